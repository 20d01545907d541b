"""The interfaces of other systems: torch's state dict, apex's `initialize`."""

from jmp_amp.interop import apex, torch

__all__ = ["apex", "torch"]
