"""`suggest_rules`: finds the modules and primitives of a program that need float32."""

import dataclasses
import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Primitive, primitives

from jmp_amp._autocast import RULES, OpSite, Rule, parse_rules, parse_settings
from jmp_amp._calls import check_concrete, new_figure, quote, transformation
from jmp_amp.debug._budget import check_reference, error_of, estimate, run_scaled
from jmp_amp.debug._compare import floating_value_and_grad
from jmp_amp.debug._emulation import Emulation, Site
from jmp_amp.debug._explain import explain
from jmp_amp.debug._report import check_without_autocast, format_percent, format_table, without_numbers

_INDEPENDENT_OF_RULES = ("traced", "region", "unknown")  # reasons for a dtype that rules do not change
_PRIMITIVES = {p.name: p for p in vars(primitives).values() if isinstance(p, Primitive)}


@transformation
def suggest_rules(
    fun: Callable,
    dtype: Any = None,
    *,
    loss_scale: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Callable = floating_value_and_grad,
    **options: Any,
) -> "Callable[..., Suggestion]":
    """Returns a function that finds a small set of rules with which the gradient of `fun` is accurate.

    The rules are `"full"`. For float8, rules that name the base dtype are tried first. Each rule selects a named scope
    (a Flax or Haiku module) or a primitive. The gradient is compiled once, with its roundings as switches, as by
    `error_budget`. The rules with the largest shares of the error for the least work are added until a run without
    their roundings is accurate, and those that are not needed are dropped. The program with these rules is compiled to
    check them, since the ops after a rule may be rounded otherwise; if its error is larger than `tol`, more rules are
    added in the same way.

    Args:
        fun: the loss function without any mixed precision. It returns a scalar, or `(loss, aux)` with `has_aux`.
        dtype: the compute dtype, as for `autocast`.
        loss_scale: multiplies the loss. None starts at 2^16 and halves the scale while the gradients overflow, down to
            1.
        argnums: as in `jax.value_and_grad`.
        has_aux: as in `jax.value_and_grad`.
        transform: as in `amp.debug.compare`.
        **options: other options of `autocast`: `policy`, instead of `dtype`, `weight_grad_dtype`, `residual_stream`.

    Returns:
        A function that takes the arguments of `fun` and the keyword argument `tol`, and returns `(rules, report)`.
        `tol` is the largest gradient error: the norm of the difference over the norm, for all parameters together; it
        defaults to 1e-2. With None, no rules are returned, and `print(report)` and `report.plot()` show the error
        against the share of products in low precision. If no rules meet `tol`, those are returned whose error is at
        most 1.1 times the error with all rules, and `report.met` is False.

    Raises:
        TypeError: `fun` is not callable or is already under `autocast`; `rules` is among the options; there are no
            floating arrays to differentiate with respect to; or the returned function is called inside `jit`.
        ValueError: `tol` is not positive, or the loss or its gradients are not finite in float32.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> def loss_fn(w, x):
        ...     with jax.named_scope("rest"):  # float16 keeps three digits of this product
        ...         rest = x @ (300 + w["rest"]) - 300 * jnp.sum(x, -1, keepdims=True)
        ...     with jax.named_scope("head"):
        ...         return jnp.mean((rest @ w["head"]) ** 2)
        >>> w = {"rest": jnp.linspace(0, 1, 24).reshape(3, 8), "head": jnp.ones((8, 1))}
        >>> rules, report = amp.debug.suggest_rules(loss_fn)(w, jnp.linspace(0, 1, 24).reshape(8, 3), tol=1e-2)
        >>> rules, report.met
        ({'rest': 'full'}, True)
        >>> loss_fn = amp.autocast(loss_fn, rules=rules)
    """
    check_without_autocast(fun, "suggest_rules")
    if "rules" in options:
        raise TypeError(
            "`suggest_rules` takes no `rules`, which it returns; to keep other code in float32, use "
            "`amp.full_precision` in `fun`"
        )
    options = {"dtype": dtype, **options}
    form = parse_settings(**options).format
    grad_options: dict[str, Any] = {"argnums": argnums, "has_aux": has_aux, "transform": transform}

    @functools.wraps(fun, updated=())
    def suggest(*args: Any, tol: float | None = 1e-2, **kwargs: Any) -> Suggestion:
        if tol is not None and not tol > 0:
            raise ValueError(
                f"`tol` must be positive, got {quote(tol)}; 1e-2 allows an error of 1 percent, None shows the trade"
            )
        check_concrete((args, kwargs), "suggest_rules")

        def emulate(rules: Mapping[Any, str]) -> Emulation:
            return Emulation(fun, args, kwargs, {**options, "rules": dict(rules)}, grad_options)

        first = search = _Search(emulate, {}, loss_scale)
        before = error = first.error([])
        keys, trade, ops, value, floor = list[Any](), list[Step](), list[OpSite](), "full", math.nan
        if tol is None or before > tol:
            rows = explain(fun, **options)(*args, **kwargs).select(direction="forward").rows
            low = [op for op in rows if op.compute != "float32"]
            fixed = {(op.module, op.source) for op in low if op.why in _INDEPENDENT_OF_RULES}
            ops = [op for op in low if op.why not in _INDEPENDENT_OF_RULES]
            of_float8 = [op._replace(primitive="") for op in ops if op.compute.startswith("float8") and op.module]
            # A class is no dtype, so a primitive cannot have a rule with the base dtype; modules can.
            if of_float8 and tol is not None:
                first.consider(of_float8, form.dtype.name, fixed)
                if first.error([*first.off]) <= tol:
                    ops, value = of_float8, form.dtype.name
            first.consider(ops, value, fixed)
            floor = first.error([*first.off])
            limit = 0.0 if tol is None else max(tol, 1.1 * floor)
            keys, trade = first.grow(limit)
            if tol is None:
                keys = []
            elif keys:  # the ops after a rule may be rounded otherwise
                keys = first.merged(keys, limit)
                search = _Search(emulate, dict.fromkeys(keys, value), loss_scale)
                error = search.error([])
                if error > limit:
                    search.consider(ops, value, fixed)
                    more, _ = search.grow(limit)
                    keys, error = [*keys, *more], search.error(more)
        work = _Work(ops)
        found = [SuggestedRule(k, first.error([x for x in keys if x != k]), work([k])[0]) for k in keys]
        errors = before, error, floor, 1 + (search is not first)
        report = SuggestionReport(tuple(found), form.name, tol, *errors, value, tuple(trade))
        return Suggestion(dict.fromkeys(keys, value), report)

    return suggest


