"""The table of primitives: everything that this package knows of an op.

The classes follow PyTorch's lists (`torch.amp`, CUDA). A primitive that is not in the table is `ORIGINAL`.
"""

import bisect
import enum
import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive, Var

from jmp_amp import _jaxpr as jx


class OpClass(enum.StrEnum):
    """The dtype in which an op reads operands that were traced in float32."""

    LOWER = "lower"  # the compute dtype
    FULL = "full"  # float32
    PROMOTE = "promote"  # the widest of their dtypes, biases and scalars aside
    FOLLOW = "follow"  # the dtypes that they have
    ORIGINAL = "original"  # the dtypes that they were traced in


class ResultKind(enum.StrEnum):
    """How the elements of the result come from the elements of the operands."""

    MOVED = "moved"  # the same elements in other places
    TAKEN = "taken"  # the elements at given indices, such as a diagonal
    CHOSEN = "chosen"  # some of the elements, or their negatives
    SELECTED = "selected"  # elements of several operands, chosen by a condition
    ORDERED = "ordered"  # some of the elements, chosen or placed by their order
    SUM = "sum"  # sums of two elements; one may be a bias
    DIFFERENCE = "difference"  # differences of two elements
    COTANGENT = "cotangent"  # sums of two cotangents
    PRODUCT = "product"
    QUOTIENT = "quotient"
    OUTER_PRODUCT = "outer product"  # a matrix product that sums nothing
    MATRIX_PRODUCT = "matrix product"
    TOTAL = "total"  # sums along axes
    LOGARITHM = "logarithm"
    POWER = "power"  # of the first operand
    ROUNDED = "rounded"  # to a whole number
    BOUNDED = "bounded"  # between -2 and 2, and smooth
    OTHER = "other"


class Demand:
    """What the readers of a value demand of it; several are joined by `|`. Plain integers, since there are many."""

    NONE = 0
    ANY = 1 << 0  # nothing of what follows
    RETURNED = 1 << 1  # by the caller of the program, in float32; of whole numbers, a sum, too
    ANGLE = 1 << 2  # as an angle, `jnp.sin(x @ w)`: one of 100 is off by 0.03 rad in float16, by 0.25 in bfloat16
    DISTANCE = 1 << 3  # as a term of a difference that cancels, `x2[:, None] + y2 - 2 * x @ y.T`
    MATRIX = 1 << 4  # as a matrix to decompose, or as an operand of a solver: `jnp.linalg.cholesky(f @ f.T)`
    RANGE = 1 << 5  # as the operand of a logarithm, which small and large values reach: `jnp.log(p @ q)`
    EDGE = 1 << 6  # near the edge of the domain of a function, whose slope is infinite there: `jnp.acos(u @ v)`
    ROOT = 1 << 7  # as the operand of a square root, `jnp.sqrt(1 - c * c)`
    GATE = 1 << 8  # as a factor of an accumulator in its next value: `gate` in `h = gate * h + x`
    MAKES_GATE = 1 << 9  # as `z` in a gate `1 - z` or `jnp.exp(-z)`
    TERM = 1 << 10  # as a term of the next value of an accumulator: `x` in `h = gate * h + x`
    RECURRENCE = 1 << 11  # as the next value of a recurrence by products: `x = a @ x`
    ENDS_LOOP = 1 << 12  # to decide when a loop ends: `lax.while_loop(lambda c: c[1] > tol, ...)`
    INDEX = 1 << 13  # as an index or a code, an integer of more than 8 bits: `(x @ w).astype(int)`
    CODE = 1 << 14  # to see whether it is equal to another: `code[:, None] == code`
    RANK = 1 << 15  # to choose by its order: `lax.top_k(jax.nn.softmax(x @ router), 2)`
    LOSS = 1 << 16  # as a term of what the program returns, or of its sum
    LOG = 1 << 17  # as the operand of a logarithm, also of one that small values do not reach: `jnp.log1p(p @ q)`
    METRIC = 1 << 18  # to choose by its order what is only returned: a top-5 accuracy, which is none if a loss reads it
    SQUARES = 1 << 19  # as a term beside a sum of squares: they cancel if it is a product of what was squared
    SQUARED = 1 << 20  # as what is squared in such a sum
    HIDDEN = 1 << 21  # by a product of the forward pass, whatever is between: it is in a hidden layer, and no result

    OTHERS = ANY | RETURNED | LOSS
    EXACT = INDEX | CODE | RANK | METRIC  # which ops on few elements pass on
    LINEAR = ANGLE | DISTANCE | MATRIX | RANGE | LOG | EDGE | SQUARES  # which sums and products pass on
    SENSITIVE = LINEAR | ENDS_LOOP | INDEX  # those that float32 is for


