"""What is read of the scaled gradients: unscaled values, whether they are finite, and their leaves."""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmp_amp._jaxpr import varying_axes
from jmp_amp._loss_scale._arguments import AxisName
from jmp_amp._trees import is_value, multiply_wide

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
        return multiply_wide(tree, factor)


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
    # The leaves to check together, by the axes along which they are sharded.
    groups: dict[tuple[tuple[Any, ...], int], list[int]] = collections.defaultdict(list)
    for i, x in enumerate(leaves):
        groups[tuple(name for name in names if is_typed and name in varying_axes(x)), i if by_leaf else 0].append(i)
    flags: dict[int, jax.Array] = {}
    total = jnp.float32(0)
    with jax.debug_nans(False):  # a NaN marks an overflow here
        for (axes, _), indices in groups.items():
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


def _any_over_axes(flag: jax.Array, names: tuple[Any, ...]) -> jax.Array:
    return lax.psum(flag.astype(jnp.float32), names) > 0


_LeavesByPath = dict[tuple[Any, ...], Any]


def check_same_leaves(grads: Any, params: Any) -> None:
    """Raises ValueError unless every gradient has a parameter of its shape at the same path, and vice versa.

    Frozen and static leaves have no gradient, so `params` may hold anything at the paths where `grads` holds None or
    `optax.MaskedNode`. Per-example gradients may have a leading axis, which all of them must share. For
    `optax.LookaheadParams`, the gradients are those of the fast parameters.
    """
    if isinstance(params, optax.LookaheadParams):
        params = params.fast
    grads_by_path, params_by_path = _leaves_by_path(grads), _leaves_by_path(params)
    holes = tuple(path for path, x in grads_by_path.items() if not is_value(x))
    arrays = {path: x for path, x in grads_by_path.items() if is_value(x)}
    for path in arrays:
        if not is_value(params_by_path.get(path)):
            extra = f"have a leaf `{jax.tree_util.keystr(path)}` that" if path else "are a single array, which"
            raise ValueError(
                f"the gradients {extra} the parameters do not have; pass `tx.update` gradients with respect to the "
                "same tree as `params`"
            )
    if not _are_per_example(arrays, params_by_path):
        _check_shapes("gradient", arrays, params_by_path, "reduce or index it to the shape of the parameter")
    for path, x in params_by_path.items():
        if is_value(x) and path not in grads_by_path and not any(path[: len(hole)] == hole for hole in holes):
            raise ValueError(
                f"the parameter `{jax.tree_util.keystr(path)}` has no gradient; differentiate with respect to it, or, "
                "if it is frozen, replace it with None in both the gradients and the parameters"
            )


def check_updates(updates: Any, params: Any) -> None:
    """Raises ValueError if an update and its parameter differ in shape."""
    params_by_path = _leaves_by_path(params)
    updates_by_path = {
        path: x for path, x in _leaves_by_path(updates).items() if is_value(x) and is_value(params_by_path.get(path))
    }
    _check_shapes("update", updates_by_path, params_by_path, "reduce its per-example gradients, or correct `inner`")


def _are_per_example(grads: _LeavesByPath, params: _LeavesByPath) -> bool:
    shapes = [(jnp.shape(x), jnp.shape(params[path])) for path, x in grads.items()]
    return all(shape[1:] == want for shape, want in shapes) and len({shape[:1] for shape, _ in shapes}) <= 1


def _check_shapes(name: str, leaves: _LeavesByPath, params: _LeavesByPath, cure: str) -> None:
    for path, x in leaves.items():
        if jnp.shape(x) != jnp.shape(params[path]):
            raise ValueError(
                f"the {name} at `{jax.tree_util.keystr(path)}` has shape {jnp.shape(x)}, but its parameter has shape "
                f"{jnp.shape(params[path])}; {cure}"
            )


def is_hole(x: Any) -> bool:
    """Returns whether `x` takes the place of a gradient that a frozen parameter does not have."""
    return x is None or isinstance(x, optax.MaskedNode)


def _leaves_by_path(tree: Any) -> _LeavesByPath:
    return dict(jax.tree.leaves_with_path(tree, is_leaf=is_hole))
