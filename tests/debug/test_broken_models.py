"""The programs of `broken_models` are broken as they say, and their correct forms are correct."""

import broken_kinds
import broken_models
import jax
import numpy as np
import pytest
from broken_models import MODELS, lines_at_fault
from judge import TOLERANCE, assert_near, in_float64, is_finite


def test_each_model_marks_its_lines():
    named = {model.broken.__name__ for model in MODELS.values() if model.broken.__module__ == "broken_models"}
    assert lines_at_fault(broken_models.__file__).keys() == named


KINDS = [name for name, model in MODELS.items() if model.broken.__module__ == "broken_kinds"]


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # JAX's, as it traces a constant
@pytest.mark.sweep(42)
@pytest.mark.parametrize("name", KINDS)
def test_broken_kind(name):
    model = MODELS[name]
    fun, args = model.make()
    result = jax.device_get(jax.jit(fun)(*args))
    if name in broken_kinds.HIDDEN:
        assert not np.any(jax.tree.leaves(result)[-1]), "it should be 0"
    else:
        assert not is_finite(result)
    if model.fixed is not model.broken:
        fixed = in_float64(model.fixed, model.dtype)
        assert is_finite(fixed(*model.args()))
        value, *grads = jax.tree.leaves(in_float64(model.broken, model.dtype)(*model.near()))
        assert is_finite(value)
        if name == "distance_to_self":  # whose gradient is finite nowhere
            grads = []
        assert is_finite(grads)
        found = jax.tree.leaves(fixed(*model.near()))[: 1 + len(grads)]
        assert_near(found, [value, *grads], 1e-2 if "float16" in name or name in broken_kinds.HIDDEN else 1e-5)


@pytest.mark.sweep(42)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in KINDS])
def test_broken_model(name):
    model = MODELS[name]
    fun, args = model.make()
    assert not is_finite(jax.device_get(jax.jit(fun)(*args)))

    fixed = in_float64(model.fixed, model.dtype)
    exact, near = fixed(*model.fixed_args()), fixed(*model.near())
    if model.fixed is not model.intended:
        assert_near(near, in_float64(model.intended, model.dtype)(*model.near()), model.rtol)
    if model.dtype is not None:
        assert all(np.any(x) for x in jax.tree.leaves(near)), "a gradient of zeros"

    for dtype in {"float32", model.dtype or "float32"}:
        fun, args = model.cured(dtype)
        result = jax.device_get(jax.jit(fun)(*args))
        if dtype == "float16":
            value, grads = result
            result = value, jax.tree.map(lambda g: g / model.fixed_scale, grads)
        assert is_finite(result)
        assert_near(result, exact, TOLERANCE[dtype])
