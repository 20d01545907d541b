"""What is known of a value of a program before the program runs: all that the rules decide by."""

import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

FLOAT32 = np.dtype(np.float32)

# Constants are read on the host, at trace time, to see whether a low dtype holds them; above this size they are not.
_READABLE = 1024


class Origin(enum.IntEnum):
    """How a value came to be; the larger one wins where values meet."""

    UNCOMMITTED = 0  # an input or a constant with at most one dimension larger than 1: a bias, a scalar
    INPUT = 1  # any other input or constant
    COMPUTED = 2


class Value(NamedTuple):
    """What is known of a value.

    Attributes:
        dtype: the dtype that it will have, which may be lower than the traced one.
        native: the dtype of the data that it is made of, whatever was broadcast over it aside: a norm of float16
            activations is float32, but natively float16. None where it is `dtype`.
        origin: where it came from; `UNCOMMITTED` values do not widen the ops that read them.
        magnitudes: of a constant, the smallest that is not 0 and the largest finite one (infinity and 0 where there is
            no such element); None for what is not known to be constant.
        scalar: the value of a constant scalar, where it is known.
        exact: it has elements that the low dtype cannot hold (-1e9 where there was a mask), or is a logarithm: a
            product of it is a loss, not a layer, and stays float32.
        copied: there is a float32 copy of it.
        held: it is the same in all iterations of a loop, so that its cast need not be made again for the backward pass.
        features: of a product with a weight, how many of its last dimensions are the weight's; a bias has only them.
    """

    dtype: Any
    origin: Origin = Origin.COMPUTED
    magnitudes: tuple[float, float] | None = None
    native: Any = None
    scalar: float | None = None
    exact: bool = False
    copied: bool = False
    held: bool = False
    features: int = 0

    def as_native(self) -> "Value":
        """Returns the value as it would be in its native dtype."""
        return self._replace(dtype=self.native or self.dtype)

    def in_full(self) -> "Value":
        """Returns the value cast to float32."""
        return self._replace(dtype=FLOAT32, native=self.native or self.dtype)

    def fits(self, dtype: np.dtype) -> bool:
        """Whether `dtype` holds this constant as normal numbers: `inf` for what is finite, or 0, would be wrong."""
        if self.magnitudes is None:
            return True
        return not self.exceeds(dtype) and self.magnitudes[0] >= float(jax.numpy.finfo(dtype).tiny)

    def exceeds(self, dtype: np.dtype) -> bool:
        """Whether this constant has finite elements that are too large for `dtype`."""
        return self.magnitudes is not None and self.magnitudes[1] > float(jax.numpy.finfo(dtype).max)


def origin_of_input(shape: tuple[int, ...] | None) -> Origin:
    """The origin of an input or constant of this shape."""
    # `!= 1`, because a symbolic dimension can be compared for equality only.
    return Origin.UNCOMMITTED if sum(n != 1 for n in shape or ()) <= 1 else Origin.INPUT


def constant(x: Any) -> Value:
    """Describes a constant of the program; a traced one is an input whose value is not known."""
    aval = jax.typeof(x)
    origin = origin_of_input(aval.shape)
    if origin is not Origin.UNCOMMITTED or not _is_known(x) or aval.size > _READABLE:
        return Value(aval.dtype, origin)
    if aval.dtype != FLOAT32:
        is_number = aval.shape == () and jax.numpy.issubdtype(aval.dtype, np.number)
        return Value(aval.dtype, origin, scalar=np.asarray(x).item() if is_number else None)
    known = np.asarray(x)
    return Value(aval.dtype, origin, _magnitudes(known), scalar=known.item() if known.shape == () else None)


def folded(value: Value, scalar: Any) -> Value:
    """Returns the value with a known scalar."""
    return value._replace(magnitudes=_magnitudes(np.asarray(scalar, np.float32)), scalar=float(scalar))


def _magnitudes(x: np.ndarray) -> tuple[float, float]:
    size = np.abs(x)
    size = size[np.isfinite(size) & (size > 0)]
    return float(size.min(initial=np.inf)), float(size.max(initial=0))


def merged_magnitudes(values: Sequence[Value]) -> tuple[float, float] | None:
    """Returns the magnitudes of a value made of the elements of `values`, None where one is not known."""
    known = [value.magnitudes for value in values if value.magnitudes is not None]
    if not known or len(known) < len(values):
        return None
    return min(small for small, _ in known), max(large for _, large in known)


def _is_known(x: Any) -> bool:
    """Not a traced value, not spread over processes, and not a mutable reference."""
    if isinstance(x, jax.Array):
        return not isinstance(x, jax.core.Tracer) and x.is_fully_addressable
    return isinstance(x, np.ndarray | np.generic | bool | int | float | complex)


def widest(dtypes: Iterable[Any]) -> np.dtype:
    """Returns the dtype that holds all of `dtypes`, each float32 or one of the two 16-bit dtypes."""
    different = set(dtypes)
    return different.pop() if len(different) == 1 else FLOAT32


def common_dtype(values: Sequence[Value]) -> np.dtype:
    """Returns the dtype in which `values` meet: the widest committed one, float32 where it cannot hold a constant."""
    committed = [value.dtype for value in values if value.origin is not Origin.UNCOMMITTED]
    dtype = widest(committed) if committed else FLOAT32
    return dtype if all(value.fits(dtype) for value in values) else FLOAT32


def join(a: Value, b: Value) -> Value:
    """Returns what is known of a value that is either `a` or `b`: a branch's result, or a loop's carry."""
    if a.origin is b.origin is Origin.UNCOMMITTED:
        return a if a == b else Value(widest((a.dtype, b.dtype)), Origin.UNCOMMITTED, merged_magnitudes((a, b)))
    return Value(common_dtype((a, b)), max(a.origin, b.origin), exact=a.exact or b.exact)
