import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
from jmp_amp import LossScale

SAVED = {
    "scale": 3.0,
    "growth_factor": 4.0,
    "backoff_factor": 0.5,
    "growth_interval": 2,
    "_growth_tracker": 0,
}
PRESETS = ["torch", "apex", "deepspeed", "deepspeed_consecutive", "megatron", "keras", "flax", "jmp"]


def test_the_keys_are_torchs_five_and_the_values_plain_numbers():
    rule = LossScale.torch(init_scale=8, growth_factor=4, backoff_factor=0.25, growth_interval=10)
    d = amp.interop.torch.state_dict(rule.update(rule.init(), True), rule)
    assert d == {
        "scale": 8.0,
        "growth_factor": 4.0,
        "backoff_factor": 0.25,
        "growth_interval": 10,
        "_growth_tracker": 1,
    }
    assert [type(value) for value in d.values()] == [float, float, float, int, int]
    assert list(d) == ["scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"]
    assert json.loads(json.dumps(d)) == d


def test_the_state_is_found_inside_an_optimizer_state():
    tx = optax.chain(amp.dynamic_loss_scale(optax.sgd(0.1)), optax.identity())
    assert amp.interop.torch.state_dict(tx.init(jnp.ones(2)))["scale"] == 2.0**16


def test_loading_replaces_everything_that_was_in_use():
    rule = LossScale.torch(init_scale=6, growth_factor=7, backoff_factor=0.8, growth_interval=10)
    tx = amp.dynamic_loss_scale(optax.sgd(0.1), rule)
    opt_state = tx.init(jnp.ones(2))
    opt_state = opt_state._replace(loss_scale=opt_state.loss_scale._replace(growth_tracker=jnp.int32(7)))
    rule, state = amp.interop.torch.load_state_dict(SAVED)
    opt_state = amp.set_loss_scale(opt_state, state)
    assert amp.get_loss_scale(opt_state) == 3
    assert (rule.growth_factor, rule.backoff_factor, rule.growth_interval) == (4, 0.5, 2)
    assert state.growth_tracker == 0
    # The rule and the state work together.
    state = rule.update(rule.update(state, True), True)
    assert state.loss_scale == 12
    assert rule.update(state, False).loss_scale == 6


def test_torchs_own_state_dict_loads():
    # What `torch.amp.GradScaler().state_dict()` returns after 137 clean steps.
    d = {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 137,
    }
    rule, state = amp.interop.torch.load_state_dict(d)
    assert rule == LossScale.torch()
    assert (state.loss_scale, state.growth_tracker) == (65536, 137)
    assert amp.interop.torch.state_dict(state, rule) == d


@pytest.mark.parametrize("steps", ["", "...", "..x.", "xx", "x" * 20])
def test_a_round_trip_in_the_middle_of_a_run_changes_nothing(steps):
    rule = LossScale.torch(init_scale=48, growth_interval=3)
    state = rule.init()
    for step in steps:
        state = rule.update(state, step != "x")
    loaded_rule, loaded = amp.interop.torch.load_state_dict(amp.interop.torch.state_dict(state, rule))
    for step in "..x...":
        state, loaded = rule.update(state, step != "x"), loaded_rule.update(loaded, step != "x")
        assert (loaded.loss_scale, loaded.growth_tracker) == (state.loss_scale, state.growth_tracker)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("steps", ["", "x", "..."])
def test_what_any_preset_saves_can_be_loaded(name, steps):
    rule = getattr(LossScale, name)(growth_interval=3)
    state = rule.init()
    for step in steps:
        state = rule.update(state, step != "x")
    d = amp.interop.torch.state_dict(state, rule)
    loaded_rule, loaded = amp.interop.torch.load_state_dict(d)
    assert loaded.loss_scale == state.loss_scale
    assert loaded_rule.growth_interval == 3
    assert amp.interop.torch.state_dict(loaded, loaded_rule) == d


def test_loaded_leaves_are_strongly_typed():
    _, state = amp.interop.torch.load_state_dict(SAVED)
    init = LossScale().init()
    assert [(leaf.dtype, leaf.weak_type, leaf.shape) for leaf in state] == [(leaf.dtype, False, ()) for leaf in init]


def test_disabled_is_an_empty_dictionary_both_ways():
    rule = LossScale.none()
    assert amp.interop.torch.state_dict(rule.init(), rule) == {}
    loaded_rule, loaded = amp.interop.torch.load_state_dict({})
    assert loaded_rule == rule
    assert jax.tree.leaves(loaded) == jax.tree.leaves(rule.init())


def test_numpy_numbers_load():
    rule, state = amp.interop.torch.load_state_dict(
        {
            "scale": np.float32(3),
            "growth_factor": np.float64(4),
            "backoff_factor": np.float16(0.5),
            "growth_interval": np.int64(2),
            "_growth_tracker": np.int32(1),
        }
    )
    assert amp.interop.torch.state_dict(state, rule) == SAVED | {"_growth_tracker": 1}


@pytest.mark.parametrize("key", SAVED)
def test_a_missing_key_is_named(key):
    with pytest.raises(ValueError, match=rf"unknown: \[\], missing: \['{key}'\]"):
        amp.interop.torch.load_state_dict({k: v for k, v in SAVED.items() if k != key})


@pytest.mark.parametrize("key", ["growth_tracker", "init_scale", "hysteresis", 5, None])
def test_an_unknown_key_is_named(key):
    with pytest.raises(ValueError, match=rf"unknown: \[{key!r}\], missing: \[\]"):
        amp.interop.torch.load_state_dict(SAVED | {key: 1})


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        *[
            (key, value, ValueError)
            for key in ("scale", "growth_factor", "backoff_factor")
            for value in (0.0, -1.0, np.inf, -np.inf, np.nan, 1e39, 10**400)
        ],
        *[
            (key, value, TypeError)
            for key in ("scale", "growth_factor", "backoff_factor")
            for value in (None, "3", True, [3.0], np.ones(2))
        ],
        ("growth_factor", 1.0, ValueError),
        ("backoff_factor", 1.0, ValueError),
        *[("growth_interval", value, ValueError) for value in (0, -2, 2**31)],
        *[("_growth_tracker", value, ValueError) for value in (-1, 2**31, 10**400)],
        *[
            (key, value, TypeError)
            for key in ("growth_interval", "_growth_tracker")
            for value in (None, "3", True, 1.5, np.nan, np.inf)
        ],
    ],
)
def test_a_bad_value_is_named(key, value, error):
    with pytest.raises(error) as info:
        amp.interop.torch.load_state_dict(SAVED | {key: value})
    assert f"`{key}`" in str(info.value)
    assert repr(value)[:40] in str(info.value)


@pytest.mark.parametrize("d", [None, [], [("scale", 1.0)], "scale", 3.0], ids=repr)
def test_only_a_dictionary_loads(d):
    with pytest.raises(TypeError, match=r"`d` must be a dictionary, .* got"):
        amp.interop.torch.load_state_dict(d)
