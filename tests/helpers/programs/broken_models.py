"""Programs as JAX users write them, whose losses, gradients or logged values are not finite.

Each stands beside the same program written correctly. The lines at fault end in a comment `# at fault: FUNCTION`.
"""

import dataclasses
import functools
import pathlib
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jmp_amp as amp


@dataclasses.dataclass(frozen=True)
class BrokenModel:
    """A broken program and its correct form.

    Attributes:
        broken: The program: a loss, or a whole train step if `dtype` is None.
        args: Makes the arguments, in float32, at which `broken` is not finite.
        cause: Why.
        fixed: The program as its author should have written it.
        fixed_args: The arguments that go with it, if the arguments were at fault.
        dtype: `"float16"` is run under `autocast`, with the loss scaled; `"float32"` is the gradient as it stands.
        loss_scale: Of float16.
        fixed_scale: The loss scale that goes with `fixed`, if the loss scale was at fault.
        intended: What the program should compute: in float64 `fixed` must agree with it at `near`.
        near: Arguments at which `intended` is finite in float64.
        rtol: How near `fixed` comes to `intended` there.
        wrong: Cures that hide the fault or compute another function.
    """

    name: str
    broken: Callable
    args: Callable[[], tuple]
    cause: str
    fixed: Callable
    fixed_args: Callable[[], tuple]
    fixed_scale: float
    intended: Callable
    near: Callable[[], tuple]
    dtype: str | None = "float32"
    loss_scale: float = 1024.0
    rtol: float = 1e-5
    wrong: tuple[str, ...] = ()

    @property
    def lines(self):
        """The acceptable line numbers of its file."""
        return lines_at_fault(self.broken.__code__.co_filename)[self.broken.__name__]

    def make(self):
        """Returns the broken function and its arguments."""
        return step(self.broken, self.dtype, self.loss_scale), self.args()

    def cured(self, dtype=None):
        """Returns the correct function and its arguments; in another precision than its own if `dtype` is given."""
        return step(self.fixed, self.dtype and (dtype or self.dtype), self.fixed_scale), self.fixed_args()


def step(program, dtype, loss_scale):
    if dtype is None:
        return program
    if dtype == "float32":
        return jax.value_and_grad(program)
    return amp.value_and_grad(amp.autocast(program, dtype), loss_scale=loss_scale)


@functools.cache
def lines_at_fault(file):
    lines = {}
    for number, line in enumerate(pathlib.Path(file).read_text().splitlines(), 1):
        if found := re.search(r"  # at fault: ([\w, ]+)$", line):
            for name in found[1].split(", "):
                lines.setdefault(name, set()).add(number)
    return lines


MODELS = {}


def model(broken, args, **fields):
    """Adds a `BrokenModel`. What is fixed is as in the broken program, which is also what is intended, if not given."""
    defaults = {
        "name": broken.__name__,
        "fixed": broken,
        "fixed_args": args,
        "fixed_scale": fields.get("loss_scale", BrokenModel.loss_scale),
        "intended": broken,
        "near": fields.get("fixed_args", args),
    }
    fields = {**defaults, **fields}
    MODELS[fields["name"]] = BrokenModel(broken=broken, args=args, **fields)


def normal(*shape, seed=0, scale=1.0):
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def uniform(*shape, seed=0, low=0.0, high=1.0):
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


# In float16, under autocast.


def cosine_after_product(params, images, texts):
    a, b = images @ params["image"], texts @ params["text"]
    norms = jnp.linalg.norm(a, axis=1, keepdims=True) * jnp.linalg.norm(b, axis=1, keepdims=True).T
    logits = (a @ b.T) / norms / 0.07  # at fault: cosine_after_product
    labels = jnp.arange(len(logits))
    return (cross_entropy(logits, labels).mean() + cross_entropy(logits.T, labels).mean()) / 2


def cosine_of_directions(params, images, texts):
    a, b = images @ params["image"], texts @ params["text"]
    a = a / jnp.linalg.norm(a, axis=1, keepdims=True)
    b = b / jnp.linalg.norm(b, axis=1, keepdims=True)
    logits = a @ b.T / 0.07
    labels = jnp.arange(len(logits))
    return (cross_entropy(logits, labels).mean() + cross_entropy(logits.T, labels).mean()) / 2


model(
    cosine_after_product,
    args=lambda: (
        {"image": normal(16, 16, seed=1, scale=0.25), "text": normal(8, 16, seed=2)},
        uniform(4, 16, seed=3, high=255.0),
        normal(4, 8, seed=4, scale=60.0),
    ),
    fixed=cosine_of_directions,
    dtype="float16",
    cause="The product of two embeddings that are not normalised passes 65504 before it is divided by their norms.",
    wrong=("clip the logits", "nan_to_num", "a smaller loss scale", "eps in the norms"),
)


def packed_sequences(params, x, segments, targets):
    q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
    allowed = (segments[:, None] == segments[None]) & (segments[None] > 0)
    scores = jnp.where(allowed, q @ k.T / jnp.sqrt(q.shape[-1]), -jnp.inf)  # at fault: packed_sequences
    weights = jax.nn.softmax(scores)  # at fault: packed_sequences
    errors = jnp.mean((weights @ v @ params["out"] - targets) ** 2, axis=-1)
    return jnp.mean(errors, where=segments > 0)


def packed_sequences_with_finite_mask(params, x, segments, targets):
    q, k, v = jnp.split(x @ params["qkv"], 3, axis=-1)
    allowed = (segments[:, None] == segments[None]) & (segments[None] > 0)
    scores = jnp.where(allowed, q @ k.T / jnp.sqrt(q.shape[-1]), -1e9)
    weights = jax.nn.softmax(scores)
    errors = jnp.mean((weights @ v @ params["out"] - targets) ** 2, axis=-1)
    return jnp.mean(errors, where=segments > 0)


def packed_args(segments=(1, 1, 2, 2, 0, 0)):
    params = {"qkv": normal(4, 12, seed=1, scale=0.5), "out": normal(4, 4, seed=2, scale=0.5)}
    return params, normal(6, 4, seed=3), np.array(segments, np.int32), normal(6, 4, seed=4)


model(
    packed_sequences,
    args=packed_args,
    near=lambda: packed_args((1, 1, 2, 2, 3, 3)),
    fixed=packed_sequences_with_finite_mask,
    dtype="float16",
    cause="Queries of the padding (segment 0) may attend to no key: a softmax of a row of -inf is NaN.",
    wrong=("nan_to_num of the weights alone (gradients stay NaN)", "let real queries attend to the padding"),
)


def t5_feed_forward(params, x, labels):
    h = x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    hidden = jax.nn.gelu(h @ params["wi_0"]) * (h @ params["wi_1"])  # at fault: t5_feed_forward
    x = x + hidden @ params["wo"]  # at fault: t5_feed_forward
    x = x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return jnp.mean(cross_entropy(x @ params["head"], labels))


def t5_feed_forward_in_full_precision(params, x, labels):
    h = x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    gate, linear = h @ params["wi_0"], h @ params["wi_1"]
    with amp.full_precision():
        x = x + (jax.nn.gelu(gate) * linear) @ params["wo"]
    x = x * lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return jnp.mean(cross_entropy(x @ params["head"], labels))


model(
    t5_feed_forward,
    args=lambda: (
        {
            "wi_0": normal(8, 16, seed=1, scale=100.0),
            "wi_1": normal(8, 16, seed=2, scale=100.0),
            "wo": normal(16, 8, seed=3, scale=0.1),
            "head": normal(8, 5, seed=4),
        },
        normal(6, 8, seed=5),
        np.array([0, 1, 2, 3, 4, 0]),
    ),
    fixed=t5_feed_forward_in_full_precision,
    dtype="float16",
    cause="The gated hidden units of a pretrained bfloat16 model are products of two numbers of about 300.",
    wrong=("clamp the hidden units to 65504", "nan_to_num", "a smaller loss scale"),
)


def one_large_kernel(params, x, labels):
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"][None])  # at fault: one_large_kernel
    logits = x @ params[-1]["kernel"] + params[-1]["bias"][None]
    return jnp.mean(cross_entropy(logits, labels))


def mlp_args(scales):
    kernels = [normal(8, 8, seed=i, scale=s / np.sqrt(8)) for i, s in enumerate(scales)]
    params = [{"kernel": w, "bias": np.zeros(8, np.float32)} for w in kernels]
    return params, normal(6, 8, seed=9, scale=5.0), np.arange(6) % 8


