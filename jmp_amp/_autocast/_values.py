"""Describes the values of a program before it runs: the facts that the rules decide by."""

import enum
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr

from jmp_amp import _jaxpr as jx
from jmp_amp._formats import FLOAT32
from jmp_amp._ops import Axes, Demand, varying


class Origin(enum.IntEnum):
    """Where a value comes from; where several values meet, the largest counts."""

    SCALAR = 0  # an input or constant of one element, or arithmetic on those; does not widen an array
    INPUT = 1  # another input or constant, moved or not
    PRODUCT = 2  # a product of matrices, moved or not
    SUM = 3  # a sum of products and biases
    COMPUTED = 4

    @property
    def takes_bias(self) -> bool:
        """Whether an input that is added to it may be a bias: it is a product, or a sum of products and biases."""
        return self in (Origin.PRODUCT, Origin.SUM)


class Stream:
    """How a residual stream is read; several are joined by `|`, as those of `Demand`."""

    NONE = 0
    RETURNED = 1 << 0  # by the caller of the program, itself or in a sum, so that a sum is not stored in low precision
    RESNET = 1 << 1  # by a product, as the stream of a ResNet, so that a sum of low-precision data is
    ELEMENTS = 1 << 2  # divided by a deviation
    STATISTIC = 1 << 3  # in the sums that a deviation is made of
    NORM = ELEMENTS | STATISTIC  # by a norm, so that a sum of layer outputs is, inputs of the program included


class Reads:
    """In which dtype a value is read, as plain integers; where it has several readers, the smallest counts."""

    LOW = 0  # in low precision, if it is that
    STORED = 1  # in float32, and from memory, as by the body of a loop: computed in float32, it takes more memory
    FUSED = 2  # in float32, by an op that fuses with the one that computes it
    UNREAD = 3


class Use(NamedTuple):
    """How a result of a jaxpr is used.

    Attributes:
        demand: what its readers demand.
        stream: as which residual stream they read it.
        reads: in which dtype they read it.
    """

    demand: int = Demand.ANY
    stream: int = Stream.NONE
    reads: int = Reads.LOW


class Squares(enum.IntEnum):
    """How a value is made of squares. The terms of |x|^2 + |y|^2 - 2 x.y cancel where x is close to y."""

    NO = 0
    SQUARE = 1  # each element is a square: `x * x`
    SUM = 2  # each element is a sum of squares: `x2 = jnp.sum(x * x, -1)`
    NORM = 3  # each element is the square root of a sum of squares, or its reciprocal: `jnp.sqrt(x2)`
    GRAM = 4  # the product of a matrix with itself, whose diagonal holds sums of squares: `x @ x.T`


class Moment(enum.IntEnum):
    """How a value is made of products. A mean of squares less the square of a mean cancels where x varies little."""

    NO = 0
    PAIR = 1  # a multiplication of two arrays: `x * y`
    PRODUCT = 2  # a product of matrices, or a convolution: `blur(x)`
    SECOND = 3  # such a product of a multiplication: `blur(x * y)`
    SQUARED = 4  # a multiplication of two such products: `blur(x) * blur(y)`


class ValueFacts(NamedTuple):
    """What is known of a value: nothing, by default.

    Attributes:
        scalar: the value of a constant scalar in float32, however the program writes it.
        least: the smallest nonzero magnitude of the elements of a float32 constant, moved or not; of another value, an
            estimate of its largest magnitude where constants make that small: 1e-9 for `x * 1e-9`.
        low, high: estimates of the largest magnitudes of its negative and its positive elements; inputs of the program
            count as 1, constants as they are. In `q * 1e3 * 1e4` both are 1e7. In `jnp.where(mask, q, -1e9)` the first
            is 1e9, and in a maximum over its rows 1.
        is_log: whether it is a logarithm, as in `-labels @ jax.nn.log_softmax(logits).T`, which is a loss.
        squares: how it is made of squares.
        moment: how it is made of products.
        is_constant: whether it is made of constants only, as `jnp.linspace(-20, 20, 255)`.
        is_whole: whether it holds whole numbers, as `jax.nn.one_hot(ids, n)`.
        is_solution: whether it was made of what a decomposition or a solver returns, and nothing bounds it, as the
            residual `b - a @ jnp.linalg.solve(a, b)`.
        is_squared: whether its squares are summed, and others added to the sum, as those of `x` in `x.x - 2 x.y`.
        carry: what is demanded of the next value of the carry that it is: `Demand.TERM` of an accumulator, moved or
            not, as `h` in `h + x`; `Demand.RECURRENCE` of a state that the loop replaces with products and sums of
            itself, and of what is made of it: `x` in `a @ x`; `Demand.ANY` of another function of a carry.
        multiplies_slices: whether it was made by multiplying parts of one array, as `gate[:-1] * gate[1:]` in an
            associative scan.
        adds_matrix: whether it is the sum of a constant matrix and others, as `3 * jnp.eye(n) - z @ y`.
    """

    scalar: float | None = None
    least: float = math.inf
    low: float = 1.0
    high: float = 1.0
    is_log: bool = False
    squares: Squares = Squares.NO
    moment: Moment = Moment.NO
    is_constant: bool = False
    is_whole: bool = False
    is_solution: bool = False
    is_squared: bool = False
    carry: int = Demand.NONE
    multiplies_slices: bool = False
    adds_matrix: bool = False

    @property
    def size(self) -> float:
        """An estimate of its largest magnitude."""
        return self.low if self.low > self.high else self.high

    def leaves(self, dtype: np.dtype) -> bool:
        """Whether `dtype` may not hold it: as inf, a constant as subnormal numbers, or a scaled value as 0."""
        largest, normal, subnormal = _limits(dtype)
        size, least = (self.size, normal) if self.is_constant else (self.least, subnormal)
        return self.low > largest or self.high > largest or self.least <= size < least

    def is_rounded(self, dtype: np.dtype, divides: bool) -> bool:
        """Whether it is one number, repeated or not, that `dtype` does not hold, as 287 in bfloat16.

        A divisor is held if its reciprocal is, by which XLA multiplies: in `h / 3` none is.
        """
        number = 1 / self.size if divides and self.size else self.size
        return self.is_constant and self.least == self.size and number != float(np.float32(number).astype(dtype))


