"""Plain-text tables."""

from collections.abc import Iterable, Sequence


def format_table(rows: Iterable[Sequence[str]], align_right: bool = True) -> str:
    """Returns rows of equal length as lines with aligned columns.

    Args:
        rows: the cells, by row.
        align_right: whether to align all columns but the first to the right, as for numbers.
    """
    rows = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = str.rjust if align_right else str.ljust
    lines = (
        "  ".join([row[0].ljust(widths[0]), *(align(x, n) for x, n in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def format_percent(share: float) -> str:
    """Returns a share in percent; a small positive share is `<0.1%` rather than `0.0%`."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return "0" if share == 0 else f"{share:.1%}"
