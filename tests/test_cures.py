"""Each cure that `first_nonfinite` prints, followed to the letter: value and gradient then agree with float64."""

import re
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp.debug import first_nonfinite
from jmp_amp.debug._cures import CURES, matches
from jmp_amp.debug._evaluation import Evaluation

pytestmark = pytest.mark.usefixtures("users_code")

EYE = np.eye(4, dtype=np.float32)


def f32(*values):
    return np.array(values, np.float32)


def low(x):
    """Casts by hand, as a program in float16 does; the same program in float64 has no casts."""
    return x if x.dtype == np.float64 else x.astype(np.float16)


class Model(NamedTuple):
    """A loss that is broken, and how it is mended.

    Attributes:
        cause: the name of the cause that is reported.
        broken: the loss, of the arguments.
        mended: the loss after the cure.
        args: the arguments that make it NaN or infinite, all differentiated.
        says: the part of the cure that `mended` copies.
        regular: arguments at which both must be the same. With them, the loss has no finite gradient at `args` in any
            precision.
        truth: the loss that is right in float64. By default it is `broken`, and with `regular` it is `mended`.
        train: makes a function of the arguments that returns the loss and its unscaled gradients.
        is_forward: whether the loss is given to `first_nonfinite` without its gradients.
        is_precision: whether the results are finite in float32; None if that is not known.
        rtol: the tolerance.
    """

    cause: str
    broken: Callable
    mended: Callable
    args: tuple
    says: str
    regular: tuple | None = None
    truth: Callable | None = None
    train: Callable = lambda loss, n: jax.value_and_grad(loss, tuple(range(n)))
    is_forward: bool = False
    is_precision: bool | None = False
    rtol: float = 1e-4


def under_autocast(loss, n):
    return jax.value_and_grad(amp.autocast(loss), tuple(range(n)))


HAND = {"is_precision": True, "rtol": 2e-2}
AUTOCAST = {"train": under_autocast, "is_precision": True, "rtol": 1e-2}

# Infinities


def attend(scores, keep, fill):
    masked = jnp.where(keep > 0, scores, fill(scores.dtype))
    return jnp.sum(jax.nn.softmax(masked) * jnp.array([3, 1, 2], scores.dtype))


def attend_with_infinity(scores, keep):
    return attend(scores, keep, lambda dtype: -jnp.inf)


def attend_with_finite_values(scores, keep):
    return attend(scores, keep, lambda dtype: jnp.finfo(dtype).min)


def blocked(scores):
    padding = jnp.array([0.0, 1.0, 0.0])
    return jnp.mean(jax.nn.softmax(scores + padding * -jnp.inf) ** 2)


def blocked_by_where(scores):
    keep = jnp.array([True, False, True])
    return jnp.mean(jax.nn.softmax(jnp.where(keep, scores, jnp.finfo(scores.dtype).min)) ** 2)


def without_blocked(scores):
    return jnp.mean(jax.nn.softmax(scores[:, ::2]) ** 2) * 2 / 3


SCORES = np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3)
PADDED = f32(1, 1, 1, 1, 0, 0, 0, 0, 0).reshape(3, 3)  # the last sequence is all padding


def interval(x, low, high):
    return jnp.mean(x**2 * (high - low))


def finite_interval(x, low, high):
    return interval(x, jnp.maximum(low, jnp.finfo(low.dtype).min), jnp.maximum(high, jnp.finfo(high.dtype).min))


INFINITIES = [
    Model(
        "masked row",
        attend_with_infinity,
        attend_with_finite_values,
        (SCORES, PADDED),
        "`jnp.where(mask, x, jnp.finfo(x.dtype).min)`",
        (SCORES, PADDED[:2, [0, 0, 1]].repeat(2, 0)[:3]),
    ),
    Model(
        "mask product",
        blocked,
        blocked_by_where,
        (SCORES,),
        "`jnp.where(mask, x, jnp.finfo(x.dtype).min)`",
        truth=without_blocked,
    ),
    Model(
        "infinite operand",
        interval,
        finite_interval,
        (f32(1, 2), f32(-np.inf, -3), f32(-np.inf, 5)),
        "replace infinities by a large finite number",
        (f32(1, 2), f32(-4, -3), f32(7, 5)),
    ),
    Model(
        "large constant",
        lambda scores, keep: attend(low(scores), keep, lambda dtype: -1e9),
        lambda scores, keep: attend(low(scores), keep, lambda dtype: jnp.finfo(dtype).min),
        (SCORES, PADDED),
        "use `jnp.finfo(x.dtype).min` in a mask",
        **HAND,
    ),
]

# Formulas that have a function, or another form


def standard_deviation(x):
    return jnp.sqrt(jnp.mean(x**2) - jnp.mean(x) ** 2)


def standardize(x, w):
    m = jnp.mean(x, -1, keepdims=True)
    v = jnp.mean(jnp.square(x), -1, keepdims=True) - jnp.square(m)
    return jnp.sum(w * (x - m) * lax.rsqrt(v + 1e-5))


def standardize_mended(x, w):
    m = jnp.mean(x, -1, keepdims=True)
    v = jnp.mean((x - m) ** 2, -1, keepdims=True)
    return jnp.sum(w * (x - m) * lax.rsqrt(v + 1e-5))


def standard_deviation_mended(x):
    m = jnp.mean(x)
    return jnp.sqrt(jnp.mean((x - m) ** 2))


def nll(log_probabilities):
    return lambda x: -jnp.mean(log_probabilities(x)[jnp.arange(2), jnp.array([0, 2])])


