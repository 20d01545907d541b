"""Unscales and checks in an optax chain that no `dynamic_loss_scale` is around."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_amp._loss_scale._arguments import check_axis_name, to_scale
from jmp_amp._loss_scale._unscale import AxisName, check_scaled, look, unscale
from jmp_amp._policy import select_tree


class UnscaleAndCheckState(NamedTuple):
    """State of `unscale_and_check`.

    Attributes:
        last_finite: bool[], whether the gradients of the last step that reached it were finite; None inside
            `dynamic_loss_scale`, which unscales and checks in its place.

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
    """Unscales gradients where it stands in a chain.

    Inside `dynamic_loss_scale` it does nothing: the wrapper unscales the gradients, checks them and skips the step on
    overflow, and all that it wraps sees true gradients.

    In a chain of its own, gradients are scaled before it, and true and float32 behind it. It takes the scale from
    `tx.update(..., loss_scale=scale)` (1 where it is not given), checks the unscaled gradients, and on overflow passes
    **zeros** on. A transformation behind it cannot tell these from gradients that are zero: Adam's moments decay by one
    step and its count and schedules move on. Wrap the chain in `dynamic_loss_scale` to skip such a step whole.

    Args:
        axis_name: the mapped axes (of `shard_map`, `pmap` or `vmap`) over which gradients are sharded or differ: an
            overflow on one device is then an overflow on all. Under plain `jit`, sharded or not, it is not needed.
        implementation: what reads the gradients, see `pallas_kernels.check_finite`.

    Returns:
        An optax transformation; `update` takes gradients in any floating dtype and returns float32 (float64 and complex
        leaves keep their dtype, others pass through). It raises ValueError where it sees a part of the gradients only,
        as inside `optax.masked`, or gradients that were unscaled before, as far as the traced program shows it.

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
        loss_scale: jax.typing.ArrayLike = 1.0,
        **extra_args: Any,
    ) -> tuple[optax.Updates, UnscaleAndCheckState]:
        del params, extra_args
        if state.last_finite is None:
            return updates, state
        _check_whole(updates)
        check_scaled(updates)
        factor = 1 / to_scale(loss_scale)
        finite = look(updates, factor, axis_name, implementation).finite
        true = unscale(updates, factor)
        zeros = jax.tree.map(jnp.zeros_like, true)
        return select_tree(finite, true, zeros), UnscaleAndCheckState(last_finite=finite)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_whole(updates: optax.Updates) -> None:
    for path, x in jax.tree.leaves_with_path(updates, is_leaf=lambda x: isinstance(x, optax.MaskedNode)):
        if isinstance(x, optax.MaskedNode):
            raise ValueError(
                f"`unscale_and_check` would leave the gradient at `{jax.tree_util.keystr(path)}` scaled: it stands "
                "inside `optax.masked` or one part of `optax.partition`; put it in front of that, or wrap all of it in "
                "`dynamic_loss_scale`"
            )
