"""What `autocast` promises of one function: op classes, the bias and constant rules, eligibility, signature."""

import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jaxprs import dtypes, equations, read_low

import jmp_amp as amp
from jmp_amp._formats import FORMATS
from jmp_amp._policy import NAMED_POLICIES

pytestmark = pytest.mark.usefixtures("users_code")

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def out_dtype(fun, *args, dtype="float16"):
    """The dtype of what `fun` computes under autocast, as an op reads it, before it is cast back for the caller.

    An unregistered primitive would cast back, and a sort does not: what it returns is what was computed.
    """
    last = jax.make_jaxpr(amp.autocast(read_low(fun), dtype=dtype))(*args).eqns[-1]
    return last.invars[0].aval.dtype if last.primitive.name == "convert_element_type" else last.outvars[0].aval.dtype


X, W, B = jnp.ones((4, 8)), jnp.ones((8, 8)), jnp.ones(8)


class TestClasses:
    @pytest.mark.parametrize("dtype", [F16, BF16])
    @pytest.mark.parametrize(
        ("fun", "expected"),
        [
            (lambda x: x @ W, "low"),
            (lambda x: lax.conv(x[None, None], W[None, None, :3, :3], (1, 1), "SAME"), "low"),
            (lambda x: lax.ragged_dot(x, W[None], jnp.array([4])), "low"),
            (lambda x: jnp.exp(x @ W), F32),
            (lambda x: jnp.log1p(x @ W), F32),
            (lambda x: lax.rsqrt(x @ W), F32),
            (lambda x: jnp.power(x @ W, 0.5), F32),
            (lambda x: jnp.reciprocal(x @ W), F32),
            (lambda x: jnp.sum(x @ W, 1), F32),
            (lambda x: jnp.cumsum(x @ W, 1), F32),
            (lambda x: jax.nn.softmax(x @ W), F32),
            (lambda x: jax.nn.logsumexp(x @ W, 1), F32),
            (lambda x: jnp.mean(x @ W, 1), F32),
            (lambda x: jnp.tanh(x @ W), "low"),
            (lambda x: jax.nn.gelu(x @ W), "low"),
            (lambda x: jax.nn.relu(x @ W), "low"),
            (lambda x: jax.nn.sigmoid(x @ W), "low"),
            (lambda x: (x @ W).reshape(8, 4).T[:2], "low"),
            (lambda x: (x @ W) * 2.0 + 1.0, "low"),
            (lambda x: (x @ W) + (x @ W), "low"),
            (lambda x: jnp.concatenate([x @ W, x @ W]), "low"),
            (lambda x: x + (x @ W), F32),  # a matrix that comes straight from an input is committed
            (lambda x: jnp.concatenate([x @ W, x]), F32),
            (lambda x: jnp.where(x > 0, x @ W, x), F32),
            (lambda x: jnp.linalg.inv((x @ W)[:, :4] + jnp.eye(4)), F32),
            (lambda x: jnp.fft.fft(x @ W).real, F32),
        ],
    )
    def test_result_has_the_dtype_of_its_class(self, fun, expected, dtype):
        assert out_dtype(fun, X, dtype=dtype) == (dtype if expected == "low" else expected)

    def test_matmul_takes_low_precision_and_accumulates_in_the_unit(self):
        assert dtypes(amp.autocast(lambda x: x @ W), X, primitive="dot_general") == ["float16 float16 -> float16"]

    def test_softmax_is_evaluated_in_float32_from_the_logits_on(self):
        softmax = amp.autocast(lambda x: jax.nn.softmax((x @ W) / 3.0))
        for primitive in ("div", "reduce_max", "sub", "exp", "reduce_sum"):
            assert all("float16" not in row for row in dtypes(softmax, X, primitive=primitive)), primitive

    def test_loss_of_low_precision_predictions_is_float32(self):
        mse = amp.autocast(lambda x, y: jnp.mean((x @ W - y) ** 2))
        for primitive in ("sub", "square", "integer_pow", "reduce_sum"):
            assert all("float16" not in row for row in dtypes(mse, X, X, primitive=primitive)), primitive

    def test_float32_targets_beyond_float16_survive_in_the_loss(self):
        mse = amp.autocast(lambda x, y: jnp.mean(((x @ W)[:, 0] - y) ** 2))
        assert mse(X, jnp.full(4, 1e6)) == pytest.approx((1e6 - 8) ** 2, rel=1e-5)

    def test_normalisation_is_float32_throughout(self):
        def norm(x):
            h = x @ W
            centred = h - jnp.mean(h, -1, keepdims=True)
            return centred * lax.rsqrt(jnp.var(h, -1, keepdims=True) + 1e-6)

        assert out_dtype(norm, X) == F32
        for primitive in ("sub", "square", "div", "rsqrt", "mul"):
            assert all("float16" not in row for row in dtypes(amp.autocast(norm), X, primitive=primitive)), primitive

    def test_norm_of_a_single_example_is_float32_although_its_statistics_are_scalars(self):
        def norm(x):
            h = x @ W
            return (h - jnp.mean(h)) * lax.rsqrt(jnp.var(h) + 1e-6)

        assert out_dtype(norm, B) == F32


