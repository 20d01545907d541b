"""Products on float8 operands with a scale for each block of 32: what is computed, its derivatives, and where."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float8_nets import E4M3, loss_fn, normal
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from rounding import error

import jmp_amp as amp
from jmp_amp._float8 import EMULATE, PRIMITIVE, float8_dot, quantize_blocks

pytestmark = pytest.mark.usefixtures("emulated")
EVERYWHERE = {"*": "mxfp8"}  # products of every size


PARAMS = {"w": normal(64, 96, seed=1, scale=0.1), "v": normal(96, 32, seed=2, scale=0.1)}
X = normal(32, 64)


def mxfp8(fun, **options):
    return amp.autocast(fun, "mxfp8", rules=EVERYWHERE, **options)


def used(fun, *args):
    return [eqn for eqn in equations(fun, *args) if eqn.primitive.name == PRIMITIVE and eqn.params["blocks"]]


# Blocks.


def quantized(x):
    """The recipe in NumPy: blocks of 32 along the last axis, each divided by a power of two and rounded to e4m3."""
    blocks = np.asarray(x, np.float64).reshape(len(x), -1, 32)
    with np.errstate(divide="ignore"):
        exponents = np.ceil(np.log2(np.abs(blocks).max(-1) / 448))
    scales = 2.0 ** np.maximum(exponents, -126)  # a scale and its inverse are normal float32 numbers
    return (blocks / scales[..., None]).astype(np.float32).astype(E4M3).astype(np.float64), scales


def rounded(x):
    low, scales = quantized(x)
    return (low * scales[..., None]).reshape(np.shape(x))


SPREAD = normal(8, 96) * np.exp2(np.random.default_rng(1).integers(-30, 30, (8, 96))).astype(np.float32)
MATRICES = {
    "normal": normal(8, 96),
    "spread": SPREAD,
    "bfloat16": SPREAD.astype(jnp.bfloat16),
    "at the edges of a scale": jnp.array([448.0, 448.001, 447.9, 1.75, 1.7500001, 3e38, 2.0**-100, 2.0**-118])[:, None]
    * jnp.ones((1, 96)),
    "zeros": jnp.zeros((8, 96)),
}


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("axis", [0, 1])
def test_each_block_has_the_least_power_of_two_that_clips_nothing(name, axis):
    x = MATRICES[name].reshape(-1, 32) if axis == 1 else MATRICES[name].reshape(32, -1)
    low, scales = jax.jit(functools.partial(quantize_blocks, dtype=E4M3, axis=axis))(x)
    want, want_scales = quantized(np.asarray(x if axis == 1 else x.T, np.float64))
    np.testing.assert_array_equal(np.float64(scales), want_scales)
    np.testing.assert_array_equal(np.float64(low), want.reshape(low.shape))
    assert low.dtype == E4M3
    assert scales.dtype == jnp.float8_e8m0fnu


@pytest.mark.long
@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_block_with_an_infinity_is_nan_and_so_is_its_scale(axis, bad):
    low, scales = quantize_blocks(jnp.ones((64, 64)).at[3, 5].set(bad), E4M3, axis)
    is_nan = np.isnan(np.float64(low))
    assert is_nan[3 if axis == 1 else 5, :32].all()
    assert is_nan.sum() == 32
    assert np.isnan(np.float64(scales)).sum() == 1


@pytest.mark.parametrize("axis", [0, 1])
def test_nan_stays_nan(axis):
    low, _ = quantize_blocks(jnp.ones((64, 64)).at[3, 5].set(jnp.nan), E4M3, axis)
    assert np.isnan(np.float64(low if axis == 1 else low.T)[3, 5])


# Products.


def dot(x, y, contracting=((1,), (0,)), dtype=jnp.float32):
    params = {"dimension_numbers": (contracting, ((), ())), "precision": None, "out_sharding": None}
    return float8_dot(
        x, y, jnp.bfloat16, (E4M3, E4M3), E4M3, blocks=True, preferred_element_type=jnp.dtype(dtype), **params
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_product_is_bit_for_bit_that_of_the_rounded_operands(dtype):
    x, y = SPREAD.reshape(8, 96), normal(96, 40, seed=3)
    rows, columns = (jnp.float32(rounded(each)) for each in (x, y.T))
    want = jax.lax.dot_general(rows, columns, (((1,), (1,)), ((), ()))).astype(dtype)
    np.testing.assert_array_equal(*map(np.float64, (dot(x, y, dtype=dtype), want)))


def test_a_gradient_is_a_product_of_originals_in_blocks_along_its_own_sum():
    x, y, cotangent = normal(32, 64), normal(64, 96, seed=1), normal(32, 96, seed=2)
    _, pull = jax.vjp(dot, x, y)
    grads = pull(cotangent)
    assert [grad.dtype for grad in grads] == [jnp.float32] * 2
    assert error(grads[0], rounded(cotangent) @ rounded(y).T) < 1e-6
    assert error(grads[1], rounded(x.T) @ rounded(cotangent.T).T) < 1e-6


@pytest.mark.sweep(3)
@pytest.mark.parametrize("batch", [(4, 8), (2, 2, 16), (1, 32)])
def test_blocks_of_several_axes_are_those_of_one(batch):
    x, w = normal(*batch, 64), PARAMS["w"]

    def fun(w, x):
        return jnp.sum(jnp.sin(mxfp8(lambda w, x: x @ w)(w, x)))

    got = jax.grad(fun, (0, 1))(w, x)
    flat = jax.grad(fun, (0, 1))(w, x.reshape(-1, 64))
    np.testing.assert_array_equal(got[0], flat[0])
    np.testing.assert_array_equal(got[1].reshape(-1, 64), flat[1])


def test_a_huge_element_changes_its_block_alone():
    x, w = normal(32, 64).at[3, 5].set(1e7), PARAMS["w"]
    want = np.delete(np.float64(x) @ np.float64(w), 3, 0)
    in_float8 = amp.autocast(lambda w, x: x @ w, "float8", rules={"*": "float8"})(w, x)
    assert error(np.delete(dot(x, w), 3, 0), want) < 0.05
    assert error(np.delete(in_float8, 3, 0), want) > 0.5


# Autocast.


def test_agrees_with_float32_better_than_float8():
    ways = mxfp8(loss_fn), loss_fn, amp.autocast(loss_fn, "float8", rules={"*": "float8"})
    got, want, in_float8 = jax.jit(lambda *args: [jax.grad(way)(*args) for way in ways])(PARAMS, X)
    assert error(got, want) < min(0.1, error(in_float8, want))
    products = used(jax.grad(mxfp8(loss_fn)), PARAMS, X)
    assert [set(eqn.params["operands"]) for eqn in products] == [{E4M3}] * 5


def why(fun, *shapes, **options):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    rows = amp.explain(fun, **{"dtype": "mxfp8"} | options)(*args).select(direction="forward").rows
    return [(row.why, row.compute) for row in rows if row.primitive == "dot_general"]


@pytest.mark.parametrize(
    ("reason", "x", "w"),
    [
        ("rule", (512, 2048), (2048, 2048)),
        ("size", (512, 1024), (1024, 1024)),
        ("multiple", (512, 4096), (4096, 2064)),  # of 16
    ],
)
def test_a_product_is_mxfp8_if_it_gains(reason, x, w):
    assert why(lambda w, x: jnp.tanh(x) @ w, w, x) == [(reason, str(E4M3) if reason == "rule" else "bfloat16")]


def test_regions_rules_and_policies_name_it():
    def program(w, x):
        with amp.precision("mxfp8"):
            x = x @ w
        with jax.named_scope("head"):
            return x @ w

    shapes = (64, 64), (32, 64)
    assert why(program, *shapes, dtype="bfloat16") == [("region", str(E4M3)), ("rule", "bfloat16")]
    assert why(program, *shapes, dtype="bfloat16", rules={"head": "mxfp8"})[1] == ("pattern", str(E4M3))
    policy = amp.get_policy("mixed_mxfp8")
    assert (policy.compute_dtype, policy.compute_format) == (jnp.dtype("bfloat16"), "mxfp8")
    low = amp.autocast(loss_fn, policy.with_rules(EVERYWHERE))
    assert low(PARAMS, X) == mxfp8(loss_fn)(PARAMS, X)


def test_an_array_is_quantized_once_for_each_axis():
    def two(w, x):
        return jnp.sum(jnp.tanh(x @ w)) + jnp.sum(jnp.exp(x @ w))

    text = jax.jit(jax.grad(mxfp8(two), (0, 1))).lower(PARAMS["w"], X).as_text()
    assert text.count("-> tensor<2x32x96xf8E4M3FN>") == 1  # the weight along its first axis, for two products
    assert text.count("-> tensor<64x3x32xf8E4M3FN>") == 1  # and along its second


def test_a_kernel_that_was_measured_to_be_faster_casts_along_both_axes_at_once(fastest):
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def gradients():
        args = PARAMS["w"], X.reshape(2, -1, X.shape[-1])
        lowered = jax.jit(jax.grad(mxfp8(loss), (0, 1))).lower(*args)
        return lowered.as_text(), lowered.compile()(*args)

    _, expected = gradients()
    fastest("triton")
    text, found = gradients()
    assert text.count("-> tensor<64x3x32xf8E4M3FN>") == 1  # the weight along its rows
    assert text.count("-> tensor<96x2x32xf8E4M3FN>") == 1  # and along its columns
    jax.tree.map(np.testing.assert_array_equal, found, expected)


# Devices.


@pytest.mark.long
@pytest.mark.sweep(2)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_eight_devices_compute_what_one_does(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x, grads = normal(256, 64), jax.jit(jax.grad(mxfp8(loss_fn)))
    want = grads(PARAMS, x)
    with jax.set_mesh(mesh):
        spec = P("data") if kind is AxisType.Auto else P()  # FSDP
        params = jax.device_put(PARAMS, NamedSharding(mesh, spec))
        got = grads(params, jax.device_put(x, NamedSharding(mesh, P("data"))))
    assert error(got, want) < 1e-5


@pytest.mark.long
@pytest.mark.sweep(2)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_are_quantized_as_the_whole(check_vma):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    x, grads = normal(256, 64), jax.grad(mxfp8(loss_fn))

    def local(params, x):
        params = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params) if check_vma else params
        return jax.lax.pmean(grads(params, x), "data")

    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, **specs))
    assert error(mapped(PARAMS, x), grads(PARAMS, x)) < 1e-5  # blocks of 32 rows are whole in each shard


@pytest.mark.long
def test_accumulated_gradients_are_those_of_the_batch():
    x = normal(64, 64)
    _, got = jax.jit(amp.value_and_grad(mxfp8(loss_fn), accumulate_steps=2))(PARAMS, x)
    assert error(got, jax.grad(mxfp8(loss_fn))(PARAMS, x)) < 1e-2


@pytest.fixture
def native(monkeypatch):
    monkeypatch.delenv(EMULATE)


def lowered(kind):
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(mxfp8(loss_fn)).trace(PARAMS, X).lower(lowering_platforms=("cuda",)).as_text()


def test_a_device_without_the_units_runs_the_base_dtype_and_says_so(native):
    with pytest.warns(UserWarning, match=r'cpu has no units for blocks of float8, .* in bfloat16 .*dtype="bfloat16"'):
        low = jax.jit(mxfp8(loss_fn))(PARAMS, X)
    assert low == jax.jit(amp.autocast(loss_fn, "bfloat16"))(PARAMS, X)


@pytest.mark.parametrize("kind", ["NVIDIA B200", "NVIDIA GB200", "NVIDIA GB300", "NVIDIA GeForce RTX 5090"])
def test_blackwell_multiplies_blocks(native, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "block_scaled_dot" in lowered(kind)


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        ("NVIDIA H200", "float8"),
        ("NVIDIA H100 80GB HBM3", "float8"),
        ("NVIDIA L4", "float8"),
        ("NVIDIA GeForce RTX 4090", "float8"),
        ("NVIDIA A100-SXM4-80GB", "bfloat16"),
    ],
)
def test_gpus_before_it_are_named_and_the_dtype_to_use_there(native, kind, instead):
    with pytest.warns(UserWarning, match=f'{kind} has no units for blocks of float8, .* write dtype="{instead}"'):
        assert "f8E" not in lowered(kind)
