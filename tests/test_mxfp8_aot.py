"""What mxfp8 costs on a GPU, read from programs compiled for a B200 and an H200 on any machine."""

import functools

import float8
import gpu_aot
import jax
import jax.numpy as jnp
import pytest
from float8 import block_products
from float8_libraries import LAYERS
from models import mlp_case

import jmp_amp as amp
from pallas_kernels import _tune

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("users_code")]

SIZES = {"tokens": 1024, "dim": 1024, "hidden": 4096}  # the smallest that autocast computes in mxfp8


def compiled(dtype, target):
    loss_fn, args = mlp_case(None, **SIZES)
    return float8.lower(amp.autocast(loss_fn, dtype), args, target).compile()


@functools.cache
def sharded(dtype):
    return float8.lower_sharded(gpu_aot.mesh("B200", 8), {"dtype": dtype}, **SIZES | {"tokens": 8192}).compile()


def gathered(program):
    """The bytes that all-gathers move, by dtype."""
    sizes = [each for op, _, each in gpu_aot.collectives(program) if op == "all-gather"]
    return {dtype: sum(each.get(dtype, 0) for each in sizes) for dtype in {d for each in sizes for d in each}}


def test_every_product_of_an_mlp_multiplies_blocks_on_a_b200():
    program = compiled("mxfp8", "B200")
    assert block_products(program) == 6
    assert list(gpu_aot.products(program)) == []


def test_a_layer_needs_fewer_kernels_and_bytes_than_with_jaxs_own_quantizer():
    ours, jaxs = (
        float8.compiled_layer(LAYERS[f"{name}, mxfp8"]()) for name in ("autocast", "`jax.nn.scaled_dot_general`")
    )
    assert block_products(ours) == block_products(jaxs) == 3
    ours, jaxs = map(gpu_aot.cost, (ours, jaxs))
    assert ours["kernels"] < jaxs["kernels"]
    assert ours["bytes_moved"] < jaxs["bytes_moved"]


def test_a_layer_moves_little_more_than_it_must_if_a_kernel_casts():
    tokens, dim = float8.TOKENS, float8.DIM
    arrays = {"bfloat16": 2 * tokens * dim, "float32": dim * dim}  # the input and the cotangent, and the weight
    least = 2 * (2 * arrays["bfloat16"] + 4 * arrays["float32"])  # read; and as many bytes are written as results
    least += 2 * 2 * (1 + 1 / 32) * sum(arrays.values())  # both casts, written and read
    program = float8.compiled_layer(LAYERS[float8.BY_KERNEL](), "triton")
    assert block_products(program) == 3
    cost = gpu_aot.cost(program)
    assert cost["kernels"] == 12  # three of them cast, three multiply, and the rest arrange the scales for cuDNN
    assert cost["bytes_moved"] < 1.02 * least


def test_an_h200_computes_the_base_dtype():
    with pytest.warns(UserWarning, match="NVIDIA H200 has no units for blocks of float8"):
        program = compiled("mxfp8", "H200")
    assert block_products(program) == 0
    assert "f8e" not in program.as_text()
    assert gpu_aot.cost(program) == gpu_aot.cost(compiled("bfloat16", "H200"))


def test_fsdp_gathers_weights_in_blocks():
    assert block_products(sharded("mxfp8")) == 6
    moved, (in_bfloat16,) = gathered(sharded("mxfp8")), gathered(sharded("bfloat16")).values()
    # In blocks along the rows, and for the gradient in blocks along the columns: each has half the bytes of bfloat16.
    assert moved == {"f8e4m3fn": in_bfloat16, "f8e8m0fnu": in_bfloat16 // 32}


def test_the_layer_that_tune_times_multiplies_blocks_on_a_b200():
    shapes, dtypes = [(512, 256), (256, 384), (512, 384)], [jnp.bfloat16, jnp.float32, jnp.bfloat16]
    args = gpu_aot.struct(gpu_aot.mesh("B200"), [*map(jax.ShapeDtypeStruct, shapes, dtypes)])
    assert block_products(gpu_aot.compile_for(_tune.in_mxfp8, *args)) == 3
    types = [[(x.shape, x.dtype) for x in jax.eval_shape(way, *args)] for way in (_tune.in_mxfp8, _tune.in_bfloat16)]
    assert types[0] == types[1]
    assert len(list(gpu_aot.products(gpu_aot.compile_for(_tune.in_bfloat16, *args)))) == 3
