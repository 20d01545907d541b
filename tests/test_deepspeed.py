import pathlib
import reprlib
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
from jmp_amp import LossScale
from jmp_amp.interop.deepspeed import _FIELDS


def rule(**fp16):
    return amp.interop.deepspeed.from_config({"train_batch_size": 8, "fp16": {"enabled": True} | fp16})


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
    assert amp.interop.deepspeed.from_config({"train_batch_size": 8}).max_scale == 1.0


def test_a_loss_scale_is_static_and_zero_is_dynamic():
    static = rule(loss_scale=128.0)
    assert static.init_scale == static.min_scale == static.max_scale == 128.0
    assert rule(loss_scale=0) == LossScale.deepspeed()


TAKEN = {
    "loss_scale": [("128", 128), (" 1e3 ", 1000), (True, 1), (128, 128), (Fraction(1, 2), 0.5), (2.0**126, 2.0**126)],
    "initial_scale_power": [(16.0, 16), ("16", 16), ("16.0", 16), (-3, -3), (126, 126), (np.int64(4), 4)],
    "loss_scale_window": [(1000.0, 1000), ("1_000", 1000), (2**31 - 1, 2**31 - 1), (True, 1)],
    "hysteresis": [(1.0, 1), (" 3\n", 3)],
    "consecutive_hysteresis": [(1, True), (0.0, False), ("Yes", True), ("OFF", False), ("t", True), ("0", False)],
    "min_loss_scale": [(0.25, 0.25), ("2", 2), (2.0**-126, 2.0**-126)],
}
ARGUMENTS = {
    "loss_scale": "init_scale",
    "initial_scale_power": "init_scale",
    "loss_scale_window": "growth_interval",
    "min_loss_scale": "min_scale",
}


def cases(table):
    return [(name, *case) if isinstance(case, tuple) else (name, case) for name in table for case in table[name]]


@pytest.mark.parametrize(("name", "value", "read"), cases(TAKEN), ids=str)
def test_values_are_read_as_deepspeed_reads_them(name, value, read):
    floor = {} if name == "min_loss_scale" else {"min_loss_scale": 2.0**-126}
    got = getattr(rule(**floor | {name: value}), ARGUMENTS.get(name, name))
    assert got == (2.0**read if name == "initial_scale_power" else read)
    assert type(got) is not bool or isinstance(read, bool)


@pytest.mark.parametrize("name", [name for name in _FIELDS if name != "enabled"])
def test_auto_is_the_default(name):
    assert rule(**{name: "auto"}) == LossScale.deepspeed()


@pytest.mark.parametrize(("value", "scale"), [(1, 2**16), ("True", 2**16), (0, 1), ("no", 1), (0.0, 1)])
def test_enabled_is_read_as_deepspeed_reads_it(value, scale):
    assert rule(enabled=value).init_scale == scale


BOOL, COUNT = "true or false", r"an integer from 1 to 2\^31 - 1"
SCALE = r"a number from 2\^-126 to 2\^126, so that float32 holds its reciprocal"
REFUSED = {
    "enabled": (BOOL, [2, -1, 0.5, "", "maybe", None, [True], "auto"]),
    "auto_cast": (BOOL, [" true ", "1.0"]),
    "loss_scale": (
        rf"0 \(dynamic\) or {SCALE}",
        [-1, float("inf"), float("nan"), "dynamic", "1e400", 10**400, 2.0**127, 2.0**-127, None, [128], 1j],
    ),
    "initial_scale_power": ("an integer from -126 to 126", [127, -127, 16.5, "16.5", "1e1", "16.", None, 10**400]),
    "loss_scale_window": (COUNT, [0, -5, "0", 2**31, 1000.5, float("nan"), float("inf"), None]),
    "hysteresis": (COUNT, [0, False, 1.5, {}]),
    "consecutive_hysteresis": (BOOL, [2, "ja"]),
    "min_loss_scale": (SCALE, [0, -1, float("inf"), 2.0**-130, "small"]),
    "fp16_master_weights_and_grads": (BOOL, [None]),
}


@pytest.mark.parametrize(
    ("name", "allowed", "value"),
    [(name, allowed, value) for name, (allowed, values) in REFUSED.items() for value in values],
    ids=lambda x: reprlib.repr(x),
)
def test_a_bad_value_is_named(name, allowed, value):
    with pytest.raises(ValueError, match=rf"^`fp16.{name}` must be {allowed}, got ") as error:
        rule(**{name: value})
    assert len(str(error.value)) < 200


UNUSED = {"loss_scale_window": 0, "hysteresis": 0, "min_loss_scale": 0, "initial_scale_power": 1000}


def test_values_that_are_not_used_may_be_out_of_range():
    assert rule(loss_scale=128, **UNUSED) == rule(loss_scale=128)
    assert rule(enabled=False, loss_scale=-1, **UNUSED) == rule(enabled=False)
    with pytest.raises(ValueError, match=r"`fp16.loss_scale_window` must be .*, got 'often'"):
        rule(loss_scale=128, loss_scale_window="often")


def test_an_unknown_name_is_an_error_that_knows_the_right_one():
    with pytest.raises(ValueError, match=r"`fp16.loss_scale_windw` is not known; did you mean `loss_scale_window`\?"):
        rule(loss_scale_windw=100)
    with pytest.raises(TypeError, match="`fp16` must be a mapping, got True"):
        amp.interop.deepspeed.from_config({"fp16": True})
    with pytest.raises(TypeError, match=r"the keys of `fp16` must be strings, got 5. Allowed: enabled, "):
        amp.interop.deepspeed.from_config({"fp16": {"enabled": True, 5: 1}})


@pytest.mark.parametrize("section", [{"enabled": True, "loss_scale": 128}, {"hysteresis": 1}, {"min_loss_scale": 1}])
def test_a_section_is_no_config(section):
    match = rf"`{next(iter(section))}` belongs in the section `fp16`, .* pass the whole config, or `{{\"fp16\": "
    with pytest.raises(ValueError, match=match):
        amp.interop.deepspeed.from_config(section)
    with pytest.raises(ValueError, match=match):
        amp.interop.deepspeed.from_config(section | {"train_batch_size": 8})


def test_other_keys_of_a_config_are_not_read():
    assert (
        amp.interop.deepspeed.from_config({5: None, "fp16": {"enabled": True}, "enabled": 3}) == LossScale.deepspeed()
    )


@pytest.mark.parametrize("path", ["ds_config.json", b"ds_config.json", pathlib.Path("ds_config.json")])
def test_a_path_must_be_loaded_first(path):
    with pytest.raises(TypeError, match=r"`config` must be a mapping, got .*ds_config.json.*; load the file first"):
        amp.interop.deepspeed.from_config(path)


@pytest.mark.parametrize("config", [None, 5, [("fp16", {})], LossScale()])
def test_a_config_must_be_a_mapping(config):
    with pytest.raises(TypeError, match=r"`config` must be a mapping such as `\{\"fp16\": .*, got "):
        amp.interop.deepspeed.from_config(config)


@pytest.mark.usefixtures("users_code")
@pytest.mark.parametrize("checked", [True, False])
def test_bfloat16_without_scaling_skips_an_overflow_if_it_is_checked(checked):
    adam = optax.adam(0.1)
    tx = (
        amp.dynamic_loss_scale(adam, amp.interop.deepspeed.from_config({"bf16": {"enabled": True}}))
        if checked
        else adam
    )
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
