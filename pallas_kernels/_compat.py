"""What differs between JAX versions, or is deprecated, in one place."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from jax._src import config


def interpret_mosaic_gpu() -> Any:
    """The argument of `plgpu.kernel` that runs it in Pallas' interpreter, where what is not written is NaN."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # here, for it takes a second to import

    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # until JAX 0.10

    return InterpretGPUParams()


@contextlib.contextmanager
def lowering_kernels() -> Iterator[None]:
    """What holds while a kernel is traced and lowered, where no value has an axis to vary over any more.

    Triton's outputs do not say over which axes of `shard_map` they vary, which `check_vma=True` asks for; Mosaic GPU
    sets the same option itself. From JAX 0.11 lowering a Triton kernel warns; who asks for one by name knows.
    """
    with config._check_vma(False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Triton backend is deprecated", category=DeprecationWarning)
        yield
