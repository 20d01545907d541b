"""Whether 16 bits and float8 end where float32 does, over seeds, and how the loss scale recovers.

    python benchmarks/convergence.py [--steps 120] [--seeds 5] [--out docs/benchmarks/convergence.md]
    python benchmarks/convergence.py --only float8 [--out docs/benchmarks/convergence.md]  # or stream
    python benchmarks/convergence.py --only demo --seeds 3      # for docs/examples.md, in an hour of CPU time

Trains the examples, in half an hour on two CPU cores, half of it for float8; needs the extras `demo` and
`frameworks`.
"""

import csv
import importlib
import itertools
import os
import pathlib
import platform
import statistics
import sys
import tempfile
from unittest import mock

import cpu  # first: it sets a flag of XLA
import jax
import jax.numpy as jnp
from report import arguments, head, report, report_section

import jmp_amp as amp

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
    "first scale 2^24, doubled after 10 finite steps": ("--init-scale", 2.0**24, "--growth-interval", 10),
    "first scale 1, doubled after 10 finite steps": ("--init-scale", 1.0, "--growth-interval", 10),
}
GPT_SIZES = {"steps": 150, "batch": 32, "context": 32, "layers": 2}

WHY = """Whether training in 16 bits and in float8 ends where float32 does, over seeds.
For you: it does; the difference is smaller than that between two seeds. These models are small, so that many can be
trained; [GPT-2 small](gpu_convergence.md) is trained once in each precision."""
NOTES = """
Scores are means and standard deviations over the seeds, on held-out data. A seed sets the initial parameters and the
batches, which are the same for each precision. "Less float32" is the mean difference from the float32 run with the same
seed, and its standard error. The settings are those of the examples, which were chosen in float32.

In the second table, "recovered" is the first step after the last skip. Its losses only show that training
continues: with seeds 0 to 2, float32 ends there between 2.78 and 3.10, mixed_float16 between 2.91 and 3.04.
"""


TITLES = {"float8": "Float8", "stream": "The residual stream in 16 bits"}
GPT_NOTES = {
    "float8": """
`train_gpt.py --layers 2 --batch 32 --context 32`: float8 in the layers, of width 64, computed as a device with
such units does (`JMP_AMP_EMULATE_FLOAT8=1`), and no loss scale. Losses are those of 1024 windows that are not trained
on, the same for each seed. "Not scaled" casts the operands of the same products to float8_e4m3fn, and their cotangents
to float8_e5m2, as they are, and sums in float32.
""",
    "stream": """
The same model, in bfloat16. By default the sum that runs through its layers is float32; with `residual_stream="low"`
each layer rounds it to bfloat16. Five seeds show no difference: it is smaller than its error.
""",
}


def scores(name, precision, steps, seeds):
    train = importlib.import_module(name).train
    return [train(precision, steps, seed, lambda **values: None)[EXAMPLES[name]] for seed in range(seeds)]


def rows(name, score, runs):
    """The rows of a table: each run of `(name, scores)`, next to the first."""
    expected = None
    for run, found in runs:
        less = ""
        if expected:
            pairs = [a - b for a, b in zip(found, expected, strict=True)]
            less = f"{statistics.mean(pairs):+.4f} ± {statistics.stdev(pairs) / len(pairs) ** 0.5:.4f}"
        expected = expected or found
        mean, spread = statistics.mean(found), statistics.stdev(found)
        yield f"| {name} | {score} | {run} | {mean:.4f} | {spread:.4f} | {less} |"


def convergence(steps, seeds):
    yield from head(f"{steps} steps, {seeds} seeds", "score", "run", "mean", "standard deviation", "less float32")
    for name, score in EXAMPLES.items():
        yield from rows(name, score, ((run, scores(name, dtype, steps, seeds)) for run, dtype in RUNS.items()))


@jax.custom_vjp
def product_of_casts(x, w):
    return float32_dot(x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn))


def gradients_of_casts(saved, cotangent):
    x, w = (value.astype(jnp.float8_e4m3fn) for value in saved)
    cotangent = cotangent.astype(jnp.float8_e5m2)
    return float32_dot(cotangent, w.T), float32_dot(x.T, cotangent)


product_of_casts.defvjp(lambda x, w: (product_of_casts(x, w), (x, w)), gradients_of_casts)


def float32_dot(x, y):
    return jax.lax.dot(x, y, preferred_element_type=jnp.float32)


def dense_of_casts(p, x):
    return product_of_casts(x, p["w"]) + p["b"]


