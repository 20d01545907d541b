"""The names of floating dtypes, and the formats: the dtypes that the ops of a region compute in."""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_amp._calls import quote, shorten

FLOAT32 = np.dtype(np.float32)

# All floating dtypes of the installed JAX, including float8 and narrower ones.
_FLOATING_DTYPES = {name: jnp.dtype(value) for name, value in vars(jnp).items() if re.fullmatch(r"b?float\d\w*", name)}

# The short names of jmp, then those of torch users. "half" is absent because its dtype depends on the backend, which
# an import must not start.
_ALIASES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64", "full": "float32"}
_ALIASES |= {"fp16": "float16", "fp32": "float32", "fp64": "float64"}

ALLOWED_DTYPES = (
    "`f16`, `fp16`, `bf16`, `f32`, `fp32`, `f64`, `fp64`, `float16`, `bfloat16`, `float32`, `float64`, `half`, `full`, "
    "or the full name of another floating dtype of JAX, such as `float8_e4m3fn`"
)


def half_dtype() -> np.dtype:
    """Returns the 16-bit dtype for the default backend, as in jmp.

    Returns:
        bfloat16 on a TPU, whose matrix units do not support float16, and float16 on other backends. The call
        initializes the backend.

    Examples:
        >>> import jmp_amp.compat.jmp as jmp
        >>> jmp.half_dtype()  # on a CPU or a GPU
        dtype('float16')
    """
    return jnp.dtype(jnp.bfloat16 if jax.default_backend() == "tpu" else jnp.float16)


def parse_dtype(value: DTypeLike, field: str = "dtype") -> np.dtype:
    """Returns the floating dtype that a string or a dtype-like object denotes.

    Args:
        value: a string whose digits count bits (`"f16"` is float16, whereas numpy reads it as 16 bytes), or any object
            that numpy accepts as a dtype: `jnp.float16`, `np.dtype("float16")`, an array's `dtype`. The byte order is
            ignored.
        field: the name of the argument, used in error messages.

    Raises:
        ValueError: `value` is a string or a dtype, but not a floating dtype of JAX.
        TypeError: `value` is neither a string nor a dtype.
    """
    # Check the type first: `np.dtype("float16") == "half"` is True.
    if isinstance(value, str) and value == "half":
        return half_dtype()
    name = _ALIASES.get(value, value) if isinstance(value, str) else _numpy_name(value, field)
    if name not in _FLOATING_DTYPES:
        raise ValueError(f"`{field}` must be a floating dtype, got `{shorten(name)}`; allowed: {ALLOWED_DTYPES}")
    return _FLOATING_DTYPES[name]


def _numpy_name(value: DTypeLike, field: str) -> str:
    try:
        if value is not None:  # numpy reads None as float64
            return np.dtype(value).name
    except (TypeError, ValueError):
        pass
    raise TypeError(
        f"`{field}` must be a floating dtype, got `{quote(value)}` of type `{type(value).__name__}`; "
        f"allowed: a dtype such as `jnp.float16`, or a string: {ALLOWED_DTYPES}"
    )


class Float8(NamedTuple):
    """The float8 dtypes of products with a weight, and the sizes from which such a product gains by them.

    A product of `rows x terms` with a `terms x columns` weight is about as fast as in 16 bits at 1024 x 1024 and slower
    below: its operands are read twice more, for the scale and for the cast.

    Attributes:
        operands: the dtype of the operands.
        cotangents: the dtype of the cotangent, in the products that compute the gradients.
        multiple: the number that the three sizes of a ragged product must be multiples of.
        min_rows: the least number of rows.
        min_size: the least number of terms, and of columns.
        min_weight: the least number of elements of the weight.
    """

    operands: np.dtype = jnp.dtype(jnp.float8_e4m3fn)
    cotangents: np.dtype = jnp.dtype(jnp.float8_e5m2)
    multiple: int = 16
    min_rows: int = 512
    min_size: int = 1024
    min_weight: int = 2048 * 2048


