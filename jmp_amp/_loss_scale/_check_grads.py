"""The overflow check: one read of the scaled gradients."""

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmp_amp._jaxpr import varying_axes
from jmp_amp._loss_scale._arguments import AxisName


class GradStats(NamedTuple):
    """Statistics of the unscaled gradients.

    Attributes:
        is_finite: bool[], whether every unscaled gradient is finite on every device.
        sum_of_squares: float32[], of the unscaled gradients; -inf if they are not finite.
        nonfinite_leaves: tree of bool[] with the structure of the gradients, true for leaves that are not finite; None
            unless `check_grads` was called with `by_leaf=True`.
    """

    is_finite: jax.Array
    sum_of_squares: jax.Array
    nonfinite_leaves: Any = None


def check_grads(
    grads: Any, factor: jax.Array, axis_name: AxisName | None, implementation: str | None, by_leaf: bool = False
) -> GradStats:
    """Checks that every gradient is finite after unscaling.

    It reads each gradient once and writes no arrays. Over mapped axes, it adds one scalar collective, or one for each
    leaf, which XLA merges. Under `shard_map`, the type of a leaf contains the axes along which the leaf varies. Such a
    leaf is a shard of one gradient, so its squares are summed over these axes. Without these types (`pmap`, `vmap`,
    `check_vma=False`), each device is assumed to hold a copy of the gradient, and any copy may have overflowed.

    Args:
        grads: scaled gradients of any shape; leaves that are neither floating nor complex are ignored.
        factor: float32[], the reciprocal of the scale.
        axis_name: the mapped axes over which gradients are sharded or differ.
        implementation: as in `pallas_kernels.check_finite`.
        by_leaf: whether to check each leaf separately and return `nonfinite_leaves`.

    Raises:
        ValueError: `axis_name` is no mapped axis, or gradients vary along an axis of `shard_map` that it lacks.
    """
    from pallas_kernels import check_finite

    names = () if axis_name is None else axis_name if isinstance(axis_name, tuple) else (axis_name,)
    is_typed = any(map(_is_typed, names))
    leaves, treedef = jax.tree.flatten(grads)
    _check_axes(leaves, factor, names)
    flags: dict[int, jax.Array] = {}
    total = jnp.float32(0)
    with jax.debug_nans(False):  # a NaN marks an overflow here
        for axes, indices in _groups(leaves, names if is_typed else (), by_leaf):
            _, squares = check_finite([leaves[i] for i in indices], factor, implementation=implementation)
            squares = lax.psum(squares, axes) if axes else squares
            total += squares
            if by_leaf:
                flags[indices[0]] = jnp.isnan(squares)
        if names and not is_typed:
            flags = {i: _any_over_axes(flag, names) for i, flag in flags.items()}
            total = jnp.where(_any_over_axes(jnp.isnan(total), names), jnp.nan, total)
        nonfinite_leaves = jax.tree.unflatten(treedef, [flags[i] for i in range(len(leaves))]) if by_leaf else None
        # Outside this block, `jax.debug_nans` would raise on a NaN. Here, the replacement fuses into the sum.
        total = jnp.where(jnp.isnan(total), -jnp.inf, total)
        return GradStats(total >= 0, total, nonfinite_leaves)


def _is_typed(name: Any) -> bool:
    """Returns whether the types of arrays contain the mapped axes along which they vary."""
    try:
        return bool(varying_axes(lax.axis_index(name)))
    except NameError:  # JAX's error for an unbound axis
        raise ValueError(
            f"`axis_name` must name axes of `shard_map`, `pmap` or `vmap` around `update`, got {name!r}, which is none "
            "here; leave out `axis_name` under plain `jit`, which sees whole arrays, with or without sharding"
        ) from None


def _check_axes(leaves: Sequence[Any], factor: jax.Array, names: tuple[Any, ...]) -> None:
    missing = frozenset[Any]().union(*map(varying_axes, leaves)) - {*names} - varying_axes(factor)
    if missing:
        axes = (*names, *sorted(missing, key=str))
        named = repr(axes[0] if len(axes) == 1 else axes)
        raise ValueError(
            f"gradients vary along the mapped axes {sorted(missing, key=str)}, but the loss scale does not, so devices "
            f"could disagree on whether to skip a step; average the gradients first, `grads = jax.lax.pmean(grads, "
            f"{named})`, or, if the parameters are sharded along these axes, pass `axis_name={named}`"
        )


def _groups(
    leaves: Sequence[Any], names: tuple[Any, ...], by_leaf: bool
) -> Iterator[tuple[tuple[Any, ...], list[int]]]:
    """Yields the indices of the leaves to check together, with the axes along which these leaves are sharded."""
    indices_by_axes = collections.defaultdict(list)
    for i, x in enumerate(leaves):
        indices_by_axes[tuple(name for name in names if name in varying_axes(x))].append(i)
    for axes, indices in indices_by_axes.items():
        for group in [[i] for i in indices] if by_leaf else [indices]:
            yield axes, group


def _any_over_axes(flag: jax.Array, names: tuple[Any, ...]) -> jax.Array:
    return lax.psum(flag.astype(jnp.float32), names) > 0
