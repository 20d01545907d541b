"""Computes before a loop what the loop computes from arrays that it does not change."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from jmp_amp._jaxpr._structures import Body, Call, Loop, holds, inner_jaxprs, structure_of
from jmp_amp._jaxpr._trace import apply_as_traced, bind, evaluate, nbytes_of, trace, with_last_reads
from jmp_amp._jaxpr._versions import has_effects, open_jaxpr, split_known, with_constants_as_inputs, with_loop_constants


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
    if holds(jaxpr, selects) and not has_effects(opened):
        whole = with_constants_as_inputs(jaxpr)
        before, after = split_known(whole, [True] * len(consts) + is_known, selects)
        moved = _evaluate_once(before, [*consts, *[x for x in known if x is not None]])
        if math.isinf(growth) or _peak(after, moved) <= growth * _peak(whole):
            return ClosedJaxpr(after, ()), [*moved, *consts]
    return jaxpr, []


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
    return bind(with_loop_constants(eqn, len(moved)), [*args[:first], *moved, *args[first:]], **jaxprs)
