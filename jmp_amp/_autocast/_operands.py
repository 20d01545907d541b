"""Decides the dtype of the operands of a first-order op, and of the parameters that name it."""

import math
from collections.abc import Sequence
from itertools import compress
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jmp_amp._autocast._axes import Axes, varying
from jmp_amp._autocast._rule import Makes, OpClass, Rule
from jmp_amp._autocast._rules import operand_dtypes
from jmp_amp._autocast._values import Origin, Stream, Value, common_dtype, widest
from jmp_amp._formats import FLOAT32, Format
from jmp_amp._jaxpr import dtype_of, retyped, shape_of


class OpContext(NamedTuple):
    """An op, and everything that its dtypes depend on.

    Attributes:
        eqn: the equation.
        rule: the rule of the op.
        values: what is known of its operands.
        format: the format of its region.
        reads_full: whether all readers of its results read float32, so that it is evaluated in float32.
        overflows: whether its results may be too large for the low dtype, because of a constant.
        shares_norm: whether it reads a norm of low-precision data that a product reads too.
        has_streams: whether residual streams are stored in low precision.
        stream: how the residual stream that it adds to is read; `NONE` if there is none.
    """

    eqn: JaxprEqn
    rule: Rule
    values: tuple[Value, ...]
    format: Format
    reads_full: bool = False
    overflows: bool = False
    shares_norm: bool = False
    has_streams: bool = False
    stream: Stream = Stream.NONE

    @property
    def is_float32(self) -> list[bool]:
        """Whether each operand was traced in float32."""
        return [dtype_of(atom) == FLOAT32 for atom in self.eqn.invars]

    def lean(self, value: Value) -> Any:
        """Returns the native dtype of an operand where inputs of the program count as low-precision data."""
        return self.format.dtype if value.origin is Origin.INPUT else value.lean or value.dtype


def decide(op: OpContext) -> tuple[Any, str]:
    """Returns the dtype that the float32 operands of an op are cast to, and why, as a key of `REASONS`.

    None leaves the operands as they are.
    """
    rule, low = op.rule, op.format.dtype
    atoms = (*op.eqn.invars, *op.eqn.outvars)
    is_traced = not any(dtype_of(atom) == FLOAT32 for atom in atoms)
    if rule.op_class is OpClass.ORIGINAL:
        return FLOAT32, "traced" if is_traced else "precision" if rule.is_product else "rule"
    values = list(compress(weighed(rule, op.eqn, op.values), op.is_float32))
    if _joins_stream(op):
        return low, "stream"
    if rule.op_class is OpClass.FULL:
        return FLOAT32, "traced" if is_traced else "rule"
    if rule.op_class is OpClass.LOWER:
        allowed = operand_dtypes(op.eqn.params.get("precision"))
        if any(value.overflows(low) or value.is_lost(low) for value in values):
            return FLOAT32, "constant"
        if not op.format.takes(set(map(dtype_of, atoms))) or not (allowed is None or low in allowed):
            return FLOAT32, "traced"
        return (FLOAT32, "constant") if op.overflows else (low, "traced" if is_traced else "rule")
    if is_traced or not values:
        return None, "traced" if is_traced else "rule"
    if op.overflows or (op.reads_full and not _is_exact(op)):
        return FLOAT32, _why_float32(op, values)
    stored = [value.as_native() for value in values] if op.shares_norm or rule.stores else values
    dtype = common_dtype(stored) if rule.op_class is OpClass.PROMOTE else widest(value.dtype for value in stored)
    if dtype == FLOAT32:
        why = _why_float32(op, values)
    else:
        widened = [value for value in values if rule.op_class is OpClass.PROMOTE and value.dtype == FLOAT32]
        is_stream = op.has_streams and any(value.origin is not Origin.SCALAR for value in widened)
        why = "stream" if is_stream else "bias" if widened else "rule"
    return dtype if rule.op_class is OpClass.PROMOTE or rule.stores else None, why


