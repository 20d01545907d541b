"""`Comparison`: the report of `compare`, as a table and a plot."""

import dataclasses
import math
import os
from typing import Any, NamedTuple

from jmp_amp._calls import extra
from jmp_amp.debug._table import format_table


class ErrorRow(NamedTuple):
    """The relative error of one result, for each policy.

    Attributes:
        kind: `"loss"`, `"gradient"` or `"activation"`.
        name: the module: for a gradient, the container of the parameters, `"decoder/norm"`; for an activation, a named
            scope or a function, `"model.py:attention"`.
        norm: the norm of the reference.
        errors: by policy, the norm of the difference over the norm of the reference; infinite if the result is not
            finite.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
        >>> report = amp.debug.compare(loss_fn)({"w": jnp.ones((3, 2)) / 3}, jnp.ones((4, 3)))
        >>> row = next(row for row in report.rows if row.kind == "gradient")
        >>> row.name, row.errors["float16"] < 1e-3
        ('w', True)
    """

    kind: str
    name: str
    norm: float
    errors: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The errors of a function under several policies; `compare` returns it. `print` shows a table.

    A gradient that is 0 except for rounding, such as that of a bias before a norm, has no meaningful relative error.
    If the norm of a gradient is below 1e-5 of the norm of all gradients, the table shows its error in parentheses and
    the plot omits it.

    Attributes:
        rows: the loss, the gradients by module, and the activations in program order.
        gradient: the error of all gradients together, by policy.
        loss_scale: the loss scale, by policy.
        reference: the dtype of the reference.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
        >>> report = amp.debug.compare(loss_fn)({"w": jnp.ones((3, 2)) / 3}, jnp.ones((4, 3)))
        >>> report.reference, sorted({row.kind for row in report.rows})
        ('float32', ['activation', 'gradient', 'loss'])
    """

    rows: tuple[ErrorRow, ...]
    gradient: dict[str, float]
    loss_scale: dict[str, float]
    reference: str

    def worst(self, policy: str | None = None) -> str:
        """Returns the module that causes the error: the one whose activation increases it by the largest factor.

        The factor is the error over the largest error of all earlier activations, or over a tenth of the largest finite
        error if that is larger. The first module with a non-finite activation takes precedence over all others.

        Args:
            policy: the name of the policy; None for the first.

        Returns:
            The name of the module; empty if there is no error.

        Raises:
            ValueError: the comparison has no such policy.
        """
        policy = next(iter(self.gradient)) if policy is None else policy
        if policy not in self.gradient:
            raise ValueError(f"`policy` must be one of {', '.join(map(repr, self.gradient))}, got {policy!r}")
        errors = {row.name: row.errors[policy] for row in self._of("activation")}
        largest = max((e for e in errors.values() if math.isfinite(e)), default=0) / 10 or 1.0
        worst, worst_factor = "", 0.0
        for name, error in errors.items():
            if error > largest * worst_factor:
                worst, worst_factor = name, error / largest
            largest = max(largest, error)
        return worst

    def _of(self, kind: str) -> list[ErrorRow]:
        return [row for row in self.rows if row.kind == kind]

    def _is_rounding(self, row: ErrorRow) -> bool:
        return row.kind == "gradient" and row.norm < 1e-5 * math.hypot(*(row.norm for row in self._of("gradient")))

    def __str__(self) -> str:
        policies = list(self.gradient)
        worst = {policy: self.worst(policy) for policy in policies}
        lines = [(f"error against {self.reference}", "norm", *policies)]
        for row in self.rows:
            form = "({:.1e})" if self._is_rounding(row) else "{:.1e} "
            starred = {p for p in policies if row.kind == "activation" and worst[p] == row.name}
            errors = (f"{row.errors[p]:.1e}*" if p in starred else form.format(row.errors[p]) for p in policies)
            lines.append((f"{row.kind} {row.name}".strip(), f"{row.norm:.1e}", *errors))
            if row.kind == "loss":
                lines.append(("all gradients", "", *(f"{self.gradient[p]:.1e} " for p in policies)))
        scales = ", ".join(f"2^{math.log2(scale):g} ({policy})" for policy, scale in self.loss_scale.items())
        return f"{format_table(lines)}\n* where the error increases most. Loss scale: {scales}."

    def plot(self, path: str | os.PathLike | None = None) -> Any:
        """Plots the errors as bars, one row for each module and one color for each policy.

        A cross marks a result that is not finite.

        Args:
            path: the file to save the plot to, in the format of its extension; None saves nothing.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        titles = {"gradient": "Gradients, by module", "activation": "Activations, in the order of the program"}
        most_rows = max(len(self._of(kind)) for kind in titles)
        n = len(self.gradient)
        figure = extra("matplotlib.figure", "`plot`").Figure(
            figsize=(11, 1.6 + most_rows * (0.14 + 0.14 * n)), dpi=120, layout="constrained"
        )
        plotted = [row for row in self.rows if not self._is_rounding(row)]
        finite = [e for row in plotted for e in row.errors.values() if 0 < e < math.inf]
        xlim = min(finite, default=1e-8) / 3, max(finite, default=1.0) * 3
        for axes, (kind, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
            _plot_rows(axes, [row for row in plotted if row.kind == kind], list(self.gradient), xlim)
            axes.set(title=title, xlabel=f"relative error against {self.reference}")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=n, frameon=False)
        if path is not None:
            figure.savefig(path)
        return figure


def _plot_rows(axes: Any, rows: list[ErrorRow], policies: list[str], xlim: tuple[float, float]) -> None:
    right, n = xlim[1], len(policies)
    for i, policy in enumerate(policies):
        positions = [k + (i - (n - 1) / 2) * 0.8 / n for k in range(len(rows))]
        errors = [row.errors[policy] for row in rows]
        widths = [right if math.isinf(e) else e for e in errors]
        axes.barh(positions, widths, 0.8 / n, color=f"C{i}", label=policy)
        infinite = [position for position, e in zip(positions, errors, strict=True) if math.isinf(e)]
        axes.plot([right / 1.3] * len(infinite), infinite, "kx", ms=5)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()
    axes.set(xscale="log", xlim=xlim)
    axes.spines[["top", "right"]].set_visible(False)
