import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
from jmp_amp import LossScale

RULE = LossScale(init_scale=64)


def scaler(rule=RULE):
    return amp.dynamic_loss_scale(optax.sgd(0.1, momentum=0.9), rule)


def after(steps, rule=RULE):
    """The state after clean steps and overflows (`x`)."""
    state = rule.init()
    for step in steps:
        state = rule.update(state, step != "x")
    return state


# Where the state may hide
HIDING_PLACES = {
    "bare": lambda: RULE.init(),
    "dynamic_loss_scale": lambda: scaler().init(jnp.ones(2)),
    "chain": lambda: optax.chain(optax.identity(), scaler(), optax.scale(1.0)).init(jnp.ones(2)),
    "masked": lambda: optax.masked(scaler(), {"w": True, "b": False}).init({"w": jnp.ones(2), "b": jnp.ones(1)}),
    "train_state": lambda: {"params": jnp.ones(2), "opt": (None, scaler().init(jnp.ones(2))), "step": 3},
}


@pytest.fixture(params=HIDING_PLACES)
def hidden(request):
    return HIDING_PLACES[request.param]()


def test_get_finds_the_scale_wherever_it_hides(hidden):
    for get in (amp.get_loss_scale, jax.jit(amp.get_loss_scale)):
        scale = get(hidden)
        assert (scale, scale.shape, scale.dtype) == (64, (), jnp.float32)


def test_set_replaces_the_scale_and_nothing_else(hidden):
    for set_ in (amp.set_loss_scale, jax.jit(amp.set_loss_scale)):
        new = set_(hidden, 8.0)
        assert amp.get_loss_scale(new) == 8
        assert jax.tree.structure(new) == jax.tree.structure(hidden)
        changed = [
            jax.tree_util.keystr(path)
            for (path, x), y in zip(jax.tree.leaves_with_path(hidden), jax.tree.leaves(new), strict=True)
            if not (jnp.result_type(x) == jnp.result_type(y) and np.array_equal(x, y))
        ]
        assert len(changed) == 1
        assert changed[0].endswith(".loss_scale")


def test_metrics_are_the_fields_of_the_state(hidden):
    for metrics in (amp.metrics, jax.jit(amp.metrics)):
        values = {name: value.item() for name, value in metrics(hidden).items()}
        if not isinstance(hidden, amp.LossScaleState):
            assert values.pop("grad_norm") == 0.0
        assert set(values) == set(amp.LossScaleState._fields)
        assert values == {
            "loss_scale": 64.0,
            "growth_tracker": 0,
            "hysteresis_tracker": 1,
            "last_finite": True,
            "notfinite_count": 0,
            "total_notfinite": 0,
        }


def test_metrics_count_skips():
    values = amp.metrics(after(".xx.x"))
    assert (values["loss_scale"], values["notfinite_count"], values["total_notfinite"]) == (8, 1, 3)
    assert not values["last_finite"]


def test_metrics_do_not_read_the_device():
    state = after("x")
    with jax.transfer_guard("disallow"):
        assert all(isinstance(value, jax.Array) for value in amp.metrics(state).values())


# Setting


@pytest.mark.parametrize("jit", [False, True])
def test_setting_resets_the_growth_tracker_and_keeps_the_counters(jit):
    state = after("x.x...")
    assert state.growth_tracker == 3
    new = (jax.jit(amp.set_loss_scale) if jit else amp.set_loss_scale)(state, 1024)
    assert [leaf.item() for leaf in new] == [1024, 0, state.hysteresis_tracker, True, 0, 2]
    assert [(leaf.dtype, leaf.weak_type) for leaf in new] == [(leaf.dtype, False) for leaf in state]


@pytest.mark.parametrize("jit", [False, True])
def test_setting_a_state_replaces_the_scale_and_all_counters(jit):
    _, saved = amp.interop.torch.load_state_dict(amp.interop.torch.state_dict(after("x...")))
    state = scaler().init(jnp.ones(2))
    new = (jax.jit(amp.set_loss_scale) if jit else amp.set_loss_scale)(state, saved)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    assert [x.item() for x in new.loss_scale] == [x.item() for x in saved]
    assert [(x.dtype, x.weak_type) for x in new.loss_scale] == [(x.dtype, False) for x in state.loss_scale]
    assert new.inner_state is not None
    nested = amp.set_loss_scale(state, new.loss_scale._replace(loss_scale=jnp.float16(4)))
    assert (amp.get_loss_scale(nested), amp.get_loss_scale(nested).dtype) == (4, jnp.float32)


