"""Unscales gradients, and checks that they are finite, and match the parameters."""

import collections
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import keystr

from jmp_amp import _jaxpr as jx
from jmp_amp._calls import quote
from jmp_amp._trees import is_value, multiply_wide

AxisName = Hashable | tuple[Hashable, ...]
UNSCALE, CHECK = "unscale", "overflow_check"  # mark both of gradients
# Mark the reciprocal of a scale in `update`: of one that is always 1, of one that `grads_finite=` keeps equal to those
# of other states, of any other one; and the scale of the next step.
NO_SCALE, EQUAL_SCALE, OTHER_SCALE, NEXT_SCALE = "no_scale", "equal_scale", "other_scale", "next_scale"


def unscale(tree: Any, factor: jax.Array) -> Any:
    """Returns the tree with its floating and complex leaves multiplied by `factor`, in float32 or wider.

    Args:
        tree: gradients of any shape; other leaves pass through.
        factor: float32[], the reciprocal of the scale, times the clipping factor if gradients are clipped.
    """
    # A multiplication, because XLA rewrites only some divisions by a scalar as multiplications. Plain JAX instead of a
    # kernel, so that XLA fuses it into the operations that use the result.
    with jx.marked(UNSCALE):
        return multiply(tree, factor)


def multiply(tree: Any, factor: jax.Array) -> Any:
    """As `unscale`, for gradients that stay scaled."""
    return with_overwritten(tree, multiply_wide(jax.tree.leaves(tree), factor))


def is_overwritten(path: tuple[Any, ...], x: Any) -> bool:
    """Whether a leaf of a tree of gradients is no gradient, but the next state of a float8 module of Flax.

    References:
        `OVERWRITE_WITH_GRADIENT` and `fm32` in `flax.linen.fp8_ops`.
    """
    is_max = getattr(getattr(x, "dtype", None), "name", "").startswith("fp8_meta")
    return is_max or "['_overwrite_with_gradient']" in keystr(path)


def without_overwritten(grads: Any) -> list[Any]:
    """Returns the leaves of a tree of gradients, with a number in place of each that is none."""
    return [np.int32(0) if is_overwritten(path, x) else x for path, x in jax.tree.leaves_with_path(grads)]


def with_overwritten(grads: Any, new: Sequence[Any]) -> Any:
    """Returns a tree of the leaves `new`, with those of the gradients that are no gradients in their places."""
    leaves, treedef = jax.tree.flatten_with_path(grads)
    kept = [x if is_overwritten(path, x) else y for (path, x), y in zip(leaves, new, strict=True)]
    return jax.tree.unflatten(treedef, kept)


