"""What `first_nonfinite` returns."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp.debug._location import Location


@dataclasses.dataclass(frozen=True)
class Values:
    """What is in an array.

    Attributes:
        dtype: its name.
        shape: its shape.
        min: the smallest finite value, of the real part; None if there is none.
        max: the largest.
        zeros: how many values are 0.
        infs: how many are infinite.
        nans: how many are NaN.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> amp.debug.first_nonfinite(lambda x: jnp.log(x - 1))(jnp.ones(2)).operands[0]
        Values(dtype='float32', shape=(2,), min=0.0, max=0.0, zeros=2, infs=0, nans=0)
    """

    dtype: str
    shape: tuple[int, ...]
    min: float | None
    max: float | None
    zeros: int
    infs: int
    nans: int

    def __str__(self) -> str:
        """For instance `float16[4,8] from -3 to 410, 2 of 32 inf`."""
        size = int(np.prod(self.shape))
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.min is not None:
            text += f" = {self.min:.4g}" if self.min == self.max else f" from {self.min:.4g} to {self.max:.4g}"
        for count, name in ((self.infs, "inf"), (self.nans, "NaN")):
            if count:
                text += f", {count} of {size} {name}"
        return text


def values_of(x: Any) -> Values:
    """Reads an array to the host."""
    array = np.asarray(x)
    finite = array[np.isfinite(array)].real
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (None, None)
    infs, nans = int(np.isinf(array).sum()), int(np.isnan(array).sum())
    return Values(array.dtype.name, array.shape, low, high, int((array == 0).sum()), infs, nans)


def is_floating(x: Any) -> bool:
    """Whether it is an array that can be non-finite at all; a reference to a mutable one is none."""
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.inexact)


def floating(values: Iterable[Any]) -> list[Any]:
    """The floating arrays among some values."""
    return list(filter(is_floating, values))


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """The first op that made values non-finite, as `first_nonfinite` found it. `print` it.

    Attributes:
        primitive: the name of the op in a jaxpr; `"argument"` if an argument was not finite to begin with, and
            `"constant"` if the results hold an infinity that no op made.
        source: the user's line, `"model.py:12 (attention)"`, or the path of an argument, `"params['w']"`.
        library: the line inside a library, below that of the user; empty if there is none.
        scope: the named scopes around it, such as the modules of Flax and Haiku: `"decoder/attention"`.
        backward: whether it is in a backward pass; `source` is then the line of the forward pass that it belongs to.
        iteration: its index in each loop around it, outermost first; of a `scan`, the index along the scanned axis.
        operands: its floating operands.
        result: its (first non-finite) result.
        cure: what to try.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> found = amp.debug.first_nonfinite(lambda x: jnp.log(x - 1))(jnp.ones(2))
        >>> found.primitive, found.result.infs, found.operands[0].zeros
        ('log', 2, 2)
    """

    primitive: str
    source: str
    library: str
    scope: str
    backward: bool
    iteration: tuple[int, ...]
    operands: tuple[Values, ...]
    result: Values
    cure: str

    def __str__(self) -> str:
        """A paragraph."""
        made = "NaN" if self.result.nans else "inf"
        match self.primitive:
            case "argument":
                head = f"`{self.source}` is not finite: {self.result}"
            case "constant":
                head = "an infinite constant is in the results, no op made it"
            case _:
                head = f"`{self.primitive}` made {made}, {self._where()}"
        lines = [head]
        lines += [f"  operand  {x}" for x in self.operands]
        if self.primitive != "argument":
            lines.append(f"  result   {self.result}")
        return "\n".join([*lines, f"  cure     {self.cure}"])

    def _where(self) -> str:
        where = Location(self.source, self.library, self.scope, self.backward).line
        if self.library:
            where += f", in {self.library}"
        if self.scope:
            where += f", scope {self.scope}"
        if self.iteration:
            where += f", iteration {', '.join(map(str, self.iteration))}"
        return where
