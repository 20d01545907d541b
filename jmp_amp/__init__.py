"""Automatic mixed precision for JAX: `import jmp_amp as amp`."""

from jmp_amp import debug
from jmp_amp._autocast import autocast, full_precision, precision
from jmp_amp._explain import explain
from jmp_amp._grad import grad, value_and_grad
from jmp_amp._health import LossScaleError, check_health, get_loss_scale, metrics, set_loss_scale
from jmp_amp._initialize import initialize
from jmp_amp._live import LiveView, live
from jmp_amp._loss_scale import LossScale, LossScaleState
from jmp_amp._master import MasterWeightsState, RoundedWeightsState, master_weights, rounded_weights
from jmp_amp._params import cast_params, is_norm
from jmp_amp._plot_history import plot_history
from jmp_amp._policy import Policy, get_policy
from jmp_amp._report import PrecisionDiff, PrecisionReport
from jmp_amp._state_dict import load_state_dict, state_dict
from jmp_amp._suggest_rules import suggest_rules
from jmp_amp._transform import DynamicLossScaleState, dynamic_loss_scale
from jmp_amp._tree import all_finite, cast_to_full, cast_to_half, half_dtype, select_tree
from jmp_amp._unscale_and_check import UnscaleAndCheckState, unscale_and_check
from jmp_amp._version import __version__

# In the order of the data flow.
__all__ = [  # noqa: RUF022
    "Policy",
    "get_policy",
    "cast_to_half",
    "cast_to_full",
    "cast_params",
    "is_norm",
    "half_dtype",
    "all_finite",
    "select_tree",
    "autocast",
    "full_precision",
    "precision",
    "explain",
    "suggest_rules",
    "PrecisionReport",
    "PrecisionDiff",
    "LossScale",
    "LossScaleState",
    "value_and_grad",
    "grad",
    "unscale_and_check",
    "UnscaleAndCheckState",
    "dynamic_loss_scale",
    "DynamicLossScaleState",
    "master_weights",
    "MasterWeightsState",
    "rounded_weights",
    "RoundedWeightsState",
    "initialize",
    "get_loss_scale",
    "set_loss_scale",
    "metrics",
    "live",
    "LiveView",
    "plot_history",
    "check_health",
    "LossScaleError",
    "state_dict",
    "load_state_dict",
    "debug",
    "__version__",
]
