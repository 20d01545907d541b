"""Block sizes, and which implementation was measured to be fastest where: data, no code."""

import dataclasses
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a kernel.

    Attributes:
        block: elements that one program reads, a power of two and a multiple of 1024. At 8192, a warpgroup has eight
            loads of 16 or 32 bytes a thread in flight.
        num_warps: warps of a program, where the backend leaves the choice (Triton).
        max_leaves: leaves of one launch; each takes a kernel parameter or two, of 8 bytes, and 4 KiB hold them all on
            any driver.
    """

    block: int = 8192
    num_warps: int = 8
    max_leaves: int = 250


DEFAULT = Config()
CONFIGS: dict[str, dict[str, Config]] = {}
"""By device kind, then by implementation; `DEFAULT` where there is no entry."""


class Measured(NamedTuple):
    """An implementation that was measured to be faster than XLA, and the least number of leaves from which on."""

    implementation: str
    least_leaves: int


FASTEST: dict[str, dict[str, Measured]] = {}
"""By device kind, then by op, what `benchmarks/kernels.py` measured on it. Where there is no entry, XLA it is.

Empty so far: the kernels were compiled for an H200 and run in Pallas' interpreters, never timed on a GPU.
"""


def config_for(device_kind: str | None, implementation: str) -> Config:
    """The sizes of a kernel on a device."""
    return CONFIGS.get(device_kind or "", {}).get(implementation, DEFAULT)


def fastest(device_kind: str | None, op: str, leaves: int) -> str:
    """The implementation that was measured to be fastest."""
    measured = FASTEST.get(device_kind or "", {}).get(op)
    return measured.implementation if measured and leaves >= measured.least_leaves else "xla"
