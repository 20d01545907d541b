"""What the kernels share: the types of their results, the sizes of their launches, and the primitive.

With one scale for a matrix, a launch that finds the largest magnitudes of `PROGRAMS` parts precedes the cast.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._implementations import ADA, DTYPES, HOPPER, INDEX_LIMIT, define_kernel, load_kernel
from pallas_kernels.quantize import reference

KERNELS = {"mosaic_gpu": HOPPER, "triton": ADA}

TILE = 128  # the rows and columns of a matrix that one program casts

PROGRAMS = 1024  # that look for the largest magnitude: few enough that each program of the cast can read their results


def is_supported(x: jax.Array, implementation: str) -> bool:
    """Returns whether a kernel can read a matrix."""
    if x.dtype not in DTYPES or not 0 < x.size < INDEX_LIMIT:
        return False
    return implementation == "triton" or all(size % TILE == 0 for size in x.shape)


def out_types(x: jax.Array, dtype: Any, block: int | None) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types that a kernel writes: rows, columns, and the scale or the bits of those of both."""
    rows, columns = x.shape
    Shape = jax.ShapeDtypeStruct
    quantized = Shape((rows, columns), dtype), Shape((columns, rows), dtype)
    if block is None:
        return (*quantized, Shape((1,), jnp.float32))
    return (*quantized, Shape((rows, columns // block), jnp.uint8), Shape((columns, rows // block), jnp.uint8))


def run(x: jax.Array, *, dtype: Any, block: int | None, implementation: str, interpret: bool, **_: Any) -> Any:
    """Computes `reference.quantize` with a kernel."""
    kernel = load_kernel(__package__, implementation)
    rows, columns, *scales = kernel(x, dtype=dtype, block=block, interpret=interpret)
    return [rows, columns, *([scales[0][0]] if block is None else map(reference.as_scales, scales))]


quantize_p = define_kernel("quantize", reference.quantize, run)
