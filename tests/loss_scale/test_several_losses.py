"""Several losses, several optimizers: whose overflow skips whom, and which scale moves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from overflowing_run import BAD_BATCH, RULE, batches, net
from overflowing_run import initial_params as net_params

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")
DISABLED = amp.LossScale.none()
NETS = ("net0", "net1")


def initial_params():
    return {name: net_params(seed) for seed, name in enumerate(NETS)}


def losses(params, x, y):
    out0, out1 = (net(params[name], x) for name in NETS)
    mse = lambda out: jnp.mean((out - y) ** 2)  # noqa: E731
    return mse(0.3 * out0 + 0.7 * out1), mse(0.6 * out0 - 0.4 * out1)


def loss(i, params, x, y):
    return losses(params, x, y)[i]


def grads_of(i, params, batch, scale, bad):
    """Of one loss; in the third batch with an infinity in the weights of the second layer of the second net."""
    grads = amp.grad(functools.partial(loss, i), loss_scale=scale)(params, *batch)
    layer = grads["net1"][1]
    layer["w"] = layer["w"].at[0, 0].add(bad)
    return grads


def added(*trees):
    return jax.tree.map(lambda *leaves: sum(leaves), *trees)


def run(step, state, control=False):
    """Four batches; without scaling, the control skips by hand what the overflow would have moved."""
    params, step = initial_params(), step if control else jax.jit(step)
    for i, batch in enumerate(batches()):
        params, state = step(params, state, batch, np.float32(np.inf if i == BAD_BATCH else 0))
    return params, state


def control_step(skipped):
    """In float32, without scaling; of the batch with the infinity, `skipped` nets see nothing."""

    def step(params, states, batch, bad):
        grads = jax.grad(lambda p: sum(losses(p, *batch)))(params)
        new_params, new_states = {}, {}
        for name in NETS:
            updates, state = optax.sgd(0.3, momentum=0.9).update(grads[name], states[name])
            keep = bad and name in skipped
            new_states[name] = states[name] if keep else state
            new_params[name] = params[name] if keep else optax.apply_updates(params[name], updates)
        return new_params, new_states

    return step


@functools.cache
def control(skipped):
    states = {name: optax.sgd(0.3, momentum=0.9).init(p) for name, p in initial_params().items()}
    return run(control_step(skipped), states, control=True)[0]


def assert_close(params, expected):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6, rtol=1e-5), params, expected)


def own_optimizers():
    """An optimizer a net, which skips by its own gradients; the scale is somebody else's."""
    tx = amp.dynamic_loss_scale(optax.sgd(0.3, momentum=0.9), DISABLED)
    return tx, {name: tx.init(params) for name, params in initial_params().items()}


@pytest.mark.parametrize("rule", [RULE, DISABLED], ids=["scaled", "disabled"])
@pytest.mark.parametrize("together", [False, True], ids=["own flag", "global flag"])
@pytest.mark.sweep(4)
def test_two_losses_and_two_optimizers_share_a_scale_and_one_update(rule, together):
    tx, states = own_optimizers()

    def step(params, state, batch, bad):
        scaling, states = state
        grads = added(*(grads_of(i, params, batch, scaling.loss_scale, bad) for i in range(2)))
        _, all_finite = rule.unscale(scaling, grads)
        extra = {"loss_scale": scaling.loss_scale} | ({"grads_finite": all_finite} if together else {})
        new_params, new_states = {}, {}
        for name in NETS:
            updates, new_states[name] = tx.update(grads[name], states[name], params[name], **extra)
            new_params[name] = optax.apply_updates(params[name], updates)
        return new_params, (rule.update(scaling, all_finite), new_states)

    params, (scaling, states) = run(step, (rule.init(), states))
    assert_close(params, control(NETS if together else ("net1",)))
    assert scaling.loss_scale == (512 if rule is RULE else 1)
    assert scaling.total_notfinite == 1
    skips = {name: int(amp.metrics(state)["total_notfinite"]) for name, state in states.items()}
    assert skips == {"net0": int(together), "net1": 1}


def test_a_partition_has_an_optimizer_a_net_and_skips_together():
    parts = {name: optax.sgd(0.3, momentum=0.9) for name in NETS}
    tx = amp.dynamic_loss_scale(optax.partition(parts, {name: name for name in NETS}), RULE)

    def step(params, state, batch, bad):
        grads = added(*(grads_of(i, params, batch, amp.get_loss_scale(state), bad) for i in range(2)))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = run(step, tx.init(initial_params()))
    assert_close(params, control(NETS))
    assert amp.get_loss_scale(state) == 512


