"""Where a reason ends that a reader gives: what is read otherwise, too, or what is in front, is low precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rounding import EPSILON, error, rounded

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

RNG = np.random.default_rng(0)
X, W = (jnp.asarray(RNG.normal(size=(6, 8)), jnp.float32), jnp.asarray(RNG.normal(size=(8, 8)) / 3, jnp.float32))
LABELS = jnp.arange(6) % 8
OTHER = jnp.cos(jnp.arange(48.0)).reshape(6, 8)


def products(fun, low, *args):
    """Returns the reason of each product that is float32, and "low" for the others, in their order."""
    rows = amp.explain(fun, low, argnums=0)(*args).select(direction="forward", primitive="dot_general").rows
    return [row.why if row.compute == "float32" else "low" for row in rows]


def hidden(x, w):
    return jnp.tanh(x @ w)


def each_cross_entropy(z):
    return jax.nn.logsumexp(z, -1) - jnp.take_along_axis(z, LABELS[:, None], 1)[:, 0]


def cross_entropy(z):
    return jnp.mean(each_cross_entropy(z))


# What reads the product of `h` and `w`, and why the product is float32 for it.
READERS = {
    "rank": lambda z, h, w: lax.top_k(z, 2)[1],
    "distance": lambda z, h, w: jnp.sum(h**2, -1)[:, None] - 2 * z + jnp.sum(w**2, 0),
    "logarithm": lambda z, h, w: OTHER / z,
}

# Ways from a product to its reader, with the reasons that pass them.
ALL, EXACT, NONE = {*READERS}, {"rank"}, set()
ONWARD = {
    "nothing": (lambda z: z, ALL),
    "moved": (lambda z: z[::-1].T.reshape(6, 8), ALL),
    "scaled": (lambda z: 0.1 * z, ALL),
    "a bias": (lambda z: z + OTHER[0], ALL),
    "a call": (jax.jit(lambda z: z * 1.0), ALL),
    "a branch": (lambda z: lax.cond(True, lambda z: z * 1.0, lambda z: z * 2.0, z), ALL),
    "a loop": (lambda z: lax.scan(lambda c, _: (0.5 * c, None), z, None, 3)[0], ALL),
    "a map": (lambda z: lax.map(lambda row: 0.5 * row, z), ALL),
    "tanh": (jnp.tanh, EXACT),
    "a softmax": (jax.nn.softmax, EXACT),
    "an exponential": (jnp.exp, EXACT),
    "a norm": (jax.nn.standardize, {"distance"}),  # which scales
    "a layer": (lambda z: jnp.tanh(z @ W) @ W, NONE),
    "a layer in a loop": (lambda z: lax.scan(lambda c, _: (c, jnp.tanh(z @ W)), 0.0, None, 2)[1][0] @ W, NONE),
}


@pytest.mark.parametrize("low", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("why", READERS)
def test_a_reason_reaches_the_product_that_is_read_and_none_in_front_of_it(why, low):
    is_for_range = why == "logarithm"
    for way, (onward, passing) in ONWARD.items():

        def fun(x, w, onward=onward):
            h = hidden(x, w)
            return READERS[why](onward(h @ w), h, w)

        got = products(fun, low, X, W)
        is_last = "layer" in way and why != "distance"  # the last product is read as it is, but by another norm
        full = (why in passing or is_last) and not (is_for_range and low == "bfloat16")
        assert got == ["low"] * (len(got) - 1) + [why if full else "low"], way


BORDERS = {
    "none": lambda fun: fun,
    "a call": jax.jit,
    "a checkpoint": jax.checkpoint,
    "a map": lambda fun: lambda *args: lax.map(lambda _: fun(*args), jnp.arange(2)),
    "a branch": lambda fun: lambda *args: lax.cond(args[0][0, 0] > 9, fun, fun, *args),
}


def all_in_calls(low, cases, head):
    """Returns the reasons of the last product of each case, by name, and checks that borders change none."""
    found = {}
    for name, fun in cases.items():
        last = {border: products(around(fun), low, X, W)[head] for border, around in BORDERS.items()}
        assert set(last.values()) == {last["none"]}, (name, last)
        found[name] = last["none"]
    return found


def beside(read, loss=cross_entropy):
    """A network with a loss, and what reads its logits beside it."""

    def fun(x, w):
        z = hidden(x, w) @ w
        return loss(z), read(z)

    return fun


def is_hit(z):
    return jnp.any(lax.top_k(z, 5)[1] == LABELS[:, None], -1)


def binary_cross_entropy(z):
    return jnp.mean(jnp.maximum(z, 0) - z * (OTHER > 0) + jnp.log1p(jnp.exp(-jnp.abs(z))))


METRICS = {
    "the best five": beside(lambda z: lax.top_k(z, 5)),
    "the best by probability": beside(lambda z: lax.top_k(jax.nn.softmax(z), 5)[1]),
    "a sorted list": beside(lambda z: jnp.argsort(z)[:, ::-1]),
    "an accuracy": beside(lambda z: jnp.mean(is_hit(z))),
    "in percent": beside(lambda z: 100 * jnp.mean(is_hit(z).astype(jnp.float32))),
    "of what is not masked": beside(lambda z: jnp.sum(is_hit(z) * (OTHER[:, 0] > 0)) / jnp.sum(OTHER[:, 0] > 0)),
    "a count": beside(lambda z: jnp.sum(is_hit(z))),
    "the rank of the label": beside(lambda z: jnp.take_along_axis(jnp.argsort(jnp.argsort(-z)), LABELS[:, None], 1)),
    "beside squares": beside(lambda z: lax.top_k(z, 5)[1], lambda z: jnp.mean((z - 1) ** 2)),
    "beside binary labels": beside(lambda z: lax.top_k(z, 5)[1], binary_cross_entropy),
}
RANKS = {
    "nothing but the choice": lambda x, w: lax.top_k(hidden(x, w) @ w, 2)[1],
    "nothing but an accuracy": lambda x, w: jnp.mean(is_hit(jax.nn.softmax(hidden(x, w) @ w))),
    "the logits": lambda x, w: (lambda z: (z, lax.top_k(z, 2)[1]))(hidden(x, w) @ w),
    "rows of a table": beside(lambda z: OTHER[lax.top_k(z, 2)[1][:, 0]]),
    "a mask": beside(lambda z: jnp.where(lax.top_k(z, 1)[1] == 1, OTHER, jnp.tanh(OTHER))),
    "a threshold": beside(lambda z: jnp.where(z >= lax.top_k(z, 2)[0][:, 1:], z, 0.0)),
    "weights": beside(lambda z: jnp.sum(jax.nn.one_hot(lax.top_k(z, 2)[1], 8) * jax.nn.softmax(z)[:, None])),
    "a loss that balances experts": beside(
        lambda z: jnp.sum(jax.nn.one_hot(lax.top_k(z, 2)[1], 8).mean((0, 1)) * jax.nn.softmax(z).mean(0))
    ),
    "a router, and a sorted list": beside(lambda z: (OTHER[lax.top_k(z, 2)[1][:, 0]], jnp.argsort(z))),
}


@pytest.mark.parametrize("low", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_choice_that_is_only_returned_is_a_metric_and_one_that_the_program_reads_a_rank(low):
    assert all_in_calls(low, METRICS, -1) == dict.fromkeys(METRICS, "low")
    assert all_in_calls(low, RANKS, -1) == dict.fromkeys(RANKS, "rank")


def log_layer(x, w):
    return jnp.log(jnp.exp(x @ w) + 1)


def behind_logarithms(loss):
    return lambda x, w: loss(log_layer(log_layer(x, w), w) @ w)


LAYERS = {
    "logits": behind_logarithms(cross_entropy),
    "log probabilities": behind_logarithms(
        lambda z: -jnp.mean(jnp.sum(jax.nn.one_hot(LABELS, 8) * jax.nn.log_softmax(z), -1))
    ),
    "binary logits": behind_logarithms(binary_cross_entropy),
    "squares": behind_logarithms(lambda z: jnp.mean((z - 1) ** 2)),
    "absolute differences": behind_logarithms(lambda z: jnp.mean(jnp.abs(z - 1))),
    "a hinge": behind_logarithms(lambda z: jnp.mean(jnp.maximum(1 - z, 0))),
    "a pooled layer": behind_logarithms(lambda z: jnp.mean(jax.nn.relu(z))),
    "a residual layer": behind_logarithms(lambda z: cross_entropy((z + jnp.tanh(z)) @ W)),
}
LOSSES = {
    "labels": lambda x, w: -jnp.mean(jax.nn.one_hot(LABELS, 8) @ jax.nn.log_softmax(x @ w).T),
    "probabilities": lambda x, w: -jnp.mean(jax.nn.softmax(x) @ jax.nn.log_softmax(x @ w).T),
    "a returned loss": lambda x, w: -jax.nn.softmax(x) @ jax.nn.log_softmax(x @ w).T,
    "a weighted loss": lambda x, w: -jnp.sum(OTHER[:, :6] * (jax.nn.softmax(x) @ jax.nn.log_softmax(x @ w).T)),
    "a selected loss": lambda x, w: -jnp.trace(jax.nn.softmax(x) @ jax.nn.log_softmax(x @ w).T),
}


@pytest.mark.parametrize("low", ["bfloat16"])  # in float16, the logarithms that are layers have a reason of their own
def test_a_loss_is_what_is_returned_and_no_layer_behind_logarithms(low):
    assert all_in_calls(low, LAYERS, -1) == dict.fromkeys(LAYERS, "low")
    assert all_in_calls(low, LOSSES, -1) == dict.fromkeys(LOSSES, "loss")


def squares(x):
    return jnp.sum(x**2, -1)


def beside_squares(of, loss=each_cross_entropy):
    def fun(x, w):
        h = hidden(x, w)
        return jnp.mean(loss(h @ w) + 0.5 * squares(of(x, h, w)))

    return fun


UNRELATED = {
    "a center loss": beside_squares(lambda x, h, w: h - w[LABELS]),
    "a commitment": beside_squares(lambda x, h, w: h - lax.stop_gradient(jnp.round(h))),
    "features that a cross entropy reads": beside_squares(lambda x, h, w: h),
    "an energy": beside_squares(lambda x, h, w: x, lambda z: z[:, 0]),
    "a reward less a cost": beside_squares(lambda x, h, w: jnp.sin(x), lambda z: -z[:, 0]),
    "a Gaussian with a learned scale": beside_squares(lambda x, h, w: x - h, lambda z: z[:, 1]),
}
RELATED = {
    "a distance": lambda x, w: squares(x)[:, None] - 2 * (x @ w) + jnp.sum(w**2, 0),
    "of features": lambda x, w: (lambda h: squares(h)[:, None] - (2 * h) @ w)(hidden(x, w)),
    "of a codebook": lambda x, w: jnp.sum(w**2, 0) - 2 * hidden(x, w) @ w,
    "the nearest": lambda x, w: squares(x) + jnp.min(-2 * x @ w, 1),
    "an energy of its own inputs": lambda x, w: 0.5 * squares(x) - x @ w[:, 0],
    "a mixture": lambda x, w: jax.nn.logsumexp(x @ w + (OTHER[0] - 0.5 * jnp.sum(w**2, 0)), 1),
    "squares in a call": lambda x, w: jax.jit(squares)(x)[:, None] - 2 * (x @ w),
    "a product in a branch": lambda x, w: squares(x)[:, None] - lax.cond(True, lambda: 2 * x @ w, lambda: x @ w),
    "a product in a map": lambda x, w: squares(x)[:, None] - lax.map(lambda _: 2 * x @ w, jnp.arange(2))[0],
}


@pytest.mark.parametrize("low", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_squares_cancel_only_against_a_product_of_what_was_squared(low):
    assert all_in_calls(low, UNRELATED, -1) == dict.fromkeys(UNRELATED, "low")
    assert all_in_calls(low, RELATED, -1) == dict.fromkeys(RELATED, "distance")


def sinkhorn(dot, points):
    """The cost of moving points, by scaling a kernel; the last scale is computed behind the loop."""
    costs = jnp.sum((points[:, None] - jnp.roll(points, 1, 0)) ** 2, -1)
    kernel, share = jnp.exp(-costs / 0.1), jnp.full(len(points), 1 / len(points))

    def step(u, _):
        return share / dot(kernel, share / dot(kernel.T, u)), None

    u, _ = lax.scan(step, jnp.ones(len(points)), length=20)
    return jnp.sum(u[:, None] * kernel * (share / dot(kernel.T, u)) * costs)


def test_a_divisor_behind_a_loop_is_as_good_as_in_it():
    points = jnp.asarray(RNG.normal(size=(24, 2)), jnp.float32)
    ways = functools.partial(sinkhorn, jnp.dot), amp.autocast(functools.partial(sinkhorn, jnp.dot))
    (want, want_grad), (got, grad) = jax.jit(lambda x: [jax.value_and_grad(way)(x) for way in ways])(points)
    assert error(got, want) < EPSILON["float16"]
    assert error(grad, want_grad) < EPSILON["float16"]


@pytest.mark.parametrize(
    "activate",
    [
        lambda z: z / (1 + jnp.abs(z)),
        lambda z: z / (1 + jnp.exp(-z)),
        lambda z: z / jnp.max(jnp.abs(z), -1, keepdims=True),
        lambda z: z / jnp.linalg.norm(z, axis=-1, keepdims=True),
        lambda z: 1 / z,
        lambda z: z / 3,
    ],
)
def test_a_divisor_of_an_activation_is_low(activate):
    assert products(lambda x, w: activate(x @ w) @ w, "float16", X, W) == ["low", "low"]


# Quotients by products, and whether small values of these matter.
DIVISORS = {
    "a product": (lambda z: OTHER / z, True),
    "a sum of squares": (lambda z: OTHER / (z**2 + 1e-6), False),
    "a number less a product": (lambda z: OTHER / (1 - z), True),
    "beside 1": (lambda z: OTHER / (1 + jnp.abs(z)), False),
    "at least 1": (lambda z: OTHER / jnp.maximum(z, 1), False),
    "a scale of a row": (
        lambda z: (lambda s: jnp.round(z * s) / s)(127 / jnp.max(jnp.abs(z), -1, keepdims=True)),
        False,
    ),
    "a large multiple beside 1": (lambda z: OTHER / (1 + 1e6 * z), True),
}


@pytest.mark.parametrize("name", DIVISORS)
def test_a_divisor_is_read_for_small_values_where_these_matter(name):
    divided, matters = DIVISORS[name]
    assert products(lambda x, w: divided(x @ w), "float16", X, W) == ["logarithm" if matters else "low"]


# What reads a layer whose bias is large, as (rows, columns).
RESULTS = {
    "returned": lambda q: q,
    "rows": lambda q: q[LABELS[:4]],
    "label": lambda q: jnp.take_along_axis(q, LABELS[:, None] % q.shape[1], 1),
    "sort": lambda q: jnp.sort(q, 0),
    "top_k": lambda q: lax.top_k(q, 1)[0],
    "concatenate": lambda q: jnp.concatenate([q[1:], q[-1:]]),
    "stack": lambda q: jnp.stack([q, q[::-1]]),
    "pad": lambda q: jnp.pad(q, ((0, 1), (0, 0))),
    "roll": lambda q: jnp.roll(q, 1, 0),
    "dynamic update": lambda q: lax.dynamic_update_slice(q, q[:1], (3, 0)),
    "slices of a scan": lambda q: lax.scan(lambda c, v: (0.9 * c + v,) * 2, jnp.zeros(q.shape[1]), q)[1],
    "constants of a scan": lambda q: lax.scan(lambda c, i: (0.9 * c + q[i],) * 2, jnp.zeros(q.shape[1]), LABELS % 6)[1],
    "a carry": lambda q: lax.fori_loop(0, 2, lambda _, c: c - 1, q),
    "map": lambda q: lax.map(lambda v: v - 1, q),
    "cond": lambda q: lax.cond(q[0, 0] > 0, lambda q: q - 1, lambda q: q + 1, q),
    "checkpoint": lambda q: jax.checkpoint(lambda q: q - 1)(q),
    "segments": lambda q: jax.ops.segment_max(q, LABELS % 2, 2),
    "a choice, moved": lambda q: jnp.roll(jnp.maximum(q, -5000.0), 1, 0),
}
HEADS = {
    "a layer": lambda dot, b: dot(jnp.tanh(dot(X, W)), W[:, :5]) + b,
    "one column": lambda dot, b: dot(jnp.tanh(dot(X, W)), W[:, :1]) + b[:1],
    "a scalar": lambda dot, b: b[0] + dot(jnp.tanh(dot(X, W)), W[:, :5]),
    "a scale": lambda dot, b: b[0] + 2 * dot(jnp.tanh(dot(X, W)), W[:, :5]),
    "a difference": lambda dot, b: dot(jnp.tanh(dot(X, W)), W[:, :5]) - b,
    "in a call": lambda dot, b: jax.jit(lambda x: dot(jnp.tanh(dot(x, W)), W[:, :5]) + b)(X),
    "in a map": lambda dot, b: lax.map(lambda x: (dot(jnp.tanh(dot(x[None], W)), W[:, :5]) + b)[0], X),
    "in a branch": lambda dot, b: lax.cond(b[1] > 1e6, lambda x: x[:, :5], lambda x: dot(x, W[:, :5]) + b, X),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("head", HEADS)
def test_a_bias_of_a_result_is_not_rounded_whatever_moves_it(head, low):
    """A mean return of 200, energies of -4000, and the prior of a detector."""

    def program(dot, b):
        return {name: read(HEADS[head](dot, b)) for name, read in RESULTS.items()}

    def one_by_one(dot, b):
        return {
            name: amp.autocast(lambda b, read=read: read(HEADS[head](dot, b)), low)(b) for name, read in RESULTS.items()
        }

    @jax.jit
    def all_ways(b):
        return program(jnp.dot, b), program(functools.partial(rounded, low), b), one_by_one(jnp.dot, b)

    for size in (200.0, -4000.0, -4.6):
        want, by_hand, got = all_ways(size + jnp.arange(5.0) / 7)
        off = {name: np.abs(np.float64(got[name]) - np.float64(want[name])).max() for name in RESULTS}
        hand = {name: np.abs(np.float64(by_hand[name]) - np.float64(want[name])).max() for name in RESULTS}
        far = {name: (off[name], hand[name]) for name in RESULTS if off[name] > 3 * hand[name] + 1e-6 * abs(size)}
        assert far == {}, size


@pytest.mark.parametrize("low", EPSILON)
def test_a_bias_of_a_hidden_or_a_wide_layer_is_part_of_it(low):
    def moved(x, w, b):
        return jnp.roll(x @ w + b, 1, 0)

    def sums(fun, *args):
        rows = amp.explain(fun, low, argnums=0)(*args).select(direction="forward", primitive="add").rows
        return {row.compute for row in rows}

    wide = jnp.ones((8, 2000)), jnp.ones(2000)
    assert sums(moved, X, W, OTHER[0]) == {"float32"}
    assert sums(moved, X, *wide) == {low}
    for onward in (jax.nn.relu, jnp.tanh, jax.nn.softmax, lambda h: h):
        assert sums(lambda x, w, b, onward=onward: onward(moved(x, w, b)) @ w, X, W, OTHER[0]) == {low}
