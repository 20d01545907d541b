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
from jmp_amp._autocast._values import Origin, Reads, Stream, Use, Value, ValueFacts, join
from jmp_amp._float8 import as_products
from jmp_amp._formats import AS_TRACED, FLOAT32
from jmp_amp._ops import Demand

Values = tuple[Value, ...]


def plan_higher_order(planner: Planner, op: Context) -> Step:
    """Decides an equation that holds jaxprs."""
    structure = op.info.structure
    if isinstance(structure, jx.Call):
        return _call(planner, structure, op)
    return _loop(planner, structure, op) if isinstance(structure, jx.Loop) else _branches(planner, op)


def _call(planner: Planner, call: jx.Call, op: Context) -> Step:
    """Casts inputs that the body reads only in float32 before the call, so that other readers share the cast.

    A call that keeps its inputs for the backward pass gets them as they are: float32 would take more memory.
    """
    eqn, entry = op.info.eqn, jx.HIGHER_ORDER[op.info.eqn.primitive.name]
    if entry.enter_low is not None and op.region.format.is_low:
        return _as_traced(planner, entry.enter_low(eqn), op, "cast_inputs")
    if entry.run is None:
        return _as_traced(planner, call, op, "decomposition")
    # A rule may write to a reference, or return the gradient of what it holds; only JAX knows how.
    if call.rule is not None and any(map(jx.is_reference, eqn.invars)):
        return _as_traced(planner, call, op, "reference")
    ((jaxpr, known, demands),) = op.inside
    values = _known_as(op.values, known)
    uses = tuple(use._replace(demand=each) for use, each in zip(op.uses, demands, strict=True))
    is_checkpoint = jx.versions.is_checkpoint(eqn.primitive, **eqn.params)
    region = op.region._replace(is_checkpointed=op.region.is_checkpointed or is_checkpoint)
    first = planner.plan(jaxpr, values, uses, region)
    reads = _stored(first.reads) if entry.keeps_inputs else first.reads
    cast = tuple(
        value.as_float32() if each == Reads.FUSED and jx.dtype_of(atom) == FLOAT32 else value
        for value, each, atom in zip(values, reads, eqn.invars, strict=True)
    )
    plan = planner.plan(jaxpr, cast, uses, region)
    op = op._replace(info=op.info._replace(eqn=jx.versions.with_policy(eqn, as_products)))
    step = _step(op, cast, reads, plan.outs, [plan], [plan.body()])
    if is_checkpoint and not planner.options.keeps_checkpoints:
        return step._replace(run=functools.partial(jx.run_inline, eqn, [plan.body()]), changed=True)
    return step._replace(run=_with_rule(planner, call.rule, eqn, plan)) if call.rule and plan.changed else step


def _as_traced(planner: Planner, call: jx.Call, op: Context, why: str) -> Step:
    """Runs an equation in the dtypes that its jaxpr was traced in; this is planned only for `explain`."""
    opened, _ = jx.open_jaxpr(call.jaxpr)
    dtypes = list(map(jx.dtype_of, op.info.eqn.invars))
    for i, var in zip(call.operands, opened.invars, strict=True):
        dtypes[i] = jx.dtype_of(var)
    cast = tuple(
        value.as_float32() if dtype == FLOAT32 else value._replace(dtype=dtype)
        for value, dtype in zip(op.values, dtypes, strict=True)
    )
    inputs, uses = tuple(cast[i] for i in call.operands), (Use(),) * len(opened.outvars)
    plan = planner.plan(call.jaxpr, inputs, uses, op.region._replace(format=AS_TRACED, why=why))
    outs = tuple(Value(jx.dtype_of(atom)) for atom in opened.outvars)
    step = _step(op, cast, (Reads.FUSED,) * len(cast), outs, [plan], [])
    return step._replace(run=functools.partial(jx.bind, op.info.eqn))


