"""`error_budget`: how much each rounding of autocast adds to the error of the gradient."""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Unpack

import numpy as np

from jmp_amp._autocast import parse_settings
from jmp_amp._calls import check_concrete, transformation
from jmp_amp.debug._clock import Clock, check_seconds
from jmp_amp.debug._compare import relative_error, scales_to_try
from jmp_amp.debug._emulation import Emulation, EmulationOptions, Probe, Rounding, split_options
from jmp_amp.debug._report import Content, Plot, Table, check_without_autocast, format_percent, grouped

FIELDS = ("primitive", "direction", "module", "source")
_COLUMNS = ("share", "error", "op", "pass", "module", "source")
_SHOWN = 15  # rows in a table or plot


@transformation
def error_budget(
    fun: Callable, dtype: Any = None, *, probes: int = 1, max_seconds: float = 60.0, **options: Unpack[EmulationOptions]
) -> "Callable[..., ErrorBudget]":
    """Returns a function that estimates how much each rounding of `autocast` adds to the error of the gradient.

    Use it on a small batch, outside of training, to see which lines and modules lose the accuracy. The gradient is
    compiled once, in float32, with its roundings as ops that can be switched on. Two runs, with all off and all on,
    measure the error of the gradient, `total`. One reverse pass through the run in float32 estimates the error that
    each rounding would cause if it were the only one, to first order. With `a` the adjoint of the product of the
    gradient and a random vector, and `d` the errors of the elements of the rounded value, which are known, the square
    of the error is the mean of `sum(a * d) ** 2`, and that of `sum((a * d) ** 2)`, which has less noise, if the errors
    of the elements are independent. A weighted mean of both is taken. The roundings in a loop, a branch or a custom
    derivative are included; those of one op in all iterations of a `scan` count as one. `jax.checkpoint` is left out,
    so that a value that would be computed again is rounded once.

    Roundings also flip decisions: comparisons, which branch of a `cond` is taken, and what `relu`, `max` or `top_k`
    choose. The run with all roundings records them. The decisions of a line are a row. Its error is measured: that of a
    run in float32 with these decisions.

    The estimate is random. By one vector, that of a single number, such as the scale of a loss, is off by a factor of 2
    in 4 of 10 cases, and that of a large array by a few percent. A program of small arrays, up to 4096 elements, has up
    to 64 orthogonal vectors in a probe. The estimate is the mean of `probes`. It cannot see roundings inside of
    kernels, callbacks, `shard_map` and `while` loops, which are low precision in all runs, and which
    `ErrorBudget.opaque` lists; how roundings amplify or cancel each other; and what would be rounded otherwise if one
    were not: to choose rules, use `suggest_rules`, which runs the program with them. It is too large for elements whose
    errors cancel, as in a long chain of layers whose gradient vanishes. It takes the memory of about 3 to 6 steps,
    since nothing is kept in 16 bits.

    Args:
        fun: the loss function without any mixed precision. It returns a scalar, or `(loss, aux)` with `has_aux`.
        dtype: the compute dtype, as for `autocast`.
        probes: how often the estimate is made, with other random vectors. Each takes a run.
        max_seconds: after so many seconds, the decisions of the lines that are left are measured together, and each
            line has a part in proportion to its flips.
        **options: `loss_scale`, `argnums`, `has_aux` and `transform` of the gradient, as in `amp.debug.compare`; and
            other options of `autocast`: `rules`, `weight_grad_dtype`, `residual_stream`.

    Returns:
        A function that takes the arguments of `fun` and returns an `ErrorBudget`; `print` it or call `plot()`.

    Raises:
        TypeError: `fun` is not callable or is already under `autocast`; its result is no scalar; there are no floating
            arrays to differentiate with respect to; or the returned function is called inside `jit`.
        ValueError: `probes` or `max_seconds` is not positive; nothing is rounded; or the gradient is not finite in
            float32.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> def loss_fn(w, x):
        ...     with jax.named_scope("rest"):  # float16 keeps three digits of this product
        ...         rest = x @ (300 + w["rest"]) - 300 * jnp.sum(x, -1, keepdims=True)
        ...     with jax.named_scope("head"):
        ...         return jnp.mean((rest @ w["head"]) ** 2)
        >>> w = {"rest": jnp.linspace(0, 1, 32).reshape(4, 8), "head": jnp.ones((8, 1))}
        >>> budget = amp.debug.error_budget(loss_fn)(w, jnp.linspace(0, 1, 32).reshape(8, 4))
        >>> budget.by_module()[0].module, budget.total > 0.01
        ('rest', True)
    """
    check_without_autocast(fun, "error_budget")
    autocast_options, grad_options = split_options(options)
    form = parse_settings(dtype, **autocast_options).format
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 1:
        raise ValueError(f"`probes` must be an integer of at least 1, got {probes!r}")
    check_seconds(max_seconds)

    @functools.wraps(fun, updated=())
    def budget(*args: Any, **kwargs: Any) -> ErrorBudget:
        check_concrete((args, kwargs), "error_budget")
        clock = Clock(max_seconds)
        emulation = Emulation(fun, args, kwargs, {"dtype": dtype, **autocast_options}, grad_options)
        if not emulation.rows:
            seen = f" outside of {', '.join(emulation.opaque)}, which cannot be seen into" if emulation.opaque else ""
            raise ValueError(
                f"nothing in `fun` is rounded to {form.name}{seen}; "
                "`print(amp.explain(fun, dtype)(*args))` says why each op is in its dtype"
            )
        low, scale, overflows = run_scaled(emulation, emulation.default)
        exact = [emulation.exact(scale, seed, low.decisions) for seed in range(probes)]
        errors = errors_alone(emulation, exact, low, scale, clock)
        flips = exact[0].flips * low.is_finite
        overflows |= ~np.isfinite(errors)
        errors[overflows] = np.nan
        shares = errors**2 / (np.nansum(errors**2) or 1.0)  # 0 if there is no error
        columns = [x.tolist() for x in (shares, errors, overflows, flips)]
        rows = tuple(
            dataclasses.replace(row, share=s, error=e, overflows=over, flips=n)
            for row, s, e, over, n in zip(emulation.rows, *columns, strict=True)
            if n or not row.decides
        )
        total = relative_error(low.grads, exact[0].grads)
        return ErrorBudget(rows, form.name, total, scale, tuple(emulation.opaque))

    return budget


