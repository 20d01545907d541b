"""`live`: a status line in the terminal or a notebook for a training run."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jmp_amp._extras import extra

_FORMATS: dict[str, Callable[[Any], str]] = {
    "loss": lambda value: f"loss {value:.4g}",
    "loss_scale": lambda value: f"scale 2^{math.log2(value):g}",
    "total_notfinite": lambda value: f"skips {value}",
    "grad_norm": lambda value: f"norm {value:.3g}",
}
# Entries of `amp.metrics` that are left out to keep the line short.
_HIDDEN = ("growth_tracker", "hysteresis_tracker", "last_finite", "notfinite_count")


class LiveView:
    """A status line, created by `live`.

    Examples:
        >>> import jmp_amp as amp
        >>> with amp.live(total=2, name="run", every=1) as view:
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
        >>> with amp.live(total=3, name="run") as view:
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
