"""A gather of low-precision values, whose gradient is added up in float32.

An element can be taken any number of times, as that of a node is by its edges: the transpose of a gather is a sum by
scatter, and in bfloat16 a sum of ones ends at 256.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Apply = Callable[[Sequence[Any]], list[Any]]


def gather(apply: Apply, args: Sequence[Any]) -> list[Any]:
    """Evaluates such a gather; `apply` is the gather itself."""

    def in_float32(x: Any, indices: Any) -> Any:
        return lax.convert_element_type(apply([lax.convert_element_type(x, jnp.float32), indices])[0], x.dtype)

    def tangent(x: Any, indices: Any, t: Any) -> Any:
        return jax.jvp(lambda x: in_float32(x, indices), [x], [t])[1]

    return with_tangent(apply, tangent, args)


def with_tangent(apply: Apply, tangent: Callable[[Any, Any, Any], Any], args: Sequence[Any]) -> list[Any]:
    """Evaluates a gather whose tangent is computed from the operand, the indices and the tangent of the operand."""

    @jax.custom_jvp
    def call(x: Any, indices: Any) -> Any:
        return apply([x, indices])[0]

    @call.defjvp
    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        x, indices = primals
        return call(x, indices), tangent(x, indices, tangents[0])

    return [call(*args)]
