"""Takes some items out of a list, and puts them back."""

from collections.abc import Iterable, Sequence
from typing import Any


def chosen(mask: Sequence[bool], items: Iterable[Any]) -> list[Any]:
    """Returns the items in the places of the mask."""
    return [item for item, is_chosen in zip(items, mask, strict=True) if is_chosen]


def merged(mask: Sequence[bool], items: Iterable[Any], others: Iterable[Any]) -> list[Any]:
    """Returns `others` with `items` in the places of the mask."""
    it = iter(items)
    return [next(it) if is_chosen else other for is_chosen, other in zip(mask, others, strict=True)]
