import dataclasses
import functools
import math
import pickle

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jmp_amp as amp
from jmp_amp import LossScale

TINY = float(np.finfo(np.float32).tiny)
HUGE = 2.0**126
NEVER = 2**31 - 1  # the largest count, and the hysteresis of a static scale
PRESETS = ["torch", "apex", "deepspeed", "deepspeed_consecutive", "megatron", "keras", "flax", "jmp"]


@functools.partial(jax.jit, static_argnums=0)
def scan_states(rule, state, finite):
    def step(state, finite):
        state = rule.update(state, finite)
        return state, state

    return jax.lax.scan(step, state, finite)[1]


def test_a_rule_adapts_the_scale_of_a_state_that_was_static():
    static = LossScale.static(64.0)
    state = static.update(static.update(static.init(), False), True)
    assert state.hysteresis_tracker == static.init().hysteresis_tracker == 2**31 - 1
    rule = LossScale(hysteresis=2)
    for scale in (64, 32):
        state = rule.update(state, False)
        assert state.loss_scale == scale


def clean(steps):
    """`x` is an overflow, anything else a clean step."""
    return np.array([step != "x" for step in steps])


def scales(rule, steps):
    return scan_states(rule, rule.init(), clean(steps)).loss_scale.tolist()


def at_scale(value):
    return LossScale().init()._replace(loss_scale=jnp.float32(value))


# Configuration


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        *[
            (field, value, ValueError)
            for field in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
            for value in (0.0, -2.0, math.inf, -math.inf, math.nan, 1e39, 1e-39, 10**400)
        ],
        *[
            (field, value, TypeError)
            for field in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale")
            for value in (True, np.True_, None, "2", b"2", 2j, [2.0], np.ones(1))
        ],
        ("growth_factor", 1.0, ValueError),
        ("growth_factor", 0.5, ValueError),
        ("backoff_factor", 1.0, ValueError),
        ("backoff_factor", 2.0, ValueError),
        *[
            (field, value, ValueError)
            for field in ("growth_interval", "hysteresis")
            for value in (0, -1, 2**31, 10**400)
        ],
        *[(field, value, ValueError) for field in ("overflow_delay", "growth_delay") for value in (-1, 2**31)],
        *[
            (field, value, TypeError)
            for field in ("growth_interval", "hysteresis", "overflow_delay", "growth_delay")
            for value in (True, 2.0, "2", None, math.nan)
        ],
        *[("consecutive_hysteresis", value, TypeError) for value in (1, 0, None, "yes", 2.0)],
    ],
)
def test_a_bad_field_is_named_with_its_value(field, value, error):
    with pytest.raises(error) as info:
        LossScale(**{field: value})
    assert f"`{field}`" in str(info.value)
    assert repr(value)[:40] in str(info.value)


BOUNDS = dict.fromkeys(("growth_interval", "hysteresis"), (1, NEVER)) | dict.fromkeys(
    ("overflow_delay", "growth_delay"), (0, NEVER)
)


@pytest.mark.parametrize("field", BOUNDS)
def test_a_count_may_be_what_int32_holds_from_its_minimum_on(field):
    lower, upper = BOUNDS[field]
    for value in (lower, lower + 1, upper - 1, upper):
        state = LossScale(**{field: value}).init()
        assert state.growth_tracker == (-value if field == "overflow_delay" else 0)
        assert state.hysteresis_tracker == (value if field == "hysteresis" else 1)
    for value in (lower - 1, upper + 1):
        with pytest.raises(ValueError, match=f"`{field}` must be an integer from {lower} to 2\\^31 - 1, got {value}"):
            LossScale(**{field: value})


@pytest.mark.parametrize(
    "fields",
    [
        {"init_scale": 0.5},
        {"init_scale": 2.0**25},
        {"min_scale": 2.0**17},
        {"max_scale": 2.0**15},
        {"min_scale": 8.0, "max_scale": 4.0, "init_scale": 6.0},
    ],
    ids=str,
)
def test_the_initial_scale_must_lie_between_floor_and_ceiling(fields):
    with pytest.raises(ValueError, match="min_scale <= init_scale <= max_scale") as info:
        LossScale(**fields)
    for field, value in fields.items():
        assert f"{field}={value}" in str(info.value)


