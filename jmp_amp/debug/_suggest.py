"""`suggest_rules`: finds the modules and primitives of a program that need float32."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Primitive, primitives

from jmp_amp._autocast import RULES, OpSite, Rule, autocast, parse_rules, parse_settings
from jmp_amp._calls import check_concrete, quote, transformation
from jmp_amp.debug._compare import floating_value_and_grad, measure, measure_reference, relative_error
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
    """Returns a function that finds a minimal set of rules with which the gradient of `fun` is accurate.

    The rules are `"full"`. For float8, rules that name the base dtype are tried first. Each rule selects a named scope
    (a Flax or Haiku module) or a primitive. The search starts with a rule for every scope and primitive and removes as
    many rules as it can, the most expensive first and in halves. It finds one sensitive part among n in about 2 log2(n)
    trials, and also finds parts that only matter together. Each trial compiles the gradient once.

    Args:
        fun: the loss function without any mixed precision. It returns a scalar, or `(loss, aux)` with `has_aux`.
        dtype: the compute dtype, as for `autocast`.
        loss_scale: multiplies the loss. None starts at 2^16 and halves the scale while the gradients overflow, down to
            1.
        argnums: as in `jax.value_and_grad`.
        has_aux: as in `jax.value_and_grad`.
        transform: as in `amp.debug.compare`.
        **options: other options of `autocast`: `policy`, instead of `dtype`, `save`, `weight_grad_dtype`,
            `residual_stream`.

    Returns:
        A function that takes the arguments of `fun` and the keyword argument `tol`, and returns `(rules, report)`.
        `tol` is the largest gradient error: the norm of the difference over the norm, for all parameters together; it
        defaults to 1e-2. Every returned rule is necessary. If no rules meet `tol`, the error with the returned rules is
        at most 1.1 times the error with all rules, and `report.met` is False.

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
    settings = parse_settings(dtype, **options)
    grad_options: dict[str, Any] = {"argnums": argnums, "has_aux": has_aux, "transform": transform}

    @functools.wraps(fun, updated=())
    def suggest(*args: Any, tol: float = 1e-2, **kwargs: Any) -> Suggestion:
        if not tol > 0:
            raise ValueError(f"`tol` must be positive, got {quote(tol)}; 1e-2 allows an error of 1 percent")
        check_concrete((args, kwargs), "suggest_rules")
        exact = measure_reference(fun, args, kwargs, "float32", **grad_options).all_grads

        @functools.cache
        def error(keys: frozenset[Any], value: str) -> float:
            low = autocast(fun, dtype, rules=dict.fromkeys(keys, value), **options)
            measured = measure(low, args, kwargs, loss_scale, **grad_options)
            return relative_error(measured.all_grads, exact) if measured.is_finite else math.inf

        form, value = settings.format, "full"
        error_before, error_floor = error(frozenset(), value), math.nan
        keys, sites = list[Any](), list[OpSite]()
        if error_before > tol:
            forward = explain(fun, dtype, **options)(*args, **kwargs).select(direction="forward").rows
            sites = [site for site in forward if site.compute != "float32" and site.why not in _INDEPENDENT_OF_RULES]
            of_float8 = [site for site in sites if site.compute.startswith("float8") and site.module]
            # A class is no dtype, so a primitive cannot have a rule with the base dtype; modules can.
            if of_float8 and error(frozenset(site.module for site in of_float8), form.dtype.name) <= tol:
                sites, value = [site._replace(primitive="") for site in of_float8], form.dtype.name
            keys, error_floor = _search(sites, lambda keys: error(keys, value), tol)
        flops = max(sum(site.flops for site in sites), 1)
        rules = [SuggestedRule(k, error(frozenset(keys) - {k}, value), _cost(k, sites)[0] / flops) for k in keys]
        errors = error_before, error(frozenset(keys), value), error_floor
        report = SuggestionReport(tuple(rules), form.name, tol, *errors, error.cache_info().misses, value)
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


