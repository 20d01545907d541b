"""`PrecisionDiff`: the differences between two reports of `explain`."""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jmp_amp._autocast import OpSite
from jmp_amp.debug._precision_table import format_modules, short_dtype
from jmp_amp.debug._table import format_table

if TYPE_CHECKING:
    from jmp_amp.debug._precision_report import PrecisionReport


@dataclasses.dataclass(frozen=True)
class PrecisionDiff:
    """The differences between two reports of one program. `print` shows a line for each op with other dtypes.

    Attributes:
        before: the first report.
        after: the second report.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.explain(lambda w, x: jnp.tanh(x @ w) @ w.T)(jnp.ones((3, 2)), jnp.ones((4, 3)))
        >>> diff = report.diff(rules={jax.lax.tanh_p: "full"})
        >>> [(before.compute, after.compute) for before, after in diff.changes]
        [('float16', 'float32')]
    """

    before: "PrecisionReport"
    after: "PrecisionReport"

    @property
    def changes(self) -> list[tuple[OpSite, OpSite]]:
        """The forward op sites with another compute or output dtype, before and after."""
        befores, afters = (
            _by_key([row for row in report.rows if row.direction == "forward"]) for report in (self.before, self.after)
        )
        pairs = [(row, afters[key]) for key, row in befores.items() if key in afters]
        return [(a, b) for a, b in pairs if (a.compute, a.output) != (b.compute, b.output)]

    def __str__(self) -> str:
        before, after = self.before.summary(), self.after.summary()
        lines = [f"{name}: {_format(before[name])} -> {_format(after[name])}" for name in before]
        modules: dict[tuple[str, ...], list[str]] = {}
        for a, b in self.changes:
            change = a.primitive, f"{short_dtype(a.compute)} -> {short_dtype(b.compute)}", b.why, a.source
            modules.setdefault(change, []).append(a.module)
        rows = [
            (op, compute, why, str(len(sites)), format_modules(sites), source)
            for (op, compute, why, source), sites in modules.items()
        ]
        header = ("op", "compute", "why", "sites", "module", "source")
        return "\n".join([*lines, "", format_table([header, *rows], align_right=False)])


def _by_key(rows: Iterable[OpSite]) -> dict[Any, OpSite]:
    """Returns the rows by their position in the program, and by the number of earlier rows at the same position."""
    counts: Counter = Counter()
    by_key = {}
    for row in rows:
        position = row.module, row.source, row.primitive, row.runs
        by_key[position, counts[position]] = row
        counts[position] += 1
    return by_key


def _format(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{share:.1%} {dtype}" for dtype, share in value.items())
    return f"{value:.1%}" if isinstance(value, float) else str(value)
