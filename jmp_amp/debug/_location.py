"""The position of an equation in the user's code."""

import itertools
import os
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from jmp_amp._jaxpr import Frame, frames_of, is_backward, is_recomputed, scope_path

_OWN_FOLDERS = tuple(
    str(pathlib.Path(__file__).resolve().parents[2] / package) + os.sep for package in ("jmp_amp", "pallas_kernels")
)
_DEBUG_FOLDER = str(pathlib.Path(__file__).resolve().parent) + os.sep
_SITE_PACKAGES = re.compile(r".*[/\\](site|dist)-packages[/\\]")


class Location(NamedTuple):
    """The position of an equation in the user's code.

    Attributes:
        source: `file.py:12 (function)`, the innermost line outside of libraries; the innermost line of all if every
            line belongs to a library, and empty if the equation has no line.
        library: the innermost line of all, if it differs from `source`; else empty.
        scope: the named scopes around the equation, such as Flax modules.
        backward: whether the equation belongs to a backward pass; `source` is then the forward line.
    """

    source: str
    library: str
    scope: str
    backward: bool

    @property
    def where(self) -> str:
        """`at file.py:12 (function)`, or `in the backward pass of file.py:12 (function)`."""
        return ("in the backward pass of " if self.backward else "at ") + (self.source or "an unknown line")


def location_of(eqns: Sequence[JaxprEqn]) -> Location:
    """Returns the location of the last of `eqns`; the others contain it, outermost first."""
    scope, backward = "", False
    frames: list[Frame] = []
    for eqn in eqns:
        stack = eqn.source_info.name_stack
        scope = scope_path(scope, stack)
        # Inside a backward pass, `jax.checkpoint` runs the forward pass again.
        backward = not is_recomputed(stack) and (backward or is_backward(stack))
        # The equations inside JAX's own jitted functions, such as `jnp.where`, have no line of the user's code.
        frames = _user_frames(eqn) or frames
    outside_libraries = [frame for frame in frames if not _is_library(frame)]
    source = next(iter(outside_libraries or frames), None)
    library = frames[0] if frames and frames[0] != source else None
    return Location(_format(source) if source else "", _format(library) if library else "", scope, backward)


def _user_frames(eqn: JaxprEqn) -> list[Frame]:
    """Returns the stack frames of an equation, innermost first, up to the call of the debugging tool."""
    frames = frames_of(eqn, limit=10_000)
    return list(itertools.takewhile(lambda frame: not frame.file.startswith(_DEBUG_FOLDER), frames))


def _is_library(frame: Frame) -> bool:
    return frame.file.startswith(_OWN_FOLDERS) or _SITE_PACKAGES.match(frame.file) is not None


def _format(frame: Frame) -> str:
    """Formats a frame; its path is relative to `site-packages` or to the working directory where possible."""
    path = pathlib.Path(_SITE_PACKAGES.sub("", frame.file))
    if path.is_relative_to(pathlib.Path.cwd()):
        path = path.relative_to(pathlib.Path.cwd())
    return f"{path}:{frame.line} ({frame.function})"
