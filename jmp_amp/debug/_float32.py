"""A low-precision op evaluated in float32."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_amp._jaxpr import bind


def is_below_float32(dtype: Any) -> bool:
    """Returns whether `dtype` is a floating dtype of less than 32 bits."""
    return isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def evaluate_in_float32(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """Evaluates a low-precision op in float32; returns None if the op does not run in float32."""
    params = {name: np.dtype(np.float32) if is_below_float32(value) else value for name, value in eqn.params.items()}
    try:
        wide = [lax.convert_element_type(x, np.float32) if is_below_float32(x.dtype) else x for x in operands]
        return bind(eqn, wide, **params)
    except Exception:  # a custom primitive may reject other dtypes, and a reference a cast, with any error
        return None
