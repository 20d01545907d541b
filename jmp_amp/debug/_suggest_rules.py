"""`suggest_rules`: the few parts of a program that have to run in float32."""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Primitive, primitives

from jmp_amp._autocast import RULES, OpSite, Rule, autocast, parse_format, parse_rules
from jmp_amp.debug._explain import explain
from jmp_amp.debug._measure import (
    check_concrete,
    check_plain,
    floating_value_and_grad,
    measure,
    measure_reference,
    relative_error,
)
from jmp_amp.debug._table import aligned, percent

Rules = dict[Any, str]


class SuggestedRule(NamedTuple):
    """A rule, and what it is for.

    Attributes:
        key: a pattern of scopes, or a primitive; in `rules` it is given `"full"`.
        error_without: the gradient error when all rules but this one hold.
        flops: the share of the FLOPs of the forward pass, of products and convolutions, that it moves to float32.
    """

    key: Any
    error_without: float
    flops: float


@dataclasses.dataclass(frozen=True)
class SuggestionReport:
    """How `suggest_rules` came to its rules. Printed, a table.

    The gradient error is the norm of the difference to the gradients in float32 (of all parameters together), over the
    norm of these; infinite where they or the loss are not finite.

    Attributes:
        rows: a `SuggestedRule` for each rule.
        dtype: the compute dtype.
        tol: what was asked for.
        error_before: without rules.
        error: with the rules.
        error_floor: with everything that rules can name in float32. NaN if it was not needed.
        trials: how many sets of rules were tried; each is compiled once.
    """

    rows: tuple[SuggestedRule, ...]
    dtype: str
    tol: float
    error_before: float
    error: float
    error_floor: float
    trials: int

    @property
    def met(self) -> bool:
        """Whether the error is at most `tol`."""
        return self.error <= self.tol

    def __str__(self) -> str:
        head = f"gradient error in {self.dtype}: {self.error_before:.1e} without rules"
        head += f", {self.error:.1e} with these (asked for: {self.tol:g}; {self.trials} trials)" if self.rows else ""
        lines = [head]
        if self.rows:
            cells = [(f"{row.key}", f"{row.error_without:.1e}", percent(row.flops)) for row in self.rows]
            lines.append(aligned([("full", "without it", "FLOPs in float32"), *cells]))
        if not self.met:
            lines.append(
                f"The tolerance cannot be met by rules: with all of them the error is {self.error_floor:.1e}. Look for "
                "casts and regions in the code itself, or for gradients that overflow at any scale."
            )
        return "\n".join(lines)


class Suggestion(NamedTuple):
    """What `suggest_rules` returns.

    Attributes:
        rules: for `autocast(fun, rules=rules)` or `policy.with_rules(rules)`; empty where none is needed.
        report: why these.
    """

    rules: Rules
    report: SuggestionReport