def entropy(x, log):
    return -jnp.sum(x * log(x))


def bounded_log(x):
    return jnp.log(jnp.maximum(x, 1e-12))


def divergence(p, q):
    return jnp.sum(p * jnp.log(p / q))


def divergence_mended(p, q):
    return jnp.sum(p * (jnp.log(jnp.maximum(p, 1e-12)) - jnp.log(jnp.maximum(q, 1e-12))))


def poisson(log_rate, count):
    return jnp.mean(jnp.exp(log_rate) - count * log_rate)


def poisson_mended(log_rate, count):
    return jnp.mean(jnp.exp(jnp.clip(log_rate, -80, 80)) - count * log_rate)


WIDE = f32(-200, -1, 0.5, 200)
LOGITS = f32(0, 300, 1, 5, 2, -300).reshape(2, 3)
OFFSET = 2000 + f32(*range(8)) / 100
RATES = f32(0.5, 1, 2)
ENTRIES = f32(0.25, 0.75, 0)

FUNCTIONS = [
    Model(
        "variance",
        standard_deviation,
        standard_deviation_mended,
        (OFFSET,),
        "`jnp.mean((x - m)**2)` with `m = jnp.mean(x)`",
        rtol=1e-2,
    ),
    Model(
        "variance",
        standardize,
        standardize_mended,
        (np.stack([OFFSET, OFFSET]), f32(1, -1, 2, 0, 3, -2, 1, 0)),
        "`jnp.mean((x - m)**2)` with `m = jnp.mean(x)`",
        rtol=2e-2,  # the mean is rounded
    ),
    Model(
        "log(1 + exp(x))",
        lambda x: jnp.sum(jnp.log(1 + jnp.exp(x))),
        lambda x: jnp.sum(jax.nn.softplus(x)),
        (WIDE,),
        "`jax.nn.softplus(x)`",
    ),
    Model(
        "log(1 + exp(x))",
        lambda x: jnp.sum(jnp.log1p(jnp.exp(-x))),
        lambda x: jnp.sum(jnp.logaddexp(-x, 0)),
        (WIDE,),
        "`jnp.logaddexp(x, 0)`",
    ),
    Model(
        "log(exp(x) + exp(y))",
        lambda x, y: jnp.sum(jnp.log(jnp.exp(x) + jnp.exp(y))),
        lambda x, y: jnp.sum(jnp.logaddexp(x, y)),
        (WIDE, WIDE[::-1] - 3),
        "`jnp.logaddexp(x, y)`",
    ),
    Model(
        "log(cosh(x))",
        lambda x, y: jnp.mean(jnp.log(jnp.cosh(x - y))),
        lambda x, y: jnp.mean(jnp.logaddexp(x - y, y - x) - jnp.log(2.0)),
        (WIDE, f32(0, 1, 2, 3)),
        "`jnp.logaddexp(x, -x) - jnp.log(2.0)`",
    ),
    Model(
        "log(softmax(x))",
        nll(lambda x: jnp.log(jax.nn.softmax(x, -1))),
        nll(lambda x: jax.nn.log_softmax(x, -1)),
        (LOGITS,),
        "`jax.nn.log_softmax(x, axis)`",
    ),
    Model(
        "log(softmax(x))",
        lambda x: -jnp.sum(jnp.log(jnp.sum(jax.nn.softmax(x) * jnp.array([[1, 0, 0], [0, 0, 1]]), -1))),
        lambda x: -jnp.sum(jnp.sum(jax.nn.log_softmax(x, -1) * jnp.array([[1, 0, 0], [0, 0, 1]]), -1)),
        (LOGITS,),
        "`jax.nn.log_softmax(x, axis)`",
    ),
    Model(
        "log(sum(exp(x)))",
        lambda x: jnp.mean(jnp.log(jnp.sum(jnp.exp(x), 0))),
        lambda x: jnp.mean(jax.nn.logsumexp(x, 0)),
        (LOGITS,),
        "`jax.nn.logsumexp(x, axis)`",
    ),
    Model(
        "log(sum(exp(x)))",
        lambda x, w: jnp.sum(jnp.log(jnp.sum(w * jnp.exp(x), -1))),
        lambda x, w: jnp.sum(jax.nn.logsumexp(x, -1, b=w)),
        (LOGITS - 400, f32(0.2, 0.5, 0.3)[None]),
        "`jax.nn.logsumexp(x, axis, b=w)`",
    ),
    Model(
        "log(mean(exp(x)))",
        lambda x: jnp.sum(jnp.log(jnp.mean(jnp.exp(x), -1))),
        lambda x: jnp.sum(jax.nn.logsumexp(x, -1) - jnp.log(3)),
        (LOGITS,),
        "`jax.nn.logsumexp(x, axis) - jnp.log(n)`",
    ),
    Model(
        "log(sigmoid(x))",
        lambda x: -jnp.mean(jnp.log(jax.nn.sigmoid(x))),
        lambda x: -jnp.mean(jax.nn.log_sigmoid(x)),
        (WIDE,),
        "`jax.nn.log_sigmoid(x)`",
    ),
    Model(
        "log(1 - sigmoid(x))",
        lambda x: -jnp.mean(jnp.log(1 - 1 / (1 + jnp.exp(-x)))),
        lambda x: -jnp.mean(jax.nn.log_sigmoid(-x)),
        (f32(-20, 1, 20),),
        "`jax.nn.log_sigmoid(-x)`",
    ),
    Model(
        "log(1 - tanh(x)**2)",
        lambda x: jnp.sum(jnp.log(1 - jnp.tanh(low(x)) ** 2)).astype(x.dtype),
        lambda x: jnp.sum(2 * (jnp.log(2.0) - x - jax.nn.softplus(-2 * x))),
        (f32(-2, 0.5, 6),),
        "`2 * (jnp.log(2.0) - x - jax.nn.softplus(-2 * x))`",
        is_precision=True,
    ),
    Model(
        "log(1 - exp(x))",
        lambda x: jnp.sum(jnp.log(1 - jnp.exp(x))),
        lambda x: jnp.sum(jnp.log(-jnp.expm1(x))),
        (f32(-1e-9, -0.5, -20),),
        "`jnp.log(-jnp.expm1(x))`",
    ),
    Model(
        "log(exp(x))",
        lambda x, m: -jnp.mean(jnp.log(jnp.exp(-0.5 * (x - m) ** 2) / jnp.sqrt(2 * jnp.pi))),
        lambda x, m: -jnp.mean(-0.5 * (x - m) ** 2 - jnp.log(jnp.sqrt(2 * jnp.pi))),
        (f32(-20, 0, 3), f32(1)),
        "`jnp.log(exp(x) / c)` is `x - jnp.log(c)`",
    ),
    Model(
        "log(prod(x))",
        lambda x: -jnp.log(jnp.prod(x)),
        lambda x: -jnp.sum(jnp.log(x)),
        (np.full(7, 1e-8, np.float32),),
        "`jnp.sum(jnp.log(x), axis)`",
    ),
    Model(
        "log(prod(x))",
        lambda x, y: jnp.mean(jnp.log(x * y)),
        lambda x, y: jnp.mean(jnp.log(x) + jnp.log(y)),
        (f32(1e20, 3), f32(1e25, 0.1)),
        "`jnp.log(x) + jnp.log(y)`",
    ),
    Model(
        "tanh by hand",
        lambda x: jnp.sum((jnp.exp(x) - jnp.exp(-x)) / (jnp.exp(x) + jnp.exp(-x))),
        lambda x: jnp.sum(jnp.tanh(x)),
        (WIDE,),
        "`jnp.tanh(x)`",
    ),
    Model(
        "sigmoid by hand",
        lambda x: jnp.sum(x / (1 + jnp.exp(-x))),
        lambda x: jnp.sum(x * jax.nn.sigmoid(x)),
        (WIDE,),
        "`y * jax.nn.sigmoid(x)`",
    ),
    Model(
        "softmax by hand",
        lambda x, v: jnp.sum(v * jnp.exp(x) / jnp.sum(jnp.exp(x), -1, keepdims=True)),
        lambda x, v: jnp.sum(v * jax.nn.softmax(x, -1)),
        (LOGITS, f32(1, 2, 3)),
        "`jax.nn.softmax(x, axis)`",
    ),
    Model(
        "softmax by hand",
        lambda x, v: jnp.sum(v * jnp.exp(x) / jnp.sum(jnp.exp(x), -1, keepdims=True)),
        lambda x, v: jnp.sum(v * jax.nn.softmax(x, -1)),
        (LOGITS / 100 - 200, f32(1, 2, 3)),  # all exponentials are 0
        "`jax.nn.softmax(x, axis)`",
    ),
    Model(
        "softmax by hand",
        lambda x, v: jnp.mean(jnp.exp(x / 0.1) @ v / jnp.sum(jnp.exp(x / 0.1), -1)),
        lambda x, v: jnp.mean(jax.nn.softmax(x / 0.1, -1) @ v),
        (LOGITS / 10, f32(1, 2, 3)),
        "`jax.nn.softmax(x, axis)`",
    ),
    Model(
        "sigmoid by hand",
        lambda x, y: jnp.sum(y / (1 + jnp.exp(x - 3))),
        lambda x, y: jnp.sum(y * jax.nn.sigmoid(-(x - 3))),
        (WIDE, WIDE[::-1].copy()),
        "`jax.nn.sigmoid(-x)`",
    ),
    Model(
        "x * log(x)",
        lambda x: entropy(x, jnp.log),
        lambda x: entropy(x, bounded_log),
        (ENTRIES,),
        "`x * jnp.log(jnp.maximum(x, eps))` is 0 there, with an eps of 1e-12",
        (ENTRIES[:2],),
    ),
    Model(
        "x * log(x / y)",
        divergence,
        divergence_mended,
        (ENTRIES, ENTRIES[::-1].copy() + 0.1),
        "`p * (jnp.log(jnp.maximum(p, eps)) - jnp.log(jnp.maximum(q, eps)))`, with an eps of 1e-12",
        (ENTRIES[:2], ENTRIES[1::-1].copy()),
    ),
    Model(
        "sin(x) / x",
        lambda x: jnp.sum(jnp.sin(x) / x),
        lambda x: jnp.sum(jnp.sinc(x / jnp.pi)),
        (f32(0, 1, -2),),
        "`jnp.sinc(x / jnp.pi)`",
        (f32(0.5, 1, -2),),
    ),
    Model("exp", poisson, poisson_mended, (WIDE, f32(1, 2, 3, 4)), "`jnp.clip(x, -80, 80)`", (RATES, RATES)),
]

