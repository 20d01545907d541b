"""apex's levels: what each assembles, and what each costs in memory."""

import functools

import autocast_cost
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxprs import equations
from models import gpt_case
from normed_net import batch, initial_params, loss_fn, train_step

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")
LEVELS = ("O0", "O1", "O2", "O3")


@functools.cache
def train(level, steps=50, **options):
    fun, params, tx = amp.interop.apex.initialize(loss_fn, initial_params(), optax.adam(1e-2), level, **options)
    state, step = tx.init(params), jax.jit(train_step(fun, tx))
    for _ in range(steps):
        params, state, loss = step(params, state, *batch())
    return params, state, loss


def dtypes(tree):
    return {str(x.dtype) for x in jax.tree.leaves(tree)}


@pytest.mark.parametrize(("level", "dtype"), [*((level, "float16") for level in LEVELS), ("O2", "bfloat16")])
def test_each_level_trains_and_keeps_its_dtypes(level, dtype):
    params, state, loss = train(level, dtype=dtype)
    _, _, expected = train("O0", dtype="float16")
    np.testing.assert_allclose(loss, expected, rtol=0.05 if level < "O3" else 0.25)
    low = dtype if level >= "O2" else "float32"
    norm = dtype if level == "O3" else "float32"
    assert [params[name].dtype.name for name in ("in", "out", "norm")] == [low, low, norm]
    # The optimizer computes in float32 at every level.
    assert dtypes((optax.tree.get(state, "mu"), optax.tree.get(state, "nu"))) == {"float32"}
    masters = {"O2": {"float32"}}.get(level, set())
    assert dtypes([s.masters for s in find(amp.LowPrecisionParamsState, state)]) == masters
    scaled = level in ("O1", "O2") and dtype == "float16"
    assert (amp.get_loss_scale(state) > 1) == scaled


def find(kind, tree):
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind))
    return [x for x in leaves if isinstance(x, kind)]


def outputs(fun, params, primitive):
    return {
        eqn.outvars[0].aval.dtype.name for eqn in equations(fun, params, *batch()) if eqn.primitive.name == primitive
    }


@pytest.mark.parametrize("level", LEVELS)
def test_products_are_low_precision_and_statistics_are_not(level):
    fun, params, _ = amp.interop.apex.initialize(loss_fn, initial_params(), optax.sgd(0.1), level)
    assert outputs(fun, params, "dot_general") == {"float32" if level == "O0" else "float16"}
    assert outputs(fun, params, "reduce_sum") == {"float32"}


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_that_was_written_for_float32_is_traced_so(level):
    def written_for_float32(params, x, y):
        def body(carry, w):
            assert carry.dtype == w.dtype == jnp.float32
            return jnp.tanh(carry @ w), None

        h, _ = jax.lax.scan(body, x, params)
        return jnp.mean((h - y) ** 2)

    params = np.stack([np.eye(4, dtype=np.float32)] * 3)
    fun, params, _ = amp.interop.apex.initialize(written_for_float32, params, optax.sgd(0.1), level)
    loss, grads = amp.value_and_grad(fun, loss_scale=8.0)(params, *batch())
    expected = written_for_float32(np.float32(params), *batch())
    np.testing.assert_allclose(loss, expected, rtol=1e-2)
    assert grads.dtype == params.dtype


@pytest.mark.sweep(2)
@pytest.mark.parametrize("level", LEVELS)
def test_overflows_are_skipped_at_every_level(level):
    fun, params, tx = amp.interop.apex.initialize(loss_fn, initial_params(), optax.adam(1e-2), level)
    x, y = batch()
    new_params, state, _ = jax.jit(train_step(fun, tx))(params, tx.init(params), x, y + np.inf)
    jax.tree.map(np.testing.assert_array_equal, new_params, params)
    assert not state.loss_scale.last_finite


def test_the_scale_and_what_is_kept_can_be_chosen():
    rule = amp.LossScale.static(8)
    _, params, tx = amp.interop.apex.initialize(
        loss_fn, initial_params(), optax.sgd(0.1), "O3", loss_scale=rule, keep=lambda path, x: x.ndim == 1
    )
    assert amp.get_loss_scale(tx.init(params)) == 8
    assert [params[name].dtype for name in ("in", "norm")] == [jnp.float16, jnp.float32]