@pytest.mark.parametrize("value", [4, np.float32(4), np.int64(4), np.float16(4), jnp.float32(4)], ids=repr)
def test_numbers_of_any_kind_become_python_floats(value):
    rule = LossScale(init_scale=value)
    assert type(rule.init_scale) is float
    assert rule == LossScale(init_scale=4.0)
    assert hash(rule) == hash(LossScale(init_scale=4.0))


def test_steps_of_any_integer_kind_become_python_ints():
    rule = LossScale(growth_interval=np.int16(3), hysteresis=np.uint8(2))
    assert (type(rule.growth_interval), type(rule.hysteresis)) == (int, int)


@pytest.mark.parametrize(
    ("name", "init", "interval", "floor", "ceiling", "hysteresis"),
    [
        ("torch", 2.0**16, 2000, TINY, HUGE, 1),
        ("apex", 2.0**16, 2000, TINY, 2.0**24, 1),
        ("deepspeed", 2.0**16, 1000, 1.0, HUGE, 2),
        ("deepspeed_consecutive", 2.0**16, 1000, 1.0, HUGE, 2),
        ("megatron", 2.0**32, 1000, 1.0, HUGE, 2),
        ("keras", 2.0**15, 2000, TINY, HUGE, 1),
        ("flax", 2.0**16, 2000, TINY, HUGE, 1),
        ("jmp", 2.0**15, 2000, 1.0, HUGE, 1),
    ],
)
def test_presets_have_the_defaults_of_their_systems(name, init, interval, floor, ceiling, hysteresis):
    rule = getattr(LossScale, name)()
    assert (rule.init_scale, rule.growth_interval, rule.min_scale, rule.max_scale, rule.hysteresis) == (
        init,
        interval,
        floor,
        ceiling,
        hysteresis,
    )
    assert (rule.growth_factor, rule.backoff_factor) == (2.0, 0.5)


def test_the_defaults_are_the_documented_ones():
    rule = LossScale()
    assert (rule.init_scale, rule.growth_factor, rule.backoff_factor) == (2.0**16, 2.0, 0.5)
    assert (rule.growth_interval, rule.min_scale, rule.max_scale) == (2000, 1.0, 2.0**24)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LossScale)])
def test_every_preset_takes_every_override(name, field):
    values = {
        "init_scale": 2.0**10,
        "min_scale": 2.0,
        "max_scale": 2.0**40,
        "consecutive_hysteresis": True,
        "clamp_growth": True,
    }
    values |= {"growth_factor": 4.0, "backoff_factor": 0.25}
    value = values.get(field, 7)
    rule, overridden = getattr(LossScale, name)(), getattr(LossScale, name)(**{field: value})
    assert getattr(overridden, field) == value
    assert overridden == dataclasses.replace(rule, **{field: value})


def test_a_config_is_frozen_hashable_picklable_and_no_pytree():
    rule = LossScale.megatron(growth_interval=7)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.init_scale = 2.0
    assert {rule: 1}[LossScale.megatron(growth_interval=7)] == 1
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert jax.tree.leaves(rule) == [rule]


def test_equal_configs_share_one_compiled_program_as_static_arguments():
    @functools.partial(jax.jit, static_argnums=0)
    @chex.assert_max_traces(n=1)
    def update(rule, state):
        return rule.update(state, True)

    for _ in range(2):
        rule = LossScale(growth_interval=11)
        update(rule, rule.init())


# Sequences: what each system does, step by step

ZERO0 = functools.partial(LossScale.deepspeed, hysteresis=1)
APEX_CUDA = functools.partial(LossScale.torch, hysteresis=2, consecutive_hysteresis=True)
TEN_CLEAN = {"init_scale": 256, "growth_interval": 2}
MIXED = {"init_scale": 1024, "growth_interval": 4}
MIXED_STEPS = "x.x.x....x....xx"


