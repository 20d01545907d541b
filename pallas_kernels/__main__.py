"""`python -m pallas_kernels tune` times the kernels on this machine's GPU, which then runs what was fastest."""

import argparse
import sys

import jax

from pallas_kernels import _measured
from pallas_kernels._tune import mxfp8_pays, tune


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tune", help="time the kernels beside XLA, and write what is fastest to the user's cache")
    parser.parse_args()
    kind = _measured.device_kind()
    if kind is None:
        sys.exit(f"the kernels need an NVIDIA GPU, but JAX runs on {jax.default_backend()}; nothing was measured")
    print(f"{kind}, JAX {jax.__version__}\n", flush=True)
    fastest = tune()
    file = _measured.write(kind, fastest)
    print(f"\nWritten to {file}. `implementation=None` runs XLA, but for")
    for op, entries in fastest.items():
        for bits, (kernel, least) in entries.items():
            print(f"- {op}, {bits} bits, from size {least}: {kernel}")
    print(f"\n{mxfp8_pays()}")


if __name__ == "__main__":
    main()
