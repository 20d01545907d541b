"""Equations that hold jaxprs: their bodies are planned and run like the program itself."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jmp_amp._autocast._accumulators import accumulators
from jmp_amp._autocast._axes import sliced
from jmp_amp._autocast._custom_derivatives import custom_jvp, custom_vjp
from jmp_amp._autocast._deciding import deciding_carries
from jmp_amp._autocast._format import AS_TRACED, FLOAT32
from jmp_amp._autocast._plan import Plan, Region, Step, with_results
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._values import Origin, Reads, Value, join
from jmp_amp._jaxpr import HIGHER_ORDER, Branches, Call, Loop, bind, dtype_of, shape_of

Values = tuple[Value, ...]
Wanted = tuple[Reads, ...]
Run = Callable[[Sequence[Any]], Sequence[Any]]


def plan_higher_order(planner: Planner, eqn: JaxprEqn, values: Values, wanted: Wanted, region: Region) -> Step:
    """Decides an equation that holds jaxprs."""
    match HIGHER_ORDER[eqn.primitive.name].enter(eqn):
        case Call() as call:
            return _call(planner, eqn, call, values, wanted, region)
        case Branches() as branches:
            return _branches(planner, eqn, branches, values, wanted, region)
        case Loop(cond=None) as loop:
            return _scan(planner, eqn, loop, values, region)
        case Loop() as loop:
            return _while(planner, eqn, loop, values, region)


def _call(planner: Planner, eqn: JaxprEqn, call: Call, values: Values, wanted: Wanted, region: Region) -> Step:
    """What the body reads in float32 only is cast in front of the call, where other readers can share the cast.

    It is not if the call keeps its inputs for the backward pass, which would then be float32.
    """
    entry = HIGHER_ORDER[eqn.primitive.name]
    if entry.run is None:
        return _as_traced(planner, eqn, call, values, region)
    plan = planner.plan(call.jaxpr, values, wanted, region)
    reads_full = (False,) * len(values) if entry.keeps_inputs else plan.reads_full
    full = tuple(
        value.in_full() if is_full and dtype_of(atom) == FLOAT32 else value
        for value, is_full, atom in zip(values, reads_full, eqn.invars, strict=True)
    )
    plan = planner.plan(call.jaxpr, full, wanted, region)
    derivative = _DERIVATIVES.get(eqn.primitive.name)
    run = derivative(planner, eqn, plan) if derivative and plan.changed else _run_with(eqn, [plan])
    return _step(eqn, _casts(values, full), plan.outs, run, [(plan, 1)])._replace(reads_full=reads_full)


def _as_traced(planner: Planner, eqn: JaxprEqn, call: Call, values: Values, region: Region) -> Step:
    """An equation that cannot be run with another jaxpr: its jaxpr is planned for `explain` alone."""
    pairs = zip(values, eqn.invars, strict=True)
    full = tuple(value.in_full() if dtype_of(atom) == FLOAT32 else value for value, atom in pairs)
    reads = (Reads.TRACED,) * len(eqn.outvars)
    plan = planner.plan(call.jaxpr, tuple(full[i] for i in call.operands), reads, Region(AS_TRACED, region.path))
    outs = tuple(Value(dtype_of(var)) for var in eqn.outvars)
    return _step(eqn, _casts(values, full), outs, functools.partial(bind, eqn), [(plan, 1)])._replace(
        reads_full=(True,) * len(values)
    )


def _branches(
    planner: Planner, eqn: JaxprEqn, branches: Branches, values: Values, wanted: Wanted, region: Region
) -> Step:
    """`cond` and `switch`: each result has the widest dtype over the branches."""
    # What leaves a branch is stored, so float32 would cost memory there, whoever reads it.
    stored = tuple(Reads.ANY if reads is Reads.FULL else reads for reads in wanted)
    inputs = tuple(values[i] for i in branches.operands)
    plans = [planner.plan(branch, inputs, stored, region) for branch in branches.jaxprs]
    of_results = zip(*(plan.outs for plan in plans), strict=True)
    outs = tuple(functools.reduce(join, of_branches) for of_branches in of_results)
    run = _run_with(eqn, plans, [with_results(plan, outs) for plan in plans])
    return _step(eqn, (None,) * len(values), outs, run, [(plan, 1) for plan in plans])


def _scan(planner: Planner, eqn: JaxprEqn, loop: Loop, values: Values, region: Region) -> Step:
    """`scan`: each carry has the dtype that the body, once it gets it, returns again."""
    saves_products = planner.options.save == "matmuls"
    consts = tuple(value._replace(save_cast=saves_products) for value in values[loop.consts])
    xs = tuple(map(_sliced, values[loop.xs]))

    def plan_body(carry: Values) -> Plan:
        return planner.plan(loop.body, (*consts, *carry, *xs), (Reads.ANY,) * len(eqn.outvars), region)

    adds_up = accumulators(loop, planner.rules_of)
    carry, plan = _fixpoint(plan_body, values[loop.carry], eqn.invars[loop.carry], adds_up)
    # What is stacked is stored as it is carried.
    stored = dict(zip(plan.jaxpr.outvars, carry, strict=False))
    slices = zip(plan.jaxpr.outvars[loop.n_carry :], plan.outs[loop.n_carry :], strict=True)
    stacked = [stored.get(var, out) for var, out in slices]
    outs = carry + tuple(Value(out.dtype, keep_float32=out.keep_float32) for out in stacked)
    body = with_results(plan, outs)
    if saves_products and not plan.jaxpr.effects:
        body = jax.checkpoint(body, policy=planner.is_saved, prevent_cse=False)
    casts = _casts(values, (*consts, *carry, *values[loop.xs]))
    return _step(eqn, casts, outs, _run_with(eqn, [plan], [body]), [(plan, loop.length)])


def _while(planner: Planner, eqn: JaxprEqn, loop: Loop, values: Values, region: Region) -> Step:
    """`while_loop` and `fori_loop`: carries as in `scan`."""
    # What decides when the loop ends is not rounded: it might never end.
    decides = deciding_carries(loop)
    reads = tuple(Reads.TRACED if d else Reads.ANY for d in decides)

    def plan_body(carry: Values) -> Plan:
        return planner.plan(loop.body, (*values[loop.consts], *carry), reads, region)

    adds_up = accumulators(loop, planner.rules_of)
    carry, body = _fixpoint(plan_body, values[loop.carry], eqn.invars[loop.carry], adds_up, decides)
    cond = planner.plan(loop.cond, (*values[loop.cond_consts], *carry), (Reads.TRACED,), region)
    casts = _casts(values, (*values[loop.cond_consts], *values[loop.consts], *carry))
    run = _run_with(eqn, [cond, body], [cond, with_results(body, carry)])
    return _step(eqn, casts, carry, run, [(cond, 1), (body, 1)])


def _run_with(eqn: JaxprEqn, plans: Sequence[Plan], functions: Sequence[Any] = ()) -> Run | None:
    """Returns what runs an equation with its jaxprs planned; None if that changes nothing."""
    run = HIGHER_ORDER[eqn.primitive.name].run
    changed = any(plan.changed for plan in plans)
    return functools.partial(run, eqn, functions or plans) if changed and run is not None else None


def _step(
    eqn: JaxprEqn, casts: tuple[Any, ...], outs: Values, run: Run | None, inner: Sequence[tuple[Plan, Any]]
) -> Step:
    """Returns the decision for an equation; what enters a loop or a branch is stored, whoever reads it.

    So nothing says that it is read in float32, which would cost memory.
    """
    changed = any(plan.changed for plan, _ in inner)
    return Step(eqn, casts, outs, run or functools.partial(bind, eqn), changed, (False,) * len(casts), tuple(inner))


def _fixpoint(
    plan_body: Callable[[Values], Plan],
    init: Values,
    atoms: Sequence[Any],
    adds_up: Sequence[bool],
    decides: Sequence[bool] | None = None,
) -> tuple[Values, Plan]:
    """Plans a body with the carries that it returns, until these no longer change.

    It ends because `join` only ever widens. An array that the caller passes in as the first carry is state, not a bias,
    and is kept in its dtype; a constant, such as zeros, takes the dtype of what replaces it. Two kinds of carries have
    the dtypes that they were traced in: those that add up, and those that decide when the loop ends.
    """
    none = [False] * len(init)
    decides = decides or none
    fixed = [a or d for a, d in zip(adds_up, decides, strict=True)]

    def settled(carry: Values, fixed: Sequence[bool], rounded: Sequence[bool]) -> tuple[Values, Plan]:
        def kept(values: Iterable[Value]) -> Values:
            return tuple(
                value._replace(dtype=dtype_of(atom), native=None, adds_up=True) if is_fixed else value
                for value, atom, is_fixed in zip(values, atoms, fixed, strict=True)
            )

        carry = kept(carry)
        while True:
            plan = plan_body(carry)
            joined = kept(
                old if is_rounded and not new.keep_float32 else join(old, new)
                for old, new, is_rounded in zip(carry, plan.outs, rounded, strict=False)
            )
            if joined == carry:
                return carry, plan
            carry = joined

    start = tuple(map(_first_carry, init, atoms))
    if all(is_fixed or dtype_of(atom) != FLOAT32 for is_fixed, atom in zip(fixed, atoms, strict=True)):
        return settled(start, fixed, none)
    carry, plan = settled(start, decides, none)
    if fixed == list(decides):
        return carry, plan
    # What is made of a carry that adds up, and would be low precision if that were, is rounded where it is stored.
    rounded = [value.dtype != dtype_of(atom) for value, atom in zip(carry, atoms, strict=True)]
    return settled(carry, fixed, rounded)


def _first_carry(value: Value, atom: Any) -> Value:
    """What is known of a carry before the first iteration, so that low precision may replace a constant."""
    if not shape_of(atom):
        return value
    if value.magnitudes is not None and (value.origin is Origin.SCALAR or value.magnitudes[1] == 0):
        return value._replace(origin=Origin.SCALAR, axes=(), filled=False)
    return Value(value.dtype, keep_float32=value.keep_float32)


def _sliced(value: Value) -> Value:
    """What is known of the slices along the first axis."""
    value = value._replace(save_cast=False, axes=sliced(value.axes))
    is_scalar = value.origin is Origin.INPUT and value.axes == (frozenset(),)
    return value._replace(origin=Origin.SCALAR) if is_scalar else value


def _casts(values: Values, wanted: Values) -> tuple[Any, ...]:
    return tuple(w.dtype if w.dtype != v.dtype else None for v, w in zip(values, wanted, strict=True))


_DERIVATIVES: Mapping[str, Callable[[Planner, JaxprEqn, Plan], Run]] = {
    "custom_jvp_call": custom_jvp,
    "custom_vjp_call": custom_vjp,
}
