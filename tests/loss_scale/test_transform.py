import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from overflowing_run import RULE as RIG_RULE
from overflowing_run import loss_fn as rig_loss

import jmp_amp as amp
from jmp_amp import LossScale

P = PartitionSpec
SKIPS = ["cond", "select"]
# Every operation rounds by itself, as the program says. Otherwise XLA fuses differently around a branch than without
# one, and within a fusion LLVM contracts `a * b + c`: results differ in the last bit.
AS_WRITTEN = {
    "xla_disable_hlo_passes": "algsimp,fusion,cpu-instruction-fusion",
    "xla_backend_optimization_level": 0,
}
BAD = [np.inf, -np.inf, np.nan]
PARAMS = {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), "b": np.zeros(3, np.float32)}


@pytest.fixture(autouse=True)
def _count_traces_from_zero():
    chex.clear_trace_counter()


def relaxed(tx):
    """Optax promotes dtypes (`decay**count`); only its own updates may."""
    tx = optax.with_extra_args_support(tx)

    def update(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return tx.update(*args, **kwargs)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def params_():
    return jax.tree.map(jnp.asarray, PARAMS)


def true_grads(step=0):
    values = np.random.default_rng(step).normal(size=9).astype(np.float32)
    return {"w": values[:6].reshape(2, 3), "b": values[6:]}


def scaled(grads, scale):
    return jax.tree.map(lambda g: g * scale, grads)


def stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)


def spoil(grads, bad=np.inf, name="w"):
    spoilt = grads[name].copy()
    spoilt.flat[0] = bad
    return grads | {name: spoilt}


def assert_same_bits(a, b):
    chex.assert_trees_all_equal_shapes_and_dtypes(a, b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), jax.tree_util.keystr(path)


def recorder(seen):
    """A transformation that notes what it gets, and passes it on."""

    def update(updates, state, params=None, **extra_args):
        seen.append({"updates": updates, "params": params, **extra_args})
        return updates, state + 1

    return optax.GradientTransformationExtraArgs(lambda params: jnp.int32(0), update)


def primitives(jaxpr):
    """The names of all primitives, those of the sub-jaxprs among them."""
    names = []
    for eqn in jaxpr.eqns:
        names.append(eqn.primitive.name)
        for sub in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")
        ):
            if hasattr(sub, "jaxpr") or hasattr(sub, "eqns"):
                names += primitives(getattr(sub, "jaxpr", sub))
    return names


# unscale_and_check in a chain of its own


@pytest.mark.parametrize("scale", [1, 256])
def test_unscale_and_check_stands_alone_in_a_plain_jitted_chain(scale):
    tx = optax.chain(amp.unscale_and_check(), optax.adam(1e-3))
    plain = optax.adam(1e-3)
    params = params_()
    with jax.numpy_dtype_promotion("standard"):
        update = jax.jit(tx.update, compiler_options=AS_WRITTEN)
        plain_update = jax.jit(plain.update, compiler_options=AS_WRITTEN)
        state, plain_state = tx.init(params), plain.init(params)
        for step in range(3):
            grads = true_grads(step)
            updates, state = update(scaled(grads, scale), state, params, loss_scale=jnp.float32(scale))
            expected, plain_state = plain_update(grads, plain_state, params)
            assert_same_bits(updates, expected)
    assert_same_bits(state[1], plain_state)
    assert state[0].last_finite


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("jit", [False, True])
def test_unscale_and_check_alone_passes_zeros_on_overflow(bad, jit):
    tx = amp.unscale_and_check()
    update = jax.jit(tx.update) if jit else tx.update
    state = tx.init(params_())
    updates, state = update(spoil(true_grads(), bad), state, loss_scale=2.0)
    assert_same_bits(updates, jax.tree.map(jnp.zeros_like, true_grads()))
    assert not state.last_finite
    updates, state = update(true_grads(), state, loss_scale=2.0)
    assert_same_bits(updates, scaled(true_grads(), 0.5))
    assert state.last_finite


def test_behind_unscale_and_check_alone_an_overflow_still_counts_as_a_step():
    tx = optax.chain(amp.unscale_and_check(), optax.trace(0.5))
    state = tx.init(params_())
    _, state = tx.update(true_grads(), state, loss_scale=1.0)
    _, state = tx.update(spoil(true_grads()), state, loss_scale=1.0)
    assert_same_bits(state[1].trace, scaled(true_grads(), 0.5))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_unscale_and_check_returns_float32(dtype):
    tx = amp.unscale_and_check()
    grads = {"w": jnp.full(2, 8, dtype), "n": jnp.int32(3), "none": None}
    updates, _ = tx.update(grads, tx.init(grads), loss_scale=jnp.float32(16))
    chex.assert_trees_all_equal(updates, {"w": jnp.full(2, 0.5), "n": jnp.int32(3), "none": None})
    assert updates["w"].dtype == jnp.float32