def check_grads(
    grads: Any, factor: jax.Array, axis_name: AxisName | None, implementation: str | None, by_leaf: bool = False
) -> tuple[jax.Array, jax.Array, dict[Any, jax.Array]]:
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
        by_leaf: whether to check each leaf separately.

    Returns:
        bool[], whether every unscaled gradient is finite on every device; float32[], the sum of squares of the unscaled
        gradients, -inf if they are not finite; and, with `by_leaf`, bool[] by the path of each gradient, true for those
        that are not finite.

    Raises:
        ValueError: `axis_name` is no mapped axis, or gradients vary along an axis of `shard_map` that it lacks.
    """
    from pallas_kernels import check_finite

    leaves = without_overwritten(grads)
    names = () if axis_name is None else axis_name if isinstance(axis_name, tuple) else (axis_name,)
    is_typed = any(map(_is_typed, names))
    varying = frozenset[Any]().union(*map(jx.versions.varying_axes, leaves))
    if missing := sorted(varying - {*names} - jx.versions.varying_axes(factor), key=str):
        raise ValueError(
            f"gradients vary along the mapped axes {missing}, but the loss scale does not, so devices could disagree "
            f"on whether to skip a step; {average_first((*names, *missing))}, or, if the parameters are sharded along "
            f"these axes, pass `axis_name={_as_argument((*names, *missing))}`"
        )

    def sum_of_squares(part: list[Any]) -> jax.Array:
        """Returns the sum of squares of some of the leaves on all devices; NaN if one is not finite."""
        total = jnp.float32(0)
        by_axes = collections.defaultdict(list)
        for x in part:
            by_axes[tuple(name for name in names if is_typed and name in jx.versions.varying_axes(x))].append(x)
        for axes, group in by_axes.items():
            _, squares = check_finite(group, factor, implementation=implementation)
            total += lax.psum(squares, axes) if axes else squares
        if names and not is_typed:
            overflows = lax.psum(jnp.isnan(total).astype(jnp.float32), names)
            total = jnp.where(overflows > 0, jnp.nan, total)
        return total

    with jx.marked(CHECK), jax.debug_nans(False):  # a NaN marks an overflow here
        sums = [sum_of_squares(part) for part in ([[x] for x in leaves] if by_leaf else [leaves])]
        paths = [path for path, _ in jax.tree.leaves_with_path(grads)] if by_leaf else []
        flags = dict(zip(paths, map(jnp.isnan, sums), strict=False))
        total = sum(sums, jnp.float32(0))
        # Outside this block, `jax.debug_nans` would raise on a NaN. Here, the replacement fuses into the sum.
        total = jnp.where(jnp.isnan(total), -jnp.inf, total)
        return total >= 0, total, flags


def average_first(axes: Sequence[Any]) -> str:
    """Returns the cure for gradients, or what is computed from them, that vary along mapped axes."""
    return f"average the gradients first, `grads = jax.lax.pmean(grads, {_as_argument(axes)})`"


def _as_argument(axes: Sequence[Any]) -> str:
    return repr(axes[0] if len(axes) == 1 else tuple(axes))


def _is_typed(name: Any) -> bool:
    """Returns whether the types of arrays contain the mapped axes along which they vary."""
    try:
        return bool(jx.versions.varying_axes(lax.axis_index(name)))
    except NameError:  # JAX's error for an unbound axis
        raise ValueError(
            f"`axis_name` must name axes of `shard_map`, `pmap` or `vmap` around `update`, got {quote(name)}, which is "
            "none here; leave out `axis_name` under plain `jit`, which sees whole arrays, with or without sharding"
        ) from None


def at(path: Any) -> str:
    """Returns the place of the gradient of a leaf in a message."""
    return f"at `{keystr(path)}`" if path else "of the parameters"


def differentiated(params: Any) -> Any:
    """Returns the tree that the gradients are of: the fast parameters of `optax.LookaheadParams`."""
    return params.fast if isinstance(params, optax.LookaheadParams) else params


def check_leaves(grads: Any, params: Any) -> None:
    """Raises ValueError unless every gradient has a parameter of its shape at the same path, and vice versa.

    Frozen and static leaves have no gradient, so `params` may hold anything at the paths where `grads` holds None or
    `optax.MaskedNode`. Per-example gradients may have a leading axis, which all of them must share.
    """
    params = differentiated(params)
    grads_by_path, params_by_path = _leaves_by_path(grads), _leaves_by_path(params)
    for path, x in grads_by_path.items():
        if is_value(x) and not is_value(params_by_path.get(path)):
            extra = f"have a leaf `{keystr(path)}` that" if path else "are a single array, which"
            raise ValueError(
                f"the gradients {extra} the parameters do not have; pass `tx.update` gradients with respect to the "
                "same tree as `params`"
            )
    shapes = [(jnp.shape(x), jnp.shape(params_by_path[path])) for path, x in grads_by_path.items() if is_value(x)]
    if any(shape[1:] != want for shape, want in shapes) or len({shape[:1] for shape, _ in shapes}) > 1:
        check_shapes("gradient", grads, params, "reduce or index it to the shape of the parameter")
    for path, x in params_by_path.items():
        if is_value(x) and not any(path[:i] in grads_by_path for i in range(len(path) + 1)):
            name = f"the parameter `{keystr(path)}` has" if path else "the parameters have"
            raise ValueError(
                f"{name} no gradient; differentiate with respect to it, or, "
                "if it is frozen, replace it with None in both the gradients and the parameters"
            )


def check_shapes(name: str, tree: Any, params: Any, cure: str) -> None:
    """Raises ValueError if a leaf of a tree of gradients or updates has another shape than its parameter."""
    params_by_path = _leaves_by_path(params)
    for path, x in _leaves_by_path(tree).items():
        param: Any = params_by_path.get(path)
        if is_value(x) and is_value(param) and jnp.shape(x) != jnp.shape(param):
            raise ValueError(
                f"the {name} {at(path)} has shape {jnp.shape(x)}, but its parameter has shape "
                f"{jnp.shape(param)}; {cure}"
            )


def is_frozen(x: Any) -> bool:
    """Returns whether `x` takes the place of a gradient that a frozen parameter does not have."""
    return x is None or isinstance(x, optax.MaskedNode)


def _leaves_by_path(tree: Any) -> dict[tuple[Any, ...], Any]:
    return dict(jax.tree.leaves_with_path(tree, is_leaf=is_frozen))
