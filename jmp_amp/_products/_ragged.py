"""The primitive of a ragged product whose operands are cast to float8: the experts of a mixture.

It computes `lax.ragged_dot_general` as `float8_dot` computes `lax.dot_general`, with one scale for all rows and one for
all groups of the other operand.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_amp._products._float8 import bind_float8, product_primitive

FLOAT8_RAGGED_DOT = "float8_ragged_dot_general"


def float8_ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    base: Any,
    operands: tuple[Any, Any],
    cotangents: Any,
    *,
    is_weight: Sequence[bool] = (False, False),
    **params: Any,
) -> jax.Array:
    """Computes `lax.ragged_dot_general` of operands that are cast to float8, each with one scale.

    Rows beyond the groups have no part in it, whatever they hold: their results and their gradients are 0.

    Args:
        lhs: the rows, a matrix, in `base` or float32.
        rhs: a matrix for each group of rows, likewise.
        group_sizes: the number of rows of each group, `int[groups]`.
        base: as for `float8_dot`.
        operands: likewise.
        cotangents: likewise.
        is_weight: likewise.
        **params: those of `lax.ragged_dot_general`, without batches or an offset.
    """
    (axis,) = params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    own = {"base": np.dtype(base), "operands": operands, "cotangents": cotangents}
    # The scale is that of all rows, so rows beyond the groups, and their cotangents, must be 0.
    lhs = _in_groups(lhs, axis, group_sizes)
    product = bind_float8(_float8_ragged_dot_p, [lhs, rhs, group_sizes], is_weight, params | own)
    return _in_groups(product, 0, group_sizes)


def _in_groups(x: jax.Array, axis: int, group_sizes: jax.Array) -> jax.Array:
    """Returns the array with zeros in the rows beyond the groups."""
    is_in_group = lax.broadcasted_iota(group_sizes.dtype, x.shape, axis) < jnp.sum(group_sizes, dtype=group_sizes.dtype)
    return lax.select(is_in_group, x, jnp.zeros_like(x))


_float8_ragged_dot_p = product_primitive(FLOAT8_RAGGED_DOT)
