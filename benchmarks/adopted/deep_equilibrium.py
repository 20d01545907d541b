"""A deep equilibrium model: a layer is iterated to its fixed point, and differentiated by the implicit function."""

import functools

import jax
import jax.numpy as jnp
import optax

WIDTH, CLASSES = 48, 10


def fixed_point(fun, z, tolerance=1e-3, most=40):
    def proceeds(state):
        i, old, new = state
        return (jnp.linalg.norm(new - old) > tolerance * jnp.linalg.norm(new)) & (i < most)

    return jax.lax.while_loop(proceeds, lambda state: (state[0] + 1, state[2], fun(state[2])), (0, z, fun(z)))[2]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def equilibrium(layer, params, x):
    return fixed_point(lambda z: layer(params, x, z), jnp.zeros((len(x), WIDTH)))


def forward(layer, params, x):
    z = equilibrium(layer, params, x)
    return z, (params, x, z)


def backward(layer, kept, g):
    params, x, z = kept
    _, pull_z = jax.vjp(lambda z: layer(params, x, z), z)
    u = fixed_point(lambda u: g + pull_z(u)[0], jnp.zeros_like(g))
    return jax.vjp(lambda params, x: layer(params, x, z), params, x)[1](u)


equilibrium.defvjp(forward, backward)


def layer(params, x, z):
    h = jax.nn.relu(z @ params["up"])
    h = jax.nn.relu(x @ params["in"] + h @ params["down"] + z)
    return 0.7 * h / (1 + jnp.sqrt(jnp.mean(h**2, -1, keepdims=True)))


def loss_fn(params, x, labels):
    z = equilibrium(layer, params, x)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(z @ params["head"], labels))


def main(steps):
    keys = jax.random.split(jax.random.key(0), 6)
    sizes = {"in": (16, WIDTH), "up": (WIDTH, WIDTH), "down": (WIDTH, WIDTH), "head": (WIDTH, CLASSES)}
    params = {k: jax.random.normal(x, s) * s[0] ** -0.5 / 2 for x, (k, s) in zip(keys, sizes.items(), strict=False)}
    centers = jax.random.normal(keys[4], (CLASSES, 16))
    labels = jnp.arange(80) % CLASSES
    x = centers[labels] + 0.5 * jax.random.normal(keys[5], (80, 16))
    tx = optax.adam(3e-3)

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, labels)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state)
        losses.append(loss)
    return losses
