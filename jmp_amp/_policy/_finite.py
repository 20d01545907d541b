"""Checks that the leaves of a pytree are finite."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._policy._cast import ARRAYS


def all_finite(tree: Any) -> jax.Array:
    """Checks that all values in a tree are finite: neither infinite nor NaN.

    Args:
        tree: Any pytree, of mixed dtypes and shapes. Floating and complex leaves are checked, including Python's
            `float` and `complex`. Integers, bools, PRNG keys, objects that are not arrays, and arrays without
            elements count as finite.

    Returns:
        `bool[]`, True for an empty tree. For sharded arrays the result covers all shards under `jit`, and the
        local shard inside `shard_map`.

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
    """Whether a leaf is an array or a number of a floating or complex dtype."""
    if isinstance(leaf, ARRAYS):
        return jnp.issubdtype(leaf.dtype, jnp.inexact)
    return isinstance(leaf, float | complex)


def _leaf_is_finite(leaf: Any) -> jax.Array | np.bool_:
    # Check numpy values with numpy: without x64, JAX would round a large finite float64 to infinity.
    if isinstance(leaf, jax.Array):
        return jnp.isfinite(leaf).all()
    return np.isfinite(leaf).all()
