"""An op that reads a constant that the low dtype cannot hold is float32, of whatever shape, size and place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import dtypes, equations, read_low
from rounding import EPSILON, error

import jmp_amp as amp
from jmp_amp._autocast import _values

pytestmark = pytest.mark.usefixtures("users_code")

LOW, FULL = "float16 float16 -> float16", "float32 float32 -> float32"
RNG = np.random.default_rng(0)
X, W = (jnp.asarray(RNG.normal(size=shape) / 2, jnp.float32) for shape in ((4, 8), (8, 8)))
WIDE = jnp.asarray(RNG.normal(size=(8, 2000)), jnp.float32)
LARGE = np.random.default_rng(1).uniform(1e5, 1e6, size=(4, 8)).astype(np.float32)

PROGRAMS = {
    "a product with a vector": lambda w: (X @ w) @ np.float32([1e6, *[1] * 7]),
    "a product with a matrix": lambda w: (X @ w) @ np.float32([[1e6, 1], *[[2, 3]] * 7]),
    "a product from the left": lambda w: np.float32([[1e6, 1, 0, 0]] * 5) @ (X @ w),
    "a scale of 2000 features": lambda w: (X @ w @ WIDE) * np.full(2000, 1e6, np.float32),
    "a scale of two dimensions": lambda w: (X @ w) * LARGE,
    "an offset of two dimensions": lambda w: (X @ w) + LARGE,
    "an offset of 2000 features": lambda w: (X @ w @ WIDE) - np.linspace(0, 1e6, 2000, dtype=np.float32),
    "a mask of 2000 features": lambda w: jnp.where(np.arange(2000) > 9, X @ w @ WIDE, np.full(2000, -1e9, np.float32)),
    "a mask of two dimensions": lambda w: jnp.maximum(X @ w, np.float32([[-1e9, *[0] * 7], *[[0] * 8] * 3])),
    "a constant that jnp makes": lambda w: (X @ w @ WIDE) * jnp.full(2000, 1e6),
    "a constant of a table": lambda w: (X @ w) * jnp.asarray(LARGE)[jnp.array([3, 2, 1, 0])],
    "a constant that is moved": lambda w: (X @ w) * jnp.asarray(LARGE).T.reshape(4, 8)[::-1],
    "a constant within a jit": lambda w: jax.jit(lambda h: h * LARGE)(X @ w),
    "a constant within a scan": lambda w: jax.lax.scan(lambda c, x: (c, (x @ w) * LARGE[0]), 0, X)[1],
    "a scale of whole numbers": lambda w: (X @ w) * LARGE.astype(int),
    "a scale of integers in a product": lambda w: (X * np.asarray([10**6, *[1] * 7])) @ w,
    "a mask of an integer": lambda w: jnp.where(np.arange(8) > 4, X @ w, -(10**9)) @ w,
    "a mask of integers that are moved": lambda w: jnp.where(X > 0, X @ w, jnp.full((8, 4), -(10**9)).T) @ w,
    "a mask of integers that are indexed": lambda w: (
        jnp.where(X > 0, X @ w, jnp.asarray([0, -(10**9)])[(X[:, :1] > 0) * 1]) @ w
    ),
    "flags times an integer": lambda w: (X @ w + (X > 0) * -(10**9)) @ w,
    "a scale that is a whole number in an array": lambda w: (X * jnp.asarray(10**6)) @ w,
    "a constant joined to others": lambda w: (X @ w) * jnp.concatenate([jnp.ones((2, 8)), jnp.asarray(LARGE[:2])]),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_large_constant_in_an_op_is_finite_and_close(name):
    scale = 1 if "offset" in name or "mask" in name else 1e-6

    def loss(w):
        return scale * jnp.sum(PROGRAMS[name](w))

    def ways(cast, w):
        return cast(PROGRAMS[name])(w), jax.grad(cast(loss))(w), cast(jax.grad(loss))(w)

    casts = [lambda f: f, *(functools.partial(amp.autocast, dtype=low) for low in EPSILON)]
    want, *results = jax.jit(lambda w: [ways(cast, w) for cast in casts])(W)
    for low, got in zip(EPSILON, results, strict=True):
        assert max(map(error, got, want)) < 4 * EPSILON[low]


OPS = {
    "mul": lambda h, c: h * c,
    "add": lambda h, c: h + c,
    "sub": lambda h, c: c - h,
    "max": jnp.maximum,
    "select_n": lambda h, c: jnp.where(h > 0, h, c),
    "dot_general": lambda h, c: h @ c,
}
SHAPES = {op: [(8,), (4, 8), (1, 8), (4, 1), (2000,), (4, 2000)] for op in OPS} | {
    "dot_general": [(8,), (8, 1), (8, 3), (2000,), (2000, 3)]
}
TOO_LARGE = {"float16": [1e5, -1e9, 3e38], "bfloat16": [3.4e38, -3.4e38]}


@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("op", OPS)
def test_an_op_is_float32_wherever_its_constant_has_an_element_that_is_too_large(op, low):
    rng = np.random.default_rng(0)
    for shape in SHAPES[op]:
        for value in TOO_LARGE[low]:
            constant = rng.choice([0, 1, -np.inf, 1e-3], size=shape).astype(np.float32)
            constant.flat[rng.integers(constant.size)] = value
            width = 2000 if 2000 in shape else 8

            def fun(w, c=constant):
                return jnp.reshape(OPS[op](X @ w, c), (4, -1))[:, :1] @ jnp.ones((1, 2))

            found = [e for e in equations(amp.autocast(fun, low), jnp.zeros((8, width))) if e.primitive.name == op]
            eqn = found[1 if op == "dot_general" else 0]
            assert eqn.outvars[0].aval.dtype == jnp.float32, (shape, value)


def test_a_constant_that_the_low_dtype_holds_leaves_its_product_low():
    for constant in (np.float32([[6e4] * 2] * 8), np.full((8, 2), 1e3, np.float32), np.float32([[np.inf] * 2] * 8)):
        fun = amp.autocast(lambda w, c=constant: (X @ w) @ c)
        assert set(dtypes(fun, W, primitive="dot_general")) <= {LOW}
    fun = amp.autocast(lambda w: (X @ w) @ np.float32([[1e6, 1]] * 8), "bfloat16")
    assert set(dtypes(fun, W, primitive="dot_general")) == {"bfloat16 bfloat16 -> bfloat16"}
    fun = amp.autocast(lambda w: (X @ w) @ np.float32([[3.4e38, 1]] * 8), "bfloat16")
    assert dtypes(fun, W, primitive="dot_general")[1] == FULL


def test_a_product_of_a_large_operand_is_float32_though_its_result_is_small():
    fun = amp.autocast(lambda w: ((X @ w) + LARGE) @ np.full((8, 2), 1e-3, np.float32))
    assert dtypes(fun, W, primitive="dot_general") == [LOW, FULL]


SMALLER = {
    "from the right": lambda h: h * 1e-4,
    "from the left": lambda h: 1e-4 * h,
    "by a division": lambda h: h / 1e4,
    "by two": lambda h: 1e-2 * h * 1e-2,
}


@pytest.mark.parametrize("name", SMALLER)
def test_a_constant_does_not_make_data_smaller(name):
    fun = amp.autocast(lambda w: (SMALLER[name](X @ w) * 1e6) @ W)
    assert dtypes(fun, W, primitive="dot_general") == [LOW, FULL]


CHAINS = {
    "mul": lambda h, c: h * c,
    "div": lambda h, c: h / c,
    "div by it": lambda h, c: c / (h + 1),
    "square": lambda h, c: jnp.square(c + h),
    "sqrt": lambda h, c: jnp.sqrt(c * jnp.abs(h)),
    "pow": lambda h, c: lax.integer_pow(h + c, -2),
    "dot_general": lambda h, c: h @ (c * jnp.eye(8)),
}


@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_any_length_and_constant_is_planned(name, low):
    for constant in map(np.float32, (0, 1e-45, 1e-38, 3e38, np.inf, np.nan)):

        def fun(w, c=constant):
            h = X @ w
            for _ in range(16):
                h = CHAINS[name](h, c)
            return h @ w

        def looped(w, fun=fun, c=constant):
            return lax.scan(lambda h, _: (CHAINS[name](h, c), None), fun(w)[:, :8], None, 3)[0]

        assert jax.eval_shape(amp.autocast(fun, low), W).dtype == np.float32
        assert jax.eval_shape(amp.autocast(looped, low), W).dtype == np.float32


def test_a_gather_whose_fill_value_is_too_large_is_float32():
    def fun(w, fill):
        return jnp.take(X @ w, jnp.array([0, 9]), axis=0, mode="fill", fill_value=fill)

    for fill, dtype in ((6e4, "float16"), (1e5, "float32")):
        rows = dtypes(amp.autocast(read_low(lambda w, fill=fill: fun(w, fill))), W, primitive="gather")
        assert [row.split()[-1] for row in rows] == [dtype]


# Arithmetic on numbers, whose results float16 cannot hold, and the same on others, whose results it can.
NUMBERS = {
    "add": (lambda x: x + 6e4, 6e4, 1.0),
    "sub": (lambda x: x - 6e4, -6e4, 1.0),
    "mul": (lambda x: x * 1e3, 1e3, 1.0),
    "div": (lambda x: 1e4 / x, 1e-3, 1e3),
    "pow": (lambda x: lax.pow(x, jnp.float32(2.5)), 1e3, 2.0),
    "integer_pow": (lambda x: x**3, 1e2, 2.0),
    "square": (jnp.square, 1e3, 2.0),
    "sqrt": (jnp.sqrt, 1e12, 4e6),
    "rsqrt": (lax.rsqrt, 1e-12, 4e-6),
    "exp": (jnp.exp, 12.0, 2.0),
    "log": (jnp.log, 1 + 2.0**-20, 1e9),  # 1e-6 is subnormal
    "stop_gradient": (lax.stop_gradient, 1e6, 1.0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_known_however_it_was_computed(name):
    fun, large, fits = NUMBERS[name]
    for number, dtype in ((large, "float32"), (fits, "float16")):
        autocast = amp.autocast(read_low(lambda w, number=number: jnp.maximum(X @ w, fun(jnp.float32(number)))))
        assert dtypes(autocast, W, primitive="max")[-1].endswith(f"-> {dtype}"), number


PLACES = {
    "jit": lambda fun, x: jax.jit(fun)(x),
    "checkpoint": lambda fun, x: jax.checkpoint(fun)(x),
    "both branches": lambda fun, x: lax.cond(X[0, 0] > 0, fun, lambda x: fun(x) + 0, x),
    "a loop that does not change it": lambda fun, x: fun(lax.scan(lambda c, _: (c, None), x, length=2)[0]),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_number_is_known_wherever_it_was_computed(place):
    for number, dtype in ((1e3, "float32"), (2.0, "float16")):
        autocast = amp.autocast(read_low(lambda w, x=number: X @ w + PLACES[place](jnp.square, jnp.float32(x))))
        assert dtypes(autocast, W, primitive="add")[-1].endswith(f"-> {dtype}"), number


def test_a_product_with_constants_that_are_0_in_float16_is_float32():
    small = jnp.full((8, 2), 1e-9)
    assert dtypes(amp.autocast(lambda w: (X @ w) @ small), W, primitive="dot_general") == [LOW, FULL]


WEIGHTS = [RNG.normal(size=(128, 128)).astype(np.float32) / 12 for _ in range(3)]
WEIGHTS[1][5, 7] = 7e4
TABLE = RNG.normal(size=(1024, 128)).astype(np.float32)
TABLE[3, 4] = 7e4
AROUND = {
    "plain": lambda fun: fun,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda fun: lambda x: lax.scan(lambda x, _: (fun(x), None), x, length=2)[0],
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of NumPy, as JAX traces the constant
def test_one_large_element_leaves_a_model_low(kind, around):
    weights, table = list(map(kind, WEIGHTS)), kind(TABLE)

    def model(x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return x + x @ jnp.take(table, jnp.arange(128), axis=0)

    products = dtypes(amp.autocast(AROUND[around](model)), jnp.ones((8, 128)), primitive="dot_general")
    assert set(products) == {LOW}


def test_large_weights_are_not_read(monkeypatch):
    weights, read = [*map(jnp.asarray, WEIGHTS), jnp.zeros(128), jnp.float32(2)], []
    elements = _values._elements
    monkeypatch.setattr(_values, "_elements", lambda x: read.append(elements(x)) or read[-1])
    fun = amp.autocast(
        lambda x: jax.jit(lambda x: weights[4] * (x @ weights[0] @ weights[1] @ weights[2] + weights[3]))(x)
    )
    for _ in range(3):
        jax.make_jaxpr(fun)(jnp.ones((8, 128)))
    assert sorted(x.size for x in read if x is not None and x.ndim) == [128], "once"


T = 256
MASKS = {
    "added": (lambda s, m: s + m, np.triu(np.full((T, T), -1e9, np.float32), 1)),
    "added to a batch": (lambda s, m: (s[None, None] + m)[0, 0], np.triu(np.full((1, 1, T, T), -1e9, np.float32), 1)),
    "chosen": (lambda s, m: jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, m), np.full((T, T), -1e9, np.float32)),
    "a minimum": (jnp.minimum, np.where(np.tri(T) > 0, np.float32(1e9), np.float32(-1e9))),
    "of itself": (lambda s, m: s - m, 1e9 * np.eye(T, dtype=np.float32)),
    "of a vocabulary": (
        lambda s, m: (s.reshape(-1) + m).reshape(T, T),
        np.where(np.arange(T * T) == 9, np.float32(-1e9), 0),
    ),
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("name", MASKS)
def test_a_large_mask_is_finite_and_its_op_float32(name, kind, around):
    fun, mask = MASKS[name][0], kind(MASKS[name][1].astype(np.float32))

    def scores(x):
        return fun(x @ x.T, mask)[:, :16]

    reads = {"add", "sub", "min", "select_n"}
    found = [*equations(amp.autocast(AROUND[around](scores)), jnp.ones((T, 16)))]
    found = [
        eqn.outvars[0].aval.dtype for eqn in found if eqn.primitive.name in reads and eqn.outvars[0].aval.size == T * T
    ]
    assert {dtype.name for dtype in found if jnp.issubdtype(dtype, jnp.floating)} == {"float32"}


def test_a_product_with_a_large_mask_of_ones_counts():
    fun = amp.autocast(lambda x: np.tri(T, dtype=np.float32) @ (x > 0.5).astype(jnp.float32), "bfloat16")
    np.testing.assert_array_equal(fun(jnp.ones((T, 2)))[:, 0], np.arange(1, T + 1))


def test_large_integers_stay_integers_in_loops_and_branches():
    def fun(x):
        n, x = lax.fori_loop(0, 3, lambda i, c: (c[0] + i, jnp.tanh(c[1] @ W)), (jnp.asarray([-(10**9), 70_000]), x))
        return lax.cond(x[0, 0] > 9, lambda: (n, x @ W), lambda: (jnp.asarray([10**9, 0]), x))

    n, x = jax.jit(amp.autocast(fun))(X)
    assert (n.dtype, x.dtype) == (jnp.int32, jnp.float32)
    assert n.tolist() == [10**9, 0]