def _branches(planner: Planner, op: Context) -> Step:
    """Gives each result of `cond` or `switch` the widest of its dtypes in the branches."""
    reads, streams = _stored([use.reads for use in op.uses]), [use.stream for use in op.uses]
    plans = [
        planner.plan(branch, _known_as(op.values[1:], known), tuple(map(Use, demands, streams, reads)), op.region)
        for branch, known, demands in op.inside
    ]
    outs = tuple(functools.reduce(join, each) for each in zip(*[plan.outs for plan in plans], strict=True))
    reads = _stored([Reads.LOW, *map(min, zip(*[plan.reads for plan in plans], strict=True))])
    return _step(op, op.values, reads, outs, plans, [plan.body(outs) for plan in plans])


def _loop(planner: Planner, loop: jx.Loop, op: Context) -> Step:
    """Gives each carry of a loop the dtype that the body returns for it."""
    values, uses, n_carry = op.values, op.uses, loop.n_carry
    *of_cond, (body, known, demands) = op.inside
    consts = tuple(value._replace(save_cast=True) for value in values[loop.consts])
    inputs = _known_as((*consts, *values[loop.carry], *map(_sliced, values[loop.xs])), known)
    first, last = loop.n_consts, loop.n_consts + n_carry
    streams = [False] * n_carry
    if planner.options.has_low_stream and op.region.format.is_low:
        streams = planner.streams.carries(loop, op.is_input[loop.xs], [use.stream for use in uses])
    as_norm = [Stream.NORM if is_stream else Stream.NONE for is_stream in streams] + [Stream.NONE] * len(uses)
    read_as = [use.stream if use.stream & Stream.RETURNED else each for use, each in zip(uses, as_norm, strict=False)]
    reads = [Reads.LOW] * n_carry + _stored([use.reads for use in uses[n_carry:]])
    of_body = tuple(map(Use, demands, read_as, reads))

    def plan_body(carry: Values) -> Plan:
        return planner.plan(body, (*inputs[:first], *carry, *inputs[last:]), of_body, op.region)

    carry, plan = _plan_carries(plan_body, op, loop, known[first:last], streams)
    conds = [
        planner.plan(cond, _known_as((*values[loop.cond_consts], *carry), known), tuple(map(Use, demands)), op.region)
        for cond, known, demands in of_cond
    ]
    # A stacked result that is also carried has the dtype of the carry.
    results = plan.frame.outvars
    stored = {var: value for var, value in zip(results, carry, strict=False) if isinstance(var, Var)}
    slices = zip(results[n_carry:], plan.outs[n_carry:], strict=True)
    stacked = [stored.get(var, out) if isinstance(var, Var) else out for var, out in slices]
    outs = carry + tuple(Value(out.dtype) for out in stacked)
    cast = (*values[loop.cond_consts], *consts, *carry, *values[loop.xs])
    reads = [
        *[each for cond in conds for each in cond.reads[loop.cond_consts]],
        *plan.reads[:first],
        *[Reads.FUSED if value.dtype == FLOAT32 else Reads.LOW for value in carry],  # in the dtypes of the carries
        *plan.reads[last:],
    ]
    keeper = _keeper(planner, plan, body, op.region) if loop.cond is None else None
    bodies = [*[cond.body() for cond in conds], plan.body(outs, planner.is_saved if keeper == "autocast" else None)]
    return _step(op, cast, _stored(reads), outs, [*conds, plan], bodies)._replace(keeper=keeper)


def _sliced(value: Value) -> Value:
    """Describes the slices of a value along its first axis."""
    axes = tuple(frozenset(axis - 1 for axis in each if axis) for each in value.axes)
    is_scalar = value.origin is Origin.INPUT and axes == (frozenset(),)
    return value._replace(axes=axes, origin=Origin.SCALAR if is_scalar else value.origin)


