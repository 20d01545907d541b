"""Each row of `docs/migrating.md`, by what it says stands here."""

import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxprs import dtypes, products, read_low

import jmp_amp as amp
import jmp_amp.compat.jmp as jmp

pytestmark = pytest.mark.usefixtures("users_code")
PAGE = Path(__file__).parents[2] / "docs/migrating.md"
TESTED = set()
PARAMS = {"w": jnp.ones((8, 8)) / 4}
X = jnp.arange(32.0).reshape(4, 8) / 64
LOW, BFLOAT16, FULL = (f"{d} {d} -> {d}" for d in ("float16", "bfloat16", "float32"))


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def row(table, *cells):
    """Says which rows of a table a test is for: the beginnings of their first cells."""

    def register(test):
        TESTED.update((table, cell) for cell in cells)
        return test

    return register


def overflow(tx, state, params=PARAMS):
    return tx.update(jax.tree.map(lambda p: jnp.full_like(p, jnp.inf), params), state, params)


def scaled_step(tx, state, params=PARAMS, fun=loss_fn):
    _, grads = amp.value_and_grad(amp.autocast(fun), loss_scale=amp.get_loss_scale(state))(params, X)
    return tx.update(grads, state, params)


def assert_trees_close(a, b, rtol=1e-2):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6), a, b)


def test_every_row_has_a_test():
    table, found = "", set()
    calls, _, _ = PAGE.read_text().partition("## Differences from torch.amp")  # in test_torch_lists.py
    for line in calls.splitlines():
        if line.startswith("## "):
            table = line.removeprefix("## ").strip()
        elif line.startswith("| ") and not line.endswith("| here |"):
            found.add((table, line.split(" | ")[0].removeprefix("| ")))
    assert len(found) > 60
    untested = {(table, cell) for table, cell in found if not any(cell.startswith(c) for t, c in TESTED if t == table)}
    gone = {(table, c) for table, c in TESTED if not any(t == table and cell.startswith(c) for t, cell in found)}
    assert (untested, gone) == (set(), set())


# torch.amp


@row("torch.amp", "`F.scaled_dot_product_attention`", "`sdpa_kernel(SDPBackend.CUDNN_ATTENTION)`")
def test_attention_as_written_is_computed_by_the_kernel_that_the_user_names():
    def attend(q, k, v):
        return jax.nn.softmax(q @ k.T / 8**0.5) @ v

    def kernel(query, key, value, **options):
        called.append(query.dtype)
        return jax.nn.dot_product_attention(query, key, value, **options)

    called, x = [], jnp.linspace(0, 1, 128).reshape(16, 8)
    as_written = amp.autocast(attend, "bfloat16", attention=None)(x, x, x)
    assert not called
    by_kernel = amp.autocast(attend, "bfloat16", attention=kernel)(x, x, x)
    assert set(called) == {jnp.dtype("bfloat16")}
    assert_trees_close(by_kernel, as_written)


@row("torch.amp", '`with torch.autocast("cuda", torch.float16):`', "`@torch.autocast(...)`")
def test_autocast_is_a_function_of_a_function_and_a_decorator():
    @amp.autocast
    def decorated(params, x):
        return loss_fn(params, x)

    @amp.autocast(dtype="bfloat16")
    def decorated_with_arguments(params, x):
        return loss_fn(params, x)

    assert products(amp.autocast(loss_fn, "float16"), PARAMS, X) == {LOW}
    assert products(decorated, PARAMS, X) == {LOW}
    assert products(decorated_with_arguments, PARAMS, X) == {BFLOAT16}


@row("torch.amp", "`torch.autocast(..., enabled=flag)`")
@row("mpx", "`use_mixed_precision=False`")
def test_disabled_autocast_is_the_function_itself():
    assert amp.autocast(loss_fn, enabled=False) is loss_fn


@row("torch.amp", "`torch.autocast(..., cache_enabled=)`")
def test_a_weight_that_is_used_twice_is_cast_once_in_the_compiled_program():
    fun = jax.jit(amp.autocast(lambda w, x: (x @ w) @ w))
    text = fun.lower(jnp.ones((8, 8)), X).compile().as_text()
    assert len(re.findall(r"= f16\[8,8\]\S* convert\(", text)) == 1


