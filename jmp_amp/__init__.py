"""Automatic mixed precision for JAX: `import jmp_amp as amp`."""

import importlib
from typing import TYPE_CHECKING, Any

from jmp_amp._autocast import autocast, full_precision, precision
from jmp_amp._loss_scale import (
    DynamicLossScaleState,
    LossScale,
    LossScaleError,
    LossScaleState,
    UnscaleAndCheckState,
    check_health,
    dynamic_loss_scale,
    get_loss_scale,
    grad,
    load_state_dict,
    metrics,
    set_loss_scale,
    state_dict,
    unscale_and_check,
    value_and_grad,
)
from jmp_amp._params import (
    MasterWeightsState,
    RoundedWeightsState,
    cast_params,
    initialize,
    is_norm,
    master_weights,
    rounded_weights,
)
from jmp_amp._policy import Policy, all_finite, cast_to_full, cast_to_half, get_policy, half_dtype, select_tree
from jmp_amp._version import __version__
from jmp_amp._watch import LiveView, live, plot_history

if TYPE_CHECKING:
    from jmp_amp import debug
    from jmp_amp.debug import PrecisionDiff, PrecisionReport, explain, suggest_rules

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

# Imported on first use: a training job that debugs nothing starts without them.
_FROM_DEBUG = {"explain", "suggest_rules", "PrecisionReport", "PrecisionDiff"}


def __getattr__(name: str) -> Any:
    if name not in _FROM_DEBUG | {"debug"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module("jmp_amp.debug")
    return getattr(module, name) if name in _FROM_DEBUG else module


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