def test_unscale_and_check_finds_gradients_that_overflow_when_unscaled():
    tx = amp.unscale_and_check()
    updates, state = tx.update(jnp.float32(8), tx.init(None), loss_scale=2.0**-126)
    assert updates == 0
    assert not state.last_finite


def test_the_state_of_unscale_and_check_is_strongly_typed():
    state = amp.unscale_and_check().init(None)
    assert (state.last_finite.shape, state.last_finite.dtype) == ((), jnp.bool_)
    assert state.last_finite  # before the first step


# Skipping

SCHEDULE = optax.linear_schedule(0.0, 0.1, 6)
INNERS = {
    "adam": lambda: optax.adam(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adamw_schedule": lambda: optax.adamw(SCHEDULE),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.2), optax.sgd(0.1, momentum=0.9)),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
}
PLACES = {
    "in front": lambda tx: relaxed(tx),
    "inside": lambda tx: optax.chain(amp.unscale_and_check(), relaxed(tx)),
}
RULE = LossScale(init_scale=64, growth_interval=3)


def make_step(inner, skip, place="in front"):
    """The transformation, and a step that scales true gradients by the state's own scale."""
    tx = amp.dynamic_loss_scale(PLACES[place](INNERS[inner]()), RULE, skip=skip)

    def step(params, state, grads):
        updates, state = tx.update(scaled(grads, amp.get_loss_scale(state)), state, params)
        return optax.apply_updates(params, updates), state, updates

    return tx, step


@functools.cache
def training(inner, skip="cond", place="in front"):
    tx, step = make_step(inner, skip, place)
    return tx, jax.jit(step)


@functools.cache
def scanned(inner, skip, compiler_options=None):
    tx, step = make_step(inner, skip)

    def body(carry, grads):
        params, state, updates = step(*carry, grads)
        return (params, state), (params, state, updates)

    def run(params, grads):
        return jax.lax.scan(body, (params, tx.init(params)), grads)[1]

    return jax.jit(run, compiler_options=dict(compiler_options or ()))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("inner", INNERS)
@settings(max_examples=15)
@given(steps=st.lists(st.sampled_from([1.0, 1.0, 1.0, *BAD]), min_size=10, max_size=10))
def test_both_skip_modes_give_the_same_bits(inner, steps):
    grads = stacked([true_grads(i) for i in range(10)])
    grads["w"][:, 1, 2] *= np.float32(steps)
    options = tuple(AS_WRITTEN.items())
    cond, select = (scanned(inner, skip, options)(params_(), grads) for skip in SKIPS)
    assert_same_bits(cond, select)
    finite = [bool(np.isfinite(step)) for step in steps]
    assert cond[1].loss_scale.last_finite.tolist() == finite


@pytest.mark.parametrize("inner", ["clip", "adam"])
def test_both_skip_modes_agree_to_rounding_however_they_are_compiled(inner):
    grads = stacked([spoil(true_grads(i)) if i in (0, 4, 5) else true_grads(i) for i in range(10)])
    cond, select = (scanned(inner, skip)(params_(), grads) for skip in SKIPS)
    assert_same_bits(cond[1].loss_scale, select[1].loss_scale)
    chex.assert_trees_all_close(cond, select, rtol=1e-5, atol=1e-6)


@pytest.mark.sweep(15)
@pytest.mark.parametrize(("place", "skip"), [("in front", "cond"), ("inside", "cond"), ("inside", "select")])
@pytest.mark.parametrize("inner", INNERS)
def test_a_skip_leaves_every_leaf_of_params_and_inner_state_as_it_was(inner, skip, place):
    tx, step = training(inner, skip, place)
    params = params_()
    state = tx.init(params)
    # The first step of all is skipped, then one after each of two clean steps.
    for i, bad in enumerate(BAD):
        new_params, new_state, updates = step(params, state, spoil(true_grads(i), bad, ("w", "b")[i % 2]))
        assert_same_bits(new_params, params)
        assert_same_bits(new_state.inner_state, state.inner_state)
        assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
        assert new_state.loss_scale.loss_scale == state.loss_scale.loss_scale / 2
        params, state, updates = step(params, new_state, true_grads(i))
        assert new_state.loss_scale.total_notfinite == i + 1
        assert state.loss_scale.last_finite
    assert not all((params[name] == PARAMS[name]).all() for name in PARAMS)


@pytest.mark.parametrize(("inner", "skip"), [("adamw_schedule", "select"), ("multi_steps", "cond")])
def test_after_skips_the_run_equals_one_that_never_saw_the_bad_steps(inner, skip):
    tx, step = training(inner, skip)
    params, clean_params = params_(), params_()
    state, clean_state = tx.init(params), tx.init(params)
    for i in range(6):
        if i in (0, 3, 4):
            params, state, _ = step(params, state, spoil(true_grads(i)))
            continue
        params, state, _ = step(params, state, true_grads(i))
        clean_params, clean_state, _ = step(clean_params, clean_state, true_grads(i))
    assert_same_bits((params, state.inner_state), (clean_params, clean_state.inner_state))


@pytest.mark.sweep(18)
@pytest.mark.parametrize(
    ("inner", "place"), [*[(inner, "in front") for inner in INNERS], ("clip", "inside"), ("adam", "inside")]
)
def test_without_overflow_float32_training_equals_plain_optax_bitwise(inner, place):
    tx, step = make_step(inner, "cond", place)
    step = jax.jit(step, compiler_options=AS_WRITTEN)
    plain = relaxed(INNERS[inner]())
    plain_update = jax.jit(plain.update, compiler_options=AS_WRITTEN)
    params = plain_params = params_()
    state, plain_state = tx.init(params), plain.init(params)
    for i in range(7):
        params, state, _ = step(params, state, true_grads(i))
        updates, plain_state = plain_update(true_grads(i), plain_state, plain_params)
        plain_params = optax.apply_updates(plain_params, updates)
        assert_same_bits(params, plain_params)
    assert state.loss_scale.loss_scale == 256
    mine = state.inner_state if place == "in front" else state.inner_state[1]
    assert_same_bits(mine, plain_state)


def test_counts_and_schedules_do_not_advance_on_skipped_steps():
    tx, step = training("adamw_schedule")
    params, state = params_(), tx.init(params_())
    for i in range(4):
        params, state, _ = step(params, state, spoil(true_grads()) if i % 2 else true_grads())
    counts = optax.tree.get_all_with_path(state.inner_state, "count")
    assert len(counts) == 2
    assert [int(count) for _, count in counts] == [2, 2]


@pytest.mark.parametrize("skip", SKIPS)
def test_updates_of_low_precision_gradients_are_float32_on_clean_and_skipped_steps(skip):
    tx = amp.dynamic_loss_scale(optax.sgd(1.0), LossScale(init_scale=4), skip=skip)
    params = jnp.ones(2)
    for g in (jnp.array([4, 8], jnp.float16), jnp.array([4, np.inf], jnp.bfloat16)):
        updates, state = tx.update(g, tx.init(params), params)
        assert updates.dtype == jnp.float32
        assert updates.tolist() == ([-1, -2] if state.loss_scale.last_finite else [0, 0])


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("grads", [True, False], ids=["zeros", "empty"])
def test_zero_gradients_are_a_finite_step(skip, grads):
    tx = amp.dynamic_loss_scale(optax.trace(0.9), LossScale(init_scale=4, growth_interval=1), skip=skip)
    params = {"w": jnp.ones(2)} if grads else {}
    _, state = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert state.loss_scale.last_finite
    assert state.loss_scale.loss_scale == 8


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_without_scaling_overflows_are_still_skipped_and_counted(skip, dtype):
    tx = amp.dynamic_loss_scale(optax.sgd(0.5, momentum=0.9), LossScale.none(), skip=skip)
    params = jnp.ones(2)
    state = tx.init(params)
    for g in ([1, np.nan], [1, 1], [np.inf, 1]):
        updates, state = tx.update(jnp.array(g, dtype), state, params)
        params = optax.apply_updates(params, updates)
    assert params.tolist() == [0.5, 0.5]
    assert state.loss_scale.total_notfinite == 2
    assert amp.get_loss_scale(state) == 1


def test_cond_branches_and_select_does_not():
    params = params_()
    for skip, branches in (("cond", 1), ("select", 0)):
        tx = amp.dynamic_loss_scale(optax.sgd(0.1), skip=skip)
        jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
        assert primitives(jaxpr.jaxpr).count("cond") == branches


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("place", PLACES)
def test_gradients_are_checked_once(skip, place):
    params = params_()
    tx = amp.dynamic_loss_scale(PLACES[place](optax.sgd(0.1)), skip=skip)
    jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    assert primitives(jaxpr.jaxpr).count("is_finite") == len(params)


# Where the gradients are unscaled, and by what


@pytest.mark.parametrize("skip", SKIPS)
def test_inner_is_traced_once(skip):
    seen = []
    tx = amp.dynamic_loss_scale(recorder(seen), skip=skip)
    jax.jit(tx.update)(true_grads(), tx.init(params_()))
    assert len(seen) == 1


def test_every_transformation_sees_true_gradients_without_unscale_and_check():
    seen = []
    tx = amp.dynamic_loss_scale(recorder(seen), LossScale(init_scale=8), skip="select")
    tx.update(scaled(true_grads(), 8), tx.init(params_()), params_())
    assert_same_bits(seen[0]["updates"], true_grads())


def test_unscale_and_check_inside_the_wrapper_changes_nothing():
    before, after = [], []
    inner = optax.chain(recorder(before), amp.unscale_and_check(), recorder(after))
    tx = amp.dynamic_loss_scale(inner, LossScale(init_scale=8), skip="select")
    tx.update(scaled(true_grads(), 8), tx.init(params_()), params_())
    assert_same_bits(before[0]["updates"], true_grads())
    assert_same_bits(after[0]["updates"], true_grads())


@pytest.mark.parametrize("wrap", [lambda tx: optax.masked(tx, {"w": True, "b": True}), optax.named_chain])
def test_unscale_and_check_is_found_at_any_depth(wrap):
    check = ("name", amp.unscale_and_check()) if wrap is optax.named_chain else amp.unscale_and_check()
    tx = amp.dynamic_loss_scale(optax.chain(optax.identity(), wrap(check)), LossScale(init_scale=8))
    updates, _ = tx.update(scaled(true_grads(), 8), tx.init(params_()), params_())
    assert_same_bits(updates, true_grads())


@pytest.mark.parametrize("skip", SKIPS)
def test_inner_gets_the_callers_extra_arguments_and_no_others(skip):
    seen = []
    tx = amp.dynamic_loss_scale(recorder(seen), LossScale(init_scale=8), skip=skip)
    params, grads = params_(), scaled(true_grads(), 8)
    tx.update(grads, tx.init(params), params, value=3.0, grad=grads, other=params, loss_scale=8, grads_finite=True)
    assert seen[0].keys() == {"updates", "params", "value", "grad", "other"}
    assert (seen[0]["value"], seen[0]["params"] is params, seen[0]["other"] is params) == (3.0, True, True)
    assert_same_bits(seen[0]["grad"], true_grads())


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("place", PLACES)
def test_a_growth_step_unscales_with_the_scale_that_scaled(skip, place):
    rule = LossScale(init_scale=2, growth_interval=1)
    tx = amp.dynamic_loss_scale(PLACES[place](optax.sgd(1.0)), rule, skip=skip)
    state = tx.init(jnp.ones(2))
    for growth in range(3):
        scale = amp.get_loss_scale(state)
        assert scale == 2 * 2.0**growth
        updates, state = tx.update(scale * jnp.float32([3, 5]), state, jnp.ones(2))
        assert updates.tolist() == [-3, -5]


@pytest.mark.parametrize("skip", SKIPS)
def test_finite_scaled_gradients_that_overflow_when_unscaled_are_skipped(skip):
    rule = LossScale.torch(init_scale=2.0**-126)
    tx = amp.dynamic_loss_scale(optax.sgd(1.0), rule, skip=skip)
    updates, state = tx.update(jnp.float32([1, 8]), tx.init(jnp.ones(2)), jnp.ones(2))
    assert updates.tolist() == [0, 0]
    assert not state.loss_scale.last_finite


def test_params_are_optional():
    tx = amp.dynamic_loss_scale(optax.trace(0.9))
    updates, state = tx.update(scaled(true_grads(), 2.0**16), tx.init(params_()))
    assert_same_bits(updates, true_grads())
    assert state.loss_scale.last_finite


# Frozen and partitioned parameters


@pytest.mark.parametrize("skip", SKIPS)
def test_frozen_parameters_have_none_for_a_gradient(skip):
    tx = amp.dynamic_loss_scale(optax.sgd(1.0, momentum=0.9), LossScale(init_scale=4), skip=skip)
    params = {"w": jnp.ones(2), "frozen": None}
    state = tx.init(params)
    for g, expected in (([4, 8], [-1, -2]), ([4, np.inf], [0, 0])):
        updates, state = tx.update({"w": jnp.float32(g), "frozen": None}, state, params)
        assert updates["w"].tolist() == expected
        assert updates["frozen"] is None


@pytest.mark.parametrize("skip", SKIPS)
def test_masked_inner_leaves_the_rest_alone(skip):
    inner = optax.masked(optax.trace(0.9), {"w": True, "b": False})
    tx = amp.dynamic_loss_scale(inner, LossScale(init_scale=4), skip=skip)
    state = tx.init(params_())
    updates, state = tx.update(scaled(true_grads(), 4), state, params_())
    assert_same_bits(updates, true_grads())
    _, skipped = tx.update(spoil(true_grads(), name="b"), state, params_())
    assert_same_bits(skipped.inner_state, state.inner_state)


@pytest.mark.parametrize("skip", SKIPS)
def test_an_overflow_in_one_partition_skips_all_of_them(skip):
    inner = optax.partition({"a": optax.sgd(1.0, momentum=0.5), "z": optax.sgd(2.0)}, {"w": "a", "b": "z"})
    tx = amp.dynamic_loss_scale(inner, LossScale(init_scale=4), skip=skip)
    state = tx.init(params_())
    updates, state = tx.update(scaled(true_grads(), 4), state, params_())
    assert_same_bits(updates, {"w": -true_grads()["w"], "b": -2 * true_grads()["b"]})
    for name in PARAMS:
        updates, skipped = tx.update(spoil(true_grads(), name=name), state, params_())
        assert not any(leaf.any() for leaf in jax.tree.leaves(updates))
        assert_same_bits(skipped.inner_state, state.inner_state)


# Compilation, devices, memory


@pytest.mark.parametrize("skip", SKIPS)
def test_one_program_serves_clean_skipped_and_growing_steps(skip):
    tx = amp.dynamic_loss_scale(optax.trace(0.9), LossScale(growth_interval=2), skip=skip)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(grads, state):
        return tx.update(grads, state)[1]

    state = tx.init(params_())
    for i in range(6):
        state = step(spoil(true_grads()) if i % 3 == 0 else true_grads(), state)
    assert state.loss_scale.total_notfinite == 2
    assert state.loss_scale.loss_scale == 2.0**16


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("place", PLACES)
def test_nothing_in_a_jitted_step_touches_the_host(skip, place):
    tx, step = training("adam", skip, place)
    params = params_()
    state, clean, bad = tx.init(params), *jax.device_put([true_grads(), spoil(true_grads())])
    with jax.transfer_guard("disallow"):
        for grads in (clean, bad, clean):
            params, state, _ = step(params, state, grads)
    assert state.loss_scale.total_notfinite == 1


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("place", PLACES)
def test_params_and_state_can_be_donated(skip, place):
    tx, step = training("adam", skip, place)
    params = params_()
    state = tx.init(params)
    # The updates are left out, or they would take the buffer of the parameters.
    donating = jax.jit(lambda *args: step(*args)[:2], donate_argnums=(0, 1))
    compiled = donating.lower(params, state, true_grads()).compile()
    # All of it but the old flag and sum, which nothing reads.
    unread = state.loss_scale.last_finite.nbytes + state.sum_of_squares.nbytes
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((params, state))) - unread
    assert compiled.memory_analysis().alias_size_in_bytes == size
    for i in range(3):
        old = params, state
        params, state = donating(params, state, spoil(true_grads(i)) if i == 1 else true_grads(i))
        kept = [leaf for leaf in jax.tree.leaves(old) if not leaf.is_deleted()]
        assert {id(leaf) for leaf in kept} <= {id(old[1].loss_scale.last_finite), id(old[1].sum_of_squares)}
    assert int(state.loss_scale.total_notfinite) == 1


