"""The relative error of arrays, in float64 on the host."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def relative_error(x: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Returns the norm of `x - reference`, for all arrays together, over the norm of `reference`.

    The error is infinite if `x` is not finite, or if `reference` is 0 and `x` is not.
    """
    if not all(np.isfinite(a).all() for a in x):
        return math.inf
    difference = norm([a - b for a, b in zip(x, reference, strict=True)])
    size = norm(reference)
    return difference / size if size else (math.inf if difference else 0.0)


def norm(arrays: Sequence[np.ndarray]) -> float:
    """Returns the Euclidean norm of all arrays together."""
    return math.hypot(*(float(np.linalg.norm(x)) for x in arrays))


def flat_on_host(x: Any) -> np.ndarray:
    """Returns an array as a float64[size] NumPy array."""
    return np.asarray(jax.device_get(x)).astype(np.float64).ravel()
