"""Low-precision parameters: casts, float32 master weights, stochastic rounding, apex's opt levels."""

from jmp_amp._params._cast_params import cast_params, is_norm
from jmp_amp._params._initialize import initialize
from jmp_amp._params._master_weights import MasterWeightsState, master_weights
from jmp_amp._params._rounded_weights import RoundedWeightsState, rounded_weights

__all__ = [
    "MasterWeightsState",
    "RoundedWeightsState",
    "cast_params",
    "initialize",
    "is_norm",
    "master_weights",
    "rounded_weights",
]