@pytest.mark.parametrize("skip", SKIPS)
def test_under_vmap_each_seed_has_its_own_scale_and_its_own_skip(skip):
    tx = amp.dynamic_loss_scale(optax.sgd(1.0, momentum=0.5), RULE, skip=skip)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), params_())
    state = jax.vmap(tx.init)(params)
    before = state
    grads = {"w": jnp.ones((3, 2, 3)).at[1, 0, 0].set(np.nan), "b": jnp.ones((3, 3))}
    updates, state = jax.jit(jax.vmap(tx.update))(scaled(grads, 64), state, params)
    assert state.loss_scale.loss_scale.tolist() == [64, 32, 64]
    assert state.loss_scale.last_finite.tolist() == [True, False, True]
    assert updates["b"].tolist() == [[-1] * 3, [0] * 3, [-1] * 3]
    first, second = (jax.tree.map(lambda leaf: leaf[1], tree.inner_state) for tree in (before, state))
    assert_same_bits(first, second)


@pytest.mark.parametrize("skip", SKIPS)
def test_a_named_vmap_axis_makes_all_skip_together(skip):
    tx = amp.dynamic_loss_scale(optax.sgd(1.0), RULE, axis_name="seed", skip=skip)
    state = tx.init(jnp.ones(2))
    grads = jnp.ones((3, 2)).at[2, 1].set(np.inf)
    updates, state = jax.jit(jax.vmap(tx.update, (0, None), axis_name="seed"))(grads, state)
    assert not updates.any()
    assert state.loss_scale.loss_scale.tolist() == [32] * 3


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("inner", ["adam", "multi_steps"])
def test_a_scan_over_steps_equals_a_python_loop(inner, skip):
    tx, step = training(inner, skip)
    grads = [spoil(true_grads(i)) if i in (2, 3) else true_grads(i) for i in range(10)]
    params, state = params_(), tx.init(params_())
    for g in grads:
        params, state, updates = step(params, state, g)
    out = scanned(inner, skip)(params_(), stacked(grads))
    chex.assert_trees_all_close(
        jax.tree.map(lambda leaf: leaf[-1], out), (params, state, updates), rtol=1e-6, atol=1e-7
    )


