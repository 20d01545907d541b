"""`debug.check_loss_scaling` is silent on right train steps, and names the line of those that scale in two ways."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental.ode import odeint
from jax.scipy.sparse.linalg import cg, gmres
from optax import contrib
from optax_transformations import case_of, gradients, names, parameters

import jmp_amp as amp
from jmp_amp import LossScale

pytestmark = [pytest.mark.usefixtures("users_code"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PARAMS = {"w": jnp.linspace(-1, 1, 32).reshape(4, 8), "u": jnp.linspace(-1, 1, 64).reshape(8, 8), "b": jnp.zeros(8)}
X = jnp.linspace(-1, 1, 24).reshape(6, 4)
SKIPS = ["cond", "select"]
check = amp.debug.check_loss_scaling


def network(params, x):
    def layer(h, _):
        variance = jnp.var(h, -1, keepdims=True)
        return jnp.tanh(h @ params["u"] + params["b"]) * lax.rsqrt(variance + 1e-6), jnp.max(h)

    h, _ = lax.scan(jax.checkpoint(layer), x @ params["w"], length=2)
    scores = jnp.where(jnp.tril(jnp.ones(2 * h.shape[:1], bool)), h @ h.T, -1e9)
    return jax.nn.logsumexp(jax.nn.softmax(scores) @ h, axis=-1)


@amp.autocast
def loss_fn(params, x):
    return jnp.mean(network(params, x) ** 2)


@amp.autocast
def linear(params, x):  # so simple that `update` does not see what multiplies the loss
    return jnp.mean((x @ params["w"] @ params["u"] + params["b"]) ** 2)


def train_step(tx, params, state, x, *, scale=None, change=None, loss_fn=loss_fn, **options):
    loss_scale = amp.get_loss_scale(state) if scale is None else scale
    if change is None:
        loss, grads = amp.value_and_grad(loss_fn, loss_scale=loss_scale, **options)(params, x)
    else:  # scaled by hand, so that `update` does not raise at what was done to the gradients
        loss, grads = jax.value_and_grad(lambda params: loss_scale * loss_fn(params, x))(params)
        grads = change(grads, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss / loss_scale if change else loss


def checked(tx, params=PARAMS, **options):
    check(functools.partial(train_step, tx, **options))(params, tx.init(params), X)


WRAPPERS = {
    "plain": {},
    "select": {"skip": "select"},
    "clipping": {"clip_global_norm": 1.0},
    "leaves": {"nonfinite_leaves": True},
    "static": {"loss_scale": LossScale.static(2.0**10)},
    "deepspeed": {"loss_scale": LossScale.deepspeed_consecutive()},
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_right_step_passes(name):
    inner = optax.chain(amp.unscale_and_check(), optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    checked(amp.dynamic_loss_scale(inner, **WRAPPERS[name]))


def test_right_steps_of_other_forms_pass():
    tx = amp.dynamic_loss_scale(optax.adam(1e-3))
    checked(tx, accumulate_steps=2)
    checked(tx, loss_fn=network_loss_in_float16)
    checked(tx, transform=lambda fun, **kwargs: jax.jit(jax.value_and_grad(fun, **kwargs)))
    low = amp.cast_params(PARAMS, "O2")
    checked(amp.dynamic_loss_scale(amp.low_precision_params(optax.adam(1e-3))), low)
    checked(
        amp.dynamic_loss_scale(amp.low_precision_params(optax.adam(1e-3), masters=False, rounding="stochastic")), low
    )
    jitted = jax.jit(functools.partial(train_step, tx))
    check(jitted)(PARAMS, tx.init(PARAMS), X)
    check(jitted)(*jax.eval_shape(lambda: (PARAMS, tx.init(PARAMS), X)))


NORMS = {
    "sqrt": lambda g: jnp.sqrt(jnp.sum(g**2)),
    "a power": lambda g: jnp.sum(g**2) ** 0.5,
    "powers": lambda g: jnp.power(jnp.sum(jnp.power(jnp.abs(g), 3.0)), 1 / 3),
}
CLIPS = {
    "scaled threshold": lambda g, norm, scale: g * jnp.minimum(1.0, scale / norm),
    "unscaled norm": lambda g, norm, scale: g * jnp.minimum(1.0, 1.0 / (norm / scale + 1e-6)),
    "no division by 0": lambda g, norm, scale: g / jnp.where(norm > 0, norm, 1.0) * jnp.minimum(norm, scale),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("clip", CLIPS)
def test_a_clip_by_hand_passes(clip, norm):
    tx = amp.dynamic_loss_scale(optax.adam(1e-3))

    def step(params, state):
        scale = amp.get_loss_scale(state)
        grads = amp.grad(loss_fn, loss_scale=scale)(params, X)
        updates, state = tx.update(jax.tree.map(lambda g: CLIPS[clip](g, NORMS[norm](g), scale), grads), state, params)
        return optax.apply_updates(params, updates), state

    check(step)(PARAMS, tx.init(PARAMS))


def test_a_factor_from_the_norm_of_scaled_gradients_is_named_once():
    def clip(grads, params):
        return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / jnp.linalg.norm(g)), grads)

    with pytest.raises(ValueError, match=UNSCALED + r".* the norm of gradients that are still scaled") as raised:
        checked(amp.dynamic_loss_scale(optax.adam(1e-3)), change=clip)
    assert all("test_check_loss_scaling.py" in line for line in str(raised.value).splitlines()[1:])


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    "replace",
    [
        jnp.nan_to_num,
        lambda g: jnp.where(jnp.isfinite(g), g, 0),
        lambda g: jnp.where(jnp.isnan(g) | jnp.isinf(g), 0, g),
    ],
)
def test_values_that_replace_overflows_before_the_check_are_named(replace):
    tx = amp.dynamic_loss_scale(optax.adam(1e-3))
    with pytest.warns(
        UserWarning, match=r"^at .*test_check_loss_scaling.py.*, `step` replaces non-finite values"
    ) as found:
        checked(tx, change=lambda grads, params: jax.tree.map(replace, grads))
    assert len(found) == 1  # of three leaves, one line

    checked(amp.dynamic_loss_scale(optax.chain(amp.unscale_and_check(), optax.stateless(lambda g, _: replace_all(g)))))


def replace_all(grads):
    return jax.tree.map(jnp.nan_to_num, grads)


def test_a_logged_value_that_is_scaled_is_named():
    tx = amp.dynamic_loss_scale(optax.adam(1e-3))

    def step(params, state, *, norm=jnp.linalg.norm):
        scale = amp.get_loss_scale(state)
        loss, grads = amp.value_and_grad(loss_fn, loss_scale=scale)(params, X)
        updates, state = tx.update(grads, state, params)
        logs = {"loss": loss, "grad_norm": norm(grads["w"]), "scale": scale, "norm": norm(grads["w"]) / scale}
        return optax.apply_updates(params, updates), state, logs

    with pytest.warns(
        UserWarning, match=r"`step` returns `result\[2\]\['grad_norm'\]`, a value multiplied by"
    ) as found:
        check(step)(PARAMS, tx.init(PARAMS))
    assert len(found) == 1
    check(functools.partial(step, norm=lambda grads: jnp.float32(0)))(PARAMS, tx.init(PARAMS))


def network_loss_in_float16(params, x):
    return loss_fn(params, x).astype(jnp.float16)


def test_a_chain_of_its_own_passes_with_the_scale_and_not_without():
    rule, tx = LossScale(), optax.chain(amp.unscale_and_check(), optax.sgd(0.1))

    def step(params, scaling, state, handed=True):
        grads = amp.grad(loss_fn, loss_scale=scaling.loss_scale)(params, X)
        updates, state = tx.update(grads, state, params, loss_scale=scaling.loss_scale if handed else 1.0)
        return optax.apply_updates(params, updates), rule.update(scaling, state[0].last_finite), state

    check(step)(PARAMS, rule.init(), tx.init(PARAMS))
    with pytest.raises(ValueError, match=r"the loss scale and an unscaled value: the gradients are still scaled here"):
        check(step)(PARAMS, rule.init(), tx.init(PARAMS), handed=False)


def test_each_of_two_losses_has_its_scale():
    rule, tx = LossScale(), optax.sgd(0.1)

    def step(params, scalings, swapped=False):
        grads, finite = [], []
        for scaling, other in zip(scalings, scalings[::-1], strict=True):
            scaled = amp.grad(loss_fn, loss_scale=scaling.loss_scale)(params, X)
            true, ok = rule.unscale(other if swapped else scaling, scaled)
            grads.append(true)
            finite.append(ok)
        updates, _ = tx.update(jax.tree.map(jnp.add, *grads), tx.init(params), params)
        new = optax.tree.where(finite[0] & finite[1], optax.apply_updates(params, updates), params)
        return new, [rule.update(s, ok) for s, ok in zip(scalings, finite, strict=True)]

    check(step)(PARAMS, [rule.init(), rule.init()])
    with pytest.raises(ValueError, match="does not scale and unscale its gradients consistently"):
        check(step)(PARAMS, [rule.init(), rule.init()], swapped=True)


UNSCALED = r"divided by the loss scale and an unscaled value: the gradients are unscaled twice"
STILL = r"the gradients are still scaled here"
BETWEEN = r"between `amp.value_and_grad` and `update`, gradients are multiplied by the loss scale"  # `update` says so
FORGOTTEN = r"does not depend on the loss scale"  # the wrapper says so itself
FAULTS = {
    "the loss was not scaled": ({"scale": 1.0}, FORGOTTEN),
    "another scale": ({"scale": 2.0**16}, FORGOTTEN),
    "clipped by norm while scaled": (
        {"change": lambda grads, _: optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]},
        r"compares a value multiplied by the loss scale and an unscaled value: " + STILL,
    ),
    "clipped by value while scaled": (
        {"change": lambda grads, _: jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads)},
        STILL,
    ),
    "weight decay while scaled": (
        {"change": lambda grads, params: jax.tree.map(lambda g, p: g + 0.1 * p, grads, params)},
        r"test_check_loss_scaling.py:\d+ \(\S*<lambda>\), the program adds .*" + STILL,
    ),
    "a logarithm of scaled gradients": (
        {"change": lambda grads, _: jax.tree.map(lambda g: g * jnp.log1p(jnp.abs(g)), grads)},
        r"applies `log1p` to a value multiplied by the loss scale: " + STILL,
    ),
    "squared, so that optax adds them to unscaled ones": (
        {"change": lambda grads, _: jax.tree.map(jnp.square, grads)},
        r"consistently:\n- at \S*test_check_loss_scaling.py:\d+ \(train_step\), the program adds .*" + STILL,
    ),
    "unscaled by hand as well": (
        {"change": lambda grads, _: jax.tree.map(lambda g: g / 1024, grads), "scale": 1024.0},
        FORGOTTEN,
    ),
}


def test_a_step_of_jitted_parts_that_forgets_the_scale_is_found_here_alone():
    tx = amp.dynamic_loss_scale(optax.sgd(1.0))
    gradient, update = jax.jit(amp.grad(loss_fn)), jax.jit(tx.update)

    def step(params, state, x):
        updates, state = update(gradient(params, x), state, params)
        return optax.apply_updates(params, updates), state, updates

    _, _, updates = step(PARAMS, tx.init(PARAMS), X)
    want = jax.grad(loss_fn)(PARAMS, X)["w"]
    np.testing.assert_allclose(updates["w"], -want / 2**16, rtol=1e-3)
    with pytest.raises(ValueError, match="does not scale and unscale its gradients consistently"):
        check(step)(PARAMS, tx.init(PARAMS), X)


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_line(name, skip):
    options, message = FAULTS[name]
    tx = amp.dynamic_loss_scale(optax.sgd(0.1, momentum=0.9), skip=skip)
    with pytest.raises(ValueError, match=message):
        checked(tx, **options)


def test_gradients_that_are_unscaled_outside_as_well():
    tx = amp.dynamic_loss_scale(optax.sgd(0.1))

    def step(params, state):
        grads = amp.grad(loss_fn, loss_scale=amp.get_loss_scale(state))(params, X)
        true, _ = LossScale().unscale(state.loss_scale, grads)
        updates, state = tx.update(true, state, params)
        return optax.apply_updates(params, updates), state

    with pytest.raises(ValueError, match=r"was already unscaled, by .* or `LossScale.unscale`; keep only one"):
        check(step)(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize(
    "tx",
    [
        optax.chain(amp.unscale_and_check(), optax.clip(1.0), optax.scale(-0.1)),
        optax.chain(optax.scale(-0.1), amp.unscale_and_check()),
    ],
    ids=["behind", "in front"],
)
@pytest.mark.parametrize("doubled", [False, True])
def test_a_chain_that_unscales_twice_in_eager_code_is_found_as_well(tx, doubled):
    def step(params, scaling):
        scale = scaling.loss_scale
        grads = amp.grad(loss_fn, loss_scale=scale)(params, X)
        true = jax.tree.map(lambda g: g / scale, grads) if doubled else grads
        return optax.apply_updates(params, tx.update(true, tx.init(params), params, loss_scale=scale)[0])

    if doubled:
        with pytest.raises(
            ValueError, match="becomes an unscaled value; `update` divides gradients by the loss scale: leave"
        ):
            check(step)(PARAMS, LossScale().init())
    else:
        check(step)(PARAMS, LossScale().init())


def test_shard_map_is_entered():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    tx = amp.dynamic_loss_scale(optax.adam(1e-3), axis_name="data")

    def step(params, state, x, **options):
        def local(params, state, x):
            return train_step(tx, params, state, x, **options)

        specs = spec(), spec(), spec("data")
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec(), check_vma=False)(params, state, x)

    x = jnp.concatenate([X, X])
    check(step)(PARAMS, tx.init(PARAMS), x)
    with pytest.raises(ValueError, match=FORGOTTEN):
        check(step)(PARAMS, tx.init(PARAMS), x, scale=8.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
@pytest.mark.filterwarnings("ignore:Specifying a key")
def test_every_transformation_of_optax_passes_and_is_found_without_a_scale(name):
    case, params = case_of(name), parameters(name)
    tx = amp.dynamic_loss_scale(case.make())

    def step(params, state, scaled=True):
        value, grads = gradients(name, params, amp.get_loss_scale(state) if scaled else 1.0)
        updates, state = tx.update(grads, state, params, **case.extra(value, grads))
        return optax.apply_updates(params, updates), state

    check(step)(params, tx.init(params))
    with pytest.raises(ValueError, match=FORGOTTEN):
        check(step)(params, tx.init(params), scaled=False)


def test_a_sum_that_a_loop_starts_from_true_gradients_is_found():
    tx = amp.dynamic_loss_scale(optax.sgd(0.1))

    def step(params, state, start):
        def add(total, x):
            grads = amp.grad(loss_fn, loss_scale=amp.get_loss_scale(state))(params, x)
            return jax.tree.map(jnp.add, total, grads), None

        grads, _ = lax.scan(add, start(params), jnp.stack([X, X]))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    check(functools.partial(step, start=lambda params: jax.tree.map(jnp.zeros_like, params)))(PARAMS, tx.init(PARAMS))
    with pytest.raises(ValueError, match=r"\(\S*add\), the step adds .*" + BETWEEN):
        check(functools.partial(step, start=lambda params: params))(PARAMS, tx.init(PARAMS))

    def last(params, state):
        grads, _ = lax.scan(
            lambda _, x: (amp.grad(loss_fn, loss_scale=amp.get_loss_scale(state))(params, x), None), params, X[None]
        )
        return tx.update(grads, state, params)

    with pytest.raises(ValueError, match=r"carries a value .* through a loop; " + BETWEEN):
        check(last)(PARAMS, tx.init(PARAMS))


@pytest.mark.slow
def test_a_scale_that_the_step_makes_is_followed():
    tx = amp.dynamic_loss_scale(optax.sgd(0.1))

    def run(params, x, is_scaled=True, unscaled=True, steps=2):
        state = tx.init(params)
        for _ in range(steps):
            scale = amp.get_loss_scale(state)
            grads = jax.grad(lambda p, scale=scale: loss_fn(p, x) * (scale if is_scaled else 1.0))(params)
            updates, state = tx.update(grads, state, params)
            params = optax.apply_updates(params, updates if unscaled else grads)
        return params

    check(run)(PARAMS, X)
    with pytest.raises(ValueError, match="does not scale and unscale its gradients consistently"):
        check(functools.partial(run, unscaled=False))(PARAMS, X)
    forgotten = functools.partial(run, is_scaled=False)
    for call, x in ((run, X), (jax.vmap(run, (None, 0)), X[None])):  # over seeds
        jax.eval_shape(call, PARAMS, x)
    for call, x in ((forgotten, X), (jax.vmap(forgotten, (None, 0)), X[None])):
        with pytest.raises(ValueError, match=FORGOTTEN):
            jax.eval_shape(call, PARAMS, x)
    one = functools.partial(forgotten, steps=1)
    jax.vmap(one, (None, 0))(PARAMS, X[None])  # nothing is traced, and nothing is said


def noisy(params, x, key):
    return loss_fn(params, x) * jnp.mean(jax.random.bernoulli(key, 0.5, (8,)))


@pytest.mark.parametrize("make", [pytest.param(jax.random.PRNGKey, marks=pytest.mark.slow), jax.random.key])
def test_random_numbers_that_all_micro_batches_share_are_named(make):
    tx = amp.dynamic_loss_scale(optax.adam(1e-3))

    def step(params, state, x, key, **options):
        value_and_grad = amp.value_and_grad(noisy, opt_state=state, batch_argnums=(1,), **options)
        loss, grads = value_and_grad(params, x, key)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    args = PARAMS, tx.init(PARAMS), X, make(0)
    check(step)(*args)
    accumulating = functools.partial(step, accumulate_steps=2)
    if make is jax.random.key:
        check(accumulating)(*args)
    else:
        with pytest.warns(
            UserWarning, match=r"\(noisy\), `step` draws the same random numbers in every micro-batch"
        ) as found:
            check(accumulating)(*args)
        assert len(found) == 1


def test_wrong_calls():
    with pytest.raises(TypeError, match="`check_loss_scaling` takes a function, got int"):
        check(3)
    with pytest.raises(ValueError, match="no loss scale in the arguments, and `step` makes none; pass"):
        check(lambda x: x)(np.ones(3))


# What a step that overflows leaves.


def averaged(params, average, state, x, selects=False):
    params, state, loss = train_step(TX, params, state, x)
    new = optax.incremental_update(params, average, 0.1)
    if selects:
        finite = amp.metrics(state)["last_finite"]
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, average)
    return params, new, state, loss


def with_statistics(run, x):
    params, state, loss = train_step(TX, run["params"], run["state"], x)
    grads = amp.grad(loss_fn, opt_state=run["state"])(run["params"], x)
    length = optax.tree.norm(grads) / amp.get_loss_scale(run["state"])
    return run | {
        "params": params,
        "state": state,
        "count": run["count"] + 1,
        "key": jax.random.split(run["key"])[0],
        "mean": 0.9 * run["mean"] + jnp.mean(x, 0),
        "length": 0.9 * run["length"] + length,
    }, loss


TX = amp.dynamic_loss_scale(optax.sgd(0.1))
STATE = TX.init(PARAMS)
RUN = {"params": PARAMS, "state": STATE, "count": jnp.int32(0), "key": jax.random.key(0)}
RUN |= {"mean": jnp.zeros(4), "length": jnp.float32(0)}


def moved(step, *args):
    """What the check says that a skipped step changes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(step)(*args)
    assert len(caught) <= 1
    for each in caught:
        return str(each.message).partition(" changes ")[2].partition(". That is right for counts")[0]