class SuggestedRule(NamedTuple):
    """A suggested rule, its effect and its cost.

    Attributes:
        key: a pattern of named scopes, or a primitive.
        error_without: the gradient error with all suggested rules but this one.
        flops: the share of the FLOPs of products and convolutions in the forward pass that the rule selects.
    """

    key: Any
    error_without: float
    flops: float


class Step(NamedTuple):
    """A step of the trade between accuracy and low precision: a rule, added to those before.

    Attributes:
        key: a pattern of named scopes, or a primitive; None for no rule.
        low: the share of the FLOPs of products in the forward pass that stay in low precision.
        error: the gradient error with all rules so far.
    """

    key: Any
    low: float
    error: float


@dataclasses.dataclass(frozen=True)
class SuggestionReport:
    """The errors behind the rules of `suggest_rules`. `print` shows a table.

    A gradient error is the norm of the difference to the float32 gradients, for all parameters together, over the norm
    of the float32 gradients; it is infinite if the loss or the gradients are not finite. The errors are those of the
    gradient as `error_budget` emulates it.

    Attributes:
        rows: a `SuggestedRule` for each rule.
        dtype: the compute dtype.
        tol: the `tol` of the call.
        error_before: the gradient error without rules.
        error: the gradient error with the suggested rules.
        error_floor: the gradient error with a rule for every module and primitive; NaN if `error_before` meets `tol`.
        compilations: how often the gradient was compiled: at most twice.
        value: the value of all suggested rules: `"full"`, or the base dtype of a float8 format.
        trade: the rules in the order in which they were added, with the error of each.
    """

    rows: tuple[SuggestedRule, ...]
    dtype: str
    tol: float | None
    error_before: float
    error: float
    error_floor: float
    compilations: int
    value: str = "full"
    trade: tuple[Step, ...] = ()

    @property
    def met(self) -> bool:
        """Whether `error` is at most `tol`."""
        return self.tol is not None and self.error <= self.tol

    def __str__(self) -> str:
        lines = [f"gradient error in {self.dtype}: {self.error_before:.1e} without rules"]
        if self.tol is None:
            cells = [(_name(step.key), format_percent(step.low), f"{step.error:.1e}") for step in self.trade]
            return "\n".join([*lines, format_table([("rules, added", "low FLOPs", "error"), *cells])])
        if self.rows:
            lines[0] += f", {self.error:.1e} with these rules (tol={self.tol:g}, {self.compilations} compilations)"
            cells = [(f"{row.key}", f"{row.error_without:.1e}", format_percent(row.flops)) for row in self.rows]
            lines.append(format_table([(self.value, "without it", "FLOPs"), *cells]))
        if not self.met:
            lines.append(
                f"No rules meet `tol`: with all of them the error is {self.error_floor:.1e}. Check the code for casts "
                "and `precision` regions, and the gradients for overflow at every loss scale."
            )
        return "\n".join(lines)

    def plot(self, path: str | os.PathLike | None = None) -> Any:
        """Plots the error against the share of products in low precision, as rules are added.

        Args:
            path: the file to save the plot to, in the format of its extension; None saves nothing.

        Returns:
            A `matplotlib.figure.Figure`.

        Raises:
            ImportError: matplotlib is not installed.
        """
        figure = new_figure("`plot`", 7, 4)
        axes = figure.subplots()
        finite = [step for step in self.trade if 0 < step.error < math.inf]
        axes.plot([100 * step.low for step in finite], [step.error for step in finite], "o-")
        for step in finite:
            axes.annotate(_name(step.key), (100 * step.low, step.error), (4, 4), textcoords="offset points", fontsize=7)
        axes.set(xlabel="products in low precision, % of FLOPs", ylabel="error of the gradient", yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
        if path is not None:
            figure.savefig(path)
        return figure


def _name(key: Any) -> str:
    return "no rule" if key is None else f"+ {key}"


class Suggestion(NamedTuple):
    """The result of `suggest_rules`.

    Attributes:
        rules: for `autocast(fun, rules=rules)` or `policy.with_rules(rules)`; empty if no rule is needed.
        report: the errors behind the rules.
    """

    rules: dict[Any, str]
    report: SuggestionReport


class _Work:
    """What the ops cost that rules select."""

    def __init__(self, ops: Sequence[OpSite]) -> None:
        self._ops = ops
        self._all = max(sum(op.flops for op in ops), 1), max(sum(op.bytes for op in ops), 1)

    def __call__(self, keys: Iterable[Any]) -> tuple[float, float]:
        """Returns the shares of FLOPs and of bytes."""
        overrides = parse_rules(dict.fromkeys(keys, "full"))
        selected = [op for op in self._ops if op.primitive in overrides.primitives or overrides.matching(op.module)]
        return sum(op.flops for op in selected) / self._all[0], sum(op.bytes for op in selected) / self._all[1]


class _Search:
    """A program with some rules, compiled once, and what rounding each rule removes that can be added."""

    def __init__(
        self, emulate: Callable[[Mapping[Any, str]], Emulation], rules: Mapping[Any, str], loss_scale: Any
    ) -> None:
        self._emulate, self._rules, self._loss_scale = emulate, rules, loss_scale
        self._program = emulate(rules)
        self._exact = self._program(0 * self._program.default, 1.0)
        check_reference(self._exact)
        self._squares = np.nan_to_num(estimate([self._exact]), nan=1e30, posinf=1e30)  # an overflow
        self.off: dict[Any, np.ndarray] = {}
        self._errors: dict[bytes, float] = {}

    def consider(self, ops: Sequence[OpSite], value: str, fixed: Collection[tuple[str, str]]) -> None:
        """Takes the modules of ops, and their primitives, except those that only move values, as rules to add."""
        self._work, self.off, sites = _Work(ops), {}, self._program.sites
        can_change = np.array([
            (site.module, site.source) not in fixed and (value == "full" or site.dtype.startswith("float8"))
            for site in sites
        ])  # fmt: skip
        for key in {op.module: None for op in ops if op.module and op.module not in self._rules}:
            matching = parse_rules({key: "full"}).matching
            self.off[key] = can_change & [bool(matching(site.module)) for site in sites]
        for name in {op.primitive: None for op in ops if op.primitive in _PRIMITIVES}:
            primitive, rule = _PRIMITIVES[name], RULES[name]
            if primitive not in self._rules and not (isinstance(rule, Rule) and rule.moves):
                # What else is float32 with this rule, such as what only these ops read, tracing says.
                self.off[primitive] = _missing(sites, self._emulate({**self._rules, primitive: value}).trace())

    def _on(self, keys: Iterable[Any]) -> np.ndarray:
        off = [self.off[key] for key in keys if key in self.off]
        return self._program.default * ~np.any(off, 0) if off else self._program.default

    def error(self, keys: Sequence[Any]) -> float:
        """Returns the error of the gradient without the roundings that these rules remove."""
        if not self._program.sites:
            return 0.0
        on = self._on(keys)
        if on.tobytes() not in self._errors:
            self._errors[on.tobytes()] = error_of(run_scaled(self._program, on, self._loss_scale)[0], self._exact)
        return self._errors[on.tobytes()]

    def grow(self, limit: float) -> tuple[list[Any], list[Step]]:
        """Adds rules until the error is small enough, and drops those that are not needed; returns all steps, too."""
        keys, steps = list[Any](), [Step(None, 1.0, self.error([]))]
        while self.error(keys) > limit:
            squares = np.where(self._on(keys) > 0, self._squares, 0)
            gains = {key: squares[off].sum() / max(sum(self._work([key])), 1e-9) for key, off in self.off.items()}
            best = max(gains, key=lambda key: gains[key], default=None)
            if best is None or not gains[best] > 0:
                break
            keys.append(best)
            steps.append(Step(best, 1 - self._work(keys)[0], self.error(keys)))
        for key in sorted(keys, key=lambda key: self._work([key]), reverse=True):
            rest = [x for x in keys if x != key]
            if self.error(rest) <= max(limit, self.error(keys)):
                keys = rest
        return keys, steps

    def merged(self, keys: list[Any], limit: float) -> list[Any]:
        """Replaces modules that differ in numbers only with one pattern, `layer_*/norm`, if the result suffices."""
        patterns = [without_numbers(key) if isinstance(key, str) else key for key in keys]
        counts, merged = Counter(patterns), list[Any]()
        for key, pattern in zip(keys, patterns, strict=True):
            if counts[pattern] > 1 and pattern not in self.off:
                overrides = parse_rules({pattern: "full"})
                same = [off for x, off in self.off.items() if isinstance(x, str) and overrides.matching(x)]
                self.off[pattern] = np.any(same, 0)
            merged.append(pattern if counts[pattern] > 1 else key)
        merged = list(dict.fromkeys(merged))
        return merged if len(merged) < len(keys) and self.error(merged) <= limit else keys


def _missing(sites: Sequence[Site], others: Sequence[Site]) -> np.ndarray:
    """Returns which of the roundings are not among others."""
    left = Counter(site[:5] for site in others)
    found = []
    for site in sites:
        found.append(left[site[:5]] == 0)
        left[site[:5]] -= left[site[:5]] > 0
    return np.array(found)