def _plan_carries(
    plan_of: Callable[[Values], Plan], op: Context, loop: jx.Loop, known: Sequence[ValueFacts], streams: Sequence[bool]
) -> tuple[Values, Plan]:
    """Plans the body of a loop again and again until its carries have the dtypes that it returns.

    This ends because `join` only widens. An array that the caller passes in is state, not a bias, and keeps its dtype.
    A constant takes the dtype of the values that replace it, as `jnp.zeros(n)` in front of `h = jnp.tanh(x + h @ w)`.
    Accumulators (`c + x`) and recurrences (`a @ c`) keep the dtypes that they were traced in.

    Args:
        plan_of: plans the body for the carries that enter it.
        op: the equation.
        loop: its structure.
        known: what is known of each carry in every iteration.
        streams: whether it is a residual stream, which has the compute dtype if it is made of such data.

    Returns:
        The carries, and the plan of the body.
    """
    init, atoms, low = op.values[loop.carry], op.info.eqn.invars[loop.carry], op.region.format.dtype
    traced, none = [jx.dtype_of(atom) for atom in atoms], [False] * len(init)
    adds_up = [bool(each.carry) for each in known]

    def settled(carry: Iterable[Value], fixed: Sequence[bool], rounded: Sequence[bool]) -> tuple[Values, Plan]:
        def kept(carry: Iterable[Value]) -> Values:
            return tuple(map(keep, carry, known, traced, fixed))

        def keep(value: Value, known: ValueFacts, dtype: Any, is_fixed: bool) -> Value:
            value = value._replace(known=known if is_fixed else known._replace(carry=Demand.NONE))
            return value._replace(dtype=dtype, data_dtype=None) if is_fixed else value

        before, after = None, kept(carry)
        while before != after:
            before, plan = after, plan_of(after)
            after = kept(
                old if is_rounded and not new.overflows(old.dtype) else join(old, new)
                for old, new, is_rounded in zip(before, plan.outs, rounded, strict=False)
            )
        return after, plan

    start = tuple(map(_first_carry, init, atoms))
    while any(streams):
        fixed = [a and not s for a, s in zip(adds_up, streams, strict=True)]
        lowered = [value._replace(dtype=low) if s else value for value, s in zip(start, streams, strict=True)]
        carry, plan = settled(lowered, fixed, streams)
        before, streams = streams, [s and v.as_data().dtype == low for s, v in zip(streams, plan.outs, strict=False)]
        if streams == before:
            return carry, plan
    # Whether each carry has the dtype that it was traced in, whatever replaces it.
    is_wide = [value.dtype == FLOAT32 and value.origin is not Origin.SCALAR for value in start]
    if all(a or wide or dtype != FLOAT32 for a, wide, dtype in zip(adds_up, is_wide, traced, strict=True)):
        return settled(start, adds_up, none)
    carry, plan = settled(start, none, none)
    if not any(adds_up):
        return carry, plan
    # In an LSTM, `c = f * c + i * g; h = o * jnp.tanh(c)`: the cell `c` is an accumulator, and `h` is low precision. A
    # carry computed from an accumulator is stored in the dtype that it would have if the accumulator were rounded.
    return settled(carry, adds_up, [value.dtype != dtype for value, dtype in zip(carry, traced, strict=True)])


def _first_carry(value: Value, atom: Any) -> Value:
    """Describes a carry before the first iteration; low-precision values may replace a constant."""
    if jx.dtype_of(atom) != FLOAT32 or not jx.shape_of(atom):
        return value
    # One constant number, or a carry of the loop around this one that starts as such a constant.
    is_number = value.origin is Origin.SCALAR and (value.known.is_constant or not value.filled)
    if is_number or (value.origin is Origin.INPUT and value.known.size == 0):
        return value._replace(origin=Origin.SCALAR, axes=(), filled=False)
    return Value(value.dtype)


def _keeper(planner: Planner, plan: Plan, body: Any, region: Region) -> str:
    """Returns who decides what the backward pass of a `scan` keeps.

    Of nested policies of `jax.checkpoint`, JAX follows the outermost. One around the body would override the user's.
    """
    if region.is_checkpointed or jx.holds(body, jx.versions.is_checkpoint):
        return "jax.checkpoint"
    # `checkify` cannot rewrite a `jax.checkpoint` whose checks need constants.
    is_fixed = jx.versions.has_effects(plan.frame) or jx.versions.is_traced_by("checkify")
    return "autocast" if planner.options.saves_products and not is_fixed else "JAX"


