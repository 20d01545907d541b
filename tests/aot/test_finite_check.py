"""What the kernels cost on a GPU, read from programs compiled for an H200 on any machine: `benchmarks/gpu_aot.py`."""

import functools
import warnings

import gpu_aot
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec
from trees import TREES, Shape, gpt2_small, resnet50

from pallas_kernels import check_finite, unscale_check
from pallas_kernels._implementations import DTYPES
from pallas_kernels.finite_check import launch

pytestmark = pytest.mark.aot

OPS = {"check_finite": check_finite, "unscale_check": unscale_check}
SIZES = [5, 128, 1000, 8192, 8193, 30000]
SHARDED = [Shape((64, 64), jnp.float32), Shape((128,), jnp.float16), Shape((8, 8, 16), jnp.bfloat16)]
EVERY = PartitionSpec()
DATA = PartitionSpec("data")

for_every_kernel = pytest.mark.parametrize("kernel", launch.KERNELS.oldest)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
for_both_ops = pytest.mark.parametrize("op", OPS)


@functools.cache
def mesh(devices=1):
    return gpu_aot.h200_mesh(devices)


def cost(fun, leaves, devices=1, spec=EVERY):
    """Figures of `fun(leaves, inv_scale)`, compiled."""
    (inv_scale,) = gpu_aot.struct(mesh(devices), [Shape((), jnp.float32)])
    return gpu_aot.cost(gpu_aot.compile_for(fun, gpu_aot.struct(mesh(devices), leaves, spec), inv_scale))


def run(op, implementation, **options):
    return functools.partial(OPS[op], implementation=implementation, **options)


@functools.cache
def bytes_of_xla(tree, op):
    return cost(run(op, "xla"), TREES[tree](jnp.float32))["bytes_moved"]


def launches(figures):
    return figures["kinds"].get("custom-call", 0)


GPT2, RESNET, ONE_LEAF = TREES
CASES = [
    # These compile for 10 seconds and more: each kernel reads each tree, by one of the ops.
    (GPT2, "mosaic_gpu", "check_finite"),
    slow(GPT2, "triton", "unscale_check"),
    slow(RESNET, "mosaic_gpu", "unscale_check"),
    slow(RESNET, "triton", "check_finite"),
    *((ONE_LEAF, kernel, op) for kernel in launch.KERNELS.oldest for op in OPS),
]


@pytest.mark.parametrize(("tree", "kernel", "op"), CASES)
def test_a_whole_tree_is_one_launch_and_each_byte_moves_once(tree, kernel, op):
    figures = cost(run(op, kernel), TREES[tree](jnp.float32))
    assert launches(figures) == 1
    assert figures["kernels"] <= 4
    assert figures["bytes_moved"] <= 1.001 * bytes_of_xla(tree, op)


@pytest.mark.sweep(5)  # the first tree and the last, each by one of the ops
@for_both_ops
@pytest.mark.parametrize(
    ("leaves", "most"),
    [
        (gpt2_small(jnp.float32), 110),
        slow(resnet50(jnp.float32), 100),
        ([Shape((64,), jnp.float32)] * 1000, 80),
    ],
    ids=[GPT2, RESNET, "1,000 small leaves"],
)
def test_in_plain_jax_small_leaves_share_a_launch_and_each_byte_moves_once(leaves, most, op):
    figures = cost(run(op, "xla"), leaves)
    assert figures["kernels"] <= most
    elements = sum(x.size for x in leaves)
    # Large leaves have partial sums, and every leaf has a sum that is written and read.
    assert figures["bytes_moved"] <= 4 * elements * (1 if op == "check_finite" else 2) * 1.015 + 12 * len(leaves)


def test_in_plain_jax_inside_shard_map_small_leaves_share_a_launch():
    leaves = [Shape((64, 64), jnp.float32)] * 32
    figures = cost(psum_of_shards(run("check_finite", "xla"), mesh(8)), leaves, devices=8, spec=DATA)
    assert figures["collectives"] == ["all-reduce f32[]"]
    assert figures["kernels"] <= 6


def test_in_plain_jax_no_sharded_leaf_is_gathered():
    grid = Mesh(mesh(8).devices.reshape(2, 4), ("data", "model"))
    (inv_scale,) = gpu_aot.struct(grid, [Shape((), jnp.float32)])
    specs = [("data",), (None, "data"), (), ("model",), ("data", "model"), (("data", "model"),)]
    leaves = [gpu_aot.struct(grid, Shape((64, 64), jnp.float32), PartitionSpec(*spec)) for spec in specs * 4]
    figures = gpu_aot.cost(gpu_aot.compile_for(run("check_finite", "xla"), leaves, inv_scale))
    assert figures["collectives"]
    assert all(name.startswith("all-reduce") for name in figures["collectives"])


@pytest.mark.sweep(3)
@for_every_kernel
@pytest.mark.parametrize("out_dtype", [None, *DTYPES], ids=str)
def test_float16_is_read_as_such_and_results_are_written_as_asked(kernel, out_dtype):
    leaves = [Shape((size,), jnp.float16) for size in SIZES] + [Shape((size, 3), jnp.bfloat16) for size in SIZES]
    fun = run("unscale_check", kernel, out_dtype=out_dtype) if out_dtype else run("check_finite", kernel)
    figures = cost(fun, leaves)
    assert launches(figures) == 1
    assert figures["kernels"] <= 3
    elements = sum(x.size for x in leaves)
    assert figures["bytes_moved"] <= 1.01 * elements * (2 + (out_dtype.itemsize if out_dtype else 0))


