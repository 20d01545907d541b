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

from jmp_amp._autocast._axes import varying
from jmp_amp._autocast._rules import OpClass, Rule
from jmp_amp._autocast._values import Reads, Squares
from jmp_amp._jaxpr import Branches, Call, dtype_of, open_jaxpr, shape_of, structure_of

Known = dict[Var, Squares]


class Sensitivity:
    """Finds the sensitive values of jaxprs; one that is held by many equations, as a layer is, is read once."""

    def __init__(self, rules_of: Callable[[Jaxpr], Sequence[Rule]]) -> None:
        """Takes what returns the rule of each equation of a jaxpr."""
        self._rules_of = rules_of
        self._squares: dict[Any, tuple[Jaxpr, Known]] = {}
        self._sensitive: dict[Any, tuple[Jaxpr, dict[Var, Reads]]] = {}

    def squares(self, jaxpr: Jaxpr, inputs: tuple[Squares | None, ...]) -> Known:
        """Returns the values of a jaxpr that are made of squares, those of its inputs given; scalars aside."""
        # The jaxpr is kept alive, so an id cannot come to mean another one.
        key = id(jaxpr), inputs
        if key not in self._squares:
            self._squares[key] = jaxpr, self._find_squares(jaxpr, inputs)
        return self._squares[key][1]

    def sensitive(
        self, jaxpr: Jaxpr, inputs: tuple[Squares | None, ...], results: tuple[Reads, ...]
    ) -> dict[Var, Reads]:
        """Returns the values that are read in one of these ways, through arithmetic, moves and calls, and in which.

        Args:
            jaxpr: an open one.
            inputs: what its inputs are made of.
            results: how its results are read.
        """
        key = id(jaxpr), inputs, results
        if key not in self._sensitive:
            self._sensitive[key] = jaxpr, self._find_sensitive(jaxpr, self.squares(jaxpr, inputs), results)
        return self._sensitive[key][1]

    def _find_sensitive(self, jaxpr: Jaxpr, squares: Known, results: tuple[Reads, ...]) -> dict[Var, Reads]:
        found: dict[Var, Reads] = {}

        def note(atoms: Sequence[Any], reads: Sequence[Reads]) -> None:
            for atom, each in zip(atoms, reads, strict=True):
                if isinstance(atom, Var):
                    found[atom] = _merged(found[atom], each) if atom in found else each

        note(jaxpr.outvars, [reads if reads in _WAYS else Reads.ANY for reads in results])
        for eqn, rule in zip(reversed(jaxpr.eqns), reversed(self._rules_of(jaxpr)), strict=True):
            outs = tuple([found.get(var, Reads.ANY) for var in eqn.outvars])
            inner, operands = _inner(eqn, rule)
            for each in inner:
                inside = self.sensitive(each, _at(squares, operands), outs)
                note(operands, [inside.get(var, Reads.ANY) for var in each.invars])
            if not inner:
                reads = _reads(eqn, rule, outs, squares)
                note(eqn.invars, [reads] * len(eqn.invars))
        return {var: reads for var, reads in found.items() if reads in _WAYS}

    def _find_squares(self, jaxpr: Jaxpr, inputs: Sequence[Squares | None]) -> Known:
        known = {var: each for var, each in zip(jaxpr.invars, inputs, strict=True) if each is not None}
        roots: dict[Any, Any] = {}  # of what was moved only, what it was before
        for eqn, rule in zip(jaxpr.eqns, self._rules_of(jaxpr), strict=True):
            inner, operands = _inner(eqn, rule)
            if inner:
                results = [_at(self.squares(each, _at(known, operands)), each.outvars) for each in inner]
                outs = [next(filter(None, of_each), None) for of_each in zip(*results, strict=True)]
            else:
                if rule.moves and len(eqn.outvars) == 1 and isinstance(eqn.invars[0], Var):
                    roots[eqn.outvars[0]] = roots.get(eqn.invars[0], eqn.invars[0])
                operands = _at(known, eqn.invars)
                if not (any(operands) or eqn.primitive.name in _SQUARING):
                    continue
                sources = [roots.get(atom, atom) if isinstance(atom, Var) else None for atom in eqn.invars]
                outs = [_made(eqn, rule, operands, sources)] * len(eqn.outvars)
            known |= {
                var: each
                for var, each in zip(eqn.outvars, outs, strict=True)
                if each is not None and varying(shape_of(var))
            }
        return known


_WAYS = (Reads.ANGLE, Reads.DISTANCE, Reads.MATRIX)
_SQUARING = ("square", "mul", "integer_pow", "dot_general")


def _merged(a: Reads, b: Reads) -> Reads:
    """An angle is read as nothing else; of the other ways, one reader suffices."""
    return max(a, b) if max(a, b) > Reads.ANGLE else min(a, b)


def _reads(eqn: JaxprEqn, rule: Rule, outs: Sequence[Reads], squares: Known) -> Reads:
    if rule.reads:
        return rule.reads
    if rule.op_class is OpClass.LOWER or not outs:
        return Reads.ANY
    reads = functools.reduce(_merged, outs)
    if not (rule.passes_on or reads is Reads.MATRIX):
        return Reads.ANY
    if rule.arithmetic and not rule.scales and Squares.SUM in _at(squares, eqn.invars):
        return max(reads, Reads.DISTANCE)
    return reads


def _inner(eqn: JaxprEqn, rule: Rule) -> tuple[list[Jaxpr], Sequence[Any]]:
    """Returns the jaxprs of a call or of branches, and the operands that they are given."""
    structure = None if rule.reads else structure_of(eqn)
    match structure:
        case Call(jaxpr, operands):
            return [open_jaxpr(jaxpr)[0]], [eqn.invars[i] for i in operands]
        case Branches(jaxprs, operands):
            return [open_jaxpr(branch)[0] for branch in jaxprs], [eqn.invars[i] for i in operands]
    return [], eqn.invars


def _at(known: Known, atoms: Sequence[Any]) -> tuple[Squares | None, ...]:
    return tuple([known.get(atom) if isinstance(atom, Var) else None for atom in atoms])


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
        return Squares.SUM if name == "gather" else Squares.GRAM  # its diagonal, or masked by a multiplication
    others = [source for source, each in zip(sources, operands, strict=True) if each is None]
    alone = not any(varying(shape_of(atom)) for atom in others if atom is not None and dtype_of(atom) == np.float32)
    return next(filter(None, operands), None) if rule.passes_on and alone else None
