"""What each module of a program computes: the last result in each named scope, or in each function without one."""

import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal

from jmp_amp._autocast import _compat
from jmp_amp._autocast._api import split_arrays
from jmp_amp._autocast._decisions import dtype_of
from jmp_amp._autocast._overrides import scope_path
from jmp_amp.debug._measure import on_host

_FRAME = re.compile(r"(.*):\d+:\d+ \((.*)\)")
_COMPREHENSION = re.compile(r"(\.<locals>)?\.<(genexpr|listcomp|setcomp|dictcomp)>")


def activations(fun: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, np.ndarray]:
    """Evaluates a function and returns the last floating result in each of its modules, in the order of the program.

    A module is a named scope, such as a module of Flax or Haiku, and every scope around it; what is in no scope belongs
    to the function of the user that it comes from. Of what runs several times the last run counts, in a `scan` all.

    Returns:
        float64 arrays on the host, flat, by module: `"encoder/Dense_0"`, or `"model.py:attention"`.
    """
    arrays, rebuild = split_arrays((args, kwargs))
    names: list[str] = []

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = rebuild(arrays)
        return split_arrays(fun(*args, **kwargs))[0]

    @jax.jit
    def run(*arrays: Any) -> list[Any]:
        found: dict[str, Any] = {}
        _evaluate(_compat.trace(flat, arrays), arrays, found, "", "")
        names[:] = found  # a dict would come back sorted
        return list(found.values())

    results = run(*arrays)
    return {name: on_host(x) for name, x in zip(names, results, strict=True)}


def _evaluate(jaxpr: Any, args: Sequence[Any], found: dict[str, Any], outer: str, source: str) -> list[Any]:
    """Evaluates a jaxpr; loops but `scan`, branches, `shard_map` and kernels are one op."""
    opened, consts = _compat.open_jaxpr(jaxpr)
    env = dict(zip(opened.constvars, consts, strict=True)) | dict(zip(opened.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in opened.eqns:
        name, operands = eqn.primitive.name, list(map(read, eqn.invars))
        path = scope_path(outer, eqn.source_info.name_stack)
        inner_source = _function(eqn) or source
        if name in _compat.CALLS:
            outs = _evaluate(eqn.params[_compat.CALLS[name]], operands, found, path, inner_source)
        elif name == "scan":
            outs = _scan(eqn, operands, found, path, inner_source)
        else:
            with _compat.context_of(eqn):
                outs = _compat.bind(eqn, operands)
            _note(found, path or inner_source, eqn, outs)
        env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, opened.outvars))


def _scan(eqn: JaxprEqn, operands: Sequence[Any], found: dict[str, Any], path: str, source: str) -> list[Any]:
    """Runs the same loop, which also stacks what its modules compute."""
    n_consts, n_carry = _compat.scan_sizes(eqn)
    consts, init, xs = operands[:n_consts], operands[n_consts : n_consts + n_carry], operands[n_consts + n_carry :]
    names: list[str] = []

    def body(carry: list[Any], x: list[Any]) -> tuple[Any, tuple[list[Any], list[Any]]]:
        inside: dict[str, Any] = {}
        outs = _evaluate(eqn.params["jaxpr"], [*consts, *carry, *x], inside, path, source)
        names[:] = inside
        return outs[:n_carry], (outs[n_carry:], list(inside.values()))

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, (ys, stacked) = lax.scan(body, list(init), list(xs), **options)
    for name, x in zip(names, stacked, strict=True):
        found.pop(name, None)
        found[name] = x
    return [*carry, *ys]


def _note(found: dict[str, Any], module: str, eqn: JaxprEqn, outs: Sequence[Any]) -> None:
    """Remembers the result as the last one of its module and of those around it, innermost first."""
    floating = [
        x for x, var in zip(outs, eqn.outvars, strict=True) if jnp.issubdtype(dtype_of(var) or bool, jnp.floating)
    ]
    if not floating or not module:
        return
    parts = module.split("/")
    for n in range(len(parts), 0, -1):
        name = "/".join(parts[:n])
        found.pop(name, None)  # the order is that of the last results
        found[name] = floating[0]


def _function(eqn: JaxprEqn) -> str:
    """The function of the user's code that an equation comes from, with its file."""
    return _short(source_info_util.summarize(eqn.source_info))


@functools.lru_cache(maxsize=4096)
def _short(frame: str) -> str:
    match = _FRAME.fullmatch(frame)
    if match is None:
        return ""
    function = _COMPREHENSION.sub("", match[2]).rpartition("<locals>.")[2]
    return f"{os.path.basename(match[1])}:{function}"
