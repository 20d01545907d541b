"""GPU kernels for mixed precision, and the plain JAX functions that define their results.

The package needs only JAX; it does not import `jmp_amp`. Each folder contains the ops that share a kernel. Its
`reference.py` is the oracle of the tests, and the implementation for programs that cannot use a kernel. `python -m
pallas_kernels tune` times the kernels on a GPU, which then runs those that are faster than XLA.
"""

from pallas_kernels._measured import fastest_implementation
from pallas_kernels.finite_check.api import check_finite, unscale_check
from pallas_kernels.quantize.api import Quantized, QuantizedBlocks, quantize

__all__ = ["Quantized", "QuantizedBlocks", "check_finite", "fastest_implementation", "quantize", "unscale_check"]
