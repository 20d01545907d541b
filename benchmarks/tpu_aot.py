"""Compile a JAX function for a TPU on a machine that has none.

Needs `pip install "jax[tpu]"`, and a process that compiles for no GPU: libtpu and the CUDA plugin do not load into one.
A program that does not fit the TPU's memory raises `JaxRuntimeError`.
"""

import os
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no device is used, so several processes may compile

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding


class Tpu(NamedTuple):
    """The smallest topology of a kind of TPU, and the bytes of memory that its compiler gives to a program."""

    topology: str
    memory: int


TPUS = {
    "TPU v5e": Tpu("v5e:2x2", int(15.75 * 2**30)),
    "TPU v6e": Tpu("v6e:2x2", int(31.24 * 2**30)),
    "TPU7x": Tpu("tpu7x:2x2x1", int(94.74 * 2**30)),
}


def compile_for(fun, *args, target):
    """Compiles `fun` for one core of a TPU of `TPUS`; `args` are trees of arrays or ShapeDtypeStructs."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[target].topology).devices
    sharding = SingleDeviceSharding(devices[0])
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    return jax.jit(fun).trace(*args).lower(lowering_platforms=("tpu",)).compile()
