"""The optax transformations: the wrapper that skips overflows and adapts the scale, and the link of a chain."""

import functools
import inspect
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import keystr

from jmp_amp import _jaxpr as jx
from jmp_amp._calls import check_type, describe, quote, with_inner_state
from jmp_amp._loss_scale import _gradients
from jmp_amp._loss_scale._rule import LossScale, LossScaleState, check_rule, checked_scale, to_flag, to_number
from jmp_amp._trees import is_value


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
    axis_name: _gradients.AxisName | None = None, *, implementation: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """Unscales gradients, and replaces them by zeros on overflow.

    Use it without `dynamic_loss_scale`, in a chain of your own. `tx.update(..., loss_scale=scale)` passes the scale,
    1.0 for gradients that are not scaled. Transformations before this one receive the scaled gradients, so they must
    commute with the scale, pass on what is not finite, and keep nothing; those after it receive the unscaled float32
    gradients. On overflow, later transformations receive **zeros**, which they treat as ordinary gradients: Adam's
    moments decay by one step, and its count and schedules advance. Wrap the chain in `dynamic_loss_scale` instead to
    skip the whole step.

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
        TypeError without `loss_scale=`, and ValueError if the traced program shows that the gradients were already
        unscaled, or that what was done to them since `value_and_grad`, by hand or in front of it in a chain, is wrong
        for scaled gradients.

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

    def update(
        updates: optax.Updates, state: UnscaleAndCheckState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, UnscaleAndCheckState]:
        if state.last_finite is None:
            return updates, state
        loss_scale = extra_args.get("loss_scale")
        if loss_scale is None:
            raise TypeError(
                "`unscale_and_check` divides the gradients by the `loss_scale` that `update` gets, got None; write "
                "`tx.update(grads, state, params, loss_scale=scale)`, with `loss_scale=1.0` for gradients that are not "
                "scaled, or wrap the whole optimizer in `amp.dynamic_loss_scale(...)`, whose state holds the scale"
            )
        cure = "move it behind `unscale_and_check()`"
        factor = 1 / checked_scale(loss_scale, updates, params, cure, may_be="number")
        is_finite, *_ = _gradients.check_grads(updates, factor, axis_name, implementation)
        unscaled_grads = _zeros_unless(is_finite, _gradients.unscale(updates, factor))
        unscaled_grads = _gradients.with_overwritten(updates, jax.tree.leaves(unscaled_grads))
        return unscaled_grads, UnscaleAndCheckState(last_finite=is_finite)

    return optax.GradientTransformationExtraArgs(lambda params: UnscaleAndCheckState(jnp.asarray(True)), update)


@with_inner_state
class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`.

    Attributes:
        loss_scale: the scale and its counters.
        inner_state: the state of the wrapped transformation.
        sum_of_squares: float32[], of the unscaled gradients of the last step, before clipping; -inf if they were not
            finite, 0 before the first step.
        nonfinite_leaves: tree of bool[] at the paths of the parameters, true for leaves whose gradients were not finite
            in the last step; None unless `dynamic_loss_scale` was called with `nonfinite_leaves=True`.

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
    axis_name: _gradients.AxisName | None = None,
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

    The check covers all gradients that `update` takes, also those of parameters that `inner` freezes. If these may be
    infinite or NaN, put the wrapper around the part that trains:
    `optax.partition({"train": dynamic_loss_scale(...), "frozen": optax.set_to_zero()}, labels)`.

    The check does not cover the updates. If `inner` returns non-finite updates for finite gradients, the parameters
    become non-finite; from then on every step is skipped, and `check_health` raises.

    `update` accepts these extra arguments:

    - `loss_scale=`, float32[], replaces the scale in the state, for several optimizers that share one scale.
    - `grads_finite=`, bool[]: `False` skips the step like an overflow, for several optimizers that skip together.
    - `grad=`, for line searches such as `optax.lbfgs`: gradients of the scaled loss, which are unscaled as the updates
      are. Others are passed to `inner`; pass the unscaled loss as `value=`, as `value_and_grad` returns it.

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
        scaled or already unscaled; and, with the line, if what was done to them since `value_and_grad`, by hand or in
        front of it in a chain, is wrong for scaled gradients, such as a clip, or hides overflows. It raises TypeError
        if `inner` changes the dtype or shape of its state. It never raises because of non-finite gradients.

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
    check_inner(inner, "dynamic_loss_scale")
    check_rule(loss_scale)
    if skip not in ("cond", "select"):
        raise ValueError(f'`skip` must be "cond" or "select", got {quote(skip)}')
    max_norm = None if clip_global_norm is None else to_number("clip_global_norm", clip_global_norm)
    check_axis_name(axis_name)
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> DynamicLossScaleState:
        leaves = _gradients.differentiated(params) if nonfinite_leaves else None
        flags = jx.with_leaves(leaves, [jnp.zeros((), bool) for _ in jax.tree.leaves(leaves)])
        kinds = DynamicLossScaleState | UnscaleAndCheckState
        inner_state = jax.tree.map_with_path(_disable_check, inner.init(params), is_leaf=lambda x: isinstance(x, kinds))
        return DynamicLossScaleState(loss_scale.init(), inner_state, jnp.zeros((), jnp.float32), flags)

    def update(
        updates: optax.Updates, state: DynamicLossScaleState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, DynamicLossScaleState]:
        given_scale, grads_finite = extra_args.pop("loss_scale", None), extra_args.pop("grads_finite", None)
        factor = _checked_factor(updates, state, params, loss_scale, given_scale, grads_finite is not None)
        is_finite, squares, by_path = _gradients.check_grads(
            updates, factor, axis_name, implementation, nonfinite_leaves
        )
        is_finite &= to_flag("grads_finite", True if grads_finite is None else grads_finite)
        # Frozen parameters may have no gradient.
        flags = jax.tree.map_with_path(lambda path, x: by_path.get(path, jnp.zeros_like(x)), state.nonfinite_leaves)
        if max_norm is not None:
            factor *= jnp.minimum(1.0, max_norm / jnp.sqrt(jnp.abs(squares)))

        def step() -> tuple[optax.Updates, optax.OptState]:
            # Outside `jit`, `jax.debug_nans` raises on a NaN that `inner` computes, even if the result is discarded.
            is_grad = "grad" in extra_args and all(map(is_value, jax.tree.leaves(extra_args["grad"])))
            scaled = updates, {"grad": extra_args["grad"]} if is_grad else {}
            scaled = scaled if isinstance(is_finite, jax.core.Tracer) else _zeros_unless(is_finite, scaled)
            unscaled_grads, extras = _gradients.unscale(scaled, factor)
            new_updates, inner_state = inner.update(unscaled_grads, state.inner_state, params, **extra_args | extras)
            if params is not None:
                cure = "reduce its per-example gradients, or correct `inner`"
                _gradients.check_shapes("update", new_updates, params, cure)
            return new_updates, inner_state

        new_updates, inner_state = _step_if_finite(skip, is_finite, step, state.inner_state)
        new_scale = loss_scale.update(state.loss_scale, is_finite)
        return new_updates, DynamicLossScaleState(new_scale, inner_state, squares, flags)

    return optax.GradientTransformationExtraArgs(init, update)


def _checked_factor(grads: Any, state: Any, params: Any, rule: LossScale, given: Any, is_shared: bool) -> jax.Array:
    """Returns the reciprocal of the scale of gradients: of that which `update` got, or of that of the state.

    Raises TypeError or ValueError, or warns, if what `update` got does not match.
    """
    cure = "create it with the `init` of this transformation, and replace its `inner_state` by a state of `inner`"
    check_type("state", state, DynamicLossScaleState, cure)
    if params is not None:
        _gradients.check_leaves(grads, params)
    is_own, is_one = given is None, rule.is_static and rule.init_scale == 1
    may_be = "equal" if is_shared or not is_own else ""
    source, its_rule = (state.loss_scale, rule) if is_own else (given, None)
    scale = checked_scale(source, grads, params, _MOVE_INSIDE, its_rule, may_be)
    mark = _gradients.NO_SCALE if is_one else _gradients.EQUAL_SCALE if is_shared else _gradients.OTHER_SCALE
    with jx.marked(mark if is_own else _gradients.OTHER_SCALE):
        return 1 / scale


_MOVE_INSIDE = (
    "move it inside, `dynamic_loss_scale(optax.chain(..., inner))`, where gradients are unscaled; to clip by the "
    "global norm, `clip_global_norm=` will do"
)


def _disable_check(path: Any, x: Any) -> Any:
    """Returns a node of the state of `inner`, disabled if it is that of `unscale_and_check`."""
    if isinstance(x, DynamicLossScaleState):
        raise ValueError(
            f"there is a `dynamic_loss_scale` inside another one, at `inner`{keystr(path)}, so gradients "
            "would be unscaled twice; wrap the whole optimizer once"
        )
    return UnscaleAndCheckState(last_finite=None) if isinstance(x, UnscaleAndCheckState) else x


def _zeros_unless(is_finite: jax.Array, tree: Any) -> Any:
    return jax.tree.map(lambda x: lax.select(is_finite, x, jnp.zeros_like(x)), tree)


def _step_if_finite(
    skip: str, is_finite: jax.Array, step: Callable[[], tuple[optax.Updates, optax.OptState]], state: optax.OptState
) -> tuple[optax.Updates, optax.OptState]:
    """Returns the result of `step()` if `is_finite`, otherwise zero updates and the old state."""
    # Outside `jit`, `lax.cond` would recompile in every step.
    has_branches = skip == "cond" and isinstance(is_finite, jax.core.Tracer)
    step = jax.jit(step) if has_branches else step  # traced once, for both its shapes and the branch
    updates, new_state = jax.eval_shape(step) if has_branches else step()
    _check_same_structure(state, new_state, checks_axes=has_branches)
    if has_branches:
        return lax.cond(is_finite, step, lambda: (jax.tree.map(jnp.zeros_like, updates), state))
    return _zeros_unless(is_finite, updates), jax.tree.map(functools.partial(lax.select, is_finite), new_state, state)


def _check_same_structure(state: optax.OptState, new_state: optax.OptState, *, checks_axes: bool) -> None:
    before, after = map(str, map(jax.tree.structure, (state, new_state)))
    if before != after:
        raise TypeError(
            f"`inner` changes the structure of its state from {before} to {after}, so a step cannot be skipped; "
            "`inner.update` must return the structure that `inner.init` returns"
        )
    for (path, x), y in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(new_state), strict=True):
        if (jnp.shape(x), jnp.result_type(x)) != (jnp.shape(y), jnp.result_type(y)):
            cure = "initialize it with the dtype and shape that `inner.update` returns"
            if jx.is_floating(x) and jnp.finfo(jnp.result_type(x)).bits < 32 and jnp.result_type(y) == jnp.float32:
                cure = (
                    "if parameters are in 16 bits, write `amp.dynamic_loss_scale(amp.low_precision_params(inner))`, "
                    "which computes in float32; with float32 parameters, initialize the state in float32"
                )
            raise TypeError(
                f"`inner` changes its state{keystr(path)} from {describe(x)} to {describe(y)}, so a step "
                f"cannot be skipped; {cure}"
            )
        if checks_axes and (axes := sorted(jx.versions.varying_axes(y) - jx.versions.varying_axes(x), key=str)):
            raise ValueError(
                f"the state of `inner`{keystr(path)} is the same on all devices, but `inner` returns one that varies "
                f"along the mapped axes {axes} of `shard_map`, as its gradients do; {_gradients.average_first(axes)}"
            )


def check_axis_name(value: Any) -> None:
    """Raises TypeError unless `value` can name one or several mapped axes."""
    if not isinstance(value, Hashable):
        raise TypeError(f"`axis_name` must be the name of a mapped axis or a tuple of names, got {quote(value)}")


def check_inner(inner: Any, wrapper: str) -> None:
    """Raises TypeError unless `inner`, the argument of the function `wrapper`, is an optax transformation."""
    if not isinstance(inner, optax.GradientTransformation):
        call = f"{inner.__name__}(...)" if inspect.isfunction(inner) else "optax.adam(1e-3)"
        call = "inner.gradient_transformation()" if isinstance(inner, optax.MultiSteps) else call
        raise TypeError(f"`inner` must be an optax transformation, got {describe(inner)}; write `{wrapper}({call})`")
