"""What is known of a value of a program before the program runs: all that the rules decide by."""

import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp_amp._autocast._axes import Axes, varying
from jmp_amp._autocast._format import FLOAT32

# Constants are read on the host, at trace time, to see whether a low dtype holds them; above 64 MB they are not.
_READABLE = 2**24


class Origin(enum.IntEnum):
    """How a value came to be; the larger one wins where values meet."""

    SCALAR = 0  # an input or constant of one element, or arithmetic of such: it does not widen an array
    INPUT = 1  # any other input or constant, moved or not
    PRODUCT = 2  # a product of matrices, moved or not, or a sum of such and of their biases
    COMPUTED = 3


class Reads(enum.IntEnum):
    """How all that reads a value reads it."""

    ANY = 0
    FULL = 1  # in float32
    ANGLE = 2  # in float32, as an angle; so is the product that it comes from, and in the next two ways
    DISTANCE = 3  # as a term of a squared distance
    MATRIX = 4  # to be decomposed, or by a solver
    TRACED = 5  # to decide when a loop ends: what it depends on runs as it was traced


class Squares(enum.StrEnum):
    """What a value is to the squares of which it is made."""

    SQUARE = enum.auto()  # each element is one
    SUM = enum.auto()  # each element is a sum of them
    NORM = enum.auto()  # each element is the square root of such a sum
    GRAM = enum.auto()  # a product of a matrix with itself: there are such sums on its diagonal


class Value(NamedTuple):
    """What is known of a value.

    Attributes:
        dtype: the dtype that it will have, which may be lower than the traced one.
        native: the dtype of the data that it is made of, whatever was broadcast over it aside: a norm of float16
            activations is float32, but natively float16. None where it is `dtype`.
        origin: where it came from.
        axes: of an `INPUT`, the axes along which it varies, broadcast axes aside. Of a `PRODUCT`, those along which
            it varies with the operand that is not the weight: an input that varies along none of them is a bias. There
            is one set for each operand that may be the weight.
        filled: it is an array that holds one number throughout, such as `jnp.zeros(shape)`. Where values are chosen
            it does not widen them, but what is added to it, or multiplied with it, is float32, as by JAX's promotion.
        magnitudes: of a constant, the smallest that is not 0 and the largest finite one (infinity and 0 where there is
            no such element); None for what is not known to be constant.
        scalar: the value of a constant scalar, where it is known.
        keep_float32: it has elements that the low dtype cannot hold (-1e9 where there was a mask), or is a logarithm:
            a product of it is a loss, not a layer, and stays float32.
        has_float32_copy: another equation reads it in float32.
        adds_up: it is a carry of a loop that adds up, as it enters the body, moved or not.
        squares: it is made of squares.
        save_cast: it is the same in all iterations of a loop, so its cast is saved for the backward pass.
    """

    dtype: Any
    origin: Origin = Origin.COMPUTED
    magnitudes: tuple[float, float] | None = None
    native: Any = None
    scalar: float | None = None
    keep_float32: bool = False
    has_float32_copy: bool = False
    save_cast: bool = False
    adds_up: bool = False
    axes: tuple[Axes, ...] = ()
    filled: bool = False
    squares: Squares | None = None

    def as_native(self) -> "Value":
        """Returns the value as it would be in its native dtype."""
        return self._replace(dtype=self.native or self.dtype)

    def in_full(self) -> "Value":
        """Returns the value cast to float32."""
        return self._replace(dtype=FLOAT32, native=self.native or self.dtype)

    def fits(self, dtype: np.dtype) -> bool:
        """Whether `dtype` holds this constant: `inf` for what is finite, 0, or 1 for 1 - 1e-6, would be wrong."""
        if self.magnitudes is None:
            return True
        if self.exceeds(dtype) or self.magnitudes[0] < float(jax.numpy.finfo(dtype).tiny):
            return False
        return self.scalar is None or abs(self.scalar) == 1 or abs(float(np.float32(self.scalar).astype(dtype))) != 1

    def exceeds(self, dtype: np.dtype) -> bool:
        """Whether this constant has finite elements that are too large for `dtype`."""
        return self.magnitudes is not None and self.magnitudes[1] > float(jax.numpy.finfo(dtype).max)

    def is_lost(self, dtype: np.dtype) -> bool:
        """Whether `dtype` holds this constant as `inf` somewhere, or nowhere as a normal number."""
        return self.exceeds(dtype) or (
            self.magnitudes is not None and 0 < self.magnitudes[1] < float(jax.numpy.finfo(dtype).tiny)
        )


def unknown(dtype: Any, shape: tuple[Any, ...]) -> Value:
    """Describes an input of the program."""
    axes = varying(shape)
    return Value(dtype, Origin.INPUT, axes=(axes,)) if axes else Value(dtype, Origin.SCALAR)


def constant(x: Any) -> Value:
    """Describes a constant of the program; a traced one is an input whose value is not known."""
    aval = jax.typeof(x)
    value = unknown(aval.dtype, aval.shape)
    if not _is_known(x) or aval.size > _READABLE:
        return value
    if aval.dtype != FLOAT32:
        is_number = aval.shape == () and jax.numpy.issubdtype(aval.dtype, np.number)
        return value._replace(scalar=np.asarray(x).item() if is_number else None)
    known = np.asarray(x)
    return value._replace(magnitudes=_magnitudes(known), scalar=known.item() if known.shape == () else None)


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
    """Returns the dtype that holds all of `dtypes`, each float32 or the result dtype of a format."""
    different = set(dtypes)
    return different.pop() if len(different) == 1 else FLOAT32


def common_dtype(values: Sequence[Value]) -> np.dtype:
    """Returns the dtype in which `values` meet: the widest, scalars aside; float32 where it cannot hold a constant."""
    arrays = [value.dtype for value in values if value.origin is not Origin.SCALAR]
    dtype = widest(arrays) if arrays else FLOAT32
    return dtype if all(value.fits(dtype) for value in values) else FLOAT32


def join(a: Value, b: Value) -> Value:
    """Returns what is known of a value that is either `a` or `b`: a branch's result, or a loop's carry."""
    origin = max(a.origin, b.origin)
    if origin is Origin.SCALAR:
        filled = a.filled or b.filled
        return a if a == b else Value(widest((a.dtype, b.dtype)), origin, merged_magnitudes((a, b)), filled=filled)
    axes: tuple[Axes, ...] = ()
    if origin is Origin.INPUT:
        axes = (frozenset[int]().union(*a.axes, *b.axes),)
    elif origin is Origin.PRODUCT:
        origin, axes = (origin, a.axes) if a.axes == b.axes else (Origin.COMPUTED, ())
    return Value(common_dtype((a, b)), origin, keep_float32=a.keep_float32 or b.keep_float32, axes=axes)
