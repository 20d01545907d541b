"""Plans equations that hold jaxprs: calls, branches, loops, and the rules of custom derivatives."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, NoReturn

import jax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero, zero_from_primal
from jax.extend.core import JaxprEqn, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._decide import Context
from jmp_amp._autocast._plan import Plan, Region, Run, Step, is_loop_invariant, with_results
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._primitives import Demand
from jmp_amp._autocast._values import Origin, Reads, Stream, Use, Value, ValueFacts, join
from jmp_amp._float8 import as_products
from jmp_amp._formats import AS_TRACED, FLOAT32

Values = tuple[Value, ...]


def _plan_carries(
    plan_body: Callable[[Values], Plan], init: Values, atoms: Sequence[Any], streams: Sequence[bool], low: Any
) -> tuple[Values, Plan]:
    """Plans the body of a loop again and again until its carries have the dtypes that it returns.

    This ends because `join` only widens. An array that the caller passes in is state, not a bias, and keeps its dtype.
    A constant takes the dtype of the values that replace it, as `jnp.zeros(n)` in front of `h = jnp.tanh(x + h @ w)`.
    Accumulators (`c + x`) and recurrences (`a @ c`) keep the dtypes that they were traced in.

    Args:
        plan_body: plans the body for the carries that enter it.
        init: the first carries, with what is known of them in every iteration.
        atoms: their variables and literals.
        streams: whether each carry is a residual stream, which has the dtype `low` if it is made of such data.
        low: the compute dtype.

    Returns:
        The carries, and the plan of the body.
    """
    fixed = [bool(value.known.carry) and not s for value, s in zip(init, streams, strict=True)]

    def settled(carry: Values, fixed: Sequence[bool], rounded: Sequence[bool]) -> tuple[Values, Plan]:
        def kept(values: Iterable[Value]) -> Values:
            return tuple(map(keep, values, init, atoms, fixed))

        def keep(value: Value, first: Value, atom: Any, is_fixed: bool) -> Value:
            known = first.known if is_fixed else first.known._replace(carry=Demand.NONE)
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
    # In an LSTM, `c = f * c + i * g; h = o * jnp.tanh(c)`: the cell `c` is an accumulator, and `h` is low precision. A
    # carry computed from an accumulator is stored in the dtype that it would have if the accumulator were rounded.
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
    match op.info.structure:
        case jx.Call() as call:
            return _call(planner, call, op)
        case jx.Branches() as branches:
            return _branches(planner, branches, op)
        case jx.Loop(cond=None) as loop:
            return _scan(planner, loop, op)
        case jx.Loop() as loop:
            return _while(planner, loop, op)
    raise TypeError(op.info.structure)


def _call(planner: Planner, call: jx.Call, op: Context) -> Step:
    """Casts inputs that the body reads only in float32 before the call, so that other readers share the cast.

    A call that keeps its inputs for the backward pass gets them as they are: float32 would take more memory.
    """
    eqn, values, uses = op.eqn, op.values, op.uses
    entry = jx.HIGHER_ORDER[eqn.primitive.name]
    policy = jx.versions.params_of(eqn).get("policy")  # of `jax.checkpoint`
    if policy is not None and not jx.versions.is_known_by_class(eqn, policy):
        eqn = jx.versions.with_params(eqn, policy=as_products(policy))
    # A rule may write to a reference, or return the gradient of what it holds; only JAX knows how.
    has_references = call.rule is not None and any(map(jx.is_reference, eqn.invars))
    if entry.enter_low is not None and op.format.is_low:
        return _as_traced(planner, entry.enter_low(eqn), op, eqn)
    if entry.run is None or has_references:
        return _as_traced(planner, call, op, eqn)
    ((jaxpr, known, demands),) = op.inside
    values = _known_as(values, known)
    uses = tuple(use._replace(demand=each) for use, each in zip(uses, demands, strict=True))
    region = op.region
    is_checkpoint = jx.versions.is_checkpoint(eqn.primitive, **eqn.params)
    if is_checkpoint:
        region = region._replace(is_checkpointed=True)
    plan = planner.plan(jaxpr, values, uses, region)
    reads = _stored(plan.reads) if entry.keeps_inputs else plan.reads
    cast = tuple(
        value.as_float32() if each == Reads.FUSED and jx.dtype_of(atom) == FLOAT32 else value
        for value, each, atom in zip(values, reads, eqn.invars, strict=True)
    )
    plan = planner.plan(jaxpr, cast, uses, region)
    step = _step(eqn, values, cast, reads, plan.outs, [plan.body()], [(plan, 1)])
    if is_checkpoint and not planner.options.keeps_checkpoints:
        return step._replace(run=functools.partial(_run_inline, plan), changed=True)
    if call.rule is None or not plan.changed:
        return step
    with_rule = custom_jvp if call.rule == "custom_jvp_call" else custom_vjp
    return step._replace(run=with_rule(planner, eqn, plan))


def _run_inline(plan: Plan, args: Sequence[Any]) -> list[Any]:
    return plan(*args)


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
    plan = planner.plan(call.jaxpr, inputs, uses, op.region._replace(format=AS_TRACED))
    outs = tuple(Value(jx.dtype_of(atom)) for atom in opened.outvars)
    step = _step(eqn, op.values, cast, (Reads.FUSED,) * len(cast), outs, [], [(plan, 1)])
    return step._replace(run=functools.partial(jx.bind, eqn))


def _branches(planner: Planner, branches: jx.Branches, op: Context) -> Step:
    """Gives each result of `cond` or `switch` the widest of its dtypes in the branches."""
    inputs, plans = tuple(op.values[i] for i in branches.operands), []
    for branch, known, demands in op.inside:
        reads = _stored([use.reads for use in op.uses])
        stored = tuple(map(Use, demands, [use.stream for use in op.uses], reads))
        plans.append(planner.plan(branch, _known_as(inputs, known), stored, op.region))
    of_results = zip(*(plan.outs for plan in plans), strict=True)
    outs = tuple(functools.reduce(join, of_branches) for of_branches in of_results)
    bodies = [plan.body(outs) for plan in plans]
    of_operands = zip(*[plan.reads for plan in plans], strict=True)
    reads = _stored([Reads.LOW, *map(min, of_operands)])
    return _step(op.eqn, op.values, op.values, reads, outs, bodies, [(plan, 1) for plan in plans])


def _scan(planner: Planner, loop: jx.Loop, op: Context) -> Step:
    """Gives each carry of a `scan` the dtype that the body returns for it."""
    eqn, values, uses = op.eqn, op.values, op.uses
    ((body, known, demands),) = op.inside
    consts = tuple(value._replace(save_cast=True) for value in values[loop.consts])
    inputs = _known_as((*consts, *values[loop.carry], *map(_sliced, values[loop.xs])), known)
    first, last = loop.n_consts, loop.n_consts + loop.n_carry
    streams = [False] * loop.n_carry
    if planner.options.has_low_stream and op.format.is_low:
        streams = planner.streams.carries(loop, op.is_input[loop.xs], [use.stream for use in uses])
    read_as = [Stream.NORM if is_stream else Stream.NONE for is_stream in streams] + [Stream.NONE] * len(uses)
    read_as = [use.stream if use.stream & Stream.RETURNED else each for use, each in zip(uses, read_as, strict=False)]
    reads = [Reads.LOW] * loop.n_carry + _stored([use.reads for use in uses[loop.n_carry :]])
    of_body = tuple(map(Use, demands, read_as, reads))

    def plan_body(carry: Values) -> Plan:
        return planner.plan(body, (*inputs[:first], *carry, *inputs[last:]), of_body, op.region)

    carry, plan = _plan_carries(plan_body, inputs[first:last], eqn.invars[loop.carry], streams, op.format.dtype)
    # A stacked result that is also carried has the dtype of the carry.
    results = plan.frame.outvars
    stored = {var: value for var, value in zip(results, carry, strict=False) if isinstance(var, Var)}
    slices = zip(results[loop.n_carry :], plan.outs[loop.n_carry :], strict=True)
    stacked = [stored.get(var, out) if isinstance(var, Var) else out for var, out in slices]
    outs = carry + tuple(Value(out.dtype) for out in stacked)
    keeper = _keeper(planner, plan, body, op.region)
    policy = planner.is_saved if keeper == "autocast" else None
    cast = (*consts, *carry, *values[loop.xs])
    reads = _of_operands(plan, loop, carry)
    step = _step(eqn, values, cast, reads, outs, [plan.body(outs, policy)], [(plan, loop.length)])
    return step._replace(keeper=keeper)


def _keeper(planner: Planner, plan: Plan, body: Any, region: Region) -> str:
    """Returns who decides what the backward pass of a `scan` keeps.

    Of nested policies of `jax.checkpoint`, JAX follows the outermost. One around the body would override the user's.
    """
    if region.is_checkpointed or jx.holds(body, jx.versions.is_checkpoint):
        return "jax.checkpoint"
    # `checkify` cannot rewrite a `jax.checkpoint` whose checks need constants.
    is_fixed = jx.versions.has_effects(plan.frame) or jx.versions.is_traced_by("checkify")
    return "autocast" if planner.options.saves_products and not is_fixed else "JAX"


def _while(planner: Planner, loop: jx.Loop, op: Context) -> Step:
    """Plans `while_loop` and `fori_loop`; carries are as in `scan`."""
    eqn, values = op.eqn, op.values
    (_, known_of_cond, _), (_, known, demands) = op.inside
    uses, first, streams = tuple(map(Use, demands)), loop.n_consts, [False] * loop.n_carry
    consts = tuple(value._replace(save_cast=True) for value in values[loop.consts])
    inputs = _known_as((*consts, *values[loop.carry]), known)

    def plan_body(carry: Values) -> Plan:
        return planner.plan(loop.body, (*inputs[:first], *carry), uses, op.region)

    carry, body = _plan_carries(plan_body, inputs[first:], eqn.invars[loop.carry], streams, op.format.dtype)
    of_cond = _known_as((*values[loop.cond_consts], *carry), known_of_cond)
    cond = planner.plan(loop.cond, of_cond, (Use(Demand.ENDS_LOOP),), op.region)
    cast = (*values[loop.cond_consts], *values[loop.consts], *carry)
    reads = (*_stored(cond.reads[: loop.cond_consts.stop]), *_of_operands(body, loop, carry))
    return _step(eqn, values, cast, reads, carry, [cond.body(), body.body(carry)], [(cond, 1), (body, 1)])


def _of_operands(body: Plan, loop: jx.Loop, carry: Values) -> list[int]:
    """Returns in which dtype a loop reads its operands: carries in the dtypes that they have in it."""
    first = [Reads.FUSED if value.dtype == FLOAT32 else Reads.LOW for value in carry]
    return _stored([*body.reads[: loop.n_consts], *first, *body.reads[loop.n_consts + loop.n_carry :]])


def _stored(reads: Iterable[int]) -> list[int]:
    """Returns in which dtype values are read that are stored in memory."""
    return [Reads.STORED if each == Reads.FUSED else each for each in reads]


def _step(
    eqn: JaxprEqn,
    values: Values,
    cast: Values,
    reads: Sequence[int],
    outs: Values,
    bodies: list[jx.Body],
    inner: list[tuple[Plan, Any]],
) -> Step:
    """Returns the decision for an equation: the casts of its operands, and other bodies if a plan changes one."""
    casts = tuple(c.dtype if c.dtype != v.dtype else None for v, c in zip(values, cast, strict=True))
    run_with, changed = jx.HIGHER_ORDER[eqn.primitive.name].run, any(plan.changed for plan, _ in inner)
    run: Run = functools.partial(jx.bind, eqn)
    if changed and run_with is not None:
        run = functools.partial(run_with, eqn, bodies)
        if isinstance(jx.structure_of(eqn), jx.Loop):
            run = functools.partial(_run_loop, run_with, eqn, bodies)
    return Step(eqn, casts, outs, run, changed, tuple(reads), inner=tuple(inner))


def _run_loop(run_with: Any, eqn: JaxprEqn, bodies: Sequence[jx.Body], args: Sequence[Any]) -> Sequence[Any]:
    """Runs a loop; arrays that it does not change are cast once, before it."""
    if jx.holds(bodies[-1].jaxpr, is_loop_invariant):
        return jx.run_loop(eqn, bodies, args, is_loop_invariant)
    return run_with(eqn, bodies, args)


def _sliced(value: Value) -> Value:
    """Describes the slices of a value along its first axis."""
    axes = tuple(frozenset(axis - 1 for axis in each if axis) for each in value.axes)
    value = value._replace(axes=axes)
    is_scalar = value.origin is Origin.INPUT and value.axes == (frozenset(),)
    return value._replace(origin=Origin.SCALAR) if is_scalar else value


def _known_as(values: Values, known: Sequence[ValueFacts]) -> Values:
    return tuple(value._replace(known=each) for value, each in zip(values, known, strict=True))


# The rules of `custom_jvp` and `custom_vjp` run under autocast too: `jax.jvp` and `jax.vjp` of the traced call apply
# the user's rule at the traced dtypes. That program is traced, planned and run like any other, as the derivative of a
# new function with a custom rule.


def custom_jvp(planner: Planner, eqn: JaxprEqn, plan: Plan) -> Run:
    """Returns the planned function with the tangent rule of `eqn`."""

    def jvp(symbolic: bool, primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        pairs = zip(_differentiable(eqn), tangents, strict=True)
        perturbed = [d and not isinstance(t, SymbolicZero) for d, t in pairs]
        moves: list[bool] = []

        def as_traced(*args: Any) -> list[Any]:
            nonlocal moves
            primals, tangents = args[: len(perturbed)], args[len(perturbed) :]
            fun = _of_perturbed(eqn, perturbed, primals)
            results, result_tangents, moves = _jvp(fun, list(compress(primals, perturbed)), list(tangents))
            return [*results, *compress(result_tangents, moves)]

        types = _types(primals, eqn.invars)
        traced = jx.trace(as_traced, [*types, *compress(types, perturbed)])
        outs = (*plan.outs, *_tangents(compress(plan.outs, moves)))
        inputs = (*plan.inputs, *_tangents(compress(plan.inputs, perturbed)))
        rule = _planned(planner, traced, inputs, plan)
        results = with_results(rule, outs)(*primals, *compress(tangents, perturbed))
        results, result_tangents = results[: len(plan.outs)], results[len(plan.outs) :]
        return results, jx.combine(moves, result_tangents, [zero_from_primal(x, symbolic) for x in results])

    def define(function: Any, rule: jx.versions.CustomRule) -> None:
        function.defjvp(functools.partial(jvp, rule.symbolic_zeros), symbolic_zeros=rule.symbolic_zeros)

    return _with_rule(plan, eqn, jax.custom_jvp, define)


def _jvp(fun: Callable, primals: list[Any], tangents: list[Any]) -> tuple[list[Any], list[Any], list[bool]]:
    """As `jax.jvp` of a function that returns a list; it also says which tangents are not known to be zero."""
    moves: list[bool] = []

    @jax.custom_jvp
    def end(results: list[Any]) -> list[Any]:
        return results

    @functools.partial(end.defjvp, symbolic_zeros=True)
    def _(results: Any, tangents: Any) -> Any:  # is not called if all are known to be zero
        nonlocal moves
        moves = [not isinstance(tangent, SymbolicZero) for tangent in tangents[0]]
        return results[0], tangents[0]

    results, result_tangents = jax.jvp(lambda *args: end(fun(*args)), primals, tangents)
    return results, result_tangents, moves or [False] * len(results)


def custom_vjp(planner: Planner, eqn: JaxprEqn, plan: Plan) -> Run:
    """Returns the planned function with the cotangent rule of `eqn`. Its residuals may be low precision."""

    def forward(*args: Any) -> tuple[list[Any], Any]:
        perturbed = _differentiable(eqn)
        if any(isinstance(arg, CustomVJPPrimal) for arg in args):  # the rule gets symbolic zeros
            perturbed = [d and arg.perturbed for d, arg in zip(perturbed, args, strict=True)]
            args = tuple(arg.value for arg in args)
        return _forward(planner, eqn, plan, perturbed, args)

    def define(function: Any, rule: jx.versions.CustomRule) -> None:
        options = {"symbolic_zeros": rule.symbolic_zeros, "optimize_remat": rule.optimize_remat}
        jx.versions.define_vjp(function, forward, operator.call, **options)

    return _with_rule(plan, eqn, jax.custom_vjp, define)


def _with_rule(plan: Plan, eqn: JaxprEqn, transform: Callable, define: Callable[[Any, Any], Any]) -> Run:
    """Returns the planned function with a derivative rule, which `define` gives to what `transform` returns."""

    def call(*args: Any) -> list[Any]:
        return plan(*args)

    def run(args: Sequence[Any]) -> Sequence[Any]:
        rule = jx.versions.custom_rule(eqn)
        call.__name__ = rule.name
        function, n = transform(call), rule.n_closed_over
        define(function, rule)
        # JAX refuses to differentiate what the function closes over.
        closed_over = [_refuses_tangents(x) if isinstance(x, jax.core.Tracer) else x for x in args[:n]]
        return function(*closed_over, *args[n:])

    return run


@jax.custom_jvp
def _refuses_tangents(x: Any) -> Any:
    return x


@_refuses_tangents.defjvp
def _(primals: Any, tangents: Any) -> NoReturn:  # is not called for a tangent that is known to be zero
    raise jx.versions.closed_over_error()


def _differentiable(eqn: JaxprEqn) -> list[bool]:
    """Returns whether each operand may be differentiated."""
    n_closed_over = jx.versions.custom_rule(eqn).n_closed_over
    return [i >= n_closed_over and jx.is_inexact(var) for i, var in enumerate(eqn.invars)]


def _forward(
    planner: Planner, eqn: JaxprEqn, plan: Plan, perturbed: Sequence[bool], args: Sequence[Any]
) -> tuple[list[Any], Any]:
    """Evaluates the forward pass of the user's rule for the perturbed operands; returns the results and a pullback."""
    pullback_tree: Any = None
    n_outs = len(eqn.outvars)

    def as_traced(*args: Any) -> list[Any]:
        nonlocal pullback_tree
        results, pullback = jax.vjp(_of_perturbed(eqn, perturbed, args), *compress(args, perturbed))
        residuals, pullback_tree = jax.tree.flatten(pullback)
        return [*results, *residuals]

    try:
        traced = jx.trace(as_traced, _types(args, eqn.invars))
    except jx.versions.closed_over_error():
        # An equation that JAX traced again does not tell which of its first operands its function closes over.
        if not any(perturbed):
            raise
        first = list(perturbed).index(True)
        return _forward(planner, eqn, plan, [p and i > first for i, p in enumerate(perturbed)], args)
    rule = _planned(planner, traced, plan.inputs, plan)
    outs = (*plan.outs, *rule.outs[n_outs:])
    results = with_results(rule, outs)(*args)
    types = _types(results[n_outs:], rule.frame.outvars[n_outs:])

    def backward(residuals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Sequence[Any], Any]:
        pairs = zip(eqn.outvars, cotangents, strict=True)
        given = [jx.is_inexact(var) and not isinstance(cotangent, SymbolicZero) for var, cotangent in pairs]
        cotangents, primals = list(compress(cotangents, given)), list(compress(eqn.invars, perturbed))
        n_grads, logs_tree = sum(perturbed), None

        def as_traced(*args: Any) -> list[Any]:
            nonlocal logs_tree
            pullback = jax.tree.unflatten(pullback_tree, args[: len(types)])
            zeros = [jx.versions.zero_cotangent(var.aval) for var in eqn.outvars]
            grads, logs = jx.versions.pull_with_logs(pullback, jx.combine(given, args[len(types) :], zeros))
            logged, logs_tree = jax.tree.flatten(logs)
            return [*grads, *logged]

        traced = jx.trace(as_traced, [*types, *_types(cotangents, list(compress(eqn.outvars, given)))])
        rule = _planned(planner, traced, (*outs[n_outs:], *_tangents(compress(plan.outs, given))), plan)
        # A rule may return float32 for a bfloat16 operand; JAX keeps it.
        of_grads = [
            Value(value.dtype if jx.dtype_of(var) == jx.dtype_of(primal) else jx.dtype_of(var))
            for var, primal, value in zip(rule.frame.outvars, primals, compress(plan.inputs, perturbed), strict=False)
        ]
        results = with_results(rule, (*of_grads, *rule.outs[n_grads:]))(*residuals, *cotangents)
        grads = jx.combine(perturbed, results[:n_grads], [None] * len(perturbed))
        return tuple(grads), jax.tree.unflatten(logs_tree, results[n_grads:])

    return results[:n_outs], jax.tree_util.Partial(backward, results[n_outs:])


def _planned(planner: Planner, jaxpr: Any, inputs: tuple[Value, ...], outer: Plan) -> Plan:
    """Returns the plan of a jaxpr in the region of `outer`; nothing is known of the readers of its results."""
    return planner.plan(jaxpr, inputs, (Use(),) * len(jaxpr.out_avals), outer.region)


def _of_perturbed(eqn: JaxprEqn, perturbed: Sequence[bool], args: Sequence[Any]) -> Callable[..., list[Any]]:
    """Returns the traced call as a function of its perturbed operands."""
    return lambda *values: jx.bind(eqn, jx.combine(perturbed, values, args))


def _tangents(values: Iterable[Value]) -> tuple[Value, ...]:
    """Describes tangents and cotangents: only their dtypes are known."""
    return tuple(Value(value.dtype) for value in values)


def _types(args: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the types of `args` in the dtypes that the variables were traced in."""
    return [jx.with_dtype(x, jx.dtype_of(var)) for x, var in zip(args, variables, strict=True)]
