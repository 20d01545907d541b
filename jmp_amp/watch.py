"""Monitors of a training run: a status line in the terminal, and a plot of its history."""

import collections
import contextlib
import csv
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._calls import extra, finished, new_figure, quote, shorten

__all__ = ["LiveView", "live", "plot_history"]

_FORMATS: dict[str, Callable[[Any], str]] = {
    "loss": "loss {:.4g}".format,
    "loss_scale": lambda value: f"scale 2^{math.log2(value):g}" if 0 < value < math.inf else f"scale {value:g}",
    "total_notfinite": "skips {}".format,
    "grad_norm": "norm {:.3g}".format,
}
# Entries of `amp.metrics` that are left out to keep the line short.
_HIDDEN = ("growth_tracker", "hysteresis_tracker", "last_finite", "notfinite_count")


class LiveView:
    """A status line, created by `live`.

    Examples:
        >>> import jmp_amp as amp
        >>> with amp.watch.live(total=2, name="run", every=1) as view:
        ...     view.update(loss=3.0)
        ...     view.update(loss=2.5, accuracy=0.5)
        run ... 2/2 loss 2.5 accuracy 0.5 ...
    """

    def __init__(self, progress: Any, task: Any, every: int, step: int, output: Any = None) -> None:
        self._progress, self._task, self._every, self._step, self._output = progress, task, every, step, output
        self._values: dict[str, Any] = {}

    def update(self, step: int | None = None, **values: Any) -> None:
        """Records the values of one step.

        Args:
            step: the number of the step. The default is one more than that of the last call.
            **values: scalars, as numbers or JAX arrays: `loss=loss, **amp.metrics(opt_state)`. Any other
                scalar is shown with its name, except the remaining entries of `amp.metrics`. A value stays on the line
                until a later call replaces it.
        """
        # Fetch the values of the previous step, so that the device computes this one meanwhile.
        if self._values and self._step % self._every == 0:
            self.refresh()
        self._step = self._step + 1 if step is None else step
        if self._step % self._every == 0:
            # Copy, because the next step may donate the state that holds the values.
            values = {name: jnp.copy(x) if isinstance(x, jax.Array) else x for name, x in values.items()}
        self._values |= values

    def refresh(self) -> None:
        """Shows the values of the last `update`. Blocks until the device has computed them."""
        values = {n: x for n, x in self._values.items() if not (isinstance(x, jax.Array) and x.is_deleted())}
        if values:
            status = status_line(jax.device_get(values))
            self._progress.update(self._task, completed=self._step, status=status, refresh=True)
            if self._output is not None:
                self._output.update(self._progress)


def status_line(values: dict[str, Any]) -> str:
    """Returns `loss 2.31 scale 2^16 skips 3 norm 0.52`, followed by the values with other names."""
    # Use the order of `_FORMATS`, because `jit` returns dicts with sorted keys.
    parts = [to_text(values[name]) for name, to_text in _FORMATS.items() if name in values]
    others = ((name, value) for name, value in values.items() if name not in _FORMATS and name not in _HIDDEN)
    parts += [f"{name} {value:,.0f}" if abs(value) >= 1000 else f"{name} {value:.4g}" for name, value in others]
    return " ".join(parts)


@contextlib.contextmanager
def live(
    total: int | None = None, name: str = "", *, every: int = 10, start: int = 0, console: Any = None
) -> Iterator[LiveView]:
    """Shows a status line in the terminal or a notebook: progress, loss, loss scale, skipped steps, gradient norm.

    It does not block the device: it fetches values only every `every` steps, and only those of the previous step, while
    the device computes the next one.

    Args:
        total: the number of steps, if known.
        name: the text at the start of the line.
        every: the number of steps between fetches.
        start: the number of steps before a resumed run.
        console: the `rich.console.Console` to write to. The default writes to the standard output.

    Yields:
        A `LiveView`. Call its `update(loss=loss, **amp.metrics(opt_state))` after each step.

    Raises:
        ImportError: rich is not installed.
        ValueError: `every` is less than 1.

    Examples:
        >>> import jmp_amp as amp
        >>> state = amp.LossScale().init()
        >>> with amp.watch.live(total=3, name="run") as view:
        ...     for loss in (3.0, 2.5, 2.25):
        ...         view.update(loss=loss, **amp.metrics(state))
        run ... 3/3 loss 2.25 scale 2^16 skips 0 ...
    """
    if every < 1:
        raise ValueError(f"`every` must be at least 1, got {every}")
    rich, column = extra("rich.progress", "`live`"), extra("rich.table", "`live`").Column
    console = console or rich.get_console()
    progress = rich.Progress(
        "{task.description}",
        rich.BarColumn(None),  # the only column that gives way on a narrow terminal
        rich.MofNCompleteColumn(table_column=column(no_wrap=True)),
        "{task.fields[status]}",
        rich.TimeRemainingColumn(compact=True, table_column=column(no_wrap=True)),
        console=console,
    )
    # In a notebook, rich's own display needs ipywidgets, and shows nothing without it; IPython's needs nothing.
    with contextlib.nullcontext() if console.is_jupyter else progress:
        task = progress.add_task(name, total=total, completed=start, status="compiling")
        output = extra("IPython.display", "`live`").display(progress, display_id=True) if console.is_jupyter else None
        view = LiveView(progress, task, every, start, output)
        try:
            yield view
        finally:
            view.refresh()


