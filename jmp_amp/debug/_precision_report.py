"""`PrecisionReport`: the report of `explain`."""

import dataclasses
import html
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jmp_amp._autocast import OpSite, matches
from jmp_amp.debug._precision_diff import PrecisionDiff
from jmp_amp.debug._precision_table import COLUMNS, grouped_rows, headline, notes, short_dtype
from jmp_amp.debug._table import format_table


@dataclasses.dataclass(frozen=True)
class PrecisionReport:
    """The dtypes that autocast chose for each op of a program, and why; `explain` returns it.

    `print` shows a table of the op sites, grouped by module; modules that differ in numbers only (`layer_0`, `layer_1`)
    share a group. `rich.print` adds colors. A notebook shows a page with a collapsible section for each module.

    Attributes:
        rows: an `OpSite` for each op: direction, module, source, primitive, class, reason, input, compute and output
            dtypes, number of runs, FLOPs and bytes.
        dtype: the compute dtype.
        casts: the number of casts between floating dtypes that the program runs, including the backward pass.
        kept: by dtype, the bytes of the residuals: values that the backward pass reads from the forward pass, except
            arguments. None if JAX cannot differentiate the program, such as a `while_loop`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.explain(lambda w, x: jnp.exp(x @ w))(jnp.ones((3, 2)), jnp.ones((4, 3)))
        >>> [(row.primitive, row.compute) for row in report.select(direction="forward").rows]
        [('dot_general', 'float16'), ('exp', 'float32')]
        >>> report.summary()["matmul_flops"]
        {'float16': 1.0}
    """

    rows: tuple[OpSite, ...]
    dtype: str
    casts: int
    kept: dict[str, int] | None
    _explain_again: Callable[..., "PrecisionReport"] | None = dataclasses.field(default=None, repr=False, compare=False)

    def summary(self) -> dict[str, Any]:
        """Returns the summary of the report.

        Returns:
            A dict with `dtype`; `matmul_flops`, the shares of the FLOPs of products and convolutions by compute dtype,
            including the backward pass, where `"float8"` counts all float8 dtypes; `activation_bytes`, the share of
            dtypes of less than 32 bits in the bytes of the residuals, before XLA rematerializes any (None without a
            backward pass); `casts`; and `unknown`, the names of the primitives without a rule.
        """
        return {
            "dtype": self.dtype,
            "matmul_flops": _shares((row.compute, row.flops) for row in self.rows),
            "activation_bytes": None if self.kept is None else _low_precision_share(self.kept.items()),
            "casts": self.casts,
            "unknown": sorted({row.primitive for row in self.rows if row.why == "unknown"}),
        }

    def select(self, pattern: str = "*", **fields: str) -> "PrecisionReport":
        """Returns a report with the rows whose module matches `pattern` and whose fields equal `fields`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import jmp_amp as amp
            >>> report = amp.explain(lambda w, x: jnp.tanh(x @ w))(jnp.ones((2, 2)), jnp.ones((2, 2)))
            >>> [row.compute for row in report.select(primitive="dot_general").rows]
            ['float16', 'float16', 'float16']
        """
        matching = (row for row in self.rows if matches(row.module, pattern))
        rows = tuple(row for row in matching if all(getattr(row, name) == value for name, value in fields.items()))
        return dataclasses.replace(self, rows=rows)

    def diff(self, other: "PrecisionReport | None" = None, **options: Any) -> "PrecisionDiff":
        """Returns the differences to another report, or to the same call under other options of `autocast`.

        Args:
            other: the other report. None explains the call again with `options`.
            **options: `dtype` and the other options of `explain`.

        Raises:
            TypeError: `other` is None, and the report does not come from `explain`.
        """
        if other is None:
            if self._explain_again is None:
                raise TypeError("this report does not come from `explain`, so `diff` needs another report as `other`")
            other = self._explain_again(**options)
        return PrecisionDiff(self, other)

    def to_json(self, **options: Any) -> str:
        """Returns the summary and all rows as JSON; `options` are those of `json.dumps`."""
        rows = [row._asdict() for row in self.rows]
        return json.dumps({"summary": self.summary(), "rows": rows}, **options)

    def __str__(self) -> str:
        lines, printed = [headline(self.summary())], self._printed_rows()
        for title, rows in grouped_rows(printed):
            lines += ["", title, format_table([COLUMNS, *rows], align_right=False)]
        return "\n".join([*lines, "", *notes(printed, self.rows)])

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Column, Table

        printed = self._printed_rows()
        yield headline(self.summary())
        for title, rows in grouped_rows(printed):
            yield f"\n[bold]{title}"
            widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
            widths[-1] = 0  # a narrow console truncates the source first
            columns = [Column(name, no_wrap=True, min_width=n) for name, n in zip(COLUMNS, widths, strict=True)]
            table = Table(*columns, box=None, padding=(0, 1, 0, 0), header_style="dim")
            for row in rows:
                table.add_row(*row, style="" if row[4] == short_dtype("float32") else "green")
            yield table
        yield "\n".join(["", *notes(printed, self.rows)])

    def _printed_rows(self) -> tuple[OpSite, ...]:
        """Returns the rows of the forward pass; all rows if none belongs to the forward pass."""
        return tuple(row for row in self.rows if row.direction == "forward") or self.rows

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(headline(self.summary()))}</p>"]
        for title, rows in grouped_rows(self.rows):
            cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
            head = "".join(f"<th>{column}</th>" for column in COLUMNS)
            parts.append(f"<details><summary>{html.escape(title)}</summary><table>{head}{cells}</table></details>")
        return "".join([*parts, *(f"<p>{html.escape(line)}</p>" for line in notes(self.rows, self.rows))])


def _shares(sizes: Iterable[tuple[str, int]]) -> dict[str, float]:
    """Returns the share of each dtype in the sum of sizes, the largest first."""
    total: Counter[str] = Counter()
    for dtype, size in sizes:
        total["float8" if dtype.startswith("float8") else dtype] += size
    return {dtype: size / total.total() for dtype, size in total.most_common() if size}


def _low_precision_share(sizes: Iterable[tuple[str, int]]) -> float:
    """Returns the low-precision share of the sum of sizes by dtype."""
    total: Counter[bool] = Counter()
    for dtype, size in sizes:
        total[re.search(r"float(16|[84]_)", dtype) is not None] += size
    return total[True] / max(sum(total.values()), 1)
