"""Gradient accumulation: the gradients of a large batch, computed in micro-batches."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_amp._policy import wide_dtype

REDUCTIONS = ("mean", "sum")


def accumulate(value_and_grad: Callable, steps: int, reduction: str, batch_argnums: Sequence[int]) -> Callable:
    """Returns a function that evaluates `value_and_grad` on one micro-batch after the other, in one `lax.scan`.

    Args:
        value_and_grad: returns `((loss, aux), grads)`.
        steps: the number of micro-batches.
        reduction: `"mean"` or `"sum"`, applied to the losses and gradients of the micro-batches.
        batch_argnums: the arguments to split along their first axes.

    Returns:
        A function that also returns `((loss, aux), grads)`. Losses and gradients are reduced in float32 or wider, and
        `aux` is stacked along a new first axis.
    """

    def accumulated(*args: Any, **kwargs: Any) -> tuple[tuple[jax.Array, Any], Any]:
        batches = {i: _split_into_micro_batches(i, args[i], steps) for i in batch_argnums}
        if not jax.tree.leaves(batches):
            raise ValueError(
                f"accumulate_steps={steps} splits the batch, but there is no batch among the {len(args)} arguments of "
                "the loss; pass the batch as an argument, `value_and_grad(...)(params, batch)`, instead of closing "
                "over it"
            )

        def evaluate(batch: dict[int, Any]) -> tuple[tuple[jax.Array, Any], Any]:
            return value_and_grad(*(batch.get(i, x) for i, x in enumerate(args)), **kwargs)

        def step(total: Any, batch: dict[int, Any]) -> tuple[Any, Any]:
            (loss, aux), grads = evaluate(batch)
            terms = [x for x in jax.tree.leaves((loss, grads)) if not _is_float0(x)]
            return [x + y.astype(x.dtype) for x, y in zip(total, terms, strict=True)], aux

        (loss, _), grads = jax.eval_shape(evaluate, jax.tree.map(lambda x: x[0], batches))
        leaves, treedef = jax.tree.flatten((loss, grads))
        total, aux = lax.scan(step, [_wide_zeros(x) for x in leaves if not _is_float0(x)], batches)
        if reduction == "mean":
            total = [x / steps for x in total]
        totals = iter(total)
        results = [np.zeros(x.shape, x.dtype) if _is_float0(x) else next(totals) for x in leaves]
        loss, grads = jax.tree.unflatten(treedef, results)
        return (loss, aux), grads

    return accumulated


def _split_into_micro_batches(i: int, tree: Any, steps: int) -> Any:
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


def _is_float0(x: Any) -> bool:
    """Returns whether `x` is the float0 gradient of an integer argument (`allow_int=True`)."""
    return x.dtype == jax.dtypes.float0


def _wide_zeros(x: Any) -> jax.Array:
    return jnp.zeros(x.shape, wide_dtype(x.dtype))
