"""`low_precision_state`: what is held in 8 or 16 bits, how it is rounded, and how it composes with optax and flax."""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax_transformations
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_amp as amp
from jmp_amp import _jaxpr as jx
from jmp_amp._optimizer_state import _codec as codec
from jmp_amp._optimizer_state._moments import facts_of_init, moments_of

pytestmark = pytest.mark.usefixtures("users_code")  # optax adds arrays of different ranks
RNG = np.random.default_rng(0)
SHAPE = (32, 256)
PARAMS = {"w": jnp.asarray(RNG.normal(size=SHAPE), jnp.float32), "b": jnp.zeros(256)}
ADAM = optax.adam(1e-2)


def gradients(step, like=PARAMS):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda x: jnp.asarray(1e-3 * rng.normal(size=x.shape), x.dtype), like)


@functools.cache
def jitted(tx):
    return jax.jit(tx.update)


def run(tx, steps, params=PARAMS, state=None, first=0, grads_of=gradients):
    state = tx.init(params) if state is None else state
    for step in range(first, first + steps):
        updates, state = jitted(tx)(grads_of(step), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def same_bits(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes()
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


def low_leaves(state):
    """The paths of what is held in low precision."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state.inner_state)]
    return {jax.tree_util.keystr(paths[int(i)], simple=True, separator="/") for i in state.formats}


# The format


SPANS = {2: 22, 3: 9, 4: 3}  # octaves below the maximum, by the mantissa bits that such a block with signs gets
SPANS_WITHOUT_SIGN = {2: 46, 3: 24, 4: 11, 5: 4, 6: 0.5}


@functools.cache
def values(bits, has_sign):
    x = 2.0 ** np.random.default_rng(0).uniform(-(SPANS if has_sign else SPANS_WITHOUT_SIGN)[bits], 0, (1, 128))
    x[0, 0] = 1
    return jnp.asarray(x * (np.random.default_rng(1).choice([-1, 1], 128) if has_sign else 1), jnp.float32)


KINDS = [(bits, True) for bits in SPANS] + [(bits, False) for bits in SPANS_WITHOUT_SIGN]
ONE_BLOCK = jnp.zeros((1, 1), jnp.uint16)


@pytest.mark.parametrize(("bits", "has_sign"), KINDS)
def test_the_range_of_a_block_decides_how_many_mantissa_bits_it_gets(bits, has_sign):
    x = values(bits, has_sign)
    codes, formats, following = codec.store(x, ONE_BLOCK)
    for kind in (formats, following):
        assert int(kind[0, 0]) & 0xFF == (23 - bits) << 1 | has_sign
    least = 2.0 ** ((int(formats[0, 0]) >> 8) - 127)
    assert (np.abs(codec.decode(codes, formats) - x) <= 2.0 ** -(bits + 1) * (np.abs(x) + least)).all()


@pytest.mark.parametrize(("bits", "has_sign"), KINDS)
def test_rounding_is_exact_on_average_and_even_over_time(bits, has_sign):
    x = values(bits, has_sign)
    _, formats, _ = codec.store(x, ONE_BLOCK)

    @jax.jit
    @jax.vmap
    def rounded(step):
        return codec.decode(codec.encode(x, formats, codec.noise(x.shape, 0, step)), formats)

    for n in (64, 1024):
        error = np.abs(np.asarray(rounded(jnp.arange(n))).mean(0) - x)
        between = 2.0**-bits * np.abs(x) + 2.0 ** (-bits - (112 if has_sign else 224) / 2**bits + 3)
        assert (error <= 4 / n * between + 1e-6).all()  # random bits would be off by 1 / sqrt(n)
    if not has_sign:
        assert (rounded(jnp.arange(64)) > 0).all()


@pytest.mark.parametrize(("bits", "has_sign"), KINDS)
def test_what_is_read_is_stored_as_it_was(bits, has_sign):
    codes, formats, _ = codec.store(values(bits, has_sign), ONE_BLOCK)
    read = codec.decode(codes, formats)
    for noise in (0, 1 << 31, 2**32 - 1):
        assert same_bits(codec.encode(read, formats, jnp.full(read.shape, noise, jnp.uint32)), codes)


def test_all_codes_are_finite_and_ascend_in_every_format_that_can_occur():
    largest = jnp.zeros((1, 128)).at[0, 0].set(np.inf)
    for has_sign in (True, False):
        for _, formats, _ in (codec.store(x, ONE_BLOCK) for x in (values(4, has_sign), largest, 1e-38 * largest)):
            codes = jnp.arange(128 if int(formats[0, 0]) & 1 else 256, dtype=jnp.uint8)[None]
            (last,) = codec.encode(jnp.full((1,), jnp.inf), formats[0], 0)
            read = np.asarray(codec.decode(codes, formats))[0, : int(last) + 1]
            assert np.isfinite(read).all()
            assert (np.diff(read) > 0).all()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-30, -1e-30, 1e38, -1e38, np.inf, np.nan])
def test_extreme_values_are_stored_and_read(value):
    x = jnp.zeros((1, 4096)).at[0, 0].set(value)
    codes, formats, _ = codec.store(x, jnp.zeros((1, 32), jnp.uint16))
    read = codec.decode(codes, formats)
    assert (read[0, 1:] == 0).all()
    np.testing.assert_allclose(read[0, 0], value if np.isfinite(value) else 3e38, rtol=0.2)


# `init`


@pytest.mark.parametrize("make", [optax.adamw, optax.adagrad, optax.lion], ids=lambda make: make.__name__)
def test_init_takes_a_few_equations_a_leaf_and_no_arithmetic(make):
    jaxpr = jax.make_jaxpr(amp.low_precision_state(make(1e-3)).init)({"w": jnp.zeros(SHAPE)}).jaxpr
    found = [eqn.primitive.name for *_, eqn in jx.equations_in(jaxpr)]
    assert len(found) <= 16
    assert {*found} <= {"broadcast_in_dim", "reshape", "slice", "squeeze"}


def test_init_of_large_leaves_compiles_at_once():
    """XLA would fold the maxima of 16 million zeros for minutes."""
    params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    start = time.perf_counter()
    jax.jit(amp.low_precision_state(optax.adagrad(1e-3)).init).lower(params).compile()
    assert time.perf_counter() - start < 60


# The first step, outliers and zeros


@pytest.mark.parametrize("exponent", [-40, -20, 0, 20, 40, 60])
@pytest.mark.parametrize("make", [optax.adam, lambda rate: optax.adam(rate, b2=0.95), optax.rmsprop])
@pytest.mark.sweep(30)
def test_a_block_that_was_0_takes_gradients_of_any_size(make, exponent):
    """And those of the next step are 100 times smaller."""
    plain, steps = make(1e-3), [2.0**exponent, 2.0**exponent / 100]
    tx = amp.low_precision_state(plain)
    (state, full), grads = (tx.init(PARAMS), plain.init(PARAMS)), jax.tree.map(jnp.ones_like, PARAMS)
    for scale in steps:
        scaled = jax.tree.map(lambda g: g * scale, grads)  # noqa: B023
        updates, state = jitted(tx)(scaled, state, PARAMS)
        want, full = jitted(plain)(scaled, full, PARAMS)
    ratio = updates["w"] / want["w"]
    assert 1 / 8 < ratio.min() <= ratio.max() < 8  # the first codes are an octave or two apart
    assert 0.7 < jnp.exp(jnp.log(ratio).mean()) < 1.4


def test_the_first_update_is_that_of_float32():
    tx = amp.low_precision_state(ADAM)
    grads = gradients(0)
    update, _ = jitted(tx)(grads, tx.init(PARAMS), PARAMS)
    want, _ = jitted(ADAM)(grads, ADAM.init(PARAMS), PARAMS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), update, want)


@pytest.mark.parametrize("exponent", [-100, -80, -60, 0, 60, 120])
def test_values_with_signs_of_any_size_are_held_from_the_second_step_on(exponent):
    tx = amp.low_precision_state(optax.trace(0.0))  # its state is the last gradient
    grads, state = jax.tree.map(lambda g: g * 2.0**exponent * 1e3, gradients(0)), tx.init(PARAMS)
    for step in range(4):
        _, state = jitted(tx)(grads, state)
        held = state.with_float32().trace["w"]
        assert step == 0 or jnp.abs(held / grads["w"]).mean() < 2
    assert jnp.linalg.norm(held / 2.0**exponent - grads["w"] / 2.0**exponent) < 0.1 * jnp.linalg.norm(
        grads["w"] / 2.0**exponent
    )


def test_an_outlier_changes_its_own_block_alone():
    tx = amp.low_precision_state(ADAM)
    _, state = run(tx, 4)
    grads = gradients(4)
    _, plain = jitted(tx)(grads, state, PARAMS)
    _, spoiled = jitted(tx)(grads | {"w": grads["w"].at[3, 5].set(1e6)}, state, PARAMS)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(spoiled), strict=True):
        if a.shape == SHAPE:
            same = np.asarray(a) == np.asarray(b)
            assert np.delete(same, 3, axis=0).all()
            assert same[3, 128:].all()
            assert not same[3, :128].all()


def test_growth_beyond_the_headroom_is_followed_within_steps():
    tx = amp.low_precision_state(optax.trace(0.9))
    _, state = run(tx, 2)
    for step in range(6):
        _, state = jitted(tx)(jax.tree.map(lambda g: 1e6 * g, gradients(step)), state, PARAMS)
    assert 0.3 < jnp.abs(state.with_float32().trace["w"]).max() / 1e3 < 20


def test_signs_are_right_from_the_first_step_and_one_step_after_the_first_negative_value():
    tx = amp.low_precision_state(optax.trace(0.0))  # its state is the last gradient
    positive = jnp.abs(gradients(0)["w"])
    mixed = positive.at[:, ::3].multiply(-0.5)

    def held(*steps):
        state = tx.init(positive)
        for grads in steps:
            _, state = jitted(tx)(grads, state)
        return state.with_float32().trace

    for steps in (1, 2, 3):
        read = held(*[mixed] * steps)
        assert ((jnp.sign(read) == jnp.sign(mixed)) | (jnp.abs(mixed) < 2e-5)).all()
    first, second = held(positive, positive, mixed), held(positive, positive, mixed, mixed)
    assert jnp.where(mixed < 0, jnp.abs(first), 0).max() < 2.0**-7 * positive.max()
    for read, right in ((first, mixed > 1e-4), (second, jnp.abs(mixed) > 1e-4)):
        assert (jnp.abs(read / mixed - 1)[right] < 0.3).all()


def test_moments_decay_to_0_while_gradients_are_0():
    tx = amp.low_precision_state(optax.adam(1e-2, b2=0.95))
    params, state = run(tx, 20)

    @jax.jit
    def rest(params, state):
        def step(_, carry):
            updates, state = tx.update(jax.tree.map(jnp.zeros_like, params), carry[1], carry[0])
            return optax.apply_updates(carry[0], updates), state

        return jax.lax.fori_loop(0, 1000, step, (params, state))

    rested, state = rest(params, state)
    moments = state.with_float32()[0]
    assert jnp.abs(moments.mu["w"]).max() < 1e-30
    assert moments.nu["w"].max() < 1e-20
    # Adam in float32 moves on by about 10 steps, until its momentum is gone.
    assert jnp.abs(rested["w"] - params["w"]).max() < 20 * 1e-2


@pytest.mark.parametrize("dtype", ["float8", "bfloat16"])
def test_moments_follow_those_of_float32(dtype):
    tx = amp.low_precision_state(ADAM, dtype)
    (params, state), (want, full) = run(tx, 40), run(ADAM, 40)
    moments = state.with_float32()[0]
    for name in ("mu", "nu"):
        low, high = (getattr(moments, name)["w"], getattr(full[0], name)["w"])
        error = jnp.linalg.norm(low - high) / jnp.linalg.norm(high)
        assert error < {"float8": 0.3, "bfloat16": 0.02}[dtype]
    assert abs(moments.nu["w"].sum() / full[0].nu["w"].sum() - 1) < 0.01
    moved = jnp.linalg.norm(want["w"] - PARAMS["w"])
    assert jnp.linalg.norm(params["w"] - want["w"]) / moved < {"float8": 0.15, "bfloat16": 0.01}[dtype]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_slow_average_moves_on_even_where_first_moments_are_rounded_to_nearest(rounding):
    """The second moment of gradients that become 10 times smaller, after 1,000 steps with b2 = 0.999."""
    grads = jnp.full((1, 4096), 1e-3).at[:, ::128].set(1.0)
    tx = amp.low_precision_state(optax.scale_by_rms(0.999, bias_correction=False), rounding=rounding)
    state = tx.init(grads)
    state = state.with_low_precision(state.with_float32()._replace(nu=grads**2))

    def step(state, _):
        return tx.update(grads.at[:, 1::2].multiply(0.1), state)[1], None

    last = jax.jit(lambda state: jax.lax.scan(step, state, length=1000)[0])(state)
    first, last = (state.with_float32().nu[:, 1::2] for state in (state, last))
    want = 0.999**1000 + (1 - 0.999**1000) * 0.01
    assert abs(last.sum() / first.sum() / want - 1) < 0.12  # one code


def test_nearest_rounds_first_moments_alike_in_all_steps():
    tx = amp.low_precision_state(optax.trace(0.0), rounding="nearest")
    grads, state = gradients(0), tx.init(PARAMS)
    for _ in range(3):
        _, state = jitted(tx)(grads, state)
    _, later = jitted(tx)(grads, state)
    assert same_bits(later.inner_state, state.inner_state)


@pytest.mark.slow
def test_moments_do_not_drift_in_20_000_steps():
    shape = (16, 256)
    size = jnp.exp(jnp.linspace(-4, 4, 256)) * 1e-4

    def ends(tx):
        def step(carry, key):
            updates, state = tx.update(size * jax.random.normal(key, shape), carry)
            return state, jnp.abs(updates).mean()

        keys = jax.random.split(jax.random.key(0), 20_000)
        state, moved = jax.jit(lambda state: jax.lax.scan(step, state, keys))(tx.init(jnp.zeros(shape)))
        return state, moved

    adam = optax.scale_by_adam(b2=0.999)
    (low, moved), (high, wanted) = ends(amp.low_precision_state(adam)), ends(adam)
    ratio = jnp.mean(low.with_float32().nu / high.nu, 0)
    assert abs(ratio.mean() - 1) < 0.05
    assert (jnp.abs(ratio - 1) < 0.5).all()
    for part in (slice(1000, 2000), slice(10_000, 11_000), slice(19_000, 20_000)):
        assert abs(moved[part].mean() / wanted[part].mean() - 1) < 0.06


# What is held in low precision


def test_float32_leaves_of_the_shape_of_a_large_parameter_are_held_in_low_precision():
    shapes = {"w": (64, 64), "small": (63, 64), "odd": (128, 33), "prime": (128, 37), "thin": (4096, 8), "scalar": ()}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    state = amp.low_precision_state(ADAM).init(params)
    assert low_leaves(state) == {f"0/{moment}/{name}" for moment in ("mu", "nu") for name in ("w", "odd", "prime")}
    assert {x.shape for x in state.formats.values()} == {(64, 1), (128, 1)}


def test_what_inner_chose_and_keep_are_respected():
    tx = amp.low_precision_state(optax.adam(1e-3, mu_dtype=jnp.bfloat16))
    assert low_leaves(tx.init(PARAMS)) == {"0/nu/w"}
    params = {"embed": PARAMS["w"], "w": PARAMS["w"]}
    tx = amp.low_precision_state(ADAM, keep=lambda path, leaf: "embed" in jax.tree_util.keystr(path))
    assert low_leaves(tx.init(params)) == {"0/mu/w", "0/nu/w"}


def test_copies_of_parameters_are_no_moments():
    tx = amp.low_precision_state(optax.contrib.schedule_free_adamw(1e-3))
    for init in (tx.init, jax.jit(tx.init)):
        assert low_leaves(init(PARAMS)) == {"base_optimizer_state/0/nu/w"}


def test_the_state_takes_2_bytes_a_parameter_and_a_sixteenth():
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    for dtype, wanted, others in (("float8", 2.0625, 8), ("bfloat16", 4.0, 12)):
        state = jax.eval_shape(amp.low_precision_state(ADAM, dtype).init, params)
        assert sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) == wanted * 2**20 + others


@pytest.mark.parametrize("dtype", ["float8", "bfloat16"])
def test_a_state_goes_to_float32_and_back(dtype):
    tx = amp.low_precision_state(ADAM, dtype)
    params, state = run(tx, 3)
    full = state.with_float32()
    assert jax.tree.structure(full) == jax.tree.structure(ADAM.init(PARAMS))
    jitted(ADAM)(gradients(3), full, params)
    back = tx.init(params).with_low_precision(full)
    for low, high in zip(jax.tree.leaves(back.with_float32()), jax.tree.leaves(full), strict=True):
        assert (jnp.abs(low - high) <= 2.0**-4 * jnp.abs(high) + 2.0**-9 * jnp.abs(high).max()).all()


def few(step):
    return np.random.default_rng(step).random(SHAPE) < 0.02


# The gradients of a step, from normal ones.
STATES = {
    "normal": lambda step, x: x,
    "six decades": lambda step, x: x * np.logspace(-6, 0, 256),
    "an outlier": lambda step, x: x * (1e8 if step == 3 else 1),
    "other rows": lambda step, x: x * (np.arange(32) % 8 == step % 5)[:, None],
    "few": lambda step, x: x * few(step),
    "equal": lambda step, x: np.sign(x),
    "positive": lambda step, x: np.abs(x),
    "none for steps": lambda step, x: x * (step % 4 == 0),
}


@pytest.mark.parametrize("dtype", ["float8", "bfloat16"])
@pytest.mark.parametrize("make", [ADAM, optax.lion(1e-2), optax.adagrad(1e-2), optax.trace(0.0)])
@pytest.mark.sweep(3)
def test_float32_and_back_is_the_identity_of_all_states(make, dtype):
    tx, params = amp.low_precision_state(make, dtype), {"w": PARAMS["w"]}
    back_of = jax.jit(lambda state: tx.init(params).with_low_precision(state.with_float32()))
    same, blocks = 0, 0
    for kind in STATES.values():
        state = tx.init(params)
        for step in range(6):
            back = back_of(state)
            assert same_bits(back.with_float32(), state.with_float32())
            assert same_bits(state.with_low_precision(state.with_float32()), state)
            want, _ = jitted(tx)(gradients(step, params), state, params)
            updates, _ = jitted(tx)(gradients(step, params), back, params)
            assert same_bits(updates, want)
            if kind is STATES["normal"]:
                pairs = zip(jax.tree.leaves(back.formats), jax.tree.leaves(state.formats), strict=True)
                found = [np.asarray(a == b) for a, b in pairs]
                same, blocks = same + sum(x.sum() for x in found), blocks + sum(x.size for x in found)
            grads = kind(step, 1e-3 * np.random.default_rng(step).normal(size=SHAPE))
            _, state = jitted(tx)({"w": jnp.asarray(grads, jnp.float32)}, state, params)
    assert same >= 0.99 * blocks  # nearly all formats are found as well, and so are the codes of the next step


# Skipped steps, checkpoints, wrappers


@pytest.mark.parametrize("skip", ["cond", "select"])
def test_a_skipped_step_changes_no_bit(skip):
    tx = amp.dynamic_loss_scale(amp.low_precision_state(ADAM), skip=skip)
    params, state = run(tx, 2)
    bad = jax.tree.map(lambda g: g.at[0].set(jnp.inf), gradients(2))
    updates, after = jitted(tx)(bad, state, params)
    assert same_bits(after.inner_state, state.inner_state)
    assert not any(x.any() for x in jax.tree.leaves(updates))


def test_a_restored_run_is_the_uninterrupted_one(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tx = amp.low_precision_state(ADAM)
    half, whole = run(tx, 3), run(tx, 6)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", half)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, half))
    assert same_bits(run(tx, 3, *restored, first=3), whole)


WRAPPED = {
    "MultiSteps": lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "partition": lambda tx: optax.partition({"a": tx, "b": optax.sgd(1e-2)}, {"w": "a", "b": "b"}),
    "chain": lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    "low_precision_params": amp.low_precision_params,
}
WRAPPED |= {f"{name}, inside": make for name, make in WRAPPED.items() if name != "low_precision_params"}
WRAPPED["inject_hyperparams, inside"] = lambda tx: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_train_as_they_do_in_float32(name):
    wrap = WRAPPED[name]
    tx = amp.low_precision_state(wrap(ADAM)) if "inside" in name else wrap(amp.low_precision_state(ADAM))
    (params, state), (want, _) = run(tx, 12), run(wrap(ADAM), 12)
    assert any(x.dtype == jnp.uint8 for x in jax.tree.leaves(state))
    moved = jnp.linalg.norm(want["w"] - PARAMS["w"])
    # Sums of gradients in 8 bits, as well.
    assert jnp.linalg.norm(params["w"] - want["w"]) / moved < (0.4 if name == "MultiSteps, inside" else 0.2)


@pytest.mark.parametrize("frozen", [None, optax.MaskedNode()])
def test_frozen_parameters_are_left_out(frozen):
    tx = amp.low_precision_params(amp.low_precision_state(optax.sgd(1e-2, momentum=0.9)))
    params = {"w": PARAMS["w"].astype(jnp.bfloat16), "frozen": frozen}
    state = tx.init(params)
    updates, state = jax.jit(tx.update)({"w": gradients(0)["w"], "frozen": frozen}, state, params)
    assert low_leaves(state.inner_state) == {"0/trace/w"}
    assert updates["frozen"] == frozen


def test_gradients_of_integers_pass_through():
    params = {"w": PARAMS["w"], "n": jnp.arange(3)}
    tx = amp.low_precision_state(optax.masked(ADAM, {"w": True, "n": False}))
    grads = {"w": gradients(0)["w"], "n": np.zeros(3, jax.dtypes.float0)}
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["n"].dtype == jax.dtypes.float0
    assert len(state.formats) == 2


def test_an_optimizer_of_flax_nnx_trains():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(64, 128, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, amp.low_precision_state(optax.adam(1e-2)), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - 1) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    losses = [step(model, optimizer, jnp.ones((2, 64))) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert any(x.dtype == jnp.uint8 for x in jax.tree.leaves(nnx.state(optimizer)))


@pytest.mark.parametrize("dtype", ["float8", "bfloat16"])
@pytest.mark.parametrize("name", ["alone", "low_precision_params", "chain", "masked, inside"])
def test_optax_maps_the_codes_of_parameters(name, dtype):
    low = functools.partial(amp.low_precision_state, dtype=dtype)
    tx = {
        "alone": low(ADAM),
        "low_precision_params": amp.dynamic_loss_scale(amp.low_precision_params(low(ADAM), remainder=True)),
        "chain": optax.chain(optax.clip_by_global_norm(1.0), low(ADAM)),
        "masked, inside": low(optax.masked(ADAM, {"w": True, "b": True})),
    }[name]
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS) if name == "low_precision_params" else PARAMS
    state, seen = jax.jit(tx.init)(params), []

    def put(x, param, place):
        assert x.shape == param.shape
        seen.append(x.dtype)
        return place

    assert same_bits(optax.tree_map_params(tx, lambda x: x, state), state)
    split, whole = [NamedSharding(jax.make_mesh((8,), ("data",)), spec) for spec in (P("data"), P())]
    shardings = optax.tree_map_params(
        tx, put, state, params, {"w": split, "b": whole}, transform_non_params=lambda x: whole
    )
    assert seen.count({"float8": jnp.uint8, "bfloat16": jnp.bfloat16}[dtype]) == 2
    placed = jax.jit(tx.init, out_shardings=shardings)(params)
    assert same_bits(placed, state)
    assert {x.sharding for x in jax.tree.leaves(placed) if x.shape == SHAPE} == {split}


# Many devices


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=["FSDP", "last axis"])
@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", ["float8", "bfloat16"])
def test_a_sharded_step_is_that_of_one_device_and_sends_nothing(spec, dtype):
    params = {"w": jnp.asarray(RNG.normal(size=(16, 1024)), jnp.float32)}
    tx = amp.low_precision_state(ADAM, dtype)
    alone = run(tx, 3, params, grads_of=lambda step: gradients(step, params))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def place(x):
        return jax.device_put(x, NamedSharding(mesh, spec if x.ndim == 2 else P()))

    params, state = jax.tree.map(place, (params, tx.init(params)))
    kept = jax.tree.map(lambda x: x.sharding, (params, state))

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(update, out_shardings=kept).lower(params, state, params).compile()
    text = step.as_text()
    assert not any(name in text for name in ("all-", "collective", "reduce-scatter"))
    for i in range(3):
        params, state = step(jax.tree.map(place, gradients(i, params)), state, params)
    assert same_bits(state, alone[1])


SHARDED = [(32, 128), (64, 96), (64, 64), (32, 384), (8, 33, 48), (40, 104), (64, 65)]  # over 4 x 2 devices
SPECS = [P(), P("data"), P(None, "model"), P("data", "model"), P("model", "data"), P(None, ("data", "model"))]


@pytest.mark.sweep(108)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("make", [optax.adam, optax.lion], ids=lambda make: make.__name__)  # two moments, and one
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", SHARDED, ids=str)
def test_a_step_under_any_sharding_is_that_of_one_device(shape, spec, make, kind):
    """Devices cut blocks, and some axes are not divided by devices. On explicit axes nothing is sent at all."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(*[None] * (len(shape) - 2), *spec))

    def sharding(x):
        try:
            return split if split.shard_shape(x.shape) else whole
        except (ValueError, IndexError):  # devices do not divide it, or it has fewer axes
            return whole

    plain = {"w": jnp.asarray(RNG.normal(size=shape), jnp.float32)}
    place = functools.partial(jax.tree.map, lambda x: jax.device_put(x, sharding(x)))
    tx = amp.low_precision_state(make(1e-2))
    with jax.set_mesh(mesh):
        params = place(plain)
        kept = jax.tree.map(sharding, jax.eval_shape(tx.init, params)) if kind is AxisType.Auto else None
        _, state = run(
            tx, 2, params, jax.jit(tx.init, out_shardings=kept)(params), 0, lambda i: place(gradients(i, plain))
        )
        text = jax.jit(tx.update).lower(params, state, params).compile().as_text()
    if kind is AxisType.Explicit:
        assert not any(name in text for name in ("all-", "collective", "reduce-scatter"))
    blocks = [shape[-1] // formats.shape[-1] for formats in state.formats.values()]
    alone = amp.low_precision_state(make(1e-2), block=max(blocks, default=128))
    if blocks:  # else devices hold less than 16 values of an axis, which stays float32
        assert same_bits(state, run(alone, 2, plain, grads_of=lambda i: gradients(i, plain))[1])


@pytest.mark.parametrize("spec", [pytest.param(P("data"), marks=pytest.mark.slow), P("data", "model")], ids=str)
def test_float32_and_back_is_the_identity_on_explicit_axes(spec):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    tx = amp.low_precision_state(optax.lion(1e-2))
    with jax.set_mesh(mesh):
        params = jax.device_put({"w": jnp.ones((32, 384))}, NamedSharding(mesh, spec))
        state = jax.jit(tx.init)(params)
        _, state = jax.jit(tx.update)(params, state, params)
        back = jax.jit(tx.init)(params).with_low_precision(state.with_float32())
    assert same_bits(back.with_float32(), state.with_float32())
    for x, y in zip(jax.tree.leaves(back.inner_state), jax.tree.leaves(state.inner_state), strict=True):
        assert x.sharding == y.sharding


WIDTH, HEADS = 128, 4
SHAPES = {
    "query": (WIDTH, WIDTH),
    "key": (WIDTH, WIDTH),
    "value": (WIDTH, WIDTH),
    "up": (WIDTH, 512),
    "down": (512, WIDTH),
}


def transformer(product, params, x):
    """One layer; `product` is `jnp.einsum`, on many devices with the sharding of its result."""
    query, key, value = (
        product("btd,de->bte", x, params[name]).reshape(*x.shape[:2], HEADS, -1) for name in ("query", "key", "value")
    )
    scores = product("bthd,bshd->bhts", query, key) / 32**0.5
    mixed = product("bhts,bshd->bthd", jax.nn.softmax(scores), value).reshape(x.shape)
    hidden = jax.nn.gelu(product("btd,de->bte", jax.nn.standardize(x + mixed), params["up"]))
    return jnp.mean((product("bte,ed->btd", hidden, params["down"]) - 1) ** 2)


def steps_of_transformer(model, place):
    loss_fn = amp.autocast(model, "bfloat16", attention="xla")
    tx = amp.low_precision_params(amp.low_precision_state(optax.adamw(1e-2)), remainder=True)
    tx = amp.dynamic_loss_scale(tx)
    rng = np.random.default_rng(0)
    params = {name: place(jnp.asarray(0.1 * rng.normal(size=shape), jnp.bfloat16)) for name, shape in SHAPES.items()}

    @jax.jit
    def step(params, state, x):
        loss, grads = amp.value_and_grad(loss_fn, opt_state=state)(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    x, state, losses = place(jnp.asarray(rng.normal(size=(16, 8, WIDTH)), jnp.float32)), jax.jit(tx.init)(params), []
    (site,) = amp.explain(loss_fn)(params, x).attention
    assert site.kernel
    for _ in range(4):
        params, state, loss = step(params, state, x)
        losses.append(float(loss))
    return losses, state


@pytest.mark.slow  # compiles two train steps; the parts have tests of their own
def test_a_sharded_model_on_explicit_axes_trains_with_kernels_of_attention_and_remainders():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))

    def product(spec, x, w):
        w = jax.sharding.reshard(w, P()) if w.ndim == 2 else w
        return jnp.einsum(spec, x, w, out_sharding=P("data"))

    want, _ = steps_of_transformer(functools.partial(transformer, jnp.einsum), lambda x: x)
    with jax.set_mesh(mesh):
        losses, state = steps_of_transformer(
            functools.partial(transformer, product), lambda x: jax.device_put(x, NamedSharding(mesh, P("data")))
        )
    np.testing.assert_allclose(losses, want, rtol=0.02)
    codes = state.inner_state.inner_state.inner_state[0].nu["up"]
    assert codes.dtype == jnp.uint8
    assert codes.sharding.spec == P("data", None)


# Wrong calls


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: amp.low_precision_state(optax.adam), "`inner` must be an optax transformation"),
        (lambda: amp.low_precision_state(ADAM, "int8"), "`dtype` must be 'float8' or 'bfloat16', got 'int8'"),
        (lambda: amp.low_precision_state(ADAM, rounding="up"), "`rounding` must be"),
        (lambda: amp.low_precision_state(ADAM, block=8), "`block` must be from 16 to 256, got 8"),
        (lambda: amp.low_precision_state(ADAM, block=512), "`block` must be from 16 to 256, got 512"),
        (lambda: amp.low_precision_state(ADAM, "bfloat16", rounding="nearest"), "stand still in bfloat16"),
    ],
)
def test_wrong_calls_say_what_is_allowed(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


# Leaves whose difference is read


@pytest.mark.parametrize(
    ("make", "low"),
    [
        (lambda: optax.rmsprop(1e-2, centered=True), set()),
        (lambda: optax.scale_by_stddev(), set()),
        (lambda: optax.rmsprop(1e-2, momentum=0.9), {"0/nu/w", "2/trace/w"}),
        (lambda: optax.adabelief(1e-2), {"0/nu/w"}),  # the square of a gradient less its mean
        (lambda: optax.contrib.acprop(1e-2), {"0/nu/w"}),
        (lambda: optax.adan(1e-2), {"0/m/w", "0/n/w", "0/v/w"}),
        (lambda: optax.optimistic_adam_v2(1e-2), set()),  # the change of an update that reads both moments
        (lambda: optax.optimistic_gradient_descent(1e-2), set()),
        (lambda: optax.amsgrad(1e-2), {"0/mu/w", "0/nu/w", "0/nu_max/w"}),
        (lambda: optax.inject_hyperparams(optax.adam)(1e-2), {"inner_state/0/mu/w", "inner_state/0/nu/w"}),
        (lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True), {"0/trace/w"}),
    ],
)
def test_what_is_subtracted_in_front_of_a_root_or_a_division_or_from_its_next_value_stays_float32(make, low):
    for dtype in ("float8", "bfloat16"):
        assert low_leaves(amp.low_precision_state(make(), dtype).init(PARAMS)) == low


