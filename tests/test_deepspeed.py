import jax
import jax.numpy as jnp
import optax
import pytest

import jmp_amp as amp
from jmp_amp import LossScale


def rule(**fp16):
    return LossScale.from_deepspeed({"train_batch_size": 8, "fp16": {"enabled": True} | fp16})


@pytest.mark.parametrize(
    ("fp16", "expected"),
    [
        ({}, LossScale.deepspeed()),
        ({"auto_cast": True, "fp16_master_weights_and_grads": False}, LossScale.deepspeed()),
        ({"initial_scale_power": 32}, LossScale.deepspeed(init_scale=2.0**32)),
        ({"initial_scale_power": 0, "min_loss_scale": 4}, LossScale.deepspeed(init_scale=4.0, min_scale=4.0)),
        ({"loss_scale_window": 100}, LossScale.deepspeed(growth_interval=100)),
        ({"hysteresis": 1}, LossScale.deepspeed(hysteresis=1)),
        ({"consecutive_hysteresis": True}, LossScale.deepspeed_consecutive()),
        ({"enabled": False}, LossScale.none()),
    ],
    ids=str,
)
def test_a_config_is_the_preset_with_its_values(fp16, expected):
    configured = rule(**fp16)
    if configured.max_scale == configured.min_scale:  # static: how it would move does not matter
        assert (configured.init_scale, configured.max_scale) == (expected.init_scale, expected.max_scale)
    else:
        assert configured == expected


def test_without_the_section_nothing_is_scaled():
    assert LossScale.from_deepspeed({"train_batch_size": 8}).max_scale == 1.0


def test_a_loss_scale_is_static_and_zero_is_dynamic():
    static = rule(loss_scale=128.0)
    assert static.init_scale == static.min_scale == static.max_scale == 128.0
    assert rule(loss_scale=0) == LossScale.deepspeed()


BAD = {
    "enabled": [1, "true", None],
    "loss_scale": [True, -1, float("inf"), float("nan"), "dynamic"],
    "initial_scale_power": [True, -1, 127, 16.0],
    "loss_scale_window": [0, -5, True, 1000.0],
    "hysteresis": [0, True, 1.5],
    "consecutive_hysteresis": [1, "yes"],
    "min_loss_scale": [0, -1, True, float("inf")],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in BAD for value in BAD[name]], ids=str)
def test_a_bad_value_is_named(name, value):
    with pytest.raises(ValueError, match=rf"`fp16.{name}` must be .*, got"):
        rule(**{name: value})


def test_an_unknown_name_is_an_error_that_knows_the_right_one():
    with pytest.raises(ValueError, match=r"`fp16.loss_scale_windw` is not known; did you mean `loss_scale_window`\?"):
        rule(loss_scale_windw=100)
    with pytest.raises(TypeError, match="`fp16` must be a mapping, got True"):
        LossScale.from_deepspeed({"fp16": True})


@pytest.mark.usefixtures("users_code")
@pytest.mark.parametrize("checked", [True, False])
def test_bfloat16_without_scaling_skips_an_overflow_if_it_is_checked(checked):
    adam = optax.adam(0.1)
    tx = amp.dynamic_loss_scale(adam, LossScale.from_deepspeed({"bf16": {"enabled": True}})) if checked else adam
    params = jnp.ones((2, 2))
    state = tx.init(params)
    for x in (1.0, jnp.inf, 2.0, jnp.nan):
        grads = jax.grad(amp.autocast(lambda w, x: jnp.mean(w @ (x * jnp.ones((2, 2)))), "bfloat16"))(params, x)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert jnp.isfinite(params).all() == checked
    if checked:
        assert amp.metrics(state)["total_notfinite"] == 2
        assert optax.tree.get(state, "count") == 2
