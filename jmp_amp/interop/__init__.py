"""The interfaces of other systems: torch's state dict, DeepSpeed's config, apex's `initialize`."""

from jmp_amp.interop import apex, deepspeed, torch

__all__ = ["apex", "deepspeed", "torch"]
