"""Where the equations of a program come from, and how often they run."""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn

from jmp_amp._jaxpr import Frame, frames_of, inner_jaxprs, open_jaxpr, scope_path


class Provenance(NamedTuple):
    """Where an equation comes from, and how often it runs.

    Attributes:
        stack: its name stack, with those of the equations around it.
        module: the named scopes in it.
        source: the line of the user's code.
        times: how often it runs.
    """

    stack: str
    module: str
    source: str
    times: int

    def of(self, eqn: JaxprEqn) -> "Provenance":
        """Returns the provenance of an equation of this jaxpr."""
        # What JAX traced once for all its callers has no source of its own.
        names = eqn.source_info.name_stack
        frames = frames_of(eqn)
        source = _shown(frames[0]) if frames else self.source
        return Provenance(f"{self.stack}/{names}", scope_path(self.module, names), source, self.times)


TOP = Provenance("", "", "", 1)


def _shown(frame: Frame) -> str:
    """Returns the file, with its folder, the line and the function of a frame."""
    file = "/".join(frame.file.replace(os.sep, "/").split("/")[-2:])
    return f"{file}:{frame.line} ({frame.function})"


def equations_in(jaxpr: Any, outer: Provenance) -> Iterator[tuple[JaxprEqn, Provenance]]:
    """Yields all equations of a jaxpr with their provenance, those inside other equations included."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        provenance = outer.of(eqn)
        yield eqn, provenance
        for inner, times in inner_jaxprs(eqn):
            yield from equations_in(inner, provenance._replace(times=provenance.times * times))
