"""Finds the carries of a loop that accumulate: those that the body returns as themselves plus something.

A carry that is rounded to 16 bits in every iteration drifts, or stops growing once it is large. This module follows
each carry through the body: through arithmetic, moves and selections, and into calls, branches and loops. A carry that
reaches itself by arithmetic is an accumulator, and so is every carry that it is copied or added to. A state that the
body replaces, such as `tanh(x @ w + h @ u)`, is not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from jmp_amp._autocast._facts import Facts
from jmp_amp._jaxpr import Branches, Call, Loop, evaluate, open_jaxpr

# The inputs of a jaxpr that reach a value, by index, and whether they do so by arithmetic.
_Sources = dict[int, bool]
_FactsOf = Callable[[Jaxpr], Sequence[Facts]]


def accumulators(loop: Loop, facts_of: _FactsOf) -> list[bool]:
    """Returns whether each carry of a loop is an accumulator.

    Args:
        loop: the loop.
        facts_of: returns the facts of each equation of an open jaxpr.
    """
    n_consts, n_carry = loop.n_consts, loop.n_carry
    reach = _closure([_carried(sources, n_consts, n_carry) for sources in _sources(loop.body, facts_of)[:n_carry]])
    adds_up = [reach[i].get(i, False) for i in range(n_carry)]
    return [adds_up[i] or any(adds_up[j] for j in reach[i]) for i in range(n_carry)]


def _carried(sources: _Sources, n_consts: int, n_carry: int) -> _Sources:
    return {i - n_consts: by for i, by in sources.items() if n_consts <= i < n_consts + n_carry}


def _closure(reach: list[_Sources]) -> list[_Sources]:
    """Follows the carries through any number of iterations of the loop."""
    while True:
        more = [_merged([sources, *(_by(reach[i], by) for i, by in sources.items())]) for sources in reach]
        if more == reach:
            return reach
        reach = more


def _sources(jaxpr: Any, facts_of: _FactsOf) -> list[_Sources]:
    """Returns which inputs of a jaxpr reach each of its results."""
    opened, _ = open_jaxpr(jaxpr)
    facts = iter(facts_of(opened))

    def apply(eqn: JaxprEqn, operands: list[_Sources]) -> list[_Sources]:
        known = next(facts)
        return _results(known, operands, facts_of) if any(operands) else [{}] * len(eqn.outvars)

    inputs: list[_Sources] = [{i: False} for i in range(len(opened.invars))]
    return evaluate(jaxpr, inputs, apply, constant=_no_sources, literal=_no_sources)


def _no_sources(_: Any) -> _Sources:
    return {}


def _results(facts: Facts, operands: Sequence[_Sources], facts_of: _FactsOf) -> list[_Sources]:
    eqn, rule = facts.eqn, facts.rule
    match facts.structure:
        case Call(jaxpr, places):
            return _through(_sources(jaxpr, facts_of), [operands[i] for i in places])
        case Branches(jaxprs, places):
            inputs = [operands[i] for i in places]
            branches = [_through(_sources(branch, facts_of), inputs) for branch in jaxprs]
            return [_merged(results) for results in zip(*branches, strict=True)]
        case Loop() as loop:
            return _through_loop(loop, operands, facts_of)
    if not rule.passes_on:
        return [{}] * len(eqn.outvars)
    merged = _by(_merged(operands), rule.arithmetic)
    return [merged if getattr(var.aval, "dtype", None) == np.float32 else {} for var in eqn.outvars]


def _through_loop(loop: Loop, operands: Sequence[_Sources], facts_of: _FactsOf) -> list[_Sources]:
    n_consts, n_carry = loop.n_consts, loop.n_carry
    results = _sources(loop.body, facts_of)
    first = [_merged([sources, {n_consts + i: False}]) for i, sources in enumerate(results[:n_carry])]
    reach = _closure([_carried(sources, n_consts, n_carry) for sources in first])
    # A source of a carry in one iteration is a source of all that the carry reaches in later ones.
    carried = [_merged([_by(first[j], by) for j, by in sources.items()]) for sources in reach]
    stacked = [
        _merged([sources, *(_by(carried[i], by) for i, by in _carried(sources, n_consts, n_carry).items())])
        for sources in results[n_carry:]
    ]
    inputs = [*operands[loop.consts], *operands[loop.carry], *operands[loop.xs]]
    return _through([*carried, *stacked], inputs)


def _through(inner: Sequence[_Sources], operands: Sequence[_Sources]) -> list[_Sources]:
    """Returns the sources of the results of a call, given those of its operands."""
    return [_merged([_by(operands[i], by) for i, by in sources.items()]) for sources in inner]


def _by(sources: _Sources, arithmetic: bool) -> _Sources:
    return {i: by or arithmetic for i, by in sources.items()}


def _merged(several: Sequence[_Sources]) -> _Sources:
    merged: _Sources = {}
    for sources in several:
        for i, by in sources.items():
            merged[i] = merged.get(i, False) or by
    return merged
