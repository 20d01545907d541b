"""Whether gradients, updates and parameters have the same leaves."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jmp_amp._policy import is_value


def check_same_leaves(grads: Any, params: Any) -> None:
    """Raises unless every gradient has a parameter of its shape at its path, and the other way round.

    Where `grads` holds None or a masked node, anything may stand in `params`: frozen and static parts have no gradient.
    Gradients of single examples have one more axis in front, all of them the same. `optax.LookaheadParams` have the
    gradients of their fast parameters.
    """
    if isinstance(params, optax.LookaheadParams):
        params = params.fast
    got, want = _leaves_by_path(grads), _leaves_by_path(params)
    holes = tuple(path for path, leaf in got.items() if not is_value(leaf))
    arrays = {path: leaf for path, leaf in got.items() if is_value(leaf)}
    for path in arrays:
        if not is_value(want.get(path)):
            fault = f"have a leaf `{jax.tree_util.keystr(path)}` that" if path else "are an array, which"
            raise ValueError(
                f"the gradients {fault} the parameters do not have; pass `tx.update` the gradient with respect to the "
                "very tree that `params` is"
            )
    batches = {jnp.shape(x)[:1] if jnp.shape(x)[1:] == jnp.shape(want[path]) else None for path, x in arrays.items()}
    if len(batches) > 1 or None in batches:
        _check_shapes("gradient", arrays, want, "reduce or index it to the shape of the parameter")
    for path, leaf in want.items():
        if is_value(leaf) and path not in got and not any(path[: len(hole)] == hole for hole in holes):
            raise ValueError(
                f"the parameter `{jax.tree_util.keystr(path)}` has no gradient; "
                "give it one; where it is frozen, put None in its place in the gradients and in the parameters"
            )


def check_updates(updates: Any, params: Any) -> None:
    """Raises where the update of a parameter has another shape."""
    want = _leaves_by_path(params)
    known = {path: x for path, x in _leaves_by_path(updates).items() if is_value(x) and is_value(want.get(path))}
    _check_shapes("update", known, want, "its gradient has another shape, too: reduce it, or see what `inner` does")


def _check_shapes(what: str, got: dict[tuple[Any, ...], Any], want: dict[tuple[Any, ...], Any], cure: str) -> None:
    for path, x in got.items():
        if jnp.shape(x) != jnp.shape(want[path]):
            raise ValueError(
                f"the {what} at `{jax.tree_util.keystr(path)}` has shape {jnp.shape(x)}, its parameter "
                f"{jnp.shape(want[path])}; {cure}"
            )


def is_hole(x: Any) -> bool:
    """Whether it stands where a frozen parameter has no gradient."""
    return x is None or isinstance(x, optax.MaskedNode)


def _leaves_by_path(tree: Any) -> dict[tuple[Any, ...], Any]:
    return dict(jax.tree.leaves_with_path(tree, is_leaf=is_hole))
