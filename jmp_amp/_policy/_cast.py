"""Casts of pytrees."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

T = TypeVar("T")

ARRAYS = (jax.Array, np.ndarray, np.generic)


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
        if isinstance(leaf, ARRAYS) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != dtype:
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


def wide_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype to accumulate in: an inexact dtype of at least 32 bits, as it is, and float32 for all others.

    Args:
        dtype: floating or complex.
    """
    dtype = jnp.dtype(dtype)
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)
