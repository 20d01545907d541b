"""The device that a program is traced for, and the file in which `tune` writes what was fastest on its kind.

A file holds for one version of JAX and of the kernels. In any other case XLA runs: nothing is assumed to be faster
before it was measured on the user's device.
"""

import functools
import hashlib
import json
import os
import pathlib
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

SWITCH = "JMP_AMP_KERNELS"
KERNELS = ("mosaic_gpu", "triton")


def target_device() -> Any:
    """Returns the device that programs are traced for: the first, or one that a mesh describes in place of it."""
    device = jax.devices()[0]
    # A program can be compiled for a device that is not present (`AbstractDevice`).
    described = jax.sharding.get_abstract_mesh().abstract_device
    return device if described is None or described.device_kind == device.device_kind else described


def device_kind() -> str | None:
    """Returns the kind of GPU that programs are traced for, or `None` for other devices."""
    device = target_device()
    return device.device_kind if device.platform == "gpu" else None


def compute_capability(device: Any) -> float | None:
    """Returns the compute capability of an NVIDIA GPU, or `None` for other devices and those that are not present."""
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; not a number for AMD GPUs
    return float(capability) if re.fullmatch(r"\d+\.\d+", capability) else None


class Measured(NamedTuple):
    """A kernel that was faster than XLA for arguments of this size or more.

    Attributes:
        implementation: the kernel.
        least_size: the least number of leaves, or of elements for an op on one array.
    """

    implementation: str
    least_size: int


# By op, then by the number of bits of an element. Missing entries mean XLA.
Measurements = Mapping[str, Mapping[int, Measured]]


def fastest_implementation(op: str, dtypes: Iterable[DTypeLike], size: int, kind: str | None = None) -> str:
    """Returns the implementation that was fastest on a device; for arrays on which they differ, `"xla"`.

    Args:
        op: `"check_finite"`, `"unscale_check"`, `"quantize"`, or `"quantize_blocks"` for `quantize` with a block.
        dtypes: the dtypes of the arrays.
        size: the number of leaves, or of elements for an op on one array.
        kind: the kind of the device; `None` is the one that programs are traced for.

    Returns:
        `"xla"` or the name of a kernel, as `python -m pallas_kernels tune` wrote it for this kind of device; `"xla"` if
        nothing was measured there.

    Raises:
        ValueError: the environment variable `JMP_AMP_KERNELS` is neither empty nor `"xla"`.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import fastest_implementation
        >>> fastest_implementation("check_finite", [jnp.float32], 148)  # on a CPU
        'xla'
    """
    measured = measurements(kind or device_kind()).get(op, {})
    entries = (measured.get(8 * np.dtype(dtype).itemsize) for dtype in dtypes)
    is_known = isinstance(size, int)  # a symbolic size is not
    fastest = {entry.implementation if entry and is_known and size >= entry.least_size else "xla" for entry in entries}
    return fastest.pop() if len(fastest) == 1 else "xla"


@functools.cache
def measurements(kind: str | None) -> Measurements:
    """Returns what was measured on a kind of device. Warns of a file that it cannot use, once in a process."""
    switch = os.environ.get(SWITCH, "")
    if switch not in ("", "xla"):
        raise ValueError(f'the environment variable {SWITCH} must be "xla" or empty, got {switch!r}')
    if switch or kind is None:
        return {}
    file = path(kind)
    try:
        content = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
        problem = f"was written with {content['versions']}, and these are {versions()}"
        if content["versions"] == versions():
            return {
                op: {int(bits): _entry(*values) for bits, values in entries.items()}
                for op, entries in content["fastest"].items()
            }
    except FileNotFoundError:
        return {}
    except Exception as error:  # whatever a damaged file holds: a train step runs without it
        problem = f"cannot be read ({type(error).__name__}: {error})"
    warnings.warn(
        f"{file} {problem}; plain JAX runs in place of kernels until `python -m pallas_kernels tune` writes it again",
        stacklevel=2,
    )
    return {}


def _entry(name: str, least_size: int) -> Measured:
    if name not in KERNELS:
        raise ValueError(f"{name!r:.40} is no kernel")
    return Measured(name, int(least_size))


def write(kind: str, fastest: Measurements) -> str:
    """Writes what was measured on a kind of device, and returns the file. A reader sees the old file or the new one."""
    file = path(kind)
    folder = os.path.dirname(file)
    os.makedirs(folder, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, encoding="utf-8") as new:
        json.dump({"versions": versions(), "fastest": fastest}, new, indent=1)
    os.replace(new.name, file)
    measurements.cache_clear()
    return file


def path(kind: str) -> str:
    """Returns the file of a kind of device, in the user's directory for caches."""
    if sys.platform == "win32":
        cache = os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/AppData/Local")
    elif sys.platform == "darwin":
        cache = os.path.expanduser("~/Library/Caches")
    else:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "pallas_kernels", re.sub(r"\W+", "_", kind) + ".json")


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions for which measurements hold: of JAX, and a hash of the sources of the kernels."""
    files = sorted(pathlib.Path(os.path.dirname(__file__)).rglob("*.py"))
    sources = (file.read_bytes() for file in files)
    return {"jax": jax.__version__, "kernels": hashlib.sha256(b"".join(sources)).hexdigest()[:16]}
