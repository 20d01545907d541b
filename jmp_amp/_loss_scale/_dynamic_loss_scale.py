"""The optax side of loss scaling: unscale, skip on overflow, adapt the scale."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jmp_amp._loss_scale._arguments import check_axis_name, to_flag, to_number, to_scale
from jmp_amp._loss_scale._leaves import check_same_leaves, check_updates
from jmp_amp._loss_scale._loss_scale import LossScale, LossScaleState
from jmp_amp._loss_scale._unscale import AxisName, check_scaled, look, unscale
from jmp_amp._loss_scale._unscale_and_check import UnscaleAndCheckState
from jmp_amp._policy import select_tree


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`.

    Attributes:
        loss_scale: the scale and its counters.
        inner_state: the state of the wrapped transformation.
        sum_of_squares: float32[], of the true gradients of the last step, before any clipping; -inf where they were not
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

    All of `inner` sees true float32 gradients. An `unscale_and_check()` in it does nothing: it marks, for the reader,
    where a chain without this wrapper unscales. Other extra arguments of `update` are handed to `inner`. One that is
    the very gradients that `update` gets, such as the `grad=` of `optax.lbfgs`, is unscaled with them; a `value=` must
    be the loss as `amp.value_and_grad` returns it.

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
        path, where gradients and parameters do not match, or where the traced program shows that gradients were not
        scaled, or were unscaled before; and TypeError where `inner` changes the dtype or shape of its state. Gradients
        that are not finite never raise.

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
    check_axis_name(axis_name)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> DynamicLossScaleState:
        flags = jax.tree.map(lambda _: jnp.zeros((), bool), params) if nonfinite_leaves else None
        inner_state = _without_checks(inner.init(params))
        return DynamicLossScaleState(loss_scale.init(), inner_state, jnp.zeros((), jnp.float32), flags)

    def update(
        updates: optax.Updates,
        state: DynamicLossScaleState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, DynamicLossScaleState]:
        if not isinstance(state, DynamicLossScaleState):
            raise TypeError(
                f"the state of `dynamic_loss_scale` is a `DynamicLossScaleState`, got {type(state).__name__}; "
                "make it with the `init` of the wrapper, or put a state that `inner` made into its `inner_state`"
            )
        if params is not None:
            check_same_leaves(updates, params)
        given = extra_args.pop("loss_scale", None)
        scale = state.loss_scale.loss_scale if given is None else to_scale(given)
        # A scale that stands still may have been handed to the loss as a number.
        check_scaled(updates, given if given is not None or loss_scale.is_static else scale)
        factor = 1 / scale
        finite, sum_of_squares, flags = look(updates, factor, axis_name, implementation, nonfinite_leaves)
        finite &= to_flag("grads_finite", extra_args.pop("grads_finite", True))
        if nonfinite_leaves:  # a frozen parameter may have no gradient
            by_path = dict(jax.tree.leaves_with_path(flags))
            flags = jax.tree.map_with_path(
                lambda path, old: by_path.get(path, jnp.zeros_like(old)), state.nonfinite_leaves
            )
        if clip_global_norm is not None:
            factor *= jnp.minimum(1.0, clip_global_norm / jnp.sqrt(jnp.abs(sum_of_squares)))

        def step() -> tuple[optax.Updates, optax.OptState]:
            # Unscaled here, not where the check did it, so that it fuses into `inner`.
            scaled = updates
            if not isinstance(finite, jax.core.Tracer):
                # What `inner` makes of an overflow is dropped, but op by op `jax.debug_nans` would see it.
                scaled = select_tree(finite, updates, jax.tree.map(jnp.zeros_like, updates))
            grads = unscale(scaled, factor)
            extras = {name: grads if _is_same(x, updates) else x for name, x in extra_args.items()}
            new_updates, inner_state = inner.update(grads, state.inner_state, params, **extras)
            if params is not None:
                check_updates(new_updates, params)
            return new_updates, inner_state

        new_updates, inner_state = _SKIP[skip](finite, step, state.inner_state)
        return new_updates, DynamicLossScaleState(
            loss_scale.update(state.loss_scale, finite), inner_state, sum_of_squares, flags
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _without_checks(inner_state: optax.OptState) -> optax.OptState:
    """Tells each `unscale_and_check` in a state that `dynamic_loss_scale` is around it."""

    def told(path: Any, x: Any) -> Any:
        if isinstance(x, DynamicLossScaleState):
            raise ValueError(
                f"there is a `dynamic_loss_scale` inside another one, at `inner`{jax.tree_util.keystr(path)}, so "
                "gradients would be unscaled twice; wrap the whole optimizer once"
            )
        return UnscaleAndCheckState(last_finite=None) if isinstance(x, UnscaleAndCheckState) else x

    ours = (DynamicLossScaleState, UnscaleAndCheckState)
    return jax.tree.map_with_path(told, inner_state, is_leaf=lambda x: isinstance(x, ours))


def _is_same(x: Any, tree: Any) -> bool:
    """Whether the leaves of one tree are the very arrays of another."""
    leaves, others = jax.tree.leaves(x), jax.tree.leaves(tree)
    return len(leaves) == len(others) > 0 and all(a is b for a, b in zip(leaves, others, strict=True))


Step = Callable[[], tuple[optax.Updates, optax.OptState]]


def _cond(finite: jax.Array, step: Step, state: optax.OptState) -> tuple[optax.Updates, optax.OptState]:
    if not isinstance(finite, jax.core.Tracer):  # outside `jit`, a branch would be compiled anew in every step
        return _select(finite, step, state)
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
    before, after = map(str, map(jax.tree.structure, (state, new_state)))
    if before != after:
        raise TypeError(
            f"`inner` changes the structure of its state, so a step could not be skipped: {before} became {after}"
        )
    old, new = (jax.tree.leaves_with_path(tree) for tree in (state, new_state))
    for (path, x), (_, y) in zip(old, new, strict=True):
        if (jnp.shape(x), jnp.result_type(x)) != (jnp.shape(y), jnp.result_type(y)):
            raise TypeError(
                f"`inner` changes its state{jax.tree_util.keystr(path)} from {jax.typeof(x).str_short()} to "
                f"{y.dtype.name}{list(y.shape)}, so a step could not be skipped; initialise it with the dtype and "
                "shape that its update returns"
            )
