"""A gather with a tangent of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import jax


def with_tangent(
    apply: Callable[[Sequence[Any]], list[Any]], tangent: Callable[[Any, Any, Any], Any], args: Sequence[Any]
) -> list[Any]:
    """Evaluates a gather whose tangent is computed from the operand, the indices and the tangent of the operand."""

    @jax.custom_jvp
    def call(x: Any, indices: Any) -> Any:
        return apply([x, indices])[0]

    @call.defjvp
    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        x, indices = primals
        return call(x, indices), tangent(x, indices, tangents[0])

    return [call(*args)]
