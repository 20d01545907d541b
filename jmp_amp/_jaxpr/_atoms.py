"""The dtypes and shapes of the variables and literals of a jaxpr."""

from typing import Any

import jax.numpy as jnp


def dtype_of(atom: Any) -> Any:
    """Returns the dtype that a variable or literal was traced in; None for tokens and the like."""
    return getattr(atom.aval, "dtype", None)


def shape_of(atom: Any) -> tuple[int, ...] | None:
    """Returns the shape of a variable or literal; None for tokens and the like."""
    return getattr(atom.aval, "shape", None)


def is_floating(x: Any) -> bool:
    """Whether a variable, a literal or an array has a real floating dtype."""
    return _has_dtype(x, jnp.floating)


def is_inexact(x: Any) -> bool:
    """Whether a variable, a literal or an array has a floating or complex dtype."""
    return _has_dtype(x, jnp.inexact)


def _has_dtype(x: Any, kind: Any) -> bool:
    dtype = getattr(getattr(x, "aval", x), "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, kind)
