"""Health checks of a training run."""

from typing import Any

import jax
import jax.numpy as jnp

from jmp_amp._loss_scale._find_state import find_state, find_wrapper_states
from jmp_amp._loss_scale._loss_scale_state import LossScaleState
from jmp_amp._loss_scale._nonfinite_leaves import count_nonfinite, describe_nonfinite


class LossScaleError(ArithmeticError):
    """Raised by `check_health` if training cannot recover by itself.

    Examples:
        >>> import jmp_amp as amp
        >>> rule = amp.LossScale(init_scale=1.0)
        >>> state = rule.update(rule.update(rule.init(), False), False)
        >>> try:
        ...     amp.check_health(state)
        ... except amp.LossScaleError as error:
        ...     print(str(error).partition(".")[0])
        the gradients overflow although the loss scale is at its minimum
    """


def check_health(
    opt_state: Any, params: Any = None, *, grads: Any = None, max_skips: int = 50, min_scale: float = 1.0
) -> None:
    """Raises `LossScaleError` if training cannot recover by itself.

    It waits for the device, so call it only occasionally, outside `jit`. If `params` or `grads` are sharded over
    several processes, all of these must call it, because the check runs a computation on all their devices.

    Args:
        opt_state: a `LossScaleState`, or any state that holds exactly one.
        params: parameters to check, or a whole model; leaves that are not arrays are ignored. A parameter that is not
            finite never becomes finite again.
        grads: the gradients of the last step, if available; the message then names those that were not finite.
        max_skips: the number of consecutive skipped steps that is an error. For comparison, a scale of 2^24 reaches 1
            after 24 overflows.
        min_scale: two consecutive overflows are an error if the scale is at most `min_scale`. Pass the `min_scale` of
            the rule in use. For `LossScale.none()`, whose scale is always 1, pass 0 to tolerate two bad batches in a
            row.

    Raises:
        LossScaleError: the loss scale is not positive and finite; or parameters are not finite; or the last two steps
            overflowed and the scale is at most `min_scale`, so loss scaling is not the cause; or the last `max_skips`
            steps overflowed. The message names the leaves that are not finite, and contains the history of the scale
            and a cure.
        TypeError: called inside `jit`.
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
        jmp_amp._loss_scale._health.LossScaleError: parameters are not finite: ['w'] (1 of 2 values). ...

    References:
        DeepSpeed raises on an overflow at the minimum scale; torch and apex do not.
    """
    if max_skips < 1:
        raise ValueError(f"`max_skips` must be at least 1, got {max_skips}")
    state = find_state(opt_state)
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, params, grads))):
        raise TypeError(
            "`check_health` needs concrete values, so it cannot run inside `jit`; "
            "call it on the outputs of the jitted step, or log `amp.metrics(opt_state)`"
        )
    state = jax.device_get(state)
    diagnosis = _diagnose(state, params, max_skips, min_scale)
    if diagnosis is None:
        return
    fact, cure = diagnosis
    flags = [x.nonfinite_leaves for x in find_wrapper_states(opt_state)]
    if description := _describe_tree(grads) or describe_nonfinite(flags[0] if flags else ()):
        fact += f"; non-finite gradients: {description}"
    raise LossScaleError(
        f"{fact}. Loss scale: {state.loss_scale.min()}; skipped steps: {state.total_notfinite.max()}, of which "
        f"{state.notfinite_count.max()} in a row until now; finite steps since the last overflow or change of the "
        f"scale: {max(state.growth_tracker.min(), 0)}. Cure: {cure}"
    )


def _diagnose(state: LossScaleState, params: Any, max_skips: int, min_scale: float) -> tuple[str, str] | None:
    """Returns a fact and its cure, or None if the run is healthy."""
    consecutive_skips = state.notfinite_count.max()
    if not ((state.loss_scale > 0) & (state.loss_scale < jnp.inf)).all():
        cure = "call `amp.set_loss_scale(opt_state, 2.0**16)`, and check the code that created or loaded the state"
        return "the loss scale in the state is not positive and finite", cure
    if description := _describe_tree(params):
        cure = "restore the last checkpoint, and check which transformation returns non-finite updates"
        return f"parameters are not finite: {description}", cure
    if ((state.notfinite_count > 1) & (state.loss_scale <= min_scale)).any():
        return "the gradients overflow although the loss scale is at its minimum", _CURE
    if consecutive_skips >= max_skips:
        return f"the last {consecutive_skips} steps overflowed", _CURE
    return None


_CURE = (
    "check for non-finite inputs or parameters, a division by zero, the logarithm of zero, or a value outside the "
    "range of the compute dtype; run the affected code under `amp.full_precision()`"
)


def _describe_tree(tree: Any) -> str:
    return describe_nonfinite(count_nonfinite(tree), tree)
