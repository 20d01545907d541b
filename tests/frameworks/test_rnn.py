"""Recurrent cells under `lax.scan`: float16 inside the loop, and what a hand would have cast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations, inner_equations

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")
WIDTH, STEPS, BATCH = 8, 5, 4


def dense(p, x):
    return x @ p["w"] + p["b"]


def vanilla(p, h, x):
    h = jnp.tanh(dense(p["in"], x) + h @ p["hidden"])
    return h, h


def lstm(p, carry, x):
    h, c = carry
    i, f, g, o = jnp.split(dense(p["in"], x) + h @ p["hidden"], 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (h, c), h


def gru(p, h, x):
    r, z, n = jnp.split(dense(p["in"], x), 3, axis=-1)
    hr, hz, hn = jnp.split(h @ p["hidden"], 3, axis=-1)
    z = jax.nn.sigmoid(z + hz)
    h = (1 - z) * jnp.tanh(n + jax.nn.sigmoid(r + hr) * hn) + z * h
    return h, h


# The cell, how many gates it has, and how many parts its state.
CELLS = {"vanilla": (vanilla, 1, 1), "lstm": (lstm, 4, 2), "gru": (gru, 3, 1)}


def model(name, low=None):
    """Loss of the last of all outputs; with `low`, cast by hand."""
    cell, _, parts = CELLS[name]

    def loss_fn(params, xs):
        params, xs = (tree if low is None else jax.tree.map(lambda x: x.astype(low), tree) for tree in (params, xs))
        zeros = jnp.zeros((BATCH, WIDTH), xs.dtype)
        _, hs = lax.scan(lambda carry, x: cell(params, carry, x), zeros if parts == 1 else (zeros,) * parts, xs)
        return jnp.mean(hs[-1].astype(jnp.float32) ** 2)

    return loss_fn


def inputs(name):
    rng, width = np.random.default_rng(0), CELLS[name][1] * WIDTH
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape) / 3, jnp.float32)  # noqa: E731
    params = {"in": {"w": normal(WIDTH, width), "b": normal(width)}, "hidden": normal(WIDTH, width)}
    return params, 3 * normal(STEPS, BATCH, WIDTH)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", CELLS)
def test_the_result_and_its_gradients_are_those_of_the_hand_cast_cell(name):
    @jax.jit
    def run(*args):
        ways = amp.autocast(model(name)), model(name, jnp.float16)
        return model(name)(*args), [jax.value_and_grad(way)(*args) for way in ways]

    full, ((value, grads), (value_by_hand, by_hand)) = run(*inputs(name))
    np.testing.assert_allclose(value, value_by_hand, rtol=1e-3)
    np.testing.assert_allclose(value, full, rtol=1e-2)
    largest = max(jnp.abs(g).max() for g in jax.tree.leaves(by_hand))
    jax.tree.map(lambda g, e: np.testing.assert_allclose(g, e, rtol=2e-2, atol=5e-3 * largest), grads, by_hand)


STORED = {  # the carries and the outputs
    "vanilla": ["float16", "float16"],
    "lstm": ["float16", "float32", "float16"],  # the cell adds up, the output is replaced
    "gru": ["float32", "float32"],  # the state adds up, and is the output
}


@pytest.mark.parametrize("name", CELLS)
def test_states_that_add_up_are_float32_and_everything_else_in_the_loop_is_float16(name):
    (loop,) = (eqn for eqn in equations(amp.autocast(model(name)), *inputs(name)) if eqn.primitive.name == "scan")
    assert [var.aval.dtype.name for var in loop.outvars] == STORED[name]
    products = [
        {var.aval.dtype.name for var in (*eqn.invars, *eqn.outvars)}
        for eqn in equations(jax.value_and_grad(amp.autocast(model(name))), *inputs(name))
        if eqn.primitive.name == "dot_general"
    ]
    assert len(products) == 5  # two forward, three backward: nobody asks for the gradient of the inputs
    assert all(dtypes == {"float16"} for dtypes in products)


# Weights that a loop does not change.


def decode(w, x):
    return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=20)[0]


def decode_until(w, x):
    def step(state):
        i, h = state
        return i + 1, jnp.tanh(h @ w)

    return lax.while_loop(lambda state: state[0] < 20, step, (0, x))[1]


def decode_by_layers(w, x):
    layers = jnp.stack([w, w.T])
    return lax.scan(lambda h, _: (lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, layers)[0], None), x, length=10)[0]


def decode_by_layers_and_a_constant(w, x):
    def step(h, _):
        return lax.scan(lambda h, layer: (jnp.tanh(h @ layer @ w), None), h, jnp.stack([w, w.T]))[0], None

    return lax.scan(step, x, length=10)[0]


W, X = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)), jnp.ones((BATCH, WIDTH))


@pytest.mark.parametrize("fun", [decode, decode_until, decode_by_layers, decode_by_layers_and_a_constant])
def test_a_loop_that_is_not_differentiated_casts_a_weight_once(fun):
    (loop,) = [eqn for eqn in jax.make_jaxpr(amp.autocast(fun))(W, X).eqns if eqn.primitive.name in ("scan", "while")]
    casts = [eqn for eqn in inner_equations(loop) if eqn.primitive.name == "convert_element_type"]
    assert not [eqn for eqn in casts if eqn.invars[0].aval.shape == W.shape]
    low, want = jax.jit(lambda w, x: (amp.autocast(fun)(w, x), fun(w, x)))(W / 3, X)
    np.testing.assert_allclose(low, want, rtol=0.02, atol=0.002)


def test_the_gradient_of_a_weight_that_was_cast_once_is_summed_in_float32():
    def loss(w, x):  # of equal terms, each too small for a float16 sum of them
        return lax.scan(lambda total, _: (total + jnp.mean(x @ w), None), 0.0, length=4000)[0]

    for low in (amp.autocast(loss), jax.jit(amp.autocast(loss))):
        np.testing.assert_allclose(jax.grad(low)(W, X), jax.grad(loss)(W, X), rtol=1e-3)


def test_a_frozen_weight_costs_no_product_with_a_tangent_of_zero():
    for order in (jax.grad, lambda f, i: jax.grad(jax.jit(f), i)):
        frozen = order(lambda *args: amp.autocast(decode)(*args).sum(), 1)
        products = [eqn for eqn in equations(frozen, W, X) if eqn.primitive.name == "dot_general"]
        assert len(products) == 2  # of each pass
