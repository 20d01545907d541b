"""Import it before jax: on a CPU with bfloat16 instructions XLA then sums bfloat16 products in float32.

See "Products on a CPU with bfloat16 instructions" in `docs/sharp-bits.md`.
"""

import os
import pathlib
import platform
import sys

if "jax" not in sys.modules:  # later, it would reach other processes only
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_experimental_ynn_fusion_type=".strip()


def features():
    """Names the processor, and its instructions for 16-bit numbers."""
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().partition("\n\n")[0].splitlines() if info.exists() else []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    names = set(fields.get("flags", fields.get("Features", "")).split())
    found = sorted(name for name in names if "bf16" in name or "fp16" in name)
    return f"{fields.get('model name', platform.machine())} ({', '.join(found) or 'no 16-bit instructions'})"
