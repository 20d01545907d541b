"""A large batch as micro-batches: the same gradients, the memory of one, one check, one scale."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")
P = PartitionSpec
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(4, 8)).astype(np.float32), "v": RNG.normal(size=(8,)).astype(np.float32)}
BATCH = {"x": RNG.normal(size=(32, 4)).astype(np.float32), "y": RNG.normal(size=(32,)).astype(np.float32)}


def loss_fn(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)


def allclose(tree, expected, **tolerance):
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), tree, expected)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("steps", [1, 2, 8, 32])
def test_the_mean_over_micro_batches_is_that_over_the_batch(steps):
    expected = jax.value_and_grad(loss_fn)(PARAMS, BATCH)
    accumulated = jax.jit(amp.value_and_grad(loss_fn, accumulate_steps=steps))(PARAMS, BATCH)
    allclose(accumulated, expected, rtol=1e-5, atol=1e-6)
    loss, grads = amp.value_and_grad(loss_fn, loss_scale=2.0**10, accumulate_steps=steps)(PARAMS, BATCH)
    allclose((loss, jax.tree.map(lambda g: g / 2**10, grads)), expected, rtol=1e-5, atol=1e-6)


def test_the_sum_is_the_mean_times_the_steps():
    mean = amp.value_and_grad(loss_fn, accumulate_steps=4)(PARAMS, BATCH)
    total = amp.value_and_grad(loss_fn, accumulate_steps=4, reduction="sum")(PARAMS, BATCH)
    allclose(total, jax.tree.map(lambda x: 4 * x, mean), rtol=1e-6)


def test_aux_is_stacked_and_grad_takes_the_arguments_too():
    def with_aux(params, batch):
        return loss_fn(params, batch), {"size": batch["x"].shape[0], "seen": batch["y"]}

    (_, aux), grads = amp.value_and_grad(with_aux, has_aux=True, accumulate_steps=4)(PARAMS, BATCH)
    assert aux["size"].tolist() == [8] * 4
    assert sorted(aux["seen"].ravel()) == sorted(BATCH["y"])
    again, _ = amp.grad(with_aux, has_aux=True, accumulate_steps=4)(PARAMS, BATCH)
    allclose(again, grads)


def test_gradients_are_added_up_in_float32():
    # In float16, 2048 + 1 is 2048.
    params, x = jnp.float16(1), np.ones(4096, np.float16)
    loss, grad = amp.value_and_grad(lambda w, x: (w * x).sum(), accumulate_steps=4096, reduction="sum")(params, x)
    assert (loss, loss.dtype, grad, grad.dtype) == (4096, jnp.float32, 4096, jnp.float32)


def test_arguments_to_cut_can_be_named():
    def fun(params, temperature, batch, mask):
        return loss_fn(params, batch) * temperature.sum() * mask.mean()

    args = PARAMS, np.full(3, 0.5, np.float32), BATCH, np.ones(32, np.float32)
    expected = jax.value_and_grad(fun)(*args)
    allclose(amp.value_and_grad(fun, accumulate_steps=4, batch_argnums=(2, 3))(*args), expected, rtol=1e-5)
    with pytest.raises(ValueError, match=r"argument 1 has shape \(3,\); .*`batch_argnums=\(2, 3\)`"):
        amp.value_and_grad(fun, accumulate_steps=4)(*args)
    with pytest.raises(ValueError, match=r"argument 1\['x'\] has shape \(32, 4\)"):
        amp.value_and_grad(loss_fn, accumulate_steps=5)(PARAMS, BATCH)


TABLE = RNG.normal(size=(1000, 4)).astype(np.float32)
NO_BATCH = {
    "a table": TABLE,
    "class weights": np.ones(8, np.float32),
    "batch statistics": {"mean": np.zeros(4, np.float32), "var": np.ones(4, np.float32)},
    "a raw key": np.zeros(2, np.uint32),
    "a scalar": np.float32(1),
    "a table in the batch": None,
}


@pytest.mark.parametrize("name", NO_BATCH)
def test_first_axes_that_differ_are_named_with_the_arguments_to_split(name):
    def fun(params, batch, other):
        rest = [jnp.sum(jnp.tanh(x)) for x in jax.tree.leaves((other, batch.get("table")))]
        return loss_fn(params, batch) * (1 + sum(rest))

    args = PARAMS, BATCH, NO_BATCH[name]
    if name == "a table in the batch":
        args = PARAMS, BATCH | {"table": TABLE}, np.zeros(32, np.float32)
    cure = r"argument 2.*; name the arguments that are a batch, `batch_argnums=\(1,\)`"
    if args[1] is not BATCH:
        cure = r"argument 1\['table'\].*; pass it as an argument of its own, and .*`batch_argnums=\(1, 2\)`"
    with pytest.raises(ValueError, match=cure):
        amp.value_and_grad(fun, accumulate_steps=4)(*args)
    if args[1] is BATCH:
        got = amp.value_and_grad(fun, accumulate_steps=4, batch_argnums=(1,))(*args)
        allclose(got, jax.value_and_grad(fun)(*args), rtol=1e-4, atol=1e-5)
        by_name = amp.value_and_grad(fun, accumulate_steps=4)(PARAMS, BATCH, other=args[2])  # never split
        allclose(by_name, got)


def masks(params, batch, keys, rate=0.5):
    kept = jax.tree.map(lambda key: jax.random.bernoulli(key, rate, batch["y"].shape), keys)
    return loss_fn(params, batch), jnp.stack(jax.tree.leaves(kept))


KEYS = {
    "an argument": ((jax.random.key(0),), {}),
    "a tree of keys": (({"dropout": jax.random.key(0), "noise": jax.random.key(1)},), {}),
    "a keyword argument": ((), {"keys": jax.random.key(0)}),
}


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("name", KEYS)
def test_each_micro_batch_draws_its_own_random_numbers(name, named):
    args, kwargs = KEYS[name]
    options = {"batch_argnums": 1} if named else {}
    drawn = jax.jit(amp.value_and_grad(masks, has_aux=True, accumulate_steps=4, **options))
    (_, kept), _ = drawn(PARAMS, BATCH, *args, **kwargs)
    assert len(np.unique(np.asarray(kept).reshape(-1, 8), axis=0)) == kept.size // 8


def test_keys_in_an_array_are_split_as_a_batch_and_folded_as_an_argument():
    def fun(params, batch, keys):
        return loss_fn(params, batch), jax.vmap(lambda key: jax.random.uniform(key))(keys)

    keys = jax.random.split(jax.random.key(0), 32)
    (_, drawn), _ = amp.value_and_grad(fun, has_aux=True, accumulate_steps=4)(PARAMS, BATCH, keys)
    assert sorted(drawn.ravel()) == sorted(jax.vmap(jax.random.uniform)(keys))
    (_, drawn), _ = amp.value_and_grad(fun, has_aux=True, accumulate_steps=4, batch_argnums=1)(PARAMS, BATCH, keys)
    assert drawn.shape == (4, 32)
    assert len(np.unique(drawn)) == 128


def test_the_state_of_float8_modules_is_the_maximum_and_is_not_scaled():
    linen = pytest.importorskip("flax.linen", reason="needs Flax")
    from flax.linen import fp8_ops

    def fun(variables, x):
        return jnp.mean(net.apply(variables, x) ** 2)

    def first(tree):
        return {
            name: float(jnp.ravel(x)[0])
            for name, x in tree["_overwrite_with_gradient"]["Fp8DirectDotGeneralOp_0"].items()
        }

    net = linen.Dense(4, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
    x = np.linspace(-3, 70, 64, dtype=np.float32).reshape(16, 4)
    variables = jax.jit(net.init)(jax.random.key(0), x)
    want = first(jax.jit(jax.grad(fun))(variables, x))
    want.pop("output_grad_amax_history")  # of the gradients of a micro-batch, which are others
    for scale, reduction in ((1.0, "mean"), (2.0**12, "sum")):
        options = {"accumulate_steps": 4, "loss_scale": scale, "reduction": reduction}
        _, grads = jax.jit(amp.value_and_grad(fun, **options))(variables, x)
        got = first(grads)
        seen = got.pop("output_grad_amax_history")
        assert got == want
        assert seen > 0
    # The optimizer, and all that reads its gradients, leaves them as they are.
    tx = amp.dynamic_loss_scale(optax.identity(), amp.LossScale(init_scale=scale), clip_global_norm=1e-3)
    updates, state = tx.update(grads, tx.init(variables), variables)
    assert first(updates) == first(grads)
    norm = optax.tree.norm(grads["params"]) / scale
    np.testing.assert_allclose(amp.metrics(state)["grad_norm"], norm, rtol=1e-3)
    np.testing.assert_allclose(optax.tree.norm(updates["params"]), 1e-3, rtol=1e-3)
    nan = {**grads, "_overwrite_with_gradient": jax.tree.map(lambda x: x * jnp.nan, grads["_overwrite_with_gradient"])}
    assert amp.metrics(tx.update(nan, state, variables)[1])["last_finite"]
    link = amp.unscale_and_check()
    assert first(link.update(grads, link.init(variables), loss_scale=scale)[0]) == first(grads)
    rule = amp.LossScale()
    unscaled, finite = rule.unscale(rule.init(), nan)
    assert finite
    assert np.isnan(first(unscaled)["input_scale"])


def test_float8_state_of_its_own_dtype_is_accumulated_too():
    linen = pytest.importorskip("flax.linen", reason="needs Flax")
    from flax.linen import fp8_ops

    net = linen.Dense(4, dot_general_cls=fp8_ops.Fp8DirectDotGeneralOp)
    x = np.linspace(-3, 70, 64, dtype=np.float32).reshape(16, 4)

    def cast(tree, dtype):
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, dtype), tree)

    @jax.jit
    def history(x):
        variables = net.init(jax.random.key(0), x)
        state = cast(variables["_overwrite_with_gradient"], fp8_ops.fm32)
        fun = amp.grad(
            lambda state, x: jnp.mean(net.apply({**variables, "_overwrite_with_gradient": state}, x) ** 2),
            accumulate_steps=4,
            allow_int=True,
        )
        return cast(fun(state, x), jnp.float32)["Fp8DirectDotGeneralOp_0"]["input_amax_history"]

    assert history(x)[0] == np.abs(x).max()


def four_arguments(x, params, y, offset):
    return loss_fn(params, {"x": x, "y": y}) + jnp.mean(offset**2)


FOUR = BATCH["x"], PARAMS, BATCH["y"], np.full(3, 0.5, np.float32)
ARGNUMS = [1, -3, (1,), (-3,), [1], [1, 3], (1, -1), (-1, -3), (3, 1), range(1, 4, 2), np.int64(1), np.int32(-3)]
ARGNUMS += [np.array([1, -1]), (np.int8(-1), np.int64(1)), jnp.array(1)]
BATCH_ARGNUMS = [(0, 2), (2, 0), (0, -2), (-4, -2), [2, -4], (0, 2, 0), (0, -4, -2), np.array([0, 2]), {0, 2}]
BATCH_ARGNUMS += [range(0, 3, 2), (np.int64(0), np.uint8(2))]


@pytest.mark.parametrize("argnums", ARGNUMS, ids=repr)
def test_arguments_are_counted_as_by_jax(argnums):
    expected = jax.value_and_grad(four_arguments, argnums=argnums)(*FOUR)
    for steps in (1, 2):
        allclose(
            amp.value_and_grad(four_arguments, argnums=argnums, accumulate_steps=steps, batch_argnums=(0, 2))(*FOUR),
            expected,
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.parametrize("argnums", [0, -1, (0, 1), (-1, 0), np.int64(-2)], ids=repr)
def test_what_is_not_differentiated_is_split_however_it_is_counted(argnums):
    def fun(*args):  # the batch is the third argument from the end
        return loss_fn(args[0], args[-3]) * jnp.mean(args[1] * args[-1])

    factors = np.full((), 0.5, np.float32), np.full((), 1.5, np.float32)
    order = (PARAMS, factors[0], BATCH, np.ones(32, np.float32), factors[1])
    selected = {i % 5 for i in np.atleast_1d(argnums)} | {0, 1, 4}
    got = amp.value_and_grad(fun, argnums=argnums, accumulate_steps=4, batch_argnums=sorted({*range(5)} - selected))
    allclose(got(*order), jax.value_and_grad(fun, argnums=argnums)(*order), rtol=1e-5, atol=1e-6)
    by_default = amp.value_and_grad(lambda batch, params: loss_fn(params, batch), argnums=-1, accumulate_steps=4)
    allclose(by_default(BATCH, PARAMS), jax.value_and_grad(loss_fn)(PARAMS, BATCH), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch_argnums", BATCH_ARGNUMS, ids=repr)
def test_the_batch_is_found_however_it_is_counted(batch_argnums):
    expected = jax.value_and_grad(four_arguments, argnums=(1, 3))(*FOUR)
    grad = amp.value_and_grad(four_arguments, argnums=(1, 3), accumulate_steps=2, batch_argnums=batch_argnums)
    allclose(grad(*FOUR), expected, rtol=1e-5, atol=1e-6)
    closed, whole = [], FOUR[0].shape[0]

    def seen(x, params, y, offset):
        closed.append((x.shape[0], y.shape[0], offset.shape[0]))
        return four_arguments(x, params, y, offset)

    amp.grad(seen, argnums=1, accumulate_steps=2, batch_argnums=batch_argnums)(*FOUR)
    assert {*closed} == {(whole // 2, whole // 2, 3)}


@pytest.mark.parametrize("options", [{"argnums": i} for i in (4, -5, (1, 4), (-5, 1), np.int64(9), (1, 1))], ids=repr)
def test_argnums_that_jax_refuses_raise_as_there(options):
    with pytest.raises(Exception) as expected:
        jax.value_and_grad(four_arguments, **options)(*FOUR)
    for steps in (1, 2):
        with pytest.raises(expected.type) as info:
            amp.value_and_grad(four_arguments, **options, accumulate_steps=steps, batch_argnums=(0, 2))(*FOUR)
        assert str(info.value) == str(expected.value)


@pytest.mark.parametrize(("batch_argnums", "wrong"), [(4, 4), (-5, -5), ((0, 4), 4), ((2, -7), -7), (np.int64(8), 8)])
def test_a_batch_beyond_the_arguments_is_named(batch_argnums, wrong):
    with pytest.raises(
        ValueError, match=rf"`batch_argnums` must be from -4 to 3, .* 4 positional arguments, got {wrong}"
    ):
        amp.grad(four_arguments, 1, accumulate_steps=2, batch_argnums=batch_argnums)(*FOUR)


@pytest.mark.parametrize(
    ("argnums", "batch_argnums", "wrong"), [(1, (0, 1), 1), (-4, (0, 2), 0), ((1, 0), (-4, 2), -4)]
)
def test_what_is_differentiated_is_not_split(argnums, batch_argnums, wrong):
    with pytest.raises(
        ValueError, match=rf"`batch_argnums` must select .* not differentiated, got {wrong}, which `argn"
    ):
        amp.grad(four_arguments, argnums, accumulate_steps=2, batch_argnums=batch_argnums)(*FOUR)


@pytest.mark.parametrize("batch_argnums", ["x", 1.0, ("x",), [None], jnp.ones(2), {"x": 1}], ids=repr)
def test_a_batch_that_is_no_position_is_refused_as_jax_refuses_argnums(batch_argnums):
    with pytest.raises(TypeError, match=r"integer|iterable"):
        amp.value_and_grad(loss_fn, accumulate_steps=2, batch_argnums=batch_argnums)


@pytest.mark.parametrize("options", [{"accumulate_steps": 0}, {"accumulate_steps": True}, {"accumulate_steps": 2.0}])
def test_steps_are_counted(options):
    with pytest.raises(ValueError, match="`accumulate_steps` must be an integer of at least 1, got"):
        amp.value_and_grad(loss_fn, **options)


def test_the_reduction_is_a_mean_or_a_sum():
    with pytest.raises(ValueError, match='`reduction` must be "mean" or "sum", got \'max\''):
        amp.value_and_grad(loss_fn, accumulate_steps=2, reduction="max")


def test_memory_is_that_of_one_micro_batch():
    def deep(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    params, x = [jnp.ones((32, 32))] * 4, jnp.ones((1024, 32))

    def held(steps):
        program = jax.jit(amp.value_and_grad(deep, accumulate_steps=steps)).lower(params, x).compile()
        return program.memory_analysis().temp_size_in_bytes

    batch, gradients = x.nbytes, sum(w.nbytes for w in params)
    whole, quarter, sixteenth = held(1), held(4), held(16)
    assert whole > 4 * batch  # the activations
    # What is left is the batch, cut, and the sums.
    assert quarter < whole / 4 + 1.5 * (batch + 2 * gradients)
    assert sixteenth < whole / 16 + 1.5 * (batch + 2 * gradients)


def training(tx, steps=2):
    @jax.jit
    def step(params, state, batch):
        scale = amp.get_loss_scale(state)
        loss, grads = amp.value_and_grad(amp.autocast(loss_fn), loss_scale=scale, accumulate_steps=steps)(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def test_two_micro_batches_a_step_of_the_standard_rig():
    tx = amp.dynamic_loss_scale(optax.sgd(0.1), amp.LossScale(init_scale=128, growth_interval=1))
    step, params, state = training(tx), PARAMS, tx.init(PARAMS)
    for _ in range(2):
        params, state, _ = step(params, state, BATCH)
    assert amp.get_loss_scale(state) == 512
    control = PARAMS
    for _ in range(2):
        control = jax.tree.map(lambda p, g: p - 0.1 * g, control, jax.grad(loss_fn)(control, BATCH))
    allclose(params, control, rtol=1e-2, atol=1e-3)


def test_one_bad_micro_batch_poisons_its_window_and_only_that():
    tx = amp.dynamic_loss_scale(optax.adam(0.1), amp.LossScale(init_scale=128, growth_interval=1))
    step, state = training(tx), tx.init(PARAMS)
    bad = BATCH | {"x": BATCH["x"].copy()}
    bad["x"][5, 0] = np.inf
    params, after, _ = step(PARAMS, state, bad)
    jax.tree.map(np.testing.assert_array_equal, (params, after.inner_state), (PARAMS, state.inner_state))
    assert amp.get_loss_scale(after) == 64
    params, after, _ = step(params, after, BATCH)
    assert after.loss_scale.last_finite
    assert not np.array_equal(params["w"], PARAMS["w"])


def test_losses_weighted_by_tokens_are_divided_by_what_all_micro_batches_held():
    weights = (RNG.random(32) < 0.4).astype(np.float32)

    def summed(params, batch, weights):
        errors = (jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2
        return (errors * weights).sum(), weights.sum()

    def mean(params):
        loss, count = summed(params, BATCH, weights)
        return loss / count

    value_and_grad = amp.value_and_grad(summed, has_aux=True, accumulate_steps=8, reduction="sum")
    (loss, counts), grads = value_and_grad(PARAMS, BATCH, weights)
    accumulated = jax.tree.map(lambda x: x / counts.sum(), (loss, grads))
    allclose(accumulated, jax.value_and_grad(mean)(PARAMS), rtol=1e-5, atol=1e-6)


def test_a_short_last_window_divides_by_what_it_held():
    short = jax.tree.map(lambda x: x[:24], BATCH)  # 3 micro-batches of 8 instead of 4
    expected = jax.value_and_grad(loss_fn)(PARAMS, short)
    allclose(amp.value_and_grad(loss_fn, accumulate_steps=3)(PARAMS, short), expected, rtol=1e-5, atol=1e-6)


def test_a_sharded_batch_stays_where_it_is():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = jax.device_put(BATCH, NamedSharding(mesh, P("data")))
    params = jax.device_put(PARAMS, NamedSharding(mesh, P()))
    step = jax.jit(amp.value_and_grad(loss_fn, accumulate_steps=4))
    allclose(step(params, batch), jax.value_and_grad(loss_fn)(PARAMS, BATCH), rtol=1e-5, atol=1e-6)
    text = step.lower(params, batch).compile().as_text()
    assert "all-reduce" in text
    for moves in ("all-gather", "all-to-all", "collective-permute"):
        assert moves not in text


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_accumulate_under_shard_map(check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def mean(params, batch):
        params = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params) if check_vma else params
        out = amp.value_and_grad(loss_fn, accumulate_steps=2)(params, batch)
        return jax.lax.pmean(out, "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    out = jax.jit(jax.shard_map(mean, mesh=mesh, **specs))(PARAMS, BATCH)
    allclose(out, jax.value_and_grad(loss_fn)(PARAMS, BATCH), rtol=1e-5, atol=1e-6)


def micro_steps(tx, bad=()):
    """Four micro-batches through `optax.MultiSteps`, some of them not finite."""
    params, state = jnp.float32(0), tx.init(jnp.float32(0))
    for i in range(4):
        scale = float(amp.get_loss_scale(state))
        grad = np.float32(np.inf if i in bad else (i + 1) * scale)
        updates, state = jax.jit(tx.update)(grad, state, params)
        params = optax.apply_updates(params, updates)
        yield float(params), scale


RULE = amp.LossScale(init_scale=4, growth_interval=1)


def test_inside_the_scale_multi_steps_leaves_the_micro_batch_out():
    inner = optax.MultiSteps(optax.sgd(1.0), 2).gradient_transformation()
    tx = amp.dynamic_loss_scale(inner, RULE)
    assert list(micro_steps(tx)) == [(0, 4), (-1.5, 8), (-1.5, 16), (-5, 32)]
    # The window is filled by the two that are finite.
    assert list(micro_steps(tx, bad=[0])) == [(0, 4), (0, 2), (-2.5, 4), (-2.5, 8)]


@pytest.mark.parametrize(
    ("around", "message"),
    [
        (lambda tx: optax.MultiSteps(tx, 2), "`MultiSteps` around .*; move it inside"),
        (
            lambda tx: optax.MultiSteps(tx, 2, should_skip_update_fn=optax.skip_not_finite),
            "`MultiSteps` around .*; move it inside",
        ),
        (lambda tx: optax.apply_if_finite(tx, 2), "`apply_if_finite` around .*does not back off; move it inside"),
    ],
)
def test_a_wrapper_that_keeps_overflows_is_found_even_if_its_inner_state_gave_the_scale(around, message):
    # `MultiSteps` would keep `inf`, and then NaN, in its sums, and so skip every later step without a word.
    tx = around(amp.dynamic_loss_scale(optax.sgd(1.0), RULE))
    state = tx.init(jnp.float32(0))
    for call in (jax.jit, lambda fun: fun):
        with pytest.raises(ValueError, match=message):
            call(lambda state: amp.grad(jnp.square, opt_state=state)(jnp.float32(0)))(state)

    def step(params, state):
        inner = state.inner_opt_state if isinstance(state, optax.MultiStepsState) else state.inner_state
        updates, state = tx.update(amp.grad(jnp.square, opt_state=inner)(params), state, params)
        return optax.apply_updates(params, updates), state

    with pytest.raises(ValueError, match="does not scale and unscale its gradients consistently"):
        amp.debug.check_loss_scaling(step)(jnp.float32(0), state)


class MultiSteps:
    """A class of the user, which may do better than optax's."""

    def update(self, tx, *args):
        return tx.update(*args)


def test_a_method_of_the_user_may_have_the_name_of_optax():
    tx = amp.dynamic_loss_scale(optax.sgd(1.0), RULE)
    updates, _ = MultiSteps().update(tx, jnp.float32(4), tx.init(jnp.float32(0)), jnp.float32(0))
    assert updates == -1


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
