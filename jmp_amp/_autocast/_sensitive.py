"""Values whose rounding errors grow: what is read as an angle, as a term of a squared distance, or by a decomposition.

An angle of 100 in float16 is off by 0.03 rad, in bfloat16 by 0.25. The terms of |x|^2 + |y|^2 - 2 x.y cancel where x is
close to y; PyTorch has `cdist` on its fp32 list. The relative error of a solution is that of the matrix times the
condition number (Higham, Accuracy and Stability of Numerical Algorithms, chapter 7). So such values are computed in
float32, and so is the product that they come from.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_amp._autocast import _compat
from jmp_amp._autocast._axes import varying
from jmp_amp._autocast._decisions import dtype_of, shape_of
from jmp_amp._autocast._rules import OpClass, Rule
from jmp_amp._autocast._values import Reads, Squares

_RuleOf = Callable[[JaxprEqn], Rule]

Known = dict[Var, Squares]


def sensitive(jaxpr: Any, squares: Known, results: Sequence[Reads], rule_of: _RuleOf) -> dict[Var, Reads]:
    """Returns the values that are read in one of these ways, through arithmetic, moves and calls, and in which.

    Args:
        jaxpr: closed or open.
        squares: from `squares_in` this jaxpr.
        results: how its results are read.
        rule_of: the rule of a first-order equation.
    """
    opened, _ = _compat.open_jaxpr(jaxpr)
    found: dict[Var, Reads] = {}

    def note(atoms: Sequence[Any], reads: Sequence[Reads]) -> None:
        for atom, each in zip(atoms, reads, strict=True):
            if isinstance(atom, Var):
                found[atom] = _merged(found.get(atom, each), each)

    note(opened.outvars, [reads if reads in _WAYS else Reads.ANY for reads in results])
    for eqn in reversed(opened.eqns):
        outs = [found.get(var, Reads.ANY) for var in eqn.outvars]
        inner, operands = _held(eqn)
        for each in inner:
            inside = sensitive(each, squares_in(each, _at(squares, operands), rule_of), outs, rule_of)
            note(operands, [inside.get(var, Reads.ANY) for var in each.invars])
        if not inner:
            note(eqn.invars, [_reads(eqn, rule_of(eqn), outs, squares)] * len(eqn.invars))
    return {var: reads for var, reads in found.items() if reads in _WAYS}


_WAYS = (Reads.ANGLE, Reads.DISTANCE, Reads.MATRIX)


def _merged(a: Reads, b: Reads) -> Reads:
    """An angle is read as nothing else; of the other ways, one reader suffices."""
    return max(a, b) if max(a, b) > Reads.ANGLE else min(a, b)


def _reads(eqn: JaxprEqn, rule: Rule, outs: Sequence[Reads], squares: Known) -> Reads:
    if rule.angle:
        return Reads.ANGLE
    if rule.decomposes:
        return Reads.MATRIX
    reads = functools.reduce(_merged, outs) if outs else Reads.ANY
    if rule.op_class is OpClass.LOWER or not (rule.passes_on or reads is Reads.MATRIX):
        return Reads.ANY
    if rule.arithmetic and not rule.scales and Squares.SUM in _at(squares, eqn.invars):
        return max(reads, Reads.DISTANCE)
    return reads


def squares_in(jaxpr: Any, inputs: Sequence[Squares | None], rule_of: _RuleOf) -> Known:
    """Returns the values of a jaxpr that are made of squares, those of its inputs given; scalars aside."""
    opened, _ = _compat.open_jaxpr(jaxpr)
    known = {var: each for var, each in zip(opened.invars, inputs, strict=True) if each is not None}
    roots: dict[Any, Any] = {}  # of what was moved only, what it was before
    for eqn in opened.eqns:
        inner, operands = _held(eqn)
        if inner:
            results = [_at(squares_in(each, _at(known, operands), rule_of), each.outvars) for each in inner]
            outs = [next(filter(None, of_each), None) for of_each in zip(*results, strict=True)]
        else:
            rule = rule_of(eqn)
            if rule.moves and len(eqn.outvars) == 1 and isinstance(eqn.invars[0], Var):
                roots[eqn.outvars[0]] = roots.get(eqn.invars[0], eqn.invars[0])
            sources = [roots.get(atom, atom) if isinstance(atom, Var) else None for atom in eqn.invars]
            outs = [_made(eqn, rule, _at(known, eqn.invars), sources)] * len(eqn.outvars)
        known |= {
            var: each
            for var, each in zip(eqn.outvars, outs, strict=True)
            if each is not None and varying(shape_of(var))
        }
    return known


def _held(eqn: JaxprEqn) -> tuple[list[Jaxpr], Sequence[Any]]:
    """Returns the jaxprs of a call or of branches, and the operands that they are given."""
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
        return [_compat.open_jaxpr(branch)[0] for branch in params["branches"]], eqn.invars[1:]
    return [_compat.open_jaxpr(params[_compat.CALLS[name]])[0]] if name in _compat.CALLS else [], eqn.invars


def _at(known: Known, atoms: Sequence[Any]) -> list[Squares | None]:
    return [known.get(atom) if isinstance(atom, Var) else None for atom in atoms]


def _made(eqn: JaxprEqn, rule: Rule, operands: Sequence[Squares | None], sources: Sequence[Any]) -> Squares | None:
    """Returns what an op makes of squares, or of the product of a value with itself."""
    name, first = eqn.primitive.name, operands[0] if operands else None
    is_with_itself = len(sources) == 2 and sources[0] is not None and sources[0] is sources[1]
    if name == "square" or (name == "mul" and is_with_itself) or (name == "integer_pow" and eqn.params["y"] == 2):
        return Squares.SUM if first is Squares.NORM else Squares.SQUARE
    if name == "dot_general" and is_with_itself:
        return Squares.GRAM if rule.op_class is OpClass.LOWER else Squares.SUM
    if name == "reduce_sum":
        return None if first in (None, Squares.NORM) else Squares.SUM
    if name == "sqrt":
        return Squares.NORM if first is Squares.SUM else None
    if rule.arithmetic and not rule.scales:
        both_are_squares = all(each in (Squares.SQUARE, Squares.SUM) for each in operands)
        return Squares.SUM if Squares.SUM in operands or both_are_squares else None
    if Squares.GRAM in operands and rule.passes_on:
        return Squares.SUM if rule.gathers else Squares.GRAM  # its diagonal, or masked by a multiplication
    others = [source for source, each in zip(sources, operands, strict=True) if each is None]
    alone = not any(varying(shape_of(atom)) for atom in others if atom is not None and dtype_of(atom) == np.float32)
    return next(filter(None, operands), None) if rule.passes_on and alone else None
