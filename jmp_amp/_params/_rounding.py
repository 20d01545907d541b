"""Rounding of float32 values to float16 or bfloat16 that keeps finite values finite."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def round_to_nearest(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds to the nearest number of `dtype`; finite values beyond its largest finite number become that number.

    Examples:
        >>> print(round_to_nearest(jnp.float32([0.1, 1e5, jnp.inf]), jnp.float16))
        [1.00e-01 6.55e+04      inf]
    """
    return _saturate(x, dtype).astype(dtype)


def round_stochastically(x: jax.Array, dtype: DTypeLike, key: jax.Array) -> jax.Array:
    """Rounds to one of the two neighbours in `dtype` at random, so that the expected result is the exact value.

    The probability of each neighbour is proportional to the distance from the other one, exact to 2**-31. Values that
    `dtype` can represent, infinities and NaN do not change. Finite values beyond the largest finite number of `dtype`
    become that number.

    Args:
        x: float32 array of any shape.
        dtype: float16 or bfloat16.
        key: a PRNG key for the random bits, 32 for each value.

    Returns:
        An array of `dtype`, with the shape of `x`.

    Examples:
        >>> rounded = round_stochastically(jnp.full(1000, 1 + 2.0**-10), jnp.bfloat16, jax.random.key(0))
        >>> print(rounded.min(), rounded.max())
        1 1.00781
    """
    info = jnp.finfo(dtype)
    x = _saturate(x, dtype)
    # Integer arithmetic throughout, because many backends flush subnormal float32 values to zero, and the subnormals of
    # bfloat16 are among them.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    biased_exponent, fraction = bits >> 23 & 0xFF, bits & 0x7FFFFF
    significand = jnp.where(biased_exponent > 0, fraction | 1 << 23, fraction)
    # Binade 0 starts at the smallest normal number of `dtype`, so the binades of its subnormals are negative.
    binade = jnp.maximum(biased_exponent, 1).astype(jnp.int32) - (127 + info.minexp)
    dropped = (23 - info.nmant + jnp.maximum(-binade, 0)).astype(jnp.uint32)
    # Far below the smallest number of `dtype`, only the first 31 dropped bits affect the result.
    significand >>= jnp.clip(dropped, 31, 62) - 31
    dropped = jnp.minimum(dropped, 31)
    noise = jax.random.bits(key, x.shape, jnp.uint32) >> 32 - dropped
    # A carry out of the significand increments the exponent, which is correct: the value reached the next binade.
    magnitude = (jnp.maximum(binade, 0).astype(jnp.uint32) << info.nmant) + (significand + noise >> dropped)
    rounded = (bits >> 31 << info.bits - 1 | magnitude).astype(jnp.uint16)
    return jnp.where(jnp.isfinite(x), jax.lax.bitcast_convert_type(rounded, dtype), x.astype(dtype))


def _saturate(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    largest = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x) & (jnp.abs(x) > largest), jnp.copysign(largest, x), x)
