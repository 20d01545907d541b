"""Plans the rules of `custom_jvp` and `custom_vjp`.

They run under autocast too: `jax.jvp` and `jax.vjp` of the traced call apply the user's rule at the traced dtypes. That
program is traced, planned and run like any other, as the derivative of a new function with a custom rule.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, NoReturn

import jax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero, zero_from_primal
from jax.extend.core import JaxprEqn

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._plan import Plan, Region, Run, cast_to
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._values import Use, Value


def with_rule(planner: Planner, kind: str, eqn: JaxprEqn, plan: Plan) -> Run:
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
    region = plan.region._replace(is_linear=True)  # in the tangents, whose program JAX transposes
    rule = _planned(planner, region, as_traced, [*types, *compress(types, perturbed)], inputs)
    outs = (*plan.outs, *_tangents(compress(plan.outs, moves)))
    results = cast_to(rule(*primals, *compress(tangents, perturbed)), outs)
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
            rule = _planned(planner, plan.region, as_traced, _types(args, eqn.invars), plan.inputs)
        except jx.versions.closed_over_error():
            # An equation that JAX traced again does not tell which of its first operands its function closes over.
            if not any(perturbed):
                raise
            perturbed[perturbed.index(True)] = False
    outs = (*plan.outs, *rule.outs[n_outs:])
    results = cast_to(rule(*args), outs)
    types = _types(results[n_outs:], rule.signature.outvars[n_outs:])

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
        rule = _planned(planner, plan.region, as_traced, [*types, *of_cotangents], inputs)
        # A rule may return float32 for a bfloat16 operand; JAX keeps it.
        of_grads = [
            Value(value.dtype if jx.dtype_of(var) == jx.dtype_of(x) else jx.dtype_of(var))
            for var, x, value in zip(rule.signature.outvars, primals, compress(plan.inputs, perturbed), strict=False)
        ]
        results = cast_to(rule(*residuals, *cotangents), (*of_grads, *rule.outs[n_grads:]))
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


def _planned(planner: Planner, region: Region, fun: Callable, types: Sequence[Any], inputs: tuple[Value, ...]) -> Plan:
    """Returns the plan of a function in a region; nothing is known of the readers of its results."""
    jaxpr = jx.trace(fun, types)
    return planner.plan(jaxpr, inputs, (Use(),) * len(jaxpr.out_avals), region)


def _tangents(values: Iterable[Value]) -> tuple[Value, ...]:
    """Describes tangents and cotangents: only their dtypes are known."""
    return tuple(Value(value.dtype) for value in values)


def _types(args: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Returns the types of `args` in the dtypes that the variables were traced in."""
    return [jx.with_dtype(x, jx.dtype_of(var)) for x, var in zip(args, variables, strict=True)]
