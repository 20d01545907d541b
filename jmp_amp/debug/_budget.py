"""`error_budget`: how much each rounding of autocast adds to the error of the gradient."""

import dataclasses
import functools
import html
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from jmp_amp._autocast import parse_settings
from jmp_amp._calls import check_concrete, new_figure, saved, transformation
from jmp_amp._loss_scale import to_number
from jmp_amp.debug._compare import check_finite, floating_value_and_grad, relative_error
from jmp_amp.debug._emulation import Emulation, Run
from jmp_amp.debug._report import check_without_autocast, format_percent, format_table, html_table

_COLUMNS = ("share", "error", "op", "pass", "module", "source", "roundings")
_SHOWN = 15  # rows in a table or plot


@transformation
def error_budget(
    fun: Callable,
    dtype: Any = None,
    *,
    probes: int = 4,
    loss_scale: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Callable = floating_value_and_grad,
    **options: Any,
) -> "Callable[..., ErrorBudget]":
    """Returns a function that estimates how much each rounding of `autocast` adds to the error of the gradient.

    Use it on a small batch, outside of training, to see which lines and modules lose the accuracy. The gradient is
    compiled once, in float32, with its roundings as ops that can be switched on. Two runs, with all off and all on,
    measure the error of the gradient, `total`. One reverse pass through the run in float32 estimates the error that
    each rounding would cause if it were the only one, to first order: with `a` the adjoint of the product of the
    gradient and random signs, and `d` the errors of the elements of the rounded value, which are known, it is the norm
    of `a * d`. The roundings in a loop, a branch or a custom derivative are included; those of one op in all iterations
    count as one. `jax.checkpoint` is left out, so that a value that would be computed again is rounded once.

    The estimate is random: by one probe, that of a single number, such as the scale of a loss, is off by a factor of 2
    in 4 of 10 cases, and that of a large array by a few percent. The estimate is the mean of `probes`. It cannot see
    roundings inside of kernels, callbacks and `shard_map`, which `ErrorBudget.opaque` lists; how roundings amplify or
    cancel each other; and what would be rounded otherwise if one were not: to choose rules, use `suggest_rules`, which
    runs the program with them. It is too large for elements whose errors cancel, as in a long chain of layers whose
    gradient vanishes. It takes the memory of about 4 to 6 steps, since nothing is kept in 16 bits.

    Args:
        fun: the loss function without any mixed precision. It returns a scalar, or `(loss, aux)` with `has_aux`.
        dtype: the compute dtype, as for `autocast`.
        probes: how often the estimate is made, with other random signs. Each takes a run.
        loss_scale: multiplies the loss. None starts at 2^16 and halves the scale while the backward pass overflows.
        argnums: as in `jax.value_and_grad`.
        has_aux: as in `jax.value_and_grad`.
        transform: as in `amp.debug.compare`.
        **options: other options of `autocast`: `policy`, instead of `dtype`, `rules`, `weight_grad_dtype`,
            `residual_stream`.

    Returns:
        A function that takes the arguments of `fun` and returns an `ErrorBudget`; `print` it or call `plot()`.

    Raises:
        TypeError: `fun` is not callable or is already under `autocast`; its result is no scalar; there are no floating
            arrays to differentiate with respect to; or the returned function is called inside `jit`.
        ValueError: `probes` is not positive; nothing is rounded; or the gradient is not finite in float32.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> def loss_fn(w, x):
        ...     with jax.named_scope("rest"):  # float16 keeps three digits of this product
        ...         rest = x @ (300 + w["rest"]) - 300 * jnp.sum(x, -1, keepdims=True)
        ...     with jax.named_scope("head"):
        ...         return jnp.mean((rest @ w["head"]) ** 2)
        >>> w = {"rest": jnp.linspace(0, 1, 24).reshape(3, 8), "head": jnp.ones((8, 1))}
        >>> budget = amp.debug.error_budget(loss_fn)(w, jnp.linspace(0, 1, 24).reshape(8, 3))
        >>> budget.by_module()[0].name, budget.total > 0.01
        ('rest', True)
    """
    check_without_autocast(fun, "error_budget")
    options = {"dtype": dtype, **options}
    form = parse_settings(**options).format
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 1:
        raise ValueError(f"`probes` must be an integer of at least 1, got {probes!r}")
    grad_options = {"argnums": argnums, "has_aux": has_aux, "transform": transform}

    @functools.wraps(fun, updated=())
    def budget(*args: Any, **kwargs: Any) -> ErrorBudget:
        check_concrete((args, kwargs), "error_budget")
        emulate = functools.partial(Emulation, fun, args, kwargs, options, grad_options)
        emulation = emulate()
        if not emulation.sites:
            seen = f" outside of {', '.join(emulation.opaque)}, which cannot be seen into" if emulation.opaque else ""
            raise ValueError(
                f"nothing in `fun` is rounded to {form.name}{seen}; "
                "`print(amp.explain(fun, dtype)(*args))` says why each op is in its dtype"
            )
        low, scale, overflows = run_scaled(emulation, emulation.default, loss_scale)
        exact = [emulation(0 * emulation.default, scale, seed) for seed in range(probes)]
        check_finite(exact[0], "float32")
        norm = float(np.linalg.norm(exact[0].grads))
        errors = np.sqrt(estimate(exact)) / (norm or 1.0)
        overflows |= ~np.isfinite(errors)
        errors[overflows] = np.nan
        squares = np.nansum(errors**2) or 1.0  # shares of no error are 0
        rows = [
            Rounding(*site[:6], float(e**2 / squares), float(e), bool(over))
            for site, e, over in zip(emulation.sites, errors, overflows, strict=True)
        ]
        explored = functools.partial(_could_be_lower, functools.partial(emulate, rounds_float32=True), scale)
        return ErrorBudget(tuple(rows), form.name, error_of(low, exact[0]), scale, tuple(emulation.opaque), explored)

    return budget


