"""Plans equations that hold jaxprs: calls, branches and loops."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._custom_derivatives import custom_jvp, custom_vjp
from jmp_amp._autocast._decide import Context
from jmp_amp._autocast._plan import Plan, Region, Run, Step, is_same_in_loops
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._primitives import Reads
from jmp_amp._autocast._values import Known, Origin, Stream, Use, Value, join
from jmp_amp._float8 import as_products
from jmp_amp._formats import AS_TRACED, FLOAT32

Values = tuple[Value, ...]


def _plan_carries(
    plan_body: Callable[[Values], Plan], init: Values, atoms: Sequence[Any], streams: Sequence[bool], low: Any
) -> tuple[Values, Plan]:
    """Plans the body of a loop again and again until its carries have the dtypes that it returns.

    This ends because `join` only widens. An array that the caller passes in is state, not a bias, and keeps its dtype.
    A constant, such as zeros, takes the dtype of the values that replace it. Accumulators and recurrences keep the
    dtypes that they were traced in.

    Args:
        plan_body: plans the body for the carries that enter it.
        init: the first carries, with what is known of them in every iteration.
        atoms: their variables and literals.
        streams: whether each carry is a residual stream, which has the dtype `low` if it is made of such data.
        low: the compute dtype.

    Returns:
        The carries, and the plan of the body.
    """
    adds_up = [value.known.adds_up or value.known.recurs for value in init]
    fixed = [a and not s for a, s in zip(adds_up, streams, strict=True)]

    def settled(carry: Values, fixed: Sequence[bool], rounded: Sequence[bool]) -> tuple[Values, Plan]:
        def kept(values: Iterable[Value]) -> Values:
            return tuple(map(keep, values, init, atoms, fixed))

        def keep(value: Value, first: Value, atom: Any, is_fixed: bool) -> Value:
            known = first.known._replace(adds_up=is_fixed, recurs=is_fixed and first.known.recurs)
            value = value._replace(known=known)
            return value._replace(dtype=jx.dtype_of(atom), data_dtype=None) if is_fixed else value

        carry = kept(carry)
        while True:
            plan = plan_body(carry)
            joined = kept(
                old if is_rounded and not new.overflows(old.dtype) else join(old, new)
                for old, new, is_rounded in zip(carry, plan.outs, rounded, strict=False)
            )
            if joined == carry:
                return carry, plan
            carry = joined

    none, start = [False] * len(init), tuple(map(_first_carry, init, atoms))
    if any(streams):
        start = tuple([v._replace(dtype=low) if s else v for v, s in zip(start, streams, strict=True)])
        carry, plan = settled(start, fixed, streams)
        kept_streams = [s and out.as_data().dtype == low for s, out in zip(streams, plan.outs, strict=False)]
        if kept_streams == list(streams):
            return carry, plan
        return _plan_carries(plan_body, init, atoms, kept_streams, low)
    if all(is_fixed or _is_settled(value, atom) for is_fixed, value, atom in zip(fixed, start, atoms, strict=True)):
        return settled(start, fixed, none)
    carry, plan = settled(start, none, none)
    if not any(fixed):
        return carry, plan
    # A carry computed from an accumulator is stored in the dtype that it would have if the accumulator were rounded.
    rounded = [value.dtype != jx.dtype_of(atom) for value, atom in zip(carry, atoms, strict=True)]
    return settled(carry, fixed, rounded)


def _is_settled(value: Value, atom: Any) -> bool:
    """Whether a carry has the dtype that it was traced in, whatever replaces it."""
    return jx.dtype_of(atom) != FLOAT32 or (value.dtype == FLOAT32 and value.origin is not Origin.SCALAR)


def _first_carry(value: Value, atom: Any) -> Value:
    """Describes a carry before the first iteration; low-precision values may replace a constant."""
    if jx.dtype_of(atom) != FLOAT32:
        return value._replace(scalar=None)  # a counter
    if not jx.shape_of(atom):
        return value
    if value.magnitudes is not None and (value.origin is Origin.SCALAR or value.magnitudes[1] == 0):
        return value._replace(origin=Origin.SCALAR, axes=(), filled=False)
    return Value(value.dtype)


def plan_higher_order(planner: Planner, op: Context) -> Step:
    """Decides an equation that holds jaxprs."""
    match op.facts.structure:
        case jx.Call() as call:
            return _call(planner, call, op)
        case jx.Branches() as branches:
            return _branches(planner, branches, op)
        case jx.Loop(cond=None) as loop:
            return _scan(planner, loop, op)
        case jx.Loop() as loop:
            return _while(planner, loop, op)
    raise TypeError(op.facts.structure)


def _call(planner: Planner, call: jx.Call, op: Context) -> Step:
    """Casts inputs that the body reads only in float32 before the call, so that other readers share the cast.

    A call that keeps its inputs for the backward pass gets them as they are: float32 would take more memory.
    """
    eqn, values, uses = op.eqn, op.values, op.uses
    entry = jx.HIGHER_ORDER[eqn.primitive.name]
    if jx.versions.params_of(eqn).get("policy") is not None:  # of `jax.checkpoint`
        eqn = jx.versions.with_params(eqn, policy=as_products(jx.versions.params_of(eqn)["policy"]))
    # A rule may write to a reference, or return the gradient of what it holds; only JAX knows how.
    has_references = call.rule is not None and any(map(jx.is_reference, eqn.invars))
    if entry.enter_low is not None and op.format.is_low:
        return _as_traced(planner, entry.enter_low(eqn), op, eqn)
    if entry.run is None or has_references:
        return _as_traced(planner, call, op, eqn)
    ((jaxpr, known, reads),) = op.inside
    values = _known_as(values, known)
    uses = tuple(use._replace(reads=each) for use, each in zip(uses, reads, strict=True))
    plan = planner.plan(jaxpr, values, uses, op.region)
    reads_float32 = (False,) * len(values) if entry.keeps_inputs else plan.reads_float32
    cast = tuple(
        value.as_float32() if in_float32 and jx.dtype_of(atom) == FLOAT32 else value
        for value, in_float32, atom in zip(values, reads_float32, eqn.invars, strict=True)
    )
    plan = planner.plan(jaxpr, cast, uses, op.region)
    step = _step(eqn, values, cast, plan.outs, [plan.body()], [(plan, 1)])._replace(reads_float32=reads_float32)
    if call.rule is None or not plan.changed:
        return step
    with_rule = custom_jvp if call.rule == "custom_jvp_call" else custom_vjp
    return step._replace(run=with_rule(planner, eqn, plan))


def _as_traced(planner: Planner, call: jx.Call, op: Context, eqn: JaxprEqn) -> Step:
    """Runs an equation in the dtypes that its jaxpr was traced in; this is planned only for `explain`."""
    opened, _ = jx.open_jaxpr(call.jaxpr)
    dtypes = list(map(jx.dtype_of, eqn.invars))
    for i, var in zip(call.operands, opened.invars, strict=True):
        dtypes[i] = jx.dtype_of(var)
    cast = tuple(
        value.as_float32() if dtype == FLOAT32 else value._replace(dtype=dtype)
        for value, dtype in zip(op.values, dtypes, strict=True)
    )
    inputs, uses = tuple(cast[i] for i in call.operands), (Use(),) * len(eqn.outvars)
    plan = planner.plan(call.jaxpr, inputs, uses, Region(AS_TRACED, op.region.path))
    outs = tuple(Value(jx.dtype_of(atom)) for atom in opened.outvars)
    step = _step(eqn, op.values, cast, outs, [], [(plan, 1)])
    return step._replace(reads_float32=(True,) * len(cast), run=functools.partial(jx.bind, eqn))


def _branches(planner: Planner, branches: jx.Branches, op: Context) -> Step:
    """Gives each result of `cond` or `switch` the widest of its dtypes in the branches."""
    inputs, plans = tuple(op.values[i] for i in branches.operands), []
    for branch, known, reads in op.inside:
        # The results are stored, so float32 would cost memory, even if all readers read float32.
        stored = tuple(use._replace(reads=each, in_float32=False) for use, each in zip(op.uses, reads, strict=True))
        plans.append(planner.plan(branch, _known_as(inputs, known), stored, op.region))
    of_results = zip(*(plan.outs for plan in plans), strict=True)
    outs = tuple(functools.reduce(join, of_branches) for of_branches in of_results)
    bodies = [plan.body(outs) for plan in plans]
    return _step(op.eqn, op.values, op.values, outs, bodies, [(plan, 1) for plan in plans])


def _scan(planner: Planner, loop: jx.Loop, op: Context) -> Step:
    """Gives each carry of a `scan` the dtype that the body returns for it."""
    eqn, values, uses = op.eqn, op.values, op.uses
    ((body, known, reads),) = op.inside
    consts = tuple(value._replace(save_cast=True) for value in values[loop.consts])
    inputs = _known_as((*consts, *values[loop.carry], *map(_sliced, values[loop.xs])), known)
    first, last = loop.n_consts, loop.n_consts + loop.n_carry
    streams = [False] * loop.n_carry
    if planner.options.has_low_stream and op.format.is_low:
        streams = planner.streams.carries(loop, op.is_input[loop.xs], [use.stream for use in uses])
    read_as = [Stream.NORM if is_stream else Stream.NONE for is_stream in streams] + [Stream.NONE] * len(uses)
    read_as = [use.stream if use.stream is Stream.RETURNED else each for use, each in zip(uses, read_as, strict=False)]
    of_body = tuple(map(Use, reads, read_as))

    def plan_body(carry: Values) -> Plan:
        return planner.plan(body, (*inputs[:first], *carry, *inputs[last:]), of_body, op.region)

    carry, plan = _plan_carries(plan_body, inputs[first:last], eqn.invars[loop.carry], streams, op.format.dtype)
    # A stacked result that is also carried has the dtype of the carry.
    results = plan.frame.outvars
    stored = {var: value for var, value in zip(results, carry, strict=False) if isinstance(var, Var)}
    slices = zip(results[loop.n_carry :], plan.outs[loop.n_carry :], strict=True)
    stacked = [stored.get(var, out) if isinstance(var, Var) else out for var, out in slices]
    outs = carry + tuple(Value(out.dtype) for out in stacked)
    recomputes = planner.options.saves_products and not plan.frame.effects and not jx.versions.is_checkified()
    policy = planner.is_saved if recomputes else None
    cast = (*consts, *carry, *values[loop.xs])
    return _step(eqn, values, cast, outs, [plan.body(outs, policy)], [(plan, loop.length)])


def _while(planner: Planner, loop: jx.Loop, op: Context) -> Step:
    """Plans `while_loop` and `fori_loop`; carries are as in `scan`."""
    eqn, values = op.eqn, op.values
    (_, known_of_cond, _), (_, known, reads) = op.inside
    uses, first, streams = tuple(map(Use, reads)), loop.n_consts, [False] * loop.n_carry
    consts = tuple(value._replace(save_cast=True) for value in values[loop.consts])
    inputs = _known_as((*consts, *values[loop.carry]), known)

    def plan_body(carry: Values) -> Plan:
        return planner.plan(loop.body, (*inputs[:first], *carry), uses, op.region)

    carry, body = _plan_carries(plan_body, inputs[first:], eqn.invars[loop.carry], streams, op.format.dtype)
    of_cond = _known_as((*values[loop.cond_consts], *carry), known_of_cond)
    cond = planner.plan(loop.cond, of_cond, (Use(Reads.ENDS_LOOP),), op.region)
    cast = (*values[loop.cond_consts], *values[loop.consts], *carry)
    return _step(eqn, values, cast, carry, [cond.body(), body.body(carry)], [(cond, 1), (body, 1)])


def _step(
    eqn: JaxprEqn, values: Values, cast: Values, outs: Values, bodies: list[jx.Body], inner: list[tuple[Plan, Any]]
) -> Step:
    """Returns the decision for an equation: the casts of its operands, and other bodies if a plan changes one.

    Its operands are stored, so float32 would cost memory. So `reads_float32` is false, even if the body reads float32.
    """
    casts = tuple(c.dtype if c.dtype != v.dtype else None for v, c in zip(values, cast, strict=True))
    run_with, changed = jx.HIGHER_ORDER[eqn.primitive.name].run, any(plan.changed for plan, _ in inner)
    run: Run = functools.partial(jx.bind, eqn)
    if changed and run_with is not None:
        is_loop = isinstance(jx.structure_of(eqn), jx.Loop)
        run = functools.partial(_run_loop if is_loop else run_with, eqn, bodies)
    return Step(eqn, casts, outs, run, changed, (False,) * len(casts), inner=tuple(inner))


def _run_loop(eqn: JaxprEqn, bodies: Sequence[jx.Body], args: Sequence[Any]) -> Sequence[Any]:
    """Runs a loop; arrays that it does not change are cast once, before it."""
    if _casts_the_same(bodies[-1].jaxpr):
        return jx.run_loop(eqn, bodies, args, is_same_in_loops)
    run = jx.HIGHER_ORDER[eqn.primitive.name].run
    assert run is not None
    return run(eqn, bodies, args)


def _casts_the_same(jaxpr: Any) -> bool:
    def casts(eqn: JaxprEqn) -> bool:
        inside = any(_casts_the_same(inner) for inner, _ in jx.inner_jaxprs(eqn))
        return inside or is_same_in_loops(eqn.primitive, **eqn.params)

    return any(map(casts, jx.open_jaxpr(jaxpr)[0].eqns))


def _sliced(value: Value) -> Value:
    """Describes the slices of a value along its first axis."""
    axes = tuple(frozenset(axis - 1 for axis in each if axis) for each in value.axes)
    value = value._replace(axes=axes)
    is_scalar = value.origin is Origin.INPUT and value.axes == (frozenset(),)
    return value._replace(origin=Origin.SCALAR) if is_scalar else value


def _known_as(values: Values, known: Sequence[Known]) -> Values:
    return tuple(value._replace(known=each) for value, each in zip(values, known, strict=True))
