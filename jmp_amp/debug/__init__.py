"""Host-side tools around traced code: see what precision does."""

from jmp_amp._loss_scale import describe_nonfinite, nonfinite_leaves
from jmp_amp.debug._compare import compare
from jmp_amp.debug._comparison import Comparison, ErrorRow
from jmp_amp.debug._explain import explain
from jmp_amp.debug._first_nonfinite import first_nonfinite
from jmp_amp.debug._loss_scaling import check_loss_scaling
from jmp_amp.debug._nonfinite_report import NonFinite, Values
from jmp_amp.debug._precision_report import PrecisionDiff, PrecisionReport
from jmp_amp.debug._suggest_rules import suggest_rules
from jmp_amp.debug._underflow import LeafUnderflow, Underflow, underflow

__all__ = [
    "Comparison",
    "ErrorRow",
    "LeafUnderflow",
    "NonFinite",
    "PrecisionDiff",
    "PrecisionReport",
    "Underflow",
    "Values",
    "check_loss_scaling",
    "compare",
    "describe_nonfinite",
    "explain",
    "first_nonfinite",
    "nonfinite_leaves",
    "suggest_rules",
    "underflow",
]
