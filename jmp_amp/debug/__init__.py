"""Tools that debug precision: they run on the host, outside of `jit`."""

# `name as name`: public as `jmp_amp.name`, not as `jmp_amp.debug.name`.
from jmp_amp._loss_scale import count_nonfinite, describe_nonfinite
from jmp_amp.debug._check_loss_scaling import check_loss_scaling
from jmp_amp.debug._compare import compare
from jmp_amp.debug._comparison import Comparison, ErrorRow
from jmp_amp.debug._explain import explain as explain
from jmp_amp.debug._first_nonfinite import first_nonfinite
from jmp_amp.debug._nonfinite import NonFinite
from jmp_amp.debug._precision_diff import PrecisionDiff
from jmp_amp.debug._precision_report import PrecisionReport
from jmp_amp.debug._suggest_rules import suggest_rules
from jmp_amp.debug._underflow import underflow
from jmp_amp.debug._underflow_report import LeafUnderflow, Underflow
from jmp_amp.debug._values import Values

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
    "count_nonfinite",
    "describe_nonfinite",
    "first_nonfinite",
    "suggest_rules",
    "underflow",
]
