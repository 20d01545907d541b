"""Every implementation against float64, bit for bit: plain JAX, the kernels in Pallas' interpreters, and on a GPU."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_ways import Way, assert_same_bits, compiled, interpreted

from jmp_amp import _float8
from pallas_kernels import Quantized, QuantizedBlocks, quantize
from pallas_kernels.quantize import mosaic_gpu, reference, triton
from pallas_kernels.quantize.api import KERNELS

READ = [jnp.float32, jnp.bfloat16, jnp.float16]
FORMATS = [jnp.float8_e4m3fn, jnp.float8_e5m2]
BAD = [np.inf, -np.inf, np.nan]
INTERPRETED, COMPILED = interpreted(KERNELS.oldest), compiled(KERNELS.oldest)
WAYS = [pytest.param(Way("xla"), id="xla"), *INTERPRETED, *COMPILED]
BLOCKS = [pytest.param(None, id="one scale"), pytest.param(32, id="blocks")]

for_every_kernel = pytest.mark.parametrize("kernel", KERNELS.oldest)
for_both_scalings = pytest.mark.parametrize("block", BLOCKS)


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Interpreters are slow, so there fewer programs look for the largest element; a GPU runs what users run."""
    with pytest.MonkeyPatch.context() as patch:
        if jax.default_backend() != "gpu":
            patch.setattr(reference, "PROGRAMS", 8)
        yield


@functools.cache
def program(way, dtype=jnp.float8_e4m3fn, block=None):
    return jax.jit(functools.partial(quantize, dtype=dtype, block=block, **way._asdict()))


