"""`Underflow`: the report of `underflow`, as a table and a plot."""

import dataclasses
import os
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_amp._calls import extra
from jmp_amp.debug._table import format_percent, format_table


class Range(NamedTuple):
    """The range of a dtype.

    Attributes:
        subnormal: the exponent of its smallest subnormal number.
        normal: the exponent of its smallest normal number.
        overflow: the exponent above that of its largest number.
    """

    subnormal: int
    normal: int
    overflow: int


def range_of(dtype: Any) -> Range:
    """Returns the range of a floating dtype."""
    info = jnp.finfo(dtype)
    smallest, normal = np.log2(float(info.smallest_subnormal)), np.log2(float(info.tiny))
    return Range(round(smallest), round(normal), int(np.frexp(float(info.max))[1]))


_IN_RANGE, _OUT_OF_RANGE, _RANGE = "#3b6fb6", "#c8443c", "#c9daf0"


class LeafUnderflow(NamedTuple):
    """The shares of one gradient that are zero, subnormal and too large in a dtype.

    Attributes:
        path: the path of the parameter, such as `layers/0/w`.
        size: the number of values.
        zero: the share that is 0 in the dtype with the scale, including exact zeros.
        subnormal: the share that is subnormal with the scale: in float16, below 2^-14, with less than 11 bits.
        zero_unscaled: the share that is 0 in the dtype at scale 1.
        subnormal_unscaled: the share that is subnormal in the dtype at scale 1.
        overflow: the share that is infinite, NaN, or too large for the dtype with the scale.
        largest: the exponent (floor of log2) of the largest finite value with the scale; the largest exponent of
            float16 is 15. None if all values are 0.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> row = amp.debug.underflow({"w": jnp.array([1024.0, 1e-6])}, loss_scale=2.0**10).rows[0]
        >>> row.path, row.zero_unscaled, row.zero, row.subnormal
        ('w', 0.5, 0.0, 0.5)
    """

    path: str
    size: int
    zero: float
    subnormal: float
    zero_unscaled: float
    subnormal_unscaled: float
    overflow: float
    largest: int | None


@dataclasses.dataclass(frozen=True)
class Underflow:
    """The shares of gradients that underflow or overflow in a dtype; `underflow` returns it.

    `print` shows a table with one line for each parameter.

    Attributes:
        rows: a `LeafUnderflow` for each floating leaf.
        total: the shares of all leaves together; its path is `all`.
        loss_scale: the scale that multiplies the gradients; None for float8, where each gradient has its own.
        dtype: the dtype, such as float16.
        exponents: for each module, the number of *unscaled* gradients with each exponent (floor of log2), and the
            number of zeros under None.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> report = amp.debug.underflow({"w": jnp.array([1.0, 1e-9]), "b": jnp.ones(2)})
        >>> [row.path for row in report.rows], report.total.zero
        (['b', 'w'], 0.25)
    """

    rows: tuple[LeafUnderflow, ...]
    total: LeafUnderflow
    loss_scale: float | None
    dtype: str
    exponents: dict[str, dict[int | None, int]] = dataclasses.field(repr=False)

    def __str__(self) -> str:
        scale = "scaled" if self.loss_scale is None else f"x2^{np.log2(self.loss_scale):g}"
        titles = ("gradient", "size", f"zero {scale}", "subnormal", "zero x1", "subnormal", "overflow", "largest")
        lines = [titles, *(_cells_of(row) for row in (*self.rows, self.total))]
        return format_table(line if self.loss_scale != 1 else (*line[:4], *line[6:]) for line in lines)

    def plot(self, path: str | os.PathLike | None = None) -> Any:
        """Plots a histogram of the exponents of the unscaled gradients for each module.

        Shaded areas show the range of the dtype with the scale: dark for normal numbers, light for subnormal numbers.
        Values to the left round to 0, values to the right overflow. A dashed line shows where the range starts at
        scale 1.

        Args:
            path: the file to save the plot to, in the format of its extension; None saves nothing.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = extra("matplotlib.figure", "`plot`").Figure(
            figsize=(8, 1.5 + 0.55 * len(self.exponents)), dpi=120, layout="constrained"
        )
        limits = range_of(self.dtype)
        log_scales = {name: self._log_scale(counts) for name, counts in self.exponents.items()}
        rows = figure.subplots(len(self.exponents), 1, sharex=True, squeeze=False)[:, 0]
        present = [k for counts in self.exponents.values() for k in counts if k is not None]
        low = min([*present, *(limits.subnormal - shift for shift in log_scales.values()), limits.subnormal]) - 2
        high = max([*present, *(limits.overflow - shift for shift in log_scales.values())]) + 2
        for axes, (name, counts) in zip(rows, self.exponents.items(), strict=True):
            _plot_module(axes, name, counts, log_scales[name], limits)
            axes.set(xlim=(low, high))
        rows[0].text(
            limits.subnormal,
            1.02,
            f"{self.dtype} starts here at scale 1 ",
            transform=rows[0].get_xaxis_transform(),
            ha="right",
            size=8,
        )
        rows[-1].set_xlabel("log2 of the magnitude of the unscaled gradients")
        scale = "the scale of each module" if self.loss_scale is None else f"loss scale 2^{np.log2(self.loss_scale):g}"
        figure.suptitle(f"Shaded: the range of {self.dtype} at {scale} (light: subnormal)", size=10)
        if path is not None:
            figure.savefig(path)
        return figure

    def _log_scale(self, counts: dict[int | None, int]) -> float:
        """Returns the logarithm of the scale of a module."""
        if self.loss_scale is not None:
            return float(np.log2(self.loss_scale))
        return range_of(self.dtype).overflow - 1 - max((k for k in counts if k is not None), default=0)


def _plot_module(axes: Any, name: str, counts: dict[int | None, int], log_scale: float, limits: Range) -> None:
    smallest, normal, overflow = (exponent - log_scale for exponent in limits)
    size = sum(counts.values())
    bars = {k: n / size for k, n in counts.items() if k is not None}
    axes.axvspan(smallest, normal, color=_RANGE, alpha=0.5, lw=0)
    axes.axvspan(normal, overflow, color=_RANGE, lw=0)
    axes.axvline(limits.subnormal, color="0.35", ls="--", lw=1)
    colors = [_IN_RANGE if smallest <= k < overflow else _OUT_OF_RANGE for k in bars]
    axes.bar(bars.keys(), bars.values(), 0.9, align="edge", color=colors)
    axes.set(yticks=[])
    axes.set_ylabel(name, rotation=0, ha="right", va="center")
    zeros = counts.get(None, 0) / size
    label = f"{format_percent(zeros)} zeros" if zeros else ""
    axes.text(0.005, 0.9, label, transform=axes.transAxes, va="top", size=8)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _cells_of(row: LeafUnderflow) -> tuple[str, ...]:
    shares = (row.zero, row.subnormal, row.zero_unscaled, row.subnormal_unscaled, row.overflow)
    largest = "-" if row.largest is None else f"2^{row.largest}"
    return (row.path, f"{row.size}", *map(format_percent, shares), largest)