def test_what_a_skipped_step_changes_is_listed():
    average = jax.tree.map(jnp.copy, PARAMS)  # equal to the parameters, until a step is taken
    listed = "`average['b']`, `average['u']`, `average['w']`"
    assert moved(averaged, PARAMS, average, STATE, X) == listed
    assert moved(jax.jit(averaged, donate_argnums=(0, 1, 2)), PARAMS, average, STATE, X) == listed
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((PARAMS, average)))
    assert moved(functools.partial(averaged, selects=True), PARAMS, average, STATE, X) is None

    ema = optax.ema(0.9)

    def by_optax(params, state, average, x):
        params, state, loss = train_step(TX, params, state, x)
        return params, state, ema.update(params, average)[1], loss

    listed = "`average.count`, `average.ema['b']`, `average.ema['u']`, `average.ema['w']`"
    assert moved(by_optax, PARAMS, STATE, ema.init(PARAMS), X) == listed
    with jax.debug_nans(True):
        listed = "`run['count']`, `run['key']`, `run['length']` (not finite), `run['mean']`"
        assert moved(with_statistics, RUN, X) == listed


def test_what_is_no_next_value_of_an_argument_is_not_listed():
    def counted(run, x):
        new, loss = with_statistics(run, x)
        return new | {"mean": run["mean"], "length": run["length"]}, loss

    def with_a_rate(params, state, rate, x):
        return train_step(TX, params, state, x)

    def encoder(params, state, x):
        params, state, loss = train_step(TX, params, state, x)
        return params, state, loss, x - x @ params["w"] @ params["w"].T

    def logged(params, state, x):
        jax.debug.callback(lambda n: pytest.fail("the step has run"), x[0, 0])
        return train_step(TX, params, state, x)[:2], with_statistics(RUN, x)[0]

    def several(params, state, x, unrolled):
        def one(carry, _):
            params, state, _ = train_step(TX, *carry, x)
            return (params, state), None

        if unrolled:  # the second update is right, and no step that is skipped
            return one(one((params, state), None)[0], None)[0]
        return lax.scan(one, (params, state), length=2)[0]

    assert moved(functools.partial(several, unrolled=True), PARAMS, STATE, X) is None
    assert moved(functools.partial(several, unrolled=False), PARAMS, STATE, X) is None
    assert moved(counted, RUN, X) is None
    assert moved(encoder, PARAMS, STATE, X) is None  # a reconstruction, with the shape of the batch
    assert moved(with_a_rate, PARAMS, STATE, jnp.float32(0.1), X) is None  # in the place of the loss
    assert moved(logged, PARAMS, STATE, X) is None
    assert moved(averaged, *jax.eval_shape(lambda: (PARAMS, PARAMS, STATE, X))) is None


