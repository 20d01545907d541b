"""`Suggestion`: the rules that `suggest_rules` suggests, and their report."""

import dataclasses
from typing import Any, NamedTuple

from jmp_amp.debug._table import format_percent, format_table

Rules = dict[Any, str]


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
        head = f"gradient error in {self.dtype}: {self.error_before:.1e} without rules"
        if self.rows:
            head += f", {self.error:.1e} with these rules (tol={self.tol:g}, {self.trials} trials)"
        lines = [head]
        if self.rows:
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

    rules: Rules
    report: SuggestionReport
