"""Plans equations that hold jaxprs: calls, branches and loops."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var

from jmp_amp._autocast._axes import sliced
from jmp_amp._autocast._carries import Values, plan_carries
from jmp_amp._autocast._custom_derivatives import custom_jvp, custom_vjp
from jmp_amp._autocast._known import Known
from jmp_amp._autocast._plan import Plan, Region, Step, Use
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._rule import Reads
from jmp_amp._autocast._values import Origin, Stream, Value, Wish, join
from jmp_amp._float8 import as_products
from jmp_amp._formats import AS_TRACED, FLOAT32
from jmp_amp._jaxpr import (
    HIGHER_ORDER,
    Body,
    Branches,
    Call,
    Loop,
    Structure,
    bind,
    dtype_of,
    is_checkified,
    is_reference,
    params_of,
    with_params,
)

Wanted = tuple[Wish, ...]
Run = Callable[[Sequence[Any]], Sequence[Any]]


def plan_higher_order(planner: Planner, structure: Structure, use: Use) -> Step:
    """Decides an equation that holds jaxprs."""
    match structure:
        case Call() as call:
            return _call(planner, call, use)
        case Branches() as branches:
            return _branches(planner, branches, use)
        case Loop(cond=None) as loop:
            return _scan(planner, loop, use)
        case Loop() as loop:
            return _while(planner, loop, use)


def _call(planner: Planner, call: Call, use: Use) -> Step:
    """Casts inputs that the body reads only in float32 before the call, so that other readers share the cast.

    A call that keeps its inputs for the backward pass gets them as they are: float32 would take more memory.
    """
    eqn, values, wanted, region, inside = use
    entry = HIGHER_ORDER[eqn.primitive.name]
    if params_of(eqn).get("policy") is not None:  # of `jax.checkpoint`
        eqn = with_params(eqn, policy=as_products(params_of(eqn)["policy"]))
    # A rule may write to a reference, or return the gradient of what it holds; only JAX knows how.
    has_references = call.rule is not None and any(map(is_reference, eqn.invars))
    if entry.run is None or has_references:
        return _as_traced(planner, call, use._replace(eqn=eqn))
    ((jaxpr, known, reads),) = inside
    values, wanted = _known_as(values, known), _read_by(wanted, reads)
    plan = planner.plan(jaxpr, values, wanted, region)
    reads_full = (False,) * len(values) if entry.keeps_inputs else plan.reads_full
    full = tuple(
        value.in_full() if is_full and dtype_of(atom) == FLOAT32 else value
        for value, is_full, atom in zip(values, reads_full, eqn.invars, strict=True)
    )
    plan = planner.plan(jaxpr, full, wanted, region)
    if call.rule is not None and plan.changed:
        run: Run | None = _DERIVATIVES[call.rule](planner, eqn, plan)
    else:
        run = _run_with(eqn, [plan.body()], [plan])
    return _step(eqn, _casts(values, full), plan.outs, run, [(plan, 1)])._replace(reads_full=reads_full)


def _as_traced(planner: Planner, call: Call, use: Use) -> Step:
    """Runs an equation as it was traced; its jaxpr is planned only for `explain`."""
    eqn, values, _, region, _ = use
    pairs = zip(values, eqn.invars, strict=True)
    full = tuple(value.in_full() if dtype_of(atom) == FLOAT32 else value for value, atom in pairs)
    inputs, reads = tuple(full[i] for i in call.operands), (Wish(),) * len(eqn.outvars)
    plan = planner.plan(call.jaxpr, inputs, reads, Region(AS_TRACED, region.path))
    outs = tuple(Value(dtype_of(var)) for var in eqn.outvars)
    return _step(eqn, _casts(values, full), outs, functools.partial(bind, eqn), [(plan, 1)])._replace(
        reads_full=(True,) * len(values)
    )


def _branches(planner: Planner, branches: Branches, use: Use) -> Step:
    """Gives each result of `cond` or `switch` the widest of its dtypes in the branches."""
    eqn, values, wanted, region, inside = use
    inputs = tuple(values[i] for i in branches.operands)
    plans = []
    for branch, known, reads in inside:
        # The results are stored, so float32 would cost memory, even if all readers read float32.
        stored = tuple(wish._replace(reads=each, full=False) for wish, each in zip(wanted, reads, strict=True))
        plans.append(planner.plan(branch, _known_as(inputs, known), stored, region))
    of_results = zip(*(plan.outs for plan in plans), strict=True)
    outs = tuple(functools.reduce(join, of_branches) for of_branches in of_results)
    run = _run_with(eqn, [plan.body(outs) for plan in plans], plans)
    return _step(eqn, (None,) * len(values), outs, run, [(plan, 1) for plan in plans])


def _scan(planner: Planner, loop: Loop, use: Use) -> Step:
    """Gives each carry of a `scan` the dtype that the body returns for it."""
    eqn, values, wanted, region, inside = use
    ((body, known, reads),) = inside
    saves_products = planner.options.save == "matmuls"
    consts = tuple(value._replace(save_cast=saves_products) for value in values[loop.consts])
    inputs = _known_as((*consts, *values[loop.carry], *map(_sliced, values[loop.xs])), known)
    first, last = loop.n_consts, loop.n_consts + loop.n_carry
    streams = _streams(planner, loop, values, wanted, region)
    wishes = [
        Wish(of, Stream.RETURNED if wish.stream is Stream.RETURNED else Stream.NORM if is_stream else Stream.NONE)
        for of, wish, is_stream in zip(reads, wanted, streams + [False] * len(wanted[loop.n_carry :]), strict=True)
    ]

    def plan_body(carry: Values) -> Plan:
        return planner.plan(body, (*inputs[:first], *carry, *inputs[last:]), tuple(wishes), region)

    carry, plan = plan_carries(
        plan_body, inputs[first:last], eqn.invars[loop.carry], streams=streams, low=region.format.dtype
    )
    # A stacked result that is also carried has the dtype of the carry.
    results = plan.frame.outvars
    stored = {var: value for var, value in zip(results, carry, strict=False) if isinstance(var, Var)}
    slices = zip(results[loop.n_carry :], plan.outs[loop.n_carry :], strict=True)
    stacked = [stored.get(var, out) if isinstance(var, Var) else out for var, out in slices]
    outs = carry + tuple(Value(out.dtype) for out in stacked)
    recomputes = saves_products and not plan.frame.effects and not is_checkified()
    policy = planner.is_saved if recomputes else None
    casts = _casts(values, (*consts, *carry, *values[loop.xs]))
    return _step(eqn, casts, outs, _run_with(eqn, [plan.body(outs, policy)], [plan]), [(plan, loop.length)])


def _streams(planner: Planner, loop: Loop, values: Values, wanted: Wanted, region: Region) -> list[bool]:
    """Returns whether each carry of a `scan` is a residual stream that is stored in low precision."""
    if not planner.options.has_low_stream or not region.format.is_low:
        return [False] * loop.n_carry
    are_weights = [value.origin <= Origin.INPUT for value in values[loop.xs]]
    return planner.streams.carries(loop, are_weights, [wish.stream for wish in wanted])


def _while(planner: Planner, loop: Loop, use: Use) -> Step:
    """Plans `while_loop` and `fori_loop`; carries are as in `scan`."""
    eqn, values, _, region, inside = use
    (_, known_of_cond, _), (_, known, reads) = inside
    # A value that decides when the loop ends is not rounded: the loop might never end.
    decides = [bool(each & Reads.DECIDES) for each in reads]
    wishes, first = tuple(map(Wish, reads)), loop.n_consts
    inputs = _known_as((*values[loop.consts], *values[loop.carry]), known)

    def plan_body(carry: Values) -> Plan:
        return planner.plan(loop.body, (*inputs[:first], *carry), wishes, region)

    carry, body = plan_carries(plan_body, inputs[first:], eqn.invars[loop.carry], decides)
    of_cond = _known_as((*values[loop.cond_consts], *carry), known_of_cond)
    cond = planner.plan(loop.cond, of_cond, (Wish(Reads.DECIDES),), region)
    casts = _casts(values, (*values[loop.cond_consts], *values[loop.consts], *carry))
    run = _run_with(eqn, [cond.body(), body.body(carry)], [cond, body])
    return _step(eqn, casts, carry, run, [(cond, 1), (body, 1)])


def _run_with(eqn: JaxprEqn, bodies: Sequence[Body], plans: Sequence[Plan]) -> Run | None:
    """Returns a function that runs an equation with plans in place of its jaxprs; None if no plan changes anything."""
    run = HIGHER_ORDER[eqn.primitive.name].run
    changed = any(plan.changed for plan in plans)
    return functools.partial(run, eqn, bodies) if changed and run is not None else None


def _step(
    eqn: JaxprEqn, casts: tuple[Any, ...], outs: Values, run: Run | None, inner: Sequence[tuple[Plan, Any]]
) -> Step:
    """Returns the decision for an equation.

    Its operands are stored, so float32 would cost memory. So `reads_full` is false, even if the body reads float32.
    """
    changed = any(plan.changed for plan, _ in inner)
    return Step(
        eqn, casts, outs, run or functools.partial(bind, eqn), changed, (False,) * len(casts), inner=tuple(inner)
    )


def _sliced(value: Value) -> Value:
    """Describes the slices of a value along its first axis."""
    value = value._replace(save_cast=False, axes=sliced(value.axes))
    is_scalar = value.origin is Origin.INPUT and value.axes == (frozenset(),)
    return value._replace(origin=Origin.SCALAR) if is_scalar else value


def _known_as(values: Values, known: Sequence[Known]) -> Values:
    return tuple(value._replace(known=each) for value, each in zip(values, known, strict=True))


def _read_by(wanted: Wanted, reads: Sequence[int]) -> Wanted:
    wishes = [wish._replace(reads=each) for wish, each in zip(wanted, reads, strict=True)]
    return tuple(wish._replace(full=wish.is_full) for wish in wishes)


def _casts(values: Values, wanted: Values) -> tuple[Any, ...]:
    return tuple(w.dtype if w.dtype != v.dtype else None for v, w in zip(values, wanted, strict=True))


_DERIVATIVES: Mapping[str, Callable[[Planner, JaxprEqn, Plan], Run]] = {
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
}
