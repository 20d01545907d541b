"""Reads, sets and judges the loss scale inside an optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import keystr

from jmp_amp._loss_scale._arguments import to_number
from jmp_amp._loss_scale._dynamic_loss_scale import DynamicLossScaleState
from jmp_amp._loss_scale._loss_scale import LossScaleState
from jmp_amp._loss_scale._nonfinite_leaves import describe_nonfinite, nonfinite_leaves
from jmp_amp._loss_scale._unscale_and_check import UnscaleAndCheckState


class LossScaleError(ArithmeticError):
    """Training cannot go on: the loss scale has nowhere left to go.

    Examples:
        >>> import jmp_amp as amp
        >>> rule = amp.LossScale(init_scale=1.0)
        >>> state = rule.update(rule.update(rule.init(), False), False)
        >>> try:
        ...     amp.check_health(state)
        ... except amp.LossScaleError as error:
        ...     print(str(error).partition(".")[0])
        the gradients overflow although the loss scale has nowhere left to go
    """


def get_loss_scale(opt_state: Any) -> jax.Array:
    """Returns the scale that multiplies the loss of the next step.

    Args:
        opt_state: a `LossScaleState`, or any state that holds exactly one, inside or outside `jit`.

    Returns:
        float32[] (with leading axes where the state was made under `vmap`).

    Raises:
        ValueError: `opt_state` holds none, or more than one; the message lists where.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> tx = amp.dynamic_loss_scale(optax.adam(1e-3))
        >>> print(amp.get_loss_scale(tx.init({"w": jnp.ones(2)})))
        65536.0
    """
    return find_state(opt_state).loss_scale


def set_loss_scale(opt_state: Any, value: float | jax.Array) -> Any:
    """Returns the optimizer state with another loss scale.

    The growth tracker starts again; the other counters stay. The value is taken as it is, also outside the `min_scale`
    and `max_scale` of the rule, which limit only what the rule itself does.

    Args:
        opt_state: a `LossScaleState`, or any state that holds exactly one, inside or outside `jit`.
        value: multiplies the loss of the next step; a scalar, cast to float32.

    Returns:
        A state of the same structure and dtypes.

    Raises:
        TypeError: the value is not a number.
        ValueError: the value is not between 2^-126 and 2^126 (a traced one is the caller's care), or
            `opt_state` does not hold exactly one `LossScaleState`.

    Examples:
        >>> import jmp_amp as amp
        >>> state = amp.set_loss_scale(amp.LossScale().init(), 2.0**10)
        >>> print(amp.get_loss_scale(state))
        1024.0
    """
    if not isinstance(value, jax.core.Tracer):
        value = to_number("value", value)
    old = find_state(opt_state)
    new = old._replace(
        loss_scale=jnp.broadcast_to(jnp.asarray(value, jnp.float32), old.loss_scale.shape),
        growth_tracker=jnp.zeros_like(old.growth_tracker),
    )

    def replace(x: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(x), new) if _is_state(x) else x

    return jax.tree.map(replace, opt_state, is_leaf=_is_state)


def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Returns what a training run should log of its loss scale.

    Args:
        opt_state: a `LossScaleState`, or any state that holds exactly one, inside or outside `jit`.

    Returns:
        The fields of `LossScaleState` by name, and `grad_norm` where `opt_state` is that of `dynamic_loss_scale`: the
        global norm of the true gradients of the last step, before any clipping, infinite where they were not finite.
        With `dynamic_loss_scale(..., nonfinite_leaves=True)` also `nonfinite/PATH`, bool[], for each leaf: whether its
        gradient was not finite. They stay on the device: nothing waits for it.

    Raises:
        ValueError: `opt_state` does not hold exactly one `LossScaleState`.

    Examples:
        >>> import jmp_amp as amp
        >>> amp.metrics(amp.LossScale().init())["loss_scale"].item()
        65536.0
    """
    found = find_state(opt_state)._asdict()
    for x in jax.tree.leaves(opt_state, is_leaf=_is_wrapper):
        if _is_wrapper(x):
            found["grad_norm"] = jnp.sqrt(jnp.abs(*jax.tree.leaves(x.sum_of_squares)))
            flags = jax.tree.leaves_with_path(x.nonfinite_leaves)
            found |= {f"nonfinite/{keystr(path, simple=True, separator='/')}": flag for path, flag in flags}
    return found


def check_health(
    opt_state: Any, params: Any = None, *, grads: Any = None, max_skips: int = 50, min_scale: float = 1.0
) -> None:
    """Raises when a run cannot recover by itself. Waits for the device: call it now and then, outside `jit`.

    Where `params` or `grads` are spread over several processes, all of these must call it: looking at them is a
    computation over their devices.

    Args:
        opt_state: a `LossScaleState`, or any state that holds exactly one.
        params: parameters to look at, or a whole model: what is no array in it is skipped. One that is not finite never
            becomes so again.
        grads: the gradients of the last step, if at hand: the message then names those that were not finite.
        max_skips: so many skipped steps in a row are too many; a scale of 2^24 needs 24 to reach 1.
        min_scale: two overflows in a row, the last at this scale or below, are an error; the `min_scale` of the rule in
            use. Give 0 with `LossScale.none()`, whose scale is always 1, if single bad batches may come in pairs.

    Raises:
        LossScaleError: the scale itself is not positive and finite; or parameters are not finite, or the gradients of
            the last `max_skips` steps were not, or those of the last two were not although the scale is at `min_scale`:
            scaling is not the cause then. The message names the leaves by their paths, and says how the scale got there
            and what to try.
        TypeError: called inside `jit`, where nothing can be raised.
        ValueError: `max_skips` is not positive, or `opt_state` does not hold exactly one `LossScaleState`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> rule = amp.LossScale(init_scale=1.0)
        >>> state = rule.update(rule.init(), False)
        >>> amp.check_health(state, {"w": jnp.ones(2)})
        >>> amp.check_health(state, {"w": jnp.array([1.0, jnp.nan])})
        Traceback (most recent call last):
          ...
        jmp_amp._health.LossScaleError: parameters are not finite: ['w'] (1 of 2 values). ...

    References:
        DeepSpeed raises on an overflow at the floor; torch and apex go on without a word.
    """
    if max_skips < 1:
        raise ValueError(f"`max_skips` must be at least 1, got {max_skips}")
    state = find_state(opt_state)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, params, grads))):
        raise TypeError(
            "`check_health` reads values and raises, so it cannot run inside `jit`; "
            "call it on what the jitted step returns, or log `amp.metrics(opt_state)`"
        )
    state = jax.device_get(state)
    in_a_row = state.notfinite_count.max()
    if not ((state.loss_scale > 0) & (state.loss_scale < jnp.inf)).all():
        fact = "the loss scale in the state is not positive and finite"
        cure = "put another there with `amp.set_loss_scale(opt_state, 2.0**16)`, and see where the state comes from"
    elif bad_params := _notfinite(params):
        fact = f"parameters are not finite: {bad_params}"
        cure = "go back to the last checkpoint, and look for what makes updates infinite behind the check"
    elif ((state.notfinite_count > 1) & (state.loss_scale <= min_scale)).any():
        fact, cure = "the gradients overflow although the loss scale has nowhere left to go", _CURE
    elif in_a_row >= max_skips:
        fact, cure = f"the last {in_a_row} steps overflowed", _CURE
    else:
        return
    flags = [x.nonfinite_leaves for x in jax.tree.leaves(opt_state, is_leaf=_is_wrapper) if _is_wrapper(x)]
    if bad_grads := _notfinite(grads) or describe_nonfinite(flags[0] if flags else ()):
        fact += f"; gradients that are not finite: {bad_grads}"
    raise LossScaleError(
        f"{fact}. The loss scale is {state.loss_scale.min()}; steps skipped: {state.total_notfinite.max()} in all, "
        f"the last {in_a_row} in a row; {max(state.growth_tracker.min(), 0)} clean steps since it last moved. "
        f"To mend it: {cure}"
    )


