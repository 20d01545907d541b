"""What `compare` returns: errors by module, as a table and as a picture."""

import dataclasses
import math
import os
from typing import Any, NamedTuple

from jmp_amp._extras import extra
from jmp_amp.debug._table import aligned


class ErrorRow(NamedTuple):
    """How far a result is from the reference.

    Attributes:
        kind: `"loss"`, `"gradient"` or `"activation"`.
        name: the module: of the parameters, `"decoder/norm"`; of the program, a named scope or `"model.py:attention"`.
        norm: of the reference.
        errors: norm of the difference over the norm of the reference, by policy; infinite where a result is not finite.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
        >>> found = amp.debug.compare(loss_fn)({"w": jnp.ones((3, 2)) / 3}, jnp.ones((4, 3)))
        >>> row = next(row for row in found.rows if row.kind == "gradient")
        >>> row.name, row.errors["float16"] < 1e-3
        ('w', True)
    """

    kind: str
    name: str
    norm: float
    errors: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The errors of a function under several policies; what `compare` returns. Printed, a table.

    The relative error of a gradient that is 0 but for rounding, such as that of a bias in front of a norm, means
    nothing: if the norm is below 1e-5 of that of all gradients, it is in parentheses in the table, and not in the
    picture.

    Attributes:
        rows: the loss, the gradients by module, and the activations in the order of the program.
        gradient: the error of all gradients together, by policy.
        loss_scale: what multiplied the loss, by policy.
        reference: the dtype that the errors are against.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
        >>> found = amp.debug.compare(loss_fn)({"w": jnp.ones((3, 2)) / 3}, jnp.ones((4, 3)))
        >>> found.reference, sorted({row.kind for row in found.rows})
        ('float32', ['activation', 'gradient', 'loss'])
    """

    rows: tuple[ErrorRow, ...]
    gradient: dict[str, float]
    loss_scale: dict[str, float]
    reference: str

    def worst(self, policy: str | None = None) -> str:
        """Returns the module where the error comes from: whose activations raise it by the largest factor.

        The factor is over all that came before in the program, errors below a tenth of the largest aside. The first
        module whose activations are not finite comes before any other.

        Args:
            policy: which one; the first if not given.

        Returns:
            Its name; empty where there is no error.

        Raises:
            ValueError: there is no such policy.
        """
        policy = next(iter(self.gradient)) if policy is None else policy
        if policy not in self.gradient:
            raise ValueError(f"there is no policy {policy!r} in this comparison, only {', '.join(self.gradient)}")
        errors = {row.name: row.errors[policy] for row in self._of("activation")}
        before = max((e for e in errors.values() if math.isfinite(e)), default=0) / 10 or 1.0
        worst, most = "", 0.0
        for name, error in errors.items():
            if error > before * most:
                worst, most = name, error / before
            before = max(before, error)
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
        return f"{aligned(lines)}\n* where the error rises most. Loss scale: {scales}."

    def plot(self, path: str | os.PathLike | None = None) -> Any:
        """Draws the errors as bars, a module a line and a policy a colour; a cross is a result that is not finite.

        Args:
            path: where to save the picture, if anywhere; the ending says in which format.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        kinds = {"gradient": "Gradients, by module", "activation": "Activations, in the order of the program"}
        longest = max(len(self._of(kind)) for kind in kinds)
        n = len(self.gradient)
        figure = extra("matplotlib.figure", "`plot`").Figure(
            figsize=(11, 1.6 + longest * (0.14 + 0.14 * n)), dpi=120, layout="constrained"
        )
        shown = (row for row in self.rows if not self._is_rounding(row))
        finite = [e for row in shown for e in row.errors.values() if 0 < e < math.inf]
        left, right = min(finite, default=1e-8) / 3, max(finite, default=1.0) * 3
        for axes, (kind, title) in zip(figure.subplots(1, 2), kinds.items(), strict=True):
            rows = [row for row in self._of(kind) if not self._is_rounding(row)]
            for i, policy in enumerate(self.gradient):
                places = [k + (i - (n - 1) / 2) * 0.8 / n for k in range(len(rows))]
                errors = [row.errors[policy] for row in rows]
                widths = [right if math.isinf(e) else e for e in errors]
                axes.barh(places, widths, 0.8 / n, color=f"C{i}", label=policy)
                bad = [place for place, e in zip(places, errors, strict=True) if math.isinf(e)]
                axes.plot([right / 1.3] * len(bad), bad, "kx", ms=5)
            axes.set_yticks(range(len(rows)), [row.name for row in rows])
            axes.invert_yaxis()
            axes.set(xscale="log", xlim=(left, right), title=title, xlabel=f"relative error against {self.reference}")
            axes.spines[["top", "right"]].set_visible(False)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=n, frameon=False)
        if path is not None:
            figure.savefig(path)
        return figure
