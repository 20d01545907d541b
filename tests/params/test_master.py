"""Parameters in float16 or bfloat16, with masters in float32 or rounded where they are."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
from jmp_amp._params import _halves, _master

pytestmark = pytest.mark.usefixtures("users_code")
LOW = [jnp.float16, jnp.bfloat16]


def rounded(inner, rounding="nearest", seed=0):
    return amp.low_precision_params(inner, masters=False, rounding=rounding, seed=seed)


def equal(tree, expected):
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("jit", [False, True])
def test_parameters_are_exactly_the_rounded_masters(dtype, jit):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=4096).astype(dtype), "tiny": (rng.normal(size=4096) * 1e-6).astype(dtype)}
    tx = amp.low_precision_params(optax.sgd(1.0))
    state = tx.init(params)
    update = jax.jit(tx.update) if jit else tx.update
    for size in (1e-1, 1e-4, 1e-7, 1e-8, 1e-2):  # down to steps below float16's smallest number
        grads = jax.tree.map(lambda p, size=size: (size * rng.normal(size=p.shape)).astype(np.float32), params)
        moved = jax.tree.map(lambda m, g: m - g, state.masters, grads)
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert all(p.dtype == dtype for p in jax.tree.leaves(params))
        equal(state.masters, moved)
        equal(params, jax.tree.map(lambda m: m.astype(dtype), moved))


@pytest.mark.parametrize("dtype", LOW)
def test_steps_that_the_parameters_cannot_hold_add_up(dtype):
    params, tx = jnp.ones(3, dtype), amp.low_precision_params(optax.sgd(1.0))
    state = tx.init(params)
    for _ in range(100):
        updates, state = tx.update(jnp.full(3, 1e-4, dtype), state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(state.masters, 1 - 100 * float(dtype(1e-4)), atol=1e-5)
    np.testing.assert_allclose(params.astype(jnp.float32), 0.99, atol=4e-3)
    assert (params < 1).all()


def test_the_inner_transformation_works_in_float32():
    params = {"low": jnp.ones(2, jnp.float16), "full": jnp.ones(2), "count": jnp.int32(3)}
    seen = {}

    def look(updates, params):
        seen.update(grads=updates, params=params)
        return updates

    tx = amp.low_precision_params(optax.chain(optax.stateless(look), optax.adam(1e-3)))
    state = tx.init(params)
    assert isinstance(state.masters["full"], optax.MaskedNode)
    grads = {"low": jnp.ones(2, jnp.float16), "full": jnp.ones(2), "count": jnp.zeros((), jnp.int32)}
    updates, _ = tx.update(grads, state, params)
    for tree in (seen["grads"], seen["params"], updates):
        assert [x.dtype for x in (tree["low"], tree["full"])] == [jnp.float32] * 2


def test_with_float32_parameters_nothing_changes():
    params, inner = {"w": jnp.arange(3.0)}, optax.adam(0.1)
    tx = amp.low_precision_params(inner)
    updates, state = tx.update({"w": jnp.ones(3)}, tx.init(params), params)
    expected, inner_state = inner.update({"w": jnp.ones(3)}, inner.init(params), params)
    equal(updates, expected)
    equal(state.inner_state, inner_state)
    assert not jax.tree.leaves(state.masters)


def test_a_skipped_step_leaves_masters_and_parameters():
    params = {"w": jnp.full(3, 0.3, jnp.float16)}
    tx = amp.dynamic_loss_scale(amp.low_precision_params(optax.adam(0.1)))
    state = tx.init(params)
    _, state = tx.update({"w": jnp.ones(3, jnp.float16)}, state, params)
    updates, after = tx.update({"w": jnp.array([1, np.inf, 1], jnp.float16)}, state, params)
    equal(after.inner_state, state.inner_state)
    equal(optax.apply_updates(params, updates), params)


def test_wrong_calls_say_what_is_missing():
    with pytest.raises(TypeError, match=r"`inner` must be an optax transformation, got 0\.1"):
        amp.low_precision_params(0.1)
    tx = amp.low_precision_params(optax.sgd(0.1))
    params = jnp.ones(2, jnp.float16)
    with pytest.raises(ValueError, match=r"needs the parameters: call `tx.update\(grads, opt_state, params\)`"):
        tx.update(params, tx.init(params))


def toy(unit, scale, inject=None, iterations=2):
    """apex's toy: a float32 and a float16 parameter, loss = sum(w0 * w1), known results."""
    params = {
        "w0": jnp.float32([unit, unit + 1]),
        "w1": jnp.float16([1 + unit, 2 + unit]),
    }
    learning_rate = {1: 0.25, 2: 0.5}[unit]
    inner = optax.chain(amp.unscale_and_check(), optax.trace(0.125), optax.scale(-learning_rate))
    rule = amp.LossScale.static(scale)
    tx = amp.dynamic_loss_scale(amp.low_precision_params(inner), rule)
    state = tx.init(params)
    for i in range(iterations):
        grads = amp.grad(lambda p: (p["w0"] * p["w1"].astype(jnp.float32)).sum(), loss_scale=scale)(params)
        if inject and inject[0] == i:
            grads[inject[1]] = grads[inject[1]].at[0].set(inject[2])
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


