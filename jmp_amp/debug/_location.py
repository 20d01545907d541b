"""Where in the user's program an equation came from."""

import itertools
import os
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from jmp_amp._jaxpr import Frame, frames_of, is_backward, is_recomputed, scope_path

_OWN = tuple(
    str(pathlib.Path(__file__).resolve().parents[2] / package) + os.sep for package in ("jmp_amp", "pallas_kernels")
)
_DEBUG = str(pathlib.Path(__file__).resolve().parent) + os.sep
_INSTALLED = re.compile(r".*[/\\](site|dist)-packages[/\\]")


class Location(NamedTuple):
    """Where an equation came from.

    Attributes:
        source: `file.py:12 (function)`, the innermost line that is not a library's; a library's if there is no other,
            empty if nothing is known.
        library: the innermost line of all, if that is another one.
        scope: the named scopes around it, such as the modules of Flax.
        backward: whether it is part of a backward pass; its source is then the forward line.
    """

    source: str
    library: str
    scope: str
    backward: bool

    @property
    def line(self) -> str:
        """`at file.py:12 (function)`."""
        return ("in the backward pass of " if self.backward else "at ") + (self.source or "an unknown line")


def location_of(eqns: Sequence[JaxprEqn]) -> Location:
    """Returns where an equation came from, given those that it is in and itself, outermost first."""
    scope, backward = "", False
    frames: list[Frame] = []
    for eqn in eqns:
        stack = eqn.source_info.name_stack
        scope = scope_path(scope, stack)
        # Inside a backward pass, `jax.checkpoint` runs the forward one again.
        backward = not is_recomputed(stack) and (backward or is_backward(stack))
        # JAX's own functions, `jnp.where` say, hold equations that know no line of the user.
        frames = _frames(eqn) or frames
    own = [frame for frame in frames if not _is_library(frame)]
    source = next(iter(own or frames), None)
    library = frames[0] if frames and frames[0] != source else None
    return Location(_shown(source) if source else "", _shown(library) if library else "", scope, backward)


def _frames(eqn: JaxprEqn) -> list[Frame]:
    """The lines of an equation, innermost first, without JAX's and without the callers of the tool."""
    frames = frames_of(eqn, limit=10_000)
    return list(itertools.takewhile(lambda frame: not frame.file.startswith(_DEBUG), frames))


def _is_library(frame: Frame) -> bool:
    return frame.file.startswith(_OWN) or _INSTALLED.match(frame.file) is not None


def _shown(frame: Frame) -> str:
    """The frame, its file seen from the working directory or from that of all libraries."""
    path = pathlib.Path(_INSTALLED.sub("", frame.file))
    if path.is_relative_to(pathlib.Path.cwd()):
        path = path.relative_to(pathlib.Path.cwd())
    return f"{path}:{frame.line} ({frame.function})"
