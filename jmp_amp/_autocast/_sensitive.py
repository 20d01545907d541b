"""Values whose rounding errors grow: angles, terms of squared distances, and operands of decompositions.

An angle of 100 is off by 0.03 rad in float16 and by 0.25 in bfloat16. The terms of a squared distance cancel
(`_squares.py`). The relative error of a solution is that of the matrix times the condition number (Higham, Accuracy and
Stability of Numerical Algorithms, chapter 7). So such values are computed in float32, and so is the product that they
come from.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, Var

from jmp_amp._autocast._facts import Facts
from jmp_amp._autocast._rule import OpClass
from jmp_amp._autocast._squares import Known, SquaresFinder, entered, squares_at
from jmp_amp._autocast._values import Reads, Squares
from jmp_amp._jaxpr import Branches, Call, Kept


class Sensitivity:
    """Finds the sensitive values of jaxprs; a jaxpr that many equations hold is read once."""

    def __init__(self, facts_of: Callable[[Jaxpr], Sequence[Facts]]) -> None:
        """Takes a function that returns the facts of each equation of an open jaxpr."""
        self._facts_of = facts_of
        self.squares = SquaresFinder(facts_of)
        self._sensitive = Kept()

    def sensitive(
        self, jaxpr: Jaxpr, inputs: tuple[Squares | None, ...], results: tuple[Reads, ...]
    ) -> dict[Var, Reads]:
        """Returns the sensitive values of an open jaxpr, and how each is read.

        Args:
            jaxpr: the jaxpr. Arithmetic, moves and calls pass on how their results are read.
            inputs: how its inputs are made of squares.
            results: how its results are read.
        """
        squares = self.squares.find(jaxpr, inputs)
        return self._sensitive(jaxpr, (inputs, results), lambda: self._find_sensitive(jaxpr, squares, results))

    def _find_sensitive(self, jaxpr: Jaxpr, squares: Known, results: tuple[Reads, ...]) -> dict[Var, Reads]:
        found = _Found()
        found.note(jaxpr.outvars, [reads if reads in _WAYS else Reads.ANY for reads in results])
        for facts in reversed(self._facts_of(jaxpr)):
            eqn, rule, structure, operands = facts
            if not isinstance(structure, Call | Branches) or rule.reads:
                if not rule.reads and found.reads.keys().isdisjoint(eqn.outvars) and not _adds_up(facts, squares):
                    found.otherwise.update(operands)
                else:
                    reads = _reads(facts, found.of(eqn.outvars), squares)
                    found.note(operands, [reads] * len(operands))
                continue
            outs, (inner, atoms) = found.of(eqn.outvars), entered(facts)
            for each in inner:
                inside = self.sensitive(each, squares_at(squares, atoms), outs)
                found.note(atoms, [inside.get(var, Reads.ANY) for var in each.invars])
        return found.sensitive()


class _Found:
    """How the readers that are known so far read each value.

    Attributes:
        reads: the values with a sensitive reader, and how that reads them.
        otherwise: the values with a reader that is not sensitive.
    """

    def __init__(self) -> None:
        self.reads: dict[Var, Reads] = {}
        self.otherwise: set[Var] = set()

    def note(self, atoms: Sequence[Any], reads: Sequence[Reads]) -> None:
        """Notes one reader of several values."""
        for atom, each in zip(atoms, reads, strict=True):
            if isinstance(atom, Var) and each:
                self.reads[atom] = max(self.reads.get(atom, each), each)
            elif isinstance(atom, Var):
                self.otherwise.add(atom)

    def of(self, variables: Sequence[Var]) -> tuple[Reads, ...]:
        """Returns how variables are read, once all of their readers are known."""
        return tuple(map(self._of, variables))

    def _of(self, var: Var) -> Reads:
        """Only angles are angles to every reader; in the other ways, one sensitive reader suffices."""
        reads = self.reads.get(var, Reads.ANY)
        return Reads.ANY if reads is Reads.ANGLE and var in self.otherwise else reads

    def sensitive(self) -> dict[Var, Reads]:
        """Returns the sensitive values, once all readers are known."""
        return {var: reads for var in self.reads if (reads := self._of(var))}


_WAYS = (Reads.ANGLE, Reads.DISTANCE, Reads.MATRIX)


def _adds_up(facts: Facts, squares: Known) -> bool:
    """Whether an equation adds or subtracts a sum of squares."""
    is_sum = facts.rule.arithmetic and not facts.rule.scales
    return is_sum and any(squares.get(var) is Squares.SUM for var in facts.operands)


def _reads(facts: Facts, outs: Sequence[Reads], squares: Known) -> Reads:
    rule = facts.rule
    if rule.reads:
        return rule.reads
    if rule.op_class is OpClass.LOWER or not outs:
        return Reads.ANY
    # An op whose results are not all angles is not sensitive.
    reads = max(outs) if max(outs) > Reads.ANGLE else min(outs)
    if not (rule.passes_on or reads is Reads.MATRIX):
        return Reads.ANY
    return max(reads, Reads.DISTANCE) if _adds_up(facts, squares) else reads
