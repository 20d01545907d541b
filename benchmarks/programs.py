"""Small programs that users write, each by an idiom of its own: what a library for mixed precision meets.

`PROGRAMS` maps a name to a `Program`. They are written for float32 and know nothing of precision, and run on JAX 0.4.35
to 0.12, so that each library can be tried on a JAX that it runs on. Programs of a framework need that framework.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

KEY = jax.random.PRNGKey(0)
PROGRAMS: dict[str, "Program"] = {}


class Program(NamedTuple):
    """A program.

    Attributes:
        group: a heading.
        make: returns the function and its arguments, the first of which are the parameters.
        by_hand: the same with the framework's own option for low precision, where there is one.
    """

    group: str
    make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    by_hand: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]] | None = None


def normal(*shape, scale=0.5):
    return scale * jax.random.normal(jax.random.fold_in(KEY, sum(shape)), shape)


def program(group, *args):
    """Registers a function of these arguments, which are made when they are needed."""

    def register(fun):
        name = fun.__name__.replace("_", " ").strip()
        assert name not in PROGRAMS, name
        PROGRAMS[name] = Program(group, lambda: (fun, tuple(a() if callable(a) else a for a in args)))
        return fun

    return register


def weights():
    return {"w": normal(8, 8), "b": jnp.zeros(8)}


def inputs():
    return normal(6, 8, scale=1.0)


def dense(p, x):
    return x @ p["w"] + p["b"]


# Layers


@program("layers", weights, inputs)
def dense_layer_with_bias(p, x):
    return jax.nn.relu(dense(p, x))


@program("layers", weights, inputs)
def gelu_mlp_with_residual(p, x):
    return x + jax.nn.gelu(dense(p, x)) @ p["w"].T


@program("layers", lambda: {"k": normal(3, 3, 2, 4), "b": jnp.zeros(4)}, lambda: normal(2, 6, 6, 2))
def convolution(p, x):
    return jax.nn.relu(lax.conv_general_dilated(x, p["k"], (1, 1), "SAME", dimension_numbers=CONV) + p["b"])


@program("layers", lambda: {"k": normal(3, 3, 1, 4)}, lambda: normal(2, 6, 6, 4))
def grouped_convolution(p, x):
    return lax.conv_general_dilated(x, p["k"], (1, 1), "SAME", dimension_numbers=CONV, feature_group_count=4)


@program("layers", lambda: {"k": normal(3, 3, 2, 4)}, lambda: normal(2, 4, 4, 2))
def transposed_convolution(p, x):
    return lax.conv_transpose(x, p["k"], (2, 2), "SAME", dimension_numbers=CONV)


CONV = ("NHWC", "HWIO", "NHWC")


@program("layers", lambda: {"e": normal(16, 8)}, lambda: jnp.arange(6))
def embedding_with_tied_logits(p, tokens):
    return jax.nn.log_softmax(p["e"][tokens] @ p["e"].T)


@program("layers", lambda: {"q": normal(8, 8), "k": normal(8, 8), "v": normal(8, 8)}, inputs)
def attention(p, x):
    q, k, v = x @ p["q"], x @ p["k"], x @ p["v"]
    return jax.nn.softmax(jnp.einsum("qd,kd->qk", q, k) / 8**0.5) @ v


@program("layers", weights, inputs)
def lstm_cell(p, x):
    i, f, g, o = jnp.split(dense(p, x), 4, axis=-1)
    c = jax.nn.sigmoid(f) + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c)


# Norms and losses


def layer_norm(x):
    mean = jnp.mean(x, -1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.mean((x - mean) ** 2, -1, keepdims=True) + 1e-6)


@program("norms and losses", weights, inputs)
def layer_norm_by_hand(p, x):
    return layer_norm(dense(p, x)) * p["b"]


@program("norms and losses", weights, lambda: 300 * inputs())
def rms_norm_of_large_activations(p, x):
    h = x @ p["w"]
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)


@program("norms and losses", weights, lambda: normal(32, 8, scale=1.0))
def batch_norm_with_its_statistics(p, x):
    h = x @ p["w"]
    mean, var = jnp.mean(h, 0), jnp.var(h, 0)
    return (h - mean) / jnp.sqrt(var + 1e-5), mean, var


@program("norms and losses", weights, inputs)
def cross_entropy(p, x):
    logits = x @ p["w"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.arange(len(x))[:, None], 1))


@program("norms and losses", weights, inputs)
def binary_cross_entropy_on_logits(p, x):
    logits = 30 * (x @ p["w"])
    return jnp.mean(jnp.maximum(logits, 0) - logits * (logits > 0) + jnp.log1p(jnp.exp(-jnp.abs(logits))))


@program("norms and losses", weights, lambda: normal(300, 8, scale=20.0))
def sum_of_squared_errors(p, x):
    return jnp.sum((x @ p["w"]) ** 2)  # beyond 65504


@program("norms and losses", lambda: {"b": jnp.zeros(8)}, lambda: jnp.ones((70_000, 8)))
def gradient_of_a_bias_over_70000_rows(p, x):
    return jnp.sum(x @ jnp.eye(8) + p["b"]) / 70_000


@program("norms and losses", weights, inputs)
def norm_of_a_vector_of_300s(p, x):
    h = 300 + x @ p["w"]
    return h / jnp.sqrt(jnp.sum(h * h, -1, keepdims=True))


@program("norms and losses", weights, inputs)
def log_sum_exp_of_large_logits(p, x):
    return jax.nn.logsumexp(40 * (x @ p["w"]), axis=-1)


@program("norms and losses", weights, inputs)
def perplexity(p, x):
    return jnp.exp(jnp.mean((x @ p["w"]) ** 2) + 9)  # beyond 65504 soon


# Masks and constants


def masked(value):
    def fun(p, x):
        scores = x @ p["w"] @ x.T
        return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, value)) @ x

    return fun


@program("masks and constants", weights, inputs)
def mask_of_minus_1e9(p, x):
    return masked(-1e9)(p, x)


@program("masks and constants", weights, inputs)
def mask_of_the_smallest_float32(p, x):
    return masked(jnp.finfo(jnp.float32).min)(p, x)


@program("masks and constants", weights, inputs)
def mask_of_minus_infinity(p, x):
    return masked(-jnp.inf)(p, x)


@program("masks and constants", weights, inputs)
def mask_added_as_a_bias(p, x):
    scores = x @ p["w"] @ x.T
    return jax.nn.softmax(scores + -1e9 * (1 - jnp.tril(jnp.ones(scores.shape))))


@program("masks and constants", weights, inputs)
def epsilon_of_1e_12_in_a_logarithm(p, x):
    return jnp.mean(jnp.log(jax.nn.relu(x @ p["w"]) + 1e-12))


@program("masks and constants", weights, inputs)
def epsilon_of_1e_8_in_a_quotient(p, x):
    h = jax.nn.relu(x @ p["w"])
    return h / (jnp.sum(h, -1, keepdims=True) * 0 + 1e-8) * 1e-8


@program("masks and constants", lambda: jnp.ones((8, 8)), inputs)
def positions_up_to_100000(p, x):
    position = jnp.arange(8.0) * 14_000
    return jnp.sin(position[:, None] / 10_000 ** (jnp.arange(8.0) / 8)) @ p


# Control flow


@program("control flow", weights, lambda: normal(5, 4, 8))
def scan_of_a_recurrent_cell(p, xs):
    def step(h, x):
        h = jnp.tanh(x @ p["w"] + h @ p["w"] + p["b"])
        return h, h

    return lax.scan(step, jnp.zeros((4, 8)), xs)


@program("control flow", lambda: {"w": normal(3, 8, 8), "b": jnp.zeros((3, 8))}, inputs)
def scan_over_layers(p, x):
    return lax.scan(lambda x, p: (x + jnp.tanh(dense(p, x)), None), x, p)[0]


@program("control flow", lambda: {"w": normal(3, 8, 8), "b": jnp.zeros((3, 8))}, inputs)
def scan_with_checkpoint(p, x):
    return lax.scan(jax.checkpoint(lambda x, p: (x + layer_norm(dense(p, x)), None)), x, p)[0]


@program("control flow", lambda: {"w": normal(2, 8, 8)}, lambda: normal(3, 4, 8))
def scan_in_a_scan(p, xs):
    def outer(h, x):
        return lax.scan(lambda h, w: (jnp.tanh(h @ w + x), jnp.sum(h)), h, p["w"])

    return lax.scan(outer, jnp.zeros((4, 8)), xs)


@program("control flow", weights, inputs)
def while_loop(p, x):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ p["w"])), (0, x))[1]


@program("control flow", weights, inputs)
def fori_loop(p, x):
    return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p["w"]), x)


@program("control flow", weights, inputs)
def cond(p, x):
    return lax.cond(jnp.sum(x) > 0, lambda x: x @ p["w"], lambda x: jnp.exp(x), x)


@program("control flow", weights, inputs)
def switch(p, x):
    return lax.switch(jnp.argmax(x[0]) % 3, [lambda x: x @ p["w"], jnp.tanh, lambda x: 2 * x], x)


@program("control flow", weights, inputs)
def map_over_rows(p, x):
    return lax.map(lambda row: jnp.tanh(row @ p["w"]), x)


@program("control flow", weights, inputs)
def associative_scan(p, x):
    return lax.associative_scan(jnp.add, x @ p["w"])


# Transformations and custom derivatives


@program("transformations", weights, inputs)
def nested_jit(p, x):
    layer = jax.jit(lambda p, x: jnp.tanh(dense(p, x)))
    return layer(p, layer(p, x))


@program("transformations", weights, inputs)
def vmap_over_examples(p, x):
    return jax.vmap(lambda row: jnp.tanh(row @ p["w"]))(x)


@program("transformations", weights, inputs)
def checkpoint(p, x):
    return jax.checkpoint(lambda x: jnp.tanh(dense(p, x)))(x)


@program("transformations", weights, inputs)
def checkpoint_that_saves_products(p, x):
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return jax.checkpoint(lambda x: jnp.tanh(dense(p, x)) @ p["w"], policy=policy)(x)


@program("transformations", weights, inputs)
def gradient_penalty(p, x):
    grads = jax.grad(lambda x: jnp.sum(jnp.tanh(dense(p, x)) ** 2))(x)
    return jnp.mean(jnp.sum(grads**2, -1))


@program("transformations", weights, inputs)
def forward_derivative(p, x):
    return jax.jvp(lambda x: jnp.tanh(dense(p, x)), (x,), (jnp.ones_like(x),))


@program("transformations", weights, inputs)
def hessian_vector_product(p, x):
    gradient = jax.grad(lambda x: jnp.sum(jnp.tanh(dense(p, x)) ** 2))
    return jax.jvp(gradient, (x,), (x,))[1]


@program("transformations", weights, inputs)
def custom_vjp(p, x):
    @jax.custom_vjp
    def product(w, x):
        return x @ w

    product.defvjp(lambda w, x: (x @ w, (w, x)), lambda saved, g: (saved[1].T @ g, g @ saved[0].T))
    return jnp.tanh(product(p["w"], x))


@program("transformations", weights, inputs)
def custom_vjp_with_a_static_argument(p, x):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def scaled(factor, x):
        return factor * x

    scaled.defvjp(lambda factor, x: (factor * x, None), lambda factor, _, g: (factor * g,))
    return scaled(2.0, x @ p["w"])


@program("transformations", weights, inputs)
def custom_jvp(p, x):
    @jax.custom_jvp
    def safe_log(x):
        return jnp.log(jnp.maximum(x, 1e-6))

    safe_log.defjvp(lambda x, t: (safe_log(x[0]), t[0] / jnp.maximum(x[0], 1e-6)))
    return safe_log(jax.nn.softplus(x @ p["w"]))


@program("transformations", weights, inputs)
def dropout(p, x):
    keep = jax.random.bernoulli(KEY, 0.5, x.shape)
    return jnp.where(keep, x @ p["w"], 0) / 0.5


# Numerics


def spd(w):
    return w @ w.T + 8 * jnp.eye(8)


@program("decompositions", weights, inputs)
def cholesky(p, x):
    return x @ jnp.linalg.cholesky(spd(p["w"]))


@program("decompositions", weights, inputs)
def solve(p, x):
    return x @ p["w"] + jnp.linalg.solve(spd(p["w"]), x.T).T


@program("decompositions", weights, inputs)
def eigenvalues(p, x):
    return jnp.tanh(x @ p["w"]) * jnp.linalg.eigvalsh(spd(p["w"]))


@program("decompositions", weights, inputs)
def singular_values(p, x):
    return jnp.tanh(x @ p["w"]) * jnp.linalg.svd(p["w"].T @ p["w"], compute_uv=False)


def squared_distances(x, y):
    return jnp.sum(x**2, -1)[:, None] - 2 * x @ y.T + jnp.sum(y**2, -1)


@program("decompositions", weights, inputs)
def likelihood_of_a_gaussian_process(p, x):
    points = 3 + p["w"]
    kernel = jnp.exp(-jnp.maximum(squared_distances(points, points), 0) / 16) + 0.01 * jnp.eye(8)
    cholesky = jnp.linalg.cholesky(kernel)
    rest = jax.scipy.linalg.solve_triangular(cholesky, jnp.sin(points), lower=True)
    return jnp.sum(rest**2, 0) + 2 * jnp.sum(jnp.log(jnp.diag(cholesky))) + jnp.tanh(x @ p["w"])


@program("decompositions", weights, inputs)
def distances_to_a_codebook(p, x):
    points = 3 + x
    return squared_distances(points, points.mean(0) + 0.1 * p["w"]) + jnp.tanh(x @ p["w"])


@program("numerics", weights, inputs)
def fourier_transform(p, x):
    return jnp.abs(jnp.fft.fft(x @ p["w"]))


@program("numerics", lambda: jnp.ones(70_000))
def cumulative_sum_of_70000_ones(x):
    return jnp.cumsum(x)[-1]


@program("numerics", lambda: jnp.ones(70_000))
def segment_sum_of_70000_ones(x):
    return jax.ops.segment_sum(x, jnp.zeros(70_000, int), 2)


@program("numerics", weights, inputs)
def variance_around_1000(p, x):
    return jnp.var(1000 + x @ p["w"], -1)


@program("numerics", weights)
def normal_samples(p):
    return jax.random.normal(KEY, (64, 8)) @ p["w"]


@program("numerics", weights, inputs)
def sort_and_top_k(p, x):
    h = jnp.sort(x @ p["w"])
    return lax.top_k(h, 3)[0]


@program("numerics", weights, inputs)
def slices_and_updates(p, x):
    h = x @ p["w"]
    return lax.dynamic_update_slice(h, h[:2, :2] * 2, (1, 1)).at[0].add(1.0)


@program("numerics", weights, inputs)
def product_in_full_precision(p, x):
    return jnp.dot(x, p["w"], precision="highest")


@program("numerics", weights, inputs)
def cast_of_the_users_own(p, x):
    return (x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)).astype(jnp.float32)


@program("numerics", weights, inputs)
def complex_product(p, x):
    return jnp.real((x + 1j * x) @ p["w"])


@program("numerics", weights, inputs)
def bits_of_a_float(p, x):
    exponent = (lax.bitcast_convert_type(x, jnp.int32) >> 23) & 255
    return (x @ p["w"]) * (exponent > 0)


@program("numerics", weights, inputs)
def callback(p, x):
    h = x @ p["w"]
    return h + lax.stop_gradient(
        jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(h.shape, h.dtype), lax.stop_gradient(h))
    )


# Sums of the program's own: what it adds up itself, over many rows


def rows():
    return normal(3000, 8, scale=1.0) + 0.7


@program("sums of the program's own", weights, rows)
def running_mean_in_a_scan(p, xs):
    total = lax.scan(lambda c, x: (c + jnp.tanh(x @ p["w"]), None), jnp.zeros(8), xs)[0]
    return total / len(xs)


@program("sums of the program's own", weights, rows)
def running_mean_in_a_fori_loop(p, xs):
    return lax.fori_loop(0, len(xs), lambda i, c: c + jnp.tanh(xs[i] @ p["w"]), jnp.zeros(8)) / len(xs)


@program("sums of the program's own", weights, rows)
def causal_linear_attention(p, xs):
    def step(carry, x):
        h = x @ p["w"]
        q, k, v = jax.nn.relu(h), jax.nn.sigmoid(h - 2), jnp.tanh(h)
        state, normaliser = carry[0] + k[:, None] * v, carry[1] + k
        return (state, normaliser), q @ state / (jnp.sum(q * normaliser) + 1)

    return lax.scan(step, (jnp.zeros((8, 8)), jnp.zeros(8)), xs)[1][-1]


@program("sums of the program's own", weights, lambda: 3 * rows())
def streaming_covariance(p, xs):
    def step(c, x):
        h = x @ p["w"]
        return c + h.T @ h, None

    return lax.scan(step, jnp.zeros((8, 8)), xs.reshape(-1, 10, 8))[0] / len(xs)


@program("sums of the program's own", weights, lambda: normal(8, 8, scale=1.0))
def gradient_descent_from_zeros(p, y):
    def step(_, x):
        return x - 0.001 * (p["w"].T @ (p["w"] @ x - y))

    return lax.fori_loop(0, 2000, step, jnp.zeros((8, 8)))


@program("sums of the program's own", weights, rows)
def positions_and_velocities_from_rest(p, xs):
    def step(carry, x):
        position, velocity = carry
        velocity = velocity + 1e-3 * (1 + jnp.tanh(x @ p["w"]))
        return (position + 1e-3 * velocity, velocity), None

    return lax.scan(step, (jnp.zeros(8), jnp.zeros(8)), xs)[0]


@program("sums of the program's own", weights, rows)
def welford_mean_and_variance(p, xs):
    def step(carry, x):
        n, mean, m2 = carry
        h = x @ p["w"]
        new = mean + (h - mean) / (n + 1)
        return (n + 1, new, m2 + (h - mean) * (h - new)), None

    n, mean, m2 = lax.scan(step, (0.0, jnp.zeros(8), jnp.zeros(8)), xs)[0]
    return mean, m2 / n


@program("sums of the program's own", weights, rows)
def gradients_accumulated_over_microbatches(p, xs):
    def step(total, x):
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(dense(p, x)) ** 2))(p)
        return jax.tree_util.tree_map(jnp.add, total, grads), None

    zeros = jax.tree_util.tree_map(jnp.zeros_like, p)
    return lax.scan(step, zeros, xs[:, None])[0]


@program("sums of the program's own", weights, rows)
def long_short_term_memory_over_3000_steps(p, xs):
    def step(carry, x):
        h, c = carry
        gate = (x + 0.1 * h) @ p["w"]
        c = jax.nn.sigmoid(gate + 6) * c + jax.nn.sigmoid(gate - 3) * jnp.tanh(gate)
        return (jnp.tanh(c), c), None

    return lax.scan(step, (jnp.zeros(8), jnp.zeros(8)), xs)[0]


@program("sums of the program's own", weights, inputs, lambda: normal(8) + 1)
def average_that_moves_by_a_thousandth(p, x, average):
    return (average - 1e-3 * jnp.tanh(x @ p["w"])[0]) - average


# Sums by scatter


def groups():
    return jnp.arange(20_000) % 2


def many_rows():
    return normal(20_000, 8, scale=1.0) + 0.7


@program("sums by scatter", weights, many_rows, groups)
def rows_added_at_their_groups(p, x, i):
    return jnp.zeros((2, 8)).at[i].add(jnp.tanh(x @ p["w"]))


@program("sums by scatter", weights, many_rows, groups)
def segment_mean(p, x, i):
    return jax.ops.segment_sum(x @ p["w"], i, 2) / jax.ops.segment_sum(jnp.ones(len(i)), i, 2)[:, None]


@program("sums by scatter", weights, many_rows, groups)
def histogram_with_weights(p, x, i):
    return jnp.bincount(i, weights=jax.nn.sigmoid(x @ p["w"])[:, 0], length=2)


@program("sums by scatter", weights, many_rows, groups)
def messages_over_edges(p, x, i):
    return jax.ops.segment_sum(jax.nn.relu(x @ p["w"]), i, 2) @ p["w"] / 20_000


@program("sums by scatter", lambda: {"e": normal(8, 8), "w": normal(8, 8)}, groups)
def gradient_of_an_embedding_over_20000_tokens(p, tokens):
    return jax.grad(lambda p: jnp.mean(jnp.tanh(p["e"][tokens] @ p["w"] + 0.5) ** 2 * 100))(p)


@program("sums by scatter", weights, rows)
def gradient_of_a_weight_read_3000_times(p, xs):
    def loss(p):
        return jnp.mean(lax.map(lambda x: jnp.tanh(x @ p["w"]) ** 2, xs)) * 100

    return jax.grad(loss)(p)


# Angles


def far_positions():
    return jnp.array([0.0, 1.0, 2049.0, 32_769.0, 65_537.0, 131_071.0])


def rotated(q, angles):
    one, other = jnp.split(q, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


@program("angles", weights, lambda: normal(6, 8), far_positions)
def rotary_embedding_by_einsum(p, x, positions):
    return rotated(x @ p["w"], jnp.einsum("i,j->ij", positions, 10_000 ** -(jnp.arange(4) / 4)))


@program("angles", weights, lambda: normal(6, 8), far_positions)
def rotary_embedding_by_a_matrix_product(p, x, positions):
    inv_freq = 1 / 10_000 ** (jnp.arange(4) / 4)
    angles = jnp.swapaxes(inv_freq[None, :, None] @ positions[None, None, :], 1, 2)[0]
    return rotated(x @ p["w"], angles)


@program("angles", weights, lambda: normal(6, 8), far_positions)
def rotary_embedding_by_an_outer_product(p, x, positions):
    return rotated(x @ p["w"], jnp.outer(positions, 10_000 ** -(jnp.arange(4) / 4)))


@program("angles", lambda: {"w": normal(16, 8), "f": 100 * normal(2, 8)}, lambda: normal(16, 2))
def fourier_features(p, x):
    angles = 2 * jnp.pi * (x @ lax.stop_gradient(p["f"]))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) @ p["w"]


# Loops that end by a float: under a library that rounds what decides, some never end.


def contraction():
    w = normal(8, 8)
    return {"w": 0.8 * w / jnp.linalg.norm(w, 2), "b": normal(8)}


def settled(step, x):
    def body(carry):
        new = step(carry[0])
        return new, jnp.max(jnp.abs(new - carry[0]))

    return lax.while_loop(lambda c: c[1] > 1e-5, body, (x, jnp.float32(1)))[0]


@program("loops that end by a float", weights, inputs)
def while_loop_that_ends_by_a_float(p, x):
    def body(c):
        y = c[0] @ p["w"] / 8
        return y, jnp.sum(y * y)

    return x @ p["w"] + lax.while_loop(lambda c: c[1] > 1e-4, body, (x, jnp.float32(1)))[1]


@program("loops that end by a float", contraction, inputs)
def fixed_point_to_1e_5(p, x):
    return settled(lambda z: jnp.tanh(z @ p["w"] + p["b"]), x) @ p["w"]


@program("loops that end by a float", contraction, inputs)
def fixed_point_that_says_when_it_is_done(p, x):
    def body(carry):
        new = jnp.tanh(p["w"] @ carry[0] + p["b"])
        return new, jnp.linalg.norm(new - carry[0]) < 1e-5

    return x @ p["w"] + lax.while_loop(lambda c: ~c[1], body, (jnp.zeros(8), jnp.zeros((), bool)))[0]


@program("loops that end by a float", contraction, inputs)
def newton_to_1e_5(p, x):
    def residual(z):
        return z + p["w"] @ jnp.tanh(z) / 2 - p["b"]

    def newton(z):
        return z - jnp.linalg.solve(jax.jacfwd(residual)(z), residual(z))

    return x @ p["w"] + settled(newton, jnp.zeros(8))


@program("loops that end by a float", contraction, inputs)
def sinkhorn_to_1e_5(p, x):
    kernel = jnp.exp(-3 * jnp.abs(p["w"]))
    return x @ settled(lambda u: 1 / (kernel @ (1 / (kernel.T @ u))), jnp.ones(8)) + jnp.sum(x @ p["w"], -1)


@program("loops that end by a float", contraction, inputs)
def conjugate_gradients(p, x):
    solution = jax.scipy.sparse.linalg.cg(lambda z: p["w"].T @ (p["w"] @ z) + z, p["b"], tol=1e-4)[0]
    return x @ p["w"] + solution


# Large constants


@program("large constants", weights, inputs)
def product_with_a_constant_of_1e6(p, x):
    return (x @ p["w"]) @ np.float32([1e6] + 7 * [1])


@program("large constants", lambda: {"w": normal(8, 2000)}, inputs)
def scale_of_2000_features_by_1e6(p, x):
    return (x @ p["w"]) * np.full(2000, 1e6, np.float32)


@program("large constants", weights, inputs)
def matrix_of_constants_in_a_product(p, x):
    return (x @ p["w"]) @ np.linspace(0, 1e6, 64, dtype=np.float32).reshape(8, 8)


# Frameworks


def flax_linen(make):
    """A Linen module without, and by hand with, a dtype of its own."""

    def built(dtype):
        import flax.linen as nn

        module, x = make(nn, **({} if dtype is None else {"dtype": dtype})), normal(4, 6, 8, scale=1.0)
        variables = module.init(KEY, x)
        params = variables["params"]
        state = {name: value for name, value in variables.items() if name != "params"}
        return (lambda p, x: module.apply({"params": p, **state}, x, mutable=list(state) or False)), (params, x)

    name = "flax linen: " + make.__name__.replace("_", " ")
    PROGRAMS[name] = Program("frameworks", lambda: built(None), lambda: built(jnp.float16))


@flax_linen
def mlp(nn, **dtype):
    return nn.Sequential([nn.Dense(8, **dtype), nn.LayerNorm(**dtype), nn.relu, nn.Dense(3, **dtype)])


@flax_linen
def cnn_with_batch_norm(nn, **dtype):
    norm = nn.BatchNorm(use_running_average=False, **dtype)
    return nn.Sequential([nn.Conv(8, (3,), **dtype), norm, nn.relu, nn.Dense(3, **dtype)])


@flax_linen
def self_attention(nn, **dtype):
    return nn.MultiHeadDotProductAttention(2, **dtype)


@flax_linen
def recurrent_network(nn, **dtype):
    return nn.RNN(nn.OptimizedLSTMCell(8, **dtype))


def _equinox():
    import equinox as eqx

    model = eqx.nn.Sequential(
        [eqx.nn.Linear(8, 8, key=KEY), eqx.nn.LayerNorm(8), eqx.nn.Lambda(jax.nn.relu), eqx.nn.Linear(8, 3, key=KEY)]
    )
    params, static = eqx.partition(model, eqx.is_inexact_array)
    return (lambda params, x: jax.vmap(eqx.combine(params, static))(x)), (params, inputs())


PROGRAMS["equinox: mlp"] = Program("frameworks", _equinox)


def _haiku():
    import haiku as hk

    def forward(x):
        h = hk.LayerNorm(-1, True, True)(hk.Linear(8)(x))
        return hk.Linear(3)(h + hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling())(h, h, h))

    model = hk.without_apply_rng(hk.transform(forward))
    return model.apply, (model.init(KEY, inputs()), inputs())


PROGRAMS["haiku: attention"] = Program("frameworks", _haiku)


# Collectives, over one device


def shard_map(fun, out_specs, **options):
    transform = getattr(jax, "shard_map", None)
    if transform is None:
        from jax.experimental.shard_map import shard_map as transform
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    specs = jax.sharding.PartitionSpec
    return transform(fun, mesh=mesh, in_specs=(specs(), specs("data")), out_specs=out_specs, **options)


@program("collectives", weights, inputs)
def sum_over_devices_in_shard_map(p, x):
    return shard_map(lambda p, x: lax.pmean(jnp.mean((x @ p["w"]) ** 2), "data"), jax.sharding.PartitionSpec())(p, x)


@program("collectives", weights, inputs)
def gather_in_shard_map(p, x):
    spec = jax.sharding.PartitionSpec("data")
    return shard_map(lambda p, x: lax.all_gather(x @ p["w"], "data", tiled=True), spec)(p, x)


@program("collectives", weights, inputs)
def pmap(p, x):
    return jax.pmap(lambda x: lax.psum(x @ p["w"], "data"), axis_name="data")(x[None])