EXPECTED = {
    1: {"w0": [0, 0.53125], "w1": [1.59375, 2.125]},
    2: {"w0": [-0.6875, -0.5], "w1": [1.625, 1.8125]},
}


@pytest.mark.parametrize(("unit", "scale"), [(1, 4.0), (2, 16.0)])
def test_the_toy_of_apex_ends_at_its_numbers_wherever_an_overflow_was(unit, scale):
    expected = {name: np.array(value) for name, value in EXPECTED[unit].items()}
    equal(toy(unit, scale), expected)
    for i, name, bad in itertools.product((0, 1), ("w0", "w1"), (np.inf, np.nan)):
        equal(toy(unit, scale, inject=(i, name, bad), iterations=3), expected)


# Without masters


def moved_by(tx, params, step):
    """The parameters after one step of gradient descent from `params` by `step`."""
    updates, _ = jax.jit(tx.update)(step, tx.init(params), params)
    return optax.apply_updates(params, updates)


@pytest.mark.parametrize("dtype", LOW)
def test_rounded_to_the_nearest_parameters_are_what_float32_makes_of_them(dtype):
    rng = np.random.default_rng(0)
    params, step = rng.normal(size=1000).astype(dtype), (1e-2 * rng.normal(size=1000)).astype(np.float32)
    moved = moved_by(rounded(optax.sgd(1.0)), params, step)
    equal(moved, (params.astype(np.float32) - step).astype(dtype))


@pytest.mark.sweep(15)
@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("size", [1.0, 3e4, 2.0**-20])  # 2^-20 is subnormal in float16
@pytest.mark.parametrize("sign", [-1, 1])
def test_stochastic_rounding_goes_to_one_of_two_neighbours_and_is_right_on_average(dtype, size, sign):
    low = np.asarray(sign * size, dtype)
    last_place = abs(float(np.nextafter(low, dtype(sign * np.inf))) - float(low))
    way = np.float32(sign * 0.3 * last_place)
    params = np.full(40_000, low)
    moved = np.float64(moved_by(rounded(optax.sgd(-1.0), "stochastic"), params, np.full(40_000, way)))
    assert set(np.unique(moved - float(low))) == {0.0, sign * last_place}
    np.testing.assert_allclose((moved - float(low)).mean(), way, rtol=0.03)


@pytest.mark.parametrize("dtype", LOW)
def test_stochastic_rounding_leaves_what_the_dtype_holds_and_what_is_not_finite(dtype):
    values = np.array([0, -0.0, 1, -1.5, 2.0**-20, np.inf, -np.inf, np.nan], dtype)
    tx = rounded(optax.sgd(1.0), "stochastic")
    for params in (values, np.random.default_rng(0).normal(size=1000).astype(dtype)):
        step = jnp.zeros(params.shape, jnp.float32)
        moved = moved_by(tx, params, step)
        finite = np.isfinite(params)
        equal(moved[finite], params[finite])
        assert not np.isfinite(np.asarray(moved)[~finite]).any()


