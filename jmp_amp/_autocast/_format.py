"""Formats: the dtypes that the ops of a region compute in."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_amp._policy import NAMED_POLICIES, parse_dtype

FLOAT32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class Format:
    """The dtypes that the ops of a region compute in.

    Attributes:
        name: its name in `autocast(dtype=)`, in `precision` and in reports.
        operands: the dtype that products and convolutions read.
        results: the dtype of their results, and of the ops that follow them.
        cotangents: the dtype in which their derivatives read the cotangents of their results.
    """

    name: str
    operands: np.dtype
    results: np.dtype
    cotangents: np.dtype

    @property
    def is_low(self) -> bool:
        """Whether ops are cast at all; float32 runs each as it was traced."""
        return self.results != FLOAT32

    @property
    def is_uniform(self) -> bool:
        """Whether operands, results and cotangents have one dtype, so that JAX's own derivatives have it too."""
        return self.operands == self.results == self.cotangents

    @property
    def needs_loss_scale(self) -> bool:
        """Whether its results have a smaller range than float32, so that gradients underflow without a loss scale."""
        return bool(jnp.finfo(self.results).maxexp < jnp.finfo(FLOAT32).maxexp)

    def takes(self, dtypes: Collection[Any]) -> bool:
        """Whether a product of operands and results that were traced in these dtypes runs in this format.

        One with another floating dtype does not, since the user chose that dtype.
        """
        return all(dtype in (FLOAT32, self.results) for dtype in dtypes if jnp.issubdtype(dtype, np.floating))


def _plain(name: str) -> Format:
    return Format(name, jnp.dtype(name), jnp.dtype(name), jnp.dtype(name))


FORMATS: Mapping[str, Format] = {name: _plain(name) for name in ("float16", "bfloat16", "float32")}

# The format inside an equation that can only run as it was traced. Marks have no effect there.
AS_TRACED = Format("as traced", FLOAT32, FLOAT32, FLOAT32)


def parse_format(value: Any) -> Format:
    """Returns the format of a dtype or of its name.

    Raises:
        ValueError: autocast does not compute in it.
    """
    try:
        dtype = parse_dtype(value)
    except ValueError:
        dtype = None
    if dtype is None or dtype.name not in FORMATS:
        cure = f'; give the policy as `policy="{value}"`' if dtype is None and value in NAMED_POLICIES else ""
        raise ValueError(f"autocast computes in {', '.join(FORMATS)}, got {dtype or value}{cure}")
    return FORMATS[dtype.name]
