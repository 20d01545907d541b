"""A neural stochastic differential equation: Euler-Maruyama over 60 steps, and the moments of paths as the loss."""

import jax
import jax.numpy as jnp
import optax

WIDTH, STEPS, DT = 32, 60, 1 / 60


def mlp(params, x):
    for w, b in params[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def init(key, *sizes):
    keys = jax.random.split(key, len(sizes))
    pairs = zip(keys, sizes[:-1], sizes[1:], strict=False)
    return [(jax.random.normal(k, (n, m)) * n**-0.5, jnp.zeros(m)) for k, n, m in pairs]


def paths(params, noise):
    def step(carry, dw):
        t, y = carry
        ty = jnp.concatenate([jnp.full((len(y), 1), t), y], -1)
        drift, diffusion = mlp(params["drift"], ty), jax.nn.softplus(mlp(params["diffusion"], ty))
        y = y + drift * DT + diffusion * dw * jnp.sqrt(DT)
        return (t + DT, y), y[:, 0]

    y = jnp.broadcast_to(params["start"], (noise.shape[1], 4))
    return jax.lax.scan(step, (0.0, y), noise)[1]


def loss_fn(params, noise, moments):
    y = paths(params, noise)
    mean, std = jnp.mean(y, 1), jnp.std(y, 1)
    return jnp.mean((mean - moments[0]) ** 2) + jnp.mean((std - moments[1]) ** 2)


def main(steps):
    keys = jax.random.split(jax.random.key(0), 3)
    params = {"drift": init(keys[0], 5, WIDTH, 4), "diffusion": init(keys[1], 5, WIDTH, 4), "start": jnp.zeros(4)}
    t = jnp.arange(1, STEPS + 1) * DT
    moments = jnp.stack([jnp.sin(3 * t), 0.3 * jnp.sqrt(t)])  # of the data
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

    @jax.jit
    def step(params, opt_state, key):
        noise = jax.random.normal(key, (STEPS, 128, 4))
        loss, grads = jax.value_and_grad(loss_fn)(params, noise, moments)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for key in jax.random.split(keys[2], steps):
        params, opt_state, loss = step(params, opt_state, key)
        losses.append(loss)
    return losses
