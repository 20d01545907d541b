"""Finds how the carries of a loop reach themselves: the accumulators, and the recurrences by products.

A carry that is rounded to 16 bits in every iteration drifts, or stops growing once it is large. One that comes back as
itself plus something is an accumulator, and so is every carry that it is copied or added to. One that comes back only
as products, sums and multiples of itself, as `A @ x`, is a recurrence: it forgets no error, so the products are float32
too. A state that a bounded function replaces, such as `tanh(x @ w + h @ u)`, is neither, and nor is its cotangent.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jax.extend.core import Jaxpr

from jmp_amp._autocast._axes import varying
from jmp_amp._autocast._facts import Facts
from jmp_amp._autocast._rule import Reads
from jmp_amp._jaxpr import Forward, Kept, Loop, dtype_of, open_jaxpr, shape_of


class Path:
    """What is on the way from an input of a body to a value, as a set of bits; nothing but moves at first."""

    CHOICE = 1 << 0  # an op that selects elements, or multiplies them by an array of this iteration, as a gate does
    ARITHMETIC = 1 << 1
    PRODUCT = 1 << 2
    OTHER = 1 << 3
    VARIES = 1 << 4  # the input is another one in each iteration; no constant of the loop


_ADDS = Path.CHOICE | Path.ARITHMETIC | Path.VARIES  # what may be on the way from an accumulator to itself
_RECURS = Path.PRODUCT | Path.ARITHMETIC | Path.VARIES  # and from a recurrence

# Each input of a body that reaches a value, by index, with what is on the way.
Sources = frozenset[tuple[int, int]]


class Paths(Forward[Facts, Sources]):
    """The analysis that follows the inputs of the body of a loop. Paths compose, so it enters each body once."""

    bottom: Sources = frozenset()

    def __init__(self, facts_of: Callable[[Jaxpr], Sequence[Facts]]) -> None:
        """Takes a function that returns the facts of each equation of an open jaxpr."""
        super().__init__(facts_of)
        self._loops, self._carries_of = Kept(), Kept()

    def carries(self, loop: Loop) -> list[tuple[bool, bool]]:
        """Returns for each carry of a loop whether it is an accumulator, and whether it is a recurrence by products."""
        body, _ = open_jaxpr(loop.body)
        return self._carries_of(body, (loop.n_consts, loop.n_carry), lambda: self._find_carries(loop))

    def _find_carries(self, loop: Loop) -> list[tuple[bool, bool]]:
        carries = range(loop.n_consts, loop.n_consts + loop.n_carry)
        after = [[(i - carries.start, path) for i, path in paths if i in carries] for paths in self._carried(loop)[0]]
        added = [[(i, path) for i, path in paths if not path & ~_ADDS] for paths in after]
        adds_up = [any(i == k and path & Path.ARITHMETIC for i, path in paths) for k, paths in enumerate(added)]
        found = []
        for k, paths in enumerate(after):
            of_itself = [path | Path.ARITHMETIC for i, path in paths if i == k]
            is_accumulator = adds_up[k] or any(adds_up[i] for i, _ in added[k])
            found.append((is_accumulator, set(of_itself) == {_RECURS}))
        return found

    def _carried(self, loop: Loop) -> tuple[list[Sources], list[Sources]]:
        """Returns what reaches the carries of a loop in one or more iterations, and its results."""
        body, _ = open_jaxpr(loop.body)
        return self._loops(body, (loop.n_consts, loop.n_carry), lambda: self._find_carried(loop))

    def _find_carried(self, loop: Loop) -> tuple[list[Sources], list[Sources]]:
        n, first = len(open_jaxpr(loop.body)[0].invars), loop.n_consts
        inputs = [frozenset({(i, Path.VARIES if i >= first else 0)}) for i in range(n)]
        outs = self.outs(loop.body, inputs)
        entering, before = inputs, None
        while entering != before:
            before = entering
            after = [_composed(before, paths) for paths in outs]
            carry = [a | b for a, b in zip(inputs[first : first + loop.n_carry], after, strict=False)]
            entering = [*inputs[:first], *carry, *inputs[first + loop.n_carry :]]
        return after[: loop.n_carry], [*carry, *after[loop.n_carry :]]

    def _through(self, equation: Facts, operands: Sequence[Sources]) -> Sequence[Sources]:
        if not isinstance(loop := equation.enters, Loop):
            return super()._through(equation, operands)
        inputs = [*operands[loop.consts], *operands[loop.carry], *operands[loop.xs]]
        return [_composed(inputs, paths) for paths in self._carried(loop)[1]]

    def join(self, a: Sources, b: Sources) -> Sources:
        """Returns what reaches either of two values."""
        return a | b

    def transfer(self, facts: Facts, operands: Sequence[Sources]) -> Sequence[Sources]:
        """Returns what reaches the results of an op."""
        rule, path = facts.rule, Path.OTHER
        if rule.is_product or rule.sums or rule.reads == Reads.MATRIX:
            path = Path.PRODUCT
        elif rule.arithmetic:
            path = Path.ARITHMETIC
        elif rule.passes_on:
            path = 0 if rule.moves else Path.CHOICE
        if rule.scales:
            gated = [_is_gated(facts, k, operands) for k in range(len(operands))]
            operands = [_after(of, Path.CHOICE) if gate else of for of, gate in zip(operands, gated, strict=True)]
        reached = _after(self.bottom.union(*operands), path)
        return [reached if dtype_of(var) == np.float32 else self.bottom for var in facts.eqn.outvars]


def _after(sources: Sources, path: int) -> Sources:
    return frozenset([(i, before | path) for i, before in sources])


def _is_gated(facts: Facts, k: int, operands: Sequence[Sources]) -> bool:
    """Whether operand `k` of a multiplication is multiplied by an array that is another one in each iteration."""
    others = zip(facts.eqn.invars[:k] + facts.eqn.invars[k + 1 :], (*operands[:k], *operands[k + 1 :]), strict=True)
    return any(varying(shape_of(atom)) and any(path & Path.VARIES for _, path in of) for atom, of in others)


def _composed(inputs: Sequence[Sources], paths: Iterable[tuple[int, int]]) -> Sources:
    """Returns what reaches a value through the inputs that reach it."""
    return frozenset([(i, before | path) for k, path in paths for i, before in inputs[k]])