class TestBias:
    @pytest.mark.parametrize(
        "layer",
        [
            lambda x, w, b: x @ w + b,
            lambda x, w, b: b + x @ w,
            lambda x, w, b: x @ w + jnp.broadcast_to(b, (4, 8)),
            lambda x, w, b: x @ w + b.reshape(1, 8),
            lambda x, w, b: jax.vmap(lambda x: x @ w + b)(x),
            lambda x, w, b: jax.vmap(jnp.add, (0, None))(x @ w, b),
            lambda x, w, b: x @ w + jnp.stack([b, b])[1],
        ],
        ids=["right", "left", "broadcast", "reshape", "vmap", "vmap add", "stacked"],
    )
    def test_does_not_widen(self, layer):
        assert out_dtype(layer, X, W, B) == F16

    def test_of_a_convolution_does_not_widen(self):
        def layer(x, w, b):
            return lax.conv(x, w, (1, 1), "SAME") + b[None, :, None, None]

        assert out_dtype(layer, jnp.ones((1, 3, 8, 8)), jnp.ones((5, 3, 3, 3)), jnp.ones(5)) == F16

    def test_is_cast_after_its_broadcast_so_its_gradient_is_summed_in_float32(self):
        def loss(b, x, w):
            return jnp.sum(x @ w + b)

        grad = jax.grad(amp.autocast(loss))(jnp.ones(1), jnp.ones((70_000, 1)), jnp.ones((1, 1)))
        assert grad == 70_000

    def test_that_was_computed_widens(self):
        assert out_dtype(lambda x, w, b: x @ w + jnp.exp(b), X, W, B) == F32

    def test_scalars_never_widen(self):
        scalar = jnp.float32(2)
        assert out_dtype(lambda x, s: (x @ W) * s, X, scalar) == F16
        assert out_dtype(lambda x, s: (x @ W) * jnp.sqrt(s), X, scalar) == F16
        assert out_dtype(lambda x: (x @ W) / jnp.sqrt(8.0), X) == F16
        assert out_dtype(lambda x: (x @ W) * np.float32(3), X) == F16

    def test_zeros_to_which_is_added_are_float32_and_zeros_that_are_chosen_give_way(self):
        assert out_dtype(lambda x: (x @ W) + jnp.zeros((4, 8)), X) == F32
        assert out_dtype(lambda x: jnp.where(x > 0, x @ W, jnp.zeros((4, 8))), X) == F16
        assert out_dtype(lambda x: jnp.zeros((9, 8)).at[2:6].set(x @ W), X) == F16


