"""The state of an optimizer in 8 or 16 bits between steps."""

from jmp_amp._optimizer_state._transformation import LowPrecisionState, low_precision_state
