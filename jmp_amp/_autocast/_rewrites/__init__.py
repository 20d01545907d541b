"""Rewrites: other ways to evaluate an op, which change its derivative.

Each file has one rewrite. Its `match` returns a function that evaluates an op, or None if the rewrite does not apply.
"""

from jmp_amp._autocast._op import Rewrite
from jmp_amp._autocast._rewrites import (
    _broadcast_bias,
    _float8_product,
    _float32_weight_grad,
    _gather_low,
    _take_label_logit,
)
from jmp_amp._autocast._rewrites._decided import Decided
from jmp_amp._autocast._rewrites._float8_product import Float8Product, why_not_float8

_REWRITES = (_take_label_logit, _gather_low, _float8_product, _float32_weight_grad, _broadcast_bias)


def rewrite_of(decided: Decided) -> Rewrite | None:
    """Returns the first rewrite that applies to an op, None if none does."""
    return next((run for rewrite in _REWRITES if (run := rewrite.match(decided)) is not None), None)


__all__ = ["Decided", "Float8Product", "rewrite_of", "why_not_float8"]