def test_after_setting_a_whole_interval_passes_before_the_scale_grows():
    rule = LossScale(init_scale=64, growth_interval=3)
    state = amp.set_loss_scale(after("..", rule), 16)
    seen = []
    for _ in range(3):
        state = rule.update(state, True)
        seen.append(float(state.loss_scale))
    assert seen == [16, 16, 32]


@pytest.mark.parametrize("value", [4, 4.0, np.float64(4), np.float16(4), jnp.float32(4), jnp.bfloat16(4)], ids=repr)
def test_any_scalar_number_can_be_set(value):
    scale = amp.get_loss_scale(amp.set_loss_scale(RULE.init(), value))
    assert (scale, scale.dtype, scale.weak_type) == (4, jnp.float32, False)


def test_a_scale_beyond_floor_and_ceiling_can_be_set():
    assert amp.get_loss_scale(amp.set_loss_scale(RULE.init(), 2.0**30)) == 2.0**30
    assert amp.get_loss_scale(amp.set_loss_scale(RULE.init(), 2.0**-30)) == 2.0**-30


@pytest.mark.parametrize(
    ("value", "error"),
    [
        *[(value, ValueError) for value in (0, 0.0, -1.0, np.inf, -np.inf, np.nan, 1e39, 1e-39, 10**400)],
        (jnp.float32(np.nan), ValueError),
        *[(value, TypeError) for value in (None, "4", True, 4j, np.ones(1), [4.0])],
    ],
)
def test_a_value_that_is_no_scale_is_refused(value, error):
    with pytest.raises(error, match="`value` must be"):
        amp.set_loss_scale(RULE.init(), value)


def test_setting_does_not_recompile_the_step():
    rule, traces = RULE, []

    @jax.jit
    def step(state):
        traces.append(state)
        return rule.update(state, True)

    step(amp.set_loss_scale(step(rule.init()), 7))
    assert len(traces) == 1


# Under vmap


def test_vmapped_states_are_read_set_and_logged_with_their_axis():
    tx = scaler()
    state = jax.vmap(tx.init)(jnp.ones((3, 2)))
    assert amp.get_loss_scale(state).tolist() == [64] * 3
    new = amp.set_loss_scale(state, 8)
    assert amp.get_loss_scale(new).tolist() == [8] * 3
    assert new.loss_scale.growth_tracker.shape == (3,)
    assert amp.metrics(state)["total_notfinite"].tolist() == [0] * 3
    assert amp.get_loss_scale(amp.set_loss_scale(state, new.loss_scale)).tolist() == [8] * 3
    assert amp.get_loss_scale(amp.set_loss_scale(state, RULE.init())).tolist() == [RULE.init_scale] * 3
    per_seed = jax.vmap(amp.set_loss_scale)(state, jnp.float32([1, 2, 4]))
    assert amp.get_loss_scale(per_seed).tolist() == [1, 2, 4]
    for value in (jnp.float32([1, 2, 4]), np.float16([1, 2, 4]), jnp.int32([1, 2, 4])):
        for set_ in (amp.set_loss_scale, jax.jit(amp.set_loss_scale)):
            assert amp.get_loss_scale(set_(state, value)).tolist() == [1, 2, 4]
    with pytest.raises(ValueError, match=r"`value` must be a number from 2\^-126 to 2\^126"):
        amp.set_loss_scale(state, jnp.float32([1, 0, 4]))


# None, or more than one

