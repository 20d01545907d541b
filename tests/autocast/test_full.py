"""What is evaluated in float32 beyond the op classes: what only float32 ops read, and what must not be rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jaxprs import dtypes, equations, read_low, row

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

F16, F32 = "float16", "float32"
PRODUCT, FULL_PRODUCT = "float16 float16 -> float16", "float32 float32 -> float32"
KEYS = jax.random.split(jax.random.key(0), 4)
X, W = jax.random.normal(KEYS[0], (6, 8)), jax.random.normal(KEYS[1], (8, 8)) / 3


class TestReadInFloat32Only:
    """Evaluated in float32, a cheap op fuses with its readers."""

    def test_a_step_of_an_integrator_is_not_rounded_before_it_is_added(self):
        @read_low
        def step(w, y):
            k = jnp.tanh(y @ w)
            return y + 0.025 * k

        assert dtypes(amp.autocast(step), W, X, primitive="mul") == [FULL_PRODUCT]
        assert dtypes(amp.autocast(step), W, X, primitive="tanh") == ["float32 -> float32"]

    @pytest.mark.parametrize("between", [lambda h: jnp.split(h, 2, -1)[0], jnp.transpose, lambda h: h[1:, ::2]])
    def test_through_ops_that_move_values(self, between):
        fun = amp.autocast(lambda w, x: jnp.exp(between(jnp.tanh(x @ w))))
        assert dtypes(fun, W, X, primitive="tanh") == ["float32 -> float32"]

    @pytest.mark.parametrize("called", [jax.jit, jax.custom_jvp])
    def test_through_calls(self, called):
        if called is jax.custom_jvp:
            called = lambda f: jax.nn.softplus  # noqa: E731
        fun = amp.autocast(lambda w, x: jnp.sum(called(jnp.exp)(2 * (x @ w))))
        assert dtypes(fun, W, X, primitive="mul")[0] == FULL_PRODUCT

    def test_what_a_product_reads_as_well_is_not(self):
        def fun(w, x):
            h = jnp.tanh(x @ w)
            return h @ w, jnp.exp(h)

        assert dtypes(amp.autocast(fun), W, X, primitive="tanh") == ["float16 -> float16"]

    def test_comparisons_do_not_hold_a_value_in_low_precision(self):
        fun = amp.autocast(lambda w, x: jax.nn.logsumexp(3 * (x @ w)))
        assert set(dtypes(fun, W, X, primitive="mul")) == {FULL_PRODUCT}
        assert dtypes(fun, W, X, primitive="reduce_max") == ["float32 -> float32"]

    def test_what_a_loop_or_checkpoint_keeps_is_low_precision(self):
        def fun(w, x):
            return jax.checkpoint(jnp.exp)(jnp.tanh(x @ w))

        assert dtypes(amp.autocast(fun), W, X, primitive="tanh") == ["float16 -> float16"]


LABELS = jnp.array([0, 3, 7, -1, 5, 2])


def by_hand(logits, labels):
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]


class TestLabelLogit:
    """Logits are cast once for a whole loss: a label's logit of its own would not cancel their rounding."""

    @pytest.mark.parametrize("loss", [by_hand, optax.softmax_cross_entropy_with_integer_labels])
    def test_is_picked_from_the_float32_copy_and_its_gradient_not_scattered(self, loss):
        grad = jax.grad(amp.autocast(lambda w, x: jnp.mean(loss(x @ w, LABELS))))
        copies = [
            eqn
            for eqn in equations(grad, W, X)
            if eqn.primitive.name == "convert_element_type" and row(eqn) == "float16 -> float32"
        ]
        assert [eqn.outvars[0].aval.shape for eqn in copies] == [(6, 8), (8, 8)]  # the logits, the gradient of `w`
        gathers = [r for r in dtypes(grad, W, X, primitive="gather") if r.startswith("float")]
        assert gathers[0] == "float32 int32 -> float32"
        wide = [e.outvars[0].aval.shape for e in equations(grad, W, X) if e.primitive.name == "scatter-add"]
        assert (6, 8) not in wide

    def test_has_the_gradient_and_the_derivatives_of_a_gather(self):
        def loss(w):
            return jnp.mean(by_hand(X @ w, LABELS))

        def derivatives(fun, w):
            return jax.grad(fun)(w), jax.jvp(jax.grad(fun), (w,), (w,))[1], jnp.stack(jax.jvp(fun, (w,), (w,)))

        both = jax.jit(lambda w: (derivatives(amp.autocast(loss), w), derivatives(loss, w)))
        for got, want, tolerance in zip(*both(W), ({"atol": 2e-3}, {"atol": 2e-3}, {"rtol": 2e-3}), strict=True):
            np.testing.assert_allclose(got, want, **tolerance)

    def test_out_of_bounds_is_what_it_is_without_autocast(self):
        labels = LABELS.at[1].set(99)

        def loss(w):
            return by_hand(X @ w, labels)

        np.testing.assert_allclose(amp.autocast(loss)(W), loss(W), rtol=2e-3)
        assert np.isnan(amp.autocast(loss)(W)[1])
        one, other = (jax.grad(lambda w, f=f: jnp.nansum(f(w)))(W) for f in (amp.autocast(loss), loss))
        np.testing.assert_allclose(one, other, atol=1e-2)

    def test_a_table_is_not_cast_for_a_few_of_its_rows(self):
        def fun(w, x):
            return jnp.sum((x @ w)[jnp.array([0, 2])])

        assert "float16 int32 -> float16" in dtypes(amp.autocast(fun), W, X, primitive="gather")


