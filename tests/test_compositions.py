"""What is put together with `dynamic_loss_scale` and `unscale_and_check` is right, or raises and says what to do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optax import contrib

import jmp_amp as amp
from jmp_amp import LossScale

pytestmark = pytest.mark.usefixtures("users_code")

SKIPS = ["cond", "select"]
PARAMS = {"w": jnp.array([1.0, -2.0, 3.0]), "b": jnp.array([0.5, -0.5])}
MARK = amp.unscale_and_check


def loss_fn(params):
    return jnp.sum(params["w"] ** 2) + jnp.sum((params["b"] - 1) ** 4)


def run(tx, steps=4, bad=(), params=PARAMS, jit=True, extra=lambda value, grads: {}):
    """Parameters and state after some steps; in those of `bad` the gradients overflow."""

    def step(params, state, is_bad):
        value, grads = amp.value_and_grad(loss_fn, loss_scale=amp.get_loss_scale(state))(params)
        grads = jax.tree.map(lambda g: jnp.where(is_bad, jnp.inf, g), grads)
        updates, state = tx.update(grads, state, params, **extra(value, grads))
        return optax.apply_updates(params, updates), state

    step, state = jax.jit(step) if jit else step, tx.init(params)
    for i in range(steps):
        params, state = step(params, state, jnp.asarray(i in bad))
    return params, state


def run_plain(tx, steps=4, params=PARAMS, extra=lambda value, grads: {}):
    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params, **extra(value, grads))
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(steps):
        params, state = step(params, state)
    return params


def assert_close(got, want):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), got, want)


INSIDE = {
    "two marks": lambda mark: optax.chain(mark(), optax.trace(0.5), mark(), optax.sgd(0.01)),
    "a mark in one part": lambda mark: optax.partition(
        {"a": optax.chain(mark(), optax.sgd(0.01)), "b": optax.adam(0.1)}, {"w": "a", "b": "b"}
    ),
    "a mask around a mark": lambda mark: optax.chain(
        optax.masked(optax.chain(mark(), optax.trace(0.5)), {"w": True, "b": False}), optax.sgd(0.01)
    ),
    "accumulation around a mark": lambda mark: optax.MultiSteps(
        optax.chain(mark(), optax.adam(0.1)), 2
    ).gradient_transformation(),
    "a clip in front of the mark": lambda mark: optax.chain(optax.clip_by_global_norm(1.0), mark(), optax.sgd(0.01)),
    "a mark in an injection": lambda mark: optax.inject_hyperparams(
        lambda learning_rate: optax.chain(mark(), optax.sgd(learning_rate))
    )(learning_rate=0.01),
}


@pytest.mark.sweep(5)
@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("name", INSIDE)
def test_a_mark_anywhere_inside_is_the_optimizer_without_it(name, skip):
    params, state = run(amp.dynamic_loss_scale(INSIDE[name](MARK), skip=skip), steps=6, bad=(1, 3))
    assert_close(params, run_plain(INSIDE[name](optax.identity), steps=4))
    assert state.loss_scale.total_notfinite == 2
    assert state.loss_scale.loss_scale == 2.0**14


TWICE = "the gradient at .* was already unscaled"
# What raises while a step is traced, and what `check_loss_scaling` finds, as the program of one update has no fault.
OUTSIDE = {
    "a mark in front": (lambda tx: optax.chain(MARK(), tx), TWICE),
    "a mark behind": (lambda tx: optax.chain(tx, MARK()), TWICE),
    "accumulation": (
        lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
        "`MultiSteps` around `dynamic_loss_scale` keeps sums of scaled gradients.*; move it inside, ",
    ),
    "apply_if_finite": (
        lambda tx: optax.apply_if_finite(tx, 3),
        "`apply_if_finite` around `dynamic_loss_scale` hides overflows from it.* does not back off; move it inside, ",
    ),
    "masked": (lambda tx: optax.masked(tx, {"w": True, "b": False}), None),
    "partition": (lambda tx: optax.partition({"a": tx, "b": optax.sgd(1.0)}, {"w": "a", "b": "b"}), None),
    "every other step": (lambda tx: optax.conditionally_transform(tx, lambda step: step % 2 == 0), None),
}
INSIDE_OF = {
    "wrapper": amp.dynamic_loss_scale,
    "link": lambda tx: optax.chain(MARK(), tx),
}


def step_of(tx, is_in_state):
    """A train step, whose scale is in the state of the optimizer, or another one, which `update` is handed."""
    tx = optax.with_extra_args_support(tx)

    def step(params, scaling, state):
        scale = amp.get_loss_scale(state if is_in_state else scaling)
        grads = amp.grad(loss_fn, loss_scale=scale)(params)
        updates, state = tx.update(grads, state, params, **({} if is_in_state else {"loss_scale": scale}))
        return optax.apply_updates(params, updates), state

    return step, (PARAMS, LossScale().init(), tx.init(PARAMS))


# `MultiSteps` does not hand the scale on to a link.
@pytest.mark.parametrize(
    ("name", "by"), [(n, b) for n in OUTSIDE for b in INSIDE_OF if (n, b) != ("accumulation", "link")]
)
def test_what_may_not_be_around_the_wrapper_raises(name, by):
    around, message = OUTSIDE[name]
    step, args = step_of(around(INSIDE_OF[by](optax.sgd(0.1))), by == "wrapper" and "mark" not in name)
    with pytest.raises(ValueError, match="does not scale and unscale its gradients consistently|" + str(message)):
        amp.debug.check_loss_scaling(step)(*args)
    if message is not None and (name, by) != ("apply_if_finite", "link"):  # whose state has no scale
        for run in (jax.jit(step), step) if "around" in message else (jax.jit(step),):
            with pytest.raises(ValueError, match=message):
                run(*args)


RIGHT = {
    "the rest set to zero": lambda tx: optax.chain(
        optax.masked(tx, {"w": True, "b": False}), optax.masked(optax.set_to_zero(), {"w": False, "b": True})
    ),
    "the rest frozen": lambda tx: optax.partition({"a": tx, "b": optax.set_to_zero()}, {"w": "a", "b": "b"}),
    "each part": lambda tx: optax.partition({"a": tx, "b": tx}, {"w": "a", "b": "b"}),
    "every other step": lambda tx: optax.conditionally_mask(tx, lambda step: step % 2 == 0),
    "a snapshot": lambda tx: optax.chain(optax.snapshot("norm", lambda updates, *_: optax.tree.norm(updates)), tx),
    "centralized": lambda tx: optax.chain(optax.centralize(), optax.scale(0.5), optax.identity(), tx),
    "a projection": lambda tx: optax.chain(optax.stateless(lambda g, _: jax.tree.map(project, g)), tx),
    "an overflow as NaN": lambda tx: optax.chain(
        optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, jnp.nan), g)), tx
    ),
    "of low rank": lambda tx: optax.chain(optax.stateless(lambda g, _: jax.tree.map(of_rank_1, g)), tx),
    "hyperparameters": lambda tx: optax.chain(optax.inject_hyperparams(optax.scale)(step_size=0.5), tx),
    "rounded by its bits": lambda tx: optax.chain(optax.stateless(lambda g, _: jax.tree.map(to_bfloat16, g)), tx),
    "quantized": lambda tx: optax.chain(optax.stateless(lambda g, _: jax.tree.map(to_int8, g)), tx),
}


def to_bfloat16(x):
    bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x7FFF)
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)


def to_int8(x):
    largest = jnp.maximum(jnp.max(jnp.abs(x)), 1e-12)
    return jnp.round(x / largest * 127).astype(jnp.int8).astype(jnp.float32) * largest / 127


def project(x):
    y = jnp.cos(jnp.arange(x.size)).astype(x.dtype).reshape(x.shape)
    return x - y * jnp.sum(x * y) / (jnp.sum(y * y) + 1e-6) + x * jnp.sum(x * x) / (jnp.sum(x * x) + 1e-8)


def of_rank_1(x):
    u, _, _ = jnp.linalg.svd(x[None], full_matrices=False)
    return (u[:, :1] @ (u[:, :1].T @ x[None]))[0]


@pytest.mark.parametrize("by", INSIDE_OF)
@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.filterwarnings("ignore:.*measurement.'norm'.*, a value multiplied by the loss scale")
def test_a_right_composition_is_not_refused(name, by):
    is_in_state = by == "wrapper" and name != "each part"
    step, args = step_of(RIGHT[name](INSIDE_OF[by](optax.sgd(0.1))), is_in_state)
    amp.debug.check_loss_scaling(step)(*args)  # traces it, too
    if name in ("of low rank", "rounded by its bits"):
        return
    # It is silent because it knows.
    clipped = optax.chain(optax.clip(1.0), INSIDE_OF[by](optax.sgd(0.1)))
    step, args = step_of(RIGHT[name](clipped), is_in_state)
    with pytest.raises(ValueError, match=r"optax/\S+ \(tree_clip.*\), the (step compares|gradient at .* becomes)"):
        jax.eval_shape(step, *args)


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun])
def test_a_threshold_that_is_scaled_is_not_refused(jit):
    inner = amp.dynamic_loss_scale(optax.sgd(0.5))

    @jit
    def update(grads, state):
        tx = optax.chain(optax.clip_by_global_norm(1.0 * amp.get_loss_scale(state)), inner)
        return tx.update(grads, state, PARAMS)[0]

    norm = optax.tree.norm(PARAMS)
    grads = jax.tree.map(lambda x: 2.0**16 * x, PARAMS)
    assert_close(update(grads, ((), inner.init(PARAMS))), jax.tree.map(lambda x: -0.5 * x / norm, PARAMS))


def test_without_a_scale_what_is_in_front_may_clip():
    tx = optax.chain(optax.clip_by_global_norm(1.0), amp.dynamic_loss_scale(optax.sgd(0.1), LossScale.none()))
    assert_close(run(tx, bad=(1,))[0], run_plain(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), steps=3))
    for inner in (optax.chain(MARK(), optax.sgd(0.1)), amp.dynamic_loss_scale(optax.sgd(0.1))):
        tx = optax.chain(optax.clip(1.0), inner)

        def update(scale, tx=tx):
            grads = amp.grad(loss_fn, loss_scale=scale)(PARAMS)
            return jax.eval_shape(lambda grads: tx.update(grads, tx.init(PARAMS), PARAMS, loss_scale=scale), grads)

        update(1.0)
        update(2.0)  # of gradients that are an argument, nothing is known
        step = jax.jit(
            lambda p, scale, tx=tx: tx.update(amp.grad(loss_fn, loss_scale=scale)(p), tx.init(p), p, loss_scale=scale)
        )
        with pytest.raises(ValueError, match="the step compares"):
            step(PARAMS, 2.0)


def test_the_check_leaves_no_trace_in_what_is_jitted():
    inner = amp.dynamic_loss_scale(optax.sgd(0.5))
    jitted = optax.GradientTransformationExtraArgs(inner.init, jax.jit(inner.update))
    tx = optax.chain(optax.identity(), jitted)
    grads = jax.tree.map(lambda x: 2.0**16 * x, PARAMS)
    for update in (tx.update, jax.jit(tx.update)):
        updates, state = update(grads, tx.init(PARAMS), PARAMS)
        assert_close(updates, jax.tree.map(lambda x: -0.5 * x, PARAMS))
        assert state[1].loss_scale.growth_tracker == 1


def test_apply_if_finite_inside_the_wrapper_is_harmless():
    params, state = run(amp.dynamic_loss_scale(optax.apply_if_finite(optax.sgd(0.01), 3)), bad=(2,))
    assert_close(params, run_plain(optax.sgd(0.01), steps=3))
    assert state.loss_scale.loss_scale == 2.0**15


def test_one_wrapper_inside_another_is_an_error_at_any_depth():
    tx = amp.dynamic_loss_scale(optax.masked(amp.dynamic_loss_scale(optax.sgd(1.0)), {"w": True, "b": True}))
    with pytest.raises(ValueError, match=r"inside another one, at `inner`\.inner_state.*wrap the whole optimizer once"):
        tx.init(PARAMS)


@pytest.mark.parametrize("between", [optax.identity(), optax.clip_by_global_norm(1.0), optax.scale_by_adam()])
def test_gradients_that_a_chain_unscales_twice_are_found_while_it_is_traced(between):
    tx = optax.chain(MARK(), between, MARK(), optax.sgd(1.0))
    with pytest.raises(ValueError, match=TWICE):
        jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS, loss_scale=8.0)


def test_two_optimizers_that_each_unscale_their_own_gradients_are_no_error():
    tx = optax.chain(MARK(), optax.sgd(1.0))

    @jax.jit
    def step(grads, scale):
        first, _ = tx.update(grads, tx.init(PARAMS), PARAMS, loss_scale=scale)
        second, _ = tx.update(jax.tree.map(jnp.sin, grads), tx.init(PARAMS), PARAMS, loss_scale=scale)
        return first, second

    assert_close(step(PARAMS, 2.0)[0], jax.tree.map(lambda x: -x / 2, PARAMS))


# Transformations that take extra arguments, or other parameters than the gradients' own.


def of_loss(value, grads):
    return {"value": value, "grad": grads, "value_fn": loss_fn}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize(
    "inner",
    [
        optax.lbfgs(),
        optax.lbfgs(linesearch=optax.scale_by_backtracking_linesearch(10)),
        optax.chain(optax.sgd(0.1), optax.scale_by_zoom_linesearch(10)),
    ],
    ids=["zoom", "backtracking", "sgd"],
)
def test_a_line_search_gets_true_values_and_gradients(inner, skip):
    params, _ = run(amp.dynamic_loss_scale(inner, skip=skip), steps=3, extra=of_loss)
    assert_close(params, run_plain(inner, steps=3, extra=of_loss))


@pytest.mark.parametrize("skip", SKIPS)
def test_sharpness_aware_minimization(skip):
    inner = contrib.sam(optax.sgd(0.01), optax.chain(contrib.normalize(), optax.sgd(0.05)), sync_period=2)
    params, _ = run(amp.dynamic_loss_scale(inner, skip=skip), steps=6, bad=(1,))
    assert_close(params, run_plain(inner, steps=5))
    inner = contrib.sam(optax.sgd(0.01), optax.chain(contrib.normalize(), optax.sgd(0.05)), opaque_mode=True)

    def true_grads(value, grads):
        return {"grad_fn": lambda params, _: jax.grad(loss_fn)(params)}

    params, _ = run(amp.dynamic_loss_scale(inner, skip=skip), extra=true_grads)
    assert_close(params, run_plain(inner, extra=true_grads))


@pytest.mark.parametrize("skip", SKIPS)
def test_lookahead(skip):
    inner = optax.lookahead(optax.sgd(0.01), sync_period=2, slow_step_size=0.5)
    tx = amp.dynamic_loss_scale(inner, skip=skip)
    grads = jax.grad(loss_fn)(PARAMS)

    def end(tx, scale):
        params = optax.LookaheadParams.init_synced(PARAMS)
        state = tx.init(params)
        for _ in range(3):
            updates, state = tx.update(jax.tree.map(lambda g: g * scale, grads), state, params)
            params = optax.apply_updates(params, updates)
        return params

    assert_close(end(tx, 2.0**16), end(inner, 1.0))


@pytest.mark.parametrize("skip", SKIPS)
def test_gradients_of_single_examples(skip):
    private = contrib.differentially_private_aggregate(l2_norm_clip=1.0, noise_multiplier=0.1, key=jax.random.key(0))
    inner = optax.chain(private, optax.sgd(0.1))
    grads = jax.tree.map(lambda x: jnp.stack([x, 2 * x, -x]), PARAMS)

    def update(tx, scale):
        return tx.update(jax.tree.map(lambda g: g * scale, grads), tx.init(PARAMS), PARAMS)[0]

    assert_close(update(amp.dynamic_loss_scale(inner, skip=skip), 2.0**16), update(inner, 1.0))
    tx = amp.dynamic_loss_scale(optax.sgd(0.1), skip=skip)
    with pytest.raises(
        ValueError, match=r"the update at `\['b'\]` has shape \(3, 2\), but its parameter has shape \(2,\)"
    ):
        update(tx, 1.0)


# Outside of `jit`, while debugging, and across devices.


@pytest.mark.parametrize("skip", SKIPS)
def test_outside_of_jit_nothing_is_compiled_after_the_first_step(skip):
    tx = amp.dynamic_loss_scale(optax.adam(0.1), skip=skip)
    state, compiled = tx.init(PARAMS), []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "compile" in name else None
    )
    for _ in range(2):
        _, state = tx.update(PARAMS, state, PARAMS)
    first = len(compiled)
    for _ in range(5):
        _, state = tx.update(PARAMS, state, PARAMS)
    assert len(compiled) == first


def test_outside_of_jit_both_ways_to_skip_run_the_same_ops():
    ends = [run(amp.dynamic_loss_scale(optax.adam(0.1), skip=skip), bad=(1,), jit=False) for skip in SKIPS]
    jax.tree.map(np.testing.assert_array_equal, *ends)


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_an_overflow_is_no_error_while_looking_for_nans(skip, jit, clip):
    tx = amp.dynamic_loss_scale(optax.adamw(0.1), skip=skip, clip_global_norm=clip, nonfinite_leaves=True)
    update, state = jax.jit(tx.update) if jit else tx.update, tx.init(PARAMS)
    with jax.debug_nans(True):
        updates, state = update(PARAMS | {"w": jnp.array([jnp.inf, 1.0, -jnp.inf])}, state, PARAMS)
        seen = amp.metrics(state)
    assert not any(map(np.any, jax.tree.leaves(updates)))
    assert np.isinf(seen["grad_norm"])
    assert seen["nonfinite/w"]
    assert seen["loss_scale"] == 2.0**15


def test_a_forgotten_axis_name_is_found_where_the_types_tell():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def step(axis_name):
        tx = amp.dynamic_loss_scale(optax.sgd(1.0), axis_name=axis_name)

        def scale_after(grads, state):
            return tx.update(grads, state)[1].loss_scale.loss_scale

        sharded = jax.shard_map(scale_after, mesh=mesh, in_specs=(spec("data"), spec()), out_specs=spec())
        return jax.jit(sharded)(jnp.ones(4), tx.init(jnp.ones(2)))

    with pytest.raises(ValueError, match=r"mapped axes \['data'\].*pmean\(grads, 'data'\).*pass `axis_name='data'`"):
        step(None)
    assert step("data") == 2.0**16


# What is handed in.

WRONG = {
    "the state of inner": (
        lambda tx, s: tx.update(PARAMS, s.inner_state, PARAMS),
        TypeError,
        "got a tuple of 2; create it with",
    ),
    "a flag in words": (
        lambda tx, s: tx.update(PARAMS, s, PARAMS, grads_finite="no"),
        TypeError,
        "`grads_finite` must be a bool, got 'no'; `amp.all_finite.grads.` returns one",
    ),
    "a flag of 1": (lambda tx, s: tx.update(PARAMS, s, PARAMS, grads_finite=1), TypeError, "must be a bool.*got 1"),
    "an integer flag": (
        lambda tx, s: tx.update(PARAMS, s, PARAMS, grads_finite=jnp.int32(1)),
        TypeError,
        "`grads_finite` must be a bool",
    ),
    "the wrapper's state for the rule": (
        lambda tx, s: LossScale().update(s, True),
        TypeError,
        "got a DynamicLossScaleState; `dynamic_loss_scale` holds it as `opt_state.loss_scale`",
    ),
    "a list of axes": (
        lambda tx, s: amp.dynamic_loss_scale(optax.sgd(1.0), axis_name=["data"]),
        TypeError,
        r"a tuple of names, got \['data'\]",
    ),
    "a list of axes, alone": (lambda tx, s: MARK(["data"]), TypeError, r"a tuple of names, got \['data'\]"),
    "an array for a tree": (
        lambda tx, s: tx.update(jnp.ones(3), s, PARAMS),
        ValueError,
        "the gradients are a single array, which the parameters do not have",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_say_what_to_hand_in(name):
    call, error, message = WRONG[name]
    tx = amp.dynamic_loss_scale(optax.adam(0.1))
    with pytest.raises(error, match=message):
        call(tx, tx.init(PARAMS))


@pytest.mark.parametrize("skip", SKIPS)
def test_a_change_of_structure_is_named_as_one(skip):
    inner = optax.GradientTransformation(lambda p: [jnp.zeros(2), jnp.zeros(3)], lambda u, s, p=None: (u, [*s[1:]]))
    tx = amp.dynamic_loss_scale(inner, skip=skip)
    with pytest.raises(TypeError, match="changes the structure of its state"):
        jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS)


@pytest.mark.parametrize("scale", [0, 0.0, -8, 1e300, np.nan, np.inf, jnp.float32(0), np.float32(-1)], ids=repr)
def test_a_scale_that_is_no_scale_raises_outside_of_jit(scale):
    for call in (
        lambda: amp.value_and_grad(loss_fn, loss_scale=scale)(PARAMS),
        lambda: amp.grad(loss_fn, loss_scale=scale)(PARAMS),
        lambda: MARK().update(PARAMS, MARK().init(PARAMS), loss_scale=scale),
    ):
        with pytest.raises(
            ValueError, match="`loss_scale` must be a number from 2^-126 to 2^126.*, got".replace("^", r"\^")
        ):
            call()


BEYOND = [2.0**127, 3e38, np.nextafter(2.0**126, np.inf), np.nextafter(2.0**-126, 0), 2.0**-127, 1e-40, 5e-324]
ENTRIES = {
    "init_scale": lambda x: LossScale(init_scale=x, min_scale=2.0**-126, max_scale=2.0**126),
    "min_scale": lambda x: LossScale(min_scale=x),
    "max_scale": lambda x: LossScale(max_scale=x),
    "static": LossScale.static,
    **{
        name: lambda x, name=name: getattr(LossScale, name)(init_scale=x, min_scale=2.0**-126, max_scale=2.0**126)
        for name in ("torch", "apex", "deepspeed", "deepspeed_consecutive", "megatron", "keras", "flax", "jmp")
    },
    "value_and_grad": lambda x: amp.value_and_grad(loss_fn, loss_scale=x),
    "a state": lambda x: amp.value_and_grad(loss_fn, opt_state=LossScale().init()._replace(loss_scale=np.float64(x))),
    "grad": lambda x: amp.grad(loss_fn, loss_scale=x),
    "link": lambda x: MARK().update(PARAMS, MARK().init(PARAMS), loss_scale=x),
    "update": lambda x: amp.dynamic_loss_scale(optax.sgd(0.1)).update(
        PARAMS, amp.dynamic_loss_scale(optax.sgd(0.1)).init(PARAMS), PARAMS, loss_scale=x
    ),
    "set": lambda x: amp.set_loss_scale(LossScale().init(), x),
    "set a state": lambda x: amp.set_loss_scale(
        LossScale().init(), LossScale().init()._replace(loss_scale=np.float64(x))
    ),
    "load_state_dict": lambda x: amp.interop.torch.load_state_dict(
        {"scale": x, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 1, "_growth_tracker": 0}
    ),
    "from_config": lambda x: amp.interop.deepspeed.from_config({"fp16": {"enabled": True, "loss_scale": float(x)}}),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_entry_takes_the_same_scales(entry):
    for scale in (2.0**-126, 1e-30, 1.0, 3.0, 2.0**24, 2.0**126):
        for cast in (float, np.float32, jnp.float32):
            if (entry != "min_scale" or scale <= 2.0**16) and (entry != "max_scale" or scale >= 2.0**16):
                ENTRIES[entry](cast(scale))
    for scale in BEYOND:
        for cast in (float, np.float64):
            with pytest.raises(ValueError, match=r"from 2\^-126 to 2\^126, so that float32 holds its reciprocal, got"):
                ENTRIES[entry](cast(scale))


@pytest.mark.parametrize("scale", [np.nan, 0.0, 2.0**127])
def test_a_traced_scale_is_data(scale):
    state = LossScale().init()
    for call in (
        lambda x: amp.grad(loss_fn, loss_scale=x)(PARAMS),
        lambda x: MARK().update(PARAMS, MARK().init(PARAMS), loss_scale=x),
        lambda x: amp.set_loss_scale(state, x),
        lambda x: amp.set_loss_scale(state, state._replace(loss_scale=x)),
    ):
        jax.jit(call)(jnp.float32(scale))


# A state from elsewhere.


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -4.0, 0.0, 1e-45, 2.0**127], ids=repr)
@pytest.mark.parametrize(
    "rule", [LossScale(), LossScale.static(8.0), LossScale.apex()], ids=["default", "static", "apex"]
)
def test_a_scale_that_is_none_is_told_and_replaced(rule, scale):
    tx = amp.dynamic_loss_scale(optax.sgd(0.1), rule)
    state = tx.init(PARAMS)
    state = state._replace(loss_scale=state.loss_scale._replace(loss_scale=jnp.float32(scale)))
    with pytest.raises(
        amp.LossScaleError, match=r"loss scale in the state is not between 2\^-126 and .*set_loss_scale"
    ):
        amp.check_health(state)
    _, state = jax.jit(tx.update)(PARAMS, state, PARAMS)
    assert amp.get_loss_scale(state) == rule.init_scale


def test_a_tracker_at_the_end_of_int32_does_not_wrap():
    rule = LossScale(growth_interval=2**31 - 1)
    state = rule.init()._replace(growth_tracker=jnp.int32(2**31 - 2))
    state = rule.update(state, True)
    assert (state.growth_tracker, state.loss_scale) == (0, 2.0**17)
    saved = {"scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3}
    rule, state = amp.interop.torch.load_state_dict(saved | {"_growth_tracker": 2**31 - 1})
    assert rule.update(state, True).loss_scale == 8


def test_a_static_scale_that_was_set_stays_where_it_is():
    rule = LossScale.static(64.0)
    for finite in (True, False):
        state = amp.set_loss_scale(rule.init(), 8.0)._replace(growth_tracker=jnp.int32(1999))
        assert rule.update(state, finite).loss_scale == 8


def test_apex_ends_at_its_ceiling():
    rule = LossScale.apex(init_scale=2.0**24 - 2**20, growth_interval=1)
    assert rule.update(rule.init(), True).loss_scale == 2.0**24
    beyond = amp.set_loss_scale(rule.init(), 2.0**30)
    assert rule.update(beyond, True).loss_scale == 2.0**30
    refuses = LossScale(init_scale=2.0**24 - 2**20, growth_interval=1)
    assert refuses.update(refuses.init(), True).loss_scale == 2.0**24 - 2**20


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_integers_among_the_parameters_of_an_accumulated_gradient(reduction):
    params = {"w": jnp.float32(3), "index": jnp.arange(2)}

    def loss(params, x):
        return jnp.mean(params["w"] * x) + params["index"][0]

    value_and_grad = amp.value_and_grad(loss, accumulate_steps=2, reduction=reduction, allow_int=True)
    value, grads = jax.jit(value_and_grad)(params, jnp.arange(4.0))
    factor = 1 if reduction == "mean" else 2
    assert (value, grads["w"]) == (4.5 * factor, 1.5 * factor)
    assert (grads["index"].dtype, grads["index"].shape) == (jax.dtypes.float0, (2,))


# A loss that was not scaled.

X = jnp.linspace(-1, 1, 8).reshape(4, 2)
WEIGHTS = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}


def loss_on(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def penalized(p, x, factor):
    return loss_on(p, x) + factor * sum(jnp.sum(w**2) for w in jax.tree.leaves(p))


def weighted(p, x):
    weights = jnp.abs(x[:, 0])
    return jnp.sum(weights * jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2, 1)) / jnp.sum(weights)


# From parameters, batch and scale, gradients of the loss.
SCALED = {
    "by value_and_grad": lambda p, x, scale: amp.grad(loss_on, loss_scale=scale)(p, x),
    "by hand": lambda p, x, scale: jax.grad(lambda p: loss_on(p, x) * scale)(p),
    "loss by loss": lambda p, x, scale: jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2 * scale))(p),
    "after all": lambda p, x, scale: jax.tree.map(lambda g: g * scale, jax.grad(loss_on)(p, x)),
    "in a jit of its own": lambda p, x, scale: jax.jit(lambda p, s: amp.grad(loss_on, loss_scale=s)(p, x))(p, scale),
    "in micro-batches": lambda p, x, scale: amp.grad(loss_on, loss_scale=scale, accumulate_steps=2)(p, x),
    "under autocast": lambda p, x, scale: amp.grad(amp.autocast(loss_on), loss_scale=scale)(p, x),
    "example by example": lambda p, x, scale: jax.tree.map(
        lambda g: g.mean(0), jax.vmap(lambda x: amp.grad(loss_on, loss_scale=scale)(p, x[None]))(x)
    ),
    "with a penalty": lambda p, x, scale: amp.grad(
        lambda p: loss_on(p, x) + optax.tree.norm(jax.grad(loss_on)(p, x)), loss_scale=scale
    )(p),
    "of moved parameters": lambda p, x, scale: amp.grad(loss_on, loss_scale=scale)(
        jax.tree.map(jnp.add, p, jax.grad(loss_on)(p, x)), x
    ),
    "of two losses": lambda p, x, scale: jax.tree.map(
        lambda g, h: g + scale * h, amp.grad(loss_on, loss_scale=scale)(p, x), jax.grad(loss_on)(p, -x)
    ),
    "not here": lambda p, x, scale: p,
    "with a traced penalty": lambda p, x, scale: amp.grad(penalized, loss_scale=scale)(p, x, x[0, 0]),
    "a mean with weights": lambda p, x, scale: amp.grad(weighted, loss_scale=scale)(p, x),
}
UNSCALED = {
    "without a scale": lambda p, x, scale: amp.grad(loss_on)(p, x),
    "by jax.grad": lambda p, x, scale: jax.grad(loss_on)(p, x),
    "with a number": lambda p, x, scale: amp.grad(loss_on, loss_scale=2.0**16)(p, x),
    "in a jit of its own": lambda p, x, scale: jax.jit(jax.grad(loss_on))(p, x),
    "of a jit": lambda p, x, scale: jax.grad(jax.jit(loss_on))(p, x),
    "of a checkpoint": lambda p, x, scale: jax.grad(jax.checkpoint(loss_on))(p, x),
    "of a float16 loss": lambda p, x, scale: amp.grad(lambda p, x: loss_on(p, x).astype(jnp.float16))(p, x),
    "in micro-batches": lambda p, x, scale: amp.grad(loss_on, accumulate_steps=2)(p, x),
    "masked": lambda p, x, scale: jax.tree.map(lambda g: g * np.float32([1, 0]), jax.grad(loss_on)(p, x)),
    "clipped": lambda p, x, scale: jax.tree.map(lambda g: jnp.clip(g, -1, 1), jax.grad(loss_on)(p, x)),
    "with a traced penalty": lambda p, x, scale: amp.grad(penalized)(p, x, x[0, 0]),
    "a mean with weights": lambda p, x, scale: jax.grad(weighted)(p, x),
    "between two losses": lambda p, x, scale: amp.grad(lambda p, x, t: t * loss_on(p, x) + (1 - t) * loss_on(p, 2 * x))(
        p, x, x[0, 0]
    ),
}
AROUND = {  # traced, as this is where a wrong scale is found, and not compiled
    "jit": lambda step, *args: jax.jit(step)(*args),
    "scan": lambda step, params, state, x: lax.scan(lambda s, x: (step(params, s, x)[1], None), state, x[None])[0],
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", SCALED)
def test_gradients_of_a_scaled_loss_pass(name, around):
    tx = amp.dynamic_loss_scale(optax.sgd(0.1))

    def step(params, state, x):
        return tx.update(SCALED[name](params, x, amp.get_loss_scale(state)), state, params)

    trace(around, step, WEIGHTS, tx.init(WEIGHTS), X)


def trace(around, *args):
    jax.eval_shape(lambda: AROUND[around](*args))


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", UNSCALED)
def test_a_forgotten_scale_is_found_while_the_step_is_traced(name, around):
    def step(tx, params, state, x, **scale):
        return tx.update(UNSCALED[name](params, x, amp.get_loss_scale(state)), state, params, **scale)

    tx = amp.dynamic_loss_scale(optax.sgd(0.1))
    with pytest.raises(
        ValueError, match=r"gradient at `\['b'\]` does not depend on the loss scale.*opt_state=opt_state"
    ):
        trace(around, functools.partial(step, tx), WEIGHTS, tx.init(WEIGHTS), X)
    # A scale that is known to stand still, or is handed in as a number, may be one.
    for rule, scale in (
        (LossScale.none(), {}),
        (LossScale.static(2.0**16), {}),
        (LossScale(), {"loss_scale": 2.0**16}),
    ):
        tx = amp.dynamic_loss_scale(optax.sgd(0.1), rule)
        trace(around, functools.partial(step, tx, **scale), WEIGHTS, tx.init(WEIGHTS), X)


# Operations that change no value, between any two parts of a step.
MESH = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
IDENTITIES = {
    "nothing": lambda tree, flag: tree,
    "a barrier": lambda tree, flag: lax.optimization_barrier(tree),
    "a sharding": lambda tree, flag: lax.with_sharding_constraint(tree, NamedSharding(MESH, PartitionSpec())),
    "where": lambda tree, flag: jax.tree.map(lambda x: jnp.where(flag, x, jnp.zeros_like(x)), tree),
    "a cast": lambda tree, flag: jax.tree.map(lambda x: x.astype(jnp.complex64).real.astype(x.dtype), tree),
    "a name": lambda tree, flag: jax.tree.map(lambda x: checkpoint_name(x, "name"), tree),
    "a jit": lambda tree, flag: jax.jit(copy)(tree),
    "a cond": lambda tree, flag: lax.cond(flag, copy, lambda tree: jax.tree.map(jnp.zeros_like, tree), tree),
    "a scan": lambda tree, flag: lax.scan(lambda tree, _: (copy(tree), None), tree, length=1)[0],
    "a vmap": lambda tree, flag: jax.tree.map(lambda x: jax.vmap(jnp.copy)(x[None])[0], tree),
    "a checkpoint": lambda tree, flag: jax.checkpoint(copy)(tree),
    "a shard_map": lambda tree, flag: jax.shard_map(
        copy, mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )(tree),
}


def copy(tree):
    return jax.tree.map(jnp.copy, tree)


# From functions that compute gradients and updates, a step that is split into functions.
SPLITS = {
    "one function": lambda grad, update, p, s, x: update(grad(p, x, scale_of(s)), s, p),
    "a jit for the gradients": lambda grad, update, p, s, x: update(jax.jit(grad)(p, x, scale_of(s)), s, p),
    "a jit for each part": lambda grad, update, p, s, x: jax.jit(update)(
        jax.jit(grad)(p, x, jax.jit(scale_of)(s)), s, p
    ),
    "a jit in a jit": lambda grad, update, p, s, x: jax.jit(
        lambda p, s: jax.jit(lambda p, s: update(jax.jit(grad)(p, x, scale_of(s)), s, p))(p, s)
    )(p, s),
    "a jit that is given the scale": lambda grad, update, p, s, x: jax.jit(
        lambda p, s, x, scale: update(grad(p, x, scale), s, p)
    )(p, s, x, scale_of(s)),
    "a jit that is given the scale and jits the gradients": lambda grad, update, p, s, x: jax.jit(
        lambda p, s, x, scale: update(jax.jit(grad)(p, x, scale), s, p)
    )(p, s, x, scale_of(s)),
    "a jit that is given several scales": lambda grad, update, p, s, x: jax.jit(
        lambda p, s, x, scales: update(grad(p, x, scales[0]), s, p)
    )(p, s, x, jnp.stack([scale_of(s), scale_of(s)])),
    "jits that are given several states": lambda grad, update, p, s, x: jax.jit(
        lambda p, states, x: update(
            jax.jit(lambda p, states, x: grad(p, x, scale_of(first(states))))(p, states, x), first(states), p
        )
    )(p, jax.tree.map(lambda x: x[None], s), x),
    "a jit that closes over the scale": lambda grad, update, p, s, x: (
        lambda scale: jax.jit(lambda p, s: update(grad(p, x, scale), s, p))(p, s)
    )(scale_of(s)),
    "a jit that closes over the state": lambda grad, update, p, s, x: jax.jit(
        lambda p: update(grad(p, x, scale_of(s)), s, p)
    )(p),
    "a scan": lambda grad, update, p, s, x: lax.scan(
        lambda s, x: (update(grad(p, x, scale_of(s)), s, p)[1], None), s, x[None]
    ),
    "a scan over gradients": lambda grad, update, p, s, x: update(
        first(lax.map(lambda x: grad(p, x, scale_of(s)), x[None])), s, p
    ),
    "a cond": lambda grad, update, p, s, x: lax.cond(
        x[0, 0] > 0, lambda: update(grad(p, x, scale_of(s)), s, p), lambda: (jax.tree.map(jnp.zeros_like, p), s)
    ),
    "a vmap": lambda grad, update, p, s, x: jax.vmap(lambda x: update(grad(p, x, scale_of(s)), s, p))(x[None]),
    "a vmap of a jit": lambda grad, update, p, s, x: jax.vmap(
        jax.jit(lambda s, scale: update(grad(p, x, scale), s, p))
    )(*jax.tree.map(lambda x: x[None], (s, scale_of(s)))),
    "a forward and a backward pass": lambda grad, update, p, s, x: jax.jit(
        lambda pull, s, p, cotangent: update(pull(cotangent)[0], s, p)
    )(jax.jit(lambda p: jax.vjp(lambda p: loss_on(p, x), p)[1])(p), s, p, scale_of(s)),
    "two stages": lambda grad, update, p, s, x: jax.jit(
        lambda p, s, cotangent: update(
            jax.vjp(jax.checkpoint(lambda p: jnp.sin(x @ p["w"] + p["b"]) * jnp.ones(2)), p)[1](cotangent)[0], s, p
        )
    )(p, s, jax.grad(lambda h: loss_on(WEIGHTS, h) * scale_of(s))(x)),
}
# Those in which the update shares a function with the backward pass, and no function that the scale enters has both.
OPEN_SPLITS = [
    "one function",
    "a jit that is given the scale",
    "a jit that is given several scales",
    "a jit that closes over the scale",
    "a jit that closes over the state",
    "a scan",
    "a cond",
]


def first(tree):
    return jax.tree.map(lambda x: x[0], tree)


def scale_of(state):
    return amp.get_loss_scale(state)


def split_step(grad, split, before, after, at_state, at_both, skip="cond"):
    """A step with an operation before and after the gradients, on the state between, and on both of these."""
    tx = amp.dynamic_loss_scale(optax.adam(0.1), skip=skip)

    def step(params, state, x, flag):
        def changed_grad(params, x, scale):
            return IDENTITIES[after](grad(params, x, IDENTITIES[before](scale, flag)), flag)

        def update(grads, state, params):
            return tx.update(*IDENTITIES[at_both]((grads, IDENTITIES[at_state](state, flag)), flag), params)

        return SPLITS[split](changed_grad, update, params, IDENTITIES[before](state, flag), x)

    return jax.eval_shape(step, WEIGHTS, tx.init(WEIGHTS), X, jnp.asarray(True))


@pytest.mark.parametrize("examples", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("split", SPLITS)
def test_a_right_step_passes_however_it_is_split_and_ordered(split, examples):
    @settings(max_examples=examples, derandomize=True, deadline=None)
    @given(name=st.sampled_from([*SCALED]), ops=st.tuples(*[st.sampled_from([*IDENTITIES])] * 4))
    def passes(name, ops):
        split_step(SCALED[name], split, *ops)

    passes()


def test_a_number_is_the_scale_where_it_was_written_to_the_state():
    tx = amp.dynamic_loss_scale(optax.sgd(0.1))

    def step(params, state):
        grads = amp.grad(loss_on, loss_scale=2.0**10)(params, X)
        return tx.update(grads, amp.set_loss_scale(state, 2.0**10), params)

    jax.eval_shape(step, WEIGHTS, tx.init(WEIGHTS))


@pytest.mark.parametrize("split", OPEN_SPLITS)
@given(name=st.sampled_from([*UNSCALED]), ops=st.tuples(*[st.sampled_from([*IDENTITIES])] * 3))
@settings(max_examples=8, derandomize=True, deadline=None)
def test_a_forgotten_scale_is_found_however_the_step_is_split(split, name, ops):
    with pytest.raises(ValueError, match="does not depend on the loss scale"):
        split_step(UNSCALED[name], split, *ops, "nothing")


# Gradients that come after an update by unscaled gradients, but are scaled, from parameters, updates and scale.
SCALED_AGAIN = {
    "of another loss": lambda p, updates, scale: amp.grad(loss_on, loss_scale=scale)(
        optax.apply_updates(p, updates), X
    ),
    "of another loss in a jit": lambda p, updates, scale: jax.jit(amp.grad(loss_on, loss_scale=scale))(
        optax.apply_updates(p, updates), X
    ),
    "by hand": lambda p, updates, scale: jax.tree.map(lambda u: u * scale, updates),
    "moved parameters": lambda p, updates, scale: jax.tree.map(jnp.subtract, optax.apply_updates(p, updates), p),
    "of an update": lambda p, updates, scale: jax.grad(
        lambda p: (
            loss_on(optax.apply_updates(p, chain_update(amp.grad(loss_on, loss_scale=scale)(p, X), scale)), X) * scale
        )
    )(p),
}


def chain_update(grads, scale):
    tx = optax.chain(MARK(), optax.clip_by_global_norm(1.0))
    return tx.update(grads, tx.init(grads), grads, loss_scale=scale)[0]


@pytest.mark.parametrize("name", SCALED_AGAIN)
def test_gradients_that_are_scaled_after_an_unscaled_update_pass(name):
    def step(p, scale):
        updates = chain_update(amp.grad(loss_on, loss_scale=scale)(p, X), scale)
        return chain_update(SCALED_AGAIN[name](p, updates, scale), scale)

    jax.eval_shape(step, WEIGHTS, jnp.float32(8))
