"""A product with a weight in a float8 format: its operands, and the cotangents of its result, are read in float8."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn

from jmp_amp._autocast._op import Op, Rewrite
from jmp_amp._autocast._rewrites._decided import Decided
from jmp_amp._autocast._rule import OpClass
from jmp_amp._float8 import float8_dot
from jmp_amp._formats import Float8
from jmp_amp._jaxpr import shape_of


def match(decided: Decided) -> Rewrite | None:
    """Matches a product that gains by float8."""
    form = decided.format
    is_product = decided.rule.op_class is OpClass.LOWER and all(dtype == form.dtype for dtype in decided.dtypes)
    if form.float8 is None or not is_product or why_not_float8(decided.eqn, decided.are_inputs, form.float8):
        return None
    return Float8Product(form.dtype, form.float8)


def why_not_float8(eqn: JaxprEqn, are_inputs: Sequence[bool], float8: Float8) -> str | None:
    """Returns why a low-precision product or convolution is not float8, as a key of `REASONS`; None if it is.

    Args:
        eqn: the product.
        are_inputs: whether each operand is an input of the program, moved or not, so that it may be a weight.
        float8: the sizes.
    """
    if eqn.primitive.name != "dot_general":
        return "no matrix product"
    contracting, batch = eqn.params["dimension_numbers"]
    if batch[0] or len(contracting[0]) != 1:
        return "no matrix product"
    if not any(are_inputs[:2]):
        return "no weight"
    terms, free = _sizes(eqn, contracting)
    if any(n % float8.multiple for n in (terms, *free)):
        return "multiple"
    if not any(is_one and _gains(terms, free[1 - i], free[i], float8) for i, is_one in enumerate(are_inputs[:2])):
        return "size"
    return None


def _sizes(eqn: JaxprEqn, contracting: Any) -> tuple[int, list[int]]:
    """Returns the number of terms of a product, and the size of each operand along its other axes."""
    shapes = [shape_of(atom) or () for atom in eqn.invars[:2]]
    terms = shapes[0][contracting[0][0]]
    return terms, [
        math.prod(n for axis, n in enumerate(s) if axis not in c) for s, c in zip(shapes, contracting, strict=True)
    ]


def _gains(terms: int, rows: int, columns: int, float8: Float8) -> bool:
    is_large = min(terms, columns) >= float8.min_size and terms * columns >= float8.min_weight
    return is_large and rows >= float8.min_rows


@dataclasses.dataclass(frozen=True)
class Float8Product:
    """Evaluates a product by `float8_dot`, which casts the weight from the dtype that it is stored in."""

    base: np.dtype
    float8: Float8

    def __call__(self, op: Op, args: Sequence[Any]) -> list[Any]:
        lhs, rhs = args
        operands = self.float8.operands, self.float8.operands
        return [float8_dot(lhs, rhs, self.base, operands, self.float8.cotangents, **dict(op.params))]
