"""Where in the user's program an equation came from."""

import os
import pathlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from jmp_amp._autocast._overrides import scope_path

_FRAME = re.compile(r"(?P<file>.*?):(?P<line>\d+)(?::\d+)? (?P<function>\(.*\))")
_OWN = tuple(
    str(pathlib.Path(__file__).resolve().parents[2] / package) + os.sep for package in ("jmp_amp", "pallas_kernels")
)
_DEBUG = str(pathlib.Path(__file__).resolve().parent) + os.sep
_INSTALLED = re.compile(r".*[/\\](site|dist)-packages[/\\]")


class Origin(NamedTuple):
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


def origin_of(eqns: Sequence[JaxprEqn]) -> Origin:
    """Returns where an equation came from, given those that it is in and itself, outermost first."""
    scope, backward = "", False
    frames: list[str] = []
    for eqn in eqns:
        stack = str(eqn.source_info.name_stack)
        scope = scope_path(scope, stack)
        # Inside a backward pass, `jax.checkpoint` runs the forward one again.
        backward = "rematted_computation" not in stack and (backward or "transpose(" in stack)
        # JAX's own functions, `jnp.where` say, hold equations that know no line of the user.
        frames = _frames(eqn) or frames
    own = [frame for frame in frames if not _is_library(frame)]
    inner = frames[:1]
    source = (own or inner or [""])[0]
    library = "" if not inner or inner[0] == source else inner[0]
    return Origin(_short(source), _short(library), scope, backward)


def _frames(eqn: JaxprEqn) -> list[str]:
    """The lines of an equation, innermost first, without JAX's and without the callers of the tool."""
    lines = source_info_util.summarize(eqn.source_info, num_frames=10_000).splitlines()[::-1]
    called = next((i for i, line in enumerate(lines) if line.startswith(_DEBUG)), len(lines))
    return lines[:called]


def _is_library(frame: str) -> bool:
    return frame.startswith(_OWN) or _INSTALLED.match(frame) is not None


def _short(frame: str) -> str:
    """The frame without its column, its file seen from the working directory or from that of all libraries."""
    match = _FRAME.fullmatch(_INSTALLED.sub("", frame))
    if match is None:
        return frame
    path = pathlib.Path(match["file"])
    if path.is_relative_to(pathlib.Path.cwd()):
        path = path.relative_to(pathlib.Path.cwd())
    return f"{path}:{match['line']} {match['function']}"
