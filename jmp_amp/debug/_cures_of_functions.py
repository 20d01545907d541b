"""The cures of formulas that lose their values half-way, and that have a function, or another form, that does not."""

from collections.abc import Iterator, Sequence

import jax.numpy as jnp

from jmp_amp.debug._cure import Cure
from jmp_amp.debug._diagnosis import Diagnosis
from jmp_amp.debug._node import Node

_VARIANCE = "mean(square(x)) - square(mean(x))"
_WEIGHTS = ("exp(x)", "exp(x) * _", "sum(exp(x) * _)", "dot_general(exp(x), _)", "dot_general(_, exp(x))")
_READ_VARIANCES = {"sqrt", "rsqrt", "div", "log", "pow", "integer_pow"}


def _in(cause: str, pattern: str, text: str) -> Cure:
    """Returns the cure of an op that is in a pattern."""
    return Cure(cause, lambda d: d.is_in(pattern), text)


def _is_variance(d: Diagnosis) -> bool:
    if d.is_in(_VARIANCE):
        return True
    return d.primitive in _READ_VARIANCES and any(map(_cancels, d.found_behind(_VARIANCE)))


def _cancels(difference: Node) -> bool:
    """Returns whether a difference is no larger than the rounding errors of what it is the difference of."""
    return difference.low <= 16 * float(jnp.finfo(difference.dtype).eps) * difference.operands[0].high


def _factors(node: Node) -> Iterator[Node]:
    """Yields the factors of a product; the gradient of `jnp.prod` is computed with a tree of products."""
    if node.primitive in ("log", "mul", "reduce_prod"):
        for operand in node.operands:
            yield from _factors(operand.origin)
    else:
        yield node


def _eps_of_logarithm(d: Diagnosis) -> str:
    return d.eps_for(jnp.log)


# The largest operand, by primitive, of which the result is a factor of 1000 below the largest float32.
_LARGEST_EXPONENTS = {"exp": 80, "expm1": 80, "cosh": 80, "sinh": 80, "exp2": 115}


def _largest_operand(d: Diagnosis) -> float:
    return max(abs(d.operands[0].min or 0), abs(d.operands[0].max or 0))


