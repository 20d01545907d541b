"""The suggested fixes for a non-finite op: a table of conditions and texts."""

import math
from collections.abc import Callable, Sequence

from jmp_amp.debug._diagnosis import Diagnosis


def cure_of(diagnosis: Diagnosis) -> str:
    """Returns the suggested fixes: the text of the first condition in the table that holds."""
    return next(text(diagnosis) for applies, text in _CURES if applies(diagnosis))


def _run_in_float32(d: Diagnosis) -> str:
    rule = f' or `rules={{"{d.location.scope}": "full"}}`' if d.location.scope else ""
    return (
        f"use `with amp.full_precision():` around that line{rule} if autocast chose {d.result.dtype}, or "
        "`.astype(jnp.float32)` if the code itself casts"
    )


def _underflow(d: Diagnosis) -> str:
    where = d.underflow.where if d.underflow else ""
    return (
        f"the operand is 0 because `{d.underflow_primitive}` {where} underflows in float16, whose smallest positive "
        "value is 6e-8"
    )


_EXPONENTIALS = {"exp", "exp2", "expm1", "cosh", "sinh"}
_WITH_DOMAIN = {"log", "log2", "log1p", "sqrt", "rsqrt", "pow", "asin", "acos", "acosh", "atanh", "erf_inv"}
_LINEAR_ALGEBRA = {"cholesky", "lu", "triangular_solve", "custom_linear_solve", "eigh", "eig", "svd"}

_CURES: Sequence[tuple[Callable[[Diagnosis], bool], Callable[[Diagnosis], str]]] = (
    (
        lambda d: any(x.infs for x in d.operands),
        lambda d: (
            "the op subtracts an infinity from itself or multiplies it by 0. If the infinity is intended (a mask of "
            "-inf): the softmax of a fully masked row is NaN, so mask with a large finite number, "
            "`jnp.finfo(x.dtype).min`, and with `jnp.where` rather than sums and products. If it is not: a constant "
            "such as -1e9 is -inf in float16"
        ),
    ),
    (
        lambda d: d.is_constant,
        lambda d: (
            f"the constant {d.operands[0].min:.4g} exceeds {d.largest_finite}, the largest finite {d.result.dtype}: "
            "use `jnp.finfo(x.dtype).min` in a mask, or keep the ops that read the constant in float32 (autocast does "
            "so if the code is written in float32)"
        ),
    ),
    (
        lambda d: d.primitive in _EXPONENTIALS,
        lambda d: (
            "subtract the maximum before the exponential, as `jax.nn.softmax`, `jax.nn.logsumexp` and "
            "`jax.nn.log_softmax` do: `jnp.exp(x - jnp.max(x, axis, keepdims=True))`"
        ),
    ),
    (
        lambda d: d.divides_by_zero and d.underflow is not None and d.underflow.backward,
        lambda d: (
            f"{_underflow(d)}. Gradients that underflow need a loss scale, or a larger one: "
            "`amp.value_and_grad(fun, loss_scale=scale)`, with the scale of `amp.dynamic_loss_scale`"
        ),
    ),
    (
        lambda d: d.divides_by_zero and d.underflow is not None,
        lambda d: (
            f"{_underflow(d)}. To run that op in float32, {_run_in_float32(d)}; or use a larger eps; or avoid the "
            "small value: `jax.nn.log_softmax` and `jax.nn.log_sigmoid` compute the logarithm without the probability"
        ),
    ),
    (
        lambda d: d.divides_by_zero,
        lambda d: (
            "the operand is 0: add an eps to it (above 6e-8 in float16), inside a square root rather than outside, "
            "or replace the zeros with `jnp.where` before the op (after it, the gradient is still NaN); for the "
            "logarithm of a probability, use `jax.nn.log_softmax` or `jax.nn.log_sigmoid`"
        ),
    ),
    (
        lambda d: d.primitive in _WITH_DOMAIN and d.result.nans > 0,
        lambda d: "the operand is outside of the domain: apply `jnp.maximum(x, eps)` or `jnp.clip` before the op",
    ),
    (
        lambda d: d.primitive in _LINEAR_ALGEBRA,
        lambda d: (
            "the matrix is singular, or not positive definite, up to rounding: add a multiple of the identity, "
            "`a + eps * jnp.eye(n)`, and compute the matrix in float32"
        ),
    ),
    (
        lambda d: d.is_opaque,
        lambda d: (
            f"`{d.primitive}` counts as one op: call `first_nonfinite` on the function inside it, on one shard or "
            "block; or run it in float32 to check whether precision is the cause"
        ),
    ),
    (
        lambda d: d.excess is not None and d.location.backward and d.excess < 2.0**24,
        lambda d: (
            f"the gradient is {d.excess:.3g} times too large for {d.result.dtype}. If the loss is scaled, a scale that "
            f"is 2^{max(math.ceil(math.log2(d.excess or 1)), 1)} times smaller fits: dynamic loss scaling finds it by "
            "skipping one step for each halving; a smaller `init_scale` avoids the skips. If the scale is 1, or keeps "
            f"falling that far, run this op in float32: {_run_in_float32(d)}"
        ),
    ),
    (
        lambda d: d.excess is not None,
        lambda d: (
            f"the result is {d.excess:.3g} times too large for {d.result.dtype}, whose largest finite value is "
            f"{d.largest_finite}. To run this op in float32, {_run_in_float32(d)}; or scale its operands down"
        ),
    ),
    (
        lambda d: True,
        lambda d: (
            "precision is not the cause: the op runs in float32, or its result overflows float32 too. Check the "
            "inputs, the initial values and the learning rate"
        ),
    ),
)
