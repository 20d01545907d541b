"""Primitives that hold jaxprs: their bodies are planned and run like the program itself."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_amp._autocast import _compat
from jmp_amp._autocast._accumulators import accumulators
from jmp_amp._autocast._axes import sliced
from jmp_amp._autocast._custom_derivatives import custom_jvp, custom_vjp
from jmp_amp._autocast._deciding import deciding_carries
from jmp_amp._autocast._decisions import dtype_of, shape_of
from jmp_amp._autocast._interpreter import Plan, Region, Step, cast_results
from jmp_amp._autocast._planner import HigherOrder, Planner
from jmp_amp._autocast._values import FLOAT32, Origin, Reads, Value, join

Values = tuple[Value, ...]
Wanted = tuple[Reads, ...]
Run = Callable[[Sequence[Any]], Sequence[Any]]


def _call(
    rebuild: Callable[[Planner, JaxprEqn, Plan], Run], param: str = "jaxpr", *, keeps_inputs: bool = False
) -> HigherOrder:
    """A call of one jaxpr: `rebuild` makes the same call of the planned jaxpr.

    What the body reads in float32 only is cast in front of the call, where other readers can share it; not if the call
    keeps its inputs for the backward pass, which would then be float32.
    """

    def decide(planner: Planner, eqn: JaxprEqn, values: Values, wanted: Wanted, region: Region) -> Step:
        plan = planner.plan(eqn.params[param], values, wanted, region)
        reads_full = (False,) * len(values) if keeps_inputs else plan.reads_full
        full = tuple(
            value.in_full() if is_full and dtype_of(atom) == FLOAT32 else value
            for value, is_full, atom in zip(values, reads_full, eqn.invars, strict=True)
        )
        plan = planner.plan(eqn.params[param], full, wanted, region)
        run = rebuild(planner, eqn, plan) if plan.changed else _as_traced(eqn)
        return Step(eqn, _casts(values, full), plan.outs, run, plan.changed, reads_full, ((plan, 1),))

    return decide


def _cond(planner: Planner, eqn: JaxprEqn, values: Values, wanted: Wanted, region: Region) -> Step:
    """`cond` and `switch`: each result has the widest dtype over the branches."""
    # What leaves a branch is stored, so float32 would cost memory there, whoever reads it.
    stored = tuple(Reads.ANY if reads is Reads.FULL else reads for reads in wanted)
    plans = [planner.plan(branch, values[1:], stored, region) for branch in eqn.params["branches"]]
    outs = tuple(
        functools.reduce(join, of_branches) for of_branches in zip(*(plan.outs for plan in plans), strict=True)
    )
    changed = any(plan.changed for plan in plans)

    def run(args: Sequence[Any]) -> Sequence[Any]:
        index, *operands = args
        branches = [cast_results(plan.run, outs) for plan in plans]
        if "branches_platforms" not in eqn.params:
            return lax.switch(index, branches, *operands)
        # The index is that of the platform; the branches for other platforms may not even compile on this one.
        platforms = zip(eqn.params["branches_platforms"], branches, strict=True)
        by_name = {name: branch for names, branch in platforms for name in names or ("default",)}
        return lax.platform_dependent(*operands, **by_name)

    inner = [(plan, 1) for plan in plans]
    return _stored_step(eqn, (None,) * len(values), outs, run if changed else _as_traced(eqn), changed, inner)


def _scan(planner: Planner, eqn: JaxprEqn, values: Values, wanted: Wanted, region: Region) -> Step:
    """`scan`: each carry has the dtype that the body, once it gets it, returns again."""
    n_consts, n_carry = _compat.scan_sizes(eqn)
    body, n_fixed = eqn.params["jaxpr"], n_consts + n_carry
    keeps_products = planner.options.save == "matmuls"
    consts = tuple(value._replace(held=keeps_products) for value in values[:n_consts])
    xs = tuple(map(_sliced, values[n_fixed:]))

    def plan_body(carry: Values) -> Plan:
        return planner.plan(body, (*consts, *carry, *xs), (Reads.ANY,) * len(wanted), region)

    adds_up = accumulators(body, n_consts, n_carry, planner.rules_of)
    carry, plan = _fixpoint(plan_body, values[n_consts:n_fixed], eqn.invars[n_consts:n_fixed], adds_up)
    # What is stacked is stored as it is carried.
    stored = dict(zip(plan.jaxpr.outvars, carry, strict=False))
    stacked = (stored.get(var, out) for var, out in zip(plan.jaxpr.outvars[n_carry:], plan.outs[n_carry:], strict=True))
    outs = carry + tuple(Value(out.dtype, exact=out.exact) for out in stacked)

    def run(args: Sequence[Any]) -> Sequence[Any]:
        consts, init, xs = args[:n_consts], args[n_consts:n_fixed], args[n_fixed:]
        step = cast_results(plan.run, outs)

        def call(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            results = step(*consts, *carry, *x)
            return results[:n_carry], results[n_carry:]

        if keeps_products and not plan.jaxpr.effects:
            call = jax.checkpoint(call, policy=planner.saves, prevent_cse=False)
        length = None if xs else eqn.params["length"]  # a symbolic one cannot be given
        options = {name: eqn.params[name] for name in ("reverse", "unroll")}
        carried, ys = lax.scan(call, list(init), list(xs), length, **options)
        return [*carried, *ys]

    casts = _casts(values, (*consts, *carry, *values[n_fixed:]))
    inner = [(plan, eqn.params["length"])]
    return _stored_step(eqn, casts, outs, run if plan.changed else _as_traced(eqn), plan.changed, inner)


def _while(planner: Planner, eqn: JaxprEqn, values: Values, wanted: Wanted, region: Region) -> Step:
    """`while_loop` and `fori_loop`: carries as in `scan`."""
    n_cond = eqn.params["cond_nconsts"]
    n_consts = n_cond + eqn.params["body_nconsts"]
    body_consts = values[n_cond:n_consts]

    # What decides when the loop ends is not rounded: it might never end.
    decides = deciding_carries(eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"], n_cond, n_consts - n_cond)
    reads = tuple(Reads.TRACED if d else Reads.ANY for d in decides)

    def plan_body(carry: Values) -> Plan:
        return planner.plan(eqn.params["body_jaxpr"], (*body_consts, *carry), reads, region)

    adds_up = accumulators(eqn.params["body_jaxpr"], n_consts - n_cond, len(wanted), planner.rules_of)
    carry, body = _fixpoint(plan_body, values[n_consts:], eqn.invars[n_consts:], adds_up, decides)
    cond = planner.plan(eqn.params["cond_jaxpr"], (*values[:n_cond], *carry), (Reads.TRACED,), region)
    changed = body.changed or cond.changed

    def run(args: Sequence[Any]) -> Sequence[Any]:
        cond_consts, body_consts, init = args[:n_cond], args[n_cond:n_consts], args[n_consts:]
        step = cast_results(body.run, carry)

        def goes_on(carry: Sequence[Any]) -> Any:
            return cond.run(*cond_consts, *carry)[0]

        def each_that_goes_on(carry: Sequence[Any]) -> list[Any]:
            """Under `vmap` each element has a predicate; those that are done stay as they are."""
            go, new = goes_on(carry), step(*body_consts, *carry)
            return [
                lax.select(lax.broadcast_in_dim(go, jnp.shape(x), range(go.ndim)), x, old)
                for x, old in zip(new, carry, strict=True)
            ]

        if shape_of(_compat.open_jaxpr(eqn.params["cond_jaxpr"])[0].outvars[0]) == ():
            return lax.while_loop(goes_on, lambda carry: step(*body_consts, *carry), list(init))
        return lax.while_loop(lambda carry: jnp.any(goes_on(carry)), each_that_goes_on, list(init))

    casts = _casts(values, (*values[:n_consts], *carry))
    inner = [(cond, 1), (body, 1)]
    return _stored_step(eqn, casts, carry, run if changed else _as_traced(eqn), changed, inner)


def _stored_step(
    eqn: JaxprEqn,
    casts: tuple[Any, ...],
    outs: Values,
    run: Run,
    changed: bool,
    inner: Sequence[tuple[Plan, int]],
) -> Step:
    """What enters a loop or a branch is stored, so float32 would cost memory there, whoever reads it."""
    return Step(eqn, casts, outs, run, changed, (False,) * len(casts), tuple(inner))


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
                old if is_rounded and not new.exact else join(old, new)
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
    return Value(value.dtype, exact=value.exact)


def _sliced(value: Value) -> Value:
    """What is known of the slices along the first axis."""
    value = value._replace(held=False, axes=sliced(value.axes))
    is_scalar = value.origin is Origin.INPUT and value.axes == (frozenset(),)
    return value._replace(origin=Origin.SCALAR) if is_scalar else value


def _casts(values: Values, wanted: Values) -> tuple[Any, ...]:
    return tuple(w.dtype if w.dtype != v.dtype else None for v, w in zip(values, wanted, strict=True))


def _as_traced(eqn: JaxprEqn) -> Run:
    return functools.partial(_compat.bind, eqn)


def _jit(planner: Planner, eqn: JaxprEqn, plan: Plan) -> Run:
    return lambda args: _compat.bind(eqn, args, jaxpr=plan.trace(args))


def _inline(planner: Planner, eqn: JaxprEqn, plan: Plan) -> Run:
    return lambda args: plan.run(*args)


def _shard_map(planner: Planner, eqn: JaxprEqn, plan: Plan) -> Run:
    options = {name: eqn.params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    sharded = jax.shard_map(
        lambda *args: tuple(plan.run(*args)), axis_names=set(eqn.params["newly_manual_axes"]), **options
    )
    return lambda args: sharded(*args)


def _remat(planner: Planner, eqn: JaxprEqn, plan: Plan) -> Run:
    # The parameters say whether this is a recomputation, so they are kept: `jax.checkpoint` cannot be told.
    def run(args: Sequence[Any]) -> Sequence[Any]:
        jaxpr, consts = _compat.hoist_consts(plan.trace(args), args)
        prevent_cse = eqn.params["prevent_cse"]
        if isinstance(prevent_cse, tuple):  # one for each operand
            prevent_cse = (False,) * len(consts) + prevent_cse
        return _compat.bind(eqn, [*consts, *args], jaxpr=jaxpr, prevent_cse=prevent_cse)

    return run


HIGHER_ORDER: Mapping[str, HigherOrder] = {
    "jit": _call(_jit),
    "call": _call(_inline, "call_jaxpr"),
    "closed_call": _call(_inline, "call_jaxpr"),
    "eval_jaxpr": _call(_inline, "call_jaxpr"),  # the name of both from JAX 0.12 on
    "remat2": _call(_remat, keeps_inputs=True),
    "custom_jvp_call": _call(custom_jvp, "call_jaxpr"),
    "custom_vjp_call": _call(custom_vjp, "call_jaxpr", keeps_inputs=True),
    "shard_map": _call(_shard_map, keeps_inputs=True),
    "cond": _cond,
    "scan": _scan,
    "while": _while,
}
