"""A VQ-VAE in Haiku: a codebook with moving averages in the state, and gradients that pass straight through."""

import haiku as hk
import jax
import jax.numpy as jnp
import optax


class VQVAE(hk.Module):
    def __call__(self, x, is_training):
        h = hk.Conv2D(16, 4, 2)(x)
        z = hk.Conv2D(8, 3)(jax.nn.relu(hk.Conv2D(32, 4, 2)(jax.nn.relu(h))))
        vq = hk.nets.VectorQuantizerEMA(8, num_embeddings=32, commitment_cost=0.25, decay=0.95)(z, is_training)
        h = jax.nn.relu(hk.Conv2D(32, 3)(vq["quantize"]))
        h = jax.nn.relu(hk.Conv2DTranspose(16, 4, 2)(h))
        out = hk.Conv2DTranspose(1, 4, 2)(h)
        error = jnp.mean((out - x) ** 2) / jnp.var(x)
        return error + vq["loss"], vq["perplexity"]


def main(steps):
    net = hk.transform_with_state(lambda x, is_training: VQVAE()(x, is_training))
    tx = optax.adam(2e-3)
    grid = jnp.arange(16) / 3
    phase = jax.random.uniform(jax.random.key(1), (16, 1, 1, 1)) * 6
    x = jnp.sin(phase + grid[:, None, None]) * jnp.cos(2 * phase + grid[None, :, None])

    def loss_fn(params, state, x):
        (loss, _), state = net.apply(params, state, None, x, is_training=True)
        return loss, state

    @jax.jit
    def step(params, state, opt_state, x):
        (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, state, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, loss

    params, state = net.init(jax.random.key(0), x, is_training=True)
    opt_state, losses = tx.init(params), []
    for _ in range(steps):
        params, state, opt_state, loss = step(params, state, opt_state, x)
        losses.append(loss)
    return losses