@row("torch.amp", '`torch.autocast("cuda", enabled=False)` inside', '`torch.autocast("cuda", torch.bfloat16)` inside')
def test_regions():
    def fun(params, x):
        with amp.full_precision():
            y = x @ params["w"]
        with amp.precision("bfloat16"):
            return y @ params["w"].T

    assert products(amp.autocast(fun), PARAMS, X) == {FULL, BFLOAT16}


@row("torch.amp", "`custom_fwd(cast_inputs=torch.float32)`", "`custom_fwd()` without `cast_inputs`")
@pytest.mark.parametrize(("mark", "expected"), [(amp.full_precision, FULL), (lambda f: f, LOW)])
def test_both_rules_of_a_custom_vjp_run_in_one_precision(mark, expected):
    @jax.custom_vjp
    def product(w, x):
        return x @ w

    product.defvjp(lambda w, x: (x @ w, (w, x)), lambda saved, g: (saved[1].T @ g, g @ saved[0].T))
    marked = mark(product)
    gradient = jax.grad(amp.autocast(lambda w, x: jnp.sum(marked(w, x) ** 2)), (0, 1))
    assert products(gradient, PARAMS["w"], X) == {expected}


@row("torch.amp", "`custom_fwd(cast_inputs=torch.float16)`")
def test_a_function_that_casts_its_inputs_runs_as_written_on_them():
    @amp.cast_inputs("float16")
    def kernel(w, x):
        return jnp.tanh(x @ w)  # autocast would run tanh in float32

    loss_fn = lambda w, x: jnp.sum(kernel(w, x) ** 2)  # noqa: E731
    assert products(jax.grad(amp.autocast(loss_fn)), PARAMS["w"], X) == {LOW}
    assert dtypes(amp.autocast(loss_fn), PARAMS["w"], X, primitive="tanh") == ["float16 -> float16"]
    assert products(loss_fn, PARAMS["w"], X) == {FULL}


@row("torch.amp", "`torch.is_autocast_enabled()`")
def test_a_function_sees_the_dtypes_it_was_written_for_and_explain_the_others():
    seen = []

    def fun(params, x):
        y = x @ params["w"]
        seen.append(y.dtype)
        return y

    report = amp.explain(amp.autocast(fun))(PARAMS, X)
    assert set(seen) == {jnp.dtype("float32")}
    assert {r.compute for r in report.select(primitive="dot_general").rows} == {"float16"}


@row("torch.amp", "`GradScaler(init_scale,", "`get_growth_factor()`", "`set_growth_factor()`")
def test_a_rule_has_torchs_names_and_can_be_replaced_beside_its_state():
    rule = amp.LossScale.torch(init_scale=8.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=2)
    assert (rule.growth_factor, rule.backoff_factor, rule.growth_interval) == (4.0, 0.25, 2)
    state = rule.update(rule.update(rule.init(), True), True)
    assert state.loss_scale == 32
    slower = dataclasses.replace(rule, backoff_factor=0.5)
    assert slower.update(state, False).loss_scale == 16


@row("torch.amp", "`GradScaler(enabled=False)`", "`scaler.is_enabled()`")
def test_a_disabled_scaler_still_skips():
    tx = amp.dynamic_loss_scale(optax.sgd(1.0), amp.LossScale.none())
    updates, state = overflow(tx, tx.init(PARAMS))
    assert not updates["w"].any()
    assert amp.get_loss_scale(state) == 1
    assert amp.LossScale.none() == amp.LossScale.none() != amp.LossScale.torch()