def test_random_bits_differ_between_steps_leaves_and_seeds_and_stay_after_a_skip():
    params = {"a": jnp.ones(1000, jnp.bfloat16), "b": jnp.ones(1000, jnp.bfloat16), "full": jnp.ones(1000)}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-10), params)

    def run(seed, steps):
        tx = amp.dynamic_loss_scale(rounded(optax.sgd(1.0), "stochastic", seed), amp.LossScale.none())
        state, seen = tx.init(params), []
        for bad in steps:
            updates, state = tx.update(jax.tree.map(lambda g, bad=bad: g + bad, grads), state, params)
            seen.append(updates)
        assert state.inner_state.step == steps.count(0)
        return seen

    first, second = run(0, [0, 0])
    bits = [first["a"], first["b"], second["a"], run(1, [0])[0]["a"]]
    assert len({np.asarray(x).tobytes() for x in bits}) == 4
    equal(run(0, [0, np.inf, 0])[2], second)
    equal(first["full"], -grads["full"])


def test_stochastic_rounding_trains_where_rounding_to_the_nearest_stands_still():
    target = np.random.default_rng(0).uniform(1, 2, 256).astype(np.float32)

    def train(tx):
        params = jnp.ones(256, jnp.bfloat16)
        state = tx.init(params)

        @jax.jit
        def step(_, carry):
            params, state = carry
            grads = jax.grad(lambda p: 0.5 * jnp.sum((p.astype(jnp.float32) - target) ** 2))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params, _ = jax.lax.fori_loop(0, 2000, step, (params, state))
        return np.abs(np.float32(params) - target).mean()

    sgd = optax.sgd(3e-3)
    assert train(rounded(sgd)) > 0.2
    assert train(rounded(sgd, "stochastic")) < 0.03
    assert train(amp.low_precision_params(sgd)) < 0.01


def test_without_masters_the_state_of_the_optimizer_is_float32():
    params = {"w": jnp.ones(2, jnp.float16)}
    for rounding in ("nearest", "stochastic"):
        tx = amp.dynamic_loss_scale(rounded(optax.adam(1e-3), rounding))
        state = tx.init(params)
        updates, state = tx.update(params, state, params)
        assert {x.dtype for x in jax.tree.leaves(optax.tree.get(state, "nu"))} == {jnp.dtype("float32")}
        assert np.isfinite(updates["w"]).all()


# Beyond the largest number