def test_options_of_autocast_reach_it():
    fun, params, _ = amp.interop.apex.initialize(
        loss_fn, initial_params(), optax.sgd(0.1), "O1", rules={jax.lax.dot_general_p: "full"}
    )
    assert outputs(fun, params, "dot_general") == {"float32"}


def test_wrong_levels_and_dtypes_are_named():
    call = lambda *args, **kwargs: amp.interop.apex.initialize(loss_fn, {}, optax.sgd(0.1), *args, **kwargs)  # noqa: E731
    with pytest.raises(ValueError, match="`opt_level` must be one of 'O0', 'O1', 'O2', 'O3', got 'O4'"):
        call("O4")
    with pytest.raises(ValueError, match=r'`dtype` must have less than 32 bits, got float32; .* opt_level="O0"'):
        call("O1", dtype="float32")
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'rule'"):
        call("O1", rule={})


@pytest.mark.parametrize(
    ("loss_scale", "cure"),
    [
        ("dynamic", r"got 'dynamic'; leave it out, or pass `LossScale.apex\(\)`"),
        (128.0, r"pass `LossScale.static\(128.0\)`"),
        ("128.0", r"pass `LossScale.static\(128.0\)`"),
        ("off", r"or `LossScale.none\(\)` for no scaling"),
    ],
)
def test_the_loss_scales_of_apex_are_named_with_ours(loss_scale, cure):
    for call in (
        lambda: amp.interop.apex.initialize(loss_fn, {}, optax.sgd(0.1), "O2", loss_scale=loss_scale),
        lambda: amp.dynamic_loss_scale(optax.sgd(0.1), loss_scale),
    ):
        with pytest.raises(TypeError, match=cure):
            call()


@pytest.mark.parametrize(
    ("args", "got"),
    [
        ((loss_fn, {}, "O2"), "as `tx`, 'O2'"),
        ((loss_fn, optax.sgd(0.1), {}, "O2"), "as `tx`, a dict"),
        (({}, optax.sgd(0.1), "O2"), "as `loss_fn`, a dict"),
    ],
)
def test_arguments_in_the_order_of_apex_are_named_with_ours(args, got):
    with pytest.raises(
        TypeError, match=got + r"; write `initialize\(loss_fn, params, optax.adam\(1e-3\), opt_level='O"
    ):
        amp.interop.apex.initialize(*args)


@pytest.mark.sweep(2)
@pytest.mark.parametrize("moments", [optax.adamw(1e-3, mu_dtype=jnp.bfloat16), optax.lion(1e-3, mu_dtype="bfloat16")])
def test_moments_may_be_bfloat16(moments):
    fun, params, tx = amp.interop.apex.initialize(loss_fn, initial_params(), moments, "O2")
    state, losses = tx.init(params), []
    step = jax.jit(train_step(fun, tx))
    for _ in range(50):
        params, state, loss = step(params, state, *batch())
        losses.append(float(loss))
    assert dtypes(optax.tree.get(state, "mu")) == {"bfloat16"}
    assert losses[-1] < 0.9 * losses[0]


SMALL = {"layers": 4, "scan": True, "batch": 4, "length": 64, "dim": 128, "heads": 2, "vocab": 64}


def test_parameters_and_state_take_the_bytes_of_their_table():
    loss_fn, (params, _) = gpt_case(None, **SMALL)
    size = sum(x.size for x in jax.tree.leaves(params))
    carried = {name: autocast_cost.assemble(loss_fn, params, *level)[2] for name, level in autocast_cost.LEVELS.items()}
    a_parameter = {name: round(autocast_cost.kept_bytes(trees) / size, 1) for name, trees in carried.items()}
    assert a_parameter == {"O0": 12, "O1": 12, "O2": 14, "O3": 10, "O2, first moments in bfloat16": 12}


@pytest.mark.aot
@pytest.mark.slow  # compiles three train steps of a transformer
def test_each_level_moves_fewer_bytes_and_holds_less_than_the_one_before():
    loss_fn, (params, tokens) = gpt_case(None, **SMALL)
    o0, o1, o2 = (
        autocast_cost.cost_of_step(loss_fn, params, [tokens], *autocast_cost.LEVELS[level])
        for level in ("O0", "O1", "O2")
    )
    for figures in (o0, o1, o2):
        assert figures["alias_bytes"] > 0.99 * figures["kept"]  # donated: nothing of it is copied
    for name in ("temp_bytes", "bytes_moved"):
        assert o2[name] < o1[name] < o0[name]
