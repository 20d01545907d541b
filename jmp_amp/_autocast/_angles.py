"""Angles: values of which nothing but sines and cosines is taken.

An angle of 100 in float16 is off by 0.03 rad, in bfloat16 by 0.25. So what is read as an angle is computed in float32,
the product that it comes from included: Fourier features, the frequencies of NeRF.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var

from jmp_amp._autocast import _compat
from jmp_amp._autocast._rules import Rule


def angles(jaxpr: Any, results: Sequence[bool], rule_of: Callable[[JaxprEqn], Rule]) -> set[Var]:
    """Returns the variables that are read, and read as angles only: through arithmetic, moves and calls.

    Args:
        jaxpr: closed or open.
        results: whether each of its results is read so.
        rule_of: the rule of a first-order equation.
    """
    opened, _ = _compat.open_jaxpr(jaxpr)
    found: dict[Var, bool] = {}

    def note(atoms: Sequence[Any], flags: Sequence[bool]) -> None:
        for atom, is_angle in zip(atoms, flags, strict=True):
            if isinstance(atom, Var):
                found[atom] = found.get(atom, True) and is_angle

    note(opened.outvars, results)
    for eqn in reversed(opened.eqns):
        outs = [found.get(var, False) for var in eqn.outvars]
        if eqn.primitive.name in _compat.CALLS:
            inner = eqn.params[_compat.CALLS[eqn.primitive.name]]
            inside = angles(inner, outs, rule_of)
            note(eqn.invars, [var in inside for var in _compat.open_jaxpr(inner)[0].invars])
        else:
            rule = rule_of(eqn)
            is_angle = rule.angle or (rule.passes_on and bool(outs) and all(outs))
            note(eqn.invars, [is_angle] * len(eqn.invars))
    return {var for var, is_angle in found.items() if is_angle}
