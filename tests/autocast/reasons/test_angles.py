"""Angles are float32: rotary embeddings at far positions, and products that only sines and cosines read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import dtypes, equations, row
from rounding import EPSILON, error

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

LOW, FULL = "float16 float16 -> float16", "float32 float32 -> float32"
FAR, HEADS, DIM = 131_072, 2, 8
POSITIONS = np.array([0, 1, 255, 2049, 4097, 32_769, 65_537, 100_003, FAR - 1])
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(len(POSITIONS), HEADS * DIM)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(HEADS * DIM, HEADS * DIM)) / 4, jnp.float32)


def inverse_frequencies(xp=jnp):
    return 1.0 / (10_000.0 ** (xp.arange(0, DIM, 2).astype("float32" if xp is jnp else "float64") / DIM))


# Each returns the sines and cosines, one for each pair of features.


def by_a_matrix_product_as_in_hugging_face_llama(positions):
    inv_freq, position_ids = inverse_frequencies(), positions[None]
    freqs = inv_freq[None, :, None].astype(jnp.float32) @ position_ids[:, None, :].astype(jnp.float32)
    freqs = jnp.swapaxes(freqs, 1, 2)[0]
    emb = jnp.concatenate([freqs, freqs], axis=-1)
    return jnp.sin(emb)[:, : DIM // 2], jnp.cos(emb)[:, : DIM // 2]


def by_einsum_as_in_flax_gpt_j(positions):
    sinusoid = jnp.einsum("i , j -> i j", positions.astype(jnp.float32), inverse_frequencies())
    return jnp.sin(sinusoid), jnp.cos(sinusoid)


def by_einsum_over_a_batch(positions):
    freqs = jnp.einsum("bi,j->bij", positions.astype(jnp.float32)[None], inverse_frequencies())[0]
    return jnp.sin(freqs), jnp.cos(freqs)


def by_outer_as_in_equinox(positions):
    angles = jnp.outer(positions.astype(jnp.float32), inverse_frequencies())
    return jnp.sin(angles), jnp.cos(angles)


def by_division_as_in_gemma(positions):
    timescale = 10_000 ** (2 * jnp.arange(DIM // 2) / DIM)
    angle = positions[:, None] / timescale[None]
    return jnp.sin(angle), jnp.cos(angle)


def by_einsum_as_in_keras_hub(positions):
    scaled = positions.astype(jnp.float32) / 1.0
    freq = jnp.einsum("i,j->ij", scaled, inverse_frequencies())
    embedding = jnp.reshape(jnp.stack((freq, freq), axis=-2), (*freq.shape[:-1], -1))
    return jnp.sin(embedding)[:, : DIM // 2], jnp.cos(embedding)[:, : DIM // 2]


def by_complex_numbers_as_in_llama(positions):
    rotation = jnp.exp(1j * jnp.outer(positions.astype(jnp.float32), inverse_frequencies()))
    return rotation.imag, rotation.real


def by_a_column_times_a_row(positions):
    angles = positions.astype(jnp.float32)[:, None] @ inverse_frequencies()[None]
    return jnp.sin(angles), jnp.cos(angles)


def by_a_table_to_the_longest_sequence(positions):
    freqs = jnp.einsum("i,j->ij", jnp.arange(FAR, dtype=jnp.float32), inverse_frequencies())
    return jnp.sin(freqs)[positions], jnp.cos(freqs)[positions]


WAYS = {
    f.__name__: f
    for f in (
        by_a_matrix_product_as_in_hugging_face_llama,
        by_einsum_as_in_flax_gpt_j,
        by_einsum_over_a_batch,
        by_outer_as_in_equinox,
        by_division_as_in_gemma,
        by_einsum_as_in_keras_hub,
        by_complex_numbers_as_in_llama,
        by_a_column_times_a_row,
        by_a_table_to_the_longest_sequence,
    )
}


def rotated(q, sin, cos):
    """Rotates the halves of the features of each head, as most do."""
    one, other = jnp.split(q.reshape(len(q), HEADS, DIM), 2, axis=-1)
    sin, cos = sin[:, None], cos[:, None]
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


def rotated_in_float64(x, w):
    angles = POSITIONS[:, None] * inverse_frequencies(np)
    one, other = np.split((np.float64(x) @ np.float64(w)).reshape(-1, HEADS, DIM), 2, axis=-1)
    sin, cos = np.sin(angles)[:, None], np.cos(angles)[:, None]
    return np.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


@pytest.mark.sweep(15)
@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("way", WAYS)
def test_queries_are_rotated_as_in_float64_up_to_position_131072(way, low):
    def queries(w, x, positions):
        return rotated(x @ w, *WAYS[way](positions))

    def loss(w, x, positions):
        return jnp.sum(queries(w, x, positions) * jnp.cos(jnp.arange(X.size)).reshape(-1, HEADS, DIM))

    cast = functools.partial(amp.autocast, dtype=low)
    args = W, X, jnp.asarray(POSITIONS)
    ways = (cast(queries), jax.grad(cast(loss)), cast(jax.grad(loss)), jax.grad(loss))
    got, *grads, want = jax.jit(lambda *args: [f(*args) for f in ways])(*args)
    # In float32, the angle of position 131,071 itself is off by up to 0.008.
    assert error(got, rotated_in_float64(X, W)) < 2 * EPSILON[low] + 2e-3
    for grad in grads:
        assert error(grad, want) < 2 * EPSILON[low]


@pytest.mark.parametrize("way", WAYS)
def test_tables_of_sines_and_cosines_are_those_of_float32(way):
    got, want = (jax.jit(f)(jnp.asarray(POSITIONS)) for f in (amp.autocast(WAYS[way]), WAYS[way]))
    np.testing.assert_allclose(got, want, atol=1e-2)  # the angles are fused in different ways


@pytest.mark.parametrize("low", EPSILON)
def test_rotary_embedding_of_equinox(low):
    eqx = pytest.importorskip("equinox", reason="needs equinox")
    x = jnp.asarray(RNG.normal(size=(4096, 4)), jnp.float32)
    w = W[:4, :4]

    def queries(w):
        return eqx.nn.RotaryPositionalEmbedding(embedding_size=4)(x @ w)

    assert error(jax.jit(amp.autocast(queries, low))(w), jax.jit(queries)(w)) < 2 * EPSILON[low]


# Products that sum nothing: the result has all axes of both, or one contracted axis of size 1.
SUM_NOTHING = {
    "i,j->ij": ((3,), (4,)),
    "bi,j->bij": ((2, 3), (4,)),
    "bi,bj->bij": ((2, 3), (2, 4)),
    "ik,kj->ij": ((3, 1), (1, 4)),
    "bik,bkj->bij": ((2, 3, 1), (2, 1, 4)),
    "bi,b->bi": ((2, 3), (2,)),
    "ikl,klj->ij": ((3, 1, 1), (1, 1, 4)),
}


@pytest.mark.parametrize("subscripts", SUM_NOTHING)
def test_a_product_that_sums_nothing_promotes_like_a_multiplication(subscripts):
    a, b = (jnp.ones(shape) for shape in SUM_NOTHING[subscripts])
    ones = {n: jnp.ones((n, n)) for n in (1, 3, 4, 2)}

    def product(a, b):
        y = jnp.einsum(subscripts, a, b)
        return y @ ones[y.shape[-1]]

    def classes(fun):
        *_, outer, _ = [
            eqn for eqn in equations(amp.autocast(fun), a, b) if eqn.primitive.name in ("dot_general", "mul")
        ]
        return row(outer)

    def low(x):
        return (jnp.concatenate([x] * 8, -1) @ jnp.ones((8 * x.shape[-1], 8)))[..., : x.shape[-1]]

    assert classes(product) == FULL
    assert classes(lambda a, b: product(low(a), low(b))) == LOW
    assert classes(lambda a, b: product(low(a), b)) == FULL


FREQUENCIES = jnp.asarray(10 * RNG.normal(size=(2, 8)), jnp.float32)
POINTS = jnp.asarray(RNG.uniform(-1, 1, size=(16, 2)), jnp.float32)
# What stands between a product and the sines and cosines that read it.
BETWEEN = {
    "nothing": lambda h: (jnp.sin(h), jnp.cos(h)),
    "scaling": lambda h: (jnp.sin(2 * jnp.pi * h), jnp.cos(h / 3)),
    "shifting": lambda h: (jnp.sin(h + 0.5), jnp.sin(jnp.pi / 2 - h)),
    "a bias": lambda h: (jnp.sin(30 * (h + FREQUENCIES[0])),),
    "moves": lambda h: (jnp.sin(h.T[::-1]).T, jnp.cos(h.reshape(4, 4, 8)).reshape(16, 8)),
    "concatenation": lambda h: (jnp.sin(jnp.concatenate([h, h + jnp.pi / 2], -1)),),
    "jit": lambda h: (jax.jit(lambda h: jnp.sin(2 * h))(h),),
    "checkpoint": lambda h: (jax.checkpoint(lambda h: jnp.cos(2 * h))(h),),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_a_product_that_only_sines_and_cosines_read_is_float32(between):
    def fun(frequencies, x):
        y = jnp.concatenate(BETWEEN[between](x @ frequencies), -1)
        return y @ jnp.ones((y.shape[-1], 2))

    assert dtypes(amp.autocast(fun), FREQUENCIES, POINTS, primitive="dot_general") == [FULL, LOW]


MOVES = {
    "nothing": lambda h: h,
    "reverse": lambda h: h[::-1],
    "reshape": lambda h: h.reshape(4, 4, 8).reshape(16, 8),
    "concatenate": lambda h: jnp.concatenate([h[8:], h[:8]]),
    "gather": lambda h: h[np.arange(16)],
    "jit": jax.jit(lambda h: h.T.T),
}


@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("reader", [lambda h: h, jnp.tanh, lambda h: h @ jnp.ones((8, 8))])
def test_a_product_that_others_read_too_is_low(reader, move):
    def fun(frequencies, x):
        h = MOVES[move](jnp.tile(x, 4) @ jnp.tile(frequencies, (4, 1)))
        return (jnp.sin(h) + reader(h)) @ jnp.ones((8, 2))

    assert set(dtypes(amp.autocast(fun), FREQUENCIES, POINTS, primitive="dot_general")) == {LOW}


def fourier_features(w, frequencies, x):
    angles = 2 * jnp.pi * x @ frequencies
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1) @ w


def nerf(w, frequencies, x):
    bands = jnp.concatenate([2.0**i * jnp.eye(2) for i in range(4)], 1)
    encoded = jnp.sin(jnp.concatenate([x @ bands, x @ bands + jnp.pi / 2], -1))
    return encoded @ w


def siren(w, frequencies, x):
    h = jnp.sin(30 * (x @ frequencies))
    return jnp.concatenate([h, h], -1) @ w


@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("features", [fourier_features, nerf, siren])
def test_features_and_their_gradients_are_those_of_float32(features, low):
    w = jnp.asarray(RNG.normal(size=(16, 4)), jnp.float32)

    def loss(*args):
        return jnp.sum(jnp.tanh(features(*args)) ** 2)

    cast = functools.partial(amp.autocast, dtype=low)
    ways = (features, jax.grad(loss), jax.grad(loss), cast(features), jax.grad(cast(loss)), cast(jax.grad(loss)))
    found = jax.jit(lambda *args: [f(*args) for f in ways])(w, FREQUENCIES, POINTS)
    assert max(map(error, found[3:], found[:3])) < 8 * EPSILON[low]
