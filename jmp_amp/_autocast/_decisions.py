"""What is decided for one first-order op: the dtype of its operands, its parameters, what is known of its results."""

import functools
from collections.abc import Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import JaxprEqn, Var

from jmp_amp._autocast._axes import Axes, moved, varying
from jmp_amp._autocast._format import FLOAT32, Format
from jmp_amp._autocast._rules import FOLDS, Makes, OpClass, Rule
from jmp_amp._autocast._sizes import is_smaller
from jmp_amp._autocast._values import Origin, Value, common_dtype, folded, merged_magnitudes, widest
from jmp_amp._jaxpr import dtype_of, retyped, shape_of


class OpContext(NamedTuple):
    """What an op is decided by.

    Attributes:
        eqn: the equation.
        rule: the rule of the op.
        values: what is known of its operands.
        format: that of its region.
        reads_full: whether its results are read in float32 only, so that it is evaluated in float32.
        shares_norm: whether it reads a norm of low-precision data that a product reads, too.
    """

    eqn: JaxprEqn
    rule: Rule
    values: tuple[Value, ...]
    format: Format
    reads_full: bool = False
    shares_norm: bool = False

    @property
    def is_float32(self) -> list[bool]:
        """Whether each operand was traced in float32."""
        return [dtype_of(atom) == FLOAT32 for atom in self.eqn.invars]


def differs(known: Iterable[tuple[Any, Value]]) -> bool:
    """Whether a value will have another dtype than it was traced in."""
    return any(value.dtype != dtype_of(atom) for atom, value in known)


def returns_no_float32(eqn: JaxprEqn) -> bool:
    """Whether the dtype of the operands does not show in the results: a comparison, for instance."""
    return not any(dtype_of(var) == FLOAT32 for var in eqn.outvars)


def operand_dtype(op: OpContext) -> Any:
    """Returns the dtype that the float32 operands of an op are cast to, None to take them as they come."""
    op_class, eqn = op.rule.op_class, op.eqn
    if op.reads_full or op_class in (OpClass.FULL, OpClass.ORIGINAL):
        return FLOAT32
    eligible = list(compress(weighed(op.rule, eqn, op.values), op.is_float32))
    if op.shares_norm:
        eligible = [value.as_native() for value in eligible]
    if op_class is OpClass.FOLLOW:
        return widest(value.as_native().dtype for value in eligible) if op.rule.stores and eligible else None
    if op_class is OpClass.LOWER:
        is_kept = any(value.keep_float32 or value.is_lost(op.format.operands) for value in eligible)
        takes = op.format.takes({dtype_of(atom) for atom in (*eqn.invars, *eqn.outvars)})
        return op.format.operands if takes and not is_kept else FLOAT32
    return common_dtype(eligible)


def weighed(rule: Rule, eqn: JaxprEqn, values: Sequence[Value]) -> Sequence[Value]:
    """Returns the operands of an op with those as scalars that do not widen it, and no others.

    These are scalars where there is an array, arrays that hold one number where values are only chosen, and biases.
    """
    if rule.op_class is not OpClass.PROMOTE:
        return values
    features: list[Axes] = []
    if rule.adds:
        products = [(a, v) for a, v in zip(eqn.invars, values, strict=True) if v.origin is Origin.PRODUCT]
        features = [varying(shape_of(atom)) - rows for atom, value in products for rows in value.axes]
    result = shape_of(eqn.outvars[0])
    return [
        value._replace(origin=Origin.SCALAR)
        if _gives_way(rule, atom, value, result, features)
        else value._replace(origin=max(value.origin, Origin.INPUT), native=None if value.filled else value.native)
        for atom, value in zip(eqn.invars, values, strict=True)
    ]


def _gives_way(rule: Rule, atom: Any, value: Value, result: tuple[int, ...] | None, features: Sequence[Axes]) -> bool:
    if value.origin is Origin.SCALAR:
        if shape_of(atom) == result == ():
            return value.scalar is not None  # a number; a variable is as wide as what it meets
        return not (value.filled and rule.arithmetic and shape_of(atom) == result)
    return value.origin is Origin.INPUT and any(map(value.axes[0].issubset, features))


