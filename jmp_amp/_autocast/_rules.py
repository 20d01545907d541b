"""The op table: a rule for every primitive that autocast may run in another dtype than it was traced in.

The classes follow PyTorch's lists (`torch.amp`, CUDA). A primitive that is not in the table is `ORIGINAL`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from jmp_amp._autocast._axes import Axes
from jmp_amp._autocast._rule import ORIGINAL, Makes, OpClass, Reads, Rule, Rules
from jmp_amp._autocast._sizes import is_smaller

_LOWER = Rule(OpClass.LOWER, Makes.MATRIX_PRODUCT, costly=True, stores=True, dtype_params=("preferred_element_type",))
_FULL = Rule(OpClass.FULL)
_VECTORS = Rule(OpClass.FULL, Makes.MATRIX_PRODUCT, dtype_params=("preferred_element_type",))
_LOGARITHM = Rule(OpClass.FULL, Makes.LOGARITHM, Reads.RANGE)
_LOGARITHM_OF_MORE = Rule(OpClass.FULL, reads=Reads.RANGE)
_EDGE = Rule(OpClass.FULL, reads=Reads.EDGE)
_TOTAL = Rule(OpClass.FULL, Makes.TOTAL)
_PROMOTE = Rule(OpClass.PROMOTE)
_FOLLOW = Rule(OpClass.FOLLOW)
_UPDATE = Rule(OpClass.PROMOTE, Makes.CHOSEN)
_OUTER_PRODUCT = Rule(OpClass.PROMOTE, Makes.OUTER_PRODUCT, dtype_params=("preferred_element_type",))
_SCATTER = Rule(OpClass.PROMOTE, Makes.CHOSEN, jaxpr_params=("update_jaxpr",))
_SCATTER_SUM = Rule(OpClass.FULL, Makes.CHOSEN, jaxpr_params=("update_jaxpr",))
_WINDOW = Rule(OpClass.FOLLOW, stores=True)
_COMPARE = Rule(OpClass.PROMOTE, fuses=True)
_SELECT = Rule(OpClass.PROMOTE, Makes.CHOSEN, fuses=True)
_ADD = Rule(OpClass.PROMOTE, Makes.SUM, fuses=True)
_SUBTRACT = Rule(OpClass.PROMOTE, Makes.DIFFERENCE, fuses=True)
_MULTIPLY = Rule(OpClass.PROMOTE, Makes.PRODUCT, fuses=True)
_DIVIDE = Rule(OpClass.PROMOTE, Makes.QUOTIENT, fuses=True)
_ELEMENTWISE = Rule(OpClass.FOLLOW, fuses=True)
_ANGLE = Rule(OpClass.FOLLOW, reads=Reads.ANGLE, fuses=True)
_CHOOSE = Rule(OpClass.FOLLOW, Makes.CHOSEN, fuses=True)
_MOVE = Rule(OpClass.FOLLOW, Makes.MOVED)
_FUSED_MOVE = Rule(OpClass.FOLLOW, Makes.MOVED, fuses=True)
_CAST = Rule(OpClass.FOLLOW, Makes.MOVED, fuses=True, dtype_params=("new_dtype",))
_JOIN = Rule(OpClass.PROMOTE, Makes.MOVED)
_ROOT = Rule(OpClass.FOLLOW, reads=Reads.ROOT, fuses=True)
_PRODUCT_AS_TRACED = Rule(OpClass.ORIGINAL, Makes.MATRIX_PRODUCT, costly=True)
_COSTLY = Rule(OpClass.ORIGINAL, costly=True)
_DECOMPOSITION = Rule(OpClass.ORIGINAL, reads=Reads.MATRIX, costly=True)


def operand_dtypes(precision: Any) -> set[np.dtype] | None:
    """Returns the dtypes that the algorithm of a product may read; None if its `precision` names no algorithm."""
    read = getattr(precision, "supported_lhs_types", None) or getattr(precision, "lhs_precision_type", None)
    return None if read is None else set(map(np.dtype, read if isinstance(read, tuple) else (read,)))


def _product(params: Mapping[str, Any], terms: Sequence[Any], rows: tuple[Axes | None, Axes | None]) -> Rule:
    """A product that sums nothing is a multiplication. One whose `precision` asks for float32 is not lowered."""
    precision = params["precision"]
    asked = precision if isinstance(precision, tuple) else (precision,)
    if lax.Precision.HIGHEST in asked or operand_dtypes(precision) == {np.dtype(np.float32)}:
        return _PRODUCT_AS_TRACED
    return _OUTER_PRODUCT if all(n == 1 for n in terms) else _LOWER._replace(rows=rows)


def _matmul(params: Mapping[str, Any], avals: Sequence[Any]) -> Rule:
    """A product of vectors is a sum, and no matrix unit speeds it up, so it is float32."""
    contracting, batch = params["dimension_numbers"]
    left, right = (
        [n for i, n in enumerate(aval.shape) if i not in (*c, *b)]
        for aval, c, b in zip(avals, contracting, batch, strict=True)
    )
    first, middle = len(batch[0]), len(batch[0]) + len(left)
    lefts, rights = frozenset(range(first, middle)), frozenset(range(middle, middle + len(right)))
    rule = _product(params, [avals[0].shape[axis] for axis in contracting[0]], (rights, lefts))
    # A layer with one input or one output is a layer, not a product of vectors.
    are_vectors = not (left or right) or (first > 0 and all(n == 1 for n in (*left, *right)))
    return _VECTORS if are_vectors and rule.op_class is OpClass.LOWER else rule


def _convolution(params: Mapping[str, Any], avals: Sequence[Any]) -> Rule:
    numbers, kernel = params["dimension_numbers"], avals[1].shape
    terms = [n for axis, n in enumerate(kernel) if axis != numbers.rhs_spec[0]]
    return _product(params, terms, (None, frozenset(range(len(kernel))) - {numbers.out_spec[1]}))


def _ragged_dot(params: Mapping[str, Any], avals: Sequence[Any]) -> Rule:
    contracting = params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][0]
    rows = frozenset(range(avals[0].ndim - 1))
    return _product(params, [avals[0].shape[axis] for axis in contracting], (None, rows))


def _integer_pow(params: Mapping[str, Any], _: Sequence[Any]) -> Rule:
    """`x ** -1` is torch's `reciprocal`, which is float32. Squares and cubes (GELU) are not."""
    return _FULL if params["y"] < 0 else _ELEMENTWISE