@pytest.mark.parametrize(
    ("rule", "steps", "expected"),
    [
        *[
            (preset(**TEN_CLEAN), "." * 10, "256 512 512 1024 1024 2048 2048 4096 4096 8192")
            for preset in (LossScale.torch, LossScale.apex, LossScale.keras, LossScale.jmp, LossScale.megatron)
        ],
        *[
            (preset(**TEN_CLEAN), "." * 10, "256 256 512 512 1024 1024 2048 2048 4096 4096")
            for preset in (LossScale.deepspeed, LossScale.deepspeed_consecutive, ZERO0)
        ],
        (LossScale.flax(**TEN_CLEAN), "." * 10, "256 256 512 512 512 1024 1024 1024 2048 2048"),
        (ZERO0(init_scale=16, growth_interval=2), "x" * 8, "8 4 2 1 1 1 1 1"),
        (ZERO0(init_scale=16, growth_interval=2, min_scale=2), "x" * 8, "8 4 2 2 2 2 2 2"),
        (ZERO0(**TEN_CLEAN), "xx...x", "128 64 64 64 128 64"),
        (LossScale.deepspeed(init_scale=256, hysteresis=1), "x" * 9, "128 64 32 16 8 4 2 1 1"),
        *[
            (preset(**MIXED), MIXED_STEPS, "512 512 256 256 128 128 128 128 256 128 128 128 128 256 128 64")
            for preset in (LossScale.torch, LossScale.apex, LossScale.keras, LossScale.jmp)
        ],
        *[
            (preset(**MIXED), MIXED_STEPS, "512 512 256 256 128 128 128 128 128 64 64 64 64 64 32 16")
            for preset in (LossScale.flax, ZERO0)
        ],
        (
            LossScale.deepspeed(**MIXED),
            MIXED_STEPS,
            "1024 1024 512 512 256 256 256 256 256 128 128 128 128 128 64 32",
        ),
        (LossScale.deepspeed_consecutive(**MIXED), MIXED_STEPS, "1024 " * 15 + "512"),
        (
            LossScale.megatron(**MIXED),
            MIXED_STEPS,
            "1024 1024 512 512 256 256 256 256 512 512 512 512 512 1024 1024 512",
        ),
        (APEX_CUDA(**MIXED), MIXED_STEPS, "1024 " * 8 + "2048 2048 2048 2048 2048 4096 4096 2048"),
        (LossScale.keras(init_scale=400), "xxxx", "200 100 50 25"),
        (LossScale.keras(init_scale=2, growth_interval=2), "." * 8, "2 4 4 8 8 16 16 32"),
        (LossScale.torch(init_scale=4, backoff_factor=0.25, growth_interval=2), "..x", "4 8 2"),
        (LossScale.torch(init_scale=4, growth_interval=2), ".x.x", "4 2 2 1"),
    ],
)
def test_the_scale_follows_the_published_sequence(rule, steps, expected):
    assert scales(rule, steps) == [float(scale) for scale in expected.split()]


@pytest.mark.parametrize(
    ("rule", "steps", "trackers"),
    [
        (LossScale.torch(init_scale=4, backoff_factor=0.25, growth_interval=2), "..x", [1, 0, 0]),
        (LossScale.torch(init_scale=4, growth_interval=2), ".x.x", [1, 0, 1, 0]),
    ],
)
def test_the_growth_tracker_follows_torchs(rule, steps, trackers):
    assert scan_states(rule, rule.init(), clean(steps)).growth_tracker.tolist() == trackers


@pytest.mark.parametrize("steps", ["..x.", "....", "xxxx", "x.x.x.x..."])
def test_growing_every_step_gives_exact_powers_of_two(steps):
    rule = LossScale.torch(init_scale=128, growth_interval=1)
    skipped = steps.count("x")
    assert scales(rule, steps)[-1] == 128 * 2.0 ** (len(steps) - skipped) * 0.5**skipped


# Against the code of each system, in plain Python: `finite` in, scales out.


def torch_model(finite, scale, interval, hysteresis):
    tracker = 0
    for ok in finite:
        if ok:
            tracker += 1
            if tracker == interval:
                scale, tracker = scale * 2 if math.isfinite(np.float32(scale) * 2) else scale, 0
        else:
            scale, tracker = scale * 0.5, 0
        yield scale


def apex_model(finite, scale, interval, hysteresis):
    unskipped = 0
    for ok in finite:
        if not ok:
            scale, unskipped = scale / 2, 0
        else:
            unskipped += 1
        if unskipped == interval:
            scale, unskipped = min(2.0**24, scale * 2), 0
        yield scale


def apex_cuda_model(finite, scale, interval, hysteresis):
    tracker, left = 0, hysteresis
    for ok in finite:
        if not ok:
            left, tracker = left - 1, 0
            scale = scale if left > 0 else scale * 0.5
        else:
            left, tracker = hysteresis, tracker + 1
            if tracker == interval:
                scale, tracker = scale * 2, 0
        yield scale


