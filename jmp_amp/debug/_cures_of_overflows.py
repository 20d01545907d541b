"""The cures of finite values that exceed a dtype, and the cure of everything else."""

import math
from collections.abc import Sequence

from jmp_amp.debug._cure import Cure, run_in_float32
from jmp_amp.debug._diagnosis import Diagnosis

_SUMS = {"reduce_sum", "cumsum", "reduce_window_sum"}


def _too_large(d: Diagnosis) -> str:
    return (
        f"the result is {d.excess:.3g} times too large for {d.result.dtype}, whose largest finite value is "
        f"{d.largest_finite}"
    )


def _exponent(d: Diagnosis) -> int:
    return max(math.ceil(math.log2(d.excess or 1)), 1)


CURES_OF_OVERFLOWS: Sequence[Cure] = (
    Cure(
        "loss scale",
        lambda d: bool(d.fitting_scale),
        lambda d: (
            f"the loss scale is too large: a scale that is 2^{d.fitting_scale} times smaller fits. Dynamic loss "
            "scaling finds it by skipping one step for each halving; a smaller `init_scale` avoids the skips"
        ),
    ),
    Cure(
        "gradient at every loss scale",
        lambda d: d.excess is not None and d.location.backward and d.fitting_scale == 0,
        lambda d: (
            f"the gradient is {d.excess:.3g} times too large for {d.result.dtype}, and no smaller loss scale makes all "
            f"results finite. To run this op in float32, {run_in_float32(d)}"
        ),
    ),
    Cure(
        "gradient",
        lambda d: d.excess is not None and d.location.backward,
        lambda d: (
            f"the gradient is {d.excess:.3g} times too large for {d.result.dtype}. If the loss is scaled, the scale is "
            f"too large, by 2^{_exponent(d)} at least; `amp.value_and_grad` and `amp.dynamic_loss_scale` find one that "
            f"fits. If it is not, run this op in float32: {run_in_float32(d)}"
        ),
    ),
    Cure(
        "sum of squares",
        lambda d: d.excess is not None and d.is_in("sqrt(sum(square(_))) | sqrt(mean(square(_)))"),
        lambda d: (
            f"{_too_large(d)}: the squares of a norm overflow before their root. To compute the norm in float32, "
            f"{run_in_float32(d)}"
        ),
    ),
    Cure(
        "sum of squares in float32",
        lambda d: d.excess is None and d.is_in("sqrt(sum(square(_)))"),
        "the squares of a norm overflow before their root: take the largest magnitude out, "
        "`m = jax.lax.stop_gradient(jnp.max(jnp.abs(x)))`, then `m * jnp.sqrt(jnp.sum((x / m)**2))`",
    ),
    Cure(
        "sum",
        lambda d: d.excess is not None and d.node.origin.primitive in _SUMS,
        lambda d: (
            f"{_too_large(d)}: sum in float32, and keep the sum there, `jnp.sum(x, axis, dtype=jnp.float32)`, likewise "
            f"with `jnp.mean` and `jnp.cumsum`; or {run_in_float32(d)}"
        ),
    ),
    Cure(
        "residual stream",
        lambda d: d.excess is not None and d.primitive in ("add", "add_any"),
        lambda d: (
            f"{_too_large(d)}: keep this sum in float32. Under `autocast`, leave out `residual_stream`, or "
            f"{run_in_float32(d)}"
        ),
    ),
    Cure(
        "cast",
        lambda d: d.excess is not None and d.primitive == "convert_element_type",
        lambda d: (
            f"{_too_large(d)}: the value does not fit in the dtype that it is cast to. To run the op that reads it in "
            f"float32, {run_in_float32(d)}; or scale the value down before"
        ),
    ),
    Cure(
        "kernel",
        lambda d: d.is_opaque,
        lambda d: (
            f"`{d.primitive}` counts as one op: call `first_nonfinite` on the function inside it, on one shard or "
            "block; or run it in float32 to check whether precision is the cause"
        ),
    ),
    Cure(
        "overflow",
        lambda d: d.excess is not None,
        lambda d: f"{_too_large(d)}. To run this op in float32, {run_in_float32(d)}; or scale its operands down",
    ),
    Cure(
        "overflow in float32",
        lambda d: True,
        lambda d: (
            f"the result exceeds {d.largest_finite}, the largest finite {d.result.dtype}, so low precision is not the "
            "cause. Check the inputs, the initial values and the learning rate"
        ),
    ),
)
