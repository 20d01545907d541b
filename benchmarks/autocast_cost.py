"""What autocast costs on a GPU, by the compiler: bytes moved and temporary memory of loss and gradients, for one H200.

    python benchmarks/autocast_cost.py [--only LSTM] [--out docs/benchmarks/autocast_cost.md]

Nothing runs on a GPU and none is needed; see `gpu_aot.py` for what is.
"""

import argparse
import pathlib

import gpu_aot  # first: it sets the platform
import jax
import jax.numpy as jnp
from models import CASES
from report import report

import jmp_amp as amp

VARIANTS = {
    "float32": lambda case: case(None),
    "by hand": lambda case: case(jnp.float16),
    "autocast": lambda case: autocast(case),
    'save="all"': lambda case: autocast(case, save="all"),
    'weight_grad_dtype="float32"': lambda case: autocast(case, weight_grad_dtype="float32"),
}


NOTES = """
Bytes are what every kernel reads and writes, by one rule for all programs (`gpu_aot.cost`): good for ratios. "By hand"
is the usual way: products, activations and the residual stream in float16; norms, softmax and the loss in float32. The
models are in `benchmarks/models.py`, each written once for both.

`save="matmuls"` is the default because of this table: where there is a scan it needs 0.33 to 0.69 of the
memory and fewer bytes, and it changes nothing where there is none.

`weight_grad_dtype="float32"` writes each weight gradient in float32. That is free where it is cast to float32 anyway,
and saves that cast in a loop, which adds to it in every iteration; with the convolutions of a ResNet it costs.
"""


def autocast(case, **options):
    loss_fn, args = case(None)
    return amp.autocast(loss_fn, **options), args


def measure(loss_fn, args):
    """Returns bytes moved and temporary bytes of `value_and_grad` on one H200."""
    args = gpu_aot.struct(gpu_aot.h200_mesh(), args)
    cost = gpu_aot.cost(gpu_aot.compile_for(jax.value_and_grad(loss_fn), *args))
    return cost["bytes_moved"], cost["temp_bytes"]


def table(cases, variants=tuple(VARIANTS)):
    """Yields the lines of a Markdown table; ratios are to the model mixed by hand."""
    yield "| model | variant | GB moved | x by hand | temporary GB | x by hand |"
    yield "|---|---|---|---|---|---|"
    for name, case in cases.items():
        figures = {variant: measure(*VARIANTS[variant](case)) for variant in variants}
        hand = figures["by hand"]
        for variant, (moved, temp) in figures.items():
            ratios = moved / hand[0], temp / hand[1]
            yield f"| {name} | {variant} | {moved / 1e9:.2f} | {ratios[0]:.3f} | {temp / 1e9:.3f} | {ratios[1]:.3f} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="the models whose name contains this")
    parser.add_argument("--out", type=pathlib.Path, help="also write the table to this file")
    options = parser.parse_args()
    head = f"Compiled for one NVIDIA H200 with JAX {jax.__version__}, by `benchmarks/autocast_cost.py`."
    report(
        "What autocast costs",
        head,
        table({name: case for name, case in CASES.items() if options.only in name}),
        NOTES,
        options.out,
    )


if __name__ == "__main__":
    main()