@pytest.mark.parametrize("bad_loss", [0, 1])
def test_each_loss_has_a_scale_of_its_own_and_one_overflow_skips_the_step(bad_loss):
    rules = (RULE, amp.LossScale.torch(init_scale=2.0**10, growth_interval=1))
    tx = amp.dynamic_loss_scale(optax.sgd(0.3, momentum=0.9), DISABLED)

    def step(params, state, batch, bad):
        *scalings, opt_state = state
        true_grads, new_scalings = [], []
        for i, (rule, scaling) in enumerate(zip(rules, scalings, strict=True)):
            grads = grads_of(i, params, batch, scaling.loss_scale, bad if i == bad_loss else 0.0)
            grads, finite = rule.unscale(scaling, grads)
            true_grads.append(grads)
            new_scalings.append(rule.update(scaling, finite))
        updates, opt_state = tx.update(added(*true_grads), opt_state, params)
        return optax.apply_updates(params, updates), (*new_scalings, opt_state)

    params, (*scalings, opt_state) = run(step, (*(rule.init() for rule in rules), tx.init(initial_params())))
    assert_close(params, control(NETS))
    starts = [128, 1024]
    assert [s.loss_scale for s in scalings] == [start * (4 if i == bad_loss else 16) for i, start in enumerate(starts)]
    assert [int(s.total_notfinite) for s in scalings] == [int(i == bad_loss) for i in range(2)]
    assert amp.metrics(opt_state)["total_notfinite"] == 1


def test_several_losses_of_one_forward_pass_have_a_cotangent_each():
    params, (batch, *_) = initial_params(), batches()
    scales = jnp.float32([128, 1024])

    @jax.jit
    def both(params):
        _, backward = jax.vjp(lambda p: losses(p, *batch), params)
        zero = jnp.float32(0)
        return backward((scales[0], zero))[0], backward((zero, scales[1]))[0]

    for i, grads in enumerate(both(params)):
        expected = amp.grad(functools.partial(loss, i), loss_scale=scales[i])(params, *batch)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), grads, expected)


@pytest.mark.parametrize("skip", ["cond", "select"])
def test_an_overflow_somewhere_else_skips_and_is_counted(skip):
    tx = amp.dynamic_loss_scale(optax.adam(0.1), amp.LossScale(), skip=skip)
    params = {"w": jnp.ones(2)}
    state = tx.init(params)
    updates, after = tx.update({"w": jnp.ones(2)}, state, params, grads_finite=jnp.asarray(False))
    assert updates["w"].tolist() == [0, 0]
    jax.tree.map(np.testing.assert_array_equal, after.inner_state, state.inner_state)
    assert (after.loss_scale.loss_scale, after.loss_scale.total_notfinite) == (2**15, 1)
    _, own = tx.update({"w": jnp.full(2, jnp.inf)}, state, params, grads_finite=jnp.asarray(True))
    assert not own.loss_scale.last_finite


def test_a_scale_from_outside_unscales_instead_of_the_one_inside():
    tx = amp.dynamic_loss_scale(optax.chain(amp.unscale_and_check(), optax.sgd(1.0)), DISABLED)
    updates, state = tx.update(jnp.float32([8, 16]), tx.init(jnp.ones(2)), jnp.ones(2), loss_scale=8.0)
    assert updates.tolist() == [-1, -2]
    assert amp.metrics(state)["grad_norm"] == np.sqrt(np.float32(5))
    with pytest.raises(TypeError, match=r"`loss_scale` must be a scalar, got LossScaleState; read it .*get_loss_scale"):
        tx.update(jnp.ones(2), state, jnp.ones(2), loss_scale=RULE.init())


def test_one_inside_another_is_an_error():
    tx = amp.dynamic_loss_scale(optax.chain(amp.dynamic_loss_scale(optax.sgd(1.0)), optax.identity()))
    with pytest.raises(ValueError, match=r"inside another one, at `inner`\[0\].*wrap the whole optimizer once"):
        tx.init(jnp.ones(2))


# One loss of two parameters, each with an optimizer and its state.

PAIR = amp.dynamic_loss_scale(optax.sgd(0.1), amp.LossScale(growth_interval=1))
MATRIX = jnp.linspace(0.5, 1, 9).reshape(3, 3)


def pair_grads(f, g, **options):
    return amp.grad(lambda f, g: jnp.mean((MATRIX @ f @ g) ** 2), argnums=(0, 1), **options)(f, g)


def by_another_scale(states):
    grads = pair_grads(MATRIX, MATRIX, opt_state=states[0])
    return [PAIR.update(g, state, MATRIX) for g, state in zip(grads, states, strict=True)]


def by_the_other_one(states):
    return by_another_scale(states[::-1])


def by_a_scale_that_is_read_first(states):
    grads = pair_grads(MATRIX, MATRIX, loss_scale=amp.get_loss_scale(states[1]))
    return [PAIR.update(g, state, MATRIX) for g, state in zip(grads, states, strict=True)]


def with_the_scale_handed_on(states):
    scale = amp.get_loss_scale(states[0])
    grads = pair_grads(MATRIX, MATRIX, loss_scale=scale)
    return [PAIR.update(g, state, MATRIX, loss_scale=scale) for g, state in zip(grads, states, strict=True)]


def skipping_together(states):
    grads = pair_grads(MATRIX, MATRIX, opt_state=states[0])
    flag = amp.all_finite(grads)
    return [PAIR.update(g, state, MATRIX, grads_finite=flag) for g, state in zip(grads, states, strict=True)]


