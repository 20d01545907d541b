"""What travels between GPUs in a scaled step, read from programs compiled for 8, 64 and 512 H200s.

Smaller models than in `benchmarks/collectives.py`, whose table holds the figures of a transformer.
"""

import collections
import functools

import collectives
import gpu_aot
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_amp as amp

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("users_code")]
LAYERS, DIM = 2, 512
MATRICES = 2 * LAYERS * DIM * 2 * DIM  # the elements of all of them
FLOAT32_GRADS = 'weight_grad_dtype="float32"'
on_every_scale = pytest.mark.parametrize("devices", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (64, 512))])


def residual_mlp(mesh):
    """A loss function, its parameters and its batch as shapes; the layers are scanned."""
    shapes = {"up": (DIM, 2 * DIM), "bias": (2 * DIM,), "down": (2 * DIM, DIM)}
    params = {name: jax.ShapeDtypeStruct((LAYERS, *shape), jnp.float32) for name, shape in shapes.items()}
    spread = functools.partial(collectives.spread, mesh)

    def layer(x, p):
        hidden = spread(jnp.tanh(x @ p["up"] + p["bias"]))
        return spread(x + hidden @ p["down"]), None

    def loss_fn(params, x):
        x, _ = lax.scan(layer, x, params)
        return jnp.mean(jnp.square(x))

    return loss_fn, params, jax.ShapeDtypeStruct((8 * mesh.size, DIM), jnp.float32)


@functools.cache
def program(devices, way, variant, scaled=True):
    mesh = gpu_aot.h200_mesh(devices)
    # XLA would merge the scalar sums of the loss and of the check into one.
    apart = {"xla_gpu_all_reduce_combine_threshold_bytes": 0}
    return collectives.compiled(mesh, way, variant, residual_mlp(mesh), scaled, compiler_options=apart)


def calls(program):
    return collections.Counter(
        (op, *size) for op, times, sizes in gpu_aot.collectives(program) for size in sizes.items() for _ in range(times)
    )


def sent(devices, way, variant):
    return collectives.on_the_wire(program(devices, way, variant), devices).total()


@on_every_scale
def test_scaling_adds_one_scalar_all_reduce_to_a_sharded_step(devices):
    plain, scaled = (calls(program(devices, "FSDP", "autocast", scaled)) for scaled in (False, True))
    assert scaled - plain == {("all-reduce", "f32", 4): 1}
    assert plain - scaled == {}


def test_scaling_adds_no_collective_where_gradients_are_replicated():
    plain, scaled = (calls(program(8, "data parallel", "autocast", scaled)) for scaled in (False, True))
    assert scaled == plain


@on_every_scale
def test_fsdp_gathers_weights_and_sums_gradients_in_float16_and_sends_half_the_bytes(devices):
    handed_in = collectives.handed_in(program(devices, "FSDP", "autocast"))
    assert handed_in["all-gather", "f16"] * devices >= 2 * MATRICES  # and once more where the backward pass gathers
    assert handed_in["all-gather", "f32"] == 0
    assert handed_in["reduce-scatter", "f16"] == 2 * MATRICES
    assert handed_in["reduce-scatter", "f32"] == LAYERS * 2 * DIM * 4  # biases
    assert sent(devices, "FSDP", "autocast") <= 0.501 * sent(devices, "FSDP", "float32")


@on_every_scale
def test_data_parallel_gradients_are_summed_in_float16(devices):
    handed_in = collectives.handed_in(program(devices, "data parallel", "autocast"))
    biases_and_loss = LAYERS * 2 * DIM * 4 + 4
    assert handed_in == {("all-reduce", "f16"): 2 * MATRICES, ("all-reduce", "f32"): biases_and_loss}


