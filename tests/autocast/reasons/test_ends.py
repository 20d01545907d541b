"""Where a reason for float32 ends: an ordinary network behind its cause is low precision."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

X, W, OTHER = jnp.ones((6, 8)), jnp.eye(8) / 2, jnp.ones((6, 8)) / 3

# Ways from what has the reason to a network, and how many products read it before it ends.
ONWARD = {
    "nothing": (lambda h: h, 1),
    "moved": (lambda h: h[::-1].reshape(3, 2, 8).reshape(6, 8), 1),
    "scaled": (lambda h: 0.1 * h, 1),
    "a sum with something else": (lambda h: h + OTHER, 1),
    "a difference": (lambda h: OTHER - h, 1),
    "a call": (jax.jit(lambda h: h * 1.0), 1),
    "a loop": (lambda h: lax.scan(lambda c, _: (0.5 * c, None), h, None, 3)[0], 1),
    "a product": (lambda h: h @ W, 1),
    "a product in a loop": (lambda h: lax.scan(lambda c, _: (c, jnp.tanh(h @ W)), 0.0, None, 2)[1][0], 1),
    "relu": (jax.nn.relu, 0),
    "gelu, which multiplies": (jax.nn.gelu, 1),
    "tanh": (jnp.tanh, 0),
    "a sigmoid": (jax.nn.sigmoid, 0),
    "a maximum": (lambda h: jnp.maximum(h, OTHER), 0),
    "a maximum of rows": (lambda h: h.reshape(3, 2, 8).max(1), 0),
    "a clip": (lambda h: jnp.clip(h, -1, 1), 0),
    "an absolute value": (jnp.abs, 0),
    "a sum of rows": (lambda h: h.reshape(3, 2, 8).sum(1), 0),
    "a norm": (jax.nn.standardize, 0),
    "a softmax": (jax.nn.softmax, 0),
}


def network(h, ws, act):
    for w in ws:
        h = act(h @ w)
    return h


@pytest.mark.parametrize("low", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("act", [jax.nn.relu, jax.nn.gelu, jnp.tanh])
@pytest.mark.parametrize("way", ONWARD)
def test_a_solution_ends_with_the_first_product_that_reads_it(way, act, low):
    onward, n = ONWARD[way]

    def fun(x, a, ws):
        return network(onward(jnp.linalg.solve(a, x.T).T), ws, act)

    rows = amp.explain(fun, low)(X, jnp.eye(8), [W] * 4).select(direction="forward", primitive="dot_general").rows
    got = [row.compute for row in rows]
    assert got == ["float32"] * n + [low] * (len(got) - n)
    assert len(got) in (4, 5)
