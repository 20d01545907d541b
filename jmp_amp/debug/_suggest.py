"""`suggest_rules`: finds the modules, primitives or lines of a program that need float32."""

import contextlib
import dataclasses
import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple, Unpack

import numpy as np
from jax.extend.core import Primitive, primitives

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast import full_precision, parse_rules, parse_settings
from jmp_amp._calls import check_concrete, quote, transformation
from jmp_amp._formats import Format
from jmp_amp._ops import RULES, Rule
from jmp_amp.debug._budget import FIELDS, estimate, run_scaled
from jmp_amp.debug._clock import Clock, check_seconds
from jmp_amp.debug._compare import evaluated, relative_error
from jmp_amp.debug._emulation import Emulation, EmulationOptions, Probe, lines_of, split_options
from jmp_amp.debug._explain import OpSite, PrecisionReport, explain, low_share
from jmp_amp.debug._nodes import Place
from jmp_amp.debug._report import Content, Plot, Table, check_without_autocast, format_percent, without_numbers

_INDEPENDENT_OF_RULES = ("traced", "region", "unknown")  # reasons for a dtype that rules do not change
_MOST = 2  # compilations with rules
_WITH_RULES = {"custom_jvp_call", "custom_vjp_call", "call_hi_primitive"}  # whose derivatives are kept
_PRIMITIVES = {p.name: p for p in vars(primitives).values() if isinstance(p, Primitive)}


