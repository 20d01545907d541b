"""Formats: the dtypes that the ops of a region compute in."""

import dataclasses
import functools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_amp._policy import NAMED_POLICIES, parse_dtype

FLOAT32 = np.dtype(np.float32)


class Float8(NamedTuple):
    """The float8 dtypes of products with a weight, and the sizes from which such a product gains by them.

    A product of `rows x terms` with a `terms x columns` weight is about as fast as in 16 bits at 1024 x 1024 and slower
    below: its operands are read twice more, for the scale and for the cast.

    Attributes:
        operands: the dtype of the operands.
        cotangents: the dtype of the cotangent, in the products that compute the gradients.
        multiple: the number that each of the three sizes must be a multiple of.
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
    """

    name: str
    dtype: np.dtype
    float8: Float8 | None = None

    @property
    def is_low(self) -> bool:
        """Whether ops are cast at all; float32 runs each as it was traced."""
        return self.dtype != FLOAT32

    @property
    def operands(self) -> tuple[np.dtype, ...]:
        """The dtypes in which products may read their operands."""
        return (self.dtype,) if self.float8 is None else (self.dtype, self.float8.operands)

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

        One with another floating dtype does not, since the user chose that dtype.
        """
        return all(dtype in (FLOAT32, self.dtype) for dtype in dtypes if jnp.issubdtype(dtype, np.floating))


_FLOAT8 = Format("float8", jnp.dtype("bfloat16"), Float8())

FORMATS: Mapping[str, Format] = {
    "float16": Format("float16", jnp.dtype("float16")),
    "bfloat16": Format("bfloat16", jnp.dtype("bfloat16")),
    "float32": Format("float32", FLOAT32),
    "float8": _FLOAT8,
    "float8_bfloat16": _FLOAT8,
    "float8_float16": Format("float8_float16", jnp.dtype("float16"), Float8()),
}

# The format inside an equation that can only run as it was traced. Marks have no effect there.
AS_TRACED = Format("as traced", FLOAT32)


def parse_format(value: Any) -> Format:
    """Returns the format of a dtype or of its name.

    Raises:
        ValueError: autocast does not compute in it.
    """
    if isinstance(value, str) and value in FORMATS:
        return FORMATS[value]
    try:
        dtype = parse_dtype(value)
    except ValueError:
        dtype = None
    if dtype is None or dtype.name not in FORMATS:
        cure = f'; give the policy as `policy="{value}"`' if dtype is None and value in NAMED_POLICIES else ""
        if dtype is not None and dtype.name.startswith("float8"):
            cure = '; "float8" chooses among the float8 dtypes'
        raise ValueError(f"autocast computes in {', '.join(FORMATS)}, got {dtype or value}{cure}")
    return FORMATS[dtype.name]
