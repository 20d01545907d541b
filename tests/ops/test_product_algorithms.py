"""Regions and rules whose float32 products run on matrix units, by an algorithm that the format names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import equations

import jmp_amp as amp

X, W = np.linspace(-1, 1, 40, dtype=np.float32).reshape(5, 8), np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
X3, X6 = lax.DotAlgorithmPreset.BF16_BF16_F32_X3, lax.DotAlgorithmPreset.BF16_BF16_F32_X6


def precisions(fun, *args, primitive="dot_general"):
    return [eqn.params["precision"] for eqn in equations(fun, *args) if eqn.primitive.name == primitive]


def distances(x, w):
    return jnp.sum(x**2, 1)[:, None] + jnp.sum(w**2, 1)[None] - 2 * x @ w.T


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "asked"), [("bfloat16_x3", X3), ("bfloat16_x6", X6), ("tensorfloat32", (lax.Precision.HIGH,) * 2)]
)
def test_float32_products_of_a_region_and_their_gradients_ask_for_it(name, asked):
    def loss_fn(x, w):
        with amp.precision(name):
            return jnp.sum(distances(x, w) ** 2)

    assert precisions(loss_fn, X, W) == [None]
    grad = jax.grad(amp.autocast(loss_fn), argnums=(0, 1))
    assert precisions(grad, X, W) == [asked] * 3
    for got, expected in zip(grad(X, W), jax.grad(loss_fn, argnums=(0, 1))(X, W), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_rule_asks_for_it_in_the_body_of_a_loop():
    def model(x, w):
        def layer(x, _):
            with jax.named_scope("solver"):
                y = x @ w.T
            return jnp.tanh(y @ w), None

        return jnp.sum(lax.scan(layer, x, None, length=2)[0])

    rules = {"solver": "bfloat16_x6"}
    assert precisions(amp.autocast(model, rules=rules), X, W) == [X6, None]
    (row,) = amp.explain(model, rules=rules)(X, W).select("solver", primitive="dot_general", direction="forward").rows
    assert (row.compute, row.why) == ("float32", "pattern")


def test_a_rule_overrules_that_distances_are_float32():
    def model(x, w):
        with jax.named_scope("knn"):
            return distances(x, w)

    assert precisions(amp.autocast(model), X, W) == [None]  # float32, since its terms cancel
    assert precisions(amp.autocast(model, rules={"knn": "bfloat16_x3"}), X, W) == [X3]


def test_what_the_program_asks_for_and_other_dtypes_stay():
    def model(x, w, kernel):
        low = (x.astype(jnp.bfloat16) @ w.T.astype(jnp.bfloat16)).astype(jnp.float32)
        image = lax.conv(x[None, None], kernel, (1, 1), "SAME")
        return jnp.dot(x, w.T, precision="highest") + low + jnp.sum(image)

    cast, args = amp.autocast(model, "bfloat16_x3"), (X, W, np.ones((1, 1, 2, 2), np.float32))
    assert precisions(cast, *args) == [None, (lax.Precision.HIGHEST,) * 2]
    assert precisions(cast, *args, primitive="conv_general_dilated") == [None]


@pytest.mark.aot
@pytest.mark.parametrize("name", ["bfloat16_x3", "bfloat16_x6"])
def test_compiled_for_a_gpu_the_products_carry_the_algorithm(name):
    import gpu_aot

    def loss_fn(w, x):
        with amp.precision(name):
            return jnp.sum(jnp.square(x @ w))

    grad = jax.grad(amp.autocast(loss_fn), argnums=(0, 1))
    args = gpu_aot.struct(gpu_aot.h200_mesh(), (jnp.ones((256, 128)), jnp.ones((512, 256))))
    compiled = gpu_aot.compile_for(grad, *args).as_text()
    assert compiled.count(f"algorithm=dot_bf16_bf16_f32_{name[-2:]}") == 3
