"""What the programs of an optimizer say of the leaves of its state: how they start, and how they are read."""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp_amp import _jaxpr as jx
from jmp_amp._ops import EqnInfo, ResultKind, Rule, rule_of

_DATA = -1  # in the place of the number of a leaf: gradients, parameters and other arguments


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
        read: the leaves that it was computed from, by their numbers, and `_DATA`.
        differences: the leaves of which a difference was taken on the way.
        is_positive: whether it is 0 or more.
        constant: the number that all its elements are, if the program says so.
        sign: the `id` of the variable of this jaxpr whose signs it has, if it is a product of that and of what is
            positive.
    """

    read: frozenset[int] = frozenset()
    differences: frozenset[int] = frozenset()
    is_positive: bool = False
    constant: Any = None
    sign: int | None = None


class _Facts(jx.Forward[EqnInfo, Fact]):
    """Finds the facts, and collects the leaves whose difference is read where its relative error matters.

    Attributes:
        subtracted: these leaves.
        pairs: what the two operands of each difference were computed from.
    """

    bottom = Fact()

    def __init__(self) -> None:
        super().__init__(lambda jaxpr: [EqnInfo(eqn, rule_of(eqn), jx.structure_of(eqn)) for eqn in jaxpr.eqns])
        self.subtracted, self.pairs = set[int](), set[tuple[frozenset[int], ...]]()

    @staticmethod
    def join(a: Fact, b: Fact) -> Fact:
        return Fact(a.read | b.read, a.differences | b.differences, a.is_positive and b.is_positive)

    def outs(self, jaxpr: Any, inputs: Sequence[Fact]) -> tuple[Fact, ...]:
        return tuple([fact._replace(sign=None) for fact in super().outs(jaxpr, inputs)])

    def constant(self, x: Any) -> Fact:  # literals are scalars
        x = np.asarray(x).item()
        return Fact(is_positive=not isinstance(x, complex) and x >= 0, constant=x)

    def transfer(self, info: EqnInfo, operands: Sequence[Fact]) -> Sequence[Fact]:
        eqn, rule = info.eqn, info.rule
        read = frozenset[int]().union(*(fact.read for fact in operands))
        differences = frozenset[int]().union(*(fact.differences for fact in operands))
        for fact in _sensitive(eqn, rule, operands):
            self.subtracted |= fact.differences
        is_of_elements = jx.shape_of(eqn.outvars[0]) != ()  # rounding errors of a total are few
        if rule.kind is ResultKind.DIFFERENCE and is_of_elements and all(fact.read for fact in operands):
            differences |= read
            self.pairs |= set(itertools.permutations(fact.read for fact in operands))
        constant = operands[0].constant if rule.moves and len(operands) == 1 else None
        sign = None
        if rule.kind is ResultKind.PRODUCT and any(fact.is_positive for fact in operands):
            sign = _signs(eqn, operands)[operands[0].is_positive]
        return [Fact(read, differences, _is_positive(eqn, rule, operands), constant, sign)] * len(eqn.outvars)


def _signs(eqn: Any, operands: Sequence[Fact]) -> list[int]:
    """Returns the `id` of the variable whose signs each operand has: that of `x` for `(1 - b2) * x` and for `x`."""
    return [fact.sign or id(var) for fact, var in zip(operands, eqn.invars, strict=True)]


def _sensitive(eqn: Any, rule: Rule, operands: Sequence[Fact]) -> Sequence[Fact]:
    """Returns the operands whose relative error matters: roots, logarithms, divisors, and what only the sign is of."""
    if rule.kind is ResultKind.QUOTIENT:
        return operands[1:]
    is_root = rule.kind is ResultKind.POWER and not rule.is_polynomial
    return operands if is_root or rule.kind is ResultKind.LOGARITHM or eqn.primitive.name == "sign" else ()


def _is_positive(eqn: Any, rule: Rule, operands: Sequence[Fact]) -> bool:
    positive = [fact.is_positive for fact in operands]
    match eqn.primitive.name, rule.kind:
        case "abs" | "exp" | "exp2" | "logistic", _:
            return True
        case "max", _:
            return any(positive)
        case "neg", _:
            return False
        case _, ResultKind.DIFFERENCE:  # of two settings, such as `1 - b2`
            return not any(fact.read for fact in operands)
        case _, ResultKind.POWER if rule.power is None or rule.power % 2 != 1:
            return True
        case _, ResultKind.PRODUCT if operator.eq(*_signs(eqn, operands)):
            return True
        case _, ResultKind.SELECTED:
            return all(positive[1:])
    return all(positive) and (rule.passes_on or rule.kind in (ResultKind.TOTAL, ResultKind.POWER))


def facts_of_init(init: Callable[[Any], Any], params: Any) -> list[Fact]:
    """Returns what is known of the leaves of a state that starts. One that reads parameters is no moment."""
    jaxpr, arrays, _ = jx.trace_call(init, (params,), {})
    return list(_Facts().outs(jaxpr, [Fact(frozenset({_DATA}))] * len(arrays)))


class Moments(NamedTuple):
    """What is known of the leaves of a state, by their numbers.

    Attributes:
        subtracted: those whose difference is read by a root, a logarithm or a division, as the mean and the mean square
            of a variance are, and those of a change since the last step: a leaf that holds a value of that step, and
            what that value is computed from. Errors of each are errors of the difference, which is much smaller.
        positive: those that are 0 or more if they start so.
    """

    subtracted: frozenset[int] = frozenset()
    positive: frozenset[int] = frozenset()


_FOUND = jx.Cache()


def moments_of(update: Callable[..., Any], updates: Any, state: Any, params: Any, extra: dict[str, Any]) -> Moments:
    """Returns what the program of an update says of the leaves of its state; each program is read once."""
    leaves, tree = jax.tree.flatten((updates, state, params, extra))
    key = tree, tuple([(np.shape(x), jx.dtype_of(x)) if hasattr(x, "dtype") else type(x) for x in leaves])
    return _FOUND(update, key, lambda: _find(update, (updates, state, params), extra))


def _find(update: Callable[..., Any], args: tuple[Any, Any, Any], extra: dict[str, Any]) -> Moments:
    jaxpr, arrays, _ = jx.trace_call(update, args, extra)
    before, n = (len(jx.split_arrays(tree)[0]) for tree in args[:2])
    is_setting = [aval.ndim == 0 for aval in jaxpr.in_avals[before : before + n]]
    facts = [Fact(frozenset() if is_setting[i] else frozenset({i}), is_positive=True) for i in range(n)]
    while True:
        inputs = [Fact(frozenset({_DATA}))] * len(arrays)
        inputs[before : before + n] = facts
        found = _Facts()
        outs = found.outs(jaxpr, inputs)[-n:] if n else ()
        new = [found.join(fact, out)._replace(read=fact.read) for fact, out in zip(facts, outs, strict=True)]
        if new == facts:
            last = {frozenset({i}): out.read for i, out in enumerate(outs) if i not in out.read}  # no averages
            changes = [a | b for a, b in found.pairs if last.get(a - b) == b]
            positive = frozenset(i for i, fact in enumerate(facts) if fact.is_positive)
            return Moments(frozenset(found.subtracted).union(*changes), positive)
        facts = new