def normal(shape, dtype=jnp.float32, seed=0, spread=6):
    """Numbers of many magnitudes."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 2.0 ** rng.uniform(-spread, spread, shape)).astype(dtype)


def exact_exponents(largest, dtype):
    """The exponents of the scales for the largest magnitudes, float64."""
    most = float(jnp.finfo(dtype).max)
    with np.errstate(divide="ignore"):
        exponents = np.floor(np.log2(most / largest))
    exponents = np.where(largest * 2.0 ** np.clip(exponents, -500, 500) > most, exponents - 1, exponents)
    exponents = np.where(largest * 2.0 ** np.clip(exponents + 1, -500, 500) <= most, exponents + 1, exponents)
    return np.clip(exponents, -126, 126).astype(np.int32)


def exact(x, dtype, block):
    x = np.asarray(x).astype(np.float64)
    if block is None:
        exponent = exact_exponents(np.abs(x).max(), dtype)
        rows = (x * 2.0**exponent).astype(dtype)
        return Quantized(rows, rows.T, np.float32(2.0**-exponent))
    sides = []
    for side in (x, x.T):
        blocks = side.reshape(side.shape[0], -1, 32)
        exponents = exact_exponents(np.abs(blocks).max(2), dtype)
        scales = (2.0**-exponents).astype(np.float32).astype(jnp.float8_e8m0fnu)
        sides.append(((blocks * 2.0 ** exponents[:, :, None]).astype(dtype).reshape(side.shape), scales))
    (rows, row_scales), (columns, column_scales) = sides
    return QuantizedBlocks(rows, columns, row_scales, column_scales)


# Values


@pytest.mark.long
@for_both_scalings
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.sweep(3)
def test_elements_are_scaled_by_powers_of_two_and_rounded_once(way, dtype, block):
    for x_dtype in READ:
        x = normal((128, 256), x_dtype)
        result = program(way, dtype, block)(x)
        assert_same_bits(result, exact(x, dtype, block))


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("way", WAYS)
def test_ties_go_to_even_and_the_largest_element_is_in_range(way, dtype):
    most = float(jnp.finfo(dtype).max)
    x = np.zeros((128, 128), np.float32)
    ties = [
        1 + 2**-4,
        1 + 3 * 2**-4,
        1 + 2**-3,
        1 + 3 * 2**-3,
        -1 - 2**-4,
        2**-9,
        2**-10,
        3 * 2**-10,
        2**-16,
        2**-17,
        -0.0,
    ]
    x[:, : len(ties)] = ties
    edges = [most, np.nextafter(np.float32(most), np.float32(np.inf)), most / 2, 1.75, 1.875, 1.0, 2.0**100, 2.0**-100]
    for k, edge in enumerate(edges):
        x[32 * (k % 4) + k // 4] = [*x[0, :12], *116 * [0]]
        x[32 * (k % 4) + k // 4, 33] = edge
    assert_same_bits(program(way, dtype, 32)(x), exact(x, dtype, 32))
    for edge in edges[:2]:
        x[5, 33], x[40:] = edge, 0
        assert_same_bits(program(way, dtype)(x), exact(x, dtype, None))


@for_both_scalings
@pytest.mark.parametrize("way", WAYS)
def test_the_scales_of_tiny_and_huge_numbers_and_of_zeros_stay_finite(way, block):
    for value in (0.0, 2.0**-126, 3e38, -3e38):
        x = np.full((128, 128), value, np.float32)
        result = program(way, jnp.float8_e4m3fn, block)(x)
        assert_same_bits(result, exact(x, jnp.float8_e4m3fn, block))
        assert np.isfinite(np.asarray(result.rows, np.float32)).all()


@for_both_scalings
@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_finite_makes_all_under_its_scale_nan_and_nothing_else(way, block):
    x = normal((128, 256))
    for bad, (i, j) in zip(BAD, [(0, 0), (127, 255), (65, 30)], strict=True):
        spoilt = x.copy()
        spoilt[i, j] = bad
        result = program(way, jnp.float8_e4m3fn, block)(spoilt)
        if block is None:
            assert np.isnan(np.asarray(result.rows, np.float32)).all()
            assert np.isnan(np.asarray(result.columns, np.float32)).all()
            continue
        expected = [np.array(field) for field in program(way, jnp.float8_e4m3fn, block)(x)]
        for side, (a, b) in enumerate([(i, j), (j, i)]):
            expected[side][a, b // 32 * 32 : (b // 32 + 1) * 32] = np.nan
            expected[2 + side][a, b // 32] = np.nan
        assert_same_bits(tuple(result), tuple(expected))


@pytest.mark.parametrize("dtype", FORMATS)
def test_one_scale_is_that_of_the_products_of_autocast(dtype, users_code):
    cases = [normal((32, 40), x_dtype) for x_dtype in READ]
    cases += [np.zeros((2, 2), np.float32), np.float32([[1, np.inf]]), np.float32([[1e38, 2.0**-126]])]
    for x in cases:
        rows, columns, scale = program(Way("xla"), dtype)(x)
        low, exponent = jax.jit(functools.partial(_float8.quantize, dtype=dtype))(x)
        assert_same_bits(rows, low)
        assert scale == 2.0 ** -int(exponent) or not np.isfinite(x).all()
        assert_same_bits(columns, np.asarray(low).T)


@pytest.mark.parametrize("x_dtype", READ)
def test_blocks_are_those_of_the_products_of_autocast(x_dtype):
    x = normal((64, 96), x_dtype)
    x[3, 5], x[40, 70] = np.inf, 0
    rows, row_scales = jax.jit(lambda x: _float8.quantize_blocks(x, jnp.float8_e4m3fn, 1))(x)
    columns, column_scales = jax.jit(lambda x: _float8.quantize_blocks(x, jnp.float8_e4m3fn, 0))(x)
    assert_same_bits(tuple(program(Way("xla"), block=32)(x)), (rows, columns, row_scales, column_scales))


# Sizes and types


@pytest.mark.parametrize("way", [pytest.param(Way("xla"), id="xla"), INTERPRETED[1], COMPILED[1]])
def test_a_matrix_may_have_any_size(way):
    for shape in [(1, 1), (3, 5), (127, 129), (130, 384), (9000, 1)]:
        x = normal(shape)
        x[-1, -1] = 1e4  # the largest
        assert_same_bits(program(way)(x), exact(x, jnp.float8_e4m3fn, None))
    for shape in [(32, 32), (96, 160), (256, 32)]:
        x = normal(shape, jnp.bfloat16)
        assert_same_bits(program(way, jnp.float8_e5m2, 32)(x), exact(x, jnp.float8_e5m2, 32))


@for_every_kernel
def test_each_element_counts_for_the_largest(kernel, monkeypatch):
    monkeypatch.setattr(triton, "ELEMENTS", 1024)
    monkeypatch.setattr(mosaic_gpu, "LOADS", 1)
    run = jax.jit(functools.partial(quantize, implementation=kernel, interpret=True))
    x = np.ones((128, 128), np.float32)  # 16 blocks for 8 programs
    for at in [(0, 0), (100, 77), (127, 127)]:
        spoilt = x.copy()
        spoilt[at] = -1000
        assert run(spoilt).scale == 4


def test_an_empty_matrix_is_cast():
    rows, columns, scale = quantize(jnp.zeros((0, 3)))
    assert (rows.shape, columns.shape, scale.shape) == ((0, 3), (3, 0), ())


@pytest.mark.long
@for_both_scalings
@pytest.mark.parametrize("way", INTERPRETED)
def test_64_bit_programs_run_the_same_kernel(way, block):
    x = normal((128, 128), jnp.bfloat16)
    result = program(way, block=block)(x)
    with jax.enable_x64(True):
        assert_same_bits(program(way, block=block)(x), result)


# Where no kernel runs


def over_mesh(op):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    return jax.jit(op)(jax.device_put(X, sharding))


X = normal((256, 128))
TRANSFORMED = {
    "eager": lambda op: op(X),
    "jit": lambda op: jax.jit(op)(X),
    "vmap": lambda op: jax.vmap(op)(X.reshape(2, 128, 128)),
    "grad": lambda op: jax.grad(lambda x: op(x).rows.astype(jnp.float32).sum())(X),
    "loop": lambda op: jax.lax.map(op, X.reshape(2, 128, 128)),
    "sharded inputs": over_mesh,
}


@pytest.mark.long
@for_both_scalings
@pytest.mark.parametrize("case", TRANSFORMED)
def test_where_no_kernel_can_run_none_is_silently_plain_jax(case, block, fastest):
    run = TRANSFORMED[case]
    expected = run(lambda x: quantize(x, block=block, implementation="xla"))
    for kernel in KERNELS.oldest:
        fastest(kernel)
        assert_same_bits(run(lambda x: quantize(x, block=block)), expected)


@for_every_kernel
@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("jit", "needs an NVIDIA GPU, but the program is compiled for cpu"),
        ("vmap", "does not support `jax.vmap`"),
        ("grad", "does not support differentiation"),
    ],
)
def test_a_kernel_asked_for_by_name_says_why_it_cannot_run(kernel, case, reason):
    with pytest.raises(NotImplementedError) as error:
        TRANSFORMED[case](lambda x: quantize(x, implementation=kernel))
    assert f'implementation="{kernel}" {reason}' in str(error.value)


def test_sizes_that_mosaic_gpu_cannot_read_are_plain_jax(fastest):
    x = normal((128, 96))
    fastest("mosaic_gpu")
    assert_same_bits(quantize(x), quantize(x, implementation="xla"))
    with pytest.raises(NotImplementedError, match=r"sizes are multiples of 128, but `x` has the shape \(128, 96\)"):
        quantize(x, implementation="mosaic_gpu", interpret=True)


@for_every_kernel
def test_a_matrix_of_symbolic_shape_is_plain_jax(kernel, fastest):
    fastest(kernel)
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 128"), jnp.float32)
    exported = jax.export.export(jax.jit(quantize), platforms=("cpu", "cuda"))(x)
    assert_same_bits(tuple(exported.call(X)), tuple(quantize(X)))
    with pytest.raises(NotImplementedError, match=r"`x` has the shape \(n, 128\)"):
        jax.export.export(jax.jit(functools.partial(quantize, implementation=kernel)))(x)


@for_every_kernel
def test_a_kernel_names_the_gpus_that_it_needs(kernel, monkeypatch):
    class Gpu:
        device_kind, compute_capability = "A fine GPU", "8.6"

    monkeypatch.setattr(jax, "devices", lambda *_: [Gpu])
    with pytest.raises(NotImplementedError, match=r"(Ada|Hopper)\) or newer, but A fine GPU has 8.6"):
        quantize(X, implementation=kernel)


def test_a_backend_that_jax_has_removed_is_plain_jax(fastest, monkeypatch):
    monkeypatch.setitem(sys.modules, "pallas_kernels.quantize.triton", None)
    fastest("triton")
    assert_same_bits(quantize(X), quantize(X, implementation="xla"))
    with pytest.raises(NotImplementedError, match=r'implementation="triton" needs a backend that JAX .* does not have'):
        quantize(X, implementation="triton")


@pytest.mark.parametrize(
    ("x", "arguments", "error", "parts"),
    [
        (X, {"implementation": "cuda"}, ValueError, ["'cuda'", "None, 'xla', 'mosaic_gpu', 'triton'"]),
        (X, {"interpret": True}, ValueError, ["`interpret=True`", "implementation='mosaic_gpu' or 'triton'"]),
        (X, {"dtype": jnp.float8_e4m3b11fnuz}, TypeError, ["float8_e4m3fn, float8_e5m2", "float8_e4m3b11fnuz"]),
        (X, {"dtype": jnp.bfloat16}, TypeError, ["`dtype`", "float8_e4m3fn, float8_e5m2", "bfloat16"]),
        (np.ones((2, 2), np.int32), {}, TypeError, ["`x`", "float32, float16, bfloat16", "int32"]),
        (X, {"block": 16}, ValueError, ["`block`", "None or 32", "16"]),
        (X[0], {}, ValueError, ["matrix", "(128,)"]),
        (X[:33], {"block": 32}, ValueError, ["multiples of 32", "(33, 128)"]),
    ],
    ids=str,
)
def test_wrong_arguments_are_quoted_beside_the_right_ones(x, arguments, error, parts):
    with pytest.raises(error) as raised:
        quantize(x, **arguments)
    for part in ["quantize: ", *parts]:
        assert part in str(raised.value)
