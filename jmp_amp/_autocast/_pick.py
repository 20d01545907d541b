"""The logit of the label: a gather of one float32 element a row, whose gradient is not scattered.

A loss in float32 reads float32 logits, and the transpose of a gather writes into an array of zeros: the gradient of all
logits, in float32, in memory. Written as a comparison with the index, it fuses with the gradient of the softmax and the
cast that follow it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_amp._autocast._gather import Apply, with_tangent


def is_pick(params: Mapping[str, Any], avals: Sequence[Any]) -> bool:
    """Whether a gather is `take_along_axis` along the last axis, of one float32 element a row."""
    x, indices = avals
    rows, axis = tuple(range(x.ndim - 1)), (x.ndim - 1,)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=axis,
        start_index_map=axis,
        operand_batching_dims=rows,
        start_indices_batching_dims=rows,
    )
    return (
        x.dtype == np.float32
        and indices.shape == (*x.shape[:-1], 1, 1)
        and indices.dtype.itemsize >= 4  # a smaller one cannot count the elements of a long row
        and params["dimension_numbers"] == numbers
        and params["slice_sizes"] == (1,) * x.ndim
        and params["mode"] in (lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    )


def pick(apply: Apply, args: Sequence[Any]) -> list[Any]:
    """Evaluates such a gather; out of bounds nothing is picked, so the tangent is 0."""

    def tangent(x: Any, indices: Any, t: Any) -> Any:
        is_picked = lax.broadcasted_iota(indices.dtype, x.shape, x.ndim - 1) == indices[..., 0]
        return jnp.sum(jnp.where(is_picked, t, 0), -1, keepdims=True)

    return with_tangent(apply, tangent, args)
