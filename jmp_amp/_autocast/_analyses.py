"""The analyses that find why a product is float32: what is known of values, and how values are read."""

import enum
import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._primitives import Demand, EqnInfo, OpClass, ResultKind, Rule, varying
from jmp_amp._formats import Format

InfosOf = Callable[[Jaxpr], Sequence[EqnInfo]]


class Squares(enum.IntEnum):
    """How a value is made of squares. The terms of |x|^2 + |y|^2 - 2 x.y cancel where x is close to y."""

    NO = 0
    SQUARE = 1  # each element is a square: `x * x`
    SUM = 2  # each element is a sum of squares: `x2 = jnp.sum(x * x, -1)`
    NORM = 3  # each element is the square root of a sum of squares, or its reciprocal: `jnp.sqrt(x2)`
    GRAM = 4  # the product of a matrix with itself, whose diagonal holds sums of squares: `x @ x.T`


class Moment(enum.IntEnum):
    """How a value is made of products. A mean of squares less the square of a mean cancels where x varies little."""

    NO = 0
    PAIR = 1  # a multiplication of two arrays: `x * y`
    PRODUCT = 2  # a product of matrices, or a convolution: `blur(x)`
    SECOND = 3  # such a product of a multiplication: `blur(x * y)`
    SQUARED = 4  # a multiplication of two such products: `blur(x) * blur(y)`


class ValueFacts(NamedTuple):
    """What is known of a value. Each field is False, 0 or 1 where nothing is known.

    `join` takes the larger one, and the smaller one of `is_constant` and `is_whole`.

    Attributes:
        size: an estimate of its largest magnitude; inputs of the program count as 1, constants as they are. In
            `q * 1e3 * 1e4` it is 1e7, and so is that of the product that reads it.
        is_log: whether it is a logarithm, as in `-labels @ jax.nn.log_softmax(logits).T`, which is a loss.
        squares: how it is made of squares.
        moment: how it is made of products.
        is_constant: whether it is made of constants only, as `jnp.linspace(-20, 20, 255)`.
        is_whole: whether it holds whole numbers, as `jax.nn.one_hot(ids, n)`.
        is_solution: whether it was made of what a decomposition or a solver returns, and nothing bounds it, as the
            residual `b - a @ jnp.linalg.solve(a, b)`.
        adds_up: whether it is an accumulator of a loop, as it enters the body, moved or not: `h` in `h + x`.
        recurs: whether it was made of a carry that the loop replaces with products and sums of itself: `x` in `a @ x`.
        multiplies_slices: whether it was made by multiplying parts of one array, as `gate[:-1] * gate[1:]` in an
            associative scan.
    """

    size: float = 1.0
    is_log: bool = False
    squares: Squares = Squares.NO
    moment: Moment = Moment.NO
    is_constant: bool = False
    is_whole: bool = False
    is_solution: bool = False
    adds_up: bool = False
    recurs: bool = False
    multiplies_slices: bool = False


NOTHING, _CONSTANT = ValueFacts(), ValueFacts(is_constant=True)


