"""What `explain` returns: a table of op sites, and how it is shown."""

import dataclasses
import html
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jmp_amp._autocast import REASONS, Explanation, OpSite, matches
from jmp_amp.debug._table import aligned

_COLUMNS = ("op", "class", "why", "in", "compute", "out", "runs", "size", "source")
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}


@dataclasses.dataclass(frozen=True)
class PrecisionReport:
    """What autocast decided for each op of a program.

    Printed, it is a table of the op sites, grouped by module, in which equal modules (`layer_0`, `layer_1`) share a
    line; `rich.print` shows the same in colours, and a notebook as a page whose modules unfold.

    Attributes:
        rows: an `OpSite` each: direction, module, source, primitive, class, why, dtypes in, compute and out, runs,
            FLOPs and bytes.
        dtype: the compute dtype.
        casts: how many casts between floating dtypes the program runs, backward pass included.
        kept: the bytes of what the backward pass reads of the forward pass, arguments aside, by dtype. None where JAX
            cannot differentiate the program, as through a `while_loop`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.explain(lambda w, x: jnp.exp(x @ w))(jnp.ones((3, 2)), jnp.ones((4, 3)))
        >>> [(row.primitive, row.compute) for row in report.select(direction="forward").rows]
        [('dot_general', 'float16'), ('exp', 'float32')]
        >>> report.summary()["matmul_flops"]
        1.0
    """

    rows: tuple[OpSite, ...]
    dtype: str
    casts: int
    kept: dict[str, int] | None
    _again: Callable[..., "PrecisionReport"] | None = dataclasses.field(default=None, repr=False, compare=False)

    def summary(self) -> dict[str, Any]:
        """Returns the shares that matter.

        Returns:
            `dtype`; `matmul_flops`, the share of the FLOPs of products and convolutions, backward pass included, that
            run in less than 32 bits; `activation_bytes`, that share of the bytes that the forward pass keeps for the
            backward pass, before XLA computes some of them again (None without a backward pass); `casts`; and
            `unknown`, the primitives without a rule.
        """
        return {
            "dtype": self.dtype,
            "matmul_flops": _share((row.compute, row.flops) for row in self.rows),
            "activation_bytes": None if self.kept is None else _share(self.kept.items()),
            "casts": self.casts,
            "unknown": sorted({row.primitive for row in self.rows if row.why == "unknown"}),
        }

    def select(self, pattern: str = "*", **fields: str) -> "PrecisionReport":
        """Returns the rows whose module matches a pattern, and whose fields have the values given.

        Examples:
            >>> import jax.numpy as jnp
            >>> import jmp_amp as amp
            >>> report = amp.explain(lambda w, x: jnp.tanh(x @ w))(jnp.ones((2, 2)), jnp.ones((2, 2)))
            >>> [row.compute for row in report.select(primitive="dot_general").rows]
            ['float16', 'float16', 'float16']
        """
        rows = (row for row in self.rows if matches(row.module, pattern))
        kept = tuple(row for row in rows if all(getattr(row, name) == value for name, value in fields.items()))
        return dataclasses.replace(self, rows=kept)

    def diff(self, other: "PrecisionReport | None" = None, **options: Any) -> "PrecisionDiff":
        """Compares with another report, or with that of the same call under other arguments of `autocast`.

        Args:
            other: another report.
            **options: `dtype`, `policy`, `rules` and so on, if there is none.
        """
        if other is None:
            if self._again is None:
                raise TypeError("`diff` needs another report: this one does not know its function any more")
            other = self._again(**options)
        return PrecisionDiff(self, other)

    def to_json(self, **options: Any) -> str:
        """Returns the summary and all rows as JSON; `options` are those of `json.dumps`."""
        rows = [row._asdict() for row in self.rows]
        return json.dumps({"summary": self.summary(), "rows": rows}, **options)

    def __str__(self) -> str:
        lines, shown = [_headline(self)], self._shown()
        for title, rows in _grouped(shown):
            lines += ["", title, aligned([_COLUMNS, *rows], numbers=False)]
        return "\n".join([*lines, "", *_notes(shown, self.rows)])

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Column, Table

        shown = self._shown()
        yield _headline(self)
        for title, rows in _grouped(shown):
            yield f"\n[bold]{title}"
            widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
            widths[-1] = 0  # the source gives way where the console is narrow
            columns = [Column(name, no_wrap=True, min_width=n) for name, n in zip(_COLUMNS, widths, strict=True)]
            table = Table(*columns, box=None, padding=(0, 1, 0, 0), header_style="dim")
            for row in rows:
                table.add_row(*row, style="" if row[4] == _short("float32") else "green")
            yield table
        yield "\n".join(["", *_notes(shown, self.rows)])

    def _shown(self) -> tuple[OpSite, ...]:
        """What is printed: the forward pass, unless there is something else only."""
        return tuple(row for row in self.rows if row.direction == "forward") or self.rows

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(_headline(self))}</p>"]
        for title, rows in _grouped(self.rows):
            cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
            head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
            parts.append(f"<details><summary>{html.escape(title)}</summary><table>{head}{cells}</table></details>")
        return "".join([*parts, *(f"<p>{html.escape(line)}</p>" for line in _notes(self.rows, self.rows))])