def step_from(tx, params, state, step):
    """The parameters and the state after one compiled step of gradient descent."""
    updates, state = jax.jit(tx.update)(step, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("sign", [-1, 1])
def test_parameters_follow_their_masters_beyond_the_largest_number_and_back(dtype, sign):
    largest = np.float32(sign * jnp.finfo(dtype).max)
    params, tx = np.full(2, largest, dtype), amp.low_precision_params(optax.sgd(-1.0))
    state = tx.init(params)
    for way in (2.0**-13, 2.0**-9, 2.0**-10, -(2.0**-10), -(2.0**-4)):  # beyond, further, and back
        params, state = step_from(tx, params, state, np.full(2, largest * way, np.float32))
        equal(params, np.clip(state.masters, -abs(largest), abs(largest)).astype(dtype))
    assert (abs(params.astype(jnp.float32)) < abs(largest)).all()


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_without_masters_parameters_stay_finite_and_come_back(dtype, rounding, sign):
    largest = np.float32(sign * jnp.finfo(dtype).max)
    params, tx = np.full(2, largest, dtype), rounded(optax.sgd(-1.0), rounding)
    state = tx.init(params)
    for way, expected in ((2.0**-13, largest), (1.5 * 2.0**-9, largest), (-0.5, largest / 2)):
        params, state = step_from(tx, params, state, np.full(2, largest * way, np.float32))
        np.testing.assert_allclose(np.float32(params), expected, rtol=2.0**-7)
        assert expected != largest or (params == largest).all()


@pytest.mark.parametrize("wrap", [amp.low_precision_params, rounded])
def test_infinite_parameters_become_no_nan_and_masters_win_over_finite_ones(wrap):
    params, tx = jnp.ones(3, jnp.float16), wrap(optax.sgd(1.0))
    state = tx.init(params)
    broken, state = step_from(tx, params.at[0].set(np.inf).at[1].set(-np.inf), state, jnp.zeros(3))
    equal(broken, np.float16([np.inf, -np.inf, 1]))
    if wrap is amp.low_precision_params:
        after, _ = step_from(tx, jnp.zeros_like(params), state, jnp.zeros(3))
        equal(after, params)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_master_that_is_not_finite_shows_in_its_parameter(bad):
    params, tx = jnp.ones(2, jnp.float16), amp.low_precision_params(optax.sgd(-1.0))
    state = tx.init(params)
    for step in (bad, 0.0, 0.0):
        params, state = step_from(tx, params, state, jnp.float32([step, 0]))
        equal(params, np.float16([bad, 1]))


@pytest.mark.parametrize("dtype", LOW)
def test_a_negative_zero_stays_one(dtype):
    for wrap in (amp.low_precision_params, rounded):
        tx, params = wrap(optax.sgd(1.0)), jnp.full(2, -0.0, dtype)
        assert np.signbit(np.asarray(step_from(tx, params, tx.init(params), jnp.zeros(2))[0])).all()


# Frozen parameters: None or a masked node in place of the gradient

WRAPPERS = {
    "masters": amp.low_precision_params,
    "nearest": rounded,
    "stochastic": lambda inner: rounded(inner, "stochastic"),
}
HOLES = {"none": None, "masked": optax.MaskedNode()}


def apply_to_trained(params, updates):
    """`optax.apply_updates`, which takes no array whose update is missing."""
    moved = {k: optax.apply_updates(params[k], u) for k, u in updates.items() if isinstance(u, jax.Array)}
    return params | moved


@pytest.mark.sweep(15)
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("hole", HOLES.values(), ids=HOLES)
@pytest.mark.parametrize("jit", [False, True])
def test_parameters_without_gradients_stay_and_the_others_move_as_they_would(wrap, hole, jit):
    trained = {"w": jnp.full(3, 0.5, jnp.float16), "scale": jnp.ones(3)}
    frozen = {"low": jnp.ones(2, jnp.bfloat16), "full": jnp.ones(2), "part": {"a": jnp.ones(2, jnp.float16)}, "": hole}
    tx = amp.dynamic_loss_scale(wrap(optax.sgd(0.25)), amp.LossScale.static(2.0))

    def run(params, grads):
        state = tx.init(params)
        for _ in range(3):
            updates, state = (jax.jit(tx.update) if jit else tx.update)(grads, state, params)
            assert jax.tree.structure(updates) == jax.tree.structure(grads)
            params = apply_to_trained(params, updates)
        return params, state.inner_state

    grads = {"w": jnp.full(3, 0.5, jnp.float16), "scale": jnp.ones(3)}
    params, state = run(trained | frozen, grads | dict.fromkeys(frozen, hole))
    expected, _ = run(trained, grads)
    equal(params, expected | frozen)
    if wrap is amp.low_precision_params:
        equal(state.masters["part"], {"a": jnp.ones(2)})


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("hole", HOLES.values(), ids=HOLES)
def test_the_state_can_be_made_of_the_trained_parameters_alone(wrap, hole):
    params = {"w": jnp.ones(2, jnp.float16), "frozen": jnp.ones(2, jnp.float16), "activation": jax.nn.relu}
    holes = {"frozen": hole, "activation": hole}
    tx = wrap(optax.adamw(0.1))  # with moments: optax needs the same holes in its state
    expected, _ = tx.update({"w": jnp.ones(2)}, tx.init({"w": params["w"]}), {"w": params["w"]})
    for given in (params, params | holes):
        updates, state = tx.update({"w": jnp.ones(2)} | holes, tx.init(params | holes), given)
        equal(updates["w"], expected["w"])
        assert jax.tree.structure(state) == jax.tree.structure(tx.init(params | holes))


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_optax_masked_and_partition_freeze_parameters(wrap):
    params = {"w": jnp.ones(2, jnp.float16), "frozen": jnp.ones(2, jnp.float16)}
    labels = {"w": "train", "frozen": "freeze"}
    tx = optax.partition({"train": wrap(optax.adam(0.25)), "freeze": optax.set_to_zero()}, labels)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    equal(optax.apply_updates(params, updates), {"w": np.float16([0.75, 0.75]), "frozen": np.ones(2)})


# Transformed and sharded


def stochastic_step(seed=0):
    tx = rounded(optax.sgd(1.0), "stochastic", seed)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return tx, step


@pytest.mark.sweep(6)
@pytest.mark.parametrize("dtype", LOW)
def test_random_bits_are_the_same_however_the_parameters_are_sharded(dtype):
    tx, step = stochastic_step()
    params, grads = jnp.ones((8, 512), dtype), jnp.full((8, 512), 1e-4)
    expected, _ = step(params, tx.init(params), grads)
    assert len(np.unique(np.float32(expected))) == 2
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spread = jax.device_put((params, grads), jax.NamedSharding(mesh, jax.P("data")))
    moved, _ = jax.jit(step)(spread[0], tx.init(params), spread[1])
    equal(moved, expected)
    replicated = jax.shard_map(step, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    equal(jax.jit(replicated)(params, tx.init(params), grads)[0], expected)
    sharded = jax.shard_map(
        step, mesh=mesh, in_specs=(jax.P("data"), jax.P(), jax.P("data")), out_specs=(jax.P("data"), jax.P())
    )
    rows = jax.jit(sharded)(params, tx.init(params), grads)[0]
    equal(rows, jnp.broadcast_to(rows[:1], rows.shape))  # replicas would be equal


@pytest.mark.parametrize("dtype", LOW)
def test_an_ensemble_under_vmap_rounds_as_its_members_do(dtype):
    tx, step = stochastic_step()
    params, grads = jnp.ones((3, 256), dtype), jnp.full((3, 256), 1e-4)
    state = jax.vmap(tx.init)(params)._replace(step=jnp.arange(3, dtype=jnp.int32))
    moved, _ = jax.jit(jax.vmap(step))(params, state, grads)
    one = jax.jit(step)
    members = [one(params[i], jax.tree.map(lambda x, i=i: x[i], state), grads[i])[0] for i in range(3)]
    equal(moved, jnp.stack(members))


def test_wrong_calls_without_masters_say_what_is_missing():
    with pytest.raises(TypeError, match=r"`inner` must be an optax transformation, got 0\.1"):
        rounded(0.1)
    with pytest.raises(ValueError, match=r"`rounding` must be .*, got 'up'"):
        rounded(optax.sgd(0.1), "up")
    tx = rounded(optax.sgd(0.1))
    with pytest.raises(ValueError, match="`low_precision_params` needs the parameters"):
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))


