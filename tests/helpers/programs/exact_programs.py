"""Programs whose products are float32, or low, because of facts that reach them through calls, loops and branches."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