class TestNotRounded:
    """A product of what float16 cannot hold, or of logarithms, stays float32."""

    @pytest.mark.parametrize("low", ["float16", "bfloat16"])
    def test_a_product_of_values_that_hold_a_large_constant(self, low):
        def fun(x):
            filled = jnp.where(x > 100, x, -1e38)
            return (filled / 1e36) @ W, (filled / 1e30) @ W, filled @ W

        products = dtypes(amp.autocast(fun, low), X, primitive="dot_general")
        low_product = f"{low} {low} -> {low}"
        full = [FULL_PRODUCT] * 2 if low == "float16" else [low_product] * 2  # -1e8 and -1e38 fit bfloat16
        assert products == [low_product, *full]
        assert all(np.isfinite(x).all() for x in amp.autocast(fun, low)(X))

    def test_through_a_loop(self):
        def fun(x):
            init = jnp.full((6, 8), -1e5)
            return lax.scan(lambda m, x: (jnp.maximum(m, x), m @ W), init, jnp.stack([x] * 3))

        assert dtypes(amp.autocast(fun), X, primitive="dot_general") == [FULL_PRODUCT]

    def test_a_product_of_logarithms(self):
        def cross_entropy(w, x):
            return -jnp.einsum("bc,bd->cd", jax.nn.one_hot(LABELS, 8), jax.nn.log_softmax(x @ w))

        assert dtypes(amp.autocast(cross_entropy), W, X, primitive="dot_general") == [PRODUCT, FULL_PRODUCT]

    @pytest.mark.parametrize(
        "fun",
        [
            lambda x: (x / 1e6) @ W,
            lambda x: (x - jnp.sum(x, 0) / 1e6) @ W,
            lambda x: jax.nn.softmax(jnp.where(x > 0, x, -1e9)) @ W,
            lambda x: (x * jnp.log(512.0)) @ W,
            lambda x: jnp.exp(jnp.log(x)) @ W,
            lambda x: jnp.tanh(jnp.log(x)) @ W,
        ],
    )
    def test_what_is_bounded_again_is_low_precision(self, fun):
        assert dtypes(amp.autocast(fun), X, primitive="dot_general") == [PRODUCT]

    def test_a_loss_that_selects_by_products_is_finite(self):
        logits = jnp.zeros((2, 12, 8)) + jnp.arange(8.0) / 8
        padding = jnp.broadcast_to(jnp.arange(16) >= 4, (2, 16)).astype(jnp.float32)

        def loss(scale):
            return jnp.mean(optax.ctc_loss(scale * logits, jnp.zeros((2, 12)), jnp.ones((2, 16), int), padding))

        np.testing.assert_allclose(*jax.jit(lambda scale: (amp.autocast(loss)(scale), loss(scale)))(1.0), rtol=1e-5)

    def test_a_product_of_vectors_is_a_sum(self):
        x = jnp.full(512, 16.0)  # its square is 131,072
        assert amp.autocast(jnp.vdot)(x, x) == 131_072
        assert dtypes(amp.autocast(jnp.vecdot), X, X, primitive="dot_general") == [FULL_PRODUCT]
        rows = amp.autocast(lambda x, y: (x[:, None, :] @ y[:, :, None])[:, 0, 0])
        assert dtypes(rows, X, X, primitive="dot_general") == [FULL_PRODUCT]