CURES_OF_FUNCTIONS: Sequence[Cure] = (
    Cure(
        "variance",
        _is_variance,
        lambda d: (
            "`mean(x**2) - mean(x)**2` subtracts numbers that are equal but for rounding, so its result may be 0 or "
            "negative. Subtract the mean first: `jnp.mean((x - m)**2)` with `m = jnp.mean(x)` over the same axes, as "
            "`jnp.var` does; where all x may be equal, add an eps of "
            f"{d.eps_for(lambda x: 1 / jnp.sqrt(x))} inside the square root"
        ),
    ),
    _in(
        "log(1 + exp(x))",
        "log(1 + exp(x)) | log1p(exp(x))",
        "`log(1 + exp(x))` overflows half-way: use `jax.nn.softplus(x)`, which is `jnp.logaddexp(x, 0)`",
    ),
    _in(
        "log(exp(x) + exp(y))",
        "log(exp(x) + exp(y))",
        "`log(exp(x) + exp(y))` overflows or underflows half-way: use `jnp.logaddexp(x, y)`",
    ),
    _in(
        "log(cosh(x))",
        "log(cosh(x))",
        "`log(cosh(x))` overflows half-way: use `jnp.logaddexp(x, -x) - jnp.log(2.0)`",
    ),
    _in(
        "log(softmax(x))",
        "log(softmax(x)) | log(sum(softmax(x) * _))",
        "the logarithm of a probability that rounds to 0: use `jax.nn.log_softmax(x, axis)`, which computes the "
        "logarithm without the probability",
    ),
    _in(
        "log(sum(exp(x)))",
        "log(sum(exp(x))) | log(sum(exp(x) * w))",
        "`log(sum(exp(x)))` overflows or underflows half-way: use `jax.nn.logsumexp(x, axis)`; for weights, "
        "`jax.nn.logsumexp(x, axis, b=w)`",
    ),
    _in(
        "log(mean(exp(x)))",
        "log(mean(exp(x)))",
        "`log(mean(exp(x)))` overflows or underflows half-way: use `jax.nn.logsumexp(x, axis) - jnp.log(n)`, for a "
        "mean over n values",
    ),
    _in(
        "log(sigmoid(x))",
        "log(sigmoid(x))",
        "the logarithm of a probability that rounds to 0: use `jax.nn.log_sigmoid(x)`",
    ),
    _in(
        "log(1 - sigmoid(x))",
        "log(1 - sigmoid(x))",
        "the logarithm of a probability that rounds to 0: use `jax.nn.log_sigmoid(-x)`",
    ),
    _in(
        "log(1 - tanh(x)**2)",
        "log(1 - square(tanh(x)))",
        "`1 - tanh(x)**2` rounds to 0: use `2 * (jnp.log(2.0) - x - jax.nn.softplus(-2 * x))`",
    ),
    _in(
        "log(1 - exp(x))",
        "log(1 - exp(x))",
        "`1 - exp(x)` rounds to 0 for small x: use `jnp.log(-jnp.expm1(x))`",
    ),
    _in(
        "log(exp(x))",
        "log(exp(x)) | log(exp(x) * _) | log(exp(x) / _)",
        "the logarithm of an exponential: leave both out. `jnp.log(exp(x) * c)` is `x + jnp.log(c)`, and "
        "`jnp.log(exp(x) / c)` is `x - jnp.log(c)`",
    ),
    Cure(
        "log(prod(x))",
        lambda d: (
            d.is_in("log(prod(_)) | log(_ * _)")
            and not any(x.n_zeros for op in (d.logarithms or [d.node]) for x in _factors(op))
        ),
        "the product overflows or underflows before its logarithm: add the logarithms, `jnp.sum(jnp.log(x), axis)` "
        "instead of `jnp.log(jnp.prod(x, axis))`, and `jnp.log(x) + jnp.log(y)` instead of `jnp.log(x * y)`",
    ),
    _in(
        "tanh by hand",
        "(exp(x) - exp(-x)) / (exp(x) + exp(-x)) | (exp(x) - 1) / (exp(x) + 1)",
        "the exponential overflows: use `jnp.tanh(x)`; `(exp(x) - 1) / (exp(x) + 1)` is `jnp.tanh(x / 2)`",
    ),
    _in(
        "sigmoid by hand",
        "sigmoid(x) | _ / (1 + exp(_))",
        "the exponential overflows: use `jax.nn.sigmoid(x)` for `1 / (1 + exp(-x))`, `jax.nn.sigmoid(-x)` for "
        "`1 / (1 + exp(x))`, and `y * jax.nn.sigmoid(x)` for `y / (1 + exp(-x))`",
    ),
    _in(
        "softmax by hand",
        " | ".join(f"{weights} / {total}" for weights in _WEIGHTS for total in ("sum(exp(x))", "sum(exp(x) * _)")),
        "use `jax.nn.softmax(x, axis)`, with `where=mask` for a mask: it subtracts the maximum before the exponential",
    ),
    Cure(
        "x * log(x)",
        lambda d: d.divides_by_zero and d.is_in("x * log(x)"),
        lambda d: (
            "0 times the logarithm of 0 is NaN: `x * jnp.log(jnp.maximum(x, eps))` is 0 there, with an eps of "
            f"{_eps_of_logarithm(d)}, whose derivative is finite, too"
        ),
    ),
    Cure(
        "x * log(x / y)",
        lambda d: d.is_in("x * log(x / y)"),
        lambda d: (
            "a probability of 0 in a Kullback-Leibler divergence: `p * (jnp.log(jnp.maximum(p, eps)) - "
            f"jnp.log(jnp.maximum(q, eps)))`, with an eps of {_eps_of_logarithm(d)}; or with logits, "
            "`jax.nn.log_softmax`"
        ),
    ),
    _in(
        "sin(x) / x",
        "sin(x) / x",
        "`sin(x) / x` is 0 / 0 at 0: use `jnp.sinc(x / jnp.pi)`",
    ),
    Cure(
        "exp",
        lambda d: d.primitive in _LARGEST_EXPONENTS and d.excess is None,
        lambda d: (
            f"`{d.primitive}` overflows {d.result.dtype}: its operand reaches {_largest_operand(d):.4g}. Compute "
            "with the logarithm as long as possible (`jax.nn.logsumexp`, `jax.nn.softplus`), or bound the operand: "
            f"`jnp.clip(x, -{_LARGEST_EXPONENTS[d.primitive]}, {_LARGEST_EXPONENTS[d.primitive]})`"
        ),
    ),
)
