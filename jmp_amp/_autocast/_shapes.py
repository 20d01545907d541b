"""Sizes of arrays, which may be symbolic, and the axes along which their elements differ."""

import bisect
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Axes = frozenset[int]
Shape = tuple[Any, ...]


def varying(shape: Shape | None) -> Axes:
    """Returns the axes of more than one element."""
    # A symbolic dimension can only be compared for equality.
    return frozenset(i for i, n in enumerate(shape or ()) if n != 1)


# How an op that moves an array moves axes of it, from its parameters and the shapes before and after; None if that is
# not known.
MoveAxes = Callable[[Mapping[str, Any], Shape, Shape, Axes], Axes | None]


def broadcast_axes(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> Axes:
    """Moves axes through a broadcast."""
    return frozenset(int(params["broadcast_dimensions"][axis]) for axis in axes)


def squeeze_axes(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> Axes:
    """Moves axes through the removal of others."""
    kept = [axis for axis in range(len(before)) if axis not in params["dimensions"]]
    return frozenset(i for i, axis in enumerate(kept) if axis in axes)


def transpose_axes(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> Axes:
    """Moves axes through a permutation."""
    return frozenset(i for i, axis in enumerate(params["permutation"]) if axis in axes)


def reshape_axes(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> Axes | None:
    """Moves axes through a reshape.

    An axis that merges several axes, or is a part of one, counts if any of these counts.
    """
    if params["dimensions"] is not None:
        return None
    olds, news = sorted(varying(before)), sorted(varying(after))
    if [before[i] for i in olds] == [after[i] for i in news]:
        return frozenset(new for old, new in zip(olds, news, strict=True) if old in axes)
    if not all(isinstance(n, int) and n for n in (*before, *after)):
        return None
    # Axes belong together if no boundary that both shapes have lies between them.
    ends, new_ends = (
        list(itertools.accumulate([n[i] for i in kept], operator.mul)) for n, kept in ((before, olds), (after, news))
    )
    shared = sorted(set(ends) & set(new_ends))
    found = {bisect.bisect_left(shared, end) for axis, end in zip(olds, ends, strict=True) if axis in axes}
    return frozenset(i for i, end in zip(news, new_ends, strict=True) if bisect.bisect_left(shared, end) in found)


def no_axes(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> None:
    """Returns None: the places of the axes depend on more than the axes."""


def same_axes(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> Axes | None:
    """Returns the axes themselves, if there are as many as before."""
    return axes if len(before) == len(after) else None


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
