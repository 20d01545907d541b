"""The transition of a loss scale from one step to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import optax

from jmp_amp._loss_scale._arguments import LARGEST_SCALE, SMALLEST_SCALE
from jmp_amp._loss_scale._loss_scale_state import LossScaleState

if TYPE_CHECKING:
    from jmp_amp._loss_scale._loss_scale import LossScale


def next_state(rule: LossScale, state: LossScaleState, is_finite: jax.Array) -> LossScaleState:
    """Returns the state after a step.

    Args:
        rule: the rule by which the scale adapts.
        state: the state before the step.
        is_finite: bool[], whether the gradients of the step were finite.
    """
    tracker = optax.safe_increment(state.growth_tracker)
    grows = is_finite & (tracker >= rule.growth_interval)
    overflows_left = jnp.maximum(state.hysteresis_tracker - 1, 0)
    refills = grows | (is_finite & rule.consecutive_hysteresis)
    scale = _next_scale(rule, state.loss_scale, is_finite, grows, overflows_left)
    return LossScaleState(
        loss_scale=scale,
        growth_tracker=jnp.where(is_finite, jnp.where(grows, -rule.growth_delay, tracker), -rule.overflow_delay),
        hysteresis_tracker=jnp.where(
            is_finite, jnp.where(refills, rule.hysteresis, state.hysteresis_tracker), overflows_left
        ),
        last_finite=is_finite,
        notfinite_count=jnp.where(is_finite, 0, optax.safe_increment(state.notfinite_count)),
        total_notfinite=jnp.where(is_finite, state.total_notfinite, optax.safe_increment(state.total_notfinite)),
    )


def _next_scale(
    rule: LossScale, scale: jax.Array, is_finite: jax.Array, grows: jax.Array, overflows_left: jax.Array
) -> jax.Array:
    grown = scale * rule.growth_factor
    ceiling = jnp.maximum(scale, rule.max_scale) if rule.clamp_growth else scale
    grown = jnp.where(grown <= rule.max_scale, grown, ceiling)
    backed_off = jnp.maximum(scale * rule.backoff_factor, rule.min_scale)
    after_overflow = jnp.where(overflows_left == 0, backed_off, scale)
    adapted = jnp.where(is_finite, jnp.where(grows, grown, scale), after_overflow)
    adapted = scale if rule.is_static else adapted
    is_valid = (scale >= SMALLEST_SCALE) & (scale <= LARGEST_SCALE)
    return jnp.where(is_valid, adapted, rule.init_scale)
