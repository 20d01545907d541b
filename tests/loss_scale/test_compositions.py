"""What is put together with `dynamic_loss_scale` and `unscale_and_check` is right, or raises and says what to do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
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


@pytest.mark.sweep(15)
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


@pytest.mark.sweep(4)
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


@pytest.mark.sweep(2)
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
