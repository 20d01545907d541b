#!/usr/bin/env python3
"""Compile a JAX function for NVIDIA H200 GPUs on a machine that has none, and say what it would cost.

XLA's CUDA compiler needs a description of the target, not the target: this script hands it one, so
that fusions, kernel counts, bytes moved, peak temporary memory, aliasing and collectives can be read
on any CPU machine, for one GPU or for hundreds. It runs nothing on a GPU and times nothing.

Needs, beside jax: `pip install jax-cuda13-plugin==$V jax-cuda13-pjrt==$V` with V the installed jax
version, and `ptxas` (on PATH, under /usr/local/cuda*, or from `pip install nvidia-cuda-nvcc`).

As a program:  python gpu_aot.py FILE.py:CASE [--devices 8] [--hlo OUT.txt]
    CASE is a function in FILE.py that takes the mesh and returns (fun, args) or (fun, args, jit_kwargs),
    args being jax.ShapeDtypeStruct with shardings (see `struct`).
As a module:   from gpu_aot import h200_mesh, struct, compile_for, cost, collectives, products, fused_by_triton
"""

import argparse
import collections
import importlib.util
import math
import os
import re

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec

# The figures XLA's cost model and code generator ask for; one H200, 141 GB.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048  core_count: 132  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
  memory_bandwidth: 4800000000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 151397597184  registers_per_core_limit: 65536  registers_per_block_limit: 65536
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  device_vendor: "NVIDIA Corporation"  platform_version: "Compute Capability 9.0a"
  device_address_bits: 64  pcie_bandwidth: 34359738368  name: "NVIDIA H200"
  driver_version: "13.0.0"  runtime_version: "13.0.0"  compile_time_toolkit_version: "13.0.0"  dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def h200_mesh(n=1, axis="data"):
    """A mesh of `n` H200s that exist only for the compiler (8 to a host)."""
    hosts, per_host = (1, n) if n <= 8 else (n // 8, 8)
    topology = topologies.get_topology_desc(
        topology_name="h200", platform="cuda", topology=f"{hosts}x{per_host}x1", target_config=H200
    )
    return topologies.make_mesh(topology, (n,), (axis,))


def struct(mesh, tree, spec=PartitionSpec()):
    """`tree` of arrays or ShapeDtypeStructs -> ShapeDtypeStructs placed on `mesh` by `spec`."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def lower_for(fun, *args, **jit_kwargs):
    """Lower `fun` for the devices that the shardings of `args` name. Pallas kernels included."""
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(fun, **jit_kwargs).trace(*args).lower(lowering_platforms=("cuda",))


def compile_for(fun, *args, **jit_kwargs):
    """Compile `fun` for the devices that the shardings of `args` name. Pallas kernels included."""
    return lower_for(fun, *args, **jit_kwargs).compile()


_BYTES = {
    "f64": 8,
    "s64": 8,
    "u64": 8,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f16": 2,
    "bf16": 2,
    "s16": 2,
    "u16": 2,
    "s8": 1,
    "u8": 1,
    "pred": 1,
    "f8e4m3fn": 1,
    "f8e5m2": 1,
    "c64": 8,
}
_ARRAY = re.compile(r"\b(" + "|".join(sorted(_BYTES, key=len, reverse=True)) + r")\[([\d,]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?(%[\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "partition-id"}
_CONTROL = {"while", "conditional", "call"}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVE = re.compile(rf"= (.*?) ({'|'.join(_COLLECTIVES)})(?:-start)?\(")


def _nbytes(type_text):
    total = 0
    for dtype, dims in _ARRAY.findall(type_text):
        size = _BYTES[dtype]
        for d in filter(None, dims.split(",")):
            size *= int(d)
        total += size
    return total


def _computations(text):
    """{name: lines} of every computation in the HLO text, and the entry's name."""
    bodies, entry, name = {}, None, None
    for line in text.splitlines():
        if (m := _COMPUTATION.match(line)) and "->" in line:
            name = m.group(2)
            bodies[name] = []
            entry = name if m.group(1) else entry
        elif line.startswith("}"):
            name = None
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _called(line):
    """The computations that a loop, a branch or a call runs."""
    named = re.findall(
        r"(?:body|to_apply|true_computation|false_computation|branch_computations)=\{?((?:%[\w.\-]+(?:, )?)+)", line
    )
    return [name for group in named for name in group.split(", ")]


def _times(line):
    trips = re.search(r'"known_trip_count":\{"n":"(\d+)"', line)
    return int(trips.group(1)) if trips and " while(" in line else 1


def _traffic(bodies, name):
    """(kernels by op, bytes moved) of one run of a computation. A loop counts its body times its known trip
    count (once where unknown); a conditional counts its dearest branch."""
    sizes, kinds, moved = {}, collections.Counter(), 0
    for line in bodies[name]:
        m = _INSTRUCTION.match(line)
        if not m:
            continue
        result, type_text, op, rest = m.groups()
        sizes[result] = _nbytes(type_text)
        if op in _FREE or op.endswith("-done"):
            continue
        if op in _CONTROL:
            if branches := [_traffic(bodies, b) for b in _called(line) if b in bodies]:
                n = _times(line)
                inner_kinds, inner_moved = max(branches, key=lambda b: b[1])
                moved += n * inner_moved
                for kind, count in inner_kinds.items():
                    kinds[kind] += n * count
            continue
        kinds[op.removesuffix("-start")] += 1
        operands = [sizes.get(o, 0) for o in re.findall(r"%[\w.\-]+", rest.split("), ")[0])]
        called = re.search(r"calls=(%[\w.\-]+)", line)
        if op in ("fusion", "fusion-start") and called and called.group(1) in bodies:
            moved += _fusion_traffic(bodies[called.group(1)], operands)
        else:
            moved += sizes[result] + sum(operands)
    return kinds, moved


def _fusion_traffic(body, operands):
    """Bytes of one fusion: a parameter that is only sliced counts its slices, one that is only updated in place
    counts the update on the way out."""
    sizes, index, sliced, whole, written = {}, {}, collections.Counter(), set(), 0
    for line in body:
        m = _INSTRUCTION.match(line)
        if not m:
            continue
        name, type_text, op, rest = m.groups()
        sizes[name] = _nbytes(type_text)
        if "ROOT" in line:
            written += sizes[name]
        if op == "parameter":
            index[name] = int(re.match(r"\d+", rest).group())
            continue
        args = re.findall(r"%[\w.\-]+", rest.split("), ")[0])
        if op in ("bitcast", "reshape") and args[0] in index:
            index[name] = index[args[0]]  # another name of the same parameter
            continue
        for position, arg in enumerate(args):
            if arg not in index:
                continue
            if op == "dynamic-slice" and position == 0:
                sliced[index[arg]] += sizes[name]
            elif op == "dynamic-update-slice" and position == 0:
                written -= sizes[name] - sizes.get(args[1], 0)
                sliced[index[arg]] += 0
            else:
                whole.add(index[arg])
    read = sum(size if i in whole or i not in sliced else min(size, sliced[i]) for i, size in enumerate(operands))
    return read + max(written, 0)


def collectives(compiled):
    """Yields (operation, times, {dtype: bytes}) for every collective: how often a step runs it, and what one device
    hands in each time. In loops they count as in `cost`; those in the branches of a conditional count all."""
    bodies, entry = _computations(compiled.as_text())
    yield from _collectives(bodies, entry, 1)


def _collectives(bodies, name, times):
    types = {}
    for line in bodies[name]:
        if not (m := _INSTRUCTION.match(line)):
            continue
        result, types[result], op, rest = m.groups()
        if op in _CONTROL:
            for body in _called(line):
                if body in bodies:
                    yield from _collectives(bodies, body, times * _times(line))
        elif op.removesuffix("-start") in _COLLECTIVES:
            handed_in = collections.Counter()
            for operand in re.findall(r"%[\w.\-]+", rest.split("), ")[0]):
                dtype = _ARRAY.search(types[operand]).group(1)
                handed_in[dtype] += _nbytes(types[operand])
            yield op.removesuffix("-start"), times, dict(handed_in)


def products(compiled):
    """Yields (times, FLOPs of one run, dtypes of the operands) for every matrix product, of Triton or of cuBLAS. The
    dtypes are those that it multiplies: a cast that is fused into it comes before. In loops they count as in `cost`;
    those in the branches of a conditional count all."""
    bodies, entry = _computations(compiled.as_text())
    yield from _products(bodies, entry, 1)


def _products(bodies, name, times):
    types = {}
    for line in bodies[name]:
        if not (m := _INSTRUCTION.match(line)):
            continue
        result, types[result], op, rest = m.groups()
        inner = _called(line) if op in _CONTROL else re.findall(r"calls=(%[\w.\-]+)", line)
        for body in filter(bodies.__contains__, inner):
            yield from _products(bodies, body, times * _times(line))
        if op == "dot" or (op == "custom-call" and "__cublas" in line):
            lhs, rhs = (_dtype_and_shape(types[operand]) for operand in re.findall(r"%[\w.\-]+", rest)[:2])
            axes = re.search(r"lhs_contracting_dim\w+\"?[=:]([\[{][\d\",]*)", line).group(1)
            terms = math.prod(lhs[1][int(axis)] for axis in re.findall(r"\d+", axes))
            yield times, 2 * terms * math.prod(_dtype_and_shape(types[result])[1]), (lhs[0], rhs[0])


def _dtype_and_shape(type_text):
    """The dtype and the shape of an array, or of the first of a tuple."""
    dtype, shape = _ARRAY.search(type_text).groups()
    return dtype, [int(size) for size in filter(None, shape.split(","))]


def cost(compiled):
    """Figures read off the scheduled HLO. `bytes_moved` counts, for every instruction that runs a kernel, what it
    reads plus what it writes: an upper estimate of device-memory traffic, by the same rule for every program, so
    good for ratios."""
    text = compiled.as_text()
    bodies, entry = _computations(text)
    kinds, moved = _traffic(bodies, entry)
    memory = compiled.memory_analysis()
    return {
        "kernels": sum(kinds.values()),
        "kinds": dict(kinds),
        "bytes_moved": moved,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "conditionals": len(re.findall(r" conditional\(", text)),
        "loops": len(re.findall(r" while\(", text)),
        "collectives": [f"{op} {t}" for t, op in _COLLECTIVE.findall(text)],
    }


def fused_by_triton(compiled):
    """How many different kernels Triton compiles, those of products left out: fused norms and softmaxes."""
    bodies, _ = _computations(compiled.as_text())
    names = re.compile(r"%[\w.\-]+|, metadata=\{[^}]*\}")
    kernels = set()
    for line in (line for body in bodies.values() for line in body):
        if '"kind":"__triton"' in line and (m := re.search(r"calls=(%[\w.\-]+)", line)):
            kernels.add(names.sub("", "\n".join(bodies[m.group(1)])))
    return len(kernels)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", help="FILE.py:FUNCTION")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--hlo", help="write the optimized HLO here")
    options = parser.parse_args()
    path, name = options.case.rsplit(":", 1)
    spec = importlib.util.spec_from_file_location("case", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    fun, args, *rest = getattr(module, name)(h200_mesh(options.devices))
    compiled = compile_for(fun, *args, **(rest[0] if rest else {}))
    if options.hlo:
        with open(options.hlo, "w") as f:
            f.write(compiled.as_text())
    for key, value in cost(compiled).items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
