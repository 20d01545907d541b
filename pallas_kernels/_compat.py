"""Code that depends on the JAX version, or on deprecated or private parts of JAX."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any


def mosaic_gpu_interpret_params() -> Any:
    """Returns `interpret` for `plgpu.kernel`: Pallas' interpreter, in which unwritten memory is NaN."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # imported here, because it takes a second

    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams()
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams  # until JAX 0.10

    return InterpretGPUParams()


@contextlib.contextmanager
def lowering_kernels() -> Iterator[None]:
    """Sets `check_vma=False` while a kernel is traced and lowered, and silences the warning that Triton is deprecated.

    With `check_vma=True`, JAX requires the axes of `shard_map` over which each output varies, and Triton outputs do not
    have them. During lowering no value varies over an axis, so disabling the check is safe. Mosaic GPU disables it
    itself. JAX 0.11 and newer warn when a Triton kernel is lowered, which is redundant: the caller chose it by name.
    """
    from jax._src import config

    with config._check_vma(False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Triton backend is deprecated", category=DeprecationWarning)
        yield
