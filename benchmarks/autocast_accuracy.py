"""How accurate autocast is: errors of loss and gradients against float64, next to the same model mixed by hand.

    JAX_PLATFORMS=cpu python benchmarks/autocast_accuracy.py [--only GRU] [--out docs/benchmarks/autocast_accuracy.md]

Everything runs on the CPU, in minutes.
"""

import itertools

import cpu  # first of these: it sets a flag of XLA
import jax
import jax.numpy as jnp
import numpy as np
from accuracy_models import CASES
from jax import lax
from report import arguments, head, report, row
from shares import TITLE, shares

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


PARTS = {"bfloat16": 1, "bfloat16_x3": 2, "bfloat16_x6": 3}  # the bfloat16 numbers that a float32 is split into
TERMS = (64, 512, 4096)  # terms of a sum

PRODUCTS = """
## Float32 products on matrix units

`with amp.precision("bfloat16_x3"):`, or the same as a rule of a scope, lets float32 products run on matrix units: an
operand is split into a sum of bfloat16 numbers, and the products of these are added in float32 ([Henry, Tang and
Heinecke, 2019](https://arxiv.org/abs/1904.06376)). For you: where a product must be float32, `"bfloat16_x6"` is as
accurate, and `"bfloat16_x3"` is accurate to 4e-6 at half the work.
"""
PRODUCT_NOTES = """
The error of a product of normally distributed matrices is the L2 norm of its difference to float64, over the norm of
the product. The squared distances are |x|² + |y|² - 2 x·y of points in 64 dimensions that are a hundredth of their
norm apart; the error is the largest one, over the distance. Autocast leaves such products in float32: in bfloat16
nothing of them is right.

`"tensorfloat32"` is not in the table: NVIDIA's GPUs compute a float32 product so by default, with operands of 11
bits; a TPU, with the same name, as `"bfloat16_x3"`.
"""


def parts(x, n):
    """Splits float32 numbers into a sum of `n` bfloat16 numbers, the largest first."""
    found = []
    for _ in range(n):
        found.append(x.astype(jnp.bfloat16).astype(np.float32))
        x = x - found[-1]
    return found


def product(x, y, algorithm):
    """Multiplies matrices; of the products of parts, those that are too small to matter are left out."""
    if algorithm == "float32":
        return x @ y
    n = PARTS[algorithm]
    pairs = [(i, j) for i in range(n) for j in range(n) if i + j < n]
    xs, ys = parts(x, n), parts(y, n)
    return sum(xs[i] @ ys[j] for i, j in sorted(pairs, key=sum, reverse=True))


def product_error(terms, algorithm):
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((128, terms), (terms, 128)))
    exact = x.astype(np.float64) @ y.astype(np.float64)
    return np.linalg.norm(product(x, y, algorithm) - exact) / np.linalg.norm(exact)


def distance_error(algorithm):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((128, 64)).astype(np.float32)
    y = (x + 0.01 * rng.standard_normal((128, 64))).astype(np.float32)

    def squared(x, y, xy):
        return np.diag((x**2).sum(1)[:, None] + (y**2).sum(1) - 2 * xy)

    exact = squared(*(z.astype(np.float64) for z in (x, y)), x.astype(np.float64) @ y.T.astype(np.float64))
    return np.max(np.abs(squared(x, y, product(x, y.T, algorithm)) - exact) / exact)


def products():
    """Yields the section about float32 products, whose algorithms are written out: a CPU computes all in float32."""
    yield PRODUCTS
    yield from head("format", "products", *(f"error, {n} terms" for n in TERMS), "squared distances")
    for algorithm in ("float32", "bfloat16_x6", "bfloat16_x3", "bfloat16"):
        n = PARTS.get(algorithm, 1)
        errors = (f"{product_error(terms, algorithm):.1e}" for terms in TERMS)
        yield row(f"`{algorithm}`", n * (n + 1) // 2, *errors, f"{distance_error(algorithm):.1e}")
    yield PRODUCT_NOTES.rstrip()


def main():
    parser = arguments(__doc__, "the models whose name contains this")
    parser.add_argument("--sets", type=int, default=10, help="how many sets of 20 seeds")
    options = parser.parse_args()
    seeds = options.sets * SEEDS
    by = f"{seeds} seeds with JAX {jax.__version__} on {cpu.features()}, by `benchmarks/autocast_accuracy.py`."
    errors = table({name: case for name, case in CASES.items() if options.only in name}, options.sets)
    lines = itertools.chain(errors, [NOTES.rstrip(), f"\n{TITLE}\n"], shares(options.only), products())
    report("Accuracy", f"{WHY}\n\n{by}", lines, "", options.out)


if __name__ == "__main__":
    main()
