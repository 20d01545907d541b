"""Errors for calls of `autocast` in the ways of `torch.autocast`: a dtype in place of the function, a `with` block."""

import functools
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from jmp_amp._autocast._format import parse_format
from jmp_amp._policy import NAMED_POLICIES, Policy


class Decorator(functools.partial):
    """The decorator that `autocast()` returns; entering it as a context manager raises TypeError."""

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "`autocast` transforms a function, so it has no `with` block; write `fun = amp.autocast(fun, ...)`, or put "
            "`@amp.autocast(...)` over the function. Inside that function, `with amp.full_precision():` and "
            "`with amp.precision(dtype):` are regions of another precision"
        )

    def __exit__(self, *exception: Any) -> None:
        pass


def check_function(fun: Any) -> None:
    """Raises TypeError unless `fun` is a function; scalar types such as `jnp.float16` are callable, but dtypes."""
    option = _option(fun)
    if option:
        raise TypeError(
            f"`autocast` takes a function, got {fun!r}; write `amp.autocast(fun, {option})`, or "
            f"`@amp.autocast({option})` over the function (it transforms a function, so it has no `with` block)"
        )
    if not callable(fun):
        raise TypeError(f"`autocast` takes a function, got {type(fun).__name__}")


def _option(value: Any) -> str | None:
    """Returns the argument of `autocast` that a dtype or a policy should have been; None if it is neither."""
    if isinstance(value, Policy):
        return "policy=policy"
    is_scalar_type = isinstance(value, type(jnp.float16)) or (isinstance(value, type) and issubclass(value, np.generic))
    if not (is_scalar_type or isinstance(value, str | np.dtype)):
        return None
    try:
        return f'dtype="{parse_format(value).name}"'
    except (TypeError, ValueError):
        return f'policy="{value}"' if value in NAMED_POLICIES else "dtype=..."
