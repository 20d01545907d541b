"""Finds the values that decide when a `while` loop ends. They run as they were traced: rounded, it might never end."""

from collections.abc import Sequence
from itertools import compress
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from jmp_amp._jaxpr import Branches, Call, Loop, dtype_of, is_floating, open_jaxpr, structure_of


def deciding_carries(loop: Loop) -> list[bool]:
    """Returns whether the end of a `while` depends on each carry, directly or through later iterations."""
    n_cond_consts = loop.cond_consts.stop - loop.cond_consts.start
    return closed_over_iterations(loop.body, loop.n_consts, depends_on(loop.cond, [True])[1][n_cond_consts:])


def closed_over_iterations(body: Any, n_consts: int, carries: Sequence[bool]) -> list[bool]:
    """Adds the carries that the given ones depend on, directly or through later iterations."""
    rest = [False] * (len(open_jaxpr(body)[0].outvars) - len(carries))
    while True:
        inputs = depends_on(body, [*carries, *rest])[1][n_consts : n_consts + len(carries)]
        more = [a or b for a, b in zip(carries, inputs, strict=True)]
        if more == list(carries):
            return more
        carries = more


def runs_as_whole(eqn: JaxprEqn) -> bool:
    """Whether an equation runs as it was traced as a whole if one of its results decides. Calls and branches do not."""
    return not isinstance(structure_of(eqn), Call | Branches)


def depends_on(jaxpr: Any, results: Sequence[bool]) -> tuple[set[Var], list[bool]]:
    """Returns the variables that the chosen results of a jaxpr depend on, and whether each input is one.

    An integer depends on integers only: a decoder that stops at a token does not depend on the logits.
    """
    opened, _ = open_jaxpr(jaxpr)
    needed = {atom for atom, needs in zip(opened.outvars, results, strict=True) if needs and isinstance(atom, Var)}
    for eqn in reversed(opened.eqns) if needed else ():
        if not needed.isdisjoint(eqn.outvars):
            needed.update(_operands(eqn, [var in needed for var in eqn.outvars]))
    return needed, [var in needed for var in opened.invars]


def _operands(eqn: JaxprEqn, results: Sequence[bool]) -> list[Var]:
    match structure_of(eqn):
        case Call(jaxpr, operands):
            is_read = depends_on(jaxpr, results)[1]
            atoms = list(compress([eqn.invars[i] for i in operands], is_read))
        case Branches(jaxprs, operands):
            of_branches = [depends_on(branch, results)[1] for branch in jaxprs]
            is_read = list(map(any, zip(*of_branches, strict=True)))
            atoms = [eqn.invars[0], *compress([eqn.invars[i] for i in operands], is_read)]
        case _:
            rounds = all(jnp.issubdtype(dtype_of(var), np.integer) for var in compress(eqn.outvars, results))
            atoms = [atom for atom in eqn.invars if not (rounds and is_floating(atom))]
    return [atom for atom in atoms if isinstance(atom, Var)]
