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
    """Casts the floating arrays of a tree.

    Args:
        tree: Any pytree. JAX arrays, tracers, numpy arrays and numpy scalars of a floating dtype, including
            bfloat16 and float8, are cast. Integers, bools, PRNG keys, complex numbers, `None`, Python numbers and
            objects that are not arrays are returned as the same object.
        dtype: The dtype to cast to.

    Returns:
        A tree of the same structure. An array that already has `dtype` is the same object. A numpy array remains a
        numpy array, so it is not moved to a device, and numpy warns if a value overflows.
    """
    dtype = jnp.dtype(dtype)

    def cast(leaf: Any) -> Any:
        # `jnp.issubdtype`, because `np.issubdtype` does not support the dtypes of PRNG keys.
        if isinstance(leaf, ARRAYS) and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype != dtype:
            return leaf.astype(dtype)
        return leaf

    return jax.tree.map(cast, tree)


def half_dtype() -> np.dtype:
    """Returns the 16-bit dtype for the default backend, as in jmp.

    Returns:
        bfloat16 on a TPU, whose matrix units do not support float16, and float16 on other backends. The call
        initializes the backend.

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
        tree: Any pytree. Floating JAX and numpy arrays of any shape are cast; other leaves are unchanged.

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
    """Casts the floating arrays of a tree to float32, both narrower and wider ones.

    Args:
        tree: Any pytree. Floating JAX and numpy arrays of any shape are cast; other leaves are unchanged.

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
    """Returns the dtype to accumulate in: `dtype` if it has at least 32 bits, float32 otherwise.

    Args:
        dtype: a floating or complex dtype.
    """
    dtype = jnp.dtype(dtype)
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)
