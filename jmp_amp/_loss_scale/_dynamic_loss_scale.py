"""The optax wrapper that unscales gradients, skips overflows and adapts the loss scale."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_amp._loss_scale._arguments import AxisName, check_axis_name, check_inner, to_flag, to_number, to_scale
from jmp_amp._loss_scale._check_grads import check_grads
from jmp_amp._loss_scale._check_scaled import check_scaled
from jmp_amp._loss_scale._leaves import check_same_leaves, check_updates
from jmp_amp._loss_scale._loss_scale import LossScale
from jmp_amp._loss_scale._loss_scale_state import LossScaleState
from jmp_amp._loss_scale._skip import STEP_IF_FINITE
from jmp_amp._loss_scale._unscale import unscale
from jmp_amp._loss_scale._unscale_and_check import UnscaleAndCheckState
from jmp_amp._trees import select_tree


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`.

    Attributes:
        loss_scale: the scale and its counters.
        inner_state: the state of the wrapped transformation.
        sum_of_squares: float32[], of the unscaled gradients of the last step, before clipping; -inf if they were not
            finite, 0 before the first step.
        nonfinite_leaves: tree of bool[] with the structure of the parameters, true for leaves whose gradients were not
            finite in the last step; None unless `dynamic_loss_scale` was called with `nonfinite_leaves=True`.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> state = amp.dynamic_loss_scale(optax.adam(1e-3)).init({"w": jnp.ones(2)})
        >>> state.loss_scale.loss_scale.item(), optax.tree.get(state.inner_state, "count").item()
        (65536.0, 0)
    """

    loss_scale: LossScaleState
    inner_state: optax.OptState
    sum_of_squares: jax.Array
    nonfinite_leaves: Any = None


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    loss_scale: LossScale = LossScale(),  # noqa: B008 (frozen)
    axis_name: AxisName | None = None,
    skip: str = "cond",
    *,
    clip_global_norm: float | None = None,
    nonfinite_leaves: bool = False,
    implementation: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer with loss scaling: unscales gradients, skips overflows and adapts the scale.

    Use it around the whole optimizer, with `value_and_grad(loss_fn, opt_state=opt_state)`, which scales the loss.
    `update` takes the scaled gradients. It reads them once to check that every gradient is finite and to compute their
    global norm. If they are finite, `inner` updates the parameters with the unscaled float32 gradients. Otherwise the
    updates are zero, and every leaf of the state of `inner`, including counts and schedules, is bitwise unchanged. The
    scale adapts after that, so gradients are always divided by the scale that multiplied the loss, also at a step where
    the scale grows. `update` never synchronizes with the host.

    The check covers the gradients, not the updates. If `inner` returns non-finite updates for finite gradients, the
    parameters become non-finite; from then on every step is skipped, and `check_health` raises.

    `update` accepts these extra arguments:

    - `loss_scale=`, float32[], replaces the scale in the state, for several optimizers that share one scale.
    - `grads_finite=`, bool[]: `False` skips the step like an overflow, for several optimizers that skip together.
    - Others are passed to `inner`. If an argument consists of the same arrays as the gradients, such as the `grad=` of
      `optax.lbfgs`, it is unscaled too. Pass the unscaled loss as `value=`, as `value_and_grad` returns it.

    An `unscale_and_check()` inside `inner` does nothing, so `inner` may be a chain that also works on its own.

    Args:
        inner: any optax transformation; it receives float32 gradients, so its parameters are usually float32.
        loss_scale: the rule by which the scale adapts; `LossScale.none()` only skips overflows.
        axis_name: the mapped axes (of `shard_map`, `pmap` or `vmap`) over which gradients are sharded or differ. An
            overflow on one device then skips the step on all devices. Plain `jit` does not need it, with or without
            sharding. Under `shard_map`, the global norm includes all shards; under `pmap`, `vmap` or
            `check_vma=False`, it is the norm of the local gradients of each device.
        skip: `"cond"` runs `inner` only if the gradients are finite (under `vmap`, JAX converts the branch to a
            select); `"select"` always runs `inner` and discards the result on overflow. Both return the same results,
            bit for bit unless XLA fuses `inner` differently inside a branch.
        clip_global_norm: the largest global norm of the unscaled gradients that `update` receives. Larger gradients
            are multiplied by `clip_global_norm / norm`. This is equivalent to `optax.clip_by_global_norm` as the first
            transformation of `inner`, but does not read the gradients again.
        nonfinite_leaves: whether the state records which leaves were not finite, for `metrics` and `check_health`. The
            overflow check then launches once for each leaf, and sends one float32 for each leaf between devices.
        implementation: the implementation of the check, as in `pallas_kernels.check_finite`.

    Returns:
        An optax transformation whose state is a `DynamicLossScaleState`. Its `update` raises ValueError, with the tree
        path, if gradients and parameters do not match, or if the traced program shows that the gradients were not
        scaled or already unscaled. It raises TypeError if `inner` changes the dtype or shape of its state. It never
        raises because of non-finite gradients.

    Raises:
        TypeError: `inner` is not an optax transformation, `loss_scale` is not a `LossScale`, or `clip_global_norm` is
            not a number.
        ValueError: `skip` is neither `"cond"` nor `"select"`, or `clip_global_norm` is not positive.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> tx = amp.dynamic_loss_scale(optax.chain(amp.unscale_and_check(), optax.adam(1e-3)))
        >>> params = {"w": jnp.ones(2)}
        >>> state = tx.init(params)
        >>> updates, state = tx.update({"w": jnp.array([1.0, jnp.inf])}, state, params)
        >>> print(updates["w"], amp.get_loss_scale(state))
        [0. 0.] 32768.0

    References:
        The protocol is that of torch's `GradScaler`, the interface that of `optax.apply_if_finite`.
    """
    _check_arguments(inner, loss_scale, skip)
    max_norm = None if clip_global_norm is None else to_number("clip_global_norm", clip_global_norm)
    check_axis_name(axis_name)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> DynamicLossScaleState:
        flags = jax.tree.map(lambda _: jnp.zeros((), bool), params) if nonfinite_leaves else None
        inner_state = _disable_checks(inner.init(params))
        return DynamicLossScaleState(loss_scale.init(), inner_state, jnp.zeros((), jnp.float32), flags)

    def update(
        updates: optax.Updates,
        state: DynamicLossScaleState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, DynamicLossScaleState]:
        _check_state(state)
        if params is not None:
            check_same_leaves(updates, params)
        factor = 1 / _checked_scale(updates, state, extra_args.pop("loss_scale", None), loss_scale.is_static)
        stats = check_grads(updates, factor, axis_name, implementation, nonfinite_leaves)
        is_finite = stats.is_finite & to_flag("grads_finite", extra_args.pop("grads_finite", True))
        flags = _flags_of_parameters(stats.nonfinite_leaves, state.nonfinite_leaves) if nonfinite_leaves else None
        if max_norm is not None:
            factor *= jnp.minimum(1.0, max_norm / jnp.sqrt(jnp.abs(stats.sum_of_squares)))

        def step() -> tuple[optax.Updates, optax.OptState]:
            unscaled_grads = unscale(_zeros_on_eager_overflow(updates, is_finite), factor)
            extras = {name: unscaled_grads if _is_same(x, updates) else x for name, x in extra_args.items()}
            new_updates, inner_state = inner.update(unscaled_grads, state.inner_state, params, **extras)
            if params is not None:
                check_updates(new_updates, params)
            return new_updates, inner_state

        new_updates, inner_state = STEP_IF_FINITE[skip](is_finite, step, state.inner_state)
        new_scale = loss_scale.update(state.loss_scale, is_finite)
        return new_updates, DynamicLossScaleState(new_scale, inner_state, stats.sum_of_squares, flags)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_arguments(inner: Any, loss_scale: Any, skip: Any) -> None:
    check_inner(inner, "dynamic_loss_scale")
    if not isinstance(loss_scale, LossScale):
        raise TypeError(
            f"`loss_scale` must be a `LossScale`, got {loss_scale!r}; "
            "pass `LossScale.static(scale)` for a fixed scale, or `LossScale.none()` for no scaling"
        )
    if skip not in STEP_IF_FINITE:
        raise ValueError(f'`skip` must be "cond" or "select", got {skip!r}')


def _check_state(state: Any) -> None:
    if not isinstance(state, DynamicLossScaleState):
        raise TypeError(
            f"`state` must be a `DynamicLossScaleState`, got {type(state).__name__}; create it with the `init` of "
            "`dynamic_loss_scale`, and replace its `inner_state` to restore a state of `inner`"
        )


def _checked_scale(grads: optax.Updates, state: DynamicLossScaleState, given_scale: Any, is_static: bool) -> jax.Array:
    """Returns the scale of `grads`, and raises if the traced program shows that they have another scale."""
    scale = state.loss_scale.loss_scale if given_scale is None else to_scale(given_scale)
    # With a static rule, the loss may have been multiplied by a Python number instead of the traced scale.
    check_scaled(grads, given_scale if given_scale is not None or is_static else scale)
    return scale


def _disable_checks(inner_state: optax.OptState) -> optax.OptState:
    """Returns the state of `inner` with every `unscale_and_check` disabled."""

    def disable(path: Any, x: Any) -> Any:
        if isinstance(x, DynamicLossScaleState):
            raise ValueError(
                f"there is a `dynamic_loss_scale` inside another one, at `inner`{jax.tree_util.keystr(path)}, so "
                "gradients would be unscaled twice; wrap the whole optimizer once"
            )
        return UnscaleAndCheckState(last_finite=None) if isinstance(x, UnscaleAndCheckState) else x

    return jax.tree.map_with_path(
        disable, inner_state, is_leaf=lambda x: isinstance(x, DynamicLossScaleState | UnscaleAndCheckState)
    )


def _flags_of_parameters(flags: Any, old_flags: Any) -> Any:
    """Returns a flag for each parameter; frozen parameters, which may have no gradient, get False."""
    by_path = dict(jax.tree.leaves_with_path(flags))
    return jax.tree.map_with_path(lambda path, old: by_path.get(path, jnp.zeros_like(old)), old_flags)


def _zeros_on_eager_overflow(grads: optax.Updates, is_finite: jax.Array) -> optax.Updates:
    """Returns zeros in place of overflowed gradients outside `jit`.

    There, `jax.debug_nans` raises on a NaN that `inner` computes, even though the result is discarded.
    """
    if isinstance(is_finite, jax.core.Tracer):
        return grads
    return select_tree(is_finite, grads, jax.tree.map(jnp.zeros_like, grads))


def _is_same(x: Any, tree: Any) -> bool:
    """Returns whether the leaves of `x` are the same arrays, by identity, as the leaves of `tree`."""
    leaves, others = jax.tree.leaves(x), jax.tree.leaves(tree)
    return len(leaves) == len(others) > 0 and all(a is b for a, b in zip(leaves, others, strict=True))
