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
from jmp_amp._calls import check_concrete, new_figure, quote, saved, transformation
from jmp_amp.debug._budget import check_exact, estimate, run_scaled
from jmp_amp.debug._compare import floating_value_and_grad, relative_error
from jmp_amp.debug._emulation import Emulation
from jmp_amp.debug._explain import explain
from jmp_amp.debug._report import check_without_autocast, format_percent, format_table, without_numbers

_INDEPENDENT_OF_RULES = ("traced", "region", "unknown")  # reasons for a dtype that rules do not change
_WORK = "flops", "bytes"
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

        def search(rules: Mapping[Any, str]) -> _Search:
            def emulate(more: Mapping[Any, str]) -> Emulation:
                return Emulation(fun, args, kwargs, {**options, "rules": {**rules, **more}}, grad_options)

            return _Search(emulate, loss_scale)

        first = search({})
        error = first.error([])
        keys, value, floor, compilations = list[Any](), "full", math.nan, 1
        if tol is None or error > tol:
            rows = explain(fun, **options)(*args, **kwargs).select(direction="forward").rows
            low = [op for op in rows if op.compute != "float32"]
            fixed = {(op.module, op.source) for op in low if op.why in _INDEPENDENT_OF_RULES}
            ops = [op for op in low if op.why not in _INDEPENDENT_OF_RULES]
            of_float8 = [op._replace(primitive="") for op in ops if op.compute.startswith("float8") and op.module]
            # A class is no dtype, so a primitive cannot have a rule with the base dtype; modules can.
            if of_float8 and tol is not None and first.consider(of_float8, form.dtype.name, fixed) <= tol:
                ops, value = of_float8, form.dtype.name
            floor = first.consider(ops, value, fixed)
            limit = 0.0 if tol is None else max(tol, 1.1 * floor)
            keys = first.choose(limit)
            if keys and tol is not None:
                # The ops after a rule may be rounded otherwise.
                second, compilations = search(dict.fromkeys(keys, value)), 2
                error = second.error([])
                if error > limit:
                    second.consider(ops, value, fixed)
                    more = second.choose(limit)
                    keys, error = [*keys, *more], second.error(more)
        steps = tuple(first.step(keys[:i]) for i in range(len(keys) + 1))
        rules = {} if tol is None else dict.fromkeys(keys, value)
        return Suggestion(rules, SuggestionReport(steps, form.name, tol, error, floor, compilations, value))

    return suggest


class Step(NamedTuple):
    """A rule, and what it brings together with the rules before it.

    Attributes:
        key: a pattern of named scopes, or a primitive; None for no rule.
        low: the share of the FLOPs of products in the forward pass that stay in low precision.
        error: the gradient error.
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
        rows: a `Step` without rules, and one for each rule.
        dtype: the compute dtype.
        tol: the `tol` of the call.
        error: the gradient error with the suggested rules.
        error_floor: the gradient error with a rule for every module and primitive; NaN if no rule is needed.
        compilations: how often the gradient was compiled: at most twice.
        value: the value of all suggested rules: `"full"`, or the base dtype of a float8 format.
    """

    rows: tuple[Step, ...]
    dtype: str
    tol: float | None
    error: float
    error_floor: float
    compilations: int
    value: str = "full"

    @property
    def met(self) -> bool:
        """Whether `error` is at most `tol`."""
        return self.tol is not None and self.error <= self.tol

    def __str__(self) -> str:
        lines = [f"gradient error in {self.dtype}: {self.rows[0].error:.1e} without rules"]
        if self.tol is not None and self.rows[1:]:
            lines[0] += f", {self.error:.1e} with these rules (tol={self.tol:g}, {self.compilations} compilations)"
        cells = [(_name(step.key), format_percent(step.low), f"{step.error:.1e}") for step in self.rows]
        if self.rows[1:]:
            lines.append(format_table([(f"{self.value}, added", "low FLOPs", "error"), *cells]))
        if self.tol is not None and not self.met:
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
        finite = [step for step in self.rows if 0 < step.error < math.inf]
        axes.plot([100 * step.low for step in finite], [step.error for step in finite], "o-")
        for step in finite:
            at = 100 * step.low, step.error
            axes.annotate(_name(step.key), at, (6, -9), textcoords="offset points", fontsize=7)
        axes.set(xlabel="products in low precision, % of FLOPs", ylabel="error of the gradient", yscale="log")
        axes.spines[["top", "right"]].set_visible(False)
        return saved(figure, path)


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