model(
    one_large_kernel,
    args=lambda: mlp_args((1.4, 1e4, 1.4, 1.0)),  # at fault: one_large_kernel
    fixed_args=lambda: mlp_args((1.4, 1.4, 1.4, 1.0)),
    dtype="float16",
    cause="The kernel of layer 1 was initialised 1e4 times too large.",
    wrong=("run the layer in float32: it trains no better", "clip the activations", "a smaller loss scale"),
)


def summed_loss(params, tokens, labels):
    h = jnp.tanh(params["embedding"][tokens])
    logits = h @ params["head"]  # at fault: summed_loss
    return jnp.sum(cross_entropy(logits, labels))  # at fault: summed_loss


model(
    summed_loss,
    args=lambda: (
        {"embedding": normal(7, 4, seed=1, scale=2.0), "head": normal(4, 7, seed=2, scale=0.1)},
        np.arange(64) % 7,
        np.arange(64) % 2,
    ),
    dtype="float16",
    loss_scale=2.0**15,
    fixed_scale=2.0**7,
    cause="The loss is summed over the tokens, so the gradient of the head, scaled by 2**15, passes 65504.",
    wrong=("clip the gradients after they are unscaled", "nan_to_num of the gradients", "clip the logits"),
)


def grpo(params, states, actions, rewards, old_logp):
    logits = jnp.tanh(states @ params["hidden"]) @ params["out"]
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[..., None], axis=-1)[..., 0]
    baseline, spread = rewards.mean(1, keepdims=True), rewards.std(1, keepdims=True)
    advantages = (rewards - baseline) / spread  # at fault: grpo
    ratio = jnp.exp(logp - old_logp)
    return -jnp.mean(jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages))


def grpo_without_signal(params, states, actions, rewards, old_logp):
    logits = jnp.tanh(states @ params["hidden"]) @ params["out"]
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[..., None], axis=-1)[..., 0]
    baseline, spread = rewards.mean(1, keepdims=True), rewards.std(1, keepdims=True)
    advantages = (rewards - baseline) / jnp.where(spread > 0, spread, 1.0)
    ratio = jnp.exp(logp - old_logp)
    return -jnp.mean(jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages))


def grpo_args(second_group=(1.0, 1.0, 1.0, 1.0)):
    params = {"hidden": normal(3, 8, seed=1), "out": normal(8, 3, seed=2)}
    actions = np.array([[0, 1, 2, 0], [1, 1, 2, 0]])
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], second_group], np.float32)
    return params, normal(2, 4, 3, seed=3), actions, rewards, uniform(2, 4, seed=4, low=-1.2, high=-0.9)


model(
    grpo,
    args=grpo_args,
    near=lambda: grpo_args((1.0, 1.0, 0.0, 1.0)),
    fixed=grpo_without_signal,
    dtype="float16",
    cause="All answers to one prompt have the same reward: its advantages are 0 / 0.",
    wrong=("drop the normalisation", "nan_to_num of the loss", "run the division in float32", "add 1 to the spread"),
)


def fill_value(params, table, targets):
    h = jax.nn.relu(table @ params["hidden"])  # at fault: fill_value
    prediction = (h @ params["out"])[:, 0]
    return jnp.mean((prediction - targets) ** 2)


def ocean_args(fill):
    table = normal(6, 4, seed=1)
    table[:, 2] += 10
    table[[1, 4], 2] = fill
    return {"hidden": normal(4, 8, seed=2), "out": normal(8, 1, seed=3, scale=0.3)}, table, normal(6, seed=4)


model(
    fill_value,
    args=lambda: ocean_args(9.96921e36),  # at fault: fill_value
    fixed_args=lambda: ocean_args(10.0),
    dtype="float16",
    cause="Two cells of column 2 hold NetCDF's fill value for missing data, 1e37.",
    wrong=("run the first layer in float32", "clip the activations", "clip the gradients", "a smaller loss scale"),
)


# In float32.


def ctc(params, frames, labels):
    logp = jax.nn.log_softmax(frames @ params)[:, labels]
    skip = jnp.concatenate([jnp.zeros(2, bool), (labels[2:] != labels[:-2]) & (labels[2:] > 0)])

    def logadd(a, b):
        m = jnp.maximum(a, b)
        return m + jnp.log(jnp.exp(a - m) + jnp.exp(b - m))  # at fault: ctc

    def step(alpha, logp):
        one = jnp.pad(alpha[:-1], (1, 0), constant_values=-jnp.inf)  # at fault: ctc
        two = jnp.where(skip, jnp.pad(alpha[:-2], (2, 0), constant_values=-jnp.inf), -jnp.inf)  # at fault: ctc
        return logadd(logadd(alpha, one), two) + logp, None

    alpha = jnp.where(jnp.arange(len(labels)) < 2, logp[0], -jnp.inf)  # at fault: ctc
    alpha, _ = lax.scan(step, alpha, logp[1:])
    return -logadd(alpha[-1], alpha[-2])


def ctc_from_finite_start(params, frames, labels):
    logp = jax.nn.log_softmax(frames @ params)[:, labels]
    skip = jnp.concatenate([jnp.zeros(2, bool), (labels[2:] != labels[:-2]) & (labels[2:] > 0)])

    def logadd(a, b):
        m = jnp.maximum(a, b)
        return m + jnp.log(jnp.exp(a - m) + jnp.exp(b - m))

    def step(alpha, logp):
        one = jnp.pad(alpha[:-1], (1, 0), constant_values=-1e30)
        two = jnp.where(skip, jnp.pad(alpha[:-2], (2, 0), constant_values=-1e30), -1e30)
        return logadd(logadd(alpha, one), two) + logp, None

    alpha = jnp.where(jnp.arange(len(labels)) < 2, logp[0], -1e30)
    alpha, _ = lax.scan(step, alpha, logp[1:])
    return -logadd(alpha[-1], alpha[-2])


def optax_ctc(params, frames, labels):
    with jax.numpy_dtype_promotion("standard"):
        logits, labels = (frames @ params)[None], labels[None, 1::2]
        return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, jnp.zeros(labels.shape))[0]


model(
    ctc,
    args=lambda: (normal(5, 4, seed=1), normal(6, 5, seed=2), np.array([0, 2, 0, 3, 0])),
    fixed=ctc_from_finite_start,
    intended=optax_ctc,
    cause="Prefixes that cannot be reached have log-probability -inf, and -inf - -inf is NaN.",
    wrong=("nan_to_num of alpha", "log(x + eps) of the sum", "start all prefixes at log-probability 0"),
)


def von_mises(params, x, angles):
    def nll(x, angle):
        mean, log_kappa = x @ params
        kappa = jnp.exp(log_kappa)
        log_normaliser = jnp.log(2 * jnp.pi * jax.scipy.special.i0(kappa))  # at fault: von_mises
        return log_normaliser - kappa * jnp.cos(angle - mean)

    return jnp.mean(jax.vmap(nll)(x, angles))


def von_mises_scaled(params, x, angles):
    def nll(x, angle):
        mean, log_kappa = x @ params
        kappa = jnp.exp(log_kappa)
        log_normaliser = jnp.log(2 * jnp.pi * jax.scipy.special.i0e(kappa)) + kappa
        return log_normaliser - kappa * jnp.cos(angle - mean)

    return jnp.mean(jax.vmap(nll)(x, angles))


model(
    von_mises,
    args=lambda: (np.array([[0.3, 1.0], [0.1, 2.0]], np.float32), uniform(4, 2, seed=1, low=0.5, high=2.0), normal(4)),
    fixed=von_mises_scaled,
    cause="The Bessel function I0(kappa) overflows for kappa > 91, its logarithm is about kappa.",
    wrong=("clip kappa at 90", "log(i0 + eps)", "minimum of i0 and the largest float32"),
)


def min_snr(params, x, noise, t):
    s = jnp.sqrt(jnp.cumprod(1 - jnp.linspace(0.01, 0.3, 20)))
    s = (s - s[-1]) * s[0] / (s[0] - s[-1])  # "Common diffusion noise schedules are flawed": zero terminal SNR
    alpha_bar = s[t][:, None] ** 2
    snr = alpha_bar / (1 - alpha_bar)
    weight = jnp.minimum(snr, 5.0) / snr  # at fault: min_snr
    noisy = jnp.sqrt(alpha_bar) * x + jnp.sqrt(1 - alpha_bar) * noise
    return jnp.mean(weight * (jnp.tanh(noisy @ params["hidden"]) @ params["out"] - noise) ** 2)


