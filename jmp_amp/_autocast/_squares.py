"""Values made of squares: the terms of squared distances, and the matrices that hold such sums.

The terms of |x|^2 + |y|^2 - 2 x.y cancel where x is close to y. PyTorch has `cdist` on its fp32 list.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_amp._autocast._axes import varying
from jmp_amp._autocast._facts import Facts
from jmp_amp._autocast._rule import OpClass, Rule
from jmp_amp._autocast._values import Squares
from jmp_amp._jaxpr import Branches, Call, Kept, dtype_of, open_jaxpr, shape_of

Known = dict[Var, Squares]


class SquaresFinder:
    """Finds the values of jaxprs that are made of squares; a jaxpr that many equations hold is read once."""

    def __init__(self, facts_of: Callable[[Jaxpr], Sequence[Facts]]) -> None:
        """Takes a function that returns the facts of each equation of an open jaxpr."""
        self._facts_of = facts_of
        self._known = Kept()

    def find(self, jaxpr: Jaxpr, inputs: tuple[Squares | None, ...]) -> Known:
        """Returns the arrays of an open jaxpr that are made of squares, given those of its inputs; no scalars."""
        return self._known(jaxpr, inputs, lambda: self._find(jaxpr, inputs))

    def _find(self, jaxpr: Jaxpr, inputs: Sequence[Squares | None]) -> Known:
        known = {var: each for var, each in zip(jaxpr.invars, inputs, strict=True) if each is not None}
        roots: dict[Any, Any] = {}  # from what was only moved to what it was before
        for facts in self._facts_of(jaxpr):
            eqn, rule, structure, operands = facts
            outs: Sequence[Squares | None]
            if isinstance(structure, Call | Branches) and not rule.reads:
                inner, atoms = entered(facts)
                results = [squares_at(self.find(each, squares_at(known, atoms)), each.outvars) for each in inner]
                outs = [next(filter(None, of_each), None) for of_each in zip(*results, strict=True)]
            else:
                if rule.moves and len(eqn.outvars) == 1 and isinstance(eqn.invars[0], Var):
                    roots[eqn.outvars[0]] = roots.get(eqn.invars[0], eqn.invars[0])
                if eqn.primitive.name not in _SQUARING and known.keys().isdisjoint(operands):
                    continue
                sources = [roots.get(atom, atom) if isinstance(atom, Var) else None for atom in eqn.invars]
                outs = [_made(eqn, rule, squares_at(known, eqn.invars), sources)] * len(eqn.outvars)
            known |= {
                var: each
                for var, each in zip(eqn.outvars, outs, strict=True)
                if each is not None and varying(shape_of(var))
            }
        return known


_SQUARING = ("square", "mul", "integer_pow", "dot_general")


def entered(facts: Facts) -> tuple[list[Jaxpr], Sequence[Any]]:
    """Returns the jaxprs of a call or of branches, and the operands that are their inputs."""
    invars = facts.eqn.invars
    match facts.structure:
        case Call(jaxpr, operands):
            return [open_jaxpr(jaxpr)[0]], [invars[i] for i in operands]
        case Branches(jaxprs, operands):
            return [open_jaxpr(branch)[0] for branch in jaxprs], [invars[i] for i in operands]
    return [], invars


def squares_at(known: Known, atoms: Sequence[Any]) -> tuple[Squares | None, ...]:
    """Returns how variables and literals are made of squares."""
    return tuple([known.get(atom) if isinstance(atom, Var) else None for atom in atoms])


def _made(eqn: JaxprEqn, rule: Rule, operands: Sequence[Squares | None], sources: Sequence[Any]) -> Squares | None:
    """Returns how the result of an op is made of squares."""
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
        return Squares.SUM if name == "gather" else Squares.GRAM  # the diagonal, or the matrix times a mask
    others = [source for source, each in zip(sources, operands, strict=True) if each is None]
    # A multiplication with another array makes another quantity.
    alone = not any(varying(shape_of(atom)) for atom in others if atom is not None and dtype_of(atom) == np.float32)
    return next(filter(None, operands), None) if rule.passes_on and alone else None
