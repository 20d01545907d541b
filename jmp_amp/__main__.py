"""`python -m jmp_amp` prints the facts for a bug report: versions and devices."""

import collections
import contextlib
import importlib.metadata
import platform
from collections.abc import Iterator

import jax

_PACKAGES = ("jmp-amp", "jax", "jaxlib", "optax", "chex", "numpy", "flax", "equinox", "dm-haiku", "keras")


def facts() -> Iterator[str]:
    """Yields the lines that `python -m jmp_amp` prints, the versions before JAX looks for devices."""
    yield f"Python {platform.python_version()}, {platform.platform()}"
    for package in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{package} {importlib.metadata.version(package)}"
    devices = collections.Counter((device.platform, device.device_kind) for device in jax.devices())
    for (backend, kind), count in sorted(devices.items()):
        yield f"{count} x {kind} ({backend})"


if __name__ == "__main__":
    for line in facts():
        print(line, flush=True)  # a log has the versions even if JAX hangs while it looks for devices
