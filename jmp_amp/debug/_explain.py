"""`explain`: the dtypes that autocast chooses for each op of a function, and the reasons."""

import dataclasses
import functools
import html
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast import REASONS, RULES, AttentionSite, OpSite, Rule, explain_call, matches_scope, parse_settings
from jmp_amp._calls import transformation
from jmp_amp.debug._report import check_callable, format_table, html_table, without_numbers

_COLUMNS = ("op", "class", "why", "in", "compute", "out", "runs", "size", "source")
_ATTENTION = ("module", "kernel", "why", "runs", "source")
_KERNELS = {name for name, rule in RULES.items() if isinstance(rule, Rule) and rule.is_kernel}


@transformation
def explain(
    fun: Callable, dtype: Any = None, *, argnums: int | Sequence[int] | None = None, **options: Any
) -> "Callable[..., PrecisionReport]":
    """Returns a function that reports, for each op of `fun`, the dtypes that `autocast` chooses, and why.

    The returned function takes the arguments of `fun`. It traces the forward and the backward pass (of all floating
    results, with respect to all floating arguments, or those in `argnums`), and compiles and runs nothing. The report
    includes the ops inside loops, branches and custom derivatives. If the derivative raises, as of an argument that a
    library does not differentiate, the report has the forward pass, and what was raised.

    Args:
        fun: a function for `autocast`, or a function that `autocast` returned. The latter brings its own settings, so
            pass no other arguments with it.
        dtype: as for `autocast`.
        argnums: as in `jax.grad`; None differentiates all floating arrays.
        **options: `policy`, `rules`, `save`, `weight_grad_dtype`, `residual_stream` and `attention`, as for `autocast`.

    Returns:
        A function that returns a `PrecisionReport`. Its array arguments may be `jax.ShapeDtypeStruct`.

    Raises:
        TypeError: `fun` is not callable, or is already under `autocast` and options are given; `dtype` and `policy` are
            both given; or `explain` got the arguments of `fun`.
        ValueError: `argnums` names no argument of the call.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> def loss_fn(w, b, x):
        ...     return jnp.mean(jnp.exp(x @ w + b))
        >>> report = amp.explain(loss_fn)(jnp.ones((8, 2)), jnp.zeros(2), jnp.ones((4, 8)))
        >>> for row in report.select(direction="forward").rows[:4]:
        ...     print(row.primitive, row.op_class, row.why, row.inputs, row.compute, row.output)
        dot_general lower rule ('float32', 'float32') float16 float16
        broadcast_in_dim follow rule ('float32',) float32 float32
        add promote readers ('float16', 'float32') float32 float32
        exp full rule ('float32',) float32 float32
        >>> report.summary()["matmul_flops"]
        {'float16': 1.0}
    """
    if hasattr(fun, "autocast_of"):
        if options or dtype is not None:
            raise TypeError(
                "`fun` is already under `autocast`, which fixes its options; "
                "call `explain(fun)` without options, or pass the function without `autocast`"
            )
        fun, settings = fun.autocast_of
    else:
        check_callable(fun, "explain")
        settings = parse_settings(dtype, **options)

    @jx.api_boundary
    @functools.wraps(fun, updated=())
    def explained(*args: Any, **kwargs: Any) -> PrecisionReport:
        def explain_again(**options: Any) -> PrecisionReport:
            return explain(fun, argnums=argnums, **options)(*args, **kwargs)

        sites, attention, casts, kept, scans, why = explain_call(fun, settings, args, kwargs, argnums)
        form = settings.format.name
        return PrecisionReport(tuple(sites), tuple(attention), form, casts, kept, scans, why, explain_again)

    return explained