def deepspeed_model(finite, scale, interval, hysteresis, consecutive=False):
    left, last_overflow = hysteresis, -1
    for i, ok in enumerate(finite):
        if not ok:
            if left == 1:
                scale = max(scale / 2, 1.0)
            else:
                left -= 1
            last_overflow = i
        else:
            left = hysteresis if consecutive else left
            stable = i - last_overflow - 1
            if stable > 0 and stable % interval == 0:
                left, scale = hysteresis, scale * 2
        yield scale


def zero0_model(finite, scale, interval, hysteresis):
    last_overflow = -1
    for i, ok in enumerate(finite):
        stable = i - last_overflow - 1
        if not ok:
            scale, last_overflow = max(scale / 2, 1.0), i
        elif stable > 0 and stable % interval == 0:
            scale *= 2
        yield scale


def megatron_model(finite, scale, interval, hysteresis):
    tracker, left = 0, hysteresis
    for ok in finite:
        if not ok:
            tracker, left = 0, left - 1
            scale = max(scale * 0.5, 1.0) if left <= 0 else scale
        else:
            tracker += 1
            if tracker == interval:
                tracker, left, scale = 0, hysteresis, scale * 2
        yield scale


def keras_model(finite, scale, interval, hysteresis):
    counter = 0
    for ok in finite:
        if not ok:
            counter, scale = 0, scale / 2
        elif counter == interval - 1:
            counter, scale = 0, scale * 2
        else:
            counter += 1
        yield scale


def flax_model(finite, scale, interval, hysteresis):
    fin_steps = 0
    for ok in finite:
        grow = fin_steps == interval
        scale = (scale * 2 if grow else scale) if ok else max(scale * 0.5, TINY)
        fin_steps = 0 if grow or not ok else fin_steps + 1
        yield scale


def jmp_model(finite, scale, interval, hysteresis):
    counter = 0
    for ok in finite:
        scale = (scale * 2 if counter == interval - 1 else scale) if ok else max(1.0, scale / 2)
        counter = (counter + 1) % interval * ok
        yield scale


MODELS = {
    "torch": (LossScale.torch, torch_model),
    "apex": (LossScale.apex, apex_model),
    "apex_cuda": (functools.partial(LossScale.torch, consecutive_hysteresis=True), apex_cuda_model),
    "deepspeed": (LossScale.deepspeed, deepspeed_model),
    "deepspeed_consecutive": (
        LossScale.deepspeed_consecutive,
        functools.partial(deepspeed_model, consecutive=True),
    ),
    "deepspeed_zero0": (LossScale.deepspeed, zero0_model),
    "megatron": (LossScale.megatron, megatron_model),
    "keras": (LossScale.keras, keras_model),
    "flax": (LossScale.flax, flax_model),
    "jmp": (LossScale.jmp, jmp_model),
}
HAVE_HYSTERESIS = ("apex_cuda", "deepspeed", "deepspeed_consecutive", "megatron")
MAX_STEPS = 48


@pytest.mark.parametrize("system", MODELS)
@settings(max_examples=25)
@given(
    # Runs of equal steps, because hysteresis and intervals only show in these.
    runs=st.lists(st.tuples(st.booleans(), st.integers(1, 7)), max_size=16),
    init=st.integers(0, 20).map(lambda exponent: 2.0**exponent),
    interval=st.sampled_from([1, 2, 5]),
    hysteresis=st.sampled_from([2, 3]),
)
def test_presets_follow_the_code_of_their_systems(system, runs, init, interval, hysteresis):
    preset, model = MODELS[system]
    hysteresis = hysteresis if system in HAVE_HYSTERESIS else 1
    finite = np.array([ok for ok, length in runs for _ in range(length)], bool)[:MAX_STEPS]
    padded = np.concatenate([finite, np.ones(MAX_STEPS - len(finite), bool)])
    rule = preset(growth_interval=interval, hysteresis=hysteresis)
    state = rule.init()._replace(loss_scale=jnp.float32(init))
    states = scan_states(rule, state, padded)
    assert states.loss_scale.tolist() == list(model(padded.tolist(), init, interval, hysteresis))
    # What has been counted, from the definition.
    assert states.last_finite.tolist() == padded.tolist()
    assert states.total_notfinite.tolist() == np.cumsum(~padded).tolist()
    in_a_row = [len(prefix) - len(prefix.rstrip("x")) for prefix in _prefixes(padded)]
    assert states.notfinite_count.tolist() == in_a_row


