"""GPU kernels for loss scaling, each beside the plain JAX function that defines its result.

The package stands alone: it needs JAX and nothing of `jmp_amp`. Ops that share a kernel share a folder; its
`reference.py` is both the oracle of the tests and what runs where no kernel can.
"""

from pallas_kernels.finite_check.api import check_finite, unscale_check

__all__ = ["check_finite", "unscale_check"]
