"""Unscaling: gradients of the scaled loss, multiplied by the reciprocal of the scale."""

from typing import Any

import jax

from jmp_amp._trees import map_wide

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