def test_a_variance_of_gradients_that_hardly_change_is_that_of_float32():
    def near_1(step):
        return jax.tree.map(lambda g: 1 + 100 * g, gradients(step))

    for make in (lambda: optax.rmsprop(1e-2, centered=True), lambda: optax.scale_by_stddev(0.9)):
        (params, _), (want, _) = (run(tx, 30, grads_of=near_1) for tx in (amp.low_precision_state(make()), make()))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), params, want)


def test_a_difference_that_init_cannot_see_is_refused_in_words():
    def update(updates, state, params=None, *, value, **extra):
        rate = value / jnp.sqrt(state.nu["w"] - state.mu["w"] ** 2)
        return jax.tree.map(lambda g: -rate.mean() * g, updates), state

    zeros = optax.ScaleByRStdDevState
    inner = optax.GradientTransformationExtraArgs(
        lambda params: zeros(
            *[jnp.zeros((), jnp.int32)] * (len(zeros._fields) == 3), *[jax.tree.map(jnp.zeros_like, params)] * 2
        ),
        update,
    )
    tx = amp.low_precision_state(inner)
    state = tx.init(PARAMS)
    with pytest.raises(ValueError, match=r"difference of .*\.mu\['w'\] and .*\.nu\['w'\] .*`keep=lambda path, leaf:"):
        tx.update(gradients(0), state, PARAMS, value=1.0)
    tx = amp.low_precision_state(inner, keep=lambda path, leaf: True)
    tx.update(gradients(0), tx.init(PARAMS), PARAMS, value=1.0)