def min_snr_with_limit(params, x, noise, t):
    s = jnp.sqrt(jnp.cumprod(1 - jnp.linspace(0.01, 0.3, 20)))
    s = (s - s[-1]) * s[0] / (s[0] - s[-1])
    alpha_bar = s[t][:, None] ** 2
    snr = alpha_bar / (1 - alpha_bar)
    weight = 5.0 / jnp.maximum(snr, 5.0)
    noisy = jnp.sqrt(alpha_bar) * x + jnp.sqrt(1 - alpha_bar) * noise
    return jnp.mean(weight * (jnp.tanh(noisy @ params["hidden"]) @ params["out"] - noise) ** 2)


def diffusion_args(t=(0, 7, 19, 12)):
    params = {"hidden": normal(3, 8, seed=1), "out": normal(8, 3, seed=2)}
    return params, normal(4, 3, seed=3), normal(4, 3, seed=4), np.array(t)


model(
    min_snr,
    args=diffusion_args,
    near=lambda: diffusion_args((0, 7, 18, 12)),
    fixed=min_snr_with_limit,
    cause="The signal-to-noise ratio of the last step is 0, and the weight min(snr, 5) / snr is 0 / 0; its limit is 1.",
    wrong=("a weight of 0 at the last step", "snr + 1e-2", "nan_to_num of the loss"),
)


def gcn(params, x, adjacency, labels):
    scale = jnp.sum(adjacency, axis=1, keepdims=True) ** -0.5  # at fault: gcn
    propagate = scale * adjacency * scale.T  # at fault: gcn
    h = jax.nn.relu(propagate @ x @ params["hidden"])
    return jnp.mean(cross_entropy(propagate @ h @ params["out"], labels))


def gcn_with_isolated_nodes(params, x, adjacency, labels):
    degree = jnp.sum(adjacency, axis=1, keepdims=True)
    scale = jnp.where(degree > 0, jnp.where(degree > 0, degree, 1.0) ** -0.5, 0.0)
    propagate = scale * adjacency * scale.T
    h = jax.nn.relu(propagate @ x @ params["hidden"])
    return jnp.mean(cross_entropy(propagate @ h @ params["out"], labels))


def graph_args(edges=((0, 1), (1, 2), (2, 3))):
    adjacency = np.zeros((5, 5), np.float32)
    for i, j in edges:
        adjacency[i, j] = adjacency[j, i] = 1
    params = {"hidden": normal(3, 6, seed=1), "out": normal(6, 2, seed=2)}
    return params, normal(5, 3, seed=3), adjacency, np.array([0, 1, 0, 1, 1])


model(
    gcn,
    args=graph_args,
    near=lambda: graph_args(((0, 1), (1, 2), (2, 3), (3, 4))),
    fixed=gcn_with_isolated_nodes,
    cause="Node 4 has no edge: its degree to the power -0.5 is inf, and inf times 0 is NaN.",
    wrong=("degree + 1 without self loops", "nan_to_num of the logits", "a large eps in the degree"),
)


def lars(params, x, y):
    def loss_fn(params):
        return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] - y) ** 2)

    def update(w, g):
        trust = jnp.linalg.norm(w) / jnp.linalg.norm(g)  # at fault: lars
        return w - 0.01 * trust * g  # at fault: lars

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(update, params, grads), loss


def lars_with_zero_norms(params, x, y):
    def loss_fn(params):
        return jnp.mean((jnp.tanh(x @ params["hidden"]) @ params["out"] - y) ** 2)

    def update(w, g):
        w_norm, g_norm = jnp.linalg.norm(w), jnp.linalg.norm(g)
        trust = jnp.where((w_norm > 0) & (g_norm > 0), w_norm / jnp.where(g_norm > 0, g_norm, 1.0), 1.0)
        return w - 0.01 * trust * g

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return jax.tree.map(update, params, grads), loss


def lars_args(scale=0.0):
    return (
        {"hidden": normal(3, 4, seed=1), "out": normal(4, 1, seed=2, scale=scale)},
        normal(5, 3),
        normal(5, 1, seed=3),
    )


model(
    lars,
    args=lars_args,
    near=lambda: lars_args(0.5),
    fixed=lars_with_zero_norms,
    dtype=None,
    cause="The output layer starts at 0, so the gradient of the layer before it is 0, and its trust ratio |w| / 0.",
    wrong=(
        "an eps that leaves a trust ratio of 1e8",
        "nan_to_num of the parameters",
        "a trust ratio of 0 for new layers",
    ),
)


def batch_norm(params, x, y):
    mean = jnp.mean(x, axis=0, keepdims=True)
    var = jnp.mean(x**2, axis=0, keepdims=True) - mean**2  # at fault: batch_norm
    x = (x - mean) / jnp.sqrt(var + 1e-5) * params["scale"] + params["bias"]  # at fault: batch_norm
    return jnp.mean((x @ params["out"] - y) ** 2)


def batch_norm_of_differences(params, x, y):
    x = x - jnp.mean(x, axis=0, keepdims=True)
    x = x - jnp.mean(x, axis=0, keepdims=True)
    x = x / jnp.sqrt(jnp.mean(x**2, axis=0, keepdims=True) + 1e-5) * params["scale"] + params["bias"]
    return jnp.mean((x @ params["out"] - y) ** 2)


model(
    batch_norm,
    args=lambda: (
        {"scale": np.ones((1, 8), np.float32), "bias": np.zeros((1, 8), np.float32), "out": normal(8, 1, seed=1)},
        101325 + normal(16, 8, seed=2),
        normal(16, 1, seed=3),
    ),
    fixed=batch_norm_of_differences,
    cause="Of pressures of 101325 Pa that vary by 1 Pa, E[x**2] - E[x]**2 is rounding error, which is negative.",
    wrong=("maximum(var, 0): then x is divided by sqrt(eps)", "abs(var)", "a larger eps"),
)


def ciou(params, features, boxes):
    w, h = jax.nn.relu(features @ params["box"] + params["bias"]).T
    inter = jnp.minimum(w, boxes[:, 0]) * jnp.minimum(h, boxes[:, 1])
    iou = inter / (w * h + boxes[:, 0] * boxes[:, 1] - inter)
    v = 4 / jnp.pi**2 * (jnp.arctan(boxes[:, 0] / boxes[:, 1]) - jnp.arctan(w / h)) ** 2  # at fault: ciou
    alpha = lax.stop_gradient(v / (1 - iou + v))
    return jnp.mean(1 - iou + alpha * v)


def ciou_of_angles(params, features, boxes):
    w, h = jax.nn.relu(features @ params["box"] + params["bias"]).T
    inter = jnp.minimum(w, boxes[:, 0]) * jnp.minimum(h, boxes[:, 1])
    iou = inter / (w * h + boxes[:, 0] * boxes[:, 1] - inter)
    v = 4 / jnp.pi**2 * (jnp.arctan2(boxes[:, 0], boxes[:, 1]) - jnp.arctan2(w, h)) ** 2
    alpha = lax.stop_gradient(v / (1 - iou + v))
    return jnp.mean(1 - iou + alpha * v)


def box_args(low=-1.0):
    features = np.array([[1.0, 0.5], [0.5, low], [0.2, 0.4]], np.float32)
    params = {"box": np.eye(2, dtype=np.float32), "bias": np.full((1, 2), 0.1, np.float32)}
    return params, features, uniform(3, 2, low=0.5)


model(
    ciou,
    args=box_args,
    near=lambda: box_args(1.0),
    fixed=ciou_of_angles,
    cause="A predicted box of height 0 (ReLU) gives arctan(w / 0): the value is pi / 2, the gradient 0 times inf.",
    wrong=("nan_to_num of the gradients", "where after the division", "drop the aspect term", "add 1 to the height"),
)


def slerp(params, times, targets):
    q0, q1 = (q / jnp.linalg.norm(q) for q in (params["start"], params["end"]))

    def at(t):
        theta = jnp.arccos(jnp.clip(jnp.dot(q0, q1), -1.0, 1.0))  # at fault: slerp
        return (jnp.sin((1 - t) * theta) * q0 + jnp.sin(t * theta) * q1) / jnp.sin(theta)  # at fault: slerp

    return jnp.mean((jax.vmap(at)(times) - targets) ** 2)