_PANELS = {  # the columns, and the base of a logarithmic axis
    "Loss": (("loss", "val_loss"), None),
    "Loss scale": (("loss_scale",), 2),
    "Norm of the unscaled gradients": (("grad_norm",), 10),
}
_PLOTTED = [name for names, _ in _PANELS.values() for name in names]
_COLUMNS = ("step", *_PLOTTED, "skipped", "total_notfinite", "last_finite")
_CSV_VALUES = {"True": 1.0, "False": 0.0, "": math.nan}  # the strings that Python writes to CSV files


def plot_history(rows: Sequence[Mapping[str, Any]] | str | os.PathLike, path: str | os.PathLike | None = None) -> Any:
    """Plots the loss, the loss scale with the skipped steps, and the gradient norm of a run.

    The plotted columns are `loss`, `val_loss`, `loss_scale` and `grad_norm`. The x axis is `step`, or the number of the
    row from 1. Skipped steps are read from the first of `skipped`, `total_notfinite` and `last_finite` that exists.
    Each distinct value of `run` gets its own curve. All other columns are ignored.

    Args:
        rows: one mapping from names to scalars for each step, as numbers or JAX arrays:
            `{"loss": loss, **amp.metrics(opt_state)}`; or the path of a CSV file with these columns.
        path: where to save the figure, if given. The suffix determines the format.

    Returns:
        A `matplotlib.figure.Figure` with up to three panels: loss, loss scale and gradient norm, each if `rows` has a
        column for it.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: `rows` is empty, has none of the plotted columns, or has a value that is not a scalar number in one
            of the columns above.

    Examples:
        >>> import jmp_amp as amp
        >>> rule, rows = amp.LossScale(growth_interval=3), []
        >>> state = rule.init()
        >>> for loss in (3.0, 2.5, float("inf"), 2.2):
        ...     state = rule.update(state, loss < 10)
        ...     rows.append({"loss": loss, **amp.metrics(state)})
        >>> figure = amp.watch.plot_history(rows)
        >>> [axes.get_title() for axes in figure.axes]
        ['Loss', 'Loss scale']
    """
    if isinstance(rows, str | os.PathLike):
        with open(rows, newline="") as file:
            rows = list(csv.DictReader(file))
    runs = _columns_by_run(rows)
    columns = {name for run in runs.values() for name in run}
    panels = [(title, *panel) for title, panel in _PANELS.items() if columns.intersection(panel[0])]
    if not panels:
        raise ValueError(
            f"`rows` must have at least one of the columns {', '.join(_PLOTTED)}, got {shorten(', '.join(rows[0]))}"
        )
    figure = new_figure("`plot_history`", 8, 0.6 + 1.9 * len(panels))
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (title, names, log_base) in zip(all_axes, panels, strict=True):
        for i, (label, run) in enumerate(runs.items()):
            # The first of several runs is the baseline: a wide and pale curve, visible behind the others.
            style = {"lw": 4, "color": "0.75"} if i == 0 and len(runs) > 1 else {"lw": 1.4, "color": f"C{i}"}
            _plot_run(axes, run, [name for name in names if name in run], label=label, **style)
        axes.set_title(title, size=10)
        if log_base is not None:
            axes.set_yscale("log", base=log_base)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    all_axes[-1].set_xlabel("step")
    return finished(figure, path)


def _plot_run(axes: Any, run: Mapping[str, np.ndarray], names: Sequence[str], **style: Any) -> None:
    for name in names:
        finite, skipped = np.isfinite(run[name]), _skipped_steps(run)
        changes: dict[str, Any] = {"marker": "." if finite.sum() < 2 else ""}
        if name != names[-1]:  # the training loss, if there is also a validation loss
            changes = {"lw": style["lw"] / 2, "alpha": 0.4, "label": None}
        if name == "loss_scale":
            changes["drawstyle"] = "steps-post"
        axes.plot(run["step"][finite], run[name][finite], **(style | changes))
        if name == "loss_scale" and skipped.any():
            mark = {"color": "#c8443c", "ms": 6, "mew": 1.6, "label": "skipped", "zorder": 3}
            axes.plot(run["step"][skipped], run[name][skipped], "x", **mark)


def _skipped_steps(run: Mapping[str, np.ndarray]) -> np.ndarray:
    """Returns bool[rows]: whether this step, or one since the previous row, was skipped."""
    if "skipped" in run:
        return run["skipped"] > 0
    if "total_notfinite" in run:
        total, is_start = run["total_notfinite"], run["step"][0] <= 1
        return np.diff(total, prepend=0 if is_start else total[0]) > 0
    return run["last_finite"] == 0 if "last_finite" in run else np.zeros(len(run["step"]), bool)


def _columns_by_run(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, np.ndarray]]:
    """Returns the columns of each run, as float arrays of shape `[rows]`."""
    if not rows:
        raise ValueError("`rows` is empty; pass a mapping from names to numbers for each step")
    runs = collections.defaultdict(list)
    for row in rows:
        runs[str(row.get("run", ""))].append({name: row[name] for name in _COLUMNS if name in row})
    return {label: _columns(jax.device_get(run)) for label, run in runs.items()}


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: np.array([_to_float(name, row.get(name, "")) for row in rows]) for name in names}
    return {"step": np.arange(1.0, len(rows) + 1), **columns}


def _to_float(name: str, value: Any) -> float:
    try:
        return float(_CSV_VALUES.get(str(value), value))
    except (TypeError, ValueError):
        raise ValueError(f"the column `{name}` must contain scalar numbers, got {quote(value)}") from None