halved = jax.jit(lambda x: 0.5 * x)


@pytest.mark.parametrize(
    ("square", "is_positive"),
    [
        (lambda g, p: g * g, True),
        (lambda g, p: (0.1 * g) * g, True),
        (lambda g, p: g * (jnp.abs(p) * g * 0.1), True),
        (lambda g, p: (-0.1 * g) * g, False),
        (lambda g, p: (0.1 * g[:, :32]) * g[:, :32].T, False),
        (lambda g, p: (0.1 * g) * p, False),
        (lambda g, p: halved(g) * halved(p), False),
    ],
)
def test_what_is_a_square_is_read_from_its_factors(square, is_positive):
    def update(updates, state, params):
        return updates, state + square(updates, params).sum()

    params = jnp.zeros((32, 128))
    moments = moments_of(update, params, jnp.zeros((32, 128)), params, {})
    assert moments.positive == ({0} if is_positive else set())


def test_the_program_of_an_update_is_read_once():
    calls = []

    def update(updates, state, params=None):
        calls.append(None)
        return ADAM.update(updates, state, params)

    tx = amp.low_precision_state(optax.GradientTransformation(ADAM.init, update))
    state = tx.init(PARAMS)
    for step in range(3):
        _, state = tx.update(gradients(step), state, PARAMS)
    assert len(calls) == 1 + 3


