"""Where 64 bits are enabled: float64, complex and integer values beside float32 ones, which alone are cast."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxprs import equations, row

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

RNG = np.random.default_rng(0)
X, W = (RNG.normal(size=shape).astype(np.float32) / 2 for shape in ((4, 8), (8, 8)))
B = np.linspace(-1, 1, 8, dtype=np.float32)
OTHERS = {
    "float64": RNG.normal(size=(4, 8)) / 3,
    "complex128": RNG.normal(size=(4, 8)) + 1j / 3,
    "int64": RNG.integers(0, 4, size=(4, 8)),
    "uint8": RNG.integers(0, 4, size=(4, 8)).astype(np.uint8),
}


@pytest.fixture(autouse=True)
def x64():
    with jax.enable_x64(True):
        yield


def added(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]


def mapped(*xs):
    mesh, whole = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,)), PartitionSpec()
    return jax.shard_map(lambda *xs: lax.psum(xs, "rows"), mesh=mesh, in_specs=whole, out_specs=whole)(*xs)


@jax.custom_vjp
def doubled(*xs):
    return added(xs, xs)


doubled.defvjp(lambda *xs: (doubled(*xs), None), lambda _, cotangents: tuple(cotangents))

# What takes any number of arrays, each of any dtype, and returns as many.
SIDE_BY_SIDE = {
    "optimization_barrier": lambda *xs: lax.optimization_barrier(xs),
    "device_put": lambda *xs: jax.device_put(xs),
    "sort": lambda *xs: lax.sort(xs, num_keys=len(xs)),
    "reduce": lambda *xs: lax.reduce(xs, tuple(np.zeros((), x.dtype) for x in xs), added, (0,)),
    "psum": mapped,
    "cond": lambda *xs: lax.cond(jnp.sum(xs[0]) > 0, lambda *xs: list(xs), lambda *xs: added(xs, xs), *xs),
    "scan": lambda *xs: lax.scan(lambda c, x: (added(c, c), x), list(xs), xs, length=4),
    "while_loop": lambda *xs: lax.fori_loop(0, 2, lambda _, c: added(c, c), list(xs)),
    "jit": lambda *xs: jax.jit(lambda *xs: added(xs, xs))(*xs),
    "checkpoint": lambda *xs: jax.checkpoint(lambda *xs: added(xs, xs))(*xs),
    "custom_vjp": doubled,
}


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
@pytest.mark.parametrize("origin", ["product", "input"])
def test_what_stands_beside_a_float32_value_does_not_change_its_dtypes(name, origin):
    def decided(beside, low):
        def fun(x, *others):
            h = x @ W if origin == "product" else x
            first = jax.tree.leaves(SIDE_BY_SIDE[name](h, *others))[0]
            return (first + B) @ W, (x @ W) + first

        rows = [(e.primitive.name, row(e)) for e in equations(amp.autocast(fun, low), X, *beside)]
        return [each for each in rows if each[0] in ("add", "dot_general") and ("float32" in each[1] or low in each[1])]

    for low in ("float16", "bfloat16"):
        alone = decided([], low)
        for dtype, other in OTHERS.items():
            assert decided([other], low) == alone, dtype


MIXED = {
    "add": lambda h, t: h + t,
    "sub": lambda h, t: t - h,
    "mul": lambda h, t: h * t,
    "div": lambda h, t: t / (2 + jnp.abs(h)),
    "pow": lambda h, t: (2 + jnp.abs(h)) ** t,
    "where": lambda h, t: jnp.where(jnp.abs(t) > 1, h, t),
    "concatenate": lambda h, t: jnp.concatenate([h, t]),
    "stack": lambda h, t: jnp.stack([t, h]),
    "dot_general": lambda h, t: h @ t.T,
    "conv": lambda h, t: jnp.convolve(h[0], t[0]),
    "ranges": lambda h, t: jnp.minimum(jnp.maximum(h, t.real), 1),
    "there and back": lambda h, t: h.astype(t.dtype).real.astype(h.dtype) + B if t.dtype.kind in "fc" else h + B,
    "back": lambda h, t: h + t.real.astype(h.dtype),
    "a bias": lambda h, t: h + t.real[0].astype(h.dtype),
    "update": lambda h, t: lax.dynamic_update_slice(h, t[:2, :2].real.astype(h.dtype), (t[0, 0].real.astype(int), 0)),
    "gather": lambda h, t: h[jnp.abs(t).astype(int)],
    "take_along_axis": lambda h, t: jnp.take_along_axis(h, jnp.abs(t).astype(int), 1),
    "scatter": lambda h, t: h.at[jnp.arange(2)].set(t[:2].real.astype(h.dtype)),
    "scatter-add": lambda h, t: t.at[jnp.arange(2)].add(h[:2].astype(t.dtype)),
    "sum": lambda h, t: jnp.sum(h, 0, dtype=t.dtype if t.dtype.kind in "fc" else None) + t,
    "complex": lambda h, t: lax.complex(h, h) * t,
    "abs": lambda h, t: jnp.abs(h + t),
    "atan2": lambda h, t: jnp.arctan2(h, t.real),
    "top_k": lambda h, t: lax.top_k(h, 2)[1] + t[:, :2],
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.sweep(15)
def test_a_mixture_has_the_dtypes_and_the_values_of_plain_jax(name):
    def loss(x, t):
        mixture = MIXED[name](x @ W, t)
        return jnp.sum(jnp.abs(mixture.astype(complex) + 1) ** 2), mixture

    def ways(cast, x, t):
        return jax.grad(cast(loss), has_aux=True)(x, t), cast(jax.grad(loss, has_aux=True))(x, t)

    def mixtures(cast, x, others):
        return [ways(cast, x, t) for t in others]

    casts = [lambda f: f, functools.partial(amp.autocast, dtype="bfloat16")]
    want, got = jax.jit(lambda x, others: [mixtures(cast, x, others) for cast in casts])(X, list(OTHERS.values()))
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(x - y) <= 2**-5 * np.linalg.norm(y)