class _Search:
    """A program with some rules, compiled once, and what rounding each rule removes that can be added."""

    def __init__(self, emulate: Callable[[Mapping[Any, str]], Emulation], loss_scale: Any) -> None:
        self._emulate, self._loss_scale, self._program = emulate, loss_scale, emulate({})
        self._exact = self._program(0 * self._program.default, 1.0)
        check_exact(self._exact, self._program.opaque)
        self._squares = np.nan_to_num(estimate([self._exact]), nan=1e30, posinf=1e30)  # an overflow
        self._ops: Sequence[OpSite] = ()

    def consider(self, ops: Sequence[OpSite], value: str, fixed: Collection[tuple[str, str]]) -> float:
        """Takes the modules of ops, and their primitives, except those that only move values, as rules to add.

        Returns:
            The error of the gradient with all of them.
        """
        rows = self._program.rows

        @functools.cache
        def removes(key: Any) -> np.ndarray:
            if isinstance(key, str):
                matching = parse_rules({key: "full"}).matching
                return is_free & np.array([bool(matching(row.module)) for row in rows], bool)
            # What else is float32 with this rule, such as what only these ops read, tracing says.
            left, removed = Counter(row[:5] for row in self._emulate({key: value}).trace()), []
            for row in rows:
                left[row[:5]] -= 1
                removed.append(left[row[:5]] < 0)
            return np.array(removed, bool)

        is_selected = np.array([value == "full" or row.dtype.startswith("float8") for row in rows], bool)
        is_free = is_selected & np.array([(row.module, row.source) not in fixed for row in rows], bool)
        moves = {name for name, rule in RULES.items() if isinstance(rule, Rule) and rule.moves}
        names = [op.primitive for op in ops if op.primitive in _PRIMITIVES and op.primitive not in moves]
        self._keys = dict.fromkeys([*(op.module for op in ops if op.module), *map(_PRIMITIVES.get, names)])
        self._ops, self._removes = ops, removes
        return self.error([*self._keys])

    def _on(self, keys: Iterable[Any]) -> np.ndarray:
        return functools.reduce(lambda on, key: on * ~self._removes(key), keys, self._program.default)

    def error(self, keys: Sequence[Any]) -> float:
        """Returns the error of the gradient without the roundings that these rules remove."""
        run = run_scaled(self._program, self._on(keys), self._loss_scale)[0]
        return relative_error(run.grads, self._exact.grads)

    def step(self, keys: Sequence[Any]) -> Step:
        """Returns the last of some rules, with what they bring."""
        return Step(keys[-1] if keys else None, 1 - self._work(keys)[0], self.error(keys))

    def _work(self, keys: Sequence[Any]) -> list[float]:
        """Returns the shares of the FLOPs and of the bytes of the ops that rules select."""
        rules = parse_rules(dict.fromkeys(keys, "full"))
        selected = [op for op in self._ops if op.primitive in rules.primitives or rules.matching(op.module)]
        return [sum(getattr(x, of) for x in selected) / max(sum(getattr(x, of) for x in self._ops), 1) for of in _WORK]

    def choose(self, limit: float) -> list[Any]:
        """Adds rules until the error is small enough, and drops those that are not needed."""
        keys, error, work = list[Any](), self.error([]), {key: self._work([key]) for key in self._keys}
        while error > limit:
            squares = self._squares * (self._on(keys) > 0)
            gains = {key: squares[self._removes(key)].sum() / max(sum(x), 1e-9) for key, x in work.items()}
            best = max(gains, key=lambda key: gains[key], default=None)
            if best is None or not gains[best] > 0:
                break
            keys.append(best)
            error = self.error(keys)
        if not limit:
            return keys
        for key in sorted(keys, key=lambda key: work[key], reverse=True):
            rest = [x for x in keys if x != key]
            keys = rest if self.error(rest) <= max(limit, error) else keys
        # Modules that differ in numbers only have one pattern, `layer_*/norm`.
        patterns = [without_numbers(key) if isinstance(key, str) else key for key in keys]
        merged = list(dict.fromkeys(p if patterns.count(p) > 1 else k for k, p in zip(keys, patterns, strict=True)))
        return merged if len(merged) < len(keys) and self.error(merged) <= limit else keys
