"""What `first_nonfinite` says is true: the line, the cause, and lines in float32. So are the formulas of its guide."""

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
from judge import CURED, SEEN, assert_cure_is_right, assert_right, is_cause_right, is_line_right, with_cure

from jmp_amp.debug import first_nonfinite

GUIDE = (pathlib.Path(__file__).parents[2] / "docs/my-loss-is-nan.md").read_text()
SECTIONS = {re.sub(r"[^a-z0-9]+", "-", x.lower()) for x in re.findall(r"^## (.*)$", GUIDE, re.MULTILINE)}
# By formula, what to write in its place, of the table of the guide.
FORMULAS = {
    formula: written
    for formulas, written in re.findall(r"^\|[^|]*\| (`.*) \| `(.*)` \|$", GUIDE, re.MULTILINE)
    for formula in re.findall(r"`([^`]*)`", formulas)
}

pytestmark = pytest.mark.usefixtures("users_code")

# The table of the guide


@pytest.mark.parametrize("formula", FORMULAS)
def test_what_the_guide_writes_is_equal_wherever_the_formula_is_finite(formula):
    rng, scales = np.random.default_rng(0), np.float64([0, 0.1, 1, 3, 9])  # others are rounding further out
    samples = scales[:, None, None] * rng.normal(size=(5, 3, 3)) + 0.0
    n_known = 0
    for x in abs(samples) if "prod" in formula else samples:
        with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
            names = {"jax": jax, "jnp": jnp, "optax": optax, "x": jnp.asarray(x), "axis": 1}
            expected, written = (np.asarray(eval(code, names)) for code in (formula, FORMULAS[formula]))
        known = np.abs(expected) < np.finfo(np.float32).max
        n_known += known.sum()
        np.testing.assert_allclose(written[known], expected[known], rtol=1e-5, atol=1e-7)
    assert n_known


def test_what_the_guide_writes_chooses_no_number():
    assert len(FORMULAS) > 15
    for written in FORMULAS.values():
        assert not {"clip", "eps", "nan_to_num", "finfo"} & set(written.replace("(", " ").split())


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


def test_what_is_0_in_a_step_that_xla_optimizes_is_0_in_the_tool():
    """At another level of LLVM, the difference of an array of equal numbers from its mean is no 0."""
    jax.config.update("jax_disable_most_optimizations", False)  # the next test sets it again
    fun, args = MODELS["rmse"].make()
    assert is_line_right(MODELS["rmse"], first_nonfinite(fun)(*args))


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # JAX's, as it traces a constant
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in (*QUICK, *SEEN_AGAIN) else pytest.mark.slow) for x in MODELS]
)
@pytest.mark.sweep(12)
def test_the_line_and_the_cause_are_right_and_lines_in_float32_are_enough_in_the_source(name):
    model = MODELS[name]
    fun, args = model.make()
    found = first_nonfinite(fun)(*args)
    assert is_line_right(model, found)
    assert is_cause_right(model, found)
    assert found.guide.partition("#")[2] in SECTIONS
    assert bool(found.tried) == bool(found.cure) == (name in CURED.split())
    assert_cure_is_right(model, found)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", broken_kinds.CORRECT)
def test_nothing_is_said_of_correct_programs(name):
    fun, args = broken_kinds.CORRECT[name]
    assert first_nonfinite(fun)(*args) is None


@pytest.mark.parametrize(("name", "line"), [("squared_relu", 1), ("summed_loss", None)])
def test_a_wrong_cure_is_noticed(name, line):
    model = MODELS[name]
    first = model.broken.__code__.co_firstlineno
    cure = line and f"compute broken_models.py:{first + line} ({name}) in float32"
    cured = with_cure(model, cure or "", "a loss scale that is 2^1 times smaller")
    with pytest.raises(AssertionError):
        assert_right(cured, "within 3e-02 of float32")


def test_a_wrong_line_and_a_wrong_cause_are_noticed():
    model = MODELS["adam"]
    found = first_nonfinite(model.broken)(*model.args())
    wrong = dataclasses.replace(found, source="broken_models.py:1 (adam)", cause="`div` of 1 and 0 is inf")
    assert is_line_right(model, found)
    assert is_cause_right(model, found)
    assert not is_line_right(model, wrong)
    assert not is_cause_right(model, wrong)
