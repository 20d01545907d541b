"""Gradients of a large batch with the memory of a small one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_amp._policy import wide_dtype

REDUCTIONS = ("mean", "sum")


def accumulate(value_and_grad: Callable, steps: int, reduction: str, batch_argnums: Sequence[int]) -> Callable:
    """Returns `value_and_grad` of a batch, evaluated micro-batch after micro-batch in one `lax.scan`.

    Args:
        value_and_grad: returns `((loss, aux), grads)`.
        steps: the number of micro-batches.
        reduction: what becomes of their losses and gradients: `"mean"` or `"sum"`.
        batch_argnums: the arguments that are cut along their first axes.

    Returns:
        A function that returns the same, with losses and gradients reduced in float32 (or wider) and `aux` stacked
        along a new first axis.
    """

    def accumulated(*args: Any, **kwargs: Any) -> tuple[tuple[jax.Array, Any], Any]:
        batches = {i: _micro_batches(i, args[i], steps) for i in batch_argnums}
        if not jax.tree.leaves(batches):
            raise ValueError(
                f"accumulate_steps={steps} found no batch among the {len(args)} arguments of the loss; pass the batch "
                "as an argument of its own, `value_and_grad(...)(params, batch)`, instead of closing over it"
            )

        def one(batch: dict[int, Any]) -> tuple[tuple[jax.Array, Any], Any]:
            return value_and_grad(*(batch.get(i, x) for i, x in enumerate(args)), **kwargs)

        def step(total: Any, batch: dict[int, Any]) -> tuple[Any, Any]:
            (loss, aux), grads = one(batch)
            terms = [x for x in jax.tree.leaves((loss, grads)) if not _is_zero(x)]
            return [x + y.astype(x.dtype) for x, y in zip(total, terms, strict=True)], aux

        (loss, _), grads = jax.eval_shape(one, jax.tree.map(lambda x: x[0], batches))
        leaves, treedef = jax.tree.flatten((loss, grads))
        total, aux = lax.scan(step, [_zeros(x) for x in leaves if not _is_zero(x)], batches)
        if reduction == "mean":
            total = [x / steps for x in total]
        totals = iter(total)
        sums = [np.zeros(x.shape, x.dtype) if _is_zero(x) else next(totals) for x in leaves]
        loss, grads = jax.tree.unflatten(treedef, sums)
        return (loss, aux), grads

    return accumulated


def _micro_batches(i: int, tree: Any, steps: int) -> Any:
    def cut(path: Any, x: Any) -> jax.Array:
        size = jnp.shape(x)[0] if jnp.ndim(x) else None
        if size is None or size % steps:
            raise ValueError(
                f"accumulate_steps={steps} cuts the batch along its first axis into equal parts, but argument {i}"
                f"{jax.tree_util.keystr(path)} has shape {jnp.shape(x)}; "
                "pad the batch, or name the arguments to cut with `batch_argnums`"
            )
        # Each micro-batch takes one of every `steps` examples, so that of a batch that is sharded over devices each
        # device keeps its part.
        return jnp.moveaxis(jnp.reshape(x, (size // steps, steps, *jnp.shape(x)[1:])), 1, 0)

    return jax.tree_util.tree_map_with_path(cut, tree)


def _is_zero(x: Any) -> bool:
    """Whether it is the gradient of integers (`allow_int=True`), an array of the dtype that holds nothing but zeros."""
    return x.dtype == jax.dtypes.float0


def _zeros(x: Any) -> jax.Array:
    return jnp.zeros(x.shape, wide_dtype(x.dtype))