def _prefixes(finite):
    steps = "".join("." if ok else "x" for ok in finite)
    return [steps[: i + 1] for i in range(len(steps))]


# Any rule, from any state


def random_rule(rng):
    floor, init, ceiling = sorted(2.0 ** rng.uniform(-6, 6, 3))
    return LossScale(
        init_scale=init,
        growth_factor=rng.uniform(1.1, 4.0),
        backoff_factor=rng.uniform(0.1, 0.9),
        growth_interval=rng.integers(1, 4),
        min_scale=floor,
        max_scale=ceiling,
        hysteresis=rng.integers(1, 4),
        consecutive_hysteresis=bool(rng.integers(2)),
        overflow_delay=rng.integers(3),
        growth_delay=rng.integers(3),
        clamp_growth=bool(rng.integers(2)),
    )


def random_states(rule, rng, n):
    """States that the rule may have reached, and restored ones that it never would; `NEVER` is also the last count."""
    limits = [rule.min_scale, rule.max_scale, rule.max_scale / rule.growth_factor, TINY, HUGE]
    invalid = [0.0, -1.0, TINY / 2, 2 * HUGE, math.inf, math.nan]
    counts = [*range(-2, 5), NEVER - 1, NEVER]
    return amp.LossScaleState(
        np.where(rng.random(n) < 0.5, 2.0 ** rng.uniform(-8, 8, n), rng.choice(limits + invalid, n)).astype(np.float32),
        rng.choice(counts, n).astype(np.int32),
        rng.choice(counts[2:], n).astype(np.int32),
        rng.random(n) < 0.5,
        rng.choice(counts[2:], n).astype(np.int32),
        rng.choice(counts[2:], n).astype(np.int32),
    )


def step_as_described(rule, state, finite):
    """One step as the docstrings of `LossScale` and `LossScaleState` say, in Python numbers."""
    scale, tracker, left, _, in_a_row, total = state
    after, left = scale, min(left, rule.hysteresis)
    if finite:
        tracker, in_a_row = min(tracker + 1, NEVER), 0
        grows = tracker >= rule.growth_interval
        if grows:
            tracker, grown = -rule.growth_delay, scale * np.float32(rule.growth_factor)
            refused = max(scale, np.float32(rule.max_scale)) if rule.clamp_growth else scale
            after = grown if grown <= np.float32(rule.max_scale) else refused
        if grows or rule.consecutive_hysteresis:
            left = rule.hysteresis
    else:
        tracker, left = -rule.overflow_delay, max(left - 1, 0)
        in_a_row, total = min(in_a_row + 1, NEVER), min(total + 1, NEVER)
        if not left:
            after = max(scale * np.float32(rule.backoff_factor), np.float32(rule.min_scale))
    if rule.min_scale == rule.max_scale:
        after, left = scale, NEVER
    if not TINY <= scale <= HUGE:
        after = np.float32(rule.init_scale)
    return after, tracker, left, finite, in_a_row, total


