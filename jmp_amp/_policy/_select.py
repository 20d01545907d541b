"""Selects one of two pytrees."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmp_amp._policy._cast import ARRAYS

T = TypeVar("T")


def select_tree(pred: ArrayLike, a: T, b: T) -> T:
    """Returns `a` where `pred` is true, else `b`, leaf by leaf, as `jnp.where` does.

    Both trees are computed and one is discarded, so it works under `jit` and `vmap` and never branches.

    Args:
        pred: `bool[]`, traced or not.
        a: A pytree of arrays (PRNG keys too) or Python numbers. Other leaves, such as functions and
            strings, must be equal in both trees and are handed on.
        b: A pytree of the same structure; each leaf has the shape and the dtype of its leaf in `a`.

    Returns:
        A tree of the same structure, shapes and dtypes.

    Raises:
        TypeError: If `pred` is not a boolean scalar, or two leaves differ in shape or dtype, or are no
            arrays and differ. The message names the leaf by its path.
        ValueError: If the structures differ.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> old, new = {"w": jnp.zeros(2)}, {"w": jnp.ones(2)}
        >>> amp.select_tree(amp.all_finite(new), new, old)
        {'w': Array([1., 1.], dtype=float32)}

    References:
        `select_tree` of jmp 0.0.4.
    """
    _check_predicate(pred)
    _check_same_structure(a, b)
    return jax.tree_util.tree_map_with_path(functools.partial(_select_leaf, pred), a, b)


def _check_predicate(pred: Any) -> None:
    if is_value(pred):
        kind = jax.typeof(pred)
        if kind.shape == () and kind.dtype == jnp.bool_:
            return
        got = f"a `{kind}`"
    else:
        got = f"`{pred!r}` of type `{type(pred).__name__}`"
    raise TypeError(
        f"select_tree: `pred` must be a boolean scalar, `bool[]`, got {got}; "
        "make it one with a comparison, `jnp.all` or `all_finite`."
    )


def _select_leaf(pred: ArrayLike, path: tuple[Any, ...], a: Any, b: Any) -> Any:
    where = jax.tree_util.keystr(path)
    if is_value(a) and is_value(b):
        type_a, type_b = jax.typeof(a), jax.typeof(b)
        if (type_a.shape, type_a.dtype) == (type_b.shape, type_b.dtype):
            return jax.lax.select(pred, a, b)
        raise TypeError(
            f"select_tree: `a{where}` is `{type_a}` but `b{where}` is `{type_b}`; "
            "both must have the same shape and dtype: cast or reshape one of them."
        )
    if not is_value(a) and not is_value(b) and a == b:
        return a
    raise TypeError(
        f"select_tree: cannot select between `a{where}`, which is `{a!r}`, and `b{where}`, which is `{b!r}`; "
        "leaves must be arrays or numbers, or else be equal: take them out of the tree, or make them equal."
    )


def is_value(leaf: Any) -> bool:
    """Whether a leaf is an array or a number."""
    return isinstance(leaf, (*ARRAYS, bool, int, float, complex))


def _check_same_structure(a: Any, b: Any) -> None:
    structures: list[Any] = [jax.tree.structure(a), jax.tree.structure(b)]
    if structures[0] == structures[1]:
        return
    paths_a, paths_b = _leaf_paths(a), _leaf_paths(b)
    alone = [f"`a{path}` is not in `b`" for path in paths_a if path not in paths_b]
    alone += [f"`b{path}` is not in `a`" for path in paths_b if path not in paths_a]
    # The same paths can still come from other containers, such as a tuple and a list.
    difference = alone[0] if alone else f"`a` is `{structures[0]}` and `b` is `{structures[1]}`"
    raise ValueError(f"select_tree: `a` and `b` must have the same structure, but {difference}.")


def _leaf_paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
