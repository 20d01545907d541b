"""What an evaluation knows of a value: its summary, the op that computed it, and the values that this op read."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from jmp_amp import _jaxpr as jx


@dataclasses.dataclass(frozen=True)
class Summary:
    """A summary of the values of an array. `str` formats it as `float16[4,8] from -3 to 410, 2 of 32 inf`.

    Attributes:
        dtype: the name of the dtype.
        shape: the shape.
        min: the smallest finite value, of the real part if complex; None if no value is finite.
        max: the largest finite value, likewise.
        zeros: the number of zeros.
        infs: the number of infinities.
        nans: the number of NaNs.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> amp.debug.first_nonfinite(lambda x: jnp.log(x - 1))(jnp.ones(2)).operands[0]
        Summary(dtype='float32', shape=(2,), min=0.0, max=0.0, zeros=2, infs=0, nans=0)
    """

    dtype: str = ""
    shape: tuple[int, ...] = ()
    min: float | None = None
    max: float | None = None
    zeros: int = 0
    infs: int = 0
    nans: int = 0

    @property
    def is_finite(self) -> bool:
        """Whether there are no infinities and no NaNs."""
        return self.infs == self.nans == 0

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.min is not None:
            text += f" = {self.min:.4g}" if self.min == self.max else f" from {self.min:.4g} to {self.max:.4g}"
        for count, name in ((self.infs, "inf"), (self.nans, "NaN")):
            if count:
                text += f", {count} of {math.prod(self.shape)} {name}"
        return text


def summary_of(x: Any) -> Summary:
    """Returns the summary of an array, by NumPy; an empty one, without a dtype, unless it is floating or complex.

    That of a type has a dtype and a shape.
    """
    if not jx.is_inexact(x):
        return Summary()
    if isinstance(x, jax.core.ShapedArray):
        return Summary(x.dtype.name, x.shape)
    array = np.asarray(x).astype(np.float32) if is_low(x) else np.asarray(x)
    finite = array.real[np.isfinite(array)]
    extremes = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
    counts = (int(np.sum(flags)) for flags in (array == 0, np.isinf(array), np.isnan(array)))
    return Summary(x.dtype.name, x.shape, *extremes, *counts)


Id = tuple[int, ...]


class Place(NamedTuple):
    """The position of an equation in one evaluation of a program.

    Attributes:
        key: the position in the program: the index of each equation in `eqns` within its jaxpr, and of the jaxprs.
        eqns: the equations that contain this one, outermost first, and the equation itself.
        iteration: the index of the iteration of each loop that contains the equation, outermost first.
    """

    key: Id = ()
    eqns: tuple[JaxprEqn, ...] = ()
    iteration: tuple[int, ...] = ()

    @property
    def id(self) -> Id:
        """The position in an evaluation."""
        return (*self.key, *self.iteration)

    @property
    def eqn(self) -> JaxprEqn:
        """The equation."""
        return self.eqns[-1]

    @property
    def site(self) -> jx.Site:
        """Where the equation is in the user's code."""
        return jx.site_of(self.eqns)

    def of(self, index: int, eqn: JaxprEqn) -> "Place":
        """Returns the place of an equation of the jaxpr at this place."""
        return self._replace(key=(*self.key, index), eqns=(*self.eqns, eqn))

    def body(self, jaxpr: int, i: int | None = None) -> "Place":
        """Returns the place of a branch, or of iteration `i` of one of the jaxprs of the loop at this place."""
        return self._replace(key=(*self.key, jaxpr), iteration=self.iteration if i is None else (*self.iteration, i))


ARGUMENT: Id = (-1,)  # in the index of an argument, which differs from the index of every equation