@pytest.mark.parametrize("seed", range(8))
def test_any_rule_steps_from_any_state_as_it_is_described(seed):
    rng = np.random.default_rng(seed)
    rule = random_rule(rng) if seed else LossScale.static(3.0)
    states, finite = random_states(rule, rng, 500), rng.random(500) < 0.5
    stepped = jax.jit(jax.vmap(rule.update))(states, finite)
    with np.errstate(all="ignore"):
        expected = [
            step_as_described(rule, state, ok) for *state, ok in zip(*map(_python_numbers, states), finite, strict=True)
        ]
    for name, leaf, column in zip(states._fields, stepped, zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(leaf, np.array(column, leaf.dtype), err_msg=name)


def _python_numbers(leaf):
    return leaf if leaf.dtype == np.float32 else leaf.tolist()


# Floor and ceiling


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("steps", ["x" * 300 + "." * 600, "." * 600 + "x" * 300], ids=["down_up", "up_down"])
def test_300_overflows_and_300_growths_stay_within_floor_and_ceiling(name, steps):
    rule = getattr(LossScale, name)(growth_interval=1)
    seen = np.array(scales(rule, steps))
    assert np.isfinite(seen).all()
    assert seen.min() == rule.min_scale
    # Growth is refused, not clipped, so the scale stays a power of two.
    assert seen.max() == 2.0 ** math.floor(math.log2(rule.max_scale))


def test_custom_floor_and_ceiling_hold():
    rule = LossScale(init_scale=16, min_scale=4, max_scale=64, growth_interval=1)
    assert scales(rule, "xxxx......xx") == [8, 4, 4, 4, 8, 16, 32, 64, 64, 64, 32, 16]


def test_a_floor_that_is_no_power_of_the_backoff_is_reached_exactly():
    assert scales(LossScale(init_scale=10, min_scale=3), "xxx") == [5, 3, 3]


def test_a_growth_beyond_the_ceiling_is_refused_and_starts_a_new_interval():
    rule = LossScale(init_scale=48, max_scale=64, growth_interval=2)
    states = scan_states(rule, rule.init(), clean("...."))
    assert states.loss_scale.tolist() == [48] * 4
    assert states.growth_tracker.tolist() == [1, 0, 1, 0]


def test_a_growth_to_infinity_is_refused():
    rule = LossScale.torch(init_scale=8e37, growth_factor=16, growth_interval=1)
    assert scales(rule, ".") == [float(np.float32(8e37))]


@pytest.mark.parametrize("rule", [LossScale.static(3.0), LossScale.none()], ids=["static", "none"])
def test_a_static_scale_never_moves_but_counts_overflows(rule):
    rule = dataclasses.replace(rule, growth_interval=2)
    states = scan_states(rule, rule.init(), clean("...xx..x"))
    assert set(states.loss_scale.tolist()) == {rule.init_scale}
    assert states.total_notfinite.tolist() == [0, 0, 0, 1, 2, 2, 2, 3]
    assert states.notfinite_count.tolist() == [0, 0, 0, 1, 2, 0, 0, 1]


def test_none_is_a_scale_of_one():
    assert LossScale.none().init_scale == 1.0


def test_a_custom_floor_survives_jit_tree_map_numpy_and_pickle():
    rule = LossScale(init_scale=32, min_scale=8)
    state = rule.init()
    for carry in (
        jax.jit(lambda state: state),
        lambda state: jax.tree.map(lambda leaf: leaf, state),
        lambda state: jax.tree.map(np.asarray, state),
        lambda state: pickle.loads(pickle.dumps(state)),
    ):
        state = rule.update(carry(state), False)
    assert float(state.loss_scale) == 8


# Defects of other systems that must not come back


def test_an_interval_lowered_below_the_tracker_grows_at_once():
    state = LossScale(growth_interval=100).init()._replace(growth_tracker=jnp.int32(50))
    state = LossScale(growth_interval=10).update(state, True)
    assert float(state.loss_scale) == 2.0**17
    assert int(state.growth_tracker) == 0


def test_a_float16_loss_is_cast_before_it_is_scaled():
    scaled = LossScale().scale(LossScale().init(), jnp.float16(2))
    assert (float(scaled), scaled.dtype) == (2.0**17, jnp.float32)


def test_finite_gradients_that_overflow_when_unscaled_are_an_overflow():
    _, finite = LossScale().unscale(at_scale(TINY), jnp.float32([1.0, 8.0]))
    assert not finite


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-100, 2.0**100, 2.0**126])
@pytest.mark.parametrize("jit", [False, True])
def test_unscaling_is_exact_at_extreme_scales(scale, jit):
    unscale = jax.jit(LossScale().unscale) if jit else LossScale().unscale
    scale = np.float32(scale)
    grads, finite = unscale(at_scale(scale), scale * jnp.float32([1.0, -1.0, 0.0]))
    assert grads.tolist() == [1.0, -1.0, 0.0]
    assert finite


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**126])
def test_unscaling_complex_gradients_is_exact_at_extreme_scales(scale):
    scale = np.float32(scale)
    grads, finite = LossScale().unscale(at_scale(scale), jnp.array([complex(scale, -scale)]))
    assert grads.tolist() == [1 - 1j]
    assert finite


def test_the_state_is_restored_from_numpy_without_another_dtype_or_compilation():
    rule = LossScale()

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(state):
        return rule.update(state, True)

    state = step(rule.init())
    restored = step(jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, state)))
    chex.assert_trees_all_equal(restored, step(state))


# The state


