"""What each module of a program computes: the last result in each named scope, or in each function without one."""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_amp._jaxpr import (
    Call,
    Loop,
    apply_as_traced,
    evaluate,
    flat_call,
    frames_of,
    is_floating,
    scope_path,
    structure_of,
    trace,
)
from jmp_amp.debug._measure import on_host

_COMPREHENSION = re.compile(r"(\.<locals>)?\.<(genexpr|listcomp|setcomp|dictcomp)>")


def activations(fun: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Evaluates a function and returns the last floating result in each of its modules, in the order of the program.

    A module is a named scope, such as a module of Flax or Haiku, and every scope around it; what is in no scope belongs
    to the function of the user that it comes from. Of what runs several times the last run counts, in a `scan` all.

    Returns:
        float64 arrays on the host, flat, by module: `"encoder/Dense_0"`, or `"model.py:attention"`.
    """
    flat, arrays = flat_call(fun, args, kwargs)
    names: list[str] = []

    @jax.jit
    def run(*arrays: Any) -> list[Any]:
        found: dict[str, Any] = {}
        _evaluate(trace(flat, arrays), arrays, found, "", "")
        names[:] = found  # a dict would come back sorted
        return list(found.values())

    results = run(*arrays)
    return {name: on_host(x) for name, x in zip(names, results, strict=True)}


def _evaluate(jaxpr: Any, args: Sequence[Any], found: dict[str, Any], outer: str, source: str) -> list[Any]:
    """Evaluates a jaxpr; `while` loops, branches and kernels are one op."""

    def apply(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        path = scope_path(outer, eqn.source_info.name_stack)
        inner_source = _function(eqn) or source
        match structure_of(eqn):
            case Call(inner, places, is_inline=True):
                return _evaluate(inner, [operands[i] for i in places], found, path, inner_source)
            case Loop(cond=None) as loop:
                return _scan(eqn, loop, operands, found, path, inner_source)
        outs = apply_as_traced(eqn, operands)
        _note(found, path or inner_source, eqn, outs)
        return outs

    return evaluate(jaxpr, args, apply)


def _scan(
    eqn: JaxprEqn, loop: Loop, operands: Sequence[Any], found: dict[str, Any], path: str, source: str
) -> list[Any]:
    """Runs the same loop, which also stacks what its modules compute."""
    names: list[str] = []

    def body(carry: list[Any], x: list[Any]) -> tuple[Any, tuple[list[Any], list[Any]]]:
        inside: dict[str, Any] = {}
        outs = _evaluate(loop.body, [*operands[loop.consts], *carry, *x], inside, path, source)
        names[:] = inside
        return outs[: loop.n_carry], (outs[loop.n_carry :], list(inside.values()))

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, (ys, stacked) = lax.scan(body, list(operands[loop.carry]), list(operands[loop.xs]), **options)
    for name, x in zip(names, stacked, strict=True):
        found.pop(name, None)
        found[name] = x
    return [*carry, *ys]


def _note(found: dict[str, Any], module: str, eqn: JaxprEqn, outs: Sequence[Any]) -> None:
    """Remembers the result as the last one of its module and of those around it, innermost first."""
    floating = [x for x, var in zip(outs, eqn.outvars, strict=True) if is_floating(var)]
    if not floating or not module:
        return
    parts = module.split("/")
    for n in range(len(parts), 0, -1):
        name = "/".join(parts[:n])
        found.pop(name, None)  # the order is that of the last results
        found[name] = floating[0]


def _function(eqn: JaxprEqn) -> str:
    """Returns the function of the user's code that an equation comes from, with its file."""
    for frame in frames_of(eqn):
        function = _COMPREHENSION.sub("", frame.function).rpartition("<locals>.")[2]
        return f"{os.path.basename(frame.file)}:{function}"
    return ""
