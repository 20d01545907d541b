"""A printed cure is right wherever the formula stands: in a product, a difference, a power, or before a method."""

import importlib.util
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from broken_models import normal, uniform
from cured import norm
from test_broken_models import in_float64, is_finite

from jmp_amp.debug import first_nonfinite

pytestmark = pytest.mark.usefixtures("users_code")

X, Y = np.clip(normal(3, 4), -2, 2), uniform(3, 4, low=0.1)
LARGE, ZEROS, ONE_ZERO = X + 100, X * np.float32([[0], [1], [1]]), np.float32([[0, 0.5, 0.2, 0.3]] * 3)
CONTEXTS = ["jnp.mean({})", "jnp.mean(2 * {})", "jnp.mean(-{})", "jnp.mean(2 - {})", "{}.mean()", "jnp.mean({} ** 2)"]
# Formulas of `x` and `y`, and these.
FORMULAS = {
    "jnp.log(1 + jnp.exp(x))": (LARGE, Y),
    "jnp.log(jnp.mean(jnp.exp(x), -1))": (LARGE, Y),
    "jnp.log(jnp.sum(jnp.exp(x), -1))": (LARGE, Y),
    "jnp.log(jnp.mean(jnp.exp(x)))": (LARGE, Y),
    "(jnp.exp(x) / jnp.sum(jnp.exp(x), keepdims=True) * y)": (LARGE, Y),
    "jnp.log(1 - 1 / (1 + jnp.exp(-x)))": (LARGE, Y),
    "(jnp.sin(x) / x)": (ONE_ZERO, Y),
    "jnp.sqrt(jnp.sum(x ** 2, -1))": (ZEROS, Y),
    "jnp.linalg.norm(x, axis=-1)": (ZEROS, Y),
}
QUICK = "jnp.log(1 + jnp.exp(x))", CONTEXTS[1::2]
# None of these is near 0, or where two of them are equal.
NEAR = [(scale * uniform(3, 4, low=0.05), uniform(3, 4, seed=1, low=0.05)) for scale in (0.9, 8)]


def load(path, code):
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.parametrize(
    ("formula", "contexts"), [QUICK, *(pytest.param(x, CONTEXTS, marks=pytest.mark.slow) for x in FORMULAS)]
)
def test_a_printed_cure_is_right_in_each_context(formula, contexts, tmp_path):
    lines = [f"def context{i}(x, y):\n    return {x.format(formula)} + 0 * jnp.sum(y)" for i, x in enumerate(contexts)]
    module = load(tmp_path / "contexts.py", "import jax\nimport jax.numpy as jnp\n\n" + "\n\n".join(lines))
    args, n_cured = tuple(map(np.float32, FORMULAS[formula])), 0
    for i, context in enumerate(contexts):
        broken = getattr(module, f"context{i}")
        found = first_nonfinite(jax.value_and_grad(broken))(*args)
        use = found and re.search(r"use `([^`]*)` in place of `([^`]*)`", found.cure)
        if not use:
            assert found is None or not found.cure
            continue
        n_cured += 1
        new, old = use.groups()
        code, scope = inspect.getsource(broken), {"jax": jax, "jnp": jnp, "optax": optax}
        assert code.count(old) == 1
        exec(code.replace(old, new), scope)
        cured = scope[broken.__name__]
        assert is_finite(jax.device_get(jax.jit(jax.value_and_grad(cured))(*args)))
        for near in NEAR:
            expected, actual = (in_float64(x, "float32")(*near) for x in (broken, cured))
            assert norm(jax.tree.map(np.subtract, actual, expected)) < 1e-6 * (norm(expected) or 1), (context, new)
    assert n_cured >= 2
