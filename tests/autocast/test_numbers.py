"""A number in the code that the low dtype does not hold is exact: the op is float32, and rounds its result once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import dtypes
from rounding import EPSILON

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

RNG = np.random.default_rng(0)
EYE = jnp.eye(8)
OPS = {
    "a sum": lambda h, c: h + c,
    "a difference": lambda h, c: h - c,
    "a difference from it": lambda h, c: c - h,
    "a product": lambda h, c: c * h,
    "a quotient": lambda h, c: h / c,
    "a quotient of it": lambda h, c: c / h,
    "a maximum": lambda h, c: jnp.maximum(h, c),
    "a minimum": lambda h, c: jnp.minimum(h, c),
    "a bound": lambda h, c: jnp.clip(h, -abs(c), abs(c)),
    "a choice": lambda h, c: jnp.where(h > 0, h, c),
}
NUMBERS = 287.0, 0.1, -1 / 3, 2.001, 0.5, 8.0, -1.0, 0.0


def between_products(op):
    """Products with the identity around an op, which reads and writes 16 bits then, and is not rounded by them."""
    return lambda x: op(x @ EYE) @ EYE


def data(low):
    return [jnp.asarray(RNG.uniform(0.1, 4, size=(4, 8)) * RNG.choice([-1, 1], size=(4, 8)), low) for _ in range(2)]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("name", OPS)
def test_an_op_with_any_number_is_rounded_once_and_its_cotangent_too(low, name):
    (x, cotangent), numbers = data(low), [c for c in NUMBERS if c or name != "a quotient"]

    def of_all(cast, x, cotangent):
        funs = [functools.partial(OPS[name], c=np.float32(c)) for c in numbers]
        found = [jax.vjp(cast(fun), x) for fun in funs]
        return [(value, pull(cotangent)[0]) for value, pull in found]

    exact = of_all(lambda fun: fun, x.astype(jnp.float32), cotangent.astype(jnp.float32))
    want = jax.tree.map(lambda y: y.astype(low).astype(jnp.float32), exact)
    low_of = lambda fun: amp.autocast(between_products(fun), low)  # noqa: E731
    got = jax.jit(functools.partial(of_all, low_of))(x.astype(jnp.float32), cotangent.astype(jnp.float32))
    for c, (value, grad), (exact_value, exact_grad) in zip(numbers, got, want, strict=True):
        np.testing.assert_array_equal(value, exact_value, err_msg=f"{name}, {c}")
        if name == "a quotient of it":  # its slope is made of several ops
            np.testing.assert_allclose(grad, exact_grad, rtol=8 * EPSILON[low])
        else:
            np.testing.assert_array_equal(grad, exact_grad, err_msg=f"{name}, {c}")


@jax.custom_jvp
def with_tangent(h, c):
    return c * h


with_tangent.defjvp(lambda primals, tangents: (with_tangent(*primals), primals[1] * tangents[0]))


@jax.custom_vjp
def with_cotangent(h, c):
    return c * h


with_cotangent.defvjp(lambda h, c: (c * h, c), lambda c, g: (c * g, jnp.sum(g)))
KNOWN = jnp.float32(1.7)

# Ways to write a product with 1.7, which no 16 bits hold.
WAYS = {
    "a Python number": lambda h: 1.7 * h,
    "a whole number": lambda h: 4097 * h * 2.0**-12,
    "a scalar of NumPy": lambda h: np.float32(1.7) * h,
    "an array of no axes": lambda h: KNOWN * h,
    "an array of one element": lambda h: np.full((1, 1), 1.7, np.float32) * h,
    "an array of one number": lambda h: jnp.full((1, 8), 1.7) * h,
    "a number that is moved": lambda h: lax.broadcast(jnp.float32(1.7), (4, 1)) * h,
    "a number that is computed": lambda h: jnp.sqrt(jnp.float32(2.89)) * h,
    "an argument of a call": lambda h: jax.jit(lambda h, c: c * h)(h, 1.7),
    "the default of a call": lambda h: jax.jit(lambda h, c=1.7: c * h)(h),
    "a constant of a loop": lambda h: lax.scan(lambda c, x: (c, 1.7 * x), 0, h)[1],
    "what a loop closes over": lambda h: (lambda c: lax.map(lambda x: c * x, h))(jnp.float32(1.7)),
    "a while loop": lambda h: lax.fori_loop(0, 1, lambda _, x: 1.7 * x, h),
    "a branch": lambda h: lax.cond(h[0, 0] > 9, lambda h: h, lambda h: 1.7 * h, h),
    "an operand of a branch": lambda h: lax.cond(h[0, 0] > 9, lambda h, c: h, lambda h, c: c * h, h, 1.7),
    "a checkpoint": jax.checkpoint(lambda h: 1.7 * h),
    "a vmap": jax.vmap(lambda h: 1.7 * h),
    "a vmap of an argument": lambda h: jax.vmap(lambda h, c: c * h, (0, None))(h, 1.7),
    "a tangent of the user": lambda h: with_tangent(h, 1.7),
    "a cotangent of the user": lambda h: with_cotangent(h, 1.7),
    "a power of it": lambda h: 2.89**0.5 * h,
    "a function of jax.nn": lambda h: jax.nn.leaky_relu(h, 1.7),
}


@pytest.mark.parametrize("low", EPSILON)
def test_a_number_is_exact_however_it_is_written(low):
    x, cotangent = (each.astype(jnp.float32) for each in data(low))

    def of_all(x, cotangent, cast=lambda fun: fun):
        found = {name: jax.vjp(cast(between_products(fun)), x) for name, fun in WAYS.items()}
        return {name: (value, pull(cotangent)[0]) for name, (value, pull) in found.items()}

    got = jax.jit(functools.partial(of_all, cast=functools.partial(amp.autocast, dtype=low)))(x, cotangent)
    want = jax.tree.map(lambda y: y.astype(low).astype(jnp.float32), of_all(x, cotangent))
    differ = [name for name in WAYS if not all(map(np.array_equal, got[name], want[name]))]
    assert differ == []


@pytest.mark.parametrize("low", EPSILON)
def test_numbers_that_the_dtype_holds_and_choices_take_no_cast(low):
    x = data(low)[0].astype(jnp.float32)
    chosen = [(name, 287) for name in ("a maximum", "a minimum", "a bound", "a choice")]
    held = [(name, number) for name in OPS if name != "a quotient of it" for number in (0.5, 2, 8)]  # that is float32
    for name, number in [*held, *chosen]:
        fun = amp.autocast(between_products(functools.partial(OPS[name], c=number)), low)
        assert dtypes(fun, x, primitive="convert_element_type").count(f"{low} -> float32") == 1, (name, number)


@pytest.mark.parametrize("low", EPSILON)
def test_one_cast_up_and_one_down(low):
    x = data(low)[0].astype(jnp.float32)
    fun = amp.autocast(between_products(lambda h: 1.7 * h), low)
    assert len(dtypes(fun, x, primitive="convert_element_type")) == 6
    (row,) = amp.explain(between_products(lambda h: 1.7 * h), low)(x).select(direction="forward", primitive="mul").rows
    assert (row.why, row.inputs, row.compute, row.output) == ("number", ("float32", low), "float32", low)


@pytest.mark.parametrize("low", EPSILON)
def test_what_is_clipped_equals_its_bound(low):
    def share(x):
        return jnp.mean(jnp.clip(x @ EYE, -0.7, 0.7) >= 0.7)

    x = data(low)[0].astype(jnp.float32)
    assert amp.autocast(share, low)(x) == share(x)


@pytest.mark.parametrize("low", EPSILON)
def test_a_number_saves_no_more_for_the_backward_pass(low):
    def saved(number):
        def body(x, w):
            return jnp.tanh(number * (x @ w) + number) / number - number, None

        fun = amp.autocast(lambda w, x: lax.scan(body, x, w)[0], low, save="all")
        pull = jax.eval_shape(lambda *args: jax.vjp(fun, *args)[1], jnp.ones((3, 8, 8)), jnp.ones((4, 8)))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))

    assert saved(1.7) == saved(0.5)


def test_a_rule_for_a_primitive_is_all_that_it_says():
    fun = amp.autocast(between_products(lambda h: 1.7 * h), "bfloat16", rules={lax.mul_p: "lower"})
    assert dtypes(fun, jnp.ones((4, 8)), primitive="mul") == ["bfloat16 bfloat16 -> bfloat16"]
