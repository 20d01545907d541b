"""The optax side of loss scaling: unscale in a chain, skip on overflow, adapt the scale."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmp_amp._loss_scale import LossScale, LossScaleState, to_number
from jmp_amp._tree import check_same_leaves, select_tree
from jmp_amp._unscale import AxisName, look, to_scale, unscale


class UnscaleAndCheckState(NamedTuple):
    """State of `unscale_and_check`.

    Attributes:
        last_finite: bool[], whether the gradients of the last step that reached it were finite.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> tx = amp.unscale_and_check()
        >>> _, state = tx.update({"w": jnp.array([1.0, jnp.nan])}, tx.init({"w": jnp.ones(2)}), loss_scale=2.0)
        >>> state.last_finite.item()
        False
    """

    last_finite: jax.Array


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`.

    Attributes:
        loss_scale: the scale and its counters.
        inner_state: the state of the wrapped transformation.
        sum_of_squares: float32[], of the true gradients of the last step, before any clipping; NaN where they were not
            finite, 0 before the first step.
        nonfinite_leaves: of bool[], the tree of the parameters, true for the leaves whose gradients were not finite in
            the last step; None unless `dynamic_loss_scale` was asked for it.

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


def unscale_and_check(
    axis_name: AxisName | None = None, *, implementation: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """Unscales gradients where it stands in a chain.

    Before it, gradients are scaled; after it, they are the true ones, in float32. Inside `dynamic_loss_scale` that is
    all it does: the wrapper passes it the scale, has checked the gradients and skips the step on overflow.

    In a chain of its own it takes the scale from `tx.update(..., loss_scale=scale)` (1 where it is not given), checks
    the unscaled gradients, and on overflow passes **zeros** on. A transformation behind it cannot tell these from
    gradients that are zero: Adam's moments decay by one step and its count and schedules move on. Wrap the chain in
    `dynamic_loss_scale` to skip such a step whole.

    Args:
        axis_name: the mapped axes (of `shard_map`, `pmap` or `vmap`) over which gradients are sharded or differ: an
            overflow on one device is then an overflow on all. Under plain `jit`, sharded or not, it is not needed.
        implementation: what reads the gradients, see `pallas_kernels.check_finite`.

    Returns:
        An optax transformation; `update` takes gradients in any floating dtype and returns float32 (float64 and complex
        leaves keep their dtype, others pass through).

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

    def init(params: optax.Params) -> UnscaleAndCheckState:
        del params
        return UnscaleAndCheckState(last_finite=jnp.asarray(True))

    def update(
        updates: optax.Updates,
        state: UnscaleAndCheckState,
        params: optax.Params | None = None,
        *,
        loss_scale: jax.typing.ArrayLike = 1.0,
        grads_finite: jax.Array | None = None,
        unscale_factor: jax.Array | None = None,
        unscaled_by: list[str] | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, UnscaleAndCheckState]:
        del state, params, extra_args
        if unscaled_by is not None:
            unscaled_by.append("unscale_and_check")
        factor = 1 / to_scale(loss_scale) if unscale_factor is None else unscale_factor
        scaled, updates = updates, unscale(updates, factor)
        if grads_finite is None:
            grads_finite = look(scaled, factor, axis_name, implementation).finite
            updates = select_tree(grads_finite, updates, jax.tree.map(jnp.zeros_like, updates))
        return updates, UnscaleAndCheckState(last_finite=grads_finite)

    return optax.GradientTransformationExtraArgs(init, update)


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
    """Wraps a transformation so that it sees true gradients, skips overflows and adapts the loss scale.

    `update` takes gradients of a loss that was multiplied by `get_loss_scale(opt_state)`. One read of them tells
    whether the step is finite, and their global norm. If it is finite, `inner` runs. If not, every leaf of `inner`'s
    state, its counts and schedules included, stays bitwise what it was, and the updates are zero. Then the scale
    adapts, so the scale that unscales is the one that scaled, on growth steps too. Nothing in it touches the host.

    The check comes before `inner`. What `inner` itself makes non-finite passes in that step; parameters are not finite
    from then on, so every later step is skipped, and `check_health` raises.

    Where several optimizers share one scale, `update` takes it as `loss_scale=` (float32[], instead of the one in the
    state), and `grads_finite=` (bool[], `False` skips as an overflow does) from those that skip together.

    `inner` gets `loss_scale=` (float32[]), `grads_finite=` (bool[]) and `unscale_factor=` (float32[], what scaled
    gradients are multiplied by: the reciprocal of the scale, and the clipping) as extra arguments. If it contains
    `unscale_and_check()`, what stands before that sees scaled gradients; if it does not, all of it sees true ones.

    Args:
        inner: any optax transformation, with float32 parameters in mind.
        loss_scale: the rule of the scale; `LossScale.none()` only skips.
        axis_name: the mapped axes (of `shard_map`, `pmap` or `vmap`) over which gradients are sharded or differ: an
            overflow on one device skips the step on all. Under plain `jit`, sharded or not, it is not needed. The norm
            adds up what the types of `shard_map` say is sharded; under `pmap`, `vmap` or `check_vma=False` every device
            takes the norm of the gradients that it has.
        skip: `"cond"` runs `inner` only on finite steps (under `vmap`, JAX makes a select of it); `"select"` always
            runs it and discards the result. Both give the same results; the same bits where XLA does
            not fuse `inner` differently, as it may around a branch.
        clip_global_norm: the true gradients are multiplied by `clip_global_norm / norm` where their global norm is
            larger, in the multiplication that unscales them. That is `optax.clip_by_global_norm` right behind the
            unscaling, without its reading them once more; the norm is of the gradients that `update` is given.
        nonfinite_leaves: keep in the state which leaves were not finite, for `metrics` and `check_health`; from the
            read that looks for overflows anyway, which is then one launch a leaf, and one float32 a leaf over devices.
        implementation: what reads the gradients, see `pallas_kernels.check_finite`.

    Returns:
        An optax transformation whose state is a `DynamicLossScaleState`. Its `update` raises ValueError, with the tree
        path, where gradients and parameters do not match, and TypeError where `inner` changes the dtype or shape of its
        state. Gradients that are not finite never raise.

    Raises:
        TypeError: `inner` or `loss_scale` is something else, or `clip_global_norm` no number.
        ValueError: `skip` is neither of the two, or `clip_global_norm` is not positive.

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
        torch's `GradScaler` for the protocol, `optax.apply_if_finite` for the form.
    """
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(f"`inner` must be an optax transformation, got {type(inner).__name__}")
    if not isinstance(loss_scale, LossScale):
        raise TypeError(
            f"`loss_scale` must be a `LossScale`, got {loss_scale!r}; "
            "for a fixed scale write `LossScale.static(scale)`, for none `LossScale.none()`"
        )
    if skip not in _SKIP:
        raise ValueError(f'`skip` must be "cond" or "select", got {skip!r}')
    if clip_global_norm is not None:
        clip_global_norm = to_number("clip_global_norm", clip_global_norm)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> DynamicLossScaleState:
        flags = jax.tree.map(lambda _: jnp.zeros((), bool), params) if nonfinite_leaves else None
        return DynamicLossScaleState(loss_scale.init(), inner.init(params), jnp.zeros((), jnp.float32), flags)

    def update(
        updates: optax.Updates,
        state: DynamicLossScaleState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, DynamicLossScaleState]:
        if params is not None:
            check_same_leaves(updates, params)
        if "unscaled_by" in extra_args:
            raise ValueError(
                "there is a `dynamic_loss_scale` inside another one, so gradients would be unscaled twice; "
                "wrap the whole optimizer once"
            )
        scale = to_scale(extra_args.pop("loss_scale", state.loss_scale.loss_scale))
        factor = 1 / scale
        finite, sum_of_squares, flags = look(updates, factor, axis_name, implementation, nonfinite_leaves)
        finite &= extra_args.pop("grads_finite", True)
        if nonfinite_leaves:  # a frozen parameter may have no gradient
            by_path = dict(jax.tree.leaves_with_path(flags))
            flags = jax.tree.map_with_path(
                lambda path, old: by_path.get(path, jnp.zeros_like(old)), state.nonfinite_leaves
            )
        if clip_global_norm is not None:
            factor *= jnp.minimum(1.0, clip_global_norm / jnp.sqrt(sum_of_squares))
        unscales_itself = _contains(UnscaleAndCheckState, state.inner_state)
        unscaled_by: list[str] = []
        extra_args |= {"loss_scale": scale, "grads_finite": finite}
        extra_args |= {"unscale_factor": factor, "unscaled_by": unscaled_by}

        def step() -> tuple[optax.Updates, optax.OptState]:
            # Unscaled here, not where the check did it, so that it fuses into `inner`.
            grads = updates if unscales_itself else unscale(updates, factor)
            updates_and_state = inner.update(grads, state.inner_state, params, **extra_args)
            if unscales_itself and not unscaled_by:
                raise ValueError(
                    "the `unscale_and_check()` inside `inner` was not handed the loss scale: what it is wrapped in, "
                    "such as `optax.MultiSteps(...).gradient_transformation()`, drops extra arguments; leave it out, "
                    "and the gradients are unscaled in front of `inner`"
                )
            return updates_and_state

        new_updates, inner_state = _SKIP[skip](finite, step, state.inner_state)
        return new_updates, DynamicLossScaleState(
            loss_scale.update(state.loss_scale, finite), inner_state, sum_of_squares, flags
        )

    return optax.GradientTransformationExtraArgs(init, update)


