"""Ways to write attention, each as a function of queries, keys and values; and what is almost attention."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BATCH, LENGTH, KEYS, HEADS, FEATURES = 2, 6, 10, 4, 8
LOWEST = float(jnp.finfo(jnp.float32).min)


def by_hand(s, where=None):
    e = jnp.exp(s - jnp.max(s, -1, keepdims=True))
    return e / jnp.sum(e, -1, keepdims=True)


def inverse_of_sum(s):
    e = jnp.exp(s - lax.stop_gradient(jnp.max(s, -1, keepdims=True)))
    return e * (1 / jnp.sum(e, -1, keepdims=True))


def with_exp2(s):
    s = s * np.log2(np.e).astype(np.float32)
    e = jnp.exp2(s - jnp.max(s, -1, keepdims=True))
    return e / jnp.sum(e, -1, keepdims=True)


def in_float32(s):
    return jax.nn.softmax(s.astype(jnp.float32)).astype(s.dtype)


SOFTMAX = {
    "jax.nn": jax.nn.softmax,
    "by hand": by_hand,
    "times the inverse": inverse_of_sum,
    "unshifted": lambda s: jnp.exp(s) / jnp.sum(jnp.exp(s), -1, keepdims=True),
    "logsumexp": lambda s: jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)),
    "log_softmax": lambda s: jnp.exp(jax.nn.log_softmax(s)),
    "in float32": in_float32,
    "exp2": with_exp2,
}


def causal(t, s):
    return jnp.tril(jnp.ones((t, s), bool))


def before(t, s):
    return jnp.arange(s) <= jnp.arange(t)[:, None]


def window(t, s):
    i, j = jnp.arange(t)[:, None], jnp.arange(s)
    return (j <= i) & (i - j < 3)


def near(t, s):
    return jnp.abs(jnp.arange(t)[:, None] - jnp.arange(s)) <= 2


def shifted(t, s):
    return jnp.tril(jnp.ones((t, s), bool), k=s - t)


def irregular(t, s):
    return jnp.asarray(np.random.default_rng(0).random((t, s)) < 0.7).at[:, 0].set(True)


def numpy_causal(t, s):
    return np.tril(np.ones((t, s), bool))


# The flags of a mask, and the options by which a kernel is told of it; None for a mask.
FLAGS = {
    "none": (None, {}),
    "causal": (causal, {"is_causal": True}),
    "causal of indices": (before, {"is_causal": True}),
    "causal of NumPy": (numpy_causal, {"is_causal": True}),
    "window": (window, {"is_causal": True, "local_window_size": (2, 0)}),
    "near": (near, {"local_window_size": (2, 2)}),
    "irregular": (irregular, None),
}
# How scores are masked by flags.
MASKS = {
    "where -1e9": lambda s, flags: jnp.where(flags, s, -1e9),
    "where -inf": lambda s, flags: jnp.where(flags, s, -jnp.inf),
    "add lowest": lambda s, flags: s + jnp.where(flags, 0.0, LOWEST),
    "(1 - flags) * -1e9": lambda s, flags: s + (1 - jnp.asarray(flags).astype(jnp.float32)) * -1e9,
    "where not": lambda s, flags: jnp.where(jnp.logical_not(flags), LOWEST, s),
}
SCALES = {
    "of scores": lambda q, k: (q, k, FEATURES**-0.5),
    "of queries": lambda q, k: (q * FEATURES**-0.5, k, 1),
    "of keys": lambda q, k: (q, k / np.sqrt(FEATURES), 1),
    "of both": lambda q, k: (q * FEATURES**-0.25, k * FEATURES**-0.25, 1),
    "traced": lambda q, k: (q, k, 1 / jnp.sqrt(jnp.float32(FEATURES))),
}
# Axes of queries, keys, values, scores and results: batch, heads, g heads that share keys, t and s lengths, d features.
LAYOUTS = {
    "bthd": "bthd bshd bshd bhts bthd",
    "bhtd": "bhtd bhsd bhsd bhts bhtd",
    "tbhd": "tbhd sbhd sbhd bhts tbhd",
    "keys first": "bthd bshd bshd bhst bthd",
    "no heads": "btd bsd bsd bts btd",
    "no batch": "thd shd shd hts thd",
    "one head of keys": "bthd bsd bsd bhts bthd",
    "grouped": "bthgd bshd bshd bhgts bthgd",
    "grouped, queries last": "bhgtd bhsd bhsd bhgts bhgtd",
    "transposed keys": "bthd bhds bshd bhts bthd",
    "result by heads": "bthd bshd bshd bhts bhtd",
    "queries without a batch": "td bsd bsd bts btd",
    "queries without heads": "btd bshd bshd bhts bthd",
    "values without heads": "bthd bshd bsd bhts bthd",
    "wider values": "bthd bshd bshe bhts bthe",
}
SIZES = {"b": BATCH, "h": HEADS, "g": 2, "t": LENGTH, "s": KEYS, "d": FEATURES, "e": 12}


def attention(softmax="jax.nn", flags="none", mask="where -1e9", scale="of scores", layout="bthd"):
    """Returns attention written in one way, and the shapes of its queries, keys and values."""
    *operands, scores, out = LAYOUTS[layout].split()
    q_axes, k_axes, v_axes = operands
    along = scores.index("s")

    def attend(q, k, v):
        q, k, by = SCALES[scale](q, k)
        s = jnp.einsum(f"{q_axes},{k_axes}->{scores}", q, k)
        s = s * by if not isinstance(by, int) else s
        s = jnp.moveaxis(s, along, -1)
        make, _ = FLAGS[flags]
        if make is not None:
            t = "".join(axis for axis in scores if axis != "s").index("t")
            allowed = make(LENGTH, KEYS)
            shape = [LENGTH if i == t else KEYS if i == s.ndim - 1 else 1 for i in range(s.ndim)]
            s = MASKS[mask](s, jnp.reshape(allowed, shape))
        weights = SOFTMAX[softmax](s)
        moved = "".join(axis for axis in scores if axis != "s") + "s"
        return jnp.einsum(f"{moved},{v_axes}->{out}", weights, v)

    return attend, [tuple(SIZES[axis] for axis in axes) for axes in operands]


def variants(number, seed=0):
    """Returns ways to write attention, as keyword arguments: each of them once with the default, then random ones."""
    names = {"softmax": SOFTMAX, "flags": FLAGS, "mask": MASKS, "scale": SCALES, "layout": LAYOUTS}
    found = [
        {key: each, **({"flags": "causal"} if key == "mask" else {})} for key, table in names.items() for each in table
    ]
    rng = np.random.default_rng(seed)
    while len(found) < number:
        one = {key: str(rng.choice([*table])) for key, table in names.items()}
        if one not in found:
            found.append(one)
    return found[:number]


def name_of(variant):
    return ", ".join(variant.values())


def scores_of(q, k):
    return jnp.einsum("bthd,bshd->bhts", q, k) / math.sqrt(FEATURES)


def apply_to(weights, v):
    return jnp.einsum("bhts,bshd->bthd", weights, v)


def dropped(weights, rate=0.2):
    keep = jax.random.bernoulli(jax.random.key(0), 1 - rate, weights.shape)
    return jnp.where(keep, weights / (1 - rate), 0)


def softmax_with(denominator):
    def softmax(s):
        e = jnp.exp(s - jnp.max(s, -1, keepdims=True))
        return e / denominator(e, s)

    return softmax


def of_weights(change):
    return lambda q, k, v: apply_to(change(jax.nn.softmax(scores_of(q, k))), v)


def of_scores(change, softmax=jax.nn.softmax):
    return lambda q, k, v: apply_to(softmax(change(scores_of(q, k))), v)


def read_again(read):
    def attend(q, k, v):
        scores = scores_of(q, k)
        weights = jax.nn.softmax(scores)
        return apply_to(weights, v), read(scores, weights)

    return attend


def total(x):
    return jnp.sum(x, -1, keepdims=True)


@jax.custom_jvp
def clipped(s):
    return jax.nn.softmax(s)


clipped.defjvp(lambda primals, tangents: (clipped(*primals), jnp.clip(tangents[0], -1e-3, 1e-3)))


def with_custom_rule(q, k, v):
    return apply_to(clipped(scores_of(q, k)), v)


def square(x):
    return jnp.mean(x**2)


# What is almost attention, with queries as many as keys, so that no shape tells.
ALMOST = {
    "weights returned": read_again(lambda s, w: w),
    "weights averaged": read_again(lambda s, w: jnp.mean(w, 1)),
    "weights squared": read_again(lambda s, w: square(w)),
    "entropy": read_again(lambda s, w: -jnp.sum(w * jnp.log(w + 1e-9))),
    "scores returned": read_again(lambda s, w: s),
    "largest score": read_again(lambda s, w: jnp.max(s)),
    "z-loss": read_again(lambda s, w: square(jax.nn.logsumexp(s, -1))),
    "dropout": of_weights(dropped),
    "dropout by a product": of_weights(lambda w: w * jax.random.bernoulli(jax.random.key(0), 0.8, w.shape) / 0.8),
    "noise": of_weights(lambda w: w + 0.01 * jax.random.normal(jax.random.key(0), w.shape)),
    "weights scaled": of_weights(lambda w: 0.5 * w),
    "weights clipped": of_weights(lambda w: jnp.clip(w, 0, 0.3)),
    "weights above a threshold": of_weights(lambda w: jnp.where(w > 0.1, w, 0)),
    "weights masked afterwards": of_weights(lambda w: jnp.where(causal(KEYS, KEYS), w, 0)),
    "weights of the largest": of_weights(lambda w: jnp.where(w == jnp.max(w, -1, keepdims=True), w, 0)),
    "weights to a power": of_weights(lambda w: w**2),
    "weights mixed": of_weights(lambda w: jnp.einsum("bhts,hg->bgts", w, jnp.eye(HEADS) + 0.1)),
    "weights reversed": of_weights(lambda w: w[..., ::-1]),
    "weights shifted": of_weights(lambda w: jnp.roll(w, 1, -1)),
    "weights transposed": of_weights(lambda w: w.mT),
    "weights stopped": of_weights(lax.stop_gradient),
    "weights rounded": of_weights(lambda w: lax.reduce_precision(w, 5, 2)),
    "soft cap": of_scores(lambda s: 5 * jnp.tanh(s / 5)),
    "scores clipped": of_scores(lambda s: jnp.clip(s, -1, 1)),
    "scores squared": of_scores(jnp.square),
    "scores stopped": of_scores(lax.stop_gradient),
    "scores mixed": of_scores(lambda s: jnp.einsum("bhts,hg->bgts", s, jnp.eye(HEADS) + 0.1)),
    "scores of both directions": of_scores(lambda s: s + s.mT),
    "scores masked by 0": of_scores(lambda s: jnp.where(causal(KEYS, KEYS), s, 0.0)),
    "scores masked a little": of_scores(lambda s: jnp.where(causal(KEYS, KEYS), s, -3.0)),
    "masked scores made small": of_scores(lambda s: jnp.where(causal(KEYS, KEYS), s, -1e4) * 1e-3),
    "masked scores made negative": of_scores(lambda s: -jnp.where(causal(KEYS, KEYS), s, -1e9)),
    "largest scores": of_scores(lambda s: jnp.where(s >= jnp.sort(s)[..., -3:-2], s, -1e9)),
    "squares": of_scores(lambda s: s, lambda s: jnp.square(s) / total(jnp.square(s))),
    "no denominator": of_scores(lambda s: s, lambda s: jnp.exp(s - jnp.max(s, -1, keepdims=True))),
    "epsilon": of_scores(lambda s: s, softmax_with(lambda e, s: total(e) + 1e-3)),
    "sink": of_scores(lambda s: s, softmax_with(lambda e, s: total(e) + jnp.exp(-jnp.max(s, -1, keepdims=True)))),
    "denominator of other scores": of_scores(lambda s: s, softmax_with(lambda e, s: total(jnp.exp(s * 0.5)))),
    "denominator along another axis": of_scores(lambda s: s, softmax_with(lambda e, s: total(e).mT)),
    "denominator stopped": of_scores(lambda s: s, softmax_with(lambda e, s: lax.stop_gradient(total(e)))),
    "softmax of queries": of_scores(lambda s: s, functools.partial(jax.nn.softmax, axis=-2)),
    "softmax of heads": of_scores(lambda s: s, functools.partial(jax.nn.softmax, axis=1)),
    "softmax of heads and keys": of_scores(lambda s: s, functools.partial(jax.nn.softmax, axis=(1, 3))),
    "sigmoid": of_scores(lambda s: s, jax.nn.sigmoid),
    "a derivative of its own": with_custom_rule,
    "float32 asked for": lambda q, k, v: jnp.einsum(
        "bhts,bshd->bthd", jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k, precision="highest")), v
    ),
    "linear attention": lambda q, k, v: jnp.einsum(
        "bthd,bhde->bthe", jax.nn.softmax(q), jnp.einsum("bshd,bshe->bhde", jax.nn.softmax(k, 1), v)
    ),
}


def pairs(*tables):
    return list(itertools.product(*tables))
