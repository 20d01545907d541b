"""GPU kernels for loss scaling, each beside the plain JAX function that defines its result.

The package stands alone: it needs JAX and nothing of `jmp_amp`. An op is a folder; its `reference.py` is both the
oracle of the tests and what runs where no kernel can.
"""

from pallas_kernels.check_finite.reference import check_finite

__all__ = ["check_finite"]