Step = Callable[[], tuple[optax.Updates, optax.OptState]]


def _cond(finite: jax.Array, step: Step, state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
    step = jax.jit(step)  # traced once, for its shapes and for the branch
    updates, new_state = jax.eval_shape(step)
    _check_unchanged(state, new_state)
    return lax.cond(finite, step, lambda: (jax.tree.map(jnp.zeros_like, updates), state))


def _select(finite: jax.Array, step: Step, state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
    updates, new_state = step()
    _check_unchanged(state, new_state)
    return select_tree(finite, (updates, new_state), (jax.tree.map(jnp.zeros_like, updates), state))


_SKIP = {"cond": _cond, "select": _select}


def _check_unchanged(state: optax.OptState, new_state: optax.OptState) -> None:
    old, new = (jax.tree.leaves_with_path(tree) for tree in (state, new_state))
    for (path, x), (_, y) in zip(old, new, strict=False):
        if (jnp.shape(x), jnp.result_type(x)) != (jnp.shape(y), jnp.result_type(y)):
            raise TypeError(
                f"`inner` changes its state{jax.tree_util.keystr(path)} from {jax.typeof(x).str_short()} to "
                f"{y.dtype.name}{list(y.shape)}, so a step could not be skipped; initialise it with the dtype and "
                "shape that its update returns"
            )
    before, after = map(str, map(jax.tree.structure, (state, new_state)))
    if before != after:
        raise TypeError(
            f"`inner` changes the structure of its state, so a step could not be skipped: {before} became {after}"
        )


def _contains(kind: type, tree: Any) -> bool:
    return any(isinstance(x, kind) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)))
