"""Is a program as close to float32 under autocast as by hand? By hand, products alone are rounded to 16 bits.

For programs written in the tests, which take the product that they use as their first argument. The bound is the error
by hand, so it holds for ill-conditioned programs too, and no tolerance is chosen. Models of libraries: `agreement`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jmp_amp as amp

EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def rounded(low, x, w):
    return jnp.dot(x.astype(low), w.astype(low)).astype(jnp.float32)


def error(got, want):
    """The norm of the difference, relative to that of `want`, over all leaves, in float64."""
    got, want = (np.concatenate([np.ravel(np.float64(x)) for x in jax.tree.leaves(tree)]) for tree in (got, want))
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def further_than_by_hand(program, args, low, scale=1.0, has_gradient=True):
    """Returns the errors that are more than four times those by hand, which are named beside them.

    Of the value, and of the gradient of a weighted sum of the results, times `scale`, taken outside and inside of
    autocast. Four times, because what stands between two products is low as well under autocast.
    """
    exact = _ways(functools.partial(program, jnp.dot), lambda f: f, scale, has_gradient)(*args)
    hand = _ways(functools.partial(program, functools.partial(rounded, low)), lambda f: f, scale, has_gradient)(*args)
    got = _ways(functools.partial(program, jnp.dot), functools.partial(amp.autocast, dtype=low), scale, has_gradient)
    kinds = ("value", "gradient of autocast", "autocast of gradient")
    pairs = {
        kind: (error(x, want), error(y, want)) for kind, x, y, want in zip(kinds, got(*args), hand, exact, strict=False)
    }
    far = {kind: pair for kind, pair in pairs.items() if not pair[0] <= max(4 * pair[1], 2 * EPSILON[low])}
    return [f"{kind}: {here:.1e}, by hand {by_hand:.1e}" for kind, (here, by_hand) in far.items()]


def _ways(fun, cast, scale, has_gradient):
    def loss(*args):
        leaves = jax.tree.leaves(fun(*args))
        return scale * sum(jnp.sum(y * (2 + jnp.cos(jnp.arange(y.size))).reshape(y.shape)) for y in leaves)

    inside, outside = cast(jax.grad(loss)), jax.grad(cast(loss))
    ways = [cast(fun), *([outside, inside] if has_gradient else [])]
    return jax.jit(lambda *args: [way(*args) for way in ways])