def run_scaled(emulation: Emulation, on: np.ndarray, loss_scale: float | None) -> tuple[Run, float, np.ndarray]:
    """Runs an emulation with the largest loss scale at which the backward pass does not overflow.

    Returns:
        The run, the scale, and for each rounding whether it overflows; none does if the gradient is finite.
    """
    backward = np.array([site.direction == "backward" for site in emulation.sites])
    scales = 2.0 ** np.arange(16, -1, -1) if loss_scale is None else [to_number("loss_scale", loss_scale)]
    for scale in map(float, scales):
        run, overflows = emulation(on, scale), np.zeros(len(on), bool)
        if run.is_finite:
            break
        overflows = ~np.isfinite(emulation(2 * on, scale).squares) & (on > 0)
        if not (overflows & backward).any():
            break
    return run, scale, overflows


def error_of(run: Run, exact: Run) -> float:
    """Returns the error of a gradient, relative to the norm of the exact one; infinite if it overflows."""
    return relative_error(run.grads, exact.grads) if run.is_finite else math.inf


def estimate(runs: Sequence[Run]) -> np.ndarray:
    """Returns the estimated square of the error that each rounding causes alone.

    The sum of squares is it if the errors of the elements are uncorrelated, and has little noise. If they add up, as
    those of equal elements, the square is larger by an unknown factor. The square of the signed sum has the
    factor in the mean, but also the noise of a few normal numbers. So the distribution of the factor over all
    roundings is fitted to these, by maximum likelihood and without an assumption (Kiefer and Wolfowitz, 1956), and the
    estimate is the mean of the factor given the two sums of the rounding.
    """
    n = len(runs)
    squares, signed = np.mean([run.squares for run in runs], 0), np.mean([run.signed**2 for run in runs], 0)
    known = (squares > 0) & np.isfinite(squares)
    ratio = signed[known] / squares[known]
    factors = np.geomspace(1, max(ratio.max(initial=1), 2), 50)
    likelihood = np.exp(-n / 2 * (ratio[:, None] / factors + np.log(factors)))
    weights = np.full(factors.size, 1 / factors.size)
    for _ in range(200 if ratio.size else 0):  # expectation maximization
        posterior = likelihood * weights
        posterior /= posterior.sum(1, keepdims=True)
        weights = posterior.mean(0)
    squares[known] *= (likelihood * weights) @ factors / (likelihood @ weights)
    return squares


class Rounding(NamedTuple):
    """A rounding, and what it adds to the error of the gradient.

    Attributes:
        source: the line of code; for a backward pass, that of the forward pass.
        module: the named scopes around it, such as the modules of Flax and Haiku.
        primitive: the op whose result is rounded; `"convert_element_type"` for a cast, `"constant"` for a number in the
            code.
        direction: `"forward"` or `"backward"`.
        dtype: the dtype that it rounds to.
        runs: how often it runs.
        share: its part of the sum of the squared errors of all roundings.
        error: the norm of the error of the gradient with this rounding alone, over the norm of the gradient. It is NaN,
            and the share too, if values overflow.
        overflows: whether values overflow, so that the gradient is not finite.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda w, x: jnp.mean(jax.nn.softmax(x @ w) ** 2)
        >>> budget = amp.debug.error_budget(loss_fn)(jnp.ones((8, 8)) / 9, jnp.ones((4, 8)))
        >>> [(row.primitive, row.dtype) for row in budget.rows if row.direction == "forward"]
        [('convert_element_type', 'float16'), ('convert_element_type', 'float16'), ('dot_general', 'float16')]
    """

    source: str
    module: str
    primitive: str
    direction: str
    dtype: str
    runs: int
    share: float
    error: float
    overflows: bool