# Masters in two halves: a bfloat16 parameter, and a remainder of 16 bits


def bits(x):
    return np.asarray(x).view(f"uint{8 * np.asarray(x).dtype.itemsize}")


def remainders(inner, **options):
    return amp.low_precision_params(inner, remainder=True, **options)


def masters_of(state, params):
    return state.with_float32(params).masters


def test_two_halves_are_the_master_bit_for_bit():
    edges = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x17FFF, 0x18000, 0x007FFFFF, 0x00800000, 0x3F808000, 0x3F818000, 0x7F7F7FFF]
    magnitudes = np.concatenate([np.random.default_rng(0).integers(0, 0x7F7F8000, 100_000), edges, [0x7F800000]])
    x = np.concatenate([magnitudes, magnitudes + 2**31]).astype(np.uint32).view(np.float32)
    params, lower = jax.jit(_halves)(x)
    np.testing.assert_array_equal(bits(jax.jit(_master)(params, lower)), bits(x))
    is_halfway = bits(x) & 0xFFFF == 0x8000
    np.testing.assert_array_equal(bits(params)[~is_halfway], bits(x.astype(jnp.bfloat16))[~is_halfway])

    largest = np.float32(jnp.finfo(jnp.bfloat16).max)
    params, lower = _halves(np.array([np.nan, -np.nan, 3.4e38, -3.4e38], np.float32))
    np.testing.assert_array_equal(params.astype(np.float32), [np.nan, np.nan, largest, -largest])
    np.testing.assert_array_equal(np.isnan(_master(params, lower)), [True, True, False, False])