def _known_as(values: Values, known: Sequence[ValueFacts]) -> Values:
    return tuple(value._replace(known=each) for value, each in zip(values, known, strict=True))


def _stored(reads: Iterable[int]) -> list[int]:
    """Returns in which dtype values are read that are stored in memory."""
    return [Reads.STORED if each == Reads.FUSED else each for each in reads]


def _step(
    op: Context, cast: Values, reads: Sequence[int], outs: Values, plans: Sequence[Plan], bodies: list[jx.Body]
) -> Step:
    """Returns the decision for an equation: the casts of its operands, and other bodies if a plan changes one."""
    eqn, entry = op.info.eqn, jx.HIGHER_ORDER[op.info.eqn.primitive.name]
    casts = tuple(c.dtype if c.dtype != v.dtype else None for v, c in zip(op.values, cast, strict=True))
    changed = any(plan.changed for plan in plans)
    run: Run = functools.partial(jx.bind, eqn)
    if changed and entry.run is not None:
        run = functools.partial(entry.run, eqn, bodies)
        if isinstance(op.info.structure, jx.Loop):  # arrays that it does not change are cast once, before it
            run = functools.partial(jx.run_loop, is_loop_invariant, eqn, bodies)
    return Step(eqn, op.region, casts, outs, run, changed, tuple(reads), inner=tuple(plans))


# The rules of `custom_jvp` and `custom_vjp` run under autocast too: `jax.jvp` and `jax.vjp` of the traced call apply
# the user's rule at the traced dtypes. That program is traced, planned and run like any other, as the derivative of a
# new function with a custom rule.


def _with_rule(planner: Planner, kind: str, eqn: JaxprEqn, plan: Plan) -> Run:
    """Returns the planned function with the rule of `eqn`: its tangents, or its cotangents."""

    def call(*args: Any) -> list[Any]:
        return plan(*args)

    def run(args: Sequence[Any]) -> Sequence[Any]:
        rule = jx.versions.custom_rule(eqn)
        call.__name__, n = rule.name, rule.n_closed_over
        if kind == "custom_jvp_call":
            function: Any = jax.custom_jvp(call)
            jvp = functools.partial(_jvp, planner, eqn, plan, rule.symbolic_zeros)
            function.defjvp(jvp, symbolic_zeros=rule.symbolic_zeros)
        else:
            function = jax.custom_vjp(call)
            forward = functools.partial(_forward, planner, eqn, plan)
            options = {"symbolic_zeros": rule.symbolic_zeros, "optimize_remat": rule.optimize_remat}
            jx.versions.define_vjp(function, forward, operator.call, **options)
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