def run_scaled(emulation: Emulation, on: np.ndarray) -> tuple[Probe, float, np.ndarray]:
    """Runs an emulation with the largest loss scale at which the backward pass does not overflow.

    Returns:
        The run, the scale, and for each rounding whether it overflows; none does if the gradient is finite.
    """
    backward = np.array([row.direction == "backward" for row in emulation.rows], bool)
    for scale in scales_to_try(emulation.loss_scale):
        run, overflows = emulation(on, scale), np.zeros(len(on), bool)
        if run.is_finite:
            break
        overflows = ~np.isfinite(emulation(2 * on, scale).squares) & (on > 0)
        if not (overflows & backward).any():
            break
    return run, scale, overflows


def errors_alone(emulation: Emulation, exact: Sequence[Probe], low: Probe, scale: float, clock: Clock) -> np.ndarray:
    """Returns the error of the gradient with each row alone: estimated from runs without roundings, or measured.

    Decisions are measured, since a few jumps are no mean over many elements. Those that are left when it is late, which
    have the fewest flips, are measured together, and have parts in proportion to their flips.
    """
    errors, flips = np.sqrt(estimate(exact)) / (np.linalg.norm(exact[0].grads) or 1.0), exact[0].flips * low.is_finite
    left = np.argsort(-flips, kind="stable")[: np.count_nonzero(flips)]
    while len(left):
        now, left = (left, left[:0]) if clock.is_late else (left[:1], left[1:])
        on = np.isin(np.arange(len(errors)), now)
        error = relative_error(emulation(on, scale, decisions=low.decisions).grads, exact[0].grads)
        errors[now] = error * np.sqrt(flips[now] / flips[now].sum())
    return errors


def estimate(runs: Sequence[Probe]) -> np.ndarray:
    """Returns the estimated square of the error that each rounding causes alone.

    The sum of squares is it if the errors of the elements are uncorrelated, and has little noise. If they add up, as
    those of equal elements, or cancel, it is wrong by a factor. The squared sum has the factor in the mean, but the
    noise of the mean of `n` squares of normal numbers. With factors that are distributed around 1 as the inverse of the
    mean of `m` such squares, the estimate is the mean of both sums with the weights `m` and `n`. `m` is that of the
    largest likelihood for all roundings.
    """
    n = sum(run.vectors for run in runs)
    squares, signed = np.mean([run.squares for run in runs], 0), np.mean([run.signed for run in runs], 0)
    known = (squares > 0) & np.isfinite(squares)
    ratio, widths, log_gamma = signed[known] / squares[known], np.geomspace(0.5, 512, 64), np.vectorize(math.lgamma)
    m = widths[:, None]
    each = (n + m) / 2 * np.log(m + n * ratio) - m / 2 * np.log(m) - log_gamma((n + m) / 2) + log_gamma(m / 2)
    best = widths[np.argmin(each.sum(1))]
    return np.where(known, (n * signed + best * squares) / (n + best), squares)


