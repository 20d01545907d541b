"""`save` and `weight_grad_dtype`: what is kept for the backward pass, and in which dtype weight gradients arrive."""

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import dtypes, equations, inner_equations, row

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

X, W = jnp.ones((4, 8)) / 8, jnp.eye(8)
TOKENS = jax.random.randint(jax.random.key(1), (2, gpt.CONTEXT + 1), 0, gpt.VOCAB)


@pytest.fixture(scope="module")
def params():
    with jax.numpy_rank_promotion("allow"):
        return gpt.init(jax.random.key(0))


class TestSave:
    def test_keeps_only_products_for_the_backward_pass(self, params):
        def kept(**options):
            """Elements that the scan stacks for the backward pass, by dtype."""
            grad = jax.grad(amp.autocast(gpt.loss, **options))
            forward = next(e for e in equations(grad, params, TOKENS) if e.primitive.name == "scan")
            return {
                dtype: sum(v.aval.size for v in forward.outvars if v.aval.dtype == dtype)
                for dtype in (jnp.float16, jnp.float32)
            }

        everything, matmuls = kept(save="all"), kept()
        # What is still float32 is the residual stream, the carry of the loop.
        stream = TOKENS[:, :-1].size * gpt.DIM
        assert matmuls[jnp.float32] <= (gpt.LAYERS + 1) * stream
        assert matmuls[jnp.float32] < everything[jnp.float32] / 4
        assert matmuls[jnp.float16] <= everything[jnp.float16]

    def test_products_are_not_computed_again(self, params):
        def products(**options):
            return len(dtypes(jax.grad(amp.autocast(gpt.loss, **options)), params, TOKENS, primitive="dot_general"))

        assert products() == products(save="all")

    def test_composes_with_vmap_jit_dropout_and_the_users_checkpoint(self):
        def loss(w, x, key):
            def body(x, w_key):
                w, key = w_key
                h = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
                return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h * 2, 0), None

            return jnp.sum(lax.scan(body, x, (jnp.stack([w] * 3), jax.random.split(key, 3)))[0])

        def grads(fun):
            return jax.jit(jax.vmap(jax.grad(fun), (None, 0, 0)))(
                W, jnp.stack([X, 2 * X]), jax.random.split(jax.random.key(0))
            )

        np.testing.assert_allclose(grads(amp.autocast(loss)), grads(loss), atol=2e-2)

    def test_keeps_the_cast_of_a_weight_that_all_iterations_share(self):
        def loss(w, x):
            step = jax.jit(lambda h: jnp.tanh(h @ w.T))
            return jnp.sum(lax.scan(lambda h, _: (step(h), None), x, length=3)[0])

        _, backward = (e for e in equations(jax.grad(amp.autocast(loss)), W, X) if e.primitive.name == "scan")
        casts = [e for e in inner_equations(backward) if e.primitive.name == "convert_element_type"]
        assert casts  # of the cotangents
        assert [e for e in casts if row(e) == "float32 -> float16" and e.outvars[0].aval.shape == (8, 8)] == []

    def test_leaves_bodies_with_effects_alone(self, capfd):
        def loss(x):
            def body(x, _):
                jax.debug.print("step")
                return x @ W, None

            return jnp.sum(lax.scan(body, x, None, length=2)[0])

        printed = []
        for fun in (loss, amp.autocast(loss)):
            np.testing.assert_array_equal(jax.grad(fun)(X), jnp.ones_like(X))
            jax.effects_barrier()
            printed.append(capfd.readouterr().out)
        assert printed[0] == printed[1] != ""

    def test_another_value_is_an_error(self):
        with pytest.raises(ValueError, match=r'"all" or "matmuls", got \'dots\''):
            amp.autocast(lambda x: x, save="dots")


class TestWeightGradDtype:
    @pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint], ids=["eager", "jit", "remat"])
    def test_a_gradient_beyond_float16_is_finite(self, around):
        def loss(w, x):
            return jnp.sum(x @ w)

        x = jnp.full((1000, 8), 100.0)
        plain = jax.grad(around(amp.autocast(loss)))(W, x)
        exact = jax.grad(around(amp.autocast(loss, weight_grad_dtype="float32")))(W, x)
        assert np.isinf(plain).all()
        np.testing.assert_allclose(exact, 1e5)

    @pytest.mark.sweep(3)
    @pytest.mark.parametrize(
        ("fun", "shape"),
        [
            (lambda w, x: x @ w, (8, 3)),
            (lambda w, x: jnp.einsum("bi,kio->bko", x, w), (5, 8, 3)),
            (lambda w, x: lax.conv(x.reshape(1, 1, -1, 8), w, (1, 1), "SAME"), (2, 1, 3, 3)),
            (lambda w, x: lax.ragged_dot(x, w, jnp.array([1, 3])), (2, 8, 3)),
            (lambda w, x: lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], (3, 8, 8)),
            (lambda w, x: (x @ w) @ w.T, (8, 3)),
        ],
        ids=["matmul", "einsum", "conv", "ragged", "scan", "reused"],
    )
    def test_gradients_are_those_of_float32_and_no_float16_lies_between(self, fun, shape):
        w = jax.random.normal(jax.random.key(0), shape)
        x = jax.random.normal(jax.random.key(1), (4, 8))

        def loss(w, x):
            return jnp.sum(jnp.square(fun(w, x)))

        grad = jax.grad(amp.autocast(loss, weight_grad_dtype="float32"))
        exact = jax.grad(loss)(w, x)
        np.testing.assert_allclose(grad(w, x), exact, rtol=2e-2, atol=2e-2 * np.abs(exact).max())
        jaxpr = jax.make_jaxpr(grad)(w, x)
        assert any(
            e.outvars[0].aval.dtype == jnp.float32 and e.invars[0].aval.dtype == jnp.float16
            for e in equations(grad, w, x)
            if e.primitive.name in ("dot_general", "conv_general_dilated", "ragged_dot_general")
        )
        casts = [e for e in jaxpr.eqns if e.primitive.name == "convert_element_type"]
        assert not any(e.invars[0].aval.dtype == jnp.float16 and e.outvars[0].aval.shape == shape for e in casts), (
            "a weight gradient was float16"
        )

    def test_gradients_of_activations_stay_low_precision(self):
        grad = jax.grad(amp.autocast(lambda x, w: jnp.sum(jnp.tanh(x @ w) @ w), weight_grad_dtype="float32"))
        rows = dtypes(jax.jit(grad), X, W, primitive="dot_general")
        assert "float16 float16 -> float16" in rows

    def test_another_dtype_is_an_error(self):
        with pytest.raises(ValueError, match="float32 or None, got 'bfloat16'"):
            amp.autocast(lambda x: x, weight_grad_dtype="bfloat16")