@transformation
def suggest_rules(
    fun: Callable, dtype: Any = None, *, max_seconds: float = 60.0, **options: Unpack[EmulationOptions]
) -> "Callable[..., Suggestion]":
    """Returns a function that finds a small set of rules with which the gradient of `fun` is accurate.

    The rules are `"full"`. For float8, rules that name the base dtype are tried first. Each rule selects a named scope
    (a Flax or Haiku module) or a primitive. If lines of your code need less than half of their work in float32, the
    report names these lines instead, for `with amp.full_precision():`.

    The gradient is compiled once, with its roundings as switches, as by `error_budget`. The rules with the largest
    shares of the error for the least work are added until a run without their roundings is accurate, and those that are
    not needed are dropped. The shares are estimated, or, where the estimates explain less than 0.8 of the error, as in
    networks with `relu`, measured. The program with these rules is compiled to check them, since the ops after a rule
    may be rounded otherwise; if its error is larger than `tol`, more rules are added, or another set is tried, once.

    Args:
        fun: the loss function without any mixed precision. It returns a scalar, or `(loss, aux)` with `has_aux`.
        dtype: the compute dtype, as for `autocast`.
        max_seconds: after so many seconds, no more rules are looked for; the report says what was left out. A
            compilation that has begun is finished, which may take longer.
        **options: `loss_scale`, `argnums`, `has_aux` and `transform` of the gradient, as in `amp.debug.compare`; and
            other options of `autocast`: `weight_grad_dtype`, `residual_stream`.

    Returns:
        A function that takes the arguments of `fun` and the keyword argument `tol`, and returns `(rules, report)`.
        `tol` is the largest gradient error: the norm of the difference over the norm, for all parameters together; it
        defaults to 1e-2. With None, no rules are returned, and `print(report)` and `report.plot()` show the error
        against the share of products in low precision. If no rules meet `tol`, those are returned whose error is at
        most 1.1 times the error with all rules, and `report.met` is False.

    Raises:
        TypeError: `fun` is not callable or is already under `autocast`; `rules` is among the options; there are no
            floating arrays to differentiate with respect to; or the returned function is called inside `jit`.
        ValueError: `tol` or `max_seconds` is not positive, or the loss or its gradients are not finite in float32.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> def loss_fn(w, x):
        ...     with jax.named_scope("rest"):  # float16 keeps three digits of this product
        ...         rest = x @ (300 + w["rest"]) - 300 * jnp.sum(x, -1, keepdims=True)
        ...     with jax.named_scope("head"):
        ...         return jnp.mean((rest @ w["head"]) ** 2)
        >>> w = {"rest": jnp.linspace(0, 1, 32).reshape(4, 8), "head": jnp.ones((8, 1))}
        >>> rules, report = amp.debug.suggest_rules(loss_fn)(w, jnp.linspace(0, 1, 32).reshape(8, 4), tol=1e-2)
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
    check_seconds(max_seconds)
    autocast_options, grad_options = split_options(options)
    given: dict[str, Any] = {"dtype": dtype, **autocast_options}
    form = parse_settings(**given).format

    @functools.wraps(fun, updated=())
    def suggest(*args: Any, tol: float | None = 1e-2, **kwargs: Any) -> Suggestion:
        if tol is not None and not tol > 0:
            raise ValueError(
                f"`tol` must be positive, got {quote(tol)}; 1e-2 allows an error of 1 percent, None shows the trade"
            )
        check_concrete((args, kwargs), "suggest_rules")
        clock = Clock(max_seconds)

        def with_rules(keys: Sequence[Any], value: str) -> tuple[Callable, dict[str, Any]]:
            lines = {key for key in keys if isinstance(key, jx.Frame)}
            rules = dict.fromkeys((key for key in keys if key not in lines), value)
            return _in_float32(fun, lines), {**given, "rules": rules}

        def emulate(keys: Sequence[Any], value: str) -> Emulation:
            program, options = with_rules(keys, value)
            return Emulation(program, args, kwargs, options, grad_options)

        @functools.cache
        def report(keys: tuple[Any, ...], value: str) -> PrecisionReport:
            program, options = with_rules(keys, value)
            return explain(program, **options)(*args, **kwargs)

        return _suggested(_Candidate(emulate, report, emulate([], "full"), clock), form, tol)

    return suggest


def _suggested(program: "_Candidate", form: Format, tol: float | None) -> "Suggestion":
    """Finds the rules for a program that has none."""
    error, floor, keys, n_tried = program.error([]), math.nan, list[Any](), 0
    if tol is None or error > tol:
        if form.float8 is not None and tol is not None:
            in_base = dataclasses.replace(program, value=form.dtype.name)
            program = in_base if in_base.keys and in_base.floor <= tol else program
        floor = program.floor
        if tol is None:
            keys = program.choose(program.keys, 0.0)
        else:
            keys, error, n_tried = program.search(max(tol, 1.1 * floor))
    rows = tuple(program.suggested(keys[:i]) for i in range(len(keys) + 1))
    opaque, is_late = tuple(program.emulation.opaque), program.clock.is_late
    is_checked = not keys or n_tried > 0 or tol is None
    report = SuggestionReport(
        rows, form.name, tol, error, floor, 1 + n_tried, program.value, opaque, is_late, is_checked
    )
    rules = [key for key in keys if tol is not None and not isinstance(key, jx.Frame)]
    return Suggestion(dict.fromkeys(rules, program.value), report)


class Suggested(NamedTuple):
    """A rule, and what it brings together with the rules before it.

    Attributes:
        key: a pattern of named scopes, a primitive, or a line to put `with amp.full_precision():` around; None for no
            rule.
        low: the share of the FLOPs of products in low precision, as `explain` counts them with these rules.
        error: the gradient error.
    """

    key: Any
    low: float
    error: float


@dataclasses.dataclass(frozen=True)
class SuggestionReport(Plot):
    """The errors behind the rules of `suggest_rules`. `print` shows a table.

    `plot` draws the error against the share of products in low precision, as rules are added.

    A gradient error is the norm of the difference to the float32 gradients, for all parameters together, over the norm
    of the float32 gradients; it is infinite if the loss or the gradients are not finite. The errors are those of the
    gradient as `error_budget` emulates it.

    Attributes:
        rows: a `Suggested` without rules, and one for each rule.
        dtype: the compute dtype.
        tol: the `tol` of the call.
        error: the gradient error with the suggested rules.
        error_floor: the gradient error with a rule for every module and primitive; NaN if no rule is needed.
        compilations: how often the gradient was compiled: at most three times.
        value: the value of all suggested rules: `"full"`, or the base dtype of a float8 format.
        opaque: the ops that ran as they were traced, so that the errors do not include those of the roundings in them.
        is_late: whether the time was over.
        is_checked: whether the program was compiled with the rules; without, its error is not known to be `error`.
    """

    _aligns_right = True
    rows: tuple[Suggested, ...]
    dtype: str
    tol: float | None
    error: float
    error_floor: float
    compilations: int
    value: str = "full"
    opaque: tuple[str, ...] = ()
    is_late: bool = False
    is_checked: bool = True

    @property
    def met(self) -> bool:
        """Whether the error of the program with the rules is known to be at most `tol`."""
        return self.tol is not None and self.error <= self.tol and self.is_checked and not self.opaque

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines to put `with amp.full_precision():` around."""
        return tuple(str(row.key) for row in self.rows if isinstance(row.key, jx.Frame)) if self.tol is not None else ()

    def _content(self) -> Content:
        title, rows = f"gradient error in {self.dtype}: {self.rows[0].error:.1e} without rules", self.rows[1:]
        if self.tol is not None and rows:
            title += f", {self.error:.1e} with these rules (tol={self.tol:g}, {self.compilations} compilations)"
        cells = [(_name(step.key), format_percent(step.low), f"{step.error:.1e}") for step in self.rows]
        notes = [f"Put `with amp.full_precision():` around {line}." for line in self.lines]
        notes += [f"Not seen: roundings in {x}; `amp.debug.compare` measures the error with them." for x in self.opaque]
        if self.is_late:
            what = "rules" if not rows else "other rules" if self.is_checked else "these rules"
            notes.append(f"The time was over: {what} were not tried. `max_seconds=` sets it.")
        if self.tol is not None and not self.error <= self.tol and not self.is_late:
            notes.append(
                f"No rules meet `tol`: with all of them the error is {self.error_floor:.1e}. Check the code for casts "
                "and `precision` regions, and the gradients for overflow at every loss scale."
            )
        head = f"{self.value}, added", "low FLOPs", "error"
        return title, [Table([head, *cells])] if rows else [], notes

    def _draw(self, figure: Any) -> None:
        axes = figure.subplots()
        finite = [step for step in self.rows if 0 < step.error < math.inf]
        axes.plot([100 * step.low for step in finite], [step.error for step in finite], "o-")
        for step in finite:
            at = 100 * step.low, step.error
            axes.annotate(_name(step.key), at, (6, -9), textcoords="offset points", fontsize=7)
        axes.set(xlabel="products in low precision, % of FLOPs", ylabel="error of the gradient", yscale="log")


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


