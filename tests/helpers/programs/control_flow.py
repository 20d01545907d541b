"""A layer in every way to call it: in calls, loops, branches, recomputation and custom derivatives."""

import jax
import jax.numpy as jnp
from jax import lax

X, W, B = jnp.ones((4, 8)) / 8, jnp.eye(8), jnp.zeros(8)


def layer(x, w=W, b=B):
    return jnp.tanh(x @ w + b)


def scan_layers(x):
    return lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack([W] * 3))[0]


@jax.custom_jvp
def doubled(x):
    return 2 * (x @ W)


@doubled.defjvp
def _(primals, tangents):
    # A rule that is not the derivative, so that a lost rule is seen.
    return doubled(*primals), 10 * (tangents[0] @ W)


@jax.custom_vjp
def clipped(x, n):
    return jnp.tanh(x @ W) * n, n


def clipped_forward(x, n):
    y = jnp.tanh(x @ W)
    return (y * n, n), (x, y, n)


def clipped_backward(residuals, cotangents):
    # Not the derivative, so that a lost rule is seen.
    _, y, n = residuals
    return 10 * ((cotangents[0] * (1 - y**2)) @ W) * n, None


clipped.defvjp(clipped_forward, clipped_backward)


def psum_of_shards(x):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    return jax.shard_map(lambda x: lax.pmean(layer(x), "data") + layer(x), mesh=mesh, in_specs=spec, out_specs=spec)(x)


PROGRAMS = {
    "jit": lambda x: jax.jit(layer)(x),
    "nested jit": lambda x: jax.jit(lambda x: jax.jit(layer)(x))(x),
    "scan": scan_layers,
    "reverse scan": lambda x: lax.scan(lambda x, w: (layer(x, w), None), x, jnp.stack([W] * 3), reverse=True)[0],
    "while": lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, layer(c[1])), (0, x))[1],
    "fori_loop": lambda x: lax.fori_loop(0, 3, lambda _, x: layer(x), x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, layer, lambda x: x @ W, x),
    "switch": lambda x: lax.switch(1, [layer, layer, lambda x: x], x),
    "remat": lambda x: jax.checkpoint(layer)(x),
    "remat with policy": lambda x: jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_saveable)(x),
    "remat in scan": lambda x: lax.scan(lambda x, w: (jax.checkpoint(layer)(x, w), None), x, jnp.stack([W] * 3))[0],
    "scan in remat": lambda x: jax.checkpoint(scan_layers)(x),
    "custom_jvp": doubled,
    "custom_vjp": lambda x: clipped(x, 2)[0],
    "custom_vjp in scan": lambda x: lax.scan(lambda x, _: (clipped(x, 2)[0], None), x, None, length=2)[0],
    "custom_vjp in remat": lambda x: jax.checkpoint(lambda x: clipped(x @ W, 2)[0])(x),
    "shard_map": psum_of_shards,
    "relu": lambda x: jax.nn.relu(x @ W),
    "silu": lambda x: jax.nn.silu(x @ W),
    "vmap": lambda x: jax.vmap(layer)(x),
}
BACKWARD = sorted(set(PROGRAMS) - {"while", "custom_jvp"})
