"""Low-precision parameters: casts, float32 masters, stochastic rounding, and apex's levels."""

from jmp_amp._params._cast_params import cast_params, is_norm
from jmp_amp._params._initialize import initialize
from jmp_amp._params._master import MasterWeightsState, RoundedWeightsState, master_weights, rounded_weights

__all__ = [
    "MasterWeightsState",
    "RoundedWeightsState",
    "cast_params",
    "initialize",
    "is_norm",
    "master_weights",
    "rounded_weights",
]
