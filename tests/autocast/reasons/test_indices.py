"""An index is exact: a product that is converted to an integer of more than 8 bits is computed as it was traced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from custom_derivatives import by_custom_jvp, by_custom_vjp
from jax import lax
from jaxprs import dtypes
from rounding import EPSILON

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

RNG = np.random.default_rng(0)
BITS = jnp.asarray(RNG.integers(0, 2, size=(16, 12)), jnp.float32)
POWERS = 2 ** np.arange(12)
BASIS = np.stack([POWERS, POWERS[::-1], 3 * np.arange(12), np.ones(12), np.ones(12)], 1).astype(np.float32)
TABLE = jnp.arange(8192)


def matmul(q, w):
    return q @ w


# The code that a product becomes, from the product.
CODES = {
    "astype": lambda p: p.astype(int),
    "int16": lambda p: p.astype(jnp.int16),
    "uint32": lambda p: p.astype(jnp.uint32),
    "floor": lambda p: jnp.floor(p + 0.5).astype(int),
    "round": lambda p: jnp.round(p).astype(int),
    "ceil": lambda p: lax.ceil(p - 0.25).astype(int),
    "clip": lambda p: jnp.clip(p, 0, 4000).astype(int),
    "where": lambda p: jnp.where(p > 0, p, 0.0).astype(int),
    "minimum": lambda p: jnp.minimum(-p, 0).astype(int),
    "scale": lambda p: (p * 0.5 + 0.25).astype(int),
    "power": lambda p: jnp.sqrt(p**2).astype(int),
    "exponential": lambda p: jnp.round(jnp.exp(jnp.log(p + 1))).astype(int),
    "remainder": lambda p: jnp.mod(p, 4096.0).astype(int),
    "reshape": lambda p: p.T.reshape(-1)[::-1].astype(int),
    "concatenate": lambda p: jnp.concatenate([p, -p]).astype(int),
    "sort": lambda p: jnp.sort(p, 0).astype(int),
    "largest": lambda p: jnp.max(p, 0).astype(int),
    "gather": lambda p: p[jnp.array([3, 1, 2])].astype(int),
    "scatter": lambda p: jnp.zeros((20, *p.shape[1:])).at[jnp.arange(p.shape[0])].add(p).astype(int),
    "weak type": lambda p: lax.convert_element_type(p * 1.0, int),
    "index": lambda p: TABLE[p.astype(int)],
    "one-hot": lambda p: jax.nn.one_hot(p.astype(int), 8),
    "read otherwise too": lambda p: (p.astype(int), jnp.tanh(p) @ jnp.eye(p.shape[1])),
}

PRODUCTS = {
    "matmul": matmul,
    "one column": lambda q, w: q @ w[:, 0],
    "einsum": lambda q, w: jnp.einsum("nk,km->nm", q, w),
    "a batch of products": lambda q, w: jnp.einsum("nbk,bkm->nm", q[:, None], w[None]),
    "convolution": lambda q, w: lax.conv(q[:, :, None], w.T[:, :, None], (1,), "VALID")[..., 0],
}


@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("name", CODES)
def test_a_code_is_exact(name, low):
    def fun(q, w):
        return CODES[name](q @ w)

    got, want = jax.jit(lambda *args: (amp.autocast(fun, low)(*args), fun(*args)))(BITS, BASIS)
    exact = [(x, y) for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True) if x.dtype != jnp.float32]
    for x, y in exact or [(got, want)]:
        np.testing.assert_array_equal(x, y)
    assert amp.explain(fun, low)(BITS, BASIS).select(direction="forward").rows[0].why == "index"


@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("name", PRODUCTS)
def test_every_product_counts(name, low):
    fun = lambda q, w: jnp.floor(PRODUCTS[name](q, w) + 0.5).astype(int)  # noqa: E731
    np.testing.assert_array_equal(amp.autocast(fun, low)(BITS, BASIS), fun(BITS, BASIS))


def zeros(fun, x):
    return jnp.zeros_like(jax.eval_shape(fun, x))


def by_cond(fun):
    return lambda x: lax.cond(x.sum() > 0, fun, lambda x: zeros(fun, x), x)


def by_scan(fun):
    return lambda x: lax.scan(lambda carry, x: (carry, fun(x)), 0, x[None])[1][0]


def by_carry(fun):
    return lambda x: lax.scan(lambda carry, _: (fun(x), None), zeros(fun, x), length=2)[0]


def by_fori_loop(fun):
    return lambda x: lax.fori_loop(0, 2, lambda i, carry: fun(x), zeros(fun, x))


def by_while_loop(fun):
    return lambda x: lax.while_loop(
        lambda carry: carry[0] < 2, lambda carry: (carry[0] + 1, fun(x)), (0, zeros(fun, x))
    )[1]


WAYS = {
    "plain": lambda fun: fun,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda fun: lambda x: jax.vmap(lambda row: fun(row[None])[0])(x),
    "map": lambda fun: lambda x: lax.map(lambda row: fun(row[None])[0], x),
    "cond": by_cond,
    "scan": by_scan,
    "carry of a scan": by_carry,
    "fori_loop": by_fori_loop,
    "while_loop": by_while_loop,
    "custom_jvp": by_custom_jvp,
    "custom_vjp": by_custom_vjp,
}
PLACES = {
    "the product": lambda way, to_code: lambda q: to_code(way(lambda q: q @ BASIS)(q)),
    "the conversion": lambda way, to_code: lambda q: way(to_code)(q @ BASIS),
    "both": lambda way, to_code: way(lambda q: to_code(q @ BASIS)),
}


def forward_products(fun):
    return {row.split()[-1] for row in dtypes(fun, BITS, primitive="dot_general")}


@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_through_calls_branches_and_loops(way, place, low):
    wide = PLACES[place](WAYS[way], lambda p: jnp.floor(p + 0.5).astype(int))
    byte = PLACES[place](WAYS[way], lambda p: jnp.floor(p + 0.5).astype(jnp.int8))
    assert forward_products(amp.autocast(wide, low)) == {"float32"}
    assert forward_products(amp.autocast(byte, low)) == {low}


# Nothing here is an index that a product becomes.
LOW = {
    "an int8 quantizer": lambda p: jnp.clip(jnp.round(p / 3), -127, 127).astype(jnp.int8),
    "a uint8 image": lambda p: (p * 255).astype(jnp.uint8),
    "int8, widened": lambda p: p.astype(jnp.int8).astype(jnp.int32),
    "a comparison": lambda p: (p > 0.5).astype(int),
    "bool": lambda p: p.astype(bool).astype(int),
    "argmax": lambda p: jnp.argmax(p, -1).astype(int),
    "the condition of a choice": lambda p: jnp.where(p > 0, 1.0, 2.0).astype(int),
    "a branch": lambda p: lax.cond(p[0, 0] > 0, lambda: 1.0, lambda: 2.0).astype(int),
    "a metric": lambda p: jnp.sum(jax.nn.log_softmax(p)).astype(int),
    "a straight-through estimator": lambda p: p + lax.stop_gradient(jnp.round(p) - p),
    "a draw": lambda p: jax.random.categorical(jax.random.key(0), p),
    "the next layer": lambda p: (jnp.tanh(p) @ jnp.ones((5, 8)))[0, 0].astype(int),
}


@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("name", LOW)
def test_what_is_no_index_stays_low(name, low):
    fun = amp.autocast(lambda q: LOW[name](q @ BASIS), low)
    assert dtypes(fun, BITS, primitive="dot_general")[0].endswith(f"-> {low}")


@pytest.mark.parametrize("low", EPSILON)
def test_lookup_free_quantization_returns_the_codes_of_float32(low):
    def codes(w, x):
        signs = jnp.sign(x @ w)
        return (jnp.maximum(signs, 0) @ POWERS.astype(np.float32)).astype(int), x @ w @ jnp.ones((12, 8))

    x, w = (jnp.asarray(RNG.integers(-9, 10, size=shape), jnp.float32) for shape in ((64, 16), (16, 12)))
    np.testing.assert_array_equal(amp.autocast(codes, low)(w, x)[0], codes(w, x)[0])
    products = dtypes(amp.autocast(codes, low), w, x, primitive="dot_general")
    assert [row.split()[-1] for row in products] == [low, "float32", low, low]  # signs are not converted
