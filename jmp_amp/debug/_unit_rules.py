"""The unit of the result of each primitive, by primitive name."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

# The result has the unit of the operand to a power, which may depend on the parameters.
POWERS: Mapping[str, Callable[[Mapping[str, Any]], Fraction]] = {
    "sqrt": lambda _: Fraction(1, 2),
    "rsqrt": lambda _: Fraction(-1, 2),
    "cbrt": lambda _: Fraction(1, 3),
    "square": lambda _: Fraction(2),
    "integer_pow": lambda params: Fraction(params["y"]),
}

# The result has the product of the units of the operands, where each has this power.
PRODUCTS: Mapping[str, tuple[int, int]] = {
    "mul": (1, 1),
    "div": (1, -1),
    "dot_general": (1, 1),
    "conv_general_dilated": (1, 1),
    "ragged_dot_general": (1, 1),
}

# The result has no unit, and the operands have any.
UNITLESS = {"is_finite", "sign", "argmax", "argmin"}

# All operands and the result have one unit, as for the primitives whose `Rule` says `passes_on`.
LINEAR = {
    *("convert_element_type", "reduce_precision", "real", "imag", "conj", "complex", "rem", "nextafter"),
    *("reduce_sum", "cumsum", "cummax", "cummin", "reduce_window_sum", "sort", "top_k"),
    *("psum", "psum_invariant", "pmax", "pmin", "reduce_scatter", "all_to_all"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
}

# Each result has the unit of the operand at the same position.
PAIRWISE = {"optimization_barrier", "psum", "psum_invariant", "sort", "copy", "split"}

# The predicate of a primitive in error messages; `{}` stands for its operands.
PREDICATES = {
    "add": "adds {}",
    "add_any": "adds {}",
    "sub": "subtracts {}",
    "select_n": "selects between {}",
    "max": "compares {}",
    "min": "compares {}",
    "clamp": "clips {}",
    "concatenate": "concatenates {}",
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), "compares {}"),
}
