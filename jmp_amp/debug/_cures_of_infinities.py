"""The cures of infinite operands and constants."""

from collections.abc import Sequence

from jmp_amp.debug._cure import Cure
from jmp_amp.debug._diagnosis import Diagnosis


def _has_infinite_operand(d: Diagnosis) -> bool:
    return any(x.infs for x in d.operands)


CURES_OF_INFINITIES: Sequence[Cure] = (
    Cure(
        "masked row",
        lambda d: _has_infinite_operand(d) and d.primitive == "sub" and d.is_in("exp(_ - _)"),
        "the softmax of a fully masked row of -inf is NaN: mask with a large finite number instead, "
        "`jnp.where(mask, x, jnp.finfo(x.dtype).min)`",
    ),
    Cure(
        "mask product",
        lambda d: _has_infinite_operand(d) and d.primitive == "mul",
        "0 times an infinity is NaN: mask with `jnp.where(mask, x, jnp.finfo(x.dtype).min)` rather than with products "
        "and sums. If the code has no infinity: a constant such as -1e9 is -inf in float16",
    ),
    Cure(
        "infinite operand",
        _has_infinite_operand,
        "an infinity meets an infinity here: replace infinities by a large finite number, "
        "`jnp.finfo(x.dtype).max` or `.min`. If the code has none: a constant such as -1e9 is -inf in float16",
    ),
    Cure(
        "large constant",
        lambda d: d.is_constant and d.primitive == "convert_element_type" and not d.location.backward,
        lambda d: (
            f"the constant {d.operands[0].min:.4g} exceeds {d.largest_finite}, the largest finite {d.result.dtype}: "
            "use `jnp.finfo(x.dtype).min` in a mask, or keep the ops that read the constant in float32 (autocast does "
            "so if the code is written in float32)"
        ),
    ),
)
