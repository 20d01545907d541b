"""Each small program that `benchmarks/conformance.py` shows to libraries, under autocast."""

import jax
import jax.numpy as jnp
import pytest
from conformance import behaviour, examine, examine_apart, may_not_end, scale_of_jmp_amp, under_jmp_amp, verdict
from programs import PROGRAMS

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")


@pytest.mark.sweep(42)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_runs_low_where_it_should_and_agrees_with_float32(name):
    try:
        answers = examine_apart(name) if may_not_end(name) else examine(PROGRAMS[name], under_jmp_amp)
    except ImportError as error:
        pytest.skip(f"needs {error.name}")
    assert verdict(answers) == "ok"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PROGRAMS if not may_not_end(name)])
def test_program_agrees_with_float32_where_its_residual_stream_is_low(name):
    try:
        answers = examine(PROGRAMS[name], lambda fun: amp.autocast(fun, residual_stream="low"))
    except ImportError as error:
        pytest.skip(f"needs {error.name}")
    assert verdict(answers) == "ok"


# The backward pass of a norm or a softmax adds cotangents to sums of them, which look like the terms of a variance.
@pytest.mark.parametrize(
    "name",
    ["attention", "layer norm by hand", "batch norm with its statistics", "variance around 1000", "equinox: mlp"],
)
def test_products_of_derivatives_of_norms_and_softmaxes_are_low(name):
    try:
        fun, args = PROGRAMS[name].make()
    except ImportError as error:
        pytest.skip(f"needs {error.name}")

    def loss(*args):
        return sum(jnp.sum(x) for x in jax.tree.leaves(fun(*args)))

    second = jax.grad(lambda *args: jnp.sum(jax.grad(loss, 1)(*args) ** 2))
    for transformed in (jax.grad(loss), second):
        products = amp.explain(transformed)(*args).select(primitive="dot_general", direction="forward").rows
        assert {row.compute for row in products if row.why != "short"} == {"float16"}


def test_loss_scale_behaves_as_the_table_says():
    assert behaviour(scale_of_jmp_amp) == {
        "grows after (asked for 3)": "3 steps",
        "gradient on the step on which it grows": "right",
        "gradient of a float16 loss of 2 at 2^16": "right",
        "after a NaN at 2^10": "2^9",
        "after 300 overflows": "2^0",
        "after 900 finite steps": "2^24",
    }
