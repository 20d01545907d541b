"""The unit of the result of each primitive, by primitive name."""

from collections.abc import Callable, Mapping
from fractions import Fraction

from jax.extend.core import JaxprEqn, Literal


def _constant_exponent(eqn: JaxprEqn) -> Fraction | None:
    """Returns the exponent of a `pow`, which float32 rounds (1/3), or None where it is no constant."""
    exponent = eqn.invars[1]
    return Fraction(float(exponent.val)).limit_denominator(100) if isinstance(exponent, Literal) else None


# The result has the unit of the first operand to a power, which the equation knows; or None where it does not.
POWERS: Mapping[str, Callable[[JaxprEqn], Fraction | None]] = {
    "sqrt": lambda _: Fraction(1, 2),
    "rsqrt": lambda _: Fraction(-1, 2),
    "cbrt": lambda _: Fraction(1, 3),
    "square": lambda _: Fraction(2),
    "integer_pow": lambda eqn: Fraction(eqn.params["y"]),
    "pow": _constant_exponent,
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
