"""Autocast and the kernels on GPUs from T4 to B200 and on TPUs, read from programs compiled on any machine."""

import collections
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import gpu_aot
import jax
import jax.numpy as jnp
import optax
import pytest
import small_net

import jmp_amp as amp
from pallas_kernels import check_finite, unscale_check

pytestmark = pytest.mark.usefixtures("users_code")

ROOT = pathlib.Path(__file__).parents[2]
Shape = jax.ShapeDtypeStruct

OPS = {"check_finite": check_finite, "unscale_check": unscale_check}
KERNELS = {"A100": "triton", "L4": "triton", "H200": "mosaic_gpu", "B200": "mosaic_gpu"}
"""The kernel that is for a GPU."""
LEAVES = [Shape((size,), dtype) for size in (5, 8193) for dtype in (jnp.float32, jnp.float16, jnp.bfloat16)]


def compiled(fun, args, target):
    return gpu_aot.compile_for(fun, *gpu_aot.struct(gpu_aot.mesh(target), args))


def dtypes_of_products(target, dtype):
    step = jax.value_and_grad(amp.autocast(small_net.loss_fn, dtype))
    return collections.Counter(d for _, _, d in gpu_aot.products(compiled(step, small_net.ARGS, target)))


@pytest.mark.aot
@pytest.mark.sweep(5)
@pytest.mark.parametrize("target", gpu_aot.GPUS)
def test_every_product_multiplies_the_low_dtype_of_the_gpu(target):
    dtype, short = ("float16", "f16") if target == "T4" else ("bfloat16", "bf16")
    assert dtypes_of_products(target, dtype) == {(short, short): small_net.PRODUCTS}


@pytest.mark.aot
def test_a_t4_multiplies_float32_where_bfloat16_is_asked_for():
    assert dtypes_of_products("T4", "bfloat16") == {("f32", "f32"): small_net.PRODUCTS}


def launches(op, implementation, target, cost=gpu_aot.cost_on):
    """Launches of kernels, and of all, of an op on `LEAVES`."""
    figures = cost(target, functools.partial(OPS[op], implementation=implementation), LEAVES, Shape((), jnp.float32))
    return figures["kinds"].get("custom-call", 0), figures["kernels"]


@pytest.mark.aot
@pytest.mark.sweep(3)
@pytest.mark.parametrize("target", KERNELS)
@pytest.mark.parametrize("op", OPS)
def test_the_kernel_of_a_gpu_reads_all_leaves_in_one_launch(op, target):
    kernels, of_all = launches(op, KERNELS[target], target, gpu_aot.cost_in_a_process)
    assert kernels == 1
    assert of_all <= 4


@pytest.mark.aot
@pytest.mark.parametrize("op", OPS)
def test_a_t4_is_served_by_plain_jax(op):
    kernels, of_all = launches(op, None, "T4")
    assert kernels == 0
    assert of_all <= 2 * len(LEAVES)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Ampere"):  # why it has no kernel
        launches(op, "triton", "T4")


def train_step(implementation=None):
    tx = amp.dynamic_loss_scale(optax.adamw(1e-3), implementation=implementation)

    def step(params, opt_state, x):
        scale = amp.get_loss_scale(opt_state)
        grad_fn = amp.value_and_grad(amp.autocast(small_net.loss_fn, "bfloat16"), loss_scale=scale)
        loss, grads = grad_fn(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params, x = small_net.ARGS
    return jax.jit(step).trace(params, jax.eval_shape(tx.init, params), x)


def test_a_train_step_lowers_for_tpus_without_a_kernel():
    assert "custom_call" not in train_step().lower(lowering_platforms=("tpu",)).as_text()
    for kernel in ("mosaic_gpu", "triton"):
        with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU, but the program is compiled for tpu"):
            train_step(kernel).lower(lowering_platforms=("tpu",))


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="compiling for a TPU needs libtpu")
def test_every_product_multiplies_bfloat16_on_tpus():
    path = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks", ROOT / "tests/helpers")))
    done = subprocess.run(
        [sys.executable, ROOT / "tests/helpers/workers/tpu_worker.py"],
        env={**os.environ, "PYTHONPATH": path, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
        check=True,
        capture_output=True,
        text=True,
    )
    for target, products in json.loads(done.stdout).items():
        assert products == {"bf16 bf16": small_net.PRODUCTS}, target
