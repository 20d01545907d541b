"""Gradient accumulation: the gradients of a large batch, computed in micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_amp._modules import (
    arrays_by_path,
    changed_state,
    holds_modules,
    is_module,
    split_modules,
    state_of_modules,
    update_modules,
)
from jmp_amp._trees import wide_dtype

REDUCTIONS = ("mean", "sum")


def accumulate(
    value_and_grad: Callable,
    steps: int,
    reduction: str,
    differentiated: Sequence[int],
    batch_argnums: Sequence[int] | None,
) -> Callable:
    """Returns a function that evaluates `value_and_grad` on one micro-batch after the other, in one `lax.scan`.

    Args:
        value_and_grad: returns `((loss, aux), grads)`.
        steps: the number of micro-batches.
        reduction: `"mean"` or `"sum"`, applied to the losses and gradients of the micro-batches.
        differentiated: the arguments that `value_and_grad` differentiates.
        batch_argnums: the arguments to split along their first axes. None splits all others but NNX modules.

    Returns:
        A function that also returns `((loss, aux), grads)`. Losses and gradients are reduced in float32 or wider, and
        `aux` is stacked along a new first axis. The state of NNX modules goes from one micro-batch to the next, and
        into the modules at the end.
    """

    def accumulated(*args: Any, **kwargs: Any) -> tuple[tuple[jax.Array, Any], Any]:
        to_split = batch_argnums
        if to_split is None:
            to_split = [i for i, x in enumerate(args) if i not in differentiated and not is_module(x)]
        batches = {i: _split_into_micro_batches(i, args[i], steps) for i in to_split}
        if not jax.tree.leaves(batches):
            raise ValueError(
                f"accumulate_steps={steps} splits the batch, but there is no batch among the {len(args)} arguments of "
                "the loss; pass the batch as an argument, `value_and_grad(...)(params, batch)`, instead of closing "
                "over it"
            )
        modules = [{i: x for i, x in group if holds_modules(x)} for group in (enumerate(args), kwargs.items())]
        state, merge = split_modules(modules)

        def evaluate(state: Any, batch: dict[int, Any]) -> tuple[tuple[tuple[jax.Array, Any], Any], Any]:
            copies = positional, named = merge(state)
            inputs = [(positional | batch).get(i, x) for i, x in enumerate(args)]
            return value_and_grad(*inputs, **{**kwargs, **named}), state_of_modules(copies)

        def step(carry: Any, batch: dict[int, Any]) -> tuple[Any, Any]:
            total, state = carry
            ((loss, aux), grads), state = evaluate(state, batch)
            total = jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, _without_float0((loss, grads)))
            return (total, state), aux

        ((loss, _), grads), after = jax.eval_shape(evaluate, state, jax.tree.map(lambda x: x[0], batches))
        _check_same_variables(state, after)
        before = arrays_by_path(state)
        # `zeros_like`: also with the axes of `shard_map` along which a gradient varies.
        zeros = jax.tree.map(lambda x: jnp.zeros_like(x, wide_dtype(x.dtype)), _without_float0((loss, grads)))
        (total, state), aux = lax.scan(step, (zeros, state), batches)
        update_modules(modules, changed_state(before, state))
        divisor = steps if reduction == "mean" else 1
        loss, grads = jax.tree.map(
            lambda like, x: np.zeros(like.shape, like.dtype) if x is None else x / divisor, (loss, grads), total
        )
        return (loss, aux), grads

    return accumulated


def _split_into_micro_batches(i: int, tree: Any, steps: int) -> Any:
    if holds_modules(tree):
        raise ValueError(
            f"accumulate_steps={steps} splits argument {i}, which holds a Flax NNX module; pass the module as an "
            "argument of its own, and do not name it in `batch_argnums`"
        )

    def split(path: Any, x: Any) -> jax.Array:
        size = jnp.shape(x)[0] if jnp.ndim(x) else None
        if size is None or size % steps:
            raise ValueError(
                f"accumulate_steps={steps} splits the first axis of the batch into {steps} equal parts, but argument "
                f"{i}{jax.tree_util.keystr(path)} has shape {jnp.shape(x)}; "
                "pad the batch, or select the arguments to split with `batch_argnums`"
            )
        # A micro-batch takes every `steps`-th example, so a batch that is sharded over devices is not resharded.
        return jnp.moveaxis(jnp.reshape(x, (size // steps, steps, *jnp.shape(x)[1:])), 1, 0)

    return jax.tree_util.tree_map_with_path(split, tree)


def _check_same_variables(before: Any, after: Any) -> None:
    old, new = (dict(jax.tree.leaves_with_path(state)) for state in (before, after))
    for path in new.keys() - old.keys():
        raise ValueError(
            f"the loss adds the variable `{jax.tree_util.keystr(path[2:])}` to a module, so the state changes its "
            "structure between micro-batches; create the variable in the constructor, or return the value as `aux`"
        )


def _without_float0(tree: Any) -> Any:
    """Returns None in place of the float0 gradients of integer arguments (`allow_int=True`)."""
    return jax.tree.map(lambda x: None if x.dtype == jax.dtypes.float0 else x, tree)