def slerp_or_lerp(params, times, targets):
    q0, q1 = (q / jnp.linalg.norm(q) for q in (params["start"], params["end"]))

    def at(t):
        dot = jnp.dot(q0, q1)
        close = dot > 0.9995
        theta = jnp.arccos(jnp.where(close, 0.0, dot))
        q = (jnp.sin((1 - t) * theta) * q0 + jnp.sin(t * theta) * q1) / jnp.sin(theta)
        lerp = (1 - t) * q0 + t * q1
        return jnp.where(close, lerp / jnp.linalg.norm(lerp), q)

    return jnp.mean((jax.vmap(at)(times) - targets) ** 2)


def key_frame_args(moved=0.0):
    identity = np.array([1.0, 0.0, 0.0, 0.0], np.float32)
    params = {"start": identity, "end": identity + np.float32(moved) * np.array([0, 1, -1, 0.5], np.float32)}
    return params, uniform(4, seed=1), identity[None] + normal(4, 4, seed=2, scale=0.2)


model(
    slerp,
    args=key_frame_args,
    near=lambda: key_frame_args(1e-3),
    fixed=slerp_or_lerp,
    rtol=1e-3,
    cause="Both key frames start at the identity: the angle is 0, sin(0) / sin(0) is NaN, as is arccos's slope at 1.",
    wrong=("clip at 1 - 1e-7, which is 1 - 1.2e-7 and gives no gradient", "sin(theta) + eps: the result is 0"),
)


def whitening(params, x):
    h = jax.nn.relu(x @ params["encoder"])
    h = h - jnp.mean(h, axis=0, keepdims=True)
    values, vectors = jnp.linalg.eigh(h.T @ h / len(h) + 1e-2 * jnp.eye(h.shape[1]))  # at fault: whitening
    white = h @ (vectors * values[None] ** -0.5 @ vectors.T)
    return jnp.mean((white @ params["decoder"] - x) ** 2)


def whitening_by_newton_schulz(params, x):
    h = jax.nn.relu(x @ params["encoder"])
    h = h - jnp.mean(h, axis=0, keepdims=True)
    eye = jnp.eye(h.shape[1])
    y, z = h.T @ h / len(h) + 1e-2 * eye, eye
    size = lax.stop_gradient(jnp.linalg.norm(y))
    y = y / size
    for _ in range(15):
        half = (3 * eye - z @ y) / 2
        y, z = y @ half, half @ z
    return jnp.mean((h @ z / jnp.sqrt(size) @ params["decoder"] - x) ** 2)


def whitening_args(dead=-2.0):
    encoder = normal(3, 5, seed=1)
    encoder[:, 3:] = dead * np.abs(encoder[:, 3:]) if dead < 0 else encoder[:, 3:]
    return {"encoder": encoder, "decoder": normal(5, 3, seed=2)}, uniform(8, 3, seed=3)


model(
    whitening,
    args=whitening_args,
    near=lambda: whitening_args(0.0),
    fixed=whitening_by_newton_schulz,
    cause="Two dead ReLUs give equal eigenvalues, and the derivative of eigh divides by their difference.",
    wrong=(
        "a larger eps on the diagonal: it moves all eigenvalues alike",
        "nan_to_num",
        "stop_gradient of the vectors",
    ),
)


def wkv(params, x, y):
    decay = jnp.exp(-jnp.exp(params["decay"]))

    def step(state, kv):
        (numerator, denominator), (k, v) = state, kv
        e = jnp.exp(k)  # at fault: wkv
        out = (numerator + e * v) / (denominator + e)  # at fault: wkv
        return (decay * numerator + e * v, decay * denominator + e), out

    zero = jnp.zeros_like(decay)
    _, out = lax.scan(step, (zero, zero), (x @ params["key"], x @ params["value"]))
    return jnp.mean((out - y) ** 2)


def wkv_with_running_maximum(params, x, y):
    log_decay = -jnp.exp(params["decay"])

    def step(state, kv):
        (numerator, denominator, largest), (k, v) = state, kv
        m = jnp.maximum(largest, k)
        past, e = jnp.exp(largest - m), jnp.exp(k - m)
        out = (past * numerator + e * v) / (past * denominator + e)
        m = jnp.maximum(largest + log_decay, k)
        past, e = jnp.exp(largest + log_decay - m), jnp.exp(k - m)
        return (past * numerator + e * v, past * denominator + e, m), out

    zero = jnp.zeros_like(log_decay)
    _, out = lax.scan(step, (zero, zero, zero - 1e30), (x @ params["key"], x @ params["value"]))
    return jnp.mean((out - y) ** 2)


model(
    wkv,
    args=lambda: (
        {"decay": normal(4, seed=1), "key": normal(3, 4, seed=2, scale=60.0), "value": normal(3, 4, seed=3)},
        normal(6, 3, seed=4),
        normal(6, 4, seed=5),
    ),
    fixed=wkv_with_running_maximum,
    cause="exp(k) of keys above 88.7 overflows in the numerator and the denominator: inf / inf.",
    wrong=("clip k at 80", "eps in the denominator", "normalise by the maximum of the last step alone"),
)


@jax.custom_vjp
def mish(x):
    return x * jnp.tanh(jax.nn.softplus(x))


def mish_fwd(x):
    return mish(x), x


def mish_bwd(x, g):
    e = jnp.exp(x)
    omega = e**3 + 4 * e**2 + (6 + 4 * x) * e + 4 * (1 + x)  # at fault: memory_efficient_mish
    delta = 1 + (e + 1) ** 2
    return (g * e * omega / delta**2,)  # at fault: memory_efficient_mish


mish.defvjp(mish_fwd, mish_bwd)


def memory_efficient_mish(params, x, y):
    # JAX knows the ops of a custom rule by the line that calls it.
    return jnp.mean((mish(x @ params["hidden"]) @ params["out"] - y) ** 2)  # at fault: memory_efficient_mish


def mish_by_autodiff(params, x, y):
    h = x @ params["hidden"]
    return jnp.mean(((h * jnp.tanh(jax.nn.softplus(h))) @ params["out"] - y) ** 2)


model(
    memory_efficient_mish,
    args=lambda: (
        {"hidden": normal(3, 6, seed=1, scale=20.0), "out": normal(6, 1, seed=2, scale=0.1)},
        normal(5, 3, seed=3),
        normal(5, 1, seed=4),
    ),
    fixed=mish_by_autodiff,
    cause="The backward rule is the paper's fraction of exponentials up to exp(4 * x): inf / inf for x > 22.",
    wrong=("clip the activations in the forward pass", "nan_to_num of the gradient: 0 where it is 1"),
)


def uint8_lengths(params, x, y, mask, sequence):
    errors = (x @ params - y) ** 2 * mask.astype(x.dtype)
    lengths = jax.ops.segment_sum(mask, sequence, 2)  # at fault: uint8_lengths
    return jnp.mean(jax.ops.segment_sum(errors, sequence, 2) / lengths.astype(x.dtype))  # at fault: uint8_lengths


def int32_lengths(params, x, y, mask, sequence):
    errors = (x @ params - y) ** 2 * mask.astype(x.dtype)
    lengths = jax.ops.segment_sum(mask.astype(jnp.int32), sequence, 2)
    return jnp.mean(jax.ops.segment_sum(errors, sequence, 2) / lengths.astype(x.dtype))


def long_sequence_args(length=256):
    mask = np.ones(300, np.uint8)
    mask[length:256] = 0
    return normal(2, seed=1), normal(300, 2, seed=2), normal(300, seed=3), mask, np.repeat([0, 1], [256, 44])


model(
    uint8_lengths,
    args=long_sequence_args,
    near=lambda: long_sequence_args(255),
    fixed=int32_lengths,
    cause="The mask is uint8, and so is the sum of its 256 ones, which wraps to 0.",
    wrong=("where(lengths > 0, lengths, 1): the loss is 256 times too large", "eps in the division"),
)


def diverging_descent(params, x, y):
    optimizer = optax.sgd(0.05)  # at fault: diverging_descent

    def step(carry, _):
        params, state = carry
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(params)  # at fault: diverging_descent
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), state), loss  # at fault: diverging_descent

    (params, _), losses = lax.scan(step, (params, optimizer.init(params)), length=60)
    return params, losses