def mesh_of(size, axis_type=jax.sharding.AxisType.Auto):
    return jax.make_mesh((size,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:size])


@pytest.mark.sweep(15)
@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("place", [*PLACES, "alone"])
@pytest.mark.parametrize("size", [2, 8])
def test_an_overflow_on_one_shard_skips_the_step_on_all(size, place, skip):
    # Each device holds its own part of the parameters, and only one of the parts overflows.
    inner = optax.sgd(1.0, momentum=0.5)
    extra = {"loss_scale": 1.0} if place == "alone" else {}
    if place == "alone":
        tx = optax.chain(amp.unscale_and_check(axis_name="data"), inner)
        specs = jax.tree.map(lambda leaf: P("data") if leaf.ndim else P(), tx.init(jnp.ones(size)))
    else:
        tx = amp.dynamic_loss_scale(PLACES[place](inner), RULE, axis_name="data", skip=skip)
        specs = jax.tree.map(lambda leaf: P("data") if leaf.ndim else P(), tx.init(jnp.ones(size)))

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh_of(size), in_specs=(P("data"), specs, P("data")), out_specs=(P("data"), specs)
    )
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    params, grads = jnp.arange(size, dtype=jnp.float32), jnp.ones(size)
    grads = grads if place == "alone" else grads * 64
    state = tx.init(params)
    skipped, after = step(params, state, grads.at[size - 1].set(np.inf))
    assert_same_bits(skipped, params)
    if place == "alone":
        assert not after[0].last_finite
    else:
        assert [shard.data.item() for shard in after.loss_scale.loss_scale.addressable_shards] == [32] * size
        assert_same_bits(after.inner_state, state.inner_state)
        grads = grads / 2
    moved, after = step(skipped, after, grads)
    assert moved.tolist() == (params - 1).tolist()


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("axis_name", [None, "data"])
def test_data_parallel_gradients_under_shard_map_agree_on_the_skip(skip, axis_name):
    # Replicated parameters: JAX sums their gradients over the devices, so that all see the overflow of one.
    tx = amp.dynamic_loss_scale(optax.sgd(1.0, momentum=0.5), RULE, axis_name=axis_name, skip=skip)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh_of(8), in_specs=(P(), P(), P("data")), out_specs=(P(), P()))
    def step(params, state, x):
        loss = lambda params: (params * x).sum() / 8  # noqa: E731
        grads = amp.grad(loss, loss_scale=amp.get_loss_scale(state))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jnp.ones(1)
    params, state = step(params, tx.init(params), jnp.ones(8).at[3].set(np.inf))
    assert (params.item(), state.loss_scale.loss_scale.item()) == (1, 32)
    params, state = step(params, state, jnp.ones(8))
    assert (params.item(), state.loss_scale.loss_scale.item()) == (0, 32)


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("axis_type", list(jax.sharding.AxisType)[:2], ids=str)
def test_under_plain_jit_the_flag_is_global_over_sharded_gradients(skip, axis_type):
    mesh = mesh_of(8, axis_type)
    tx = amp.dynamic_loss_scale(optax.sgd(1.0, momentum=0.5), RULE, skip=skip)
    sharding = NamedSharding(mesh, P("data"))
    params = jax.device_put(jnp.arange(8, dtype=jnp.float32), sharding)
    with jax.set_mesh(mesh):
        state = jax.jit(tx.init)(params)
        step = jax.jit(tx.update)
        updates, state = step(jax.device_put(jnp.ones(8).at[5].set(np.nan), sharding), state, params)
        assert updates.tolist() == [0] * 8
        assert state.loss_scale.loss_scale.item() == 32
        updates, state = step(jax.device_put(jnp.full(8, 32.0), sharding), state, params)
        assert updates.tolist() == [-1] * 8


