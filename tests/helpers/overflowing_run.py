"""A small net and four batches; tests put an overflow into the gradients of the third."""

import jax.numpy as jnp
import numpy as np

import jmp_amp as amp

RULE = amp.LossScale.torch(init_scale=128, growth_interval=1)
BAD_BATCH = 2


def initial_params(seed=0):
    rng = np.random.default_rng(seed)
    return [{"w": rng.normal(size=(8, 8)).astype(np.float32) / 3, "b": np.zeros(8, np.float32)} for _ in range(2)]


def batches():
    rng = np.random.default_rng(1)
    return [tuple(rng.normal(size=(2, 8, 8)).astype(np.float32)) for _ in range(4)]


def net(params, x):
    for layer in params:
        x = x @ layer["w"] + jnp.broadcast_to(layer["b"], x.shape)
    return x


def loss_fn(params, x, y):
    return jnp.mean((net(params, x) - y) ** 2)
