"""The dataflow of one evaluation: each value, the op that computed it, and the values that the op read."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator

from jax.extend.core import JaxprEqn

# Ops that move or cast the values of their first operand and compute nothing.
_MOVES = {
    *("broadcast_in_dim", "convert_element_type", "copy", "dynamic_slice", "expand_dims", "gather", "name", "pad"),
    *("reduce_precision", "reshape", "rev", "slice", "squeeze", "stop_gradient", "transpose"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """A value of an evaluation. It holds no array, so that arrays can be freed.

    Attributes:
        dtype: the name of its dtype; empty if it is not floating.
        eqn: the op that computed it; None for arguments, literals and slices.
        operands: the values that the op read.
        is_constant: whether it was computed from literals alone.
        low: its smallest finite value; inf if it has none.
        high: its largest finite value; -inf if it has none.
        n_zeros: its number of zeros.
    """

    dtype: str = ""
    eqn: JaxprEqn | None = None
    operands: tuple["Node", ...] = ()
    is_constant: bool = False
    low: float = math.inf
    high: float = -math.inf
    n_zeros: int = 0

    @property
    def primitive(self) -> str:
        """The name of the op; empty if no op computed the value."""
        return self.eqn.primitive.name if self.eqn is not None else ""

    @property
    def constant(self) -> float | None:
        """Its value, if it is a constant of one value."""
        return self.low if self.is_constant and self.low == self.high else None

    @property
    def origin(self) -> "Node":
        """The value whose elements it has, before any casts and changes of shape."""
        node = self
        while node.operands and (node.primitive in _MOVES or (node.eqn is None and len(node.operands) == 1)):
            node = node.operands[0]
        return node


class Dataflow:
    """The nodes of one evaluation, and which of them read which."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._readers: dict[Node, list[Node]] = collections.defaultdict(list)
        for node in nodes:
            if node.origin is node:
                for operand in node.operands:
                    self._readers[operand.origin].append(node)

    def readers(self, node: Node) -> list[Node]:
        """Returns the results of the ops that read a value, also after casts and changes of shape."""
        return self._readers.get(node.origin, [])

    def downstream(self, node: Node, limit: int = 200) -> Iterator[Node]:
        """Yields the node and the nodes that depend on it, nearest first, `limit` at most."""
        waiting, seen = collections.deque([node.origin]), {node.origin}
        for _ in range(limit):
            if not waiting:
                return
            yield (nearest := waiting.popleft())
            new = [reader for reader in self.readers(nearest) if reader not in seen]
            seen.update(new)
            waiting.extend(new)


def upstream(node: Node, depth: float = math.inf) -> Iterator[Node]:
    """Yields the node and the nodes that it was computed from by at most `depth` ops, nearest first."""
    level, seen = [node.origin], {node.origin}
    while level and depth >= 0:
        yield from level
        level = list(dict.fromkeys(x.origin for node in level for x in node.operands if x.origin not in seen))
        seen.update(level)
        depth -= 1