@dataclasses.dataclass(frozen=True)
class PrecisionReport:
    """The dtypes that autocast chose for each op of a program, and why; `explain` returns it.

    `print` shows a table of the op sites, grouped by module; modules that differ in numbers only (`layer_0`, `layer_1`)
    share a group. A notebook shows a collapsible section for each module.

    Attributes:
        rows: an `OpSite` for each op: direction, module, source, primitive, class, reason, input, compute and output
            dtypes, number of runs, FLOPs and bytes.
        attention: an `AttentionSite` for each softmax that a product reads: what computes it, or why it stays as it is
            written. Empty without the option `attention`.
        dtype: the compute dtype.
        casts: the number of casts between floating dtypes that the program runs, including the backward pass.
        kept: by dtype, the bytes of the residuals: values that the backward pass reads from the forward pass, except
            arguments. None if the report has no backward pass.
        scans: the lines of the scans, by who decides what their backward pass keeps: `"jax.checkpoint"` in the program,
            `"autocast"` (`save="matmuls"`), or `"JAX"`.
        why_forward: why the report has no backward pass: with respect to what the program was differentiated, and what
            that raised, as for a `while_loop`. Empty if it has one.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.explain(lambda w, x: jnp.exp(x @ w))(jnp.ones((8, 2)), jnp.ones((4, 8)))
        >>> [(row.primitive, row.compute) for row in report.select(direction="forward").rows]
        [('dot_general', 'float16'), ('exp', 'float32')]
        >>> report.summary()["matmul_flops"]
        {'float16': 1.0}
    """

    rows: tuple[OpSite, ...]
    attention: tuple[AttentionSite, ...]
    dtype: str
    casts: int
    kept: dict[str, int] | None
    scans: dict[str, list[str]]
    why_forward: str
    _explain_again: Callable[..., "PrecisionReport"] = dataclasses.field(repr=False, compare=False)

    def summary(self) -> dict[str, Any]:
        """Returns the summary of the report.

        Returns:
            A dict with `dtype`; `matmul_flops`, the shares of the FLOPs of products and convolutions by compute dtype,
            including the backward pass, where `"float8"` counts all float8 dtypes; `activation_bytes`, the share of
            dtypes of less than 32 bits in the bytes of the residuals, before XLA rematerializes any (None without a
            backward pass); `scans`; `attention`, how often each kernel computes attention, `"as written"` for the rest;
            `casts`; `kernels`, the names of the primitives of kernels, which autocast cannot
            read; and `unknown`, the names of the other primitives without a rule.
        """
        flops: Counter[str] = Counter()
        for row in self.rows:
            flops["float8" if row.compute.startswith("float8") else row.compute] += row.flops
        low_share = None
        if self.kept is not None:
            low = sum(size for dtype, size in self.kept.items() if jnp.dtype(dtype).itemsize < 4)
            low_share = low / max(sum(self.kept.values()), 1)
        return {
            "dtype": self.dtype,
            "matmul_flops": {dtype: n / flops.total() for dtype, n in flops.most_common() if n},
            "activation_bytes": low_share,
            "scans": self.scans,
            "attention": dict(Counter(site.kernel or "as written" for site in self.attention)),
            "casts": self.casts,
            "kernels": sorted(_KERNELS & {row.primitive for row in self.rows}),
            "unknown": sorted({row.primitive for row in self.rows if row.why in ("unknown", "opaque")}),
        }

    def select(self, pattern: str = "*", **fields: str) -> "PrecisionReport":
        """Returns a report with the rows whose module matches `pattern` and whose fields equal `fields`.

        Examples:
            >>> import jax.numpy as jnp
            >>> import jmp_amp as amp
            >>> report = amp.explain(lambda w, x: jnp.tanh(x @ w))(jnp.ones((8, 8)), jnp.ones((8, 8)))
            >>> [row.compute for row in report.select(primitive="dot_general").rows]
            ['float16', 'float16', 'float16']
        """
        matching = (row for row in self.rows if matches_scope(row.module, pattern))
        rows = tuple(row for row in matching if all(getattr(row, name) == value for name, value in fields.items()))
        return dataclasses.replace(self, rows=rows)

    def diff(self, other: "PrecisionReport | None" = None, **options: Any) -> "PrecisionDiff":
        """Returns the differences to another report, or to the same call under other options of `autocast`.

        Args:
            other: the other report. None explains the call again with `options`.
            **options: `dtype` and the other options of `explain`.
        """
        return PrecisionDiff(self, self._explain_again(**options) if other is None else other)

    def to_json(self, **options: Any) -> str:
        """Returns the summary and all rows as JSON; `options` are those of `json.dumps`."""
        return json.dumps({"summary": self.summary(), "rows": [row._asdict() for row in self.rows]}, **options)

    def __str__(self) -> str:
        lines, printed = [_headline(self)], self._printed_rows()
        if self.attention:
            lines += ["", "attention", format_table([_ATTENTION, *_attention_rows(self.attention)], align_right=False)]
        for title, rows in _grouped_rows(printed):
            lines += ["", title, format_table([_COLUMNS, *rows], align_right=False)]
        return "\n".join([*lines, "", *_notes(printed, self.rows)])

    def _printed_rows(self) -> tuple[OpSite, ...]:
        """Returns the rows of the forward pass; all rows if none belongs to the forward pass."""
        return tuple(row for row in self.rows if row.direction == "forward") or self.rows

    def _repr_html_(self) -> str:
        parts = [f"<p>{html.escape(_headline(self))}</p>"]
        if self.attention:
            table = html_table(_ATTENTION, _attention_rows(self.attention))
            parts.append(f"<details><summary>attention</summary>{table}</details>")
        for title, rows in _grouped_rows(self.rows):
            table = html_table(_COLUMNS, rows)
            parts.append(f"<details><summary>{html.escape(title)}</summary>{table}</details>")
        return "".join([*parts, *(f"<p>{html.escape(line)}</p>" for line in _notes(self.rows, self.rows))])


