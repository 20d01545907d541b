"""Gradients of a large batch with the memory of a small one."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

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
            return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, (loss, grads)), aux

        (loss, _), grads = jax.eval_shape(one, jax.tree.map(lambda x: x[0], batches))
        total, aux = lax.scan(step, jax.tree.map(_zeros, (loss, grads)), batches)
        if reduction == "mean":
            total = jax.tree.map(lambda x: x / steps, total)
        loss, grads = total
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


def _zeros(x: Any) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype if jnp.finfo(x.dtype).bits >= 32 else jnp.float32)
