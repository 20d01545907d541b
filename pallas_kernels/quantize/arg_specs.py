"""Shapes of the matrices on which the kernels are compiled and timed."""

from typing import Any

import jax

Shape = jax.ShapeDtypeStruct

LAYER = 8192, 4096, 4096  # tokens, and the features that a layer reads and returns


def matrices(dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of small and large weights, and of the activations of a large layer."""
    shapes = (512, 512), (2048, 2048), LAYER[:2]
    return {f"{rows} x {columns}": Shape((rows, columns), dtype) for rows, columns in shapes}