@dataclasses.dataclass(frozen=True)
class PrecisionDiff:
    """The differences between two reports of one program. `print` shows a line for each op with other dtypes.

    Attributes:
        before: the first report.
        after: the second report.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.explain(lambda w, x: jnp.tanh(x @ w) @ w.T)(jnp.ones((8, 8)), jnp.ones((4, 8)))
        >>> diff = report.diff(rules={jax.lax.tanh_p: "full"})
        >>> [(before.compute, after.compute) for before, after in diff.changes]
        [('float16', 'float32')]
    """

    before: PrecisionReport
    after: PrecisionReport

    @property
    def changes(self) -> list[tuple[OpSite, OpSite]]:
        """The forward op sites with another compute or output dtype, before and after."""
        befores, afters = _by_position(self.before), _by_position(self.after)
        pairs = (pair for key, rows in befores.items() for pair in zip(rows, afters[key], strict=False))
        return [(a, b) for a, b in pairs if (a.compute, a.output) != (b.compute, b.output)]

    def __str__(self) -> str:
        before, after = self.before.summary(), self.after.summary()
        lines = [f"{name}: {_format(before[name])} -> {_format(after[name])}" for name in before]
        modules = defaultdict(list)
        for a, b in self.changes:
            change = a.primitive, f"{_short_dtype(a.compute)} -> {_short_dtype(b.compute)}", b.why
            modules[change, a.source].append(a.module)
        rows = [(*op, str(len(sites)), _format_modules(sites), source) for (op, source), sites in modules.items()]
        header = ("op", "compute", "why", "sites", "module", "source")
        return "\n".join([*lines, "", format_table([header, *rows], align_right=False)])


def _by_position(report: PrecisionReport) -> defaultdict[Any, list[OpSite]]:
    """Returns the forward rows by their position in the program."""
    rows = defaultdict(list)
    for row in report.select(direction="forward").rows:
        rows[row.module, row.source, row.primitive, row.runs].append(row)
    return rows


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_format(each)} {name}" for name, each in value.items())
    if isinstance(value, list):
        return " ".join(value) or "none"
    return f"{value:.1%}" if isinstance(value, float) else str(value)


