"""A large constant that is added to a product is not rounded, whatever moves the sum and wherever it is read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from custom_derivatives import by_custom_vjp
from jax import lax
from jaxprs import dtypes
from rounding import EPSILON, error, rounded

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

RNG = np.random.default_rng(0)
X, W = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((6, 16), (16, 5)))
ROWS = jnp.arange(6) % 5

# Each reads `q`, of (6, 5) values near 80, in 16 bits if it can, and returns what is left of them.
READERS = {
    "gather": lambda q: jnp.take_along_axis(q, ROWS[:, None], 1) - 80,
    "rows": lambda q: q[ROWS] - 80,
    "roll": lambda q: jnp.roll(q, 1, 0) - q,
    "concatenate": lambda q: jnp.concatenate([q[1:], q[-1:]]) - q,
    "stack": lambda q: jnp.stack([q, q[::-1]]) - 80,
    "pad": lambda q: jnp.pad(q, ((0, 1), (0, 0)), constant_values=80.0) - 80,
    "tile": lambda q: jnp.tile(q, (2, 1)) - 80,
    "repeat": lambda q: jnp.repeat(q, 2, 0) - 80,
    "reshape and transpose": lambda q: q.reshape(3, 10).T - 80,
    "dynamic slice": lambda q: lax.dynamic_slice(q, (ROWS[1], 0), (2, 5)) - 80,
    "dynamic update": lambda q: lax.dynamic_update_slice(q, q[:1] + 1, (3, 0)) - 80,
    "set": lambda q: q.at[ROWS[:2]].set(81.0) - 80,
    "gradient": lambda q: jnp.gradient(q, axis=0),
    "sort": lambda q: jnp.sort(q, 1) - 80,
    "top_k": lambda q: lax.top_k(q, 2)[0] - 80,
    "a running maximum": lambda q: lax.cummax(q) - 80,
    "the largest of windows": lambda q: lax.reduce_window(q, -jnp.inf, lax.max, (2, 1), (1, 1), "VALID") - 80,
    "select": lambda q: jnp.where(ROWS[:, None] > 1, q, 80.0) - 80,
    "call": lambda q: jax.jit(lambda q: q - 80)(q),
    "vmap": lambda q: jax.vmap(lambda q: q - 80)(q),
    "checkpoint": lambda q: jax.checkpoint(lambda q: q - 80)(q),
    "cond": lambda q: lax.cond(q[0, 0] > 0, lambda q: q - 80, lambda q: 80 - q, q),
    "switch": lambda q: lax.switch(ROWS[1], [lambda q: 80 - q, lambda q: q - 80], q),
    "custom_jvp": lambda q: jax.nn.relu(q) - 80,
    "the first carry": lambda q: lax.scan(lambda c, _: (c + 0.1 * (80 - c), None), q, length=2)[0] - 80,
    "inputs of a scan": lambda q: lax.scan(lambda c, v: (0.9 * c + (v - 80), None), jnp.zeros(5), q)[0],
    "constants of a scan": lambda q: lax.scan(lambda c, i: (0.9 * c + (q[i] - 80), None), jnp.zeros(5), ROWS)[0],
    "a loop": lambda q: lax.fori_loop(0, 2, lambda _, c: c - 40, q),
    "map": lambda q: lax.map(lambda v: v - 80, q),
}

# Each makes `q` by a product.
MAKERS = {
    "a number": lambda dot: 80 + 5 * dot(X, W),
    "a bias": lambda dot: 5 * dot(X, W) + jnp.full(5, 80.0),
    "a number less": lambda dot: 80 - 5 * dot(X, W),
    "in a call": lambda dot: jax.jit(lambda x: 80 + 5 * dot(x, W))(X),
    "in a branch": lambda dot: lax.cond(X[0, 0] > 9, lambda x: 5 * dot(x, W), lambda x: 80 + 5 * dot(x, W), X),
    "the results of a scan": lambda dot: lax.scan(lambda c, x: (c, 80 + 5 * dot(x[None], W)[0]), 0.0, X)[1],
    "the last carry": lambda dot: lax.fori_loop(0, 2, lambda _, q: 80 + 5 * dot(X, W), jnp.zeros((6, 5))),
    "in a custom_vjp": lambda dot: by_custom_vjp(lambda x: 80 + 5 * dot(x, W))(X),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("maker", MAKERS)
def test_what_is_left_of_a_large_offset_is_as_good_as_its_product(maker, low):
    make = MAKERS[maker]

    def program(dot):
        q = make(dot)
        return {name: read(q) for name, read in READERS.items()}

    def all_ways():
        autocast = amp.autocast(lambda: program(jnp.dot), low)
        return program(jnp.dot), program(functools.partial(rounded, low)), autocast()

    want, by_hand, got = jax.jit(all_ways)()
    far = {name: error(got[name], want[name]) for name in READERS}
    assert {name for name in READERS if far[name] > 2 * error(by_hand[name], want[name]) + EPSILON[low]} == set(), far


@pytest.mark.sweep(2)
@pytest.mark.parametrize("low", EPSILON)
def test_gradients_of_what_reads_a_large_offset_are_those_by_hand(low):
    def loss(dot, w, reader):
        return jnp.sum(
            jnp.sin(jnp.arange(60.0))[: (out := READERS[reader](80 + 5 * dot(X, w))).size] * out.ravel() ** 2
        )

    def grads(dot, cast=lambda f: f):
        return {reader: jax.grad(cast(lambda w, reader=reader: loss(dot, w, reader)))(W) for reader in READERS}

    def all_ways():
        by_hand, autocast = functools.partial(rounded, low), functools.partial(amp.autocast, dtype=low)
        return grads(jnp.dot), grads(by_hand), grads(jnp.dot, autocast)

    want, hand, got = jax.jit(all_ways)()
    far = {name: (error(got[name], want[name]), error(hand[name], want[name])) for name in READERS}
    assert {name for name, (here, there) in far.items() if here > 4 * there + EPSILON[low]} == set(), far


@pytest.mark.parametrize(
    ("fun", "want"),
    [
        (lambda h: 287 * h, {"float16": "float32", "bfloat16": "bfloat16"}),
        (lambda h: h / 1e-3, {"float16": "float32", "bfloat16": "bfloat16"}),
        (lambda h: 3 * h, {"float16": "float16", "bfloat16": "bfloat16"}),
        (lambda h: h + 3, {"float16": "float16", "bfloat16": "bfloat16"}),
        (lambda h: h - 16, {"float16": "float32", "bfloat16": "float32"}),
    ],
)
def test_a_large_factor_counts_where_the_range_is_small_and_a_large_offset_in_16_bits(fun, want):
    for low, dtype in want.items():
        rows = dtypes(amp.autocast(lambda x: jnp.roll(fun(x @ W), 1, 0) @ W.T, low), X, primitive="concatenate")
        assert rows[0].split()[-1] == dtype


def test_a_region_in_the_code_comes_first():
    def fun(w):
        with amp.precision("bfloat16"):
            return jnp.roll(80 + X[:, :3] @ w[:3], 1, 0) @ w.T

    rows = amp.explain(fun)(W).select(direction="forward").rows
    assert {row.compute for row in rows if row.primitive in ("dot_general", "add", "concatenate")} == {"bfloat16"}


def test_a_large_factor_leaves_what_it_moves_to_finite():
    temperature, weights = jnp.full((16, 8), 250.0), jnp.ones((8, 8)) / 2
    got = amp.autocast(lambda t: jnp.roll(287 * (t @ weights), 1, 0))(temperature)
    np.testing.assert_allclose(got, 287 * (temperature @ weights), rtol=1e-3)