# All of optax's transformations

# The page says to keep these: a line search reads their program in `update` only, they bet on the sum of all gradients,
# or divide by differences of totals.
NOT_MEANT = {"lbfgs", "contrib.cocob", "contrib.scale_by_cocob"}
DIFFERENCES_OF_TOTALS = {"contrib.momo", "contrib.momo_adam"}
WEIGHTS = jnp.linspace(-1.0, 1.0, 128)


@pytest.fixture
def transformation(name, monkeypatch):
    """A case of the benchmark, whose parameters have more elements here."""
    params = {
        "w": jnp.asarray(np.random.default_rng(0).normal(size=(32, 128)), jnp.float32),
        "b": jnp.linspace(-1, 1, 3),
    }

    def loss_fn(params):
        return jnp.mean((jnp.tanh(params["w"]) @ WEIGHTS - 1) ** 2) + jnp.mean((params["b"] - 2) ** 4)

    monkeypatch.setattr(optax_transformations, "loss_fn", loss_fn)
    monkeypatch.setattr(optax_transformations, "PARAMS", params)
    return optax_transformations.case_of(name)


def noise(step):
    return np.random.default_rng(step).normal(size=(32, 128)).astype(np.float32)


# The gradients of a step, and by how much of their size updates may differ from those in float32.
GRADIENTS = {
    "mean 1, deviation 0.1": (lambda step: 1 + 0.1 * noise(step), 0.4),
    "zeros": (lambda step: 0 * noise(step), 0.02),  # accumulators that start above 0 are rounded
    "2**-40": (lambda step: 2.0**-40 * noise(step), 0.6),
    "2**40": (lambda step: 2.0**40 * noise(step), 0.8),  # codes of a first step are an octave apart
    "one spike": (lambda step: (1e6 if step == 10 else 1.0) * 1e-3 * noise(step), 1.5),
}


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:Specifying a key", "ignore:overflow", "ignore:invalid"
)
@pytest.mark.parametrize("kind", GRADIENTS)
@pytest.mark.parametrize("name", sorted({*optax_transformations.names()} - NOT_MEANT - DIFFERENCES_OF_TOTALS))
def test_every_transformation_follows_float32_for_30_steps_of_extreme_gradients(name, kind, transformation):
    grads_of, tolerance = GRADIENTS[kind]
    if kind == "zeros" and name == "contrib.differentially_private_aggregate":  # which adds noise
        tolerance = GRADIENTS["mean 1, deviation 0.1"][1]

    def updates_of(wrap):
        params, found = optax_transformations.parameters(name), []
        tx = optax.with_extra_args_support(wrap(transformation.make()))
        state = tx.init(params)

        @jax.jit
        def step(grads, params, state):
            if name == "contrib.differentially_private_aggregate":
                grads = jax.tree.map(lambda g: jnp.stack([g, 0.5 * g]), grads)
            updates, state = tx.update(grads, state, params, **transformation.extra(jnp.float32(1), grads))
            return updates, optax.apply_updates(params, updates), state

        for i in range(30):
            w = jnp.asarray(grads_of(i))
            updates, params, state = step({"w": w, "b": w[0, :3]}, params, state)
            found.append(np.asarray(jax.tree.leaves(updates)[-1], np.float64))
        return found

    low, full = updates_of(amp.low_precision_state), updates_of(lambda tx: tx)
    for i, (ours, expected) in enumerate(zip(low, full, strict=True)):
        if not np.isfinite(expected).all():
            return
        error, size = np.sqrt(np.mean((ours - expected) ** 2)), np.sqrt(np.mean(expected**2))
        assert error <= tolerance * AMPLIFIES.get(name, 1) * size + 1e-7 * (kind == "zeros") + 1e-12, f"in step {i}"


