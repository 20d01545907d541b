"""Loss scaling: the rule, scaled gradients, the optax transformations, and functions of their state."""

from jmp_amp._loss_scale._grad import LOSS_SCALE, MICRO_BATCHES, grad, value_and_grad
from jmp_amp._loss_scale._gradients import CHECK, EQUAL_SCALE, NEXT_SCALE, NO_SCALE, OTHER_SCALE, is_frozen
from jmp_amp._loss_scale._rule import LossScale, LossScaleState, check_rule, is_concrete, to_count, to_number
from jmp_amp._loss_scale._scaled_grads import is_new_scale, is_set_scale
from jmp_amp._loss_scale._state import LossScaleError, check_health, find_state, get_loss_scale, metrics, set_loss_scale
from jmp_amp._loss_scale._transformations import (
    DynamicLossScaleState,
    UnscaleAndCheckState,
    check_inner,
    dynamic_loss_scale,
    unscale_and_check,
)
from jmp_amp._loss_scale._units import ITS_OWN_SCALE, Origins, Unit, UnitAnalysis, describe_unit
