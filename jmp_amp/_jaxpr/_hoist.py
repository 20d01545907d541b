"""Computes before a loop what the loop computes from arrays that it does not change."""

import functools
import math
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from jmp_amp._jaxpr import _versions as versions
from jmp_amp._jaxpr._structures import Body, Call, Loop, holds, inner_jaxprs, structure_of, with_checkpointed
from jmp_amp._jaxpr._trace import apply_as_traced, bind, evaluate, live_equations, nbytes_of, with_last_reads
from jmp_amp._jaxpr._versions import open_jaxpr, trace


def hoist(
    jaxpr: Any, known: Sequence[Any], selects: Callable[..., bool], growth: float = math.inf
) -> tuple[Any, list[Any]]:
    """Computes some ops of a closed jaxpr here, so that a loop over the others computes them once.

    Args:
        jaxpr: the jaxpr. If it has effects, or holds no such op, all of its ops stay in it.
        known: the values of its first inputs, which are the same in every call; None for an input that may change.
        selects: selects ops that depend on known values and constants alone, as the policies of `jax.checkpoint` do.
        growth: how many times the memory that the jaxpr needs now it may need with these results; if it needed more,
            the ops stay in the jaxpr.

    Returns:
        The jaxpr without these ops, and the values of the inputs that it has before those of `jaxpr`.
    """
    opened, consts = open_jaxpr(jaxpr)
    is_known = [x is not None for x in known] + [False] * (len(opened.invars) - len(known))
    if holds(jaxpr, selects) and not versions.has_effects(opened):
        whole = versions.with_constants_as_inputs(jaxpr)
        before, after = _split(whole, [True] * len(consts) + is_known, selects)
        moved = _evaluate_once(before, [*consts, *[x for x in known if x is not None]])
        if math.isinf(growth) or _peak(after, moved) <= growth * _peak(whole):
            return ClosedJaxpr(after, ()), [*moved, *consts]
    return jaxpr, []


def _split(jaxpr: Jaxpr, known: Sequence[bool], selects: Callable[..., bool]) -> tuple[Jaxpr, Jaxpr]:
    """Splits an open jaxpr into the selected ops that depend on known inputs alone, and the others.

    JAX's partial evaluation does this, too, and reads all that the jaxpr holds, several times if loops are nested. So
    it only splits equations here that hold selected ops.

    Returns:
        A jaxpr from the known inputs to the results of these ops, and one from these results and all inputs to the
        results of `jaxpr`.
    """
    available, clean = set(compress(jaxpr.invars, known)), lambda part: part
    before, after, saved = list[JaxprEqn](), list[JaxprEqn](), list[Var]()
    for eqn in jaxpr.eqns:
        given = [isinstance(x, Literal) or x in available for x in eqn.invars]
        is_split = any(given) and any(holds(inner, selects) for inner in inner_jaxprs(eqn))
        if is_split and eqn.primitive.name == "remat2":
            first, rest = _split(eqn.params["jaxpr"], given, selects)
            results = [Var(var.aval) for var in first.outvars]
            before.append(with_checkpointed(eqn, first).replace(invars=[*compress(eqn.invars, given)], outvars=results))
            after.append(with_checkpointed(eqn, rest).replace(invars=[*results, *eqn.invars]))
        elif is_split and (parts := versions.split_known(eqn, given, selects)) is not None:
            first_eqns, rest_eqns, known_results, results = parts
            before += first_eqns
            after += rest_eqns
            available.update(known_results)
            clean = versions.without_dead_code  # it reads what equations hold, too
        else:
            is_known, avals = all(given), [atom.aval for atom in eqn.invars]
            results = eqn.outvars if is_known and selects(eqn.primitive, *avals, **eqn.params) else []
            if is_known:
                before.append(eqn)
                available.update(eqn.outvars)
            if not results:
                after.append(eqn)
        saved += results
    after, read = live_equations(after, jaxpr.outvars)
    made = {*jaxpr.invars, *[var for eqn in after for var in eqn.outvars]}
    saved = [var for var in dict.fromkeys(saved) if var in read - made]
    before, _ = live_equations(before, saved)
    first = jaxpr.replace(invars=[*compress(jaxpr.invars, known)], outvars=saved, eqns=before)
    return clean(first), clean(jaxpr.replace(invars=[*saved, *jaxpr.invars], eqns=after))


def _evaluate_once(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr: equal casts of an array once, and a loop without carries on all of its slices at once.

    The forward pass of a model casts a weight, and so may the backward pass; in a `scan` both cast slices.
    """
    casts = dict[Any, Any]()

    def apply(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        structure = structure_of(eqn)
        if isinstance(structure, Call) and structure.is_plain:
            return evaluate(structure.jaxpr, [operands[i] for i in structure.operands], apply)
        if isinstance(structure, Loop) and structure.cond is None and not structure.n_carry and operands[structure.xs]:
            axes = [None] * structure.n_consts + [0] * len(operands[structure.xs])
            body = functools.partial(jax.core.eval_jaxpr, *open_jaxpr(structure.body))
            return evaluate(trace(jax.vmap(body, axes), operands), operands, apply)
        if eqn.primitive is not lax.convert_element_type_p:
            return apply_as_traced(eqn, operands)
        key = id(operands[0]), *eqn.params.values()
        if key not in casts:
            casts[key] = operands, apply_as_traced(eqn, operands)  # the operands keep their ids
        return casts[key][1]

    return evaluate(jaxpr, args, apply)


def _peak(jaxpr: Any, first: Sequence[Any] = ()) -> int:
    """Returns an estimate of the memory of a jaxpr: the most bytes of values that it holds at once.

    Args:
        jaxpr: the jaxpr. Its inputs are held all the time.
        first: its first inputs, if some of them are the same array.
    """
    opened, _ = open_jaxpr(jaxpr)
    inputs = set(opened.invars)
    different = {id(x): x for x in first}.values()
    peak = held = sum(map(nbytes_of, [*different, *opened.invars[len(first) :]]))
    for eqn, dead in with_last_reads(opened):
        held += sum(map(nbytes_of, eqn.outvars))
        inside = [_peak(inner) - sum(map(nbytes_of, open_jaxpr(inner)[0].invars)) for inner in inner_jaxprs(eqn)]
        peak = max(peak, held + max(inside, default=0))
        held -= sum(map(nbytes_of, set(dead) - inputs))
    return peak


def run_loop(selects: Callable[..., bool], eqn: JaxprEqn, bodies: Sequence[Body], args: Sequence[Any]) -> Sequence[Any]:
    """Runs a loop with other functions in place of its jaxprs, and some ops on its constants before it; see `hoist`."""
    loop, (*cond, body) = structure_of(eqn), [body.jaxpr for body in bodies]
    assert isinstance(loop, Loop)
    body, moved = hoist(body, args[loop.consts], selects)
    jaxprs = {"cond_jaxpr": cond[0], "body_jaxpr": body} if cond else {"jaxpr": body}
    first = loop.consts.start
    return bind(versions.with_loop_constants(eqn, len(moved)), [*args[:first], *moved, *args[first:]], **jaxprs)