@pytest.mark.sweep(3)
@for_every_kernel
@for_both_ops
def test_a_leaf_too_large_for_int32_is_one_launch(kernel, op):
    leaf = Shape((2**31 + 16,), jnp.float16)
    figures = cost(run(op, kernel, **({"out_dtype": jnp.float16} if op == "unscale_check" else {})), [leaf])
    assert launches(figures) == 1
    assert figures["kernels"] <= 4
    assert figures["bytes_moved"] <= 1.001 * leaf.size * (4 if op == "unscale_check" else 2)


@for_every_kernel
def test_a_leaf_that_no_kernel_can_index_is_named(kernel):
    leaves = [Shape((2**31 + 11,), jnp.float16), Shape((1000,), jnp.float32)]
    assert launch.rows(leaves[0].size) is None
    with pytest.raises(NotImplementedError, match=r"leaf\[0\] is float16\[2147483659\]"):
        cost(run("check_finite", kernel), leaves)


@pytest.mark.parametrize(("kernel", "op"), [slow("mosaic_gpu", "unscale_check"), ("triton", "check_finite")])
def test_the_most_leaves_of_one_launch_fit_into_its_parameters(kernel, op, monkeypatch):
    most = launch.MAX_LEAVES
    monkeypatch.setattr(launch, "BLOCK", 1024)  # compiles faster
    figures = cost(run(op, kernel), [Shape((1024,), jnp.float32)] * most)
    assert launches(figures) == 1
    assert figures["kernels"] <= 4


@pytest.mark.sweep(3)
@for_every_kernel
@for_both_ops
def test_64_bit_programs_compile(kernel, op):
    with jax.enable_x64(True):
        leaves = [Shape((size,), dtype) for size in (5, 129, 9000) for dtype in DTYPES]
        assert launches(cost(run(op, kernel), leaves)) == 1
        assert launches(cost(run(op, kernel), [Shape((2**31 + 16,), jnp.float16)])) == 1


def psum_of_shards(op, devices, **options):
    def shard(leaves, inv_scale):
        *out, _, total = op(leaves, inv_scale)
        return *out, jax.lax.psum(total, "data")

    def fun(leaves, inv_scale):
        n = len(jax.eval_shape(op, leaves, inv_scale))
        specs = (DATA, EVERY)[-(n - 1) :]
        return jax.shard_map(shard, mesh=devices, in_specs=(DATA, EVERY), out_specs=specs, **options)(leaves, inv_scale)

    return fun


@for_both_ops
@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        ("mosaic_gpu", {}),
        ("mosaic_gpu", {"check_vma": False}),
        ("triton", {}),
        ("triton", {"check_vma": False}),
    ],
)
def test_inside_shard_map_each_device_runs_the_kernel_on_its_shard(kernel, options, op):
    fun = psum_of_shards(run(op, kernel), mesh(8), **options)
    figures = cost(fun, SHARDED, devices=8, spec=DATA)
    assert launches(figures) == 1
    assert figures["collectives"] == ["all-reduce f32[]"]


@for_every_kernel
@for_both_ops
def test_what_the_compiler_partitions_has_one_collective_and_no_kernel(kernel, op):
    assert launches(cost(run(op, kernel), SHARDED)) == 1  # on one device
    figures = cost(run(op, None), SHARDED, devices=8, spec=DATA)
    assert launches(figures) == 0
    assert figures["collectives"] == ["all-reduce f32[]"]
    with pytest.raises(NotImplementedError, match=rf'implementation="{kernel}" .* inside `jax.shard_map`'):
        cost(run(op, kernel), SHARDED, devices=8, spec=DATA)


@for_every_kernel
def test_a_shard_map_that_leaves_an_axis_to_the_compiler_has_no_kernel(kernel):
    grid = Mesh(mesh(8).devices.reshape(2, 4), ("data", "model"))
    (inv_scale,) = gpu_aot.struct(grid, [Shape((), jnp.float32)])
    leaves = gpu_aot.struct(grid, [Shape((64, 64), jnp.float32)], PartitionSpec("data", "model"))

    def compiled(implementation):
        fun = psum_of_shards(run("check_finite", implementation), grid, axis_names={"data"})
        return gpu_aot.cost(gpu_aot.compile_for(fun, leaves, inv_scale))

    assert launches(compiled(None)) == 0
    with pytest.raises(NotImplementedError, match=rf'implementation="{kernel}" .* inside `jax.shard_map`'):
        compiled(kernel)


def test_who_asks_for_triton_is_not_warned_and_other_warnings_are():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert launches(cost(run("check_finite", "triton"), [Shape((100,), jnp.float32)])) == 1
        assert [str(w.message) for w in caught] == []
        warnings.warn("Pallas' Triton backend is deprecated", DeprecationWarning, stacklevel=1)
        assert len(caught) == 1
