"""A loss scale to and from the state dict of `torch.amp.GradScaler`."""

from typing import Any

import jax
import jax.numpy as jnp

from jmp_amp._calls import quote
from jmp_amp._loss_scale import LossScale, LossScaleState, find_state, to_count, to_number

__all__ = ["load_state_dict", "state_dict"]

_RULE = ("growth_factor", "backoff_factor", "growth_interval")
_KEYS = ("scale", *_RULE, "_growth_tracker")


def state_dict(state: Any, loss_scale: LossScale = LossScale()) -> dict[str, float | int]:  # noqa: B008 (frozen)
    """Returns the state dict of the equivalent `torch.amp.GradScaler`.

    Use it for a checkpoint that torch loads. A JAX checkpoint does not need it: the optimizer state is a pytree that
    holds the whole state of the loss scale.

    Args:
        state: a `LossScaleState`, or an optimizer state that holds exactly one; copied from the device.
        loss_scale: the rule in use, which is not part of the state.

    Returns:
        The floats `scale`, `growth_factor` and `backoff_factor` and the integers `growth_interval` and
        `_growth_tracker`; `{}` for `LossScale.none()`, like a disabled `GradScaler`.

    Examples:
        >>> import jmp_amp as amp
        >>> rule = amp.LossScale.torch(init_scale=4.0)
        >>> amp.interop.torch.state_dict(rule.init(), rule)
        {'scale': 4.0, 'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000, '_growth_tracker': 0}
    """
    if loss_scale == LossScale.none():
        return {}
    state = jax.device_get(find_state(state))
    rule = {key: getattr(loss_scale, key) for key in _RULE}
    # The trackers of DeepSpeed's and flax's rules start at -1, which torch does not support.
    return {"scale": float(state.loss_scale), **rule, "_growth_tracker": max(int(state.growth_tracker), 0)}


def load_state_dict(d: dict[str, float | int]) -> tuple[LossScale, LossScaleState]:
    """Returns the rule and the state of a loss scale from a `torch.amp.GradScaler` state dict.

    The dictionary holds everything that torch's rule needs, so both results replace the previous ones.

    Args:
        d: a dictionary with torch's five keys, or `{}` for a disabled `GradScaler`.

    Returns:
        The rule, which is `LossScale.torch` with the saved values or `LossScale.none()` for `{}`, and its state. Insert
        the state into that of `dynamic_loss_scale` with `amp.set_loss_scale(opt_state, state)`.

    Raises:
        ValueError: a key is unknown or missing, or a value is not finite, not positive or out of range.
        TypeError: `d` is not a dictionary, or a value is not a number.

    Examples:
        >>> import jmp_amp as amp
        >>> saved = dict(scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2, _growth_tracker=1)
        >>> rule, state = amp.interop.torch.load_state_dict(saved)
        >>> rule.growth_factor, float(state.loss_scale), int(state.growth_tracker)
        (4.0, 3.0, 1)
    """
    if not isinstance(d, dict):
        raise TypeError(f"`d` must be a dictionary, as `GradScaler.state_dict` returns it, got {type(d).__name__}")
    if not d:
        return LossScale.none(), LossScale.none().init()
    unknown, missing = sorted(set(d) - set(_KEYS), key=str), [key for key in _KEYS if key not in d]
    if unknown or missing:
        raise ValueError(
            f"a `GradScaler` state dict must have the keys {', '.join(_KEYS)}; unknown: {quote(unknown)}, missing: "
            f"{missing}"
        )
    tracker = to_count("_growth_tracker", d["_growth_tracker"], 0)
    rule = LossScale.torch(init_scale=to_number("scale", d["scale"]), **{key: d[key] for key in _RULE})
    return rule, rule.init()._replace(growth_tracker=jnp.asarray(tracker, jnp.int32))