def params_for(op: OpContext, operands: Sequence[Any]) -> dict[str, Any]:
    """Returns the parameters that name float32 and must name the dtype that the op computes in.

    Args:
        op: the op.
        operands: the dtypes that its operands are cast to.
    """
    rule, eqn, eligible = op.rule, op.eqn, list(compress(operands, op.is_float32))
    dtype = widest(eligible) if eligible else FLOAT32
    if dtype == FLOAT32:
        return {}
    result = op.format.results if rule.op_class is OpClass.LOWER else dtype
    params: dict[str, Any] = {name: result for name in rule.dtype_params if eqn.params.get(name) == FLOAT32}
    jaxprs = {name: eqn.params[name] for name in rule.jaxpr_params if eqn.params[name] is not None}
    return params | {name: retyped(jaxpr, dtype) for name, jaxpr in jaxprs.items()}


def results(op: OpContext, operands: Sequence[Any]) -> tuple[Value, ...]:
    """Returns what is known of the results, from the dtypes that the operands are cast to."""
    eqn, rule, values = op.eqn, op.rule, op.values
    scalars = all(
        value.origin is Origin.SCALAR and shape_of(atom) == () for value, atom in zip(values, eqn.invars, strict=True)
    )
    eligible = list(compress(operands, op.is_float32))
    outs = []
    for i, var in enumerate(eqn.outvars):
        out = _moved(eqn, values, var) if rule.moves else _computed(rule, eqn, values, var)
        if scalars and shape_of(var) == () and not rule.moves:
            out = Value(None, Origin.SCALAR)
        is_array = any(n != 1 for n in shape_of(var) or ())
        is_float32 = dtype_of(var) == FLOAT32
        out = out._replace(
            dtype=_result_dtype(op, i, operands, eligible),
            native=_native(op, var) if is_float32 and eligible else None,
            keep_float32=is_float32 and is_array and _keeps_float32(op),
            save_cast=rule.moves and all(value.save_cast for value in values),
            adds_up=rule.moves and any(value.adds_up for value in values),
        )
        outs.append(_fold(eqn, values, out) if scalars and is_float32 and shape_of(var) == () else out)
    return tuple(outs)


def _result_dtype(op: OpContext, i: int, operands: Sequence[Any], eligible: Sequence[Any]) -> Any:
    """Returns the dtype of a result; of an op on several arrays side by side, each keeps its own."""
    dtype, op_class = dtype_of(op.eqn.outvars[i]), op.rule.op_class
    if dtype != FLOAT32 or op_class is OpClass.ORIGINAL or not eligible:
        return dtype
    if op_class is OpClass.LOWER and widest(eligible) == op.format.operands:
        return op.format.results
    is_pairwise = op_class is OpClass.FOLLOW and len(operands) == len(op.eqn.outvars)
    return operands[i] if is_pairwise and dtype_of(op.eqn.invars[i]) == FLOAT32 else widest(eligible)


def _moved(eqn: JaxprEqn, values: Sequence[Value], var: Var) -> Value:
    """Returns where the result of an op that moves values comes from, and its magnitudes."""
    origin, shape = max((value.origin for value in values), default=Origin.SCALAR), shape_of(var) or ()
    floating = [i for i, atom in enumerate(eqn.invars) if dtype_of(atom) == FLOAT32]
    magnitudes = merged_magnitudes([values[i] for i in floating])
    if origin is Origin.SCALAR:
        return Value(None, origin, magnitudes, filled=bool(varying(shape)))
    axes: tuple[Axes | None, ...] = (None,)
    if len(floating) == 1:
        (source,) = floating
        axes = _moved_axes(eqn, values[source], shape_of(eqn.invars[source]) or (), shape)
    if origin is Origin.INPUT:
        along = varying(shape) if axes[0] is None else axes[0]
        return Value(None, origin, magnitudes, axes=(along,)) if along else Value(None, Origin.SCALAR, magnitudes)
    known = tuple(each for each in axes if each is not None)
    if origin is Origin.PRODUCT and known:
        return Value(None, origin, axes=known)
    return Value(None, Origin.COMPUTED, magnitudes)