GPT_RUNS = {  # by section, a run of `train_gpt.py`, options of `autocast`, and its dense layers
    "float8": {
        "mixed_bfloat16": ("mixed_bfloat16", {}),
        "float32": ("float32", {}),
        "float8": ("float8", {}),
        "float8, not scaled": ("mixed_bfloat16", {}, dense_of_casts),
    },
    "stream": {
        "mixed_bfloat16": ("mixed_bfloat16", {}),
        '`residual_stream="low"`': ("mixed_bfloat16", {"residual_stream": "low"}),
    },
}


def gpt_loss(config, precision, options, dense=None):
    import data
    import train_gpt

    text = data.library_text(4_000_000)
    windows = next(data.windows(text[1], config.context + 1, 1024, seed=0))
    options = train_gpt.RUNS[precision][0] | options
    with (
        mock.patch.object(train_gpt, "dense", dense or train_gpt.dense),
        mock.patch.dict(train_gpt.RUNS, {precision: (options, {})}),
    ):
        params = train_gpt.train(precision, config, text, [], [])
        return jax.jit(amp.autocast(train_gpt.loss_fn, **options))(params, windows).item()


def gpt(section, steps, seeds):
    import train_gpt

    os.environ["JMP_AMP_EMULATE_FLOAT8"] = "1"
    sizes = GPT_SIZES | ({"steps": steps} if steps else {})
    configs = [train_gpt.Config(**sizes, seed=seed) for seed in range(seeds)]
    yield from head(
        f"{sizes['steps']} steps, {seeds} seeds", "score", "run", "mean", "standard deviation", "less mixed_bfloat16"
    )
    runs = ((run, [gpt_loss(config, *how) for config in configs]) for run, how in GPT_RUNS[section].items())
    yield from rows("train_gpt", "val_loss", runs)


def demo(steps, seeds):
    """The runs that `train_gpt.py` compares: their last validation losses, skipped steps and flushed gradients."""
    import train_gpt

    yield from head("run", *(f"seed {seed}" for seed in range(seeds)), "steps skipped", "flushed to zero")
    runs = {name: [] for name in train_gpt.COMPARED["compare"]}
    for seed in range(seeds):
        found = train_gpt_rows("--precision", "compare", "--steps", steps or 300, "--seed", seed)
        for name, rows in runs.items():
            rows.append([row for row in found if row["run"] == name])
    for name, rows_by_seed in runs.items():
        losses = " | ".join(f"{float(rows[-1]['val_loss']):.4f}" for rows in rows_by_seed)
        skipped = ", ".join(str(sum(int(row["skipped"]) for row in rows)) for rows in rows_by_seed)
        zeros = [float(row["zero_grads"]) for rows in rows_by_seed for row in rows]
        yield f"| {name} | {losses} | {skipped} | {statistics.mean(zeros):.2%}, {max(zeros):.0%} at worst |"


def train_gpt_rows(*options):
    """The rows of the `metrics.csv` that the example writes."""
    import train_gpt

    with tempfile.TemporaryDirectory() as out:
        train_gpt.main([*map(str, options), "--out", out])
        with open(pathlib.Path(out, "metrics.csv"), newline="") as file:
            return list(csv.DictReader(file))


def recovery(steps):
    yield ""
    yield from head("`train_gpt.py`", "skipped", "recovered", "scale then", "last scale", "val loss")
    runs = {"float32": ("--precision", "float32"), **RECOVERIES}
    for name, options in runs.items():
        rows = train_gpt_rows(*options, "--steps", steps, "--batch", 8, "--context", 64)
        skipped = [int(row["step"]) for row in rows if int(row["skipped"])]
        recovered = skipped[-1] + 1 if skipped else 1
        scale, last = (f"2^{jax.numpy.log2(float(rows[i]['loss_scale'])):g}" for i in (recovered - 2, -1))
        yield f"| {name} | {len(skipped)} | step {recovered} | {scale} | {last} | {float(rows[-1]['val_loss']):.4f} |"


def table(steps, seeds):
    yield from convergence(steps, seeds)
    yield from recovery(steps)


def main():
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, help=f"default: 120, and {GPT_SIZES['steps']} for float8 and the stream")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=[*GPT_RUNS, "demo"], help="this section alone; the demo is printed")
    options = parser.parse_args()
    if options.only == "demo":
        print(*demo(options.steps, options.seeds), sep="\n")
        return
    versions = f"Python {platform.python_version()}, JAX {jax.__version__}"
    by = f"By `benchmarks/convergence.py`, on {cpu.features()}; {versions}."
    if not options.only:
        report("Convergence", f"{WHY}\n\n{by}", table(options.steps or 120, options.seeds), NOTES, options.out)
    for section in [options.only] if options.only else GPT_RUNS:
        lines = itertools.chain([by, ""], gpt(section, options.steps, options.seeds), [GPT_NOTES[section]])
        report_section(f"## {TITLES[section]}", lines, options.out)


if __name__ == "__main__":
    main()
