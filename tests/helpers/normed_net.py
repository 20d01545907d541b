"""A net with a norm, and its train step with a loss scale."""

import jax.numpy as jnp
import numpy as np
import optax

import jmp_amp as amp


def initial_params():
    rng = np.random.default_rng(0)
    return {
        "in": rng.normal(size=(4, 16)).astype(np.float32) / 2,
        "norm": np.ones(16, np.float32),
        "out": rng.normal(size=(16, 1)).astype(np.float32) / 4,
    }


def batch():
    x = np.random.default_rng(1).normal(size=(64, 4)).astype(np.float32)
    return x, np.sin(x.sum(1, keepdims=True))


def loss_fn(params, x, y):
    h = jnp.tanh(x @ params["in"])
    h = (h - h.mean(-1, keepdims=True)) / h.std(-1, keepdims=True) * params["norm"]
    return jnp.mean((h @ params["out"] - y) ** 2)


def train_step(loss_fn, tx):
    def step(params, state, x, y):
        loss, grads = amp.value_and_grad(loss_fn, loss_scale=amp.get_loss_scale(state))(params, x, y)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step
