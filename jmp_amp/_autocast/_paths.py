"""Finds the carries of a loop whose errors add up over its iterations, by the paths from each carry to itself."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from jax.extend.core import Jaxpr

from jmp_amp import _jaxpr as jx
from jmp_amp._ops import Demand, EqnInfo, ResultKind, varying

InfosOf = Callable[[Jaxpr], Sequence[EqnInfo]]


class Path:
    """What is on the way from an input of a body to a value, as a set of bits; nothing but moves at first."""

    CHOICE = 1 << 0  # an op that chooses, as `max`, or multiplies by an array of this iteration, as a gate does
    ARITHMETIC = 1 << 1
    PRODUCT = 1 << 2
    OTHER = 1 << 3
    CARRY = 1 << 4  # the input is a carry
    SLICE = 1 << 5  # the input is another slice in each iteration
    LAYER = 1 << 6  # a product with an array of this iteration, such as the weight of a layer
    TOTAL = 1 << 7  # a sum along axes, which is a product, too


_ADDS = Path.CHOICE | Path.ARITHMETIC | Path.CARRY | Path.SLICE  # what may be on the way from an accumulator to itself

# Each input of a body that reaches a value, by index, with what is on the way.
Sources = frozenset[tuple[int, int]]


class Paths(jx.Forward[EqnInfo, Sources]):
    """The analysis that follows the inputs of the body of a loop. Paths compose, so it enters each body once."""

    bottom: Sources = frozenset()

    def carried(self, loop: jx.Loop) -> tuple[list[int], list[Sources]]:
        """Returns what the loop demands of the next value of each carry, and what reaches its results.

        That is `TERM` and `RECURRENCE` of `Demand`. An accumulator is a sum of itself and others, or such a sum is
        added to it. For a recurrence, see `_recurs`. Results are reached in one or more iterations.
        """
        body, _ = jx.open_jaxpr(loop.body)
        return self._carries(body, (loop.n_consts, loop.n_carry), lambda: self._find_carried(loop))

    def _find_carried(self, loop: jx.Loop) -> tuple[list[int], list[Sources]]:
        n, first, last = len(jx.open_jaxpr(loop.body)[0].invars), loop.n_consts, loop.n_consts + loop.n_carry
        kinds = [0] * first + [Path.CARRY] * loop.n_carry + [Path.SLICE] * (n - last)
        inputs = [frozenset({pair}) for pair in enumerate(kinds)]
        outs = self.outs(loop.body, inputs)
        reached, before = inputs, None
        while reached != before:
            before = reached
            after = [_composed(before, paths) for paths in outs]
            reached = [*inputs[:first], *map(self.join, inputs[first:last], after), *inputs[last:]]
        paths_of = [[(i - first, path) for i, path in paths if first <= i < last] for paths in after[: loop.n_carry]]
        added = [[(i, path) for i, path in paths if not path & ~_ADDS] for paths in paths_of]
        adds_up = [any(i == k and path & Path.ARITHMETIC for i, path in paths) for k, paths in enumerate(added)]
        reads_sum = [any(adds_up[i] for i, _ in paths) for paths in added]
        recurs = [_recurs([path for i, path in paths if i == k]) for k, paths in enumerate(paths_of)]
        carries = [Demand.TERM * a | Demand.RECURRENCE * b for a, b in zip(reads_sum, recurs, strict=True)]
        return carries, [*reached[first:last], *after[loop.n_carry :]]

    def _through(self, equation: EqnInfo, operands: Sequence[Sources]) -> Sequence[Sources]:
        if not isinstance(loop := equation.program, jx.Loop):
            return super()._through(equation, operands)
        inputs = [*operands[loop.consts], *operands[loop.carry], *operands[loop.xs]]
        return [_composed(inputs, paths) for paths in self.carried(loop)[1]]

    def join(self, a: Sources, b: Sources) -> Sources:
        """Returns what reaches either of two values."""
        return a | b

    def transfer(self, info: EqnInfo, operands: Sequence[Sources]) -> Sequence[Sources]:
        """Returns what reaches the results of an op."""
        rule, path = info.rule, Path.OTHER
        if rule.kind is ResultKind.TOTAL:
            path = Path.PRODUCT | Path.TOTAL
        elif rule.is_product or rule.is_decomposition:
            path = Path.PRODUCT
        elif rule.is_polynomial:
            path = Path.ARITHMETIC
        elif rule.passes_on:  # a part that is replaced, or selected by a mask, is no choice: the mask is followed, too
            path = Path.CHOICE if rule.kind is ResultKind.CHOSEN and rule.fuses and not rule.makes_gates else 0
        if rule.scales or rule.is_product or rule.kind is ResultKind.SELECTED:
            gate = Path.LAYER if rule.is_product else Path.CHOICE
            operands = [_after(of, gate) if _is_gated(info, k, operands) else of for k, of in enumerate(operands)]
        reached = _after(self.bottom.union(*operands), path)
        return [reached if jx.dtype_of(var) in _FOLLOWED else self.bottom for var in info.eqn.outvars]


_FOLLOWED = {np.dtype(np.float32), np.dtype(bool)}


def _recurs(paths: Sequence[int]) -> bool:
    """Whether a carry that reaches itself on these paths is a recurrence: the state of a simulation.

    Its errors add up: nothing forgets them, and some are made by products. Each path is judged by itself: `L @ u` in
    `u + L @ u + jnp.tanh(u @ w)` is a recurrence. In `h + h @ layer`, whose products read another array in each
    iteration, errors do not add up more than in a network of as many layers, nor those of `jnp.mean(h)` in a network.
    """
    forgets = Path.CHOICE | Path.OTHER
    ends = forgets | (Path.TOTAL if any(path & forgets for path in paths) else 0)
    ends |= 0 if all(path & Path.PRODUCT for path in paths) else Path.LAYER
    return any(path & Path.PRODUCT and not path & ends for path in paths)


def _after(sources: Sources, path: int) -> Sources:
    return frozenset([(i, before | path) for i, before in sources])


def _is_gated(info: EqnInfo, k: int, operands: Sequence[Sources]) -> bool:
    """Whether operand `k` is multiplied, or selected, by an array of this iteration, or by a function of a carry.

    What is chosen from another carry is a function of it, as the layer `jax.nn.relu(x @ a)` of its weights.
    """
    others = [0] if info.rule.kind is ResultKind.SELECTED else [i for i in range(len(operands)) if i != k]
    slices = [i for i in others if varying(jx.shape_of(info.eqn.invars[i]))]
    is_slice = any(path & Path.SLICE for i in slices for _, path in operands[i])
    own, chosen = {source for source, _ in operands[k]}, Path.OTHER | Path.CHOICE
    carries = [(source, path) for i in others for source, path in operands[i] if path & Path.CARRY]
    return is_slice or any(path & (Path.OTHER if source in own else chosen) for source, path in carries)


def _composed(inputs: Sequence[Sources], paths: Iterable[tuple[int, int]]) -> Sources:
    """Returns what reaches a value through the inputs that reach it."""
    return frozenset([(i, before | path) for k, path in paths for i, before in inputs[k]])
