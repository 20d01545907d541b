"""The sum of each of many arrays, with one launch for several small ones."""

import collections
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

SMALL = 2**16
"""The largest size of an array that shares a launch; to launch takes longer than to read that many elements."""

TOGETHER = 16
"""The largest number of arrays that share a launch. With 32, GPT-2 small has 107 launches instead of 109."""


def sum_each(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the sum of each array, a scalar of its dtype.

    Small arrays of one type are the operands of one reduction. It adds up each operand by itself, so nothing is
    concatenated.
    """
    sums: dict[int, jax.Array] = {}
    for indices in _groups(arrays):
        together = sum_together_p.bind if len(indices) > 1 else _one_by_one
        sums |= zip(indices, together(*(arrays[i] for i in indices)), strict=True)
    return [sums[i] for i in range(len(arrays))]


def is_partitioned(context: Any) -> bool:
    """Returns whether the compiler partitions a program over devices.

    Args:
        context: the `module_context` that a lowering rule receives.
    """
    axes = context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):  # inside `shard_map`, the compiler partitions axes that are not manual
        return axes.manual_axes != frozenset(axes.mesh.axis_names)
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices != 1


def _groups(arrays: Sequence[jax.Array]) -> list[list[int]]:
    """Returns the indices of the arrays of each reduction."""
    by_type: dict[Any, list[int]] = collections.defaultdict(list)
    for i, x in enumerate(arrays):
        is_small = isinstance(x.size, int) and x.size <= SMALL  # a symbolic size is not an integer
        by_type[jax.typeof(x) if is_small else i].append(i)
    return [indices[i : i + TOGETHER] for indices in by_type.values() for i in range(0, len(indices), TOGETHER)]


def _one_by_one(*arrays: jax.Array) -> list[jax.Array]:
    return [jnp.sum(x) for x in arrays]


def _together(*arrays: jax.Array) -> Sequence[jax.Array]:
    zeros = tuple(jnp.zeros((), x.dtype) for x in arrays)
    return lax.reduce(arrays, zeros, lambda xs, ys: tuple(map(operator.add, xs, ys)), range(arrays[0].ndim))


def _lower(can_join: bool, ctx: Any, *args: Any) -> Any:
    # The compiler gives all operands of a reduction one sharding, so it would gather those that have another one.
    fun = _together if can_join and not is_partitioned(ctx.module_context) else _one_by_one
    return mlir.lower_fun(fun, multiple_results=True)(ctx, *args)


def _batch(args: Sequence[Any], axes: Sequence[Any]) -> tuple[list[jax.Array], list[int]]:
    return jax.vmap(_one_by_one, axes)(*args), [0] * len(args)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[jax.Array], list[jax.Array]]:
    return sum_together_p.bind(*primals), _one_by_one(*map(ad.instantiate_zeros, tangents))


sum_together_p = Primitive("sum_together")
sum_together_p.multiple_results = True
sum_together_p.def_impl(_one_by_one)
sum_together_p.def_abstract_eval(lambda *avals: jax.make_jaxpr(_one_by_one)(*avals).out_avals)
batching.primitive_batchers[sum_together_p] = _batch
ad.primitive_jvps[sum_together_p] = _jvp
mlir.register_lowering(sum_together_p, functools.partial(_lower, True))
# On a CPU a launch costs little, and XLA adds in blocks, which is more exact, only where a reduction has one operand.
mlir.register_lowering(sum_together_p, functools.partial(_lower, False), platform="cpu")