def stable_descent(params, x, y):
    optimizer = optax.sgd(0.001)

    def step(carry, _):
        params, state = carry
        loss, grads = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(params)
        updates, state = optimizer.update(grads, state)
        return (optax.apply_updates(params, updates), state), loss

    (params, _), losses = lax.scan(step, (params, optimizer.init(params)), length=60)
    return params, losses


def descent_by_hand(params, x, y):
    losses = []
    for _ in range(60):
        error = x @ params - y
        losses.append(jnp.mean(error**2))
        params = params - 0.002 * x.T @ error / len(x)
    return params, jnp.stack(losses)


model(
    diverging_descent,
    args=lambda: (normal(3, seed=1), normal(8, 3, seed=2, scale=15.0), normal(8, seed=3)),
    fixed=stable_descent,
    intended=descent_by_hand,
    dtype=None,
    cause="The learning rate is above 2 / the largest curvature of features that nobody standardised.",
    wrong=("nan_to_num of the parameters", "float64: it only takes longer", "eps in the loss"),
)


def tanh_gaussian(params, states, noise, values):
    h = jnp.tanh(states @ params["hidden"])
    mean, log_std = jnp.split(h @ params["heads"], 2, axis=-1)
    before = mean + jnp.exp(jnp.clip(log_std, -5, 2)) * noise
    action = jnp.tanh(before)
    log_prob = jnp.sum(-0.5 * noise**2 - log_std - jnp.log(1 - action**2), axis=-1)  # at fault: tanh_gaussian
    return jnp.mean(0.2 * log_prob - jnp.sum(action * values, axis=-1))


def tanh_gaussian_by_softplus(params, states, noise, values):
    h = jnp.tanh(states @ params["hidden"])
    mean, log_std = jnp.split(h @ params["heads"], 2, axis=-1)
    before = mean + jnp.exp(jnp.clip(log_std, -5, 2)) * noise
    squash = 2 * (jnp.log(2.0) - before - jax.nn.softplus(-2 * before))
    log_prob = jnp.sum(-0.5 * noise**2 - log_std - squash, axis=-1)
    return jnp.mean(0.2 * log_prob - jnp.sum(jnp.tanh(before) * values, axis=-1))


def actor_args(scale=15.0):
    params = {"hidden": normal(3, 8, seed=1), "heads": normal(8, 4, seed=2) * np.float32([[scale, scale, 0.1, 0.1]])}
    return params, normal(6, 3, seed=3), normal(6, 2, seed=4), normal(6, 2, seed=5)


model(
    tanh_gaussian,
    args=actor_args,
    near=lambda: actor_args(1.0),
    fixed=tanh_gaussian_by_softplus,
    cause="tanh(u) rounds to 1 for u above 9, and log(1 - 1) is -inf.",
    wrong=("log(1 - a**2 + 1) or another large eps", "clip the log-probability", "nan_to_num"),
)


def triplet(params, x, labels):
    e = x @ params
    squares = jnp.sum(e**2, axis=1)
    distances = jnp.sqrt(jnp.maximum(squares[:, None] + squares[None] - 2 * e @ e.T, 0.0))  # at fault: triplet
    same = labels[:, None] == labels[None]
    positive = jnp.max(jnp.where(same, distances, 0.0), axis=1)
    negative = jnp.min(jnp.where(same, 1e9, distances), axis=1)
    return jnp.mean(jax.nn.relu(positive - negative + 0.5))


def triplet_with_safe_root(params, x, labels):
    e = x @ params
    squares = jnp.sum((e[:, None] - e[None]) ** 2, axis=-1)
    distances = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)
    same = labels[:, None] == labels[None]
    positive = jnp.max(jnp.where(same, distances, 0.0), axis=1)
    negative = jnp.min(jnp.where(same, 1e9, distances), axis=1)
    return jnp.mean(jax.nn.relu(positive - negative + 0.5))


def triplet_with_eps(params, x, labels):
    e = x @ params
    distances = jnp.sqrt(jnp.sum((e[:, None] - e[None]) ** 2, axis=-1) + 1e-14)
    same = labels[:, None] == labels[None]
    hardest = jnp.max(jnp.where(same, distances, 0.0), axis=1) - jnp.min(jnp.where(same, 1e9, distances), axis=1)
    return jnp.mean(jax.nn.relu(hardest + 0.5))


model(
    triplet,
    args=lambda: (np.eye(3, dtype=np.float32), np.round(normal(6, 3, seed=1) * 4) / 4, np.array([0, 0, 1, 1, 2, 3])),
    near=lambda: (np.eye(3, dtype=np.float32), normal(6, 3, seed=1), np.array([0, 0, 1, 1, 2, 2])),
    fixed=triplet_with_safe_root,
    intended=triplet_with_eps,
    cause="The distance of a point to itself is the root of 0, whose derivative is infinite.",
    wrong=("nan_to_num of the gradients", "drop the root", "an eps of 1"),
)


def focal(params, x, labels):
    p = jax.nn.sigmoid((x @ params)[:, 0])
    positive = -0.25 * (1 - p) ** 2 * jnp.log(p)  # at fault: focal
    negative = -0.75 * p**2 * jnp.log(1 - p)  # at fault: focal
    return jnp.mean(jnp.where(labels > 0, positive, negative))


def focal_of_logits(params, x, labels):
    logits = (x @ params)[:, 0]
    p = jax.nn.sigmoid(logits)
    positive = -0.25 * (1 - p) ** 2 * jax.nn.log_sigmoid(logits)
    negative = -0.75 * p**2 * jax.nn.log_sigmoid(-logits)
    return jnp.mean(jnp.where(labels > 0, positive, negative))


def detection_args(scale=60.0):
    return normal(3, 1, seed=1, scale=scale), normal(8, 3, seed=2), np.array([0, 1, 0, 0, 1, 0, 1, 1])


model(
    focal,
    args=detection_args,
    near=lambda: detection_args(1.0),
    fixed=focal_of_logits,
    cause="The sigmoid of a logit of 40 rounds to 1, and of -120 to 0; their logarithms are -inf.",
    wrong=("clip the probabilities at 1e-3", "nan_to_num of the loss", "where on the logarithm alone"),
)


def mixture_density(params, x, y):
    h = jnp.tanh(x @ params["hidden"])
    weights = jax.nn.softmax(h @ params["weights"])
    means, sigmas = h @ params["means"], jnp.exp(h @ params["sigmas"])
    densities = jnp.exp(-0.5 * ((y[:, None] - means) / sigmas) ** 2) / sigmas
    return -jnp.mean(jnp.log(jnp.sum(weights * densities, axis=-1)))  # at fault: mixture_density


def mixture_density_of_logarithms(params, x, y):
    h = jnp.tanh(x @ params["hidden"])
    weights = jax.nn.log_softmax(h @ params["weights"])
    means, log_sigmas = h @ params["means"], h @ params["sigmas"]
    densities = -0.5 * ((y[:, None] - means) / jnp.exp(log_sigmas)) ** 2 - log_sigmas
    return -jnp.mean(jax.nn.logsumexp(weights + densities, axis=-1))


def mixture_args(far=40.0):
    params = {name: normal(4, 3, seed=i, scale=0.3) for i, name in enumerate(("weights", "means", "sigmas"))}
    y = normal(6, seed=8)
    y[2] = far
    return {**params, "hidden": normal(2, 4, seed=9)}, normal(6, 2, seed=7), y


model(
    mixture_density,
    args=mixture_args,
    near=lambda: mixture_args(1.0),
    fixed=mixture_density_of_logarithms,
    cause="A target far from all components has density exp(-800) = 0, and its logarithm is -inf.",
    wrong=("log(x + eps): the outlier has no gradient", "clip the loss", "drop the outlier"),
)


def distillation(params, x, teacher):
    student = jax.nn.log_softmax(x @ params)
    return jnp.mean(jnp.sum(teacher * (jnp.log(teacher) - student), axis=-1))  # at fault: distillation


def distillation_by_xlogy(params, x, teacher):
    student = jax.nn.log_softmax(x @ params)
    return jnp.mean(jnp.sum(jax.scipy.special.xlogy(teacher, teacher) - teacher * student, axis=-1))


