"""`live`: a line in the terminal that follows a run."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jmp_amp._extras import extra

_SHOWN: dict[str, Callable[[Any], str]] = {
    "loss": lambda value: f"loss {value:.4g}",
    "loss_scale": lambda value: f"scale 2^{math.log2(value):g}",
    "total_notfinite": lambda value: f"skips {value}",
    "grad_norm": lambda value: f"norm {value:.3g}",
}
# What `amp.metrics` returns beyond what a line has room for.
_UNSHOWN = ("growth_tracker", "hysteresis_tracker", "last_finite", "notfinite_count")


class LiveView:
    """A line that follows a run; `live` makes one.

    Examples:
        >>> import jmp_amp as amp
        >>> with amp.live(total=2, name="run", every=1) as view:
        ...     view.update(loss=3.0)
        ...     view.update(loss=2.5, accuracy=0.5)
        run ... 2/2 loss 2.5 accuracy 0.5 ...
    """

    def __init__(self, progress: Any, task: Any, every: int, step: int) -> None:
        self._progress, self._task, self._every, self._step = progress, task, every, step
        self._values: dict[str, Any] = {}

    def update(self, step: int | None = None, **values: Any) -> None:
        """Tells of one more step.

        Args:
            step: its number; one more than the last if not given.
            **values: scalars, on the device or not: `loss=loss, **amp.metrics(opt_state)`. Any others are shown by
                their names; a value that is not given again stays.
        """
        # The values of the step before: the device computes this one while they are fetched.
        if self._values and self._step % self._every == 0:
            self.refresh()
        self._step = self._step + 1 if step is None else step
        if self._step % self._every == 0:
            # They may belong to a state that the next step donates.
            values = {name: jnp.copy(x) if isinstance(x, jax.Array) else x for name, x in values.items()}
        self._values |= values

    def refresh(self) -> None:
        """Shows what the last `update` told; waits for the device."""
        values = {n: x for n, x in self._values.items() if not (isinstance(x, jax.Array) and x.is_deleted())}
        if values:
            status = status_line(jax.device_get(values))
            self._progress.update(self._task, completed=self._step, status=status, refresh=True)


def status_line(values: dict[str, Any]) -> str:
    """Returns `loss 2.31 scale 2^16 skips 3 norm 0.52`, and what else there is."""
    # In an order of its own: a dict that was returned from `jit` comes back sorted.
    parts = [show(values[name]) for name, show in _SHOWN.items() if name in values]
    others = ((name, value) for name, value in values.items() if name not in _SHOWN and name not in _UNSHOWN)
    parts += [f"{name} {value:,.0f}" if abs(value) >= 1000 else f"{name} {value:.4g}" for name, value in others]
    return " ".join(parts)


@contextlib.contextmanager
def live(
    total: int | None = None, name: str = "", *, every: int = 10, start: int = 0, console: Any = None
) -> Iterator[LiveView]:
    """Shows a line in the terminal that follows a run: progress, loss, loss scale, skips, gradient norm.

    It does not hold up the device: it fetches values once in `every` steps, and those of the step before, which are
    there when the device works on the next one.

    Args:
        total: the number of steps, if it is known.
        name: what the line begins with.
        every: how many steps to a fetch.
        start: how many steps were done before, in a run that is resumed.
        console: the `rich.console.Console` to write to; one for the standard output if not given.

    Yields:
        A `LiveView`; call its `update(loss=loss, **amp.metrics(opt_state))` after each step.

    Raises:
        ImportError: rich is not installed.
        ValueError: `every` is not positive.

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
    rich = extra("rich.progress", "`live`")
    columns = ("{task.description}", rich.BarColumn(None), rich.MofNCompleteColumn(), "{task.fields[status]}")
    progress = rich.Progress(*columns, rich.TimeRemainingColumn(compact=True), console=console)
    with progress:
        task = progress.add_task(name, total=total, completed=start, status="compiling")
        view = LiveView(progress, task, every, start)
        try:
            yield view
        finally:
            view.refresh()
