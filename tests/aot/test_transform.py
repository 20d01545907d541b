"""What a scaled step costs on a GPU, read from programs compiled for an H200 on any machine: `benchmarks/gpu_aot.py`.

The step of the whole GPT-2 small, without its forward and backward pass: gradients come as arguments.
"""

import functools

import gpu_aot
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from trees import gpt2_small

import jmp_amp as amp

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("users_code")]
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
STEPS = {
    "plain": ADAMW,
    "scaled": amp.dynamic_loss_scale(ADAMW, implementation="mosaic_gpu"),
    "scaled in plain JAX": amp.dynamic_loss_scale(ADAMW, implementation="xla"),
    "clipped": amp.dynamic_loss_scale(ADAMW, implementation="mosaic_gpu", clip_global_norm=1.0),
    "clipped in plain JAX": amp.dynamic_loss_scale(ADAMW, clip_global_norm=1.0),
    "clipped by optax": amp.dynamic_loss_scale(CLIPPED, skip="cond"),
}


def compiled(tx, params, mesh, spec):
    state = jax.eval_shape(tx.init, params)
    placed = gpu_aot.struct(mesh, params, spec)
    # State of the parameters' shapes is placed like them, scalars are everywhere.
    states = jax.tree.map(lambda x: gpu_aot.struct(mesh, x, spec if x.shape else P()), state)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return gpu_aot.compile_for(step, placed, states, placed, donate_argnums=(0, 1))


@functools.cache
def cost(name):
    figures = gpu_aot.cost(compiled(STEPS[name], gpt2_small(jnp.float32), gpu_aot.h200_mesh(), P()))
    # XLA copies a counter or two of 4 bytes, depending on its version.
    return figures | {"launches": figures["kernels"] - figures["kinds"].get("copy", 0)}


def test_a_scaled_step_is_ten_launches_and_one_read_of_the_gradients_more_than_a_plain_one():
    plain, scaled = cost("plain"), cost("scaled")
    assert scaled["launches"] <= plain["launches"] + 10
    assert scaled["bytes_moved"] <= 1.15 * plain["bytes_moved"]


def test_in_plain_jax_a_scaled_step_is_110_launches_and_the_scale_more_than_a_plain_one():
    plain, scaled = cost("plain"), cost("scaled in plain JAX")
    assert scaled["launches"] <= plain["launches"] + 110 + 10
    assert scaled["bytes_moved"] <= 1.15 * plain["bytes_moved"]
    assert scaled["launches"] > cost("scaled")["launches"]


def test_clipping_costs_a_launch():
    assert cost("clipped")["launches"] <= cost("scaled")["launches"] + 1
    assert cost("clipped")["bytes_moved"] <= 1.0001 * cost("scaled")["bytes_moved"]


@pytest.mark.slow  # compiles three steps of GPT-2
def test_in_plain_jax_clipping_costs_a_launch_and_less_than_that_of_optax():
    assert cost("clipped in plain JAX")["launches"] <= cost("scaled in plain JAX")["launches"] + 1
    assert cost("clipped in plain JAX")["launches"] < cost("clipped by optax")["launches"]
    assert cost("clipped in plain JAX")["bytes_moved"] < cost("clipped by optax")["bytes_moved"]


@pytest.mark.parametrize("name", ["scaled", "scaled in plain JAX"])
def test_donated_buffers_stay_in_place(name):
    plain, scaled = cost("plain"), cost(name)
    assert scaled["alias_bytes"] >= plain["alias_bytes"]
    assert scaled["temp_bytes"] < 1e-3 * scaled["alias_bytes"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize("clip", [None, 1.0])
def test_over_eight_gpus_a_step_adds_one_scalar_collective(clip):
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (128,), (8, 8, 16))]
    tx = amp.dynamic_loss_scale(ADAMW, clip_global_norm=clip)
    figures = gpu_aot.cost(compiled(tx, params, gpu_aot.h200_mesh(8), P("data")))
    (collective,) = figures["collectives"]
    assert collective in ("all-reduce f32[]", "all-reduce ((f32[]), f32[])")  # the second one is asynchronous
    assert gpu_aot.cost(compiled(ADAMW, params, gpu_aot.h200_mesh(8), P("data")))["collectives"] == []


@pytest.mark.parametrize("shapes", [[(3000,)], [(32, 64), (64,), (64, 10), (10,)]], ids=["one leaf", "four leaves"])
def test_on_a_cpu_a_scaled_step_runs_eight_operations_on_scalars_more_than_apply_if_finite(shapes):
    params = [jnp.ones(shape) for shape in shapes]
    operations = {}
    for name, tx in {"checked": optax.apply_if_finite(ADAMW, 10), "scaled": amp.dynamic_loss_scale(ADAMW)}.items():

        def step(params, state, grads, tx=tx):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        program = jax.jit(step, donate_argnums=(0, 1)).lower(params, tx.init(params), params).compile()
        operations[name] = gpu_aot.cost(program)["kernels"]
    assert operations["scaled"] <= operations["checked"] + 8