def with_their_own_scales(states):
    scale = jnp.minimum(*map(amp.get_loss_scale, states))
    grads = pair_grads(MATRIX, MATRIX, loss_scale=scale)
    grads = [g * (amp.get_loss_scale(state) / scale) for g, state in zip(grads, states, strict=True)]
    return [PAIR.update(g, state, MATRIX) for g, state in zip(grads, states, strict=True)]


def by_a_quotient(states):
    first, second = pair_grads(MATRIX, MATRIX, opt_state=states[0])
    second = second * (amp.get_loss_scale(states[1]) / amp.get_loss_scale(states[0]))
    return [PAIR.update(g, state, MATRIX) for g, state in zip((first, second), states, strict=True)]


def with_the_scale_of_the_first(states):
    state = amp.set_loss_scale(states[1], amp.get_loss_scale(states[0]))
    return by_another_scale([states[0], state])


def with_a_loss_each(states):
    grads = [pair_grads(MATRIX, MATRIX, opt_state=state)[i] for i, state in enumerate(states)]
    return [PAIR.update(g, state, MATRIX) for g, state in zip(grads, states, strict=True)]


def all_pairs_of_states():
    state = PAIR.init(MATRIX)
    lower = amp.set_loss_scale(state, 2.0**12)
    return [(state, state), (lower, state), (state, lower)]


AROUND = {
    "jit": lambda step, states: jax.jit(step)(states),
    "vmap": lambda step, states: jax.jit(jax.vmap(step))(jax.tree.map(lambda x: x[None], states)),
    "scan": lambda step, states: jax.lax.scan(
        lambda states, _: ([state for _, state in step(states)], None), [*states], length=2
    ),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("step", [by_another_scale, by_the_other_one, by_a_scale_that_is_read_first])
def test_the_scale_of_another_state_raises_with_the_names_of_both(step, around):
    names = r"`\S*\[\d\]\.loss_scale\.loss_scale`"
    message = rf"was multiplied by the loss scale {names}, but is divided by {names}.*loss_scale=.*grads_finite="
    with pytest.raises(ValueError, match=message) as raised:
        AROUND[around](step, all_pairs_of_states()[0])
    other, own = str(raised.value).split("`")[1], str(raised.value).split("`")[3]
    assert other != own
    if step is not by_another_scale:  # the second state has the scale
        return
    with pytest.raises(ValueError, match=message):
        amp.debug.check_loss_scaling(step)(all_pairs_of_states()[0])


def test_the_scale_of_a_state_that_went_through_a_loop_is_named():
    def step(critic, generator):
        def update(state, _):
            return PAIR.update(pair_grads(MATRIX, MATRIX, opt_state=state)[0], state, MATRIX)[1], None

        critic, _ = jax.lax.scan(update, critic, length=2)
        return PAIR.update(pair_grads(MATRIX, MATRIX, opt_state=critic)[0], generator, MATRIX)

    names = "`critic.loss_scale.loss_scale`, but is divided by `generator.loss_scale.loss_scale`"
    with pytest.raises(ValueError, match=names):
        jax.jit(step)(*all_pairs_of_states()[0])


@pytest.mark.parametrize(
    "step",
    [
        with_the_scale_handed_on,
        skipping_together,
        with_their_own_scales,
        by_a_quotient,
        with_the_scale_of_the_first,
        with_a_loss_each,
    ],
)
def test_one_loss_with_two_optimizers_is_right_while_their_scales_differ(step):
    want = [-0.1 * g for g in pair_grads(MATRIX, MATRIX)]
    pairs = all_pairs_of_states()
    for states in pairs[:1] if step is skipping_together else pairs:  # these stay equal
        for (updates, _), expected in zip(jax.jit(step)(states), want, strict=True):
            np.testing.assert_allclose(updates, expected, rtol=1e-5)
    amp.debug.check_loss_scaling(step)(pairs[1])


def test_states_that_skip_together_keep_equal_scales():
    states = all_pairs_of_states()[0]
    for bad in (0, np.inf, 0):

        def step(states, bad=bad):
            first, second = pair_grads(MATRIX, MATRIX, opt_state=states[0])
            flag = amp.all_finite((first + bad, second))
            return [
                PAIR.update(g, state, MATRIX, grads_finite=flag)[1]
                for g, state in zip((first + bad, second), states, strict=True)
            ]

        states = jax.jit(step)(states)
        assert amp.get_loss_scale(states[0]) == amp.get_loss_scale(states[1])
    assert amp.metrics(states[1])["total_notfinite"] == 1


def test_a_scale_that_is_an_argument_or_static_may_be_any_states():
    static = amp.dynamic_loss_scale(optax.sgd(0.1), amp.LossScale.static(64.0))

    def by_argument(scale, state):
        return PAIR.update(pair_grads(MATRIX, MATRIX, loss_scale=scale)[0], state, MATRIX)

    def of_equal_rules(states):
        grads = pair_grads(MATRIX, MATRIX, opt_state=states[0])
        return [static.update(g, state, MATRIX) for g, state in zip(grads, states, strict=True)]

    state = PAIR.init(MATRIX)
    jax.eval_shape(by_argument, amp.get_loss_scale(state), state)
    jax.eval_shape(of_equal_rules, [static.init(MATRIX), static.init(MATRIX)])
