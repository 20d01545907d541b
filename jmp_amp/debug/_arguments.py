"""Checks of the arguments of the debugging tools."""

from typing import Any

import jax


def check_callable(fun: Any, name: str) -> None:
    """Raises `TypeError` if `fun`, the first argument of the tool `name`, is not callable."""
    if not callable(fun):
        raise TypeError(f"`{name}` takes a function, got {type(fun).__name__}")


def check_without_autocast(fun: Any, name: str, cure: str = "") -> None:
    """Raises `TypeError` if `fun` is not callable, or is already under `autocast`."""
    check_callable(fun, name)
    if hasattr(fun, "autocast_of"):
        raise TypeError(f"`fun` is already under `autocast`; pass the function without it to `{name}`{cure}")


def check_concrete(arguments: Any, name: str, cure: str = "call it on concrete arguments") -> None:
    """Raises `TypeError` if a leaf of `arguments` is a tracer."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments)):
        raise TypeError(f"`{name}` reads values, so it cannot run inside `jit` or another transformation; {cure}")