def test_the_next_value_of_an_argument_is_found_at_another_place():
    def last(state, x, run, params):
        new, state, loss = train_step(TX, params, state, x)
        return loss, new, state, {"mean": 0.9 * run["mean"] + jnp.mean(x, 0)}

    def in_place(params, state, mean, x):
        return *train_step(TX, params, state, x)[:2], 0.9 * mean + jnp.mean(x, 0)

    assert moved(last, STATE, X, {"mean": jnp.zeros(4)}, PARAMS) == "`run['mean']`"
    assert moved(in_place, PARAMS, STATE, jnp.zeros(4), X) == "`mean`"
    assert "`run['mean']`" in moved(lambda run, x: with_statistics(run, x)[0], RUN, X)


LOGS = {
    "saturation": lambda g: jnp.mean(jnp.abs(g) > 60000.0),
    "a histogram": lambda g: jnp.histogram(g, 3)[0],
    "an entropy": lambda g: jnp.sum(jnp.log1p(jnp.abs(g))),
}
# What reads such a value as well: parameters, the end of a loop, and the next scale.
READERS = {
    "parameters": lambda p, state, log: (jax.tree.map(lambda w: jnp.sum(log) * w, p), state),
    "a loop": lambda p, state, log: (
        lax.while_loop(lambda c: c[1] < jnp.sum(log), lambda c: (c[0], c[1] + 1), (p, 0.0))[0],
        state,
    ),
    "the scale": lambda p, state, log: (
        p,
        state._replace(loss_scale=LossScale().update(state.loss_scale, jnp.sum(log) < 9)),
    ),
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", LOGS)
def test_what_is_only_logged_is_no_error(name):
    def step(params, state, x, reads=lambda params, state, log: (params, state)):
        grads = amp.grad(loss_fn, opt_state=state)(params, x)
        updates, new = TX.update(grads, state, params)
        log = LOGS[name](grads["w"])
        return *reads(optax.apply_updates(params, updates), new, log), log

    messages = warned(step, PARAMS, STATE, X)
    assert messages
    assert all(message.endswith(". Only what `step` logs depends on it") for message in messages)
    for reads in READERS.values():
        with pytest.raises(ValueError, match=r"a value multiplied by the loss scale.*: the gradients are still scaled"):
            check(functools.partial(step, reads=reads))(PARAMS, STATE, X)


def updated(params, state, x, selects):
    grads = amp.grad(loss_fn, opt_state=state)(params, x)
    updates, new = TX.update(grads, state, params)
    return selects(optax.apply_updates(params, updates), new, params, state, grads)


def flax_select(finite, new, old):
    return jax.tree.map(functools.partial(jnp.where, finite), new, old)


# What selects the state of the optimizer, also in a train state, by a flag of the gradients or of the next state.
STUCK = {
    "the state": lambda p, new, old_p, old, g: (p, optax.tree.where(amp.all_finite(g), new, old)),
    "all": lambda p, new, old_p, old, g: optax.tree.where(new.loss_scale.last_finite, (p, new), (old_p, old)),
    "as with DynamicScale": lambda p, new, old_p, old, g: (p, flax_select(amp.all_finite(g), new, old)),
    "a branch": lambda p, new, old_p, old, g: lax.cond(
        jnp.isfinite(optax.tree.norm(g)), lambda: (p, new), lambda: (old_p, old)
    ),
    "the scale": lambda p, new, old_p, old, g: (
        p,
        new._replace(loss_scale=optax.tree.where(amp.all_finite(g), new.loss_scale, old.loss_scale)),
    ),
}
BACKS_OFF = {
    "parameters": lambda p, new, old_p, old, g: (optax.tree.where(amp.all_finite(g), p, old_p), new),
    "the state of the inner optimizer": lambda p, new, old_p, old, g: (
        p,
        new._replace(inner_state=optax.tree.where(amp.all_finite(g), new.inner_state, old.inner_state)),
    ),
    "a rollback": lambda p, new, old_p, old, g: (
        lax.cond(new.loss_scale.notfinite_count > 5, lambda: old_p, lambda: p),
        new,
    ),
}


def warned(step, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check(step)(*args)
    return [str(each.message) for each in caught]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", STUCK)
def test_a_scale_that_never_backs_off_is_named(name):
    step = functools.partial(updated, selects=STUCK[name])
    (message,) = warned(step, PARAMS, STATE, X)
    assert message.startswith("where gradients overflow, `step` keeps `state.loss_scale.loss_scale`: a loss scale that")
    params, state = jax.jit(step)(PARAMS, amp.set_loss_scale(STATE, 2.0**126), X)  # as it says
    assert amp.get_loss_scale(state) == 2.0**126
    assert jnp.array_equal(params["w"], PARAMS["w"])


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", BACKS_OFF)
def test_a_step_that_keeps_other_state_passes(name):
    step = functools.partial(updated, selects=BACKS_OFF[name])
    assert warned(step, PARAMS, STATE, X) == []
    assert amp.get_loss_scale(jax.jit(step)(PARAMS, amp.set_loss_scale(STATE, 2.0**126), X)[1]) < 2.0**126


def test_a_branch_that_skips_the_update_backs_off_itself():
    def step(params, state, x, back_off):
        grads = amp.grad(loss_fn, opt_state=state)(params, x)

        def update():
            updates, new = TX.update(grads, state, params)
            return optax.apply_updates(params, updates), new

        return lax.cond(amp.all_finite(grads), update, lambda: (params, back_off(state)))

    def backs_off(params, state, x):
        return step(params, state, x, lambda s: s._replace(loss_scale=LossScale().update(s.loss_scale, False)))

    assert warned(backs_off, PARAMS, STATE, X) == []
    assert amp.get_loss_scale(jax.jit(backs_off)(PARAMS, amp.set_loss_scale(STATE, 2.0**126), X)[1]) < 2.0**126
    with pytest.raises(ValueError, match="checks gradients for overflows only where another check"):
        check(functools.partial(step, back_off=lambda s: s))(PARAMS, STATE, X)


def test_a_step_that_updates_now_and_then_passes():
    def update(params, state):
        return train_step(TX, params, state, X)[:2]

    def delayed(critic, actor, critic_state, actor_state, count):
        critic, critic_state = update(critic, critic_state)
        actor, actor_state = lax.cond(count % 2 == 0, update, lambda *args: args, actor, actor_state)
        return critic, actor, critic_state, actor_state, count + 1

    for count in range(2):
        assert warned(delayed, PARAMS, PARAMS, STATE, STATE, jnp.int32(count)) == []


# Scales.

RULE = LossScale(init_scale=4.0, growth_interval=1)


def by_rule(params, scaling, x, unscale):
    grads = amp.grad(loss_fn, loss_scale=scaling.loss_scale)(params, x)
    new = RULE.update(scaling, amp.all_finite(grads))
    grads = unscale(grads, scaling, new)
    moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return optax.tree.where(new.last_finite, moved, params), new


def divided(grads, scale):
    return jax.tree.map(lambda g: g / scale, grads)


LINK = optax.chain(amp.unscale_and_check(), optax.identity())
UNSCALES = {
    "by the rule": lambda grads, scaling: RULE.unscale(scaling, grads)[0],
    "by hand": lambda grads, scaling: divided(grads, scaling.loss_scale),
    "by the link": lambda grads, scaling: LINK.update(grads, LINK.init(PARAMS), loss_scale=scaling.loss_scale)[0],
}


ADAM, ADAM_BEHIND_THE_LINK = optax.adam(0.1), optax.chain(amp.unscale_and_check(), optax.adam(0.1))


def held(params, moments, scaling, x, keeps=("params", "moments")):
    """A step that keeps the scale itself, and selects what it is told to."""
    grads, finite = RULE.unscale(scaling, amp.grad(linear, opt_state=scaling)(params, x))
    updates, new_moments = ADAM.update(grads, moments, params)
    new_params = optax.apply_updates(params, updates)
    if "params" in keeps:
        new_params = optax.tree.where(finite, new_params, params)
    if "moments" in keeps:
        new_moments = optax.tree.where(finite, new_moments, moments)
    return new_params, new_moments, RULE.update(scaling, finite)


def linked(params, moments, scaling, x, log=None):
    scale = scaling.loss_scale
    grads = amp.grad(linear, loss_scale=scale)(params, x)
    updates, moments = ADAM_BEHIND_THE_LINK.update(grads, moments, params, loss_scale=scale)
    scaling = RULE.update(scaling, moments[0].last_finite)
    log = {"norm": log["norm"] + optax.tree.norm(grads) / scale} if log else None
    return optax.apply_updates(params, updates), moments, scaling, log


def test_a_step_that_keeps_the_scale_itself_is_run_too():
    args = PARAMS, ADAM.init(PARAMS), RULE.init(), X
    assert warned(held, *args) == []
    params, moments = (moved(functools.partial(held, keeps=keeps), *args) for keeps in (["moments"], ["params"]))
    assert params == "`params['b']` (not finite), `params['u']` (not finite), `params['w']` (not finite)"
    assert moments.startswith("`moments[0].count`, `moments[0].mu['b']` (not finite), ")

    args = PARAMS, ADAM_BEHIND_THE_LINK.init(PARAMS), RULE.init(), X
    assert warned(linked, *args) == []  # a momentum moves the parameters, as the page says
    assert moved(linked, *args, {"norm": jnp.float32(0)}) == "`log['norm']` (not finite)"


@pytest.mark.parametrize("name", UNSCALES)
def test_gradients_that_the_next_scale_divides_are_found(name):
    unscale = UNSCALES[name]
    args = PARAMS, RULE.init(), X
    check(lambda *args: by_rule(*args, lambda grads, old, new: unscale(grads, old)))(*args)
    with pytest.raises(
        ValueError, match=r"multiplied by one loss scale and divided by another .*: divide gradients by"
    ):
        check(lambda *args: by_rule(*args, lambda grads, old, new: unscale(grads, new)))(*args)


def test_a_log_that_the_next_scale_divides_is_found():
    def step(params, state, x, late):
        grads = amp.grad(loss_fn, opt_state=state)(params, x)
        updates, new = TX.update(grads, state, params)
        norm = optax.tree.norm(grads) / amp.get_loss_scale(new if late else state)
        return optax.apply_updates(params, updates), new, norm

    check(functools.partial(step, late=False))(PARAMS, STATE, X)
    with pytest.raises(ValueError, match=r"`step` returns `result\[2\]`, a value multiplied by one loss scale and div"):
        check(functools.partial(step, late=True))(PARAMS, STATE, X)


def test_a_static_scale_has_no_next_one():
    rule = LossScale.static(8.0)

    def step(params, scaling, x):
        grads = amp.grad(loss_fn, loss_scale=scaling.loss_scale)(params, x)
        new = rule.update(scaling, amp.all_finite(grads))
        moved = jax.tree.map(lambda p, g: p - 0.1 * g, params, divided(grads, new.loss_scale))
        return optax.tree.where(new.last_finite, moved, params), new

    check(step)(PARAMS, rule.init(), X)


# A loop over steps.


def in_body(params, state, outer, x):
    return train_step(TX, params, state, x, loss_fn=linear)[:2]


def of_outer(params, state, outer, x):
    return train_step(TX, params, state, x, scale=amp.get_loss_scale(outer), loss_fn=linear)[:2]


def handed(params, state, outer, x):
    scale = amp.get_loss_scale(outer)
    updates, state = TX.update(amp.grad(linear, loss_scale=scale)(params, x), state, params, loss_scale=scale)
    return optax.apply_updates(params, updates), state


def twice(params, state, outer, x):
    return in_body(*in_body(params, state, outer, x), outer, x)


def inner(params, state, outer, x):
    return lax.scan(lambda carry, x: (in_body(*carry, outer, x), None), (params, state), x[None])[0]


LOOPS = {
    "scan": lambda body, init, x: lax.scan(lambda carry, x: (body(carry, x), None), init, jnp.stack([x, x]))[0],
    "fori_loop": lambda body, init, x: lax.fori_loop(0, 2, lambda _, carry: body(carry, x), init),
    "while_loop": lambda body, init, x: lax.while_loop(
        lambda carry: optax.tree.norm(carry[0]) > 1, lambda carry: body(carry, x), init
    ),
}


def loop(params, state, x, over, one):
    return over(lambda carry, x: one(*carry, state, x), (params, state), x)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("one", [in_body, handed, twice, inner])
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_steps_with_the_scale_of_each_passes(name, one):
    assert warned(functools.partial(loop, over=LOOPS[name], one=one), PARAMS, STATE, X) == []


@pytest.mark.parametrize("name", LOOPS)
def test_the_scale_in_front_of_a_loop_over_steps_is_found_in_it(name):
    with pytest.raises(
        ValueError, match=r"multiplied by one loss scale and divided by another .*: divide gradients by"
    ):
        check(functools.partial(loop, over=LOOPS[name], one=of_outer))(PARAMS, STATE, X)


def adversaries(params, states, x, stale=False, shared=False):
    """Two players, each with a state, whose scales are equal if both skip together."""

    def body(carry, x):
        players, now = carry
        scaling = states if stale else now
        grads = [amp.grad(linear, opt_state=state)(p, x) for p, state in zip(players, scaling, strict=True)]
        options = {"grads_finite": amp.all_finite(grads)} if shared else {}
        updates, new = zip(*(TX.update(g, s, **options) for g, s in zip(grads, now, strict=True)), strict=True)
        return ([*map(optax.apply_updates, players, updates)], [*new]), None

    return lax.scan(body, ([params, params], states), jnp.stack([x, x]))[0]


@pytest.mark.parametrize("shared", [False, True])
def test_two_states_in_a_loop_have_their_scales(shared):
    step = functools.partial(adversaries, shared=shared)
    assert warned(step, PARAMS, [STATE, STATE], X) == []
    with pytest.raises(ValueError, match="multiplied by one loss scale and divided by another"):
        check(functools.partial(step, stale=True))(PARAMS, [STATE, STATE], X)


def test_gradients_of_the_step_before_and_a_lower_scale_in_a_loop_pass():
    def pipelined(params, state, x):
        def body(carry, x):
            params, state, grads = carry
            updates, state = TX.update(grads, state, params)
            params = optax.apply_updates(params, updates)
            return (params, state, amp.grad(loss_fn, opt_state=state)(params, x)), None

        grads = amp.grad(loss_fn, opt_state=state)(params, x)
        (params, state, grads), _ = lax.scan(body, (params, state, grads), jnp.stack([x, x]))
        return TX.update(grads, state, params)

    def again(params, scaling, x):
        def lower(carry):
            scaling = RULE.update(carry[0], False)
            return scaling, amp.grad(loss_fn, opt_state=scaling)(params, x)

        init = scaling, amp.grad(loss_fn, opt_state=scaling)(params, x)
        scaling, grads = lax.while_loop(lambda carry: ~amp.all_finite(carry[1]), lower, init)
        return jax.tree.map(lambda p, g: p - g, params, RULE.unscale(scaling, grads)[0]), scaling

    assert warned(pipelined, PARAMS, STATE, X) == []
    assert warned(again, PARAMS, RULE.init(), X) == []


# A state that starts at a scale that is an argument.


def client(params, scale, x, *, by_hand=False, forgotten=False, logged=False):
    state = amp.set_loss_scale(TX.init(params), scale)

    def one(carry, x):
        params, state = carry
        grads = amp.grad(linear, **({"loss_scale": scale} if by_hand else {"opt_state": state}))(params, x)
        updates, state = TX.update(grads, state, params)
        params = optax.apply_updates(params, grads if forgotten else updates)
        return (params, state), optax.tree.norm(grads)

    if by_hand:
        (params, state), norms = one((params, state), x)
    else:
        (params, state), norms = lax.scan(one, (params, state), x[None])
    return params, amp.get_loss_scale(state), norms if logged else None


def clients(params, scale, x):
    """Hands the scale on from one client to the next."""
    return lax.scan(lambda carry, x: (client(*carry, x)[:2], None), (params, scale), jnp.stack([x, x]))[0]


SCALE = jnp.float32(2**10)
CLIENTS = {
    "in a loop": (client, SCALE),
    "in a loop, an integer": (client, jnp.int32(2**10)),
    "once, and multiplied by hand": (functools.partial(client, by_hand=True), SCALE),
    "one after the other": (clients, SCALE),
    "one after the other, in a tree": (lambda params, run, x: clients(params, run["scale"], x), {"scale": SCALE}),
    "at the same time": (jax.vmap(client, (None, 0, None)), jnp.stack([SCALE, SCALE])),
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_state_that_starts_at_an_argument_passes(name):
    step, scale = CLIENTS[name]
    assert warned(step, PARAMS, scale, X) == []


def test_a_state_that_starts_at_an_argument_is_checked():
    with pytest.raises(ValueError, match="the gradients are still scaled here"):
        check(functools.partial(client, forgotten=True))(PARAMS, SCALE, X)
    (message,) = warned(functools.partial(client, by_hand=True, logged=True), PARAMS, SCALE, X)
    assert message.startswith("`step` returns `result[2]`, a value multiplied by the loss scale")

    def set_too(params, scale, state, x):
        return train_step(TX, params, amp.set_loss_scale(state, scale), x, loss_fn=linear)

    for scale in (SCALE, jnp.int32(2**10)):
        assert warned(set_too, PARAMS, scale, STATE, X) == []


PRIVATE = contrib.differentially_private_aggregate(l2_norm_clip=1.0, noise_multiplier=0.1, key=0)


def examples(params, x, **options):
    return jax.vmap(amp.grad(loss_fn, **options), (None, 0))(params, x[:, None])


def with_noise(grads, scale=1.0):
    norms = jax.vmap(optax.tree.norm)(grads)
    mean = jax.tree.map(lambda g: jnp.tensordot(jnp.minimum(1.0, scale / norms), g, 1) / 6, grads)
    return jax.tree.map(lambda g: g + scale * 0.1 * jax.random.normal(jax.random.key(0), g.shape), mean)


NONE = amp.dynamic_loss_scale(optax.sgd(0.1), LossScale.none())
# A transformation, and the gradients that it gets.
PRIVATELY = {
    "inside the wrapper": (
        amp.dynamic_loss_scale(optax.chain(PRIVATE, optax.sgd(0.1))),
        lambda p, s, x: examples(p, x, opt_state=s),
    ),
    "in front of a wrapper that scales nothing": (optax.chain(PRIVATE, NONE), lambda p, s, x: examples(p, x)),
    "... with gradients by the state": (optax.chain(PRIVATE, NONE), lambda p, s, x: examples(p, x, opt_state=s)),
    "in front of a wrapper, unscaled": (
        optax.chain(PRIVATE, NONE),
        lambda p, s, x: divided(examples(p, x, loss_scale=2.0**10), 2.0**10),
    ),
    "by hand, scaled": (
        amp.dynamic_loss_scale(optax.sgd(0.1)),
        lambda p, s, x: with_noise(examples(p, x, opt_state=s), amp.get_loss_scale(s)),
    ),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", PRIVATELY)
def test_private_gradients_pass_in_the_right_order(name):
    tx, grads_of = PRIVATELY[name]

    def step(params, state, x):
        updates, state = tx.update(grads_of(params, state, x), state, params)
        return optax.apply_updates(params, updates), state

    check(step)(PARAMS, tx.init(PARAMS), X)


def test_private_gradients_in_front_of_a_wrapper_that_scales_are_refused():
    tx = optax.chain(PRIVATE, TX)

    def step(params, state, x):
        return tx.update(examples(params, x, opt_state=state), state, params)

    with pytest.raises(ValueError, match=r"per_example_global_norm_clip.*compares .*" + BETWEEN):
        check(step)(PARAMS, tx.init(PARAMS), X)


def test_a_step_with_its_own_unscaling_and_a_wrapper_that_scales_nothing_passes():
    def step(params, state, scaling, x):
        grads, finite = RULE.unscale(scaling, amp.grad(loss_fn, opt_state=scaling)(params, x))
        updates, state = NONE.update(grads, state, params)
        return optax.apply_updates(params, updates), state, RULE.update(scaling, finite)

    check(step)(PARAMS, NONE.init(PARAMS), RULE.init(), X)


# Other programs.


def test_max_pooling_passes():
    def pooled(params, x):
        return jnp.mean(lax.reduce_window(x @ params["w"], -jnp.inf, lax.max, (2, 2), (2, 2), "VALID") ** 2)

    checked(TX, loss_fn=pooled)
    with pytest.raises(ValueError, match="compares a value multiplied by the loss scale and an unscaled value"):
        checked(TX, loss_fn=pooled, change=lambda grads, _: jax.tree.map(lambda g: jnp.clip(g, -1, 1), grads))


def solved(params, x):
    return odeint(lambda y, t, w: jnp.tanh(y @ w), x @ params["w"], jnp.array([0.0, 1.0]), params["u"])[-1]


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -1, 1),))


def test_an_adaptive_solver_of_cotangents_is_named_once():
    with pytest.warns(
        UserWarning, match=r"in the backward pass of .*\(solved\), .*tolerance.*`LossScale.none\(\)`"
    ) as found:
        checked(TX, loss_fn=lambda params, x: jnp.mean(solved(params, x) ** 2))
    assert len(found) == 1
    with pytest.raises(ValueError, match="compares a value multiplied by the loss scale"):  # outside of the solver
        checked(TX, loss_fn=lambda params, x: jnp.mean(clipped(x @ params["w"]) ** 2))


def searched(params, state, x, slope, search):
    """A step whose length is halved until the loss falls as far as the slope says."""
    grads = amp.grad(loss_fn, opt_state=state)(params, x)
    slope = slope(optax.tree.norm(grads) ** 2, amp.get_loss_scale(state))
    updates, new = TX.update(grads, state, params)

    def is_long(length):
        moved = jax.tree.map(lambda p, u: p + length * u, params, updates)
        return (loss_fn(moved, x) > loss_fn(params, x) - 1e-4 * length * slope) & (length > 1e-3)

    return jax.tree.map(lambda p, u: p + search(is_long) * u, params, updates), new


SEARCHES = {
    "while": lambda is_long: lax.while_loop(is_long, lambda length: length / 2, jnp.float32(1)),
    "once": lambda is_long: lax.cond(is_long(jnp.float32(1)), lambda: 0.5, lambda: 1.0),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_what_decides_when_a_loop_ends_is_unscaled(name):
    step = functools.partial(searched, search=SEARCHES[name])
    check(functools.partial(step, slope=lambda square, scale: square / scale**2))(PARAMS, STATE, X)
    with pytest.raises(ValueError, match=r"\(\S*is_long\), the program subtracts .* to the power 2 and an unscaled"):
        check(functools.partial(step, slope=lambda square, scale: square))(PARAMS, STATE, X)


def by_hand(matvec, grads):
    """Conjugate gradients of scaled gradients, up to a tolerance that is relative."""

    def step(carry):
        x, r, d, square, n = carry
        product = matvec(d)
        length = square / optax.tree.vdot(d, product)
        x, r = optax.tree.add_scale(x, length, d), optax.tree.add_scale(r, -length, product)
        new = optax.tree.vdot(r, r)
        return x, r, optax.tree.add_scale(r, new / square, d), new, n + 1

    start = optax.tree.vdot(grads, grads)
    init = optax.tree.zeros_like(grads), grads, grads, start, 0
    return lax.while_loop(lambda carry: (carry[3] > 1e-6 * start) & (carry[4] < 5), step, init)[0]


SOLVERS = {
    "cg": lambda *args: cg(*args, maxiter=5)[0],
    "gmres": lambda *args: gmres(*args, maxiter=2)[0],
    "by hand": by_hand,
}


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", SOLVERS)
def test_a_solve_for_gradients_up_to_a_relative_tolerance_passes(name):
    def step(params, state, x):
        grads = amp.grad(loss_fn, opt_state=state)(params, x)
        grads = SOLVERS[name](lambda v: jax.tree.map(lambda v: 2 * v, v), grads)
        updates, new = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), new

    assert warned(step, PARAMS, STATE, X) == []


def mapped(step, name):
    mesh = jax.make_mesh((1,), ("b",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    ways = {
        "pmap": lambda: jax.pmap(step, axis_name="b"),
        "vmap": lambda: jax.vmap(step, axis_name="b"),
        "vmap of the batch": lambda: jax.vmap(step, (None, None, 0), axis_name="b"),
        "shard_map": lambda: jax.shard_map(
            lambda *args: jax.tree.map(lambda x: x[None], step(*jax.tree.map(lambda x: x[0], args))),
            mesh=mesh,
            in_specs=spec("b"),
            out_specs=spec("b"),
            check_vma=False,
        ),
    }
    return ways[name]()


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", ["pmap", "vmap", "vmap of the batch", "shard_map"])
def test_a_logged_norm_of_scaled_gradients_is_named_under_a_map(name):
    tx = amp.dynamic_loss_scale(optax.sgd(0.1), axis_name="b")

    def step(params, state, x, scales=True):
        grads = amp.grad(loss_fn, opt_state=state)(params, x)
        updates, state = tx.update(lax.pmean(grads, "b"), state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads) / (1.0 if scales else 2.0**16)

    args = jax.tree.map(lambda x: x[None], (PARAMS, tx.init(PARAMS), X))
    args = (PARAMS, tx.init(PARAMS), X[None]) if name == "vmap of the batch" else args
    with pytest.warns(UserWarning, match=r"`step` returns `result\[2\]`, a value multiplied by the loss scale"):
        check(mapped(step, name))(*args)


def test_a_message_names_a_leaf_of_the_state():
    def step(params, opt_state, x):
        grads = amp.grad(loss_fn, opt_state=opt_state)(params, x)
        updates, new = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), new._replace(sum_of_squares=optax.tree.norm(grads))

    with pytest.warns(UserWarning, match=r"`step` returns `opt_state.sum_of_squares`, a value multiplied by"):
        check(step)(PARAMS, STATE, X)


def test_what_a_jit_around_update_or_an_argument_hides_is_found():
    def apply(grads, state, params):
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def forgotten(params, state, x, limit):
        return jax.jit(apply)(jax.grad(loss_fn)(params, x), state, params)

    def clipped(params, state, x, limit, apply):
        grads = amp.grad(loss_fn, opt_state=state)(params, x)
        factor = jnp.minimum(1.0, limit / optax.tree.norm(grads))
        return apply(jax.tree.map(lambda g: g * factor, grads), state, params)

    args = PARAMS, STATE, X, jnp.float32(1.0)
    jitted = jax.jit(apply)
    for step in (forgotten, lambda *args: clipped(*args[:3], 1.0, jitted), lambda *args: clipped(*args, apply)):
        jax.eval_shape(step, *args)  # nothing is said
        with pytest.raises(ValueError, match="does not scale and unscale its gradients consistently"):
            check(step)(*args)
