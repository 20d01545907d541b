"""Programs for `rounding` that add up in a loop, of a product, a weight and 3,000 rows.

So many that a sum in 16 bits would be far from float32: a model of a few steps, which is what `agreement` checks, is
close to float32 either way.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

WIDTH = 4


def normal(seed, *shape, scale=1.0, mean=0.0):
    return jnp.asarray(mean + scale * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def running_mean(dot, w, xs):
    total = lax.scan(lambda c, x: (c + jnp.tanh(dot(x, w)), None), jnp.zeros(WIDTH), xs)[0]
    return total / len(xs)


def running_mean_by_fori_loop(dot, w, xs):
    return lax.fori_loop(0, len(xs), lambda i, c: c + jnp.tanh(dot(xs[i], w)), jnp.zeros(WIDTH)) / len(xs)


def running_mean_by_a_while_loop(dot, w, xs):
    def body(carry):
        i, c = carry
        return i + 1, c + jnp.tanh(dot(xs[i], w))

    return lax.while_loop(lambda c: c[0] < len(xs), body, (0, jnp.zeros(WIDTH)))[1] / len(xs)


def causal_linear_attention(dot, w, xs):
    def step(carry, x):
        state, normaliser = carry
        q, k, v = jnp.split(dot(x, w), 3)
        q, k = jax.nn.relu(q) + 0.1, jax.nn.relu(k) + 0.1
        state, normaliser = state + k[:, None] * v, normaliser + k
        return (state, normaliser), dot(q[None], state)[0] / jnp.sum(q * normaliser)

    return lax.scan(step, (jnp.zeros((WIDTH, WIDTH)), jnp.zeros(WIDTH)), xs)[1]


def streaming_covariance(dot, w, xs):
    """As in K-FAC, PPCA and FID; the sum is beyond 65504."""

    def step(c, x):
        h = dot(x, w)
        return c + dot(h.T, h), None

    return lax.scan(step, jnp.zeros((WIDTH, WIDTH)), xs.reshape(-1, 8, WIDTH))[0] / len(xs)


def gradient_descent(dot, w, xs):
    x = jnp.zeros((WIDTH, 1))
    for _ in range(8):
        x = x - 0.05 * dot(w.T, dot(w, x) - xs[:WIDTH, :1])
    return x


def iterative_soft_thresholding(dot, w, xs):
    def body(_, x):
        x = x - 0.05 * dot(w.T, dot(w, x) - xs[:WIDTH, :1])
        return jnp.sign(x) * jnp.maximum(jnp.abs(x) - 1e-3, 0)

    return lax.fori_loop(0, 200, body, jnp.zeros((WIDTH, 1)))


def positions_and_velocities_from_rest(dot, w, xs):
    def step(carry, x):
        position, velocity = carry
        velocity = velocity + 1e-3 * (1 + jnp.tanh(dot(x, w)))
        return (position + 1e-3 * velocity, velocity), None

    return lax.scan(step, (jnp.zeros(WIDTH), jnp.zeros(WIDTH)), xs)[0]


def online_softmax(dot, w, xs):
    def step(carry, x):
        top, total, acc = carry
        scores = dot(x, w)[:, 0]
        new = jnp.maximum(top, jnp.max(scores))
        p, decay = jnp.exp(scores - new), jnp.exp(top - new)
        return (new, total * decay + jnp.sum(p), acc * decay + dot(p[None], x)[0]), None

    init = jnp.full((), -jnp.inf), jnp.zeros(()), jnp.zeros(WIDTH)
    _, total, acc = lax.scan(step, init, xs.reshape(-1, 4, WIDTH))[0]
    return acc / total


def state_space_model(dot, w, xs):
    def step(h, x):
        h = 0.995 * h + dot(x, w)
        return h, dot(h, w)

    return lax.scan(step, jnp.zeros(WIDTH), xs)[1]


def mamba(dot, w, xs):
    def step(h, x):
        delta = 0.01 * jax.nn.softplus(dot(x, w))
        h = jnp.exp(-delta)[:, None] * h + (delta * x)[:, None] * dot(x, w)
        return h, dot(h, w)[:, 0]

    return lax.scan(step, jnp.zeros((WIDTH, WIDTH)), xs)[1]


def forward_variables_of_a_hidden_markov_model(dot, w, xs):
    transitions = jax.nn.log_softmax(w)

    def step(alpha, x):
        alpha = jax.nn.logsumexp(alpha[:, None] + transitions, 0) + jax.nn.log_softmax(dot(x, w))
        return alpha, None

    return jax.nn.logsumexp(lax.scan(step, jnp.zeros(WIDTH), xs)[0]) / len(xs)


def welford(dot, w, xs):
    def step(carry, x):
        n, mean, m2 = carry
        h = dot(x, w)
        new = mean + (h - mean) / (n + 1)
        return (n + 1, new, m2 + (h - mean) * (h - new)), None

    n, mean, m2 = lax.scan(step, (0.0, jnp.zeros(WIDTH), jnp.zeros(WIDTH)), xs)[0]
    return mean, m2 / n


def exponential_average(dot, w, xs):
    return lax.scan(lambda e, x: (0.999 * e + 0.001 * dot(x, w), None), jnp.zeros(WIDTH), xs)[0]


def gradients_accumulated_by_hand(dot, w, xs):
    def loss(w, x):
        return jnp.mean(jnp.tanh(dot(x, w)) ** 2)

    def step(total, x):
        return total + jax.grad(loss)(w, x), None

    return lax.scan(step, jnp.zeros_like(w), xs.reshape(-1, 2, WIDTH))[0] / len(xs)


def cell_of_a_long_short_term_memory(dot, w, xs):
    """Its `c` is summed with gates that are almost open."""

    def step(carry, x):
        h, c = carry
        i, f, g = jnp.split(dot(jnp.concatenate([x, h]), jnp.concatenate([w, 0.1 * w])), 3)
        c = jax.nn.sigmoid(f + 6) * c + jax.nn.sigmoid(i - 3) * jnp.tanh(g)
        return (jnp.tanh(c), c), None

    return lax.scan(step, (jnp.zeros(WIDTH), jnp.zeros(WIDTH)), xs)[0][1]


ROWS = normal(2, 3000, WIDTH, mean=0.7)
SQUARE, GATES = normal(0, WIDTH, WIDTH, scale=0.4), normal(1, WIDTH, 3 * WIDTH, scale=0.4)
WITH_GATES = {"causal_linear_attention", "cell_of_a_long_short_term_memory"}
PROGRAMS = {
    fun.__name__: fun
    for fun in (
        running_mean,
        running_mean_by_fori_loop,
        running_mean_by_a_while_loop,
        causal_linear_attention,
        streaming_covariance,
        gradient_descent,
        iterative_soft_thresholding,
        positions_and_velocities_from_rest,
        online_softmax,
        state_space_model,
        mamba,
        forward_variables_of_a_hidden_markov_model,
        welford,
        exponential_average,
        gradients_accumulated_by_hand,
        cell_of_a_long_short_term_memory,
    )
}


def weight(name):
    return GATES if name in WITH_GATES else SQUARE
