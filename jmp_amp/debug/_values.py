"""A summary of the values of an array."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Values:
    """A summary of the values of an array. `str` formats it as `float16[4,8] from -3 to 410, 2 of 32 inf`.

    Attributes:
        dtype: the name of the dtype.
        shape: the shape.
        min: the smallest finite value, of the real part if complex; None if no value is finite.
        max: the largest finite value, likewise.
        zeros: the number of zeros.
        infs: the number of infinities.
        nans: the number of NaNs.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> amp.debug.first_nonfinite(lambda x: jnp.log(x - 1))(jnp.ones(2)).operands[0]
        Values(dtype='float32', shape=(2,), min=0.0, max=0.0, zeros=2, infs=0, nans=0)
    """

    dtype: str
    shape: tuple[int, ...]
    min: float | None
    max: float | None
    zeros: int
    infs: int
    nans: int

    def __str__(self) -> str:
        size = int(np.prod(self.shape))
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.min is not None:
            text += f" = {self.min:.4g}" if self.min == self.max else f" from {self.min:.4g} to {self.max:.4g}"
        for count, name in ((self.infs, "inf"), (self.nans, "NaN")):
            if count:
                text += f", {count} of {size} {name}"
        return text


def values_of(x: Any) -> Values:
    """Returns the summary of an array, which is copied to the host."""
    array = np.asarray(x)
    finite = array[np.isfinite(array)].real
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
    infs, nans = int(np.isinf(array).sum()), int(np.isnan(array).sum())
    return Values(array.dtype.name, array.shape, low, high, int((array == 0).sum()), infs, nans)


def is_inexact_array(x: Any) -> bool:
    """Returns whether `x` is an array of a floating or complex dtype; a reference to a mutable array is not."""
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)


def inexact_arrays(values: Iterable[Any]) -> list[Any]:
    """Returns the arrays of floating and complex dtypes among `values`."""
    return list(filter(is_inexact_array, values))


def nonfinite_array(values: Iterable[Any]) -> Any:
    """Returns the first array among `values` that contains NaN or an infinity."""
    return next(x for x in inexact_arrays(values) if not np.isfinite(np.asarray(x)).all())
