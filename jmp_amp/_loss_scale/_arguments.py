"""Checks of what users hand in."""

import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NO_FLOOR = 2.0**-126
NO_CEILING = 2.0**126
"""Between the two, float32 holds a scale and its reciprocal as normal numbers; devices flush others to zero."""


def to_number(name: str, value: Any) -> float:
    """Returns `value` as a float that float32 holds as a normal, positive number."""
    try:
        if isinstance(value, bool | np.bool_ | str | bytes):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except TypeError:
        raise TypeError(f"`{name}` must be a number, got {value!r} of type {type(value).__name__}") from None
    if not (math.isfinite(number) and NO_FLOOR <= number <= NO_CEILING):
        raise ValueError(
            f"`{name}` must be a number from 2^-126 to 2^126, where float32 holds its reciprocal too, got {value!r}"
        )
    return number


def to_count(name: str, value: Any, least: int) -> int:
    """Returns `value` as a number of steps that int32 holds."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be an integer, got {value!r} of type {type(value).__name__}")
    if not least <= value <= np.iinfo(np.int32).max:
        raise ValueError(f"`{name}` must be at least {least} and fit into int32, got {value}")
    return int(value)


def to_scale(value: Any) -> jax.Array:
    """Returns a scale that a user handed in as float32[]; a traced one cannot be judged."""
    is_number = hasattr(value, "shape") or type(value) in (int, float)
    if not is_number or jnp.shape(value) != ():
        raise TypeError(
            f"`loss_scale` must be a scalar, got {type(value).__name__}; "
            "read it from the optimizer state with `amp.get_loss_scale(opt_state)`"
        )
    is_known = not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)
    if is_known and not 0 < float(value) <= float(np.finfo(np.float32).max):
        raise ValueError(f"`loss_scale` must be positive and finite in float32, got {value}; write 1.0 for no scaling")
    return jnp.asarray(value, jnp.float32)


def to_flag(name: str, value: Any) -> jax.Array:
    """Returns a flag that a user handed in as bool[]."""
    if getattr(value, "dtype", type(value)) not in (bool, jnp.bool_):
        raise TypeError(f"`{name}` must be a bool, such as `amp.all_finite(grads)` returns, got {value!r}")
    return jnp.asarray(value)


def check_axis_name(value: Any) -> None:
    """Raises unless a value is the name of a mapped axis, or a tuple of such."""
    if not isinstance(value, Hashable):
        raise TypeError(f"`axis_name` must be the name of a mapped axis or a tuple of names, got {value!r}")
