"""Tables as plain text."""

from collections.abc import Iterable, Sequence


def aligned(rows: Iterable[Sequence[str]], numbers: bool = True) -> str:
    """Returns rows of equal length as aligned lines.

    The first column is aligned to the left, and the others to the right if they hold numbers.
    """
    rows = [tuple(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    align = str.rjust if numbers else str.ljust
    lines = (
        "  ".join([row[0].ljust(widths[0]), *(align(x, n) for x, n in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def percent(share: float) -> str:
    """Returns a share so that what is not 0 does not look like it."""
    if 0 < share < 0.0005:
        return "<0.1%"
    return "0" if share == 0 else f"{share:.1%}"