class TestMixedProduct:
    """JAX traces a product of a float16 weight and a float32 input as one op with a float32 result."""

    @pytest.mark.parametrize("low", ["float16", "bfloat16"])
    @pytest.mark.parametrize("traced", ["float16", "bfloat16"])
    @pytest.mark.parametrize("to", [None, "float32", "float16"])
    def test_is_low_precision_if_its_other_dtypes_are_the_compute_dtype(self, low, traced, to):
        def fun(w, x):
            return lax.dot(x, w, preferred_element_type=to)

        w = W.astype(traced)
        (product,) = dtypes(amp.autocast(fun, low), w, X, primitive="dot_general")
        is_low = {traced, to} <= {low, None, F32}
        assert product == (f"{low} {low} -> {low}" if is_low else f"float32 {traced} -> {to or F32}")
        assert jax.eval_shape(amp.autocast(fun, low), w, X) == jax.eval_shape(fun, w, X)

    @pytest.mark.parametrize("weight_grad_dtype", [None, "float32"])
    def test_has_gradients_of_the_dtypes_of_its_operands(self, weight_grad_dtype):
        def loss(w, b, x):
            return jnp.mean(jnp.square(jnp.tanh(x @ w + b) @ w))

        args = W.astype(F16), jnp.zeros(8, F16), X
        low = amp.autocast(loss, weight_grad_dtype=weight_grad_dtype)
        assert set(dtypes(jax.grad(low, (0, 1, 2)), *args, primitive="dot_general")) <= {
            PRODUCT,
            "float16 float16 -> float32",
        }
        for got, want, arg in zip(jax.grad(low, (0, 1, 2))(*args), jax.grad(loss, (0, 1, 2))(*args), args, strict=True):
            assert got.dtype == arg.dtype
            np.testing.assert_allclose(np.float32(got), np.float32(want), atol=1e-3)

    def test_is_float32_where_the_code_or_an_operand_says_so(self):
        def fun(w, x):
            with amp.full_precision():
                y = x @ w
            return y, jnp.dot(x, w, precision="highest"), jnp.where(x > 0, x, -1e9) @ w, jnp.vecdot(x[0], w[0])

        products = dtypes(amp.autocast(fun), W.astype(F16), X, primitive="dot_general")
        assert products == ["float32 float16 -> float32"] * 4

    def test_of_16_bits_is_as_it_was_traced(self):
        fun = amp.autocast(lambda w, x: lax.dot(x, w, preferred_element_type=F32))
        for traced in (F16, "bfloat16"):
            products = dtypes(fun, W.astype(F16), X.astype(traced), primitive="dot_general")
            assert products == [f"{traced} float16 -> float32"]