# Errors


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"w": jnp.ones(2)}, "`['b'][0]` has no gradient"),
        ({"w": jnp.ones(2), "b": [jnp.ones(2), jnp.ones(2)]}, "leaf `['b'][1]` that the parameters do not have"),
        ({"w": jnp.ones((1, 2)), "b": [jnp.ones(2)]}, "`['w']` has shape (1, 2), but its parameter has shape (2,)"),
        ({"w": {"x": jnp.ones(2)}, "b": [jnp.ones(2)]}, "leaf `['w']['x']` that the parameters do not have"),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_gradients_that_do_not_match_the_parameters_are_named_by_their_path(grads, message, jit):
    params = {"w": jnp.ones(2), "b": [jnp.ones(2)]}
    tx = amp.dynamic_loss_scale(optax.sgd(0.1))
    update = jax.jit(tx.update) if jit else tx.update
    with pytest.raises(ValueError) as info:
        update(grads, tx.init(params), params)
    assert message in str(info.value)


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {"m": state["m"].astype(jnp.float16)}, "['m'] from float32[2] to float16[2]"),
        (lambda state: {"m": state["m"][None]}, "['m'] from float32[2] to float32[1,2]"),
        (lambda state: {"m": state["m"], "extra": state["m"]}, "structure"),
        (lambda state: {}, "structure"),
    ],
    ids=["dtype", "shape", "more", "fewer"],
)
def test_an_inner_that_changes_the_form_of_its_state_is_refused(skip, change, message):
    inner = optax.GradientTransformation(
        lambda params: {"m": jnp.zeros(2)}, lambda updates, state, params=None: (updates, change(state))
    )
    tx = amp.dynamic_loss_scale(inner, skip=skip)
    with pytest.raises(TypeError, match="`inner` changes") as info:
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)), jnp.ones(2))
    assert message in str(info.value)


