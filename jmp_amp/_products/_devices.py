"""The devices that products are traced for; which have float8 units, and whether others compute as if they had."""

import contextlib
import contextvars
import math
import os
import re
from collections.abc import Iterator

import jax

from pallas_kernels._devices import compute_capability, target_device

EMULATE = "JMP_AMP_EMULATE_FLOAT8"

_is_emulated = contextvars.ContextVar("is_emulated", default=False)


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Traces products that run in float8 on every device: on one without float8 units, they are as slow as float32."""
    token = _is_emulated.set(True)
    try:
        yield
    finally:
        _is_emulated.reset(token)


def is_emulated() -> bool:
    """Whether products that are traced now run in float8 on every device."""
    return _is_emulated.get() or os.environ.get(EMULATE, "0") not in ("", "0")


# Parts of the names of GPUs and TPUs. A GPU that is not named here has the units, as all do since Ada, of 2022.
_GPUS_WITHOUT = re.compile(r"P100|V100|TITAN|T4|Quadro|A100|A30|A40|A10|A16|RTX [23]0|RTX A")
_ADA = 8.9  # compute capability
_TPUS_WITH = re.compile("TPU7|TPU v7")


def without_float8(platform: str) -> str | None:
    """Returns the name of the device that a program for a platform runs on, or None if it has float8 units.

    Args:
        platform: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
    """
    device = target_device()
    is_present = device.platform == {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    kind = device.device_kind if is_present else ""  # a program can be lowered for a platform that is not here
    if platform == "cuda":
        capability = compute_capability(device)
        named = bool(_GPUS_WITHOUT.search(kind))
        return kind if (named if capability is None else capability < _ADA) else None
    has_units = platform == "tpu" and _TPUS_WITH.search(kind)
    return None if has_units else kind or platform


def is_for_nvidia() -> bool:
    """Whether the program that is traced now is for NVIDIA GPUs."""
    device = target_device()
    return device.platform == "gpu" and not device.device_kind.startswith("AMD")


def automatic_devices() -> int:
    """Returns over how many devices the compiler may split the arrays of the program that is traced now."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty and mesh.abstract_device is None:
        return jax.device_count()
    return math.prod(n for name, n in mesh.shape.items() if name not in mesh.manual_axes)  # of `shard_map`
