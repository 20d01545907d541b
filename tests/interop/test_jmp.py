"""Programs that were written for jmp 0.0.4, with the import changed."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
import jmp_amp.compat.jmp as jmp

pytestmark = pytest.mark.usefixtures("users_code")


def test_the_surface_is_that_of_jmp():
    assert set(jmp.__all__) == {
        *("all_finite", "DynamicLossScale", "LossScale", "NoOpLossScale", "select_tree", "StaticLossScale"),
        *("cast_to_full", "cast_to_half", "get_policy", "half_dtype", "Policy"),
    }
    assert all(hasattr(jmp, name) for name in jmp.__all__)


@pytest.mark.parametrize("make", [jmp.StaticLossScale, lambda s: jmp.DynamicLossScale(float(s))])
@pytest.mark.parametrize("scale", [2, 3, 4])
def test_scaling_and_unscaling_undo_each_other(make, scale):
    loss_scale, tree = make(scale), {"a": jnp.array(1.0)}
    scaled = loss_scale.scale(tree)
    assert scaled == {"a": scale}
    assert loss_scale.unscale(scaled)["a"] == pytest.approx(1)
    assert isinstance(loss_scale, jmp.LossScale)


def test_nothing_is_scaled_by_the_one_that_does_nothing():
    tree = {"a": jnp.ones(2)}
    none = jmp.NoOpLossScale()
    assert none.scale(tree) is none.unscale(tree) is tree
    assert (none.loss_scale, none.adjust(jnp.bool_(False))) == (1, none)


@pytest.mark.parametrize("static", [jmp.NoOpLossScale(), jmp.StaticLossScale(4), jmp.StaticLossScale(jnp.float32(4))])
def test_what_does_not_move_has_no_leaves_and_passes_through_jit(static):
    assert jax.tree.leaves(static) == []
    step = jax.jit(lambda s, x: (s.adjust(jnp.bool_(True)), s.scale(x)))
    for _ in range(2):
        after, scaled = step(static, jnp.ones(()))
    assert (after, scaled) == (static, static.loss_scale)
    assert step._cache_size() == 1


@pytest.mark.parametrize(("period", "factor"), [(20, 2), (30, 3)])
def test_the_scale_grows_after_a_period(period, factor):
    scale = jmp.DynamicLossScale(jnp.float32(10), jnp.int32(0), period, factor)
    for i in range(1, period):
        scale = scale.adjust(jnp.bool_(True))
        assert (scale.loss_scale, scale.counter) == (10, i)
    scale = scale.adjust(jnp.bool_(True))
    assert (scale.loss_scale, scale.counter, scale.period, scale.factor) == (10 * factor, 0, period, factor)


@pytest.mark.parametrize(("factor", "floor"), [(2, 1.0), (2, 0.3125), (3, 0.37)])
def test_the_scale_falls_to_its_floor_through_trees_and_jit(factor, floor):
    scale = jmp.DynamicLossScale(jnp.float32(10), jnp.int32(3), 20, factor, jnp.float32(floor))
    adjust = jax.jit(lambda s: s.adjust(jnp.bool_(False)))
    for i in range(10):
        scale = jax.tree.map(lambda x: x, adjust(scale))  # jmp loses the floor here
        assert scale.min_loss_scale == np.float32(floor)
        np.testing.assert_allclose(scale.loss_scale, max(floor, 10 / factor ** (i + 1)), rtol=1e-5)
        assert scale.counter == 0


def test_the_scale_stays_finite():
    scale = jmp.DynamicLossScale(jnp.float32(1e38), period=1, factor=16)
    assert scale.adjust(jnp.bool_(True)).loss_scale == np.float32(1e38)


def test_a_float16_loss_becomes_float32_before_it_is_scaled():
    scale = jmp.DynamicLossScale(jnp.float32(2.0**16))
    assert (scale.scale(jnp.float16(2)), scale.scale(jnp.float16(2)).dtype) == (2**17, jnp.float32)


def test_scales_that_are_not_floating_warn():
    with pytest.warns(UserWarning, match="Expected floating type for loss_scale"):
        jmp.DynamicLossScale(jnp.int32(1))
    with pytest.warns(UserWarning, match="Expected floating type for min_loss_scale"):
        jmp.DynamicLossScale(jnp.float32(1), min_loss_scale=jnp.int32(1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jmp.DynamicLossScale(2.0**15)


def test_the_leaves_are_the_scale_and_the_counter():
    scale = jmp.DynamicLossScale(jnp.float32(2), jnp.int32(3), 100, 4, jnp.float32(0.5))
    leaves = jax.tree.leaves_with_path(scale)
    assert [(jax.tree_util.keystr(path), leaf, leaf.dtype) for path, leaf in leaves] == [
        ("[<flat index 0>]", 2, jnp.float32),
        ("[<flat index 1>]", 3, jnp.int32),
    ]
    restored = jax.tree.unflatten(jax.tree.structure(scale), [jnp.float32(8), jnp.int32(5)])
    assert restored == jmp.DynamicLossScale(8.0, 5, 100, 4, 0.5)
    assert jax.tree.structure(scale) == jax.tree.structure(scale.adjust(jnp.bool_(False)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_leaves_keep_their_dtypes(dtype):
    scale = jmp.DynamicLossScale(jnp.asarray(2.0**14, dtype), period=1)
    for finite in (True, True, True, False):
        scale = jax.jit(lambda s, finite: s.adjust(finite))(scale, finite)
        assert (scale.loss_scale.dtype, scale.counter.dtype) == (dtype, jnp.int32)
        assert jnp.isfinite(scale.loss_scale)


def test_a_loss_scale_of_jmp_continues_here():
    theirs = pytest.importorskip("jmp", reason="needs jmp")
    there = theirs.DynamicLossScale(jnp.float32(2.0**13), period=4, factor=3)
    here = jmp.DynamicLossScale(jnp.float32(1), period=4, factor=3)
    here = jax.tree.unflatten(jax.tree.structure(here), jax.tree.leaves(there))
    for finite in np.random.default_rng(0).random(60) < 0.8:
        there, here = there.adjust(jnp.bool_(finite)), here.adjust(jnp.bool_(finite))
        assert jax.tree.leaves_with_path(here) == jax.tree.leaves_with_path(there)
        assert list(map(jnp.result_type, jax.tree.leaves(here))) == list(map(jnp.result_type, jax.tree.leaves(there)))


@pytest.mark.parametrize(("counter", "period", "after"), [(5, 2, 0), (1500, 1000, 501)])
def test_a_counter_past_a_shorter_period_wraps(counter, period, after):
    scale = jmp.DynamicLossScale(jnp.float32(8), jnp.int32(counter), period).adjust(jnp.bool_(True))
    assert (scale.loss_scale, scale.counter) == (8, after)


def test_a_scale_without_a_floor_stays_normal():
    scale = jmp.DynamicLossScale(jnp.float32(2.0**-125), min_loss_scale=0.0)
    for _ in range(3):
        scale = scale.adjust(jnp.bool_(False))
    assert scale.loss_scale == 2.0**-126
    assert scale.unscale(jnp.float32(1)) == 2.0**126


def test_a_floor_that_is_computed_under_jit_cannot_leave_it():
    def adjusted():
        return jmp.DynamicLossScale(jnp.float32(8), min_loss_scale=jnp.float32(6)).adjust(False)

    assert jax.jit(lambda: adjusted().loss_scale)() == 6
    with pytest.raises(TypeError, match=r"`min_loss_scale` is static, .* pass a number, such as `min_loss_scale=0.5`"):
        jax.jit(adjusted)()


def test_flags_that_are_no_boolean_scalars_raise_as_in_jmp():
    scale, ones, one = jmp.DynamicLossScale(2.0**15), jnp.ones(1, bool), {"w": jnp.ones(2)}
    with pytest.raises(AssertionError, match=r"expected boolean scalar for `grads_finite`, got bool\[1\]; compute it"):
        scale.adjust(ones)
    with pytest.raises(TypeError, match="boolean or int"):
        scale.adjust(jnp.float32(1))
    assert scale.adjust(jnp.int32(0)).loss_scale == scale.adjust(False).loss_scale == 2.0**14
    for pred, got in [(ones, r"bool\[1\]"), (jnp.int32(1), r"int32\[\]"), (1, "1"), (None, "None")]:
        with pytest.raises(AssertionError, match=rf"expected boolean scalar for `pred`, got {got}; compute it"):
            jmp.select_tree(pred, one, one)
    with pytest.raises(TypeError, match=r"`a\['w'\]` is `float32\[2\]` but"):
        jmp.select_tree(jnp.bool_(True), one, {"w": jnp.ones(3)})
    with pytest.raises(ValueError, match="structure error"):
        jmp.select_tree(jnp.bool_(True), one, {})


@pytest.mark.parametrize(("flag", "picked"), [(True, 1), (np.bool_(False), 0), (jnp.bool_(True), 1)])
def test_a_tree_is_selected(flag, picked):
    one, zero = {"w": jnp.ones(())}, {"w": jnp.zeros(())}
    assert jmp.select_tree(flag, one, zero) == jax.jit(jmp.select_tree)(flag, one, zero) == {"w": picked}
    assert jmp.select_tree(flag, None, None) is None


@pytest.mark.parametrize("text", ["c=compute_float16", "compute_float16", "c="])
def test_an_unknown_dtype_raises_as_in_jmp(text):
    with pytest.raises(ValueError, match=r"^Unknown dtype"):
        jmp.get_policy(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("c=f16", "p=full,c=f16,o=f16"),
        ("params=float16,compute=bfloat16,output=f64", "p=f16,c=bf16,o=f64"),
        ("mixed_bfloat16", "p=full,c=bf16,o=full"),
        ("float8_e4m3fn", "p=float8_e4m3fn,c=float8_e4m3fn,o=float8_e4m3fn"),
    ],
)
def test_the_string_of_a_policy_has_the_names_of_jmp(text, named):
    policy = jmp.get_policy(text)
    assert str(policy) == named
    assert jmp.get_policy(named) == policy
    assert str(policy.with_output_dtype(jnp.float16)) == named.rpartition("=")[0] + "=f16"


def test_a_policy_is_one_of_ours():
    policy = jmp.Policy(np.float32, jnp.bfloat16, jnp.float32)
    assert isinstance(policy, amp.Policy)
    assert str(amp.get_policy(policy)) == "p=full,c=bf16,o=full"
    assert amp.autocast(jnp.dot, policy)(jnp.ones((2, 2)), jnp.ones((2, 2))).dtype == jnp.float32


@pytest.mark.parametrize("dtype", [np.float16, jnp.float16, jnp.bfloat16, np.float32, jnp.float32, jnp.float64])
def test_the_first_name_of_a_dtype_is_the_one_in_strings(dtype):
    name = jmp.dtype_to_names[dtype][0]
    assert str(jmp.Policy(dtype, dtype, dtype)) == f"p={name},c={name},o={name}"
    assert all(jmp.get_policy(other).param_dtype == dtype for other in jmp.dtype_to_names[dtype])


def test_a_training_loop_of_jmps_readme_runs():
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 1)).astype(np.float32)}
    x = rng.normal(size=(32, 4)).astype(np.float32)
    y = x @ np.float32([[1], [-2], [3], [0.5]])
    tx = optax.sgd(0.1)

    def loss_fn(params, loss_scale, x, y):
        params, x = policy.cast_to_compute((params, x))
        out = policy.cast_to_output(x @ params["w"])
        return loss_scale.scale(jnp.mean((out - y) ** 2))

    @jax.jit
    def step(params, opt_state, loss_scale, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, loss_scale, x, y)
        grads = loss_scale.unscale(policy.cast_to_param(grads))
        finite = jmp.all_finite(grads)
        updates, new_state = tx.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        params, opt_state = jmp.select_tree(finite, (new_params, new_state), (params, opt_state))
        return params, opt_state, loss_scale.adjust(finite), loss_scale.unscale(loss)

    opt_state, loss_scale = tx.init(params), jmp.DynamicLossScale(jnp.float32(2.0**20), period=10)
    for _ in range(60):
        params, opt_state, loss_scale, loss = step(params, opt_state, loss_scale, x, y)
    assert step._cache_size() <= 2  # the first scale has counters of NumPy
    assert loss < 1e-3
    assert 1 < loss_scale.loss_scale < 2**30


def test_a_haiku_program_takes_its_policies():
    hk = pytest.importorskip("haiku", reason="needs Haiku")
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    seen = []

    class Net(hk.Module):
        def __call__(self, x):
            seen.append((x.dtype, hk.get_parameter("w", [3, 2], x.dtype, init=jnp.ones).dtype))
            return x @ hk.get_parameter("w", [3, 2], x.dtype, init=jnp.ones)

    try:
        hk.mixed_precision.set_policy(Net, policy)
        net = hk.transform(lambda x: Net()(x))
        params = net.init(jax.random.key(0), jnp.ones((4, 3)))
        out = net.apply(params, None, jnp.ones((4, 3)))
    finally:
        hk.mixed_precision.clear_policy(Net)
    assert jax.tree.leaves(params)[0].dtype == jnp.float32
    assert set(seen) == {(jnp.dtype("float16"), jnp.dtype("float16"))}
    assert (out.dtype, out[0, 0]) == (jnp.float32, 3)
