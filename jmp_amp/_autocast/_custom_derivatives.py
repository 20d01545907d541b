"""`custom_jvp` and `custom_vjp`: the user's rule is kept, and runs under autocast as the function does.

The rule itself is never touched. `jax.jvp` and `jax.vjp` of the traced call apply it at the traced dtypes; what they do
is traced, planned and run like any other program, inside a new function with a custom derivative.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn

from jmp_amp._autocast import _compat
from jmp_amp._autocast._decisions import dtype_of
from jmp_amp._autocast._interpreter import Plan, cast_results
from jmp_amp._autocast._masks import chosen, merged
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._values import Reads, Value

Run = Callable[[Sequence[Any]], Sequence[Any]]


def custom_jvp(planner: Planner, eqn: JaxprEqn, plan: Plan) -> Run:
    """Returns the planned function with the tangent rule of `eqn`."""
    differentiable, moved_outs = _differentiable(eqn), _inexact(eqn.outvars)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moved = [d and not isinstance(t, SymbolicZero) for d, t in zip(differentiable, tangents, strict=True)]
        tangents = chosen(moved, tangents)

        def as_traced(*args: Any) -> list[Any]:
            primals, tangents = args[: len(moved)], args[len(moved) :]
            results, result_tangents = jax.jvp(_of_moved(eqn, moved, primals), chosen(moved, primals), list(tangents))
            return [*results, *chosen(moved_outs, result_tangents)]

        outs = (*plan.outs, *_tangents(chosen(moved_outs, plan.outs)))
        rule = planner.plan(
            _compat.trace(as_traced, [*(types := _types(primals, eqn.invars)), *chosen(moved, types)]),
            (*_inputs(plan), *_tangents(chosen(moved, _inputs(plan)))),
            (Reads.ANY,) * len(outs),
            plan.region,
        )
        results = cast_results(rule.run, outs)(*primals, *tangents)
        results, result_tangents = results[: len(plan.outs)], results[len(plan.outs) :]
        given = iter(result_tangents)
        return results, [next(given) if m else _no_tangent(x) for m, x in zip(moved_outs, results, strict=True)]

    function = jax.custom_jvp(_named(plan, eqn, "custom_jvp"))
    function.defjvp(jvp, symbolic_zeros=eqn.params["symbolic_zeros"])
    return lambda args: function(*args)


def custom_vjp(planner: Planner, eqn: JaxprEqn, plan: Plan) -> Run:
    """Returns the planned function with the cotangent rule of `eqn`; residuals may be low precision."""
    differentiable, moved_outs = _differentiable(eqn), _inexact(eqn.outvars)
    n_outs = len(eqn.outvars)

    def forward_of(moved: Sequence[bool], args: Sequence[Any]) -> tuple[list[Any], Any]:
        """Evaluates the user's rule for the gradients of the operands that are `moved`."""
        pullback_tree: Any = None

        def as_traced(*args: Any) -> list[Any]:
            nonlocal pullback_tree
            results, pullback = jax.vjp(_of_moved(eqn, moved, args), *chosen(moved, args))
            residuals, pullback_tree = jax.tree.flatten(pullback)
            return [*results, *residuals]

        traced = _compat.trace(as_traced, _types(args, eqn.invars))
        outvars = _compat.open_jaxpr(traced)[0].outvars
        rule = planner.plan(traced, _inputs(plan), (Reads.ANY,) * len(outvars), plan.region)
        outs = (*plan.outs, *rule.outs[n_outs:])
        results = cast_results(rule.run, outs)(*args)
        residual_types = _types(results[n_outs:], outvars[n_outs:])

        def backward(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
            given = [m and not isinstance(ct, SymbolicZero) for m, ct in zip(moved_outs, cotangents, strict=True)]
            nothing = [_compat.zero_cotangent(var.aval) for var in eqn.outvars]
            cotangents = chosen(given, cotangents)

            def as_traced(*args: Any) -> list[Any]:
                pullback = jax.tree.unflatten(pullback_tree, args[: len(residuals)])
                return list(pullback(merged(given, args[len(residuals) :], nothing)))

            types = _types(cotangents, chosen(given, eqn.outvars))
            values = (*outs[n_outs:], *_tangents(chosen(given, plan.outs)))
            traced = _compat.trace(as_traced, [*residual_types, *types])
            grads = _tangents(chosen(moved, _inputs(plan)))
            rule = planner.plan(traced, values, (Reads.ANY,) * len(grads), plan.region)
            return merged(moved, cast_results(rule.run, grads)(*residuals, *cotangents), [None] * len(moved))

        return results[:n_outs], jax.tree_util.Partial(backward, results[n_outs:])

    def forward(*args: Any) -> tuple[list[Any], Any]:
        if not eqn.params["symbolic_zeros"]:
            return forward_of(differentiable, args)
        moved = [d and arg.perturbed for d, arg in zip(differentiable, args, strict=True)]
        return forward_of(moved, [arg.value for arg in args])

    function = jax.custom_vjp(_named(plan, eqn, "custom_vjp"))
    function.defvjp(
        forward, lambda pull, cotangents: tuple(pull(cotangents)), symbolic_zeros=eqn.params["symbolic_zeros"]
    )
    return lambda args: function(*args)


def _named(plan: Plan, eqn: JaxprEqn, default: str) -> Callable[..., list[Any]]:
    def call(*args: Any) -> list[Any]:
        return plan.run(*args)

    call.__name__ = eqn.params.get("name", default)
    return call


def _of_moved(eqn: JaxprEqn, moved: Sequence[bool], args: Sequence[Any]) -> Callable[..., list[Any]]:
    """Returns the traced call as a function of its differentiable operands."""
    return lambda *values: _compat.bind(eqn, merged(moved, values, args))


def _differentiable(eqn: JaxprEqn) -> list[bool]:
    """Whether the rule is asked about each operand: not about integers, nor about what the function closed over."""
    n_consts = eqn.params["num_consts"]
    return [i >= n_consts and inexact for i, inexact in enumerate(_inexact(eqn.invars))]


def _inexact(variables: Sequence[Any]) -> list[bool]:
    return [jnp.issubdtype(dtype_of(var), jnp.inexact) for var in variables]


def _inputs(plan: Plan) -> tuple[Value, ...]:
    return tuple(plan.values[var] for var in plan.jaxpr.invars)


def _tangents(values: Sequence[Value]) -> tuple[Value, ...]:
    """What is known of tangents and cotangents: their dtype."""
    return tuple(Value(value.dtype) for value in values)


def _types(args: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the types of `args` in the dtypes that the variables were traced in."""
    return [_compat.with_dtype(x, dtype_of(var)) for x, var in zip(args, variables, strict=True)]


def _no_tangent(x: Any) -> np.ndarray:
    return np.zeros(jnp.shape(x), jax.dtypes.float0)
