"""The same map gets the same dtypes for its products, however it is written: facts pass loops, branches and calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree
from jaxprs import dtypes, equations, row
from rounding import EPSILON, error

import jmp_amp as amp
from jmp_amp import _jaxpr as jx

pytestmark = pytest.mark.usefixtures("users_code")

RNG = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return jnp.asarray(scale * RNG.normal(size=shape), jnp.float32)


X, W, Y = normal(4, 6, 8), normal(8, 8, scale=0.3), normal(6, 8)
SPD = W @ W.T + jnp.eye(8)
NEAR_ONE = jnp.eye(8) + normal(8, 8, scale=1e-3)
WINDOW = jnp.ones((4, 6), jnp.float32) / 6
LAPLACE = jnp.roll(jnp.eye(8), 1, 0) + jnp.roll(jnp.eye(8), -1, 0) - 2 * jnp.eye(8)
BINS = jnp.linspace(-20, 20, 8)
POWERS = 2.0 ** jnp.arange(16.0).reshape(8, 2)
LARGE = np.random.default_rng(1).uniform(2e5, 1e6, size=(8, 8)).astype(np.float32)


def gates(x):
    return jax.nn.sigmoid(x @ W + 4), jnp.tanh(x @ W)


def gated_once(h, gate_and_value):
    gate, value = gate_and_value
    return gate * h + (1 - gate) * value


def gated(gate, value):
    return lax.scan(lambda h, each: (gated_once(h, each),) * 2, jnp.zeros(8), (gate, value))[1]


def associative(gate, value):
    def combine(a, b):
        return a[0] * b[0], a[1] * b[0] + b[1]

    return lax.associative_scan(combine, (gate, (1 - gate) * value))[1] @ W


def reacted(u):
    return lax.scan(lambda u, _: (u + 0.1 * (LAPLACE @ u) + 0.1 * u * (1 - u), None), u, length=5)[0]


def halved(x):
    return lax.while_loop(lambda x: jnp.sum(x**2) > 1, lambda x: jnp.tanh(x @ W) / 2, x)


# A map of one example in two parts, the second of which reads what the first returns, and whether its products are
# float32 in float16 and in bfloat16; None where some are. Every kind of fact is in one of them.
BODIES = {
    "angles": (lambda x: 9 * x @ W, jnp.sin, (True, True)),
    "distances": (
        lambda x: (x @ Y.T, x),
        lambda p, x: jnp.sum(x**2, 1)[:, None] + jnp.sum(Y**2, 1) - 2 * p,
        (True, True),
    ),
    "variances": (
        lambda x: (WINDOW @ (x * x), WINDOW @ x),
        lambda second, mean: second - mean**2,
        (True, True),
    ),
    "a matrix": (lambda x: x.T @ x / 6 + 1e-3 * jnp.eye(8), jnp.linalg.cholesky, (True, True)),
    "an operand of a solver": (lambda x: x @ W, lambda b: jnp.linalg.solve(SPD, b.T), (True, True)),
    "a solution": (lambda x: jnp.linalg.solve(SPD, x.T), lambda x: W @ x, (True, True)),
    "a logarithm": (lambda x: x**2 @ W**2, lambda p: jnp.log(p + 1e-12), (True, False)),
    "the edge of a domain": (
        lambda x: (x / jnp.linalg.norm(x, axis=1, keepdims=True)) @ (Y / jnp.linalg.norm(Y, axis=1, keepdims=True)).T,
        lambda c: jnp.arccos(jnp.clip(c, -1, 1)),
        (True, True),
    ),
    "counts": (lambda x: (x > 0).astype(jnp.float32), lambda mask: mask.T @ mask, (True, True)),
    "a large constant": (lambda x: x + LARGE[:6], lambda h: h @ W, (True, False)),
    "scalars in a row": (lambda x: x * 1e3, lambda h: (h * 1e4) @ W, (True, False)),
    "a chain of products": (lambda x: x @ LARGE, lambda h: h @ W, (True, False)),
    "a recurrence": (
        lambda x: x.T,
        lambda h: lax.scan(lambda h, _: (NEAR_ONE @ h, None), h, length=5)[0],
        (True, True),
    ),
    "a simulation": (lambda x: x.T, reacted, (True, True)),
    "a router": (lambda x: x @ W, lambda h: lax.top_k(jax.nn.softmax(h), 2)[1].astype(jnp.float32), (True, True)),
    "an expectation": (jax.nn.softmax, lambda p: jnp.sinh(p @ BINS), (True, True)),
    "codes": (lambda x: x @ POWERS, lambda c: (c[:, None] == c[None]).astype(jnp.float32), (True, True)),
    "a Gram matrix of many rows": (lambda x: jnp.tile(x, (200, 1)), lambda f: f.T @ f / f.size, (True, False)),
    "a loop that decides": (lambda x: 9 * x, halved, (True, True)),
    "gates": (gates, gated, (False, False)),
    "gates of an associative scan": (gates, associative, (False, False)),
    "a sum in a loop": (
        lambda x: x,
        lambda x: lax.scan(lambda c, row: (c + jnp.tanh(row[None] @ W), None), jnp.zeros((1, 8)), x)[0],
        (False, False),
    ),
    "a layer": (lambda x: jax.nn.gelu(x @ W), lambda h: jnp.tanh(h @ W), (False, False)),
    "attention": (lambda x: (x @ W, x), lambda q, x: jax.nn.softmax(q @ x.T) @ (x @ W), (False, False)),
    "a range": (lambda x: x @ W, lambda h: h * 4e4 + 1e3, (False, False)),
}


def of_one(first, second):
    def fun(x):
        mid = first(x)
        return second(*mid) if isinstance(mid, tuple) else second(mid)

    return fun


def in_a_fori_loop(fun, xs):
    out = jnp.zeros((len(xs), *jax.eval_shape(fun, xs[0]).shape))
    return lax.fori_loop(0, len(xs), lambda i, out: out.at[i].set(fun(xs[i])), out)


def cut(fun, xs, half=2):
    return jnp.concatenate([lax.map(fun, xs[:half]), lax.map(fun, xs[half:])])


WAYS = {
    "unrolled": lambda fun, xs: jnp.stack([fun(x) for x in xs]),
    "vmap": lambda fun, xs: jax.vmap(fun)(xs),
    "map": lax.map,
    "map over batches": lambda fun, xs: lax.map(fun, xs, batch_size=2),
    "scan": lambda fun, xs: lax.scan(lambda _, x: (None, fun(x)), None, xs)[1],
    "fori_loop": in_a_fori_loop,
    "cond": lambda fun, xs: lax.cond(xs[0, 0, 0] > 9, jax.vmap(lambda x: fun(x)), jax.vmap(lambda x: fun(x)), xs),
    "jit": lambda fun, xs: jax.vmap(jax.jit(fun))(xs),
    "checkpoint": lambda fun, xs: jax.vmap(jax.checkpoint(fun))(xs),
    "map of jit of checkpoint": lambda fun, xs: lax.map(jax.jit(jax.checkpoint(fun)), xs),
    "two loops": cut,
}


@pytest.mark.parametrize("low", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("body", BODIES)
def test_products_have_the_same_dtypes_however_a_map_is_written(body, low):
    first, second, full = BODIES[body]
    want = dtypes(amp.autocast(of_one(first, second), low), X[0], primitive="dot_general")
    is_full = full[list(EPSILON).index(low)]
    assert {row == "float32 float32 -> float32" for row in want} == {is_full}

    def one_loop_after_another(_, xs):
        mid = lax.map(first, xs)
        return lax.map(lambda mid: second(*mid), mid) if isinstance(mid, tuple) else lax.map(second, mid)

    for name, way in {**WAYS, "one loop after another": one_loop_after_another}.items():
        fun = functools.partial(way, of_one(first, second))
        got = dtypes(amp.autocast(fun, low), X, primitive="dot_general")
        assert set(got) == set(want), name
        assert len(got) % len(want) == 0, name


# What changes a value, and then back. Ops that keep what a value is; only a count that was divided is none, and a
# solution ends at a bound.
EDITS = {
    "moved": lambda x: x.T.reshape(-1).reshape(x.shape[::-1]).T,
    "reversed": lambda x: lax.rev(lax.rev(x, range(x.ndim)), range(x.ndim)),
    "scaled": lambda x: 2 * (0.5 * x),
    "divided": lambda x: (x / 4) * 4,
    "negated": lambda x: jnp.negative(-x),
    "shifted": lambda x: x + 0.0,
    "selected": lambda x: jnp.where(jnp.ones(x.shape) > 0, x, 0.0),
    "clipped": lambda x: x if jnp.iscomplexobj(x) else jnp.clip(x, -1e6, 1e6),
    "cut and joined": lambda x: jnp.concatenate([x[:2], x[2:]]) if x.ndim else x,
    "in a call": jax.jit(lambda x: x * 1.0),
    "in a cond": lambda x: lax.cond(True, lambda x: x * 1.0, lambda x: x, x),
}


@pytest.mark.parametrize("low", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("body", BODIES)
def test_a_fact_passes_ops_that_keep_what_a_value_is(body, low):
    first, second, full = BODIES[body]
    for name, edit in EDITS.items():
        if (body == "counts" and name in ("scaled", "divided")) or (body == "a solution" and name == "clipped"):
            continue
        fun = of_one(lambda x, edit=edit: jax.tree.map(edit, first(x)), second)
        got = dtypes(amp.autocast(fun, low), X[0], primitive="dot_general")
        assert {row == "float32 float32 -> float32" for row in got} == {full[list(EPSILON).index(low)]}, name


SEQUENCE, TOKENS = normal(256, 4, 8), jnp.asarray(RNG.integers(0, 4, 200_000))
POINTS = 2 * normal(40, 1)
ROTATION = jnp.asarray([[np.cos(1e-3), -np.sin(1e-3)], [np.sin(1e-3), np.cos(1e-3)]], jnp.float32)
IMAGE = jnp.asarray(RNG.uniform(0.4, 0.6, (1, 16, 16, 1)), jnp.float32)


def kernel(a, b):
    return jnp.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1))


def blurred(x):
    return lax.conv_general_dilated(
        x, jnp.ones((7, 7, 1, 1)) / 49, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def covariance(x, y):
    return blurred(x * y) - blurred(x) * blurred(y)


def kalman_filter(observed):
    transition, seen = 0.99 * jnp.eye(3), jnp.asarray([[1.0, 0.2, 0.0], [0.0, 1.0, 0.3]])

    def step(state, y):
        mean, cov = transition @ state[0], transition @ state[1] @ transition.T + 1e-3 * jnp.eye(3)
        innovation = seen @ cov @ seen.T + 0.1 * jnp.eye(2)
        gain = jnp.linalg.solve(innovation, seen @ cov).T
        return (mean + gain @ (y - seen @ mean), cov - gain @ innovation @ gain.T), mean

    return lax.scan(step, (jnp.zeros((3, 1)), jnp.eye(3)), observed)[1]


TRANSITION, SEEN = jnp.eye(6) + 0.1 * jnp.eye(6, k=1), jnp.eye(2, 6, 2)


def log_likelihood(noise, unroll):
    """Of two observations, by a Kalman filter with a diffuse prior."""

    def step(cov, y):
        cov = TRANSITION @ cov @ TRANSITION.T + noise * jnp.eye(6)
        innovation = SEEN @ cov @ SEEN.T + jnp.eye(2)
        gain = jnp.linalg.solve(innovation, SEEN @ cov).T
        return cov - gain @ innovation @ gain.T, y @ jnp.linalg.solve(innovation, y) + jnp.linalg.slogdet(innovation)[1]

    cov = TRANSITION @ (1e4 * jnp.eye(6)) @ TRANSITION.T + noise * jnp.eye(6)
    return lax.scan(step, cov, jnp.ones((4, 2)), unroll=unroll)[1].sum()


def unrolled_filter(noise):
    with jax.disable_jit():
        return log_likelihood(noise, 4)


def log_determinant(noise):
    """Of what is left of a diffuse prior after one observation; each product of three is written in another way."""
    transition, seen = TRANSITION[:, :5], SEEN
    cov = jnp.einsum("ij,jk,lk->il", transition, 1e4 * jnp.eye(5), transition) + noise * jnp.eye(6)
    innovation = jnp.linalg.multi_dot([seen, cov, seen.T]) + jnp.eye(2)
    gain = jnp.linalg.solve(innovation, seen @ cov).T
    return jnp.linalg.slogdet(cov - gain @ (innovation @ gain.T))[1]


def unrolled(x):
    (gate, value), h = gates(x), jnp.zeros((4, 8))
    for i in range(16):
        h = gated_once(h, (gate[i], value[i]))
    return h


def counted(tokens):
    one_hot = jax.nn.one_hot(tokens, 4)
    return one_hot.T @ one_hot, one_hot.T @ jnp.ones((len(tokens), 1))


def batched(*parts):
    return lambda xs: [lax.map(of_one(*parts), xs), parts[1](lax.map(parts[0], xs))]


def conjugate_gradients(b):
    """Written out: the carries are divided by each other."""

    def step(carry, _):
        x, residual, direction = carry
        product, old = SPD @ direction, residual @ residual
        length = old / (direction @ product)
        residual = residual - length * product
        return (x + length * direction, residual, residual + (residual @ residual) / old * direction), None

    return lax.scan(step, (jnp.zeros(8), b, b), length=6)[0][0]


def coded(bits):
    code = bits @ jnp.exp2(jnp.arange(16.0))
    return code[:, None] == code[None]


VELOCITIES = np.float32([[i, j] for i in (-1, 0, 1) for j in (-1, 0, 1)])
SHARES = np.float32([[[1, 4, 1, 4, 16, 4, 1, 4, 1]]]) / 36


def lattice_boltzmann(f):
    def step(f, _):
        density = f.sum(-1, keepdims=True)
        velocity = f @ VELOCITIES / density
        along = velocity @ VELOCITIES.T
        settled = density * SHARES * (1 + 3 * along + 4.5 * along**2 - 1.5 * jnp.sum(velocity**2, -1, keepdims=True))
        f = f - 0.6 * (f - settled)
        moves = [jnp.roll(f[..., i], tuple(map(int, VELOCITIES[i])), (0, 1)) for i in range(9)]
        return jnp.stack(moves, -1), None

    return lax.scan(step, f, length=100)[0]


def convolved(u):
    stencil = jnp.asarray([[0, 1, 0], [1, -4, 1], [0, 1, 0]], jnp.float32)[:, :, None, None]

    def step(u, _):
        flow = lax.conv_general_dilated(u, stencil, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return u + 0.1 * flow + 0.05 * u * (1 - u), None

    return lax.scan(step, u, length=100)[0]


def diffused(u):
    def step(u, _):
        return u + 0.1 * (LAPLACE @ u) + 1e-2 * jnp.tanh((u - 290) / 5 @ W), None

    return lax.scan(step, u, length=50)[0] - 290


def rooted(a):
    """By Newton and Schulz."""

    def step(_, carry):
        y, z = carry
        half = 0.5 * (3 * jnp.eye(8) - z @ y)
        return y @ half, half @ z

    norm = jnp.linalg.norm(a)
    return jnp.sqrt(norm) * lax.fori_loop(0, 12, step, (a / norm, jnp.eye(8)))[0]


def rooted_unrolled(a):
    with jax.disable_jit():
        return rooted(a)


def inverted(a):
    """By Schulz, unrolled."""
    x = a.T / jnp.linalg.norm(a) ** 2
    for _ in range(20):
        x = x @ (2 * jnp.eye(8) - a @ x)
    return x


def exponential(a):
    """By its Taylor series, nested."""
    power = jnp.eye(8) + a / 8
    for n in range(7, 0, -1):
        power = jnp.eye(8) + a @ power / n
    return power


def infected(x):
    """A simulation of millions: a share of them is a function of a quotient, and is multiplied by the divisor again."""
    n, contacts = 4e6 + jnp.exp(x[0]), jnp.abs(W) / 4
    return lax.fori_loop(0, 20, lambda _, i: i + 0.1 * n * (1 - jnp.exp(-contacts @ i / n)) - 0.1 * i, n / 100)


def unit(x):
    return x / jnp.linalg.norm(x, axis=1, keepdims=True)


# Programs that were off, or infinite, before facts crossed borders.
PROGRAMS = {
    "cholesky in a map": (lambda x: lax.map(jnp.linalg.cholesky, x @ x.mT + 1e-3 * jnp.eye(6)), X),
    "determinants in a map": (lambda x: lax.map(lambda k: jnp.linalg.slogdet(k)[1], x.mT @ x + 1e-3 * jnp.eye(8)), X),
    "gradient of sines in a map": (jax.grad(lambda x: lax.map(jnp.sin, 30 * x @ W).sum()), Y),
    "sines behind a map": (lambda x: jnp.sin(lax.map(lambda row: 30 * row @ W, x)), X),
    "gates in a body": (
        lambda x: lax.scan(lambda h, x: (gated_once(h, gates(x)),) * 2, jnp.zeros((4, 8)), x),
        SEQUENCE,
    ),
    "gates in front of a scan": (
        lambda x: lax.scan(lambda h, g: (gated_once(h, g),) * 2, jnp.zeros((4, 8)), gates(x)),
        SEQUENCE,
    ),
    "gates of an associative scan": (lambda x: associative(*gates(x)), SEQUENCE),
    "gates of an unrolled recurrence": (unrolled, SEQUENCE[:16]),
    "a linear recurrence": (lambda a: lax.scan(lambda x, _: (a @ x, None), jnp.ones(8), length=200)[0], NEAR_ONE),
    "a linear recurrence in a fori_loop": (
        lambda a: lax.fori_loop(0, 200, lambda _, x: a @ x, jnp.ones((8, 4))),
        NEAR_ONE,
    ),
    "a thousand rotations": (lambda a: lax.scan(lambda x, _: (a @ x, None), jnp.eye(2), length=1000)[0], ROTATION),
    "a Kalman filter": (kalman_filter, normal(50, 2, 1)),
    "the gradient of a Kalman filter with a diffuse prior": (
        jax.grad(lambda s: log_likelihood(s, 1)),
        jnp.float32(0.3),
    ),
    "covariances by einsum": (log_determinant, jnp.float32(0.3)),
    "the same without a loop": (jax.grad(unrolled_filter), jnp.float32(0.3)),
    "conjugate gradients": (conjugate_gradients, normal(8)),
    "an expectation that an exponential reads": (lambda x: jnp.sinh(jax.nn.softmax(3 * x) @ BINS), Y),
    "codes of 16 bits": (lambda x: coded((x > 0).astype(jnp.float32)), normal(64, 16)),
    "a Gram matrix of many rows": (lambda x: x.T @ x / x.size, 30 + normal(4096, 4)),
    "experts": (lambda x: jax.nn.one_hot(lax.top_k(x @ W, 2)[1], 8), normal(512, 8)),
    "a Gaussian process": (
        lambda x: kernel(x[:5] + 0.1, x) @ jnp.linalg.solve(kernel(x, x) + 1e-4 * jnp.eye(40), jnp.sin(x[:, 0])),
        POINTS,
    ),
    "a large inverse": (lambda x: x @ jnp.linalg.inv(1e-5 * jnp.eye(8)) @ x.T, Y),
    "a product with a large matrix and another": (lambda x: x @ LARGE @ x.T, 0.1 * Y),
    "a large first carry": (lambda q: lax.scan(lambda c, _: (0.9 * c, c @ q), LARGE, length=3)[1], 0.1 * W),
    "a large branch": (lambda q: lax.cond(q[0, 0] > 9, lambda: q, lambda: LARGE + q) @ q, 0.1 * W),
    "a small divisor": (lambda q: (q / 1e-6) @ q, W),
    "scalars in a row": (lambda q: (q * 1e3 * 1e4) @ q, W),
    "large cumulative sums": (lambda q: jnp.cumsum(LARGE + q, 0) @ q, W),
    "large sums": (lambda q: jnp.sum(LARGE * q, 0, keepdims=True) @ q, W),
    "a large square": (lambda q: jnp.sqrt(LARGE + q) ** 2 @ q, W),
    "the logarithm of a small product": (lambda p: jnp.log(1e-9 * p**2 @ p.T**2 + 1e-12), Y),
    "the logarithm of a large product": (lambda p: jnp.log(1e3 * p**2 @ (1e2 * p.T**2) + 1e-6), Y),
    "counts of 200,000": (counted, TOKENS),
    "sums of 200,000 by a one-hot matrix": (lambda x: jax.nn.one_hot(TOKENS, 4).T @ x, jnp.ones((len(TOKENS), 2))),
    "a sum of 200,000 by a matrix of ones": (lambda x: jnp.ones((2, len(TOKENS))) @ x, jnp.ones((len(TOKENS), 2))),
    "a returned value of 130,000": (lambda x: 4e4 * (x @ W) + 1e3, Y),
    "a variance of a window": (lambda x: blurred(x * x) - blurred(x) ** 2, IMAGE),
    "a covariance of windows": (lambda x: blurred(x * x**2) - blurred(x) * blurred(x**2), IMAGE),
    "a covariance of two images": (lambda x: covariance(x, jnp.roll(x, 1, 1)), IMAGE),
    "a linear term of a simulation beside a learned one": (diffused, 290 + 5 * normal(8)),
    "a square root of a product of covariances": (lambda x: rooted(SPD @ (x.T @ x / 6 + jnp.eye(8))), Y),
    "a square root of one, unrolled": (lambda x: rooted_unrolled(SPD @ (x.T @ x / 6 + jnp.eye(8))), Y),
    "an inverse by products": (lambda x: inverted(x.T @ x / 6 + 0.3 * jnp.eye(8)), Y),
    "a matrix exponential by products": (lambda x: exponential(10 * x.T @ W[:6]), Y),
    "a simulation of millions": (infected, Y),
    "a quotient of two small sums by features": (
        lambda x: (lambda q: (q @ (q.T @ x)) / (q @ q.sum(0))[:, None])(jnp.exp(x - 12)),
        Y,
    ),
    "a mean less what it is a mean of": (lambda x: (lambda at: jax.nn.softmax(x[:, :6]) @ at - at)(15 + x), Y),
    "an angle in a complex exponential": (lambda x: jnp.real(jnp.exp(1j * (30 * x @ W))), Y),
    "the angle of one": (lambda x: jnp.angle(2 * jnp.exp(1j * (30 * x @ W))), Y),
    "a product of a real and a complex matrix": (lambda x: jnp.abs(x @ (W + 1j * SPD)), Y),
    "a small factor": (lambda x: (x * 1e-9) @ W / 1e-9, Y),
    "a small factor of a product": (lambda x: (jnp.tanh(x @ W) * 1e-9) @ W / 1e-9, Y),
    "two small factors": (lambda x: jnp.flip(x * 1e-5).T @ (x * 1e-5) / 1e-10, Y),
    "an array of small divisors": (lambda x: (x / (jnp.arange(1, 9) / 1e13)) @ W, Y),
    "normals before a steep function": (lambda x: 1 / (1.01 - unit(x[:, :3]) @ unit(x[:, 3:6]).T ** 2) ** 2, Y),
    "angles between vectors": (batched(*BODIES["the edge of a domain"][:2]), X),
    "sines of angles between vectors": (batched(BODIES["the edge of a domain"][0], lambda c: jnp.sqrt(1 - c * c)), X),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_is_that_of_float32(name):
    fun, arg = PROGRAMS[name]
    want, *both = jax.jit(lambda x: [fun(x), *[amp.autocast(fun, low)(x) for low in EPSILON]])(arg)
    for low, got in zip(EPSILON, both, strict=True):
        assert error(got, want) < 2 * EPSILON[low], low


@pytest.mark.parametrize("low", EPSILON)
def test_a_gradient_through_a_simulation_is_that_of_float32(low):
    for simulate, start in (convolved, IMAGE), (lattice_boltzmann, SHARES * (1 + 0.1 * normal(8, 8, 1))):
        weights = jnp.cos(jnp.arange(float(start.size))).reshape(start.shape)

        def loss(start, simulate=simulate, weights=weights):
            return jnp.sum(simulate(start) * weights)

        want, got = jax.jit(lambda x, loss=loss: [jax.grad(f)(x) for f in (loss, amp.autocast(loss, low))])(start)
        assert error(got, want) < 2 * EPSILON[low], simulate


# Products of one matrix that belong together, as in `A @ P @ A.T`. They are not recognized across these edits.
TOGETHER = {"covariances by einsum", "the same without a loop", "a square root of one, unrolled"}
TOGETHER |= {"an inverse by products", "a matrix exponential by products", "a mean less what it is a mean of"}
BORDERS = {"selected", "clipped", "in a call", "in a cond"}


def with_edit(fun, edit):
    """Returns `fun` with an edit of the result of each product outside of loops."""

    def apply(eqn, operands):
        structure = jx.structure_of(eqn)
        if isinstance(structure, jx.Call) and structure.is_inline and structure.rule is None:
            return jx.evaluate(structure.jaxpr, [operands[i] for i in structure.operands], apply)
        outs = jx.apply_as_traced(eqn, operands)
        return list(map(edit, outs)) if eqn.primitive.name in PRODUCTS else outs

    return lambda x: jx.evaluate(jax.make_jaxpr(fun)(x), [x], apply)


PRODUCTS = {"dot_general", "conv_general_dilated"}


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_that_changes_nothing_changes_no_decision(edit):
    def decisions(fun, arg):
        rows = amp.explain(fun, "bfloat16")(arg).select(direction="forward").rows
        return [(row.compute, row.why) for row in rows if row.primitive in PRODUCTS]

    for name, (fun, arg) in PROGRAMS.items():
        if edit not in BORDERS or name not in TOGETHER:
            assert decisions(with_edit(fun, EDITS[edit]), arg) == decisions(fun, arg), name


@pytest.mark.parametrize(
    "fun",
    [
        lambda x: jax.nn.one_hot(TOKENS[:512], 4).T @ jnp.tile(x, (128, 1))[:512],
        lambda x: (x @ W) @ W.T,
        lambda x: (x @ W) @ x.T,
    ],
)
def test_other_products_of_a_matrix_and_its_transpose_and_short_sums_are_low(fun):
    assert "float16 float16 -> float16" in dtypes(amp.autocast(fun), Y, primitive="dot_general")


def test_a_product_of_what_only_one_branch_counts_is_low():
    def fun(x):
        mask = lax.cond(x[0, 0] > 0, lambda: (x > 0).astype(jnp.float32), lambda: x)
        return mask @ mask.T

    assert dtypes(amp.autocast(fun), Y, primitive="dot_general") == ["float16 float16 -> float16"]


def local_energy(product, params, positions):
    """Of a trial wave function: its Laplacian, by forward over reverse."""

    def log_wave(x):
        h = x
        for w in params:
            h = jnp.tanh(product(h[None], w)[0])
        return jnp.sum(h) - jnp.sum(x**2) / 2

    def of_one(x):
        gradient = jax.grad(log_wave)
        laplacian = sum(jax.jvp(gradient, (x,), (e,))[1] @ e for e in jnp.eye(6))
        return (jnp.sum(x**2) - laplacian - jnp.sum(gradient(x) ** 2)) / 2

    return jnp.var(jax.vmap(of_one)(positions))


def crps(product, weights, inputs):
    """Of forecasts near 288 K by an ensemble."""
    forecast = product(inputs, weights)
    spread = jnp.abs(forecast[:, :, None] - forecast[:, None])
    return jnp.mean(jnp.abs(forecast - 288)) - jnp.mean(spread) / 2


@pytest.mark.slow
@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize(
    ("loss_fn", "args"),
    [
        (local_energy, ([normal(6, 32) / 3, normal(32, 32) / 6, normal(32, 8) / 6], normal(64, 6))),
        (crps, (1 / 16 + 0.01 * normal(16, 8), 288 + 5 * normal(256, 16))),
    ],
)
def test_a_loss_that_magnifies_the_errors_of_a_network_is_as_good_as_with_casts_by_hand(loss_fn, args, low):
    def by_hand(a, b):
        return jnp.matmul(a.astype(low), b.astype(low)).astype(jnp.float32)

    def gradient(product, transform=lambda fun: fun):
        return ravel_pytree(jax.jit(jax.grad(transform(functools.partial(loss_fn, product))))(*args))[0]

    want = gradient(jnp.matmul)
    got = gradient(jnp.matmul, lambda fun: amp.autocast(fun, low))
    assert jnp.linalg.norm(got - want) < 1.5 * jnp.linalg.norm(gradient(by_hand) - want)


GATES = {
    "as it is": lambda z: z,
    "of the rest": lambda z: 1 - z,
    "of an exponential": lambda z: jnp.exp(-2.0 * z),
    "moved": lambda z: z[::-1],
}


@pytest.mark.parametrize("name", GATES)
def test_what_a_gate_is_made_of_is_float32_in_front_of_a_loop(name):
    def fun(x):
        z = jax.nn.sigmoid(x @ W - 4)
        return lax.scan(lambda h, z: (GATES[name](z) * h + z,) * 2, jnp.zeros(8), z)[1]

    assert dtypes(amp.autocast(fun), Y, primitive="logistic") == ["float32 -> float32"]

    def replaced(x):
        z = jax.nn.sigmoid(x @ W - 4)
        return lax.scan(
            lambda h, z: (jnp.tanh(GATES[name](z) @ W + h @ W),) * 2, jnp.zeros((2, 8)), z.reshape(3, 2, 8)
        )[1]

    assert dtypes(amp.autocast(replaced), Y, primitive="logistic") == ["float16 -> float16"]


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "gates" in name])
def test_gates_are_float32_wherever_they_are_computed(name):
    fun, arg = PROGRAMS[name]
    assert set(dtypes(amp.autocast(fun), arg, primitive="logistic")) == {"float32 -> float32"}


def cost_of(x):
    """A sum of two products, which may cancel."""
    return x**2 @ W**2 - 2 * (x @ W)


def potential(cost):
    return jax.nn.logsumexp(-cost / 0.1, 1)


def loop_of(read):
    return lambda c: lax.scan(lambda f, _: (f + read(c), None), jnp.zeros(6), length=3)[0]


def with_rule(read):
    fun = jax.custom_vjp(read)
    fun.defvjp(lambda c: (read(c), c), lambda c, g: (c * g[:, None],))
    return fun


# Where the reader of a sum stands: beyond which border.
READERS = {
    "none": potential,
    "a constant of a scan": loop_of(potential),
    "slices of a scan": lambda c: lax.map(lambda row: potential(row[None])[0], c),
    "a constant of a fori_loop": lambda c: lax.fori_loop(0, 3, lambda _, f: f + potential(c), jnp.zeros(6)),
    "a loop in a loop": loop_of(loop_of(potential)),
    "a cond": lambda c: lax.cond(True, potential, lambda c: potential(2 * c), c),
    "a branch that reads nothing": lambda c: lax.cond(True, potential, lambda c: jnp.zeros(6), c),
    "a jit": jax.jit(potential),
    "a loop in a jit": jax.jit(loop_of(potential)),
    "a checkpoint": jax.checkpoint(potential),
    "a custom_vjp": with_rule(potential),
    "moved and scaled": lambda c: loop_of(potential)(0.5 * c[::-1]),
}
MAKERS = {
    "none": cost_of,
    "a jit": jax.jit(cost_of),
    "a checkpoint": jax.checkpoint(cost_of),
    "a map": lambda x: lax.map(lambda row: cost_of(row[None])[0], x),
    "a cond": lambda x: lax.cond(x[0, 0] > 9, cost_of, lambda x: cost_of(-x), x),
}


@pytest.mark.parametrize("low", EPSILON)
def test_a_sum_that_all_readers_read_in_float32_is_float32_beyond_borders(low):
    for made in MAKERS:
        for read in READERS if made == "none" else ("none", "a constant of a scan"):
            fun = amp.autocast(lambda x, made=made, read=read: READERS[read](MAKERS[made](x)), low)
            sums = [
                row(e) for e in equations(fun, Y) if e.primitive.name == "sub" and e.outvars[0].aval.shape[-1:] == (8,)
            ]
            assert sums[0] == "float32 float32 -> float32", (made, read)
            assert set(dtypes(fun, Y, primitive="dot_general")) == {f"{low} {low} -> {low}"}, (made, read)


def test_what_a_loop_stores_is_low_if_it_is_no_sum_or_a_reader_is_low():
    for fun in (
        lambda x: loop_of(potential)(x @ W),
        lambda x: loop_of(potential)(x @ W + 1.0),
        lambda x: loop_of(potential)(jnp.tanh(x @ W)),
        lambda x: loop_of(lambda c: jnp.sum(c @ W, 1))(x @ W - jnp.tanh(x @ W)),
    ):
        loop = next(e for e in equations(amp.autocast(fun), Y) if e.primitive.name == "scan")
        assert "float16" in {var.aval.dtype.name for var in loop.invars if var.aval.shape == (6, 8)}


def unread(h):
    """Reads `h` in vain, in ops, branches, loops and results of calls."""
    h.T.shape
    lax.cond(True, lambda: h.T, lambda: h.T)
    lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c + 1, h)
    h, _ = jax.jit(lambda h: (h, h.T))(h)
    return lax.scan(lambda h, _: (h, h.T), h, length=3)[0]


def test_what_nothing_reads_does_not_count_as_a_reader():
    fun = amp.autocast(lambda x: jnp.sin(unread(30 * x @ W)))
    assert dtypes(fun, Y, primitive="dot_general") == ["float32 float32 -> float32"]
    fun = amp.autocast(lambda x: (lambda h: (jnp.sin(h), h.T))(30 * x @ W))
    assert dtypes(fun, Y, primitive="dot_general") == ["float16 float16 -> float16"]


# Cutoffs of potentials, whose coefficients cancel, in the ways that a polynomial is written.
CUTOFFS = {
    "a sum of powers": lambda u: 1 - 28 * u**6 + 48 * u**7 - 21 * u**8,
    "negative coefficients": lambda u: 1 + (-28 * u**6) + 48 * u**7 + (-21 * u**8),
    "nested": lambda u: 1 + u**6 * (-28 + u * (48 - 21 * u)),
    "polyval": lambda u: jnp.polyval(jnp.array([-21.0, 48, -28, 0, 0, 0, 0, 0, 1]), u),
    "a sum of a list": lambda u: sum([-28 * u**6, 48 * u**7, -21 * u**8], jnp.ones_like(u)),
    "of degree 5": lambda u: 1 - 6 * u**5 + 15 * u**4 - 10 * u**3,
    "of degree 10": lambda u: 1 - 45 * u**8 + 80 * u**9 - 36 * u**10,
}


@pytest.mark.parametrize("name", CUTOFFS)
def test_layers_with_a_polynomial_cutoff_and_their_derivatives_are_low(name):
    def fun(x, u):
        for _ in range(8):
            x = jnp.tanh(jnp.where(u < 1, CUTOFFS[name](u), 0.0) * x @ W)
        return jnp.sum(x)

    found = dtypes(amp.autocast(jax.value_and_grad(fun)), Y, jnp.ones((6, 1)), primitive="dot_general")
    assert set(found) == {"float16 float16 -> float16"}


GUARDS = {
    "clip": lambda x: jnp.clip(x, -1e6, 1e6),
    "minimum": lambda x: jnp.minimum(x, 1e9),
    "clamp": lambda x: lax.clamp(-1e6, x, 1e6),
    "maximum": lambda x: jnp.maximum(jnp.tanh(x), -1e9),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_large_bound_makes_no_product_float32(name):
    assert dtypes(amp.autocast(lambda x: GUARDS[name](x) @ W), Y, primitive="dot_general") == [
        "float16 float16 -> float16"
    ]


FRACTIONS = {
    "floor": lambda x: x - jnp.floor(x),
    "ceil": lambda x: jnp.ceil(x) - x,
    "round": lambda x: x - jnp.round(x),
    "lax.round": lambda x: x - lax.round(x),
    "mod": lambda x: x % 1.0,
}


@pytest.mark.parametrize("name", FRACTIONS)
def test_the_fraction_of_a_large_number_is_below_1(name):
    assert dtypes(amp.autocast(lambda x: FRACTIONS[name](1e6 * x) @ W), Y, primitive="dot_general") == [
        "float16 float16 -> float16"
    ]


@pytest.mark.parametrize(
    "grow",
    [
        lambda x: 100.0 * (100.0 * (100.0 * x)),
        lambda x: 300.0 * x - 300.0 * x[::-1] * 300.0,
        lambda x: jnp.where(x > 0, x, -1e9),
        lambda x: jnp.maximum(x, LARGE[:6]),
        lambda x: jnp.maximum(x, 1e6),
        lambda x: jnp.minimum(x, -1e6),
        lambda x: x.at[0].set(1e6),
        lambda x: 1e6 * x - jnp.floor(1e6 * x[::-1]),
        lambda x: 1e6 * x - jnp.floor(x),
    ],
)
def test_what_is_large_for_float16_is_float32_in_a_product(grow):
    for low, want in ("float16", "float32 float32 -> float32"), ("bfloat16", "bfloat16 bfloat16 -> bfloat16"):
        assert dtypes(amp.autocast(lambda x: grow(x) @ W, low), Y, primitive="dot_general") == [want]


LOSES_NOTHING = {
    "conditioning by a logarithm": lambda x: (x + jnp.log(jnp.exp(x[:, :1])) * W[0]) @ W,
    "attention scaled by the logarithm of its length": lambda x: (
        (x * jnp.log(jnp.arange(6.0) + 2)[:, None]) @ (x @ W).T
    ),
    "features that are logarithms": lambda x: jnp.tanh(jnp.log(jnp.abs(x) + 1e-6) @ W),
    "a modulus": lambda x: jnp.sqrt((x @ W) ** 2 + (x @ W.T) ** 2 + 1e-9),
    "a cost that a softmax reads": lambda x: jax.nn.softmax(-jnp.sum((x @ W) ** 2, -1) / 4 - 0.1 * jnp.sum(x**2, -1)),
    "a mask of a matrix to decompose": lambda x: jnp.linalg.slogdet(jax.nn.sigmoid(x @ W)[:, :6] + 9 * jnp.eye(6))[1],
    "a residual layer whose weight is a sum with an identity": lambda x: x @ (jnp.eye(8) + W[:, :4] @ W[:4]),
    "attention to constant neighbours": lambda x: (jnp.tanh(x @ W) @ x.T / 8 + np.tri(6, dtype=np.float32)) @ (x @ W),
    "a soft cap": lambda x: (lambda cap: cap * jnp.tanh((x @ W) / cap))(5.0),
    "factors of low rank": lambda x: (x @ W[:, :4]) @ W[:4],
    "a layer of an ODE": lambda x: lax.fori_loop(0, 9, lambda _, x: x + 0.1 * jnp.tanh(x @ W), x),
    "a layer with a mean": lambda x: lax.fori_loop(0, 9, lambda _, x: jnp.tanh(x @ W) + 0.1 * jnp.mean(x), x),
    "a small step": lambda x: x + 1e-9 * jnp.tanh(x @ W),
    "audio of 16 bits": lambda x: jnp.tanh(x / 2**15 @ W),
    "a modulation": lambda x: jnp.tanh((1 + x @ W) * x),
    "an activation": lambda x: jax.nn.hard_swish(x @ W),
}


@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("name", LOSES_NOTHING)
def test_a_product_is_low_where_that_loses_nothing(name, low):
    fun = LOSES_NOTHING[name]
    want, got = jax.jit(lambda x: [fun(x), amp.autocast(fun, low)(x)])(Y)
    assert error(got, want) < 4 * EPSILON[low]
    assert "float32" not in " ".join(dtypes(amp.autocast(fun, low), Y, primitive="dot_general"))


VOCABULARY = normal(8, 1000)
NOT_ROUTED = {
    "argmax": lambda x: jnp.argmax(x @ W, -1),
    "a draw": lambda x: jax.random.categorical(jax.random.key(0), x @ W),
    "sorted": lambda x: jnp.sort(x @ W),
    "the best of a vocabulary": lambda x: lax.top_k(jax.nn.softmax(jnp.tanh(x) @ VOCABULARY), 5)[1],
    "the best of a vocabulary, for one example": lambda x: lax.top_k(jnp.tanh(x[:1]) @ VOCABULARY, 5)[1],
    "what is in front of a router": lambda x: lax.top_k(jnp.tanh(x @ W) @ W[:, :0], 0)[1] + jnp.argmax(x @ W),
    "a region": lambda x: amp.precision("float16")(lambda x: lax.top_k(x @ W, 2)[1])(x),
}


@pytest.mark.parametrize("name", NOT_ROUTED)
def test_other_products_that_are_compared_are_low(name):
    assert dtypes(amp.autocast(NOT_ROUTED[name]), Y, primitive="dot_general")[0] == "float16 float16 -> float16"


@pytest.mark.parametrize(
    "route",
    [
        lambda x: lax.top_k(x @ W, 2),
        lambda x: lax.top_k(jax.nn.sigmoid(x @ W) + 0.1, 2),
        lambda x: jnp.argsort(-(x @ W), -1)[:, :2],
        lambda x: lax.approx_max_k(x @ W, 2),
        lambda x: lax.top_k(jax.vmap(lambda row: W.T @ row)(x), 2),
        lambda x: lax.top_k((x @ W).T, 2),
    ],
)
def test_a_router_is_float32(route):
    assert dtypes(amp.autocast(route), Y, primitive="dot_general") == ["float32 float32 -> float32"]


@pytest.mark.parametrize("n_keys", [1, 2])
def test_what_is_sorted_by_keys_is_low_and_its_keys_are_float32(n_keys):
    def fun(x):
        return lax.sort((x @ W, jnp.tanh(x) @ W, jnp.sin(x) @ W), num_keys=n_keys)

    found = dtypes(amp.autocast(fun), Y, primitive="dot_general")
    assert found == ["float32 float32 -> float32"] * n_keys + ["float16 float16 -> float16"] * (3 - n_keys)


DECAY = jnp.linspace(0.9, 1, 8)[:, None]
FACTORS = {
    "nothing": lambda x, s: x,
    "a number": lambda x, s: 0.99 * x,
    "an array": lambda x, s: DECAY * x,
    "a scalar of the iteration": lambda x, s: s[0, 0] * x,
    "an array of the iteration": lambda x, s: s * x,  # a gate, which lets it forget
}


@pytest.mark.parametrize("factor", FACTORS)
def test_a_recurrence_may_be_scaled_but_not_gated(factor):
    for body in (
        lambda x, s: FACTORS[factor](NEAR_ONE @ x, s),
        lambda x, s: NEAR_ONE @ FACTORS[factor](x, s),
        lambda x, s: s - FACTORS[factor](NEAR_ONE @ x, s),
    ):
        fun = amp.autocast(lambda xs, body=body: lax.scan(lambda x, s: (body(x, s), None), xs[0], xs)[0])
        found = dtypes(fun, jnp.ones((5, 8, 8)), primitive="dot_general")
        assert found == [f"{low} {low} -> {low}" for low in ["float16" if "array of" in factor else "float32"]]


def delta_net(q, k, v):
    """Chunks of a delta rule, whose state is itself plus a product (Yang et al., 2024)."""

    def chunk(state, each):
        q, k, v = each
        new = v - k @ state
        return state + k.T @ new, q @ state + jnp.tril(q @ k.T) @ new

    return lax.scan(chunk, jnp.zeros((8, 8)), (q, k, v))[1]


LOW_LOOPS = {
    "a recurrent network": lambda x: lax.scan(lambda h, x: (jnp.tanh(x @ W + h @ W), None), jnp.zeros((6, 8)), x)[0],
    "layers with rectifiers": lambda x: lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), x[0], jnp.stack([W] * 3))[0],
    "a power iteration": lambda x: lax.fori_loop(
        0, 9, lambda _, v: (lambda u: u / jnp.linalg.norm(u))(W @ v), jnp.ones((8, 1))
    ),
    "residual layers": lambda x: lax.scan(lambda h, w: (h + jax.nn.gelu(h @ w), None), x[0], jnp.stack([W] * 3))[0],
    "linear residual layers": lambda x: lax.scan(lambda h, w: (h + h @ w, None), x[0], jnp.stack([W] * 3))[0],
    "shared layers with a nonlinearity": lambda x: lax.fori_loop(0, 9, lambda _, h: h + jnp.tanh(h @ W), x[0]),
    "shared layers with a norm": lambda x: lax.fori_loop(
        0, 9, lambda _, h: h + (h / jnp.linalg.norm(h, axis=-1, keepdims=True)) @ W, x[0]
    ),
    "a delta network": lambda x: delta_net(x @ W, x @ W, x @ W),
}


@pytest.mark.parametrize("name", LOW_LOOPS)
def test_products_of_loops_that_forget_are_low_and_so_are_those_of_their_derivatives(name):
    fun = LOW_LOOPS[name]

    def loss(x):
        return jnp.sum(fun(x) ** 2)

    for program in (fun, jax.grad(loss), lambda x: jax.jvp(loss, (x,), (x,))):
        assert set(dtypes(amp.autocast(program), X, primitive="dot_general")) == {"float16 float16 -> float16"}


def test_a_factor_of_a_cotangent_is_stored_low():
    def loss(ws, x):
        return jnp.sum(lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, ws)[0] ** 2)

    forward, _ = (e for e in equations(amp.autocast(jax.grad(loss)), W[None], Y) if e.primitive.name == "scan")
    stacked = [var.aval.dtype.name for var in forward.outvars if var.aval.ndim == 3]
    assert stacked.count("float32") == 1  # the cotangent is a sum, but `1 - tanh(x)**2` is no gate of it
