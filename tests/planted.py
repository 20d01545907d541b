"""A net with an inaccuracy where it was planted, for the tools that look for one."""

import jax
import jax.numpy as jnp


def network(*planted, by=64.0):
    """A loss of layers in scopes; the planted ones add and take off what rounds their result to a digit in float16."""

    def loss_fn(params, x):
        for name, w in params.items():
            with jax.named_scope(name):
                x = jnp.tanh(x @ w)
                if name in planted:
                    x = x @ (by + jnp.eye(len(w))) - x @ jnp.full(w.shape, by)
        return jnp.mean(jnp.square(x))

    return loss_fn


def arguments(layers, width):
    *keys, key = jax.random.split(jax.random.key(0), layers + 1)
    params = {f"layer_{i}": jax.random.normal(key, (width, width)) for i, key in enumerate(keys)}
    return params, jax.random.normal(key, (8, width))
