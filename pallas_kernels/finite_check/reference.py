"""The ops in plain JAX: the oracle of the tests, and the fallback.

The fallback runs on CPU, TPU and AMD, under `vmap` and differentiation, and in programs that the compiler partitions.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def unscale_check(
    leaves: Sequence[jax.Array], inv_scale: jax.Array, *, out_dtype: Any
) -> tuple[list[jax.Array], jax.Array]:
    """Multiplies leaves by `inv_scale`, and sums the squares of the results.

    Args:
        leaves: floating and complex arrays of any shape.
        inv_scale: float32[], the factor.
        out_dtype: the dtype of the results. float64 and complex leaves keep their dtype. With `None`, the list of
            results is empty.

    Returns:
        The results, and the sum of their squares, float32[]. The sum is NaN if and only if a result is not finite:
        squares of finite values are at most `inf`, and their sum cannot be NaN. The flag and the norm thus need one
        reduction for each leaf and one collective over devices. Products, squares and sums are computed in float32 (in
        float64 for float64 leaves).
    """
    outs = []
    sum_of_squares = jnp.float32(0)
    for x in leaves:
        y = x.astype(wide(x.dtype)) * inv_scale.astype(wide(x.dtype))
        if out_dtype is not None:
            y = y.astype(out_dtype if y.dtype == jnp.float32 else y.dtype)
            outs.append(y)
        magnitude = jnp.abs(y)
        squares = jnp.square(magnitude.astype(wide(magnitude.dtype)))
        sum_of_squares += jnp.sum(jnp.where(jnp.isfinite(y), squares, jnp.nan)).astype(jnp.float32)
    return outs, sum_of_squares


def wide(dtype: Any) -> Any:
    """Returns the dtype in which values of `dtype` are multiplied and summed."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)