class BudgetShare(NamedTuple):
    """What the roundings of a line, a module or a primitive add to the error of the gradient together.

    Attributes:
        name: the line, the module or the primitive.
        share: their part of the sum of the squared errors of all roundings.
        error: the root of the sum of their squared errors, relative to the gradient.
        roundings: how many there are.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda w, x: jnp.mean(jax.nn.softmax(x @ w) ** 2)
        >>> budget = amp.debug.error_budget(loss_fn)(jnp.ones((8, 8)) / 9, jnp.ones((4, 8)))
        >>> sum(x.roundings for x in budget.by_primitive()) == len(budget.rows)
        True
    """

    name: str
    share: float
    error: float
    roundings: int


class Lowering(NamedTuple):
    """Values in float32 that could be stored in the low dtype.

    Attributes:
        source: the line of code.
        module: the named scopes around it.
        primitives: the ops that compute them.
        bytes: how much smaller they are in the low dtype, if they are stored at all.
        total: the error of the gradient, measured with them and all rows above rounded, relative to the gradient.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda w, x: jnp.mean(jax.nn.softmax(x @ w) ** 2)
        >>> budget = amp.debug.error_budget(loss_fn)(jnp.eye(8), jnp.linspace(0, 1, 32).reshape(4, 8))
        >>> row = budget.could_be_lower(tol=0.1)[0]
        >>> "exp" in row.primitives, row.total < 0.1
        (True, True)
    """

    source: str
    module: str
    primitives: tuple[str, ...]
    bytes: int
    total: float


