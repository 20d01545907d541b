"""Tools that debug precision: they run on the host, outside of `jit`."""

from jmp_amp.debug._budget import ErrorBudget, error_budget
from jmp_amp.debug._compare import Comparison, ErrorRow, compare
from jmp_amp.debug._emulation import Rounding
from jmp_amp.debug._explain import PrecisionDiff, PrecisionReport
from jmp_amp.debug._explain import explain as explain  # public as `jmp_amp.explain`
from jmp_amp.debug._fastest import Timing, Timings, fastest
from jmp_amp.debug._nodes import Summary
from jmp_amp.debug._nonfinite import NonFinite, first_nonfinite
from jmp_amp.debug._scaling import check_loss_scaling
from jmp_amp.debug._suggest import suggest_rules
from jmp_amp.debug._underflow import LeafUnderflow, Underflow, underflow

__all__ = [
    "Comparison",
    "ErrorBudget",
    "ErrorRow",
    "LeafUnderflow",
    "NonFinite",
    "PrecisionDiff",
    "PrecisionReport",
    "Rounding",
    "Summary",
    "Timing",
    "Timings",
    "Underflow",
    "check_loss_scaling",
    "compare",
    "error_budget",
    "fastest",
    "first_nonfinite",
    "suggest_rules",
    "underflow",
]