@row("torch.amp", "`scaler.scale(loss).backward()`", "`scaler.get_scale()`")
@row("apex", "`with amp.scale_loss(loss, optimizer) as scaled:")
@row("mpx", "`mpx.calculate_scaled_grad`")
@row("Keras", "`optimizer.scale_loss(loss)`", "`optimizer.dynamic_scale`")
def test_gradients_are_those_of_the_scaled_loss():
    state = amp.dynamic_loss_scale(optax.sgd(1.0), amp.LossScale.static(128.0)).init(PARAMS)
    loss, grads = amp.value_and_grad(loss_fn, loss_scale=amp.get_loss_scale(state))(PARAMS, X)
    want_loss, want = jax.value_and_grad(loss_fn)(PARAMS, X)
    assert loss == want_loss
    assert_trees_close(grads, jax.tree.map(lambda g: 128 * g, want), 1e-6)


@row("torch.amp", "`scaler.scale([out1, out2])`")
@row("jmp", "`loss_scale.scale(loss)`")
@row("mpx", "`scaling.scale(x)`")
def test_a_rule_scales_unscales_and_updates_trees():
    rule = amp.LossScale.jmp(init_scale=4.0, growth_interval=1)
    state = rule.init()
    scaled = rule.scale(state, (jnp.float32(1), jnp.float32(2)))
    assert scaled == (4, 8)
    tree, finite = rule.unscale(state, scaled)  # with the scale that scaled: on the step on which it grows, too
    assert tree == (1, 2)
    assert rule.update(state, finite).loss_scale == 8


@row("torch.amp", "`scaler.unscale_(optimizer)`")
@pytest.mark.parametrize("marked", [True, False])
def test_the_optimizer_gets_true_gradients_wherever_they_are_unscaled(marked):
    inner = optax.chain(amp.unscale_and_check(), optax.sgd(1.0)) if marked else optax.sgd(1.0)
    tx = amp.dynamic_loss_scale(inner)
    updates, _ = scaled_step(tx, tx.init(PARAMS))
    assert_trees_close(updates, jax.tree.map(jnp.negative, jax.grad(loss_fn)(PARAMS, X)))


@row("torch.amp", "`scaler.step(optimizer)`", "`scaler.update()`")
@row("Flax's `DynamicScale`", "`dynamic_scale, is_fin, aux, grads = ...`", "`TrainState(dynamic_scale=...)`")
def test_update_skips_and_moves_the_scale_in_its_state():
    tx = amp.dynamic_loss_scale(optax.adam(1e-3))
    updates, state = overflow(tx, tx.init(PARAMS))
    after = optax.apply_updates(PARAMS, updates)
    assert (after["w"] == PARAMS["w"]).all()
    assert optax.tree.get(state.inner_state, "count") == 0
    assert amp.get_loss_scale(state) == 2**15


@row("torch.amp", "`scheduler.step()`")
def test_a_schedule_waits_where_a_step_is_skipped():
    tx = amp.dynamic_loss_scale(optax.sgd(optax.linear_schedule(1.0, 0.0, 2)))
    first, state = scaled_step(tx, tx.init(PARAMS))
    _, state = overflow(tx, state)
    second, _ = scaled_step(tx, state)
    assert_trees_close(second, jax.tree.map(lambda x: x / 2, first))


@row("torch.amp", "`scaler.update(new_scale)`")
def test_setting_the_scale_starts_the_tracker_again():
    tx = amp.dynamic_loss_scale(optax.sgd(1.0))
    _, state = scaled_step(tx, tx.init(PARAMS))
    assert state.loss_scale.growth_tracker == 1
    state = amp.set_loss_scale(state, 2.0**10)
    assert (amp.get_loss_scale(state), state.loss_scale.growth_tracker) == (2**10, 0)


@row("torch.amp", "`scaler.state_dict()`", "`scaler.load_state_dict(d)`")
def test_torchs_dictionaries_are_written_and_read():
    rule = amp.LossScale.torch(init_scale=4.0, growth_interval=7)
    tx = amp.dynamic_loss_scale(optax.sgd(1.0), rule)
    _, state = scaled_step(tx, tx.init(PARAMS))
    saved = amp.interop.torch.state_dict(state, rule)
    assert saved == {
        "scale": 4.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 7,
        "_growth_tracker": 1,
    }
    loaded_rule, loaded = amp.interop.torch.load_state_dict(saved)
    assert loaded_rule == rule
    assert amp.metrics(state._replace(loss_scale=loaded))["growth_tracker"] == 1


