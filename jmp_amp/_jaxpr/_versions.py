"""The only file that knows JAX's versions and its private names (JAX 0.10 to 0.12).

A private name is looked up when it is needed, so that a JAX that moved it breaks one feature and not the import.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Primitive
from jax.interpreters import ad

_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


source_info_util.register_exclusion(_PACKAGE)  # ops get the source line of the user who calls this package
with contextlib.suppress(ImportError, AttributeError):  # for tracebacks there is no public function
    from jax._src import traceback_util

    traceback_util.register_exclusion(_PACKAGE)


def api_boundary(fun: Callable) -> Callable:
    """Decorates a function so that its errors show no frames of this package, as `jax_traceback_filtering` says.

    JAX's decorator is private; without it the errors show all frames.
    """
    try:
        from jax._src import traceback_util

        return traceback_util.api_boundary(fun)
    except (ImportError, AttributeError):
        return fun


def is_users_file(name: str) -> bool:
    """Whether a file is neither JAX's, nor Python's, nor this package's. JAX has no public function for it."""
    from jax._src.source_info_util import is_user_filename

    return is_user_filename(name)


def open_jaxpr(jaxpr: Any) -> tuple[Jaxpr, Sequence[Any]]:
    """Returns a jaxpr and the values of its constants; a plain jaxpr has none.

    `ClosedJaxpr` wraps a `Jaxpr` up to JAX 0.10; from 0.11 they are one class, whose constants are in `consts`.
    """
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


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
    """A context in which new equations have the source line, the scopes and the settings of `eqn`."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
        yield


# The value of `jax.jit(inline=...)` for a call that no jaxpr shows; from JAX 0.12 on, True means another one.
INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True  # type: ignore[attr-defined, unused-ignore]


def is_differentiated() -> bool:
    """Whether JAX differentiates each op as it is applied here. JAX has no public function for it."""
    from jax._src.core import trace_ctx
    from jax._src.interpreters.ad import LinearizeTrace

    return isinstance(trace_ctx.trace, ad.JVPTrace | LinearizeTrace)


def apply(primitive: Primitive, params: dict[str, Any], args: Sequence[Any]) -> list[Any]:
    """Applies a primitive, given the parameters of an equation."""
    out = primitive.bind(*args, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def varying_axes(x: Any) -> frozenset[Any]:
    """Returns the mesh axes along which the type of `x` varies: those of `shard_map` with `check_vma=True`.

    The type has them in `mat` since JAX 0.10, in `vma` before.
    """
    aval = jax.typeof(x)
    return aval.mat.varying if hasattr(aval, "mat") else aval.vma


def parent_of(tracer: Any) -> Any:
    """Returns the equation that computed a tracer; None for an array, or for a tracer that does not know.

    The equation has `source_info`, `params` and `in_tracers`. Nothing public connects tracers to equations.
    """
    return getattr(tracer, "parent", None)


def is_same_value(x: Any, y: Any) -> bool:
    """Whether two tracers stand for one variable of a program."""
    return x is y or (getattr(x, "val", None) is not None and x.val is getattr(y, "val", None))


def zero_cotangent(aval: Any) -> Any:
    """Returns a cotangent for the pullback of `jax.vjp` that is known to be zero."""
    return ad.Zero(aval.to_tangent_aval())
