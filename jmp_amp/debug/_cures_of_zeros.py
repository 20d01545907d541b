"""The cures of divisions by zero, and of operands outside of the domain of their op."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from jmp_amp.debug._cure import Cure, run_in_float32
from jmp_amp.debug._diagnosis import Diagnosis
from jmp_amp.debug._node import Node, upstream

_IN_FLOAT16 = "underflows in float16, whose smallest positive value is 6e-8"


def _underflow(d: Diagnosis) -> str:
    where = d.underflow.where if d.underflow else ""
    return f"the operand is 0 because `{d.underflow_primitive}` {where} {_IN_FLOAT16}"


def _larger_eps(d: Diagnosis) -> str:
    """Returns the eps to add where the op of `d` divides by 0, or takes the logarithm of 0."""
    if d.is_behind("sqrt(_)"):
        return f"a larger eps inside the square root, `jnp.sqrt(x + {d.eps_for(_inverse_root)})`"
    name, fun = ("log", jnp.log) if d.primitive == "log" else (d.primitive, _OPS[d.primitive])
    return f"a larger eps, {d.eps_for(fun)}: with it `{name}` and its derivative are finite in {d.eps_dtype}"


def _inverse(x: Any) -> Any:
    return 1 / x


def _inverse_root(x: Any) -> Any:
    return 1 / jnp.sqrt(x)


_OPS: dict[str, Callable[[Any], Any]] = {
    "div": _inverse,
    "rem": _inverse,
    "integer_pow": _inverse,
    "pow": jnp.sqrt,
    "rsqrt": lax.rsqrt,
    "log": jnp.log,
    "log2": jnp.log2,
}


def _is_in_other_branch(d: Diagnosis) -> bool:
    """Returns whether `jnp.where` selects between the op of which this is the derivative, and another value."""
    if not (d.divides_by_zero and d.is_differentiated):
        return False
    zero = d.divisor
    ops = [zero] if zero.primitive == "sqrt" else [op for op in d.flow.readers(zero) if op.primitive in _OPS]
    return any(_is_replaced(d, result, op) for op in ops for result in (op, *d.flow.readers(op)))


def _is_replaced(d: Diagnosis, result: Node, op: Node) -> bool:
    """Returns whether `jnp.where` selects between `result`, which depends on `op`, and a value that does not."""
    for select in d.flow.readers(result):
        branches = [x.origin for x in select.operands[1:]]
        if select.primitive == "select_n" and result in branches and not all(op in upstream(x) for x in branches):
            return True
    return False


_DOMAINS = {  # the op with a bounded operand, by primitive
    "log": "jnp.log(jnp.maximum(x, {eps}))",
    "log2": "jnp.log2(jnp.maximum(x, {eps}))",
    "log1p": "jnp.log1p(jnp.maximum(x, -1 + {near}))",
    "sqrt": "jnp.sqrt(jnp.maximum(x, {eps}))",
    "rsqrt": "jax.lax.rsqrt(jnp.maximum(x, {eps}))",
    "pow": "jnp.maximum(x, {eps}) ** y",
    "asin": "jnp.arcsin(jnp.clip(x, -1 + {near}, 1 - {near}))",
    "acos": "jnp.arccos(jnp.clip(x, -1 + {near}, 1 - {near}))",
    "atanh": "jnp.arctanh(jnp.clip(x, -1 + {near}, 1 - {near}))",
    "acosh": "jnp.arccosh(jnp.maximum(x, 1 + {near}))",
    "erf_inv": "jax.lax.erf_inv(jnp.clip(x, -1 + {near}, 1 - {near}))",
}


def _in_domain(d: Diagnosis, primitive: str | None = None) -> str:
    """Returns the op with a bounded operand, as code."""
    primitive = primitive or d.primitive
    near = f"1e-{6 if jnp.finfo(d.result.dtype).bits >= 32 else 2}"  # 1 - near is not 1, nor is its square
    return f"`{_DOMAINS[primitive].format(eps=d.eps_for(_OPS.get(primitive, jnp.sqrt)), near=near)}`"


def _arc(d: Diagnosis) -> str:
    """Returns the inverse function whose derivative the op is part of; empty if there is none."""
    for primitive, pattern in _ARCS.items():
        if d.is_derivative_of({primitive}, pattern):
            return primitive
    return ""


_ARCS = {
    "asin": "rsqrt(1 - square(x)) | rsqrt(one_minus_square(x))",
    "acos": "rsqrt(1 - square(x)) | rsqrt(one_minus_square(x))",
    "acosh": "rsqrt(square(x) - 1) | rsqrt(x - 1)",
}

_LINEAR_ALGEBRA = {"cholesky", "lu", "triangular_solve", "custom_linear_solve", "eigh", "eig", "svd"}

CURES_OF_ZEROS: Sequence[Cure] = (
    Cure(
        "gradient that underflows",
        lambda d: d.divides_by_zero and d.underflow is not None and d.underflow.backward,
        lambda d: (
            f"{_underflow(d)}. Gradients that underflow need a loss scale, or a larger one: "
            "`amp.value_and_grad(fun, loss_scale=scale)`, with the scale of `amp.dynamic_loss_scale`"
        ),
    ),
    Cure(
        "underflow",
        lambda d: d.divides_by_zero and d.underflow is not None,
        lambda d: (
            f"{_underflow(d)}. To run that op in float32, {run_in_float32(d)}; or use {_larger_eps(d)}; or avoid the "
            "small value: `jax.nn.log_softmax` and `jax.nn.log_sigmoid` compute the logarithm without the probability"
        ),
    ),
    Cure(
        "eps that rounds to 0",
        lambda d: d.divides_by_zero and d.has_lost_constant,
        lambda d: (
            f"an eps of the code is 0 in {d.eps_dtype}. To run the ops around it in float32, {run_in_float32(d)}; or "
            f"use {_larger_eps(d)}"
        ),
    ),
    Cure(
        "branch of `where`",
        _is_in_other_branch,
        "the gradient of both branches of `jnp.where` is computed, and 0 times an infinity is NaN. Replace the bad "
        "values before the op, too: `safe = jnp.where(mask, x, 1)`, then `jnp.where(mask, f(safe), other)`",
    ),
    Cure(
        "derivative of a norm",
        lambda d: d.divides_by_zero and d.is_differentiated and d.is_("0.5 / sqrt(sum(square(_)))"),
        lambda d: (
            "this is the derivative of a norm at 0, which is infinite. Write the norm with an eps inside the square "
            f"root: `jnp.sqrt(jnp.sum(x**2, axis) + {d.eps_for(_inverse_root)})` instead of `jnp.linalg.norm(x)`"
        ),
    ),
    Cure(
        "derivative of a standard deviation",
        lambda d: (
            d.divides_by_zero
            and d.is_differentiated
            and d.is_("0.5 / sqrt(_)")
            and d.is_behind("sum(square(_ - _)) / _")
        ),
        lambda d: (
            "this is the derivative of a standard deviation at 0, which is infinite. Add an eps inside the square "
            f"root: `jnp.sqrt(jnp.var(x, axis) + {d.eps_for(_inverse_root)})` instead of `jnp.std(x, axis)`"
        ),
    ),
    Cure(
        "derivative of sqrt",
        lambda d: d.divides_by_zero and d.is_differentiated and d.is_("0.5 / sqrt(_)"),
        lambda d: (
            "this is the derivative of a square root at 0, which is infinite. Add an eps inside the square root, "
            f"`jnp.sqrt(x + {d.eps_for(_inverse_root)})`; or replace the zeros before and after it: "
            "`jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)`"
        ),
    ),
    Cure(
        "derivative of cbrt",
        lambda d: d.divides_by_zero and d.is_("cbrt(_) ** -2"),
        "this is the derivative of a cube root at 0, which is infinite. Replace the zeros before and after it: "
        "`jnp.where(x == 0, 0, jnp.cbrt(jnp.where(x == 0, 1, x)))`",
    ),
    Cure(
        "derivative of an inverse function",
        lambda d: d.divides_by_zero and bool(_arc(d)),
        lambda d: (
            f"this is the derivative of `{_arc(d)}` at the end of its domain, which is infinite. Stay inside: "
            f"{_in_domain(d, _arc(d))}"
        ),
    ),
    Cure(
        "derivative of arctan2",
        lambda d: d.divides_by_zero and d.is_derivative_of({"atan2"}, "_ / (square(x) + square(_))"),
        "this is the derivative of `arctan2` at (0, 0), where the angle is not defined. Replace the zeros before it: "
        "`jnp.arctan2(y, jnp.where((x == 0) & (y == 0), 1, x))`",
    ),
    Cure(
        "power of 0",
        lambda d: d.divides_by_zero and d.primitive == "pow",
        lambda d: (
            "a power of 0 with a negative exponent, as in the derivative of `x ** p` for p below 1, is infinite: "
            f"`(x + eps) ** p`, with an eps of {d.eps_for(jnp.sqrt)}, whose derivative is finite, too"
        ),
    ),
    Cure(
        "division by a norm",
        lambda d: d.divides_by_zero and d.is_("_ / sqrt(sum(square(_)))"),
        lambda d: (
            "the norm is 0. Add an eps inside the square root (outside, the gradient is NaN): "
            f"`x / jnp.sqrt(jnp.sum(x**2, axis, keepdims=True) + {d.eps_for(_inverse_root)})`"
        ),
    ),
    Cure(
        "division by a standard deviation",
        lambda d: d.divides_by_zero and d.primitive == "div" and d.divisor.primitive == "sqrt",
        lambda d: (
            "the square root is 0, as the standard deviation of constants is. Add an eps inside it (outside, the "
            f"gradient is NaN): `x / jnp.sqrt(jnp.var(x, axis) + {d.eps_for(_inverse_root)})`"
        ),
    ),
    Cure(
        "mean over nothing",
        lambda d: d.divides_by_zero and d.is_("sum(_) / sum(_)"),
        "the sum of the mask, or of the weights, is 0: `total = jnp.sum(mask)`, then "
        "`jnp.sum(x * mask) / jnp.where(total == 0, 1, total)`, which is 0 there",
    ),
    Cure(
        "log of 0",
        lambda d: d.divides_by_zero and (d.primitive in ("log", "log2") or bool(d.logarithms)),
        lambda d: (
            f"the operand is 0: bound it, {_in_domain(d, (d.logarithms or [d.node])[0].primitive)}, with which the "
            "derivative is finite, too. For the logarithm of a probability, use `jax.nn.log_softmax` or "
            "`jax.nn.log_sigmoid`"
        ),
    ),
    Cure(
        "rsqrt of 0",
        lambda d: d.divides_by_zero and d.primitive == "rsqrt",
        lambda d: (
            f"the operand is 0: add an eps, `jax.lax.rsqrt(x + {d.eps_for(lax.rsqrt)})`, with which the derivative "
            "is finite, too"
        ),
    ),
    Cure(
        "division by 0",
        lambda d: d.divides_by_zero,
        "the divisor is 0. Replace the zeros before and after the division: "
        "`jnp.where(y == 0, limit, x / jnp.where(y == 0, 1, y))`, with the value that the quotient should have there; "
        "after it alone, the gradient is still NaN",
    ),
    Cure(
        "small divisor",
        lambda d: d.is_derivative_of({"div"}, "x ** -2"),
        lambda d: (
            f"this is the derivative of a division, 1 / y**2, and y is as small as {_smallest(d):.4g}. If y is "
            f"positive, add an eps of {d.eps_for(_inverse)}: with it the division and its derivative are finite in "
            f"{d.eps_dtype}"
        ),
    ),
    Cure(
        "small operand of rsqrt",
        lambda d: d.is_differentiated and d.is_("rsqrt(x) / x"),
        lambda d: (
            f"this is the derivative of `rsqrt`, and its operand is as small as {_smallest(d):.4g}. Add an eps of "
            f"{d.eps_for(lax.rsqrt)}: with it `rsqrt` and its derivative are finite in {d.eps_dtype}"
        ),
    ),
    Cure(
        "outside of the domain",
        lambda d: d.primitive in _DOMAINS and d.excess is None and (d.result.nans > 0 or d.primitive != "pow"),
        lambda d: (
            f"the operand is outside of the domain, or at its end: bound it, {_in_domain(d)}, with which the "
            "derivative is finite, too"
        ),
    ),
    Cure(
        "singular matrix",
        lambda d: d.primitive in _LINEAR_ALGEBRA,
        "the matrix is singular, or not positive definite, up to rounding: add a multiple of the identity, "
        "`a + eps * jnp.eye(n)`, with an eps of 1e-3 times its largest element, and compute the matrix in "
        "float32",
    ),
)


def _smallest(d: Diagnosis) -> float:
    x = d.operands[-1]
    return min(abs(x.min or 0.0), abs(x.max or 0.0))
