"""Whether float16 and bfloat16 end where float32 does, over seeds, and how the loss scale recovers.

    python benchmarks/convergence.py [--steps 120] [--seeds 5] [--out docs/benchmarks/convergence.md]

Trains the examples, in a quarter of an hour on two CPU cores; needs the extras `demo` and `frameworks`.
"""

import argparse
import csv
import importlib
import pathlib
import platform
import statistics
import sys
import tempfile

import jax
from report import report

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

EXAMPLES = {  # and their score; what a run of float16 must not lose
    "transformer_flax_linen": "val_loss",
    "lstm": "val_loss",
    "cnn_flax_nnx": "accuracy",
}
RUNS = {
    "float32": "float32",
    "mixed_float16": "float16",
    "mixed_bfloat16": "bfloat16",
    "float16, not scaled": "f16",  # the same dtype by another name, for which the examples do not scale
}
RECOVERIES = {  # options of `train_gpt.py`
    "no overflow": (),
    "an infinity in the gradients of step 20": ("--inject-overflow", "20"),
    "first scale 2^24": ("--init-scale", 2.0**24),
    "first scale 2^24, after each 10 clean steps doubled": ("--init-scale", 2.0**24, "--growth-interval", 10),
    "first scale 1, after each 10 clean steps doubled": ("--init-scale", 1.0, "--growth-interval", 10),
}

NOTES = """
Scores are means and standard deviations over the seeds, on data that is not trained on; a seed sets initial parameters
and batches, the same for each precision. "Less float32" is the mean difference from the float32 run with the same seed,
and its standard error. The settings are those of the examples, chosen in float32.

In the second table, "recovered" is the first step after the last skip. Its losses say no more than that training went
on: with seeds 0 to 2, float32 ends there between 2.78 and 3.10, mixed_float16 between 2.91 and 3.04.
"""


def scores(name, precision, steps, seeds):
    train = importlib.import_module(name).train
    return [train(precision, steps, seed, lambda **values: None)[EXAMPLES[name]] for seed in range(seeds)]


def convergence(steps, seeds):
    yield f"| {steps} steps, {seeds} seeds | score | run | mean | standard deviation | less float32 |"
    yield "|---|---|---|---|---|---|"
    for name, score in EXAMPLES.items():
        expected = None
        for run, precision in RUNS.items():
            found = scores(name, precision, steps, seeds)
            expected = expected or found
            pairs = [a - b for a, b in zip(found, expected, strict=True)]
            error = statistics.stdev(pairs) / seeds**0.5
            less = f"{statistics.mean(pairs):+.4f} ± {error:.4f}" if run != "float32" else ""
            mean, spread = statistics.mean(found), statistics.stdev(found)
            yield f"| {name} | {score} | {run} | {mean:.4f} | {spread:.4f} | {less} |"


def recovery(steps):
    import train_gpt

    yield ""
    yield "| `train_gpt.py` | skipped | recovered | scale then | last scale | val loss |"
    yield "|---|---|---|---|---|---|"
    runs = {"float32": ("--precision", "float32"), **RECOVERIES}
    for name, options in runs.items():
        with tempfile.TemporaryDirectory() as out:
            train_gpt.main([*map(str, options), "--steps", str(steps), "--batch", "8", "--context", "64", "--out", out])
            with open(pathlib.Path(out, "metrics.csv"), newline="") as file:
                rows = list(csv.DictReader(file))
        skipped = [int(row["step"]) for row in rows if int(row["skipped"])]
        recovered = skipped[-1] + 1 if skipped else 1
        scale, last = (f"2^{jax.numpy.log2(float(rows[i]['loss_scale'])):g}" for i in (recovered - 2, -1))
        yield f"| {name} | {len(skipped)} | step {recovered} | {scale} | {last} | {float(rows[-1]['val_loss']):.4f} |"


def table(steps, seeds):
    yield from convergence(steps, seeds)
    yield from recovery(steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, help="also write the page to this file")
    options = parser.parse_args()
    head = f"By `benchmarks/convergence.py`, on a CPU; Python {platform.python_version()}, JAX {jax.__version__}."
    report("Where training ends", head, table(options.steps, options.seeds), NOTES, options.out)


if __name__ == "__main__":
    main()