@pytest.mark.parametrize("inner", [optax.sgd(1.0), optax.adamw(1e-2)], ids=["sgd", "adamw"])
def test_a_thousand_steps_have_the_masters_of_float32(inner):
    rng = np.random.default_rng(0)
    sizes = (10.0 ** rng.uniform(-7, 3, 2048)).astype(np.float32)
    params = {"w": (sizes * rng.normal(size=2048)).astype(jnp.bfloat16)}

    def step(carry, key):
        grads = {"w": sizes * jax.random.normal(key, sizes.shape) * jax.random.bernoulli(key, 0.9, sizes.shape)}
        new, before = [], carry[0][1].masters["w"]
        for tx, (params, state) in zip(txs, carry, strict=True):
            updates, state = tx.update(grads, state, params)
            new.append((optax.apply_updates(params, updates), state))
        return new, jnp.abs(before) > 2.0**15 * jnp.abs(new[0][1].masters["w"])

    txs = amp.low_precision_params(inner), remainders(inner)
    keys = jax.random.split(jax.random.key(0), 1000)
    train = jax.jit(lambda carry: jax.lax.scan(step, carry, keys))
    ((low, state), (same, halves)), shrinks = train([(params, tx.init(params)) for tx in txs])
    assert halves.masters["w"].dtype == jnp.uint16
    kept = ~np.asarray(shrinks).any(0)
    assert kept.mean() > 0.99
    np.testing.assert_array_equal(bits(masters_of(halves, same)["w"])[kept], bits(state.masters["w"])[kept])
    assert (bits(same["w"]) == bits(low["w"])).mean() > 0.99  # but for values halfway between two numbers


def test_masters_that_are_not_finite_are_kept_and_skipped_steps_keep_all():
    params = {"w": jnp.array([1, -1, 1, 1], jnp.bfloat16)}
    tx = remainders(optax.sgd(1.0))
    updates, state = tx.update({"w": jnp.array([-np.inf, np.inf, np.nan, 2.0**-20])}, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(masters_of(state, params)["w"], np.float32([np.inf, -np.inf, np.nan, 1 - 2.0**-20]))

    params = {"w": jnp.full(3, 0.3, jnp.bfloat16)}
    tx = amp.dynamic_loss_scale(remainders(optax.adam(0.1)))
    _, state = tx.update({"w": jnp.ones(3)}, tx.init(params), params)
    updates, after = tx.update({"w": jnp.array([1, np.inf, 1])}, state, params)
    equal(after.inner_state, state.inner_state)
    equal(optax.apply_updates(params, updates), params)


def test_a_parameter_that_shrinks_to_nothing_in_a_step_loses_less_than_a_rounding():
    params, tx = jnp.array([1.0, -3.0], jnp.bfloat16), remainders(optax.sgd(1.0))
    target = np.float32([1.2345678e-6, 0])
    updates, state = tx.update(params.astype(jnp.float32) - target, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(masters_of(state, params), target, rtol=0, atol=2.0**-23)


def test_other_dtypes_have_masters_as_ever():
    params = {"b": jnp.ones(2, jnp.bfloat16), "h": jnp.ones(2, jnp.float16), "f": jnp.ones(2), "frozen": None}
    tx = remainders(optax.sgd(0.1))
    state = tx.init(params)
    assert [str(x.dtype) for x in jax.tree.leaves(state.masters)] == ["uint16", "float32"]
    updates, state = tx.update(params, state, params)
    assert [str(x.dtype) for x in jax.tree.leaves(state.masters)] == ["uint16", "float32"]
    assert [str(x.dtype) for x in jax.tree.leaves(masters_of(state, params))] == ["float32", "float32"]
    assert updates["frozen"] is None


def test_checkpoints_convert_both_ways():
    params = {
        "b": jnp.float32([0.3, 1 + 2.0**-8]).astype(jnp.bfloat16),
        "h": jnp.ones(2, jnp.float16),
        "f": jnp.ones(2),
    }
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 2.0**-9), params)
    plain, halves = amp.low_precision_params(optax.sgd(1.0)), remainders(optax.sgd(1.0))
    updates, state = plain.update(grads, plain.init(params), params)  # one is halfway now
    params = optax.apply_updates(params, updates)

    moved, stored = state.with_remainders(params)
    equal(masters_of(stored, moved), state.masters)
    assert jax.tree.structure(stored) == jax.tree.structure(halves.init(params))
    expected, expected_state = plain.update(grads, state, params)
    updates, stored = halves.update(grads, stored, moved)
    new = optax.apply_updates(moved, updates)
    equal(masters_of(stored, new), expected_state.masters)
    equal({k: new[k] for k in "hf"}, {k: optax.apply_updates(params, expected)[k] for k in "hf"})


