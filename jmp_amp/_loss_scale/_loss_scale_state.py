"""The state of a loss scale."""

from typing import NamedTuple

import jax


class LossScaleState(NamedTuple):
    """State of a `LossScale`; every leaf is a strongly typed array.

    Attributes:
        loss_scale: float32[], multiplies the loss of the next step.
        growth_tracker: int32[], finite steps since the last overflow or change of the scale; negative during a delay.
        hysteresis_tracker: int32[], overflows left until the scale backs off; at 0 or 1, the next overflow backs off.
        last_finite: bool[], whether the gradients of the last step were finite; true before the first step.
        notfinite_count: int32[], consecutive steps, up to the last one, whose gradients were not finite.
        total_notfinite: int32[], all steps so far whose gradients were not finite.

    Examples:
        >>> import jmp_amp as amp
        >>> rule = amp.LossScale(growth_interval=2)
        >>> state = rule.update(rule.init(), True)
        >>> state.growth_tracker.item(), state.total_notfinite.item()
        (1, 0)
    """

    loss_scale: jax.Array
    growth_tracker: jax.Array
    hysteresis_tracker: jax.Array
    last_finite: jax.Array
    notfinite_count: jax.Array
    total_notfinite: jax.Array