def test_an_inner_that_widens_its_state_from_16_bits_is_told_of_masters_and_no_other():
    dtypes = ("float16", "bfloat16", "float32", "float64", "int32", "bool")
    forms = list(itertools.product(dtypes, ((2,), (1, 2))))
    for before, after in itertools.product(forms, forms):
        inner = optax.GradientTransformation(
            lambda params, before=before: jax.ShapeDtypeStruct(before[1], before[0]),
            lambda updates, state, params=None, after=after: (updates, jnp.ones(after[1], after[0])),
        )
        tx = amp.dynamic_loss_scale(inner)
        with jax.enable_x64(True):
            args = tx.update, jnp.ones(2, jnp.float32), tx.init(None)
            if before == after:
                assert jax.eval_shape(*args)[1].inner_state.dtype == before[0]
                continue
            with pytest.raises(TypeError, match="`inner` changes its state from") as info:
                jax.eval_shape(*args)
        is_widened = before[0] in ("float16", "bfloat16") and after[0] == "float32"
        assert ("low_precision_params(inner)" in str(info.value)) == is_widened
        assert ("initialize it with the dtype and shape" in str(info.value)) != is_widened


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((0.1,), TypeError, "`inner` must be an optax transformation, got 0.1; write `dynamic_loss_scale(optax.adam("),
        ((optax.sgd(0.1), 2.0**16), TypeError, "`LossScale.static(65536.0)`"),
        ((optax.sgd(0.1), LossScale), TypeError, "`loss_scale` must be a `LossScale`"),
        ((optax.sgd(0.1), None), TypeError, "`LossScale.none()`"),
        ((optax.sgd(0.1), LossScale(), None, "where"), ValueError, "'where'"),
        ((optax.sgd(0.1), LossScale(), None, None), ValueError, "got None"),
    ],
)
def test_wrong_arguments_are_named(args, error, message):
    with pytest.raises(error) as info:
        amp.dynamic_loss_scale(*args)
    assert message in str(info.value)


