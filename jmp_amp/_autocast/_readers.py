"""The analysis that finds how the readers of each value read it."""

import functools
import operator
from collections.abc import Sequence

import numpy as np
from jax import numpy as jnp
from jax.extend.core import Literal

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._primitives import Facts, Makes, OpClass, Reads
from jmp_amp._autocast._values import Known, Moment, Squares, Whole
from jmp_amp._formats import Format


class Readers(jx.Backward[Facts, Known, int]):
    """The analysis that finds how the readers of each value read it."""

    bottom = Reads.NOBODY
    condition = Reads.ENDS_LOOP

    def join(self, a: int, b: int) -> int:
        """Returns how two readers read a value."""
        return a | b

    def control(self, outs: Sequence[int]) -> int:
        """Returns how branches read their index."""
        return (joined(outs) & Reads.ENDS_LOOP) or Reads.OTHERWISE

    def enter_loop(self, loop: jx.Loop, inputs: Sequence[Known], outs: Sequence[int]) -> Sequence[int]:
        """Marks the next values of the accumulators and the recurrences of a loop."""
        carry = inputs[loop.n_consts : loop.n_consts + loop.n_carry]
        marks = [Reads.TERM * known.adds_up | Reads.RECURRENCE * known.recurs for known in carry]
        return [reads | mark for reads, mark in zip(outs, marks, strict=True)]

    def leave_loop(self, loop: jx.Loop, outs: Sequence[int], said: Sequence[int]) -> Sequence[int]:
        """Returns how a loop reads its operands. What decides when it ends may be rounded before it starts."""
        ends_loop = joined(outs) & Reads.ENDS_LOOP
        gates = [Reads.GATE if reads & (Reads.GATE | Reads.MAKES_GATE) else Reads.NOBODY for reads in said]
        return [(reads & ~_OF_A_BODY) | gate | ends_loop for reads, gate in zip(said, gates, strict=True)]

    def transfer(self, facts: Facts, operands: Sequence[Known], outs: Sequence[int]) -> Sequence[int]:
        """Returns how an op reads its operands."""
        rule, reads = facts.rule, joined(outs)
        of_all = rule.reads
        if rule.moves or reads & ~Reads.OTHERS:
            of_all |= _passed_on(facts, reads)
        if rule.makes in (Makes.SUM, Makes.DIFFERENCE):
            of_all |= _cancels(operands)
        each = [of_all or Reads.OTHERWISE] * len(operands)
        if gate := _gate(facts, operands, reads):
            each = [of if known.adds_up else of | gate for of, known in zip(each, operands, strict=True)]
        if reads & Reads.RECURRENCE:
            each = [of | Reads.RECURRENCE if known.recurs else of for of, known in zip(each, operands, strict=True)]
        if reads & Reads.ENDS_LOOP:
            # An integer depends on integers only: a decoder that stops at a token does not depend on the logits.
            deciding = [var for var, of in zip(facts.eqn.outvars, outs, strict=True) if of & Reads.ENDS_LOOP]
            rounds = all(jnp.issubdtype(jx.dtype_of(var), np.integer) for var in deciding)
            pairs = zip(each, facts.eqn.invars, strict=True)
            each = [of if rounds and jx.is_floating(atom) else of | Reads.ENDS_LOOP for of, atom in pairs]
        return each


def why_as_traced(facts: Facts, reads: int, operands: Sequence[Known], form: Format) -> str | None:
    """Returns why an equation runs as it was traced: for its readers, or for what it reads; None if it does not.

    A value counts as an angle only if all its readers read it as one. For the other ways, one reader suffices.
    """
    if reads & Reads.ENDS_LOOP and not isinstance(facts.structure, jx.Call | jx.Branches):
        return "loop"
    if facts.rule.op_class is not OpClass.LOWER:
        return None
    if reads & Reads.RECURRENCE and any(known.recurs for known in operands):
        return "recurrence"
    if any(known.is_solution for known in operands):
        return "solution"
    counts = [known.whole for known in operands]
    if min(counts) > Whole.NO and max(counts) is Whole.COUNT:
        return "count"
    if reads & Reads.OTHERS:
        reads &= ~Reads.ANGLE
    if not form.needs_loss_scale:
        reads &= ~Reads.RANGE
    return next((reason for way, reason in _REASONS.items() if reads & way), None)


# What stays in the body of a loop: its own end, its own carries, and factors that only reach another product.
_OF_A_BODY = Reads.ENDS_LOOP | Reads.TERM | Reads.RECURRENCE | Reads.FACTOR | Reads.MAKES_GATE

_REASONS = {
    Reads.MATRIX: "decomposition",
    Reads.DISTANCE: "distance",
    Reads.ANGLE: "angle",
    Reads.EDGE: "edge",
    Reads.RANGE: "logarithm",
}


def joined(several: Sequence[int]) -> int:
    """Returns how several readers read a value."""
    return several[0] if len(several) == 1 else functools.reduce(operator.or_, several, Reads.NOBODY)


def _passed_on(facts: Facts, reads: int) -> int:
    """Returns how an op whose results are read in this way reads its operands for that."""
    rule = facts.rule
    if rule.op_class is OpClass.LOWER:
        return Reads.NOBODY
    if rule.passes_on:
        ways = Reads.LINEAR | Reads.TERM if rule.arithmetic else Reads.LINEAR | Reads.TERM | Reads.ROOT
        if rule.moves:
            ways |= Reads.OTHERS
        if reads & Reads.OTHERS:
            ways &= ~Reads.ANGLE
        # sqrt(1 - x)
        takes_from_a_number = rule.makes is Makes.DIFFERENCE and isinstance(facts.eqn.invars[0], Literal)
        edge = Reads.EDGE if takes_from_a_number and reads & Reads.ROOT else Reads.NOBODY
        return (reads & ways) | edge
    if facts.is_square:
        return reads & (Reads.MATRIX | Reads.DISTANCE | Reads.EDGE)
    return reads & (Reads.MATRIX | Reads.RANGE if rule.sums else Reads.MATRIX)


def _cancels(operands: Sequence[Known]) -> int:
    """Says that a sum or a difference reads its operands as terms that may cancel, if it does.

    The terms are sums of squares, or a mean of products beside the product of means. PyTorch has `cdist` on its fp32
    list.
    """
    is_distance = any(known.squares is Squares.SUM for known in operands)
    is_variance = {Moment.SECOND, Moment.SQUARED} == {known.moment for known in operands}
    return Reads.DISTANCE if is_distance or is_variance else Reads.NOBODY


def _gate(facts: Facts, operands: Sequence[Known], reads: int) -> int:
    """Says that the operands of an op multiply an accumulator, or each other as in an associative scan, if they do."""
    rule = facts.rule
    if rule.scales and any(known.adds_up for known in operands):
        return Reads.GATE if reads & Reads.TERM else Reads.FACTOR
    if facts.multiplies_slices and any(known.multiplies_slices for known in operands):
        return Reads.GATE
    if rule.moves or facts.multiplies_slices:
        return reads & (Reads.GATE | Reads.MAKES_GATE)
    of_a_gate = reads & (Reads.GATE | Reads.MAKES_GATE) and len(facts.operands) == 1
    is_simple = rule.arithmetic or rule.makes_gates
    return Reads.MAKES_GATE if of_a_gate and is_simple else Reads.NOBODY
