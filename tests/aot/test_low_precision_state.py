"""What the optimizer state in 8 bits costs on a GPU, read from programs compiled for H200s: `benchmarks/gpu_aot.py`."""

import functools
import math

import gpu_aot
import jax
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_amp as amp

pytestmark = [pytest.mark.aot, pytest.mark.usefixtures("users_code")]
SHAPES = {"small": (2048, 8192), "large": (4096, 14336), "stacked": (32, 4096, 1024)}  # what XLA fuses depends on sizes
SIZE = sum(map(math.prod, SHAPES.values()))


@functools.cache
def compiled(wrap, optimizer="adamw", devices=1, spec=(), dtype="bfloat16"):
    """A step, parameters and state donated, with remainders of bfloat16 parameters, and the bytes of its moments."""
    tx = wrap(getattr(optax, optimizer)(1e-4))
    tx = tx if dtype == "float32" else amp.low_precision_params(tx, remainder=True)
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in SHAPES.items()}
    mesh = gpu_aot.h200_mesh(devices)

    def place(x):
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, P(*[None] * (x.ndim - 2), *spec) if x.ndim > 1 else P())
        )

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    kept = jax.tree.map(place, (params, jax.eval_shape(tx.init, params)))
    shardings = jax.tree.map(lambda x: x.sharding, kept)
    program = gpu_aot.compile_for(step, *kept, kept[0], donate_argnums=(0, 1), out_shardings=shardings)
    return program, sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(kept[1])) - (dtype == "bfloat16") * 2 * SIZE


@pytest.mark.sweep(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("optimizer", "moments"), [("adamw", 2), ("lion", 1)])
def test_a_step_moves_each_value_once_and_holds_nothing_more(optimizer, moments, dtype):
    program, state = compiled(amp.low_precision_state, optimizer, dtype=dtype)
    cost = gpu_aot.cost(program)
    assert state / SIZE <= 1.032 * moments
    # Parameter, remainder, gradient and codes are read, and all but the gradient written.
    assert cost["bytes_moved"] / SIZE <= {"bfloat16": 10, "float32": 12}[dtype] + 2.45 * moments
    # One kernel has the size of the leaf; two for each moment read and compute the formats of its blocks.
    assert cost["temp_bytes"] / SIZE <= 0.1 * moments
    assert cost["kernels"] <= len(SHAPES) * (1 + 2 * moments) + 5  # and those of scalars


def test_a_step_moves_57_percent_of_one_with_moments_in_float32():
    low, full = (gpu_aot.cost(compiled(wrap)[0])["bytes_moved"] for wrap in (amp.low_precision_state, lambda tx: tx))
    assert low <= 0.571 * full


@pytest.mark.sweep(2)
@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=["FSDP", "last axis"])
def test_a_sharded_step_sends_nothing_and_costs_each_device_its_part(spec):
    program, _ = compiled(amp.low_precision_state, devices=8, spec=spec)
    assert list(gpu_aot.collectives(program)) == []
    cost = gpu_aot.cost(program)
    assert cost["bytes_moved"] / SIZE * 8 <= 15.3
    assert cost["temp_bytes"] / SIZE * 8 <= 0.4