# Zeros


def rms_norm(x, root):
    x = low(x)
    return jnp.sum(x / root(jnp.mean(x**2, -1, keepdims=True)) * jnp.array([1, 2, 3], x.dtype))


def mixture(x, w):
    with amp.precision("float16"):
        probabilities = jax.nn.softmax(x) @ w
    return -jnp.mean(jnp.log(probabilities))


def mixture_with_eps(x, w):
    with amp.precision("float16"):
        probabilities = jax.nn.softmax(x) @ w
    return -jnp.mean(jnp.log(probabilities + 1e-4))


def normalized(x):
    x = low(x)
    return jnp.sum(x / (jnp.sqrt(jnp.sum(x**2, -1, keepdims=True)) + 1e-8) * jnp.arange(3.0).astype(x.dtype))


def normalized_inside(x):
    x = low(x)
    return jnp.sum(x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-3) * jnp.arange(3.0).astype(x.dtype))


def masked_mean(x, mask):
    return jnp.sum(jnp.sum(x * mask, -1) / jnp.sum(mask, -1))


def masked_mean_mended(x, mask):
    total = jnp.sum(mask, -1)
    return jnp.sum(jnp.sum(x * mask, -1) / jnp.where(total == 0, 1, total))


def where_root(x):
    return jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0))


