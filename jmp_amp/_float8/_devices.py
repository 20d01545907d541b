"""Which devices multiply float8 matrices."""

from collections.abc import Sequence

import jax

# Parts of the names of GPUs and TPUs. A GPU that is not named here has the units: all do since Ada (sm_89), of 2022.
_GPUS_WITHOUT = (
    "P100",
    "V100",
    "TITAN",
    "T4",
    "Quadro",
    "A100",
    "A30",
    "A40",
    "A10",
    "A16",
    "RTX 20",
    "RTX 30",
    "RTX A",
)
_TPUS_WITH = ("TPU7", "TPU v7")
_LEAST_CAPABILITY = (8, 9)


def device_without_float8(platforms: Sequence[str]) -> str | None:
    """Returns the name of a device that a program is lowered for and that has no float8 units; None if all have them.

    Args:
        platforms: the platforms that the program is lowered for: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
    """
    return next((name for platform in platforms if (name := _without_float8(platform)) is not None), None)


def _without_float8(platform: str) -> str | None:
    kind, capability = _target(platform)
    if platform == "cuda":
        is_old = any(name in kind for name in _GPUS_WITHOUT) if capability is None else capability < _LEAST_CAPABILITY
        return kind if is_old else None
    has_units = platform == "tpu" and any(name in kind for name in _TPUS_WITH)
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
