"""Whether GRPO learns as much in 16 bits as in float32, and how far its sampler and its learner are apart.

    python benchmarks/grpo.py [--steps 150] [--seeds 3] [--out docs/benchmarks/grpo.md]
    python benchmarks/grpo.py --only weights    # the second table, in a minute

Trains `examples/grpo_float16.py`, in a quarter of an hour on one CPU core; needs the extras `demo` and `frameworks`.
"""

import functools
import os
import pathlib
import platform
import statistics
import subprocess
import sys

import flax
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from report import arguments, head, report, row

import jmp_amp as amp

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import grpo_float16 as grpo

WARMUP = 50
PROMPTS = 256  # of the second table
EXCESS = {"allowed": "true", "not allowed": "false"}  # `--xla_allow_excess_precision`

WHY = """Whether GRPO learns as much in 16 bits as in float32, and how far its sampler and its learner are apart.
For you: if you sample and train with this library, float16 keeps the two seven times closer than bfloat16. For
large models, [Defeating the Training-Inference Mismatch via FP16](https://arxiv.org/abs/2510.26788) finds that float16
removes the mismatch that unsettles training in bfloat16."""


def mean_and_spread(values, digits):
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def runs(steps, seeds):
    """Yields the lines of a table: a precision each, over the seeds."""
    yield from head(
        f"{steps} steps, {seeds} seeds", "reward at first", "reward", "less float32", "KL", "clipped", "mismatch",
        "largest", "skipped",
    )  # fmt: skip
    found = {name: [] for name in grpo.RUNS}
    for seed in range(seeds):
        reference = grpo.warm_start(WARMUP, seed)
        for name, rows in found.items():
            rows.append(grpo.train(reference, name, steps, seed))
    fifth, rewards = max(1, steps // 5), {}
    for name, rows in found.items():
        first = [grpo.column(run, "reward")[:fifth].mean() for run in rows]
        rewards[name] = [grpo.final(run, "reward") for run in rows]
        pairs = [x - y for x, y in zip(rewards[name], rewards["float32"], strict=True)]
        yield row(
            name,
            mean_and_spread(first, 3),
            mean_and_spread(rewards[name], 3),
            "" if name == "float32" else f"{statistics.mean(pairs):+.3f} ± {statistics.stdev(pairs) / seeds**0.5:.3f}",
            mean_and_spread([grpo.final(run, "kl") for run in rows], 3),
            f"{statistics.mean(grpo.final(run, 'clipped') for run in rows):.1%}",
            f"{statistics.mean(grpo.column(run, 'mismatch_mean').mean() for run in rows):.1e}",
            f"{max(grpo.column(run, 'mismatch_max').max() for run in rows):.1e}",
            ", ".join(str(run[-1]["total_notfinite"]) for run in rows),
        )


def same_weights():
    """Yields a row for each residual stream: the mean mismatch of each precision, with the same weights and key."""
    model = grpo.warm_start(WARMUP, 0)
    prompts = np.repeat(next(grpo.draw_prompts(0, 2, size=PROMPTS)), grpo.GROUP, axis=0)

    @functools.partial(nnx.jit, static_argnames=("precision", "stream"))
    def mismatch(model, prompts, precision, stream):
        sampler = amp.autocast(grpo.sample, precision, residual_stream=stream)
        completions, log_probs = sampler(model, prompts, jax.random.key(0))
        tokens = jnp.concatenate([prompts, completions], axis=1)
        return jnp.abs(amp.autocast(grpo.completion_log_probs, precision)(model, tokens) - log_probs).mean()

    for stream, name in (("low", "compute dtype"), ("float32", "float32")):
        found = {precision: mismatch(model, prompts, precision, stream).item() for precision in grpo.RUNS}
        yield row(name, *(f"{x:.1e}" for x in found.values()), f"{found['bfloat16'] / found['float16']:.1f}")


def by_rounding():
    yield from head("excess precision", "the sampler's residual stream", *grpo.RUNS, "bfloat16, x float16")
    for name, allowed in EXCESS.items():
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_allow_excess_precision={allowed}"
        command = [sys.executable, __file__, "--only", "weights"]
        found = subprocess.run(
            command, env=os.environ | {"XLA_FLAGS": flags}, check=True, stdout=subprocess.PIPE, text=True
        )
        yield from (f"| {name} {line}" for line in found.stdout.splitlines())


NOTES = """
In the first table, a step is a rollout of {samples} completions and {passes} optimizer steps. The runs of a seed
start from the same weights, after {warmup} steps of imitation in float32, and draw the same prompts and keys. Reward,
KL from these weights and clipped ratios are means over the last fifth of a run, with standard deviations over the
seeds; "at first" is the first fifth. "Less float32" is the mean difference from the float32 run with the same seed,
and its standard error. The mismatch is |log p learner - log p sampler| of the sampled tokens, before the learner has
moved: the mean over the run, and the largest of all tokens. Skipped are optimizer steps, by seed.

At this size, the mismatch is 7 times smaller in float16 than in bfloat16, and the reward is the same: 0.01 less than
in float32, for both. GRPO clips ratios below 0.8 and above 1.2. Almost all that it clips here, two ratios of a
hundred, is due to the first of the two optimizer steps; the largest mismatch of bfloat16 only just reaches the limit.
Completions have {digits} tokens, and errors do not add up over thousands of them.

The second table has mean mismatches of the same weights and the same key: those of seed 0 before GRPO, and {drawn}
completions. A sampler that stores its residual stream in the compute dtype rounds in other places than the learner,
and the ratio is about that of the formats, 8. One that keeps it in float32, as the learner does, differs from it by
the order of sums and by what XLA makes of bfloat16: on a CPU without bfloat16 units it computes in float32, and
leaves out some of the roundings, not the same ones in both programs. `XLA_FLAGS=--xla_allow_excess_precision=false`
rounds as written, and more than halves this mismatch. None of this was measured on a GPU.
"""


def table(steps, seeds):
    yield from runs(steps, seeds)
    yield ""
    yield from by_rounding()


def main():
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=["weights"], help="the rows of the second table, printed")
    options = parser.parse_args()
    if options.only:
        print(*same_weights(), sep="\n")
        return
    versions = f"Python {platform.python_version()}, JAX {jax.__version__}, Flax {flax.__version__}"
    by = f"By `benchmarks/grpo.py`, on {os.cpu_count()} cores of an x86 CPU without 16-bit units; {versions}."
    notes = NOTES.format(
        samples=grpo.PROMPTS * grpo.GROUP,
        passes=grpo.PASSES,
        warmup=WARMUP,
        digits=grpo.DIGITS,
        drawn=PROMPTS * grpo.GROUP,
    )
    report("GRPO", f"{WHY}\n\n{by}", table(options.steps, options.seeds), notes, options.out)


if __name__ == "__main__":
    main()
