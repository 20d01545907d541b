"""The table of cures: the causes of non-finite values, and what to do about them.

A row is a line with a cause and its conditions, and then the text of the cure. All conditions must hold: `ends PATTERN`
(the op is the last op of a pattern of `_diagnosis`), `in PATTERN` (it is one of its ops), `behind PATTERN` (it reads
what the pattern computed), `of OP PATTERN` (the same as `ends`, and `OP` reads the `x` of the pattern too), `op OP OP`
(it is one of these primitives), `not NAME`, or a name. Names, also `{NAME}` in a text, are those of `_NAMES` and the
properties of `Diagnosis`.
"""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_amp.debug._diagnosis import NONZERO_OPERANDS, Diagnosis, upstream
from jmp_amp.debug._evaluation import Node, Values
from jmp_amp.debug._report import location_of

# Special cures come first, general ones last.
_TABLE = """
# Infinite operands and constants
masked row: infinite operand; op sub; in exp(_ - _)
    the softmax of a fully masked row of -inf is NaN: mask with a large finite number instead,
    `jnp.where(mask, x, jnp.finfo(x.dtype).min)`
mask product: infinite operand; op mul
    0 times an infinity is NaN: mask with `jnp.where(mask, x, jnp.finfo(x.dtype).min)` rather than with products and
    sums. If the code has no infinity: a constant such as -1e9 is -inf in float16
infinite operand: infinite operand
    an infinity meets an infinity here: replace infinities by a large finite number, `jnp.finfo(x.dtype).max` or `.min`.
    If the code has none: a constant such as -1e9 is -inf in float16
large constant: constant; op convert_element_type; not backward
    the constant {first operand} exceeds {largest}, the largest finite {dtype}: use `jnp.finfo(x.dtype).min` in a mask,
    or keep the ops that read the constant in float32 (autocast does so if the code is written in float32)

# Formulas that lose their values half-way, and that have a function, or another form, that does not
variance: variance
    `mean(x**2) - mean(x)**2` subtracts numbers that are equal but for rounding, so its result may be 0 or negative.
    Subtract the mean first: `jnp.mean((x - m)**2)` with `m = jnp.mean(x)` over the same axes, as `jnp.var` does; where
    all x may be equal, add an eps of {eps of rsqrt} inside the square root
log(1 + exp(x)): in log(1 + exp(x)) | log1p(exp(x))
    `log(1 + exp(x))` overflows half-way: use `jax.nn.softplus(x)`, which is `jnp.logaddexp(x, 0)`
log(exp(x) + exp(y)): in log(exp(x) + exp(y))
    `log(exp(x) + exp(y))` overflows or underflows half-way: use `jnp.logaddexp(x, y)`
log(cosh(x)): in log(cosh(x))
    `log(cosh(x))` overflows half-way: use `jnp.logaddexp(x, -x) - jnp.log(2.0)`
log(softmax(x)): in log(softmax(x)) | log(sum(softmax(x) * _))
    the logarithm of a probability that rounds to 0: use `jax.nn.log_softmax(x, axis)`, which computes the logarithm
    without the probability
log(sum(exp(x))): in log(sum(exp(x))) | log(sum(exp(x) * w))
    `log(sum(exp(x)))` overflows or underflows half-way: use `jax.nn.logsumexp(x, axis)`; for weights,
    `jax.nn.logsumexp(x, axis, b=w)`
log(mean(exp(x))): in log(mean(exp(x)))
    `log(mean(exp(x)))` overflows or underflows half-way: use `jax.nn.logsumexp(x, axis) - jnp.log(n)`, for a mean over
    n values
log(sigmoid(x)): in log(sigmoid(x))
    the logarithm of a probability that rounds to 0: use `jax.nn.log_sigmoid(x)`
log(1 - sigmoid(x)): in log(1 - sigmoid(x))
    the logarithm of a probability that rounds to 0: use `jax.nn.log_sigmoid(-x)`
log(1 - tanh(x)**2): in log(1 - square(tanh(x)))
    `1 - tanh(x)**2` rounds to 0: use `2 * (jnp.log(2.0) - x - jax.nn.softplus(-2 * x))`
log(1 - exp(x)): in log(1 - exp(x))
    `1 - exp(x)` rounds to 0 for small x: use `jnp.log(-jnp.expm1(x))`
log(exp(x)): in log(exp(x)) | log(exp(x) * _) | log(exp(x) / _)
    the logarithm of an exponential: leave both out. `jnp.log(exp(x) * c)` is `x + jnp.log(c)`, and
    `jnp.log(exp(x) / c)` is `x - jnp.log(c)`
log(prod(x)): in log(prod(_)) | log(_ * _); nonzero factors
    the product overflows or underflows before its logarithm: add the logarithms, `jnp.sum(jnp.log(x), axis)` instead of
    `jnp.log(jnp.prod(x, axis))`, and `jnp.log(x) + jnp.log(y)` instead of `jnp.log(x * y)`
tanh by hand: in (exp(x) - exp(-x)) / (exp(x) + exp(-x)) | (exp(x) - 1) / (exp(x) + 1)
    the exponential overflows: use `jnp.tanh(x)`; `(exp(x) - 1) / (exp(x) + 1)` is `jnp.tanh(x / 2)`
sigmoid by hand: in sigmoid(x) | _ / (1 + exp(_))
    the exponential overflows: use `jax.nn.sigmoid(x)` for `1 / (1 + exp(-x))`, `jax.nn.sigmoid(-x)` for
    `1 / (1 + exp(x))`, and `y * jax.nn.sigmoid(x)` for `y / (1 + exp(-x))`
softmax by hand: in weights(x) / (sum(exp(x)) | sum(exp(x) * _))
    use `jax.nn.softmax(x, axis)`, with `where=mask` for a mask: it subtracts the maximum before the exponential
x * log(x): divides by zero; in x * log(x)
    0 times the logarithm of 0 is NaN: `x * jnp.log(jnp.maximum(x, eps))` is 0 there, with an eps of {eps of log}, whose
    derivative is finite, too
x * log(x / y): in x * log(x / y)
    a probability of 0 in a Kullback-Leibler divergence:
    `p * (jnp.log(jnp.maximum(p, eps)) - jnp.log(jnp.maximum(q, eps)))`, with an eps of {eps of log}; or with logits,
    `jax.nn.log_softmax`
sin(x) / x: in sin(x) / x
    `sin(x) / x` is 0 / 0 at 0: use `jnp.sinc(x / jnp.pi)`
exp: exponential; not fits in float32
    `{primitive}` overflows {dtype}: its operand reaches {largest operand}. Compute with the logarithm as long as
    possible (`jax.nn.logsumexp`, `jax.nn.softplus`), or bound the operand:
    `jnp.clip(x, -{largest exponent}, {largest exponent})`

# Divisions by zero, and operands outside of the domain of their op
gradient that underflows: divides by zero; underflow; backward underflow
    the operand is 0 because {rounded to 0} in float16, whose smallest positive value is 6e-8. Gradients that underflow
    need a loss scale, or a larger one: `amp.value_and_grad(fun, loss_scale=scale)`, with the scale of
    `amp.dynamic_loss_scale`
underflow: divides by zero; underflow
    the operand is 0 because {rounded to 0} in float16, whose smallest positive value is 6e-8. To run that op in
    float32, {run in float32}; or use {a larger eps}; or avoid the small value: `jax.nn.log_softmax` and
    `jax.nn.log_sigmoid` compute the logarithm without the probability
eps that rounds to 0: divides by zero; has lost constant
    an eps of the code is 0 in {eps dtype}. To run the ops around it in float32, {run in float32}; or use {a larger eps}
branch of `where`: divides by zero; is under grad; other branch
    the gradient of both branches of `jnp.where` is computed, and 0 times an infinity is NaN. Replace the bad values
    before the op, too: `safe = jnp.where(mask, x, 1)`, then `jnp.where(mask, f(safe), other)`
derivative of a norm: divides by zero; is under grad; ends 0.5 / norm(_)
    this is the derivative of a norm at 0, which is infinite. Write the norm with an eps inside the square root:
    `jnp.sqrt(jnp.sum(x**2, axis) + {eps of rsqrt})` instead of `jnp.linalg.norm(x)`
derivative of a standard deviation: divides by zero; is under grad; ends 0.5 / sqrt(_); behind sum(square(_ - _)) / _
    this is the derivative of a standard deviation at 0, which is infinite. Add an eps inside the square root:
    `jnp.sqrt(jnp.var(x, axis) + {eps of rsqrt})` instead of `jnp.std(x, axis)`
derivative of sqrt: divides by zero; is under grad; ends 0.5 / sqrt(_)
    this is the derivative of a square root at 0, which is infinite. Add an eps inside the square root,
    `jnp.sqrt(x + {eps of rsqrt})`; or replace the zeros before and after it:
    `jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)`
derivative of cbrt: divides by zero; ends cbrt(_) ** -2
    this is the derivative of a cube root at 0, which is infinite. Replace the zeros before and after it:
    `jnp.where(x == 0, 0, jnp.cbrt(jnp.where(x == 0, 1, x)))`
derivative of an inverse function: divides by zero; arc
    this is the derivative of `{arc}` at the end of its domain, which is infinite. Stay inside: {bounded arc}
derivative of arctan2: divides by zero; of atan2 _ / (square(x) + square(_))
    this is the derivative of `arctan2` at (0, 0), where the angle is not defined. Replace the zeros before it:
    `jnp.arctan2(y, jnp.where((x == 0) & (y == 0), 1, x))`
power of 0: divides by zero; op pow
    a power of 0 with a negative exponent, as in the derivative of `x ** p` for p below 1, is infinite:
    `(x + eps) ** p`, with an eps of {eps of sqrt}, whose derivative is finite, too
division by a norm: divides by zero; ends _ / norm(_)
    the norm is 0. Add an eps inside the square root (outside, the gradient is NaN):
    `x / jnp.sqrt(jnp.sum(x**2, axis, keepdims=True) + {eps of rsqrt})`
division by a standard deviation: divides by zero; ends _ / sqrt(_)
    the square root is 0, as the standard deviation of constants is. Add an eps inside it (outside, the gradient is
    NaN): `x / jnp.sqrt(jnp.var(x, axis) + {eps of rsqrt})`
mean over nothing: divides by zero; ends sum(_) / sum(_)
    the sum of the mask, or of the weights, is 0: `total = jnp.sum(mask)`, then
    `jnp.sum(x * mask) / jnp.where(total == 0, 1, total)`, which is 0 there
log of 0: divides by zero; logarithm
    the operand is 0: bound it, {bounded log}, with which the derivative is finite, too. For the logarithm of a
    probability, use `jax.nn.log_softmax` or `jax.nn.log_sigmoid`
rsqrt of 0: divides by zero; op rsqrt
    the operand is 0: add an eps, `jax.lax.rsqrt(x + {eps of rsqrt})`, with which the derivative is finite, too
division by 0: divides by zero
    the divisor is 0. Replace the zeros before and after the division:
    `jnp.where(y == 0, limit, x / jnp.where(y == 0, 1, y))`, with the value that the quotient should have there; after
    it alone, the gradient is still NaN
small divisor: of div x ** -2
    this is the derivative of a division, 1 / y**2, and y is as small as {smallest operand}. If y is positive, add an
    eps of {eps of 1 / x}: with it the division and its derivative are finite in {eps dtype}
small operand of rsqrt: is under grad; ends rsqrt(x) / x
    this is the derivative of `rsqrt`, and its operand is as small as {smallest operand}. Add an eps of {eps of rsqrt}:
    with it `rsqrt` and its derivative are finite in {eps dtype}
outside of the domain: has a domain; not fits in float32
    the operand is outside of the domain, or at its end: bound it, {bounded op}, with which the derivative is finite,
    too
singular matrix: linear algebra
    the matrix is singular, or not positive definite, up to rounding: add a multiple of the identity,
    `a + eps * jnp.eye(n)`, with an eps of 1e-3 times its largest element, and compute the matrix in float32

# Finite values that exceed a dtype, and everything else
loss scale: fitting scale
    the loss scale is too large: a scale that is 2^{fitting scale} times smaller fits. Dynamic loss scaling finds it by
    skipping one step for each halving; a smaller `init_scale` avoids the skips
gradient at every loss scale: fits in float32; backward; no scale fits
    the gradient is {times too large}, and no smaller loss scale makes all results finite. To run this op in float32,
    {run in float32}
gradient: fits in float32; backward
    the gradient is {times too large}. If the loss is scaled, the scale is too large, by 2^{excess exponent} at least;
    `amp.value_and_grad` and `amp.dynamic_loss_scale` find one that fits. If it is not, run this op in float32:
    {run in float32}
sum of squares: fits in float32; in norm(_) | sqrt(mean(square(_)))
    {too large}: the squares of a norm overflow before their root. To compute the norm in float32, {run in float32}
sum of squares in float32: not fits in float32; in norm(_)
    the squares of a norm overflow before their root: take the largest magnitude out,
    `m = jax.lax.stop_gradient(jnp.max(jnp.abs(x)))`, then `m * jnp.sqrt(jnp.sum((x / m)**2))`
sum: fits in float32; sum
    {too large}: sum in float32, and keep the sum there, `jnp.sum(x, axis, dtype=jnp.float32)`, likewise with `jnp.mean`
    and `jnp.cumsum`; or {run in float32}
residual stream: fits in float32; op add add_any
    {too large}: keep this sum in float32. Under `autocast`, leave out `residual_stream`, or {run in float32}
cast: fits in float32; op convert_element_type
    {too large}: the value does not fit in the dtype that it is cast to. To run the op that reads it in float32,
    {run in float32}; or scale the value down before
kernel: is opaque
    `{primitive}` counts as one op: call `first_nonfinite` on the function inside it, on one shard or block; or run it
    in float32 to check whether precision is the cause
overflow: fits in float32
    {too large}. To run this op in float32, {run in float32}; or scale its operands down
overflow in float32: any op
    the result exceeds {largest}, the largest finite {dtype}, so low precision is not the cause. Check the inputs, the
    initial values and the learning rate
"""

