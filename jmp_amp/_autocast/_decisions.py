"""What is decided for one first-order op: the dtype of its operands, its parameters, what is known of its results."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jmp_amp._autocast import _compat
from jmp_amp._autocast._rules import FOLDS, OpClass, Rule
from jmp_amp._autocast._sizes import is_smaller
from jmp_amp._autocast._values import (
    FLOAT32,
    Origin,
    Value,
    common_dtype,
    folded,
    merged_magnitudes,
    origin_of_input,
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
    if op_class is OpClass.LOWER and any(value.exact for value in eligible):
        return FLOAT32
    if op_class is OpClass.LOWER:
        # Integers are left alone, and so is a product with an operand or result of another dtype, which the user chose.
        dtypes = {dtype_of(atom) for atom in (*eqn.invars, *eqn.outvars)}
        floating = {dtype for dtype in dtypes if jax.numpy.issubdtype(dtype, np.floating)}
        return low if floating <= {FLOAT32, low} else FLOAT32
    return common_dtype(eligible)


def without_biases(rule: Rule, eqn: JaxprEqn, values: Sequence[Value]) -> Sequence[Value]:
    """Marks the biases of products as uncommitted: inputs with no dimensions but those that the weight has alone.

    A bias of one dimension is uncommitted anyway; this is for layers with several, such as the heads of an attention.
    """
    features = max((value.features for value in values), default=0)
    if rule.op_class is not OpClass.PROMOTE or not features:
        return values
    return [
        value._replace(origin=Origin.UNCOMMITTED)
        if value.origin is Origin.INPUT and all(n == 1 for n in (shape_of(atom) or ())[:-features])
        else value
        for atom, value in zip(eqn.invars, values, strict=True)
    ]


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
        value.origin is Origin.UNCOMMITTED and shape_of(atom) == ()
        for value, atom in zip(values, eqn.invars, strict=True)
    )
    eligible = [dtype for dtype, atom in zip(operands, eqn.invars, strict=True) if dtype_of(atom) == FLOAT32]
    pairwise = rule.op_class is OpClass.FOLLOW and len(operands) == len(eqn.outvars)
    outs = []
    for i, var in enumerate(eqn.outvars):
        dtype = dtype_of(var)
        if dtype == FLOAT32 and rule.op_class is not OpClass.ORIGINAL and eligible:
            dtype = operands[i] if pairwise and dtype_of(eqn.invars[i]) == FLOAT32 else widest(eligible)
        origin, magnitudes = Origin.COMPUTED, None
        if rule.moves:
            origin = max((value.origin for value in values), default=Origin.UNCOMMITTED)
            if origin is Origin.INPUT:
                origin = origin_of_input(shape_of(var))
            floating = [value for value, atom in zip(values, eqn.invars, strict=True) if dtype_of(atom) == FLOAT32]
            magnitudes = merged_magnitudes(floating)
        elif scalars and shape_of(var) == ():
            origin = Origin.UNCOMMITTED
        native = _native(rule, eqn, values, var, low) if dtype == FLOAT32 and eligible else None
        exact = dtype == FLOAT32 and any(n != 1 for n in shape_of(var) or ()) and _is_exact(rule, values, low)
        features = rule.features if rule.features and values[1].origin is Origin.INPUT else 0
        held = rule.moves and all(value.held for value in values)
        out = Value(dtype, origin, magnitudes, native, exact=exact, held=held, features=features)
        outs.append(_fold(eqn, values, out) if scalars and dtype == FLOAT32 and shape_of(var) == () else out)
    return tuple(outs)


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
    same_size = [
        value.as_native().dtype
        for value, atom in zip(values, eqn.invars, strict=True)
        if value.origin is not Origin.UNCOMMITTED and dtype_of(atom) == FLOAT32 and shape_of(atom) == shape_of(var)
    ]
    if same_size:
        return widest(same_size)
    return low if rule.moves and is_smaller(shape_of(eqn.invars[0]) or (), shape_of(var) or ()) else None


def _is_exact(rule: Rule, values: Sequence[Value], low: np.dtype) -> bool:
    """Whether a float32 result must not be rounded, because its operands must not, or by what the op makes of them."""
    if not (rule.carries or rule.moves):
        return rule.logarithm
    return any(value.exceeds(low) or value.exact for value in values)
