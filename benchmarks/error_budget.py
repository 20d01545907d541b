"""How good `amp.debug.error_budget` is: its estimates against one rounding at a time, and what it costs.

    JAX_PLATFORMS=cpu python benchmarks/error_budget.py [--only GPT] [--out docs/benchmarks/error_budget.md]

Times are CPU times.
"""

import functools
import time

import cpu  # first: it sets a flag of XLA, so that products of bfloat16 on a CPU are exact, and rounded once
import jax
import jax.numpy as jnp
import numpy as np
from accuracy_models import CASES
from programs import PROGRAMS
from report import arguments, head, report, row

import jmp_amp as amp
from jmp_amp.debug._budget import errors_alone
from jmp_amp.debug._clock import Clock
from jmp_amp.debug._compare import floating_value_and_grad, relative_error
from jmp_amp.debug._emulation import Emulation

LOSS_SCALE = {"bfloat16": 1.0, "float16": 2.0**10}
GRAD_OPTIONS = {"has_aux": False, "transform": floating_value_and_grad}
SIZES = {  # so large that a step takes milliseconds
    "MLP": {"batch": 256, "dim": 128, "hidden": 256},
    "GPT block": {"batch": 8, "length": 64, "dim": 64},
    "ViT": {"batch": 32, "dim": 64},
    "LSTM": {},
    "GRU": {},
    "CNN with BatchNorm": {"batch": 16, "size": 16, "width": 16},
    "attention": {"batch": 16, "length": 64, "dim": 64},
    "normalising flow": {"batch": 512, "dim": 16, "hidden": 64},
    "graph convolution": {"nodes": 512, "dim": 64, "hidden": 64},
    "ODE integration": {"batch": 256, "dim": 16, "hidden": 64},
    "`optax.kl_divergence`": {"batch": 256, "dim": 64},
    "`optax.sigmoid_focal_loss`": {"batch": 256, "dim": 64},
    "`optax.cosine_distance`": {"batch": 256, "dim": 64},
    "`optax.ctc_loss`": {},
}
SMALL = (
    "map over rows",
    "associative scan",
    "scan of a recurrent cell",
    "causal linear attention",
    "messages over edges",
    "conjugate gradients",
    "likelihood of a gaussian process",
    "checkpoint that saves products",
    "custom vjp",
    "gradient penalty",
    "hessian vector product",
    "flax linen: cnn with batch norm",
    "flax linen: self attention",
    "flax linen: recurrent network",
    "equinox: mlp",
    "haiku: attention",
)

WHY = (
    "How close the shares of `amp.debug.error_budget` are to the errors of one rounding at a time, and what they cost."
)

KINKS_HEADING = (
    "",
    "## Programs with kinks",
    "",
    "Roundings flip comparisons, and the gradient jumps. Most of its error is that of the flips.",
    "",
)


def small(name):
    """A program of `programs.py`; its loss is a weighted sum of all that it returns."""
    fun, args = PROGRAMS[name].make()

    def loss_fn(*args):
        leaves = [x for x in jax.tree.leaves(fun(*args)) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(y * (2 + jnp.cos(jnp.arange(y.size))).reshape(y.shape)) for y in leaves)

    return loss_fn, args


def relu_network(w, x, y):
    for i in range(3):
        x = x + jax.nn.relu(x @ w["up"][i]) @ w["down"][i]
    return jnp.mean(x**2)


def scan_of_leaky_relu(w, x, y):
    def layer(x, w):
        return x + jax.nn.leaky_relu(x @ w), None

    return jnp.mean((jax.lax.scan(layer, x, w["up"])[0] - y) ** 2)


