"""What `quantize` costs on GPUs, read from programs compiled on any machine: `benchmarks/gpu_aot.py`."""

import functools

import gpu_aot
import jax
import jax.numpy as jnp
import pytest
import quantized_layer
from jax import ShapeDtypeStruct as Shape
from jax.sharding import PartitionSpec

from pallas_kernels import quantize
from pallas_kernels.quantize.api import KERNELS

pytestmark = pytest.mark.aot

mesh = functools.cache(gpu_aot.mesh)
for_both_scalings = pytest.mark.parametrize("block", [None, 32])
for_every_kernel = pytest.mark.parametrize("kernel", KERNELS.oldest)


EVERY, DATA = PartitionSpec(), PartitionSpec("data")


def cost(x, target="H200", devices=1, spec=EVERY, wrap=lambda op: op, **options):
    x = gpu_aot.struct(mesh(target, devices), x, spec)
    return gpu_aot.cost(gpu_aot.compile_for(wrap(functools.partial(quantize, **options)), x))


@for_both_scalings
@pytest.mark.parametrize(
    ("x_dtype", "dtype"),
    [(jnp.float32, jnp.float8_e5m2), (jnp.bfloat16, jnp.float8_e4m3fn), (jnp.float16, jnp.float8_e4m3fn)],
)
@pytest.mark.parametrize(("kernel", "target"), [("mosaic_gpu", "H200"), ("triton", "H200"), ("triton", "L4")])
def test_a_matrix_is_read_once_or_with_one_scale_twice_and_each_result_written_once(
    kernel, target, x_dtype, dtype, block
):
    x = Shape((2048, 1024), x_dtype)
    figures = cost(x, target, dtype=dtype, block=block, implementation=kernel)
    reads = 1 if block else 2
    assert figures["kinds"] == {"custom-call": reads}
    least = x.size * (reads * x.dtype.itemsize + 2 + (2 / 32 if block else 0))
    assert least <= figures["bytes_moved"] <= 1.005 * least
    assert figures["temp_bytes"] <= 5000


@for_both_scalings
def test_triton_compiles_for_any_size(block):
    shape = (96, 160) if block else (1003, 517)
    figures = cost(Shape(shape, jnp.bfloat16), block=block, implementation="triton")
    assert figures["kinds"]["custom-call"] == (1 if block else 2)


@for_every_kernel
def test_64_bit_programs_compile(kernel):
    with jax.enable_x64(True):
        for block in (None, 32):
            x = Shape((256, 384), jnp.float32)
            assert cost(x, block=block, implementation=kernel)["kinds"]["custom-call"] == (1 if block else 2)


@for_every_kernel
def test_on_several_devices_the_kernel_runs_inside_shard_map(kernel, fastest):
    fastest(kernel)
    x = Shape((1024, 256), jnp.bfloat16)

    def on_shards(op):
        return jax.shard_map(lambda x: op(x).rows, mesh=mesh("H200", 8), in_specs=DATA, out_specs=DATA)

    assert cost(x, devices=8, spec=DATA, wrap=on_shards, block=32)["kinds"] == {"custom-call": 1}
    assert "custom-call" not in cost(x, devices=8, spec=DATA, block=32)["kinds"]
    with pytest.raises(NotImplementedError, match=r"call it inside `jax.shard_map`"):
        cost(x, devices=8, spec=DATA, block=32, implementation=kernel)


@pytest.mark.parametrize("kernel", KERNELS.oldest)
def test_a_layer_in_blocks_moves_the_bytes_of_the_floor_on_a_b200(kernel):
    triton, cudnn = quantized_layer.PRODUCTS
    keys = [(quantized_layer.BLOCKS, kernel, product) for product in (triton, cudnn)]
    by_triton, by_cudnn = gpu_aot.in_a_process(quantized_layer.costs, "B200", keys).values()
    assert by_triton["kernels"] == 6  # three casts, three products
    assert by_triton["bytes_moved"] <= 1.001 * by_triton["floor"]
    assert by_cudnn["kernels"] <= 12  # XLA rearranges the scales of each operand in a kernel
    assert by_cudnn["bytes_moved"] <= 1.02 * by_cudnn["floor"]


@pytest.mark.parametrize("kernel", KERNELS.oldest)
def test_a_layer_with_one_scale_is_nine_kernels(kernel):
    key = quantized_layer.ONE, kernel, "`lax.dot_general`"
    (figures,) = quantized_layer.costs("H200", [key]).values()
    assert figures["kernels"] == 9  # three maxima, three casts, three products
    assert figures["bytes_moved"] <= 1.001 * figures["floor"]
