"""What the tests of float8 share: dtypes, random arrays and a net."""

import jax
import jax.numpy as jnp
import numpy as np
from rounding import error

import jmp_amp as amp
from jmp_amp._jaxpr import equations_in, runs_of
from jmp_amp._products._float8 import FLOAT8_SCALE

EVERYWHERE = {"*": "float8"}  # products of every size
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


def normal(*shape, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).normal(size=shape), jnp.float32)


def float8(fun, **options):
    return amp.autocast(fun, "float8", rules=EVERYWHERE, **options)


def loss_fn(params, x):
    return jnp.mean((jax.nn.gelu(x @ params["w"]) @ params["v"]) ** 2)


def assert_agrees(low, fun, args, value, gradient):
    """Asserts that a function and its gradient are within these errors, relative to those of `fun`."""
    ways = low, fun, jax.grad(low), jax.grad(fun)
    got, want, got_grads, grads = jax.jit(lambda *args: [way(*args) for way in ways])(*args)
    assert error(got, want) < value
    assert error(got_grads, grads) < gradient


def scales_computed(jaxpr):
    """Returns how often scales of weights are computed; those in a `while`, 100 times."""
    found = [eqns for eqns in equations_in(jaxpr) if eqns[-1].primitive.name == FLOAT8_SCALE]
    return sum(runs_of(eqns) * 100 ** sum(eqn.primitive.name == "while" for eqn in eqns) for eqns in found)
