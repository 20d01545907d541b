"""Loss scaling: the rule, scaled gradients, the optax transformations, and functions of their state."""

from jmp_amp._loss_scale._arguments import check_inner, to_number
from jmp_amp._loss_scale._dynamic_loss_scale import DynamicLossScaleState, dynamic_loss_scale
from jmp_amp._loss_scale._grad import LOSS_SCALE, grad, value_and_grad
from jmp_amp._loss_scale._health import LossScaleError, check_health
from jmp_amp._loss_scale._leaves import is_hole
from jmp_amp._loss_scale._loss_scale import LossScale
from jmp_amp._loss_scale._loss_scale_state import LossScaleState
from jmp_amp._loss_scale._nonfinite_leaves import describe_nonfinite, nonfinite_leaves
from jmp_amp._loss_scale._read_and_set import get_loss_scale, metrics, set_loss_scale
from jmp_amp._loss_scale._state_dict import load_state_dict, state_dict
from jmp_amp._loss_scale._unscale import map_wide
from jmp_amp._loss_scale._unscale_and_check import UnscaleAndCheckState, unscale_and_check

__all__ = [
    "LOSS_SCALE",
    "DynamicLossScaleState",
    "LossScale",
    "LossScaleError",
    "LossScaleState",
    "UnscaleAndCheckState",
    "check_health",
    "check_inner",
    "describe_nonfinite",
    "dynamic_loss_scale",
    "get_loss_scale",
    "grad",
    "is_hole",
    "load_state_dict",
    "map_wide",
    "metrics",
    "nonfinite_leaves",
    "set_loss_scale",
    "state_dict",
    "to_number",
    "unscale_and_check",
    "value_and_grad",
]
