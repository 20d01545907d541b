"""Where an equation comes from: the lines and the named scopes of the user, and the marks of this package."""

import dataclasses
import functools
import os
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from jmp_amp._jaxpr._structures import runs_of
from jmp_amp._jaxpr._versions import SITE_PACKAGES, is_backward, is_of_derivative, is_recomputed, scopes_of

_KERNELS = str(pathlib.Path(__file__).resolve().parents[2] / "pallas_kernels") + os.sep
_FRAME = re.compile(r"(.*?):(\d+)(?::\d+)? \((.*)\)")


class Frame(NamedTuple):
    """A line of code: its file (`In[3]` for a cell of a notebook), its number, and the function that it is in."""

    file: str
    line: int
    function: str

    @property
    def is_of_library(self) -> bool:
        """Whether it is in an installed package."""
        return SITE_PACKAGES.match(self.file) is not None

    def __str__(self) -> str:
        """Returns `train.py:12 (loss_fn)`; the path is relative to `site-packages` or to the working directory."""
        return f"{_shortened(self.file, os.getcwd())}:{self.line} ({self.function})"


@functools.lru_cache(maxsize=1024)
def _shortened(file: str, folder: str) -> pathlib.Path:
    path = pathlib.Path(SITE_PACKAGES.sub("", file))
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def frames_of(eqn: JaxprEqn, limit: int = 1) -> list[Frame]:
    """Returns the lines of code that an equation comes from, the innermost first, without JAX's and this package's.

    Args:
        eqn: the equation. Those inside JAX's own functions, such as `jnp.where`, may have no lines; those that are
            marked as `SHARED` have those of the equation that holds them.
        limit: how many lines to return at most.
    """
    if SHARED in marks_in(eqn.source_info.name_stack):
        return []
    lines = source_info_util.summarize(eqn.source_info, num_frames=limit).splitlines()
    return [Frame(_cell_name(m[1]), int(m[2]), m[3]) for m in map(_FRAME.fullmatch, reversed(lines)) if m]


def _cell_name(file: str) -> str:
    """Returns `In[3]` for the temporary file of a notebook's third cell, and `file` for any other file."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    format_name = getattr(getattr(shell, "compile", None), "format_code_name", None)  # of IPython 8 and newer
    named = format_name(file) if format_name else None
    return named[1] if named else file


_PREFIX = "jmp_amp:"  # not to be used in a scope of the user
SHARED = "shared"  # marks ops that are traced once for several lines of the user
_MARK = re.compile(rf"(?<![^/(]){_PREFIX}(\w+)(?![^/)])")  # a whole scope, in `jvp(...)` or not


def marked(name: str) -> Any:
    """Returns a context that marks new equations. Tracing and differentiation keep the mark."""
    return jax.named_scope(_PREFIX + name)


def marks_in(name_stack: Any) -> list[str]:
    """Returns the names of the marks of an equation, the outermost first."""
    return _MARK.findall(str(name_stack)) if name_stack.stack else []


def scope_path(outer: str, name_stack: Any) -> str:
    """Returns the named scopes of an equation, with those of the jaxpr that holds it.

    Args:
        outer: the scopes of the jaxpr, such as `"encoder/Dense_0"`.
        name_stack: the name stack of the equation. The result has no marks and no names that JAX adds.
    """
    path = "/".join(name for name in scopes_of(name_stack) if not _MARK.fullmatch(name))
    repeats = is_of_derivative(name_stack) and f"{path}/".startswith(f"{outer}/")
    return path if repeats else f"{outer}/{path}".strip("/")


@dataclasses.dataclass(frozen=True)
class Site:
    """An op at one place in the code.

    Attributes:
        primitive: the name of the op in a jaxpr.
        direction: `"forward"`, `"backward"`, or `"recomputed"` for the backward pass.
        module: the named scopes around it, such as the modules of Flax and Haiku.
        source: the file and line that it comes from, and the function there; in a backward pass, the forward line.
        runs: how often it runs; a `while_loop` counts as one iteration, and of a `cond` each branch counts.
    """

    primitive: str = ""
    direction: str = "forward"
    module: str = ""
    source: str = ""
    runs: int = 1

    @staticmethod
    def at(eqns: Sequence[JaxprEqn]) -> "Site":
        """Returns the site of the last of `eqns`; the others contain it, outermost first."""
        module = functools.reduce(scope_path, [eqn.source_info.name_stack for eqn in eqns], "")
        # What JAX traced once for all its callers has no line of its own.
        source = next((str(frame) for eqn in reversed(eqns) for frame in frames_of(eqn)), "")
        return Site(eqns[-1].primitive.name, direction_of(eqns), module, source, runs_of(eqns))

    @property
    def where(self) -> str:
        """`at file.py:12 (function)`, or `in the backward pass of file.py:12 (function)`."""
        before = "in the backward pass of" if self.direction == "backward" else "at"
        return f"{before} {self.source or 'an unknown line'}"


def direction_of(eqns: Sequence[JaxprEqn]) -> str:
    """Returns the direction of the site of the last of `eqns`; the others contain it, outermost first."""
    stack = "/".join(str(eqn.source_info.name_stack) for eqn in eqns)
    return ("recomputed" if is_recomputed(stack) else "backward") if is_backward(stack) else "forward"


def site_of(eqns: Sequence[JaxprEqn]) -> Site:
    """Returns the site of the last of `eqns`, in the user's code; the others contain it, outermost first."""
    return dataclasses.replace(Site.at(eqns), source=lines_of(eqns)[0])


def lines_of(eqns: Sequence[JaxprEqn]) -> tuple[str, str]:
    """Returns the lines that the last of `eqns` comes from; the others contain it, outermost first.

    Returns:
        `file.py:12 (function)`, the innermost line outside of libraries; the innermost line of all if every line
        belongs to a library, and empty if there is no line. And the innermost line of all, if it is another one.
    """
    # Inside a jitted function of JAX, as `jnp.where`, or of this package, no line is the user's: those around it are.
    frames = [frame for eqn in reversed(eqns) for frame in frames_of(eqn, limit=10_000)]
    innermost = next(map(str, frames), "")
    source = next((str(x) for x in frames if not (x.is_of_library or x.file.startswith(_KERNELS))), innermost)
    return source, innermost if innermost != source else ""
