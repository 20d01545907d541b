"""Compares sizes, which may be symbolic: then only equality is known."""

import math
from collections.abc import Sequence
from typing import Any


def is_smaller(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether an array of a shape is known to have fewer elements than one of another shape.

    Dimensions that both have cancel. Of those that are left, symbolic ones are only known to be another size than 1.
    """
    mine, others = list(shape), list(other)
    for n in shape:
        if n in others:
            mine.remove(n)
            others.remove(n)
    size, other_size = math.prod(mine), math.prod(others)
    if isinstance(size, int) and isinstance(other_size, int):
        return size < other_size
    return size == 1 and other_size != 1
