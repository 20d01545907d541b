"""More programs whose results are not finite, or wrong by an overflow: the kinds that people report.

They are added to `broken_models.MODELS`. `CORRECT` has programs that nothing is to be said of.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
from broken_models import MODELS, model, normal, uniform
from jax import lax

import jmp_amp as amp

F16 = np.float16
CONSTANT_ROWS = np.float32([[2] * 8, [1] * 8, [3] * 8])

# Constants and sums of plain float16.


def layer_norm_in_float16(params, x):
    x = x.astype(F16)
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean((x - mean) ** 2, axis=-1, keepdims=True)
    y = (x - mean) / jnp.sqrt(variance + 1e-8)  # at fault: layer_norm_in_float16
    return jnp.mean((y.astype(params.dtype) * params[None]) ** 2)


model(layer_norm_in_float16, args=lambda: (normal(8), CONSTANT_ROWS), cause="1e-8 is 0 in float16.")


def layer_norm_with_default(params, x, eps=1e-8):
    x = x.astype(F16)
    mean = jnp.mean(x, axis=-1, keepdims=True)
    std = jnp.std(x, axis=-1, keepdims=True)
    return jnp.mean(((x - mean) / (std + eps)).astype(params.dtype) * params[None])  # at fault: layer_norm_with_default


model(layer_norm_with_default, args=lambda: (normal(8), CONSTANT_ROWS), cause="The default 1e-8 is 0 in float16.")


def rms_norm_of_zeros(params, x):
    x = x.astype(F16)
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + F16(1e-8))  # at fault: rms_norm_of_zeros
    return jnp.mean((x * scale).astype(params.dtype) * params[None])  # at fault: rms_norm_of_zeros


model(rms_norm_of_zeros, args=lambda: (normal(8), 0 * CONSTANT_ROWS), cause="1e-8 is 0 in float16.")


def adam_in_float16(g, m, v):
    g, m, v = (x.astype(F16) for x in (g, m, v))
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return -1e-3 * m / (jnp.sqrt(v) + 1e-8)  # at fault: adam_in_float16


model(
    adam_in_float16,
    args=lambda: (np.float32([0, 0.1]), np.zeros(2, np.float32), np.zeros(2, np.float32)),
    dtype=None,
    cause="Adam's eps of 1e-8 is 0 in float16, and so is the second moment of a gradient of 0.",
)


def mask_in_float16(w, x, mask):
    x = x.astype(F16)
    scores = x @ w.astype(F16) @ x.T
    scores = jnp.where(mask, scores, -1e9)  # at fault: mask_in_float16
    return jnp.mean(jax.nn.softmax(scores)).astype(w.dtype)  # at fault: mask_in_float16


MASK = np.tril(np.ones((4, 4), bool)) & (np.arange(4) > 0)[:, None]
model(
    mask_in_float16,
    args=lambda: (normal(3, 3), normal(4, 3), MASK),
    cause="-1e9 is -inf in float16, and a query may attend to no key.",
)


def additive_mask_in_float16(scores, mask):
    scores = scores.astype(F16) + (1 - mask.astype(F16)) * -1e9  # at fault: additive_mask_in_float16
    return jnp.sum(jax.nn.softmax(scores)).astype(jnp.float32)


model(
    additive_mask_in_float16,
    args=lambda: (normal(4, 4), np.tril(np.ones((4, 4), np.float32))),
    cause="-1e9 is -inf in float16, and 0 times that is NaN.",
)


def binary_cross_entropy_in_float16(w, x, y):
    p = jax.nn.sigmoid((x @ w).astype(F16)).astype(F16)
    y = y.astype(F16)
    losses = y * jnp.log(p) + (1 - y) * jnp.log(1 - p)  # at fault: binary_cross_entropy_in_float16
    return -jnp.mean(losses).astype(w.dtype)


def binary_cross_entropy_of_logits(w, x, y):
    z = (x @ w).astype(F16)
    losses = y.astype(F16) * jax.nn.log_sigmoid(z) + (1 - y.astype(F16)) * jax.nn.log_sigmoid(-z)
    return -jnp.mean(losses).astype(w.dtype)


model(
    binary_cross_entropy_in_float16,
    args=lambda: (np.float32([4, -3]), np.float32([[3, 0], [0, 3], [1, 1], [0.5, 2]]), np.float32([1, 0, 1, 0])),
    near=lambda: (np.float32([1, -1]), np.float32([[1, 0], [0, 1], [1, 1]]), np.float32([1, 0, 1])),
    fixed=binary_cross_entropy_of_logits,
    cause="A sigmoid of 12 is 1 in float16, and log(1 - 1) is -inf.",
)


def squared_error_in_float16(w, x, y):
    errors = (x @ w).astype(F16) - y.astype(F16)
    return jnp.mean(errors**2).astype(w.dtype)  # at fault: squared_error_in_float16


model(
    squared_error_in_float16,
    args=lambda: (normal(3), normal(5, 3), np.float32([1, 2, 300, 4, 5])),
    near=lambda: (normal(3), normal(5, 3), normal(5, seed=2)),
    fixed=lambda w, x, y: jnp.mean((x @ w - y) ** 2),
    cause="The square of an error of 300 is beyond float16.",
)


def sum_in_float16(x):
    return jnp.sum(x.astype(F16), dtype=F16).astype(x.dtype) / x.size  # at fault: sum_in_float16


model(
    sum_in_float16,
    args=lambda: (np.full(1000, 100, np.float32),),
    near=lambda: (np.full(100, 100, np.float32),),
    fixed=lambda x: jnp.sum(x) / x.size,
    cause="A sum of 1e5 is beyond float16.",
)


# Overflows that are hidden.


def variance_that_overflows(x, w):
    x = x.astype(F16)
    variance = jnp.mean(x * x, axis=-1, keepdims=True)  # at fault: variance_that_overflows
    normed = x / jnp.sqrt(variance + 1e-5)
    return jnp.mean((normed.astype(w.dtype) * w[None]) ** 2)


model(
    variance_that_overflows,
    args=lambda: (normal(3, 8, scale=1000.0), normal(8, seed=1)),
    near=lambda: (normal(3, 8), normal(8, seed=1)),
    fixed=lambda x, w: jnp.mean((x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5) * w[None]) ** 2),
    cause="The squares overflow; the division by infinity gives 0.",
)


def clipped_by_norm(g):
    g = g.astype(F16)
    norm = jnp.sqrt(jnp.sum(g**2))  # at fault: clipped_by_norm
    return g * (1.0 / jnp.maximum(norm, 1.0))


model(
    clipped_by_norm,
    args=lambda: (normal(8, scale=500.0),),
    near=lambda: (normal(8, scale=5.0),),
    fixed=lambda g: g * (1.0 / jnp.maximum(jnp.sqrt(jnp.sum(g**2)), 1.0)),
    dtype=None,
    cause="The squares overflow, and the clipped gradient is 0.",
)


def scanned_norms(layers, x):
    def layer(x, w):
        x = (x @ w.astype(F16)).astype(F16)
        return x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-3) * 400, None  # at fault: scanned_norms

    return jnp.sum(lax.scan(layer, x.astype(F16), layers)[0]).astype(jnp.float32)


def scanned_norms_in_float32(layers, x):
    for w in layers:
        x = x @ w
        x = x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-3) * 400
    return jnp.sum(x)


model(
    scanned_norms,
    args=lambda: (np.stack([np.eye(4, dtype=np.float32)] * 3), normal(2, 4, scale=300.0)),
    near=lambda: (np.stack([np.eye(4, dtype=np.float32)]), normal(2, 4)),
    fixed=scanned_norms_in_float32,
    dtype=None,
    cause="The squares of a layer overflow.",
)


# Logarithms, exponentials and their quotients.


def entropy_by_hand(logits):
    e = jnp.exp(logits)
    p = e / jnp.sum(e, axis=-1, keepdims=True)
    return -jnp.sum(p * jnp.log(p))  # at fault: entropy_by_hand


def entropy_of_log_softmax(logits):
    log_p = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_p) * log_p)


model(
    entropy_by_hand,
    args=lambda: (np.float32([[0, -120, 3], [1, 2, 3]]),),
    near=lambda: (normal(2, 3),),
    fixed=entropy_of_log_softmax,
    cause="exp(-120) is 0, and its logarithm is -inf.",
)


def cross_entropy_by_hand(w, x, labels):
    p = jax.nn.softmax(x @ w)
    return -jnp.mean(jnp.log(p[jnp.arange(len(labels)), labels]))  # at fault: cross_entropy_by_hand


model(
    cross_entropy_by_hand,
    args=lambda: (normal(3, 4, scale=100.0), normal(5, 3, seed=1), np.array([0, 1, 2, 3, 0])),
    near=lambda: (normal(3, 4), normal(5, 3, seed=1), np.array([0, 1, 2, 3, 0])),
    fixed=lambda w, x, labels: -jnp.mean(jax.nn.log_softmax(x @ w)[jnp.arange(len(labels)), labels]),
    cause="The probability of a label rounds to 0.",
)


def one_hot_cross_entropy(w, x, targets):
    logits = x @ w
    return -jnp.mean(jnp.sum(targets * jnp.log(jax.nn.softmax(logits)), axis=-1))  # at fault: one_hot_cross_entropy


model(
    one_hot_cross_entropy,
    args=lambda: (normal(3, 4, scale=100.0), normal(4, 3, seed=1), np.eye(4, dtype=np.float32)),
    near=lambda: (normal(3, 4), normal(4, 3, seed=1), np.eye(4, dtype=np.float32)),
    fixed=lambda w, x, targets: -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(x @ w), axis=-1)),
    cause="A softmax rounds to 0, and 0 * log(0) is NaN.",
)


def logistic_by_hand(w, x, y):
    return jnp.mean(jnp.log(1 + jnp.exp(-y * (x @ w))))  # at fault: logistic_by_hand


model(
    logistic_by_hand,
    args=lambda: (normal(3, scale=1000.0), normal(5, 3, seed=1), np.float32([1, -1, 1, -1, 1])),
    near=lambda: (normal(3), normal(5, 3, seed=1), np.float32([1, -1, 1, -1, 1])),
    fixed=lambda w, x, y: jnp.mean(jax.nn.softplus(-y * (x @ w))),
    cause="The exponential of a margin of -200 overflows.",
)


def poisson(w, x, counts):
    rates = jnp.exp(x @ w)  # at fault: poisson
    return jnp.mean(rates - counts * jnp.log(rates))


model(
    poisson,
    args=lambda: (normal(3, scale=1000.0), normal(5, 3, seed=1), np.float32([1, 0, 2, 3, 1])),
    near=lambda: (normal(3), normal(5, 3, seed=1), np.float32([1, 0, 2, 3, 1])),
    cause="The exponential of a rate overflows.",
)


def log_of_one_hot(labels, logits):
    return jnp.sum(labels * (jnp.log(labels) - jax.nn.log_softmax(logits)))  # at fault: log_of_one_hot


def log_of_one_hot_by_xlogy(labels, logits):
    return jnp.sum(jax.scipy.special.xlogy(labels, labels) - labels * jax.nn.log_softmax(logits))


model(
    log_of_one_hot,
    args=lambda: (np.eye(4, dtype=np.float32), normal(4, 4)),
    near=lambda: (uniform(4, 4, low=0.1), normal(4, 4)),
    fixed=log_of_one_hot_by_xlogy,
    dtype=None,
    cause="A label of 0 gives 0 * log(0).",
)


def kl_divergence(p, q):
    return jnp.sum(p * jnp.log(p / q), axis=-1)  # at fault: kl_divergence


model(
    kl_divergence,
    args=lambda: (np.float32([[0, 0.5, 0.5]]), np.float32([[0.2, 0.3, 0.5]])),
    near=lambda: (np.float32([[0.1, 0.4, 0.5]]), np.float32([[0.2, 0.3, 0.5]])),
    fixed=lambda p, q: jnp.sum(jax.scipy.special.rel_entr(p, q), axis=-1),
    dtype=None,
    cause="A probability of 0 gives 0 * log(0).",
)


def kl_with_no_support(p, q):
    return jnp.sum(p * (jnp.log(p) - jnp.log(q)))  # at fault: kl_with_no_support


model(
    kl_with_no_support,
    args=lambda: (np.float32([0.1, 0.4, 0.5]), np.float32([0, 0.5, 0.5])),
    near=lambda: (np.float32([0.1, 0.4, 0.5]), np.float32([0.2, 0.3, 0.5])),
    cause="q is 0 where p is not: the divergence is infinite.",
)


def gumbel(logits, u):
    return jnp.max(logits - jnp.log(-jnp.log(u)))  # at fault: gumbel


model(
    gumbel,
    args=lambda: (normal(4), np.float32([0.3, 1.0, 0.5, 0.2])),
    near=lambda: (normal(4), np.float32([0.3, 0.9, 0.5, 0.2])),
    cause="A uniform number of 1 has logarithm 0.",
)


def logit(p):
    return jnp.sum(jnp.log(p / (1 - p)))  # at fault: logit


model(
    logit,
    args=lambda: (np.float32([0.2, 1.0, 0.7]),),
    near=lambda: (np.float32([0.2, 0.9, 0.7]),),
    cause="A probability of 1 has an infinite logit.",
)


def likelihood_by_prod(p):
    return -jnp.log(jnp.prod(p))  # at fault: likelihood_by_prod


model(
    likelihood_by_prod,
    args=lambda: (uniform(100, low=0.1, high=0.4),),
    near=lambda: (uniform(5, low=0.1, high=0.4),),
    fixed=lambda p: -jnp.sum(jnp.log(p)),
    cause="A product of 100 probabilities underflows.",
)


def exclusive_products(alpha, colors):
    through = jnp.cumprod(1 - alpha) / (1 - alpha)  # at fault: exclusive_products
    return jnp.sum(through * alpha * colors)


def exclusive_products_of_shifted(alpha, colors):
    through = jnp.concatenate([jnp.ones(1), jnp.cumprod(1 - alpha)[:-1]])
    return jnp.sum(through * alpha * colors)


model(
    exclusive_products,
    args=lambda: (np.float32([0.1, 1.0, 0.3]), np.float32([1, 2, 3])),
    near=lambda: (np.float32([0.1, 0.9, 0.3]), np.float32([1, 2, 3])),
    fixed=exclusive_products_of_shifted,
    cause="An opaque sample: 0 / 0.",
)


# Quotients.


def masked_mean(w, x, mask):
    losses = (x @ w) ** 2
    return jnp.mean(jnp.sum(losses * mask, axis=1) / jnp.sum(mask, axis=1))  # at fault: masked_mean


model(
    masked_mean,
    args=lambda: (normal(3), normal(2, 4, 3), np.float32([[1, 1, 0, 0], [0, 0, 0, 0]])),
    near=lambda: (normal(3), normal(2, 4, 3), np.float32([[1, 1, 0, 0], [1, 0, 0, 0]])),
    cause="A sequence has no token: 0 / 0.",
)


def class_weights(w, x, labels):
    counts = jnp.sum(jax.nn.one_hot(labels, 3), axis=0)
    weights = len(labels) / (3 * counts)  # at fault: class_weights
    log_p = jax.nn.one_hot(labels, 3) * jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.sum(log_p * weights[None], axis=-1))  # at fault: class_weights


model(
    class_weights,
    args=lambda: (normal(2, 3), normal(4, 2), np.array([0, 1, 1, 0])),
    near=lambda: (normal(2, 3), normal(4, 2), np.array([0, 1, 2, 0])),
    cause="A rare class is not in the batch: its weight is 1 / 0.",
)


def dice(w, x, target):
    p = jax.nn.relu(x @ w)
    return 1 - 2 * jnp.sum(p * target) / (jnp.sum(p) + jnp.sum(target))  # at fault: dice


model(
    dice,
    args=lambda: (np.float32([1, 1]), -abs(normal(5, 2)), np.zeros(5, np.float32)),
    near=lambda: (np.float32([1, 1]), abs(normal(5, 2)), np.ones(5, np.float32)),
    cause="An empty mask, predicted as empty: 0 / 0.",
)


def correlation(w, x, y):
    z = x @ w
    a, b = z - jnp.mean(z), y - jnp.mean(y)
    return jnp.sum(a * b) / jnp.sqrt(jnp.sum(a * a) * jnp.sum(b * b))  # at fault: correlation


model(
    correlation,
    args=lambda: (normal(3), normal(6, 3), np.full(6, 2, np.float32)),
    near=lambda: (normal(3), normal(6, 3), normal(6, seed=4)),
    cause="The target is constant.",
)


def min_max(x):
    low, high = jnp.min(x, axis=1, keepdims=True), jnp.max(x, axis=1, keepdims=True)
    return jnp.sum(((x - low) / (high - low)) ** 2)  # at fault: min_max


model(
    min_max,
    args=lambda: (np.float32([[1, 2, 3], [4, 4, 4]]),),
    near=lambda: (np.float32([[1, 2, 3], [4, 5, 7]]),),
    cause="A constant row: 0 / 0.",
)


def temperature(logits, t):
    return jnp.sum(jax.nn.softmax(logits / t) ** 2)  # at fault: temperature


model(
    temperature,
    args=lambda: (normal(3), np.float32(0)),
    near=lambda: (normal(3), np.float32(0.7)),
    cause="The temperature is annealed to 0.",
)


def sinc_kernel(times, width):
    return jnp.sum(jnp.sin(times) / times * width)  # at fault: sinc_kernel


model(
    sinc_kernel,
    args=lambda: (np.float32([-1, 0, 1]), np.float32([1, 2, 3])),
    near=lambda: (np.float32([-1, 0.5, 1]), np.float32([1, 2, 3])),
    fixed=lambda times, width: jnp.sum(jnp.sinc(times / jnp.pi) * width),
    cause="sin(0) / 0.",
)


def newton_root(a):
    def step(x, _):
        return x - (x**3 - a) / (3 * x**2), None  # at fault: newton_root

    return lax.scan(step, jnp.zeros(()), None, length=5)[0]


model(newton_root, args=lambda: (np.float32(2),), dtype=None, cause="Newton's method starts where the slope is 0.")


def power_iteration(w, v):
    def step(_, v):
        u = w @ v
        return u / jnp.linalg.norm(u)  # at fault: power_iteration

    return lax.fori_loop(0, 3, step, v)


model(
    power_iteration,
    args=lambda: (np.float32([[0, 1], [0, 0]]), np.float32([0, 1])),
    dtype=None,
    cause="A nilpotent matrix: in the second iteration the vector is 0.",
)


# Roots and norms.


def distance_to_self(w, x):
    e = x @ w
    distances = jnp.linalg.norm(e[:, None] - e[None], axis=-1)  # at fault: distance_to_self
    return jnp.mean(distances)


def distance_with_safe_root(w, x):
    squares = jnp.sum(((x @ w)[:, None] - (x @ w)[None]) ** 2, axis=-1)
    return jnp.mean(jnp.where(squares == 0, 0, jnp.sqrt(jnp.where(squares == 0, 1, squares))))


model(
    distance_to_self,
    args=lambda: (normal(3, 3), normal(4, 3)),
    fixed=distance_with_safe_root,
    cause="The distance of a point to itself is 0, where a norm has no derivative.",
)


def vmapped_norms(w, x):
    return jnp.sum(jax.vmap(lambda row: jnp.linalg.norm(row @ w))(x))  # at fault: vmapped_norms


model(
    vmapped_norms,
    args=lambda: (normal(3, 2), np.float32([[1], [0], [2]]) * normal(3, 3)),
    cause="The norm of a row of zeros has no derivative.",
)


def standard_deviation(w, x):
    return jnp.mean(jnp.std(x @ w, axis=0))  # at fault: standard_deviation


def standard_deviation_with_safe_root(w, x):
    v = jnp.var(x @ w, axis=0)
    return jnp.mean(jnp.where(v == 0, 0, jnp.sqrt(jnp.where(v == 0, 1, v))))


model(
    standard_deviation,
    args=lambda: (np.float32([[1, 0], [2, 0]]), normal(6, 2)),
    near=lambda: (normal(2, 2), normal(6, 2)),
    fixed=standard_deviation_with_safe_root,
    cause="A column is constant: the root of 0 has an infinite derivative.",
)


def pairwise_by_expansion(x):
    squares = jnp.sum(x * x, axis=-1)
    d = squares[:, None] + squares[None] - 2 * x @ x.T
    return jnp.sum(jnp.sqrt(d))  # at fault: pairwise_by_expansion


model(
    pairwise_by_expansion,
    args=lambda: (100 + normal(6, 5),),
    cause="Squared distances by expansion are negative by rounding.",
)


def spectrum(x):
    z = jnp.fft.rfft(x)
    return jnp.sum(jnp.sqrt(z.real**2 + z.imag**2))  # at fault: spectrum


def spectrum_with_safe_root(x):
    z = jnp.fft.rfft(x)
    squares = z.real**2 + z.imag**2
    return jnp.sum(jnp.where(squares == 0, 0.0, jnp.sqrt(jnp.where(squares == 0, 1.0, squares))))


model(
    spectrum,
    fixed=spectrum_with_safe_root,
    args=lambda: (np.float32([1, 1, 1, 1]),),
    near=lambda: (normal(4),),
    cause="A magnitude of 0 has no derivative.",
)


def angle_between(a, b):
    cos = jnp.sum(a * b) / (jnp.linalg.norm(a) * jnp.linalg.norm(b))
    return jnp.arccos(cos)  # at fault: angle_between


model(
    angle_between,
    args=lambda: (np.float32([1, 0, 0]), np.float32([1, 0, 0])),
    near=lambda: (np.float32([1, 0, 0]), np.float32([1, 1, 0])),
    cause="The derivative of arccos at 1 is infinite.",
)


def power_of_negative(w, x):
    return jnp.sum((x @ w) ** 0.7)  # at fault: power_of_negative


model(
    power_of_negative,
    args=lambda: (np.float32([1, -1]), np.float32([[1, 2], [3, 1]])),
    near=lambda: (np.float32([1, -1]), np.float32([[3, 2], [3, 1]])),
    cause="A fractional power of a negative number.",
)


def power_by_logarithm(x, gamma):
    return jnp.sum(jnp.exp(gamma * jnp.log(x)))  # at fault: power_by_logarithm


model(
    power_by_logarithm,
    args=lambda: (np.float32([0, 0.5, 0.7]), np.float32([2.2, 2.2, 2.2])),
    near=lambda: (np.float32([0.1, 0.5, 0.7]), np.float32([2.2, 2.2, 2.2])),
    fixed=lambda x, gamma: jnp.sum(x**gamma),
    cause="The logarithm of 0.",
)


def where_log(x):
    return jnp.sum(jnp.where(x > 0, jnp.log(x), 0.0))  # at fault: where_log


model(
    where_log,
    args=lambda: (np.float32([1, 0, 2]),),
    near=lambda: (np.float32([1, 3, 2]),),
    cause="The logarithm of 0 is not selected, but its derivative is infinity times 0.",
)


# Matrices, indices and loops.


def gaussian(covariance, x):
    chol = jnp.linalg.cholesky(covariance)  # at fault: gaussian
    z = jax.scipy.linalg.solve_triangular(chol, x, lower=True)
    return 0.5 * jnp.sum(z**2) + jnp.sum(jnp.log(jnp.diag(chol)))


model(
    gaussian,
    args=lambda: (np.float32([[1, 2], [2, 1]]), np.float32([1, 2])),
    near=lambda: (np.float32([[2, 1], [1, 2]]), np.float32([1, 2])),
    cause="The covariance is not positive definite.",
)


def normal_equations(x, y):
    return jnp.linalg.inv(x.T @ x) @ x.T @ y  # at fault: normal_equations


model(
    normal_equations,
    args=lambda: (np.float32([[1, 2], [2, 4], [3, 6]]), np.float32([1, 2, 3])),
    dtype=None,
    cause="The columns are multiples of each other.",
)


def embedding(table, tokens):
    return jnp.mean(jnp.take(table, tokens, axis=0) ** 2)  # at fault: embedding


model(
    embedding,
    args=lambda: (normal(5, 3), np.array([0, 4, 5])),
    near=lambda: (normal(5, 3), np.array([0, 4, 3])),
    cause="Token 5 of a table of 5 rows.",
)


def exploding_rnn(w, x):
    def step(h, x):
        return (h @ w + x).astype(F16), None  # at fault: exploding_rnn

    return jnp.sum(lax.scan(step, jnp.zeros(3, F16), x)[0]).astype(jnp.float32)


def exploding_rnn_in_float32(w, x):
    w, x = w.astype(jnp.float32), x.astype(jnp.float32)
    return jnp.sum(lax.scan(lambda h, x: (h @ w + x, None), jnp.zeros(3, x.dtype), x)[0])


model(
    exploding_rnn,
    args=lambda: (4 * np.eye(3, dtype=F16), np.ones((12, 3), F16)),
    near=lambda: (4 * np.eye(3, dtype=F16), np.ones((5, 3), F16)),
    fixed=exploding_rnn_in_float32,
    dtype=None,
    cause="The state is 4 times as large in each iteration.",
)


def diverging_while(x):
    def step(state):
        i, x = state
        return i + 1, x * x  # at fault: diverging_while

    return lax.while_loop(lambda state: state[0] < 10, step, (0, x))[1]


model(diverging_while, args=lambda: (np.float32(3),), dtype=None, cause="3 ** 1024 is beyond float32.")


def transformer(params, x):
    def layer(x, p):
        q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
        x = x + jax.nn.softmax(q @ k.T / 8) @ v @ p["out"]
        x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x / jnp.std(x, axis=-1, keepdims=True)  # at fault: transformer, transformer_step
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    return jnp.mean(lax.scan(layer, x, params)[0] ** 2)


def transformer_args(zero=True):
    sizes = {"qkv": (64, 192), "out": (64, 64), "up": (64, 256), "down": (256, 64)}
    params = {name: normal(3, *size, seed=i, scale=0.1) for i, (name, size) in enumerate(sizes.items())}
    x = normal(16, 64, seed=9)
    if zero:
        params["out"][0], x[3] = 0, 1.5
    return params, x


model(
    transformer,
    args=transformer_args,
    near=lambda: transformer_args(False),
    cause="A padded token is constant, and so its standard deviation is 0 in the first layer.",
)


def transformer_step(params, m, x):
    loss, grads = jax.value_and_grad(transformer)(params, x)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, grads)
    return jax.tree.map(lambda p, m: p - 1e-3 * m, params, m), m, loss


model(
    transformer_step,
    args=lambda: (transformer_args()[0], jax.tree.map(np.zeros_like, transformer_args()[0]), transformer_args()[1]),
    dtype=None,
    cause="The same in a whole step.",
)


# Frameworks


if importlib.util.find_spec("flax"):
    from flax import nnx

    class Classifier(nnx.Module):
        def __init__(self):
            self.dense = nnx.Linear(4, 3, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return jax.nn.softmax(self.dense(x))

    def nnx_classifier(kernel, x, labels):
        net = Classifier()
        net.dense.kernel[...] = kernel
        return -jnp.mean(jnp.log(jnp.take_along_axis(net(x), labels[:, None], axis=1)))  # at fault: nnx_classifier

    model(
        nnx_classifier,
        args=lambda: (normal(4, 3, scale=300.0), normal(5, 4), np.array([0, 1, 2, 0, 1])),
        near=lambda: (normal(4, 3), normal(5, 4), np.array([0, 1, 2, 0, 1])),
        cause="The probability of a label rounds to 0.",
    )

if importlib.util.find_spec("equinox"):
    import equinox as eqx

    def equinox_norms(weight, x):
        net = eqx.nn.Linear(3, 2, use_bias=False, key=jax.random.key(0))
        net = eqx.tree_at(lambda net: net.weight, net, weight)
        return jnp.mean(jax.vmap(lambda row: jnp.linalg.norm(net(row)))(x))  # at fault: equinox_norms

    model(
        equinox_norms,
        args=lambda: (normal(2, 3), np.float32([[1], [0], [2]]) * normal(3, 3)),
        near=lambda: (normal(2, 3), normal(3, 3)),
        cause="The norm of a row of zeros has no derivative.",
    )

if importlib.util.find_spec("keras"):

    def keras_entropy(kernel, x):
        import keras

        p = keras.ops.softmax(keras.ops.matmul(x, kernel))
        return -keras.ops.mean(keras.ops.sum(p * keras.ops.log(p), axis=-1))  # at fault: keras_entropy

    model(
        keras_entropy,
        args=lambda: (normal(3, 16, scale=40.0), normal(5, 3)),
        near=lambda: (normal(3, 16), normal(5, 3)),
        fixed=lambda kernel, x: entropy_of_log_softmax(x @ kernel) / len(x),
        cause="A probability rounds to 0.",
    )


HIDDEN = ("variance_that_overflows", "clipped_by_norm", "scanned_norms")  # their results are finite, and 0

# Programs that are correct: `name: (function, arguments)`.


def online_softmax(x):
    def step(carry, x):
        m, total = carry
        new = jnp.maximum(m, x)
        return (new, total * jnp.exp(m - new) + jnp.exp(x - new)), None

    return lax.scan(step, (jnp.float32(-jnp.inf), jnp.float32(0)), x)[0]


CORRECT = {
    "a mask of -inf": (lambda x, m: jax.nn.softmax(jnp.where(m, x, -jnp.inf)), (normal(4, 4), np.tri(4, dtype=bool))),
    "a mask in float16": (
        lambda x, m: jax.nn.softmax(jnp.where(m, x.astype(F16), -1e9)).astype(jnp.float32),
        (normal(4, 4), np.tri(4, dtype=bool)),
    ),
    "a mask by a sum in float16": (
        lambda x, m: jax.nn.softmax(x.astype(F16) + jnp.log(m.astype(F16))),
        (normal(4, 4), np.tri(4, dtype=np.float32)),
    ),
    "a maximum from -inf": (lambda x: jnp.max(x, initial=-jnp.inf), (normal(4),)),
    "a minimum from inf": (lambda x: lax.scan(lambda m, x: (jnp.minimum(m, x), None), jnp.inf, x)[0], (normal(4),)),
    "a running maximum": (online_softmax, (normal(6, scale=50.0),)),
    "a sigmoid by hand": (lambda x: 1 / (1 + jnp.exp(-x)), (np.float32([-100, 0, 100]),)),
    "a sigmoid by hand in float16": (lambda x: 1 / (1 + jnp.exp(-x)), (np.float16([-20, 0, 20]),)),
    "a density that underflows": (lambda x: jnp.exp(-(x**2)), (np.float16([1, 300]),)),
    "a bound of an exponential": (lambda x: jnp.minimum(jnp.exp(x), 10.0), (np.float32([1, 100]),)),
    "tanh of a square": (lambda x: jnp.tanh(x * x), (np.float16([1, 300]),)),
    "gelu": (lambda x: jax.nn.gelu(x), (np.float16([-60, 1, 60]),)),
    "an unselected exponential": (lambda x: jnp.where(x < 50, jnp.exp(x), 0.0), (np.float32([1, 100]),)),
    "an unselected logarithm": (lambda x: jnp.where(x > 0, jnp.log(x), 0.0), (np.float32([1, 0]),)),
    "a safe norm": (
        jax.grad(lambda x: jnp.sqrt(jnp.where((s := jnp.sum(x**2)) == 0, 1.0, s)) * (s > 0)),
        (np.zeros(3, np.float32),),
    ),
    "layer norm in float16": (
        lambda x: (x - jnp.mean(x)) / jnp.sqrt(jnp.var(x) + 1e-5),
        (normal(16).astype(np.float16),),
    ),
    "nearest neighbours": (lambda x: jnp.argmin(jnp.where(jnp.eye(4) > 0, jnp.inf, x), axis=1), (normal(4, 4),)),
    "autocast attention": (
        jax.value_and_grad(amp.autocast(lambda w, x, m: jnp.mean(jax.nn.softmax(jnp.where(m, x @ w @ x.T, -1e9)) @ x))),
        (normal(3, 3), normal(4, 3), np.tri(4, dtype=bool)),
    ),
    "a dropped sample": (lambda x: jnp.nanmean(x), (np.float32([1, np.nan, 3]),)),
}
assert MODELS
