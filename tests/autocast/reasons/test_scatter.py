"""Sums by scatter are float32, as `reduce_sum` is; what is set by scatter, and products that read a sum, are low."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxprs import dtypes, equations
from rounding import EPSILON, further_than_by_hand

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

ROWS, WIDTH, GROUPS = 20_000, 5, 8
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(ROWS, WIDTH)) + 0.7, jnp.float32)
W = jnp.asarray(np.eye(WIDTH) + 0.1 * RNG.normal(size=(WIDTH, WIDTH)), jnp.float32)
GROUP = jnp.asarray(RNG.integers(0, GROUPS, ROWS))
CELL = jnp.asarray(RNG.integers(0, 2, (3, ROWS)))
TABLE = jnp.asarray(RNG.normal(size=(GROUPS, WIDTH)), jnp.float32)
READ = jnp.asarray(RNG.normal(size=(WIDTH, 2)), jnp.float32)


def added_at(dot, w):
    return jnp.zeros((GROUPS, WIDTH)).at[GROUP].add(dot(X, w))


def subtracted_at(dot, w):
    return jnp.zeros((GROUPS, WIDTH)).at[GROUP].subtract(jnp.tanh(dot(X, w)))


def added_in_the_way_of_numpy(dot, w):
    return jnp.add.at(jnp.zeros((GROUPS, WIDTH)), GROUP, dot(X, w), inplace=False)


def segment_sum(dot, w):
    return jax.ops.segment_sum(dot(X, w), GROUP, GROUPS)


def segment_mean(dot, w):
    total = jax.ops.segment_sum(jax.nn.relu(dot(X, w)), GROUP, GROUPS)
    return total / jax.ops.segment_sum(jnp.ones(ROWS), GROUP, GROUPS)[:, None]


def weighted_histogram(dot, w):
    return jnp.bincount(GROUP, weights=jax.nn.sigmoid(dot(X, w)[:, 0]), length=GROUPS)


def histogram_in_two_dimensions(dot, w):
    return jnp.zeros((2, 2)).at[CELL[0], CELL[1]].add(jax.nn.relu(dot(X, w)[:, 0]))


def loads_of_experts(dot, w):
    gates = jax.nn.softmax(dot(X, w))
    chosen = jnp.argmax(lax.stop_gradient(gates), -1)
    weight = jnp.take_along_axis(gates, chosen[:, None], -1)
    return jnp.zeros(WIDTH).at[chosen].add(1.0), jnp.zeros((WIDTH, WIDTH)).at[chosen].add(weight * dot(X, w))


def voxel_pooling(dot, w):
    return jnp.zeros((2, 2, 2, WIDTH)).at[tuple(CELL)].add(jax.nn.relu(dot(X, w)))


def messages_over_edges(dot, w):
    """The sums are read by another product."""
    h = jax.ops.segment_sum(jax.nn.relu(dot(X, w)), GROUP, GROUPS) / ROWS
    return dot(h, READ)


PROGRAMS = {
    f.__name__: f
    for f in (
        added_at,
        subtracted_at,
        added_in_the_way_of_numpy,
        segment_sum,
        segment_mean,
        weighted_histogram,
        histogram_in_two_dimensions,
        loads_of_experts,
        voxel_pooling,
        messages_over_edges,
    )
}


@pytest.mark.sweep(15)
@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("name", PROGRAMS)
def test_is_as_accurate_as_products_rounded_by_hand(name, low):
    assert not further_than_by_hand(PROGRAMS[name], (W,), low, scale=1 / ROWS)


@pytest.mark.parametrize("low", EPSILON)
def test_gradient_of_an_embedding_over_20000_tokens(low):
    def fun(dot, table, w):
        return jnp.tanh(dot(table[GROUP], w))

    assert not further_than_by_hand(fun, (TABLE, W), low, scale=1 / 64)


@pytest.mark.parametrize("low", EPSILON)
def test_gradient_of_a_weight_that_a_scan_reads_2000_times(low):
    def fun(dot, w):
        return lax.scan(lambda _, x: (None, jnp.tanh(dot(x[None], w))), None, X[:2000])[1]

    assert not further_than_by_hand(fun, (W,), low, scale=1 / 64)


INDICES = {
    "one row": lambda: jnp.array([0, 2, 2]),
    "a scalar": lambda: 1,
    "two axes": lambda: (jnp.array([0, 1, 1]), jnp.array([3, 2, 2])),
    "a slice": lambda: (slice(0, 3), jnp.array([1, 1])),
    "out of bounds": lambda: jnp.array([0, 99]),
}
MODES = ("promise_in_bounds", "clip", "drop", "fill")


@pytest.mark.parametrize("op", ["add", "subtract"])
@pytest.mark.parametrize(
    ("index", "mode"), [*zip(INDICES, MODES, strict=False), ("one row", None), ("out of bounds", "drop")]
)
def test_a_sum_is_float32_whatever_it_is_added_to_and_its_readers_low(index, mode, op):
    at = INDICES[index]()

    def fun(w, x):
        h = x @ w

        def added_to(y):
            return getattr(y.at[at], op)(jnp.broadcast_to(h[0, 0], y[at].shape), mode=mode)

        return [added_to(y) @ w for y in (jnp.zeros((WIDTH, WIDTH)), h[:WIDTH], w)]

    found = [e for e in equations(amp.autocast(fun), W, X[:8]) if e.primitive.name in ("scatter-add", "scatter-sub")]
    assert len(found) == 3
    for eqn in found:
        onto, _, added = (v.aval.dtype.name for v in eqn.invars)
        assert (onto, added, eqn.outvars[0].aval.dtype.name) == ("float32",) * 3
    assert set(dtypes(amp.autocast(fun), W, X[:8], primitive="dot_general")) == {"float16 float16 -> float16"}


@pytest.mark.parametrize("op", ["set", "min", "max"])
def test_what_is_not_summed_is_low(op):
    def fun(w, x):
        h = x @ w
        return getattr(jnp.zeros((GROUPS, WIDTH)).at[jnp.array([1, 1, 3])], op)(h[:3]) @ w

    primitive = {"set": "scatter", "min": "scatter-min", "max": "scatter-max"}[op]
    assert dtypes(amp.autocast(fun), W, X[:8], primitive=primitive) == ["float16 int32 float16 -> float16"]


def test_counts_beyond_2048_and_256():
    ones = jnp.ones((ROWS, 1))

    def fun(w):
        return jnp.zeros((2, 1)).at[GROUP % 2].add(ones @ w), jax.ops.segment_sum(ones @ w, GROUP % 2, 2)

    want = np.bincount(np.asarray(GROUP) % 2)[:, None]
    for low in EPSILON:
        for got in jax.jit(amp.autocast(fun, low))(jnp.ones((1, 1))):
            np.testing.assert_array_equal(got, want)


def gathered_from_a_product(dot, w):
    return jnp.mean(jnp.tanh(dot(TABLE, w)[GROUP]) ** 2) * 100


@pytest.mark.parametrize("low", EPSILON)
def test_the_gradient_of_what_is_gathered_from_a_product_is_added_up_in_float32(low):
    assert not further_than_by_hand(gathered_from_a_product, (W,), low)
    found = equations(jax.grad(amp.autocast(lambda w: gathered_from_a_product(jnp.dot, w), low)), W)
    (scatter,) = (eqn for eqn in found if eqn.primitive.name == "scatter-add")
    assert {var.aval.dtype.name for var in (scatter.invars[0], scatter.invars[2])} == {"float32"}


def test_a_function_that_is_applied_to_elements_runs_as_it_was_traced():
    def fun(x):
        return (x @ W).at[0].apply(lambda row: 2.5 * jnp.sin(row)) @ W

    np.testing.assert_allclose(amp.autocast(fun)(X[:8]), fun(X[:8]), rtol=2e-2, atol=2e-2)
    assert dtypes(amp.autocast(fun), X[:8], primitive="scatter")[0].endswith("float32 -> float32")
