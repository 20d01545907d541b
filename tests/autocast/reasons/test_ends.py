"""Where a reason for float32 ends: an ordinary network behind its cause is low precision."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from rounding import EPSILON, error

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


def forward(fun, low, *args):
    """Returns the dtypes of the products of a program."""
    rows = amp.explain(fun, low)(*args).select(direction="forward", primitive="dot_general").rows
    return [row.compute for row in rows]


LEAST = float(jnp.finfo(jnp.float32).min)
KEEP = jnp.arange(48).reshape(6, 8) % 3 > 0


def pooled(h):
    return h.reshape(3, 2, 8).max(1)


# What a masked array goes through, and whether what it was filled with may still be there.
FILLED = {
    "a maximum of rows": (pooled, False),
    "a maximum of two": (lambda h: jnp.maximum(h[:3], h[3:]), False),
    "a maximum with another": (lambda h: jnp.maximum(h, OTHER), False),
    "a maximum in a loop": (lambda h: lax.scan(lambda m, x: (jnp.maximum(m, x), None), h[:1], h[1:])[0], False),
    "relu": (jax.nn.relu, False),
    "a clip": (lambda h: jnp.clip(h, -1, 1), False),
    "lax.clamp": (lambda h: lax.clamp(-1.0, h, 1.0), False),
    "tanh": (jnp.tanh, False),
    "a softmax": (jax.nn.softmax, False),
    "a norm": (jax.nn.standardize, False),
    "moved, scaled and added, then a maximum": (lambda h: pooled((2 * h.T[::-1] / 8 + OTHER.T).T), False),
    "negated, then a minimum": (lambda h: jnp.min(-h.reshape(3, 2, 8), 1), False),
    "subtracted, then a minimum": (lambda h: jnp.minimum(OTHER - h, 3.0), False),
    "in a call, then relu": (lambda h: jax.nn.relu(jax.jit(lambda h: h * 1.0)(h)), False),
    "in a loop, then relu": (lambda h: jax.nn.relu(lax.map(lambda row: 0.5 * row, h)), False),
    "in a branch, then relu": (lambda h: jax.nn.relu(lax.cond(h[0, 0] > 9, lambda: h, lambda: 2 * h)), False),
    "nothing": (lambda h: h, True),
    "moved": (lambda h: h[::-1], True),
    "a sum": (lambda h: h + OTHER, True),
    "a call": (jax.jit(lambda h: h * 1.0), True),
    "a loop": (lambda h: lax.map(lambda row: 1.5 * row, h), True),
    "a sum of rows": (lambda h: h.reshape(3, 2, 8).sum(1), True),
    "gelu, which multiplies": (jax.nn.gelu, True),
    "a clip that is as large": (lambda h: jnp.clip(h, LEAST, -LEAST), True),
    "a minimum of rows": (lambda h: h.reshape(3, 2, 8).min(1), True),
    "negated, then a maximum": (lambda h: pooled(-h), True),
    "an absolute value, then a maximum": (lambda h: pooled(jnp.abs(h)), True),
    "times -1, then relu": (lambda h: jax.nn.relu(-1 * h), True),
    "divided by -1, then relu": (lambda h: jax.nn.relu(h / -1), True),
    "times an array, then relu": (lambda h: jax.nn.relu(h * (OTHER - 1)), True),
}


@pytest.mark.parametrize("low", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", FILLED)
def test_the_fill_of_a_mask_ends_at_a_maximum_and_at_a_bound(way, low):
    onward, stays = FILLED[way]

    def fun(x, ws):
        filled = jnp.where(KEEP, jax.nn.relu(x @ ws[0]), -1e9 if low == "float16" else LEAST)
        return network(onward(filled), ws, jax.nn.gelu)

    got = forward(fun, low, X, [W] * 3)
    assert got[:2] == [low, "float32" if stays else low]
    assert stays or set(got) == {low}


MASKS = {
    "an argument": lambda h, keep: jnp.where(keep, h, -1e9),
    "an argument of floats": lambda h, keep: jnp.where(keep.astype(jnp.float32) > 0.5, h, -1e9),
    "lengths": lambda h, keep: jnp.where(jnp.arange(8) < keep.sum(1, keepdims=True), h, -1e9),
    "an integer": lambda h, keep: jnp.where(keep, h, -(10**9)),
    "added flags": lambda h, keep: h + ~keep * -1e9,
    "subtracted flags": lambda h, keep: h - 1e9 * (~keep).astype(jnp.float32),
    "an added array": lambda h, keep: h + jnp.where(keep, 0.0, -1e9),
    "of a maximum": lambda h, keep: jnp.max(h, 0, keepdims=True, where=keep, initial=-1e9),
}


@pytest.mark.parametrize("mask", MASKS)
def test_the_fill_ends_at_a_maximum_however_the_mask_is_written(mask):
    for around in (lambda fun: fun, jax.jit, jax.checkpoint):

        def fun(x, keep, ws, around=around):
            h = around(lambda h: jnp.max(MASKS[mask](h, keep), 0, keepdims=True))(x @ ws[0])
            return network(h, ws, jax.nn.gelu)

        assert set(forward(fun, "float16", X, KEEP, [W] * 2)) == {"float16"}


# What a layer reads, and whether the products of layers of `0.1 * relu(h) ** 2` behind it are float32 in float16.
SIZES = {
    "embeddings that are scaled": (lambda x: (x / 64) * 64.0, False),
    "inputs that are scaled": (lambda x: 255.0 * x, False),
    "a square that float16 holds": (lambda x: (64 * x) ** 2, False),
    "a square that it does not": (lambda x: (300 * x) ** 2, True),
    "a row of scalars": (lambda x: x * 1e3 * 1e4, True),
    "a large square in front of a norm": (lambda x: jax.nn.standardize((300 * x) ** 2), False),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_start_anew_at_a_product_with_a_weight(name):
    scale, is_large = SIZES[name]
    for loop in (False, True):

        def fun(x, ws, loop=loop):
            h = scale(x)
            if loop:
                return lax.scan(lambda h, w: (0.1 * jax.nn.relu(h @ w) ** 2, None), h, ws)[0]
            return network(h, ws, lambda h: 0.1 * jax.nn.relu(h) ** 2)

        assert set(forward(fun, "float16", X, jnp.stack([W] * 4))) == {"float32" if is_large else "float16"}


def test_sizes_multiply_where_no_weight_is_in_the_product():
    ones, table = jnp.ones((8, 8)), jnp.full((8, 8), 1e3)
    for fun in (
        lambda x, w: (300 * x) @ (300 * x).T,  # a Gram matrix, whose elements may be 90,000
        lambda x, w: ((300 * x) @ ones) ** 2 @ w,
        lambda x, w: (jax.nn.one_hot(jnp.arange(6), 6) @ (300 * x)) ** 2 @ w,
        lambda x, w: (x @ table @ table) @ w,
    ):
        assert forward(fun, "float16", X, W)[-1] == "float32"


# What a logarithm reads of a product, and whether small values of the product matter to it.
LOGARITHMS = {
    "log1p": (jnp.log1p, False),
    "log1p of a relu": (lambda h: jnp.log1p(jax.nn.relu(h)), False),
    "symlog": (lambda h: jnp.sign(h) * jnp.log1p(jnp.abs(h)), False),
    "log1p of a square": (lambda h: jnp.log1p(h * h), False),
    "log1p of a sum": (lambda h: jnp.log1p(jnp.sum(jax.nn.relu(h), 0)), False),
    "log1p of an exponential": (lambda h: jnp.log1p(jnp.exp(h)), False),
    "1 is added": (lambda h: jnp.log(jax.nn.relu(h) + 1), False),
    "1 is added to an exponential": (lambda h: jnp.log(1 + jnp.exp(h)), False),
    "a half is added": (lambda h: jnp.log(0.5 + 2 * h[::-1]), False),
    "1 is added in a call": (lambda h: jnp.log(jax.jit(lambda h: h + 1.0)(h)), False),
    "1 is added in a loop": (lambda h: lax.map(lambda row: jnp.log(row + 1.0), h), False),
    "a relu": (lambda h: jnp.log(jax.nn.relu(h) + 1e-9), False),
    "a maximum with 0": (lambda h: jnp.log(jnp.maximum(0.0, h) + 1e-9), False),
    "a maximum with a tenth": (lambda h: jnp.log(jnp.maximum(h, 0.1)), False),
    "softplus": (lambda h: jnp.log(jax.nn.softplus(h)), False),
    "softplus and a small number": (lambda h: jnp.log(jax.nn.softplus(h) + 1e-5), False),
    "a sigmoid": (lambda h: jnp.log(jax.nn.sigmoid(h)), False),
    "a softmax": (jax.nn.log_softmax, False),
    "nothing": (jnp.log, True),
    "moved and scaled": (lambda h: jnp.log(2 * h[::-1]), True),
    "a small number is added": (lambda h: jnp.log(h + 1e-9), True),
    "a zero is added": (lambda h: jnp.log(h + 0.0), True),
    "a maximum with a small number": (lambda h: jnp.log(jnp.maximum(h, 1e-9)), True),
    "a clip": (lambda h: jnp.log(jnp.clip(h, 1e-7, 1)), True),
    "another": (lambda h: jnp.log(h + OTHER), True),
    "what is left of 1": (lambda h: jnp.log(1 - h), True),
    "log1p of the negative": (lambda h: jnp.log1p(-h), True),
    "log1p of minus 1 times it": (lambda h: jnp.log1p(-1 * h), True),
    "log1p of a difference": (lambda h: jnp.log1p(OTHER - h), True),
    "log1p of what is scaled up": (lambda h: jnp.log1p(1e9 * h), True),
    "log1p of a quotient": (lambda h: jnp.log1p(h / 1e-5), True),
    "1 is added to what is scaled up": (lambda h: jnp.log(1 + 1e9 * h), True),
}


@pytest.mark.parametrize("name", LOGARITHMS)
def test_small_values_matter_to_a_logarithm_where_it_is_steep(name):
    read, matters = LOGARITHMS[name]

    def fun(x, w):
        return jnp.tanh(read(x @ w)) @ w

    assert forward(fun, "float16", X, W) == ["float32" if matters else "float16", "float16"]
    assert set(forward(fun, "bfloat16", X, W)) == {"bfloat16"}


def test_large_values_matter_to_log1p_where_the_program_scales_them_up():
    assert forward(lambda x, w: jnp.log1p(x**2 @ w), "float16", X, W) == ["float16"]
    assert forward(lambda x, w: jnp.log1p((1e3 * x) @ w), "float16", X, W) == ["float32"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("low", EPSILON)
def test_where_small_values_do_not_matter_gradients_are_those_of_float32(low):
    x, w = (jax.random.uniform(key, (8, 8)) for key in jax.random.split(jax.random.key(0)))

    def losses(cast, w):
        reads = [read for read, matters in LOGARITHMS.values() if not matters]
        funs = [lambda w, read=read, s=s: jnp.mean(read((x - s) @ w) ** 2) for read in reads for s in (0, 0.5)]
        return [jax.value_and_grad(cast(fun))(w) for fun in funs]

    got, want = jax.jit(lambda w: [losses(lambda f: amp.autocast(f, low), w), losses(lambda f: f, w)])(w)
    for a, b in zip(got, want, strict=True):
        assert error(a, b) < 8 * EPSILON[low] or not jnp.isfinite(b[0])


# Divisors, and whether the quotient is that of two products, both of which may be small.
DIVISORS = {
    "a sum": (lambda a: a.sum(1, keepdims=True), False),
    "a product with ones": (lambda a: a @ jnp.ones((6, 1)), False),
    "with ones like another": (lambda a: a @ jnp.ones_like(a[:, :1]), False),
    "with ones that are moved": (lambda a: a @ jnp.ones((1, 6)).T, False),
    "a product with another": (lambda a: a @ a[:, :1], True),
}


@pytest.mark.parametrize("name", DIVISORS)
def test_a_product_with_ones_is_a_sum(name):
    divide, matters = DIVISORS[name]
    fun = lambda x, w: (lambda a: (a @ (x @ w)) / (divide(a) + 1e-6))(jnp.exp(x @ x.T - 9))  # noqa: E731
    assert forward(fun, "float16", X, W)[2] == ("float32" if matters else "float16")


@jax.custom_vjp
def round_through(x):
    return jnp.round(x)


round_through.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (g,))

# Functions of a quotient by a unit, and whether they leave it small.
ROUNDED = {
    "round": (jnp.round, False),
    "floor": (lambda x: jnp.floor(x + 0.5), False),
    "lax.round": (lambda x: jnp.clip(lax.round(x), -8, 7), False),
    "round to 8 bits": (lambda x: jnp.round(x).astype(jnp.int8), False),
    "a cast": (lambda x: x.astype(jnp.int8), False),
    "a clip, then round": (lambda x: jnp.round(jnp.clip(x, -8, 7)), False),
    "round with a derivative of its own": (round_through, False),
    "round past the derivative": (lambda x: x + lax.stop_gradient(jnp.round(x) - x), False),
    "tanh": (jnp.tanh, True),
    "one less an exponential": (lambda x: 1 - jnp.exp(-x), True),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_what_is_rounded_to_whole_numbers_is_not_small(name):
    of_quotient, matters = ROUNDED[name]

    def fun(x, step, ws):
        return network(x, ws, lambda h: of_quotient(h / step) * step)

    assert set(forward(fun, "float16", X, jnp.float32(0.1), [W] * 3)) == {"float32" if matters else "float16"}


ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh, "leaky": lambda x: jnp.where(x > 0, x, 0.2 * x), "abs": jnp.abs}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_layers_that_a_loop_trains_are_no_recurrence_whatever_is_between_them(name):
    def loss(ws, x):
        return jnp.mean((ACTIVATIONS[name](x @ ws[0]) @ ws[1] - 1) ** 2)

    def trained(ws, x):
        step = lambda ws, _: (jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws, x)), None)  # noqa: E731
        return loss(lax.scan(step, ws, None, 3)[0], x)

    assert set(forward(trained, "float16", [W, W], X)) == {"float16"}


ACTIVATIONS_OF_A_STATE = ACTIVATIONS | {
    "gelu": jax.nn.gelu,
    "swish": jax.nn.swish,
    "elu": jax.nn.elu,
    "softplus": jax.nn.softplus,
    "softmax": jax.nn.softmax,
}


@pytest.mark.parametrize("low", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ACTIVATIONS_OF_A_STATE)
def test_a_network_beside_a_recurrence_is_none(name, low):
    act, shift = ACTIVATIONS_OF_A_STATE[name], jnp.eye(6, k=1)

    def simulated(x, ws, change):
        return lax.scan(lambda u, _: (u + 0.1 * (shift @ u) + change(u, ws), None), x, None, 3)[0]

    ways = lambda u, ws: act(act(u @ ws[0]) @ ws[1]) @ ws[2], lambda u, ws: u * act(u @ ws[0])
    for change in ways:
        got = forward(lambda x, ws, change=change: simulated(x, ws, change), low, X, [W] * 3)
        assert got == ["float32"] + [low] * (len(got) - 1)
    rational = [
        lambda u, ws: u @ ws[0],
        lambda u, ws: 0.1 * u * (1 - u @ ws[0]),
        lambda u, ws: (u @ ws[0]) ** 3,
        lambda u, ws: (u @ ws[0]) * (1 + u * u) ** -2,
        lambda u, ws: (u @ ws[0]) @ jnp.linalg.inv(ws[1] + u[0] * u[1:2].T),
    ]
    for change in rational:
        got = forward(lambda x, ws, change=change: simulated(x, ws, change), low, X, [W] * 3)
        assert set(got) == {"float32"}


# What is written in place of values, and whether finite ones may become it.
REPLACED = {
    "nan_to_num": (jnp.nan_to_num, False),
    "isinf": (lambda x: jnp.where(jnp.isinf(x), 1e9, x), False),
    "isnan": (lambda x: jnp.where(jnp.isnan(x), 1e9, x), False),
    "-inf": (lambda x: jnp.where(x == -jnp.inf, -1e9, x), False),
    "a number": (lambda x: jnp.where(x == 3, 1e9, x), True),
    "all but inf": (lambda x: jnp.where(x != jnp.inf, 1e9, x), True),
    "what is large": (lambda x: jnp.where(x > 3, 1e9, x), True),
}


@pytest.mark.parametrize("name", REPLACED)
def test_what_stands_for_values_that_are_not_finite_is_no_size(name):
    replace, matters = REPLACED[name]
    for around in (lambda fun: fun, jax.checkpoint):
        got = forward(lambda x, ws, around=around: network(around(replace)(x), ws, jax.nn.relu), "float16", X, [W] * 3)
        assert set(got) == {"float32" if matters else "float16"}
