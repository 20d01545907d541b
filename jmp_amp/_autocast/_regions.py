"""Regions of another precision, marked in the name stack, which survives tracing and differentiation."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

from jmp_amp._autocast._misuse import check_region_function
from jmp_amp._formats import FORMATS, Format, parse_format
from jmp_amp._jaxpr import marked, marks_in

F = TypeVar("F", bound=Callable[..., Any])


class Mark(Protocol):
    """A context manager that is also a decorator."""

    def __enter__(self) -> None: ...
    def __exit__(self, *exception: Any) -> bool | None: ...
    def __call__(self, fun: F, /) -> F: ...


def precision(dtype: Any) -> Mark:
    """Makes a region inside `autocast` compute in `dtype`. It is a context manager and a decorator.

    Outside `autocast` it has no effect. Regions nest, and the innermost counts, in the backward pass too.

    Args:
        dtype: as for `autocast`, or the dtype. With float32 every op of the region runs in the dtypes that it was
            traced in. With `"float8"` products with a weight are float8 at every size.

    Raises:
        ValueError: another dtype.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> @amp.autocast
        ... def product(x):
        ...     with amp.precision("bfloat16"):
        ...         return x @ x.T
        >>> print(product(jnp.full((1, 2), 1e3)))  # float16 ends at 65504
        [[1.998848e+06]]
    """
    return marked(parse_format(dtype).name)


@overload
def full_precision(fun: None = None) -> Mark: ...
@overload
def full_precision(fun: F) -> F: ...
def full_precision(fun: F | None = None) -> F | Mark:
    """Makes a region inside `autocast` run in the dtypes that it was traced in.

    It is a context manager, `with full_precision():`, and a decorator, `@full_precision`. On a function it replaces
    torch's `custom_fwd(cast_inputs=torch.float32)` and `custom_bwd`: inputs are cast back to the traced dtypes, and the
    backward pass runs in the same dtypes.

    Raises:
        TypeError: `fun` is not a function, such as a dtype: `precision(dtype)` takes one.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> @amp.autocast
        ... def gram(x):
        ...     with amp.full_precision():
        ...         return x @ x.T
        >>> print(gram(jnp.full((1, 2), 300.0)))
        [[180000.]]
    """
    region = precision("float32")
    if fun is None:
        return region
    check_region_function(fun)
    return region(fun)


def format_in(name_stack: Any) -> Format | None:
    """Returns the format of the innermost region in a name stack; None outside of regions."""
    return next((FORMATS[mark].at_any_size for mark in reversed(marks_in(name_stack)) if mark in FORMATS), None)