class TestConstants:
    @pytest.mark.parametrize("mask", [-1e9, float(np.finfo(np.float32).min), 1e30])
    def test_that_the_low_dtype_cannot_hold_makes_its_op_float32(self, mask):
        fun = amp.autocast(lambda x: jnp.where(x > 0, x @ W, mask))
        np.testing.assert_array_equal(fun(-X), np.full((4, 8), mask, np.float32))
        assert out_dtype(lambda x: jnp.where(x > 0, x @ W, mask), X) == F32

    def test_that_would_be_flushed_to_zero_makes_its_op_float32(self):
        fun = amp.autocast(lambda x: jnp.log(jnp.abs(x @ W) + 1e-9))
        assert np.isfinite(fun(jnp.zeros_like(X))).all()

    @pytest.mark.parametrize("dtype", [F16, BF16])
    def test_that_would_be_rounded_to_one_makes_its_op_float32(self, dtype):
        def fun(x):
            return -jnp.log1p(-jnp.clip(jax.nn.sigmoid(x @ (50 * W)), 1e-6, 1 - 1e-6))

        ones = jnp.ones((4, 8))
        np.testing.assert_allclose(amp.autocast(fun, dtype)(ones), fun(ones), rtol=1e-2)
        assert out_dtype(lambda x: 0.9999 * (x @ W), X, dtype=dtype) == F32
        assert out_dtype(lambda x: 0.99 * (x @ W), X, dtype=dtype) == dtype

    def test_that_is_closed_over_is_looked_at_too(self):
        mask = jnp.float32(-1e9)
        assert out_dtype(lambda x: jnp.where(x > 0, x @ W, mask), X) == F32
        assert out_dtype(lambda x: jnp.maximum(x @ W, jnp.full(8, -1e9)), X) == F32

    def test_infinity_and_what_fits_stay_low(self):
        assert out_dtype(lambda x: jnp.where(x > 0, x @ W, -jnp.inf), X) == F16
        assert out_dtype(lambda x: jnp.where(x > 0, x @ W, -1e4), X) == F16

    def test_bfloat16_holds_what_float32_holds(self):
        assert out_dtype(lambda x: jnp.where(x > 0, x @ W, -1e9), X, dtype=BF16) == BF16

    def test_fully_masked_rows_give_no_nan(self):
        def attention(x):
            return jax.nn.softmax(jnp.where(jnp.zeros((4, 8), bool), x @ W, -1e9))

        np.testing.assert_allclose(amp.autocast(attention)(X), 1 / 8)


class TestEligibility:
    @pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn", "bfloat16"])
    def test_other_dtypes_are_left_as_they_are(self, dtype):
        x = jnp.ones((4, 4), dtype)
        assert str(jax.make_jaxpr(amp.autocast(lambda x: x + x))(x)) == str(jax.make_jaxpr(lambda x: x + x)(x))

    def test_float64_is_left_as_it_is(self):
        with jax.enable_x64(True):
            fun = amp.autocast(lambda x: jnp.exp(x @ x))
            x = jnp.ones((2, 2), jnp.float64)
            assert dtypes(fun, x, primitive="dot_general") == ["float64 float64 -> float64"]

    def test_explicit_casts_are_honoured(self):
        def fun(x):
            low = x.astype(BF16)
            return (low @ W.astype(BF16)).astype(F32)

        assert dtypes(amp.autocast(fun), X, primitive="dot_general") == ["bfloat16 bfloat16 -> bfloat16"]

    @pytest.mark.parametrize("precision", [lax.Precision.HIGHEST, "highest", "F32_F32_F32"])
    def test_matmul_that_asks_for_float32_gets_it(self, precision):
        fun = amp.autocast(lambda x: jnp.dot(x, W, precision=precision))
        assert dtypes(fun, X, primitive="dot_general") == ["float32 float32 -> float32"]

    def test_unregistered_primitives_get_the_traced_dtypes_back(self):
        def twice(x):
            return jax.pure_callback(lambda x: 2 * x, jax.typeof(x), x)

        rows = dtypes(amp.autocast(lambda x: twice(x @ W)), X, primitive="pure_callback")
        assert rows == ["float32 -> float32"]


