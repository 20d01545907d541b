"""Rounding of float32 values to float16 or bfloat16, where finite values stay finite."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def round_to_nearest(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds to the nearest value of `dtype`; finite values beyond its largest become the largest.

    Examples:
        >>> print(round_to_nearest(jnp.float32([0.1, 1e5, jnp.inf]), jnp.float16))
        [1.00e-01 6.55e+04      inf]
    """
    return _saturate(x, dtype).astype(dtype)


def round_stochastically(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Rounds to one of the two neighbours in `dtype`, with the odds of the distances.

    Values that `dtype` holds stay as they are, and so do infinities and NaN. Finite values beyond the largest of
    `dtype` become the largest. The odds are exact to 2**-31.

    Args:
        x: float32.
        dtype: float16 or bfloat16.
        key: for the random bits, 32 a value.

    Returns:
        An array of `dtype` and of the shape of `x`.

    Examples:
        >>> rounded = round_stochastically(jnp.full(1000, 1 + 2.0**-10), jnp.bfloat16, jax.random.key(0))
        >>> print(rounded.min(), rounded.max())
        1 1.00781
    """
    info = jnp.finfo(dtype)
    x = _saturate(x, dtype)
    # Integers all the way: many backends flush subnormal float32 values to zero, and bfloat16 has the same subnormals.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    biased_exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    significand = jnp.where(biased_exponent > 0, fraction | 1 << 23, fraction)
    # Binades count from the one of the smallest normal number of `dtype`; its subnormals lie below 0.
    binade = jnp.maximum(biased_exponent, 1).astype(jnp.int32) - (127 + info.minexp)
    dropped = (23 - info.nmant + jnp.maximum(-binade, 0)).astype(jnp.uint32)
    # Far below the smallest number, only the first 31 dropped bits count.
    significand >>= jnp.clip(dropped, 31, 62) - 31
    dropped = jnp.minimum(dropped, 31)
    noise = jax.random.bits(key, x.shape, jnp.uint32) >> 32 - dropped
    # A carry out of the significand arrives in the exponent above it, where it belongs.
    magnitude = (jnp.maximum(binade, 0).astype(jnp.uint32) << info.nmant) + (significand + noise >> dropped)
    rounded = (bits >> 31 << info.bits - 1 | magnitude).astype(jnp.uint16)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(rounded, dtype), x.astype(dtype))


def _saturate(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    largest = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x) & (jnp.abs(x) > largest), jnp.copysign(largest, x), x)