@row("torch.amp", "`clip_grad_norm_` between")
@row("apex", "`FP16_Optimizer.clip_master_grads(norm)`")
@row("DeepSpeed", "`gradient_clipping`")
@pytest.mark.parametrize("by_option", [True, False])
def test_true_gradients_are_clipped(by_option):
    clip = [] if by_option else [amp.unscale_and_check(), optax.clip_by_global_norm(0.1)]
    tx = amp.dynamic_loss_scale(optax.chain(*clip, optax.sgd(1.0)), clip_global_norm=0.1 if by_option else None)
    updates, state = scaled_step(tx, tx.init(PARAMS))
    assert float(optax.tree.norm(updates)) == pytest.approx(0.1, rel=1e-3)
    norm = optax.tree.norm(jax.grad(loss_fn)(PARAMS, X))
    assert float(amp.metrics(state)["grad_norm"]) == pytest.approx(float(norm), rel=1e-2)


@row("torch.amp", "`scaler.step(opt)` for several optimizers")
def test_one_scale_for_two_optimizers_moves_once():
    rule = amp.LossScale(init_scale=64.0)
    tx, state = amp.dynamic_loss_scale(optax.sgd(1.0), amp.LossScale.none()), rule.init()
    inner = [tx.init(PARAMS), tx.init(PARAMS)]
    finite = []
    for i, grads in enumerate([PARAMS, {"w": PARAMS["w"] * jnp.inf}]):
        updates, inner[i] = tx.update(grads, inner[i], PARAMS, loss_scale=state.loss_scale)
        finite.append(amp.metrics(inner[i])["last_finite"])
        assert updates["w"].any() == (i == 0)
    assert rule.update(state, jnp.stack(finite).all()).loss_scale == 32


@row("torch.amp", "gradient penalty")
def test_gradient_penalty_through_scaled_gradients():
    def penalized(fun, scale):
        def loss(params, x):
            grads = jax.tree.map(lambda g: g / scale, amp.grad(fun, loss_scale=scale)(params, x))
            return fun(params, x) + optax.tree.norm(grads)

        return loss

    want = jax.grad(penalized(loss_fn, 1.0))(PARAMS, X)
    got = amp.grad(penalized(amp.autocast(loss_fn), 64.0), loss_scale=64.0)(PARAMS, X)
    assert_trees_close(jax.tree.map(lambda g: g / 64, got), want)


@row("torch.amp", "gradient accumulation")
@row("DeepSpeed", "`gradient_accumulation_steps`", "`scale_wrt_gas=False`")
def test_micro_batches_add_up_to_the_batch():
    want = jax.grad(loss_fn)(PARAMS, X)
    mean = amp.grad(loss_fn, accumulate_steps=2)(PARAMS, X)
    total = amp.grad(loss_fn, accumulate_steps=2, reduction="sum")(PARAMS, X)
    assert_trees_close(mean, want, 1e-5)
    assert_trees_close(total, jax.tree.map(lambda g: 2 * g, want), 1e-5)


@row("torch.amp", "`DistributedDataParallel`")
@row("Flax's `DynamicScale`", "`axis_name=`")
def test_an_overflow_on_one_device_skips_on_all():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = X.at[0, 0].set(jnp.inf)
    tx = amp.dynamic_loss_scale(optax.sgd(1.0))
    sharded = jax.device_put(x, jax.NamedSharding(mesh, P("data")))

    @jax.jit
    def step(params, state, x):
        _, grads = amp.value_and_grad(amp.autocast(loss_fn), loss_scale=amp.get_loss_scale(state))(params, x)
        return tx.update(grads, state, params)

    assert not step(PARAMS, tx.init(PARAMS), sharded)[0]["w"].any()

    by_axis = amp.dynamic_loss_scale(optax.sgd(1.0), axis_name="data")

    def own_gradients(params, state, x):
        grads = amp.grad(loss_fn, loss_scale=amp.get_loss_scale(state))(params, x)
        updates, _ = by_axis.update(grads, state, params)
        return updates["w"][None]

    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P("data"), "check_vma": False}
    updates = jax.jit(jax.shard_map(own_gradients, mesh=mesh, **specs))(PARAMS, by_axis.init(PARAMS), x)
    assert updates.shape[0] == 2
    assert not updates.any()