@dataclasses.dataclass(frozen=True, eq=False)
class Format:
    """The dtypes that the ops of a region compute in.

    Attributes:
        name: its name in `autocast(dtype=)`, in `precision` and in reports.
        dtype: the dtype that products and convolutions read and return, and that the ops after them follow.
        float8: how products with a weight read their operands instead; None for a format without float8.
        precision: the `precision` of float32 products that ask for none; None leaves them.
    """

    name: str
    dtype: np.dtype
    float8: Float8 | None = None
    precision: Any = None

    def __reduce__(self) -> Any:
        """Is pickled by name, since formats are compared by identity."""
        return _named, (self.name, self is FORMATS[self.name])

    @property
    def is_low(self) -> bool:
        """Whether ops are cast at all; float32 runs each as it was traced."""
        return self.dtype != FLOAT32

    @property
    def needs_loss_scale(self) -> bool:
        """Whether its dtype has a smaller range than float32, so that gradients underflow without a loss scale."""
        return bool(jnp.finfo(self.dtype).maxexp < jnp.finfo(FLOAT32).maxexp)

    @functools.cached_property
    def largest(self) -> float:
        """The largest number of its dtype."""
        return float(jnp.finfo(self.dtype).max)

    @functools.cached_property
    def at_any_size(self) -> "Format":
        """The format of a region or a rule that asks for float8: it holds for products of every size."""
        if self.float8 is None:
            return self
        return dataclasses.replace(self, float8=self.float8._replace(min_rows=0, min_size=0, min_weight=0))

    def takes(self, dtypes: Collection[Any]) -> bool:
        """Whether a product of operands and results that were traced in these dtypes runs in this format.

        One with another floating or complex dtype does not, since the user chose that dtype.
        """
        return all(dtype in (FLOAT32, self.dtype) for dtype in dtypes if jnp.issubdtype(dtype, np.inexact))


_FLOAT8 = Format("float8", jnp.dtype("bfloat16"), Float8())

# By the names that `autocast`, `precision`, rules, policies and `initialize` take.
FORMATS = {
    "float16": Format("float16", jnp.dtype("float16")),
    "bfloat16": Format("bfloat16", jnp.dtype("bfloat16")),
    "float32": Format("float32", FLOAT32),
    "float8": _FLOAT8,
    "float8_bfloat16": _FLOAT8,
    "float8_float16": Format("float8_float16", jnp.dtype("float16"), Float8()),
    # float32 products on matrix units: as several products of bfloat16 parts (Henry, Tang and Heinecke, Leveraging the
    # bfloat16 artificial intelligence datatype for higher-precision computations, 2019), or with 10 bits of mantissa.
    "bfloat16_x3": Format("bfloat16_x3", FLOAT32, precision=lax.DotAlgorithmPreset.BF16_BF16_F32_X3),
    "bfloat16_x6": Format("bfloat16_x6", FLOAT32, precision=lax.DotAlgorithmPreset.BF16_BF16_F32_X6),
    "tensorfloat32": Format("tensorfloat32", FLOAT32, precision=(lax.Precision.HIGH,) * 2),
}


def _named(name: str, is_own: bool) -> Format:
    form = FORMATS[name]
    return form if is_own else form.at_any_size


# The format inside an equation that can only run as it was traced. Marks have no effect there.
AS_TRACED = Format("as traced", FLOAT32)


def parse_format(value: Any) -> Format:
    """Returns the format of a dtype or of its name.

    Raises:
        ValueError: autocast does not compute in it.
    """
    name = str(value)  # that of a format is no dtype
    with contextlib.suppress(ValueError):
        name = parse_dtype(value).name
    if name not in FORMATS:
        cure = '; "float8" chooses among the float8 dtypes' if name.startswith("float8") else ""
        raise ValueError(f"autocast computes in {', '.join(FORMATS)}, got {shorten(name)}{cure}")
    return FORMATS[name]


def parse_compute_dtype(value: DTypeLike, format_name: str = "") -> tuple[np.dtype, str]:
    """Returns the dtype that a policy casts to, and the name of the format that autocast computes in.

    Args:
        value: the name of a format, or any floating dtype, which autocast may not compute in.
        format_name: the format for a dtype that is not a name; ignored if it has another dtype.
    """
    if isinstance(value, str) and value in FORMATS:
        return FORMATS[value].dtype, FORMATS[value].name
    try:
        dtype = parse_dtype(value, "compute_dtype")
    except ValueError as error:
        raise ValueError(f"{error}, or a format: {', '.join(FORMATS)}") from None
    form = FORMATS.get(format_name)
    return dtype, form.name if form is not None and form.dtype == dtype else dtype.name
