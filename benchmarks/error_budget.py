"""How good `amp.debug.error_budget` is: its estimates against one rounding at a time, and what it costs.

    JAX_PLATFORMS=cpu python benchmarks/error_budget.py [--only GPT]

It prints the table of `docs/worse-than-float32.md`. Each cell is the median over the programs and both dtypes, and the
worst. Rank correlation is Spearman's, with the errors of runs with one rounding each; where there are kinks, these have
the decisions of float32, and a row of decisions is a run with its flips alone. Errors below 1e-6 of the gradient are
left out, because the rounding errors of float32 hide them. The true error is that of the compiled gradient with
`xla_allow_excess_precision=False`, so that XLA rounds what the program says. Times are CPU times.
"""

import argparse
import functools
import time

import cpu  # first: it sets a flag of XLA, so that products of bfloat16 on a CPU are exact, and rounded once
import jax
import jax.numpy as jnp
import numpy as np
from accuracy_models import CASES
from programs import PROGRAMS
from report import head, row

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
    as_written = jax.jit(scaled, compiler_options={"xla_allow_excess_precision": False})
    native, reference = flat(as_written(*args)[1]) / scale, flat(jax.jit(jax.grad(loss_fn))(*args))
    true_error = np.linalg.norm(native - reference) / np.linalg.norm(reference)
    known = alone > 1e-6  # smaller errors are rounding errors of float32
    one, four = (errors_alone(program, part, every, scale, Clock()) for part in (runs[:1], runs))
    factor = np.median(times_off(one[known] / alone[known]))
    vectors = np.ones((program._count, program._size), np.float32)
    inputs = 0 * program.default, program._arrays, jnp.float32(scale), vectors, every.decisions
    total = relative_error(every.grads, exact.grads)
    return (
        *(rank_correlation(x[known], alone[known]) for x in (one, four)),
        factor,
        times_off(total / true_error),
        times_off(np.linalg.norm(one) / total),
        cpu_seconds(program._run, *inputs) / cpu_seconds(step, *args),
        own_compile / step_compile,
        nbytes(program._run) / nbytes(step) if nbytes(step) > 1e6 else np.nan,
    )


def times_off(ratio):
    """Returns a ratio, or its reciprocal if that is larger."""
    return np.maximum(ratio, 1 / ratio)


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


def traced_and_compiled(loss_fn, args, dtype):
    program = Emulation(loss_fn, args, {}, {"dtype": dtype}, GRAD_OPTIONS)
    return program if program.rows and program._run else None  # which compiles it


FIGURES = {  # and the worst of several
    "rank correlation with the true errors, one probe": np.nanmin,
    "the same, four probes": np.nanmin,
    "estimate / truth of a rounding, or its reciprocal": np.nanmax,
    "`total` / true error, or its reciprocal": np.nanmax,
    "rows / `total`, or its reciprocal": np.nanmax,
    "time of a probe, x a step": np.nanmax,
    "time to compile, x the gradient": np.nanmax,
    "memory, x a step, where that takes more than 1 MB": np.nanmax,
}


def cells(programs):
    """Returns the median and the worst of each figure."""
    measured = np.array([measure(make, dtype) for make in programs.values() for dtype in LOSS_SCALE])
    return [f"{np.nanmedian(x):.2f}, {worst(x):.2f}" for x, worst in zip(measured.T, FIGURES.values(), strict=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="measure only the programs with this in their name")
    only = parser.parse_args().only
    kinds = {"smooth": SMOOTH_TRIED, "with kinks": KINKS_TRIED}
    chosen = {kind: {name: make for name, make in each.items() if only in name} for kind, each in kinds.items()}
    columns = {f"{len(each)} programs, {kind}": cells(each) for kind, each in chosen.items() if each}
    print(f"JAX {jax.__version__}, on {cpu.features()}.\n")
    print(*head("median, worst", *columns), sep="\n")
    print(*(row(name, *figures) for name, *figures in zip(FIGURES, *columns.values(), strict=True)), sep="\n")


if __name__ == "__main__":
    main()
