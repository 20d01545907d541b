"""Rules of custom derivatives that close over values, hold references, log, or return another dtype."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.ode import odeint
from jaxprs import dtypes

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

X, W = jnp.eye(8) / 2 + 0.1, jnp.eye(8) / 4 + 0.1


@jax.custom_vjp
def closing_over(x):
    return jnp.sum(jnp.tanh(x @ W))


closing_over.defvjp(lambda x: (closing_over(x), x), lambda x, cotangent: (cotangent * jnp.cos(x @ W),))


def solved(x):
    return jnp.sum(odeint(lambda y, _: -(y @ W), x, jnp.array([0.0, 1.0])))


@pytest.mark.parametrize("name", ["closing over an array", pytest.param("odeint", marks=pytest.mark.slow)])
def test_second_derivatives_of_a_rule_that_closes_over_an_array(name):
    fun = {"closing over an array": closing_over, "odeint": solved}[name]

    def second(fun):
        return jax.jacrev(jax.grad(fun))

    ways = [fun, amp.autocast(fun), amp.autocast(jax.jit(fun))]
    want, *results = jax.jit(lambda x: [second(way)(x) for way in ways])(X)
    for got in results:
        np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-3)


def test_differentiating_what_a_rule_closes_over_is_an_error_as_without_autocast():
    def fun(x):
        @jax.custom_vjp
        def product(y):
            return jnp.sum(y @ x)

        product.defvjp(lambda y: (jnp.sum(y), y), lambda y, cotangent: (cotangent * y,))
        return product(X)

    for way in (jax.jit(fun), amp.autocast(jax.jit(fun)), jax.jit(amp.autocast(fun))):
        with pytest.raises(Exception, match="closed-over value"):
            jax.grad(way)(W)


@jax.custom_vjp
def looked_at(x, ref):
    return x


def look(ref, cotangent):
    ref[...] = cotangent
    return cotangent, None


looked_at.defvjp(lambda x, ref: (x, ref), look)


@pytest.mark.parametrize("around", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
def test_a_reference_gets_the_gradient_that_a_rule_writes_to_it(around):
    def loss(x, ref):
        return jnp.sum(jnp.tanh(looked_at(x @ W, ref)))

    def seen(fun):
        ref = jax.new_ref(jnp.zeros_like(X))
        return around(jax.grad(fun))(X, ref), ref[...]

    for got, want in zip(seen(amp.autocast(loss)), seen(loss), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-2)
    ref = jax.new_ref(jnp.zeros_like(X))
    assert dtypes(lambda x: amp.autocast(loss)(x, ref), X, primitive="dot_general") == ["float16 float16 -> float16"]


@pytest.mark.skipif(not hasattr(jax.custom_vjp, "defvjp_with_logs"), reason="JAX logs backward passes since 0.11")
def test_a_backward_pass_keeps_its_logs():
    @jax.custom_vjp
    def fun(x):
        return jnp.sum(x @ W)

    def backward(x, cotangent):
        return (cotangent * (x @ W),), {"norm": jnp.linalg.norm(x)}

    fun.defvjp_with_logs(lambda x: (fun(x), x), backward)
    results = [jax.vjp(way, X)[1].with_logs(1.0) for way in (fun, amp.autocast(fun), amp.autocast(jax.jit(fun)))]
    for (gradient,), logs in results[1:]:
        np.testing.assert_allclose(gradient, results[0][0][0], rtol=1e-2)
        np.testing.assert_allclose(logs["norm"], results[0][1]["norm"], rtol=1e-2)


def test_a_rule_may_return_float32_for_a_bfloat16_operand():
    @jax.custom_vjp
    def fun(x, y):
        return jnp.sum(x.astype(jnp.float32) * (y @ y))

    def backward(y, cotangent):
        return cotangent * (y @ y) * (1 + 2**-10), cotangent * y

    fun.defvjp(lambda x, y: (fun(x, y), y), backward)
    low = X.astype(jnp.bfloat16)
    got, want = (jax.vjp(lambda x, way=way: way(x, X), low)[1](1.0)[0] for way in (amp.autocast(fun, "float16"), fun))
    assert got.dtype == want.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=1e-3)  # bfloat16 would be off by 2e-3


Zero = jax.custom_derivatives.SymbolicZero
scan_twice = functools.partial(jax.lax.scan, xs=None, length=2)
TAKING_ZEROS = {
    "one after another": lambda fun, x: fun(x, fun(x, 1.0)[1])[0],
    "under vmap": lambda fun, x: jnp.sum(jax.vmap(lambda x: fun(x, fun(x, 1.0)[1])[0])(x)),
    "in a scan": lambda fun, x: scan_twice(lambda x, _: (fun(x, fun(x, 1.0)[1])[0], None), x)[0],
}


@pytest.mark.parametrize("name", TAKING_ZEROS)
def test_a_result_whose_tangent_is_zero_passes_symbolic_zeros_on(name):
    def fun(x, y):
        return x @ W, y, jnp.int32(3)

    def rule(primals, tangents):
        assert isinstance(tangents[1], Zero)
        return fun(*primals), (tangents[0] @ W, tangents[1], np.zeros((), jax.dtypes.float0))

    with_rule = jax.custom_jvp(fun)
    with_rule.defjvp(rule, symbolic_zeros=True)

    def loss(x, way):
        return jnp.sum(TAKING_ZEROS[name](way, x))

    want = jax.grad(loss)(X, with_rule)
    for way in (amp.autocast(with_rule), amp.autocast(jax.jit(with_rule))):
        np.testing.assert_allclose(jax.grad(loss)(X, way), want, rtol=1e-2)
    np.testing.assert_allclose(jax.grad(amp.autocast(loss))(X, with_rule), want, rtol=1e-2)


@jax.custom_vjp
def of_two(ref, other):
    return jnp.sum(ref[...] @ other[...])


of_two.defvjp(lambda ref, other: (of_two(ref, other), None), lambda _, cotangent: (None, None))


def test_errors_of_references_name_the_arguments():
    ref = jax.new_ref(X)
    for way in (of_two, amp.autocast(of_two)):
        with pytest.raises(ValueError, match="ref and other"):
            jax.vjp(way, ref, ref)
    for way in (jax.jit, lambda fun: jax.jit(amp.autocast(fun)), amp.autocast):
        with pytest.raises(ValueError, match="passed in as the argument ref"):
            way(lambda x, ref: (x @ x, ref))(X, ref)
