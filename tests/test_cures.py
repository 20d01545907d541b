"""Cures are tried before they are printed, and a cure that computes another function never is."""

import dataclasses
import inspect
import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from broken_models import MODELS
from test_broken_models import TOLERANCE, assert_near, in_float64, is_finite

from jmp_amp.debug import first_nonfinite
from jmp_amp.debug._cures import BOUNDS, CURES

pytestmark = pytest.mark.usefixtures("users_code")

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
    numbers = {"axis": axis, "c": 0.5}
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        replaced = cure.function(cure.tries[0], **numbers)(*map(jnp.asarray, values))
    exact = cure.exact(*values, **numbers)
    np.testing.assert_allclose(np.reshape(replaced, np.shape(exact)), exact, rtol=1e-6)


# These are equal to their replacements for positive values only; the program is tried with others, too.
OF_POSITIVE = ("log(x * y)", "log(x / y)", "log(prod(x, axis))", "log(exp(x) @ y)", "arctan(x / y)")


@pytest.mark.parametrize(
    "cure", [x for x in EQUAL if not 0 < x.tries[0] < 1], ids=lambda x: f"{x.formula} -> {x.replacement}"
)
def test_a_replacement_is_equal_wherever_its_formula_is_finite(cure):
    scales = np.float64([0, 0.1, 1, 9, 60 if cure.formula == "exp(x)" else 3])  # others are rounding further out
    x, y = scales[:, None, None] * np.random.default_rng(0).normal(size=(2, 5, 3, 3)) + 0.0
    if cure.formula in OF_POSITIVE:
        x, y = abs(x), abs(y)
    if cure.formula == "exp(x) @ y / sum(exp(x), -1)":
        x = x[:, 0]
    axis = -1 if cure.has_axis else None
    for values, c in itertools.product(zip(*(x, y)[: cure.arity], strict=True), (0.5, 5.0, -2.0)):
        numbers = {"axis": axis, "c": c}
        with jax.enable_x64(True), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            replaced = cure.function(cure.tries[0], **numbers)(*map(jnp.asarray, values))
        exact = cure.exact(*values, **numbers)
        known = np.abs(exact) < np.finfo(np.float32).max
        np.testing.assert_allclose(
            np.reshape(np.asarray(replaced), np.shape(exact))[known], exact[known], rtol=1e-6, atol=1e-7
        )


# Programs, and what their reports say