def _jvp(
    planner: Planner, eqn: JaxprEqn, plan: Plan, symbolic: bool, primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Evaluates the user's rule for the tangents that are not known to be zero."""
    pairs = zip(_differentiable(eqn), tangents, strict=True)
    perturbed = [d and not isinstance(t, SymbolicZero) for d, t in pairs]
    moves = [False] * len(plan.outs)

    # Of the results, it marks those whose tangents are not known to be zero; `jax.jvp` returns zeros for the others.
    @jax.custom_jvp
    def end(results: list[Any]) -> list[Any]:
        return results

    @functools.partial(end.defjvp, symbolic_zeros=True)
    def _(results: Any, tangents: Any) -> Any:  # is not called if all are known to be zero
        moves[:] = [not isinstance(tangent, SymbolicZero) for tangent in tangents[0]]
        return results[0], tangents[0]

    def as_traced(*args: Any) -> list[Any]:
        primals, tangents = args[: len(perturbed)], args[len(perturbed) :]
        fun = _of_perturbed(eqn, perturbed, primals)
        results = jax.jvp(lambda *args: end(fun(*args)), list(compress(primals, perturbed)), list(tangents))
        return [*results[0], *compress(results[1], moves)]

    types = _types(primals, eqn.invars)
    inputs = (*plan.inputs, *_tangents(compress(plan.inputs, perturbed)))
    rule = _planned(planner, plan, as_traced, [*types, *compress(types, perturbed)], inputs)
    outs = (*plan.outs, *_tangents(compress(plan.outs, moves)))
    results = with_results(rule, outs)(*primals, *compress(tangents, perturbed))
    results, result_tangents = results[: len(plan.outs)], results[len(plan.outs) :]
    return results, jx.combine(moves, result_tangents, [zero_from_primal(x, symbolic) for x in results])


def _forward(planner: Planner, eqn: JaxprEqn, plan: Plan, *args: Any) -> tuple[list[Any], Any]:
    """Evaluates the forward pass of the user's rule for the perturbed operands; returns the results and a pullback.

    The residuals may be low precision.
    """
    perturbed = _differentiable(eqn)
    if any(isinstance(arg, CustomVJPPrimal) for arg in args):  # the rule gets symbolic zeros
        perturbed = [d and arg.perturbed for d, arg in zip(perturbed, args, strict=True)]
        args = tuple(arg.value for arg in args)
    pullback_tree: Any = None
    n_outs = len(eqn.outvars)

    def as_traced(*args: Any) -> list[Any]:
        nonlocal pullback_tree
        results, pullback = jax.vjp(_of_perturbed(eqn, perturbed, args), *compress(args, perturbed))
        residuals, pullback_tree = jax.tree.flatten(pullback)
        return [*results, *residuals]

    rule = None
    while rule is None:
        try:
            rule = _planned(planner, plan, as_traced, _types(args, eqn.invars), plan.inputs)
        except jx.versions.closed_over_error():
            # An equation that JAX traced again does not tell which of its first operands its function closes over.
            if not any(perturbed):
                raise
            perturbed[perturbed.index(True)] = False
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

        of_cotangents = _types(cotangents, list(compress(eqn.outvars, given)))
        inputs = (*outs[n_outs:], *_tangents(compress(plan.outs, given)))
        rule = _planned(planner, plan, as_traced, [*types, *of_cotangents], inputs)
        # A rule may return float32 for a bfloat16 operand; JAX keeps it.
        of_grads = [
            Value(value.dtype if jx.dtype_of(var) == jx.dtype_of(primal) else jx.dtype_of(var))
            for var, primal, value in zip(rule.frame.outvars, primals, compress(plan.inputs, perturbed), strict=False)
        ]
        results = with_results(rule, (*of_grads, *rule.outs[n_grads:]))(*residuals, *cotangents)
        grads = jx.combine(perturbed, results[:n_grads], [None] * len(perturbed))
        return tuple(grads), jax.tree.unflatten(logs_tree, results[n_grads:])

    return results[:n_outs], jax.tree_util.Partial(backward, results[n_outs:])


def _differentiable(eqn: JaxprEqn) -> list[bool]:
    """Returns whether each operand may be differentiated."""
    n_closed_over = jx.versions.custom_rule(eqn).n_closed_over
    return [i >= n_closed_over and jx.is_inexact(var) for i, var in enumerate(eqn.invars)]


def _of_perturbed(eqn: JaxprEqn, perturbed: Sequence[bool], args: Sequence[Any]) -> Callable[..., list[Any]]:
    """Returns the traced call as a function of its perturbed operands."""
    return lambda *values: jx.bind(eqn, jx.combine(perturbed, values, args))


def _planned(planner: Planner, outer: Plan, fun: Callable, types: Sequence[Any], inputs: Values) -> Plan:
    """Returns the plan of a function in the region of `outer`; nothing is known of the readers of its results."""
    jaxpr = jx.trace(fun, types)
    return planner.plan(jaxpr, inputs, (Use(),) * len(jaxpr.out_avals), outer.region)


def _tangents(values: Iterable[Value]) -> Values:
    """Describes tangents and cotangents: only their dtypes are known."""
    return tuple(Value(value.dtype) for value in values)


def _types(args: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the types of `args` in the dtypes that the variables were traced in."""
    return [jx.with_dtype(x, jx.dtype_of(var)) for x, var in zip(args, variables, strict=True)]
