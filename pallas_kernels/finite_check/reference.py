"""The ops in plain JAX: the oracle, and what runs on CPU, TPU and AMD, under `vmap`, differentiation and meshes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def unscale_check(
    leaves: Sequence[jax.Array], inv_scale: jax.Array, *, out_dtype: Any
) -> tuple[list[jax.Array], jax.Array]:
    """Multiplies leaves by `inv_scale` and says what came out, in one number.

    Args:
        leaves: floating and complex arrays of any shape.
        inv_scale: float32[], the factor.
        out_dtype: dtype of the results; float64 and complex leaves keep theirs. `None` returns none.

    Returns:
        The results, and the sum of their squares, float32[], which is NaN exactly if one of them is not finite: the
        squares of finite values, `inf` where they overflow, cannot add up to NaN. One number means one reduction a leaf
        and one collective over devices. Products and squares are made and summed in float32 (in float64 for float64
        leaves).
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
    """The dtype in which values of `dtype` are multiplied and summed."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)