# apex


@row("apex", "`amp.initialize(", "`keep_batchnorm_fp32`", "`master_weights=True`", "`amp.master_params(optimizer)`")
def test_o2_keeps_norms_and_masters_in_float32():
    params = {"dense": PARAMS["w"], "norm": {"scale": jnp.ones(8)}}
    fun, low, tx = amp.interop.apex.initialize(
        lambda p, x: jnp.sum(x @ p["dense"] * p["norm"]["scale"]), params, optax.sgd(0.1), "O2"
    )
    assert (low["dense"].dtype, low["norm"]["scale"].dtype) == (jnp.float16, jnp.float32)
    assert optax.tree.get(tx.init(low), "masters")["dense"].dtype == jnp.float32
    assert fun(low, X).dtype == jnp.float32
    _, all_low, _ = amp.interop.apex.initialize(loss_fn, params, optax.sgd(0.1), "O2", keep=lambda path, leaf: False)
    assert all_low["norm"]["scale"].dtype == jnp.float16


@row("apex", '`loss_scale="dynamic"`, `128.0`', "`min_loss_scale`, `max_loss_scale`")
def test_initialize_takes_a_rule():
    for rule in (amp.LossScale.apex(min_scale=2.0, max_scale=2.0**20), amp.LossScale.static(128.0)):
        _, params, tx = amp.interop.apex.initialize(loss_fn, PARAMS, optax.sgd(0.1), "O1", loss_scale=rule)
        assert amp.get_loss_scale(tx.init(params)) == rule.init_scale
    assert dataclasses.replace(amp.LossScale.apex(), min_scale=2.0, max_scale=2.0**20).min_scale == 2


@row("apex", "`cast_model_outputs`")
def test_the_output_dtype_is_that_of_the_policy():
    policy = amp.get_policy("O1").with_output_dtype("float16")
    assert amp.autocast(loss_fn, policy)(PARAMS, X).dtype == jnp.float16


@row("apex", "`num_losses`, `loss_id`")
def test_a_state_for_each_loss():
    rule = amp.LossScale()
    states = [rule.update(rule.init(), finite) for finite in (True, False)]
    assert [state.loss_scale for state in states] == [2**16, 2**15]


@row("apex", "`amp.half_function`, `float_function`, `promote_function`")
@row("mpx", "`mpx.force_full_precision(fun, return_dtype)`", "`mpx.cast_function(fun, dtype, return_dtype)`")
def test_functions_and_primitives_get_a_precision():
    product = lambda w, x: jnp.tanh(x @ w)  # noqa: E731
    args = PARAMS["w"], X
    assert products(amp.autocast(amp.precision("float16")(product), "bfloat16"), *args) == {LOW}
    assert products(amp.autocast(amp.full_precision(product)), *args) == {FULL}
    for name, dtype in (("full", "float32"), ("promote", "float16"), ("lower", "float16")):
        low = amp.autocast(read_low(product), rules={lax.tanh_p: name})
        assert dtypes(low, *args, primitive="tanh") == [f"{dtype} -> {dtype}"]


@row("apex", "`amp.state_dict()`")
def test_the_optimizer_state_is_a_tree_of_arrays():
    state = amp.dynamic_loss_scale(optax.adam(1e-3)).init(PARAMS)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(state))


@row("apex", "`FP16_Optimizer(optimizer, dynamic_loss_scale=True)`")
def test_masters_move_where_float16_parameters_would_stand_still():
    params = {"w": jnp.ones((8, 2), jnp.float16)}
    tx = amp.dynamic_loss_scale(amp.low_precision_params(optax.sgd(1.0)), amp.LossScale.apex())
    state = tx.init(params)
    for _ in range(8):
        grads = jax.tree.map(lambda p: jnp.full_like(p, 1e-4 * 2**10), params)
        updates, state = tx.update(grads, amp.set_loss_scale(state, 2.0**10), params)
        params = optax.apply_updates(params, updates)
    assert params["w"].dtype == jnp.float16
    np.testing.assert_allclose(params["w"], 1 - 8e-4, atol=5e-4)
    assert (params["w"] < 1).all()


