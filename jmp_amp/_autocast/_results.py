"""Describes the results of a first-order op from what is known of its operands."""

import functools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from jmp_amp._autocast._axes import Axes, moved, varying
from jmp_amp._autocast._operands import OpContext, weighed
from jmp_amp._autocast._rule import OpClass, Rule
from jmp_amp._autocast._rules import FOLDS
from jmp_amp._autocast._sizes import is_smaller
from jmp_amp._autocast._values import Origin, Value, folded, merged_magnitudes, widest
from jmp_amp._formats import FLOAT32
from jmp_amp._jaxpr import dtype_of, shape_of


def results(op: OpContext, operands: Sequence[Any]) -> tuple[Value, ...]:
    """Returns what is known of the results of an op.

    Args:
        op: the op.
        operands: the dtypes that its operands are cast to.
    """
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
        is_float32 = dtype_of(var) == FLOAT32
        out = out._replace(
            dtype=_result_dtype(op, i, operands, eligible),
            native=_native(op, var, lambda value: value.as_native().dtype) if is_float32 and eligible else None,
            lean=_native(op, var, op.lean) if op.has_streams and is_float32 and eligible else None,
            save_cast=rule.moves and all(value.save_cast for value in values),
        )
        outs.append(_fold(eqn, values, out) if scalars and is_float32 and shape_of(var) == () else out)
    return tuple(outs)


def _result_dtype(op: OpContext, i: int, operands: Sequence[Any], eligible: Sequence[Any]) -> Any:
    """Returns the dtype of a result. An op on several arrays side by side leaves each in its own dtype."""
    dtype, op_class = dtype_of(op.eqn.outvars[i]), op.rule.op_class
    if dtype != FLOAT32 or op_class is OpClass.ORIGINAL or not eligible:
        return dtype
    is_pairwise = op_class is OpClass.FOLLOW and len(operands) == len(op.eqn.outvars)
    return operands[i] if is_pairwise and dtype_of(op.eqn.invars[i]) == FLOAT32 else widest(eligible)


def _moved(eqn: JaxprEqn, values: Sequence[Value], var: Var) -> Value:
    """Returns the origin and the magnitudes of the result of an op that moves values."""
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
    if origin.takes_bias and known:
        return Value(None, origin, axes=known)
    return Value(None, Origin.COMPUTED, magnitudes)


def _moved_axes(
    eqn: JaxprEqn, value: Value, before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[Axes | None, ...]:
    def move(axes: Axes) -> Axes | None:
        return moved(eqn.primitive.name, eqn.params, before, after, axes)

    if not value.origin.takes_bias:
        return tuple(map(move, value.axes))
    # The axes of the weight move. A bias varies along none of the others, nor along new ones.
    places = [(move(varying(before)), move(rows)) for rows in value.axes]
    return tuple(
        None if all_axes is None or rows is None else varying(after) - (all_axes - rows) for all_axes, rows in places
    )


def _computed(rule: Rule, eqn: JaxprEqn, values: Sequence[Value], var: Var) -> Value:
    """Returns the origin of the result of another op: a product, or a sum of products and their biases, stays one."""
    if rule.op_class is OpClass.LOWER and any(rows is not None for rows in rule.rows):
        inputs = [value.origin <= Origin.INPUT for value in values[:2]]
        weights = inputs if any(inputs) else [True, True]
        axes = tuple(rows for rows, is_weight in zip(rule.rows, weights, strict=True) if is_weight and rows is not None)
        return Value(None, Origin.PRODUCT, axes=axes) if axes else Value(None)
    products = [value for value in values if value.origin.takes_bias]
    others = [value for value in weighed(rule, eqn, values) if value.origin is not Origin.SCALAR]
    if rule.adds and products and len(products) == len(others):
        axes = functools.reduce(lambda a, b: tuple(x | y for x in a for y in b), (value.axes for value in products))
        return Value(None, Origin.SUM, axes=axes)
    return Value(None)


def _fold(eqn: JaxprEqn, values: Sequence[Value], out: Value) -> Value:
    """Computes a scalar from known scalars on the host, so that `-1e9` is known however it was written."""
    fold = FOLDS.get(eqn.primitive.name)
    known = [value.scalar for value in values]
    if fold is None or None in known:
        return out
    with np.errstate(all="ignore"):
        return folded(out, fold(eqn.params, *map(np.float32, known)))


def _native(op: OpContext, var: Var, dtype: Callable[[Value], Any]) -> Any:
    """Returns the native dtype of a float32 result: the `dtype` of the operands whose elements it holds."""
    rule, eqn, values = op.rule, op.eqn, op.values
    if rule.op_class not in (OpClass.PROMOTE, OpClass.FOLLOW):
        return None
    floating = [
        (value, shape_of(atom))
        for value, atom in zip(weighed(rule, eqn, values), eqn.invars, strict=True)
        if dtype_of(atom) == FLOAT32 and not _is_broadcast(value, shape_of(atom) or ())
    ]
    if not rule.moves:
        floating = [(value, shape) for value, shape in floating if shape == shape_of(var)]
    elif len(floating) == 1 and is_smaller(floating[0][1] or (), shape_of(var) or ()):
        floating = []
    if floating:
        return widest(dtype(value) for value, _ in floating)
    return op.format.dtype if rule.moves and is_smaller(shape_of(eqn.invars[0]) or (), shape_of(var) or ()) else None


def _is_broadcast(value: Value, shape: tuple[Any, ...]) -> bool:
    """Whether an operand was broadcast to its shape."""
    if value.origin is Origin.INPUT and value.axes:
        return value.axes[0] != varying(shape)
    return value.origin is Origin.SCALAR
