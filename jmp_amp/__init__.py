"""Automatic mixed precision for JAX: `import jmp_amp as amp`."""

import importlib
from typing import TYPE_CHECKING, Any

from jmp_amp._autocast import autocast, full_precision, precision
from jmp_amp._cast_inputs import cast_inputs
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
    metrics,
    set_loss_scale,
    unscale_and_check,
    value_and_grad,
)
from jmp_amp._optimizer_state import LowPrecisionState, low_precision_state
from jmp_amp._params import LowPrecisionParamsState, cast_params, is_norm, low_precision_params
from jmp_amp._policy import Policy, get_policy
from jmp_amp._trees import all_finite
from jmp_amp._version import __version__

if TYPE_CHECKING:
    from jmp_amp import compat, debug, interop, watch
    from jmp_amp.debug import explain

# In the order of the data flow.
__all__ = [  # noqa: RUF022
    "Policy",
    "get_policy",
    "autocast",
    "full_precision",
    "precision",
    "cast_inputs",
    "explain",
    "LossScale",
    "LossScaleState",
    "value_and_grad",
    "grad",
    "unscale_and_check",
    "UnscaleAndCheckState",
    "dynamic_loss_scale",
    "DynamicLossScaleState",
    "get_loss_scale",
    "set_loss_scale",
    "metrics",
    "check_health",
    "LossScaleError",
    "all_finite",
    "cast_params",
    "is_norm",
    "low_precision_params",
    "LowPrecisionParamsState",
    "low_precision_state",
    "LowPrecisionState",
    "watch",
    "debug",
    "interop",
    "compat",
    "__version__",
]

# Imported on first use: a training job that debugs nothing starts without them.
_MODULES = ("compat", "debug", "interop", "watch")


def __getattr__(name: str) -> Any:
    if name == "explain":
        return importlib.import_module("jmp_amp.debug").explain
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"jmp_amp.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
