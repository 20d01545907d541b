"""Errors for wrong calls of `autocast` and of its regions, such as those in the way of `torch.autocast`."""

import functools
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from jmp_amp._formats import parse_format
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


def check_region_function(fun: Any) -> None:
    """Raises TypeError unless `full_precision` can decorate `fun`."""
    if _is_dtype(fun) or not callable(fun):
        raise TypeError(
            f"`full_precision` takes a function or no argument, got {fun!r}; write `with amp.full_precision():`, or "
            '`@amp.full_precision` over a function; a region of another dtype is `with amp.precision("bfloat16"):`'
        )


def check_dtype_or_policy(dtype: Any, policy: Any) -> None:
    """Raises TypeError if both are given, or if a policy is given as `dtype`."""
    if isinstance(dtype, Policy):
        raise TypeError(f"`dtype` must be a dtype that autocast computes in, got {dtype!r}; write `policy=policy`")
    if dtype is not None and policy is not None:
        named = repr(policy) if isinstance(policy, str) else "policy"
        raise TypeError(
            f"pass either `dtype` or `policy`, got dtype={dtype!r} and policy={policy!r}; a policy names the dtype of "
            f"the ops itself: write `autocast(fun, policy={named})`, or `autocast(fun, {dtype!r})` without a policy"
        )


def _option(value: Any) -> str | None:
    """Returns the argument of `autocast` that a dtype or a policy should have been; None if it is neither."""
    if isinstance(value, Policy):
        return "policy=policy"
    if not _is_dtype(value):
        return None
    try:
        return f'dtype="{parse_format(value).name}"'
    except (TypeError, ValueError):
        return f'policy="{value}"' if value in NAMED_POLICIES else "dtype=..."


def _is_dtype(value: Any) -> bool:
    """Returns whether `value` is a dtype, a scalar type (which is callable) or a string."""
    is_scalar_type = isinstance(value, type(jnp.float16)) or (isinstance(value, type) and issubclass(value, np.generic))
    return is_scalar_type or isinstance(value, str | np.dtype)
