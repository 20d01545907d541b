"""What users do to gradients between the backward pass and the update, in float16 as in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from overflowing_run import BAD_BATCH, RULE, batches, initial_params, loss_fn, net

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")


def train(loss_fn, tx, get_scale=lambda state: 1.0, skipped=()):
    """Four batches of the standard rig; at the third an `inf` is put into the weight gradient of the second layer."""

    @jax.jit
    def step(params, state, batch, bad):
        grads = amp.grad(loss_fn, loss_scale=get_scale(state))(params, *batch)
        grads[1]["w"] = grads[1]["w"].at[0, 0].add(bad)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = initial_params()
    state = tx.init(params)
    for i, batch in enumerate(batches()):
        if i not in skipped:
            params, state = step(params, state, batch, np.float32(np.inf if i == BAD_BATCH else 0))
    return params, state


def check(loss_fn, inner, control, scaled_loss_fn=None, **tolerance):
    """Compares a scaled run with the float32 one that skips the bad batch by hand."""
    expected, _ = train(loss_fn, control, skipped=[BAD_BATCH])
    params, state = train(scaled_loss_fn or loss_fn, amp.dynamic_loss_scale(inner, RULE), amp.get_loss_scale)
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), params, expected)
    assert amp.get_loss_scale(state) == 512
    assert amp.metrics(state)["total_notfinite"] == 1


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.5),
    "adam": lambda: optax.adam(0.01),
    "adamw": lambda: optax.adamw(0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_autocast_with_scaling_is_close_to_float32(name):
    optimizer = OPTIMIZERS[name]()
    check(loss_fn, optimizer, optimizer, amp.autocast(loss_fn), atol=1e-3, rtol=1e-3)


BEHIND = {
    "each value": lambda: optax.clip(0.05),
    "each leaf's root mean square": lambda: optax.clip_by_block_rms(0.02),
    "each unit, by its weights": lambda: optax.adaptive_grad_clip(0.05),
    "global norm": lambda: optax.clip_by_global_norm(0.2),
    "centred": lambda: optax.centralize(),
    "noise": lambda: optax.add_noise(eta=0.1, gamma=0.55, key=7),
}


@pytest.mark.parametrize("name", BEHIND)
def test_what_stands_behind_the_unscaling_sees_true_gradients(name):
    # The noise of the batch behind the overflow too: what makes it is part of the state that stays.
    clip, sgd = BEHIND[name](), optax.sgd(0.5)
    inner = optax.chain(amp.unscale_and_check(), clip, sgd)
    check(loss_fn, inner, optax.chain(clip, sgd), atol=1e-5, rtol=1e-5)


def test_scaled_gradients_are_clipped_at_a_scaled_norm():
    @jax.jit
    def step(params, state, batch):
        scale = amp.get_loss_scale(state)
        grads = amp.grad(loss_fn, loss_scale=scale)(params, *batch)
        grads, _ = optax.clip_by_global_norm(0.2 * scale).update(grads, optax.EmptyState())
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    sgd = optax.sgd(0.5)
    tx = amp.dynamic_loss_scale(sgd, RULE)
    params, state = initial_params(), tx.init(initial_params())
    for batch in batches():
        params, state = step(params, state, batch)
    control = optax.chain(optax.clip_by_global_norm(0.2), sgd)
    plain, plain_state = initial_params(), control.init(initial_params())
    for batch in batches():
        updates, plain_state = control.update(jax.grad(loss_fn)(plain, *batch), plain_state, plain)
        plain = optax.apply_updates(plain, updates)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), params, plain)


def with_penalty(loss_fn, scale):
    """The norm of the gradients is part of the loss; `scale` only keeps the inner gradients from underflow."""

    def penalised(params, x, y):
        loss, grads = amp.value_and_grad(loss_fn, loss_scale=scale)(params, x, y)
        return loss + optax.tree.norm(jax.tree.map(lambda g: g / scale, grads))

    return penalised


@pytest.mark.parametrize("scale", [1.0, 2.0**7])
def test_a_penalty_on_gradients_of_parameters_by_double_backward(scale):
    sgd = optax.sgd(0.1)
    low = with_penalty(amp.autocast(loss_fn), scale)
    check(with_penalty(loss_fn, 1.0), sgd, sgd, low, atol=1e-3, rtol=1e-3)


def test_a_penalty_on_gradients_of_inputs_as_in_a_wasserstein_gan():
    def critic(params, x):
        return jnp.tanh(net(params, x)).sum()

    def critic_loss(params, real, fake):
        slopes = jax.vmap(jax.grad(critic, argnums=1), (None, 0))(params, 0.5 * (real + fake))
        penalty = jnp.mean((jnp.sqrt(jnp.sum(slopes**2, axis=-1) + 1e-12) - 1) ** 2)
        return critic(params, fake) / 8 - critic(params, real) / 8 + 10 * penalty

    sgd = optax.sgd(0.01)
    check(critic_loss, sgd, sgd, amp.autocast(critic_loss), atol=1e-3, rtol=2e-3)


def test_inner_gradients_that_float16_flushes_to_zero_survive_with_a_scale_inside():
    # d loss / d w = 2 w x^2: below float16's smallest number for this x.
    def tiny(w, x):
        return jnp.sum(jnp.square(w @ x)) * 1e-10

    w, x = np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)
    low = amp.autocast(tiny)
    expected = optax.tree.norm(jax.grad(tiny)(w, x))
    assert optax.tree.norm(jax.grad(low)(w, x)) == 0
    penalty = optax.tree.norm(amp.grad(low, loss_scale=2.0**16)(w, x) / 2**16)
    np.testing.assert_allclose(penalty, expected, rtol=1e-2)


def test_evaluation_between_steps_leaves_no_cast_behind():
    # torch caches casts of weights, which an evaluation without gradients once poisoned; here there is no cache.
    low, tx = amp.autocast(loss_fn), amp.dynamic_loss_scale(optax.sgd(0.5), RULE)

    def run(evaluate):
        params, state = initial_params(), tx.init(initial_params())
        step = jax.jit(lambda params, scale, batch: amp.grad(low, loss_scale=scale)(params, *batch))
        for batch in batches():
            if evaluate:
                jax.jit(low)(params, *batch)
            updates, state = tx.update(step(params, amp.get_loss_scale(state), batch), state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    jax.tree.map(np.testing.assert_array_equal, run(evaluate=True), run(evaluate=False))