@functools.cache
def _limits(dtype: np.dtype) -> tuple[float, float, float]:
    """Returns the largest number of a dtype, its smallest normal one, and its smallest one.

    An integer is held by its own dtype, whichever that is.
    """
    if not jnp.issubdtype(dtype, np.inexact):
        return math.inf, 0.0, 0.0
    info = jnp.finfo(dtype)
    return float(info.max), float(info.tiny), float(info.smallest_subnormal)


NOTHING = ValueFacts()


def facts_of(x: np.ndarray) -> ValueFacts:
    """Returns what is known of a constant, from its elements, or some of them; they are float32."""
    read = x[np.isfinite(x) & (x != 0)]
    least, low, high = map(float, (np.abs(read).min(initial=np.inf), -read.min(initial=0), read.max(initial=0)))
    is_whole = bool(np.all(x == np.rint(x)))
    return ValueFacts(None if x.shape else x.item(), least, low, high, is_constant=True, is_whole=is_whole)


class Value(NamedTuple):
    """A value before the program runs.

    Attributes:
        dtype: the dtype that it will have, which may be lower than the one that it was traced in.
        data_dtype: the dtype of the data that it is made of: a norm of float16 activations is float32, its data are
            float16. Operands that were broadcast do not count. None if it is `dtype`.
        stream_dtype: its data dtype if the inputs of the program, such as embeddings and positions, count as
            low-precision data. None if it is `dtype`, or if no sum is a part of a residual stream.
        origin: where it comes from.
        axes: for an `INPUT`, the axes along which it varies; for a `PRODUCT` or a `SUM`, those along which it varies
            with the operand that is not the weight, one set for each operand that may be the weight. An input that
            varies along none of these is a bias.
        filled: it is an array of one repeated number, such as `jnp.zeros(shape)`. It does not widen the values that
            an op selects, but it widens sums and products, as in JAX's promotion.
        has_float32_copy: another equation reads it in float32.
        known: the facts that do not depend on dtypes.
        save_cast: it is the same in all iterations of a loop, which casts it once, and `jax.checkpoint` saves its cast.
    """

    dtype: Any
    origin: Origin = Origin.COMPUTED
    data_dtype: Any = None
    stream_dtype: Any = None
    has_float32_copy: bool = False
    save_cast: bool = False
    axes: tuple[Axes, ...] = ()
    filled: bool = False
    known: ValueFacts = NOTHING

    @property
    def is_half(self) -> bool:
        """Whether it is a floating value in 16 bits."""
        return jx.is_floating(self) and self.dtype.itemsize == 2

    def as_data(self) -> "Value":
        """Returns the value as it would be in the dtype of its data."""
        return self._replace(dtype=self.data_dtype or self.dtype)

    def as_float32(self) -> "Value":
        """Returns the value cast to float32."""
        return self if self.dtype == FLOAT32 else self._replace(dtype=FLOAT32, data_dtype=self.data_dtype or self.dtype)

    def fits(self, dtype: np.dtype) -> bool:
        """Whether `dtype` can hold this constant: not as inf, as 0 or subnormal, nor 1 - 1e-6 as 1."""
        known = self.known
        if known.is_constant and (self.overflows(dtype) or known.least < _limits(dtype)[1]):
            return False
        return known.scalar is None or abs(known.scalar) == 1 or abs(np.float32(known.scalar).astype(dtype)) != 1

    def overflows(self, dtype: np.dtype) -> bool:
        """Whether it may have elements that are too large for `dtype`, as -1e9 in a mask."""
        return self.known.size > _limits(dtype)[0]


