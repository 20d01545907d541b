"""A dense layer, a norm, a convolution and another dense layer: small, and each kind of product is in it."""

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
