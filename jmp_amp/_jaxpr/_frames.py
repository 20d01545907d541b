"""The lines of code that an equation comes from."""

import functools
import re
from typing import NamedTuple

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

_FRAME = re.compile(r"(?P<file>.*?):(?P<line>\d+)(?::\d+)? \((?P<function>.*)\)")


class Frame(NamedTuple):
    """A line of code: its file, its number, and the function that it is in."""

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
    return [frame for frame in map(_parsed, reversed(lines)) if frame is not None]


@functools.lru_cache(maxsize=4096)
def _parsed(line: str) -> Frame | None:
    match = _FRAME.fullmatch(line)
    return Frame(match["file"], int(match["line"]), match["function"]) if match else None
