"""Programs that were written for jmp 0.0.4, with the import changed."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

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
    with pytest.raises(ValueError, match=r"must be a boolean scalar, got shape \(1,\)"):
        jmp.DynamicLossScale(2.0**15).adjust(jnp.ones(1, bool))


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