UNKNOWN = "The cause is not known"
# A part of each cure.
REPORTS = {
    # These were written without knowledge of the tool.
    "cosine_after_product": "full_precision",
    "packed_sequences": "a fully masked row",
    "t5_feed_forward": "full_precision",
    "one_large_kernel": "`params[1]['kernel']` holds 7e+03 times its neighbours",
    "summed_loss": "the loss scale is too large",
    "grpo": "`jnp.sqrt(jnp.var(rewards, 1, keepdims=True) + 1e-12)` in place of `rewards.std(1, keepdims=True)`",
    "fill_value": "`table[1, 2]` is 9.969e+36, and its neighbours are about",
    "ctc": "an infinity meets an infinity",
    "von_mises": "`(jnp.log(6.283185 * jax.scipy.special.i0e(kappa)) + jnp.abs(kappa))` in place of",
    "min_snr": "`(5.0 / jnp.maximum(snr, 5.0))` in place of `jnp.minimum(snr, 5.0) / snr`",
    "gcn": "`jax.lax.rsqrt(jnp.sum(adjacency, axis=1, keepdims=True) + 1e-12)` in place of",
    "lars": "jnp.where(jnp.linalg.norm(g) == 0, 1, jnp.linalg.norm(g)))` in place of",
    "batch_norm": "`jnp.var(x, 0, keepdims=True)` in place of",
    "ciou": "`jnp.arctan2(w, h)` in place of `jnp.arctan(w / h)`",
    "slerp": "-1 + 1e-6, 1 - 1e-6))` in place of",
    "whitening": "the derivative of `eigh`",
    "wkv": UNKNOWN,
    "memory_efficient_mish": "remove the `custom_vjp`",
    "uint8_lengths": "more than uint8 holds",
    "diverging_descent": "the learning rate is too large",
    "tanh_gaussian": "`(2 * (jnp.log(2.0) - before - jax.nn.softplus(-2 * before)))` in place of",
    "triplet": ", 1)), 0)` in place of `jnp.sqrt(",
    "focal": "`jax.nn.log_sigmoid(-(x @ params)[:, 0])` in place of `jnp.log(1 - p)`",
    "mixture_density": "underflows float32. Keep the logarithms of the factors",
    "distillation": "`jnp.log(jnp.maximum(teacher, 1e-12))` in place of `jnp.log(teacher)`",
    "gem_pooling": UNKNOWN,
    "sinkhorn": "underflows float32. Keep the logarithms of the factors",
    "rodrigues": "`jnp.sqrt(jnp.sum(params['rotation'] ** 2) + 1e-12)` in place of",
    "cox": UNKNOWN,
    "router": "full_precision",
    # On these the tool was built.
    "rmse": "`jnp.sqrt(jnp.mean((x @ w - y) ** 2) + 1e-",
    "rmse_by_hand": "`jnp.sqrt(jnp.mean(difference * difference) + 1e-",
    "rmse_by_norm": "`jnp.sqrt(jnp.sum((x @ w - y) ** 2) + ",
    "hidden_markov_model": "underflows float32. Keep the logarithms of the factors",
    "mean_by_prod": "more than int32 holds",
    "log_of_relu": "`jnp.log(jax.nn.softplus(x @ w))`",
    "log_of_determinant": "`jnp.linalg.slogdet(w)[1]` in place of",
    "adam": "`t` is 0",
    "ppo": "`jnp.exp(jnp.minimum(log_probs - old, 88.72))`",
    "ppo_of_negative_advantages": UNKNOWN,
    "of_eigenvectors": "the division is inside JAX",
    "deep": "`params['dense1']['kernel']` holds",
    "diverged": "the learning rate",
    "with_norms": "`jnp.sqrt(jnp.sum(layer['bias'] ** 2) + 1e-12)`",
    "cosine": "`jnp.sqrt(jnp.sum(a ** 2, 1) + 1e-12)` in place of",
    "entropy": "`jax.nn.log_softmax(logits, 1)` in place of `jnp.log(p)`",
    "likelihood": UNKNOWN,
    "regression": "`batch['x'][5, 2]` is 3e+30",
    "masked_sqrt": "`jnp.where(distances > 0, jnp.sqrt(jnp.where(distances > 0, distances, 1)), 0)`",
    "contrastive": "`(jnp.diag(x @ w @ w.T @ x.T / 0.01) - ",
    "scanned": "full_precision",
    "squared_relu": "full_precision",
    # Another function is equal to a part of them at the user's arguments.
    "log_of_ratio": "`(jnp.log(a) - jnp.log(b))` in place of",
    "clipped_weight": "`(5.0 / jnp.maximum(x, 5.0))` in place of",
    "clipped_softplus": UNKNOWN,
    "penalty_of_small": "`jnp.sqrt(jnp.sum(x ** 2, 1) + 1e-24)` in place of",
    "roots_from_zero": "`jnp.where(x > 0, jnp.sqrt(jnp.where(x > 0, x, 1)), 0)` in place of",
    "batch_of_one": "`jax.nn.logsumexp(x, keepdims=True)` in place of",
    "selected_below_85": "`jnp.exp(jnp.minimum(x, 88.72))` in place of",
}
# Cures that are printed for any `x`: the code that is printed, what it takes the place of here, and what `x` is here.
FOR_ANY_X = {
    "mean_by_prod": ("x.astype(jnp.float32)", r"(?<=prod.)shape", "shape"),
    "uint8_lengths": ("x.astype(jnp.float32)", r"(?<=segment_sum.)mask", "mask"),
    "router": (".astype(jnp.float32)", r"(?<=z)(?=\*\*2)", ""),  # its code casts by itself
    "packed_sequences": ("jnp.finfo(x.dtype).min", "-jnp.inf", "x"),
    "ctc": ("jnp.finfo(x.dtype).min", "-jnp.inf", "logp"),
}
# Causes whose cures say what to do, but not what to write. These are not applied.
NOT_APPLIED = (
    "underflow",  # an algorithm on logarithms, as `fixed` is
    "derivative of eigh",  # another function, which the user is to choose
    "growth in a loop",  # a smaller learning rate, as that of `fixed`
    "unknown",  # there is no cure
)
# The correct form of LARS takes a trust ratio of 1 for layers that are 0.
BY_CONVENTION = "lars"
QUICK = ("rmse", "mean_by_prod", "log_of_relu", "adam", "deep", "squared_relu", "ciou", "distillation")


