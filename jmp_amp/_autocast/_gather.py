"""A gather of low-precision values, whose gradient is added up in float32.

An element can be taken any number of times, as that of a node is by its edges: the transpose of a gather is a sum by
scatter, and in bfloat16 a sum of ones ends at 256.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def gather(apply: Callable[[Sequence[Any]], list[Any]], args: Sequence[Any]) -> list[Any]:
    """Evaluates such a gather; `apply` is the gather itself."""

    @jax.custom_jvp
    def call(x: Any, indices: Any) -> Any:
        return apply([x, indices])[0]

    @call.defjvp
    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        x, indices = primals

        def in_float32(x: Any) -> Any:
            return lax.convert_element_type(apply([lax.convert_element_type(x, jnp.float32), indices])[0], x.dtype)

        return call(x, indices), jax.jvp(in_float32, primals[:1], tangents[:1])[1]

    return [call(*args)]
