"""What float8 costs on a GPU, read from programs compiled for an H200 on any machine; see `benchmarks/gpu_aot.py`.

Smaller models than in `benchmarks/float8.py`, whose tables hold the figures of the real ones.
"""

import functools

import float8
import gpu_aot
import jax
import pytest
from models import experts_case, gpt_case, mlp_case

import jmp_amp as amp

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("users_code")]

SIZES = {"tokens": 1024, "dim": 1024, "hidden": 4096}  # the smallest that autocast computes in float8
each_compiler = pytest.mark.parametrize("flags", float8.FLAGS)


@functools.cache
def mlp(dtype):
    loss_fn, args = mlp_case(None, **SIZES)
    return float8.lower(amp.autocast(loss_fn, dtype), args)


@functools.cache
def compiled_mlp(dtype, flags):
    return mlp(dtype).compile(float8.FLAGS[flags])


@functools.cache
def sharded_mlp(dtype):
    return float8.lower_sharded(gpu_aot.h200_mesh(8), {"dtype": dtype}, **SIZES | {"tokens": 8192}).compile()


def gathered(program):
    calls = [sizes for op, _, sizes in gpu_aot.collectives(program) if op == "all-gather"]
    return {dtype for sizes in calls for dtype in sizes}, sum(sum(sizes.values()) for sizes in calls)


@each_compiler
def test_every_product_of_an_mlp_multiplies_float8(flags):
    count, _ = float8.products(compiled_mlp("float8", flags))
    assert count == {"float8": 6}


@each_compiler
def test_bytes_moved_are_near_those_of_bfloat16(flags):
    moved, in_bfloat16 = (gpu_aot.cost(compiled_mlp(dtype, flags))["bytes_moved"] for dtype in ("float8", "bfloat16"))
    assert moved <= 1.15 * in_bfloat16


def test_a_scanned_gpt_has_the_share_of_float8_that_explain_predicts():
    loss_fn, args = gpt_case(None, layers=2, dim=1024, heads=8, vocab=8192, batch=2, scan=True)
    predicted = amp.explain(loss_fn, "float8")(*args).summary()["matmul_flops"]
    _, flops = float8.products(float8.lower(amp.autocast(loss_fn, "float8"), args).compile())
    assert 0.5 < predicted["float8"] < 0.9  # products with small weights, and attention, stay bfloat16
    assert flops["float8"] / flops.total() == pytest.approx(predicted["float8"])


def test_fsdp_gathers_weights_in_float8():
    dtypes, size = gathered(sharded_mlp("float8"))
    _, in_bfloat16 = gathered(sharded_mlp("bfloat16"))
    assert dtypes == {"f8e4m3fn"}
    assert size == 0.5 * in_bfloat16


def test_fsdp_finds_scales_by_all_reduces_of_scalars():
    scalars = float8.scalar_all_reduces(sharded_mlp("float8"))
    assert sum(scalars) == 7  # the loss, two weights, two activations and two cotangents


@each_compiler
@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", ["H200", "B200"])
def test_both_passes_of_experts_multiply_float8_and_move_fewer_bytes_than_bfloat16(target, flags):
    loss_fn, (params, *args) = experts_case(None, experts=4, tokens=1024, dim=2048, hidden=2048)
    args = gpu_aot.struct(gpu_aot.mesh(target), (params, *args))
    moved = {}
    for dtype, kind in {"float8": "float8", "bfloat16": "bf16"}.items():
        gradients = jax.value_and_grad(amp.autocast(loss_fn, dtype), (0, 1))
        program = gpu_aot.lower_for(gradients, *args).compile(float8.FLAGS[flags])
        count, _ = float8.products(program)
        assert count == {kind: 6}
        moved[dtype] = gpu_aot.cost(program)["bytes_moved"]
    assert moved["float8"] < moved["bfloat16"]


def test_micro_batches_do_not_read_the_weights_again_for_their_scales(monkeypatch):
    loss_fn, args = mlp_case(None, **SIZES | {"tokens": 4096})
    nbytes = 4 * sum(x.size for x in jax.tree.leaves(args[0]))

    def moved():
        gradients = amp.value_and_grad(amp.autocast(loss_fn, "float8"), accumulate_steps=4)
        return gpu_aot.cost(gpu_aot.compile_for(gradients, *gpu_aot.struct(gpu_aot.mesh("H200"), args)))["bytes_moved"]

    once = moved()
    monkeypatch.setattr("jmp_amp._loss_scale._grad.is_float8_scale", lambda *args, **params: False)
    assert moved() - once >= 3 * nbytes


@pytest.mark.slow  # compiles two scanned transformers
def test_micro_batches_hold_little_more_memory_than_in_bfloat16():
    loss_fn, args = gpt_case(None, layers=4, dim=1024, heads=8, vocab=8192, batch=4, length=512, scan=True)
    programs = [float8.lower(amp.autocast(loss_fn, dtype), args, micro_batches=4) for dtype in ("float8", "bfloat16")]
    held, in_bfloat16 = (gpu_aot.cost(program.compile())["temp_bytes"] for program in programs)
    assert held <= 1.10 * in_bfloat16
