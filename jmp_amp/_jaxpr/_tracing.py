"""Traces functions of pytrees to jaxprs, and applies the primitives of equations."""

import collections
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn

from jmp_amp._jaxpr._versions import apply, is_users_file, open_jaxpr, parent_of


def trace(fun: Callable, args: Sequence[Any]) -> Any:
    """Traces a flat function to a closed jaxpr."""
    return jax.make_jaxpr(fun)(*args)


def split_arrays(tree: Any, *also: type) -> tuple[list[Any], Callable[..., Any]]:
    """Separates the arrays of a pytree from its other leaves.

    Args:
        tree: any pytree.
        also: more types of leaves that count as arrays.

    Returns:
        The arrays, and a function that puts others in their places.
    """
    leaves, treedef = jax.tree.flatten(tree)
    is_array = [isinstance(x, (jax.Array, np.ndarray, *also)) and _has_jax_dtype(x) for x in leaves]
    arrays = [x for x, is_one in zip(leaves, is_array, strict=True) if is_one]

    def rebuild(arrays: Any) -> Any:
        it = iter(arrays)
        return jax.tree.unflatten(
            treedef, [next(it) if is_one else x for x, is_one in zip(leaves, is_array, strict=True)]
        )

    return arrays, rebuild


def _has_jax_dtype(x: Any) -> bool:
    """Whether JAX can trace it; numpy also has arrays of strings and of objects."""
    return not isinstance(x, np.ndarray) or jnp.issubdtype(x.dtype, np.number) or x.dtype == np.bool_


def flat_call(
    fun: Callable, args: Sequence[Any], kwargs: dict[str, Any], *also: type
) -> tuple[Callable[..., list[Any]], list[Any]]:
    """Returns a call as a function of its arrays, which returns the arrays of the result, and these arguments.

    Args:
        fun: a function of pytrees.
        args: its arguments.
        kwargs: likewise.
        also: more types of leaves that count as arrays.
    """
    arrays, rebuild = split_arrays((args, kwargs), *also)

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = rebuild(arrays)
        return split_arrays(fun(*args, **kwargs))[0]

    return flat, arrays


def bind(eqn: JaxprEqn, args: Sequence[Any], **params: Any) -> list[Any]:
    """Applies the primitive of `eqn` to `args`, with some parameters replaced."""
    return apply(eqn.primitive, eqn.params | params, args)


def hoist_consts(jaxpr: Any, args: Sequence[Any]) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns an open jaxpr whose constants are its first inputs, and their values."""
    opened, consts = open_jaxpr(jaxpr)
    if not consts:
        return opened, ()
    n = len(consts)
    retraced = trace(lambda *xs: jax.core.eval_jaxpr(opened, xs[:n], *xs[n:]), [*consts, *args])
    return open_jaxpr(retraced)[0], consts


def retyped(jaxpr: Any, dtype: Any) -> Jaxpr:
    """Returns an open jaxpr without constants, traced again with inputs of another dtype."""
    opened, consts = open_jaxpr(jaxpr)
    args = [var.aval.update(dtype=dtype) for var in opened.invars]
    return open_jaxpr(trace(lambda *xs: jax.core.eval_jaxpr(opened, consts, *xs), args))[0]


def with_dtype(x: Any, dtype: Any) -> Any:
    """Returns the type of `x`, with its sharding, in another dtype."""
    aval = jax.typeof(x)
    return aval.update(dtype=dtype) if aval.dtype != dtype else aval


def as_type(x: Any, aval: Any) -> Any:
    """Returns `x` as an array of the dtype and the weak type of `aval`; a jaxpr may return a Python number."""
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if jax.typeof(x).dtype == aval.dtype and jax.typeof(x).weak_type == aval.weak_type:
        return x
    # The public `lax.convert_element_type` makes weak types of the default dtypes only.
    return lax.convert_element_type_p.bind(x, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None)


def equations_behind(x: Any) -> Iterator[Any]:
    """Yields the equations that a tracer was computed by, the last ones first; see `parent_of`."""
    seen: set[int] = set()
    waiting = collections.deque([x])
    while waiting:
        eqn = parent_of(waiting.popleft())
        if eqn is not None and id(eqn) not in seen:
            seen.add(id(eqn))
            waiting.extend(eqn.in_tracers)
            yield eqn


# Where JAX cannot differentiate an op, and does not raise `NotImplementedError`: a loop, a callback, an FFI call, an op
# in the forward pass of a `custom_vjp`, a solver without a transpose.
_NO_DERIVATIVE = re.compile(
    "Reverse-mode differentiation does not work|callbacks do not support (JVP|transpose)|cannot be differentiated"
    "|does not support reverse-mode autodiff|can't apply forward-mode autodiff|transpose_solve required"
)


def has_no_derivative(error: Exception) -> bool:
    """Whether JAX raised an error because it cannot differentiate an op, and not the code that it differentiates."""
    if any(is_users_file(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)):
        return False
    return isinstance(error, NotImplementedError) or _NO_DERIVATIVE.search(str(error)) is not None