def with_cure(model, cure, line=""):
    """Returns a model in which a cure that is printed for a line is followed to the letter."""
    lines, first = inspect.getsourcelines(model.broken)
    code, scope, changes = "".join(lines), dict(vars(sys.modules[model.broken.__module__])), {}
    if use := re.search(r"use `([^`]*)` in place of `([^`]*)`", cure):
        new, old = use.groups()
        code, n = re.subn(re.escape(old).replace(r"\ ", r"\s+"), lambda _: new, code)
        assert n == 1, f"{old} is not in the program"
    elif model.name in FOR_ANY_X:
        printed, old, x = FOR_ANY_X[model.name]
        assert printed in cure
        code = re.sub(old, re.sub(r"\bx\b", x, printed), code)
    elif around := re.search(r"use `with amp.full_precision\(\):` around (.*?) (if|or) ", cure):
        numbers = re.findall(r"py:(\d+) ", line if around[1] == "that line" else around[1])
        for k in {int(number) - first for number in numbers}:
            indent = re.match(" *", lines[k])[0]
            lines[k] = f"{indent}with amp.full_precision():\n    {lines[k]}"
        code = "".join(lines)
    elif "remove the `custom_vjp`" in cure:
        scope |= {name: x.fun for name, x in scope.items() if isinstance(x, jax.custom_vjp)}
    elif smaller := re.search(r"a scale that is 2\^(\d+) times smaller", cure):
        changes["loss_scale"] = model.loss_scale / 2 ** int(smaller[1])
    else:  # an argument is to be checked: take the right one
        named, both = re.match(r"`(.*?)` (is|holds) ", cure)[1], (model.args(), model.fixed_args())
        wrong, right = (eval(named, inspect.signature(model.broken).bind(*args).arguments) for args in both)
        assert np.any(wrong != right), f"{named} is right"
        changes["args"] = model.fixed_args
    exec(compile(code, "cured.py", "exec"), scope)
    return dataclasses.replace(model, broken=scope[model.broken.__name__], **changes)


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in jax.tree.leaves(tree)))


def assert_right(cured, tried=""):
    """Compares value and gradient with those of the correct form in float64."""
    near, args = cured.near(), cured.args()
    exact = in_float64(cured.intended if cured.name == BY_CONVENTION else cured.fixed, cured.dtype)
    assert_near(in_float64(cured.broken, cured.dtype)(*near), exact(*near), 1e-3)

    value, *grads = jax.tree.leaves(jax.device_get(jax.jit(cured.make()[0])(*args)))
    if cured.dtype == "float16":
        grads = [g / cured.loss_scale for g in grads]
    assert is_finite((value, grads))
    if cured.name != BY_CONVENTION:
        printed = re.search(r"within (.*) of float64", tried)
        rtol = max(TOLERANCE[cured.dtype or "float32"], 3 * float(printed[1]) if printed else 0)
        exact_value, *exact_grads = jax.tree.leaves(exact(*args))
        for actual, expected in ((value, exact_value), (grads, exact_grads)):
            assert norm(jax.tree.map(np.subtract, actual, expected)) < rtol * (norm(expected) or 1)


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in MODELS])
def test_the_line_is_right_and_the_printed_cure_is_right_in_the_source(name):
    model = MODELS[name]
    fun, args = model.make()
    found = first_nonfinite(fun)(*args)
    if name != "memory_efficient_mish":  # JAX knows the ops of a custom rule by the line that calls it
        assert any(f"broken_models.py:{line} " in found.source for line in model.lines)
    assert REPORTS[name] in found.cure
    if name in ("scanned", "squared_relu"):
        assert found.in_float32 == "in float32 all results are finite: precision is the cause"
    assert bool(found.tried) == (found.cause not in (*NOT_APPLIED, "integer overflow"))
    if found.cause not in NOT_APPLIED:
        assert_right(with_cure(model, found.cure, found.source), found.tried)


WRONG = {
    "rmse": "use `jnp.var(x @ w - y)` in place of `jnp.sqrt(jnp.mean((x @ w - y) ** 2))`",
    "log_of_relu": "use `jnp.log(jax.nn.sigmoid(x @ w))` in place of `jnp.log(jax.nn.relu(x @ w))`",
    "distillation": "use `jnp.log(jnp.maximum(teacher, 0.3))` in place of `jnp.log(teacher)`",
    "summed_loss": "a scale that is 2^1 times smaller fits",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_cure_is_noticed(name):
    cured = with_cure(MODELS[name], WRONG[name])
    with pytest.raises(AssertionError):
        assert_right(cured, "within 3e-02 of float64")


# Names


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
    found = first_nonfinite(jax.grad(fun) if fun is called else fun)(np.float32([99, 100]))
    own = "`jax.nn.softplus(x)` in place of `jnp.log(1 + y)`"
    assert "use `jax.nn.softplus(x)`" in found.cure
    assert (own in found.cure) == (fun is called)