def where_root_mended(x):
    safe = jnp.where(x > 0, x, 1)
    return jnp.sum(jnp.where(x > 0, jnp.sqrt(safe), 0))


def where_log(x, y):
    return jnp.sum(jnp.where(x > 0, y * jnp.log(x), 0))


def where_log_mended(x, y):
    safe = jnp.where(x > 0, x, 1)
    return jnp.sum(jnp.where(x > 0, y * jnp.log(safe), 0))


def cosine(x, y):
    x, y = (a / jnp.linalg.norm(a, axis=-1, keepdims=True) for a in (x, y))
    return jnp.sum(x * y)


def cosine_mended(x, y):
    x, y = (a / jnp.sqrt(jnp.sum(a**2, -1, keepdims=True) + 1e-12) for a in (x, y))
    return jnp.sum(x * y)


def z_scores(x, w):
    return jnp.sum(w * (x - jnp.mean(x, 0)) / jnp.std(x, 0))


def z_scores_mended(x, w):
    return jnp.sum(w * (x - jnp.mean(x, 0)) / jnp.sqrt(jnp.var(x, 0) + 1e-12))


def relative_change(x, y):
    return jnp.mean(jnp.tanh((x - y) / y))


def relative_change_mended(x, y):
    limit = 0
    return jnp.mean(jnp.tanh(jnp.where(y == 0, limit, (x - y) / jnp.where(y == 0, 1, y))))


def polar(x, y):
    return jnp.sum(jnp.arctan2(y, x) ** 2)


def polar_mended(x, y):
    return jnp.sum(jnp.arctan2(y, jnp.where((x == 0) & (y == 0), 1, x)) ** 2)


def cholesky_log_det(x, eps=0.0):
    a = x @ x.T
    return jnp.sum(jnp.log(jnp.diagonal(jnp.linalg.cholesky(a + eps * jnp.eye(3, dtype=x.dtype)))))


def edge(function, mended, bad, regular, says):
    """A function at the end of its domain."""
    return Model(
        "outside of the domain",
        lambda x: jnp.sum(function(x)),
        lambda x: jnp.sum(mended(x)),
        (f32(bad, regular),),
        says,
        (f32(regular),),
    )


def inverse(function, mended, bad, regular, says):
    """A function whose derivative is infinite at the end of its domain."""
    return edge(function, mended, bad, regular, says)._replace(cause="derivative of an inverse function", rtol=2e-3)


ROWS = f32(0, 0, 0, 1, -2, 2).reshape(2, 3)
CONSTANT_FEATURE = f32(5, 1, 5, 3, 5, 4).reshape(3, 2)
FEATURES = f32(6, 1, 5, 3, 2, 4).reshape(3, 2)
WEIGHTS = f32(1, 2, -1, 3, 0.5, 2).reshape(3, 2)
TWO_ROWS = f32(1, 2, 3, -1, 2, 2).reshape(2, 3)

