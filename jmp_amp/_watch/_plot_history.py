"""`plot_history`: a picture of a run, its loss scale included."""

import csv
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jmp_amp._extras import extra

_PANELS = {
    "Loss": ("loss", "val_loss"),
    "Loss scale": ("loss_scale",),
    "Norm of the true gradients": ("grad_norm",),
}
_LOG_BASES = {"Loss scale": 2, "Norm of the true gradients": 10}
_READ = ("step", *sum(_PANELS.values(), ()), "skipped", "total_notfinite", "last_finite")
_FLAGS = {"True": 1.0, "False": 0.0, "": math.nan}  # as CSV files have them


def plot_history(rows: Sequence[Mapping[str, Any]] | str | os.PathLike, path: str | os.PathLike | None = None) -> Any:
    """Draws the loss, the loss scale with the steps that were skipped, and the gradient norm of a run.

    Args:
        rows: a mapping a step of names to scalars, on the device or not: `{"loss": loss, **amp.metrics(opt_state)}`; or
            the path of a CSV file with those columns. Read are `loss`, `val_loss`, `loss_scale` and `grad_norm`; `step`
            (else rows are numbered from 1); and for the steps that were skipped `skipped`, `total_notfinite` or
            `last_finite`, the first that is there. Each value of `run` is a curve. Other columns may be anything.
        path: where to save the picture, if anywhere; the ending says in which format.

    Returns:
        A `matplotlib.figure.Figure`, with a panel for each of the three that there is a column for.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there are no rows, or none of these columns, or a value in them is not a scalar number.

    Examples:
        >>> import jmp_amp as amp
        >>> rule, rows = amp.LossScale(growth_interval=3), []
        >>> state = rule.init()
        >>> for loss in (3.0, 2.5, float("inf"), 2.2):
        ...     state = rule.update(state, loss < 10)
        ...     rows.append({"loss": loss, **amp.metrics(state)})
        >>> figure = amp.plot_history(rows)
        >>> [axes.get_title() for axes in figure.axes]
        ['Loss', 'Loss scale']
    """
    if isinstance(rows, str | os.PathLike):
        with open(rows, newline="") as file:
            rows = list(csv.DictReader(file))
    runs = _runs(rows)
    columns = {name for run in runs.values() for name in run}
    panels = [title for title, names in _PANELS.items() if columns.intersection(names)]
    if not panels:
        known = ", ".join(name for names in _PANELS.values() for name in names)
        raise ValueError(f"there is nothing to draw: the columns are {', '.join(rows[0])}; those drawn are {known}")
    figure = extra("matplotlib.figure", "`plot_history`").Figure(
        figsize=(8, 0.6 + 1.9 * len(panels)), dpi=120, layout="constrained"
    )
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, title in zip(all_axes, panels, strict=True):
        for i, (label, run) in enumerate(runs.items()):
            names = [name for name in _PANELS[title] if name in run]
            # The first of several is what the others are held against: wide and pale, so that it shows behind them.
            style = {"lw": 4, "color": "0.75"} if i == 0 and len(runs) > 1 else {"lw": 1.4, "color": f"C{i}"}
            _PLOTS.get(title, _curves)(axes, run, names, label=label, **style)
        axes.set_title(title, size=10)
        axes.spines[["top", "right"]].set_visible(False)
        if title in _LOG_BASES:
            axes.set_yscale("log", base=_LOG_BASES[title])
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    all_axes[-1].set_xlabel("step")
    if path is not None:
        figure.savefig(path)
    return figure


def _curves(axes: Any, run: Mapping[str, np.ndarray], names: Sequence[str], **style: Any) -> None:
    for name in names:
        faint = name != names[-1]  # the training loss, where there is a validation loss
        shown = np.isfinite(run[name])
        changes = (
            {"lw": style["lw"] / 2, "alpha": 0.4, "label": None}
            if faint
            else {"marker": "." if shown.sum() < 2 else ""}
        )
        axes.plot(run["step"][shown], run[name][shown], **(style | changes))


def _steps(axes: Any, run: Mapping[str, np.ndarray], names: Sequence[str], **style: Any) -> None:
    for name in names:
        skipped = _skipped(run)
        axes.step(run["step"], run[name], where="post", **style)
        mark = "skipped" if skipped.any() else ""
        axes.plot(run["step"][skipped], run[name][skipped], "x", color="#c8443c", ms=6, mew=1.6, label=mark, zorder=3)


_PLOTS = {"Loss scale": _steps}


def _skipped(run: Mapping[str, np.ndarray]) -> np.ndarray:
    """Whether a step was skipped, or one since the row before."""
    if "skipped" in run:
        return run["skipped"] > 0
    if "total_notfinite" in run:
        total, is_start = run["total_notfinite"], run["step"][0] <= 1
        return np.diff(total, prepend=0 if is_start else total[0]) > 0
    return run["last_finite"] == 0 if "last_finite" in run else np.zeros(len(run["step"]), bool)


def _runs(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, np.ndarray]]:
    """The columns of each run, as numbers."""
    if not rows:
        raise ValueError("there are no rows to draw: give a mapping of names to numbers for each step")
    labels = [str(row.get("run", "")) for row in rows]
    numbers = jax.device_get([{name: row[name] for name in _READ if name in row} for row in rows])
    runs = {}
    for label in dict.fromkeys(labels):
        of_run = [row for row, other in zip(numbers, labels, strict=True) if other == label]
        names = dict.fromkeys(name for row in of_run for name in row)
        columns = {name: np.array([_number(name, row.get(name, "")) for row in of_run]) for name in names}
        runs[label] = {"step": np.arange(1.0, len(of_run) + 1), **columns}
    return runs


def _number(name: str, value: Any) -> float:
    try:
        return _FLAGS[value] if isinstance(value, str) and value in _FLAGS else float(value)
    except (TypeError, ValueError):
        raise ValueError(f"the column `{name}` must hold scalar numbers, got {value!r}") from None
