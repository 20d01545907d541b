"""GPU kernels for loss scaling, and the plain JAX functions that define their results.

The package needs only JAX; it does not import `jmp_amp`. Each folder contains the ops that share a kernel. Its
`reference.py` is the oracle of the tests, and the implementation for programs that cannot use a kernel.
"""

from pallas_kernels.finite_check.api import check_finite, unscale_check

__all__ = ["check_finite", "unscale_check"]
