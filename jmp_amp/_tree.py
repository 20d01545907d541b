"""Pytrees of arrays: cast the floating leaves, ask whether all are finite, pick one of two trees."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike

T = TypeVar("T")

_ARRAYS = (jax.Array, np.ndarray, np.generic)


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Casts the floating arrays of a tree and hands on everything else.

    Args:
        tree: Any pytree. Floating leaves (JAX arrays, tracers, numpy arrays and numpy scalars; bfloat16
            and float8 are floating too) are cast. Integers, bools, PRNG keys, complex numbers, `None`,
            Python numbers and objects that are no arrays come back as the same object.
        dtype: The dtype to cast to.

    Returns:
        A tree of the same structure. An array that has `dtype` already is the same object; a numpy array
        stays one, so that nothing moves to a device (and numpy warns where a value overflows).
    """
    dtype = jnp.dtype(dtype)

    def cast(leaf: Any) -> Any:
        # PRNG keys have dtypes that numpy does not know; `jnp.issubdtype` is the one that can be asked.
        if isinstance(leaf, _ARRAYS) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != dtype:
            return leaf.astype(dtype)
        return leaf

    return jax.tree.map(cast, tree)


def half_dtype() -> np.dtype:
    """Returns the 16-bit dtype that suits the default backend, by jmp's rule.

    Returns:
        bfloat16 on a TPU, whose matrix units have no float16, and float16 elsewhere. Asking starts the
        backend.

    Examples:
        >>> import jmp_amp as amp
        >>> amp.half_dtype()  # on a CPU or a GPU
        dtype('float16')

    References:
        `half_dtype` of jmp 0.0.4.
    """
    return jnp.dtype(jnp.bfloat16 if jax.default_backend() == "tpu" else jnp.float16)


def cast_to_half(tree: T) -> T:
    """Casts the floating arrays of a tree to `half_dtype()`.

    Args:
        tree: Any pytree; only floating JAX and numpy arrays change, of any shape.

    Returns:
        A tree of the same structure and shapes.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> half = amp.cast_to_half({"w": jnp.ones(3), "step": jnp.zeros((), jnp.int32)})
        >>> half["w"].dtype == amp.half_dtype(), half["step"].dtype
        (True, dtype('int32'))

    References:
        `cast_to_half` of jmp 0.0.4.
    """
    return cast_floating(tree, half_dtype())


def cast_to_full(tree: T) -> T:
    """Casts the floating arrays of a tree to float32, from narrower and from wider ones.

    Args:
        tree: Any pytree; only floating JAX and numpy arrays change, of any shape.

    Returns:
        A tree of the same structure and shapes.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> amp.cast_to_full({"w": jnp.ones(3, jnp.bfloat16)})["w"].dtype
        dtype('float32')

    References:
        `cast_to_full` of jmp 0.0.4.
    """
    return cast_floating(tree, jnp.float32)


def all_finite(tree: Any) -> jax.Array:
    """Whether no number in a tree is infinite or NaN.

    Args:
        tree: Any pytree, of mixed dtypes and shapes. Floating and complex leaves are looked at, Python's
            `float` and `complex` among them. Integers, bools, PRNG keys and objects that are no arrays
            count as finite, and so do arrays without elements.

    Returns:
        `bool[]`, which is True for an empty tree. Over sharded arrays it is global under `jit`, and local
        to the device inside `shard_map`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> grads = {"w": jnp.ones((2, 2), jnp.float16), "b": jnp.zeros(2)}
        >>> bool(amp.all_finite(grads))
        True
        >>> bool(amp.all_finite(grads | {"b": jnp.array([0.0, jnp.inf])}))
        False

    References:
        `all_finite` of jmp 0.0.4.
    """
    flags = [_leaf_is_finite(leaf) for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
    return functools.reduce(jnp.logical_and, flags, jnp.asarray(True))


def is_inexact(leaf: Any) -> bool:
    if isinstance(leaf, _ARRAYS):
        return jnp.issubdtype(leaf.dtype, jnp.inexact)
    return isinstance(leaf, float | complex)


def _leaf_is_finite(leaf: Any) -> jax.Array | np.bool_:
    # Host values stay on the host: JAX without x64 would round a large finite float64 to infinity.
    if isinstance(leaf, jax.Array):
        return jnp.isfinite(leaf).all()
    return np.isfinite(leaf).all()


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
    if _is_value(pred):
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
    if _is_value(a) and _is_value(b):
        type_a, type_b = jax.typeof(a), jax.typeof(b)
        if (type_a.shape, type_a.dtype) == (type_b.shape, type_b.dtype):
            return jax.lax.select(pred, a, b)
        raise TypeError(
            f"select_tree: `a{where}` is `{type_a}` but `b{where}` is `{type_b}`; "
            "both must have the same shape and dtype: cast or reshape one of them."
        )
    if not _is_value(a) and not _is_value(b) and a == b:
        return a
    raise TypeError(
        f"select_tree: cannot select between `a{where}`, which is `{a!r}`, and `b{where}`, which is `{b!r}`; "
        "leaves must be arrays or numbers, or else be equal: take them out of the tree, or make them equal."
    )


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, (*_ARRAYS, bool, int, float, complex))


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


def check_same_leaves(grads: Any, params: Any) -> None:
    """Raises unless every gradient has a parameter of its shape at its path, and the other way round.

    Where `grads` holds None or a masked node, anything may stand in `params`: frozen and static parts have no gradient.
    Gradients of single examples have one more axis in front, all of them the same. `optax.LookaheadParams` have the
    gradients of their fast parameters.
    """
    if isinstance(params, optax.LookaheadParams):
        params = params.fast
    got, want = _leaves_by_path(grads), _leaves_by_path(params)
    holes = tuple(path for path, leaf in got.items() if not _is_value(leaf))
    arrays = {path: leaf for path, leaf in got.items() if _is_value(leaf)}
    for path in arrays:
        if not _is_value(want.get(path)):
            fault = f"have a leaf `{jax.tree_util.keystr(path)}` that" if path else "are an array, which"
            raise ValueError(
                f"the gradients {fault} the parameters do not have; pass `tx.update` the gradient with respect to the "
                "very tree that `params` is"
            )
    batches = {jnp.shape(x)[:1] if jnp.shape(x)[1:] == jnp.shape(want[path]) else None for path, x in arrays.items()}
    if len(batches) > 1 or None in batches:
        _check_shapes("gradient", arrays, want, "reduce or index it to the shape of the parameter")
    for path, leaf in want.items():
        if _is_value(leaf) and path not in got and not any(path[: len(hole)] == hole for hole in holes):
            raise ValueError(
                f"the parameter `{jax.tree_util.keystr(path)}` has no gradient; "
                "give it one; where it is frozen, put None in its place in the gradients and in the parameters"
            )


def check_updates(updates: Any, params: Any) -> None:
    """Raises where the update of a parameter has another shape."""
    want = _leaves_by_path(params)
    known = {path: x for path, x in _leaves_by_path(updates).items() if _is_value(x) and _is_value(want.get(path))}
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
