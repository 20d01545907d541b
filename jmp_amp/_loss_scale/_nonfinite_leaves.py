"""Counts of the non-finite values in each leaf, and their description."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._trees import is_inexact


def count_nonfinite(tree: Any) -> Any:
    """Returns the number of non-finite values in each leaf.

    Call it inside or outside `jit`, and pass the result to `describe_nonfinite` outside `jit`.

    Args:
        tree: gradients, parameters or activations of any shape. Floating and complex leaves are counted; other leaves,
            such as integers, PRNG keys or functions, are ignored.

    Returns:
        A tree of int32[] with the same structure, on the device; 0 for ignored leaves.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> grads = {"w": jnp.array([1.0, jnp.inf, jnp.nan]), "b": jnp.ones(2), "step": 3}
        >>> print(jax.device_get(jax.jit(amp.debug.count_nonfinite)(grads)))
        {'b': array(0, dtype=int32), 'step': array(0, dtype=int32), 'w': array(2, dtype=int32)}
    """

    def count(x: Any) -> jax.Array:
        if not is_inexact(x):
            return jnp.int32(0)
        return jnp.sum(~jnp.isfinite(x), dtype=jnp.int32)

    return jax.tree.map(count, tree)


def describe_nonfinite(counts: Any, tree: Any = None, *, shown: int = 5) -> str:
    """Returns the tree paths of the leaves that are not finite, with their counts.

    It blocks until the device has computed `counts`, so call it outside `jit`.

    Args:
        counts: the result of `count_nonfinite`, or a tree of bool[], true for a leaf that is not finite. Counts with
            a leading axis, as `vmap` returns them, are summed.
        tree: the tree that was counted; if given, the description includes the number of values in each leaf.
        shown: the largest number of leaves to name; the description ends with the number of further leaves.

    Returns:
        The description, or the empty string if every leaf is finite.

    Raises:
        TypeError: called inside `jit`.
        ValueError: `tree` and `counts` differ in structure.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> grads = {"w": jnp.array([1.0, jnp.inf, jnp.nan]), "b": jnp.ones(2)}
        >>> counts = amp.debug.count_nonfinite(grads)
        >>> amp.debug.describe_nonfinite(counts)
        "['w'] (2)"
        >>> amp.debug.describe_nonfinite(counts, grads)
        "['w'] (2 of 3 values)"
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(counts)):
        raise TypeError(
            "`describe_nonfinite` needs concrete values, so it cannot run inside `jit`; "
            "return `count_nonfinite(tree)` from the jitted step, and pass the result to `describe_nonfinite`"
        )
    sizes = [""] * len(jax.tree.leaves(counts))
    if tree is not None:
        got, want = map(str, map(jax.tree.structure, (tree, counts)))
        if got != want:
            raise ValueError(f"`tree` must have the structure of `counts`, {want}, got {got}")
        sizes = [f" of {getattr(x, 'size', 1)} values" for x in jax.tree.leaves(tree)]
    leaves = zip(jax.tree.leaves_with_path(jax.device_get(counts)), sizes, strict=True)
    nonfinite = [_describe_leaf(path, count, size) for (path, count), size in leaves if np.any(count)]
    more = f" and {len(nonfinite) - shown} more leaves" if len(nonfinite) > shown else ""
    return ", ".join(nonfinite[:shown]) + more


def _describe_leaf(path: Any, count: Any, size: str) -> str:
    is_flag = np.result_type(count) == np.bool_
    return jax.tree_util.keystr(path) + ("" if is_flag else f" ({np.sum(count)}{size})")
