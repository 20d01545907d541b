"""What a loop adds up is float32, in a carry or unrolled; the products it adds, and states replaced whole, are low."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accumulators import PROGRAMS, ROWS, weight
from jax import lax
from jaxprs import equations, row
from rounding import EPSILON, further_than_by_hand

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

LOW, FULL = "float16 float16 -> float16", "float32 float32 -> float32"


@pytest.mark.sweep(27)
@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("name", PROGRAMS)
def test_is_as_accurate_as_products_rounded_by_hand(name, low):
    args = weight(name), ROWS
    assert not further_than_by_hand(PROGRAMS[name], args, low, has_gradient="while" not in name)


X, W, EYE = jnp.ones((8, 8)) / 4, jnp.eye(8) / 2, jnp.eye(8)
STEPS = 4


def by_scan(body, init, xs):
    return lax.scan(lambda c, x: (body(c, x), None), init, xs)[0]


def by_fori_loop(body, init, xs):
    return lax.fori_loop(0, len(xs), lambda i, c: body(c, xs[i]), init)


def by_while_loop(body, init, xs):
    return lax.while_loop(lambda c: c[0] < len(xs), lambda c: (c[0] + 1, body(c[1], xs[c[0]])), (0, init))[1]


def unrolled(body, init, xs):
    for x in xs:
        init = body(init, x)
    return init


LOOPS = {f.__name__: f for f in (by_scan, by_fori_loop, by_while_loop, unrolled)}
CARRIES = {"scan", "while"}


@jax.custom_jvp
def added(c, p):
    return c + p


added.defjvp(lambda primals, tangents: (added(*primals), tangents[0] + tangents[1]))

# How something is added to the carry.
SUMS = {
    "add": lambda c, p: c + p,
    "add from the left": lambda c, p: p + c,
    "sub": lambda c, p: c - p,
    "sub from a product": lambda c, p: p - c,
    "two terms": lambda c, p: c + p + p.T,
    "towards a product": lambda c, p: c + 0.1 * (p - c),
    "where": lambda c, p: jnp.where(p > 0, c + p, c),
    "one row": lambda c, p: c.at[1].set(c[1] + p[1]),
    "jit": jax.jit(lambda c, p: c + p),
    "checkpoint": jax.checkpoint(lambda c, p: c + p),
    "cond": lambda c, p: lax.cond(p[0, 0] > 0, lambda c, p: c + p, lambda c, p: c, c, p),
    "scan in the loop": lambda c, p: lax.scan(lambda c, p: (c + p, None), c, p[None])[0],
    "custom_jvp": added,
}
# What happens to the carry besides.
PATHS = {
    "nothing": lambda c: c,
    "decay": lambda c: 0.9 * c,
    "decay by a gate": lambda c: jax.nn.sigmoid(c @ W) * c,
    "negative": jnp.negative,
    "clip": lambda c: jnp.clip(c, -5, 5),
    "where": lambda c: jnp.where(EYE > 0, c, 0),
}
MOVES = {
    "nothing": lambda c: c,
    "reshape": lambda c: c.reshape(2, 32).reshape(8, 8),
    "transpose": jnp.transpose,
    "roll": lambda c: jnp.roll(c, 1, 0),
    "dynamic_slice": lambda c: jnp.concatenate([lax.dynamic_slice(c, (2, 0), (6, 8)), c[:2]]),
    "reverse": lambda c: c[::-1],
    "jit": jax.jit(jnp.transpose),
    "checkpoint": jax.checkpoint(jnp.transpose),
    "cond": lambda c: lax.cond(c[0, 0] > 0, jnp.transpose, lambda c: c, c),
    "scan in the loop": lambda c: lax.scan(lambda c, _: (c.T, None), c, length=2)[0],
}
PRODUCTS = {
    "of the row": lambda c, x: x @ W,
    "after a nonlinearity": lambda c, x: jnp.tanh(x @ W),
    "of the carry": lambda c, x: c @ W,
    "of a function of the carry": lambda c, x: jnp.tanh(jnp.tanh(c) @ W),
}
# States that are replaced whole, or in part, and never added to.
REPLACED = {
    "recurrent": lambda h, x: jnp.tanh(x @ W + h @ W),
    "gated": lambda h, x: jax.nn.sigmoid(x @ W) * jnp.tanh(h @ W),
    "kept at padding": lambda h, x: jnp.where(x > 0, jnp.tanh(h @ W), h),
    "one row, as in a cache": lambda h, x: lax.dynamic_update_slice(h, jnp.tanh(x @ W)[:1], (2, 0)),
    "one of two": lambda h, x: lax.cond(x[0, 0] > 0, lambda: jnp.tanh(h @ W), lambda: jnp.tanh(x @ W)),
    "jit": jax.jit(lambda h, x: jnp.tanh(h @ W + x @ W)),
    "checkpoint": jax.checkpoint(lambda h, x: jnp.tanh(h @ W)),
    "scan in the loop": lambda h, x: lax.scan(lambda h, _: (jnp.tanh(h @ W + x @ W), None), h, length=2)[0],
}


def examples(*families, count):
    """Combinations of the entries of each family, in which every entry occurs."""
    rng = np.random.default_rng(0)
    columns = [np.concatenate([rng.permutation(list(f)) for _ in range(count)])[:count] for f in families]
    return [tuple(map(str, names)) for names in zip(*columns, strict=True)]


def of_loop(loop, body):
    """All equations of a loop from zeros, whose result a product reads."""
    fun = amp.autocast(lambda xs: LOOPS[loop](body, jnp.zeros((8, 8)), xs) @ W)
    return [*equations(fun, jnp.stack([X] * STEPS))]


def carried(found):
    """The dtypes of the arrays in the carry of the outermost loop."""
    loop = next(eqn for eqn in found if eqn.primitive.name in ("scan", "while"))
    return {v.aval.dtype.name for v in loop.outvars if v.aval.shape == (8, 8)}


def rows(found, *primitives):
    """The dtypes of the equations of these primitives that compute floating arrays."""
    chosen = [eqn for eqn in found if eqn.primitive.name in primitives and eqn.outvars[0].aval.ndim]
    return [row(eqn) for eqn in chosen if jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("total", "path", "move", "product"), examples(SUMS, PATHS, MOVES, PRODUCTS, count=26))
def test_a_carry_that_is_itself_plus_something_is_float32(loop, total, path, move, product):
    def body(c, x):
        return SUMS[total](MOVES[move](PATHS[path](c)), PRODUCTS[product](c, x))

    found = of_loop(loop, body)
    of_loops, of_the_end = rows(found, "dot_general")[:-1], rows(found, "dot_general")[-1]
    # A product of the carry with the same matrix in each iteration is a recurrence, if nothing chooses it.
    if product == "of the carry" and loop != "unrolled":
        want = {LOW if total == "where" else FULL}
        assert set(of_loops) == want | ({LOW} if path == "decay by a gate" else set())  # of the gate
    else:
        assert set(of_loops) == {LOW}
    assert of_the_end == LOW
    sums = rows(found, "add", "sub", "add_any")
    if loop == "unrolled":  # where the first term is added to zeros, which rounds nothing
        sums = sums[len(sums) // STEPS :]
    else:
        assert carried(found) == {"float32"}
    assert set(sums) == {FULL}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(("state", "move"), examples(REPLACED, MOVES, count=10))
def test_a_carry_that_is_replaced_is_low(loop, state, move):
    found = of_loop(loop, lambda h, x: REPLACED[state](MOVES[move](h), x))
    assert loop == "unrolled" or carried(found) == {"float16"}
    assert set(rows(found, "dot_general")) == {LOW}
    assert set(rows(found, "tanh")) == {"float16 -> float16"}


def test_an_lstm_keeps_its_cell_in_float32_and_its_output_low():
    def step(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ jnp.tile(W, 4) + h @ jnp.tile(W, 4), 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((8, 8))
    found = [*equations(amp.autocast(lambda xs: lax.scan(step, (zeros, zeros), xs)), jnp.stack([X] * STEPS))]
    (loop,) = (eqn for eqn in found if eqn.primitive.name == "scan")
    assert [v.aval.dtype.name for v in loop.outvars] == ["float16", "float32", "float16"]
    assert set(rows(found, "dot_general")) == {LOW}


def test_a_gru_keeps_its_state_in_float32():
    def step(h, x):
        z, n = jax.nn.sigmoid(x @ W + h @ W), jnp.tanh(x @ W + h @ W)
        return (1 - z) * n + z * h, None

    found = [*equations(amp.autocast(lambda xs: lax.scan(step, jnp.zeros((8, 8)), xs)[0]), jnp.stack([X] * STEPS))]
    assert carried(found) == {"float32"}
    assert set(rows(found, "dot_general")) == {LOW}


def test_carries_that_are_added_to_through_each_other_are_float32():
    def step(carry, x):
        position, velocity = carry
        return (position + 0.1 * velocity, velocity + x @ W), None

    zeros = jnp.zeros((8, 8))
    found = [*equations(amp.autocast(lambda xs: lax.scan(step, (zeros, zeros), xs)[0]), jnp.stack([X] * STEPS))]
    assert carried(found) == {"float32"}

    def swapped(carry, x):
        a, b = carry
        return (b, a + x @ W), None

    found = [*equations(amp.autocast(lambda xs: lax.scan(swapped, (zeros, zeros), xs)[0]), jnp.stack([X] * STEPS))]
    assert carried(found) == {"float32"}

    def delayed(carry, x):
        return (carry[0] + x @ W, carry[0]), None

    found = [*equations(amp.autocast(lambda xs: lax.scan(delayed, (zeros, zeros), xs)[0]), jnp.stack([X] * STEPS))]
    assert carried(found) == {"float32"}
