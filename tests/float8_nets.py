"""What the tests of float8 share: dtypes, random arrays and a net."""

import jax
import jax.numpy as jnp

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


def normal(*shape, seed=0, scale=1.0):
    return scale * jax.random.normal(jax.random.key(seed), shape)


def loss_fn(params, x):
    return jnp.mean((jax.nn.gelu(x @ params["w"]) @ params["v"]) ** 2)
