"""A rule: everything that the planner knows of an op."""

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jmp_amp._autocast._axes import Axes


class OpClass(enum.StrEnum):
    """The dtype in which an op reads operands that were traced in float32."""

    LOWER = "lower"  # the compute dtype
    FULL = "full"  # float32
    PROMOTE = "promote"  # the widest of their dtypes, biases and scalars aside
    FOLLOW = "follow"  # the dtypes that they have
    ORIGINAL = "original"  # the dtypes that they were traced in


class Makes(enum.StrEnum):
    """How the elements of the result come from the elements of the operands."""

    MOVED = "moved"  # the same elements in other places
    CHOSEN = "chosen"  # some of the elements, or their negatives
    SUM = "sum"  # sums of two elements, of which one may be a bias
    DIFFERENCE = "difference"  # differences of two elements, or sums of two cotangents
    PRODUCT = "product"
    QUOTIENT = "quotient"
    OUTER_PRODUCT = "outer product"  # a matrix product that sums nothing
    MATRIX_PRODUCT = "matrix product"
    TOTAL = "total"  # sums along axes
    LOGARITHM = "logarithm"
    OTHER = "other"


class Reads:
    """How the readers of a value read it; several are joined by `|`. Plain integers, since there are many."""

    NOBODY = 0
    OTHERWISE = 1 << 0  # in a way that is none of these
    RETURNED = 1 << 1  # by the caller of the program, in float32
    ANGLE = 1 << 2  # as an angle: one of 100 is off by 0.03 rad in float16, and by 0.25 in bfloat16
    DISTANCE = 1 << 3  # as a term of a difference that cancels: of a squared distance, or of a variance
    MATRIX = 1 << 4  # as a matrix to decompose, or as an operand of a solver
    RANGE = 1 << 5  # as the operand of a logarithm, which small and large values reach
    EDGE = 1 << 6  # near the edge of the domain of a function, whose slope is infinite there
    ROOT = 1 << 7  # as the operand of a square root
    FACTOR = 1 << 8  # as a factor of an accumulator, in every iteration of a loop
    GATE = 1 << 9  # as such a factor, where the result is a term of the next value of an accumulator
    GATE_IS_MADE_OF_IT = 1 << 10  # as `z` in a gate `1 - z` or `exp(-z)`
    TERM = 1 << 11  # as a term of the next value of an accumulator
    RECURRENCE = 1 << 12  # as the next value of a recurrence by products
    DECIDES = 1 << 13  # to decide when a loop ends

    OTHERS = OTHERWISE | RETURNED
    LINEAR = ANGLE | DISTANCE | MATRIX | RANGE | EDGE  # which sums and products pass on
    SENSITIVE = LINEAR | DECIDES  # those that float32 is for


class Rule(NamedTuple):
    """The class of an op, and the other properties that the planner uses.

    Attributes:
        op_class: the dtype in which the op reads its operands.
        makes: how the elements of the result come from the elements of the operands.
        reads: how rounding errors of the operands grow, as in `sin` or `cholesky`; `NOBODY` if they do not.
        fuses: XLA fuses the op with its readers. If all of them read float32, evaluating the op in float32 costs no
            memory.
        rows: for a product, the axes of the result that come from the other operand, if the first or the second operand
            is the weight. None if that operand cannot be the weight.
        costly: `jax.checkpoint` saves the result instead of computing it again.
        stores: the op reads its operands from memory, so they are stored in low precision.
        dtype_params: names of parameters that name the dtype of the result.
        jaxpr_params: names of parameters that hold a jaxpr over scalars of the operands' dtype.
    """

    op_class: OpClass
    makes: Makes = Makes.OTHER
    reads: int = Reads.NOBODY
    fuses: bool = False
    rows: tuple[Axes | None, Axes | None] = (None, None)
    costly: bool = False
    stores: bool = False
    dtype_params: tuple[str, ...] = ()
    jaxpr_params: tuple[str, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether the op only moves elements."""
        return self.makes is Makes.MOVED

    @property
    def adds(self) -> bool:
        """Whether the op adds two arrays, of which one may be a bias."""
        return self.makes is Makes.SUM

    @property
    def scales(self) -> bool:
        """Whether the op multiplies or divides two arrays element by element."""
        return self.makes in (Makes.PRODUCT, Makes.QUOTIENT)

    @property
    def arithmetic(self) -> bool:
        """Whether the op adds, subtracts, multiplies or divides."""
        return self.makes in _ARITHMETIC

    @property
    def keeps_magnitude(self) -> bool:
        """Whether a large element of an operand can be as large in the result."""
        return self.makes in _KEEPS_MAGNITUDE

    @property
    def passes_on(self) -> bool:
        """Whether the result holds the elements of the operands, or their sums, products or quotients."""
        return self.makes in _PASSES_ON

    @property
    def is_product(self) -> bool:
        """Whether the op multiplies matrices or convolves, in any dtype."""
        return self.makes is Makes.MATRIX_PRODUCT

    @property
    def sums(self) -> bool:
        """Whether the op sums along axes."""
        return self.makes is Makes.TOTAL

    @property
    def is_linear(self) -> bool:
        """Whether the op moves, adds and multiplies, so that it passes on errors as they are."""
        return self.moves or self.arithmetic or self.is_product or self.sums


_ARITHMETIC = {Makes.SUM, Makes.DIFFERENCE, Makes.PRODUCT, Makes.QUOTIENT, Makes.OUTER_PRODUCT}
_KEEPS_MAGNITUDE = {Makes.MOVED, Makes.CHOSEN, Makes.SUM, Makes.DIFFERENCE, Makes.PRODUCT, Makes.OUTER_PRODUCT}

_PASSES_ON = {Makes.MOVED, Makes.CHOSEN, *_ARITHMETIC}

# The rule of a primitive, or a function of the parameters of the op and the types of its operands.
RuleOf = Callable[[Mapping[str, Any], Sequence[Any]], Rule]
Rules = Mapping[str, Rule | RuleOf]

ORIGINAL = Rule(OpClass.ORIGINAL)
