"""Values while a program is evaluated, what is known of them, and where they are made."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_amp._jaxpr import bind
from jmp_amp.debug._nonfinite_report import is_floating

Path = tuple[int, ...]


class Place(NamedTuple):
    """Where an equation stands in the evaluation.

    Attributes:
        path: a name for it: the indices of the equations that it is in, and of their iterations.
        eqns: the equations that it is in and itself, outermost first.
        iteration: the index in each loop around it, outermost first.
    """

    path: Path = ()
    eqns: tuple[JaxprEqn, ...] = ()
    iteration: tuple[int, ...] = ()

    def at(self, index: int, eqn: JaxprEqn) -> "Place":
        """The place of an equation of the jaxpr that is here."""
        return Place((*self.path, index), (*self.eqns, eqn), self.iteration)

    def iterated(self, part: int, i: int) -> "Place":
        """The place of an iteration of one of the jaxprs of the loop that is here."""
        return Place((*self.path, part, i), self.eqns, (*self.iteration, i))


class Cell(NamedTuple):
    """A value, and what is known of it.

    Attributes:
        value: the array.
        nan: whether it holds NaN.
        inf: whether it holds an infinity.
        zeros: how many zeros it holds.
        rounded: the float16 op upstream, if there is one, that made zeros where float32 would have had none.
        constant: whether it was computed from literals alone.
        events: the ops upstream that made it non-finite; none if only constants or arguments did.
    """

    value: Any
    nan: bool = False
    inf: bool = False
    zeros: int = 0
    rounded: Place | None = None
    constant: bool = False
    events: frozenset[Path] = frozenset()

    @property
    def bad(self) -> bool:
        """Whether it holds values that are not finite."""
        return self.nan or self.inf


def look(value: Any, parents: Sequence[Cell] = (), *, constant: bool = False) -> Cell:
    """Looks at a value that was computed from others."""
    constant = constant or (bool(parents) and all(x.constant for x in parents))
    if not is_floating(value):
        return Cell(value, constant=constant)
    nans, infs, zeros = np.asarray(_counts(value)).tolist()
    rounded = next((x.rounded for x in parents if x.rounded), None) if zeros else None
    events = frozenset[Path]().union(*(x.events for x in parents if x.bad)) if nans or infs else frozenset()
    return Cell(value, nans > 0, infs > 0, zeros, rounded, constant, events)


def in_float32(eqn: JaxprEqn, operands: Sequence[Cell]) -> list[Any] | None:
    """Evaluates an op of 16 bits or less in float32; None for one that cannot be."""
    wide = [lax.convert_element_type(x.value, np.float32) if is_low(x.value.dtype) else x.value for x in operands]
    params = {k: np.dtype(np.float32) if is_low(v) else v for k, v in eqn.params.items()}
    try:
        return bind(eqn, wide, **params)
    except Exception:  # a custom primitive may refuse other dtypes, with any error
        return None


def is_low(dtype: Any) -> bool:
    """Whether it is a floating dtype of less than 32 bits."""
    return isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


@jax.jit
def _counts(x: Any) -> jax.Array:
    zeros = x == jnp.zeros((), x.dtype)
    return jnp.stack([jnp.sum(flags, dtype=jnp.int32) for flags in (jnp.isnan(x), jnp.isinf(x), zeros)])
