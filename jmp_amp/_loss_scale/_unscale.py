"""Unscaling: gradients of the scaled loss, multiplied by the reciprocal of the scale."""

from typing import Any

import jax
import jax.numpy as jnp

from jmp_amp._policy import wide_dtype

UNSCALE_SCOPE = "amp.unscale"


def unscale(tree: Any, factor: jax.Array) -> Any:
    """Returns the tree with its floating and complex leaves multiplied by `factor`, in float32 or wider.

    Args:
        tree: gradients of any shape; other leaves pass through.
        factor: float32[], the reciprocal of the scale, times the clipping factor if gradients are clipped.
    """
    # A multiplication, because XLA rewrites only some divisions by a scalar as multiplications. Plain JAX instead of a
    # kernel, so that XLA fuses it into the operations that use the result.
    with jax.named_scope(UNSCALE_SCOPE):
        return map_wide(lambda x: x * factor.astype(x.dtype), tree)


def unscale_and_check_grads(tree: Any, factor: jax.Array, implementation: str | None) -> tuple[Any, jax.Array]:
    """Returns the unscaled gradients, and bool[], whether every one of them is finite.

    One kernel reads and writes the gradients. Use it if the caller needs all unscaled gradients in memory; otherwise
    `unscale` fuses better.
    """
    from pallas_kernels import unscale_check

    unscaled_grads, is_finite, _ = unscale_check(tree, factor, implementation=implementation)
    return unscaled_grads, is_finite


def map_wide(fun: Any, tree: Any) -> Any:
    """Applies `fun` to the floating and complex leaves, in float32 or wider; other leaves pass through."""

    def apply(x: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        x = jnp.asarray(x)
        return fun(x.astype(wide_dtype(x.dtype)))

    return jax.tree.map(apply, tree)
