"""Cures are tried before they are printed, and a cure that computes another function never is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from broken_models import MODELS
from jax import lax

import jmp_amp as amp
from jmp_amp.debug import first_nonfinite
from jmp_amp.debug._cures import BOUNDS, CURES

pytestmark = pytest.mark.usefixtures("users_code")

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


# The table


@pytest.mark.parametrize("cure", [*CURES, *BOUNDS], ids=lambda cure: f"{cure.formula} -> {cure.replacement}")
def test_a_replacement_is_equal_to_its_formula(cure):
    rng = np.random.default_rng(0)
    x, y = rng.uniform(0.1, 0.9, (2, 3, 3))
    if cure.formula.startswith(("arccosh", "log(exp(x) - 1)")):
        x = x + 1
    if cure.formula == "log(1 - exp(x))":
        x = -x
    if cure.formula == "exp(x) @ y / sum(exp(x), -1)":
        x = x[0]
    values, axis = (x, y)[: cure.arity], -1 if cure.has_axis else None
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        replaced = cure.function(axis, cure.epsilons[0])(*map(jnp.asarray, values))
    exact = cure.exact(*values, axis=axis)
    np.testing.assert_allclose(np.reshape(replaced, np.shape(exact)), exact, rtol=1e-6)


# Programs, and what their reports say


def rmse(w, x, y):
    return jnp.sqrt(jnp.mean((x @ w - y) ** 2))


def rmse_by_hand(w, x, y):
    difference = x @ w - y
    return jnp.mean(difference * difference) ** 0.5


def rmse_by_norm(w, x, y):
    return jnp.linalg.norm(x @ w - y) / jnp.sqrt(8.0)


def hidden_markov_model(transition, emission, observed):
    def step(alpha, symbol):
        return (alpha @ transition) * emission[:, symbol], None

    return -jnp.log(jnp.sum(lax.scan(step, jnp.full(4, 0.25), observed)[0]))


def mean_by_prod(x, shape):
    return jnp.sum(x) / jnp.prod(shape).astype(jnp.float32)


def log_of_relu(w, x):
    return -jnp.mean(jnp.log(jax.nn.relu(x @ w)))


def log_of_determinant(w):
    return jnp.log(jnp.abs(jnp.linalg.det(w)))


def adam(m, v, t, g):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)


def ppo(logits, old, actions, advantages):
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), actions[:, None], 1)[:, 0]
    ratio = jnp.exp(log_probs - old)
    return -jnp.mean(jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages))


def of_eigenvectors(a):
    values, vectors = jnp.linalg.eigh(a @ a.T)
    return jnp.sum(vectors[:, 0] ** 4) + jnp.sum(values)


def deep(params, x):
    for name in params:
        x = jax.nn.relu(x @ params[name]["kernel"])
    return jnp.mean(x**2)


def diverged(params, x):
    for w in params[:-1]:
        x = jnp.tanh(x @ w)
    return jnp.mean((x @ params[-1]) ** 2)


def cosine(w, x, y):
    a, b = x @ w, y @ w
    return jnp.mean(jnp.sum(a * b, -1) / (jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)))


def entropy(logits):
    p = jax.nn.softmax(logits)
    return -jnp.sum(p * jnp.log(p))


def likelihood(params, y):
    return jnp.mean(0.5 * ((y - params["mean"]) / jnp.exp(params["log_sigma"])) ** 2 + params["log_sigma"])


def regression(w, batch):
    return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)


def masked_sqrt(w, x):
    distances = x @ w
    return jnp.sum(jnp.where(distances > 0, jnp.sqrt(distances), 0.0))


def contrastive(w, x):
    scores = jnp.exp(x @ w @ w.T @ x.T / 0.01)
    return -jnp.mean(jnp.log(jnp.diag(scores) / jnp.sum(scores, -1)))


def with_norms(params, x):
    penalty = sum(jnp.linalg.norm(layer["bias"]) for layer in params)
    return jnp.mean(x @ params[0]["w"] @ params[1]["w"]) + penalty


def scanned(layers, x):
    return jnp.mean(lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, layers)[0])


def squared_relu(w, x):
    h = jax.nn.relu(x @ w)
    return jnp.mean((h * h * 100) @ w)


X, W = normal(8, 4), normal(4, 1)
BAD = np.where(np.arange(32).reshape(8, 4) == 22, np.float32(3e30), X)
FIT = W, X, np.asarray(jax.jit(jnp.matmul)(X, W))
KERNELS = {f"dense{i}": {"kernel": normal(4, 4) * (5e3 if i == 1 else 0.5)} for i in range(3)}
OLD = np.float32([-1, -120, -2, -1, -0.5, -3])
SIGNS = np.float32([1, 1, -1, 1, -1, 1])
ACTIONS = np.array([0, 1, 2, 0, 1, 2])
grad, half = jax.value_and_grad, lambda f: amp.value_and_grad(amp.autocast(f), loss_scale=4.0)
EPS = "has an infinite derivative at 0"
UNKNOWN = "The cause is not known"

# The function, its arguments, a part of the cure, and whether it was tried.
PROGRAMS = {
    "rmse": (grad(rmse), FIT, "jnp.sqrt(jnp.mean(x**2, axis) + 1e-", True),
    "rmse by hand": (grad(rmse_by_hand), FIT, "jnp.sqrt(jnp.mean(x**2, axis) + 1e-", True),
    "rmse by norm": (grad(rmse_by_norm), FIT, "jnp.sqrt(jnp.sum(x**2, axis) + 1e-", True),
    "hmm": (
        hidden_markov_model,
        (
            RNG.dirichlet(np.ones(4), 4).astype(np.float32),
            RNG.dirichlet(np.ones(6), 4).astype(np.float32),
            RNG.integers(0, 6, 120),
        ),
        "underflows float32. Keep the logarithms of the factors",
        False,
    ),
    "integers": (mean_by_prod, (np.ones(8, np.float32), np.int32([65536, 65536, 2])), "more than int32 holds", False),
    "log(relu)": (grad(log_of_relu), (W, X), "`jax.nn.softplus(x)`", True),
    "log(det)": (grad(log_of_determinant), (np.eye(16, dtype=np.float32) * 1e-3,), "jnp.linalg.slogdet(x)[1]", True),
    "adam": (adam, (normal(3), normal(3) ** 2, jnp.float32(0), normal(3)), "`t` is 0", True),
    "ppo": (grad(ppo), (normal(6, 3), OLD, ACTIONS, SIGNS), "jnp.exp(jnp.minimum(x, 80.0))", True),
    "ppo, other sign": (grad(ppo), (normal(6, 3), OLD, ACTIONS, -SIGNS), UNKNOWN, False),
    "eigenvectors": (grad(of_eigenvectors), (np.eye(3, dtype=np.float32),), "the division is inside JAX", False),
    "init": (half(deep), (KERNELS, X), "`params['dense1']['kernel']` holds", True),
    "learning rate": (diverged, ([normal(4, 4) * 1e20 for _ in range(3)], X), "the learning rate", True),
    "norms of layers": (
        grad(with_norms),
        ([{"w": normal(4, 4), "bias": np.zeros(n, np.float32)} for n in (4, 4)], X),
        "`jnp.sqrt(jnp.sum(x**2, axis) + 1e-12)`",
        True,
    ),
    "cosine of nothing": (grad(cosine), (np.eye(4, dtype=np.float32), X * (X[:, :1] > 0), X), "axis) + 1e-12)`", True),
    "entropy": (grad(entropy), (np.float32([[0, -200, 3]]),), "`jax.nn.log_softmax(x, axis)`", True),
    "likelihood": (
        grad(likelihood),
        ({"mean": np.float32(0), "log_sigma": np.float32(-60)}, normal(8)),
        UNKNOWN,
        False,
    ),
    "a bad element": (grad(regression), (W[:, 0], {"x": BAD, "y": X[:, 0]}), "`batch['x'][5, 2]` is 3e+30", True),
    "masked sqrt": (grad(masked_sqrt), (normal(4, 4), X), "jnp.sqrt(jnp.where(x > 0, x, 1))", True),
    "contrastive": (grad(contrastive), (10 * np.eye(4, dtype=np.float32), X), UNKNOWN, False),
    "scan": (half(scanned), (np.stack([np.eye(4, dtype=np.float32) * 30] * 4), abs(X)), "full_precision", True),
    "relu": (half(squared_relu), (200 * np.eye(4, dtype=np.float32), abs(X)), "full_precision", True),
}
QUICK = ("rmse", "integers", "log(relu)", "adam", "init", "relu")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PROGRAMS]
)
def test_the_cure_fits_the_program_and_was_tried(name):
    fun, args, cure, is_tried = PROGRAMS[name]
    found = first_nonfinite(fun)(*args)
    assert cure in found.cure
    assert ("finite" in found.tried) == is_tried
    if name in ("scan", "relu"):
        assert found.in_float32 == "in float32 all results are finite: precision is the cause"


# Programs that were written without knowledge of the tool


REPORTS = {
    "cosine_after_product": "full_precision",
    "packed_sequences": "a fully masked row",
    "t5_feed_forward": "full_precision",
    "one_large_kernel": "`params[1]['kernel']` holds 7e+03 times its neighbours",
    "summed_loss": "the loss scale is too large",
    "grpo": "axis) + 1e-12)",
    "fill_value": "`table[1, 2]` is 9.969e+36, and its neighbours are about",
    "ctc": "an infinity meets an infinity",
    "von_mises": UNKNOWN,
    "min_snr": UNKNOWN,
    "gcn": "jax.lax.rsqrt(x + 1e-12)",
    "lars": UNKNOWN,
    "batch_norm": "jnp.var(x, axis",
    "ciou": UNKNOWN,
    "slerp": "jnp.arccos(jnp.clip(x, -1 + 1e-6, 1 - 1e-6))",
    "whitening": "the derivative of `eigh`",
    "wkv": UNKNOWN,
    "memory_efficient_mish": UNKNOWN,
    "uint8_lengths": "more than uint8 holds",
    "diverging_descent": "the learning rate is too large",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_is_said_of_programs_as_users_write_them(name):
    model = MODELS[name]
    fun, args = model.make()
    found = first_nonfinite(fun)(*args)
    if name != "memory_efficient_mish":  # JAX knows the ops of a custom rule by the line that calls it
        assert any(f"broken_models.py:{line} " in found.source for line in model.lines)
    assert REPORTS[name] in found.cure
