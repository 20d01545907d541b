"""A format, in which a region computes, is one entry of a table."""

import jax
import jax.numpy as jnp
import pytest
from jaxprs import dtypes

import jmp_amp as amp
from jmp_amp._autocast._format import FORMATS, Format

X, W = jnp.ones((4, 8)) / 8, jnp.eye(8)
FLOAT8 = Format(*("float8_e4m3fn", *map(jnp.dtype, ("float8_e4m3fn", "bfloat16", "float8_e5m2"))))


def fun(x):
    return jax.nn.softmax(jax.nn.relu(x @ W) @ W)


@pytest.fixture
def float8(monkeypatch):
    monkeypatch.setitem(FORMATS, FLOAT8.name, FLOAT8)
    return FLOAT8.name


def test_a_format_may_have_operands_and_results_of_different_dtypes(float8):
    low = amp.autocast(fun, float8)
    assert set(dtypes(low, X, primitive="dot_general")) == {"float8_e4m3fn float8_e4m3fn -> bfloat16"}
    assert dtypes(low, X, primitive="max")[0] == "bfloat16 bfloat16 -> bfloat16"  # relu
    assert dtypes(low, X, primitive="exp") == ["float32 -> float32"]
    assert jnp.allclose(low(X), fun(X), atol=1e-2)


def test_cotangents_have_a_dtype_of_their_own(float8):
    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)

    w = jax.random.normal(jax.random.key(0), (8, 8)) / 4
    grad = jax.grad(amp.autocast(loss, float8))
    forward, backward = "float8_e4m3fn float8_e4m3fn -> bfloat16", "float8_e5m2 float8_e4m3fn -> bfloat16"
    products = dtypes(grad, w, X, primitive="dot_general")
    assert products.count(forward) == 2
    assert backward in products
    assert set(products) <= {forward, backward, "float8_e4m3fn float8_e5m2 -> bfloat16"}
    expected = jax.grad(loss)(w, X)
    assert jnp.linalg.norm(grad(w, X) - expected) < jnp.linalg.norm(expected) / 8  # the rounding error of float8_e5m2


def test_a_region_and_a_report_name_a_format(float8):
    def mixed(x):
        with amp.precision(float8):
            x = x @ W
        return x @ W

    low = amp.autocast(mixed, "bfloat16")
    assert dtypes(low, X, primitive="dot_general") == [
        "float8_e4m3fn float8_e4m3fn -> bfloat16",
        "bfloat16 bfloat16 -> bfloat16",
    ]
    (row, _) = amp.explain(mixed, "bfloat16")(X).select(primitive="dot_general", direction="forward").rows
    assert (row.compute, row.output, row.why) == (float8, "bfloat16", "region")


def test_an_unknown_format_is_an_error_that_lists_the_formats():
    with pytest.raises(ValueError, match="autocast computes in float16, bfloat16, float32, got float8_e4m3fn"):
        amp.autocast(fun, "float8_e4m3fn")
