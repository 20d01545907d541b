"""Errors and warnings that say what to write: for misplaced arguments, tracers and missing packages."""

import functools
import importlib
import inspect
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def with_inner_state(cls: C) -> C:
    """Decorates the state of a wrapper: the error for a missing attribute says where the wrapped state has it."""

    def __getattr__(self: Any, name: str) -> NoReturn:  # noqa: N807
        state, place, cure = self, "opt_state", ""
        while not cure and "inner_state" in getattr(state, "_fields", ()):
            state, place = state.inner_state, f"{place}.inner_state"
            cure = f"; the wrapped optimizer has it: write `{place}.{name}`" if hasattr(state, name) else ""
        raise AttributeError(f"'{cls.__name__}' object has no attribute '{name}'{cure}", name=name, obj=self)

    cls.__getattr__ = __getattr__  # type: ignore[attr-defined] # a type checker must not know it
    return cls


def transformation(transform: Callable[P, R]) -> Callable[P, R]:
    """Decorates a transformation of functions, so that a call with the arguments of the function raises TypeError.

    It refuses more positional arguments than `transform` has, and options that are or hold arrays. Options may be
    integer scalars (`argnums`), and functions (`policies`), which may be modules and are not searched.
    """
    parameters = inspect.signature(transform).parameters.values()
    names = inspect.Signature([inspect.Parameter(p.name, p.kind) for p in parameters])
    n_positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)

    @functools.wraps(transform)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if args and callable(args[0]) and (len(args) > n_positional or any(map(_holds_arrays, args[1:]))):
            name, fun = transform.__name__, getattr(args[0], "__name__", "fun")
            raise TypeError(
                f"`{name}{names}` got {', '.join(map(describe, args[1:]))} after the function; pass the arguments of "
                f"the function to what `{name}` returns: `{name}({fun if fun.isidentifier() else 'fun'})(...)`"
            )
        return transform(*args, **kwargs)

    return checked


def describe(value: Any) -> str:
    """Returns the dtype and shape of an array, a short value itself, the name of a function, or else the type."""
    if _is_array(value):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if inspect.isfunction(value):
        return f"the function `{value.__name__}`"
    if type(value) in (tuple, list):
        return f"a {type(value).__name__} of {len(value)}"
    return quote(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


# Packages that call the functions of the user, and are not where a warning is of use.
_LIBRARIES = {"jmp_amp", "pallas_kernels", "jax", "optax", "flax", "equinox", "haiku", "keras", "jaxtyping"}
_LIBRARIES |= sys.stdlib_module_names


def warn(message: str) -> None:
    """Warns at the line of the user's code that is executed, also where JAX traces or compiles it for another one."""
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _LIBRARIES:
            break
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)


def quote(value: Any) -> str:
    """Returns the repr of a user's value for a message."""
    try:
        return shorten(repr(value))
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"a {type(value).__name__} of too many digits"


def listed(items: Sequence[str]) -> str:
    """Returns the names of leaves for a message, the first five, and how many more there are."""
    return ", ".join(items[:5]) + (f" and {len(items) - 5} more leaves" if len(items) > 5 else "")


def shorten(text: str) -> str:
    """Returns a user's text for a message; of a long one, the start and the end."""
    return text if len(text) <= 80 else f"{text[:50]} ... {text[-20:]}"


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _holds_arrays(option: Any) -> bool:
    try:
        arrays = filter(_is_array, jax.tree.leaves(option, is_leaf=callable))
        return any(x.ndim or not jnp.issubdtype(x.dtype, jnp.integer) for x in arrays)
    except (TypeError, ValueError):  # a dict of rules may have keys that JAX cannot sort
        return False


def check_type(name: str, value: Any, kind: type, cure: str) -> None:
    """Raises TypeError if the argument `name` has another type than `kind`."""
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` must be a `{kind.__name__}`, got {describe(value)}; {cure}")


def check_concrete(values: Any, name: str, cure: str = "call it on concrete arguments") -> None:
    """Raises TypeError if a leaf of `values`, which the function `name` reads, is a tracer."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(values)):
        raise TypeError(f"`{name}` reads values, so it cannot run inside `jit` or another transformation; {cure}")


def extra(module: str, feature: str) -> Any:
    """Imports a module of an optional package.

    Args:
        module: the name of the module.
        feature: the function that needs it, for the error message.

    Raises:
        ImportError: the package is not installed. The message contains the `pip install` command.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{feature} needs {package}, which could not be imported ({error}); "
            'run `pip install -e ".[demo]"` in a clone of the repository',
            name=package,
        ) from error


def new_figure(feature: str, width: float, height: float) -> Any:
    """Returns an empty `matplotlib.figure.Figure` of a size in inches.

    Raises:
        ImportError: matplotlib is not installed; see `extra`.
    """
    return extra("matplotlib.figure", feature).Figure(figsize=(width, height), dpi=120, layout="constrained")


def finished(figure: Any, path: Any) -> Any:
    """Returns a figure without frames above and to the right; it is saved to a path unless that is None."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    if path is not None:
        figure.savefig(path)
    return figure
