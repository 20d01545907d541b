"""`python -m pallas_kernels tune` times the kernels on this machine's GPU, which then runs what was fastest."""

import argparse
import sys

import jax

from pallas_kernels import _measured
from pallas_kernels._implementations import device_kind
from pallas_kernels._tune import tune


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tune", help="time the kernels beside XLA, and write what is fastest to the user's cache")
    parser.parse_args()
    kind = device_kind()
    if kind is None:
        sys.exit(f"the kernels need an NVIDIA GPU, but JAX runs on {jax.default_backend()}; nothing was measured")
    print(f"{kind}, JAX {jax.__version__}\n", flush=True)
    fastest = tune()
    file = _measured.write(kind, fastest)
    print(f"\nWritten to {file}, for `implementation=None`:")
    for op in ("check_finite", "unscale_check", "quantize", "quantize_blocks"):
        for bits in (16, 32):
            kernel, least = fastest.get(op, {}).get(bits, ("xla", 0))
            print(f"{op}, {bits} bits: {kernel}" + (f" from size {least}" if least else ""))


if __name__ == "__main__":
    main()