READERS = {
    "get_loss_scale": amp.get_loss_scale,
    "set_loss_scale": functools.partial(amp.set_loss_scale, value=2.0),
    "metrics": amp.metrics,
    "check_health": amp.check_health,
    "state_dict": amp.interop.torch.state_dict,
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("state", [(), None, {"w": np.ones(2)}, optax.sgd(0.1).init(np.ones(2)), LossScale()], ids=repr)
def test_a_state_without_a_loss_scale_is_an_error_with_the_cure(read, state):
    with pytest.raises(ValueError, match=r"no `LossScaleState` in this \w+; .*`amp.dynamic_loss_scale"):
        READERS[read](state)


@pytest.mark.parametrize("read", READERS)
def test_two_loss_scales_are_an_error_that_lists_where(read):
    states = {"generator": scaler().init(jnp.ones(2)), "critic": [RULE.init()]}
    with pytest.raises(ValueError, match="2 loss scales") as info:
        READERS[read](states)
    assert "opt_state['generator'].loss_scale" in str(info.value)
    assert "opt_state['critic'][0]" in str(info.value)


# Health


@pytest.mark.parametrize("steps", ["", "...", "x", "xxx..", "xxxxx", "x.x.x.x."])
def test_a_run_that_can_recover_is_healthy(steps):
    amp.check_health(after(steps))


@pytest.mark.parametrize("steps", ["xxxxxxx", "...xxxxxxxx"])
def test_an_overflow_at_the_floor_is_an_error(steps):
    with pytest.raises(amp.LossScaleError, match=r"at its minimum\. Loss scale: 1\.0") as info:
        amp.check_health(after(steps))
    skips = steps.count("x")
    assert f"skipped steps: {skips}, of which {skips} in a row until now" in str(info.value)
    assert "full_precision" in str(info.value)


def test_a_clean_step_at_the_floor_is_healthy():
    amp.check_health(after("xxxxxxxxx."))


def test_the_floor_of_the_rule_in_use_can_be_given():
    rule = LossScale(init_scale=64, min_scale=16)
    amp.check_health(after("xxx", rule))
    with pytest.raises(amp.LossScaleError, match=r"16\.0"):
        amp.check_health(after("xxx", rule), min_scale=16)


@pytest.mark.parametrize("max_skips", [1, 3, 5])
def test_too_many_skips_in_a_row_are_an_error(max_skips):
    rule = LossScale.torch()
    amp.check_health(after("x." + "x" * (max_skips - 1), rule), max_skips=max_skips)
    with pytest.raises(amp.LossScaleError, match=f"the last {max_skips} steps overflowed. Loss scale: "):
        amp.check_health(after("x." + "x" * max_skips, rule), max_skips=max_skips)


def test_fifty_skips_in_a_row_are_too_many():
    state = RULE.init()._replace(notfinite_count=jnp.int32(49))
    amp.check_health(state)
    with pytest.raises(amp.LossScaleError, match="last 50"):
        amp.check_health(state._replace(notfinite_count=jnp.int32(50)))


def test_the_state_is_found_inside_a_chain():
    tx = optax.chain(scaler(LossScale(init_scale=1)), optax.identity())
    _, state = tx.update(jnp.full(2, jnp.inf), tx.init(jnp.ones(2)))
    with pytest.raises(amp.LossScaleError):
        amp.check_health(state, max_skips=1)


def test_one_bad_batch_without_scaling_is_healthy_and_two_in_a_row_are_not():
    amp.check_health(after("x.x.x", LossScale.none()))
    with pytest.raises(amp.LossScaleError):
        amp.check_health(after("xx", LossScale.none()))
    amp.check_health(after("xx", LossScale.none()), min_scale=0)


def test_one_unhealthy_seed_of_several_is_an_error():
    states = jax.vmap(lambda _: RULE.init())(jnp.arange(3))
    states = states._replace(notfinite_count=jnp.array([0, 5, 0]))
    amp.check_health(states)
    with pytest.raises(amp.LossScaleError):
        amp.check_health(states, max_skips=5)
    with pytest.raises(amp.LossScaleError):
        amp.check_health(states._replace(loss_scale=jnp.float32([64, 1, 64])))


def test_a_seed_at_the_floor_and_another_that_overflows_far_above_it_are_healthy():
    states = jax.vmap(lambda _: RULE.init())(jnp.arange(2))
    amp.check_health(states._replace(loss_scale=jnp.float32([1, 64]), notfinite_count=jnp.array([0, 1])))


def test_inside_jit_health_cannot_be_checked():
    with pytest.raises(TypeError, match="cannot run inside `jit`"):
        jax.jit(amp.check_health)(RULE.init())


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_parameters_that_are_not_finite_are_named_by_their_paths(bad):
    params = {"dense": [{"w": jnp.ones((2, 3)), "b": np.float16([1, bad])}], "steps": jnp.int32(3), "none": None}
    params["key"] = jax.random.key(0)
    params["dense"][0]["w"] = params["dense"][0]["w"].at[0].set(bad)
    state = after("..x...")
    with pytest.raises(amp.LossScaleError) as info:
        amp.check_health(state, params)
    assert str(info.value) == (
        "parameters are not finite: ['dense'][0]['b'] (1 of 2 values), ['dense'][0]['w'] (3 of 6 values). Loss scale: "
        "32.0; skipped steps: 1, of which 0 in a row until now; finite steps since the last overflow or change of the "
        "scale: 3. Cure: restore the last checkpoint, and check which transformation returns non-finite updates"
    )
    amp.check_health(state, {"dense": jnp.ones(3), "key": jax.random.key(0)})


def test_parameters_that_are_no_arrays_are_skipped():
    model = {"w": jnp.ones(2), "act": jnp.tanh, "name": "mlp"}
    amp.check_health(after("."), model, grads=model)
    with pytest.raises(amp.LossScaleError, match=r"not finite: \['w'\] \(1 of 2 values\)\. "):
        amp.check_health(after("."), model | {"w": jnp.float32([1, np.nan])})


def test_only_the_first_of_many_bad_leaves_are_named():
    with pytest.raises(amp.LossScaleError, match=r"\[4\] \(1 of 1 values\) and 15 more leaves\. "):
        amp.check_health(after("."), [jnp.float32(np.nan)] * 20)


def test_gradients_that_are_at_hand_are_named_but_are_no_reason():
    grads = {"w": jnp.float32([1, np.inf])}
    amp.check_health(after("x"), grads=grads)
    with pytest.raises(amp.LossScaleError, match=r"overflowed; non-finite gradients: \['w'\] \(1 of 2"):
        amp.check_health(after("xx"), grads=grads, max_skips=2)


def test_sharded_parameters_are_looked_at_where_they_are():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put(jnp.arange(16.0).at[13].set(np.nan), jax.NamedSharding(mesh, jax.P("data")))
    with pytest.raises(amp.LossScaleError, match="1 of 16 values"):
        amp.check_health(after("."), {"w": spread})


@pytest.mark.parametrize("max_skips", [0, -1])
def test_max_skips_must_be_positive(max_skips):
    with pytest.raises(ValueError, match=f"`max_skips` must be at least 1, got {max_skips}"):
        amp.check_health(RULE.init(), max_skips=max_skips)


def test_the_error_is_an_arithmetic_error():
    assert issubclass(amp.LossScaleError, ArithmeticError)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Box:
    value: jax.Array


def test_arrays_in_boxes_are_read_and_set_as_flax_nnx_has_them():
    tx = amp.dynamic_loss_scale(optax.adam(1e-3))
    state = jax.tree.map(Box, tx.init({"w": jnp.ones(2)}))
    assert amp.get_loss_scale(state) == 2**16
    assert {name: x.shape for name, x in amp.metrics(state).items()}.keys() >= {"loss_scale", "grad_norm"}
    amp.check_health(state)
    assert amp.interop.torch.state_dict(state)["scale"] == 2**16
    state = amp.set_loss_scale(state, 8.0)
    assert isinstance(state.loss_scale.loss_scale, Box)
    assert amp.get_loss_scale(state) == 8


# Frozen leaves


TWO = {"w": jnp.ones(2), "frozen": jnp.ones(2)}
LABELS = {"w": "train", "frozen": "frozen"}


def stepped(tx, n, **bad):
    state = tx.init(TWO)
    for _ in range(n):
        _, state = tx.update({name: x * bad.get(name, 1.0) for name, x in TWO.items()}, state, TWO)
    return state


FREEZES = {
    "multi_transform": lambda tx: optax.partition({"train": tx, "frozen": optax.set_to_zero()}, LABELS),
    "selective_transform": lambda tx: optax.selective_transform(tx, freeze_mask={"w": False, "frozen": True}),
}


@pytest.mark.parametrize("name", FREEZES)
@pytest.mark.usefixtures("users_code")
def test_in_the_other_order_a_frozen_leaf_skips_nothing(name):
    state = stepped(FREEZES[name](amp.dynamic_loss_scale(optax.adam(0.1), clip_global_norm=1.0)), 3, frozen=jnp.nan)
    assert amp.metrics(state)["total_notfinite"] == 0
    assert amp.metrics(state)["grad_norm"] == 2.0**-16 * jnp.sqrt(2.0)
    amp.check_health(state)


@pytest.mark.parametrize(
    "inner",
    [
        optax.sgd(0.1, momentum=0.9),
        optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation(),
        optax.apply_if_finite(optax.sgd(0.1), 3),
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
        amp.low_precision_params(optax.adam(0.1)),
    ],
)
@pytest.mark.usefixtures("users_code")
def test_optimizers_that_count_otherwise_are_healthy(inner):
    tx, grads = amp.dynamic_loss_scale(inner), jax.tree.map(jnp.ones_like, TWO)
    state = tx.init(TWO)
    for _ in range(3):
        _, state = tx.update(grads, state, TWO, value=jnp.float32(1))
        amp.check_health(state, TWO)


def test_at_the_floor_of_the_scale_the_cure_depends_on_the_loss():
    with pytest.raises(amp.LossScaleError, match=r"if the loss is finite, .*min_scale=2.0\*\*-20.*weight_grad_dtype"):
        amp.check_health(after("xxxxxxx"))
    none = LossScale.none()
    with pytest.raises(amp.LossScaleError, match="Cure: check for non-finite inputs"):  # no scale is too large
        amp.check_health(after("xx", none))


@pytest.mark.parametrize("cured", ["", "a lower floor", "float32 gradients"])
def test_gradients_that_overflow_at_a_scale_of_1_have_a_cure(cured):
    params, x = {"w": jnp.ones((8, 2))}, jnp.full((4096, 8), 8.0)
    options = {"weight_grad_dtype": "float32"} if cured == "float32 gradients" else {}
    loss_fn = amp.autocast(lambda p, x: jnp.sum(jnp.tanh(x @ p["w"] * 1e-2) * 4000), **options)
    rule = LossScale(init_scale=2.0, min_scale=2.0**-20 if cured == "a lower floor" else 1.0)
    tx = amp.dynamic_loss_scale(optax.sgd(1e-12), rule)

    @jax.jit
    def step(params, state):
        loss, grads = amp.value_and_grad(loss_fn, opt_state=state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = tx.init(params)
    for _ in range(8):
        params, state, loss = step(params, state)
    assert np.isfinite(loss)
    if cured:
        assert amp.metrics(state)["last_finite"]
        amp.check_health(state, params, min_scale=rule.min_scale)
    else:
        with pytest.raises(amp.LossScaleError, match="at its minimum"):
            amp.check_health(state, params)


def test_an_array_as_parameters_has_a_name():
    bare = jnp.array([1.0, jnp.nan])
    with pytest.raises(amp.LossScaleError, match=r"not finite: the parameters \(1 of 2 values\)"):
        amp.check_health(after("."), bare)
    tx = amp.dynamic_loss_scale(optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"^the gradient of the parameters has shape \(2, 3\)"):
        tx.update(jnp.ones((2, 3)), tx.init(bare), bare)
    with pytest.raises(ValueError, match=r"^the gradient of the parameters does not depend on the loss scale"):
        jax.eval_shape(lambda w, s: tx.update(jax.grad(jnp.sum)(w), s, w), bare, tx.init(bare))
    with pytest.raises(ValueError, match=r"^the gradient of the parameters was already unscaled"):
        jax.eval_shape(lambda w, s: tx.update(RULE.unscale(s.loss_scale, w)[0], s, w), bare, tx.init(bare))