def _convert(params: Mapping[str, Any], _: Sequence[Any]) -> Rule:
    """A cast from float32 to float32 changes only the weak type. Any other cast is the user's choice."""
    return _CAST if params["new_dtype"] == np.float32 else ORIGINAL


def _gather(params: Mapping[str, Any], avals: Sequence[Any]) -> Rule:
    """Casting a whole table for a few of its rows would waste time. A fill value may not fit the low dtype."""
    fill = params["fill_value"]
    if fill is not None and np.isfinite(fill) and abs(fill) > float(np.finfo(np.float16).max):
        return _FULL
    x, indices = avals
    shape = (*indices.shape[:-1], *params["slice_sizes"])
    is_whole = math.prod(shape) == math.prod(x.shape) or is_smaller(x.shape, shape)
    return _FUSED_MOVE if is_whole else _MOVE


def _mul(params: Mapping[str, Any], _: Sequence[Any]) -> Rule:
    return _MULTIPLY if params.get("out_dtype") is None else ORIGINAL


def _table(rows: Mapping[str, Any]) -> Rules:
    table: dict[str, Any] = {}
    for names, rule in rows.items():
        for name in names.split():
            if name in table:
                raise ValueError(f"the primitive `{name}` is in the table twice")
            table[name] = rule
    return table