@on_every_scale
def test_float32_weight_gradients_are_summed_in_float32_and_weights_still_gathered_in_float16(devices):
    handed_in = collectives.handed_in(program(devices, "FSDP", FLOAT32_GRADS))
    assert handed_in["reduce-scatter", "f16"] == handed_in["all-gather", "f32"] == 0
    assert handed_in["reduce-scatter", "f32"] > 4 * MATRICES
    assert handed_in["all-gather", "f16"] * devices >= 2 * MATRICES
    assert sent(devices, "FSDP", FLOAT32_GRADS) <= 0.67 * sent(devices, "FSDP", "float32")


def test_float32_weight_gradients_of_data_parallel_steps_are_summed_in_float32():
    handed_in = collectives.handed_in(program(8, "data parallel", FLOAT32_GRADS))
    assert set(handed_in) == {("all-reduce", "f32")}


def test_a_gather_that_is_written_out_behind_a_cast_travels_in_float16():
    mesh = gpu_aot.h200_mesh(8)

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ lax.all_gather(w.astype(jnp.float16), "data", tiled=True).astype(jnp.float32))
        return jnp.mean(jnp.square(x))

    grads = jax.shard_map(jax.grad(amp.autocast(loss_fn)), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    params = [jax.ShapeDtypeStruct((DIM, DIM), jnp.float32)] * 3
    args = gpu_aot.struct(mesh, (params, jax.ShapeDtypeStruct((64, DIM), jnp.float32)), P("data"))
    assert set(collectives.handed_in(gpu_aot.compile_for(grads, *args))) == {
        ("all-gather", "f16"),
        ("reduce-scatter", "f16"),
    }


def test_collectives_in_a_loop_count_as_often_as_it_runs():
    mesh = gpu_aot.h200_mesh(8)

    def layer(x, w):
        return lax.psum(jnp.tanh(x + w), "data"), None

    total = jax.shard_map(
        lambda ws: lax.scan(layer, jnp.zeros(4), ws)[0], mesh=mesh, in_specs=P(None, "data"), out_specs=P()
    )
    ws = gpu_aot.struct(mesh, jax.ShapeDtypeStruct((5, 32), jnp.float32), P(None, "data"))
    assert list(gpu_aot.collectives(gpu_aot.compile_for(total, ws))) == [("all-reduce", 5, {"f32": 16})]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("way", ["XLA", "constraint", "reshard", "shard_map"])
def test_micro_batches_gather_weights_in_float16_and_only_once_where_the_loss_gathers_them(way):
    mesh, steps = gpu_aot.h200_mesh(8), 4
    if way == "reshard":
        mesh = jax.sharding.Mesh(mesh.devices, "data", axis_types=(jax.sharding.AxisType.Explicit,))
    gather = {
        "XLA": lambda w: w,
        "constraint": lambda w: lax.with_sharding_constraint(w, NamedSharding(mesh, P())),
        "reshard": lambda w: jax.sharding.reshard(w, NamedSharding(mesh, P())),
        "shard_map": lambda w: lax.all_gather(w, "data", tiled=True),
    }[way]

    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ gather(w))
            x = collectives.spread(mesh, x) if way in ("XLA", "constraint") else x
        return jnp.mean(jnp.square(x))

    fun = amp.value_and_grad(amp.autocast(loss_fn), accumulate_steps=steps)
    if way == "shard_map":
        fun = jax.shard_map(fun, mesh=mesh, in_specs=P("data"), out_specs=(P(), P("data")), check_vma=False)
    params = [jax.ShapeDtypeStruct((DIM, DIM), jnp.float32)] * 3
    args = gpu_aot.struct(mesh, (params, jax.ShapeDtypeStruct((steps * 8 * 1024, DIM), jnp.float32)), P("data"))
    gathers = [each for each in gpu_aot.collectives(gpu_aot.compile_for(fun, *args)) if each[0] == "all-gather"]
    assert {dtype for _, _, sizes in gathers for dtype in sizes} == {"f16"}
    assert {times for _, times, _ in gathers} == {steps if way == "XLA" else 1}