@dataclasses.dataclass(eq=False, repr=False)  # it refers to its readers, and they to it
class Node:
    """A value of an evaluation in its dataflow. It holds few arrays, so that others can be freed.

    Attributes:
        summary: of its array.
        place: the place of the op that computed it, or of the body that it is an argument of; None for constants.
        index: which result of the op it is; `(*ARGUMENT, i)` for an argument of a body.
        operands: the values that the op read.
        name: the path of an argument of the program; empty for others.
        source: the same value outside of the body that it is an argument of, or inside of the loop that returned it.
        value: the array of a constant, of a result of the program, or of what is asked for; else None.
        is_constant: whether it was computed from literals alone.
        is_backward: whether it was computed in a backward pass.
        readers: the values that were computed from it.
        causes: if it is not finite, the first results of the ops that introduced that, and arguments; empty if it comes
            from constants alone, or from -inf in an argument.
    """

    summary: Summary
    place: Any = None
    index: Id = ()
    operands: Sequence["Node"] = ()
    name: str = ""
    source: "Node | None" = None
    value: Any = None
    is_constant: bool = False
    is_backward: bool = False
    readers: list["Node"] = dataclasses.field(default_factory=list)
    causes: frozenset["Node"] = frozenset()

    @property
    def eqn(self) -> Any:
        """The op that computed it; None for arguments and constants."""
        return self.place.eqn if self.place and self.operands else None

    @property
    def primitive(self) -> str:
        """The name of that op; empty if there is none."""
        return self.eqn.primitive.name if self.eqn else ""

    @property
    def id(self) -> Id:
        """Its position in an evaluation; empty if it has none."""
        return (*self.place.id, *self.index) if self.place else ()

    @property
    def is_floating(self) -> bool:
        """Whether it is floating or complex."""
        return bool(self.summary.dtype)

    @property
    def is_finite(self) -> bool:
        """Whether there are no infinities and no NaNs."""
        return self.summary.is_finite

    @property
    def parents(self) -> list["Node"]:
        """The values that it was computed from."""
        return [*self.operands, *([self.source] if self.source else [])]


def is_low(x: Any) -> bool:
    """Whether a variable, a literal, a type or an array has a floating dtype of less than 32 bits."""
    dtype = jx.dtype_of(x)
    return isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def reads_low(jaxpr: Any) -> bool:
    """Whether an op of a jaxpr, or of one inside it, reads values of less than 32 bits."""
    return any(is_low(atom) for *_, eqn in jx.equations_in(jaxpr) for atom in eqn.invars)


def nearest(
    nodes: Iterable[Node], neighbors: Callable[[Node], Iterable[Node]] = lambda x: x.parents, depth: float = math.inf
) -> dict[Node, int]:
    """Returns nodes and those that at most `depth` steps lead to, with the numbers of steps, nearest first."""
    found = dict.fromkeys(nodes, 0)
    waiting = list(found)
    for node in waiting:
        for x in neighbors(node) if found[node] < depth else ():
            if x not in found:
                found[x] = found[node] + 1
                waiting.append(x)
    return found


def merge_equal(nodes: Sequence[Node]) -> dict[Node, Node]:
    """Merges common subexpressions: what read a copy of a value reads the first one. Returns the first of each."""
    first, merged = dict[Any, Node](), dict[Node, Node]()
    for node in nodes:
        merged[node] = node
        node.operands = [merged.get(x, x) for x in node.operands]
        node.source = node.source and merged.get(node.source, node.source)
        if node.eqn and node.is_floating:
            operands = tuple(_constant(x) or id(x) for x in node.operands)
            params = tuple(sorted((name, str(x)) for name, x in node.eqn.params.items()))
            key = node.primitive, params, operands, node.index, node.place.key[:-1], node.place.iteration
            merged[node] = first.setdefault(key, node)
            if merged[node] is not node:
                merged[node].readers += node.readers
    return merged


def _constant(x: Node) -> Any:
    is_scalar = x.is_constant and x.value is not None and np.ndim(x.value) == 0
    return (str(x.value.dtype), float(np.real(x.value))) if is_scalar and x.is_floating else None
