"""Keeps the state of Flax NNX modules that are arguments of a function, or the function itself."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jmp_amp._jaxpr import api_boundary
from jmp_amp._modules import (
    arrays_by_path,
    changed_state,
    holds_modules,
    is_module,
    split_modules,
    state_of_modules,
    update_modules,
)


def with_modules(fun: Callable, transform: Callable[[Callable], Callable]) -> Callable:
    """Returns `transform(fun)`, which also updates the state of NNX modules.

    A traced function gets copies of its arguments, so updates of batch statistics or random keys would be lost. If
    there are modules, the function becomes pure: it takes their state and returns the state that changed.

    Args:
        fun: a function, a module, or a method of one.
        transform: takes a function of pytrees and returns one.
    """
    plain = transform(fun)
    method = getattr(fun, "__func__", None)
    owner = fun if method is None else fun.__self__  # type: ignore[attr-defined] # a method

    @api_boundary
    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        inputs = args, kwargs, owner if is_module(owner) else None
        if not holds_modules(inputs):
            return plain(*args, **kwargs)
        state, merge = split_modules(inputs)

        @functools.wraps(type(fun).__call__ if is_module(fun) else fun, updated=())  # JAX's errors name it
        def pure(arguments: Any) -> tuple[Any, Any]:
            before = arrays_by_path(arguments)
            copies = args, kwargs, module = merge(arguments)
            if module is None:
                results = fun(*args, **kwargs)
            else:
                results = method(module, *args, **kwargs) if method else module(*args, **kwargs)
            return results, changed_state(before, state_of_modules(copies))

        pure.__signature__ = _OF_ARGUMENTS  # type: ignore[attr-defined]
        results, changed = transform(pure)(state)
        update_modules(inputs, changed)
        return results

    return call


_OF_ARGUMENTS = inspect.Signature([inspect.Parameter("arguments", inspect.Parameter.POSITIONAL_ONLY)])


def unbound(fun: Callable, args: Sequence[Any]) -> tuple[Callable, Sequence[Any]]:
    """Returns a function and its arguments; if `fun` is a module or a method of one, the module is an argument."""
    if is_module(fun):
        return lambda module, *args, **kwargs: module(*args, **kwargs), (fun, *args)
    if is_module(getattr(fun, "__self__", None)):
        return fun.__func__, (fun.__self__, *args)  # type: ignore[attr-defined] # a method
    return fun, args
