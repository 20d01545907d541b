"""Casts of arrays to float8, with a scale for each array.

The scale is a power of two, so scaling rounds nothing, and the gradients of a scaled loss are the scaled gradients, bit
for bit. It is computed from the array itself ("current scaling"), so no state is kept from step to step.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_BIAS = 127  # of the exponent of a float32
_MANTISSA = 23  # bits
_LARGEST = 126  # the exponents -126 to 126: the scale and its inverse are normal numbers


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Casts an array to a float8 dtype, scaled to use its range.

    An infinity or NaN makes every element NaN, so that an overflow is found in whatever is computed from the result.

    Args:
        x: floating, not empty.
        dtype: the float8 dtype.

    Returns:
        `x * 2**exponent` in `dtype`, of which the largest magnitude is between half of the largest finite number of
        `dtype` and that number; and `exponent`, an int32 scalar.
    """
    largest = lax.reduce_max(lax.abs(x), range(x.ndim)).astype(jnp.float32)
    exponent = jnp.clip(_exponent(jnp.finfo(dtype).max) - _exponent(largest), -_LARGEST, _LARGEST)
    scale = jnp.where(jnp.isfinite(largest), power_of_two(exponent), jnp.nan)
    return lax.convert_element_type(x.astype(jnp.float32) * scale, dtype), exponent


def _exponent(x: Any) -> jax.Array:
    """Returns the exponent of a float32, plus 1 if its mantissa exceeds that of every largest float8 number, 1.75."""
    bits = lax.bitcast_convert_type(jnp.float32(x), jnp.int32)
    exponent, mantissa = bits >> _MANTISSA, bits & (2**_MANTISSA - 1)
    return exponent + (mantissa > 3 << (_MANTISSA - 2)) - _BIAS


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns a power of two as a float32; where that is below 2^-126, a device may return 0."""
    half = exponent >> 1
    return _normal_power(half) * _normal_power(exponent - half)


def _normal_power(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponent + _BIAS) << _MANTISSA, jnp.float32)
