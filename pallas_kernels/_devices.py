"""The device that a program is traced for."""

import re
from typing import Any

import jax


def target_device() -> Any:
    """Returns the device that programs are traced for: the first, or one that a mesh describes in place of it."""
    device = jax.devices()[0]
    # A program can be compiled for a device that is not present (`AbstractDevice`).
    described = jax.sharding.get_abstract_mesh().abstract_device
    return device if described is None or described.device_kind == device.device_kind else described


def compute_capability(device: Any) -> float | None:
    """Returns the compute capability of an NVIDIA GPU, or `None` for other devices and those that are not present."""
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; not a number for AMD GPUs
    return float(capability) if re.fullmatch(r"\d+\.\d+", capability) else None
