"""Two implementations of skipping a step: `lax.cond`, and selecting the old state after the step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmp_amp._jaxpr import varying_axes
from jmp_amp._trees import select_tree

Step = Callable[[], tuple[optax.Updates, optax.OptState]]


def _cond(is_finite: jax.Array, step: Step, state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
    if not isinstance(is_finite, jax.core.Tracer):  # outside `jit`, `lax.cond` would recompile in every step
        return _select(is_finite, step, state)
    step = jax.jit(step)  # traced once, for both its shapes and the branch
    updates, new_state = jax.eval_shape(step)
    _check_same_structure(state, new_state)
    _check_same_axes(state, new_state)
    return lax.cond(is_finite, step, lambda: (jax.tree.map(jnp.zeros_like, updates), state))


def _select(is_finite: jax.Array, step: Step, state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
    updates, new_state = step()
    _check_same_structure(state, new_state)
    return select_tree(is_finite, (updates, new_state), (jax.tree.map(jnp.zeros_like, updates), state))


STEP_IF_FINITE = {"cond": _cond, "select": _select}
"""Functions that return the result of `step()` if `is_finite`, otherwise zero updates and the old state."""


def _check_same_structure(state: optax.OptState, new_state: optax.OptState) -> None:
    before, after = map(str, map(jax.tree.structure, (state, new_state)))
    if before != after:
        raise TypeError(
            f"`inner` changes the structure of its state from {before} to {after}, so a step cannot be skipped; "
            "`inner.update` must return the structure that `inner.init` returns"
        )
    old, new = (jax.tree.leaves_with_path(tree) for tree in (state, new_state))
    for (path, x), (_, y) in zip(old, new, strict=True):
        if (jnp.shape(x), jnp.result_type(x)) != (jnp.shape(y), jnp.result_type(y)):
            raise TypeError(
                f"`inner` changes its state{jax.tree_util.keystr(path)} from {jax.typeof(x).str_short()} to "
                f"{y.dtype.name}{list(y.shape)}, so a step cannot be skipped; initialize it with the dtype and shape "
                "that `inner.update` returns"
            )


def _check_same_axes(state: optax.OptState, new_state: optax.OptState) -> None:
    old, new = (jax.tree.leaves_with_path(tree) for tree in (state, new_state))
    for (path, x), (_, y) in zip(old, new, strict=True):
        axes = sorted(varying_axes(y) - varying_axes(x), key=str)
        if axes:
            named = repr(axes[0] if len(axes) == 1 else tuple(axes))
            raise ValueError(
                f"the state of `inner`{jax.tree_util.keystr(path)} is the same on all devices, but `inner` returns one "
                f"that varies along the mapped axis {named} of `shard_map`, as its gradients do; average the gradients "
                f"first, `grads = jax.lax.pmean(grads, {named})`"
            )
