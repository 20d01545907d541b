"""Casts arrays to float8, each with one scale, a power of two.

A power of two rounds nothing, so a scaled array has the same float8 numbers, and the gradients of a scaled loss are the
scaled gradients, bit for bit. A scale is computed from the elements that it scales ("current scaling"), so no state is
kept from step to step. An infinity makes everything under its scale NaN, and NaN stays NaN, so an overflow is found
in whatever is computed from the result.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_BIAS = 127  # of the exponent of a float32
_MANTISSA = 23  # bits
_LARGEST = 126  # the exponents -126 to 126: the scale and its inverse are normal numbers
_NOT_FINITE = 128  # the exponent of inf and NaN


def scale_exponent(x: jax.Array, dtype: Any) -> jax.Array:
    """Returns the exponent of the scale that makes an array use the range of a float8 dtype, an int32 scalar."""
    # The bits of magnitudes have the order of the magnitudes, and NaN is the largest.
    bits = lax.bitcast_convert_type(lax.abs(x.astype(jnp.float32)), jnp.int32)
    limit = np.float32(jnp.finfo(dtype).max).view(np.int32)
    # Those of the least powers of two that divide each into the range. They grow with the magnitudes, so the largest is
    # that of the largest. As the maximum of exponents, it comes out of one kernel.
    exponents = (bits - limit + (2**_MANTISSA - 1)) >> _MANTISSA  # rounded up
    is_finite = bits >> _MANTISSA < _NOT_FINITE + _BIAS
    exponents = jnp.where(is_finite, jnp.clip(exponents, -_LARGEST, _LARGEST), _NOT_FINITE)
    return -lax.reduce_max(exponents, range(x.ndim))


def quantize(x: jax.Array, dtype: Any, exponent: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Casts an array to a float8 dtype, with one scale that makes it use the range of the dtype.

    Args:
        x: floating, not empty.
        dtype: the float8 dtype.
        exponent: what `scale_exponent` returns, if it is known.

    Returns:
        `x * 2**exponent` in `dtype`, whose largest magnitude is between half of the largest finite number of
        `dtype` and that number; and `exponent`, an int32 scalar. The result is NaN if an element is not finite, for
        `dtype` may have no infinity.
    """
    if exponent is None:
        exponent = scale_exponent(x, dtype)
    scale = jnp.where(exponent == -_NOT_FINITE, jnp.nan, power_of_two(exponent))
    return lax.convert_element_type(x.astype(jnp.float32) * scale, dtype), exponent


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns a power of two as a float32: 0 below 2^-126, and inf above 2^127."""
    return lax.bitcast_convert_type(jnp.clip(exponent + _BIAS, 0, 255) << _MANTISSA, jnp.float32)
