"""Keeps the rules of `custom_jvp` and `custom_vjp`, and runs them under autocast.

`jax.jvp` and `jax.vjp` of the traced call apply the user's rule at the traced dtypes. The resulting program is traced,
planned and run like any other, as the derivative of a new function with a custom rule.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn

from jmp_amp._autocast._plan import Plan, with_results
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._values import Reads, Value
from jmp_amp._jaxpr import bind, dtype_of, open_jaxpr, trace, with_dtype, zero_cotangent

Run = Callable[[Sequence[Any]], Sequence[Any]]


def custom_jvp(planner: Planner, eqn: JaxprEqn, plan: Plan) -> Run:
    """Returns the planned function with the tangent rule of `eqn`."""
    differentiable, perturbed_outs = _differentiable(eqn), _inexact(eqn.outvars)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        perturbed = [d and not isinstance(t, SymbolicZero) for d, t in zip(differentiable, tangents, strict=True)]
        tangents = list(compress(tangents, perturbed))

        def as_traced(*args: Any) -> list[Any]:
            primals, tangents = args[: len(perturbed)], args[len(perturbed) :]
            fun = _of_perturbed(eqn, perturbed, primals)
            results, result_tangents = jax.jvp(fun, list(compress(primals, perturbed)), list(tangents))
            return [*results, *compress(result_tangents, perturbed_outs)]

        outs = (*plan.outs, *_tangents(compress(plan.outs, perturbed_outs)))
        rule = planner.plan(
            trace(as_traced, [*(types := _types(primals, eqn.invars)), *compress(types, perturbed)]),
            (*plan.inputs, *_tangents(compress(plan.inputs, perturbed))),
            (Reads.ANY,) * len(outs),
            plan.region,
        )
        results = with_results(rule, outs)(*primals, *tangents)
        results, result_tangents = results[: len(plan.outs)], results[len(plan.outs) :]
        given = iter(result_tangents)
        return results, [next(given) if m else _no_tangent(x) for m, x in zip(perturbed_outs, results, strict=True)]

    function = jax.custom_jvp(_named(plan, eqn, "custom_jvp"))
    function.defjvp(jvp, symbolic_zeros=eqn.params["symbolic_zeros"])
    return lambda args: function(*args)


def custom_vjp(planner: Planner, eqn: JaxprEqn, plan: Plan) -> Run:
    """Returns the planned function with the cotangent rule of `eqn`. Its residuals may be low precision."""
    differentiable, symbolic_zeros = _differentiable(eqn), eqn.params["symbolic_zeros"]

    def forward(*args: Any) -> tuple[list[Any], Any]:
        if not symbolic_zeros:
            return _forward(planner, eqn, plan, differentiable, args)
        perturbed = [d and arg.perturbed for d, arg in zip(differentiable, args, strict=True)]
        return _forward(planner, eqn, plan, perturbed, [arg.value for arg in args])

    function = jax.custom_vjp(_named(plan, eqn, "custom_vjp"))
    function.defvjp(forward, lambda pull, cotangents: tuple(pull(cotangents)), symbolic_zeros=symbolic_zeros)
    return lambda args: function(*args)


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

    traced = trace(as_traced, _types(args, eqn.invars))
    outvars = open_jaxpr(traced)[0].outvars
    rule = planner.plan(traced, plan.inputs, (Reads.ANY,) * len(outvars), plan.region)
    outs = (*plan.outs, *rule.outs[n_outs:])
    results = with_results(rule, outs)(*args)
    types = _types(results[n_outs:], outvars[n_outs:])

    def backward(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Sequence[Any]:
        inexact = zip(_inexact(eqn.outvars), cotangents, strict=True)
        given = [is_one and not isinstance(cotangent, SymbolicZero) for is_one, cotangent in inexact]
        cotangents = list(compress(cotangents, given))

        def as_traced(*args: Any) -> list[Any]:
            pullback = jax.tree.unflatten(pullback_tree, args[: len(types)])
            zeros = [zero_cotangent(var.aval) for var in eqn.outvars]
            return list(pullback(_combine(given, args[len(types) :], zeros)))

        traced = trace(as_traced, [*types, *_types(cotangents, list(compress(eqn.outvars, given)))])
        values = (*outs[n_outs:], *_tangents(compress(plan.outs, given)))
        grads = _tangents(compress(plan.inputs, perturbed))
        rule = planner.plan(traced, values, (Reads.ANY,) * len(grads), plan.region)
        return _combine(perturbed, with_results(rule, grads)(*residuals, *cotangents), [None] * len(perturbed))

    return results[:n_outs], jax.tree_util.Partial(backward, results[n_outs:])


def _named(plan: Plan, eqn: JaxprEqn, default: str) -> Callable[..., list[Any]]:
    def call(*args: Any) -> list[Any]:
        return plan(*args)

    call.__name__ = eqn.params.get("name", default)
    return call


def _of_perturbed(eqn: JaxprEqn, perturbed: Sequence[bool], args: Sequence[Any]) -> Callable[..., list[Any]]:
    """Returns the traced call as a function of its differentiable operands."""
    return lambda *values: bind(eqn, _combine(perturbed, values, args))


def _differentiable(eqn: JaxprEqn) -> list[bool]:
    """Returns whether each operand is differentiable: integers and closed-over constants are not."""
    n_consts = eqn.params["num_consts"]
    return [i >= n_consts and inexact for i, inexact in enumerate(_inexact(eqn.invars))]


def _inexact(variables: Sequence[Any]) -> list[bool]:
    return [jnp.issubdtype(dtype_of(var), jnp.inexact) for var in variables]


def _combine(mask: Sequence[bool], items: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Returns `others`, with `items` at the places at which the mask is true."""
    it = iter(items)
    return [next(it) if is_item else other for is_item, other in zip(mask, others, strict=True)]


def _tangents(values: Iterable[Value]) -> tuple[Value, ...]:
    """Describes tangents and cotangents, of which only the dtype is known."""
    return tuple(Value(value.dtype) for value in values)


def _types(args: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the types of `args` in the dtypes that the variables were traced in."""
    return [with_dtype(x, dtype_of(var)) for x, var in zip(args, variables, strict=True)]


def _no_tangent(x: Any) -> np.ndarray:
    return np.zeros(jnp.shape(x), jax.dtypes.float0)
