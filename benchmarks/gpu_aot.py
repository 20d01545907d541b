#!/usr/bin/env python3
"""Compile a JAX function for NVIDIA GPUs on a machine that has none, and say what it would cost.

XLA's CUDA compiler needs a description of the target, not the target: this script hands it one (`GPUS`), so that
fusions, kernel counts, bytes moved, peak temporary memory, aliasing and collectives can be read on any CPU machine, for
one GPU or for hundreds. It runs nothing on a GPU and times nothing.

Needs, beside jax: `pip install jax-cuda13-plugin==$V jax-cuda13-pjrt==$V` with V the installed jax
version, and `ptxas` (on PATH, under /usr/local/cuda*, or from `pip install nvidia-cuda-nvcc`).
cuDNN's attention needs cuDNN, and no GPU either: `pip install --no-deps --target DIR nvidia-cudnn-cu13 nvidia-cublas`
(1.5 GB), with DIR on PYTHONPATH and the folders DIR/nvidia/*/lib on LD_LIBRARY_PATH.

As a program:  python gpu_aot.py FILE.py:CASE [--target T4] [--devices 8] [--hlo OUT.txt]
    CASE is a function in FILE.py that takes the mesh and returns (fun, args) or (fun, args, jit_kwargs),
    args being jax.ShapeDtypeStruct with shardings (see `struct`).
As a module:   from gpu_aot import mesh, struct, compile_for, cost, collectives, products, fused_by_triton
"""

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import multiprocessing
import os

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from hlo import collectives, cost, fused_by_triton, products
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

__all__ = [
    "GPUS",
    "collectives",
    "compile_for",
    "cost",
    "cost_in_a_process",
    "cost_on",
    "fused_by_triton",
    "h200_mesh",
    "lower_for",
    "mesh",
    "products",
    "struct",
]


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as its data sheet and the table of compute capabilities describe it.

    Attributes:
        kind: the name that JAX gives to the device.
        capability: the compute capability, `"7.5"`; with an `a` for code that runs on this generation alone, such as
            warpgroup instructions.
        cores: the number of multiprocessors.
        lanes: float32 units of a multiprocessor.
        threads: the most threads that a multiprocessor holds.
        shared: shared memory of a multiprocessor, in KiB; a block can have 1 KiB less, or all of it on a T4.
        cache: the second level, in MiB.
        clock: in GHz.
        bandwidth: of the memory, in GB per second.
        memory: in bytes, as the driver counts it.
    """

    kind: str
    capability: str
    cores: int
    lanes: int
    threads: int
    shared: int
    cache: int
    clock: float
    bandwidth: int
    memory: int

    def description(self) -> str:
        """Returns a `GpuTargetConfigProto` as text: what XLA compiles for in place of a device."""
        major, minor = self.capability.removesuffix("a").split(".")
        features = "feature_extension: ACCELERATED_FEATURES" if self.capability.endswith("a") else ""
        of_block = self.shared if self.capability == "7.5" else self.shared - 1
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: {self.shared * 2**10}
  shared_memory_per_block_optin: {of_block * 2**10}
  threads_per_core_limit: {self.threads}  core_count: {self.cores}  fpus_per_core: {self.lanes}
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  memory_bandwidth: {self.bandwidth * 10**9}  l2_cache_size: {self.cache * 2**20}  clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} {features} }}
  device_vendor: "NVIDIA Corporation"  platform_version: "Compute Capability {self.capability}"
  device_address_bits: 64  pcie_bandwidth: 34359738368  name: "{self.kind}"
  driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{self.kind}"
"""


GPUS = {
    "T4": Gpu("Tesla T4", "7.5", 40, 64, 1024, 64, 4, 1.59, 320, 15843721216),
    "A100": Gpu("NVIDIA A100-SXM4-80GB", "8.0", 108, 64, 2048, 164, 40, 1.41, 2039, 85899345920),
    "L4": Gpu("NVIDIA L4", "8.9", 58, 128, 1536, 100, 48, 2.04, 300, 23034068992),
    "H100": Gpu("NVIDIA H100 80GB HBM3", "9.0a", 132, 128, 2048, 228, 50, 1.98, 3350, 85520809984),
    "H200": Gpu("NVIDIA H200", "9.0a", 132, 128, 2048, 228, 50, 1.98, 4800, 151397597184),
    "B200": Gpu("NVIDIA B200", "10.0a", 148, 128, 2048, 228, 126, 1.965, 7700, 191514411008),
}


def mesh(target, n=1, axis="data"):
    """A mesh of `n` GPUs of `GPUS` that exist only for the compiler (8 to a host)."""
    hosts, per_host = (1, n) if n <= 8 else (n // 8, 8)
    topology = topologies.get_topology_desc(
        topology_name=target,
        platform="cuda",
        topology=f"{hosts}x{per_host}x1",
        target_config=GPUS[target].description(),
    )
    return topologies.make_mesh(topology, (n,), (axis,))


def h200_mesh(n=1, axis="data"):
    """A mesh of `n` H200s, the target of all figures that name no other."""
    return mesh("H200", n, axis)


def struct(mesh, tree, spec=PartitionSpec()):
    """`tree` of arrays or ShapeDtypeStructs -> ShapeDtypeStructs placed on `mesh` by `spec`."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def lower_for(fun, *args, **jit_kwargs):
    """Lower `fun` for the devices that the shardings of `args` name. Pallas kernels included."""
    gpu = min(jax.tree.leaves(args)[0].sharding.device_set, key=lambda device: device.id)
    device = AbstractDevice(device_kind=gpu.device_kind, num_cores=gpu.core_count, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(fun, **jit_kwargs).trace(*args).lower(lowering_platforms=("cuda",))


def compile_for(fun, *args, **jit_kwargs):
    """Compile `fun` for the devices that the shardings of `args` name. Pallas kernels included."""
    return lower_for(fun, *args, **jit_kwargs).compile()


def cost_on(target, fun, *args):
    """The `cost` of `fun`, compiled for a GPU of the kind `target`, for arguments of these shapes and dtypes."""
    return cost(compile_for(fun, *struct(mesh(target), args)))


def cost_in_a_process(target, fun, *args):
    """`cost_on` in a process of its own: the compiler of Mosaic GPU kernels keeps the first kind of GPU."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(cost_on, target, fun, *args).result()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", help="FILE.py:FUNCTION")
    parser.add_argument("--target", choices=GPUS, default="H200")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--hlo", help="write the optimized HLO here")
    options = parser.parse_args()
    path, name = options.case.rsplit(":", 1)
    spec = importlib.util.spec_from_file_location("case", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fun, args, *rest = getattr(module, name)(mesh(options.target, options.devices))
    compiled = compile_for(fun, *args, **(rest[0] if rest else {}))
    if options.hlo:
        with open(options.hlo, "w") as f:
            f.write(compiled.as_text())
    for key, value in cost(compiled).items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
