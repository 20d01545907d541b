"""Block sizes, and the implementation that is fastest on each device, as measured."""

import dataclasses
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a kernel.

    Attributes:
        block: the number of elements that one program reads, a power of two and a multiple of 1024. At 8192, each
            thread of a warpgroup has eight loads of 16 or 32 bytes in flight.
        num_warps: the number of warps in one program (Triton only; Mosaic GPU always uses one warpgroup).
        max_leaves: the maximum number of leaves in one launch. Each leaf needs one or two kernel parameters of 8 bytes,
            and every driver allows 4 KiB of parameters.
    """

    block: int = 8192
    num_warps: int = 8
    max_leaves: int = 250


DEFAULT = Config()
CONFIGS: dict[str, dict[str, Config]] = {}
"""Keys: device kind, then implementation. Missing entries mean `DEFAULT`."""


class Measured(NamedTuple):
    """An implementation that is faster than XLA for trees of `least_leaves` leaves or more, as measured."""

    implementation: str
    least_leaves: int


FASTEST: dict[str, dict[str, Measured]] = {}
"""Keys: device kind, then op. Values: measurements by `benchmarks/kernels.py`. Missing entries mean XLA.

It is empty because the kernels have been compiled for an H200 and run in Pallas' interpreters, but not timed on a GPU.
"""


def config_for(device_kind: str | None, implementation: str) -> Config:
    """Returns the sizes of a kernel on a device."""
    return CONFIGS.get(device_kind or "", {}).get(implementation, DEFAULT)


def fastest_implementation(device_kind: str | None, op: str, leaves: int) -> str:
    """Returns the fastest implementation for a tree of `leaves` leaves, or `"xla"` if there is no measurement."""
    measured = FASTEST.get(device_kind or "", {}).get(op)
    return measured.implementation if measured and leaves >= measured.least_leaves else "xla"
