"""Formats op sites as the rows of a table."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jmp_amp._autocast import REASONS, OpSite

COLUMNS = ("op", "class", "why", "in", "compute", "out", "runs", "size", "source")
_SHORT_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
_SHORT_DTYPES |= {"float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2"}


def headline(summary: dict[str, Any]) -> str:
    """Returns a summary of a `PrecisionReport` as one line."""
    flops = ", ".join(f"{share:.0%} in {dtype}" for dtype, share in summary["matmul_flops"].items())
    share = summary["activation_bytes"]
    saved = (
        "JAX cannot differentiate it"
        if share is None
        else f"Saved for the backward pass: {share:.0%} of the bytes in low precision"
    )
    return (
        f"Autocast to {summary['dtype']}. Matmul FLOPs: {flops or 'none'}. {saved}. "
        f"{summary['casts']} casts. Primitives without a rule: {', '.join(summary['unknown']) or 'none'}."
    )


def grouped_rows(sites: Iterable[OpSite]) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Yields a title and the table rows for each module and direction.

    Modules that differ in numbers only, such as `layer_0` and `layer_1`, share a group. Sites of a group that differ in
    their module and their number of runs only share a row.
    """
    groups: dict[tuple[str, str], dict[OpSite, list[OpSite]]] = {}
    for site in sites:
        group = groups.setdefault((_without_numbers(_module_or_function(site)), site.direction), {})
        group.setdefault(site._replace(module="", runs=0, flops=0, bytes=0), []).append(site)
    for (_, direction), group in groups.items():
        modules = [_module_or_function(site) for equal in group.values() for site in equal]
        yield f"{format_modules(modules)}, {direction}", [_row(equal) for equal in group.values()]


def notes(printed: Sequence[OpSite], sites: Sequence[OpSite]) -> list[str]:
    """Returns the meaning of each reason among the printed sites, and the number of sites that are not printed."""
    reasons = {site.why for site in printed}
    hidden = Counter(site.direction for site in sites) - Counter(site.direction for site in printed)
    more = [f'{count} more op sites: `report.select(direction="{name}")`' for name, count in hidden.items()]
    return [f"{why}: {meaning}" for why, meaning in REASONS.items() if why in reasons] + more


def format_modules(modules: Iterable[str]) -> str:
    """Returns the name of a module, or a pattern for several: `layer_* (3 modules)`."""
    different = set(modules)
    name = different.pop() if len(different) == 1 else f"{_without_numbers(min(different))} ({len(different)} modules)"
    return name or "-"


def short_dtype(dtype: str) -> str:
    """Returns `f16` for `float16`, and so on."""
    return " ".join(_SHORT_DTYPES.get(each, each) for each in dtype.split())


def _row(sites: list[OpSite]) -> tuple[str, ...]:
    """Returns the table row of sites that differ in their module and their number of runs only."""
    site, runs, size = sites[0], sum(site.runs for site in sites), sum(site.bytes for site in sites)
    dtypes = " ".join(map(short_dtype, site.inputs)), short_dtype(site.compute), short_dtype(site.output)
    return site.primitive, site.op_class, site.why, *dtypes, str(runs), _format_bytes(size), site.source


def _module_or_function(site: OpSite) -> str:
    return site.module or site.source.rpartition("(")[2].replace(")", "()")


def _without_numbers(module: str) -> str:
    return re.sub(r"\d+", "*", module)


def _format_bytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            break
        n /= 1000
    return f"{n:.3g} {unit}"
