"""A product with a matrix of at most 4 x 4 is geometry: it promotes, and pixels stay where they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jaxprs import dtypes
from rounding import EPSILON, error

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

RNG = np.random.default_rng(0)
PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def ones(*shapes):
    return [jnp.asarray(np.ones(shape, np.float32)) for shape in shapes]  # compiles nothing


GEOMETRY = {
    "a rotation of points": (jnp.matmul, ones((64, 3), (3, 3))),
    "of points in columns": (jnp.matmul, ones((3, 3), (3, 64))),
    "an affine grid": (lambda grid, theta: grid @ theta.T, ones((16, 16, 3), (2, 3))),
    "a grid for each image": (lambda grid, theta: jnp.einsum("pk,bik->bpi", grid, theta), ones((64, 3), (8, 2, 3))),
    "a homography of each image": (jnp.matmul, ones((8, 3, 3), (8, 3, 64))),
    "a camera": (jnp.matmul, ones((3, 4), (4, 64))),
    "a product of poses": (jnp.matmul, ones((4, 4), (4, 4))),
    "a pose for each joint": (jnp.matmul, ones((24, 4, 4), (24, 4, 4))),
    "a matrix and a vector": (jnp.matmul, ones((2, 2), (2,))),
    "a measurement": (jnp.matmul, ones((1, 2), (2,))),
    "a matrix of one row and its transpose": (lambda h, p: h @ p @ h.T, ones((1, 2), (2, 2))),
    "a grid for each image, by vmap": (
        jax.vmap(lambda grid, theta: grid @ theta.T, (None, 0)),
        ones((64, 3), (8, 2, 3)),
    ),
    "under vmap": (jax.vmap(jnp.matmul, (None, 0)), ones((3, 3), (64, 3))),
    "of one matrix each": (jax.vmap(jnp.matmul), ones((64, 3, 3), (64, 3))),
    "by tensordot": (lambda x, m: jnp.tensordot(x, m, ((1, 2), (0, 1))), ones((64, 2, 2), (2, 2, 3))),
    "a matrix of colours, as a convolution": (
        lambda x, w: lax.conv(x, w, (1, 1), "SAME"),
        ones((2, 3, 8, 8), (3, 3, 1, 1)),
    ),
}
# Sums of at most 3 terms, of float32 data.
SHORT = {
    "3 inputs and 256 outputs": (jnp.matmul, ones((8, 3), (3, 256))),
    "sequences": (jnp.matmul, ones((2, 8, 3), (3, 256))),
    "one example": (jnp.matmul, ones((3,), (3, 256))),
    "one example in a batch": (jnp.matmul, ones((1, 3), (3, 256))),
    "its columns": (jnp.matmul, ones((256, 3), (3,))),
    "each example": (jax.vmap(jnp.matmul, (0, None)), ones((8, 3), (3, 256))),
    "normals and lights": (lambda n, lights: n @ lights.T, ones((64, 3), (16, 3))),
}
LAYERS = {
    "256 inputs and 3 outputs": (jnp.matmul, ones((8, 256), (256, 3))),
    "5 x 5": (jnp.matmul, ones((64, 5), (5, 5))),
    "4 x 5": (jnp.matmul, ones((64, 4), (4, 5))),
    "4 inputs": (jnp.matmul, ones((64, 4), (4, 256))),
    "rank 4": (lambda x, a, b: x @ a @ b, ones((64, 256), (256, 4), (4, 256))),
    "two positions of attention": (
        lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k),
        ones((8, 2, 4, 64), (8, 2, 4, 64)),
    ),
    "a convolution of images": (lambda x, w: lax.conv(x, w, (1, 1), "SAME"), ones((2, 3, 8, 8), (64, 3, 1, 1))),
    "a blur": (lambda x, w: lax.conv(x, w, (1, 1), "SAME"), ones((2, 1, 8, 8), (1, 1, 3, 3))),
    "a convolution of each channel": (
        lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME", feature_group_count=16),
        ones((2, 16, 8), (16, 1, 4)),
    ),
}


def results(fun, args, low="float16"):
    found = [row for name in PRODUCTS for row in dtypes(amp.autocast(fun, low), *args, primitive=name)]
    return {row.split()[-1] for row in found}


@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("name", GEOMETRY | SHORT)
def test_a_product_with_a_small_matrix_or_of_few_terms_is_float32(name, low):
    fun, args = (GEOMETRY | SHORT)[name]
    assert results(fun, args, low) == {"float32"}

    def of_low(*args):
        return fun(*[x.astype(low) for x in args])

    assert results(of_low, args, low) == {low}  # as it was traced


@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_stays_low(name, low):
    assert results(*LAYERS[name], low) == {low}


def test_the_dtype_is_the_widest_of_the_operands():
    def fun(w, x, theta):
        return (x @ w).reshape(-1, 3) @ theta, (x @ w).reshape(-1, 3) @ (x @ w)[:3, :3]

    args = ones((12, 12), (12, 12), (3, 3))
    products = dtypes(amp.autocast(fun), *args, primitive="dot_general")
    assert products[1] == "float32 float32 -> float32"
    assert products[3] == "float16 float16 -> float16"


def test_any_number_of_points_may_be_symbolic():
    (n,) = export.symbolic_shape("n")
    for shapes, dtype in (((n, 3), (3, 3)), "float32"), (((n, 4), (4, n)), "float16"), (((n, n), (n, n)), "float16"):
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        assert results(jnp.matmul, args) == {dtype}


WAYS = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "cond": lambda f: lambda x: lax.cond(x[0] > 0, f, lambda x: x, x),
    "scan": lambda f: lambda x: lax.scan(lambda x, _: (f(x), None), x, length=2)[0],
    "map": lambda f: lambda x: lax.map(f, x[None])[0],
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x] * 8))[0],
}


@pytest.mark.parametrize("way", WAYS)
def test_a_matrix_is_small_wherever_it_stands(way):
    assert results(WAYS[way](lambda x: jnp.sin(jnp.eye(3) @ x)), ones(3)) == {"float32"}


ANGLE = 0.3
THETA = jnp.float32([[np.cos(ANGLE), -np.sin(ANGLE), 20.0], [np.sin(ANGLE), np.cos(ANGLE), -11.0]])
X, Y = jnp.meshgrid(jnp.arange(256.0), jnp.arange(256.0))
GRID = jnp.stack([X, Y, jnp.ones_like(X)], -1)


@pytest.mark.parametrize("low", EPSILON)
def test_pixels_are_where_they_are_in_float32(low):
    def pixels(theta):
        return GRID @ theta.T

    np.testing.assert_array_equal(amp.autocast(pixels, low)(THETA), pixels(THETA))


def log_likelihood(noise, observed):
    """Of a Kalman filter for a position and a velocity."""
    f, h, eye = jnp.float32([[1, 1], [0, 1]]), jnp.float32([[1, 0]]), jnp.eye(2)

    def step(carry, y):
        x, p, total = carry
        x, p = f @ x, f @ p @ f.T + noise[0] * eye
        rest, s = y - h @ x, (h @ p @ h.T)[0, 0] + noise[1]
        gain = p @ h.T / s
        x, p = x + gain @ rest, (eye - gain @ h) @ p
        return (x, p, total - (rest @ rest) / s - jnp.log(s)), x

    (_, _, total), _ = lax.scan(step, (jnp.zeros(2), 10 * eye, jnp.float32(0)), observed)
    return total


@pytest.mark.parametrize("low", EPSILON)
def test_a_kalman_filter_has_the_gradients_of_float32(low):
    noise = jnp.float32([1e-3, 0.1])
    observed = jnp.asarray(np.cumsum(RNG.normal(size=(100, 1)), 0), jnp.float32)
    want = jax.grad(log_likelihood)(noise, observed)
    for got in (
        jax.grad(amp.autocast(log_likelihood, low))(noise, observed),
        amp.autocast(jax.grad(log_likelihood), low)(noise, observed),
    ):
        assert error(got, want) < 1e-4


@pytest.mark.parametrize("low", EPSILON)
def test_facts_pass_a_small_matrix(low):
    """A layer whose result a small matrix changes is read as that result is."""
    w, basis = jnp.ones((8, 2)), jnp.float32([[1, 2], [3, 4]])
    for fun in (lambda p: p.astype(int), jnp.sin, lambda p: jnp.linalg.qr(p)[1]):
        assert results(lambda x, fun=fun: fun((x @ w) @ basis), ones((16, 8)), low) == {"float32"}
