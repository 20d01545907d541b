"""The activations of a program: the last result of each module."""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_amp._float8 import emulated
from jmp_amp._jaxpr import (
    Call,
    Loop,
    apply_as_traced,
    evaluate,
    frames_of,
    is_floating,
    scope_path,
    structure_of,
    trace_call,
)
from jmp_amp.debug._relative_error import flat_on_host

_COMPREHENSION = re.compile(r"(\.<locals>)?\.<(genexpr|listcomp|setcomp|dictcomp)>")


@emulated()
def activations(fun: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Evaluates a function and returns the last floating-point result of each module, in program order.

    A module is a named scope, such as a Flax or Haiku module, or a scope around it. An op outside of all scopes belongs
    to the user's function that contains it. If a module runs several times, its last run counts; the results of all
    iterations of a `scan` are stacked.

    Returns:
        A float64[size] NumPy array for each module, `"encoder/Dense_0"`, or function, `"model.py:attention"`.
    """
    program, arrays, _ = trace_call(fun, args, kwargs)
    names: list[str] = []

    @jax.jit
    def run(*arrays: Any) -> list[Any]:
        results: dict[str, Any] = {}
        _evaluate(program, arrays, results, "", "")
        names[:] = results  # `jit` would return a dict with sorted keys
        return list(results.values())

    values = run(*arrays)
    return {name: flat_on_host(x) for name, x in zip(names, values, strict=True)}


def _evaluate(jaxpr: Any, args: Sequence[Any], results: dict[str, Any], scope: str, function: str) -> list[Any]:
    """Evaluates a jaxpr and adds the last result of each module to `results`.

    Calls and `scan` are entered; a `while` loop, a `cond` and a kernel count as one op.
    """

    def apply(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        inner_scope = scope_path(scope, eqn.source_info.name_stack)
        inner_function = _function_of(eqn) or function
        match structure_of(eqn):
            case Call(inner, inputs, is_inline=True):
                return _evaluate(inner, [operands[i] for i in inputs], results, inner_scope, inner_function)
            case Loop(cond=None) as loop:
                return _scan(eqn, loop, operands, results, inner_scope, inner_function)
        outs = apply_as_traced(eqn, operands)
        _record(results, inner_scope or inner_function, eqn, outs)
        return outs

    return evaluate(jaxpr, args, apply)


def _scan(
    eqn: JaxprEqn, loop: Loop, operands: Sequence[Any], results: dict[str, Any], scope: str, function: str
) -> list[Any]:
    """Evaluates a `scan` that also stacks the results of its modules."""
    names: list[str] = []

    def body(carry: list[Any], x: list[Any]) -> tuple[Any, tuple[list[Any], list[Any]]]:
        inner_results: dict[str, Any] = {}
        outs = _evaluate(loop.body, [*operands[loop.consts], *carry, *x], inner_results, scope, function)
        names[:] = inner_results
        return outs[: loop.n_carry], (outs[loop.n_carry :], list(inner_results.values()))

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, (ys, stacked) = lax.scan(body, list(operands[loop.carry]), list(operands[loop.xs]), **options)
    for name, x in zip(names, stacked, strict=True):
        _set_last(results, name, x)
    return [*carry, *ys]


def _record(results: dict[str, Any], module: str, eqn: JaxprEqn, outs: Sequence[Any]) -> None:
    """Adds the first floating-point result of an op to `results`, for its module and each module around it."""
    floating = [x for x, var in zip(outs, eqn.outvars, strict=True) if is_floating(var)]
    if not floating or not module:
        return
    parts = module.split("/")
    for n in range(len(parts), 0, -1):
        _set_last(results, "/".join(parts[:n]), floating[0])


def _set_last(results: dict[str, Any], name: str, x: Any) -> None:
    results.pop(name, None)  # modules are in the order of their last results
    results[name] = x


def _function_of(eqn: JaxprEqn) -> str:
    """Returns the file and the name of the user's function that an equation comes from; empty if unknown."""
    for frame in frames_of(eqn):
        name = _COMPREHENSION.sub("", frame.function).rpartition("<locals>.")[2]
        return f"{os.path.basename(frame.file)}:{name}"
    return ""