def suggest_rules(
    fun: Callable,
    dtype: Any = "float16",
    *,
    loss_scale: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Callable = floating_value_and_grad,
    **options: Any,
) -> Callable[..., Suggestion]:
    """Returns a function that finds the few `"full"` rules that bring the gradient of `fun` close to that in float32.

    Rules may be for a named scope (a module of Flax or Haiku) or for a primitive. It starts with all of them, and gives
    up as many as it can, the most expensive first and by halves, so that one culprit among n parts is found in about
    2 log2(n) trials, and several are found that only matter together. A trial compiles the gradient once.

    Args:
        fun: the loss function without any mixed precision: returns a scalar, or `(loss, aux)` with `has_aux`.
        dtype: the compute dtype, as for `autocast`.
        loss_scale: multiplies the loss; None tries 2^16, and halves while the gradients overflow, down to 1.
        argnums: as in `jax.value_and_grad`.
        has_aux: as in `jax.value_and_grad`.
        transform: as in `amp.debug.compare`.
        **options: further arguments of `autocast`: `save`, `weight_grad_dtype`.

    Returns:
        A function with the arguments of `fun`, and `tol`, the largest error of the gradient (1e-2 if not given; the
        norm of the difference over the norm, for all parameters together), that returns `(rules, report)`. No rule can
        be left out. Where `tol` cannot be met, they bring the error to within a tenth of what all rules together can
        do, and `report.met` is False.

    Raises:
        TypeError: `fun` is not callable or under `autocast` already, there are no floating arrays to differentiate with
            respect to, or it is called inside `jit`.
        ValueError: `tol` is not positive, or the loss or its gradients are not finite in float32.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> def loss_fn(w, x):
        ...     with jax.named_scope("rest"):  # of a product of which float16 holds the first three digits
        ...         rest = x @ (300 + w["rest"]) - 300 * jnp.sum(x, -1, keepdims=True)
        ...     with jax.named_scope("head"):
        ...         return jnp.mean((rest @ w["head"]) ** 2)
        >>> w = {"rest": jnp.linspace(0, 1, 12).reshape(3, 4), "head": jnp.ones((4, 1))}
        >>> rules, report = amp.suggest_rules(loss_fn)(w, jnp.linspace(0, 1, 24).reshape(8, 3), tol=1e-2)
        >>> rules, report.met
        ({'rest': 'full'}, True)
        >>> loss_fn = amp.autocast(loss_fn, rules=rules)
    """
    check_plain(fun, "suggest_rules", "")
    if "rules" in options:
        raise TypeError("`suggest_rules` finds the rules; mark what shall be float32 anyway with `amp.full_precision`")
    grad_options: dict[str, Any] = {"argnums": argnums, "has_aux": has_aux, "transform": transform}

    @functools.wraps(fun, updated=())
    def suggest(*args: Any, tol: float = 1e-2, **kwargs: Any) -> Suggestion:
        if not tol > 0:
            raise ValueError(f"`tol` must be positive, got {tol!r}; 1e-2 allows an error of 1 percent")
        check_concrete((args, kwargs), "suggest_rules")
        exact = measure_reference(fun, args, kwargs, "float32", **grad_options).all_grads

        @functools.cache
        def error(keys: frozenset[Any]) -> float:
            low = autocast(fun, dtype, rules=dict.fromkeys(keys, "full"), **options)
            found = measure(low, args, kwargs, loss_scale, **grad_options)
            return relative_error(found.all_grads, exact) if found.finite else math.inf

        before, floor = error(frozenset()), math.nan
        kept: list[Any] = []
        sites: list[OpSite] = []
        if before > tol:
            rows = explain(fun, dtype, **options)(*args, **kwargs).select(direction="forward").rows
            sites = [site for site in rows if site.compute != "float32" and site.why not in _DECIDED_BY_CODE]
            keys = sorted(_candidates(sites), key=lambda key: _cost(key, sites), reverse=True)
            floor = error(frozenset(keys))
            enough = max(tol, 1.1 * floor)
            kept = _needed(keys, lambda keys: error(frozenset(keys)) <= enough)
            kept = _merged(kept, lambda keys: error(frozenset(keys)) <= enough)
        total = max(sum(site.flops for site in sites), 1)
        rules = [SuggestedRule(k, error(frozenset(kept) - {k}), _cost(k, sites)[0] / total) for k in kept]
        after, trials = error(frozenset(kept)), error.cache_info().misses
        report = SuggestionReport(tuple(rules), parse_format(dtype).name, tol, before, after, floor, trials)
        return Suggestion(dict.fromkeys(kept, "full"), report)

    return suggest


_DECIDED_BY_CODE = ("traced", "region", "unknown")  # reasons for a dtype that rules do not change
_PRIMITIVES = {p.name: p for p in vars(primitives).values() if isinstance(p, Primitive)}


def _candidates(sites: Iterable[OpSite]) -> list[Any]:
    """The modules that hold such ops themselves, as patterns, and the primitives that compute."""
    modules = {site.module: None for site in sites if site.module}
    names = {site.primitive: None for site in sites if site.primitive in _PRIMITIVES}
    return [*modules, *(_PRIMITIVES[name] for name in names if not _moves(name))]


def _moves(name: str) -> bool:
    rule = RULES[name]
    return isinstance(rule, Rule) and rule.moves


def _cost(key: Any, sites: Sequence[OpSite]) -> tuple[int, int]:
    """The FLOPs of the op sites that a rule is for, and the bytes of their results."""
    overrides = parse_rules({key: "full"})
    chosen = [s for s in sites if s.primitive in overrides.primitives or overrides.matching(s.module)]
    return sum(site.flops for site in chosen), sum(site.bytes for site in chosen)


def _needed(keys: list[Any], suffices: Callable[[Collection[Any]], bool]) -> list[Any]:
    """Returns keys that suffice, and of which none can be left out; `keys` suffice, and those in front go first."""

    def without(group: list[Any], kept: list[Any]) -> list[Any]:
        rest = [key for key in kept if key not in group]
        if suffices(rest):
            return rest
        if len(group) == 1:
            return kept
        half = len(group) // 2
        return without(group[half:], without(group[:half], kept))

    kept = without(keys, keys) if keys else keys
    while True:  # what was needed at first may not be after others went
        rest = next(([k for k in kept if k != key] for key in kept if suffices([k for k in kept if k != key])), None)
        if rest is None:
            return kept
        kept = rest


def _merged(keys: list[Any], suffices: Callable[[Collection[Any]], bool]) -> list[Any]:
    """Writes one pattern, `layer_*/norm`, for several modules that differ by a number, if that suffices too."""
    families = {key: re.sub(r"\d+", "*", key) if isinstance(key, str) else key for key in keys}
    several = {family for family, n in Counter(families.values()).items() if n > 1}
    merged = list(dict.fromkeys(family if family in several else key for key, family in families.items()))
    return merged if several and suffices(merged) else keys