def teacher_args(smallest=0.0):
    teacher = np.random.default_rng(4).dirichlet(np.ones(5), 6).astype(np.float32)
    teacher[1] = [smallest, 1 - 2 * smallest, smallest, 0.0 + smallest, 0.0 + smallest]
    return normal(3, 5, seed=1), normal(6, 3, seed=2), teacher / teacher.sum(-1, keepdims=True)


model(
    distillation,
    args=teacher_args,
    near=lambda: teacher_args(0.01),
    fixed=distillation_by_xlogy,
    cause="A probability of the teacher that is 0 gives 0 * log(0).",
    wrong=("nan_to_num of the loss, which drops the row", "a large eps in the logarithm"),
)


def gem_pooling(params, images, labels):
    maps = jax.nn.relu(jnp.einsum("nhwc,cd->nhwd", images, params["kernel"]))
    pooled = jnp.mean(maps ** params["p"], axis=(1, 2)) ** (1 / params["p"])  # at fault: gem_pooling
    return jnp.mean(cross_entropy(pooled @ params["head"], labels))


def gem_pooling_with_least(params, images, labels):
    maps = jnp.maximum(jnp.einsum("nhwc,cd->nhwd", images, params["kernel"]), 1e-6)
    pooled = jnp.mean(maps ** params["p"], axis=(1, 2)) ** (1 / params["p"])
    return jnp.mean(cross_entropy(pooled @ params["head"], labels))


def pooling_args(dead=True):
    kernel = normal(3, 6, seed=1)
    images = uniform(4, 3, 3, 3, seed=3, low=0.1)
    kernel = np.abs(kernel) * np.where(dead, np.float32([1, 1, -1, 1, 1, 1]), np.float32(1))
    return {"kernel": kernel, "p": np.float32(3.0), "head": normal(6, 4, seed=2)}, images, np.array([0, 1, 2, 3])


model(
    gem_pooling,
    args=pooling_args,
    near=lambda: pooling_args(False),
    fixed=gem_pooling_with_least,
    rtol=1e-3,
    cause="A feature map of zeros: the root of a mean of 0 has an infinite derivative.",
    wrong=("nan_to_num of the gradients", "p as a constant", "an eps of 1 in the mean"),
)


def sinkhorn(params, x, y):
    cost = jnp.sum(((x @ params)[:, None] - y[None]) ** 2, axis=-1)
    kernel = jnp.exp(-cost / 0.01)
    u = v = jnp.ones(len(x))
    for _ in range(10):
        u = 1 / len(x) / (kernel @ v)  # at fault: sinkhorn
        v = 1 / len(y) / (kernel.T @ u)
    return jnp.sum(u[:, None] * kernel * v[None] * cost)


def sinkhorn_of_logarithms(params, x, y):
    cost = jnp.sum(((x @ params)[:, None] - y[None]) ** 2, axis=-1)
    log_kernel = -cost / 0.01
    f = g = jnp.zeros(len(x))
    for _ in range(10):
        f = -jnp.log(len(x)) - jax.nn.logsumexp(log_kernel + g[None], axis=1)
        g = -jnp.log(len(y)) - jax.nn.logsumexp(log_kernel + f[:, None], axis=0)
    return jnp.sum(jnp.exp(f[:, None] + log_kernel + g[None]) * cost)


def transport_args(scale=1.0):
    return np.eye(2, dtype=np.float32), normal(5, 2, seed=1, scale=scale), normal(5, 2, seed=2, scale=scale)


model(
    sinkhorn,
    args=transport_args,
    near=lambda: transport_args(0.1),
    fixed=sinkhorn_of_logarithms,
    cause="The kernel exp(-cost / 0.01) is 0 in a whole row, and 1 / 0 is inf.",
    wrong=("eps in the divisor: the plan is 0 or huge", "a larger regularisation", "nan_to_num"),
)


def rodrigues(params, points, targets):
    angle = jnp.linalg.norm(params["rotation"])  # at fault: rodrigues
    k = params["rotation"] / angle  # at fault: rodrigues
    crossed = jnp.cross(k[None], points)
    rotated = (
        points * jnp.cos(angle) + crossed * jnp.sin(angle) + k[None] * (points @ k)[:, None] * (1 - jnp.cos(angle))
    )
    return jnp.mean((rotated + params["shift"][None] - targets) ** 2)


def rodrigues_by_series(params, points, targets):
    r = params["rotation"]
    square = jnp.sum(r**2)
    is_small = square < 1e-8
    safe = jnp.where(is_small, 1.0, square)
    angle = jnp.sqrt(safe)
    a = jnp.where(is_small, 1 - square / 6, jnp.sin(angle) / angle)
    b = jnp.where(is_small, 0.5 - square / 24, (1 - jnp.cos(angle)) / safe)
    crossed = jnp.cross(r[None], points)
    rotated = points + a * crossed + b * jnp.cross(r[None], crossed)
    return jnp.mean((rotated + params["shift"][None] - targets) ** 2)


def pose_args(rotation=0.0):
    params = {"rotation": np.float32([rotation, -rotation, rotation / 2]), "shift": normal(3, seed=1)}
    return params, normal(6, 3, seed=2), normal(6, 3, seed=3)


model(
    rodrigues,
    args=pose_args,
    near=lambda: pose_args(0.3),
    fixed=rodrigues_by_series,
    cause="Poses start at the identity: the axis of a rotation by 0 is 0 / 0.",
    wrong=("angle + eps alone: the norm still has a NaN derivative", "nan_to_num", "a random start"),
)


def cox(params, x, events):
    risk = x @ params  # sorted by time, the longest first
    return -jnp.mean(events * (risk - jnp.log(jnp.cumsum(jnp.exp(risk)))))  # at fault: cox


def cox_of_logarithms(params, x, events):
    risk = x @ params
    return -jnp.mean(events * (risk - lax.cumlogsumexp(risk)))


def survival_args(scale=100.0):
    return normal(3, seed=1, scale=scale), normal(8, 3, seed=2), np.float32([1, 0, 1, 1, 0, 1, 1, 0])


model(
    cox,
    args=survival_args,
    near=lambda: survival_args(1.0),
    fixed=cox_of_logarithms,
    cause="exp(risk) overflows above 88.7, in the sums over those at risk.",
    wrong=("clip the risk", "subtract the maximum of all: the first sums are then 0", "nan_to_num"),
)


def router(params, x, labels):
    logits = (x @ params["router"]).astype(jnp.float16)  # "for speed"
    z = jax.nn.logsumexp(logits, axis=-1)
    experts = jnp.einsum("te,td,edk->tk", jax.nn.softmax(logits).astype(x.dtype), x, params["experts"])
    return jnp.mean(cross_entropy(experts, labels)) + 1e-3 * jnp.mean(z**2).astype(x.dtype)  # at fault: router


def router_in_float32(params, x, labels):
    logits = x @ params["router"]
    z = jax.nn.logsumexp(logits, axis=-1)
    experts = jnp.einsum("te,td,edk->tk", jax.nn.softmax(logits), x, params["experts"])
    return jnp.mean(cross_entropy(experts, labels)) + 1e-3 * jnp.mean(z**2)


def router_args(scale=200.0):
    params = {"router": normal(4, 3, seed=1, scale=scale), "experts": normal(3, 4, 5, seed=2, scale=0.3)}
    return params, normal(6, 4, seed=3), np.array([0, 1, 2, 3, 4, 0])


model(
    router,
    args=router_args,
    near=lambda: router_args(1.0),
    fixed=router_in_float32,
    rtol=1e-2,
    cause="The code casts the logits to float16, and the square of a log-sum-exp of 300 is above 65504.",
    wrong=("a smaller weight of the z-loss", "clip the logits", "nan_to_num"),
)


# Single formulas. The tool was built on these.


def rmse(w, x, y):
    return jnp.sqrt(jnp.mean((x @ w - y) ** 2))  # at fault: rmse


def rmse_by_hand(w, x, y):
    difference = x @ w - y
    return jnp.mean(difference * difference) ** 0.5  # at fault: rmse_by_hand


def rmse_by_norm(w, x, y):
    return jnp.linalg.norm(x @ w - y) / jnp.sqrt(8.0)  # at fault: rmse_by_norm


def rmse_with_safe_root(w, x, y):
    square = jnp.mean((x @ w - y) ** 2)
    is_fit = square < 1e-12  # up to the rounding errors of float32
    return jnp.where(is_fit, 0.0, jnp.sqrt(jnp.where(is_fit, 1.0, square)))


