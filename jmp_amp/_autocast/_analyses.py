"""Why a product is float32: what is known of its operands, and what the readers of its result demand.

`Knowledge` goes forward through a program, from its inputs, and finds the `ValueFacts` of each value. `Demands` goes
backward, from its results, and finds what the readers of each value demand of it. `why_as_traced` decides by both. None
of them knows dtypes, nor the names of primitives: they ask the `Rule` of each op.
"""

import functools
import math
import operator
from collections.abc import Sequence
from itertools import compress
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, Literal

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._paths import InfosOf, Paths
from jmp_amp._autocast._values import NOTHING, Moment, Squares, ValueFacts, constant, constants, facts_of
from jmp_amp._formats import Format
from jmp_amp._ops import Demand, EqnInfo, OpClass, ResultKind, Rule, varying


class Knowledge(jx.Forward[EqnInfo, ValueFacts]):
    """The analysis that finds what is known of values."""

    bottom = NOTHING

    def __init__(self, infos_of: InfosOf) -> None:
        """Takes a function that describes the equations of an open jaxpr."""
        super().__init__(infos_of)
        self.paths = Paths(infos_of)

    def constant(self, x: Any) -> ValueFacts:
        """Returns what is known of a literal."""
        return constant(x).known

    def constants(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> Sequence[ValueFacts]:
        """Returns what is known of the constants of an open jaxpr."""
        return [value.known for value in constants(jaxpr, consts)]

    def join(self, a: ValueFacts, b: ValueFacts) -> ValueFacts:
        """Returns what is known of a value that is either of two."""
        if a == b:
            return a
        is_constant, is_whole = a.is_constant and b.is_constant, a.is_whole and b.is_whole
        larger = ValueFacts._make([a.scalar if a.scalar == b.scalar else None, *map(max, a[1:], b[1:])])
        least = min(a.least, b.least) if is_constant else math.inf
        return larger._replace(least=least, carry=a.carry | b.carry, is_constant=is_constant, is_whole=is_whole)

    def widen(self, start: ValueFacts, old: ValueFacts, new: ValueFacts) -> ValueFacts:
        """Returns what is known of a carry that is not settled: how large one gets that grows is not known."""
        is_settled = (new.low, new.high) == (old.low, old.high)
        return new if is_settled else new._replace(low=start.low, high=start.high)

    def enter_loop(self, loop: jx.Loop, carry: Sequence[ValueFacts]) -> Sequence[ValueFacts]:
        """Marks the accumulators and the recurrences of a loop."""
        return [known._replace(carry=of) for known, of in zip(carry, self.paths.carried(loop)[0], strict=True)]

    def leave_loop(self, loop: jx.Loop, outs: Sequence[ValueFacts]) -> Sequence[ValueFacts]:
        """Returns what is known of the results of a loop; outside, they are no accumulators."""
        return [known._replace(carry=Demand.NONE) for known in outs]

    def transfer(self, info: EqnInfo, operands: Sequence[ValueFacts]) -> Sequence[ValueFacts]:
        """Returns what is known of the results of an op."""
        eqn, rule, scalars = info.eqn, info.rule, [known.scalar for known in operands]
        if rule.demand == Demand.CODE and _holds_of_nonfinite(info, scalars):
            return [ValueFacts(0.0)]
        if rule.kind is ResultKind.SELECTED and scalars[0] == 0:  # the other is for what is not finite
            return operands[1:2]
        if rule.is_cast and not jx.is_inexact(eqn.invars[0]):  # of integers or flags
            known = operands[0]._replace(is_whole=True)
            return [known._replace(scalar=None, low=0.0) if jx.dtype_of(eqn.invars[0]) == np.bool_ else known]
        # `-1e9` is known however it was written: `-jnp.float32(10) ** 9`, or `jnp.finfo(x.dtype).min / 2`.
        if rule.fold is not None and None not in scalars and jx.is_floating(eqn.outvars[0]):
            with np.errstate(all="ignore"):
                return [facts_of(np.asarray(rule.fold(*map(np.float32, scalars)), np.float32))]
        # Of integers, those that may be elements of the result, and not what they are chosen by.
        dtypes = _FLOATING.union(map(jx.dtype_of, eqn.outvars))
        read = [known for known, atom in zip(operands, eqn.invars, strict=True) if jx.dtype_of(atom) in dtypes]
        # The product of a logarithm and an array is another quantity, as `jnp.log(sigma) * embedding`.
        is_log = any(each.is_log for each in read) and rule.passes_on and not (rule.scales and len(info.arrays) > 1)
        is_norm = rule.scales and any(each.squares is Squares.NORM for each in read)
        # It ends with the first product that reads it, a maximum or a sum: behind these is no residual.
        is_solution = any(each.is_solution for each in read) and rule.passes_on and not (rule.bends or is_norm)
        is_plain = all(each.low == each.high == 1 and each.least == math.inf for each in read)
        known = ValueFacts(
            None,
            *((math.inf, 1.0, 1.0) if is_plain else (_least(info, read), *_bounds(info, operands, read))),
            is_log=is_log or rule.kind is ResultKind.LOGARITHM,
            squares=_squares(info, operands),
            moment=_moment(info, operands),
            is_constant=all(known.is_constant for known in operands),
            is_whole=_is_whole(info, read),
            is_solution=is_solution or rule.is_decomposition,
            is_squared=(rule.moves or rule.scales) and any(known.is_squared for known in operands),
            carry=_carry(rule, [known.carry for known in operands]),
            multiplies_slices=any(k.multiplies_slices for k in read) if rule.moves else info.multiplies_slices,
            adds_matrix=rule.passes_on and (any(k.adds_matrix for k in read) or _adds_matrix(info, operands)),
        )
        return [NOTHING if known == NOTHING else _of(var, known) for var in eqn.outvars]


def _of(var: Any, known: ValueFacts) -> ValueFacts:
    """Returns what is known of one result. Scalars scale: they are neither logarithms nor solutions."""
    if jx.dtype_of(var) not in _FLOATING:
        kept = NOTHING._replace(least=known.least, low=known.low, high=known.high, is_constant=known.is_constant)
        return kept._replace(carry=known.carry & Demand.ANY)
    scalar = known._replace(squares=Squares.NO, is_log=False, is_solution=False)
    return known if varying(jx.shape_of(var)) else scalar


_FLOATING = {np.dtype(name) for name in (jnp.float16, jnp.bfloat16, np.float32, np.float64)}


def _holds_of_nonfinite(info: EqnInfo, scalars: Sequence[float | None]) -> bool:
    """Whether a comparison holds of NaN alone, `x != x`, or of an infinity alone, `x == jnp.inf`."""
    is_equality, reads_infinity = info.rule.fold is None, math.inf in [abs(x or 0) for x in scalars]
    return len(info.operands) == 1 and is_equality == reads_infinity


def _carry(rule: Rule, carries: Sequence[int]) -> int:
    """Returns `ValueFacts.carry` of a result.

    What is chosen by size forgets a carry. Another function of it than sums, products, quotients and solutions, and
    what this function multiplies or selects, is no recurrence: the layers of `x + a @ x + jax.nn.swish(x @ w) @ v`.
    """
    if rule.moves or not any(carries):
        return joined(carries)
    if rule.bends:
        return Demand.NONE
    is_rational = rule.passes_on or rule.is_linear or rule.is_decomposition or (rule.power or 0.5) % 1 == 0
    if not is_rational:
        return Demand.ANY
    n_gates = len(carries) if rule.multiplies else rule.kind is ResultKind.SELECTED
    gates = [k for k, carry in enumerate(carries[:n_gates]) if carry & Demand.ANY]
    kept = Demand.RECURRENCE | Demand.ANY
    return joined([Demand.ANY if {*gates} - {k} else carry & kept for k, carry in enumerate(carries)])


def _bounds(info: EqnInfo, operands: Sequence[ValueFacts], read: Sequence[ValueFacts]) -> tuple[float, float]:
    """Estimates `low` and `high` of a result. Sums and means count as large as their largest term."""
    rule, is_constant = info.rule, all(known.is_constant for known in operands)
    lows, highs = [known.low for known in read], [known.high for known in read]
    if rule.power is not None:
        lows = highs = [_power(read[0].size, rule.power)]
    elif rule.multiplies:
        first, second = operands[:2]
        factors = [second.low, second.high]
        if rule.kind is ResultKind.QUOTIENT:
            factors = [_power(second.size, -1) * (x > 0) for x in factors]
        lows = [first.low * factors[1], first.high * factors[0]]
        highs = [first.low * factors[0], first.high * factors[1]]
        is_number = [isinstance(atom, Literal) and not is_constant for atom in info.eqn.invars]
        if any(is_number):  # it does not make a value smaller: data may be as large anyway
            least = min(1.0, first.size if is_number[1] else max(factors))
            lows, highs = [*lows, least], [*highs, least]
    elif rule.is_decomposition:  # as large as the matrix, or as its inverse
        lows = highs = [max(known.size, _power(known.size, -1)) for known in read]
    elif info.is_fraction or not (rule.passes_on or rule.kind is ResultKind.TOTAL):
        return 1.0, 1.0
    elif rule.kind is ResultKind.DIFFERENCE or rule.fold is np.negative:
        lows[-1], highs[-1] = highs[-1], lows[-1]
    elif rule.fold is np.abs:
        highs += lows
    # A maximum drops what a mask was filled with, and ends at a number; an array of several numbers may be large.
    numbers = [known for known in read if known.is_constant]
    ends = [drops and all(known.least >= known.size for known in numbers) for drops in rule.drops]
    rest = [] if numbers else [1.0]
    sizes = [min(each + rest) if end else max(each) for each, end in zip((lows, highs), ends, strict=True)]
    # Coefficients, as in `1 - 28 * u**6 + 48 * u**7 - 21 * u**8`, and factors near 1, as those of dropout, would
    # multiply over layers. Weights are as small as the layer is wide; float16 ends at 65504.
    is_layer = rule.is_product and min(known.size for known in operands[:2]) <= 1
    is_layer &= not any(known.is_whole or (known.is_constant and known.size > 1) for known in operands[:2])
    largest = 256 if rule.kind in _SUMS else 2.0**16 if is_layer else _GROWN
    is_one = [not is_constant and (1 / 4 < size < largest or size == 0) for size in sizes]
    low, high = [1.0 if one else min(size, 2.0**128) for size, one in zip(sizes, is_one, strict=True)]
    return low, high


def _least(info: EqnInfo, read: Sequence[ValueFacts]) -> float:
    """Returns the smallest magnitude of a constant that was moved; of other values, an estimate if it is small.

    `x * 1e-9` is 1e-9, as inputs of the program count as 1, and so is the product that reads it.
    """
    rule = info.rule
    if all(known.is_constant for known in read):
        return min([known.least for known in read], default=math.inf) if rule.moves else math.inf
    sizes = [known.size if known.is_constant or known.least == math.inf else known.least for known in read]
    if rule.kind is ResultKind.QUOTIENT and len(sizes) == 2:
        size = sizes[0] * _power(sizes[1], -1)
    elif rule.multiplies:
        size = math.prod(sizes)
    else:
        size = max(sizes) if rule.passes_on or rule.kind is ResultKind.TOTAL else 1.0
    return size if 0 < size < _SMALL else math.inf


_SMALL, _GROWN = 2.0**-10, 4  # what is between them is not followed


_SUMS = {ResultKind.SUM, ResultKind.DIFFERENCE, ResultKind.COTANGENT}


def _power(size: float, power: float) -> float:
    """Returns a power, no larger or smaller than float32 holds; nothing is known of a power of 0."""
    if size == 0:
        return 1.0
    log = power * math.log2(size) if math.isfinite(size) else power * 128
    return 2.0 ** min(max(log, -126), 128)


def _moment(info: EqnInfo, operands: Sequence[ValueFacts]) -> Moment:
    """Returns how the result of an op is made of products."""
    eqn, rule = info.eqn, info.rule
    moments = [known.moment for known in operands]
    if rule.can_run_as_traced:
        is_second = any(known.moment is Moment.PAIR or known.squares is Squares.SQUARE for known in operands)
        return Moment.SECOND if is_second else Moment.PRODUCT
    if info.is_square or rule.kind is ResultKind.PRODUCT:
        arrays = [moments[i] for i in info.arrays]
        if len(arrays) < 2 and not info.is_square:
            return max(arrays, default=Moment.NO)
        if all(moment in (Moment.PRODUCT, Moment.SECOND) for moment in arrays):
            return Moment.SQUARED
        # A norm and its scale are no arrays of the same size.
        sizes = {math.prod(jx.shape_of(atom) or ()) for atom in (*info.sources, *eqn.outvars) if atom is not None}
        return Moment.PAIR if len(sizes) == 1 else Moment.NO
    different = set(moments[:1] if rule.kind is ResultKind.QUOTIENT else moments) - {Moment.NO}
    return different.pop() if rule.passes_on and len(different) == 1 else Moment.NO


def _is_whole(info: EqnInfo, read: Sequence[ValueFacts]) -> bool:
    """Whether the result of an op holds whole numbers; `read` is what is known of its operands."""
    rule = info.rule
    if not read:
        return not info.eqn.invars
    is_power = rule.kind is ResultKind.POWER and (rule.power or 0) % 1 == 0
    keeps = (rule.is_linear or rule.passes_on or is_power) and rule.kind is not ResultKind.QUOTIENT
    return keeps and all(known.is_whole for known in read)


def _adds_matrix(info: EqnInfo, operands: Sequence[ValueFacts]) -> bool:
    """Whether an op adds a constant matrix to what is no constant, or subtracts one."""
    if info.rule.kind not in _SUMS or all(known.is_constant for known in operands):
        return False
    constants = compress(info.sources, [known.is_constant and known.size > 0 for known in operands])
    return any(x is not None and len(varying(jx.shape_of(x))) > 1 for x in constants)


def _iterates(info: EqnInfo, operands: Sequence[ValueFacts]) -> bool:
    """Whether an op multiplies `3 * jnp.eye(n) - z @ y` by `y` or `z`, as iterations for inverses and roots do."""
    return info.between is not None and operands[info.between].adds_matrix


def _squares(info: EqnInfo, operands: Sequence[ValueFacts]) -> Squares:
    """Returns how the result of an op is made of squares."""
    rule = info.rule
    squares = [known.squares for known in operands]
    first = squares[0] if squares else Squares.NO
    if info.is_square:
        return Squares.SUM if first is Squares.NORM else Squares.SQUARE
    if rule.kind in (ResultKind.MATRIX_PRODUCT, ResultKind.OUTER_PRODUCT) and info.repeats_operand:
        return Squares.GRAM if rule.can_run_as_traced else Squares.SUM
    if rule.kind is ResultKind.TOTAL:
        return Squares.NO if first in (Squares.NO, Squares.NORM) else Squares.SUM
    if rule.power in (0.5, -0.5):
        return Squares.NORM if first is Squares.SUM else Squares.NO
    if Squares.GRAM in squares and rule.passes_on:
        # The diagonal, or the matrix times a mask.
        return Squares.SUM if rule.kind is ResultKind.TAKEN else Squares.GRAM
    if rule.arithmetic and not rule.scales:
        both_are_squares = all(each in (Squares.SQUARE, Squares.SUM) for each in squares)
        return Squares.SUM if Squares.SUM in squares or both_are_squares else Squares.NO
    others = [source for source, each in zip(info.sources, squares, strict=True) if source is not None and not each]
    # A multiplication with another array makes another quantity.
    alone = not any(varying(jx.shape_of(var)) for var in others if jx.dtype_of(var) == np.float32)
    return next(filter(None, squares), Squares.NO) if rule.passes_on and alone else Squares.NO


class Demands(jx.Backward[EqnInfo, ValueFacts, int]):
    """The analysis that finds what the readers of each value demand of it."""

    bottom = Demand.NONE
    condition = Demand.ENDS_LOOP

    def join(self, a: int, b: int) -> int:
        """Returns what two readers demand of a value."""
        return a | b

    def _pass(self, info: EqnInfo, *facts: Any) -> Sequence[int]:
        """Passes no demand through an op whose results nothing reads, whatever it is: XLA drops it.

        In a backward pass, no layer is hidden that was none.
        """
        operands, outs = facts
        if info.is_dead(outs):
            return [Demand.NONE] * len(operands)
        demands = super()._pass(info, *facts)
        is_backward = info.structure and jx.is_backward(info.eqn.source_info.name_stack)
        return [of & ~Demand.HIDDEN for of in demands] if is_backward else demands

    def enter_loop(self, loop: jx.Loop, inputs: Sequence[ValueFacts], outs: Sequence[int]) -> Sequence[int]:
        """Marks the next values of accumulators and recurrences, but not of those that nothing reads."""
        carry = inputs[loop.n_consts : loop.n_consts + loop.n_carry]
        return [demand and demand | known.carry for demand, known in zip(outs, carry, strict=True)]

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
        if rule.kind in (ResultKind.SUM, ResultKind.DIFFERENCE):
            demand |= _cancels(rule, operands)
        of_all = _passed_on(info, demand) | info.related
        atoms, is_index = info.eqn.invars, [False] * len(operands)
        if demand & (Demand.RETURNED | Demand.LOSS):
            facts = zip(operands, atoms, strict=True)
            counts = [known.is_whole or not jx.is_inexact(x) or jx.shape_of(x) == () for known, x in facts]
            is_index = [not (all(counts) or jx.is_inexact(x)) for x in atoms]
            if all(counts):
                of_all |= demand & Demand.OTHERS
            elif not rule.demand and (rule.passes_on or rule.kind is ResultKind.TOTAL):
                of_all |= Demand.ANY if rule.bends else Demand.LOSS | demand & Demand.ANY
        if demand & Demand.EXACT and _is_elementwise(rule):
            # A comparison with a threshold is no index.
            floating = [of for var, of in zip(info.eqn.outvars, outs, strict=True) if jx.is_floating(var)]
            of_all |= joined(floating) & Demand.EXACT
        asks_for_nan = rule.demand == Demand.CODE and len(info.operands) == 1  # `x != x`
        n_keys = 0 if asks_for_nan else len(operands[: rule.n_demanding])
        of_keys = Demand.METRIC if rule.demand == Demand.RANK and not demand & ~_OF_A_METRIC else rule.demand
        each = [of_all | of_keys] * n_keys + [of_all] * (len(operands) - n_keys)
        if (of_all | rule.demand) & Demand.LOG:
            each = [_of_logarithm(rule, operands, of) for of in each]
        if rule.kind is ResultKind.SELECTED and operands[0].scalar == 0:  # the other is for NaN
            each[2:] = [Demand.NONE] * len(each[2:])
        reads = zip(each, is_index, strict=True)  # what is chosen by an index is computed with it
        each = [of | Demand.ANY if is_read or not of & ~_SAYS_LITTLE else of for of, is_read in reads]
        moments = [known.moment for known in operands] if rule.kind is ResultKind.QUOTIENT and info.arrays[1:] else []
        if moments == [Moment.NO, Moment.PRODUCT]:  # `b / (k.T @ u)`
            each[1] |= Demand.RANGE | Demand.LOG
        if demand & Demand.SQUARED:
            is_factor = rule.moves or rule.scales or info.is_square or info.repeats_operand
            each = [of | Demand.SQUARED * (is_factor or k.squares > 0) for of, k in zip(each, operands, strict=True)]
        if info.between is not None:  # a covariance that is propagated, such as `F @ P @ F.T`: `P` is a matrix, too
            each[info.between] |= demand & Demand.MATRIX
        is_of_carries = rule.is_product and all(known.carry & demand & Demand.RECURRENCE for known in operands[:2])
        if is_of_carries or _iterates(info, operands):  # for a matrix, such as its square root
            each = [of | Demand.MATRIX for of in each]
        gate, paths = _gate(info, operands, demand), zip(each, [known.carry for known in operands], strict=True)
        each = [of | gate * (not carry & Demand.TERM) | carry & demand & Demand.RECURRENCE for of, carry in paths]
        if demand & Demand.ENDS_LOOP:
            # An integer depends on integers only: a decoder that stops at a token does not depend on the logits.
            deciding = [var for var, of in zip(info.eqn.outvars, outs, strict=True) if of & Demand.ENDS_LOOP]
            rounds = all(jnp.issubdtype(jx.dtype_of(var), np.integer) for var in deciding)
            pairs = zip(each, atoms, strict=True)
            each = [of if rounds and jx.is_floating(atom) else of | Demand.ENDS_LOOP for of, atom in pairs]
        return each


def why_as_traced(info: EqnInfo, demand: int, operands: Sequence[ValueFacts], form: Format) -> str | None:
    """Returns why an equation runs as it was traced, as in `OpSite.why`; None if it does not.

    A value counts as an angle only if all its readers read it as one. For the other ways, one reader suffices.
    """
    if demand & Demand.SQUARES and (info.repeats_operand or any(known.is_squared for known in operands)):
        demand |= Demand.DISTANCE
    if demand & Demand.ENDS_LOOP and not isinstance(info.structure, jx.Call | jx.Branches):
        return "loop"
    if not info.rule.can_run_as_traced:
        return None
    # The errors of 1000 steps add up: `lax.scan(lambda x, _: (a @ x, None), x, length=1000)`.
    if any(demand & known.carry & Demand.RECURRENCE for known in operands):
        return "recurrence"
    if _iterates(info, operands):  # an iteration for a matrix, such as its inverse
        return "decomposition"
    # A residual is what is left of two equal numbers: `b - a @ x`, where `x = jnp.linalg.solve(a, b)`.
    if any(known.is_solution for known in operands):
        return "solution"
    # An expectation, `probabilities @ jnp.linspace(-20, 20, 255)`, or a code, `bits @ 2.0 ** jnp.arange(14)`.
    terms, is_constant = info.rule.terms, [known.is_constant for known in operands]
    sizes = [math.prod(jx.shape_of(atom) or ()) for atom in compress(info.eqn.invars, is_constant)]
    if info.rule.columns and terms in sizes and not all(is_constant):
        return "vector"
    is_whole = [known.is_whole for known in operands]
    # `labels @ jax.nn.log_softmax(logits).T` is a loss, and a sum by a matrix of zeros and ones selects logarithms. A
    # layer behind `jnp.log` is none: something else reads it, too, or only that.
    is_loss = demand & (Demand.RETURNED | Demand.LOSS) and not demand & Demand.ANY
    if any(known.is_log for known in operands) and (any(is_whole) or is_loss):
        return "loss"
    # bfloat16 cannot count beyond 256: `same = (ids[:, None] == ids).astype(float); same @ same`.
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
    if demand & Demand.LOG:
        demand = _of_logarithm(info.rule, operands, demand)
    if not form.needs_loss_scale:
        demand &= ~Demand.RANGE
    return next((reason for reason, way in DEMAND_OF.items() if demand & way & _SUFFICIENT), None)


_SQUARE = 64  # 1024 squares of 8 are 65536

# What says nothing of other readers; and what those demand of a choice who return it, a count of it, or a choice by it.
_SAYS_LITTLE = Demand.CODE | Demand.RANK | Demand.HIDDEN
_OF_A_METRIC = Demand.RETURNED | Demand.METRIC | Demand.CODE | Demand.INDEX

# What stays in the body of a loop: its own end, its own carries, and what gates are made of.
_OF_A_BODY = Demand.ENDS_LOOP | Demand.TERM | Demand.RECURRENCE | Demand.MAKES_GATE

# What readers demand of a product for these reasons. One of `_SUFFICIENT` alone is a reason: the first one counts.
DEMAND_OF = {
    "index": Demand.INDEX,
    "decomposition": Demand.MATRIX,
    "distance": Demand.DISTANCE | Demand.SQUARES,
    "angle": Demand.ANGLE,
    "edge": Demand.EDGE,
    "logarithm": Demand.RANGE | Demand.LOG,
    "rank": Demand.RANK | Demand.METRIC,
    "code": Demand.CODE,
}
_SUFFICIENT = Demand.INDEX | Demand.MATRIX | Demand.DISTANCE | Demand.ANGLE | Demand.EDGE | Demand.RANGE


def joined(several: Sequence[int]) -> int:
    """Returns what several readers demand of a value."""
    return several[0] if len(several) == 1 else functools.reduce(operator.or_, several, Demand.NONE)


def _of_logarithm(rule: Rule, operands: Sequence[ValueFacts], demand: int) -> int:
    """Returns a demand of a logarithm on the operands of an op: with `RANGE` if their small values matter to it.

    They do not beside a number of about 1, as in `jnp.log(1 + x)`, nor in `jnp.maximum(x, 0)`. Where an op scales them
    up or changes their sign they do, even to `jnp.log1p`: `jnp.log1p(1e9 * x)`, and `jnp.log1p(-x)` of `x` near 1.
    """
    numbers = [known.scalar for known in operands if known.scalar is not None]
    changes_sign = rule.fold is np.negative or rule.kind is ResultKind.DIFFERENCE or min(numbers, default=0) < 0
    if changes_sign or any(known.size >= _GROWN for known in operands):
        return demand | Demand.RANGE
    is_maximum, least = rule.drops[0], max(numbers, default=-1.0)
    hides = (is_maximum and least == 0) or ((is_maximum or rule.kind is ResultKind.SUM) and least >= _SMALL)
    return demand & ~Demand.RANGE if hides else demand


def _passed_on(info: EqnInfo, demand: int) -> int:
    """Returns what an op demands of its operands for the sake of those who read its results."""
    ways = info.rule.passes | Demand.HIDDEN
    if demand & Demand.OTHERS:
        ways &= ~Demand.ANGLE
    # The slope of `jnp.sqrt(1 - c * c)` is infinite where `c`, a cosine, is 1.
    takes_from_a_number = info.rule.kind is ResultKind.DIFFERENCE and isinstance(info.eqn.invars[0], Literal)
    return demand & ways | (Demand.EDGE if takes_from_a_number and demand & Demand.ROOT else Demand.NONE)


def _is_elementwise(rule: Rule) -> bool:
    """Whether an element of the result is made of a few elements of the operands, and none is rounded again."""
    if rule.op_class in (OpClass.LOWER, OpClass.ORIGINAL):
        return rule.is_cast
    return not (rule.kind is ResultKind.TOTAL or (rule.is_product and rule.op_class is OpClass.FULL))


def _cancels(rule: Rule, operands: Sequence[ValueFacts]) -> int:
    """Says that a sum or a difference reads its operands as terms that may cancel, if it does.

    PyTorch has `cdist` on its fp32 list. A sum of squares and of what is not negative does not cancel.
    """
    # `x2[:, None] + y2 - 2 * x @ y.T`, and `blur(x * y) - blur(x) * blur(y)`.
    is_positive = [known.squares in (Squares.SQUARE, Squares.SUM) or (known.scalar or -1) > 0 for known in operands]
    cannot_cancel = rule.kind is ResultKind.SUM and all(is_positive)
    # Nor does a cross entropy, whose logarithm is no product.
    cannot_cancel |= any(known.is_log and known.squares is not Squares.SUM for known in operands)
    has_squares = any(known.squares is Squares.SUM for known in operands) and not cannot_cancel
    is_variance = {Moment.SECOND, Moment.SQUARED} == {known.moment for known in operands}
    return Demand.DISTANCE * is_variance | (Demand.SQUARES | Demand.SQUARED) * has_squares


def _gate(info: EqnInfo, operands: Sequence[ValueFacts], demand: int) -> int:
    """Says that the operands of an op multiply an accumulator, or each other as in an associative scan, if they do."""
    rule, is_scan, of_gate = info.rule, info.multiplies_slices, demand & (Demand.GATE | Demand.MAKES_GATE)
    # `h = gate * h + x` with a gate of 0.998, which is 1 in bfloat16: `h` would not forget.
    if rule.scales and any(known.carry & Demand.TERM for known in operands):
        return Demand.GATE if demand & Demand.TERM else Demand.NONE
    if is_scan and any(known.multiplies_slices for known in operands):
        return Demand.GATE
    if is_scan or not of_gate or rule.moves:
        return of_gate
    is_simple = len(info.operands) == 1 and (rule.arithmetic or rule.makes_gates)
    return Demand.MAKES_GATE if is_simple else Demand.NONE
