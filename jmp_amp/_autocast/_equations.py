"""Describes the equations of a jaxpr, and how they belong together.

Two products may have one matrix between them, a quotient may be in the unit of a later product, and a difference may be
of a value and what that was rounded to.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._ops import Demand, EqnInfo, OpClass, ResultKind, Rule

Pairs = Sequence[tuple[JaxprEqn, Rule]]
Sources = Sequence[tuple[Var | None, ...]]


def describe_equations(
    jaxpr: Jaxpr, rule_of: Callable[[JaxprEqn], Rule], token_of: Callable[..., object | None]
) -> list[EqnInfo]:
    """Returns the facts of each equation of an open jaxpr.

    Args:
        jaxpr: the jaxpr.
        rule_of: returns the rule of an equation.
        token_of: returns `EqnInfo.token` of an equation, from its sources and what relates it to others.
    """
    pairs = [(eqn, rule_of(eqn)) for eqn in jaxpr.eqns]
    sources = _sources(pairs)
    structures = list(map(jx.structure_of, jaxpr.eqns))
    rounding = [eqn for (eqn, rule), each in zip(pairs, structures, strict=True) if _rounds(rule, each, rule_of)]
    between, related = _relations(pairs, sources, rounding)
    rounded = [{*map(id, (*eqn.invars, *eqn.outvars))} for eqn in rounding]  # values, each with what it was rounded to
    infos = []
    for i, ((eqn, rule), of) in enumerate(zip(pairs, sources, strict=True)):
        operands = tuple(dict.fromkeys([atom for atom in eqn.invars if isinstance(atom, Var)]))
        is_fraction = rule.kind is ResultKind.DIFFERENCE and {*map(id, eqn.invars)} in rounded
        relations = between.get(i), related.get(i, Demand.NONE), is_fraction
        infos.append(EqnInfo(eqn, rule, structures[i], operands, of, *relations, token_of(eqn, of, *relations)))
    return infos


def _sources(pairs: Pairs) -> Sources:
    """Returns what each operand was before it was only moved; None for a literal, as in `jnp.ones(n)`."""
    moved, sources = dict[Any, Var | None](), list[tuple[Var | None, ...]]()
    for eqn, rule in pairs:
        sources.append(tuple([moved.get(a, a) if isinstance(a, Var) else None for a in eqn.invars]))
        if rule.moves and len(eqn.outvars) == 1 and (sources[-1][0] is not None or len(eqn.invars) == 1):
            moved[eqn.outvars[0]] = sources[-1][0]
    return sources


def _relations(pairs: Pairs, sources: Sources, rounding: Sequence[JaxprEqn]) -> tuple[dict[int, int], dict[int, int]]:
    """Returns `EqnInfo.between` and `EqnInfo.related`, each by the index of the equation."""
    products, between, related = dict[Any, tuple[int, Sequence[Any]]](), dict[int, int](), dict[int, int]()
    scaled, quotients = dict[Any, Var](), dict[Any, tuple[int, Var]]()  # what each was before it was scaled
    for i, ((eqn, rule), of) in enumerate(zip(pairs, sources, strict=True)):
        made, read = [products[each] for each in of if each in products], [each for each in of if each is not None]
        if rule.op_class is OpClass.LOWER and not jx.is_backward(eqn.source_info.name_stack):
            related[i] = Demand.HIDDEN
        if rule.is_product and None not in of:  # `(A @ P) @ A.T`, and `A @ (P @ A.T)`; `A @ jnp.ones(n)` is a sum
            products[eqn.outvars[0]] = i, of
            for k in (0, 1):
                first, factors = products.get(of[k], (i, ()))
                if of[1 - k] is not None and of[1 - k] in factors:
                    between |= {i: k, first: 1 - factors.index(of[1 - k])}
        elif rule.kind is ResultKind.QUOTIENT and len({*made}) == 2 and {*made[0][1]} & {*made[1][1]} - {None}:
            related[i] = Demand.RANGE  # `(q @ (k.T @ v)) / (q @ k.sum(0))`: both may be small
        elif rule.kind is ResultKind.DIFFERENCE and any(x is not None and x in each for x in of for _, each in made):
            related[i] = Demand.DISTANCE  # `jax.nn.softmax(scores) @ x - x`
        elif rule.passes_on and len(made) == 1:
            products[eqn.outvars[0]] = made[0]  # `0.9 * (A @ P)`, or `A @ P + Q`
        if len(read) == len(eqn.outvars) == 1:
            (x,), (out,) = read, eqn.outvars
            if rule.scales:
                scaled[out] = scaled.get(x, x)
            if x in quotients and jx.is_floating(out) and eqn not in rounding:  # whole numbers are not small
                quotients[out] = quotients[x]
        elif rule.kind is ResultKind.QUOTIENT and len(read) == 2:
            quotients[eqn.outvars[0]] = i, scaled.get(read[1], read[1])
        elif rule.kind is ResultKind.PRODUCT and len(read) == 2:
            for x, unit in (read, read[::-1]):  # a function of a quotient, times its unit: `n * jnp.tanh((c @ x) / n)`
                if x in quotients and quotients[x][1] is scaled.get(unit, unit):
                    related[quotients[x][0]] = Demand.RANGE
    return between, related


def _rounds(rule: Rule, structure: jx.Structure | None, rule_of: Callable[[JaxprEqn], Rule]) -> bool:
    """Whether an equation rounds to whole numbers; `jnp.round` is a call."""
    if structure and isinstance(structure, jx.Call) and len(inside := jx.open_jaxpr(structure.jaxpr)[0].eqns) == 1:
        return _rounds(rule_of(inside[0]), jx.structure_of(inside[0]), rule_of)
    return rule.kind is ResultKind.ROUNDED