AMPLIFIES = {"contrib.muon": 3, "contrib.scale_by_muon": 3}  # the page says so


@pytest.mark.sweep(6)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Specifying a key")
@pytest.mark.parametrize("name", sorted({*optax_transformations.names()} - NOT_MEANT))
def test_a_moment_is_known_to_be_positive_if_no_step_makes_it_negative(name, transformation):
    """One that is not known to be would start with signs, and lose what is small."""
    params = optax_transformations.parameters(name)
    tx = optax.with_extra_args_support(transformation.make())
    facts, states = facts_of_init(tx.init, params), [tx.init(params)]
    for i in range(4):
        grads = {"w": jnp.asarray(noise(i)), "b": jnp.ones(3)}
        if name == "contrib.differentially_private_aggregate":
            grads = jax.tree.map(lambda g: jnp.stack([g, 0.5 * g]), grads)
        args = grads, states[-1], params, transformation.extra(jnp.float32(1), grads)
        moments = moments_of(tx.update, *args)
        states.append(tx.update(*args[:3], **args[3])[1])
    for i, values in enumerate(zip(*map(jax.tree.leaves, states), strict=True)):
        is_held = values[0].shape == (32, 128) and not facts[i].read and i not in moments.subtracted
        if is_held and any(x.any() for x in values[1:]):
            assert (i in moments.positive) == all((x >= 0).all() for x in values), i


