"""An array and the facts that an evaluation tracks about it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

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
        is_constant: whether the array was computed from literals alone.
        causes: the ids of the upstream ops and arguments that introduced its non-finite values; empty if they come
            from constants alone, or from -inf in an argument.
    """

    value: Any
    has_nan: bool = False
    has_inf: bool = False
    n_zeros: int = 0
    underflow: Place | None = None
    is_constant: bool = False
    causes: frozenset[PlaceId] = frozenset()

    @property
    def is_finite(self) -> bool:
        """Whether all values of the array are finite."""
        return not (self.has_nan or self.has_inf)


def cell_of(value: Any, operands: Sequence[Cell] = (), *, is_constant: bool = False) -> Cell:
    """Returns the cell of an array that was computed from `operands`."""
    is_constant = is_constant or (bool(operands) and all(x.is_constant for x in operands))
    if not is_inexact_array(value):
        return Cell(value, is_constant=is_constant)
    n_nans, n_infs, n_zeros = np.asarray(_counts(value)).tolist()
    underflow = next((x.underflow for x in operands if x.underflow), None) if n_zeros else None
    causes = frozenset[PlaceId]()
    if n_nans or n_infs:
        causes = causes.union(*(x.causes for x in operands if not x.is_finite))
    return Cell(value, n_nans > 0, n_infs > 0, n_zeros, underflow, is_constant, causes)


@jax.jit
def _counts(x: Any) -> jax.Array:
    is_zero = x == jnp.zeros((), x.dtype)
    return jnp.stack([jnp.sum(flags, dtype=jnp.int32) for flags in (jnp.isnan(x), jnp.isinf(x), is_zero)])
