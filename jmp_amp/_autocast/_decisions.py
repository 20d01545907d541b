"""What is decided for one first-order op: the dtype of its operands, its parameters, what is known of its results."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jmp_amp._autocast import _compat
from jmp_amp._autocast._axes import Axes, moved, varying
from jmp_amp._autocast._rules import FOLDS, OpClass, Rule
from jmp_amp._autocast._sizes import is_smaller
from jmp_amp._autocast._values import (
    FLOAT32,
    Origin,
    Value,
    common_dtype,
    folded,
    merged_magnitudes,
    widest,
)


def differs(known: Iterable[tuple[Any, Value]]) -> bool:
    """Whether a value will have another dtype than it was traced in."""
    return any(value.dtype != dtype_of(atom) for atom, value in known)


def dtype_of(atom: Any) -> Any:
    """The dtype that a variable or literal was traced in; None for tokens and the like."""
    return getattr(atom.aval, "dtype", None)


def shape_of(atom: Any) -> tuple[int, ...] | None:
    """The shape of a variable or literal; None for tokens and the like."""
    return getattr(atom.aval, "shape", None)


def is_neutral(eqn: JaxprEqn) -> bool:
    """Whether it is all one in which dtype an op reads: a comparison, for instance."""
    return not any(dtype_of(var) == FLOAT32 for var in eqn.outvars)


def operand_dtype(rule: Rule, eqn: JaxprEqn, eligible: Sequence[Value], full: bool, low: np.dtype) -> Any:
    """Returns the dtype that all eligible operands are cast to, None to take them as they come."""
    op_class = rule.op_class
    if full or op_class in (OpClass.FULL, OpClass.ORIGINAL):
        return FLOAT32
    if op_class is OpClass.FOLLOW:
        return None if not rule.stores else widest(value.as_native().dtype for value in eligible) if eligible else None
    if op_class is OpClass.LOWER and any(value.exact or value.is_lost(low) for value in eligible):
        return FLOAT32
    if op_class is OpClass.LOWER:
        # Integers are left alone, and so is a product with an operand or result of another dtype, which the user chose.
        dtypes = {dtype_of(atom) for atom in (*eqn.invars, *eqn.outvars)}
        floating = {dtype for dtype in dtypes if jax.numpy.issubdtype(dtype, np.floating)}
        return low if floating <= {FLOAT32, low} else FLOAT32
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


def params_for(rule: Rule, eqn: JaxprEqn, dtype: np.dtype) -> dict[str, Any]:
    """Returns the parameters that name float32 and must name the dtype of the operands."""
    if dtype == FLOAT32:
        return {}
    params = {name: dtype for name in rule.dtype_params if eqn.params.get(name) == FLOAT32}
    jaxprs = {name: eqn.params[name] for name in rule.jaxpr_params if eqn.params[name] is not None}
    return params | {name: _compat.retyped(jaxpr, dtype) for name, jaxpr in jaxprs.items()}


def broadcast_shape(rule: Rule, eqn: JaxprEqn) -> tuple[int, ...] | None:
    """Returns the shape that an elementwise op broadcasts its operands to, None for other ops."""
    shape = shape_of(eqn.outvars[0]) if eqn.outvars else None
    return shape if rule.fuses and rule.op_class is OpClass.PROMOTE else None


def results(
    rule: Rule, eqn: JaxprEqn, values: Sequence[Value], operands: Sequence[Any], low: np.dtype
) -> tuple[Value, ...]:
    """Returns what is known of the results, from the dtypes that the operands are cast to."""
    scalars = all(
        value.origin is Origin.SCALAR and shape_of(atom) == () for value, atom in zip(values, eqn.invars, strict=True)
    )
    eligible = [dtype for dtype, atom in zip(operands, eqn.invars, strict=True) if dtype_of(atom) == FLOAT32]
    pairwise = rule.op_class is OpClass.FOLLOW and len(operands) == len(eqn.outvars)
    outs = []
    for i, var in enumerate(eqn.outvars):
        dtype = dtype_of(var)
        if dtype == FLOAT32 and rule.op_class is not OpClass.ORIGINAL and eligible:
            dtype = operands[i] if pairwise and dtype_of(eqn.invars[i]) == FLOAT32 else widest(eligible)
        out = _moved(eqn, values, var) if rule.moves else _computed(rule, eqn, values, var)
        if scalars and shape_of(var) == () and not rule.moves:
            out = Value(dtype, Origin.SCALAR)
        native = _native(rule, eqn, values, var, low) if dtype == FLOAT32 and eligible else None
        exact = dtype == FLOAT32 and any(n != 1 for n in shape_of(var) or ()) and _is_exact(rule, values, low)
        held = rule.moves and all(value.held for value in values)
        adds_up = rule.moves and any(value.adds_up for value in values)
        out = out._replace(dtype=dtype, native=native, exact=exact, held=held, adds_up=adds_up)
        outs.append(_fold(eqn, values, out) if scalars and dtype == FLOAT32 and shape_of(var) == () else out)
    return tuple(outs)


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


def _native(rule: Rule, eqn: JaxprEqn, values: Sequence[Value], var: Var, low: np.dtype) -> Any:
    """Returns the native dtype of a float32 result: that of the operands it has the elements of."""
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
    return low if rule.moves and is_smaller(shape_of(eqn.invars[0]) or (), shape_of(var) or ()) else None


def _is_broadcast(value: Value, var: Var) -> bool:
    """Whether an operand of the shape of the result was broadcast to it."""
    if value.origin is Origin.INPUT and value.axes:
        return value.axes[0] != varying(shape_of(var))
    return value.origin is Origin.SCALAR


def _is_exact(rule: Rule, values: Sequence[Value], low: np.dtype) -> bool:
    """Whether a float32 result must not be rounded, because its operands must not, or by what the op makes of them."""
    if not (rule.carries or rule.moves):
        return rule.logarithm
    return any(value.exceeds(low) or value.exact for value in values)
