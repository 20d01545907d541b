"""Every primitive of the op table under every class that a rule can give it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.sharding import AxisType, PartitionSpec
from jaxprs import equations, read_low, row

import jmp_amp as amp
from jmp_amp import _ops
from jmp_amp._jaxpr import HIGHER_ORDER
from jmp_amp._ops import RULES, OpClass, Rule

pytestmark = pytest.mark.usefixtures("users_code")

X = jnp.linspace(0.1, 0.9, 64).reshape(8, 8)
W = jnp.eye(8) + 0.1
ROWS = PartitionSpec("rows")
CLASSES = [op_class.value for op_class in OpClass]
# Linear algebra, kernels and the like: these run as they were traced, and a class that could lower them is refused.
AS_TRACED = {n for n, rule in RULES.items() if isinstance(rule, Rule) and rule.op_class is OpClass.ORIGINAL}


def same(names, fun=None):
    """Programs of functions of `jax.lax` by the name of the primitive, on as many arrays as `fun` gives them."""
    return {
        name: lambda x, name=name: (fun or (lambda f, x: f(x @ W)))(getattr(lax, name), x) for name in names.split()
    }


def sharded(fun, out_specs=ROWS, **options):
    def call(x):
        mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
        return jax.shard_map(fun, mesh=mesh, in_specs=ROWS, out_specs=out_specs, **options)(x @ W)

    return call


def resharded(x):
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(AxisType.Explicit,))
    return jax.sharding.reshard(x @ W, jax.sharding.NamedSharding(mesh, ROWS))


def constrained(x):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))
    return lax.with_sharding_constraint(x @ W, jax.sharding.NamedSharding(mesh, ROWS))


def scatter(f, x):
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    return f(x, jnp.array([[1]]), x[:1] @ W, numbers)


def pooled(f, x, init):
    return lax.reduce_window(x @ W, init, f, (2, 2), (1, 1), "VALID")


def cumulated(f, x):
    return f(x @ W, axis=1)


def pushed(fun):
    """The gradient of `fun`, in which some primitives are that JAX makes itself."""
    return lambda x: jax.grad(lambda x: jnp.sum(fun(x) ** 2))(x @ W)


PROGRAMS = {
    **same("exp exp2 expm1 log1p rsqrt log acos acosh asin asinh atan atanh cosh sinh tan erf_inv"),
    **same(
        "bessel_i0e bessel_i1e digamma lgamma neg abs sign square is_finite floor ceil round sqrt cbrt sin cos tanh"
    ),
    **same("logistic erf erfc stop_gradient sort optimization_barrier"),
    **same(
        "pow igamma igammac igamma_grad_a add sub max min mul div eq ne lt le gt ge rem atan2", lambda f, x: f(x @ W, x)
    ),
    **same("nextafter zeta", lambda f, x: f(x @ W + 1, x)),
    **same("polygamma", lambda f, x: f(jnp.ones_like(x), x @ W)),
    **same("cumsum cumprod cumlogsumexp cummax cummin", cumulated),
    **same("argmax argmin", lambda f, x: f(x @ W, 1, jnp.int32)),
    **same("psum pmax pmin", lambda f, x: sharded(lambda x: f(x, "rows"), PartitionSpec(), check_vma=False)(x)),
    "log2": lambda x: jnp.log2(x @ W),
    "one_minus_square": pushed(jnp.tanh),
    "add_any": pushed(lambda x: x * jnp.sin(x)),
    "all_gather": sharded(lambda x: lax.all_gather(x, "rows")),
    "all_gather_invariant": sharded(lambda x: lax.all_gather(x, "rows", to="invarying"), PartitionSpec()),
    "all_to_all": sharded(lambda x: lax.all_to_all(x, "rows", 1, 0, tiled=True)),
    "approx_top_k": lambda x: lax.approx_max_k(x @ W, 2),
    "broadcast_in_dim": lambda x: lax.broadcast(x @ W, (2,)),
    "clamp": lambda x: lax.clamp(0.0, x @ W, x),
    "concatenate": lambda x: lax.concatenate([x, x @ W], 0),
    "conv_general_dilated": lambda x: lax.conv(x[None, None], W[None, None], (1, 1), "SAME"),
    "convert_element_type": lambda x: (jnp.asarray(x, "bfloat16"), jnp.asarray(x, int), jnp.asarray(2.0) + x[0, 0]),
    "copy": lambda x: jnp.copy(x @ W),
    "device_put": lambda x: jax.device_put(x @ W),
    "dot_general": lambda x: (x @ W, x[0] @ x[0], jnp.einsum("i,j", x[0], x[1]), jnp.dot(x, W, precision="highest")),
    "dynamic_slice": lambda x: lax.dynamic_slice(x @ W, (1, 1), (2, 2)),
    "dynamic_update_slice": lambda x: lax.dynamic_update_slice(x @ W, x[:2], (1, 0)),
    "gather": lambda x: (jnp.take(x @ W, jnp.array([1, 2]), 0), jnp.take_along_axis(x, jnp.array([[1]] * 8), 1)),
    "integer_pow": lambda x: ((x @ W) ** 3, lax.integer_pow(x, -2)),
    "name": lambda x: checkpoint_name(x @ W, "product"),
    "pad": lambda x: lax.pad(x @ W, 0.0, ((1, 1, 0), (0, 0, 0))),
    "polynomial": lambda x: lax.polynomial(x @ W, [jnp.ones_like(x), x]),
    "ppermute": sharded(lambda x: lax.ppermute(x, "rows", [(0, 1), (1, 0)])),
    "psum_invariant": sharded(lambda x: lax.psum(x, "rows"), PartitionSpec()),
    "pvary": lambda x: sharded(lambda y: y + lax.pcast(jnp.float32(2), "rows", to="varying"))(x),
    "ragged_dot_general": lambda x: lax.ragged_dot(x, W[None], jnp.array([4], jnp.int32)),
    "reduce_max": lambda x: jnp.max(x @ W, 0),
    "reduce_min": lambda x: jnp.min(x @ W, 0),
    "reduce_prod": lambda x: jnp.prod(x @ W, 0),
    "reduce_scatter": sharded(lambda x: lax.psum_scatter(x, "rows", tiled=True)),
    "reduce_sum": lambda x: jnp.sum(x @ W, 0),
    "reduce_window_max": lambda x: pooled(lax.max, x, -jnp.inf),
    "reduce_window_min": lambda x: pooled(lax.min, x, jnp.inf),
    "reduce_window_sum": lambda x: pooled(lax.add, x, 0.0),
    "regularized_incomplete_beta": lambda x: lax.betainc(x @ W, x, x / 2),
    "reshape": lambda x: lax.reshape(x @ W, (x.size,)),
    "reshard": resharded,
    "rev": lambda x: lax.rev(x @ W, (0,)),
    "scatter": lambda x: scatter(lax.scatter, x),
    "scatter-add": lambda x: scatter(lax.scatter_add, x),
    "scatter-max": lambda x: scatter(lax.scatter_max, x),
    "scatter-min": lambda x: scatter(lax.scatter_min, x),
    "scatter-mul": lambda x: scatter(lax.scatter_mul, x),
    "scatter-sub": lambda x: scatter(lax.scatter_sub, x),
    "select_and_gather_add": lambda x: jax.jvp(lambda x: pooled(lax.max, x, -jnp.inf), (x,), (x @ W,)),
    "select_and_scatter_add": pushed(lambda x: pooled(lax.max, x, -jnp.inf)),
    "select_n": lambda x: lax.select(x > 0.5, x @ W, x),
    "sharding_constraint": constrained,
    "slice": lambda x: lax.slice(x @ W, (0, 0), (2, 2)),
    "split": lambda x: lax.split(x @ W, (1, 7)),
    "squeeze": lambda x: lax.squeeze((x @ W)[None], (0,)),
    "stack": lambda x: lax.stack([x @ W, x]),
    "tile": lambda x: lax.tile(x @ W, (2, 1)),
    "top_k": lambda x: lax.top_k(x @ W, 2),
    "transpose": lambda x: (x @ W).T,
    "unstack": lambda x: lax.unstack(x @ W),
}
NEW = {"log2", "one_minus_square", "polynomial"} if not hasattr(lax, "polynomial_p") else set()  # since JAX 0.11


def primitive_named(name):
    return next(eqn.primitive for eqn in equations(PROGRAMS[name], X) if eqn.primitive.name == name)


def test_no_primitive_is_in_the_table_twice():
    names = " ".join(_ops.ROWS).split()
    assert len(names) == len(set(names))


def test_every_primitive_of_the_table_has_a_program_or_runs_as_traced():
    assert set(RULES) == set(PROGRAMS) | AS_TRACED


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - NEW))
def test_a_primitive_of_any_class_returns_what_was_traced(name):
    want = jax.eval_shape(PROGRAMS[name], X)
    for op_class in CLASSES:
        got = jax.eval_shape(amp.autocast(PROGRAMS[name], rules={primitive_named(name): op_class}), X)
        assert jax.tree.structure(got) == jax.tree.structure(want), op_class
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (x.shape, x.dtype) == (y.shape, y.dtype), op_class


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - NEW))
def test_a_primitive_of_any_class_compiles_and_runs(name):
    funs = [amp.autocast(PROGRAMS[name], rules={primitive_named(name): op_class}) for op_class in CLASSES]
    for got in jax.jit(lambda x: [fun(x) for fun in funs])(X):
        jax.block_until_ready(got)


@pytest.mark.parametrize("name", sorted(AS_TRACED))
def test_what_runs_as_traced_can_be_given_no_class_that_lowers(name):
    for op_class in ("full", "original"):
        amp.autocast(lambda x: x, rules={Primitive(name): op_class})
    for op_class in ("lower", "promote", "follow"):
        with pytest.raises(ValueError, match=rf"`{name}` runs in the dtypes that .* can be `full` or `original`, got"):
            amp.autocast(lambda x: x, rules={Primitive(name): op_class})


@pytest.mark.parametrize("name", sorted(HIGHER_ORDER.keys() - RULES.keys()))
def test_what_holds_a_program_has_no_class(name):
    with pytest.raises(ValueError, match=rf"`{name}` holds a program .* `jax.named_scope`"):
        amp.autocast(lambda x: x, rules={Primitive(name): "full"})


@pytest.mark.parametrize("name", sorted(set(PROGRAMS) - NEW - {"regularized_incomplete_beta"}))  # it has no derivative
def test_explain_gives_reasons_that_agree_with_the_dtypes(name, monkeypatch):
    for each in amp.explain(PROGRAMS[name], "bfloat16")(X).select(direction="forward").rows:
        is_narrowed = each.op_class == "promote" and "float32" in each.inputs and each.compute == "bfloat16"
        is_widened = each.op_class in ("promote", "follow") and each.compute == "float32" and "bfloat16" in each.inputs
        assert (each.why == "bias") == is_narrowed, each
        assert (each.why == "precision") == (each.op_class == "original" and each.primitive == "dot_general"), each
        assert each.why != "readers" or is_widened, each
        assert each.why not in ("traced", "stream"), each
    with jax.enable_x64(True):
        monkeypatch.setitem(globals(), "W", W.astype("float64"))
        for each in amp.explain(PROGRAMS[name], "bfloat16")(X.astype("float64")).select(direction="forward").rows:
            reads_float32 = "float32" in (*each.inputs, each.output)
            assert reads_float32 or each.why in ("traced", "angle", "distance", "edge"), each
            assert each.why != "traced" or not reads_float32, each


# A convolution refuses a dtype that is narrower than those of its operands.
ASKED = {
    "dot_general": lambda x, dtype: jnp.dot(x, W, preferred_element_type=dtype),
    "of one row": lambda x, dtype: jnp.dot(x[:, :1], W[:1], preferred_element_type=dtype),
    "of vectors": lambda x, dtype: jnp.dot(x[0], x[0], preferred_element_type=dtype),
    "ragged_dot": lambda x, dtype: lax.ragged_dot(x, W[None], jnp.array([4], jnp.int32), preferred_element_type=dtype),
}


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ASKED)
def test_a_product_returns_the_dtype_that_the_program_asks_for(name, low):
    for dtype in (None, "float16", "bfloat16", "float32"):
        got = amp.autocast(lambda x, dtype=dtype: ASKED[name](x, dtype), low)(X)
        want = ASKED[name](X, dtype)
        assert got.dtype == want.dtype, dtype
        np.testing.assert_allclose(got.astype("float32"), want.astype("float32"), rtol=2e-2)


def operands(fun, name, **options):
    found = equations(amp.autocast(read_low(fun), **options), X)
    return {row(eqn) for eqn in found if eqn.primitive.name == name}


@pytest.mark.parametrize(
    ("key", "op_class", "fun", "expected"),
    [
        (lax.exp_p, "lower", lambda x: jnp.exp(x), "float16 -> float16"),
        (lax.add_p, "lower", lambda x: jnp.exp(x + x), "float16 float16 -> float16"),  # whoever reads it
        (lax.add_p, "full", lambda x: x @ W + x[0] @ W, "float32 float32 -> float32"),
        (lax.add_p, "follow", lambda x: x @ W + jnp.sin(x), "float32 float32 -> float32"),
        (lax.dot_general_p, "promote", lambda x: jnp.tanh(x) @ x, "float32 float32 -> float32"),
        (lax.dot_general_p, "lower", lambda x: x[0] @ x[0], "float16 float16 -> float16"),
        (lax.dot_general_p, "lower", lambda x: jnp.dot(x, x, precision="highest"), "float32 float32 -> float32"),
        (lax.transpose_p, "full", lambda x: (x @ W).T, "float32 -> float32"),
        (lax.reduce_sum_p, "follow", lambda x: jnp.sum(x @ W, 0), "float16 -> float16"),
        (lax.scatter_add_p, "lower", lambda x: scatter(lax.scatter_add, x), "float16 int32 float16 -> float16"),
    ],
)
def test_a_class_says_which_dtype_the_operands_have(key, op_class, fun, expected):
    assert operands(fun, key.name, rules={key: op_class}) == {expected}


def test_an_overridden_primitive_is_differentiated():
    for key in (lax.scatter_add_p, lax.dot_general_p, lax.exp_p, lax.add_p):
        for op_class in CLASSES:
            fun = amp.autocast(lambda x: jnp.sum(jnp.exp(scatter(lax.scatter_add, x @ W) + x)), rules={key: op_class})
            assert np.isfinite(jax.grad(fun)(X)).all()


# Programs of more than one op, whose derivatives read values and cotangents side by side.
SYMMETRIC = lambda x: x @ x.T + 8 * jnp.eye(8)  # noqa: E731
WITH_DERIVATIVES = PROGRAMS | {
    "cholesky": lambda x: jnp.linalg.cholesky(SYMMETRIC(x)),
    "eigh": lambda x: jnp.linalg.eigh(SYMMETRIC(x)),
    "lu": lambda x: jax.scipy.linalg.lu(SYMMETRIC(x)),
    "qr": lambda x: jnp.linalg.qr(SYMMETRIC(x)),
    "svd": lambda x: jnp.linalg.svd(x + W, full_matrices=False),
    "a solver": lambda x: jnp.linalg.solve(SYMMETRIC(x), x),
    "an iterative solver": lambda x: jax.scipy.sparse.linalg.cg(SYMMETRIC(x), x[0])[0],
    "triangular_solve": lambda x: lax.linalg.triangular_solve(SYMMETRIC(x), x, left_side=True, lower=True),
    "tridiagonal_solve": lambda x: lax.linalg.tridiagonal_solve(x[0], x[1] + 4, x[2], x),
    "fft": lambda x: jnp.abs(jnp.fft.fft(x)),
    "reduce_precision": lambda x: lax.reduce_precision(x, 5, 10),
    "random_gamma": lambda x: jax.random.gamma(jax.random.key(0), x),
    "scatter-mul": lambda x: x.at[jnp.array([1, 2])].mul(x[:2], unique_indices=True),
    "values sorted by keys": lambda x: lax.sort((x, 2 * x), num_keys=1),
    "a median": lambda x: jnp.median(x, axis=0),
    "a maximum a segment": lambda x: jax.ops.segment_max(x, jnp.arange(8) // 2, 4),
    "a product by a scan": lambda x: lax.associative_scan(jnp.multiply, x),
    "an interpolation": lambda x: jnp.interp(x[0], jnp.sort(x[1]), x[2]),
    "a clip by arrays": lambda x: jnp.clip(x, x - 1, 0.5 * x + 0.1),
    "a derivative of a pooling": lambda x: jax.grad(lambda x: jnp.sum(pooled(lax.max, x, -jnp.inf) ** 3))(x),
}
# JAX has no derivative of these.
WITHOUT = {"igamma_grad_a", "pmax", "pmin", "regularized_incomplete_beta", "zeta"}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", sorted(WITH_DERIVATIVES.keys() - NEW - WITHOUT))
def test_a_right_step_with_a_derivative_of_it_passes_the_check_of_the_loss_scale(name):
    tx = amp.dynamic_loss_scale(optax.sgd(0.1))

    def loss_fn(w, x):
        results = jax.tree.leaves(WITH_DERIVATIVES[name](x * w))
        inexact = [out.astype("complex64") for out in results if jnp.issubdtype(out.dtype, jnp.inexact)]
        return sum(jnp.sum(jnp.abs(out) ** 2) for out in inexact) + jnp.sum(w)

    def step(w, state, x):
        loss, grads = amp.value_and_grad(loss_fn, opt_state=state)(w, x)
        updates, state = tx.update(grads, state, w)
        return w + updates, state, loss

    amp.debug.check_loss_scaling(step)(*jax.eval_shape(lambda: (X, tx.init(X), X)))
