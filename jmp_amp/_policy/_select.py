"""Selects between two pytrees."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmp_amp._policy._cast import ARRAYS

T = TypeVar("T")


def select_tree(pred: ArrayLike, a: T, b: T) -> T:
    """Returns `a` if `pred` is true, else `b`.

    Like `jnp.where`, it evaluates both trees and does not branch, so it works under `jit` and `vmap`.

    Args:
        pred: `bool[]`, concrete or traced.
        a: A pytree of arrays (including PRNG keys) or Python numbers. Other leaves, such as functions and strings,
            must be equal in both trees and are returned unchanged.
        b: A pytree of the same structure. Each leaf has the same shape and dtype as its counterpart in `a`.

    Returns:
        A tree of the same structure, shapes and dtypes.

    Raises:
        TypeError: If `pred` is not a boolean scalar, if two leaves differ in shape or dtype, or if two leaves that
            are not arrays differ. The message contains the path of the leaf.
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
        aval = jax.typeof(pred)
        if aval.shape == () and aval.dtype == jnp.bool_:
            return
        got = f"a `{aval}`"
    else:
        got = f"`{pred!r}` of type `{type(pred).__name__}`"
    raise TypeError(
        f"select_tree: `pred` must be a boolean scalar, `bool[]`, got {got}; "
        "compute it with a comparison, `jnp.all` or `all_finite`."
    )


def _select_leaf(pred: ArrayLike, path: tuple[Any, ...], a: Any, b: Any) -> Any:
    keystr = jax.tree_util.keystr(path)
    if is_value(a) and is_value(b):
        aval_a, aval_b = jax.typeof(a), jax.typeof(b)
        if (aval_a.shape, aval_a.dtype) == (aval_b.shape, aval_b.dtype):
            return jax.lax.select(pred, a, b)
        raise TypeError(
            f"select_tree: `a{keystr}` is `{aval_a}` but `b{keystr}` is `{aval_b}`; "
            "leaves must have the same shape and dtype: cast or reshape one of them."
        )
    if not is_value(a) and not is_value(b) and a == b:
        return a
    raise TypeError(
        f"select_tree: cannot select between `a{keystr}`, which is `{a!r}`, and `b{keystr}`, which is `{b!r}`; "
        "leaves that are neither arrays nor numbers must be equal: remove them from the trees, or make them equal."
    )


def is_value(leaf: Any) -> bool:
    """Whether a leaf is an array or a number."""
    return isinstance(leaf, (*ARRAYS, bool, int, float, complex))


def _check_same_structure(a: Any, b: Any) -> None:
    structures: list[Any] = [jax.tree.structure(a), jax.tree.structure(b)]
    if structures[0] == structures[1]:
        return
    paths_a, paths_b = _leaf_paths(a), _leaf_paths(b)
    unmatched = [f"`a{path}` is not in `b`" for path in paths_a if path not in paths_b]
    unmatched += [f"`b{path}` is not in `a`" for path in paths_b if path not in paths_a]
    # Trees with equal paths can still differ in their containers, such as a tuple and a list.
    difference = unmatched[0] if unmatched else f"`a` is `{structures[0]}` and `b` is `{structures[1]}`"
    raise ValueError(f"select_tree: `a` and `b` must have the same structure, but {difference}.")


def _leaf_paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
