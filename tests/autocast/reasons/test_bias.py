"""A bias, added to a product over the features of its weight, gives way; any other float32 input widens its op."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import dtypes, equations, read_low, row
from rounding import EPSILON, error

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

LOW, FULL = "float16 float16 -> float16", "float32 float32 -> float32"
RNG = np.random.default_rng(0)
# As many rows as features, so that no rule can tell an axis by its size.
X, W = (jnp.asarray(RNG.normal(size=(8, 8)) / 3, jnp.float32) for _ in range(2))
V = jnp.asarray(RNG.normal(size=8), jnp.float32)
IMAGES, KERNEL = jnp.ones((2, 4, 4, 8)), jnp.ones((3, 3, 8, 8)) / 9


def sums_and_multiplications(fun, *args):
    """Their dtypes, in order; a product reads the result, so that it is not float32 because nothing low reads it."""
    found = equations(amp.autocast(lambda *args: fun(*args) @ jnp.ones((8, 8))), *args)
    return [row(e) for e in found if e.primitive.name in ("add", "sub", "mul", "max") and e.outvars[0].aval.ndim]


def convolution(x, kernel, numbers):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)


BIASES = {
    "dense": lambda x, w, v: x @ w + v,
    "from the left": lambda x, w, v: v + x @ w,
    "of a vector": lambda x, w, v: w @ x[0] + v,
    "of a vmapped vector": lambda x, w, v: jax.vmap(lambda x: w @ x + v)(x),
    "with its own broadcast": lambda x, w, v: x @ w + jnp.broadcast_to(v, (8, 8)),
    "as a row": lambda x, w, v: x @ w + v[None],
    "after a reshape of the product": lambda x, w, v: (x @ w).reshape(2, 4, 8) + v,
    "after a transpose of the product": lambda x, w, v: (x.reshape(2, 4, 8) @ w).transpose(1, 0, 2) + v,
    "of einsum": lambda x, w, v: jnp.einsum("nd,df->nf", x, w) + v,
    "of heads": lambda x, w, v: (jnp.einsum("nd,dhe->nhe", x, w.reshape(8, 2, 4)) + v.reshape(2, 4)).reshape(8, 8),
    "in a jit": lambda x, w, v: jax.jit(lambda h, v: h + v)(x @ w, v),
    "of a convolution": lambda x, w, v: convolution(IMAGES, KERNEL, ("NHWC", "HWIO", "NHWC")) + v,
    "of a stacked layer": lambda x, w, v: lax.scan(
        lambda x, p: (jnp.tanh(x @ p[0] + p[1]), None), x, (w[None], v[None])
    )[0],
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_gives_way(name):
    assert set(sums_and_multiplications(BIASES[name], X, W, V)) == {LOW}


def test_a_bias_of_channels_that_come_first_gives_way():
    kernel = jnp.ones((8, 3, 3, 3))

    def fun(x, kernel, v):
        h = convolution(x, kernel, ("NCHW", "OIHW", "NCHW")) + v[:, None, None]
        return h @ jnp.ones((5, 2))

    found = equations(amp.autocast(fun), jnp.ones((2, 3, 4, 5)), kernel, V)
    assert {row(eqn) for eqn in found if eqn.primitive.name == "add"} == {LOW}


COMMITTED = {
    "an average less a gradient": lambda x, w, v: v - 1e-4 * (x @ w)[0],
    "a running statistic": lambda x, w, v: 0.9 * v + 0.1 * jnp.tanh(x @ w)[3],
    "a vector and a step": lambda x, w, v: v + jnp.tanh(w @ x[0]),
    "a scale": lambda x, w, v: (x @ w) * v,
    "a scale of one more dimension": lambda x, w, v: (x @ w) * v[None],
    "a threshold": lambda x, w, v: jnp.maximum(jnp.tanh(x @ w), v),
    "a vector added after a nonlinearity": lambda x, w, v: jnp.tanh(x @ w) + v,
    "a vector added to a scaled product": lambda x, w, v: 2 * (x @ w) + v,
    "a vector over the rows": lambda x, w, v: jnp.tanh(x) @ w + v[:, None],
    "a matrix": lambda x, w, v: x @ w + x,
    "in a jit": lambda x, w, v: jax.jit(lambda h, v: h + v)(jnp.tanh(x @ w), v),
}


@pytest.mark.parametrize("name", COMMITTED)
def test_any_other_input_makes_its_op_float32(name):
    assert sums_and_multiplications(COMMITTED[name], X, W, V)[-1] == FULL


TERMS = {
    "product": lambda x, w, v: x @ w,
    "other product": lambda x, w, v: jnp.sin(x) @ w.T,
    "bias": lambda x, w, v: v,
    "computed": lambda x, w, v: jnp.tanh(x @ w),
}


@pytest.mark.parametrize("terms", [terms for n in (2, 3) for terms in itertools.product(TERMS, repeat=n)])
def test_a_bias_gives_way_in_sums_of_products_and_biases_only(terms):
    def fun(x, w, v):
        return functools.reduce(jnp.add, [jnp.broadcast_to(TERMS[term](x, w, v), x.shape) for term in terms])

    # A bias that does not give way makes its sum float32, and with it the sums that this reads and that read it.
    biases = [i for i, term in enumerate(terms) if term == "bias"]
    summed = terms[: max([*biases, 1]) + 1]  # up to the last bias, with a term that the first one is added to
    gives_way = "computed" not in summed and terms[:2] != ("bias", "bias")
    assert set(sums_and_multiplications(fun, X, W, V)) == {LOW if gives_way or not biases else FULL}


SCALARS = {
    "a Python number": lambda h, s: 0.5 * h,
    "a scalar that is multiplied": lambda h, s: s * h,
    "a scalar that is added": lambda h, s: h + s,
    "a scalar after a nonlinearity": lambda h, s: jnp.tanh(h) - s,
}


@pytest.mark.parametrize("name", SCALARS)
def test_a_scalar_gives_way(name):
    def fun(x, w, s):
        return SCALARS[name](x @ w, s)

    assert sums_and_multiplications(fun, X, W, jnp.float32(0.3)) == [LOW]


STEP = 2.0**-13  # what float16 does not hold beside 1


def average(w, x, v):
    return v - STEP * (x @ w)[0]


def descent(w, x, v):
    return v - STEP * jax.grad(lambda v: jnp.mean(jnp.tanh(x @ w @ v) ** 2))(v)


def running_statistic(w, x, v):
    return (1 - STEP) * v + STEP * (x @ w)[0]


@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("update", [average, descent, running_statistic])
def test_an_update_of_a_vector_is_not_rounded(update, low):
    def loss(*args):
        return jnp.sum(update(*args) ** 2)

    cast = functools.partial(amp.autocast, dtype=low)
    ways = (update, jax.grad(loss), jax.grad(loss), cast(update), jax.grad(cast(loss)), cast(jax.grad(loss)))
    found = jax.jit(lambda *args: [f(*args) for f in ways])(W, X, 1 + V**2)
    assert error(found[3], found[0]) < 4 * STEP * EPSILON[low]
    for got, want in zip(found[4:], found[1:3], strict=True):
        assert error(got, want) < 16 * EPSILON[low]


@pytest.mark.parametrize("low", EPSILON)
def test_a_scale_is_not_rounded(low):
    scale = 1 + jnp.arange(8) * 2.0**-12
    got = jax.jit(amp.autocast(lambda h, s: (h @ jnp.eye(8)) * s, low))(jnp.ones((8, 8)), scale)
    np.testing.assert_array_equal(got, jnp.broadcast_to(scale, (8, 8)))


def test_what_varies_with_the_rows_is_no_bias_of_a_product_that_has_none():
    @read_low
    def fun(w, x, table):
        return jnp.tanh(table + w @ x[0])

    found = dtypes(amp.autocast(fun), W, X, jnp.ones((5, len(W))), primitive="add")
    assert found == ["float32 float32 -> float32"]