def max_pooling(w, x, y):
    x = x.reshape(-1, 4, 4, 64)
    numbers = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    for i in range(2):
        x = jax.lax.conv_general_dilated(x, w["up"][i][None, None], (1, 1), "SAME", **numbers)
        x = jax.lax.reduce_window(jnp.tanh(x), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.mean((x.reshape(-1, 64) @ w["down"][0]) ** 2)


def clipped(w, x, y):
    h = jnp.clip(x @ w["up"][0], -1, 1)
    return jnp.mean((jnp.clip(h @ w["down"][0], -0.5, 0.5) - y) ** 2)


def absolute_error(w, x, y):
    return jnp.mean(jnp.abs(jnp.tanh(x @ w["up"][0]) @ w["down"][0] - y))


def hinge_loss(w, x, y):
    scores = jax.nn.relu(x @ w["up"][0]) @ w["down"][0]
    labels = jax.nn.one_hot(jnp.argmax(y, -1), 64)
    true = jnp.sum(scores * labels, -1, keepdims=True)
    return jnp.mean(jnp.max(jnp.maximum(0, scores - true + 1) * (1 - labels), -1))


def two_of_eight_experts(w, x, y):
    gates, chosen = jax.lax.top_k(jax.nn.softmax(x @ w["up"][0][:, :8]), 2)
    gates = jnp.sum(jax.nn.one_hot(chosen, 8) * gates[..., None], 1)
    hidden = jnp.tanh(x @ w["up"][1]).reshape(-1, 8, 8) * gates[..., None]
    return jnp.mean((hidden.reshape(-1, 64) @ w["down"][1] - y) ** 2)


def codebook(w, x, y):
    z = jnp.tanh(x @ w["up"][0])
    nearest = w["up"][1][jnp.argmax(z @ w["up"][1].T - jnp.sum(w["up"][1] ** 2, -1) / 2, -1)]
    decoded = (z + jax.lax.stop_gradient(nearest - z)) @ w["down"][0]
    return jnp.mean((decoded - y) ** 2) + jnp.mean((nearest - jax.lax.stop_gradient(z)) ** 2)


def rounded_activations(w, x, y):
    h = x @ w["up"][0]
    h = h + jax.lax.stop_gradient(jnp.round(4 * h) / 4 - h)
    return jnp.mean((jnp.tanh(h) @ w["down"][0] - y) ** 2)


def sliced_wasserstein(w, x, y):
    first, second = (jnp.sort(jnp.tanh(x @ w) @ w.T, 0) for w in (w["up"][0], w["up"][1]))
    return jnp.mean((first - second) ** 2)


def branches_in_a_scan(w, x, y):
    def step(carry, row):
        h = row @ w["up"][0] + carry
        h = jax.lax.cond(jnp.sum(h) > 0, lambda h: jax.nn.relu(h) @ w["up"][1], jnp.sin, h)
        return h / 10, h

    return jnp.mean((jax.lax.scan(step, jnp.zeros(64), x)[1] @ w["down"][0] - y) ** 2)


KINKS = {
    fun.__name__.replace("_", " "): fun
    for fun in (
        relu_network, scan_of_leaky_relu, max_pooling, clipped, absolute_error, hinge_loss, two_of_eight_experts,
        codebook, rounded_activations, sliced_wasserstein, branches_in_a_scan,
    )
}  # fmt: skip


def kinked(name):
    """A program with kinks: three layers of width 64, 256 rows."""
    rng = np.random.default_rng(0)
    weights = {x: jnp.asarray(rng.standard_normal((3, 64, 64)) / 8, jnp.float32) for x in ("up", "down")}
    x, y = (jnp.asarray(rng.standard_normal((256, 64)), jnp.float32) for _ in range(2))
    return KINKS[name], (weights, x, y)


SMOOTH_TRIED = {name: functools.partial(CASES[name], **sizes) for name, sizes in SIZES.items()} | {
    name: functools.partial(small, name) for name in SMALL
}
KINKS_TRIED = {name: functools.partial(kinked, name) for name in KINKS}


def cpu_seconds(run, *args, times=5):
    jax.block_until_ready(run(*args))
    start = time.process_time()
    for _ in range(times):
        jax.block_until_ready(run(*args))
    return (time.process_time() - start) / times


def compiled(make):
    """Returns what a function compiles, and the CPU time that it takes."""
    jax.clear_caches()
    start = time.process_time()
    return make(), time.process_time() - start


def nbytes(program):
    memory = program.memory_analysis()
    return memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


def rank_correlation(x, y):
    ranks = [np.searchsorted(np.sort(v), v).astype(float) for v in (x, y)]
    return np.corrcoef(*ranks)[0, 1]


def measure(make, dtype):
    """Returns the figures of one program."""
    loss_fn, args = make()
    scale = LOSS_SCALE[dtype]
    scaled = amp.value_and_grad(amp.autocast(loss_fn, dtype), loss_scale=scale)
    step, step_compile = compiled(lambda: jax.jit(scaled).lower(*args).compile())
    program, own_compile = compiled(lambda: traced_and_compiled(loss_fn, args, dtype))
    every = program(program.default, scale)
    runs = [program(0 * program.default, scale, seed, every.decisions) for seed in range(4)]
    exact = runs[0]
    alone = each_alone(program, scale)
    own_arrays, program._arrays = program._arrays, nearby(program._arrays)
    again, program._arrays = each_alone(program, scale), own_arrays
    as_written = jax.jit(scaled, compiler_options={"xla_allow_excess_precision": False})
    native, reference = flat(as_written(*args)[1]) / scale, flat(jax.jit(jax.grad(loss_fn))(*args))
    true_error = np.linalg.norm(native - reference) / np.linalg.norm(reference)
    known = alone > 1e-6  # smaller errors are rounding errors of float32
    one, four = (errors_alone(program, part, every, scale, Clock()) for part in (runs[:1], runs))
    ranks = [rank_correlation(x[known], alone[known]) for x in (one, four, again)]
    ratios = one[known] / alone[known]
    factor = np.exp(np.median(np.abs(np.log(ratios))))
    vectors = np.ones((program._count, program._size), np.float32)
    off = 0 * program.default
    inputs = off, program._arrays, jnp.float32(scale), vectors, every.decisions
    own, plain = cpu_seconds(program._run, *inputs), cpu_seconds(step, *args)
    total = relative_error(every.grads, exact.grads)
    rows = np.linalg.norm(one) / total
    costs = (
        plain * 1e3,
        own / plain,
        own_compile / step_compile,
        nbytes(step) / 1e6,
        nbytes(program._run) / nbytes(step),
    )
    return int(known.sum()), *ranks, factor, total / true_error, rows, *costs


def each_alone(program, scale):
    """Returns the error of the gradient with each rounding alone, or with the flips of a line alone."""
    every, exact = (program(on * program.default, scale) for on in (1, 0))
    decides, errors = np.array([row.decides for row in program.rows]), []
    for i in range(len(decides)):
        on, decisions = np.arange(len(decides)) == i, every.decisions
        if not decides[i]:  # decisions are those of float32
            on, decisions = on | decides, exact.decisions
        errors.append(relative_error(program(on, scale, decisions=decisions).grads, exact.grads))
    return np.array(errors)


def nearby(arrays):
    """Returns arguments that differ by a thousandth."""
    rng = np.random.default_rng(0)
    drawn = [1 + 1e-3 * rng.standard_normal(x.shape).astype(np.float32) for x in arrays]
    return [x * y if x.dtype == np.float32 else x for x, y in zip(arrays, drawn, strict=True)]


def traced_and_compiled(loss_fn, args, dtype):
    program = Emulation(loss_fn, args, {}, {"dtype": dtype}, GRAD_OPTIONS)
    return program if program.rows and program._run else None  # which compiles it


def table(programs):
    """Yields the lines of the table, the lowest rank correlations first, and the table of the goals."""
    results = []
    for name, make in programs.items():
        for dtype in LOSS_SCALE:
            results.append((name, dtype, *measure(make, dtype)))
    results.sort(key=lambda x: x[3])
    one, four, again, factor, total, rows, ms, steps, build, mb, memory = map(
        np.array, list(zip(*results, strict=True))[3:]
    )
    off = np.exp(np.abs(np.log(total)))
    explained = np.exp(np.abs(np.log(rows)))
    yield from head("", "goal", "median", "worst", "reached by")
    for label, goal, values, limit, sign in (
        ("rank correlation, 1 probe", "median 0.95, worst 0.85", one, 0.85, -1),
        ("rank correlation, 4 probes", "the same", four, 0.85, -1),
        ("rank correlation of the truth at inputs off by 0.1%", "-", again, 0.85, -1),
        ("estimate / truth of a rounding, or its reciprocal", "-", factor, 1.5, 1),
        ("total / true error, or its reciprocal", "median 1.1, worst 1.3", off, 1.3, 1),
        ("rows / total, or its reciprocal", "1.25", explained, 1.25, 1),
        ("a probe, in steps", "6", steps, 6, 1),
        ("the same, where a step takes more than 1 ms", "6", steps[ms > 1], 6, 1),
        ("compiling, x the gradient", "3", build, 3, 1),
        ("memory, x a step", "4", memory, 4, 1),
        ("the same, where a step takes more than 1 MB", "4", memory[mb > 1], 4, 1),
    ):
        if len(values):
            worst = values.max() if sign > 0 else values.min()
            reached = (sign * values <= sign * limit).sum()
            yield row(label, goal, f"{np.median(values):.2f}", f"{worst:.2f}", f"{reached} of {len(values)}")
    yield ""
    yield from head(
        "program", "dtype", "roundings", "rank, 1 probe", "4 probes", "truth again", "factor",
        "total / true", "rows / total", "step, ms",
        "probe, steps", "compiling", "step, MB", "memory",
    )  # fmt: skip
    for name, dtype, count, *figures in results:
        forms = ("{:.2f}",) * 6 + ("{:.1f}",) * 3 + ("{:.3f}", "{:.1f}")
        yield row(name, dtype, count, *(form.format(x) for form, x in zip(forms, figures, strict=True)))


NOTES = """
"Rank" is Spearman's rank correlation of the estimated errors of the roundings with their true errors: a run with only
that rounding, against a run with none. Where there are kinks, that run has the decisions of float32, and a row of
decisions is a run with its flips alone. Roundings with errors below 1e-6 of the gradient are left out, because the
rounding errors of float32 hide them. "Truth again" is that of the true errors with those at inputs that differ by a
thousandth. "Factor" is the median over the roundings of estimate / truth, or of its reciprocal, with 1 probe. "Total /
true" is the error that `ErrorBudget.total` reports, in the emulation, over that of the compiled gradient under
autocast, with `xla_allow_excess_precision=False`, so that XLA rounds what the program says. "Rows / total" is
`ErrorBudget.explained`: the root of the summed squares, over the total. A step is the compiled loss and gradient under
autocast; "probe" is one run of the emulation with its reverse pass, "compiling" the time to trace and compile, "memory"
arguments, results and temporary arrays, each x that of the step.

Where the goals are missed:

- **Rank.** Many roundings of a small program have errors within a factor of two, and which is the largest depends on
  the last digits of the inputs ("truth again"). In a loop it also depends on the rounding itself: one iteration changes
  the values that the next one rounds, so the errors of a run with the rounding are not those of the run in float32.
- **A probe.** A small program takes microseconds a step, and a probe runs ten times as many kernels.
- **Compiling.** Each rounding is two to three kernels that XLA fuses otherwise. Where a program is elementwise ops in
  low precision, as a GELU or a flow, that is more than 3 times the work. The reverse pass through the gradient has two
  products for each of its own.
- **Memory.** The reverse pass keeps every rounded value in float32, where a step keeps some of them in 16 bits. A
  program of small arrays runs with up to 64 random vectors at once, each array then of up to 4096 numbers.
"""


def tables(only):
    """Yields the tables of the programs with a text in their names: of smooth programs, and of those with kinks."""
    for heading, programs in ((), SMOOTH_TRIED), (KINKS_HEADING, KINKS_TRIED):
        if chosen := {name: make for name, make in programs.items() if only in name}:
            yield from heading
            yield from table(chosen)


def main():
    args = arguments(__doc__, "measure only the programs with this in their name").parse_args()
    by = f"By `benchmarks/error_budget.py`, JAX {jax.__version__}, on {cpu.features()}."
    report("The error budget of a gradient", f"{WHY}\n\n{by}", tables(args.only), NOTES, args.out)


if __name__ == "__main__":
    main()
