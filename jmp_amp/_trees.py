"""Casts and checks of the leaves of pytrees."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

T = TypeVar("T")

_ARRAYS = (jax.Array, np.ndarray, np.generic)


def is_value(leaf: Any) -> bool:
    """Whether a leaf is an array or a number."""
    return isinstance(leaf, (*_ARRAYS, bool, int, float, complex))


def is_inexact(leaf: Any) -> bool:
    """Whether a leaf is an array or a number of a floating or complex dtype."""
    if isinstance(leaf, _ARRAYS):
        return jnp.issubdtype(leaf.dtype, jnp.inexact)
    return isinstance(leaf, float | complex)


def wide_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype to accumulate in: `dtype` if it has at least 32 bits, float32 otherwise.

    Args:
        dtype: a floating or complex dtype.
    """
    dtype = jnp.dtype(dtype)
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def cast_floating(tree: T, dtype: DTypeLike) -> T:
    """Casts the floating arrays of a tree.

    Args:
        tree: any pytree. JAX arrays, tracers, numpy arrays and numpy scalars of a floating dtype, including bfloat16
            and float8, are cast. Integers, bools, PRNG keys, complex numbers, `None`, Python numbers and objects that
            are not arrays are returned as the same object.
        dtype: the dtype to cast to.

    Returns:
        A tree of the same structure. An array that already has `dtype` is the same object. A numpy array remains a
        numpy array, so it is not moved to a device, and numpy warns if a value overflows.
    """
    dtype = jnp.dtype(dtype)

    def cast(leaf: Any) -> Any:
        # `jnp.issubdtype`, because `np.issubdtype` does not support the dtypes of PRNG keys.
        if isinstance(leaf, _ARRAYS) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != dtype:
            return leaf.astype(dtype)
        return leaf

    return jax.tree.map(cast, tree)


def multiply_wide(tree: Any, factor: jax.Array) -> Any:
    """Multiplies the floating and complex leaves by `factor`, in float32 or wider; other leaves pass through."""

    def multiply(x: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        wide = jnp.asarray(x).astype(wide_dtype(jnp.result_type(x)))
        return wide * factor.astype(wide.dtype)

    return jax.tree.map(multiply, tree)


def all_finite(tree: Any) -> jax.Array:
    """Checks that all values in a tree are finite: neither infinite nor NaN.

    Args:
        tree: any pytree, of mixed dtypes and shapes. Floating and complex leaves are checked, including Python's
            `float` and `complex`. Integers, bools, PRNG keys, objects that are not arrays, and arrays without elements
            count as finite.

    Returns:
        bool[], True for an empty tree. For sharded arrays the result covers all shards under `jit`, and the local shard
        inside `shard_map`.

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
    # Check numpy values with numpy: without x64, JAX would round a large finite float64 to infinity.
    leaves = [x for x in jax.tree.leaves(tree) if is_inexact(x)]
    flags = [(jnp if isinstance(x, jax.Array) else np).isfinite(x).all() for x in leaves]
    return functools.reduce(jnp.logical_and, flags, jnp.asarray(True))
