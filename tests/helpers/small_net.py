"""Nets that several tests share: one that has each kind of product, and one with an inaccuracy planted in it."""

import jax
import jax.numpy as jnp

Shape = jax.ShapeDtypeStruct
WIDTH = 64
WEIGHTS = {"up": (4 * WIDTH, WIDTH), "bias": (WIDTH,), "kernel": (3, 3, WIDTH, WIDTH), "down": (WIDTH, 4 * WIDTH)}
PARAMS = {name: Shape(shape, jnp.float32) for name, shape in WEIGHTS.items()}
ARGS = PARAMS, Shape((4, 16, 16, 4 * WIDTH), jnp.float32)
PRODUCTS = 8
"""Products of the loss and its gradient: that of a gradient of the input is not there."""


def loss_fn(params, x):
    h = jax.nn.relu(x @ params["up"] + params["bias"])
    h = h - jnp.mean(h, -1, keepdims=True)
    h = jax.lax.conv_general_dilated(h, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.mean(jnp.square(h @ params["down"]))


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
