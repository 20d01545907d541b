"""Regions of another precision, written into the name stack so that they survive tracing and differentiation."""

import re
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

import jax
import numpy as np

from jmp_amp._policy import NAMED_POLICIES, parse_dtype

F = TypeVar("F", bound=Callable[..., Any])

_SCOPE = "amp:"
_DTYPES = ("float16", "bfloat16", "float32")
_NAME = re.compile(_SCOPE + f"({'|'.join(_DTYPES)})")
_MARK = re.compile(rf"(?<![^/(]){_NAME.pattern}(?![^/)])")  # a whole scope, in `jvp(...)` or not


class Mark(Protocol):
    """A context manager that is a decorator as well, for type checkers."""

    def __enter__(self) -> None: ...
    def __exit__(self, *exception: Any) -> bool | None: ...
    def __call__(self, fun: F, /) -> F: ...


def compute_dtype(value: Any) -> np.dtype:
    """Parses a dtype that autocast can compute in."""
    try:
        dtype = parse_dtype(value)
    except ValueError:
        dtype = None
    if dtype is None or dtype.name not in _DTYPES:
        cure = f'; give the policy as `policy="{value}"`' if dtype is None and value in NAMED_POLICIES else ""
        raise ValueError(f"autocast computes in {', '.join(_DTYPES)}, got {dtype or value}{cure}")
    return dtype


def precision(dtype: Any) -> Mark:
    """Marks a region inside `autocast` that computes in `dtype`; a context manager and a decorator.

    Outside `autocast` the mark does nothing. Regions nest; the innermost counts, in the backward pass too.

    Args:
        dtype: `"float16"`, `"bfloat16"` or `"float32"`, or the dtype. With float32 every op of the region runs in the
            dtypes that it was traced in.

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
    return jax.named_scope(_SCOPE + compute_dtype(dtype).name)


@overload
def full_precision(fun: None = None) -> Mark: ...
@overload
def full_precision(fun: F) -> F: ...
def full_precision(fun: F | None = None) -> F | Mark:
    """Marks a region inside `autocast` that runs in the dtypes that it was traced in.

    Either a context manager, `with full_precision():`, or a decorator, `@full_precision`. On a function it is what
    `custom_fwd(cast_inputs=torch.float32)` and `custom_bwd` are together in torch: what enters is cast back, and the
    backward pass runs in the same dtypes.

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
    region = precision(np.float32)
    return region if fun is None else region(fun)


def region_of(name_stack: Any) -> np.dtype | None:
    """Returns the dtype of the innermost region in a name stack, None outside."""
    if not name_stack.stack:
        return None
    marks = _MARK.findall(str(name_stack))
    return parse_dtype(marks[-1]) if marks else None


def is_mark(scope: str) -> bool:
    """Whether a scope is the mark of a region, and no name that a user gave."""
    return _NAME.fullmatch(scope) is not None
