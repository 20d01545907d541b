"""How accurate autocast is: errors of loss and gradients against float64, next to the same model mixed by hand.

    JAX_PLATFORMS=cpu python benchmarks/autocast_accuracy.py [--only GRU] [--out docs/benchmarks/autocast_accuracy.md]

Everything runs on the CPU, in minutes.
"""

import itertools

import cpu  # first of these: it sets a flag of XLA
import jax
import numpy as np
import product_algorithms
from accuracy_models import CASES
from jax import lax
from report import arguments, head, report

import jmp_amp as amp

DTYPES = ("float16", "bfloat16")
SEEDS = 20  # in a set
STREAMS = ("GPT block", "ViT")  # the models with a residual stream
LOW_STREAM = {"residual_stream": "low"}
LOSS_SCALE = 2.0**10  # the same for all: underflow is not what is measured


WHY = "How far losses and gradients are from float64, beside the same model with casts written by hand."
NOTES = """
The error of a loss is relative to the loss. The error of a gradient is the L2 norm of its difference over all
parameters, relative to the norm of the gradient. Parameters and data are random and differ from seed to seed. Both
sides and float64 get the same float32 values. The gradients are those of 1024 times the loss, so that none underflows.

- "By hand" and "autocast" are medians over all seeds, and "x by hand" is their ratio. "Over 20 seeds" is the range of
  the ratios of medians over 20 seeds. A loss is a single number, and its rounding error is random: between two equally
  accurate sides, the ratio is anything from 0.6 to 1.6. So there is one more column.
- "Larger : smaller" counts the seeds whose error is larger and smaller with autocast than by hand; the others are equal
  to the bit. Between two equally accurate sides, one count exceeds the other by more than three times the square root
  of their sum in 1 of 700 cases.

"By hand" is the usual careful way: products and activations in 16 bits; norms, softmax, losses, sums over neighbours,
the state of an ODE and the log-determinant of a flow in float32; logits cast to float32 before the loss. The models are
in `benchmarks/accuracy_models.py`, each written once for both. Activations are smooth: at the kink of a ReLU a rounding
error flips a whole unit, and the error of a gradient is then a matter of chance.
"""

# It takes longer to compile the code than to run it. With these, all errors are the same to two digits.
QUICK = {"xla_backend_optimization_level": 0}
if jax.__version_info__[:2] == (0, 10):
    QUICK["xla_cpu_use_fusion_emitters"] = False


def evaluate(loss_fns, args):
    """Returns the losses and the flat gradients of every function, one row per seed, as float64."""
    grad_fns = [amp.value_and_grad(loss_fn, loss_scale=LOSS_SCALE) for loss_fn in loss_fns]

    def run(args):  # seed by seed: `vmap` would make other sums of them
        return [lax.map(lambda a, f=f: f(*a), a) for f, a in zip(grad_fns, args, strict=True)]

    results = jax.jit(run, compiler_options=QUICK)(args)
    return [(rows([loss]), rows(jax.tree.leaves(grads)) / LOSS_SCALE) for loss, grads in results]


def rows(arrays):
    return np.concatenate([np.asarray(x, np.float64).reshape(len(x), -1) for x in arrays], 1)


def measure(cases, seeds, **options):
    """Yields `(model, dtype, "loss" or "gradient", errors by hand, errors of autocast)`, the errors one per seed."""
    loss_fns = [case(None)[0] for case in cases.values()]
    drawn = [[case(None, seed=seed)[1] for seed in range(seeds)] for case in cases.values()]
    args = [jax.tree.map(lambda *x: np.stack(x), *each) for each in drawn]
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, args)
        exact = evaluate(loss_fns, wide)
    for dtype in DTYPES:
        hand = evaluate([case(np.dtype(dtype))[0] for case in cases.values()], args)
        auto = evaluate([amp.autocast(loss_fn, dtype, **options) for loss_fn in loss_fns], args)
        for name, *results in zip(cases, exact, hand, auto, strict=True):
            for kind, reference, *measured in zip(("loss", "gradient"), *results, strict=True):
                size = np.linalg.norm(reference, axis=1)
                yield name, dtype, kind, *(np.linalg.norm(x - reference, axis=1) / size for x in measured)


def medians(errors):
    """Returns the median of every set of seeds."""
    return np.median(errors.reshape(-1, SEEDS), 1)


def table(cases, sets):
    """Yields the lines of a Markdown table; models with a residual stream have a row for each way to store it."""
    yield from head(
        "model", "dtype", "error of", "by hand", "autocast", "x by hand", "over 20 seeds", "larger : smaller"
    )
    variants = [(case, options) for case in cases for options in ({}, LOW_STREAM) if case in STREAMS or not options]
    for case, options in variants:
        for name, dtype, kind, hand, auto in measure({case: cases[case]}, sets * SEEDS, **options):
            name += ', `residual_stream="low"`' if options else ""
            x, y = np.median(hand), np.median(auto)
            ratios = medians(auto) / medians(hand)
            yield (
                f"| {name} | {dtype} | {kind} | {x:.2e} | {y:.2e} | {y / x:.3f} "
                f"| {ratios.min():.2f} to {ratios.max():.2f} | {np.sum(auto > hand)} : {np.sum(auto < hand)} |"
            )


def main():
    parser = arguments(__doc__, "the models whose name contains this")
    parser.add_argument("--sets", type=int, default=10, help="how many sets of 20 seeds")
    options = parser.parse_args()
    seeds = options.sets * SEEDS
    by = f"{seeds} seeds with JAX {jax.__version__} on {cpu.features()}, by `benchmarks/autocast_accuracy.py`."
    errors = table({name: case for name, case in CASES.items() if options.only in name}, options.sets)
    lines = itertools.chain(errors, [NOTES.rstrip()], product_algorithms.section())
    report("Accuracy", f"{WHY}\n\n{by}", lines, "", options.out)


if __name__ == "__main__":
    main()
