"""A program with all of its low-precision values in float32."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jmp_amp._jaxpr import (
    HIGHER_ORDER,
    Body,
    Branches,
    Call,
    Loop,
    Structure,
    aval_with,
    bind,
    context_of,
    dtype_of,
    evaluate,
    holds_jaxprs,
    inner_jaxprs,
    open_jaxpr,
    structure_of,
    trace,
)
from jmp_amp.debug._float32 import evaluate_in_float32, is_below_float32
from jmp_amp.debug._values import is_inexact_array

# They read the bits of a value, or call code that was written for its dtype.
_KEEP_DTYPES = {"bitcast_convert_type", "pure_callback", "io_callback", "debug_callback", "ffi_call"}


def has_low_precision(jaxpr: Any) -> bool:
    """Returns whether a program reads or computes values of less than 32 bits."""
    opened, _ = open_jaxpr(jaxpr)
    variables = [*opened.invars, *opened.constvars, *(var for eqn in opened.eqns for var in eqn.outvars)]
    if any(is_below_float32(dtype_of(var)) for var in variables):
        return True
    return any(has_low_precision(inner) for eqn in opened.eqns for inner, _ in inner_jaxprs(eqn))


def program_in_float32(program: Any, arrays: Sequence[Any]) -> Any:
    """Returns a program without any casts to low precision, as a closed jaxpr; its results are float32, too.

    An op that does not run in float32, such as a kernel, keeps its dtypes. Constants keep the values that they were
    rounded to as the program was traced.
    """
    return trace(_in_float32(program), arrays)


def _in_float32(jaxpr: Any) -> Body:
    """Returns a jaxpr as a function of float32 arrays."""

    def run(*args: Any) -> list[Any]:
        return evaluate(jaxpr, [_widened(x) for x in args], _apply, _widened, _literal)

    dtypes = [(var.aval, dtype_of(var)) for var in open_jaxpr(jaxpr)[0].invars]
    return Body(run, [aval_with(aval, np.float32) if is_below_float32(dtype) else aval for aval, dtype in dtypes])


def _apply(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    entry, structure = HIGHER_ORDER.get(eqn.primitive.name), structure_of(eqn)
    with context_of(eqn):
        if entry is not None and structure is not None and entry.run is not None:
            return entry.run(eqn, [_in_float32(jaxpr) for jaxpr in _jaxprs_of(structure)], operands)
        if isinstance(structure, Call):
            return _in_float32(structure.jaxpr)(*(operands[i] for i in structure.operands))
        keeps_dtypes = eqn.primitive.name in _KEEP_DTYPES or holds_jaxprs(eqn)
        outs = None if keeps_dtypes else evaluate_in_float32(eqn, operands)
        return _apply_as_traced(eqn, operands) if outs is None else outs


def _jaxprs_of(structure: Structure) -> Sequence[Any]:
    """Returns the jaxprs of an equation in the order of `HigherOrder.run`."""
    match structure:
        case Call(jaxpr):
            return [jaxpr]
        case Branches(jaxprs):
            return jaxprs
        case Loop(body, cond=cond):
            return [body] if cond is None else [cond, body]


def _apply_as_traced(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Applies an op in its own dtypes, and returns float32."""
    pairs = zip(operands, eqn.invars, strict=True)
    narrow = [lax.convert_element_type(x, dtype_of(var)) if is_below_float32(dtype_of(var)) else x for x, var in pairs]
    return [_widened(x) for x in bind(eqn, narrow)]


def _literal(atom: Literal) -> Any:
    return _widened(np.asarray(atom.val, dtype_of(atom)))


def _widened(x: Any) -> Any:
    is_low = is_inexact_array(x) and is_below_float32(x.dtype)
    return lax.convert_element_type(x, np.float32) if is_low else x
