"""autocast among JAX's transformations, either way round: what comes out is what comes out without it."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

X, W, B = jnp.linspace(-1, 1, 32).reshape(4, 8), jnp.eye(8) + 0.1, jnp.linspace(0, 1, 8)


def loss(w):
    return jnp.sum(jax.nn.softplus(X @ w + B) ** 2)


def double(x):
    def kernel(source, target):
        target[...] = 2 * source[...]

    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def square_root(a):
    def newton(f, y):
        return lax.fori_loop(0, 20, lambda _, y: y - f(y) / (2 * y), y)

    return lax.custom_root(lambda y: y**2 - a, 1.0, newton, lambda g, y: y / g(1.0))


# `around` is what stands outside of `autocast`, `inside` what it is given.
OUTSIDE = {
    "hessian": lambda around: around(loss, jax.hessian)(W),
    "jacfwd": lambda around: around(loss, jax.jacfwd)(W),
    "jacrev of jacfwd": lambda around: around(loss, lambda f: jax.jacrev(jax.jacfwd(f)))(W),
    "linearize": lambda around: around(loss, lambda f: lambda w: jax.linearize(f, w)[1](w))(W),
    "jvp": lambda around: around(loss, lambda f: lambda w: jax.jvp(f, (w,), (w,)))(W),
    "linear_transpose": lambda around: around(lambda x: x @ W, lambda f: lambda x: jax.linear_transpose(f, x)(x))(X),
    "vmap with a named axis": lambda around: around(
        lambda x: lax.pmean(x @ W, "i") - lax.axis_index("i"), lambda f: jax.vmap(f, axis_name="i")
    )(X),
    "pmap": lambda around: around(
        lambda x: lax.psum(jnp.sum(x @ W), "i"), lambda f: jax.pmap(f, axis_name="i", devices=jax.devices()[:4])
    )(1 + X[:, None]),
    "scan of a gradient": lambda around: around(
        jax.grad(loss), lambda f: lambda w: lax.scan(lambda w, _: (w - 0.01 * f(w), None), w, length=3)[0]
    )(W),
    "remat": lambda around: around(loss, lambda f: jax.grad(jax.checkpoint(f)))(W),
}

INSIDE = {
    "pallas_call": lambda x: double(x @ W) @ W,
    "custom_root": lambda x: square_root(4.0 + x[0, 0] ** 2),
    "linear_solve": lambda x: jax.scipy.sparse.linalg.cg(lambda v: (3 * W) @ v, x[0])[0],
    "reduce": lambda x: lax.reduce(x @ W, jnp.float32(0), lambda a, b: a + b, (0,)),
    "callback": lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct((4, 8), jnp.float32), x @ W),
}


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("way", ["outside", "inside"])
def test_composes(name, way):
    def plain(f, transform):
        return transform(f)

    def autocast(f, transform):
        return transform(amp.autocast(f)) if way == "outside" else amp.autocast(transform(f))

    # One program, since most of the time goes into compiling; a `pmap` in a `jit` is not meant to be.
    around = (lambda fun: fun) if name == "pmap" else jax.jit
    got, want = around(lambda: (OUTSIDE[name](autocast), OUTSIDE[name](plain)))()
    chex.assert_trees_all_equal_shapes_and_dtypes(got, want)
    chex.assert_trees_all_close(got, want, atol=2e-2 * float(jnp.max(jnp.abs(jax.tree.leaves(want)[0]))))


@pytest.mark.parametrize("name", INSIDE)
def test_contains(name):
    got, want = jax.jit(lambda x: (amp.autocast(INSIDE[name])(x), INSIDE[name](x)))(X)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, atol=2e-2)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("around", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_shardings_and_constraints_survive(kind, around):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind), devices=jax.devices()[:4])

    def loss(w, b, x):
        h = jnp.tanh((x @ w + b) * 2)
        if kind is AxisType.Explicit:
            h = jax.sharding.reshard(h, P("data", None))
        else:
            h = lax.with_sharding_constraint(h, NamedSharding(mesh, P("data", None)))
        return jnp.sum(h)

    with jax.set_mesh(mesh):
        specs = P(None, "model"), P("model"), P("data", None)
        args = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((W, B, X), specs, strict=True)]
        want = around(jax.grad(loss, (0, 1)))(*args)
        got = around(jax.grad(amp.autocast(loss), (0, 1)))(*args)
    assert [g.sharding.spec for g in got] == [g.sharding.spec for g in want]
    chex.assert_trees_all_close(got, want, atol=1e-2)


def test_exports_with_a_symbolic_batch():
    shape = jax.ShapeDtypeStruct(export.symbolic_shape("n, 8"), jnp.float32)
    grad = jax.grad(amp.autocast(lambda w, x: jnp.mean(jax.nn.softmax(x @ w + B) ** 2)))
    exported = export.export(jax.jit(grad))(jax.ShapeDtypeStruct((8, 8), jnp.float32), shape)
    chex.assert_trees_all_close(exported.call(W, X), grad(W, X), atol=1e-3)


def test_float64_is_untouched_and_float32_beside_it_cast():
    with jax.enable_x64(True):
        wide = W.astype(jnp.float64)
        np.testing.assert_array_equal(amp.autocast(loss)(wide), loss(wide))
        jaxpr = str(jax.make_jaxpr(amp.autocast(lambda w, v: (w @ w, v @ v)))(wide, W))
    assert "f64[8,8] = dot_general" in jaxpr
    assert "f16[8,8] = dot_general" in jaxpr


class TestSymbolicZeros:
    """A rule that asks for them sees which operands are differentiated, as without autocast."""

    def test_of_custom_vjp(self):
        seen = []

        @jax.custom_vjp
        def product(x, y):
            return x * y

        def forward(x, y):
            seen.append((x.perturbed, y.perturbed))
            return x.value * y.value, y.value

        product.defvjp(forward, lambda y, g: (g * y, None), symbolic_zeros=True)

        def loss(x, y):
            return jnp.sum(product(x @ W, y))

        want = jax.grad(loss)(X, X)
        for grad in (jax.grad(amp.autocast(loss)), amp.autocast(jax.grad(loss)), jax.jit(jax.grad(amp.autocast(loss)))):
            np.testing.assert_allclose(grad(X, X), want, atol=1e-2)
        assert set(seen) == {(True, False)}

    def test_of_the_cotangents_of_custom_vjp(self):
        seen = []

        @jax.custom_vjp
        def two(x):
            return x, 2 * x

        def backward(_, cotangents):
            seen.append(isinstance(cotangents[1], SymbolicZero))
            return (cotangents[0],)

        two.defvjp(lambda x: (two(x.value), None), backward, symbolic_zeros=True)
        grad = jax.grad(amp.autocast(lambda x: jnp.sum(two(x @ W)[0])))
        np.testing.assert_allclose(grad(X), jnp.ones((4, 8)) @ W.T, atol=1e-2)
        assert seen == [True]

    def test_of_custom_jvp(self):
        seen = []

        @jax.custom_jvp
        def product(x, y):
            return x @ y

        def rule(primals, tangents):
            seen.append(isinstance(tangents[1], SymbolicZero))
            return primals[0] @ primals[1], tangents[0] @ primals[1]

        product.defjvp(rule, symbolic_zeros=True)

        def loss(x, y):
            return jnp.sum(product(x, y))

        want = jax.grad(loss)(X, W)
        for grad in (jax.grad(amp.autocast(loss)), amp.autocast(jax.grad(loss))):
            np.testing.assert_allclose(grad(X, W), want, atol=1e-2)
        assert set(seen) == {True}


def test_a_backward_rule_that_computes_the_forward_pass_again_rounds_as_it_did():
    # As checkpointed loops of solvers do; one that took other steps would have the gradient of another trajectory.
    def layer(x, w, b):
        return jnp.tanh(x @ w + b)

    again = jax.custom_vjp(layer)
    again.defvjp(
        lambda *args: (layer(*args), args),
        lambda saved, ct: (jnp.zeros_like(saved[0]), jnp.zeros_like(saved[1]), layer(*saved)),
    )
    shapes = [(8,), (8, 8), (8,)]
    args = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    result, pull = jax.vjp(amp.autocast(again), *args)
    assert result.tolist() == pull(jnp.ones(8))[2].tolist()