def fit_args(error=0.0):
    w, x = normal(4, 1, seed=1), normal(8, 4)
    return w, x, np.asarray(jax.jit(jnp.matmul)(x, w)) + error * normal(8, 1, seed=2)


for program in (rmse, rmse_by_hand, rmse_by_norm):
    model(
        program,
        args=fit_args,
        near=lambda: fit_args(0.3),
        fixed=rmse_with_safe_root,
        cause="The fit is perfect: the root of 0 has an infinite derivative.",
        wrong=("jnp.var: another function", "an eps of 1"),
    )


def hidden_markov_model(transition, emission, observed):
    def step(alpha, symbol):
        return (alpha @ transition) * emission[:, symbol], None  # at fault: hidden_markov_model

    return -jnp.log(jnp.sum(lax.scan(step, jnp.full(4, 0.25), observed)[0]))  # at fault: hidden_markov_model


def hidden_markov_model_normalised(transition, emission, observed):
    def step(alpha, symbol):
        alpha = (alpha @ transition) * emission[:, symbol]
        return alpha / jnp.sum(alpha), jnp.log(jnp.sum(alpha))

    return -jnp.sum(lax.scan(step, jnp.full(4, 0.25), observed)[1])


def chain_args():
    rng = np.random.default_rng(0)
    transition, emission = (rng.dirichlet(np.ones(n), 4).astype(np.float32) for n in (4, 6))
    return transition, emission, rng.integers(0, 6, 120, np.int32)


model(
    hidden_markov_model,
    args=chain_args,
    fixed=hidden_markov_model_normalised,
    cause="The probability of 120 symbols underflows.",
    wrong=("log(maximum(x, 1e-4)): the loss is stuck",),
)


def mean_by_prod(x, shape):
    return jnp.sum(x) / jnp.prod(shape).astype(x.dtype)  # at fault: mean_by_prod


def mean_by_float_prod(x, shape):
    return jnp.sum(x) / jnp.prod(shape.astype(x.dtype))


model(
    mean_by_prod,
    args=lambda: (np.ones(8, np.float32), np.int32([65536, 65536, 2])),
    near=lambda: (normal(8), np.int32([2, 2, 2])),
    fixed=mean_by_float_prod,
    cause="The product of the sizes is 2**33, which wraps to 0 in int32.",
    wrong=("where(n == 0, 1, n)",),
)


def log_of_relu(w, x):
    return -jnp.mean(jnp.log(jax.nn.relu(x @ w)))  # at fault: log_of_relu


def log_of_softplus(w, x):
    return -jnp.mean(jnp.log(jnp.logaddexp(x @ w, 0.0)))


model(
    log_of_relu,
    args=lambda: (normal(4, 1, seed=1), normal(8, 4)),
    fixed=log_of_softplus,
    intended=log_of_softplus,
    cause="A ReLU is 0 for half of its operands.",
)


def log_of_determinant(w):
    return jnp.log(jnp.abs(jnp.linalg.det(w)))  # at fault: log_of_determinant


def log_determinant_by_qr(w):
    return jnp.sum(jnp.log(jnp.abs(jnp.diag(jnp.linalg.qr(w)[1]))))


model(
    log_of_determinant,
    args=lambda: (1e-3 * (np.eye(16, dtype=np.float32) + normal(16, 16, scale=0.1)),),
    fixed=log_determinant_by_qr,
    cause="The determinant of a matrix of 16 rows of length 1e-3 is 1e-48.",
)


def adam(m, v, t, g):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)  # at fault: adam


model(
    adam,
    args=lambda: (normal(3), normal(3, seed=1) ** 2, np.float32(0), normal(3, seed=2)),
    fixed_args=lambda: (normal(3), normal(3, seed=1) ** 2, np.float32(1), normal(3, seed=2)),
    dtype=None,
    cause="The first step is number 0, and 1 - b**0 is 0.",
)


def ppo(logits, old, actions, advantages):
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], 1)[:, 0]
    ratio = jnp.exp(log_probs - old)  # at fault: ppo
    return -jnp.mean(jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages))


def ppo_by_sign(logits, old, actions, advantages):
    log_ratio = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], 1)[:, 0] - old
    bounded = jnp.minimum(log_ratio, jnp.log(1.2)), jnp.maximum(log_ratio, jnp.log(0.8))
    return -jnp.mean(jnp.exp(jnp.where(advantages > 0, *bounded)) * advantages)


def policy_args(sign=1, least=-120.0):
    old, signs = np.float32([-1, least, -2, -1, -0.5, -3]), np.float32([1, 1, -1, 1, -1, 1])
    return normal(6, 3), old, np.array([0, 1, 2, 0, 1, 2]), sign * signs


model(
    ppo,
    args=policy_args,
    near=lambda: policy_args(-1, -10.0),
    fixed=ppo_by_sign,
    cause="The ratio exp(120) overflows where `minimum` takes the clipped ratio.",
    wrong=("clip the log-ratio of all signs at log(1.2)",),
)
model(
    ppo,
    name="ppo_of_negative_advantages",
    args=lambda: policy_args(-1),
    fixed_args=lambda: policy_args(-1, -1.5),
    cause="The loss is exp(120): the policy that sampled the action gave it no chance.",
)


def of_eigenvectors(a):
    values, vectors = jnp.linalg.eigh(a @ a.T)  # at fault: of_eigenvectors
    return jnp.sum(vectors[:, 0] ** 4) + jnp.sum(values)  # at fault: of_eigenvectors


model(
    of_eigenvectors,
    args=lambda: (np.eye(3, dtype=np.float32),),
    fixed_args=lambda: (np.diag(np.float32([1, 2, 3])) + normal(3, 3, scale=0.1),),
    cause="All eigenvalues are equal, so any vector is an eigenvector.",
)


def deep(params, x):
    for name in params:
        x = jax.nn.relu(x @ params[name]["kernel"])  # at fault: deep
    return jnp.mean(x**2)


def kernel_args(scale=5e3):
    scales = 0.5, scale, 0.5
    return {f"dense{i}": {"kernel": normal(5, 5, seed=i, scale=s)} for i, s in enumerate(scales)}, normal(8, 5, seed=9)


model(
    deep,
    args=kernel_args,
    fixed_args=lambda: kernel_args(0.5),
    dtype="float16",
    loss_scale=4.0,
    cause="The kernel of layer 1 was initialised 1e4 times too large.",
)


def diverged(params, x):
    for w in params[:-1]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ params[-1]) ** 2)  # at fault: diverged


def stack_args(scale=1e20):
    return [normal(4, 4, seed=i, scale=scale) for i in range(3)], normal(8, 4, seed=9)


model(
    diverged,
    args=stack_args,
    fixed_args=lambda: stack_args(0.5),
    cause="Steps of a learning rate that is too large made all parameters 1e20.",
)


def with_norms(params, x):
    penalty = sum(jnp.linalg.norm(layer["bias"]) for layer in params)  # at fault: with_norms
    return jnp.mean(x @ params[0]["w"] @ params[1]["w"]) + penalty


def with_safe_norms(params, x):
    squares = jnp.stack([jnp.sum(layer["bias"] ** 2) for layer in params])
    penalty = jnp.sum(jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0))
    return jnp.mean(x @ params[0]["w"] @ params[1]["w"]) + penalty


def layer_args(scale=0.0):
    return [{"w": normal(4, 4, seed=i), "bias": normal(4, seed=i, scale=scale)} for i in (1, 2)], normal(8, 4)


model(
    with_norms,
    args=layer_args,
    near=lambda: layer_args(0.5),
    fixed=with_safe_norms,
    cause="Biases start at 0, where a norm has no derivative.",
)


def cosine(w, x, y):
    a, b = x @ w, y @ w
    norms = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)  # at fault: cosine
    return jnp.mean(jnp.sum(a * b, -1) / norms)  # at fault: cosine


def cosine_or_0(w, x, y):
    a, b = x @ w, y @ w
    squares = jnp.sum(a * a, -1) * jnp.sum(b * b, -1)
    return jnp.mean(jnp.sum(a * b, -1) * lax.rsqrt(jnp.where(squares > 0, squares, 1.0)))


def pair_args(least=0.0):
    x = normal(8, 4)
    return np.eye(4, dtype=np.float32), np.where(x[:, :1] > least, x, np.float32(0)), normal(8, 4, seed=1)


