"""How the primitives of products are defined."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching

from jmp_amp import _jaxpr as jx

RAGGED_DOT = "ragged_dot_general"  # JAX's primitive of ragged products, which has no public name


def primitive_as(name: str, fun: Callable[..., Any], batch: Callable[..., Any] | None = None) -> Primitive:
    """Returns a primitive whose result has the type that a function returns; outside of `jit` it is compiled.

    Args:
        name: its name.
        fun: takes arrays and the parameters of the primitive, and returns an array.
        batch: its rule for `jax.vmap`, in place of that of `fun`.
    """

    def batch_fun(args: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, int]:
        return jax.vmap(functools.partial(fun, **params), axes)(*args), 0

    primitive = Primitive(name)
    primitive.def_impl(lambda *args, **params: _jitted(primitive, **params)(*args))
    primitive.def_abstract_eval(lambda *avals, **params: jx.trace(functools.partial(fun, **params), avals).out_avals[0])
    batching.primitive_batchers[primitive] = batch or batch_fun
    return primitive


@functools.cache
def _jitted(primitive: Primitive, **params: Any) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(primitive.bind, **params))
