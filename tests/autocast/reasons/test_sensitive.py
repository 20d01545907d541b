"""Products whose rounding errors grow are float32: terms of squared distances, and those before and after a solver."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rounding import EPSILON, error

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

RNG = np.random.default_rng(0)
# Points that are close to each other and far from the origin.
X = jnp.asarray(3 + RNG.normal(size=(16, 8)), jnp.float32)
Y = X[:12] + jnp.asarray(0.05 * RNG.normal(size=(12, 8)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(8, 8)) / 4, jnp.float32)


# Each takes the product as its first argument.


def as_in_vector_quantization(matmul, x, y):
    return jnp.sum(x**2, 1, keepdims=True) - 2 * matmul(x, y.T) + jnp.sum(y**2, 1)


def squares_first(matmul, x, y):
    return (x * x).sum(1)[:, None] + (y * y).sum(1)[None] - 2 * matmul(x, y.T)


def product_first(matmul, x, y):
    return -2 * matmul(x, y.T) + jnp.sum(jnp.square(y), -1)[None, :] + jnp.sum(jnp.square(x), -1)[:, None]


def scaled_before_the_product(matmul, x, y):
    return jnp.einsum("id,id->i", x, x)[:, None] + jnp.einsum("jd,jd->j", y, y) - matmul(2 * x, y.T)


def by_squared_norms(matmul, x, y):
    return jnp.linalg.norm(x, axis=1)[:, None] ** 2 + jnp.linalg.norm(y, axis=1) ** 2 - 2.0 * matmul(x, y.T)


def by_half_of_the_squares(matmul, x, y):
    return 0.5 * jnp.sum(x**2, 1)[:, None] + 0.5 * jnp.sum(y**2, 1) - matmul(x, y.T)


def by_the_diagonal_of_a_gram_matrix(matmul, x, y):
    gram = matmul(x, x.T)
    squares = jnp.diag(gram)
    return squares[:, None] + squares - 2 * gram


def by_a_trace(matmul, x, y):
    gram = matmul(x, x.T)
    squares = jnp.einsum("ii->i", gram)
    return squares[:, None] + squares - 2 * gram


def in_two_functions(matmul, x, y):
    @jax.jit
    def distances(product, squares):
        return jnp.maximum(squares - 2 * product, 0)

    return distances(matmul(x, y.T), jnp.sum(x**2, 1)[:, None] + jnp.sum(y**2, 1))


def row_by_row(matmul, x, y):
    squares = jnp.sum(y**2, 1)
    return lax.map(lambda row: jnp.sum(row**2) + squares - 2 * matmul(y, row), x)


def under_vmap(matmul, x, y):
    def distance(a, b):
        return jnp.vdot(a, a) + jnp.vdot(b, b) - 2 * matmul(a[None], b[:, None])[0, 0]

    return jax.vmap(lambda a: jax.vmap(lambda b: distance(a, b))(y))(x)


def in_a_branch(matmul, x, y):
    product = lax.cond(x[0, 0] < 100, lambda: matmul(x, y.T), lambda: 2 * matmul(x, y.T))
    return jnp.sum(x**2, 1)[:, None] + jnp.sum(y**2, 1) - 2 * product


DISTANCES = {
    f.__name__: f
    for f in (
        as_in_vector_quantization,
        squares_first,
        product_first,
        scaled_before_the_product,
        by_squared_norms,
        by_half_of_the_squares,
        by_the_diagonal_of_a_gram_matrix,
        by_a_trace,
        in_two_functions,
        row_by_row,
        under_vmap,
        in_a_branch,
    )
}


def ridge_regression(matmul, x, y):
    return jnp.linalg.solve(matmul(x.T, x) + 1e-2 * jnp.eye(8), matmul(x.T, jnp.cos(x[:, :2])))


def by_cholesky(matmul, x, y):
    return jnp.linalg.cholesky(matmul(x.T, x) / 16 + 1e-2 * jnp.eye(8))


def a_polynomial_kernel(matmul, x, y):
    kernel = jnp.power(matmul(x, x.T) / 8 + 1.0, 3.0) + 0.1 * jnp.eye(16)
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(kernel), x)


def a_radial_kernel(matmul, x, y):
    kernel = jnp.exp(-0.1 * squares_first(matmul, x, x)) + 1e-2 * jnp.eye(16)
    return jnp.linalg.slogdet(kernel)[1]


def whitening(matmul, x, y):
    values, vectors = jnp.linalg.eigh(matmul(x.T, x) / 16)
    return jnp.sum(vectors * values**-0.5, 1) ** 2


def solved(x):
    return jnp.linalg.solve(jnp.eye(8) + jnp.diag(jnp.ones(7), 1), x.T).T


def a_layer_after_a_solver(matmul, x, y):
    return matmul(solved(x), W)


DECOMPOSITIONS = {
    f.__name__: f
    for f in (ridge_regression, by_cholesky, a_polynomial_kernel, a_radial_kernel, whitening, a_layer_after_a_solver)
}


def by_hand(low):
    return lambda x, y: jnp.matmul(x.astype(low), y.astype(low)).astype(jnp.float32)


@pytest.mark.sweep(21)
@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("name", [*DISTANCES, *DECOMPOSITIONS])
def test_the_result_and_its_gradient_are_those_of_float32(name, low):
    program = {**DISTANCES, **DECOMPOSITIONS}[name]

    def fun(x, y):
        return program(jnp.matmul, x, y)

    def rounded(x, y):
        return program(by_hand(low), x, y)

    def loss(fun):
        return lambda x, y: jnp.sum(fun(x, y) * jnp.cos(jnp.arange(fun(x, y).size)).reshape(fun(x, y).shape))

    cast = amp.autocast(fun, low)
    ways = cast, jax.grad(loss(cast)), fun, jax.grad(loss(fun)), rounded
    got, grad, want, want_grad, hand = jax.jit(lambda *args: [f(*args) for f in ways])(X, Y)
    assert error(got, want) < 1e-4
    assert error(grad, want_grad) < 1e-3
    assert not error(hand, want) < 50 * max(error(got, want), 1e-6)  # NaN where the matrix is no longer definite
    products = amp.explain(fun, low)(X, Y).select(direction="forward", primitive="dot_general").rows
    assert {row.compute for row in products} == {"float32"}


def normalization_by_hand(x):
    h = x @ W
    variance = jnp.mean(h**2, -1, keepdims=True) - jnp.mean(h, -1, keepdims=True) ** 2
    return (h - jnp.mean(h, -1, keepdims=True)) * lax.rsqrt(variance + 1e-6)


def a_loss_with_weight_decay(x):
    return jnp.tanh(x @ W).sum(-1) + 1e-4 * jnp.sum(W**2)


def logits_with_weight_decay(x):
    return x @ W + 1e-4 * jnp.sum(W**2)


def a_variational_autoencoder(x):
    mean, log_variance = jnp.split(x @ W, 2, -1)
    return -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1)


def attention_with_shared_queries_and_keys(x):
    return jax.nn.softmax(x @ x.T / 8**0.5)


def features_beside_a_norm(x):
    return jnp.concatenate([x @ W, jnp.sum(x**2, -1, keepdims=True)], -1)


def cosine_similarity(x):
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x @ x.T


def a_residual_sum_of_a_norm(x):
    h = x @ W
    return h + h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)


def a_scaled_norm_beside_a_bilinear_gate(x):
    return (jax.nn.standardize(x) * jnp.arange(1.0, 9)) @ W + (x @ W) * (x @ W.T)


def a_layer_after_a_bounded_solution(x):
    return jnp.tanh(solved(x)) @ W


def a_layer_after_a_normalized_solution(x):
    h = solved(x)
    return h / jnp.linalg.norm(h, axis=-1, keepdims=True) @ W


def a_layer_after_the_layer_norm_of_a_solution(x):
    h = solved(x)
    return jax.nn.standardize(h) @ W


ORDINARY = (
    normalization_by_hand,
    a_loss_with_weight_decay,
    logits_with_weight_decay,
    a_variational_autoencoder,
    attention_with_shared_queries_and_keys,
    features_beside_a_norm,
    cosine_similarity,
    a_residual_sum_of_a_norm,
    a_scaled_norm_beside_a_bilinear_gate,
    a_layer_after_a_bounded_solution,
    a_layer_after_a_normalized_solution,
    a_layer_after_the_layer_norm_of_a_solution,
)


@pytest.mark.parametrize("fun", ORDINARY)
def test_ordinary_products_beside_squares_and_solvers_are_low(fun):
    products = amp.explain(fun)(X).select(direction="forward", primitive="dot_general").rows
    assert {row.compute for row in products} == {"float16"}


def test_explain_says_why_and_the_user_has_the_last_word():
    def fun(x, y):
        return squares_first(jnp.matmul, x, y)

    def solve(x):
        return jnp.linalg.cholesky(x.T @ x + jnp.eye(8))

    def products(fun, *args, **options):
        return [(r.why, r.compute) for r in amp.explain(fun, **options)(*args).select(primitive="dot_general").rows]

    def low(x, y):
        with amp.precision("float16"):
            return squares_first(jnp.matmul, x, y)

    assert ("distance", "float32") in products(fun, X, Y)
    assert ("decomposition", "float32") in products(solve, X)
    assert ("solution", "float32") in products(lambda x: solved(x) @ W, X)
    assert ("edge", "float32") in products(lambda x: jnp.sqrt(1 - jnp.square(x @ W)), X)
    assert ("rule", "float16") in products(lambda x: jnp.sqrt(1 + jnp.square(x @ W)), X)
    assert ("rule", "float16") in products(solve, X, rules={lax.linalg.cholesky_p: "original"})
    assert ("region", "float16") in products(low, X, Y)
