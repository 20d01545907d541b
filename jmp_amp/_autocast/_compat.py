"""The only file that knows JAX's versions and its private names (JAX 0.10 to 0.12)."""

import collections
import contextlib
import os
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import core, source_info_util, traceback_util
from jax._src.interpreters import ad
from jax.extend.core import Jaxpr, JaxprEqn, Primitive

# Neither the tracebacks that JAX shows nor the source lines of ops are to show this package.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
source_info_util.register_exclusion(_PACKAGE)
traceback_util.register_exclusion(_PACKAGE)

# A function of which an error shows no frames of this package and of JAX, as `jax_traceback_filtering` says.
api_boundary: Callable[[Callable], Callable] = traceback_util.api_boundary


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns a jaxpr and the values of its constants; a plain jaxpr has none.

    `ClosedJaxpr` wraps a `Jaxpr` up to JAX 0.10; from 0.11 they are one class, whose constants are in `consts`.
    """
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


# The parameter that holds the jaxpr of a call, which runs in the place of the call.
CALLS: Mapping[str, str] = {
    "jit": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # the name of both from JAX 0.12 on
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def scan_sizes(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns how many operands of a `scan` are constants, and how many are carried.

    Up to JAX 0.10 the equation says `num_consts` and `num_carry`, from 0.11 `ft_in`, three flat trees.
    """
    if "ft_in" in eqn.params:
        consts, carry, _ = map(tuple, eqn.params["ft_in"].unpack())
        return len(consts), len(carry)
    return eqn.params["num_consts"], eqn.params["num_carry"]


@contextlib.contextmanager
def context_of(eqn: JaxprEqn) -> Iterator[None]:
    """What is bound in this context keeps the source line, scope and settings of `eqn`."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
        yield


# What `jax.jit(inline=...)` takes for a call that no jaxpr shows; from JAX 0.12 on, True means another one.
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # type: ignore[attr-defined, unused-ignore]


def differentiates() -> bool:
    """Whether what is bound now is differentiated op by op."""
    return isinstance(core.trace_ctx.trace, ad.JVPTrace | ad.LinearizeTrace)


def bind(eqn: JaxprEqn, args: Sequence[Any], **params: Any) -> list[Any]:
    """Applies the primitive of `eqn` to `args`, with some parameters replaced."""
    return apply(eqn.primitive, eqn.params | params, args)


def apply(primitive: Primitive, params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """Applies a primitive, given the parameters of an equation."""
    out = primitive.bind(*args, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def varying_axes(x: Any) -> frozenset[Any]:
    """The mesh axes along which the type of `x` says that it differs: those of `shard_map` with `check_vma=True`.

    The type has them in `mat` since JAX 0.10, in `vma` before.
    """
    aval = jax.typeof(x)
    return aval.mat.varying if hasattr(aval, "mat") else aval.vma


def equations_behind(x: Any) -> Iterator[Any]:
    """Yields the equations that a traced value was computed by, the last ones first.

    None for arrays, and for tracers that do not say what they come from. An equation has `source_info`, `params` and
    `in_tracers`.
    """
    seen: set[int] = set()
    waiting = collections.deque([x])
    while waiting:
        eqn = getattr(waiting.popleft(), "parent", None)
        if eqn is not None and id(eqn) not in seen:
            seen.add(id(eqn))
            waiting.extend(eqn.in_tracers)
            yield eqn


def is_same_value(x: Any, y: Any) -> bool:
    """Whether two tracers stand for one variable of a program."""
    return x is y or (getattr(x, "val", None) is not None and x.val is getattr(y, "val", None))


def zero_cotangent(aval: Any) -> Any:
    """A cotangent for the pullback of `jax.vjp` that is known to be zero."""
    return ad.Zero(aval.to_tangent_aval())


def trace(fun: Callable, args: Sequence[Any]) -> Any:
    """Traces a flat function to a closed jaxpr."""
    return jax.make_jaxpr(fun)(*args)


def hoist_consts(jaxpr: Any, args: Sequence[Any]) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns an open jaxpr whose leading inputs are what were constants, and their values."""
    opened, consts = open_jaxpr(jaxpr)
    if not consts:
        return opened, ()
    n = len(consts)
    retraced = trace(lambda *xs: jax.core.eval_jaxpr(opened, xs[:n], *xs[n:]), [*consts, *args])
    return open_jaxpr(retraced)[0], consts


def with_dtype(x: Any, dtype: Any) -> Any:
    """Returns the type of `x`, sharding and all, in another dtype."""
    aval = jax.typeof(x)
    return aval.update(dtype=dtype) if aval.dtype != dtype else aval


def as_type(x: Any, aval: Any) -> Any:
    """Returns `x` as an array of the dtype of `aval`, weak where that is; a jaxpr has its scalars as Python numbers."""
    x = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if jax.typeof(x).dtype == aval.dtype and jax.typeof(x).weak_type == aval.weak_type:
        return x
    # The public `lax.convert_element_type` makes weak types of the default dtypes only.
    return lax.convert_element_type_p.bind(x, new_dtype=aval.dtype, weak_type=aval.weak_type, sharding=None)


def retyped(jaxpr: Any, dtype: Any) -> Jaxpr:
    """Returns an open jaxpr without constants, traced again with inputs of another dtype."""
    opened, consts = open_jaxpr(jaxpr)
    args = [var.aval.update(dtype=dtype) for var in opened.invars]
    return open_jaxpr(trace(lambda *xs: jax.core.eval_jaxpr(opened, consts, *xs), args))[0]


# What JAX says, but by `NotImplementedError`, where it cannot differentiate an op: a loop, a callback, an FFI call, an
# op of a `custom_vjp` forward, a solver without a transpose.
_NO_DERIVATIVE = re.compile(
    "Reverse-mode differentiation does not work|callbacks do not support (JVP|transpose)|cannot be differentiated"
    "|does not support reverse-mode autodiff|can't apply forward-mode autodiff|transpose_solve required"
)


def has_no_derivative(error: Exception) -> bool:
    """Whether JAX raised an error because it cannot differentiate an op, and not the code that it differentiates."""
    if any(is_users_file(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(error.__traceback__)):
        return False
    return isinstance(error, NotImplementedError) or _NO_DERIVATIVE.search(str(error)) is not None


is_users_file: Callable[[str], bool] = source_info_util.is_user_filename
