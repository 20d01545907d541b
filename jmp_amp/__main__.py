"""`python -m jmp_amp` prints the facts for a bug report: versions, devices, and the kernel that each device uses."""

import collections
import contextlib
import importlib.metadata
import platform
from collections.abc import Iterator

import jax

from pallas_kernels._measured import fastest_implementation, measurements

_PACKAGES = ("jmp-amp", "jax", "jaxlib", "optax", "chex", "numpy", "flax", "equinox", "dm-haiku", "keras")


def facts() -> Iterator[str]:
    """Yields the lines that `python -m jmp_amp` prints, the versions before JAX looks for devices."""
    yield f"Python {platform.python_version()}, {platform.platform()}"
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{package} {importlib.metadata.version(package)}"
    devices = collections.Counter((device.platform, device.device_kind) for device in jax.devices())
    for (backend, kind), count in sorted(devices.items()):
        implementation = fastest_implementation("check_finite", ["float32"], 100, kind)
        reason = "fastest in measurements" if measurements(kind) else "default, no measurements on this device"
        yield f"{count} x {kind} ({backend}); finite check by {implementation} ({reason})"


if __name__ == "__main__":
    for line in facts():
        print(line, flush=True)  # a log has the versions even if JAX hangs while it looks for devices