ZEROS = [
    Model(
        "underflow",
        lambda x: rms_norm(x, jnp.sqrt),
        lambda x: rms_norm(x, lambda s: jnp.sqrt(s + 1e-3)),
        (1e-5 * TWO_ROWS,),
        "a larger eps inside the square root, `jnp.sqrt(x + 1e-3)`",
        (TWO_ROWS,),
        **HAND,
    ),
    Model(
        "underflow",
        lambda x: rms_norm(x, jnp.sqrt),
        lambda x: (
            rms_norm(x.astype(jnp.float32).astype(x.dtype) * 1, jnp.sqrt)
            if x.dtype == np.float64
            else jnp.sum(x / jnp.sqrt(jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)) * jnp.array([1.0, 2, 3]))
        ),
        (1e-5 * TWO_ROWS,),
        "`.astype(jnp.float32)` if the code itself casts",
        **HAND,
    ),
    Model(
        "underflow",
        mixture,
        mixture_with_eps,
        (f32(0, 30, 0, 0, 1, 2).reshape(2, 3), f32(1, 0, 0.5)[:, None]),
        "a larger eps, 1e-4: with it `log` and its derivative are finite in float16",
        (f32(0, 1, 0, 0, 1, 2).reshape(2, 3), f32(1, 0, 0.5)[:, None]),
        **AUTOCAST,
    ),
    Model(
        "eps that rounds to 0",
        normalized,
        normalized_inside,
        (ROWS,),
        "a larger eps inside the square root, `jnp.sqrt(x + 1e-3)`",
        (TWO_ROWS,),
        is_precision=None,
        rtol=2e-2,
        is_forward=True,
    ),
    Model(
        "branch of `where`",
        where_root,
        where_root_mended,
        (f32(0, 4, 9),),
        "`safe = jnp.where(mask, x, 1)`, then `jnp.where(mask, f(safe), other)`",
        (f32(1, 4, 9),),
    ),
    Model(
        "branch of `where`",
        where_log,
        where_log_mended,
        (f32(0, 4, 9), f32(1, 2, 3)),
        "`safe = jnp.where(mask, x, 1)`, then `jnp.where(mask, f(safe), other)`",
        (f32(1, 4, 9), f32(1, 2, 3)),
    ),
    Model(
        "branch of `where`",
        lambda x: jnp.sum(jnp.where(x == 0, 0, 1 / x)),
        lambda x: jnp.sum(jnp.where(x == 0, 0, 1 / jnp.where(x == 0, 1, x))),
        (f32(0, 4, 9),),
        "`safe = jnp.where(mask, x, 1)`, then `jnp.where(mask, f(safe), other)`",
        (f32(1, 4, 9),),
    ),
    Model(
        "derivative of a norm",
        lambda x, y: jnp.mean(jnp.linalg.norm(x - y, axis=-1)),
        lambda x, y: jnp.mean(jnp.sqrt(jnp.sum((x - y) ** 2, -1) + 1e-12)),
        (ROWS, 0 * ROWS),
        "`jnp.sqrt(jnp.sum(x**2, axis) + 1e-12)` instead of `jnp.linalg.norm(x)`",
        (TWO_ROWS, ROWS),
    ),
    Model(
        "derivative of a standard deviation",
        lambda x: jnp.mean(jnp.std(x, 0)),
        lambda x: jnp.mean(jnp.sqrt(jnp.var(x, 0) + 1e-12)),
        (CONSTANT_FEATURE,),
        "`jnp.sqrt(jnp.var(x, axis) + 1e-12)` instead of `jnp.std(x, axis)`",
        (FEATURES,),
    ),
    Model(
        "derivative of sqrt",
        lambda x: jnp.sum(jnp.sqrt(jnp.maximum(x, 0))),
        lambda x: jnp.sum(jnp.sqrt(jnp.maximum(x, 0) + 1e-12)),
        (f32(-1, 0, 4),),
        "`jnp.sqrt(x + 1e-12)`",
        (f32(1, 2, 4),),
    ),
    Model(
        "derivative of sqrt",
        lambda x: jnp.sum(jnp.sqrt(x)),
        lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)),
        (f32(0, 1, 4),),
        "`jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)`",
        (f32(1, 2, 4),),
    ),
    Model(
        "derivative of cbrt",
        lambda x: jnp.sum(jnp.cbrt(x)),
        lambda x: jnp.sum(jnp.where(x == 0, 0, jnp.cbrt(jnp.where(x == 0, 1, x)))),
        (f32(0, 8, -1),),
        "`jnp.where(x == 0, 0, jnp.cbrt(jnp.where(x == 0, 1, x)))`",
        (f32(1, 8, -1),),
    ),
    inverse(
        jnp.arccos,
        lambda x: jnp.arccos(jnp.clip(x, -1 + 1e-6, 1 - 1e-6)),
        1,
        0.5,
        "`jnp.arccos(jnp.clip(x, -1 + 1e-6, 1 - 1e-6))`",
    ),
    inverse(
        jnp.arcsin,
        lambda x: jnp.arcsin(jnp.clip(x, -1 + 1e-6, 1 - 1e-6)),
        -1,
        0.5,
        "`jnp.arcsin(jnp.clip(x, -1 + 1e-6, 1 - 1e-6))`",
    ),
    inverse(
        jnp.arccosh, lambda x: jnp.arccosh(jnp.maximum(x, 1 + 1e-6)), 1, 3, "`jnp.arccosh(jnp.maximum(x, 1 + 1e-6))`"
    ),
    Model(
        "derivative of arctan2",
        polar,
        polar_mended,
        (f32(0, 1), f32(0, 2)),
        "`jnp.arctan2(y, jnp.where((x == 0) & (y == 0), 1, x))`",
        (f32(3, 1), f32(1, 2)),
    ),
    Model(
        "power of 0",
        lambda x: jnp.sum(x ** (1 / 2.2)),
        lambda x: jnp.sum((x + 1e-12) ** (1 / 2.2)),
        (f32(0, 0.5, 1),),
        "`(x + eps) ** p`, with an eps of 1e-12",
        (f32(0.1, 0.5, 1),),
    ),
    Model(
        "division by a norm",
        cosine,
        cosine_mended,
        (ROWS, TWO_ROWS),
        "`x / jnp.sqrt(jnp.sum(x**2, axis, keepdims=True) + 1e-12)`",
        (TWO_ROWS, TWO_ROWS[::-1].copy()),
        is_forward=True,
    ),
    Model(
        "division by a standard deviation",
        z_scores,
        z_scores_mended,
        (CONSTANT_FEATURE, WEIGHTS),
        "`x / jnp.sqrt(jnp.var(x, axis) + 1e-12)`",
        (FEATURES, WEIGHTS),
        is_forward=True,
    ),
    Model(
        "mean over nothing",
        masked_mean,
        masked_mean_mended,
        (TWO_ROWS, f32(0, 0, 0, 0.25, 0.25, 0).reshape(2, 3)),
        "`jnp.sum(x * mask) / jnp.where(total == 0, 1, total)`",
        (TWO_ROWS, f32(0, 0.25, 0, 0.25, 0.25, 0).reshape(2, 3)),
    ),
    Model(
        "log of 0",
        lambda x: jnp.mean(jnp.log(x)),
        lambda x: jnp.mean(jnp.log(jnp.maximum(x, 1e-12))),
        (f32(0, 2, 3),),
        "`jnp.log(jnp.maximum(x, 1e-12))`",
        (f32(1, 2, 3),),
    ),
    Model(
        "rsqrt of 0",
        lambda x: jnp.sum(x * lax.rsqrt(jnp.sum(x**2, -1, keepdims=True))),
        lambda x: jnp.sum(x * lax.rsqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-12)),
        (ROWS,),
        "`jax.lax.rsqrt(x + 1e-12)`",
        (TWO_ROWS,),
    ),
    Model(
        "division by 0",
        relative_change,
        relative_change_mended,
        (f32(1, 2), f32(0, 4)),
        "`jnp.where(y == 0, limit, x / jnp.where(y == 0, 1, y))`",
        (f32(1, 2), f32(-3, 4)),
    ),
    Model(
        "small divisor",
        lambda x, y: jnp.sum(x / (y + 1e-30)),
        lambda x, y: jnp.sum(x / (y + 1e-12)),
        (f32(1, 2), f32(0, 4)),
        "add an eps of 1e-12",
        (f32(1, 2), f32(3, 4)),
    ),
    Model(
        "small operand of rsqrt",
        lambda x: jnp.sum(lax.rsqrt(jnp.abs(x) + 1e-30)),
        lambda x: jnp.sum(lax.rsqrt(jnp.abs(x) + 1e-12)),
        (f32(0, 1),),
        "Add an eps of 1e-12",
        (f32(3, 1),),
    ),
    edge(jnp.log, lambda x: jnp.log(jnp.maximum(x, 1e-12)), -1, 2, "`jnp.log(jnp.maximum(x, 1e-12))`"),
    edge(jnp.log2, lambda x: jnp.log2(jnp.maximum(x, 1e-12)), -1, 2, "maximum(x, 1e-12)"),
    edge(
        jnp.log1p, lambda x: jnp.log1p(jnp.maximum(x, -1 + 1e-6)), -1, 2, "`jnp.log1p(jnp.maximum(x, -1 + 1e-6))`"
    )._replace(
        rtol=1e-2  # -1 + 1e-6 is rounded
    ),
    edge(jnp.sqrt, lambda x: jnp.sqrt(jnp.maximum(x, 1e-12)), -1e-9, 2, "`jnp.sqrt(jnp.maximum(x, 1e-12))`"),
    edge(lax.rsqrt, lambda x: lax.rsqrt(jnp.maximum(x, 1e-12)), -1, 2, "`jax.lax.rsqrt(jnp.maximum(x, 1e-12))`"),
    edge(lambda x: x**1.5, lambda x: jnp.maximum(x, 1e-12) ** 1.5, -1, 2, "`jnp.maximum(x, 1e-12) ** y`"),
    edge(
        jnp.arccos,
        lambda x: jnp.arccos(jnp.clip(x, -1 + 1e-6, 1 - 1e-6)),
        1.0000001,
        0.5,
        "`jnp.arccos(jnp.clip(x, -1 + 1e-6, 1 - 1e-6))`",
    )._replace(rtol=2e-3),
    edge(
        jnp.arcsin,
        lambda x: jnp.arcsin(jnp.clip(x, -1 + 1e-6, 1 - 1e-6)),
        1.5,
        0.5,
        "`jnp.arcsin(jnp.clip(x, -1 + 1e-6, 1 - 1e-6))`",
    )._replace(rtol=2e-3),
    edge(
        jnp.arctanh,
        lambda x: jnp.arctanh(jnp.clip(x, -1 + 1e-6, 1 - 1e-6)),
        1,
        0.5,
        "`jnp.arctanh(jnp.clip(x, -1 + 1e-6, 1 - 1e-6))`",
    )._replace(rtol=5e-3),
    edge(
        jnp.arccosh,
        lambda x: jnp.arccosh(jnp.maximum(x, 1 + 1e-6)),
        0.9,
        3,
        "`jnp.arccosh(jnp.maximum(x, 1 + 1e-6))`",
    )._replace(rtol=2e-2),
    edge(
        lax.erf_inv,
        lambda x: lax.erf_inv(jnp.clip(x, -1 + 1e-6, 1 - 1e-6)),
        1,
        0.5,
        "`jax.lax.erf_inv(jnp.clip(x, -1 + 1e-6, 1 - 1e-6))`",
    )._replace(rtol=5e-3),
    Model(
        "singular matrix",
        cholesky_log_det,
        lambda x: cholesky_log_det(x, 1e-3 * 20),
        (np.outer(f32(1, 2, 4), f32(1, -0.5)),),
        "`a + eps * jnp.eye(n)`, with an eps of 1e-3 times its largest element",
        truth=lambda x: cholesky_log_det(x, 1e-3 * 20),
        rtol=1e-2,
    ),
]