@pytest.mark.parametrize("name", PRESETS)
def test_state_leaves_are_strongly_typed_arrays_before_and_after_an_update(name):
    rule = getattr(LossScale, name)()
    dtypes = amp.LossScaleState(jnp.float32, jnp.int32, jnp.int32, jnp.bool_, jnp.int32, jnp.int32)
    updated = [rule.update(rule.init(), finite) for finite in (True, False, np.True_, jnp.array(False))]
    traced = jax.eval_shape(rule.update, rule.init(), jnp.array(True))
    for state in (rule.init(), *updated, traced):
        for field, dtype in dtypes._asdict().items():
            leaf = getattr(state, field)
            assert leaf.shape == ()
            assert leaf.dtype == dtype, field
            assert not leaf.weak_type, field
    assert all(isinstance(leaf, jax.Array) for state in (rule.init(), *updated) for leaf in state)


def test_the_first_state_is_that_before_any_step():
    state = LossScale(init_scale=8, hysteresis=3).init()
    assert [leaf.item() for leaf in state] == [8.0, 0, 3, True, 0, 0]


def test_pickling_between_steps_changes_nothing():
    rule, steps = LossScale.deepspeed(init_scale=256, growth_interval=2), clean("..x...xx...")
    state = rule.init()
    for finite in steps:
        rule, state = pickle.loads(pickle.dumps((rule, state)))
        state = rule.update(state, finite)
    expected = jax.tree.map(lambda leaf: leaf[-1], scan_states(rule, rule.init(), steps))
    chex.assert_trees_all_equal(state, expected)


def test_vmapped_states_adapt_each_by_itself():
    rule = LossScale(init_scale=4, growth_interval=2)
    states = jax.vmap(lambda _: rule.init())(jnp.arange(3))
    for finite in ([True, True, False], [True, False, False]):
        states = jax.vmap(rule.update)(states, jnp.array(finite))
    assert states.loss_scale.tolist() == [8, 2, 1]
    assert states.growth_tracker.tolist() == [0, 0, 0]
    assert states.notfinite_count.tolist() == [0, 1, 2]


# Scale and unscale


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_scale_and_unscale_return_float32(dtype):
    state = at_scale(2.0**16)
    scaled = LossScale().scale(state, jnp.full((2, 3), 1.5, dtype))
    assert scaled.dtype == jnp.float32
    assert (scaled == 1.5 * 2.0**16).all()
    unscaled, finite = LossScale().unscale(state, jnp.full((2, 3), 1.5, dtype))
    assert unscaled.dtype == jnp.float32
    assert (unscaled == 1.5 * 2.0**-16).all()
    assert (finite.shape, finite.dtype) == ((), jnp.bool_)


def test_scale_and_unscale_keep_float64():
    with jax.enable_x64(True):
        state, x = at_scale(4.0), jnp.array([1e300])
        assert LossScale().scale(state, x).tolist() == [4e300]
        grads, finite = LossScale().unscale(state, x)
        assert grads.tolist() == [2.5e299]
        assert finite


@pytest.mark.parametrize(
    "leaf",
    [jnp.arange(3), np.int8(1), jnp.array([True]), jax.random.key(0), np.zeros(2, jax.dtypes.float0), 7, None],
    ids=repr,
)
def test_scale_and_unscale_pass_on_what_has_no_gradient(leaf):
    state = at_scale(4.0)
    assert LossScale().scale(state, {"x": leaf})["x"] is leaf
    tree, finite = LossScale().unscale(state, {"x": leaf})
    assert tree["x"] is leaf
    assert finite


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("spoilt", [None, "a", "b", "c"])
def test_unscale_finds_one_bad_element_in_any_leaf(bad, spoilt):
    # torch's case: an inverse scale of 1/4 on 4.0 everywhere, the bad element at [2, 2].
    grads = {
        "a": jnp.full((3, 3), 4.0),
        "b": jnp.full((3, 3), 4.0, jnp.float16),
        "c": jnp.full((3, 3), 4.0, jnp.bfloat16),
    }
    if spoilt:
        grads[spoilt] = grads[spoilt].at[2, 2].set(bad)
    unscaled, finite = LossScale().unscale(at_scale(4.0), grads)
    assert bool(finite) is (spoilt is None)
    for name, leaf in unscaled.items():
        assert (leaf.at[2, 2].set(1.0) == 1.0).all()
        assert name == spoilt or leaf[2, 2] == 1.0


def test_scale_and_unscale_undo_each_other_over_a_tree():
    state = at_scale(2.0**13)
    tree = {"w": jnp.float32([0.1, -3.0]), "n": jnp.int32(2), "none": None}
    back, finite = LossScale().unscale(state, LossScale().scale(state, tree))
    chex.assert_trees_all_equal(back, tree)
    assert finite