class TestSignature:
    def test_results_come_back_in_the_traced_dtypes(self):
        def fun(x):
            return {"y": x @ W, "n": jnp.int32(3), "half": x.astype(F16)}, jnp.sum(x)

        chex.assert_trees_all_equal_shapes_and_dtypes(amp.autocast(fun)(X), fun(X))

    def test_results_come_back_in_the_output_dtype_of_a_policy(self):
        assert amp.autocast(lambda x: x @ W, "p=f32,c=bf16,o=f16")(X).dtype == F16
        assert amp.autocast(lambda x: x @ W, "float32")(X).dtype == F32

    def test_arguments_that_are_no_arrays_are_passed_through(self):
        def fun(x, flag, name, nothing, *, scale):
            assert flag is True
            assert name == "tanh"
            assert nothing is None
            assert scale == 2.0
            return getattr(jnp, name)(x @ W) * scale, name, scale

        y, name, scale = amp.autocast(fun)(X, True, "tanh", None, scale=2.0)
        assert y.dtype == F32
        assert (name, scale) == ("tanh", 2.0)

    def test_numpy_arrays_and_keys_are_arguments(self):
        def fun(x, key):
            return x @ W + jax.random.normal(key, (4, 8)), key

        y, key = amp.autocast(fun)(np.ones((4, 8), np.float32), jax.random.key(0))
        assert y.dtype == F32
        assert key.dtype == jax.random.key(0).dtype

    def test_closed_over_tracers_work(self):
        def loss(w):
            return jnp.sum(amp.autocast(lambda x: x @ w)(X))

        np.testing.assert_array_equal(jax.jit(jax.grad(loss))(W), np.full((8, 8), 4.0))

    def test_is_a_decorator_with_and_without_arguments(self):
        @amp.autocast
        def plain(x):
            return x @ W

        @amp.autocast(dtype="bfloat16")
        def brain(x):
            return x @ W

        assert plain.__name__ == "plain"
        assert dtypes(plain, X, primitive="dot_general") == ["float16 float16 -> float16"]
        assert dtypes(brain, X, primitive="dot_general") == ["bfloat16 bfloat16 -> bfloat16"]

    def test_disabled_or_float32_is_the_function_itself(self):
        def fun(x):
            return x

        assert amp.autocast(fun, enabled=False) is fun
        assert amp.autocast(fun, dtype="float32") is fun

    @pytest.mark.parametrize(
        ("dtype", "message"), [("float64", "float64"), ("int32", "int32"), ("float8_e4m3fn", "float8_e4m3fn")]
    )
    def test_a_dtype_it_cannot_compute_in_is_an_error(self, dtype, message):
        with pytest.raises(ValueError, match=message):
            amp.autocast(lambda x: x, dtype=dtype)

    def test_what_is_no_function_is_an_error(self):
        with pytest.raises(TypeError, match="takes a function, got int"):
            amp.autocast(3)

    @pytest.mark.parametrize(
        ("given", "cure"),
        [
            ("fp16", "'fp16'"),
            ("float8", "'float8'"),
            (jnp.float16, "dtype"),
            (np.float32, "dtype"),
            (jnp.dtype("bfloat16"), "dtype"),
            (jnp.int32, "dtype"),
            ("mixed_bfloat16", "'mixed_bfloat16'"),
            (amp.get_policy("O1"), "policy"),
        ],
        ids=repr,
    )
    def test_a_dtype_or_a_policy_in_place_of_the_function_is_an_error_with_the_cure(self, given, cure):
        with pytest.raises(TypeError) as error:
            amp.autocast(given)
        message = str(error.value)
        assert f"`autocast` takes a function, got {repr(given)[:50]}" in message  # a long one is shortened
        assert f"`amp.autocast(fun, {cure})`, or `@amp.autocast(dtype={cure})`" in message

    @pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}])
    def test_a_with_block_is_an_error_with_the_cure(self, options):
        cures = r"has no `with` block; write `fun = amp.autocast\(fun, ...\)`.*`with amp.precision\(dtype\):`"
        with pytest.raises(TypeError, match=cures), amp.autocast(**options):
            pass

    @pytest.mark.parametrize(
        ("name", "dtype"), [("fp16", "float16"), ("half", "float16"), ("f16", "float16"), ("bf16", "bfloat16")]
    )
    def test_dtypes_have_their_usual_names_wherever_one_is_named(self, name, dtype):
        def fun(x):
            return x @ W

        def inside(x):
            with amp.precision(name):
                return x @ W

        initialized, params, _ = amp.interop.apex.initialize(lambda p, x: x @ p, W, optax.sgd(0.1), "O2", dtype=name)
        low = [
            amp.autocast(fun, name),
            amp.autocast(fun, amp.Policy("fp32", name, "fp32")),
            amp.autocast(fun, f"p=fp32,c={name},o=fp32"),
            amp.autocast(inside, "float32", rules={jax.lax.tanh_p: "full"}),
            lambda x: initialized(params, x),
        ]
        for each in low:
            assert dtypes(each, X, primitive="dot_general") == [f"{dtype} {dtype} -> {dtype}"]
        assert params.dtype == dtype
        assert amp.autocast(fun, name, weight_grad_dtype="fp32")(X).dtype == jnp.float32

    def test_errors_of_the_function_are_its_own(self):
        with pytest.raises(TypeError, match="contracting dimension"):
            amp.autocast(lambda x: x @ X)(X)

    def test_effects_stay(self, capfd):
        amp.autocast(lambda x: jax.debug.print("{}", (x @ W)[0, 0]))(X)
        jax.effects_barrier()
        assert capfd.readouterr().out == "8.0\n"

    def test_threads_trace_their_own_dtypes(self):
        results = {}

        def trace(dtype):
            for _ in range(5):
                results[dtype] = dtypes(amp.autocast(lambda x: x @ W, dtype=dtype), X, primitive="dot_general")

        threads = [threading.Thread(target=trace, args=(d,)) for d in ("float16", "bfloat16")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == {d: [f"{d} {d} -> {d}"] for d in ("float16", "bfloat16")}


class TestRegions:
    def test_full_precision_runs_in_the_traced_dtypes(self):
        def fun(x):
            with amp.full_precision():
                y = x @ W
            return y @ W

        assert dtypes(amp.autocast(fun), X, primitive="dot_general") == [
            "float32 float32 -> float32",
            "float16 float16 -> float16",
        ]

    def test_full_precision_decorates_and_holds_in_the_backward_pass(self):
        @amp.full_precision
        def product(x, w):
            return x @ w

        grad = jax.grad(amp.autocast(lambda x: jnp.sum(product(x, W) @ W)))
        rows = dtypes(grad, X, primitive="dot_general")
        assert rows.count("float32 float32 -> float32") == 2
        assert rows.count("float16 float16 -> float16") == 2
        rows = dtypes(amp.autocast(jax.grad(lambda x: jnp.sum(product(x, W) @ W))), X, primitive="dot_general")
        assert rows.count("float32 float32 -> float32") == 2

    def test_regions_nest_and_reach_into_calls_and_loops(self):
        @jax.jit
        def body(x, w):
            with amp.precision("bfloat16"):
                x = x @ w
            return x @ w

        def fun(x):
            with amp.full_precision():
                return lax.scan(lambda x, w: (body(x, w), None), x, jnp.stack([W, W]))[0]

        assert dtypes(amp.autocast(fun), X, primitive="dot_general") == [
            "bfloat16 bfloat16 -> bfloat16",
            "float32 float32 -> float32",
        ]

    def test_of_nested_regions_the_inner_one_counts(self):
        def fun(x):
            with amp.full_precision():
                with amp.precision("bfloat16"):
                    y = x @ W
                return y @ W

        assert dtypes(amp.autocast(fun), X, primitive="dot_general") == [
            "bfloat16 bfloat16 -> bfloat16",
            "float32 float32 -> float32",
        ]

    def test_regions_do_nothing_outside_autocast(self):
        def fun(x):
            with amp.precision("bfloat16"):
                return x @ W

        assert dtypes(fun, X, primitive="dot_general") == ["float32 float32 -> float32"]

    def test_a_region_of_another_dtype_is_an_error(self):
        with pytest.raises(ValueError, match="got float64"):
            amp.precision("float64")

    @pytest.mark.parametrize("name", sorted(NAMED_POLICIES.keys() - FORMATS.keys()))
    def test_the_name_of_each_policy_that_is_no_dtype_is_one(self, name):
        assert amp.autocast(lambda x: x @ W, name).autocast_of[1].policy == amp.get_policy(name)

    @pytest.mark.parametrize("given", ["O2", "p=f16,c=f16,o=f32", amp.get_policy("O2")], ids=str)
    def test_a_policy_is_given_as_itself_or_by_its_string(self, given):
        fun = amp.autocast(lambda w, x: x @ w, given)
        assert dtypes(fun, W.astype(F16), X, primitive="dot_general") == ["float16 float16 -> float16"]
        assert fun(W.astype(F16), X).dtype == F32

    def test_a_policy_that_there_is_not_is_an_error_with_those_that_there_are(self):
        with pytest.raises(ValueError, match=r"of the policy `O7`; allowed: .*Names: .*`mixed_bfloat16`, .*`O2`"):
            amp.autocast(lambda x: x, "O7")

    @pytest.mark.parametrize("name", ["float16", "f16", "half"])
    def test_the_name_of_a_dtype_is_no_policy_so_results_stay_float32(self, name):
        assert amp.autocast(lambda x: x @ W, name)(X).dtype == F32


class TestCasts:
    def test_weights_are_cast_once_a_use_and_their_cotangents_summed_in_float32(self):
        def loss(w, x):
            return jnp.sum((x @ w) @ w)

        assert dtypes(amp.autocast(loss), W, X, primitive="convert_element_type").count("float32 -> float16") == 3
        adds = dtypes(jax.grad(amp.autocast(loss)), W, X, primitive="add_any")
        assert adds == ["float32 float32 -> float32"]

    def test_computed_values_are_cast_once(self):
        def fun(x):
            h = jnp.exp(x)
            return h @ W, h @ W, h @ W

        casts = [e for e in equations(amp.autocast(fun), X) if e.primitive.name == "convert_element_type"]
        assert sum(e.invars[0].aval.shape == X.shape and e.outvars[0].aval.dtype == F16 for e in casts) == 1

    def test_a_call_and_the_ops_beside_it_share_a_cast(self):
        def fun(x):
            h = x @ W
            return jax.jit(jnp.exp)(h) + jnp.exp(h)

        assert dtypes(amp.autocast(fun), X, primitive="convert_element_type").count("float16 -> float32") == 1

    def test_the_results_of_branches_are_stored_low_though_their_readers_are_float32(self):
        def fun(i, x):
            return jnp.exp(lax.switch(i, [lambda x: jnp.tanh(x @ W), lambda x: x @ W], x))

        (cond,) = [eqn for eqn in equations(amp.autocast(fun), 0, X) if eqn.primitive.name == "cond"]
        assert cond.outvars[0].aval.dtype == F16

    def test_an_op_on_several_arrays_leaves_each_in_its_dtype(self):
        def fun(x):
            a, b = lax.optimization_barrier((x @ W, jnp.exp(x)))
            return a + b  # needs a cast, so the planner must know both dtypes

        assert dtypes(amp.autocast(fun), X, primitive="optimization_barrier") == ["float16 float32 -> float16 float32"]

    def test_an_op_that_moves_values_reads_the_float32_copy_of_them(self):
        def fun(x):
            h = x @ W
            return jnp.exp(h), jnp.exp(jnp.concatenate([h, h]))

        assert dtypes(amp.autocast(fun), X, primitive="concatenate") == ["float32 float32 -> float32"]
        assert dtypes(amp.autocast(fun), X, primitive="convert_element_type").count("float16 -> float32") == 1
