"""Validation of the arguments that users pass."""

import inspect
import math
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_amp._calls import describe

AxisName = Hashable | tuple[Hashable, ...]

SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126
"""Between these bounds, a scale and its reciprocal are normal float32 numbers; devices flush subnormals to zero."""


def to_number(name: str, value: Any) -> float:
    """Returns `value` as a positive float that, like its reciprocal, is a normal float32 number."""
    try:
        if isinstance(value, bool | np.bool_ | str | bytes):
            raise TypeError
        number = float(value)
    except OverflowError:
        number = math.inf
    except TypeError:
        raise TypeError(f"`{name}` must be a number, got {value!r} of type {type(value).__name__}") from None
    if not (math.isfinite(number) and SMALLEST_SCALE <= number <= LARGEST_SCALE):
        raise ValueError(
            f"`{name}` must be a number from 2^-126 to 2^126, so that float32 holds its reciprocal, got {value!r}"
        )
    return number


def to_count(name: str, value: Any, minimum: int) -> int:
    """Returns `value` as a number of steps that fits in int32."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be an integer, got {value!r} of type {type(value).__name__}")
    if not minimum <= value <= np.iinfo(np.int32).max:
        raise ValueError(f"`{name}` must be an integer from {minimum} to 2^31 - 1, got {value}")
    return int(value)


def to_scale(value: Any) -> jax.Array:
    """Returns a user's loss scale as float32[]; the value of a traced scale is not checked."""
    is_number = hasattr(value, "shape") or type(value) in (int, float)
    if not is_number or jnp.shape(value) != ():
        raise TypeError(
            f"`loss_scale` must be a scalar, got {type(value).__name__}; "
            "read it from the optimizer state with `amp.get_loss_scale(opt_state)`"
        )
    is_concrete = not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)
    if is_concrete and not 0 < float(value) <= float(np.finfo(np.float32).max):
        raise ValueError(
            f"`loss_scale` must be positive and finite in float32, got {value}; pass 1.0 to disable scaling"
        )
    return jnp.asarray(value, jnp.float32)


def to_flag(name: str, value: Any) -> jax.Array:
    """Returns a user's flag as bool[]."""
    if getattr(value, "dtype", type(value)) not in (bool, jnp.bool_):
        raise TypeError(f"`{name}` must be a bool, got {value!r}; `amp.all_finite(grads)` returns one")
    return jnp.asarray(value)


def check_axis_name(value: Any) -> None:
    """Raises TypeError unless `value` can name one or several mapped axes."""
    if not isinstance(value, Hashable):
        raise TypeError(f"`axis_name` must be the name of a mapped axis or a tuple of names, got {value!r}")


def check_inner(inner: Any, wrapper: str) -> None:
    """Raises TypeError unless `inner`, the argument of the function `wrapper`, is an optax transformation."""
    if not isinstance(inner, optax.GradientTransformation):
        call = f"{inner.__name__}(...)" if inspect.isfunction(inner) else "optax.adam(1e-3)"
        raise TypeError(f"`inner` must be an optax transformation, got {describe(inner)}; write `{wrapper}({call})`")
