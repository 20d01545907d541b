"""What `docs/many-devices.md` says about sums of gradients over devices, in numbers."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "many-devices.md"
DEVICES = 8


@functools.cache
def page():
    """The names that the page defines."""
    names = {}
    exec(compile("\n".join(re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)), PAGE, "exec"), names)
    return names


def mean(grads, **options):
    """The mean over devices by the recipe of the page; one row of `grads` is what one device has."""
    mean_grads = functools.partial(page()["mean_grads"], axis_name="data", **options)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return np.asarray(jax.jit(jax.shard_map(mean_grads, mesh=mesh, in_specs=P("data"), out_specs=P()))(grads))[0]


@pytest.fixture
def grads():
    return np.random.default_rng(0).normal(size=(DEVICES, 512)).astype(np.float32)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("predivide", [1, DEVICES**0.5, DEVICES])
def test_the_float16_mean_is_the_float32_mean_within_a_few_roundings(grads, predivide):
    expected = mean(grads)
    np.testing.assert_allclose(expected, grads.mean(axis=0), rtol=1e-5, atol=1e-6)
    # Each of the summands and each of the sums is rounded by up to 2^-11 of the largest.
    error = 2 * DEVICES * 2**-11 * np.abs(grads).max() / DEVICES
    np.testing.assert_allclose(mean(grads, dtype=jnp.float16, predivide=predivide), expected, rtol=0, atol=error)


def test_a_float16_sum_overflows_where_the_mean_would_not_and_divided_before_it_does_not():
    grads = np.full((DEVICES, 4), 20000, np.float32)
    assert np.isinf(mean(grads, dtype=jnp.float16)).all()
    for predivide in (DEVICES**0.5, DEVICES):
        np.testing.assert_allclose(mean(grads, dtype=jnp.float16, predivide=predivide), 20000, rtol=1e-3)
    np.testing.assert_array_equal(mean(grads), 20000)


def test_dividing_by_all_devices_before_the_sum_loses_small_gradients_and_by_their_root_does_not():
    grads = np.full((DEVICES, 4), 2.0**-23, np.float32)  # float16 holds 2^-24, and nothing smaller
    np.testing.assert_array_equal(mean(grads, dtype=jnp.float16, predivide=DEVICES), 0)
    np.testing.assert_array_equal(mean(grads, dtype=jnp.float16, predivide=1), 2.0**-23)
    assert (mean(grads, dtype=jnp.float16, predivide=DEVICES**0.5) > 0).all()


def test_bfloat16_travels_without_overflow(grads):
    large = grads * 2.0**20
    np.testing.assert_allclose(
        mean(large, dtype=jnp.bfloat16), mean(large), rtol=0, atol=2 * 2**-8 * np.abs(large).max()
    )


@pytest.mark.parametrize(("dtype", "travels"), [(jnp.float16, "f16"), (jnp.bfloat16, "bf16"), (jnp.float32, "f32")])
def test_the_dtype_is_what_is_summed(dtype, travels):
    mean_grads = functools.partial(page()["mean_grads"], axis_name="data", dtype=dtype)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.shard_map(mean_grads, mesh=mesh, in_specs=P("data"), out_specs=P())
    lowered = jax.jit(spread).lower(jnp.ones((DEVICES, 4))).as_text()
    assert re.search(rf"all_reduce.*?-> tensor<1x4x{travels}>", lowered, re.S)


def test_an_overflow_of_the_sum_alone_skips_the_step_on_all_devices():
    mesh, tx = page()["mesh"], page()["tx"]
    params = {"w": np.ones(4, np.float32)}

    def update(grads, opt_state):
        grads = page()["mean_grads"]({"w": grads[0]}, "data", jnp.float16)
        return tx.update(grads, opt_state, params)

    update = jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(P("data"), P()), out_specs=P()))
    updates, opt_state = update(np.full((DEVICES, 4), 20000, np.float32), tx.init(params))
    assert (updates["w"] == 0).all()
    scales = [shard.data.item() for shard in opt_state.loss_scale.loss_scale.addressable_shards]
    assert scales == [2.0**15] * DEVICES


def initial_params():
    rng = np.random.default_rng(0)
    shapes = {"up": (16, 64), "bias": (64,), "down": (64, 16)}
    return {name: 0.1 * rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


BATCH = np.random.default_rng(1).normal(size=(4 * DEVICES, 16)).astype(np.float32)


def one_device_loss(params, x):
    return jnp.mean((jax.nn.gelu(x @ params["up"] + params["bias"]) @ params["down"]) ** 2)


def test_fsdp_by_shard_map_takes_the_steps_of_one_device():
    names, params = page(), initial_params()
    tx = amp.dynamic_loss_scale(optax.adamw(1e-3))
    state, sharded_state = tx.init(params), names["tx"].init(params)
    sharded_params = jax.device_put(params, names["kept"][0])
    sharded_state = jax.device_put(sharded_state, names["kept"][1])

    @jax.jit
    def step(params, state, x):
        loss, grads = amp.value_and_grad(one_device_loss, opt_state=state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    for x in (BATCH, BATCH[::-1] * 2, BATCH * np.inf):
        params, state, loss = step(params, state, x)
        sharded_params, sharded_state, sharded_loss = names["step"](sharded_params, sharded_state, x)
        np.testing.assert_allclose(sharded_loss, loss, rtol=1e-2, equal_nan=True)
        norm, sharded_norm = (amp.metrics(s)["grad_norm"] for s in (state, sharded_state))
        np.testing.assert_allclose(sharded_norm, norm, rtol=1e-2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=3e-4), sharded_params, params)
    assert amp.get_loss_scale(sharded_state) == amp.get_loss_scale(state) == 2.0**15
    assert sharded_params["up"].addressable_shards[0].data.shape == (16, 64 // DEVICES)


def test_fsdp_by_shard_map_gathers_and_scatters_float16():
    names = page()
    args = jax.device_put((initial_params(), names["tx"].init(initial_params())), names["kept"])
    text = names["step"].lower(*args, BATCH).as_text()
    assert re.findall(r"all_gather.*?-> tensor<[\dx]+x(\w+)>", text) == ["f16"] * 3
    assert re.findall(r"reduce_scatter.*?-> tensor<[\dx]+x(\w+)>", text, re.S) == ["f16"] * 3


@pytest.mark.parametrize(
    ("average", "factor"), [(lambda loss: loss, DEVICES), (lambda loss: lax.pmean(loss, "data"), 1)]
)
def test_jax_sums_the_gradients_of_shared_parameters_and_a_mean_loss_divides_them(average, factor):
    mesh, params = page()["mesh"], initial_params()
    grad = jax.grad(lambda p, x: average(one_device_loss(p, x)))
    grads = jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=(P(), P("data")), out_specs=P()))(params, BATCH)
    expected = jax.grad(one_device_loss)(params, BATCH)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, factor * b, rtol=1e-3, atol=1e-6), grads, expected)
