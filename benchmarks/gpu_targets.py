"""The figures of GPUs that XLA's cost model and code generator ask for."""

import dataclasses


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