def test_a_parameter_that_the_user_sets_is_taken_to_half_a_step():
    params, tx = jnp.float32([0.3, 0.3]).astype(jnp.bfloat16), remainders(optax.sgd(1.0))
    _, state = tx.update(jnp.full(2, 1e-5), tx.init(params), params)
    for new in (0.0, 0.5):
        np.testing.assert_allclose(masters_of(state, jnp.full(2, new, jnp.bfloat16)), new, rtol=2.0**-8, atol=1e-38)


# A checkpoint of remainders by an early version held them as `masters`, and Orbax casts to the dtype that is expected.


def trained(params, steps=3, change=lambda params: params, **options):
    """Parameters and state after steps, one of which is skipped, as the user changed the parameters in between."""
    tx = amp.dynamic_loss_scale(amp.low_precision_params(optax.sgd(1e-3, momentum=0.9), **options))
    state, rng = tx.init(params), np.random.default_rng(0)
    for i in range(steps):
        grads = jax.tree.map(lambda p, i=i: np.inf if i == 1 else rng.normal(size=p.shape).astype(np.float32), params)
        grads = jax.tree.map(lambda g, p: np.broadcast_to(np.float32(g), p.shape), grads, params)
        updates, state = tx.update(grads, state, params, loss_scale=1.0)
        params = change(optax.apply_updates(params, updates))
    return params, state


def read_as_float32(state):
    """The state as a run without `remainder` restores it."""
    read = jax.tree.map(lambda x: x.astype(jnp.float32), state.inner_state.masters)
    return state._replace(inner_state=amp.LowPrecisionParamsState(read, *state.inner_state[1:]))


def low_params(*names):
    w = np.random.default_rng(0).normal(size=(4, 8)).astype(jnp.bfloat16)
    leaves = {"w": w, "b": jnp.zeros(8, jnp.bfloat16), "scale": jnp.ones(8), "h": w.astype(jnp.float16)}
    return {name: leaves[name] for name in names}


@pytest.mark.parametrize("names", [("w",), ("w", "b"), ("w", "b", "scale", "h")], ids=len)
def test_remainders_that_are_read_as_masters_are_found_and_can_be_mended(names):
    params, state = trained(low_params(*names), remainder=True)
    amp.check_health(state, params)
    wrong = read_as_float32(state)
    with pytest.raises(amp.LossScaleError, match=r"masters .* are their remainders.*cast the masters .* to uint16"):
        amp.check_health(wrong, params)

    masters = {k: m.astype(jnp.uint16) if k in "wb" else m for k, m in wrong.inner_state.masters.items()}
    mended = wrong.inner_state._replace(masters=masters).with_float32(params)
    equal(mended, state.inner_state.with_float32(params))
    amp.check_health(wrong._replace(inner_state=mended), params)


WHOLE = {"w": jnp.array([0, 1, 255, 3000, 40000.0], jnp.bfloat16), "b": jnp.ones(3, jnp.bfloat16)}


@pytest.mark.parametrize("params", [low_params("w", "b", "scale", "h"), WHOLE, jnp.ones(4, jnp.bfloat16)], ids=len)
@pytest.mark.parametrize("options", [{}, {"remainder": True}, {"masters": False}], ids=str)
@pytest.mark.parametrize(
    "change", [lambda params: params, lambda params: jax.tree.map(jnp.zeros_like, params)], ids=["kept", "zeroed"]
)
def test_masters_are_never_mistaken_for_remainders(params, options, change):
    for steps in (0, 3):
        trained_params, state = trained(params, steps, change, **options)
        amp.check_health(state, change(trained_params))
        amp.check_health(state, {"a model": params, "with": jnp.zeros(3, jnp.bfloat16)})
        if "remainder" in options:
            full = state.inner_state.with_float32(trained_params)
            amp.check_health(state._replace(inner_state=full), trained_params)


def test_remainders_without_masters_are_an_error():
    with pytest.raises(ValueError, match=r"`remainder=True` stores masters in 16 bits, got `masters=False`"):
        remainders(optax.sgd(0.1), masters=False)