@dataclasses.dataclass(frozen=True, eq=False)
class _Candidate:
    """A program with some rules, compiled once, and the rules that can be added to it.

    Attributes:
        emulate: compiles the program with other rules, given their keys and their value.
        report: explains the program with other rules, given as well.
        emulation: this one. Its roundings can be left out.
        clock: says when to stop.
        rules: the keys of the rules that it has: patterns of modules, primitives and lines.
        value: the value of the rules: `"full"`, or the base dtype of a float8 format.
    """

    emulate: Callable[[Sequence[Any], str], Emulation]
    report: Callable[[tuple[Any, ...], str], PrecisionReport]
    emulation: Emulation
    clock: Clock
    rules: Sequence[Any] = ()
    value: str = "full"

    def search(self, limit: float) -> tuple[list[Any], float, int]:
        """Compiles the program with sets of rules until its error is small enough.

        Returns:
            The best rules; the error with them; and how often the program was compiled. If that is 0, the error is that
            of this program without the roundings that the rules remove.
        """
        tried = list[tuple[float, list[Any]]]()
        for keys in self._sets(limit):
            if not keys or self.clock.is_late:
                break
            program = self._adding(keys)
            tried.append((program.error([]), keys))
            # The ops after a rule may be rounded otherwise.
            if tried[-1][0] > limit and len(tried) < _MOST and (more := next(program._sets(limit))):
                tried.append((program._adding(more).error([]), [*keys, *more]))
            if tried[-1][0] <= limit or len(tried) == _MOST:
                break
        error, keys = min(tried, key=lambda x: x[0], default=(self.error(keys), keys))
        return keys, error, len(tried)

    def _adding(self, keys: Sequence[Any]) -> "_Candidate":
        rules = [*self.rules, *keys]
        return dataclasses.replace(self, rules=rules, emulation=self.emulate(rules, self.value))

    def _sets(self, limit: float) -> Iterator[list[Any]]:
        """Yields sets of rules with which the error is small enough, the best first: of rules, and of lines.

        A line must be edited. So it is worse than modules of an eighth of the work of the program, or of at most twice
        its own. Without modules, primitives, which take a trace each, are left for last if lines need less than half.
        """
        by_line = self._lines(limit) if self.value == "full" else []
        has_modules = any(isinstance(key, str) for key in self.keys)
        if by_line and not has_modules and self._work(by_line) < 1:
            yield by_line
            yield self.choose(self.keys, limit)
            return
        by_rule = self.choose(self.keys, limit)
        factor = 0.5 if all(isinstance(key, str) for key in by_rule) else 1.0
        costs_less = by_line and self._work(by_line) <= factor * (self._work(by_rule) - 0.25)
        yield from [by_line, by_rule] if costs_less else [by_rule, by_line]

    def _lines(self, limit: float) -> list[Any]:
        """Returns lines with which the error is small enough; none if there are none."""
        lines = sorted(frozenset().union(*self.emulation.lines))
        chosen = self.choose(lines, limit)
        if self.error(chosen) > limit:
            return []
        on, work = self._on(chosen), self._work(chosen)
        callers = [x for x in lines if (self._on([x]) <= on).all() and self._work([x]) <= 1.01 * work]
        return callers[:1] or chosen  # one line may call the others, and little else

    def choose(self, candidates: Sequence[Any], limit: float) -> list[Any]:
        """Returns rules with which the error is small enough: adds the best, and drops those that are not needed."""
        keys, error = list[Any](), self.error([])
        while error > limit and (best := self._best(candidates, self._on(keys))) is not None:
            keys.append(best)
            error = self.error(keys)
        if not limit:
            return keys
        for key in sorted(keys, key=lambda key: self._work([key]), reverse=True):
            rest = [x for x in keys if x != key]
            keys = rest if self.error(rest) <= max(limit, error) else keys
        # Modules that differ in numbers only have one pattern, `layer_*/norm`.
        patterns = [without_numbers(key) if isinstance(key, str) else key for key in keys]
        merged = list(dict.fromkeys(p if patterns.count(p) > 1 else k for k, p in zip(keys, patterns, strict=True)))
        return merged if len(merged) < len(keys) and self.error(merged) <= limit else keys

    def _best(self, candidates: Sequence[Any], on: np.ndarray) -> Any:
        """Returns the rule that removes the largest part of the error for its work; None if none removes any."""
        left = (key for key in candidates if not self.clock.is_late)
        gains = {key: self._gain(key, on) / max(self._work([key]), 1e-9) for key in left}
        return max((key for key in gains if gains[key] > 0), key=lambda key: gains[key], default=None)

    def _gain(self, key: Any, on: np.ndarray) -> float:
        """Returns the square of the error that the roundings cause which a rule removes.

        If it is not estimated, it is the mean of what they add to no roundings, and to the others.
        """
        removed = self._removed_by(key)
        if self._squares is not None:
            return float(self._squares @ (on * removed))
        first, every, others = (min(self._error(x) ** 2, 1e30) for x in (on * removed, on, on * ~removed))
        return (first + max(every - others, 0)) / 2

    @functools.cached_property
    def low_ops(self) -> list[OpSite]:
        """The ops of the forward pass that are in low precision without rules."""
        ops = self.report((), "full").select(direction="forward").rows
        return [op for op in ops if op.compute != "float32"]

    @functools.cached_property
    def keys(self) -> list[Any]:
        """The modules of the ops that rules change, and their primitives except those that only move values."""
        ops = [op for op in self.low_ops if op.why not in _INDEPENDENT_OF_RULES]
        if self.value != "full":  # a class is no dtype, so a primitive cannot have a rule with the base dtype
            return [*dict.fromkeys(op.module for op in ops if op.module and op.compute.startswith("float8"))]
        moves = {name for name, rule in RULES.items() if isinstance(rule, Rule) and rule.moves}
        names = [op.primitive for op in ops if op.primitive in _PRIMITIVES and op.primitive not in moves]
        return [*dict.fromkeys([*(op.module for op in ops if op.module), *map(_PRIMITIVES.get, names)])]

    @functools.cached_property
    def floor(self) -> float:
        """The error of the gradient with all rules."""
        if any(isinstance(key, Primitive) for key in self.keys):  # each op has one
            return self._error(self.emulation.default * ~self._is_free)
        return self.error(self.keys)

    def error(self, keys: Iterable[Any]) -> float:
        """Returns the error of the gradient without the roundings that these rules remove."""
        return self._error(self._on(keys))

    def suggested(self, keys: Sequence[Any]) -> Suggested:
        """Returns the last of some rules, with what they bring."""
        return Suggested(keys[-1] if keys else None, low_share(self.report(tuple(keys), self.value)), self.error(keys))

    def _error(self, on: np.ndarray) -> float:
        exact = self._exact.grads  # whose error comes first
        return relative_error(run_scaled(self.emulation, on)[0].grads, exact)

    @functools.cached_property
    def _exact(self) -> Probe:
        """The run without roundings."""
        return self.emulation.exact()

    @functools.cached_property
    def _squares(self) -> np.ndarray | None:
        """The estimated square of the error that each rounding causes; None if that does not explain the error."""
        squares = np.nan_to_num(estimate([self._exact]), nan=1e30, posinf=1e30)  # an overflow
        known = math.sqrt(squares @ self.emulation.default) / (np.linalg.norm(self._exact.grads) or 1.0)
        return squares if known >= 0.8 * self.error([]) else None

    def _work(self, keys: Iterable[Any]) -> float:
        """Returns the sum of the shares of the FLOPs and of the elements that rules compute in float32; 2 is all.

        Those of the forward pass count.
        """
        forward = np.array([row.direction == "forward" for row in self.emulation.rows], bool)
        work = self.emulation.work * (self._is_free & forward)[:, None]
        return float(np.sum(work[self._removed(keys)].sum(0) / np.maximum(work.sum(0), 1)))

    def _on(self, keys: Iterable[Any]) -> np.ndarray:
        return self.emulation.default * ~self._removed(keys)

    def _removed(self, keys: Iterable[Any]) -> np.ndarray:
        return functools.reduce(np.logical_or, map(self._removed_by, keys), np.zeros(len(self._is_free), bool))

    @functools.cached_property
    def _is_free(self) -> np.ndarray:
        """Which roundings rules may remove, bool[n]."""
        fixed = {(op.module, op.source) for op in self.low_ops if op.why in _INDEPENDENT_OF_RULES}
        rows = self.emulation.rows
        is_low = np.array([self.value == "full" or row.dtype.startswith("float8") for row in rows], bool)
        return is_low & np.array([(row.module, row.source) not in fixed for row in rows], bool)

    @functools.cached_property
    def _removed_by(self) -> Callable[[Any], np.ndarray]:
        return functools.cache(self._roundings_of)

    def _roundings_of(self, key: Any) -> np.ndarray:
        """Returns which roundings a rule removes, bool[n]."""
        rows = self.emulation.rows
        if isinstance(key, jx.Frame):
            return self._is_free & np.array([key in lines for lines in self.emulation.lines], bool)
        if isinstance(key, str):
            matching = parse_rules({key: "full"}).matching
            return self._is_free & np.array([bool(matching(row.module)) for row in rows], bool)
        # What else is float32 with this rule, such as what only these ops read, tracing says.
        identity, removed = operator.attrgetter(*FIELDS, "dtype"), list[bool]()
        left = Counter(map(identity, self.emulate([*self.rules, key], self.value).rows))
        for row in rows:
            left[identity(row)] -= 1
            removed.append(left[identity(row)] < 0)
        return np.array(removed, bool)


def _in_float32(fun: Callable, lines: Set[jx.Frame]) -> Callable:
    """Returns `fun` with `with amp.full_precision():` around some of its lines."""

    def around(place: Place, operands: Sequence[Any], compute: Callable[..., Sequence[Any]]) -> Sequence[Any]:
        with contextlib.nullcontext() if lines.isdisjoint(lines_of(place)) else full_precision():
            return compute(operands)

    return evaluated(fun, around=around, as_one=_WITH_RULES) if lines else fun
