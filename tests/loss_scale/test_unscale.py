"""One read of the gradients gives the flag, the norm and, with `clip_global_norm`, the clipping."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from jaxprs import equations

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")
RULE = amp.LossScale(init_scale=2.0**10)
PARAMS = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.zeros(4, np.float32)}


def true_grads(step=0, size=1.0):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda p: np.float32(size) * rng.normal(size=p.shape).astype(np.float32), PARAMS)


def scaled(grads):
    return jax.tree.map(lambda g: g * np.float32(RULE.init_scale), grads)


def norm(grads):
    return np.sqrt(sum((np.float64(g) ** 2).sum() for g in jax.tree.leaves(grads)))


def steps(tx, sizes):
    params, state = PARAMS, tx.init(PARAMS)
    update = jax.jit(tx.update)
    for i, size in enumerate(sizes):
        updates, state = update(scaled(true_grads(i, size)), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("skip", ["cond", "select"])
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("inner", [optax.sgd(0.1, momentum=0.9), optax.adamw(1e-2)], ids=["sgd", "adamw"])
def test_clipping_while_unscaling_is_optax_clipping(inner, inside, skip):
    chain = optax.chain(amp.unscale_and_check(), inner) if inside else inner
    tx = amp.dynamic_loss_scale(chain, RULE, skip=skip, clip_global_norm=1.0)
    theirs = amp.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), inner), RULE, skip=skip)
    # Below, above and far above the limit, zero, not finite, and finite with squares beyond float32.
    sizes = [0.1, 1.0, 1e10, 0.0, np.inf, 0.3, 1e25, 1.0]
    (params, state), (expected, their_state) = steps(tx, sizes), steps(theirs, sizes)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), params, expected)
    assert int(state.loss_scale.total_notfinite) == int(their_state.loss_scale.total_notfinite) == 1


def test_clipping_adds_no_reduction_over_the_gradients():
    def reductions(tx):
        state = tx.init(PARAMS)
        names = [eqn.primitive.name for eqn in equations(tx.update, PARAMS, state, PARAMS)]
        return names.count("reduce_sum")

    plain = reductions(amp.dynamic_loss_scale(optax.sgd(0.1)))
    assert plain == len(PARAMS)
    assert reductions(amp.dynamic_loss_scale(optax.sgd(0.1), clip_global_norm=1.0)) == plain
    assert reductions(amp.dynamic_loss_scale(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))) == 2 * plain


@pytest.mark.parametrize("clip", [None, 0.5])
def test_metrics_report_the_norm_of_the_true_gradients(clip):
    tx = amp.dynamic_loss_scale(optax.sgd(0.1), RULE, clip_global_norm=clip)
    for size in (0.1, 3.0):
        _, state = tx.update(scaled(true_grads(size=size)), tx.init(PARAMS), PARAMS)
        np.testing.assert_allclose(amp.metrics(state)["grad_norm"], norm(true_grads(size=size)), rtol=1e-6)
    _, state = tx.update(scaled(true_grads(size=np.inf)), tx.init(PARAMS), PARAMS)
    assert np.isinf(amp.metrics(state)["grad_norm"])


@pytest.mark.parametrize("value", [0, -1.0, np.inf, np.nan, "1", True, None])
def test_a_clipping_norm_is_a_positive_number(value):
    if value is None:
        amp.dynamic_loss_scale(optax.sgd(0.1), clip_global_norm=value)
        return
    with pytest.raises((TypeError, ValueError), match=r"`clip_global_norm` must be a number.*got"):
        amp.dynamic_loss_scale(optax.sgd(0.1), clip_global_norm=value)


def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


SPECS = {"w": P(None, "data"), "b": P()}


def sharded_step(tx, check_vma=True):
    """One step on shards of `w` and copies of `b`; returns the norm that each device saw."""

    @functools.partial(
        jax.shard_map,
        mesh=mesh(),
        in_specs=(SPECS, SPECS),
        out_specs=(SPECS, P("data") if not check_vma else P()),
        check_vma=check_vma,
    )
    def step(grads, params):
        updates, state = tx.update(grads, tx.init(params), params)
        seen = jnp.sqrt(jnp.abs(state.sum_of_squares))
        return updates, seen if check_vma else seen[None]

    return jax.jit(step)


def test_the_norm_of_shards_is_that_of_the_whole():
    tx = amp.dynamic_loss_scale(optax.sgd(1.0), RULE, axis_name=("data", "model"), clip_global_norm=1.0)
    grads = true_grads(size=2.0)
    updates, seen = sharded_step(tx)(scaled(grads), PARAMS)
    np.testing.assert_allclose(seen, norm(grads), rtol=1e-6)
    expected = jax.tree.map(lambda g: -g / norm(grads), grads)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), updates, expected)


def test_without_types_each_device_takes_the_norm_of_what_it_has():
    tx = amp.dynamic_loss_scale(optax.sgd(1.0), RULE, axis_name="data")
    grads = true_grads()
    step = sharded_step(tx, check_vma=False)
    updates, seen = step(scaled(grads), PARAMS)
    np.testing.assert_allclose(seen, [norm({"w": grads["w"][:, i], "b": grads["b"]}) for i in range(4)], rtol=1e-6)
    # One device's overflow is every device's.
    grads["w"][0, 2] = np.nan
    updates, seen = step(scaled(grads), PARAMS)
    assert np.isinf(seen).all()
    assert not any(np.any(u) for u in jax.tree.leaves(updates))


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("check_vma", [True, False])
def test_looking_over_devices_takes_one_collective(check_vma, clip):
    tx = amp.dynamic_loss_scale(optax.sgd(1.0), RULE, axis_name="data", clip_global_norm=clip)
    text = sharded_step(tx, check_vma).lower(PARAMS, PARAMS).compile().as_text()
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1


@pytest.mark.parametrize(
    "update",
    [
        lambda name: amp.dynamic_loss_scale(optax.sgd(0.1), implementation=name),
        lambda name: optax.chain(amp.unscale_and_check(implementation=name), optax.sgd(0.1)),
    ],
    ids=["dynamic_loss_scale", "unscale_and_check"],
)
def test_a_kernel_that_is_asked_for_by_name_must_serve(update):
    tx = update("mosaic_gpu")
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU, but the program is compiled for cpu"):
        jax.jit(tx.update)(PARAMS, tx.init(PARAMS), PARAMS, loss_scale=1.0)
    tx = update("cuda")
    with pytest.raises(ValueError, match="must be one of None, 'xla', 'mosaic_gpu', 'triton', got 'cuda'"):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, loss_scale=1.0)


def test_unscale_hands_the_implementation_on():
    state = RULE.init()
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        RULE.unscale(state, PARAMS, implementation="triton")
    grads, finite = RULE.unscale(state, scaled(true_grads()), implementation="xla")
    jax.tree.map(np.testing.assert_array_equal, grads, true_grads())
    assert finite


# Leaf by leaf


PARAMS_OF_LAYERS = {"encoder": [{"w": jnp.ones((2, 3)), "b": jnp.ones(3)}], "head": jnp.ones(2)}


@pytest.mark.parametrize("skip", ["cond", "select"])
def test_leaves_that_are_not_finite_are_remembered_until_the_next_step(skip):
    tx = amp.dynamic_loss_scale(optax.adam(0.1), nonfinite_leaves=True, skip=skip)
    state = tx.init(PARAMS_OF_LAYERS)
    names = {"nonfinite/encoder/0/b", "nonfinite/encoder/0/w", "nonfinite/head"}

    def flags(state):
        return {name: bool(x) for name, x in amp.metrics(state).items() if name.startswith("nonfinite/")}

    assert flags(state) == dict.fromkeys(names, False)
    bad = jax.tree.map(lambda x: x, PARAMS_OF_LAYERS)
    bad["encoder"][0]["b"] = bad["encoder"][0]["b"].at[1].set(jnp.nan)
    _, state = jax.jit(tx.update)(bad, state, PARAMS_OF_LAYERS)
    assert flags(state) == dict.fromkeys(names, False) | {"nonfinite/encoder/0/b": True}
    assert not state.loss_scale.last_finite
    with pytest.raises(amp.LossScaleError, match=r"non-finite gradients: \['encoder'\]\[0\]\['b'\]\. Loss scale"):
        amp.check_health(state, max_skips=1)
    updates, after = jax.jit(tx.update)(PARAMS_OF_LAYERS, state, PARAMS_OF_LAYERS)
    assert flags(after) == dict.fromkeys(names, False)
    # Beside the flags, everything is as without them.
    plain = amp.dynamic_loss_scale(optax.adam(0.1), skip=skip)
    expected, expected_state = jax.jit(plain.update)(PARAMS_OF_LAYERS, state._replace(nonfinite_leaves=None))
    jax.tree.map(np.testing.assert_array_equal, updates, expected)
    jax.tree.map(np.testing.assert_array_equal, after._replace(nonfinite_leaves=None), expected_state)


@pytest.mark.parametrize("hole", [None, optax.MaskedNode()], ids=["none", "masked"])
def test_a_frozen_parameter_without_a_gradient_is_not_flagged(hole):
    tx = amp.dynamic_loss_scale(optax.sgd(0.1), nonfinite_leaves=True)
    params = {name: jnp.ones(2) for name in "abc"}
    state = tx.init(params)
    for n_frozen in range(3):
        for frozen in itertools.combinations(params, n_frozen):
            for bad in set(params) - {*frozen}:
                grads = params | {bad: jnp.full(2, jnp.inf)} | dict.fromkeys(frozen, hole)
                _, after = tx.update(grads, state, params)
                assert jax.tree.structure(after) == jax.tree.structure(state)
                assert after.nonfinite_leaves == {name: name == bad for name in params}


def test_flags_of_leaves_read_the_gradients_once():
    tx = amp.dynamic_loss_scale(optax.sgd(0.1), nonfinite_leaves=True)
    plain = amp.dynamic_loss_scale(optax.sgd(0.1), clip_global_norm=1.0)

    def reductions(tx):
        found = equations(tx.update, PARAMS_OF_LAYERS, tx.init(PARAMS_OF_LAYERS), PARAMS_OF_LAYERS)
        return sum(eqn.invars[0].aval.size for eqn in found if eqn.primitive.name == "reduce_sum")

    assert reductions(tx) == reductions(plain)


@pytest.mark.parametrize("check_vma", [True, False])
def test_flags_of_leaves_are_those_of_all_devices(check_vma):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    tx = amp.dynamic_loss_scale(optax.sgd(0.1), axis_name="data", nonfinite_leaves=True)
    spec = {"a": P("data"), "b": P("data")}
    grads = {"a": jnp.ones(8).at[5].set(jnp.inf), "b": jnp.ones(4)}
    state = tx.init(grads)

    def update(grads, state):
        return tx.update(grads, state)[1]

    spread = jax.shard_map(update, mesh=mesh, in_specs=(spec, P()), out_specs=P(), check_vma=check_vma)
    with jax.set_mesh(mesh):
        flags = jax.jit(spread)(grads, state).nonfinite_leaves
    assert (bool(flags["a"]), bool(flags["b"])) == (True, False)