# The functions that an eps must keep finite, by the primitive that computes them, or their derivative.
_NEEDS_EPS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("div", "rem", "integer_pow"), lambda x: 1 / x),
    **dict.fromkeys(("sqrt", "pow"), jnp.sqrt),
    "rsqrt": lax.rsqrt,
    "log": jnp.log,
    "log2": jnp.log2,
}

# The op with a bounded operand, by primitive.
_DOMAINS = {
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

# The derivatives of inverse functions, which are infinite at the ends of their domains.
_ARCS = {
    **dict.fromkeys(("asin", "acos"), "rsqrt(1 - square(x)) | rsqrt(one_minus_square(x))"),
    "acosh": "rsqrt(square(x) - 1) | rsqrt(x - 1)",
}

# The largest operand, by primitive, of which the result is a factor of 1000 below the largest float32.
_LARGEST_EXPONENTS = {"exp": 80, "expm1": 80, "cosh": 80, "sinh": 80, "exp2": 115}
_LINEAR_ALGEBRA = {"cholesky", "lu", "triangular_solve", "custom_linear_solve", "eigh", "eig", "svd"}
_SUMS = {"reduce_sum", "cumsum", "reduce_window_sum"}
_PRODUCTS = {"log", "mul", "reduce_prod"}  # and logarithms of them
_READ_VARIANCES = {"sqrt", "rsqrt", "div", "log", "pow", "integer_pow"}


def cure_of(d: Diagnosis) -> tuple[str, str]:
    """Returns the cause and the cure of a non-finite op: the first row that applies; the last applies to every op."""
    for cause, (conditions, text) in CURES.items():
        if all(_holds(condition, d) for condition in conditions.split("; ")):
            return cause, _filled(text, d)
    raise AssertionError("the last row applies to every op")


def _holds(condition: str, d: Diagnosis) -> Any:
    kind, _, rest = condition.partition(" ")
    return _KINDS[kind](d, rest) if kind in _KINDS else _named(condition, d)


def _named(name: str, d: Diagnosis) -> Any:
    found = _NAMES.get(name)
    if found is None:
        return getattr(d, name.replace(" ", "_"))
    return _filled(found, d) if isinstance(found, str) else found(d)


def _filled(text: str, d: Diagnosis) -> str:
    return re.sub(r"\{(.+?)\}", lambda found: str(_named(found[1], d)), " ".join(text.split()))


def _is_variance(d: Diagnosis) -> bool:
    reads_variance = d.primitive in _READ_VARIANCES
    return d.is_in("variance(x)") or (reads_variance and any(map(_cancels, d.found_behind("variance(x)"))))


def _cancels(difference: Node) -> bool:
    """Returns whether a difference is no larger than the rounding errors of what it is the difference of."""
    low, high = difference.values.min, difference.operands[0].values.max
    eps = float(jnp.finfo(difference.values.dtype).eps)
    return low is not None and high is not None and low <= 16 * eps * high


def _has_nonzero_factors(d: Diagnosis) -> bool:
    """Returns whether no factor of a product is 0; the gradient of `jnp.prod` is computed with a tree of products."""
    waiting = list(d.logarithms or [d.node])
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.primitive in _PRODUCTS:
            new = {x.origin for x in node.operands} - seen
            seen |= new
            waiting += new
        elif node.values.zeros:
            return False
    return True


def _is_in_other_branch(d: Diagnosis) -> bool:
    """Returns whether `jnp.where` selects between the op of which this is the derivative, and another value."""
    is_root = d.divisor.primitive == "sqrt"
    for op in [d.divisor] if is_root else [x for x in d.readers(d.divisor) if x.primitive in NONZERO_OPERANDS]:
        for result in (op, *d.readers(op)):
            for select in d.readers(result):
                branches = [x.origin for x in select.operands[1:]] if select.primitive == "select_n" else []
                if result in branches and not all(op in upstream(x) for x in branches):
                    return True
    return False


def _arc(d: Diagnosis) -> str:
    """Returns the inverse function whose derivative the op is part of; empty if there is none."""
    return next((name for name, pattern in _ARCS.items() if d.is_derivative_of(name, pattern)), "")


def _run_in_float32(d: Diagnosis) -> str:
    """Returns how to run the op in float32."""
    rule = f' or `rules={{"{d.location.scope}": "full"}}`' if d.location.scope else ""
    return (
        f"use `with amp.full_precision():` around that line{rule} if autocast chose {d.result.dtype}, or "
        "`.astype(jnp.float32)` if the code itself casts"
    )


def _eps(d: Diagnosis, primitive: str) -> str:
    """Returns the smallest power of ten at which an op and its derivative are finite in `d.eps_dtype`, as code.

    It is a normal number of that dtype, and at least 1e-12: float32 rounds to 1e-7.
    """
    for exponent in range(-12, 0):
        if 10.0**exponent >= float(jnp.finfo(d.eps_dtype).tiny):
            x = jnp.asarray(10.0**exponent, d.eps_dtype)
            if np.isfinite(jax.value_and_grad(_NEEDS_EPS[primitive])(x)).all():
                return f"1e{exponent}"
    return "1e-1"


def _larger_eps(d: Diagnosis) -> str:
    """Returns the eps to add where the op divides by 0, or takes the logarithm of 0."""
    if d.found_behind("sqrt(_)"):
        return f"a larger eps inside the square root, `jnp.sqrt(x + {_eps(d, 'rsqrt')})`"
    eps = _eps(d, d.primitive)
    return f"a larger eps, {eps}: with it `{d.primitive}` and its derivative are finite in {d.eps_dtype}"


def _in_domain(d: Diagnosis, primitive: str) -> str:
    """Returns the op with a bounded operand, as code."""
    near = f"1e-{6 if jnp.finfo(d.result.dtype).bits >= 32 else 2}"  # 1 - near is not 1, nor is its square
    eps = _eps(d, primitive if primitive in _NEEDS_EPS else "sqrt")
    return f"`{_DOMAINS[primitive].format(eps=eps, near=near)}`"


def _magnitudes(x: Values) -> tuple[float, float]:
    return abs(x.min or 0.0), abs(x.max or 0.0)


# The conditions with a pattern, or with names of primitives; other conditions are names.
_KINDS: Mapping[str, Callable[[Diagnosis, str], Any]] = {
    "in": Diagnosis.is_in,
    "ends": Diagnosis.ends,
    "behind": Diagnosis.found_behind,
    "of": lambda d, rest: d.is_derivative_of(*rest.split(" ", 1)),
    "op": lambda d, rest: d.primitive in rest.split(),
    "not": lambda d, rest: not _named(rest, d),
}

# What a name in the table stands for: as a condition, or as `{name}` in a text. Other names, such as `is opaque`, are
# properties of `Diagnosis`.
_NAMES: Mapping[str, str | Callable[[Diagnosis], Any]] = {
    "any op": lambda d: True,
    "backward": lambda d: d.location.backward,
    "backward underflow": lambda d: location_of(d.underflow.eqns).backward,
    "infinite operand": lambda d: any(x.infs for x in d.operands),
    "constant": lambda d: d.node.is_constant,
    "logarithm": lambda d: d.primitive in ("log", "log2") or d.logarithms,
    "nonzero factors": _has_nonzero_factors,
    "other branch": _is_in_other_branch,
    "variance": _is_variance,
    "arc": _arc,
    "exponential": lambda d: d.primitive in _LARGEST_EXPONENTS,
    "has a domain": lambda d: d.primitive in _DOMAINS and (d.result.nans or d.primitive != "pow"),
    "linear algebra": lambda d: d.primitive in _LINEAR_ALGEBRA,
    "sum": lambda d: d.node.origin.primitive in _SUMS,
    "fits in float32": lambda d: d.excess is not None,
    "no scale fits": lambda d: d.fitting_scale == 0,
    "dtype": lambda d: d.result.dtype,
    "largest": lambda d: f"{d.largest_finite:.5g}",
    "times too large": lambda d: f"{d.excess:.3g} times too large for {d.result.dtype}",
    "too large": "the result is {times too large}, whose largest finite value is {largest}",
    "excess exponent": lambda d: max(math.ceil(math.log2(d.excess or 1)), 1),
    "run in float32": _run_in_float32,
    "rounded to 0": lambda d: f"`{d.underflow.eqn.primitive.name}` {location_of(d.underflow.eqns).where} underflows",
    "eps of 1 / x": lambda d: _eps(d, "div"),
    "eps of sqrt": lambda d: _eps(d, "sqrt"),
    "eps of rsqrt": lambda d: _eps(d, "rsqrt"),
    "eps of log": lambda d: _eps(d, "log"),
    "a larger eps": _larger_eps,
    "bounded arc": lambda d: _in_domain(d, _arc(d)),
    "bounded log": lambda d: _in_domain(d, (d.logarithms or [d.node])[0].primitive),
    "bounded op": lambda d: _in_domain(d, d.primitive),
    "first operand": lambda d: f"{d.operands[0].min:.4g}",
    "smallest operand": lambda d: f"{min(_magnitudes(d.operands[-1])):.4g}",
    "largest operand": lambda d: f"{max(_magnitudes(d.operands[0])):.4g}",
    "largest exponent": lambda d: _LARGEST_EXPONENTS[d.primitive],
}


# The conditions and the text of each cause.
CURES = {row[1]: row.group(2, 3) for row in re.finditer(r"^([^\s#].*): (.*)\n((?: .*\n)+)", _TABLE, re.MULTILINE)}