def unknown(aval: Any) -> Value:
    """Describes an input of the program."""
    dtype, axes = jx.dtype_of(aval), varying(getattr(aval, "shape", None))
    return Value(dtype, Origin.INPUT, axes=(axes,)) if axes else Value(dtype, Origin.SCALAR)


def constant(x: Any) -> Value:
    """Describes a constant of the program. A traced one counts as an input."""
    if isinstance(x, _ON_HOST) and getattr(x, "shape", ()) == ():  # as literals are
        return _number(x.item() if hasattr(x, "item") else x, getattr(x, "dtype", None) or jnp.result_type(x))
    is_kept = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)  # an array of NumPy may change
    return _of_arrays(x, (), lambda: _constant(x)) if is_kept else _constant(x)


def constants(jaxpr: Jaxpr, consts: Sequence[Any]) -> tuple[Value, ...]:
    """Describes the constants of an open jaxpr, and reads them only once."""
    return _constants(jaxpr, tuple(map(id, consts)), lambda: (consts, tuple(map(constant, consts))))[1]


_ON_HOST = bool, int, float, complex, np.ndarray, np.generic
_constants, _of_arrays = jx.Cache(), jx.Cache()


@functools.lru_cache(maxsize=1024)
def _number(x: Any, dtype: Any) -> Value:
    return _constant(np.asarray(x, dtype))


def _constant(x: Any) -> Value:
    read = _elements(x)
    return unknown(jax.typeof(x))._replace(known=NOTHING if read is None else facts_of(read))


# Constants of up to so many elements are read, at trace time, to find out whether a low dtype can hold them: vectors,
# which are often biases and then widen nothing, and other arrays. Larger ones are weights or masks.
_READABLE, _READABLE_VECTOR = 2**13, 2**18
_NUMBERS_IN_MASK = 8


def _elements(x: Any) -> np.ndarray | None:
    """Returns the elements of a constant as float32, of complex ones the magnitudes; None if not known, or a weight's.

    Of a large array of NumPy, every n-th element is read. If these are a few different numbers, it is a mask. A large
    array of JAX is not read, since it may have to be copied from a device: as an argument of the program, it makes the
    sums and choices that read it float32.
    """
    is_array, aval = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer), jax.typeof(x)
    is_known = x.is_fully_addressable if is_array else isinstance(x, _ON_HOST)  # not by several processes
    if not is_known or not jnp.issubdtype(aval.dtype, np.number):
        return None
    is_small = aval.size <= (_READABLE_VECTOR if len(varying(aval.shape)) < 2 else _READABLE)
    if is_array and not is_small:
        return None
    read = np.asarray(x) if is_small else np.unique(np.asarray(x).flat[:: aval.size // _READABLE])
    is_read = is_small or read.size <= _NUMBERS_IN_MASK
    return (np.abs(read) if np.iscomplexobj(read) else read).astype(np.float32) if is_read else None


def widest(dtypes: Iterable[Any]) -> np.dtype:
    """Returns the dtype that can hold all `dtypes`: theirs if they are equal, else float32."""
    different = set(dtypes)
    return different.pop() if len(different) == 1 else FLOAT32


def common_dtype(values: Sequence[Value]) -> np.dtype:
    """Returns the widest dtype of `values`, without scalars; float32 if that cannot hold a constant among them."""
    arrays = [value.dtype for value in values if value.origin is not Origin.SCALAR]
    dtype = widest(arrays) if arrays else FLOAT32
    return dtype if all(value.fits(dtype) for value in values) else FLOAT32


def join(a: Value, b: Value) -> Value:
    """Describes a value that is either `a` or `b`: the result of branches, or the carry of a loop."""
    origin = max(a.origin, b.origin)
    if origin is Origin.SCALAR:
        merged = Value(widest((a.dtype, b.dtype)), origin, filled=a.filled or b.filled)
        return a if a._replace(known=b.known) == b else merged
    axes: tuple[Axes, ...] = ()
    if origin is Origin.INPUT:
        axes = (frozenset[int]().union(*a.axes, *b.axes),)
    elif origin.takes_bias:
        origin, axes = (origin, a.axes) if a.axes == b.axes else (Origin.COMPUTED, ())
    return Value(common_dtype((a, b)), origin, axes=axes)
