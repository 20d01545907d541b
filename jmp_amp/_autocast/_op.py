"""A first-order op with the casts of its operands, as a value. JAX traces and differentiates equal ops once."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from jmp_amp._jaxpr import apply

SAVED = "amp:saved"  # the name of the casts that a loop saves for the backward pass, for `jax.checkpoint`


@dataclasses.dataclass(frozen=True)
class Op:
    """A primitive, and the casts of the operands that each use casts for itself.

    Attributes:
        primitive: the primitive.
        params: its parameters, by name.
        casts: the dtype that each operand is cast to; None leaves it.
        saved: the operands whose casts a loop saves for the backward pass.
        rewrite: evaluates the op in another way, which changes its derivative; None for most.
    """

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]
    casts: tuple[Any, ...]
    saved: tuple[int, ...] = ()
    rewrite: "Rewrite | None" = None

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Evaluates the op on operands that are not cast yet."""
        return self.apply(self.cast(args)) if self.rewrite is None else self.rewrite(self, args)

    def apply(self, args: Sequence[Any]) -> list[Any]:
        """Applies the primitive to operands that are cast."""
        return apply(self.primitive, dict(self.params), args)

    def cast(self, args: Sequence[Any], *, save: bool = True) -> list[Any]:
        """Casts the operands; those to be saved get a name for `jax.checkpoint`."""
        cast = [
            x if dtype is None else lax.convert_element_type(x, dtype)
            for x, dtype in zip(args, self.casts, strict=True)
        ]
        return [self.save(x) if save and i in self.saved else x for i, x in enumerate(cast)]

    @staticmethod
    def save(x: Any) -> Any:
        """Names a value that `jax.checkpoint` is to save."""
        return checkpoint_name(x, SAVED)


# From an op and its operands, which are not cast yet, to its results. Equal rewrites must compare as equal.
Rewrite = Callable[[Op, Sequence[Any]], list[Any]]
