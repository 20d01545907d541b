"""The smallest eps that keeps an op and its derivative finite."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_SMALLEST_EXPONENT = -12  # a smaller eps is of no use: float32 rounds to 1e-7


def working_eps(fun: Callable[[Any], Any], dtype: Any) -> str:
    """Returns the smallest power of ten, from 1e-12 on, at which `fun` and its derivative are finite in `dtype`.

    Args:
        fun: a function of a number, such as `jnp.log`; it is evaluated in `dtype`, like its derivative.
        dtype: a floating dtype. The eps is a normal number of it.

    Returns:
        The eps as it is written in code, such as `"1e-3"`.
    """
    for exponent in range(_SMALLEST_EXPONENT, 0):
        eps = 10.0**exponent
        if eps < float(jnp.finfo(dtype).tiny):
            continue
        value, derivative = jax.value_and_grad(fun)(jnp.asarray(eps, dtype))
        if np.isfinite(value) and np.isfinite(derivative):
            return f"1e{exponent}"
    return "1e-1"