def _headline(report: PrecisionReport) -> str:
    """Returns a summary of a `PrecisionReport` as one line."""
    summary = report.summary()
    flops = ", ".join(f"{share:.0%} in {dtype}" for dtype, share in summary["matmul_flops"].items())
    share = summary["activation_bytes"]
    saved = f"JAX cannot differentiate it {report.why_forward}; `argnums` chooses arguments"
    if share is not None:
        saved = f"Saved for the backward pass: {share:.0%} of the bytes in low precision"
    keepers = ", ".join(f"{keeper} ({len(lines)})" for keeper, lines in summary["scans"].items())
    scans = f" What scans keep is decided by {keepers}." if keepers else ""
    kernels = f" Kernels: {', '.join(summary['kernels'])}." if summary["kernels"] else ""
    return (
        f"Autocast to {summary['dtype']}. Matmul FLOPs: {flops or 'none'}. {saved}.{scans} "
        f"{summary['casts']} casts.{kernels} Primitives without a rule: {', '.join(summary['unknown']) or 'none'}."
    )


def _grouped_rows(sites: Iterable[OpSite]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yields a title and the table rows for each module and direction.

    Modules that differ in numbers only, such as `layer_0` and `layer_1`, share a group. Sites of a group that differ in
    their module and their number of runs only share a row.
    """
    groups: dict[tuple[str, str], dict[OpSite, list[OpSite]]] = defaultdict(lambda: defaultdict(list))
    for site in sites:
        decision = site._replace(module="", runs=0, flops=0, bytes=0)
        groups[without_numbers(_module_or_function(site)), site.direction][decision].append(site)
    for (_, direction), group in groups.items():
        modules = [_module_or_function(site) for equal in group.values() for site in equal]
        yield f"{_format_modules(modules)}, {direction}", [_row(equal) for equal in group.values()]


def _attention_rows(sites: Iterable[AttentionSite]) -> list[tuple[str, ...]]:
    """Returns the table rows of attention; sites that differ in numbers of their module only share a row."""
    modules: dict[AttentionSite, list[AttentionSite]] = defaultdict(list)
    for site in sites:
        modules[site._replace(module=without_numbers(site.module), runs=0)].append(site)
    return [
        (
            _format_modules(site.module for site in same),
            kernel or "as written",
            why,
            str(sum(x.runs for x in same)),
            source,
        )
        for (_, source, kernel, why, _), same in modules.items()
    ]


def _notes(printed: Sequence[OpSite], sites: Sequence[OpSite]) -> list[str]:
    """Returns the meaning of each reason among the printed sites, and the number of sites that are not printed."""
    reasons = {site.why for site in printed}
    hidden = Counter(site.direction for site in sites) - Counter(site.direction for site in printed)
    more = [f'{count} more op sites: `report.select(direction="{name}")`' for name, count in hidden.items()]
    return [f"{why}: {meaning}" for why, meaning in REASONS.items() if why in reasons] + more


def _format_modules(modules: Iterable[str]) -> str:
    """Returns the name of a module, or a pattern for several: `layer_* (3 modules)`."""
    different = set(modules)
    if len(different) == 1:
        return different.pop() or "-"
    return f"{without_numbers(min(different))} ({len(different)} modules)"


def _short_dtype(dtype: str) -> str:
    """Returns `f16` for `float16`, and so on."""
    return dtype.replace("float", "f").replace("e4m3fn", "e4m3")


def _row(sites: list[OpSite]) -> tuple[str, ...]:
    """Returns the table row of sites that differ in their module and their number of runs only."""
    site, runs, size = sites[0], sum(site.runs for site in sites), sum(site.bytes for site in sites)
    dtypes = " ".join(map(_short_dtype, site.inputs)), _short_dtype(site.compute), _short_dtype(site.output)
    return site.primitive, site.op_class, site.why, *dtypes, str(runs), _format_bytes(size), site.source


def _module_or_function(site: OpSite) -> str:
    return site.module or site.source.rpartition("(")[2].replace(")", "()")


def _format_bytes(n: float) -> str:
    power = min(int(math.log10(max(n, 1)) // 3), 3)
    return f"{n / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"