# Overflows


def scaled(loss_scale):
    def train(loss, n):
        grad = amp.value_and_grad(amp.autocast(loss), tuple(range(n)), loss_scale=loss_scale)

        def unscaled(*args):
            value, grads = grad(*args)
            return value, jax.tree.map(lambda g: g / loss_scale, grads)

        return unscaled

    return train


def steep(w, x):
    return 1e6 * jnp.sum(x @ w)


def steep_in_float32(w, x):
    with amp.full_precision():
        return 1e6 * jnp.sum(x @ w)


def low_norm(x):
    return jnp.sqrt(jnp.sum(low(x) ** 2)).astype(x.dtype)


def low_norm_mended(x):
    return jnp.sqrt(jnp.sum(low(x).astype(x.dtype) ** 2))


def norm_by_hand(x):
    return jnp.sqrt(jnp.sum(x**2))


def norm_mended(x):
    m = lax.stop_gradient(jnp.max(jnp.abs(x)))
    return m * jnp.sqrt(jnp.sum((x / m) ** 2))


def residual(x, w, to_sum=low):
    h = low(x) @ low(w)
    h = to_sum(h) + to_sum(low(x) @ low(2 * w))
    return jnp.mean((h / 1e4) ** 2).astype(x.dtype)


def residual_in_float32(x, w):
    return residual(x, w, lambda h: h.astype(x.dtype))


