"""An array and the facts that an evaluation tracks about it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jmp_amp.debug._node import Node
from jmp_amp.debug._place import Place, PlaceId
from jmp_amp.debug._values import is_inexact_array


class Cell(NamedTuple):
    """An array and the facts that an evaluation tracks about it.

    Attributes:
        value: the array.
        has_nan: whether the array contains NaN.
        has_inf: whether the array contains an infinity.
        n_zeros: the number of zeros in the array.
        underflow: the place of an upstream float16 op that returned more zeros than it returns in float32; None if
            there is no such op, or no zero in the array.
        node: where the array stands in the dataflow.
        causes: the ids of the upstream ops and arguments that introduced its non-finite values; empty if they come
            from constants alone, or from -inf in an argument.
    """

    value: Any
    has_nan: bool = False
    has_inf: bool = False
    n_zeros: int = 0
    underflow: Place | None = None
    node: Node = Node()
    causes: frozenset[PlaceId] = frozenset()

    @property
    def is_finite(self) -> bool:
        """Whether all values of the array are finite."""
        return not (self.has_nan or self.has_inf)


def cell_of(
    value: Any, operands: Sequence[Cell] = (), eqn: JaxprEqn | None = None, *, is_constant: bool = False
) -> Cell:
    """Returns the cell of an array that the op of `eqn`, or a copy, computed from `operands`."""
    is_constant = is_constant or (bool(operands) and all(x.node.is_constant for x in operands))
    read = tuple(x.node for x in operands)
    if not is_inexact_array(value):
        return Cell(value, node=Node("", eqn, read, is_constant))
    counts, extremes = _summary(value)
    n_nans, n_infs, n_zeros = np.asarray(counts).tolist()
    low, high = np.asarray(extremes).tolist()
    node = Node(value.dtype.name, eqn, read, is_constant, low, high, n_zeros)
    underflow = next((x.underflow for x in operands if x.underflow), None) if n_zeros else None
    causes = frozenset[PlaceId]()
    if n_nans or n_infs:
        causes = causes.union(*(x.causes for x in operands if not x.is_finite))
    return Cell(value, n_nans > 0, n_infs > 0, n_zeros, underflow, node, causes)


@jax.jit
def _summary(x: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of NaNs, infinities and zeros, and the smallest and the largest finite value."""
    is_zero, is_finite = x == jnp.zeros((), x.dtype), jnp.isfinite(x)
    counts = [jnp.sum(flags, dtype=jnp.int32) for flags in (jnp.isnan(x), jnp.isinf(x), is_zero)]
    # float32 holds the values of all shorter dtypes; of float64 a rounded value is enough here.
    real, inf = jnp.real(x).astype(jnp.float32), jnp.float32(jnp.inf)
    low = jnp.min(jnp.where(is_finite, real, inf), initial=inf)
    high = jnp.max(jnp.where(is_finite, real, -inf), initial=-inf)
    return jnp.stack(counts), jnp.stack([low, high])