class TestBiasGradient:
    """Summed in float16, 70,000 ones would be inf; the bias itself is cast first, not kept in front of a loop."""

    @pytest.mark.sweep(4)
    @pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
    @pytest.mark.parametrize("op", [jnp.add, jnp.subtract, jnp.maximum, jnp.multiply])
    def test_is_summed_in_float32(self, op, shape):
        def loss(b, x):
            return jnp.sum(jnp.tanh(op(x @ jnp.ones((1, 1)), b) @ jnp.ones((1, 1))))

        x = jnp.full((70_000, 1), 2.0**-8)
        b = jnp.full(shape, 2.0**-7)
        one, other = (jax.grad(f)(b, x) for f in (amp.autocast(loss), loss))
        np.testing.assert_allclose(one, other, rtol=1e-3)
        sums = dtypes(jax.grad(amp.autocast(loss)), b, x, primitive="reduce_sum")
        assert set(sums) <= {"float32 -> float32"}

    def test_of_a_layer_with_several_axes(self):
        """The heads of an attention, as Flax's `DenseGeneral` writes them."""

        def heads(w, b, x):
            return jnp.einsum("ld,dhe->lhe", x, w) + b[None]

        w, b = jnp.ones((8, 2, 4)), jnp.zeros((2, 4))
        assert dtypes(amp.autocast(read_low(heads)), w, b, X, primitive="add") == [PRODUCT]
        grad = jax.grad(amp.autocast(lambda b, w, x: jnp.sum(jnp.tanh(heads(w, b, x)).reshape(6, 8) @ W)))
        assert set(dtypes(grad, b, w, X, primitive="reduce_sum")) == {"float32 -> float32"}

    def test_what_spans_the_batch_is_no_bias(self):
        positions = jnp.ones((6, 8))
        fun = amp.autocast(read_low(lambda w, x: (x @ w).reshape(1, 6, 8) + positions))
        assert dtypes(fun, W, X, primitive="add") == [FULL_PRODUCT]

    def test_a_loop_keeps_no_broadcast_bias(self):
        def loss(b, x):
            def body(h, _):
                return jnp.tanh(h @ W + b), None

            return jnp.sum(lax.scan(body, x @ W, length=3)[0])

        grad = jax.grad(amp.autocast(loss))
        forward = next(e for e in equations(grad, jnp.ones(8), X) if e.primitive.name == "scan")
        # All that it reads: the bias, the state and the weight.
        assert sorted(v.aval.size for v in forward.invars) == [8, 48, 64]


def test_a_mutable_array_may_be_an_argument_or_closed_over():
    ref = jax.new_ref(jnp.zeros((6, 8)))

    def fun(ref, x):
        ref[...] = ref[...] + x
        return x @ W

    for call in (amp.autocast(fun), jax.jit(amp.autocast(fun)), lambda _, x: amp.autocast(lambda x: fun(ref, x))(x)):
        call(ref, X)
    np.testing.assert_allclose(ref[...], 3 * X, rtol=1e-6)


class TestEqualLayers:
    """Differentiated, the ops of one call in the code are one inlined `jit`, which JAX remembers."""

    @staticmethod
    def model(layers):
        def loss(ws, x):
            for w in ws[:layers]:
                with jax.named_scope("layer"):
                    x = jax.nn.gelu(x @ w)
            return jnp.sum(x)

        return loss

    def test_are_differentiated_once(self, monkeypatch):
        from jmp_amp._autocast import _plan

        called = []
        call = _plan.CastOp.__call__
        monkeypatch.setattr(_plan.CastOp, "__call__", lambda op, args: called.append(op) or call(op, args))

        def calls(layers, width):
            called.clear()
            ws = [jnp.eye(width)] * 8
            jax.make_jaxpr(jax.grad(amp.autocast(self.model(layers))))(ws, jnp.ones((5, width)))
            return len(called)

        assert 0 < calls(8, 12) <= calls(2, 13)  # widths that no other test has

    def test_keep_their_scopes_and_add_no_calls(self):
        from jaxprs import scoped_equations

        ws = [W] * 2
        found = [*scoped_equations(jax.grad(amp.autocast(self.model(2))), ws, X)]
        products = [scope for scope, eqn in found if eqn.primitive.name == "dot_general"]
        assert len(products) == 5  # two forward, three backward: nothing wants the gradient of `x`
        assert all("layer" in scope for scope in products)
        assert not [eqn for _, eqn in found if eqn.primitive.name == "jit" and eqn.params["name"] == "_run"]