# The acceptance rigs of other systems


def test_torchs_golden_overflow():
    # Outside `jit`, where each float16 operation rounds by itself.
    tx = amp.dynamic_loss_scale(optax.sgd(0.0), LossScale.torch(init_scale=4, growth_interval=2))
    weight = jnp.ones(100)
    state = tx.init(weight)
    seen = []
    for x in (5, 20000, 5, 40000):
        loss_fn = lambda w, x=x: (w.astype(jnp.float16) * jnp.float16(x)).sum()  # noqa: E731
        grads = amp.grad(loss_fn, loss_scale=amp.get_loss_scale(state))(weight)
        assert (grads == grads[0]).all()
        _, state = tx.update(grads, state, weight)
        seen.append((grads[0].item(), state.loss_scale.loss_scale.item(), state.loss_scale.growth_tracker.item()))
    assert seen == [(20, 4, 1), (np.inf, 2, 0), (10, 2, 1), (np.inf, 1, 0)]


@pytest.mark.parametrize("bad_step", [0, 1])
@pytest.mark.parametrize("bad_leaf", ["w0", "w1"])
@pytest.mark.parametrize(
    ("u", "rate", "scale", "w0", "w1"),
    [(1, 0.25, 4, [0, 0.53125], [1.59375, 2.125]), (2, 0.5, 16, [-0.6875, -0.5], [1.625, 1.8125])],
)
def test_apexs_toy_model_ends_at_the_exact_numbers_wherever_it_overflows(u, rate, scale, w0, w1, bad_leaf, bad_step):
    params = {"w0": jnp.float32([u, u + 1]), "w1": jnp.float16([1 + u, 2 + u])}
    tx = amp.dynamic_loss_scale(optax.sgd(rate, momentum=0.125), LossScale(init_scale=scale))
    state = tx.init(jax.tree.map(np.float32, params))
    loss_fn = lambda params: (params["w0"] * params["w1"].astype(jnp.float32)).sum()  # noqa: E731
    for i in range(3):
        grads = amp.grad(loss_fn, loss_scale=amp.get_loss_scale(state))(params)
        if i == bad_step:
            grads = spoil(jax.tree.map(np.array, grads), name=bad_leaf)
        updates, state = tx.update(grads, state, params)
        params = {name: (p + updates[name].astype(p.dtype)) for name, p in params.items()}
    assert (params["w0"].tolist(), params["w1"].tolist()) == (w0, w1)
    assert state.loss_scale.total_notfinite == 1


