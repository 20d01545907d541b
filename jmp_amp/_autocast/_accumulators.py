"""The carries of a loop that add up: those that come back as themselves plus something.

Rounded to 16 bits in every iteration, such a carry drifts, or stands still once it is large. It is found by following
each carry through the body: through arithmetic, moves and selections, into calls, branches and loops. A carry that
comes back to itself by arithmetic is an accumulator, and so is whatever it is copied or added to. A state that is
replaced as a whole, such as `tanh(x @ w + h @ u)`, is not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_amp._autocast._rules import Rule
from jmp_amp._jaxpr import Branches, Call, Loop, open_jaxpr, structure_of

# From inputs of a jaxpr that reach a value, by their places: whether they do so by arithmetic.
_Sources = dict[int, bool]
_RulesOf = Callable[[Jaxpr], Sequence[Rule]]


def accumulators(loop: Loop, rules_of: _RulesOf) -> list[bool]:
    """Returns whether each carry of a loop adds up.

    Args:
        loop: the loop.
        rules_of: the rule of each equation of an open jaxpr.
    """
    n_consts, n_carry = loop.n_consts, loop.n_carry
    reach = _closure([_carried(sources, n_consts, n_carry) for sources in _sources(loop.body, rules_of)[:n_carry]])
    adds_up = [reach[i].get(i, False) for i in range(n_carry)]
    return [adds_up[i] or any(adds_up[j] for j in reach[i]) for i in range(n_carry)]


def _carried(sources: _Sources, n_consts: int, n_carry: int) -> _Sources:
    return {i - n_consts: by for i, by in sources.items() if n_consts <= i < n_consts + n_carry}


def _closure(reach: list[_Sources]) -> list[_Sources]:
    """Follows the carries through any number of iterations."""
    while True:
        more = [_merged([sources, *(_by(reach[i], by) for i, by in sources.items())]) for sources in reach]
        if more == reach:
            return reach
        reach = more


def _sources(jaxpr: Any, rules_of: _RulesOf) -> list[_Sources]:
    """Returns which inputs of a jaxpr reach each of its results."""
    opened, _ = open_jaxpr(jaxpr)
    env: dict[Any, _Sources] = {var: {i: False} for i, var in enumerate(opened.invars)}

    def read(atom: Any) -> _Sources:
        return env.get(atom, {}) if isinstance(atom, Var) else {}

    for eqn, rule in zip(opened.eqns, rules_of(opened), strict=True):
        operands = list(map(read, eqn.invars))
        if any(operands):
            env.update(zip(eqn.outvars, _results(eqn, rule, operands, rules_of), strict=True))
    return list(map(read, opened.outvars))


def _results(eqn: JaxprEqn, rule: Rule, operands: Sequence[_Sources], rules_of: _RulesOf) -> list[_Sources]:
    match structure_of(eqn):
        case Call(jaxpr, places):
            return _through(_sources(jaxpr, rules_of), [operands[i] for i in places])
        case Branches(jaxprs, places):
            inputs = [operands[i] for i in places]
            branches = [_through(_sources(branch, rules_of), inputs) for branch in jaxprs]
            return [_merged(results) for results in zip(*branches, strict=True)]
        case Loop() as loop:
            return _through_loop(loop, operands, rules_of)
    if not rule.passes_on:
        return [{}] * len(eqn.outvars)
    merged = _by(_merged(operands), rule.arithmetic)
    return [merged if getattr(var.aval, "dtype", None) == np.float32 else {} for var in eqn.outvars]


def _through_loop(loop: Loop, operands: Sequence[_Sources], rules_of: _RulesOf) -> list[_Sources]:
    n_consts, n_carry = loop.n_consts, loop.n_carry
    results = _sources(loop.body, rules_of)
    first = [_merged([sources, {n_consts + i: False}]) for i, sources in enumerate(results[:n_carry])]
    reach = _closure([_carried(sources, n_consts, n_carry) for sources in first])
    # What reaches a carry in one iteration reaches in later ones what this carry reaches.
    carried = [_merged([_by(first[j], by) for j, by in sources.items()]) for sources in reach]
    stacked = [
        _merged([sources, *(_by(carried[i], by) for i, by in _carried(sources, n_consts, n_carry).items())])
        for sources in results[n_carry:]
    ]
    inputs = [*operands[loop.consts], *operands[loop.carry], *operands[loop.xs]]
    return _through([*carried, *stacked], inputs)


def _through(inner: Sequence[_Sources], operands: Sequence[_Sources]) -> list[_Sources]:
    """Returns what reaches the results of a call, from what reaches its operands."""
    return [_merged([_by(operands[i], by) for i, by in sources.items()]) for sources in inner]


def _by(sources: _Sources, arithmetic: bool) -> _Sources:
    return {i: by or arithmetic for i, by in sources.items()}


def _merged(several: Sequence[_Sources]) -> _Sources:
    merged: _Sources = {}
    for sources in several:
        for i, by in sources.items():
            merged[i] = merged.get(i, False) or by
    return merged