model(
    cosine,
    args=pair_args,
    near=lambda: pair_args(-np.inf),
    fixed=cosine_or_0,
    cause="Some rows are 0: their cosine is 0 / 0.",
)


def entropy(logits):
    p = jax.nn.softmax(logits)
    return -jnp.sum(p * jnp.log(p))  # at fault: entropy


def entropy_of_logarithms(logits):
    log_p = logits - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return -jnp.sum(jnp.exp(log_p) * log_p)


model(
    entropy,
    args=lambda: (np.float32([[0, -200, 3]]),),
    fixed=entropy_of_logarithms,
    cause="exp(-203) is 0, and its logarithm is -inf.",
)


def likelihood(params, y):
    errors = (y - params["mean"]) / jnp.exp(params["log_sigma"])  # at fault: likelihood
    return jnp.mean(0.5 * errors**2 + params["log_sigma"])  # at fault: likelihood


model(
    likelihood,
    args=lambda: ({"mean": np.float32(0), "log_sigma": np.float32(-60)}, normal(8)),
    fixed_args=lambda: ({"mean": np.float32(0), "log_sigma": np.float32(-1)}, normal(8)),
    cause="The standard deviation is exp(-60): the likelihood of these data is exp(-1e52).",
)


def regression(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)  # at fault: regression


def batch_args(element=3e30):
    x = normal(8, 4)
    x[5, 2] = element
    return normal(4, seed=1), {"x": x, "y": normal(8, seed=2)}


model(
    regression,
    args=batch_args,
    fixed_args=lambda: batch_args(1.0),
    cause="One element of the batch is 3e30.",
)


def masked_sqrt(w, x):
    distances = x @ w
    return jnp.sum(jnp.where(distances > 0, jnp.sqrt(distances), 0.0))  # at fault: masked_sqrt


def masked_sqrt_of_positive(w, x):
    distances = x @ w
    is_positive = distances > 0
    return jnp.sum(jnp.where(is_positive, jnp.exp(0.5 * jnp.log(jnp.where(is_positive, distances, 1.0))), 0.0))


model(
    masked_sqrt,
    args=lambda: (normal(4, 4, seed=1), normal(8, 4)),
    near=lambda: (abs(normal(4, 4, seed=1)), abs(normal(8, 4))),
    fixed=masked_sqrt_of_positive,
    cause="The root of a negative number is not selected, but its derivative is NaN times 0.",
)


def contrastive(w, x):
    scores = jnp.exp(x @ w @ w.T @ x.T / 0.01)  # at fault: contrastive
    return -jnp.mean(jnp.log(jnp.diag(scores) / jnp.sum(scores, -1)))


def contrastive_of_logarithms(w, x):
    embedded = x @ w
    return -jnp.mean(jnp.diag(jax.nn.log_softmax(embedded @ embedded.T / 0.01)))


def view_args(scale=10):
    return scale * np.eye(4, dtype=np.float32), normal(8, 4)


model(
    contrastive,
    args=view_args,
    near=lambda: view_args(0.1),
    fixed=contrastive_of_logarithms,
    cause="Scores of 1e4 are exponents.",
)


def scanned(layers, x):
    return jnp.mean(lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, layers)[0])  # at fault: scanned


def scanned_in_full_precision(layers, x):
    with amp.full_precision():
        return jnp.mean(lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, layers)[0])


model(
    scanned,
    args=lambda: (np.stack([np.eye(5, dtype=np.float32) * 30] * 4), abs(normal(8, 5))),
    fixed=scanned_in_full_precision,
    dtype="float16",
    loss_scale=4.0,
    cause="Each layer multiplies by 30.",
)


def squared_relu(w, x):
    h = jax.nn.relu(x @ w)
    return jnp.mean((h * h * 100) @ w)  # at fault: squared_relu


def squared_relu_in_full_precision(w, x):
    with amp.full_precision():
        h = jax.nn.relu(x @ w)
        return jnp.mean((h * h * 100) @ w)


model(
    squared_relu,
    args=lambda: (200 * np.eye(5, dtype=np.float32), abs(normal(8, 5))),
    fixed=squared_relu_in_full_precision,
    dtype="float16",
    loss_scale=4.0,
    cause="The square of a hidden unit of 200 is multiplied by 100.",
)


def log_of_ratio(a, b):
    return jnp.mean(2 * jnp.log(a / b))  # at fault: log_of_ratio


model(
    log_of_ratio,
    args=lambda: (np.float32([1e30, 2e30]), np.float32([1e-30, 3e-30])),
    near=lambda: (uniform(2, low=0.5, high=2), uniform(2, seed=1, low=0.5, high=2)),
    fixed=lambda a, b: jnp.mean(2 * (jnp.log(a) - jnp.log(b))),
    cause="The ratio overflows; the difference of the logarithms stands in a product.",
)


def clipped_weight(x):
    return jnp.mean(jnp.minimum(x, 5.0) / x)  # at fault: clipped_weight


model(
    clipped_weight,
    args=lambda: (np.float32([0, 0.5, 0.2, 0.3]),),
    near=lambda: (np.float32([1, 3, 6, 8]),),
    fixed=lambda x: jnp.mean(5 / jnp.maximum(x, 5.0)),
    cause="0 / 0. All weights of this batch are less than 1, and the constant of the program is 5.",
    wrong=("1 / maximum(x, 1)",),
)


def clipped_softplus(x):
    return jnp.mean(jnp.log(jnp.maximum(1 + jnp.exp(x), 1.2)))  # at fault: clipped_softplus


model(
    clipped_softplus,
    args=lambda: (np.float32([100, 1]),),
    near=lambda: (np.float32([-3, 1]),),
    fixed=lambda x: jnp.mean(jnp.maximum(jax.nn.softplus(x), np.log(1.2))),
    cause="The exponential overflows. No value of this batch is clipped.",
    wrong=("softplus(x) for all of it",),
)


def penalty_of_small(x):
    return 1e-5 * jnp.sum(jnp.linalg.norm(x, axis=-1))  # at fault: penalty_of_small


def penalty_of_selected(x):
    squares = jnp.sum(x**2, axis=-1)
    return 1e-5 * jnp.sum(jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0))


model(
    penalty_of_small,
    args=lambda: (np.float32([[0], [1], [1]]) * normal(3, 2, scale=1e-7),),
    near=lambda: (normal(3, 2, scale=1e-7),),
    fixed=penalty_of_selected,
    cause="The norm of a row of zeros. The squares of the others are 1e-14.",
    wrong=("an eps of 1e-12",),
)


def roots_from_zero(x):
    return jnp.sum(jnp.where(x >= 0, jnp.sqrt(x), 0.0))  # at fault: roots_from_zero


def roots_of_positive(x):
    return jnp.sum(jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1.0)), 0.0))


model(
    roots_from_zero,
    args=lambda: (np.float32([-1, 2, 3]),),
    near=lambda: (np.float32([-1, 0, 3]),),
    fixed=roots_of_positive,
    intended=roots_of_positive,
    cause="The root of a negative number is not selected. That of 0 is, and is 0.",
    wrong=("sqrt(where(x > 0, x, 1))",),
)


def batch_of_one(x):
    return jnp.mean(jnp.log(jnp.sum(jnp.exp(x), keepdims=True)) - x)  # at fault: batch_of_one


model(
    batch_of_one,
    args=lambda: (np.float32([[100, 101]]),),
    near=lambda: (normal(3, 2),),
    fixed=lambda x: jnp.mean(jax.nn.logsumexp(x, keepdims=True) - x),
    cause="The exponential overflows. The sum is over all axes, which in a batch of one looks as that over the last.",
    wrong=("logsumexp(x, 1, keepdims=True)",),
)


def selected_below_85(x):
    return jnp.sum(jnp.where(x < 85, jnp.exp(x), 0.0))  # at fault: selected_below_85


model(
    selected_below_85,
    args=lambda: (np.float32([1, 2, 100]),),
    near=lambda: (np.float32([82, 84.9, 100]),),
    fixed=lambda x: jnp.sum(jnp.where(x < 85, jnp.exp(jnp.where(x < 85, x, 0.0)), 0.0)),
    cause="The exponential of 100 is not selected, but its derivative is infinity times 0.",
    wrong=("exp(minimum(x, 80))",),
)