@row("apex", "`FP16_Optimizer.backward(loss, update_master_grads=False)`")
def test_scaled_gradients_of_two_calls_can_be_added_up():
    tx = amp.dynamic_loss_scale(optax.sgd(1.0))
    state = tx.init(PARAMS)
    gradient = amp.grad(loss_fn, loss_scale=amp.get_loss_scale(state))
    total = jax.tree.map(jnp.add, gradient(PARAMS, X[:2]), gradient(PARAMS, X[2:]))
    updates, _ = tx.update(total, state, PARAMS)
    want = jax.grad(lambda p: loss_fn(p, X[:2]) + loss_fn(p, X[2:]))(PARAMS)
    assert_trees_close(updates, jax.tree.map(jnp.negative, want), 1e-5)


# DeepSpeed


@row("DeepSpeed", '`"fp16": {"enabled": true}`', "`initial_scale_power", "`loss_scale_window", "`min_loss_scale")
def test_the_keys_of_a_config_are_arguments_of_the_rule():
    default = amp.LossScale.deepspeed()
    assert (default.init_scale, default.growth_interval, default.min_scale) == (2**16, 1000, 1)
    rule = amp.LossScale.deepspeed(init_scale=2.0**4, growth_interval=3, min_scale=8.0)
    state = rule.init()
    for _ in range(3):
        state = rule.update(state, False)
    assert (rule.init_scale, rule.growth_interval, state.loss_scale) == (16, 3, 8)


@row("DeepSpeed", "`hysteresis", "`consecutive_hysteresis")
def test_hysteresis_is_used_up_by_overflows_or_only_by_those_in_a_row():
    def scale(rule):
        state = rule.init()
        for finite in (False, True, False):
            state = rule.update(state, finite)
        return state.loss_scale

    assert scale(amp.LossScale.deepspeed()) == scale(amp.LossScale.deepspeed(hysteresis=2)) == 2**15
    assert scale(amp.LossScale.deepspeed_consecutive()) == 2**16
    assert scale(amp.LossScale.deepspeed(hysteresis=1)) == 2**14


@row("DeepSpeed", "`loss_scale: 128`", '`"fp16": {"enabled": false}`')
def test_a_constant_scale_and_none_skip_overflows():
    for rule, scale in ((amp.LossScale.static(128.0), 128), (amp.LossScale.none(), 1)):
        tx = amp.dynamic_loss_scale(optax.sgd(1.0), rule)
        updates, state = overflow(tx, tx.init(PARAMS))
        assert amp.get_loss_scale(state) == scale
        assert not jax.tree.leaves(updates)[0].any()


@row("DeepSpeed", "`auto_cast: true`")
def test_inputs_need_no_cast():
    assert products(amp.autocast(loss_fn), PARAMS, X) == {LOW}


@row("DeepSpeed", "`fp16_master_weights_and_grads: true`")
def test_o3_has_no_masters():
    _, params, tx = amp.interop.apex.initialize(loss_fn, PARAMS, optax.sgd(0.1), "O3")
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float16")}
    assert optax.tree.get(tx.init(params), "masters", None) is None
    rounded = amp.dynamic_loss_scale(amp.low_precision_params(optax.sgd(0.1), masters=False))
    assert optax.tree.get(rounded.init(params), "masters", None) is None


@row("DeepSpeed", '`"bf16": {"enabled": true}`')
def test_bfloat16_needs_no_scale():
    assert products(amp.autocast(loss_fn, "bfloat16"), PARAMS, X) == {BFLOAT16}
    assert amp.get_loss_scale(amp.dynamic_loss_scale(optax.sgd(1.0), amp.LossScale.none()).init(PARAMS)) == 1


@row("DeepSpeed", "`communication_data_type`")
def test_the_recipes_are_where_the_link_leads():
    assert "## `shard_map`" in (PAGE.parent / "many-devices.md").read_text()  # run by test_many_devices_recipes.py


