"""The lines of code that an equation comes from."""

import functools
import re
import sys
from typing import NamedTuple

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

_FRAME = re.compile(r"(?P<file>.*?):(?P<line>\d+)(?::\d+)? \((?P<function>.*)\)")


class Frame(NamedTuple):
    """A line of code: its file (`In[3]` for a cell of a notebook), its number, and the function that it is in."""

    file: str
    line: int
    function: str


def frames_of(eqn: JaxprEqn, limit: int = 1) -> list[Frame]:
    """Returns the lines of code that an equation comes from, the innermost first, without JAX's and this package's.

    Args:
        eqn: the equation. Those inside JAX's own functions, such as `jnp.where`, may have no lines.
        limit: how many lines to return at most.
    """
    lines = source_info_util.summarize(eqn.source_info, num_frames=limit).splitlines()
    frames = [frame for frame in map(_parsed, reversed(lines)) if frame is not None]
    return [frame._replace(file=_cell_name(frame.file)) for frame in frames]


@functools.lru_cache(maxsize=4096)
def _parsed(line: str) -> Frame | None:
    match = _FRAME.fullmatch(line)
    return Frame(match["file"], int(match["line"]), match["function"]) if match else None


def _cell_name(file: str) -> str:
    """Returns `In[3]` for the temporary file of a notebook's third cell, and `file` for any other file."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    format_name = getattr(getattr(shell, "compile", None), "format_code_name", None)  # of IPython 8 and newer
    named = format_name(file) if format_name else None
    return named[1] if named else file