def _why_float32(op: OpContext, values: Sequence[Value]) -> str:
    """Returns why an op that follows its operands reads float32; `values` are those traced in float32."""
    arrays = [value for value in values if value.origin is not Origin.SCALAR]
    is_low = bool(arrays) and all(value.dtype != FLOAT32 for value in arrays)
    low = op.format.dtype
    if op.overflows or any(value.exceeds(low) or (is_low and not value.fits(low)) for value in values):
        return "constant"
    return "readers" if is_low else "rule"


def _is_exact(op: OpContext) -> bool:
    """Whether an op scales a product by a power of two in a dtype with the range of float32, so that it rounds nothing.

    Attention with 64 features a head divides its scores by 8. Divided in float32, they would be stored in float32 on a
    TPU, where XLA fuses the product with the maximum of the softmax and keeps the result for the backward pass.
    """
    if not op.rule.scales or op.format.needs_loss_scale:
        return False
    array, factor = op.values
    if op.rule.makes is Makes.PRODUCT and array.scalar is not None:
        array, factor = factor, array
    return array.origin is Origin.PRODUCT and factor.scalar is not None and abs(math.frexp(factor.scalar)[0]) == 0.5


def _joins_stream(op: OpContext) -> bool:
    """Whether an op adds low-precision data to a residual stream, and not only a bias."""
    if op.stream is Stream.NONE:
        return False
    terms = [value for value in weighed(op.rule, op.eqn, op.values) if value.origin is not Origin.SCALAR]
    dtypes = [op.lean(value) if op.stream is Stream.NORM else value.as_native().dtype for value in terms]
    is_low = all(dtype == op.format.dtype for dtype in dtypes)
    fits = not any(value.overflows(op.format.dtype) for value in op.values)
    return is_low and fits and len(terms) == 2


def weighed(rule: Rule, eqn: JaxprEqn, values: Sequence[Value]) -> Sequence[Value]:
    """Returns the operands of an op, with `SCALAR` as the origin of those that do not widen it, and of no others.

    These are scalars beside an array, arrays that hold one number in an op that only selects values, and biases.
    """
    if rule.op_class is not OpClass.PROMOTE:
        return values
    features: list[Axes] = []
    if rule.adds:
        products = [(a, v) for a, v in zip(eqn.invars, values, strict=True) if v.origin.takes_bias]
        features = [varying(shape_of(atom)) - rows for atom, value in products for rows in value.axes]
    result = shape_of(eqn.outvars[0])
    return [
        value._replace(origin=Origin.SCALAR)
        if _does_not_widen(rule, atom, value, result, features)
        else value._replace(origin=max(value.origin, Origin.INPUT), native=None if value.filled else value.native)
        for atom, value in zip(eqn.invars, values, strict=True)
    ]


def _does_not_widen(
    rule: Rule, atom: Any, value: Value, result: tuple[int, ...] | None, features: Sequence[Axes]
) -> bool:
    """Whether an operand of an op that promotes does not widen the others."""
    if value.origin is Origin.SCALAR:
        if shape_of(atom) == result == ():
            return value.scalar is not None  # a known number; a scalar variable is as wide as the other scalar
        return not (value.filled and rule.arithmetic and shape_of(atom) == result)
    return value.origin is Origin.INPUT and any(map(value.axes[0].issubset, features))


def params_for(op: OpContext, operands: Sequence[Any]) -> dict[str, Any]:
    """Returns new values for the parameters that name float32 and must name the dtype that the op computes in.

    Args:
        op: the op.
        operands: the dtypes that its operands are cast to.
    """
    rule, eqn, eligible = op.rule, op.eqn, list(compress(operands, op.is_float32))
    dtype = widest(eligible) if eligible else FLOAT32
    if dtype == FLOAT32:
        return {}
    params: dict[str, Any] = {name: dtype for name in rule.dtype_params if eqn.params.get(name) == FLOAT32}
    jaxprs = {name: eqn.params[name] for name in rule.jaxpr_params if eqn.params[name] is not None}
    return params | {name: retyped(jaxpr, dtype) for name, jaxpr in jaxprs.items()}
