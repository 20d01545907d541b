"""What `first_nonfinite` says is true: the line, the cause, and a cure as it is printed."""

import dataclasses
import pathlib
import re

import broken_kinds
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from broken_models import MODELS, lines_at_fault
from cured import CURED, SEEN, assert_cure_is_right, assert_right, is_cause_right, is_line_right, with_cure

from jmp_amp.debug import first_nonfinite
from jmp_amp.debug._cures import CURES, exact, written

GUIDE = pathlib.Path(__file__).parents[1] / "docs/my-loss-is-nan.md"
SECTIONS = {re.sub(r"[^a-z0-9]+", "-", x.lower()) for x in re.findall(r"^## (.*)$", GUIDE.read_text(), re.MULTILINE)}

pytestmark = pytest.mark.usefixtures("users_code")

# The table

OF_POSITIVE = ("log(prod(x, axis))",)  # equal for positive values only; the program is tried with others, too


@pytest.mark.parametrize("formula", CURES)
def test_a_replacement_is_equal_wherever_its_formula_is_finite(formula):
    rng, scales = np.random.default_rng(0), np.float64([0, 0.1, 1, 3, 9])  # others are rounding further out
    samples = scales[:, None, None] * rng.normal(size=(5, 3, 3)) + 0.0
    axis, n_known = 1 if "axis" in formula else None, 0
    for x in abs(samples) if formula in OF_POSITIVE else samples:
        with jax.enable_x64(True):
            names = {"jax": jax, "jnp": jnp, "optax": optax, "x": jnp.asarray(x)}
            replaced = eval(written(CURES[formula], axis), names)
        expected = exact(formula, x, axis)
        known = np.abs(expected) < np.finfo(np.float32).max
        n_known += known.sum()
        np.testing.assert_allclose(
            np.reshape(np.asarray(replaced), np.shape(expected))[known], expected[known], rtol=1e-6, atol=1e-7
        )
    assert n_known


def test_a_replacement_chooses_no_number():
    for replacement in CURES.values():
        assert not {"clip", "eps", "nan_to_num", "finfo"} & set(replacement.replace("(", " ").split())


# Programs, and what their reports say

QUICK = ("rmse", "mean_by_prod", "log_of_relu", "adam", "deep", "squared_relu", "distillation", "one_hot_cross_entropy")
SEEN_AGAIN = (  # by a user of an earlier version
    *("layer_norm_in_float16", "rms_norm_of_zeros", "variance_that_overflows", "entropy_by_hand"),
    *("binary_cross_entropy_in_float16", "transformer", "dice", "log_of_determinant", "newton_root", "spectrum"),
)


def test_each_program_says_what_is_to_be_seen():
    for library in ("flax", "equinox", "keras"):  # whose programs are left out where it is not installed
        pytest.importorskip(library, reason=f"needs {library}")
    kinds = lines_at_fault(broken_kinds.__file__).keys()
    assert MODELS.keys() == SEEN.keys()
    assert {x.broken.__name__ for x in MODELS.values() if x.broken.__module__ == "broken_kinds"} == kinds


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # JAX's, as it traces a constant
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in (*QUICK, *SEEN_AGAIN) else pytest.mark.slow) for x in MODELS]
)
@pytest.mark.sweep(4)
def test_the_line_and_the_cause_are_right_and_the_printed_cure_is_right_in_the_source(name):
    model = MODELS[name]
    fun, args = model.make()
    found = first_nonfinite(fun)(*args)
    assert is_line_right(model, found)
    assert is_cause_right(model, found)
    assert found.guide.partition("#")[2] in SECTIONS
    assert bool(found.tried) == bool(found.cure) == (name in CURED.split())
    assert_cure_is_right(model, found)


@pytest.mark.long
@pytest.mark.parametrize("name", broken_kinds.CORRECT)
def test_nothing_is_said_of_correct_programs(name):
    fun, args = broken_kinds.CORRECT[name]
    assert first_nonfinite(fun)(*args) is None


WRONG = {
    "rmse": "use `jnp.var(x @ w - y)` in place of `jnp.sqrt(jnp.mean((x @ w - y) ** 2))`",
    "log_of_relu": "use `jnp.log(jax.nn.sigmoid(x @ w))` in place of `jnp.log(jax.nn.relu(x @ w))`",
    "distillation": "use `jnp.log(jnp.maximum(teacher, 0.3))` in place of `jnp.log(teacher)`",
    "summed_loss": "",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_cure_is_noticed(name):
    cured = with_cure(MODELS[name], WRONG[name], "a loss scale that is 2^1 times smaller")
    with pytest.raises(AssertionError):
        assert_right(cured, "within 3e-02 of float64")


@pytest.mark.long
def test_a_wrong_line_and_a_wrong_cause_are_noticed():
    model = MODELS["adam"]
    found = first_nonfinite(model.broken)(*model.args())
    wrong = dataclasses.replace(found, source="broken_models.py:1 (adam)", cause="`div` of 1 and 0 is inf")
    assert is_line_right(model, found)
    assert is_cause_right(model, found)
    assert not is_line_right(model, wrong)
    assert not is_cause_right(model, wrong)


# Several faults


@pytest.mark.long
def test_several_faults_are_cured_one_after_the_other():
    def loss(w, x, y):
        p = jax.nn.sigmoid(x @ w)
        return -jnp.mean(y * jnp.log(p) + (1 - y) * jnp.log(1 - p)) + jnp.linalg.norm(w - w)

    x = np.float32([[300, 0], [0, 300], [-300, 0]])
    found = first_nonfinite(jax.value_and_grad(loss))(np.float32([1, -1]), x, np.float32([0, 1, 1]))
    assert found.cure.count("in place of") == 3
    assert found.tried.startswith("finite, within")


@pytest.mark.long
def test_common_subexpressions_are_merged():
    def loss(w, x):
        return jnp.sum(x * (jnp.exp(x @ w) / jnp.sum(jnp.exp(x @ w), axis=-1, keepdims=True)))

    found = first_nonfinite(jax.grad(loss))(100 * np.eye(2, dtype=np.float32), np.float32([[1, 1.01], [3, 3.02]]))
    assert "use `jax.nn.softmax(x @ w, axis=1)` in place of" in found.cure


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
    own = "use `jax.nn.softplus(x)` in place of `jnp.log(1 + y)`"
    assert (own in found.cure) == bool(found.cure) == (fun is called)