@dataclasses.dataclass(frozen=True)
class SuggestionReport:
    """The errors behind the rules of `suggest_rules`. `print` shows a table.

    A gradient error is the norm of the difference to the float32 gradients, for all parameters together, over the norm
    of the float32 gradients; it is infinite if the loss or the gradients are not finite.

    Attributes:
        rows: a `SuggestedRule` for each rule.
        dtype: the compute dtype.
        tol: the `tol` of the call.
        error_before: the gradient error without rules.
        error: the gradient error with the suggested rules.
        error_floor: the gradient error with a rule for every module and primitive; NaN if `error_before` meets `tol`.
        trials: the number of sets of rules that were tried; each compiles once.
        value: the value of all suggested rules: `"full"`, or the base dtype of a float8 format.
    """

    rows: tuple[SuggestedRule, ...]
    dtype: str
    tol: float
    error_before: float
    error: float
    error_floor: float
    trials: int
    value: str = "full"

    @property
    def met(self) -> bool:
        """Whether `error` is at most `tol`."""
        return self.error <= self.tol

    def __str__(self) -> str:
        lines = [f"gradient error in {self.dtype}: {self.error_before:.1e} without rules"]
        if self.rows:
            lines[0] += f", {self.error:.1e} with these rules (tol={self.tol:g}, {self.trials} trials)"
            cells = [(f"{row.key}", f"{row.error_without:.1e}", format_percent(row.flops)) for row in self.rows]
            lines.append(format_table([(self.value, "without it", "FLOPs"), *cells]))
        if not self.met:
            lines.append(
                f"No rules meet `tol`: with all of them the error is {self.error_floor:.1e}. Check the code for casts "
                "and `precision` regions, and the gradients for overflow at every loss scale."
            )
        return "\n".join(lines)


class Suggestion(NamedTuple):
    """The result of `suggest_rules`.

    Attributes:
        rules: for `autocast(fun, rules=rules)` or `policy.with_rules(rules)`; empty if no rule is needed.
        report: the errors behind the rules.
    """

    rules: dict[Any, str]
    report: SuggestionReport


def _search(sites: Sequence[OpSite], error: Callable[[frozenset[Any]], float], tol: float) -> tuple[list[Any], float]:
    """Returns a minimal list of keys with a small enough error, and the error with all candidates."""
    candidates = sorted(_candidates(sites), key=lambda key: _cost(key, sites), reverse=True)
    error_floor = error(frozenset(candidates))
    limit = max(tol, 1.1 * error_floor)

    def suffices(keys: Collection[Any]) -> bool:
        return error(frozenset(keys)) <= limit

    return _merge_numbered(_minimal_subset(candidates, suffices), suffices), error_floor


def _candidates(sites: Iterable[OpSite]) -> list[Any]:
    """Returns the modules of the sites, as patterns, and their primitives, except those that only move values."""
    modules = dict.fromkeys(site.module for site in sites if site.module)
    names = dict.fromkeys(site.primitive for site in sites if site.primitive in _PRIMITIVES)
    return [*modules, *(_PRIMITIVES[x] for x in names if not (isinstance(rule := RULES[x], Rule) and rule.moves))]


def _cost(key: Any, sites: Sequence[OpSite]) -> tuple[int, int]:
    """Returns the FLOPs of the op sites that a rule selects, and the bytes of their results."""
    overrides = parse_rules({key: "full"})
    selected = [s for s in sites if s.primitive in overrides.primitives or overrides.matching(s.module)]
    return sum(site.flops for site in selected), sum(site.bytes for site in selected)


def _minimal_subset(keys: list[Any], suffices: Callable[[Collection[Any]], bool]) -> list[Any]:
    """Returns keys that suffice, each of which is necessary; `keys` must suffice, and its first keys go first."""

    def remove(group: list[Any], remaining: list[Any]) -> list[Any]:
        rest = [key for key in remaining if key not in group]
        if suffices(rest):
            return rest
        if len(group) == 1:
            return remaining
        half = len(group) // 2
        return remove(group[half:], remove(group[:half], remaining))

    fewer = remove(keys, keys)
    # A key may be unnecessary once later keys are removed.
    return keys if fewer == keys else _minimal_subset(fewer, suffices)


def _merge_numbered(keys: list[Any], suffices: Callable[[Collection[Any]], bool]) -> list[Any]:
    """Replaces modules that differ in numbers only with one pattern, `layer_*/norm`, if the result suffices."""
    patterns = [without_numbers(key) if isinstance(key, str) else key for key in keys]
    merged = dict.fromkeys(p if patterns.count(p) > 1 else key for key, p in zip(keys, patterns, strict=True))
    return list(merged) if len(merged) < len(keys) and suffices(merged) else keys