RULES: Rules = _table(
    {
        # Matrix units: low precision in, float32 accumulation, low precision out.
        "dot_general": _matmul,
        "conv_general_dilated": _convolution,
        "ragged_dot_general": _ragged_dot,
        # Large range or cancellation: PyTorch's fp32 list, and the special functions that it has no peer of.
        "exp exp2 expm1 pow polynomial rsqrt": _FULL,
        "log log2": _LOGARITHM,
        "log1p": _LOGARITHM_OF_MORE,
        "acos acosh asin atanh erf_inv": _EDGE,
        "asinh atan cosh sinh tan": _FULL,
        "bessel_i0e bessel_i1e digamma igamma igamma_grad_a igammac lgamma polygamma": _FULL,
        "regularized_incomplete_beta zeta": _FULL,
        # Sums over many terms.
        "reduce_sum cumsum reduce_window_sum": _TOTAL,
        "reduce_prod cumprod cumlogsumexp": _FULL,
        "scatter-add scatter-sub scatter-mul": _SCATTER_SUM,
        "integer_pow": _integer_pow,
        # Several operands of one dtype.
        "add": _ADD,
        "sub add_any": _SUBTRACT,
        "mul": _mul,
        "div": _DIVIDE,
        "max min clamp select_n": _SELECT,
        "eq ne lt le gt ge": _COMPARE,
        "rem atan2 nextafter": _PROMOTE,
        "scatter scatter-min scatter-max": _SCATTER,
        "select_and_scatter_add select_and_gather_add dynamic_update_slice": _UPDATE,
        "concatenate pad stack": _JOIN,
        # Bounded or exact in any dtype.
        "neg abs reduce_max reduce_min": _CHOOSE,
        "sign square one_minus_square is_finite": _ELEMENTWISE,
        "sin cos": _ANGLE,
        "sqrt": _ROOT,
        "floor ceil round cbrt tanh logistic erf erfc": _ELEMENTWISE,
        "argmax argmin cummax cummin sort top_k approx_top_k": _FOLLOW,
        "reduce_window_max reduce_window_min": _WINDOW,
        "psum psum_invariant pmax pmin reduce_scatter all_to_all": _FOLLOW,
        "ppermute all_gather all_gather_invariant pvary reshard": _MOVE,
        # Values move, none is computed.
        "broadcast_in_dim reshape squeeze stop_gradient": _FUSED_MOVE,
        "transpose slice dynamic_slice rev split unstack": _FUSED_MOVE,
        "gather": _gather,
        "tile copy name": _MOVE,
        "device_put sharding_constraint optimization_barrier": _MOVE,
        "convert_element_type": _convert,
        # Linear algebra, transforms and kernels in their own precision.
        "cholesky eig eigh geqrf householder_product hessenberg lu qr schur svd": _DECOMPOSITION,
        "custom_linear_solve triangular_solve tridiagonal tridiagonal_solve": _DECOMPOSITION,
        "fft ffi_call pallas_call float8_dot_general": _COSTLY,
        # Bits, complex numbers, and reductions by any function.
        "bitcast_convert_type reduce_precision complex conj imag real": ORIGINAL,
        "reduce reduce_window select_and_scatter random_gamma": ORIGINAL,
    }
)

# Arithmetic on known scalars, on the host: functions of the parameters of an equation and its operands.
FOLDS: Mapping[str, Callable[..., Any]] = {
    "abs": lambda _, x: np.abs(x),
    "add": lambda _, x, y: x + y,
    "convert_element_type": lambda _, x: x,
    "div": lambda _, x, y: x / y,
    "exp": lambda _, x: np.exp(x),
    "integer_pow": lambda params, x: x ** params["y"],
    "log": lambda _, x: np.log(x),
    "max": lambda _, x, y: np.maximum(x, y),
    "min": lambda _, x, y: np.minimum(x, y),
    "mul": lambda _, x, y: x * y,
    "neg": lambda _, x: -x,
    "pow": lambda _, x, y: x**y,
    "rsqrt": lambda _, x: 1 / np.sqrt(x),
    "sqrt": lambda _, x: np.sqrt(x),
    "square": lambda _, x: x * x,
    "stop_gradient": lambda _, x: x,
    "sub": lambda _, x, y: x - y,
}
