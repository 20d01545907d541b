"""The sum of each of many arrays, with one launch for many small ones."""

import collections
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

SMALL = 2**16
"""The largest number of elements of an array that is summed with others: reading it takes less time than a launch."""

TOGETHER = 16
"""The number of arrays in one launch. With more, programs take longer to compile and hardly have fewer launches."""


def sum_each(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the sum of each array, a scalar of its dtype.

    Small arrays of the same type are summed by one reduction with many operands. It adds the elements of each operand by
    themselves, so nothing is concatenated.
    """
    sums: dict[int, jax.Array] = {}
    for indices in _groups(arrays):
        operands = [arrays[i] for i in indices]
        sums |= zip(indices, sum_together_p.bind(*operands) if len(operands) > 1 else _one_by_one(*operands), strict=True)
    return [sums[i] for i in range(len(arrays))]


def is_partitioned(context: Any) -> bool:
    """Returns whether the compiler partitions the program that is being lowered over devices.

    Args:
        context: the `module_context` of a lowering rule.
    """
    axes = context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):  # inside `shard_map`, the compiler partitions the axes that are not manual
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


def _lower(joins: bool, ctx: Any, *args: Any) -> Any:
    # The operands of one reduction are partitioned alike, so the compiler would gather those that are not.
    fun = _together if joins and not is_partitioned(ctx.module_context) else _one_by_one
    return mlir.lower_fun(fun, multiple_results=True)(ctx, *args)


def _batch(args: Sequence[Any], axes: Sequence[Any]) -> tuple[list[jax.Array], list[int]]:
    return jax.vmap(_one_by_one, axes)(*args), [0] * len(args)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[jax.Array], list[jax.Array]]:
    return sum_together_p.bind(*primals), _one_by_one(*map(ad.instantiate_zeros, tangents))


sum_together_p = Primitive("sum_together")
sum_together_p.multiple_results = True
sum_together_p.def_impl(jax.jit(sum_together_p.bind))
sum_together_p.def_abstract_eval(lambda *avals: jax.make_jaxpr(_one_by_one)(*avals).out_avals)
batching.primitive_batchers[sum_together_p] = _batch
ad.primitive_jvps[sum_together_p] = _jvp
mlir.register_lowering(sum_together_p, functools.partial(_lower, True))
# On a CPU, a launch costs nothing, and XLA adds a single operand in blocks, which is more exact.
mlir.register_lowering(sum_together_p, functools.partial(_lower, False), platform="cpu")
