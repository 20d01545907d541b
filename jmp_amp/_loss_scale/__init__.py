"""Loss scaling: the rule, scaled gradients, the optax transformations, and functions of their state."""

from jmp_amp._loss_scale._arguments import LARGEST_SCALE, SMALLEST_SCALE, check_inner, to_count, to_number
from jmp_amp._loss_scale._dynamic_loss_scale import DynamicLossScaleState, dynamic_loss_scale
from jmp_amp._loss_scale._find_state import find_state
from jmp_amp._loss_scale._grad import LOSS_SCALE, grad, value_and_grad
from jmp_amp._loss_scale._health import LossScaleError, check_health
from jmp_amp._loss_scale._leaves import is_hole
from jmp_amp._loss_scale._loss_scale import LossScale
from jmp_amp._loss_scale._loss_scale_state import LossScaleState
from jmp_amp._loss_scale._nonfinite_leaves import count_nonfinite, describe_nonfinite
from jmp_amp._loss_scale._read_and_set import get_loss_scale, metrics, set_loss_scale
from jmp_amp._loss_scale._unscale_and_check import UnscaleAndCheckState, unscale_and_check
