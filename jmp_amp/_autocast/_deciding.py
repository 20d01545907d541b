"""What decides when a `while` ends: all of it runs as it was traced, since rounded it might never end."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jmp_amp._autocast import _compat


def deciding_carries(cond: Any, body: Any, n_cond: int, n_body: int) -> list[bool]:
    """Returns whether the end of a `while` depends on each carry, through however many iterations.

    Args:
        cond: the jaxpr of the predicate.
        body: the jaxpr of the body.
        n_cond: how many of the inputs of `cond` are constants.
        n_body: how many of the inputs of `body` are constants.
    """
    return closed_over_iterations(body, n_body, depends_on(cond, [True])[1][n_cond:])


def closed_over_iterations(body: Any, n_consts: int, carries: Sequence[bool]) -> list[bool]:
    """Returns the carries that the chosen ones depend on, through however many iterations of a loop."""
    rest = [False] * (len(_compat.open_jaxpr(body)[0].outvars) - len(carries))
    while True:
        inputs = depends_on(body, [*carries, *rest])[1][n_consts : n_consts + len(carries)]
        more = [a or b for a, b in zip(carries, inputs, strict=True)]
        if more == list(carries):
            return more
        carries = more


# Of these, only the results that decide run as they were traced; other equations that hold jaxprs do so as a whole.
SPLIT = {*_compat.CALLS, "cond"}


def depends_on(jaxpr: Any, results: Sequence[bool]) -> tuple[set[Var], list[bool]]:
    """Returns the variables that the chosen results of a jaxpr depend on, and whether its inputs are among them.

    An integer depends on integers only: a decoder that stops at a token is not one that stops at the logits of which
    the token was the largest.
    """
    opened, _ = _compat.open_jaxpr(jaxpr)
    needed = {atom for atom, needs in zip(opened.outvars, results, strict=True) if needs and isinstance(atom, Var)}
    for eqn in reversed(opened.eqns) if needed else ():
        if not needed.isdisjoint(eqn.outvars):
            needed.update(_operands(eqn, [var in needed for var in eqn.outvars]))
    return needed, [var in needed for var in opened.invars]


def _operands(eqn: JaxprEqn, results: Sequence[bool]) -> list[Var]:
    if eqn.primitive.name in _compat.CALLS:
        reads = depends_on(eqn.params[_compat.CALLS[eqn.primitive.name]], results)[1]
    elif eqn.primitive.name == "cond":
        branches = [depends_on(branch, results)[1] for branch in eqn.params["branches"]]
        reads = [True, *map(any, zip(*branches, strict=True))]
    else:
        rounds = all(_is_integer(var) for var, needs in zip(eqn.outvars, results, strict=True) if needs)
        reads = [not (rounds and _is_floating(atom)) for atom in eqn.invars]
    return [atom for atom, is_read in zip(eqn.invars, reads, strict=True) if is_read and isinstance(atom, Var)]


def _is_integer(var: Any) -> bool:
    return jax.numpy.issubdtype(var.aval.dtype, np.integer)


def _is_floating(atom: Any) -> bool:
    return jax.numpy.issubdtype(getattr(atom.aval, "dtype", np.bool_), np.floating)