class Knowledge(jx.Forward[EqnInfo, ValueFacts]):
    """The analysis that finds what is known of values."""

    bottom = NOTHING

    def __init__(self, infos_of: InfosOf, constant: Callable[..., Any], constants: Callable[..., Any]) -> None:
        """Takes functions that describe the equations of an open jaxpr, a literal, and the constants of a jaxpr."""
        super().__init__(infos_of)
        self.paths = Paths(infos_of)
        self._constant, self._constants = constant, constants

    def constant(self, x: Any) -> ValueFacts:
        """Returns what is known of a literal."""
        return self._constant(x).known

    def constants(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> Sequence[ValueFacts]:
        """Returns what is known of the constants of an open jaxpr."""
        return [value.known for value in self._constants(jaxpr, consts)]

    def join(self, a: ValueFacts, b: ValueFacts) -> ValueFacts:
        """Returns what is known of a value that is either of two."""
        if a == b:
            return a
        is_constant, is_whole = a.is_constant and b.is_constant, a.is_whole and b.is_whole
        return ValueFacts._make(map(max, a, b))._replace(is_constant=is_constant, is_whole=is_whole)

    def widen(self, old: ValueFacts, new: ValueFacts) -> ValueFacts:
        """Returns what is known of a carry that is not settled: a size that grows in each iteration is not known."""
        return new._replace(size=old.size)

    def enter_loop(self, loop: jx.Loop, carry: Sequence[ValueFacts]) -> Sequence[ValueFacts]:
        """Marks the accumulators and the recurrences of a loop."""
        marks = zip(carry, self.paths.carries(loop), strict=True)
        return [known._replace(adds_up=adds_up, recurs=recurs) for known, (adds_up, recurs) in marks]

    def leave_loop(self, loop: jx.Loop, outs: Sequence[ValueFacts]) -> Sequence[ValueFacts]:
        """Returns what is known of the results of a loop; outside, they are no accumulators."""
        return [known._replace(adds_up=False, recurs=False) for known in outs]

    def transfer(self, info: EqnInfo, operands: Sequence[ValueFacts]) -> Sequence[ValueFacts]:
        """Returns what is known of the results of an op."""
        eqn, rule = info.eqn, info.rule
        if all(known is NOTHING for known in operands) and not _is_source(info):
            return [NOTHING] * len(eqn.outvars)
        read = [known for known, atom in zip(operands, eqn.invars, strict=True) if jx.dtype_of(atom) in _FLOATING]
        joined = read[0] if len(read) == 1 else ValueFacts._make(map(max, *read)) if read else NOTHING
        passes_on = rule.passes_on or rule.is_linear
        is_norm = rule.scales and any(each.squares is Squares.NORM for each in read)
        known = ValueFacts(
            1.0 if all(each.size == 1 for each in read) else _rounded(_size(info, operands, read)),
            rule.kind is ResultKind.LOGARITHM
            or (joined.is_log and rule.passes_on and rule.kind is not ResultKind.QUOTIENT),
            _squares(info, operands),
            _moment(info, operands),
            all(known.is_constant for known in operands),
            _is_whole(info, read),
            rule.demand == Demand.MATRIX or (joined.is_solution and passes_on and not is_norm),
            joined.adds_up and rule.moves,
            joined.recurs and (passes_on or rule.is_polynomial),
            joined.multiplies_slices if rule.moves else info.multiplies_slices,
        )
        return [NOTHING if known == NOTHING else _of(var, known) for var in eqn.outvars]


def _is_source(info: EqnInfo) -> bool:
    """Whether something is known of the results of an op of whose operands nothing is known."""
    rule = info.rule
    is_constant = not info.eqn.invars  # `jnp.arange`
    return rule.kind in _SOURCES or rule.demand == Demand.MATRIX or info.is_square or rule.is_cast or is_constant


def _of(var: Any, known: ValueFacts) -> ValueFacts:
    """Returns what is known of one result. Scalars scale: they are neither logarithms nor solutions."""
    if jx.dtype_of(var) not in _FLOATING:
        return _CONSTANT if known.is_constant else NOTHING
    scalar = known._replace(squares=Squares.NO, is_log=False, is_solution=False)
    return known if varying(jx.shape_of(var)) else scalar


_FLOATING = {np.dtype(name) for name in (jnp.float16, jnp.bfloat16, np.float32, np.float64)}
_SOURCES = {ResultKind.LOGARITHM, ResultKind.PRODUCT, ResultKind.MATRIX_PRODUCT}


def _size(info: EqnInfo, operands: Sequence[ValueFacts], read: Sequence[ValueFacts]) -> float:
    """Estimates the largest magnitude of a result. Means count as large as their terms, whatever their number."""
    eqn, rule = info.eqn, info.rule
    if rule.power is not None:
        return _power(read[0].size, rule.power)
    if rule.kind is ResultKind.QUOTIENT:
        return _scaled(eqn, operands, _power(operands[1].size, -1))
    if rule.kind in (ResultKind.PRODUCT, ResultKind.OUTER_PRODUCT) or rule.is_product:
        return _scaled(eqn, operands, operands[1].size)
    if rule.passes_on or rule.sums:
        size = max(known.size for known in read)
        # The terms of a cutoff, `1 - 28 * u**6 + 48 * u**7 - 21 * u**8`, cancel where `u` is 1.
        return min(size, 1.0) if rule.kind is ResultKind.DIFFERENCE and size < _COEFFICIENT else size
    return 1.0


_COEFFICIENT = 256


def _rounded(size: float) -> float:
    """Rounds a size to a power of 4, so that factors near 1, such as those of dropout, do not add up over layers."""
    return 4.0 ** int(math.log2(size) / 2) if 0 < size < math.inf else size


def _scaled(eqn: JaxprEqn, operands: Sequence[ValueFacts], factor: float) -> float:
    """Returns the size of a value times a factor. A constant does not make it smaller: data may be as large anyway."""
    size = operands[0].size
    if isinstance(eqn.invars[1], Literal):
        return max(min(1.0, size), size * factor)
    if isinstance(eqn.invars[0], Literal):
        return max(min(1.0, factor), size * factor)
    return size * factor


def _power(size: float, power: float) -> float:
    if size == 0:
        return 1.0
    log = power * math.log2(size) if math.isfinite(size) else power * 128
    return 2.0 ** min(max(log, -126), 128)


def _moment(info: EqnInfo, operands: Sequence[ValueFacts]) -> Moment:
    eqn, rule = info.eqn, info.rule
    moments = [known.moment for known in operands]
    if rule.can_run_as_traced:
        is_second = any(known.moment is Moment.PAIR or known.squares is Squares.SQUARE for known in operands)
        return Moment.SECOND if is_second else Moment.PRODUCT
    if info.is_square or rule.kind is ResultKind.PRODUCT:
        arrays = [moment for moment, atom in zip(moments, eqn.invars, strict=True) if varying(jx.shape_of(atom))]
        if len(arrays) < 2 and not info.is_square:
            return max(arrays, default=Moment.NO)
        if all(moment in (Moment.PRODUCT, Moment.SECOND) for moment in arrays):
            return Moment.SQUARED
        # A norm and its scale are no arrays of the same size.
        sizes = {math.prod(jx.shape_of(atom) or ()) for atom in (*info.sources, *eqn.outvars) if atom is not None}
        return Moment.PAIR if len(sizes) == 1 else Moment.NO
    different = set(moments) - {Moment.NO}
    return different.pop() if rule.passes_on and len(different) == 1 else Moment.NO


def _is_whole(info: EqnInfo, read: Sequence[ValueFacts]) -> bool:
    rule = info.rule
    if not read:  # made of comparisons or integers
        return rule.is_cast or not info.eqn.invars
    is_power = rule.kind is ResultKind.POWER and (rule.power or 0) % 1 == 0
    keeps = (rule.is_linear or rule.passes_on or is_power) and rule.kind is not ResultKind.QUOTIENT
    return keeps and all(known.is_whole for known in read)


def _squares(info: EqnInfo, operands: Sequence[ValueFacts]) -> Squares:
    """Returns how the result of an op is made of squares."""
    rule = info.rule
    squares = [known.squares for known in operands]
    first = squares[0] if squares else Squares.NO
    if info.is_square:
        return Squares.SUM if first is Squares.NORM else Squares.SQUARE
    if rule.kind in (ResultKind.MATRIX_PRODUCT, ResultKind.OUTER_PRODUCT) and info.repeats_operand:
        return Squares.GRAM if rule.can_run_as_traced else Squares.SUM
    if rule.sums:
        return Squares.NO if first in (Squares.NO, Squares.NORM) else Squares.SUM
    if rule.power in (0.5, -0.5):
        return Squares.NORM if first is Squares.SUM else Squares.NO
    if Squares.GRAM in squares and rule.passes_on:
        return (
            Squares.SUM if rule.kind is ResultKind.TAKEN else Squares.GRAM
        )  # the diagonal, or the matrix times a mask
    if rule.arithmetic and not rule.scales:
        both_are_squares = all(each in (Squares.SQUARE, Squares.SUM) for each in squares)
        return Squares.SUM if Squares.SUM in squares or both_are_squares else Squares.NO
    others = [source for source, each in zip(info.sources, squares, strict=True) if not each]
    # A multiplication with another array makes another quantity.
    alone = not any(
        varying(jx.shape_of(atom)) for atom in others if atom is not None and jx.dtype_of(atom) == np.float32
    )
    return next(filter(None, squares), Squares.NO) if rule.passes_on and alone else Squares.NO


class Path:
    """What is on the way from an input of a body to a value, as a set of bits; nothing but moves at first."""

    CHOICE = 1 << 0  # an op that chooses, as `max`, or multiplies by an array of this iteration, as a gate does
    ARITHMETIC = 1 << 1
    PRODUCT = 1 << 2
    OTHER = 1 << 3
    CARRY = 1 << 4  # the input is a carry
    SLICE = 1 << 5  # the input is another slice in each iteration
    LAYER = 1 << 6  # a product with an array of this iteration, such as the weight of a layer


_ADDS = Path.CHOICE | Path.ARITHMETIC | Path.CARRY | Path.SLICE  # what may be on the way from an accumulator to itself

# Each input of a body that reaches a value, by index, with what is on the way.
Sources = frozenset[tuple[int, int]]


class Paths(jx.Forward[EqnInfo, Sources]):
    """The analysis that follows the inputs of the body of a loop. Paths compose, so it enters each body once."""

    bottom: Sources = frozenset()

    def carries(self, loop: jx.Loop) -> list[tuple[bool, bool]]:
        """Returns for each carry of a loop whether it is an accumulator, and whether it is a recurrence by products."""
        carries = range(loop.n_consts, loop.n_consts + loop.n_carry)
        after = [[(i - carries.start, path) for i, path in paths if i in carries] for paths in self._carried(loop)[0]]
        added = [[(i, path) for i, path in paths if not path & ~_ADDS] for paths in after]
        adds_up = [any(i == k and path & Path.ARITHMETIC for i, path in paths) for k, paths in enumerate(added)]
        reads_sum = [any(adds_up[i] for i, _ in paths) for paths in added]
        of_itself = [[path for i, path in paths if i == k] for k, paths in enumerate(after)]
        return list(zip(reads_sum, map(_recurs, of_itself), strict=True))

    def _carried(self, loop: jx.Loop) -> tuple[list[Sources], list[Sources]]:
        """Returns what reaches the carries of a loop in one or more iterations, and its results."""
        body, _ = jx.open_jaxpr(loop.body)
        return self._carries(body, (loop.n_consts, loop.n_carry), lambda: self._find_carried(loop))

    def _find_carried(self, loop: jx.Loop) -> tuple[list[Sources], list[Sources]]:
        n, first = len(jx.open_jaxpr(loop.body)[0].invars), loop.n_consts
        kinds = [0] * first + [Path.CARRY] * loop.n_carry + [Path.SLICE] * (n - first - loop.n_carry)
        inputs = [frozenset({pair}) for pair in enumerate(kinds)]
        outs = self.outs(loop.body, inputs)
        entering, before = inputs, None
        while entering != before:
            before = entering
            after = [_composed(before, paths) for paths in outs]
            carry = [a | b for a, b in zip(inputs[first : first + loop.n_carry], after, strict=False)]
            entering = [*inputs[:first], *carry, *inputs[first + loop.n_carry :]]
        return after[: loop.n_carry], [*carry, *after[loop.n_carry :]]

    def _through(self, equation: EqnInfo, operands: Sequence[Sources]) -> Sequence[Sources]:
        if not isinstance(loop := equation.enters, jx.Loop):
            return super()._through(equation, operands)
        inputs = [*operands[loop.consts], *operands[loop.carry], *operands[loop.xs]]
        return [_composed(inputs, paths) for paths in self._carried(loop)[1]]

    def join(self, a: Sources, b: Sources) -> Sources:
        """Returns what reaches either of two values."""
        return a | b

    def transfer(self, info: EqnInfo, operands: Sequence[Sources]) -> Sequence[Sources]:
        """Returns what reaches the results of an op."""
        rule, path = info.rule, Path.OTHER
        if rule.is_product or rule.sums or rule.demand == Demand.MATRIX:
            path = Path.PRODUCT
        elif rule.is_polynomial:
            path = Path.ARITHMETIC
        elif rule.passes_on:  # a part that is replaced, or selected by a mask, is no choice: the mask is followed, too
            path = Path.CHOICE if rule.kind is ResultKind.CHOSEN and rule.fuses and not rule.makes_gates else 0
        if rule.scales or rule.is_product or rule.kind is ResultKind.SELECTED:
            gate = Path.LAYER if rule.is_product else Path.CHOICE
            gated = [_is_gated(info, k, operands) for k in range(len(operands))]
            operands = [_after(of, gate) if is_gated else of for of, is_gated in zip(operands, gated, strict=True)]
        reached = _after(self.bottom.union(*operands), path)
        return [reached if jx.dtype_of(var) in _FOLLOWED else self.bottom for var in info.eqn.outvars]


_FOLLOWED = {np.dtype(np.float32), np.dtype(bool)}


def _recurs(paths: Sequence[int]) -> bool:
    """Whether a carry that reaches itself on these paths is a recurrence: the state of a simulation.

    Its errors add up: nothing forgets them, and some are made by products. In `h + h @ layer`, whose products read
    another array in each iteration, they do not add up more than in a network of as many layers.
    """
    products = [path & Path.PRODUCT for path in paths]
    is_network = not all(products) and any(path & Path.LAYER for path in paths)
    return any(products) and not is_network and not any(path & (Path.CHOICE | Path.OTHER) for path in paths)


def _after(sources: Sources, path: int) -> Sources:
    return frozenset([(i, before | path) for i, before in sources])


def _is_gated(info: EqnInfo, k: int, operands: Sequence[Sources]) -> bool:
    """Whether operand `k` is multiplied, or selected, by an array of this iteration, or by a function of a carry."""
    others = [0] if info.rule.kind is ResultKind.SELECTED else [i for i in range(len(operands)) if i != k]
    slices = [i for i in others if varying(jx.shape_of(info.eqn.invars[i]))]
    is_slice = any(path & Path.SLICE for i in slices for _, path in operands[i])
    return is_slice or any(path & Path.CARRY and path & Path.OTHER for i in others for _, path in operands[i])


def _composed(inputs: Sequence[Sources], paths: Iterable[tuple[int, int]]) -> Sources:
    """Returns what reaches a value through the inputs that reach it."""
    return frozenset([(i, before | path) for k, path in paths for i, before in inputs[k]])


class Demands(jx.Backward[EqnInfo, ValueFacts, int]):
    """The analysis that finds what the readers of each value demand of it."""

    bottom = Demand.NONE
    condition = Demand.ENDS_LOOP

    def join(self, a: int, b: int) -> int:
        """Returns what two readers demand of a value."""
        return a | b

    def _pass(self, info: EqnInfo, *facts: Any) -> Sequence[int]:
        operands, outs = facts
        return [Demand.NONE] * len(operands) if info.is_dead(outs) else super()._pass(info, *facts)

    def enter_loop(self, loop: jx.Loop, inputs: Sequence[ValueFacts], outs: Sequence[int]) -> Sequence[int]:
        """Marks the next values of the accumulators and the recurrences of a loop."""
        carry = inputs[loop.n_consts : loop.n_consts + loop.n_carry]
        marks = [Demand.TERM * known.adds_up | Demand.RECURRENCE * known.recurs for known in carry]
        return [demand | mark for demand, mark in zip(outs, marks, strict=True)]

    def leave(self, structure: jx.Structure, outs: Sequence[int], demands: Sequence[int]) -> Sequence[int]:
        """Returns what calls, branches and loops demand of their operands.

        Operands of a loop may be rounded, even where they decide when it ends: rounded once, they do not change in it.
        """
        kept = joined(outs) & (Demand.ENDS_LOOP | Demand.RECURRENCE)
        if isinstance(structure, jx.Branches):
            return [kept & Demand.ENDS_LOOP or Demand.ANY, *demands[1:]]
        if isinstance(structure, jx.Call):
            return demands
        gates = [Demand.GATE if demand & (Demand.GATE | Demand.MAKES_GATE) else Demand.NONE for demand in demands]
        pairs = zip(demands, gates, strict=True)
        return [demand and ((demand & ~_OF_A_BODY) | gate | kept or Demand.ANY) for demand, gate in pairs]

    def transfer(self, info: EqnInfo, operands: Sequence[ValueFacts], outs: Sequence[int]) -> Sequence[int]:
        """Returns what an op demands of its operands."""
        rule, demand = info.rule, joined(outs)
        asks_for_nan = rule.demand == Demand.CODE and len(info.operands) == 1  # `x != x`
        of_all = Demand.NONE if asks_for_nan else rule.demand
        if rule.moves or demand & ~Demand.OTHERS:
            of_all |= _passed_on(info, demand)
        if rule.kind in (ResultKind.SUM, ResultKind.DIFFERENCE):
            of_all |= _cancels(operands)
        if demand & Demand.EXACT and _is_elementwise(rule):
            # A comparison with a threshold is no index.
            floating = [of for var, of in zip(info.eqn.outvars, outs, strict=True) if jx.is_floating(var)]
            of_all |= joined(floating) & Demand.EXACT
        if not of_all & ~(Demand.CODE | Demand.RANK):
            of_all |= Demand.ANY
        each = [of_all] * len(operands)
        if info.between is not None:  # a covariance that is propagated, such as `F @ P @ F.T`: `P` is a matrix, too
            each[info.between] |= demand & Demand.MATRIX
        if gate := _gate(info, operands, demand):
            each = [of if known.adds_up else of | gate for of, known in zip(each, operands, strict=True)]
        if demand & Demand.RECURRENCE:
            each = [of | Demand.RECURRENCE if known.recurs else of for of, known in zip(each, operands, strict=True)]
        if demand & Demand.ENDS_LOOP:
            # An integer depends on integers only: a decoder that stops at a token does not depend on the logits.
            deciding = [var for var, of in zip(info.eqn.outvars, outs, strict=True) if of & Demand.ENDS_LOOP]
            rounds = all(jnp.issubdtype(jx.dtype_of(var), np.integer) for var in deciding)
            pairs = zip(each, info.eqn.invars, strict=True)
            each = [of if rounds and jx.is_floating(atom) else of | Demand.ENDS_LOOP for of, atom in pairs]
        return each


def why_as_traced(info: EqnInfo, demand: int, operands: Sequence[ValueFacts], form: Format) -> str | None:
    """Returns why an equation runs as it was traced: for its readers, or for what it demand; None if it does not.

    A value counts as an angle only if all its readers read it as one. For the other ways, one reader suffices.
    """
    if demand & Demand.ENDS_LOOP and not isinstance(info.structure, jx.Call | jx.Branches):
        return "loop"
    if not info.rule.can_run_as_traced:
        return None
    # The errors of 1000 steps add up: `lax.scan(lambda x, _: (a @ x, None), x, length=1000)`.
    if demand & Demand.RECURRENCE and any(known.recurs for known in operands):
        return "recurrence"
    # A residual is what is left of two equal numbers: `b - a @ x`, where `x = jnp.linalg.solve(a, b)`.
    if any(known.is_solution for known in operands):
        return "solution"
    # An expectation, `probabilities @ jnp.linspace(-20, 20, 255)`, or a code, `bits @ 2.0 ** jnp.arange(14)`.
    terms, is_constant = info.rule.terms, [known.is_constant for known in operands]
    sizes = [math.prod(jx.shape_of(atom) or ()) for atom in compress(info.eqn.invars, is_constant)]
    if info.rule.columns and terms in sizes and not all(is_constant):
        return "vector"
    # bfloat16 cannot count beyond 256: `same = (ids[:, None] == ids).astype(float); same @ same`.
    is_whole = [known.is_whole for known in operands]
    if all(is_whole) and not all(is_constant):
        return "count"
    if any(is_whole) and demand & Demand.CODE:
        return "code"
    # A sum by a matrix of zeros and ones: `jax.nn.one_hot(ids, n).T @ x` of 100,000 ones is inf in float16. So is that
    # of the squares of thousands of rows, `x.T @ x / len(x)`, before it is divided.
    if isinstance(terms, int) and form.largest < terms * (_SQUARE if info.repeats_operand else any(is_whole)):
        return "sum"
    if demand & Demand.OTHERS:  # `x = h @ w; jnp.sin(x) * x` rounds `x` anyway
        demand &= ~Demand.ANGLE
    if not form.needs_loss_scale:
        demand &= ~Demand.RANGE
    return next((reason for way, reason in _NAMES.items() if demand & way), None)


_SQUARE = 64  # 1024 squares of 8 are 65536

# What stays in the body of a loop: its own end, its own carries, and factors that only reach another product.
_OF_A_BODY = Demand.ENDS_LOOP | Demand.TERM | Demand.RECURRENCE | Demand.FACTOR | Demand.MAKES_GATE

_NAMES = {
    Demand.INDEX: "index",
    Demand.MATRIX: "decomposition",
    Demand.DISTANCE: "distance",
    Demand.ANGLE: "angle",
    Demand.EDGE: "edge",
    Demand.RANGE: "logarithm",
}

WHY_AS_TRACED = {  # what `why_as_traced` returns, in words
    "angle": "only sines and cosines read its result",
    "distance": "a term of a squared distance or of a variance, which cancels with the others",
    "decomposition": "a matrix decomposition or a solver reads its result",
    "solution": "it reads what a decomposition or a solver returned",
    "recurrence": "a loop replaces a carry with products and sums of it",
    "logarithm": "a logarithm reads its result, which may be smaller or larger than float16 holds",
    "edge": "its result is read at the edge of a domain, where the slope is infinite, as by `acos`",
    "index": "its result is converted to an integer",
    "code": "a sum by whole numbers that is compared with another, as a code",
    "rank": "its few columns are chosen from by their order, as by `top_k` or `argsort`",
    "vector": "a product with a constant vector, such as an expectation over bins, which is a sum",
    "count": "it counts: both operands come from comparisons or integers",
    "sum": "it sums so many squares, or terms by a matrix of whole numbers, that float16 may overflow",
    "loop": "it decides when a loop ends",
}


def joined(several: Sequence[int]) -> int:
    """Returns what several readers demand of a value."""
    return several[0] if len(several) == 1 else functools.reduce(operator.or_, several, Demand.NONE)


def _passed_on(info: EqnInfo, demand: int) -> int:
    """Returns what an op demands of its operands for the sake of those who read its results."""
    rule = info.rule
    # `jnp.sin(h @ w)` makes this product float32, and not those that compute `h`: rounding an operand is an error of
    # 0.4% of it, and the sum of many averages these.
    if rule.op_class is OpClass.LOWER:
        return Demand.NONE
    if rule.passes_on or rule.can_run_as_traced:
        is_sum = rule.arithmetic or rule.is_product
        ways = Demand.LINEAR | Demand.TERM if is_sum else Demand.LINEAR | Demand.TERM | Demand.ROOT
        if rule.moves:
            ways |= Demand.OTHERS
        if demand & Demand.OTHERS:
            ways &= ~Demand.ANGLE
        # The slope of `jnp.sqrt(1 - c * c)` is infinite where `c`, a cosine, is 1.
        takes_from_a_number = rule.kind is ResultKind.DIFFERENCE and isinstance(info.eqn.invars[0], Literal)
        edge = Demand.EDGE if takes_from_a_number and demand & Demand.ROOT else Demand.NONE
        return (demand & ways) | edge
    if info.is_square:
        return demand & (Demand.MATRIX | Demand.DISTANCE | Demand.EDGE)
    return demand & (Demand.MATRIX | Demand.RANGE if rule.sums else Demand.MATRIX)


def _is_elementwise(rule: Rule) -> bool:
    """Whether an element of the result is made of a few elements of the operands, and none is rounded again."""
    if rule.op_class in (OpClass.LOWER, OpClass.ORIGINAL):
        return rule.is_cast
    return not (rule.sums or (rule.is_product and rule.op_class is OpClass.FULL))


def _cancels(operands: Sequence[ValueFacts]) -> int:
    """Says that a sum or a difference reads its operands as terms that may cancel, if it does.

    PyTorch has `cdist` on its fp32 list.
    """
    # `x2[:, None] + y2 - 2 * x @ y.T`, and `blur(x * y) - blur(x) * blur(y)`.
    is_distance = any(known.squares is Squares.SUM for known in operands)
    is_variance = {Moment.SECOND, Moment.SQUARED} == {known.moment for known in operands}
    return Demand.DISTANCE if is_distance or is_variance else Demand.NONE


def _gate(info: EqnInfo, operands: Sequence[ValueFacts], demand: int) -> int:
    """Says that the operands of an op multiply an accumulator, or each other as in an associative scan, if they do."""
    rule = info.rule
    # `h = gate * h + x` with a gate of 0.998, which is 1 in bfloat16: `h` would not forget.
    if rule.scales and any(known.adds_up for known in operands):
        return Demand.GATE if demand & Demand.TERM else Demand.FACTOR
    if info.multiplies_slices and any(known.multiplies_slices for known in operands):
        return Demand.GATE
    if rule.moves or info.multiplies_slices:
        return demand & (Demand.GATE | Demand.MAKES_GATE)
    of_a_gate = demand & (Demand.GATE | Demand.MAKES_GATE) and len(info.operands) == 1
    is_simple = rule.arithmetic or rule.makes_gates
    return Demand.MAKES_GATE if of_a_gate and is_simple else Demand.NONE
