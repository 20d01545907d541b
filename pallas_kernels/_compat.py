"""What differs between JAX versions, or is deprecated, in one place."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def interpret_mosaic_gpu() -> Any:
    """The argument of `plgpu.kernel` that runs it in Pallas' interpreter, where what is not written is NaN."""
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # until JAX 0.10

    return InterpretGPUParams()


@contextlib.contextmanager
def deprecated_triton() -> Iterator[None]:
    """From JAX 0.11 lowering a Triton kernel warns; who asks for one by name knows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Triton backend is deprecated", category=DeprecationWarning)
        yield
