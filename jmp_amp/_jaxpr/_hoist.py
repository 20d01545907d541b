"""Computes before a loop what the loop computes from arrays that it does not change."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_amp._jaxpr._structures import HIGHER_ORDER, Body, Call, Loop, holds, inner_jaxprs, structure_of
from jmp_amp._jaxpr._trace import (
    apply_as_traced,
    evaluate,
    nbytes_of,
    shape_of,
    trace,
    with_constants_as_inputs,
    with_last_reads,
)
from jmp_amp._jaxpr._versions import has_effects, open_jaxpr, split_known


def hoist(
    jaxpr: Any, known: Sequence[Any], selects: Callable[..., bool], growth: float = math.inf
) -> Callable[..., list[Any]]:
    """Returns a closed jaxpr as a function that reads results of some ops as they are computed here.

    So a loop over the function computes these ops once.

    Args:
        jaxpr: the jaxpr. If it has effects, or holds no such op, all of its ops stay in the function.
        known: the values of its first inputs, which are the same in every call; None for an input that may change.
        selects: selects ops that depend on known values and constants alone, as the policies of `jax.checkpoint` do.
        growth: how many times the memory that the jaxpr needs now it may need with these results; if it needed more,
            the ops stay in the function.
    """
    opened, consts = open_jaxpr(jaxpr)
    is_known = [x is not None for x in known] + [False] * (len(opened.invars) - len(known))
    if holds(jaxpr, selects) and not has_effects(opened):
        whole, _ = open_jaxpr(with_constants_as_inputs(jaxpr))
        before, after = split_known(whole, [True] * len(consts) + is_known, selects)
        moved = _evaluate_once(before, [*consts, *[x for x in known if x is not None]])
        if math.isinf(growth) or _peak(after, moved) <= growth * _peak(whole):
            return lambda *args: jax.core.eval_jaxpr(after, (), *moved, *consts, *args)
    return functools.partial(jax.core.eval_jaxpr, opened, consts)


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
    loop, (*cond, body) = structure_of(eqn), bodies
    assert isinstance(loop, Loop)
    # `lax.while_loop` refuses a condition of several numbers, which `vmap` makes.
    if not holds(body.jaxpr, selects) or (cond and shape_of(open_jaxpr(cond[0].jaxpr)[0].outvars[0])):
        run: Any = HIGHER_ORDER[eqn.primitive.name].run
        return run(eqn, bodies, args)
    consts, carry, n = args[loop.consts], tuple(args[loop.carry]), loop.n_carry
    hoisted = hoist(body.jaxpr, consts, selects)
    if cond:
        goes_on = functools.partial(cond[0], *args[loop.cond_consts])
        return lax.while_loop(lambda carry: goes_on(*carry)[0], lambda carry: tuple(hoisted(*consts, *carry)), carry)

    def step(carry: Any, xs: Any) -> tuple[Any, Any]:
        outs = tuple(hoisted(*consts, *carry, *xs))
        return outs[:n], outs[n:]

    xs, options = tuple(args[loop.xs]), {name: eqn.params[name] for name in ("reverse", "unroll")}
    length = None if xs else loop.length  # `lax.scan` takes a symbolic length from `xs` only
    carry, ys = lax.scan(step, carry, xs, length, **options)
    return *carry, *ys