def rig_data():
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    params = [{"w": jnp.asarray(normal(8, 8) / 3), "b": jnp.asarray(normal(1, 8))} for _ in range(2)]
    return params, [(normal(8, 8), normal(8, 8)) for _ in range(4)]


def run_rig(tx, scaled_loss=True, skipped=()):
    """Four batches; at the third an `inf` is put into the weight gradient of the second layer."""

    @jax.jit
    def step(params, state, x, y, bad):
        scale = amp.get_loss_scale(state) if scaled_loss else 1.0
        grads = amp.grad(rig_loss, loss_scale=scale)(params, x, y)
        grads[1]["w"] = grads[1]["w"].at[0, 0].add(bad)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, batches = rig_data()
    state = tx.init(params)
    for i, (x, y) in enumerate(batches):
        if i not in skipped:
            params, state = step(params, state, x, y, np.float32(np.inf if i == 2 else 0))
    return params, state


RIG_INNERS = {
    "sgd": lambda: optax.sgd(1.0),
    "adam": lambda: relaxed(optax.adam(0.1)),
    "adamw": lambda: relaxed(optax.adamw(0.1)),
}


@pytest.mark.parametrize("rule", [RIG_RULE, LossScale.none()], ids=["scaled", "disabled"])
@pytest.mark.parametrize("name", RIG_INNERS)
def test_training_with_an_overflow_equals_the_control_that_skips_that_batch(name, rule):
    params, state = run_rig(amp.dynamic_loss_scale(RIG_INNERS[name](), rule))
    expected, control = run_rig(RIG_INNERS[name](), scaled_loss=False, skipped=[2])
    close = functools.partial(chex.assert_trees_all_close, atol=1e-7, rtol=1e-5)
    close(params, expected)
    close(state.inner_state, control)
    assert state.loss_scale.loss_scale == (1 if rule == LossScale.none() else 128 * 2.0**3 * 0.5)
    assert state.loss_scale.total_notfinite == 1


@pytest.mark.parametrize("where", ["behind", "before"])
def test_clipping_in_front_of_the_mark_and_behind_it_equals_the_control(where):
    chains = {
        "behind": (amp.unscale_and_check(), optax.clip_by_global_norm(0.2)),
        "before": (optax.clip_by_global_norm(0.2), amp.unscale_and_check()),
    }
    inner = optax.chain(*chains[where], optax.sgd(1.0))
    params, state = run_rig(amp.dynamic_loss_scale(inner, RIG_RULE))
    control = optax.chain(optax.clip_by_global_norm(0.2), optax.sgd(1.0))
    expected, _ = run_rig(control, scaled_loss=False, skipped=[2])
    chex.assert_trees_all_close(params, expected, atol=1e-5, rtol=0)
    assert state.loss_scale.loss_scale == 512


# What inner itself breaks


def test_gradients_that_inner_makes_infinite_stop_the_next_steps_and_check_health_sees_it():
    breaks = optax.stateless(lambda updates, params: jax.tree.map(lambda g: g * np.float32(np.inf), updates))
    tx = amp.dynamic_loss_scale(optax.chain(amp.unscale_and_check(), breaks), RULE)
    params, state = jnp.ones(2), tx.init(jnp.ones(2))
    for _ in range(4):
        grads = amp.grad(lambda w: (w * w).sum(), loss_scale=amp.get_loss_scale(state))(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert state.loss_scale.notfinite_count == 3
    with pytest.raises(amp.LossScaleError):
        amp.check_health(state, max_skips=3)


def test_a_gradient_of_a_parameter_that_is_none_is_an_error():
    tx = amp.dynamic_loss_scale(optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"leaf `\['w'\]` that the parameters do not have"):
        tx.update({"w": jnp.ones(2)}, tx.init({"w": jnp.ones(2)}), {"w": None})
