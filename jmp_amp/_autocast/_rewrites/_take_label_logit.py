"""The logit of the label: a gather of one float32 element a row, whose gradient is not scattered.

The transpose of a gather writes into an array of zeros. For a loss in float32 that is the gradient of all logits, in
float32, in memory. As a comparison with the index it fuses with the gradient of the softmax and the cast that follow.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_amp._autocast._op import Op, Rewrite
from jmp_amp._autocast._rewrites._decided import Decided
from jmp_amp._autocast._rewrites._with_tangent import with_tangent


def match(decided: Decided) -> Rewrite | None:
    """Matches `take_along_axis` along the last axis, of one element a row, read in float32."""
    eqn = decided.eqn
    if eqn.primitive.name != "gather" or not (decided.reads_full and decided.rule.moves):
        return None
    return _run if is_label_logit(eqn.params, [atom.aval for atom in eqn.invars]) else None


def is_label_logit(params: Mapping[str, Any], avals: Sequence[Any]) -> bool:
    """Whether a gather takes one float32 element a row, along the last axis."""
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


def _run(op: Op, args: Sequence[Any]) -> list[Any]:
    return with_tangent(op.apply, _tangent, op.cast(args))


def _tangent(x: Any, indices: Any, t: Any) -> Any:
    """An index out of bounds equals none, so its tangent is 0."""
    is_label = lax.broadcasted_iota(indices.dtype, x.shape, x.ndim - 1) == indices[..., 0]
    return jnp.sum(jnp.where(is_label, t, 0), -1, keepdims=True)