@pytest.mark.sweep(36)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Specifying a key")
@pytest.mark.parametrize("name", sorted({*optax_transformations.names()} - NOT_MEANT))
def test_every_transformation_steps_as_in_float32(name, transformation):
    """After one step and after four, with moments in 8 bits."""
    case = transformation

    def ends(wrap):
        tx, found = wrap(case.make()), [optax_transformations.parameters(name)]
        state = tx.init(found[0])

        @jax.jit
        def step(params, state):
            value, grads = optax_transformations.gradients(name, params, 1.0)
            updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **case.extra(value, grads))
            return optax.apply_updates(params, updates), state

        for _ in range(4):
            params, state = step(found[-1], state)
            found.append(params)
        return [jax.tree.leaves(params)[-1] for params in found], state

    (low, state), (full, full_state) = ends(amp.low_precision_state), ends(lambda tx: tx)
    later = 0.5 if "yogi" in name else 0.35  # which goes by the sign of a difference
    for steps, tolerance in ((1, 0.07), (4, later)):  # a first accumulator of 0.1 is rounded, too
        moved = jnp.linalg.norm(full[steps] - full[0])
        assert jnp.linalg.norm(low[steps] - full[steps]) <= tolerance * moved + 1e-6
    assert jax.tree.structure(state.with_float32()) == jax.tree.structure(full_state)
