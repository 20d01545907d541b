"""Monitors of a training run: a status line in the terminal, and a plot of its history."""

from jmp_amp._watch._live import LiveView, live
from jmp_amp._watch._plot_history import plot_history

__all__ = [
    "LiveView",
    "live",
    "plot_history",
]