@dataclasses.dataclass(frozen=True)
class PrecisionDiff:
    """Where two reports of one program differ: printed, a line for each op whose dtypes do.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.explain(lambda w, x: jnp.tanh(x @ w))(jnp.ones((3, 2)), jnp.ones((4, 3)))
        >>> diff = report.diff(rules={jax.lax.tanh_p: "full"})
        >>> [(before.compute, after.compute) for before, after in diff.changes]
        [('float16', 'float32')]
    """

    before: PrecisionReport
    after: PrecisionReport

    @property
    def changes(self) -> list[tuple[OpSite, OpSite]]:
        """The forward op sites whose compute or output dtypes differ, before and after."""
        keys = ("module", "source", "primitive", "runs")
        befores, afters = (
            _numbered([row for row in report.rows if row.direction == "forward"], keys)
            for report in (self.before, self.after)
        )
        pairs = [(row, afters[key]) for key, row in befores.items() if key in afters]
        return [(a, b) for a, b in pairs if (a.compute, a.output) != (b.compute, b.output)]

    def __str__(self) -> str:
        before, after = self.before.summary(), self.after.summary()
        lines = [f"{name}: {_shown(before[name])} -> {_shown(after[name])}" for name in before]
        modules: dict[tuple[str, ...], list[str]] = {}
        for a, b in self.changes:
            change = a.primitive, f"{_short(a.compute)} -> {_short(b.compute)}", b.why, a.source
            modules.setdefault(change, []).append(a.module)
        rows = [(*change[:3], str(len(found)), _named(found), change[3]) for change, found in modules.items()]
        table = aligned([("op", "compute", "why", "sites", "module", "source"), *rows], numbers=False)
        return "\n".join([*lines, "", table])


def report_of(explanation: Explanation, dtype: str, again: Callable[..., PrecisionReport]) -> PrecisionReport:
    """Returns the report of what was explained."""
    sites, casts, kept = explanation
    return PrecisionReport(tuple(sites), dtype, casts, kept, again)


def _share(sizes: Iterable[tuple[str, int]]) -> float:
    """The share that is in low precision, of sizes by dtype."""
    total: Counter[bool] = Counter()
    for dtype, size in sizes:
        total[_is_low(dtype)] += size
    return total[True] / max(sum(total.values()), 1)


def _is_low(dtype: str) -> bool:
    return re.search(r"float(16|[84]_)", dtype) is not None


def _headline(report: PrecisionReport) -> str:
    summary = report.summary()
    share = summary["activation_bytes"]
    kept = "JAX cannot differentiate it" if share is None else f"{share:.0%} of the bytes kept for the backward pass"
    return (
        f"In {report.dtype}: {summary['matmul_flops']:.0%} of the FLOPs of products, {kept}. {report.casts} casts. "
        f"Primitives without a rule: {', '.join(summary['unknown']) or 'none'}."
    )


def _grouped(rows: Iterable[OpSite]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yields the lines of each module and direction; equal modules and equal sites are one line."""
    groups: dict[tuple[str, str], dict[OpSite, list[OpSite]]] = {}
    for row in rows:
        group = groups.setdefault((_folded(_place(row)), row.direction), {})
        group.setdefault(row._replace(module="", runs=0, flops=0, bytes=0), []).append(row)
    for (_, direction), sites in groups.items():
        places = [_place(row) for found in sites.values() for row in found]
        yield f"{_named(places)}, {direction}", [_line(found) for found in sites.values()]


def _line(rows: list[OpSite]) -> tuple[str, ...]:
    """One line for op sites that differ in their modules only."""
    row, runs, size = rows[0], sum(row.runs for row in rows), sum(row.bytes for row in rows)
    dtypes = " ".join(map(_short, row.inputs)), _short(row.compute), _short(row.output)
    return row.primitive, row.op_class, row.why, *dtypes, str(runs), _size(size), row.source


def _place(row: OpSite) -> str:
    """The module, or the function where there is none."""
    return row.module or row.source.rpartition("(")[2].replace(")", "()")


def _numbered(rows: Iterable[OpSite], keys: tuple[str, ...]) -> dict[Any, OpSite]:
    """The rows by their keys, and by how many of those keys came before."""
    seen: Counter = Counter()
    found = {}
    for row in rows:
        key = tuple(getattr(row, name) for name in keys)
        found[key, seen[key]] = row
        seen[key] += 1
    return found


def _notes(shown: Iterable[OpSite], rows: Iterable[OpSite]) -> list[str]:
    """What the reasons mean, and what is not shown."""
    used = {row.why for row in shown}
    hidden = Counter(row.direction for row in rows) - Counter(row.direction for row in shown)
    more = [f'{count} more op sites: `report.select(direction="{name}")`' for name, count in hidden.items()]
    return [f"{why}: {meaning}" for why, meaning in REASONS.items() if why in used] + more


def _named(modules: Iterable[str]) -> str:
    """The module, or what several have in common."""
    different = set(modules)
    name = different.pop() if len(different) == 1 else f"{_folded(min(different))} ({len(different)} modules)"
    return name or "-"


def _size(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            break
        n /= 1000
    return f"{n:.3g} {unit}"


def _folded(module: str) -> str:
    return re.sub(r"\d+", "*", module)


def _short(dtype: str) -> str:
    return _SHORT.get(dtype, dtype)


def _shown(value: Any) -> str:
    return f"{value:.1%}" if isinstance(value, float) else str(value)
