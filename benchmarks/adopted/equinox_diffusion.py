"""Score-based diffusion in Equinox: a mixer of patches that is told the time, and a weighted loss for each example."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import optax


class Mixer(eqx.Module):
    patches: eqx.nn.MLP
    channels: eqx.nn.MLP
    norms: list

    def __init__(self, n, width, key):
        keys = jax.random.split(key)
        self.patches = eqx.nn.MLP(n, n, 32, depth=1, key=keys[0])
        self.channels = eqx.nn.MLP(width, width, 64, depth=1, key=keys[1])
        self.norms = [eqx.nn.LayerNorm((width, n)), eqx.nn.LayerNorm((n, width))]

    def __call__(self, x):
        x = x + jax.vmap(self.patches)(self.norms[0](x))
        y = x.T
        return (y + jax.vmap(self.channels)(self.norms[1](y))).T


class Score(eqx.Module):
    embed: eqx.nn.Linear
    mixers: list
    out: eqx.nn.Linear

    def __init__(self, n, width, key):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Linear(2, width, key=keys[0])
        self.mixers = [Mixer(n, width, k) for k in keys[1:3]]
        self.out = eqx.nn.Linear(width, 1, key=keys[3])

    def __call__(self, t, y):
        inputs = jnp.stack([y, jnp.full_like(y, t)])
        x = jax.vmap(self.embed, 1, 1)(inputs)
        for mixer in self.mixers:
            x = mixer(x)
        return jax.vmap(self.out, 1, 1)(x)[0]


def single_loss(model, data, t, key):
    mean = data * jnp.exp(-0.5 * t)
    std = jnp.sqrt(jnp.maximum(1 - jnp.exp(-t), 1e-5))
    noise = jax.random.normal(key, data.shape)
    return (1 - jnp.exp(-t)) * jnp.mean((model(t, mean + std * noise) + noise / std) ** 2)


def batch_loss(model, data, key):
    t_key, noise_key = jax.random.split(key)
    t = jax.random.uniform(t_key, (len(data),), minval=0, maxval=10 / len(data))
    t = t + (10 / len(data)) * jnp.arange(len(data))
    return jnp.mean(jax.vmap(functools.partial(single_loss, model))(data, t, jax.random.split(noise_key, len(data))))


@eqx.filter_jit
def make_step(model, data, key, opt_state, tx):
    loss, grads = eqx.filter_value_and_grad(batch_loss)(model, data, key)
    updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return loss, eqx.apply_updates(model, updates), opt_state


def main(steps):
    model, tx = Score(32, 16, jax.random.key(0)), optax.adabelief(3e-3)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    phase = jax.random.uniform(jax.random.key(1), (64, 1)) * 6
    data = jnp.sin(phase + jnp.arange(32) / 4)
    losses = []
    for i in range(steps):
        loss, model, opt_state = make_step(model, data, jax.random.key(i), opt_state, tx)
        losses.append(loss)
    return losses
