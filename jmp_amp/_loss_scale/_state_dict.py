"""A loss scale as the dictionary that `torch.amp.GradScaler` saves."""

from typing import Any

import jax
import jax.numpy as jnp

from jmp_amp._loss_scale._arguments import to_count
from jmp_amp._loss_scale._health import find_state
from jmp_amp._loss_scale._loss_scale import LossScale, LossScaleState

_RULE = ("growth_factor", "backoff_factor", "growth_interval")
_KEYS = ("scale", *_RULE, "_growth_tracker")


def state_dict(state: Any, loss_scale: LossScale = LossScale()) -> dict[str, float | int]:  # noqa: B008 (frozen)
    """Returns what `torch.amp.GradScaler.state_dict` would, for a checkpoint that torch can read.

    A checkpoint for JAX needs none of this: the optimizer state is a pytree and holds everything.

    Args:
        state: a `LossScaleState`, or an optimizer state that holds exactly one; read from the device.
        loss_scale: the rule in use; the state does not hold it.

    Returns:
        `scale`, `growth_factor`, `backoff_factor` (floats), `growth_interval`, `_growth_tracker` (ints); `{}` for
        `LossScale.none()`, as for a disabled `GradScaler`.

    Examples:
        >>> import jmp_amp as amp
        >>> rule = amp.LossScale.torch(init_scale=4.0)
        >>> amp.state_dict(rule.init(), rule)
        {'scale': 4.0, 'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000, '_growth_tracker': 0}
    """
    if loss_scale == LossScale.none():
        return {}
    state = jax.device_get(find_state(state))
    rule = {key: getattr(loss_scale, key) for key in _RULE}
    # DeepSpeed's and flax's rules count from -1, which torch's has no place for.
    return {"scale": float(state.loss_scale), **rule, "_growth_tracker": max(int(state.growth_tracker), 0)}


def load_state_dict(d: dict[str, float | int]) -> tuple[LossScale, LossScaleState]:
    """Reads what `torch.amp.GradScaler.state_dict` returned.

    Nothing of the loss scale that was in use before is kept: the dictionary holds all that torch's rule needs.

    Args:
        d: torch's five keys, or `{}` for a disabled `GradScaler`.

    Returns:
        The rule (`LossScale.torch` with the saved numbers; `LossScale.none()` for `{}`) and the state, to be put in
        place by `opt_state._replace(loss_scale=state)`.

    Raises:
        ValueError: a key is unknown or missing, or a value is not finite, not positive or out of range.
        TypeError: `d` is not a dictionary, or a value is not a number.

    Examples:
        >>> import jmp_amp as amp
        >>> saved = dict(scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2, _growth_tracker=1)
        >>> rule, state = amp.load_state_dict(saved)
        >>> rule.growth_factor, float(state.loss_scale), int(state.growth_tracker)
        (4.0, 3.0, 1)
    """
    if not isinstance(d, dict):
        raise TypeError(f"a state dict is a dictionary, got {type(d).__name__}")
    if not d:
        return LossScale.none(), LossScale.none().init()
    unknown, missing = sorted(set(d) - set(_KEYS), key=str), [key for key in _KEYS if key not in d]
    if unknown or missing:
        raise ValueError(
            f"a `GradScaler` state dict has the keys {', '.join(_KEYS)}; unknown: {unknown}, missing: {missing}"
        )
    tracker = to_count("_growth_tracker", d["_growth_tracker"], 0)
    try:
        rule = LossScale.torch(init_scale=d["scale"], **{key: d[key] for key in _RULE})
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} (`init_scale` is the dictionary's `scale`)") from None
    return rule, rule.init()._replace(growth_tracker=jnp.asarray(tracker, jnp.int32))