_CURE = (
    "look for non-finite inputs or parameters, a division or logarithm of zero, "
    "or a value beyond the range of the compute dtype; run that part in `amp.full_precision()`"
)


def _notfinite(tree: Any) -> str:
    """Says which leaves have values that are not finite, and how many."""
    return describe_nonfinite(nonfinite_leaves(tree), tree)


def find_state(opt_state: Any) -> LossScaleState:
    """Returns the one `LossScaleState` in a tree, its arrays out of the boxes that Flax NNX's optimizer has them in.

    Every step reads its scale by this, so this is where a wrong place of `dynamic_loss_scale` is found.
    """
    found = [(path, x) for path, x in jax.tree.leaves_with_path(opt_state, is_leaf=_is_state) if _is_state(x)]
    if not found:
        raise ValueError(
            f"there is no `LossScaleState` in this {type(opt_state).__name__}; "
            "make the optimizer with `amp.dynamic_loss_scale(...)` and pass the state of its `init` or `update`"
        )
    if len(found) > 1:
        where = ", ".join(f"opt_state{keystr(path)}" for path, _ in found)
        raise ValueError(f"there are {len(found)} loss scales in this state, pass the one that is meant: {where}")
    _check_outermost(opt_state)
    return LossScaleState(*jax.tree.leaves(found[0][1]))


def _check_outermost(opt_state: Any) -> None:
    """Raises where something around `dynamic_loss_scale` changes the gradients that it is to judge."""
    kinds = (DynamicLossScaleState, UnscaleAndCheckState, *_KEEPS_OVERFLOWS)

    def wraps(tree: Any) -> bool:
        return any(map(_is_wrapper, jax.tree.leaves(tree, is_leaf=_is_wrapper)))

    for path, x in jax.tree.leaves_with_path(opt_state, is_leaf=lambda x: isinstance(x, kinds)):
        where = f"at opt_state{keystr(path)}"
        if isinstance(x, UnscaleAndCheckState) and wraps(opt_state):
            raise ValueError(
                f"`unscale_and_check` stands outside of `dynamic_loss_scale`, {where}, so gradients would be unscaled "
                "twice, and overflows be zeros when they come to it; put it inside, or leave it out"
            )
        if type(x) in _KEEPS_OVERFLOWS and wraps(x):
            what, fault, cure = _KEEPS_OVERFLOWS[type(x)]
            raise ValueError(f"`{what}` is around `dynamic_loss_scale`, {where}, and {fault}; {cure}")


_KEEPS_OVERFLOWS = {
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite",
        "keeps overflows from it, so that the scale would never back off",
        "leave it out: overflows are skipped anyway",
    ),
    optax.MultiStepsState: (
        "optax.MultiSteps",
        "never forgets an overflow that it has added up",
        "put it inside, `dynamic_loss_scale(optax.MultiSteps(...).gradient_transformation())`, or use "
        "`amp.value_and_grad(..., accumulate_steps=)`",
    ),
}


def _is_state(x: Any) -> bool:
    return isinstance(x, LossScaleState)


def _is_wrapper(x: Any) -> bool:
    return isinstance(x, DynamicLossScaleState)