@row("DeepSpeed", "`engine.skipped_steps`", "raises at the smallest scale")
def test_skips_are_counted_and_the_smallest_scale_raises():
    tx = amp.dynamic_loss_scale(optax.sgd(1.0), amp.LossScale.deepspeed(init_scale=2.0, hysteresis=1))
    state = tx.init(PARAMS)
    for _ in range(3):
        _, state = overflow(tx, state)
    assert amp.metrics(state)["total_notfinite"] == 3
    assert amp.metrics(state)["loss_scale"] == 1
    with pytest.raises(amp.LossScaleError, match="the loss scale is at its minimum"):
        amp.check_health(state, PARAMS)


# Optimizers in 8 bits


@row(
    "Optimizers in 8 bits",
    "`bnb.optim.AdamW8bit(...)`",
    "`FusedAdam(exp_avg_dtype=torch.uint8",
    "`GlobalOptimManager.override_config",
    "`min_8bit_size=4096`",
    "`AdamW8bit(block_size=256)`",
)
def test_moments_have_8_bits_but_for_those_that_are_kept():
    params = {"embed": jnp.ones((16, 256)), "w": jnp.ones((16, 256)), "small": jnp.ones((15, 256))}
    tx = amp.low_precision_state(
        optax.adamw(1e-3), block=256, keep=lambda path, leaf: "embed" in jax.tree_util.keystr(path)
    )
    state = tx.init(params)
    for moment in ("mu", "nu"):
        found = optax.tree.get(state, moment)
        assert {name: x.dtype for name, x in found.items()} == {
            "embed": jnp.float32,
            "w": jnp.uint8,
            "small": jnp.float32,
        }
    assert {x.shape for x in state.formats.values()} == {(16, 1)}


@row("Optimizers in 8 bits", "`AdamW8bit(bf16_stochastic_round=True)`", "`FusedAdam(master_weights=True")
def test_bfloat16_parameters_are_rounded_or_completed_by_remainders():
    params = {"w": jnp.ones((16, 256), jnp.bfloat16)}
    rounded = amp.low_precision_params(amp.low_precision_state(optax.adamw(1e-3)), masters=False, rounding="stochastic")
    assert rounded.init(params).masters is None
    halves = amp.low_precision_params(amp.low_precision_state(optax.adamw(1e-3)), remainder=True)
    assert halves.init(params).masters["w"].dtype == jnp.uint16


# jmp


@row("jmp", "`jmp.Policy`, `jmp.get_policy`")
def test_policies_are_jmps():
    policy = amp.get_policy("params=float32,compute=float16,output=float32")
    assert policy == amp.Policy(jnp.float32, jnp.float16, jnp.float32)
    assert products(amp.autocast(loss_fn, policy), PARAMS, X) == {LOW}


@row("jmp", "`jmp.DynamicLossScale(scale,", "`jmp.StaticLossScale(s)`")
@row("mpx", "`mpx.DynamicLossScaling(loss_scaling,")
def test_jmps_loss_scales():
    rule = amp.LossScale.jmp(
        init_scale=2.0**14, growth_interval=1, growth_factor=4, backoff_factor=1 / 4, min_scale=8.0, max_scale=2.0**15
    )
    state = rule.update(rule.init(), True)
    assert state.loss_scale == 2**14  # 2^16 would be above the ceiling
    for _ in range(9):
        state = rule.update(state, False)
    assert state.loss_scale == 8
    assert amp.LossScale.static(3.0).init().loss_scale == 3
    assert amp.LossScale.none().init().loss_scale == 1


@row("jmp", "`jmp.all_finite`")
@row("mpx", "`mpx.cast_to_half_precision(tree)`", "`mpx.all_finite`")
def test_tree_functions():
    low = jmp.cast_to_half(PARAMS)
    assert low["w"].dtype == jmp.half_dtype() == jnp.float16
    assert jmp.cast_to_full(low)["w"].dtype == jnp.float32
    assert amp.get_policy("c=bf16").cast_to_compute(low)["w"].dtype == jnp.bfloat16
    assert amp.all_finite(low)
    for select in (jmp.select_tree, optax.tree.where):
        assert select(jnp.bool_(False), low, jax.tree.map(jnp.zeros_like, low))["w"].sum() == 0


