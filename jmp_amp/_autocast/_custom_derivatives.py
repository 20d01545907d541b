"""Keeps the rules of `custom_jvp` and `custom_vjp`, and runs them under autocast.

`jax.jvp` and `jax.vjp` of the traced call apply the user's rule at the traced dtypes. The resulting program is traced,
planned and run like any other, as the derivative of a new function with a custom rule.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._plan import Plan, Run, with_results
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._values import Use, Value


def custom_jvp(planner: Planner, eqn: JaxprEqn, plan: Plan) -> Run:
    """Returns the planned function with the tangent rule of `eqn`."""
    inexact_outs = list(map(jx.is_inexact, eqn.outvars))

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        pairs = zip(_differentiable(eqn), tangents, strict=True)
        perturbed = [d and not isinstance(t, SymbolicZero) for d, t in pairs]

        def as_traced(*args: Any) -> list[Any]:
            primals, tangents = args[: len(perturbed)], args[len(perturbed) :]
            fun = _of_perturbed(eqn, perturbed, primals)
            results, result_tangents = jax.jvp(fun, list(compress(primals, perturbed)), list(tangents))
            return [*results, *compress(result_tangents, inexact_outs)]

        types = _types(primals, eqn.invars)
        outs = (*plan.outs, *_tangents(compress(plan.outs, inexact_outs)))
        inputs = (*plan.inputs, *_tangents(compress(plan.inputs, perturbed)))
        rule = _planned(planner, jx.trace(as_traced, [*types, *compress(types, perturbed)]), inputs, plan)
        results = with_results(rule, outs)(*primals, *compress(tangents, perturbed))
        results, result_tangents = results[: len(plan.outs)], results[len(plan.outs) :]
        it, pairs = iter(result_tangents), zip(inexact_outs, results, strict=True)
        return results, [next(it) if is_one else np.zeros(jnp.shape(x), jax.dtypes.float0) for is_one, x in pairs]

    return _with_rule(plan, eqn, jax.custom_jvp, lambda f, zeros: f.defjvp(jvp, symbolic_zeros=zeros))


def custom_vjp(planner: Planner, eqn: JaxprEqn, plan: Plan) -> Run:
    """Returns the planned function with the cotangent rule of `eqn`. Its residuals may be low precision."""
    symbolic_zeros, _ = jx.versions.custom_rule(eqn)

    def forward(*args: Any) -> tuple[list[Any], Any]:
        perturbed = _differentiable(eqn)
        if symbolic_zeros:
            perturbed = [d and arg.perturbed for d, arg in zip(perturbed, args, strict=True)]
            args = tuple(arg.value for arg in args)
        return _forward(planner, eqn, plan, perturbed, args)

    define_vjp = jx.versions.define_vjp
    return _with_rule(plan, eqn, jax.custom_vjp, lambda f, zeros: define_vjp(f, forward, operator.call, zeros))


def _with_rule(plan: Plan, eqn: JaxprEqn, transform: Callable, define: Callable[[Any, bool], Any]) -> Run:
    """Returns the planned function with a derivative rule, which `define` gives to what `transform` returns."""
    symbolic_zeros, n_closed_over = jx.versions.custom_rule(eqn)

    def call(*args: Any) -> list[Any]:
        return plan(*args)

    call.__name__ = eqn.params.get("name", eqn.primitive.name)

    def run(args: Sequence[Any]) -> Sequence[Any]:
        function = transform(call)
        define(function, symbolic_zeros)
        # JAX refuses to differentiate what the function closes over.
        closed_over = [_refuses_tangents(x) if isinstance(x, jax.core.Tracer) else x for x in args[:n_closed_over]]
        return function(*closed_over, *args[n_closed_over:])

    return run


@jax.custom_jvp
def _refuses_tangents(x: Any) -> Any:
    return x


@_refuses_tangents.defjvp
def _(primals: Any, tangents: Any) -> NoReturn:  # is not called for a tangent that is known to be zero
    raise jx.versions.closed_over_error()


def _differentiable(eqn: JaxprEqn) -> list[bool]:
    """Returns whether each operand may be differentiated."""
    _, n_closed_over = jx.versions.custom_rule(eqn)
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