@dataclasses.dataclass(frozen=True)
class ErrorBudget:
    """What each rounding adds to the error of a gradient; `error_budget` returns it. `print` shows a table.

    Attributes:
        rows: a `Rounding` for each, in program order.
        dtype: the compute dtype.
        total: the error of the gradient with all roundings, measured: the norm of its difference to the gradient in
            float32 over the norm of that. It is infinite if a value overflows.
        loss_scale: the loss scale.
        opaque: the ops that ran as they were traced, so that roundings in them are in no row.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)
        >>> budget = amp.debug.error_budget(loss_fn)(jnp.ones((8, 8)) / 9, jnp.ones((4, 8)))
        >>> sorted({row.primitive for row in budget.rows if row.direction == "forward"})
        ['convert_element_type', 'dot_general']
        >>> f"{sum(row.share for row in budget.rows):.3f}"
        '1.000'
    """

    rows: tuple[Rounding, ...]
    dtype: str
    total: float
    loss_scale: float
    opaque: tuple[str, ...]
    _explored: Callable[[float], list[Lowering]] = dataclasses.field(repr=False, compare=False)

    @property
    def explained(self) -> float:
        """The root of the sum of the squared errors of all roundings, over `total`.

        Far from 1, the roundings do not add up like independent errors: they are correlated or amplify each other.
        """
        return math.sqrt(np.nansum([row.error**2 for row in self.rows])) / (self.total or 1.0)

    def by_line(self) -> list[BudgetShare]:
        """Returns the shares of the lines of code, the largest first."""
        return self._by("source")

    def by_module(self) -> list[BudgetShare]:
        """Returns the shares of the modules, the largest first."""
        return self._by("module")

    def by_primitive(self) -> list[BudgetShare]:
        """Returns the shares of the primitives, the largest first."""
        return self._by("primitive")

    def _by(self, *fields: str, direction: str = "") -> list[BudgetShare]:
        groups = defaultdict[Any, list[Rounding]](list)
        for row in self.rows:
            if not row.overflows and direction in ("", row.direction):
                groups[attrgetter(*fields)(row) or "-"].append(row)
        return sorted((_sum(name, rows) for name, rows in groups.items()), key=lambda x: -x.share)

    def could_be_lower(self, tol: float) -> list[Lowering]:
        """Returns values that autocast keeps in float32, and that could be rounded with an error of at most `tol`.

        Those of the forward pass are tried line by line, the largest first. The program is compiled once more.

        Args:
            tol: the largest error of the gradient, as in `total`.

        Raises:
            ValueError: `total` is above `tol`.
        """
        if not self.total <= tol:
            raise ValueError(f"the error of the gradient is {self.total:.1e} already, more than `tol`, {tol:g}")
        return self._explored(tol)

    def to_json(self, **options: Any) -> str:
        """Returns all figures as JSON; `options` are those of `json.dumps`. NaN and infinity are null."""
        fields = {name: getattr(self, name) for name in ("dtype", "total", "explained", "loss_scale", "opaque")}
        rows = [{k: _finite(x) for k, x in row._asdict().items()} for row in self.rows]
        return json.dumps({k: _finite(x) for k, x in fields.items()} | {"rows": rows}, **options)

    def _notes(self) -> list[str]:
        lines = [f"{len(self.rows)} roundings to {self.dtype}; loss scale 2^{math.log2(self.loss_scale):g}."]
        if not 0.8 <= self.explained <= 1.25 and math.isfinite(self.total):
            lines.append(f"The rows sum to {self.explained:.2f} of the error: the roundings are not independent.")
        over = dict.fromkeys(
            f"`{row.primitive}` at {row.source or '-'} ({row.direction})" for row in self.rows if row.overflows
        )
        lines += [f"Overflow, in no share: {x}. `amp.debug.first_nonfinite` finds the cause." for x in over]
        return lines + [f"Not seen: roundings in {x}." for x in self.opaque]

    @property
    def _head(self) -> str:
        return f"Gradient error in {self.dtype}: {self.total:.1e}"

    def _table(self) -> list[tuple[str, ...]]:
        found = self._by("primitive", "direction", "module", "source")
        shown, rest = found[:_SHOWN], found[_SHOWN:]
        if rest:
            shown.append(_sum((f"{len(rest)} more", "", "", ""), rest))
        return [
            (format_percent(x.share), f"{x.error:.1e}", *(cell or "-" for cell in x.name), f"{x.roundings}")
            for x in shown
        ]

    def __str__(self) -> str:
        table = format_table([_COLUMNS, *self._table()], align_right=False)
        return "\n".join([self._head, table, *self._notes()])

    def _repr_html_(self) -> str:
        lines = [f"<p>{html.escape(line)}</p>" for line in (self._head, *self._notes())]
        return "".join([lines[0], html_table(_COLUMNS, self._table()), *lines[1:]])

    def plot(self, path: str | os.PathLike | None = None) -> Any:
        """Plots the errors of the lines and of the modules as bars, forward and backward roundings apart.

        Args:
            path: the file to save the plot to, in the format of its extension; None saves nothing.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        titles = {"source": "By line of code", "module": "By module"}
        figure = new_figure("`plot`", 12, 1.6 + 0.28 * max(len(self._by(field)[:_SHOWN]) for field in titles))
        for axes, (field, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
            names = [x.name for x in self._by(field)[:_SHOWN]]
            left = np.zeros(len(names))
            for direction in ("forward", "backward"):
                shares = {x.name: 100 * x.share for x in self._by(field, direction=direction)}
                width = np.array([shares.get(name, 0) for name in names])
                axes.barh(range(len(names)), width, left=left, label=direction)
                left = left + width
            axes.set_yticks(range(len(names)), [name if len(name) < 45 else f"...{name[-41:]}" for name in names])
            axes.invert_yaxis()
            axes.spines[["top", "right"]].set_visible(False)
            axes.set(title=title, xlabel="share of the squared error, %")
        figure.suptitle(self._head)
        figure.axes[0].legend(frameon=False, loc="lower right")
        return saved(figure, path)


def _sum(name: Any, rows: Sequence[Any]) -> BudgetShare:
    """Returns the sum of roundings, or of such sums."""
    roundings = sum(getattr(row, "roundings", 1) for row in rows)
    return BudgetShare(name, sum(row.share for row in rows), math.hypot(*(row.error for row in rows)), roundings)


def _finite(x: Any) -> Any:
    return None if isinstance(x, float) and not math.isfinite(x) else x


def _could_be_lower(emulate: Callable[[], Emulation], scale: float, tol: float) -> list[Lowering]:
    emulation, groups, found = emulate(), defaultdict[Any, list[int]](list), list[Lowering]()
    exact, on = emulation(0 * emulation.default, scale), emulation.default
    for i, site in enumerate(emulation.sites):
        if site.is_float32:
            groups[site.source, site.module].append(i)
    saved = {key: 2 * sum(emulation.sites[i].size for i in group) for key, group in groups.items()}
    squares, limit = estimate([exact]), (2 * tol * float(np.linalg.norm(exact.grads))) ** 2
    for key in sorted(groups, key=lambda key: -saved[key]):
        more = on.copy()
        more[groups[key]] = 1
        # What is estimated to be off by more than twice `tol` is not run.
        error = error_of(emulation(more, scale), exact) if squares[groups[key]].sum() <= limit else math.inf
        if error <= tol:
            on, primitives = more, dict.fromkeys(emulation.sites[i].primitive for i in groups[key])
            found.append(Lowering(key[0], key[1], tuple(primitives), saved[key], error))
    return found
