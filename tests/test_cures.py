"""Cures are tried before they are printed, and a cure that computes another function never is."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from broken_models import MODELS, step
from jax import lax
from test_broken_models import TOLERANCE, assert_near, in_float64, is_finite

import jmp_amp as amp
from jmp_amp.debug import first_nonfinite
from jmp_amp.debug._cures import BOUNDS, CURES

pytestmark = pytest.mark.usefixtures("users_code")

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


# The table


EQUAL = [cure for cure in (*CURES, *BOUNDS) if cure.is_equal]


@pytest.mark.parametrize("cure", EQUAL, ids=lambda cure: f"{cure.formula} -> {cure.replacement}")
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
    numbers = {"axis": axis, "n": 3, "c": 0.5}
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        replaced = cure.function(cure.tries[0], **numbers)(*map(jnp.asarray, values))
    exact = cure.exact(*values, **numbers)
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
    "rmse": (grad(rmse), FIT, "`jnp.sqrt(jnp.mean((x @ w - y) ** 2) + 1e-", True),
    "rmse by hand": (grad(rmse_by_hand), FIT, "`jnp.sqrt(jnp.mean(difference * difference) + 1e-", True),
    "rmse by norm": (grad(rmse_by_norm), FIT, "`jnp.sqrt(jnp.sum((x @ w - y) ** 2) + 1e-", True),
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
    "log(relu)": (grad(log_of_relu), (W, X), "`jnp.log(jax.nn.softplus(x @ w))`", True),
    "log(det)": (
        grad(log_of_determinant),
        (np.eye(16, dtype=np.float32) * 1e-3,),
        "`jnp.linalg.slogdet(w)[1]` in place of",
        True,
    ),
    "adam": (adam, (normal(3), normal(3) ** 2, jnp.float32(0), normal(3)), "`t` is 0", True),
    "ppo": (grad(ppo), (normal(6, 3), OLD, ACTIONS, SIGNS), "`jnp.exp(jnp.minimum(log_probs - old, 80.0))`", True),
    "ppo, other sign": (grad(ppo), (normal(6, 3), OLD, ACTIONS, -SIGNS), UNKNOWN, False),
    "eigenvectors": (grad(of_eigenvectors), (np.eye(3, dtype=np.float32),), "the division is inside JAX", False),
    "init": (half(deep), (KERNELS, X), "`params['dense1']['kernel']` holds", True),
    "learning rate": (diverged, ([normal(4, 4) * 1e20 for _ in range(3)], X), "the learning rate", True),
    "norms of layers": (
        grad(with_norms),
        ([{"w": normal(4, 4), "bias": np.zeros(n, np.float32)} for n in (4, 4)], X),
        "`jnp.sqrt(jnp.sum(layer['bias'] ** 2) + 1e-12)`",
        True,
    ),
    "cosine of nothing": (
        grad(cosine),
        (np.eye(4, dtype=np.float32), X * (X[:, :1] > 0), X),
        "`jnp.sqrt(jnp.sum(a ** 2, 1) + 1e-12)` in place of",
        True,
    ),
    "entropy": (
        grad(entropy),
        (np.float32([[0, -200, 3]]),),
        "`jax.nn.log_softmax(logits, 1)` in place of `jnp.log(p)`",
        True,
    ),
    "likelihood": (
        grad(likelihood),
        ({"mean": np.float32(0), "log_sigma": np.float32(-60)}, normal(8)),
        UNKNOWN,
        False,
    ),
    "a bad element": (grad(regression), (W[:, 0], {"x": BAD, "y": X[:, 0]}), "`batch['x'][5, 2]` is 3e+30", True),
    "masked sqrt": (grad(masked_sqrt), (normal(4, 4), X), "`jnp.sqrt(jnp.where(distances > 0, distances, 1))`", True),
    "contrastive": (
        grad(contrastive),
        (10 * np.eye(4, dtype=np.float32), X),
        "`jnp.diag(x @ w @ w.T @ x.T / 0.01) - ",
        True,
    ),
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


def nested(x):
    def inner(z):
        return jnp.exp(z)

    return jnp.sum(jnp.log(1 + inner(x)))


def in_a_lambda(x):
    return jnp.sum(jnp.log(1 + (lambda z: jnp.exp(z))(x)))


def assigned_again(x):
    y = jnp.exp(x)
    x = 0 * x
    return jnp.sum(jnp.log(1 + y)) + jnp.sum(x)


def stored_into(x):
    values = {"x": x}
    y = jnp.exp(values["x"])
    values["x"] = 0 * x
    return jnp.sum(jnp.log(1 + y)) + jnp.sum(values["x"])


def called(x):
    y = jnp.exp(x)
    return jnp.sum(jnp.log(1 + y))


@pytest.mark.parametrize("fun", [nested, in_a_lambda, assigned_again, stored_into, called])
def test_names_of_the_user_are_printed_where_they_mean_the_same(fun):
    found = first_nonfinite(jax.grad(fun) if fun is called else fun)(100 + X)
    own = "`jax.nn.softplus(x)` in place of `jnp.log(1 + y)`"
    assert "use `jax.nn.softplus(x)`" in found.cure
    assert (own in found.cure) == (fun is called)


# Programs that were written without knowledge of the tool


REPORTS = {
    "cosine_after_product": "full_precision",
    "packed_sequences": "a fully masked row",
    "t5_feed_forward": "full_precision",
    "one_large_kernel": "`params[1]['kernel']` holds 7e+03 times its neighbours",
    "summed_loss": "the loss scale is too large",
    "grpo": "`jnp.sqrt(jnp.var(rewards, 1, keepdims=True) + 1e-12)` in place of `rewards.std(1, keepdims=True)`",
    "fill_value": "`table[1, 2]` is 9.969e+36, and its neighbours are about",
    "ctc": "an infinity meets an infinity",
    "von_mises": "`jnp.log(6.283185 * jax.scipy.special.i0e(kappa)) + jnp.abs(kappa)` in place of",
    "min_snr": "`5.0 / jnp.maximum(snr, 5.0)` in place of `jnp.minimum(snr, 5.0) / snr`",
    "gcn": "`jax.lax.rsqrt(jnp.sum(adjacency, axis=1, keepdims=True) + 1e-12)` in place of",
    "lars": "jnp.where(jnp.linalg.norm(g) == 0, 1, jnp.linalg.norm(g))` in place of",
    "batch_norm": "`jnp.var(x, 0, keepdims=True)` in place of",
    "ciou": "`jnp.arctan2(w, h)` in place of `jnp.arctan(w / h)`",
    "slerp": "-1 + 1e-6, 1 - 1e-6))` in place of",
    "whitening": "the derivative of `eigh`",
    "wkv": UNKNOWN,
    "memory_efficient_mish": "remove the `custom_vjp`",
    "uint8_lengths": "more than uint8 holds",
    "diverging_descent": "the learning rate is too large",
    "tanh_gaussian": "`2 * (jnp.log(2.0) - before - jax.nn.softplus(-2 * before))` in place of",
    "triplet": "+ 1e-12)` in place of",
    "focal": "`jax.nn.log_sigmoid(-(x @ params)[:, 0])` in place of `jnp.log(1 - p)`",
    "mixture_density": "underflows float32. Keep the logarithms of the factors",
    "distillation": "`jnp.log(jnp.maximum(teacher, 1e-12))` in place of `jnp.log(teacher)`",
    "gem_pooling": UNKNOWN,
    "sinkhorn": "underflows float32. Keep the logarithms of the factors",
    "rodrigues": "`jnp.sqrt(jnp.sum(params['rotation'] ** 2) + 1e-12)` in place of",
    "cox": UNKNOWN,
    "router": "full_precision",
}
# The code of the router casts by itself, and the correct form of LARS takes a trust ratio of 1 for layers that are 0.
NOT_AS_PRINTED, BY_CONVENTION = "router", "lars"


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))


def with_cure(program, found):
    """Returns a program in which a cure is applied as it is printed; None if the cure is not to change the code."""
    lines, first = inspect.getsourcelines(program)
    source, scope = "".join(lines), dict(program.__globals__)
    if use := re.search(r"use `([^`]*)` in place of `([^`]*)`", found.cure):
        new, old = use.groups()
        source, n = re.subn(re.escape(old).replace(r"\ ", r"\s+"), lambda _: new, source)
        assert n == 1, f"{old} is not in the program"
    elif around := re.search(r"use `with amp.full_precision\(\):` around (.*?) (if|or) ", found.cure):
        numbers = re.findall(r"py:(\d+) ", found.source if around[1] == "that line" else around[1])
        for k in (int(number) - first for number in numbers):
            indent = re.match(" *", lines[k])[0]
            lines[k] = f"{indent}with amp.full_precision():\n    {lines[k]}"
        source = "".join(lines)
    elif "remove the `custom_vjp`" in found.cure:
        scope |= {name: x.fun for name, x in scope.items() if isinstance(x, jax.custom_vjp)}
    else:
        return None
    exec(compile(source, "cured.py", "exec"), scope)
    return scope[program.__name__]


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in ("ciou", "distillation") else pytest.mark.slow) for x in MODELS]
)
def test_what_is_said_of_programs_as_users_write_them(name):
    model = MODELS[name]
    fun, args = model.make()
    found = first_nonfinite(fun)(*args)
    if name != "memory_efficient_mish":  # JAX knows the ops of a custom rule by the line that calls it
        assert any(f"broken_models.py:{line} " in found.source for line in model.lines)
    assert REPORTS[name] in found.cure

    cured = with_cure(model.broken, found)
    assert (cured is None) == (
        not found.tried or found.cause in ("outlier", "large array", "loss scale", "infinite operand")
    )
    if cured is None or name == NOT_AS_PRINTED:
        return
    result = jax.device_get(jax.jit(step(cured, model.dtype, model.loss_scale))(*args))
    if model.dtype == "float16":
        result = result[0], jax.tree.map(lambda g: g / model.loss_scale, result[1])
    exact = in_float64(model.intended if name == BY_CONVENTION else model.fixed, model.dtype)
    assert is_finite(result)
    assert_near(in_float64(cured, model.dtype)(*model.near()), exact(*model.near()), 1e-3)
    if name != BY_CONVENTION:
        expected, printed = exact(*args), float(re.search(r"within (.*) of float64", found.tried)[1])
        error = norm(jax.tree.map(np.subtract, result, expected)) / norm(expected)
        assert error < max(TOLERANCE[model.dtype or "float32"], 2 * printed)
