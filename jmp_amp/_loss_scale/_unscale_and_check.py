"""Unscaling and overflow checks in an optax chain without `dynamic_loss_scale`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_amp._loss_scale._arguments import AxisName, check_axis_name, to_scale
from jmp_amp._loss_scale._check_grads import check_grads
from jmp_amp._loss_scale._check_scaled import check_scaled
from jmp_amp._loss_scale._unscale import unscale
from jmp_amp._trees import select_tree


class UnscaleAndCheckState(NamedTuple):
    """State of `unscale_and_check`.

    Attributes:
        last_finite: bool[], whether the gradients of the last `update` were finite; None inside `dynamic_loss_scale`,
            which unscales and checks the gradients itself.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> tx = amp.unscale_and_check()
        >>> _, state = tx.update({"w": jnp.array([1.0, jnp.nan])}, tx.init({"w": jnp.ones(2)}), loss_scale=2.0)
        >>> state.last_finite.item()
        False
    """

    last_finite: jax.Array | None


def unscale_and_check(
    axis_name: AxisName | None = None, *, implementation: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """Unscales gradients, and replaces them by zeros on overflow.

    Use it without `dynamic_loss_scale`, in a chain of your own. `tx.update(..., loss_scale=scale)` passes the scale,
    1.0 for gradients that are not scaled. Transformations before this one receive the scaled gradients, and those after
    it the unscaled float32 gradients. On overflow, later transformations receive **zeros**, which they treat as
    ordinary gradients: Adam's moments decay by one step, and its count and schedules advance. Wrap the chain in
    `dynamic_loss_scale` instead to skip the whole step.

    Inside `dynamic_loss_scale`, this transformation does nothing: the wrapper unscales the gradients, checks them and
    skips the step on overflow, so all the transformations that it wraps receive unscaled gradients.

    Args:
        axis_name: the mapped axes (of `shard_map`, `pmap` or `vmap`) over which gradients are sharded or differ. An
            overflow on one device then counts as an overflow on all devices. Plain `jit` does not need it, with or
            without sharding.
        implementation: the implementation of the check, as in `pallas_kernels.check_finite`.

    Returns:
        An optax transformation. Its `update` takes gradients of any floating dtype and returns float32. Float64 and
        complex leaves keep their dtype; leaves that are neither floating nor complex pass through. `update` raises
        TypeError without `loss_scale=`, and ValueError if it receives only a part of the gradients, as inside
        `optax.masked`, or if the traced program shows that the gradients were already unscaled.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> tx = optax.chain(amp.unscale_and_check(), optax.sgd(0.5))
        >>> params = {"w": jnp.zeros(2)}
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": jnp.array([4.0, 8.0])}, state, params, loss_scale=jnp.float32(4))
        >>> print(updates["w"])
        [-0.5 -1. ]
    """
    check_axis_name(axis_name)

    def init(params: optax.Params) -> UnscaleAndCheckState:
        del params
        return UnscaleAndCheckState(last_finite=jnp.asarray(True))

    def update(
        updates: optax.Updates,
        state: UnscaleAndCheckState,
        params: optax.Params | None = None,
        *,
        loss_scale: jax.typing.ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, UnscaleAndCheckState]:
        del params, extra_args
        if state.last_finite is None:
            return updates, state
        if loss_scale is None:
            raise TypeError(
                "`unscale_and_check` divides the gradients by the `loss_scale` that `update` gets, got None; write "
                "`tx.update(grads, state, params, loss_scale=scale)`, with `loss_scale=1.0` for gradients that are not "
                "scaled, or wrap the whole optimizer in `amp.dynamic_loss_scale(...)`, whose state holds the scale"
            )
        _check_unmasked(updates)
        check_scaled(updates)
        factor = 1 / to_scale(loss_scale)
        is_finite = check_grads(updates, factor, axis_name, implementation).is_finite
        unscaled_grads = unscale(updates, factor)
        zeros = jax.tree.map(jnp.zeros_like, unscaled_grads)
        return select_tree(is_finite, unscaled_grads, zeros), UnscaleAndCheckState(last_finite=is_finite)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_unmasked(updates: optax.Updates) -> None:
    for path, x in jax.tree.leaves_with_path(updates, is_leaf=lambda x: isinstance(x, optax.MaskedNode)):
        if isinstance(x, optax.MaskedNode):
            raise ValueError(
                f"`unscale_and_check` would leave the gradient at `{jax.tree_util.keystr(path)}` scaled, because it is "
                "inside `optax.masked` or one branch of `optax.partition`; put it in front of that transformation, or "
                "wrap the whole optimizer in `dynamic_loss_scale`"
            )