def _moved_axes(
    eqn: JaxprEqn, value: Value, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[Axes | None, ...]:
    def move(axes: Axes) -> Axes | None:
        return moved(eqn.primitive.name, eqn.params, before, after, axes)

    if value.origin is not Origin.PRODUCT:
        return tuple(map(move, value.axes))
    # The axes that are the weight's alone move; along all others, new ones too, no bias varies.
    places = [(move(varying(before)), move(rows)) for rows in value.axes]
    return tuple(
        None if all_axes is None or rows is None else varying(after) - (all_axes - rows) for all_axes, rows in places
    )


def _computed(rule: Rule, eqn: JaxprEqn, values: Sequence[Value], var: Var) -> Value:
    """Returns whether the result of any other op is a product, or a sum of products and their biases."""
    if rule.op_class is OpClass.LOWER and any(rows is not None for rows in rule.rows):
        inputs = [value.origin <= Origin.INPUT for value in values[:2]]
        weights = inputs if any(inputs) else [True, True]
        axes = tuple(rows for rows, is_weight in zip(rule.rows, weights, strict=True) if is_weight and rows is not None)
        return Value(None, Origin.PRODUCT, axes=axes) if axes else Value(None)
    products = [value for value in values if value.origin is Origin.PRODUCT]
    others = [value for value in weighed(rule, eqn, values) if value.origin is not Origin.SCALAR]
    if rule.adds and products and len(products) == len(others):
        axes = functools.reduce(lambda a, b: tuple(x | y for x in a for y in b), (value.axes for value in products))
        return Value(None, Origin.PRODUCT, axes=axes)
    return Value(None)


def _fold(eqn: JaxprEqn, values: Sequence[Value], out: Value) -> Value:
    """Computes a constant scalar on the host, so that `-1e9` is known however it was written."""
    fold = FOLDS.get(eqn.primitive.name)
    known = [value.scalar for value in values]
    if fold is None or None in known:
        return out
    with np.errstate(all="ignore"):
        return folded(out, fold(eqn.params, *map(np.float32, known)))


def _native(op: OpContext, var: Var) -> Any:
    """Returns the native dtype of a float32 result: that of the operands it has the elements of."""
    rule, eqn, values = op.rule, op.eqn, op.values
    if rule.op_class not in (OpClass.PROMOTE, OpClass.FOLLOW):
        return None
    floating = [
        (value, shape_of(atom))
        for value, atom in zip(weighed(rule, eqn, values), eqn.invars, strict=True)
        if dtype_of(atom) == FLOAT32 and not _is_broadcast(value, var)
    ]
    if not rule.moves or len(floating) < 2:  # and not joined
        floating = [(value, shape) for value, shape in floating if shape == shape_of(var)]
    if floating:
        return widest(value.as_native().dtype for value, _ in floating)
    return op.format.results if rule.moves and is_smaller(shape_of(eqn.invars[0]) or (), shape_of(var) or ()) else None


def _is_broadcast(value: Value, var: Var) -> bool:
    """Whether an operand of the shape of the result was broadcast to it."""
    if value.origin is Origin.INPUT and value.axes:
        return value.axes[0] != varying(shape_of(var))
    return value.origin is Origin.SCALAR


def _keeps_float32(op: OpContext) -> bool:
    """Whether a float32 result must not be rounded, because its operands must not, or by what the op makes of them."""
    if not op.rule.keeps_magnitude:
        return op.rule.makes is Makes.LOGARITHM
    return any(value.exceeds(op.format.results) or value.keep_float32 for value in op.values)