Axes = frozenset[int]
Rows = tuple[Axes | None, Axes | None]
Shape = tuple[Any, ...]

# How an op that moves an array moves axes of it, from its parameters and the shapes before and after; None if that is
# not known.
MoveAxes = Callable[[Mapping[str, Any], Shape, Shape, Axes], Axes | None]


def _same_axes(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> Axes | None:
    """Returns the axes themselves, if there are as many as before."""
    return axes if len(before) == len(after) else None


class Rule(NamedTuple):
    """The class of an op, and the other properties that the planner uses.

    Attributes:
        op_class: the dtype in which the op reads its operands.
        kind: how the elements of the result come from the elements of the operands.
        demand: how rounding errors of the operands grow, as in `sin` or `cholesky`; `NONE` if they do not.
        n_demanding: of how many operands, the first ones, that is so; None if of all.
        n_values: how many operands, the first ones, have the unit of the results, as the cotangents of a pooling do;
            others choose their elements, or multiply some of them. None if all.
        fuses: XLA fuses the op with its readers. If all of them read float32, evaluating the op in float32 costs no
            memory.
        terms: how many elements a product sums for each of its result; 0 for other ops.
        columns: for a product that is no convolution, how many axes of either operand it does not sum over, as numbers
            of elements.
        rows: for a product, the axes of the result that come from the other operand, if the first or the second operand
            is the weight. None if that operand cannot be the weight.
        costly: `jax.checkpoint` saves the result instead of computing it again.
        stores: the op reads its operands from memory, so they are stored in low precision.
        dtype_params: names of parameters that name the dtype of the result.
        jaxpr_params: names of parameters that hold a jaxpr over scalars of the operands' dtype.
        power: the exponent of a power; None if the program computes it.
        drops: of the elements that it chooses from, whether it drops large negative ones, as the fill of a mask in a
            maximum, and whether it drops large positive ones.
        fold: computes the op on known scalars, on the host.
        move_axes: for an op that moves elements, how it moves the axes of an operand.
        makes_gates: `f(z)` is a gate, as `exp(-z)`.
        keeps_unit: its operands and results have one physical unit, although it does not pass elements on.
        drops_unit: its operands may have any unit, and its results have none.
        is_kernel: it is code that autocast cannot read.
    """

    op_class: OpClass
    kind: ResultKind = ResultKind.OTHER
    demand: int = Demand.NONE
    n_demanding: int | None = None
    n_values: int | None = None
    fuses: bool = False
    terms: Any = 0
    columns: tuple[Any, ...] = ()
    rows: Rows = (None, None)
    costly: bool = False
    stores: bool = False
    dtype_params: tuple[str, ...] = ()
    jaxpr_params: tuple[str, ...] = ()
    power: float | None = None
    drops: tuple[bool, bool] = (False, False)
    fold: Callable[..., Any] | None = None
    move_axes: MoveAxes = _same_axes
    makes_gates: bool = False
    keeps_unit: bool = False
    drops_unit: bool = False
    is_kernel: bool = False

    @property
    def moves(self) -> bool:
        """Whether the op only moves elements."""
        return self.kind in (ResultKind.MOVED, ResultKind.TAKEN)

    @property
    def scales(self) -> bool:
        """Whether the op multiplies or divides two arrays element by element."""
        return self.kind in (ResultKind.PRODUCT, ResultKind.QUOTIENT)

    @property
    def multiplies(self) -> bool:
        """Whether the op multiplies or divides, elements or matrices."""
        return self.scales or self.is_product or self.kind is ResultKind.OUTER_PRODUCT

    @property
    def bends(self) -> bool:
        """Whether the op chooses elements by their size, as a maximum or an absolute value does."""
        return self.kind is ResultKind.CHOSEN and self.fuses and self.fold is not np.negative

    @property
    def arithmetic(self) -> bool:
        """Whether the op adds, subtracts, multiplies or divides."""
        return self.kind in _ARITHMETIC

    @property
    def passes_on(self) -> bool:
        """Whether the result holds the elements of the operands, or their sums, products or quotients."""
        return self.kind in _PASSES_ON

    @property
    def passes(self) -> int:
        """What it demands of its operands because of those who read its results, if they demand it of these.

        `jnp.sin(h @ w)` makes this product float32, and not those that compute `h`: rounding an operand is an error of
        0.4% of it, and the sum of many averages these.
        """
        if self.op_class is OpClass.LOWER:
            return Demand.NONE
        if self.can_run_as_traced:
            return Demand.LINEAR | Demand.TERM
        if self.power == 2:
            return Demand.LINEAR & ~(Demand.ANGLE | Demand.RANGE | Demand.LOG)
        return PASSES.get(self.kind, Demand.MATRIX)

    @property
    def is_product(self) -> bool:
        """Whether the op multiplies matrices or convolves, in any dtype."""
        return self.kind is ResultKind.MATRIX_PRODUCT

    @property
    def can_run_as_traced(self) -> bool:
        """Whether the op runs as it was traced where a fact asks for it: a product that may be low precision does."""
        return self.op_class is OpClass.LOWER or (self.is_product and self.op_class is OpClass.PROMOTE)

    @property
    def is_decomposition(self) -> bool:
        """Whether the op decomposes a matrix, or solves equations."""
        return self.demand == Demand.MATRIX

    @property
    def is_cast(self) -> bool:
        """Whether the op converts a dtype."""
        return self.dtype_params == _CAST.dtype_params

    @property
    def is_polynomial(self) -> bool:
        """Whether the op adds, multiplies or divides, or is a power by a whole number."""
        return self.arithmetic or (self.power is not None and self.power > 0 and self.power % 1 == 0)

    @property
    def is_linear(self) -> bool:
        """Whether the op moves, adds and multiplies, so that it passes on errors as they are."""
        return self.kind in _LINEAR


# What an op demands of its operands because of those who read its results, by its kind; each other kind passes on
# `Demand.MATRIX` alone. A sigmoid is no more exact than a rounded product, whatever reads it.
PASSES = {
    **dict.fromkeys((ResultKind.MOVED, ResultKind.TAKEN), Demand.LINEAR | Demand.TERM | Demand.ROOT | Demand.OTHERS),
    **dict.fromkeys((ResultKind.CHOSEN, ResultKind.SELECTED), Demand.LINEAR | Demand.TERM | Demand.ROOT),
    **dict.fromkeys((ResultKind.SUM, ResultKind.DIFFERENCE, ResultKind.COTANGENT), Demand.LINEAR | Demand.TERM),
    **dict.fromkeys((ResultKind.PRODUCT, ResultKind.QUOTIENT, ResultKind.OUTER_PRODUCT), Demand.LINEAR | Demand.TERM),
    ResultKind.TOTAL: Demand.MATRIX | Demand.RANGE | Demand.LOG | Demand.METRIC,
    ResultKind.BOUNDED: Demand.NONE,
}

_ARITHMETIC = {ResultKind.SUM, ResultKind.DIFFERENCE, ResultKind.COTANGENT}
_ARITHMETIC |= {ResultKind.PRODUCT, ResultKind.QUOTIENT, ResultKind.OUTER_PRODUCT}
_PASSES_ON = {ResultKind.MOVED, ResultKind.TAKEN, ResultKind.CHOSEN, ResultKind.SELECTED, *_ARITHMETIC}
_LINEAR = {ResultKind.MOVED, ResultKind.TAKEN, ResultKind.MATRIX_PRODUCT, ResultKind.TOTAL, *_ARITHMETIC}

# The rule of a primitive, or a function of the parameters of the op and the types of its operands.
RuleOf = Callable[[Mapping[str, Any], Sequence[Any]], Rule]
Rules = Mapping[str, Rule | RuleOf]

ORIGINAL = Rule(OpClass.ORIGINAL)
_FULL = Rule(OpClass.FULL)
_PROMOTE = Rule(OpClass.PROMOTE)
_FOLLOW = Rule(OpClass.FOLLOW)
_LOWER = Rule(
    OpClass.LOWER, ResultKind.MATRIX_PRODUCT, costly=True, stores=True, dtype_params=("preferred_element_type",)
)
_ORDERED = Rule(OpClass.FOLLOW, ResultKind.ORDERED, keeps_unit=True)
_PAIRWISE = Rule(OpClass.PROMOTE, fuses=True)  # elementwise, of several operands
_ELEMENTWISE = Rule(OpClass.FOLLOW, fuses=True)
_LOGARITHM = Rule(OpClass.FULL, ResultKind.LOGARITHM, Demand.RANGE | Demand.LOG)
_POWER = Rule(OpClass.FULL, ResultKind.POWER)
_SQUARE = Rule(OpClass.FOLLOW, ResultKind.POWER, fuses=True, power=2, fold=np.square)
_MOVE = Rule(OpClass.FOLLOW, ResultKind.MOVED)
_FUSED_MOVE = Rule(OpClass.FOLLOW, ResultKind.MOVED, fuses=True)
_CAST = _FUSED_MOVE._replace(dtype_params=("new_dtype",), fold=lambda x: x)
_COMPLEX = Rule(OpClass.ORIGINAL, ResultKind.CHOSEN)  # the parts of complex numbers
_EXP = _FULL._replace(makes_gates=True, fold=np.exp)
_SCATTER = _PROMOTE._replace(kind=ResultKind.CHOSEN, jaxpr_params=("update_jaxpr",))
_COSTLY = Rule(OpClass.ORIGINAL, costly=True)
_KERNEL = _COSTLY._replace(is_kernel=True)
_DECOMPOSITION = Rule(OpClass.ORIGINAL, demand=Demand.MATRIX, costly=True)


def _matmul(params: Mapping[str, Any], avals: Sequence[Any]) -> Rule:
    """A product of vectors is a sum, and no matrix unit speeds it up, so it is float32."""
    contracting, batch, _ = product_axes(params)
    left, right = free_sizes(avals, contracting, batch)
    first, middle = len(batch[0]), len(batch[0]) + len(left)
    lefts, rights = frozenset(range(first, middle)), frozenset(range(middle, middle + len(right)))
    terms = [avals[0].shape[axis] for axis in contracting[0]]
    rule = _product(params["precision"], terms, left, right, (rights, lefts))
    # A layer with one input or one output is a layer, not a product of vectors.
    is_of_vectors = not (left or right) or (first > 0 and all(n == 1 for n in (*left, *right)))
    if is_of_vectors and rule.can_run_as_traced:
        return Rule(OpClass.FULL, ResultKind.MATRIX_PRODUCT, dtype_params=_LOWER.dtype_params)
    return rule._replace(columns=(math.prod(left), math.prod(right)))


def _convolution(params: Mapping[str, Any], avals: Sequence[Any]) -> Rule:
    numbers, kernel = params["dimension_numbers"], avals[1].shape
    terms = [n for axis, n in enumerate(kernel) if axis != numbers.rhs_spec[0]]
    # Each group multiplies a patch at each of any number of places by a matrix.
    features = kernel[numbers.rhs_spec[0]] // (params["feature_group_count"] * params["batch_group_count"])
    rows = None, frozenset(range(len(kernel))) - {numbers.out_spec[1]}
    return _product(params["precision"], terms, (math.inf,), (features,), rows)


def _ragged_dot(params: Mapping[str, Any], avals: Sequence[Any]) -> Rule:
    contracting, *others = product_axes(params)
    left, right = free_sizes(avals[:2], contracting, *others)
    terms = [avals[0].shape[axis] for axis in contracting[0]]
    return _product(params["precision"], terms, left, right, (None, frozenset(range(avals[0].ndim - 1))))


def _product(precision: Any, terms: Sequence[Any], left: Sequence[Any], right: Sequence[Any], rows: Rows) -> Rule:
    """A product that sums nothing is a multiplication. One whose `precision` asks for float32 is not lowered.

    Args:
        precision: that of the op.
        terms: the sizes of the axes that it sums over.
        left: those of the other axes of the first operand that are not batch axes.
        right: those of the second operand.
        rows: see `Rule`.
    """
    asked = precision if isinstance(precision, tuple) else (precision,)
    if lax.Precision.HIGHEST in asked or operand_dtypes(precision) == {np.dtype(np.float32)}:
        return Rule(OpClass.ORIGINAL, ResultKind.MATRIX_PRODUCT, costly=True)
    if all(n == 1 for n in terms):
        return Rule(OpClass.PROMOTE, ResultKind.OUTER_PRODUCT, dtype_params=_LOWER.dtype_params)
    if _is_geometry(terms, left, right):
        return Rule(OpClass.PROMOTE, ResultKind.MATRIX_PRODUCT, rows=rows, dtype_params=_LOWER.dtype_params)
    return _LOWER._replace(rows=rows, terms=math.prod(terms))


def operand_dtypes(precision: Any) -> set[np.dtype] | None:
    """Returns the dtypes that the algorithm of a product may read; None if its `precision` names no algorithm."""
    read = getattr(precision, "supported_lhs_types", None) or getattr(precision, "lhs_precision_type", None)
    return None if read is None else set(map(np.dtype, read if isinstance(read, tuple) else (read,)))


def product_axes(params: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Returns the axes of both operands that a product sums over, its batch axes, and those of ragged groups."""
    ragged = params.get("ragged_dot_dimension_numbers")
    if ragged is None:
        return *params["dimension_numbers"], ((), ())
    return *ragged.dot_dimension_numbers, ((), ragged.rhs_group_dimensions)


def free_sizes(avals: Sequence[Any], *axes: Sequence[Sequence[int]]) -> list[list[Any]]:
    """Returns the sizes of the axes of each operand that are not among these axes of it."""
    bound = [{*itertools.chain(*each)} for each in zip(*axes, strict=True)]
    return [[n for i, n in enumerate(aval.shape) if i not in each] for aval, each in zip(avals, bound, strict=True)]


def _is_geometry(terms: Sequence[Any], *others: Sequence[Any]) -> bool:
    """Whether an operand is a matrix of at most 4 x 4: a rotation, a camera. No matrix unit computes it faster.

    The axes before its rows hold other matrices, as under `vmap`. A row or a column counts only beside another such
    matrix: it may be one example of a layer of 3 inputs.
    """

    def is_small(n: Any) -> bool:
        return isinstance(n, int) and n <= 4  # a symbolic size may be any

    rows = [shape[-1] for shape in others if shape]
    has_matrix = any(is_small(n) and n > 1 for n in rows) or all(is_small(math.prod(shape)) for shape in others)
    return is_small(math.prod(terms)) and has_matrix


def _integer_pow(params: Mapping[str, Any], _: Sequence[Any]) -> Rule:
    """As in torch, `reciprocal` and `pow` are float32. Squares and cubes (GELU) are not."""
    rule = _SQUARE if 0 <= params["y"] <= 3 else _POWER
    return rule._replace(power=params["y"], fold=lambda x: x ** params["y"])


def _exp(params: Mapping[str, Any], avals: Sequence[Any]) -> Rule:
    """`jnp.exp(1j * x)` is a sine and a cosine."""
    return _COMPLEX._replace(demand=Demand.ANGLE) if jnp.issubdtype(avals[0].dtype, np.complexfloating) else _EXP


def _convert(params: Mapping[str, Any], _: Sequence[Any]) -> Rule:
    """A cast from float32 to float32 changes only the weak type. Any other cast is the user's choice.

    A wide integer is an index or a code, and 999 as bfloat16 is 1000. One of 8 bits is a quantized value.
    """
    dtype = params["new_dtype"]
    if dtype == np.float32:
        return _CAST
    if jnp.issubdtype(dtype, np.complexfloating):
        return _COMPLEX._replace(dtype_params=_CAST.dtype_params)
    is_wide = jnp.issubdtype(dtype, np.integer) and jnp.iinfo(dtype).bits > 8
    return ORIGINAL._replace(demand=Demand.INDEX if is_wide else Demand.NONE, dtype_params=_CAST.dtype_params)


def _gather(params: Mapping[str, Any], avals: Sequence[Any]) -> Rule:
    """Casting a whole table for a few of its rows would waste time. A fill value may not fit the low dtype."""
    fill = params["fill_value"]
    if fill is not None and np.isfinite(fill) and abs(fill) > float(np.finfo(np.float16).max):
        return _FULL
    x, indices = avals
    shape = (*indices.shape[:-1], *params["slice_sizes"])
    is_whole = math.prod(shape) == math.prod(x.shape) or is_smaller(x.shape, shape)
    return (_FUSED_MOVE if is_whole else _MOVE)._replace(kind=ResultKind.TAKEN, move_axes=_no_axes)


def _scatter(params: Mapping[str, Any], _: Sequence[Any]) -> Rule:
    """A scatter that applies a function of the user holds it, traced in the dtype of the array."""
    return _SCATTER if params["update_jaxpr"] is None else ORIGINAL


def _sort(params: Mapping[str, Any], avals: Sequence[Any]) -> Rule:
    """What is sorted beside the keys is chosen by them, as the indices of `argsort`."""
    n_keys = params["num_keys"]
    demand = Demand.RANK if len(avals) > n_keys else Demand.NONE
    return _ORDERED._replace(demand=demand, n_demanding=n_keys)


def _mul(params: Mapping[str, Any], _: Sequence[Any]) -> Rule:
    product = _PAIRWISE._replace(kind=ResultKind.PRODUCT, fold=np.multiply)
    return product if params.get("out_dtype") is None else ORIGINAL


def _div(params: Mapping[str, Any], avals: Sequence[Any]) -> Rule:
    """A number by an array, such as `1 / x`, is its reciprocal."""
    quotient = _PAIRWISE._replace(kind=ResultKind.QUOTIENT, fold=np.divide)
    return quotient._replace(op_class=OpClass.FULL) if avals[0].shape == () != avals[1].shape else quotient


def _broadcast_axes(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> Axes:
    """Moves axes through a broadcast."""
    return frozenset(int(params["broadcast_dimensions"][axis]) for axis in axes)


def _transpose_axes(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> Axes:
    """Moves axes through a permutation."""
    return frozenset(i for i, axis in enumerate(params["permutation"]) if axis in axes)


def _reshape_axes(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> Axes | None:
    """Moves axes through a reshape, or through the removal of axes of one element.

    An axis that merges several axes, or is a part of one, counts if any of these counts.
    """
    if len(params["dimensions"] or ()) == len(before) > 0:  # a permutation
        return None
    olds, news = sorted(varying(before)), sorted(varying(after))
    if [before[i] for i in olds] == [after[i] for i in news]:
        return frozenset(new for old, new in zip(olds, news, strict=True) if old in axes)
    if not all(isinstance(n, int) and n for n in (*before, *after)):
        return None
    # Axes belong together if no boundary that both shapes have lies between them.
    ends, new_ends = (
        list(itertools.accumulate([n[i] for i in kept], operator.mul)) for n, kept in ((before, olds), (after, news))
    )
    shared = sorted(set(ends) & set(new_ends))
    found = {bisect.bisect_left(shared, end) for axis, end in zip(olds, ends, strict=True) if axis in axes}
    return frozenset(i for i, end in zip(news, new_ends, strict=True) if bisect.bisect_left(shared, end) in found)


def _no_axes(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> None:
    """Returns None: the places of the axes depend on more than the axes."""


def varying(shape: Shape | None) -> Axes:
    """Returns the axes of more than one element."""
    # A symbolic dimension can only be compared for equality.
    return frozenset([i for i, n in enumerate(shape or ()) if n != 1])


def is_smaller(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether an array of a shape is known to have fewer elements than one of another shape.

    Dimensions that both have cancel. Of those that are left, symbolic ones are only known to be another size than 1.
    """
    mine, others = Counter(shape), Counter(other)
    size, other_size = math.prod((mine - others).elements()), math.prod((others - mine).elements())
    if isinstance(size, int) and isinstance(other_size, int):
        return size < other_size
    return size == 1 and other_size != 1


# The rules, by the names of the primitives that have them.
ROWS: Mapping[str, Rule | RuleOf] = {
    # Matrix units: low precision in, float32 accumulation, low precision out.
    "dot_general": _matmul,
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged_dot,
    # Large range or cancellation: PyTorch's fp32 list, and the special functions that it has no peer of.
    "exp": _exp,
    "exp2 expm1 polynomial": _FULL,
    "pow": _POWER._replace(fold=np.power),
    "rsqrt": _POWER._replace(power=-0.5, fold=lambda x: 1 / np.sqrt(x)),
    "log": _LOGARITHM._replace(fold=np.log),
    "log2": _LOGARITHM,
    "log1p": _FULL._replace(demand=Demand.LOG),
    "acos acosh asin atanh erf_inv": _FULL._replace(demand=Demand.EDGE),
    "asinh atan cosh sinh tan": _FULL,
    "bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma polygamma": _FULL,
    "regularized_incomplete_beta zeta": _FULL,
    # Sums over many terms.
    "reduce_sum cumsum reduce_window_sum": _FULL._replace(kind=ResultKind.TOTAL),
    "reduce_prod cumprod cumlogsumexp": _FULL,
    "scatter-add scatter-sub": _SCATTER._replace(op_class=OpClass.FULL),
    "scatter-mul": _SCATTER._replace(op_class=OpClass.FULL, n_values=1),
    "integer_pow": _integer_pow,
    # Several operands of one dtype.
    "add": _PAIRWISE._replace(kind=ResultKind.SUM, fold=np.add),
    "sub": _PAIRWISE._replace(kind=ResultKind.DIFFERENCE, fold=np.subtract),
    "add_any": _PAIRWISE._replace(kind=ResultKind.COTANGENT),
    "mul": _mul,
    "div": _div,
    "max": _PAIRWISE._replace(kind=ResultKind.CHOSEN, fold=np.maximum, drops=(True, False)),
    "min": _PAIRWISE._replace(kind=ResultKind.CHOSEN, fold=np.minimum, drops=(False, True)),
    "clamp": _PAIRWISE._replace(kind=ResultKind.CHOSEN, drops=(True, True)),
    "select_n": _PAIRWISE._replace(kind=ResultKind.SELECTED),
    "eq": _PAIRWISE._replace(keeps_unit=True, demand=Demand.CODE),
    "ne": _PAIRWISE._replace(keeps_unit=True, demand=Demand.CODE, fold=np.not_equal),
    "lt le gt ge": _PAIRWISE._replace(keeps_unit=True),
    "rem nextafter": _PROMOTE._replace(keeps_unit=True),
    "atan2": _PROMOTE,
    "scatter": _scatter,
    "scatter-min scatter-max": _SCATTER,
    "select_and_scatter_add select_and_gather_add": _PROMOTE._replace(kind=ResultKind.CHOSEN, n_values=1),
    "dynamic_update_slice": _PROMOTE._replace(kind=ResultKind.CHOSEN),
    "concatenate pad": _PROMOTE._replace(kind=ResultKind.MOVED, move_axes=_no_axes),
    "stack": _PROMOTE._replace(kind=ResultKind.MOVED),
    # Bounded or exact in any dtype.
    "neg": _ELEMENTWISE._replace(kind=ResultKind.CHOSEN, makes_gates=True, fold=np.negative),
    "abs": _ELEMENTWISE._replace(kind=ResultKind.CHOSEN, fold=np.abs),
    "reduce_max": _ELEMENTWISE._replace(kind=ResultKind.CHOSEN, drops=(True, False)),
    "reduce_min": _ELEMENTWISE._replace(kind=ResultKind.CHOSEN, drops=(False, True)),
    "square": _SQUARE,
    "sign is_finite": _ELEMENTWISE._replace(drops_unit=True),
    "sin cos": _ELEMENTWISE._replace(demand=Demand.ANGLE),
    "sqrt": _ELEMENTWISE._replace(kind=ResultKind.POWER, demand=Demand.ROOT, power=0.5, fold=np.sqrt),
    "cbrt": _ELEMENTWISE._replace(power=1 / 3),
    "floor ceil round": _ELEMENTWISE._replace(kind=ResultKind.ROUNDED),
    "tanh logistic erf erfc one_minus_square": _ELEMENTWISE._replace(kind=ResultKind.BOUNDED),
    "argmax argmin": _FOLLOW._replace(drops_unit=True),
    "cummax cummin": _ORDERED,
    "sort": _sort,
    "top_k": _ORDERED._replace(demand=Demand.RANK),
    "approx_top_k": _FOLLOW._replace(demand=Demand.RANK),
    "reduce_window_max reduce_window_min": _ORDERED._replace(stores=True),
    "psum psum_invariant": _FOLLOW._replace(kind=ResultKind.TOTAL),
    "pmax pmin reduce_scatter all_to_all": _FOLLOW._replace(keeps_unit=True),
    "ppermute all_gather all_gather_invariant pvary reshard": _MOVE,
    # Values move, none is computed.
    "broadcast_in_dim": _FUSED_MOVE._replace(move_axes=_broadcast_axes),
    "reshape squeeze": _FUSED_MOVE._replace(move_axes=_reshape_axes),
    "transpose": _FUSED_MOVE._replace(move_axes=_transpose_axes),
    "stop_gradient": _FUSED_MOVE._replace(fold=lambda x: x),
    "slice dynamic_slice rev split unstack": _FUSED_MOVE,
    "gather": _gather,
    "tile copy name device_put sharding_constraint optimization_barrier": _MOVE,
    "convert_element_type": _convert,
    # Linear algebra, transforms and kernels in their own precision.
    "cholesky eig eigh geqrf householder_product hessenberg lu qr schur svd": _DECOMPOSITION,
    "custom_linear_solve triangular_solve tridiagonal tridiagonal_solve": _DECOMPOSITION,
    "fft float8_dot_general float8_ragged_dot_general float8_scale": _COSTLY,
    "ffi_call pallas_call unscale_check": _KERNEL,
    "dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper": _KERNEL,  # cuDNN; it refuses float32
    # Bits, complex numbers, and reductions by any function.
    "reduce_precision": ORIGINAL._replace(keeps_unit=True),
    "complex conj imag real": _COMPLEX,
    "bitcast_convert_type reduce reduce_window select_and_scatter random_gamma sum_together": ORIGINAL,
}
RULES: Rules = {name: rule for row, rule in ROWS.items() for name in row.split()}


def rule_of(eqn: JaxprEqn, rules: Rules = RULES) -> Rule:
    """Returns the rule for a first-order equation."""
    return find_rule(eqn.primitive, eqn.params, [atom.aval for atom in eqn.invars], rules)


def find_rule(primitive: Primitive, params: Mapping[str, Any], avals: Sequence[Any], rules: Rules) -> Rule:
    """Returns the rule for a first-order op, from its parameters and the types of its operands."""
    rule = rules.get(primitive.name, ORIGINAL)
    return rule if isinstance(rule, Rule) else rule(params, avals)


class EqnInfo(NamedTuple):
    """What is known of an equation.

    Attributes:
        eqn: the equation.
        rule: the rule of its op.
        structure: how it holds jaxprs; None if it holds none.
        operands: the variables that it reads, each once.
        sources: what each operand was before it was only moved; None for a literal.
        between: for each of the two products in `A @ P @ A.T`, the operand that is or holds `P`; None for other ops.
        related: what it demands of its operands because they are products that share a factor, or it is a quotient by
            what multiplies a function of it, or a product of the forward pass.
        is_fraction: whether it subtracts a value and what that was rounded to, as `x - jnp.floor(x)`.
        token: stands for the primitive, its parameters and the types of its operands and results: the same op of
            another layer has the same object. None if it holds jaxprs or what cannot be hashed.
    """

    eqn: JaxprEqn
    rule: Rule
    structure: jx.Structure | None
    operands: tuple[Var, ...] = ()
    sources: tuple[Var | None, ...] = ()
    between: int | None = None
    related: int = 0
    is_fraction: bool = False
    token: object | None = None

    @property
    def program(self) -> jx.Structure | None:
        """How analyses enter its jaxprs: a solver is one op to them."""
        return None if self.rule.demand else self.structure

    @property
    def is_identity(self) -> bool:
        """Whether its results are its several operands, one by one, as those of `optimization_barrier`."""
        return self.rule.moves and len(self.eqn.outvars) == len(self.eqn.invars) > 1

    def is_dead(self, demands: Sequence[int]) -> bool:
        """Whether nothing reads its results, of which `demands` is demanded, so that XLA drops it."""
        return not (any(demands) or self.eqn.effects)

    @property
    def enlarges(self) -> bool:
        """Whether it moves the elements of an array into a larger one, as a broadcast does."""
        shapes = [jx.shape_of(atom) or () for atom in (*self.eqn.invars[:1], *self.eqn.outvars[:1])]
        return self.rule.moves and is_smaller(*shapes)

    @property
    def arrays(self) -> list[int]:
        """Its operands of more than one element."""
        return [i for i, atom in enumerate(self.eqn.invars) if varying(jx.shape_of(atom))]

    @property
    def repeats_operand(self) -> bool:
        """Whether it has two operands that are the same array, moved or not."""
        return len(self.sources) == 2 and self.sources[0] is not None and self.sources[0] is self.sources[1]

    @property
    def is_square(self) -> bool:
        """Whether its result is the square of an array, element by element."""
        return self.rule.power == 2 or (self.rule.kind is ResultKind.PRODUCT and self.repeats_operand)

    @property
    def multiplies_slices(self) -> bool:
        """Whether it multiplies different parts of one array."""
        return self.rule.scales and self.repeats_operand and self.eqn.invars[0] is not self.eqn.invars[1]
