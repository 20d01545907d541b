"""Checks that gradients, updates and parameters have the same leaves."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jmp_amp._trees import is_value

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
