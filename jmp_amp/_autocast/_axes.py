"""Follows the axes along which a value varies through ops that move it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Axes = frozenset[int]
Shape = tuple[Any, ...]


def varying(shape: Shape | None) -> Axes:
    """Returns the axes of more than one element."""
    # A symbolic dimension can only be compared for equality.
    return frozenset(i for i, n in enumerate(shape or ()) if n != 1)


def moved(primitive: str, params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> Axes | None:
    """Returns the positions of `axes` after an op that moves an array; None if they are not known.

    Args:
        primitive: the name of the op.
        params: its parameters.
        before: the shape of the operand.
        after: the shape of the result.
        axes: axes of the operand.
    """
    move = _MOVES.get(primitive)
    if move is not None:
        return move(params, before, after, axes)
    return axes if len(before) == len(after) else None


def _broadcast(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> Axes:
    return frozenset(int(params["broadcast_dimensions"][axis]) for axis in axes)


def _squeeze(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> Axes:
    kept = [axis for axis in range(len(before)) if axis not in params["dimensions"]]
    return frozenset(i for i, axis in enumerate(kept) if axis in axes)


def _transpose(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> Axes:
    return frozenset(i for i, axis in enumerate(params["permutation"]) if axis in axes)


def _reshape(params: Mapping[str, Any], before: Shape, after: Shape, axes: Axes) -> Axes | None:
    """Counts an axis that merges several axes, or is a part of one, if any of these counts."""
    if params["dimensions"] is not None:
        return None
    olds, news = sorted(varying(before)), sorted(varying(after))
    if [before[i] for i in olds] == [after[i] for i in news]:
        return frozenset(new for old, new in zip(olds, news, strict=True) if old in axes)
    if not all(isinstance(n, int) and n for n in (*before, *after)):
        return None
    found: set[int] = set()
    while olds:
        old, new = [olds.pop(0)], [news.pop(0)]
        sizes = before[old[0]], after[new[0]]
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                old.append(olds.pop(0))
                sizes = sizes[0] * before[old[-1]], sizes[1]
            else:
                new.append(news.pop(0))
                sizes = sizes[0], sizes[1] * after[new[-1]]
        found.update(new if axes.intersection(old) else ())
    return frozenset(found)


_MOVES: Mapping[str, Callable[[Mapping[str, Any], Shape, Shape, Axes], Axes | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    # The place of an axis in these depends on more than the axis.
    "gather": lambda *_: None,
    "concatenate": lambda *_: None,
    "pad": lambda *_: None,
}


def sliced(axes: Sequence[Axes]) -> tuple[Axes, ...]:
    """Returns the positions of the axes in slices along the first axis."""
    return tuple(frozenset(axis - 1 for axis in each if axis) for each in axes)