@dataclasses.dataclass(frozen=True)
class ErrorBudget(Plot):
    """What each rounding adds to the error of a gradient; `error_budget` returns it. `print` shows a table.

    `plot` draws the errors of the lines and of the modules as bars, forward and backward roundings apart.

    Attributes:
        rows: a `Rounding` for each, in program order, and for the decisions of each line that roundings flip.
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

    @property
    def explained(self) -> float:
        """The root of the sum of the squared errors of all rows, over `total`.

        Far from 1, the roundings do not add up like independent errors: they are correlated or amplify each other.
        """
        return math.sqrt(np.nansum([row.error**2 for row in self.rows])) / (self.total or 1.0)

    def by_line(self) -> list[Rounding]:
        """Returns the sums of the roundings of each line of code, the largest first."""
        return _sums(self.rows, "source")

    def by_module(self) -> list[Rounding]:
        """Returns the sums of the roundings of each module, the largest first."""
        return _sums(self.rows, "module")

    def by_primitive(self) -> list[Rounding]:
        """Returns the sums of the roundings of each primitive, the largest first."""
        return _sums(self.rows, "primitive")

    def to_json(self, **options: Any) -> str:
        """Returns all figures as JSON; `options` are those of `json.dumps`. NaN and infinity are null."""
        names = "dtype", "total", "explained", "loss_scale", "opaque"
        fields = {name: _finite(getattr(self, name)) for name in names}
        rows = [{name: _finite(x) for name, x in vars(row).items()} for row in self.rows]
        return json.dumps({**fields, "rows": rows}, **options)

    def _content(self) -> Content:
        found = _sums(self.rows, *FIELDS)
        if rest := found[_SHOWN:]:
            found[_SHOWN:] = [dataclasses.replace(_sum(rest), primitive=f"{len(rest)} more")]
        rows: list[tuple[str, ...]] = [_COLUMNS]
        for x in found:
            op = f"{x.primitive or '-'}{f': {x.flips} flips' if x.decides else ''}"
            where = (getattr(x, field) or "-" for field in FIELDS[1:])
            rows.append((format_percent(x.share), f"{x.error:.1e}", op, *where))
        count = sum(not x.decides for x in self.rows)
        notes = [f"{count} roundings to {self.dtype}; loss scale 2^{math.log2(self.loss_scale):g}."]
        if not 0.8 <= self.explained <= 1.25 and 0 < self.total < math.inf:
            notes.append(f"The rows sum to {self.explained:.2f} of the error: the roundings are not independent.")
        if any(row.decides for row in self.rows):
            notes.append("Flips: a decision is not that of float32, since what it compares is rounded in other rows.")
        over = [f"`{row.primitive}` at {row.source or '-'} ({row.direction})" for row in self.rows if row.overflows]
        cure = "`amp.debug.first_nonfinite` finds the cause."
        notes += [f"Overflow, in no share: {x}. {cure}" for x in dict.fromkeys(over)]
        notes += [f"Not seen: roundings in {x}." for x in self.opaque]
        return f"Gradient error in {self.dtype}: {self.total:.1e}", [Table(rows)], notes

    def _draw(self, figure: Any) -> None:
        titles = {"source": "By line of code", "module": "By module"}
        sums = {field: _sums(self.rows, field)[:_SHOWN] for field in titles}
        figure.set_size_inches(12, 1.6 + 0.28 * max(map(len, sums.values())))
        for axes, (field, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
            names, left = [getattr(x, field) for x in sums[field]], np.zeros(len(sums[field]))
            for direction in ("forward", "backward"):
                shares = {(getattr(x, field), x.direction): 100 * x.share for x in _sums(self.rows, field, "direction")}
                width = np.array([shares.get((name, direction), 0) for name in names])
                axes.barh(range(len(names)), width, left=left, label=direction)
                left += width
            axes.set_yticks(range(len(names)), [name if len(name) < 45 else f"...{name[-41:]}" for name in names])
            axes.invert_yaxis()
            axes.set(title=title, xlabel="share of the squared error, %")
        figure.suptitle(self._content()[0])
        figure.axes[0].legend(frameon=False, loc="lower right")


def _sum(rows: Sequence[Rounding]) -> Rounding:
    """Returns the sum of roundings; a text that is not the same for all is empty."""
    texts: dict[str, Any] = {name: "" for name in (*FIELDS, "dtype") if len({getattr(x, name) for x in rows}) > 1}
    sums = {name: sum(getattr(x, name) for x in rows) for name in ("runs", "size", "share", "flips")}
    return dataclasses.replace(rows[0], **texts, **sums, error=math.hypot(*(x.error for x in rows)))


def _sums(rows: Sequence[Rounding], *fields: str) -> list[Rounding]:
    """Returns the sums of the roundings that agree in fields, without those that overflow, the largest first."""
    groups = grouped((row for row in rows if not row.overflows), attrgetter(*fields))
    return sorted(map(_sum, groups.values()), key=lambda x: -x.share)


def _finite(x: Any) -> Any:
    return None if isinstance(x, float) and not math.isfinite(x) else x
