"""Counts the values of each leaf that are not finite, and names the leaves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._policy import is_inexact


def nonfinite_leaves(tree: Any) -> Any:
    """Counts the values that are not finite, a leaf at a time.

    Args:
        tree: gradients, parameters or activations, of any shape; floating and complex leaves are read. Others may be
            anything: integers, PRNG keys, functions.

    Returns:
        A tree of the same structure of int32[]; 0 for the leaves that are not read. It stays on the device, so a jitted
        step can return it; `describe_nonfinite` makes it readable.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> grads = {"w": jnp.array([1.0, jnp.inf, jnp.nan]), "b": jnp.ones(2), "step": 3}
        >>> print(jax.device_get(jax.jit(amp.debug.nonfinite_leaves)(grads)))
        {'b': array(0, dtype=int32), 'step': array(0, dtype=int32), 'w': array(2, dtype=int32)}
    """

    def count(x: Any) -> jax.Array:
        if not is_inexact(x):
            return jnp.int32(0)
        return jnp.sum(~jnp.isfinite(x), dtype=jnp.int32)

    return jax.tree.map(count, tree)


def describe_nonfinite(counts: Any, tree: Any = None, *, shown: int = 5) -> str:
    """Names the leaves that are not finite. Waits for the device: call it outside `jit`.

    Args:
        counts: what `nonfinite_leaves` returned, or a tree of flags, bool[], true for a leaf that is not finite. Those
            of several seeds, made under `vmap`, are added up.
        tree: what it was given, to say out of how many values.
        shown: how many leaves are named; of the rest it is said how many there are.

    Returns:
        The tree paths with the counts; the empty string if all is finite.

    Raises:
        TypeError: called inside `jit`.
        ValueError: `tree` has another structure than `counts`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> grads = {"w": jnp.array([1.0, jnp.inf, jnp.nan]), "b": jnp.ones(2)}
        >>> counts = amp.debug.nonfinite_leaves(grads)
        >>> amp.debug.describe_nonfinite(counts)
        "['w'] (2)"
        >>> amp.debug.describe_nonfinite(counts, grads)
        "['w'] (2 of 3 values)"
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(counts)):
        raise TypeError(
            "`describe_nonfinite` reads values, so it cannot run inside `jit`; "
            "return `nonfinite_leaves(tree)` from the jitted step, and describe that"
        )
    of = [""] * len(jax.tree.leaves(counts))
    if tree is not None:
        got, want = map(str, map(jax.tree.structure, (tree, counts)))
        if got != want:
            raise ValueError(f"`tree` must be what was counted, of the structure {want}, got {got}")
        of = [f" of {getattr(x, 'size', 1)} values" for x in jax.tree.leaves(tree)]
    leaves = zip(jax.tree.leaves_with_path(jax.device_get(counts)), of, strict=True)
    bad = [_named(path, n, of_size) for (path, n), of_size in leaves if np.any(n)]
    return ", ".join(bad[:shown]) + (f" and {len(bad) - shown} more leaves" if len(bad) > shown else "")


def _named(path: Any, count: Any, of_size: str) -> str:
    is_flag = np.result_type(count) == np.bool_
    return jax.tree_util.keystr(path) + ("" if is_flag else f" ({np.sum(count)}{of_size})")