# Flax's `DynamicScale`


@row("Flax's `DynamicScale`", "`DynamicScale(growth_factor,", "`dynamic_scale.value_and_grad(fun)(params)`")
def test_the_scale_moves_as_flaxs_and_the_gradients_are_the_same():
    dynamic_scale = pytest.importorskip("flax.training.dynamic_scale", reason="needs Flax")
    options = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 1}
    theirs = dynamic_scale.DynamicScale(scale=256.0, minimum_scale=2.0, **options)
    rule = amp.LossScale.flax(init_scale=256.0, min_scale=2.0, **options)
    tx = amp.dynamic_loss_scale(optax.sgd(1.0), rule)
    state = tx.init(PARAMS)
    for x in (X, X, X, X * jnp.inf, X):
        theirs, finite, loss, want = theirs.value_and_grad(loss_fn)(PARAMS, x)
        got_loss, grads = amp.value_and_grad(loss_fn, loss_scale=amp.get_loss_scale(state))(PARAMS, x)
        updates, state = tx.update(grads, state, PARAMS)
        assert theirs.scale == amp.get_loss_scale(state)
        assert finite == amp.metrics(state)["last_finite"]
        if finite:
            assert got_loss == loss
            assert_trees_close(updates, jax.tree.map(jnp.negative, want), 1e-6)


@row("Flax's `DynamicScale`", "`dtype=jnp.float16` in the layers")
def test_a_layer_with_a_dtype_is_honoured_and_one_without_is_cast():
    nn = pytest.importorskip("flax.linen", reason="needs Flax")

    def norms(**options):
        norm = nn.LayerNorm(**options)
        params = norm.init(jax.random.key(0), X)
        return dtypes(amp.autocast(norm.apply), params, X, primitive="rsqrt"), norm.apply(params, X).dtype

    assert norms() == (["float32 -> float32"], jnp.float32)
    assert norms(dtype=jnp.float16)[1] == jnp.float16


# mpx


@row(
    "mpx",
    "`mpx.set_half_precision_datatype(jnp.bfloat16)`",
    "`mpx.filter_grad(fun, scaling)`",
    "`mpx.optimizer_update(",
)
def test_equinox_models_train():
    eqx = pytest.importorskip("equinox", reason="needs Equinox")
    model = eqx.nn.Linear(8, 2, key=jax.random.key(0))
    fun = amp.autocast(lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2), "bfloat16")
    tx = amp.dynamic_loss_scale(optax.sgd(0.1))
    state = tx.init(eqx.filter(model, eqx.is_array))
    transform = {"transform": eqx.filter_value_and_grad}
    loss, grads = amp.value_and_grad(fun, loss_scale=amp.get_loss_scale(state), **transform)(model, X)
    updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_array))
    after, _ = amp.value_and_grad(fun, **transform)(eqx.apply_updates(model, updates), X)
    assert after < loss


# Keras


@row("Keras", "`keras.mixed_precision.set_global_policy", "`keras.mixed_precision.Policy")
def test_a_float32_keras_model_runs_low():
    keras = pytest.importorskip("keras", reason="needs Keras")
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    trainable = [v.value for v in model.trainable_variables]
    low = amp.autocast(lambda params, x: model.stateless_call(params, [], x)[0])
    assert products(low, trainable, X) == {LOW}
    assert str(amp.get_policy("mixed_float16")) == "params=float32,compute=float16,output=float32"


@row("Keras", "`LossScaleOptimizer(optimizer,")
def test_the_scale_starts_and_grows_as_keras_does():
    rule = amp.LossScale.keras(init_scale=2.0, growth_interval=2)
    state = rule.init()
    for _ in range(8):
        state = rule.update(state, True)
    assert state.loss_scale == 32
    assert re.search(r"keras\(init_scale=, growth_interval=\)", PAGE.read_text())
