"""The state of Flax NNX modules, for functions that must be pure: those that are traced, and the bodies of loops."""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jmp_amp import _jaxpr as jx


def is_module(x: Any) -> bool:
    """Returns whether `x` is a Flax NNX module or variable. Optimizers, random streams and metrics are modules."""
    nnx = sys.modules.get("flax.nnx")  # a program with modules has imported it
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


def is_metric(x: Any) -> bool:
    """Returns whether `x` is a Flax NNX metric, which only logs what it keeps."""
    return is_module(x) and isinstance(x, sys.modules["flax.nnx"].Metric)


def holds_modules(tree: Any) -> bool:
    """Returns whether there is an NNX module in a tree."""
    return "flax.nnx" in sys.modules and any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def split_modules(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the state of the modules in a tree, and a function from such a state to a tree with new modules.

    Call the function where the state is traced: modules can change only in the trace that made them.
    """
    if not holds_modules(tree):
        return {}, lambda state: tree
    graph, state = sys.modules["flax.nnx"].split(tree)
    return state, functools.partial(sys.modules["flax.nnx"].merge, graph)


def state_of_modules(tree: Any) -> Any:
    """Returns the state of the modules in a tree, with the structure that `split_modules` returns."""
    return sys.modules["flax.nnx"].state(tree) if holds_modules(tree) else {}


def arrays_by_path(state: Any) -> Mapping[Any, list[Any]]:
    """Returns the arrays of a state by the paths of its variables."""
    return {path: jax.tree.leaves(x) for path, x in sys.modules["flax.nnx"].to_flat_state(state)} if state else {}


def changed_state(before: Mapping[Any, list[Any]], after: Any) -> Any:
    """Returns the variables in a state whose arrays are others, or that are new.

    Args:
        before: `arrays_by_path` of the former state.
        after: a state.
    """
    if not after:
        return after
    nnx = sys.modules["flax.nnx"]
    old = {path: list(map(id, arrays)) for path, arrays in before.items()}
    changed = [(path, x) for path, x in nnx.to_flat_state(after) if [*map(id, jax.tree.leaves(x))] != old.get(path, [])]
    return nnx.from_flat_state(changed)


def update_modules(tree: Any, state: Any) -> None:
    """Writes a state, or a part of one, into the modules of a tree."""
    if state:
        sys.modules["flax.nnx"].update(tree, state)


def with_modules(fun: Callable, transform: Callable[[Callable], Callable]) -> Callable:
    """Returns `transform(fun)`, which also updates the state of NNX modules.

    A traced function gets copies of its arguments, so updates of batch statistics or random keys would be lost. If
    there are modules, the function becomes pure: it takes their state and returns the state that changed.

    Args:
        fun: a function, a module, or a method of one.
        transform: takes a function of pytrees and returns one.
    """
    plain = transform(fun)

    @jx.api_boundary
    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        function, all_args = unbound(fun, args)
        if not holds_modules((all_args, kwargs)):
            return plain(*args, **kwargs)
        state, merge = split_modules((all_args, kwargs))

        @functools.wraps(type(fun).__call__ if is_module(fun) else fun, updated=())  # JAX's errors name it
        def pure(arguments: Any) -> tuple[Any, Any]:
            before = arrays_by_path(arguments)
            copies = args, kwargs = merge(arguments)
            return function(*args, **kwargs), changed_state(before, state_of_modules(copies))

        pure.__signature__ = _OF_ARGUMENTS  # type: ignore[attr-defined]
        results, changed = transform(pure)(state)
        update_modules((all_args, kwargs), changed)
        return results

    return call


_OF_ARGUMENTS = inspect.Signature([inspect.Parameter("arguments", inspect.Parameter.POSITIONAL_ONLY)])


def unbound(fun: Callable, args: Sequence[Any]) -> tuple[Callable, Sequence[Any]]:
    """Returns a function and its arguments; if `fun` is a module or a method of one, the module is an argument."""
    if is_module(fun):
        return type(fun).__call__, (fun, *args)
    if is_module(getattr(fun, "__self__", None)):
        return fun.__func__, (fun.__self__, *args)  # type: ignore[attr-defined] # a method
    return fun, args