def raw_features(x, w):
    return jnp.mean((1e-4 * x @ w) ** 2)


def raw_features_in_float32(x, w):
    with amp.full_precision():
        return jnp.mean((x @ (1e-4 * w)) ** 2)


def bilinear(x, w):
    return jnp.mean(((x @ w) @ x.T / 1e5) ** 2)


def bilinear_in_float32(x, w):
    with amp.full_precision():
        return jnp.mean(((x @ w) @ x.T / 1e5) ** 2)


def descend(rate):
    def loss(x):
        w = jnp.zeros_like(x)
        for _ in range(12):
            w = w - rate * 4 * (w - x) ** 3
        return jnp.mean((w - x) ** 2)

    return loss


OVERFLOWS = [
    Model(
        "gradient at every loss scale",
        steep,
        steep_in_float32,
        (EYE, EYE / 1e4),
        "use `with amp.full_precision():` around that line",
        train=scaled(4.0),
        is_precision=True,
    ),
    Model(
        "gradient",
        steep,
        steep_in_float32,
        (EYE, EYE / 1e4),
        "If it is not, run this op in float32: use `with amp.full_precision():`",
        **AUTOCAST,
    ),
    Model("sum of squares", low_norm, low_norm_mended, (f32(300, -400, 3),), "`.astype(jnp.float32)`", **HAND),
    Model(
        "sum of squares in float32",
        norm_by_hand,
        norm_mended,
        (f32(3e20, -4e20, 0),),
        "`m * jnp.sqrt(jnp.sum((x / m)**2))`",
    ),
    Model(
        "sum",
        lambda x: jnp.sum(low(x), dtype=None) / 1e3,
        lambda x: jnp.sum(low(x), dtype=x.dtype) / 1e3,
        (np.full(100, 1e3, np.float32),),
        "`jnp.sum(x, axis, dtype=jnp.float32)`",
        **HAND,
    ),
    Model(
        "residual stream",
        residual,
        residual_in_float32,
        (100 * EYE, 300 * EYE + 1),
        "keep this sum in float32",
        **HAND,
    ),
    Model(
        "cast",
        raw_features,
        raw_features_in_float32,
        (1e10 * EYE, EYE),
        "use `with amp.full_precision():` around that line",
        **AUTOCAST,
    ),
    Model(
        "overflow",
        bilinear,
        bilinear_in_float32,
        (100 * EYE + 1, 20 * EYE),
        "use `with amp.full_precision():` around that line",
        **AUTOCAST,
    ),
    Model(
        "overflow in float32",
        descend(1.0),
        descend(0.01),
        (f32(1, 2, 3),),
        "the learning rate",
        truth=descend(0.01),
        rtol=1e-3,
    ),
]

MODELS = [*INFINITIES, *FUNCTIONS, *ZEROS, *OVERFLOWS]


def in_float64(loss, args):
    """Returns the loss and its gradients in float64."""
    with jax.enable_x64(True):
        grad = jax.jit(jax.value_and_grad(loss, tuple(range(len(args)))))
        return grad(*(jnp.asarray(x, np.float64) for x in args))


def assert_close(found, exact, rtol):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert np.isfinite(y).all()
        np.testing.assert_allclose(x, y, rtol, rtol * np.abs(y).max(initial=0))


@pytest.mark.sweep(2)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.cause)
def test_a_broken_program_is_told_its_cure(model):
    broken = model.broken if model.is_forward else model.train(model.broken, len(model.args))
    found = first_nonfinite(broken)(*model.args)
    assert found.cause == model.cause, found
    assert model.says in found.cure
    assert (found.finite_in_float32, found.in_float32 in str(found)) == (model.is_precision, True)


@pytest.mark.sweep(5)  # whether the cures are right does not change with the code that finds them
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.cause)
def test_the_program_that_follows_the_cure_agrees_with_float64(model):
    n = len(model.args)
    mended = jax.jit(model.train(model.mended, n))
    truth = model.truth or (model.broken if model.regular is None else model.mended)
    assert_close(mended(*model.args), in_float64(truth, model.args), model.rtol)
    if model.regular is not None:
        assert_close(mended(*model.regular), in_float64(model.broken, model.regular), model.rtol)


# Cures of more than the loss: of the train step, and of a kernel


def head(w, x):
    return jnp.sum(jnp.tanh(x @ w) @ w)


