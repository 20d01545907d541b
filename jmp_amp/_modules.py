"""The state of Flax NNX modules, for functions that must be pure: those that are traced, and the bodies of loops."""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax


def is_module(x: Any) -> bool:
    """Returns whether `x` is an NNX module (an optimizer, random streams and metrics are ones too) or a variable."""
    nnx = sys.modules.get("flax.nnx")  # a program with modules has imported it
    return nnx is not None and isinstance(x, nnx.Pytree | nnx.Variable)


def holds_modules(tree: Any) -> bool:
    """Returns whether there is an NNX module in a tree."""
    return "flax.nnx" in sys.modules and any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def split_modules(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the state of the modules in a tree, and a function from such a state to a tree with new modules.

    Call the function where the state is traced: modules can change only in the trace that made them.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not holds_modules(tree):
        return {}, lambda state: tree
    graph, state = nnx.split(tree)
    return state, functools.partial(nnx.merge, graph)


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
    flat = nnx.to_flat_state(after)
    return nnx.from_flat_state([(path, x) for path, x in flat if not _same(jax.tree.leaves(x), before.get(path, ()))])


def update_modules(tree: Any, state: Any) -> None:
    """Writes a state, or a part of one, into the modules of a tree."""
    if state:
        sys.modules["flax.nnx"].update(tree, state)


def _same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
