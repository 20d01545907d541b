"""The op in plain JAX: the oracle of the tests, and the fallback.

A kernel has a function `run(x, *, dtype, block, interpret)` that returns what `quantize` returns here. It computes
scales by these functions, and casts tiles of `TILE` rows and columns. With one scale for a matrix, a launch that finds
the largest magnitudes of `PROGRAMS` parts precedes the cast.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 32  # elements that share a scale, in the MX formats

TILE = 128  # the rows and columns of a matrix that one program casts

PROGRAMS = 1024  # that look for the largest magnitude: few enough that each program of the cast can read their results

_BIAS = 127  # of the exponent of a float32, and of a float8_e8m0fnu
_MANTISSA = 23  # bits
_LARGEST = 126  # the exponents -126 to 126: the scale and its inverse are normal numbers
_NAN = 255  # the bits of a float8_e8m0fnu that is NaN


def quantize(x: jax.Array, *, dtype: Any, block: int | None) -> list[jax.Array]:
    """Returns the rows, the columns, and the scale, float32[1], or the bits of the scales of both, uint8."""
    if block is None:
        factor, exponent = scale(jnp.max(magnitude(x), initial=0.0), dtype)
        rows = (x.astype(jnp.float32) * factor).astype(dtype)
        return [rows, rows.T, power_of_two(-exponent)[None]]
    (rows, row_scales), (columns, column_scales) = quantize_rows(x, dtype), quantize_rows(x.T, dtype)
    return [rows, columns, row_scales, column_scales]


def out_types(x: jax.Array, **params: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of the results of `quantize`."""
    return tuple(jax.eval_shape(functools.partial(quantize, **params), x))


def quantize_rows(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the rows of a matrix, each 32 elements under one scale, and the bits of these scales."""
    blocks = x.reshape(x.shape[0], -1, BLOCK)
    largest = jnp.max(magnitude(blocks), axis=2)
    factor, exponent = scale(largest, dtype)
    quantized = (blocks.astype(jnp.float32) * factor[:, :, None]).astype(dtype)
    return quantized.reshape(x.shape), scale_bits(largest, exponent)


def magnitude(x: jax.Array) -> jax.Array:
    """Returns absolute values as float32, infinite for NaN: not every maximum on a GPU propagates NaN."""
    absolute = jnp.abs(x.astype(jnp.float32))
    return jnp.where(absolute < jnp.inf, absolute, jnp.inf)


def scale(largest: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Computes the power of two by which elements up to `largest` are multiplied before the cast to `dtype`.

    Args:
        largest: float32, the magnitude of the largest element.
        dtype: the float8 dtype. The mantissa of its largest finite number is 1.75.

    Returns:
        `2**exponent`, float32, NaN if `largest` is infinite; and the exponent, int32, between -126 and 126. It is the
        largest one with `largest * 2**exponent <= finfo(dtype).max`.
    """
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exceeds = (bits & (2**_MANTISSA - 1)) > 3 << (_MANTISSA - 2)  # the mantissa of `largest` exceeds 1.75
    exponent = int(jnp.finfo(dtype).maxexp) - 1 + _BIAS - (bits >> _MANTISSA) - exceeds.astype(jnp.int32)
    exponent = jnp.clip(exponent, -_LARGEST, _LARGEST)
    return jnp.where(largest < jnp.inf, power_of_two(exponent), jnp.nan), exponent


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns `2**exponent`, float32, for exponents between -126 and 127."""
    return lax.bitcast_convert_type((exponent + _BIAS) << _MANTISSA, jnp.float32)


def scale_bits(largest: jax.Array, exponent: jax.Array) -> jax.Array:
    """Returns the bits of `2**-exponent` as float8_e8m0fnu, of NaN if `largest` is infinite: uint8."""
    return jnp.where(largest < jnp.inf, _BIAS - exponent, _NAN).astype(jnp.uint8)
