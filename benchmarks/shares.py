"""How much of the work of public models and programs is in 16 bits: the shares of the FLOPs of their products.

    JAX_PLATFORMS=cpu python benchmarks/shares.py [--only GPT] [--out docs/benchmarks/autocast_accuracy.md]

They are those that `explain` says, of both passes. Nothing is compiled or run; it takes a minute. `--out` replaces the
section of the page, which `tests/benchmarks/test_accuracy.py` compares: a reason for float32 that is added later must
not lower a share.
"""

import accuracy_models
import jax
import jax.numpy as jnp
import models
import numpy as np
from jax import lax
from report import arguments, head, report_section, row

import jmp_amp as amp

F32 = jnp.float32
WIDE, ROWS, CLASSES = 256, 512, 64
PROGRAMS = {}


def program(*shapes):
    """Registers a loss of weights and of inputs of these shapes."""

    def register(loss_fn):
        PROGRAMS[loss_fn.__doc__] = loss_fn, [jax.ShapeDtypeStruct(shape, F32) for shape in shapes]
        return loss_fn

    return register


def network(ws, x, activation=jax.nn.relu):
    """Layers without biases."""
    for w in ws:
        x = activation(x @ w)
    return x


def cross_entropy(logits):
    labels = jnp.arange(len(logits)) % logits.shape[-1]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0])


STACK, HEAD, DATA = (3, WIDE, WIDE), (WIDE, CLASSES), (ROWS, WIDE)


@program(STACK, HEAD, (ROWS, 32), (32, WIDE))
def whitened_policy(ws, out, x, first):
    """policy behind whitened observations"""
    values, vectors = jnp.linalg.eigh(x.T @ x / ROWS)
    return jnp.mean(network(ws, jax.nn.gelu((x @ vectors / jnp.sqrt(values + 1e-3)) @ first), jax.nn.gelu) @ out)


@program(STACK, HEAD, DATA)
def cayley_layers(ws, out, x):
    """layers with orthogonal weights by Cayley's map"""
    skew = ws[0] - ws[0].T
    orthogonal = jnp.linalg.solve(jnp.eye(WIDE) + skew, jnp.eye(WIDE) - skew)
    return cross_entropy(network([orthogonal, ws[1], ws[2]], x) @ out)


@program(STACK, HEAD, DATA)
def deep_sets(ws, out, x):
    """DeepSets, masked maximum over a set"""
    keep = np.arange(ROWS).reshape(8, -1, 1) % 3 > 0
    pooled = jnp.where(keep, network(ws[:2], x).reshape(8, -1, WIDE), -1e9).max(1)
    return cross_entropy(jax.nn.relu(pooled @ ws[2]) @ out)


@program(STACK, HEAD, DATA)
def primer(ws, out, x):
    """squared ReLU of scaled embeddings"""
    return cross_entropy(network(ws, WIDE**0.5 * x, lambda h: jax.nn.relu(h) ** 2) @ out)


@program(STACK, HEAD, DATA)
def splade(ws, out, x):
    """SPLADE, log1p of a maximum over tokens"""
    weights = jnp.log1p(jax.nn.relu(network(ws, x, jax.nn.gelu) @ out)).reshape(8, -1, CLASSES).max(1)
    return cross_entropy(weights @ weights.T)


@program(STACK, HEAD, DATA)
def symlog(ws, out, x):
    """symlog of activations"""
    return cross_entropy(network(ws, x, lambda h: jnp.sign(h) * jnp.log1p(jnp.abs(h))) @ out)


@program(STACK, DATA)
def slopes_of_a_flow(ws, x):
    """flow with slopes by softplus"""
    slopes = jax.nn.softplus(network(ws[:2], x) @ ws[2])
    return jnp.mean(jnp.sum((x * slopes) ** 2 / 2 - jnp.log(slopes), -1))


@program(STACK, HEAD, (CLASSES, WIDE), DATA)
def center_loss(ws, out, centers, x):
    """cross entropy and distances to the centers of classes"""
    h = network(ws, x)
    logits, labels = h @ out, jnp.arange(ROWS) % CLASSES
    of_each = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    return jnp.mean(of_each + jnp.sum((h - centers[labels]) ** 2, -1) / 2)


@program(STACK, HEAD, DATA)
def top_5(ws, out, x):
    """classifier with a top-5 accuracy"""
    logits = network(ws, x) @ out
    return cross_entropy(logits), lax.top_k(logits, 5)[1]


@program(STACK, DATA)
def linear_attention(ws, x):
    """linear attention"""
    q, k, v = x @ ws[0], x @ ws[1], x @ ws[2]
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    return jnp.mean((q @ (k.T @ v)) / (q @ k.sum(0)[:, None]))


@program(STACK, DATA, DATA)
def contrastive(ws, x, y):
    """contrastive loss with a temperature of 0.07"""
    x, y = (h / jnp.linalg.norm(h, axis=-1, keepdims=True) for h in (network(ws, x), network(ws, y)))
    return cross_entropy(x @ y.T / 0.07)


