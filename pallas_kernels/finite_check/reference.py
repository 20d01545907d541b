"""The ops in plain JAX: the oracle of the tests, and what runs unless a caller passes a kernel."""

import collections
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._compat import define_primitive, is_partitioned

# The largest size of an array that shares a launch; to launch takes longer than to read that many elements.
SMALL = 2**16
# The largest number of arrays that share a launch. With 32, GPT-2 small has 107 launches instead of 109.
TOGETHER = 16


def unscale_check(inv_scale: jax.Array, *leaves: jax.Array, out_dtype: Any) -> list[jax.Array]:
    """Multiplies leaves by `inv_scale`, and sums the squares of the results.

    Args:
        inv_scale: float32[], the factor.
        *leaves: floating and complex arrays of any shape.
        out_dtype: the dtype of the results. float64 and complex leaves keep their dtype. With `None`, there are no
            results but the sum.

    Returns:
        The sum of the squares of the results, float32[], and the results. The sum is NaN if and only if a result is not
        finite: squares of finite values are at most `inf`, and their sum cannot be NaN. The flag and the norm thus need
        one reduction for each leaf and one collective over devices. Products, squares and sums are computed in float32
        (in float64 for float64 leaves).
    """
    outs, squares = [], []
    for x in leaves:
        y = x.astype(_wide(x.dtype)) * inv_scale.astype(_wide(x.dtype))
        if out_dtype is not None:
            y = y.astype(out_dtype if y.dtype == jnp.float32 else y.dtype)
            outs.append(y)
        magnitude = jnp.abs(y)
        square = jnp.square(magnitude.astype(_wide(magnitude.dtype)))
        squares.append(jnp.where(jnp.isfinite(y), square, jnp.nan))
    return [sum((total.astype(jnp.float32) for total in _sum_each(squares)), start=jnp.float32(0)), *outs]


def _wide(dtype: Any) -> Any:
    """Returns the dtype in which values of `dtype` are multiplied and summed."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def _sum_each(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the sum of each array, a scalar of its dtype.

    Small arrays of one type are the operands of one reduction. It adds up each operand by itself, so nothing is
    concatenated.
    """
    by_type: dict[Any, list[int]] = collections.defaultdict(list)
    for i, x in enumerate(arrays):
        is_small = isinstance(x.size, int) and x.size <= SMALL  # a symbolic size is not an integer
        by_type[jax.typeof(x) if is_small else i].append(i)
    sums: dict[int, jax.Array] = {}
    for indices in by_type.values():
        for group in (indices[i : i + TOGETHER] for i in range(0, len(indices), TOGETHER)):
            add_up = sum_together_p.bind if len(group) > 1 else _one_by_one
            sums |= zip(group, add_up(*(arrays[i] for i in group)), strict=True)
    return [sums[i] for i in range(len(arrays))]


def _one_by_one(*arrays: jax.Array) -> list[jax.Array]:
    return [jnp.sum(x) for x in arrays]


def _together(*arrays: jax.Array) -> Sequence[jax.Array]:
    zeros = tuple(jnp.zeros((), x.dtype) for x in arrays)
    return lax.reduce(arrays, zeros, lambda xs, ys: tuple(map(operator.add, xs, ys)), range(arrays[0].ndim))


def _lowered(context: Any, on_cpu: bool) -> Any:
    # On a CPU a launch costs little, and XLA adds in blocks, which is more exact, only where a reduction has one
    # operand. The compiler gives all operands one sharding, so it would gather those that have another one.
    return _one_by_one if on_cpu or is_partitioned(context) else _together


sum_together_p = define_primitive("sum_together", lambda reason: _one_by_one, _lowered, "cpu")
