"""The dtypes and shapes of the variables and literals of a jaxpr."""

from typing import Any

import jax
import jax.numpy as jnp


def dtype_of(atom: Any) -> Any:
    """Returns the dtype that a variable or literal was traced in; None unless it is an array."""
    return dtype_of_aval(atom.aval)


def dtype_of_aval(aval: Any) -> Any:
    """Returns the dtype of the arrays of a type; None for tokens, references and types of the user."""
    return aval.dtype if isinstance(aval, jax.core.ShapedArray) else None


def shape_of(atom: Any) -> tuple[int, ...] | None:
    """Returns the shape of a variable or literal; None for tokens and the like."""
    return getattr(atom.aval, "shape", None)


def is_reference(atom: Any) -> bool:
    """Whether a variable is a mutable reference to an array."""
    return hasattr(atom.aval, "inner_aval")


def is_floating(x: Any) -> bool:
    """Whether a variable, a literal or an array has a real floating dtype."""
    return _has_dtype(x, jnp.floating)


def is_inexact(x: Any) -> bool:
    """Whether a variable, a literal or an array has a floating or complex dtype."""
    return _has_dtype(x, jnp.inexact)


def _has_dtype(x: Any, kind: Any) -> bool:
    aval = getattr(x, "aval", x)
    dtype = dtype_of_aval(aval) if isinstance(aval, jax.core.AbstractValue) else getattr(aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, kind)
