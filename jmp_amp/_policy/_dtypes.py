"""The names of floating dtypes."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_amp._policy._cast import half_dtype

# All floating dtypes of the installed JAX, including float8 and narrower ones.
_FLOATING_DTYPES = {name: jnp.dtype(value) for name, value in vars(jnp).items() if re.fullmatch(r"b?float\d\w*", name)}

# The short names of jmp, then those of torch users. "half" is absent because its dtype depends on the backend, which
# an import must not start.
_ALIASES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "full": "float32"}
_ALIASES |= {"fp16": "float16", "fp32": "float32", "fp64": "float64"}

# The formats of `autocast` with float8 products, and the dtype of all other ops.
FLOAT8 = {"float8": "bfloat16", "float8_bfloat16": "bfloat16", "float8_float16": "float16"}

ALLOWED_DTYPES = (
    "`f16`, `fp16`, `bf16`, `f32`, `fp32`, `f64`, `fp64`, `float16`, `bfloat16`, `float32`, `float64`, `half`, `full`, "
    "or the full name of another floating dtype of JAX, such as `float8_e4m3fn`"
)


def parse_dtype(value: DTypeLike, field: str = "dtype") -> np.dtype:
    """Returns the floating dtype that a string or a dtype-like object denotes.

    Args:
        value: A string whose digits count bits (`"f16"` is float16, whereas numpy reads it as 16 bytes), or any
            object that numpy accepts as a dtype: `jnp.float16`, `np.dtype("float16")`, an array's `dtype`.
            The byte order is ignored.
        field: The name of the argument, used in error messages.

    Raises:
        ValueError: If `value` is a string or a dtype, but not a floating dtype of JAX.
        TypeError: If `value` is neither a string nor a dtype.
    """
    # Check the type first: `np.dtype("float16") == "half"` is True.
    if isinstance(value, str) and value == "half":
        return half_dtype()
    name = _ALIASES.get(value, value) if isinstance(value, str) else _numpy_name(value, field)
    if name not in _FLOATING_DTYPES:
        raise ValueError(f"`{field}` must be a floating dtype, got `{name}`; allowed: {ALLOWED_DTYPES}.")
    return _FLOATING_DTYPES[name]


def _numpy_name(value: DTypeLike, field: str) -> str:
    try:
        if value is not None:  # numpy reads None as float64
            return np.dtype(value).name
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"`{field}` must be a floating dtype, got `{value!r}` of type `{type(value).__name__}`; "
        f"allowed: a dtype such as `jnp.float16`, or a string: {ALLOWED_DTYPES}."
    )
