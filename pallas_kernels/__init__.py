"""GPU kernels for mixed precision, and the plain JAX functions that define their results.

The package needs only JAX; it does not import `jmp_amp`. Each folder contains the ops that share a kernel. Its
`reference.py` is the oracle of the tests, and what runs unless a caller passes a kernel as `implementation`.
"""

from pallas_kernels.finite_check.api import check_finite, unscale_check

__all__ = ["check_finite", "unscale_check"]
