"""What decides when a `while` ends runs as it was traced, so that it ends; what does not decide is low."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import while_worker
from jax import lax
from jaxprs import dtypes, equations, inner_equations, row
from while_worker import LOOPS

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

LOW, FULL = "float16 float16 -> float16", "float32 float32 -> float32"
ROOT = pathlib.Path(__file__).parents[3]
X, W = jnp.ones((8, 8)) / 4, jnp.eye(8) / 2


@pytest.mark.parametrize("low", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_loops_that_settle_to_1e_5_end_where_they_do_without_autocast(low):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, while_worker.__file__, low]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    assert json.loads(output.splitlines()[-1]) == {name: [] for name in LOOPS}


def products(fun, *args):
    return set(dtypes(amp.autocast(fun), *args, primitive="dot_general"))


# Calls that the product of the body may stand in.
CALLS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x: lax.cond(x[0, 0] > 0, f, lambda x: x, x),
    "scan": lambda f: lambda x: lax.scan(lambda x, _: (f(x), None), x, length=2)[0],
    "vmap": lambda f: lambda x: jax.vmap(lambda row: f(row[None])[0])(x),
    "moves": lambda f: lambda x: jnp.roll(f(x.T), 1, 0).T,
}
# Errors, of two iterates.
MEASURES = {
    "largest change": lambda new, x: jnp.max(jnp.abs(new - x)),
    "norm": lambda new, x: jnp.linalg.norm(new - x),
    "relative change": lambda new, x: jnp.linalg.norm(new - x) / jnp.linalg.norm(new),
    "of one element": lambda new, x: (new - x)[0, 0],
    "change of a sum": lambda new, x: jnp.abs(jnp.sum(new) - jnp.sum(x)),
}


def by_a_float(layer, measure):
    def body(carry):
        x, _ = carry
        new = layer(x)
        return new, measure(new, x)

    return lambda x: lax.while_loop(lambda c: c[1] > 1e-5, body, (x, jnp.float32(1)))[0]


def by_a_boolean(layer, measure):
    def body(carry):
        x, _ = carry
        new = layer(x)
        return new, measure(new, x) < 1e-5

    return lambda x: lax.while_loop(lambda c: ~c[1], body, (x, False))[0]


def by_a_count_of_what_is_done(layer, measure):
    def body(carry):
        x, done = carry
        new = layer(x)
        return new, done + (measure(new, x) < 1e-5).astype(jnp.int32)

    return lambda x: lax.while_loop(lambda c: c[1] < 3, body, (x, 0))[0]


def by_the_iterates(layer, measure):
    return lambda x: lax.while_loop(lambda c: measure(c[1], c[0]) > 1e-5, lambda c: (c[1], layer(c[1])), (x, layer(x)))[
        0
    ]


def by_a_product_in_the_condition(layer, measure):
    return lambda x: lax.while_loop(lambda x: measure(layer(x), x) > 1e-5, lambda x: x / 2, x)


WAYS = {f.__name__: f for f in (by_a_float, by_a_boolean, by_a_count_of_what_is_done, by_the_iterates)}


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("way", WAYS)
def test_products_that_decide_are_float32(way, measure):
    for name, call in CALLS.items():
        loop = WAYS[way](call(lambda x: jnp.tanh(x @ W)), MEASURES[measure])
        fun = amp.autocast(lambda x, loop=loop: loop(x) @ W)
        (while_loop,) = [eqn for eqn in equations(fun, X) if eqn.primitive.name == "while"]
        rows = {row(eqn) for eqn in inner_equations(while_loop) if eqn.primitive.name == "dot_general"}
        assert rows == {FULL}, name
        assert LOW in dtypes(fun, X, primitive="dot_general"), "what reads the result is low"


@pytest.mark.parametrize("measure", MEASURES)
def test_a_product_in_the_condition_is_float32(measure):
    assert products(by_a_product_in_the_condition(lambda x: x @ W, MEASURES[measure]), X) == {FULL}


# How a condition is made of an error.
CONDITIONS = {
    "a comparison": lambda error: error > 1e-5,
    "several": lambda error: jnp.any(jnp.stack([error > 1e-5, error > 1])) | ~(error < 1),
    "a choice": lambda error: jnp.where(error > 1e-5, True, False),
    "an integer": lambda error: (error > 1e-5).astype(int) == 1,
    "a jit": jax.jit(lambda error: error > 1e-5),
    "branches": lambda error: lax.cond(error > 1e-5, lambda: True, lambda: False),
    "branches of a switch": lambda error: lax.switch(
        (error > 1e-5) + (error > 1).astype(int), [lambda: False, lambda: True, lambda: True]
    ),
    "branches in a loop": lambda error: lax.fori_loop(
        0, 2, lambda _, b: lax.cond(error > 1, lambda: b, lambda: ~b), True
    ),
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_product_is_float32_however_the_condition_is_made_of_it(condition):
    assert products(lambda x: lax.while_loop(lambda x: CONDITIONS[condition](jnp.max(x @ W)), jnp.tanh, x), X) == {FULL}


def test_what_does_not_decide_is_low():
    def fun(x):
        def body(carry):
            x, y, _ = carry
            new = jnp.tanh(x @ W)
            return new, jnp.tanh(y @ W[:, :3] @ W[:3]), jnp.max(jnp.abs(new - x))

        return lax.while_loop(lambda c: c[2] > 1e-5, body, (x, x, jnp.float32(1)))[1]

    found = [e for e in equations(amp.autocast(fun), X) if e.primitive.name == "dot_general"]
    assert {(e.invars[1].aval.shape, e.invars[0].aval.dtype.name) for e in found} == {
        ((8, 8), "float32"),
        ((8, 3), "float16"),
        ((3, 8), "float16"),
    }


def test_a_loop_in_a_loop_that_decides_is_float32():
    inner = by_a_float(lambda x: jnp.tanh(x @ W), MEASURES["norm"])
    assert products(by_a_boolean(inner, MEASURES["norm"]), X) == {FULL}


def test_a_product_in_front_of_a_loop_in_a_loop_that_decides_is_float32():
    def body(x):
        return lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x) / 2, x @ W)

    assert products(lambda x: lax.while_loop(lambda x: jnp.max(x) > 1e-5, body, x), X) == {FULL}


def test_in_a_region_what_decides_is_float32_behind_a_product():
    def body(x):
        with amp.precision("float16"):
            return jnp.tanh(x @ W)

    fun = amp.autocast(lambda x: lax.while_loop(lambda x: jnp.max(x) > 1e-5, body, x))
    assert dtypes(fun, X, primitive="dot_general") == [LOW]
    assert dtypes(fun, X, primitive="tanh") == ["float32 -> float32"]


def test_a_settling_loop_in_a_scan_leaves_the_scan_low():
    inner = by_a_float(lambda x: jnp.tanh(x @ W), MEASURES["norm"])

    def fun(xs):
        return lax.scan(lambda h, x: (jnp.tanh(inner(x @ W) @ W + h @ W), None), jnp.zeros((8, 8)), xs)[0]

    rows = dtypes(amp.autocast(fun), jnp.stack([X] * 3), primitive="dot_general")
    assert sorted(rows) == [LOW] * 3 + [FULL]


# What of the logits makes the next token.
DECODERS = {
    "greedy": lambda logits, key: jnp.argmax(logits, -1),
    "sampled": lambda logits, key: jax.random.categorical(key, logits / 0.7),
    "best of three": lambda logits, key: lax.top_k(logits, 3)[1][:, 0],
}


@pytest.mark.parametrize("decoder", DECODERS)
def test_decoding_until_a_token_is_low(decoder):
    table = jnp.ones((1000, 8))  # with few columns, the best of three would be a router's

    def fun(w, table):
        def body(carry):
            i, h, token, done = carry
            h = jnp.tanh(table[token] @ w + h @ w)
            token = DECODERS[decoder](h @ table.T, jax.random.fold_in(jax.random.key(0), i))
            return i + 1, h, token, done | (token == 3)

        init = 0, jnp.zeros((2, 8)), jnp.zeros(2, int), jnp.zeros(2, bool)
        return lax.while_loop(lambda c: (c[0] < 5) & ~jnp.all(c[3]), body, init)[2]

    assert products(fun, W, table) == {LOW}


def test_a_loop_that_counts_is_low():
    def fun(x):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ W)), (0, x))[1]

    assert products(fun, X) == {LOW}
