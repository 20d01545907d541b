"""Which devices have float8 units, and whether those that have none compute as if they had."""

import contextlib
import contextvars
import os
import re
from collections.abc import Iterator

import jax

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


# Parts of the names of GPUs and TPUs. A GPU that is not named here has the units: for one scale a tensor all do since
# Ada (sm_89), of 2022; for blocks all do since Blackwell (sm_100), of 2024.
_BEFORE_ADA = r"P100|V100|TITAN|T4|Quadro|A100|A30|A40|A10|A16|RTX [23]0|RTX A"
_ADA_OR_HOPPER = r"L4|L20|L2\b|H100|H20|H800|RTX 40|Ada"
_GPUS_WITHOUT = {False: re.compile(_BEFORE_ADA), True: re.compile(f"{_BEFORE_ADA}|{_ADA_OR_HOPPER}")}
_LEAST_CAPABILITY = {False: (8, 9), True: (10, 0)}
_TPUS_WITH = re.compile("TPU7|TPU v7")


def without_float8(platform: str, *, blocks: bool = False) -> str | None:
    """Returns the name of the device that a program for a platform runs on, or None if it has float8 units.

    Args:
        platform: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
        blocks: whether the units must take a scale for each block of an operand.
    """
    kind, capability = _target(platform)
    if platform == "cuda":
        named = bool(_GPUS_WITHOUT[blocks].search(kind))
        return kind if (named if capability is None else capability < _LEAST_CAPABILITY[blocks]) else None
    has_units = platform == "tpu" and _TPUS_WITH.search(kind) and not blocks
    return None if has_units else kind or platform


def _target(platform: str) -> tuple[str, tuple[int, ...] | None]:
    """Returns the kind and the compute capability of the device: the one described for the compiler, or else the first.

    The kind is empty if the program is lowered for a platform that this process does not have.
    """
    name = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None and described.platform == name:
        return described.device_kind, None
    if jax.default_backend() != name:
        return "", None
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    return device.device_kind, None if capability is None else tuple(map(int, capability.split(".")))