def test_a_loss_scale_that_is_too_large():
    args = EYE / 4, EYE
    found = first_nonfinite(amp.value_and_grad(amp.autocast(head), (0, 1), loss_scale=2.0**40))(*args)
    assert (found.cause, found.finite_in_float32) == ("loss scale", True)
    (k,) = re.findall(r"the loss scale is too large: a scale that is 2\^(\d+) times smaller fits", found.cure)

    def gradients(scale):
        value, grads = amp.value_and_grad(amp.autocast(head), (0, 1), loss_scale=scale)(*args)
        return value, jax.tree.map(lambda g: g / scale, grads)

    assert_close(gradients(2.0 ** (40 - int(k))), in_float64(head, args), 1e-2)
    assert not all(np.isfinite(g).all() for g in gradients(2.0 ** (41 - int(k)))[1])


def clipped_gradient(loss_scale):
    def loss(w, x):
        return 1e-10 * jnp.sum((x @ w) ** 2)

    def step(w, x):
        grads = amp.grad(amp.autocast(loss), loss_scale=loss_scale)(w, x)
        grads = grads / loss_scale
        return grads / jnp.max(jnp.abs(grads))

    return step


def test_a_residual_stream_that_overflows():
    def model(w, x):
        for _ in range(2):
            x = x + (x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)) @ w
        return jnp.mean((x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)) ** 3)

    args = 4e4 * EYE, EYE + 1

    def gradients(**options):
        return lambda *args: jax.value_and_grad(amp.autocast(model, **options), (0, 1))(*args)

    found = first_nonfinite(gradients(residual_stream="low"))(*args)
    assert (found.cause, found.finite_in_float32) == ("residual stream", True)
    assert "leave out `residual_stream`" in found.cure
    value, grads = gradients()(*args)
    np.testing.assert_allclose(value, in_float64(model, args)[0], 1e-2)
    assert all(np.isfinite(grad).all() for grad in grads)


def test_a_gradient_that_underflows():
    found = first_nonfinite(clipped_gradient(1.0))(EYE, EYE + 1)
    assert (found.cause, found.finite_in_float32) == ("gradient that underflows", True)
    assert "need a loss scale, or a larger one: `amp.value_and_grad(fun, loss_scale=scale)`" in found.cure
    a = EYE.astype(np.float64) + 1
    exact = a.T @ a
    assert_close(clipped_gradient(2.0**16)(EYE, EYE + 1), exact / exact.max(), 1e-2)


def test_a_kernel():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def sharded(fun):
        return jax.shard_map(fun, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))

    def inside(x):
        return jnp.log(1 + jnp.exp(x))

    found = first_nonfinite(sharded(inside))(WIDE)
    assert (found.cause, found.primitive) == ("kernel", "shard_map")
    assert "call `first_nonfinite` on the function inside it, on one shard" in found.cure
    assert first_nonfinite(inside)(WIDE[2:]).cause == "log(1 + exp(x))"
    np.testing.assert_allclose(sharded(jax.nn.softplus)(WIDE), np.logaddexp(WIDE.astype(np.float64), 0), 1e-6, 1e-30)


def test_the_derivative_of_a_logarithm_has_the_cure_of_the_logarithm():
    def nll(x):
        return -jnp.sum(jnp.log(jax.nn.softmax(x))[:, 0])

    found = first_nonfinite(jax.grad(nll))(LOGITS)
    assert (found.primitive, found.backward, found.cause) == ("div", True, "log(softmax(x))")
    found = first_nonfinite(jax.grad(lambda x: jnp.sum(jnp.log(x))))(f32(0, 1))
    assert (found.primitive, found.backward, found.cause) == ("div", True, "log of 0")


def cause_of(fun, *args):
    return first_nonfinite(jax.grad(lambda *args: jnp.sum(fun(*args))))(*args).cause


def test_a_cure_needs_its_pattern():
    one = f32(1)
    # The other branch of `leaky_relu` is the same logarithm.
    assert cause_of(lambda x: jax.nn.leaky_relu(jnp.log(x)), 0 * one) == "log of 0"
    # This is no derivative of a division.
    assert cause_of(lambda x: jnp.minimum(x**-2, 1), 1e-30 * one) == "overflow in float32"
    assert cause_of(lambda x: x**2.5, 1e30 * one) == "overflow in float32"
    # The variance is not small; the logarithm reads something else, too.
    assert cause_of(lambda x: jnp.log(x * (jnp.mean(x**2) - jnp.mean(x) ** 2)), f32(0, 1)) == "log of 0"
    # The numerator and the sum are of different values.
    assert cause_of(lambda x, y: jnp.exp(x) / jnp.sum(jnp.exp(y)), 100 * one, one) == "exp"


def test_every_cure_is_followed():
    followed = {model.cause for model in MODELS} | {"loss scale", "gradient that underflows", "kernel"}
    assert followed == set(CURES)


def test_equal_expressions_are_found_in_linear_time():
    def chain(x):
        for _ in range(3000):
            x = x * x
        return x

    program = jax.make_jaxpr(lambda x: (chain(x) - chain(x), chain(x) - chain(-x)))(1.0)
    equal, different = (x.node for x in Evaluation(program, [np.ones((), np.float32)]).results)
    start = time.perf_counter()
    assert len(list(matches("x - x", equal))) == 1
    assert not list(matches("x - x", different))
    assert time.perf_counter() - start < 0.5


def test_a_product_of_many_factors_is_searched_in_linear_time():
    def power(x):
        for _ in range(30):
            x = x * x
        return jnp.sum(jnp.log(x))

    assert first_nonfinite(power)(f32(0.5)).cause == "log(prod(x))"
