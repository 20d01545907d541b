"""Ragged products on float8 operands, as in mixtures of experts: values, gradients, rows beyond the groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float8_nets import E4M3, E5M2, EVERYWHERE, assert_agrees, float8, normal
from jax import lax
from jaxprs import equations
from rounding import error

import jmp_amp as amp
from jmp_amp._products import EMULATE, FLOAT8_RAGGED_DOT, float8_ragged_dot, quantize

pytestmark = pytest.mark.usefixtures("users_code", "emulated")
SIZES = jnp.array([20, 0, 30], jnp.int32)  # of 64 rows: the last 14 belong to no group


def loss_fn(params, x, sizes=SIZES):
    hidden = jax.nn.gelu(lax.ragged_dot(x, params["up"], sizes))
    return jnp.mean(lax.ragged_dot(hidden, params["down"], sizes) ** 2)


PARAMS = {"up": normal(3, 32, 48, seed=1, scale=0.2), "down": normal(3, 48, 32, seed=2, scale=0.2)}
X = normal(64, 32)


def used(fun, *args):
    return [eqn for eqn in equations(fun, *args) if eqn.primitive.name == FLOAT8_RAGGED_DOT]


def numbers(lhs, rhs):
    return lax.RaggedDotDimensionNumbers((((lhs,), (rhs,)), ((), ())), [1 - lhs], [0])


def dot(x, w, sizes, contracting=(1, 1), dtype=jnp.float32, base=jnp.bfloat16):
    params = {
        "ragged_dot_dimension_numbers": numbers(*contracting),
        "precision": None,
        "preferred_element_type": jnp.dtype(dtype),
        "group_offset": None,
        "out_sharding": None,
    }
    return float8_ragged_dot(x, w, sizes, base, (E4M3, E4M3), E5M2, **params)


# In float64, from the quantized operands.


def dequantized(x, dtype):
    low, exponent = quantize(x, dtype)
    return np.float64(low) * 2.0 ** -int(exponent)


def groups():
    ends = np.cumsum(SIZES)
    return [slice(end - size, end) for end, size in zip(ends, np.asarray(SIZES), strict=True)]


def exact(x, w):
    rows = [x[group] @ w[i] for i, group in enumerate(groups())]
    return np.concatenate([*rows, np.zeros((len(x) - sum(map(len, rows)), w.shape[2]))])


@pytest.mark.sweep(6)
@pytest.mark.parametrize("contracting", [(1, 1), (1, 2), (0, 1), (0, 2)])
@pytest.mark.parametrize("scales", [(1, 1), (2.0**100, 2.0**-100), (2.0**40, 1)])
def test_a_product_and_its_gradients_are_those_of_the_quantized_operands(contracting, scales):
    x, w, cotangent = scales[0] * X[:50], scales[1] * PARAMS["up"], normal(50, 48, seed=3)
    x, cotangent = (jnp.concatenate([a, jnp.zeros((14, a.shape[1]))]) for a in (x, cotangent))
    x_in = x if contracting[0] == 1 else x.T
    w_in = w if contracting[1] == 1 else w.mT
    product, pull = jax.vjp(lambda x, w: dot(x, w, SIZES, contracting), x_in, w_in)
    x_grad, w_grad = pull(cotangent)
    x8, w8, cotangent8 = dequantized(x, E4M3), dequantized(w, E4M3), dequantized(cotangent, E5M2)
    assert error(product, exact(x8, w8)) < 1e-6
    assert error(x_grad if contracting[0] == 1 else x_grad.T, exact(cotangent8, w8.mT)) < 1e-6
    want = np.stack([x8[group].T @ cotangent8[group] for group in groups()])
    assert error(w_grad if contracting[1] == 1 else w_grad.mT, want) < 1e-6
    assert {product.dtype, x_grad.dtype, w_grad.dtype} == {jnp.dtype("float32")}


@pytest.mark.parametrize("bad", [jnp.inf, jnp.nan, 1e30])
def test_rows_beyond_the_groups_have_no_part_in_it(bad):
    x, cotangent = X.at[55].set(bad), normal(64, 48, seed=3).at[55].set(bad)

    def product_and_gradients(x, cotangent):
        product, pull = jax.vjp(lambda x, w: dot(x, w, SIZES), x, PARAMS["up"])
        return product, *pull(cotangent)

    got, want = product_and_gradients(x, cotangent), product_and_gradients(X, normal(64, 48, seed=3))
    jax.tree.map(np.testing.assert_array_equal, got, want)
    product, x_grad, w_grad = got
    assert (product[50:] == 0).all()
    assert (x_grad[50:] == 0).all()
    assert (w_grad[1] == 0).all()  # of the expert without rows


@pytest.mark.parametrize("where", ["x", "w"])
def test_an_infinity_in_a_group_makes_the_product_nan(where):
    x = X.at[3, 3].set(jnp.inf) if where == "x" else X
    w = PARAMS["up"].at[0, 3, 3].set(jnp.inf) if where == "w" else PARAMS["up"]
    assert jnp.isnan(dot(x, w, SIZES)[:50]).all()


# Autocast.


def test_both_passes_of_experts_read_float8_and_their_gradients_are_float32():
    grads = jax.grad(float8(loss_fn))
    products = [(*eqn.params["operands"], eqn.outvars[0].aval.dtype.name) for eqn in used(grads, PARAMS, X)]
    assert sorted(map(str, products)) == sorted(
        map(
            str,
            [(E4M3, E4M3, "bfloat16")] * 2
            + [(E4M3, E5M2, "float32")] * 2  # experts
            + [(E5M2, E4M3, "bfloat16")],  # activations
        )
    )
    assert_agrees(float8(loss_fn), loss_fn, (PARAMS, X), 0.02, 0.1)


def layers(params, x):
    def body(x, w):
        return jnp.tanh(lax.ragged_dot(x, w, SIZES)), None

    return jnp.mean(lax.scan(body, x, params)[0] ** 2)


STACK = normal(2, 3, 32, 32, seed=5, scale=0.2)
PROGRAMS = {
    "jvp": (lambda p, x: jax.jvp(lambda p: loss_fn(p, x), (p,), (p,))[1], PARAMS),
    "scan": (layers, STACK),
    "checkpoint": (lambda p, x: jax.checkpoint(loss_fn)(p, x), PARAMS),
    "scan of a checkpoint": (lambda p, x: jax.checkpoint(layers)(p, x), STACK),
    "cond": (lambda p, x: lax.cond(x[0, 0] > 9, lambda: 0.0, lambda: loss_fn(p, x)), PARAMS),
}


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", PROGRAMS)
def test_transformations_inside_and_outside(name):
    fun, params = PROGRAMS[name]
    low = float8(fun)
    assert used(low, params, X)
    assert_agrees(low, fun, (params, X), 0.05, 0.15)


def test_a_batch_of_ragged_products_runs_in_the_base_dtype():
    args = jnp.stack([X, X + 1]), jnp.stack([PARAMS["up"]] * 2), jnp.stack([SIZES, SIZES + 1])
    got, want = jax.vmap(dot)(*args), jax.vmap(lax.ragged_dot)(*args)
    assert error(got, want) < 0.01
    assert not used(jax.vmap(dot), *args)


def test_experts_that_are_sharded_compute_the_same():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    grads = jax.jit(jax.grad(float8(loss_fn)))
    place = jax.sharding.NamedSharding(mesh, jax.P(None, "data"))
    assert error(grads(jax.device_put(PARAMS, place), X), grads(PARAMS, X)) < 0.05


def test_gradients_of_a_scaled_loss_are_the_scaled_gradients():
    ways = float8(lambda params, x: 2.0**12 * loss_fn(params, x)), float8(loss_fn)
    scaled, grads = jax.jit(lambda *args: [jax.grad(way)(*args) for way in ways])(PARAMS, X)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, 2.0**12 * b), scaled, grads)


def test_without_float8_units_it_runs_in_the_base_dtype_with_a_warning(monkeypatch):
    monkeypatch.delenv(EMULATE)
    with pytest.warns(UserWarning, match="cpu has no float8 units, so products run in bfloat16"):
        got = jax.jit(float8(loss_fn))(PARAMS, X)
    assert error(got, amp.autocast(loss_fn, "bfloat16")(PARAMS, X)) < 1e-2


# Explain.


def why(fun, *shapes, dtype="float8"):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    rows = amp.explain(fun, dtype)(*args, jax.ShapeDtypeStruct((4,), jnp.int32)).select(direction="forward").rows
    return [(row.why, row.compute) for row in rows if row.primitive == "ragged_dot_general"]


@pytest.mark.parametrize(
    ("reason", "x", "w"),
    [
        ("rule", (512, 2048), (4, 2048, 2048)),
        ("size", (512, 1024), (4, 1024, 1024)),  # although all experts are large together
        ("size", (256, 2048), (4, 2048, 2048)),
        ("multiple", (520, 2048), (4, 2048, 2048)),
    ],
)
def test_experts_are_float8_if_the_product_with_one_of_them_gains(reason, x, w):
    compute = "float8_e4m3fn" if reason == "rule" else "bfloat16"
    assert why(lambda w, x, sizes: lax.ragged_dot(jnp.tanh(x), w, sizes), w, x) == [(reason, compute)]


def test_computed_experts_and_ragged_sums_are_not_float8():
    shapes = (4, 2048, 2048), (512, 2048)
    assert why(lambda w, x, sizes: lax.ragged_dot(x, jnp.cos(w), sizes), *shapes) == [("no weight", "bfloat16")]
    sums = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])

    def by_group(w, x, sizes):
        return lax.ragged_dot_general(jnp.cos(x), w, sizes, sums)

    assert why(by_group, (512, 2048), (512, 2048)) == [("no matrix product", "bfloat16")]


def test_explain_counts_a_product_with_one_matrix_for_each_row():
    def both(params, x, w):
        return loss_fn(params, x) + jnp.sum(jnp.tanh(x @ w))

    report = amp.explain(both, "float8", rules=EVERYWHERE)(PARAMS, X, X.T)
    products = [row for row in report.rows if row.flops]
    assert {row.flops for row in products if row.primitive in ("ragged_dot_general", FLOAT8_RAGGED_DOT)} == {
        2 * 64 * 32 * 48
    }
    assert {row.flops for row in products if row.primitive == "dot_general"} == {2 * 64 * 32 * 64}
    backward = report.select(direction="backward", primitive=FLOAT8_RAGGED_DOT).rows
    assert {row.compute for row in backward} == {"float8_e5m2 float8_e4m3fn", "float8_e4m3fn float8_e5m2"}
    assert report.summary()["matmul_flops"] == {"float8": 1.0}
