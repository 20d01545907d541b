"""`python -m jmp_amp`: what a bug report should say: versions, devices, and which kernels would run on them."""

import importlib.metadata
import platform

import jax

from pallas_kernels.finite_check.config import FASTEST, fastest

_PACKAGES = ("jmp-amp", "jax", "jaxlib", "optax", "chex", "numpy", "flax", "equinox", "dm-haiku", "keras")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def report() -> str:
    """Returns the lines that are printed."""
    lines = [f"Python {platform.python_version()}, {platform.platform()}"]
    lines += [f"{package} {version}" for package in _PACKAGES if (version := _version(package))]
    kinds = sorted({(device.platform, device.device_kind) for device in jax.devices()})
    for backend, kind in kinds:
        count = sum(device.device_kind == kind for device in jax.devices())
        chosen = fastest(kind, "check_finite", leaves=100)
        why = "measured to be fastest" if kind in FASTEST else "nothing was measured on this device"
        lines.append(f"{count} x {kind} ({backend}); finite check by {chosen}: {why}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
