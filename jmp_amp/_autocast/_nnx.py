"""Keeps the state of Flax NNX modules that are arguments of a function, or the function itself."""

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jmp_amp._jaxpr import api_boundary


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
    owner = fun if method is None else fun.__self__  # type: ignore[attr-defined]

    @api_boundary
    @functools.wraps(fun, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        nnx = sys.modules.get("flax.nnx")  # a program with modules has imported it
        inputs = owner if nnx and _is_module(nnx, owner) else None, args, kwargs
        if nnx is None or not _holds_modules(nnx, inputs):
            return plain(*args, **kwargs)
        graph, state = nnx.split(inputs)

        def pure(state: Any) -> tuple[Any, Any]:
            before = {path: jax.tree.leaves(x) for path, x in nnx.to_flat_state(state)}
            copies = module, args, kwargs = nnx.merge(graph, state)
            if module is None:
                results = fun(*args, **kwargs)
            else:
                results = method(module, *args, **kwargs) if method else module(*args, **kwargs)
            after = nnx.to_flat_state(nnx.state(copies))
            changed = [(path, x) for path, x in after if not _same(jax.tree.leaves(x), before.get(path, ()))]
            return results, nnx.from_flat_state(changed)

        results, changed = transform(pure)(state)
        nnx.update(inputs, changed)
        return results

    return call


def unbound(fun: Callable, args: Sequence[Any]) -> tuple[Callable, Sequence[Any]]:
    """Returns a function and its arguments; if `fun` is a module or a method of one, the module is an argument."""
    nnx = sys.modules.get("flax.nnx")
    if nnx and _is_module(nnx, fun):
        return lambda module, *args, **kwargs: module(*args, **kwargs), (fun, *args)
    if nnx and _is_module(nnx, getattr(fun, "__self__", None)):
        return fun.__func__, (fun.__self__, *args)  # type: ignore[attr-defined]
    return fun, args


def _is_module(nnx: Any, x: Any) -> bool:
    return isinstance(x, nnx.Pytree | nnx.Variable)


def _holds_modules(nnx: Any, tree: Any) -> bool:
    is_module = functools.partial(_is_module, nnx)
    return any(map(is_module, jax.tree.leaves(tree, is_leaf=is_module)))


def _same(a: Sequence[Any], b: Sequence[Any]) -> bool:
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))