@program(STACK, HEAD, (), DATA)
def quantized(ws, out, step, x):
    """training for quantization with a learned step"""

    def rounded(h):
        whole = jnp.clip(h / step, -128, 127)
        return (whole + lax.stop_gradient(jnp.round(whole).astype(jnp.int8).astype(F32) - whole)) * step

    return cross_entropy(network(ws, x, lambda h: rounded(jax.nn.relu(h))) @ out)


@program((3, WIDE, WIDE), (60, WIDE), (WIDE, 4), (ROWS, 3))
def radiance_field(ws, first, out, points):
    """radiance field, sines of points"""
    angles = (points[:, :, None] * 2.0 ** np.arange(10)).reshape(ROWS, -1)
    x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
    return jnp.mean(jax.nn.sigmoid(network(ws, jax.nn.relu(x @ first)) @ out))


@program(STACK, (WIDE, 8), DATA)
def mixture_of_experts(ws, router, x):
    """mixture of experts, top-2 routing"""
    gates, ids = lax.top_k(jax.nn.softmax(x @ router), 2)
    chosen = jnp.sum(gates[..., None] * jax.nn.one_hot(ids, 8), 1)
    return jnp.mean(sum(chosen[:, i, None] * jax.nn.gelu(x @ w) for i, w in enumerate(ws)))


@program(STACK, (512, WIDE), DATA)
def codebook(ws, codes, x):
    """VQ-VAE, distances to a codebook"""
    h = network(ws[:2], x)
    distances = jnp.sum(h**2, -1)[:, None] + jnp.sum(codes**2, -1) - 2 * h @ codes.T
    nearest = codes[jnp.argmin(distances, -1)]
    return jnp.mean((network(ws[2:], h + lax.stop_gradient(nearest - h)) - x) ** 2) + jnp.mean((h - nearest) ** 2)


@program(STACK, DATA)
def deep_kernel(ws, x):
    """Gaussian process on the features of a network"""
    h = network(ws, x, jnp.tanh)
    factor = jnp.linalg.cholesky(h @ h.T + ROWS * jnp.eye(ROWS))
    return jnp.sum(jnp.log(jnp.diag(factor))) + jnp.sum(jax.scipy.linalg.cho_solve((factor, True), x[:, :1]) ** 2)


@program((WIDE, WIDE), DATA)
def simulation(laplacian, u):
    """simulation of 100 steps"""
    return jnp.mean(lax.fori_loop(0, 100, lambda _, u: u + 0.01 * (u @ laplacian), u))


@program(STACK, HEAD, DATA)
def preferences(ws, out, x):
    """preferences, differences of log-probabilities"""
    log_probabilities = jax.nn.log_softmax(network(ws, x, jax.nn.gelu) @ out)[:, 0].reshape(2, -1)
    return -jnp.mean(jax.nn.log_sigmoid(0.1 * (log_probabilities[0] - log_probabilities[1])))


def cases():
    """Returns the programs of the table: of each, a function that returns a loss and its arguments."""
    small = {name: case for name, case in accuracy_models.CASES.items() if "optax" not in name}
    large = {name: lambda case=case: case(None) for name, case in (models.CASES | models.MORE_CASES).items()}
    large |= {f"{name}, small": lambda case=case: case(None) for name, case in small.items()}
    return large | {name: lambda each=each: each for name, each in PROGRAMS.items()}


DTYPES = ("float16", "bfloat16")


def share(loss_fn, args, dtype):
    """Returns the share of the FLOPs of products in 16 bits, and the reasons of the others."""
    report = amp.explain(loss_fn, dtype)(*args)
    reasons = {row.why for row in report.rows if row.flops and row.compute == "float32" and row.why != "derivative"}
    return report.summary()["matmul_flops"].get(dtype, 0.0), sorted(reasons)


TITLE = "## How much is in 16 bits"
WHY = """\
A reason for which a product is float32 costs speed, so it must not spread. These are the shares of the FLOPs of
products in 16 bits, both passes included, as [`explain`](../explain.md) says, with the reasons of the others. A test
compares them: none may fall. By `benchmarks/shares.py`; a share does not depend on the machine.
"""
NOTES = """
Distances to a codebook, routers of experts, simulations, and products that a decomposition reads are meant to be
float32 ([why](../explain.md#why-is-this-op-float32)).
"""


def shares(only=""):
    """Yields the lines of the section."""
    yield WHY
    yield from head("model", *DTYPES, "reasons for float32")
    for name, case in cases().items():
        if only in name:
            found = [share(*case(), dtype) for dtype in DTYPES]
            reasons = dict.fromkeys(reason for _, each in found for reason in each)
            yield row(name, *(f"{number:.3f}" for number, _ in found), ", ".join(f"`{each}`" for each in reasons))
    yield NOTES.rstrip()


def main():
    options = arguments(__doc__, "the models whose name contains this").parse_args()
    report_section(TITLE, shares(options.only), options.out)


if __name__ == "__main__":
    main()
