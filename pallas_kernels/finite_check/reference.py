"""The ops in plain JAX: the oracle of the tests, and the fallback.

The fallback runs on CPU, TPU and AMD, under `vmap` and differentiation, and in programs that the compiler partitions.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.finite_check.sums import sum_each


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
    outs, squares = [], []
    for x in leaves:
        y = x.astype(wide(x.dtype)) * inv_scale.astype(wide(x.dtype))
        if out_dtype is not None:
            y = y.astype(out_dtype if y.dtype == jnp.float32 else y.dtype)
            outs.append(y)
        magnitude = jnp.abs(y)
        square = jnp.square(magnitude.astype(wide(magnitude.dtype)))
        squares.append(jnp.where(jnp.isfinite(y), square, jnp.nan))
    return outs, sum((total.astype(jnp.float32) for total in sum_each(squares)), start=jnp.float32(0))


def wide(dtype: Any) -> Any:
    """Returns the dtype in which values of `dtype` are multiplied and summed."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)
