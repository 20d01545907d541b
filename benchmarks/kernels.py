"""The kernels next to XLA: launches and bytes by the compiler for an H200, and times where there is a GPU.

    python benchmarks/kernels.py [--only "GPT|one"] [--out docs/kernels.md]
    python benchmarks/kernels.py --interpret

Without a GPU it compiles (see `gpu_aot.py` for what that needs) and measures nothing. With one it measures, and torch
too where that is installed, and compiles only with `--compile-only`; it needs `ptxas` on the PATH. `--out` replaces the
section of the page that was run. `--interpret` runs all that measures on any machine, at tiny sizes and with
the kernels in Pallas' interpreter, and fails where a result is wrong: for CI.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
import re
import statistics
import sys
import time
from functools import partial

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # lets the CUDA plugin load where there is no GPU
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves room for torch

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
from jax import lax
from report import arguments, head, row
from trees import TREES, Shape

import jmp_amp as amp
from pallas_kernels import check_finite, unscale_check

try:
    import torch
except (ImportError, OSError):
    torch = None
TORCH = "cuda" if torch and torch.cuda.is_available() else None  # where it runs

OPS = {"check_finite": check_finite, "unscale_check": unscale_check}
KERNELS = ("mosaic_gpu", "triton")
DTYPES = ("float16", "float32")
SCALAR = Shape((), jnp.float32)
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
scaled = partial(amp.dynamic_loss_scale, loss_scale=amp.LossScale(init_scale=1.0))  # 1: all steps agree with plain
STEPS = {
    "AdamW": {
        "plain": ADAMW,
        "cond, xla": scaled(ADAMW, implementation="xla"),
        "cond, mosaic_gpu": scaled(ADAMW, implementation="mosaic_gpu"),
        "select, xla": scaled(ADAMW, skip="select", implementation="xla"),
        "select, mosaic_gpu": scaled(ADAMW, skip="select", implementation="mosaic_gpu"),
    },
    "clip, AdamW": {
        "plain": CLIPPED,
        "optax's clip, xla": scaled(CLIPPED, implementation="xla"),
        "clip_global_norm, xla": scaled(ADAMW, clip_global_norm=1.0, implementation="xla"),
        "clip_global_norm, mosaic_gpu": scaled(ADAMW, clip_global_norm=1.0, implementation="mosaic_gpu"),
    },
}
MODEL = "GPT of 2 layers"
LATEST = 300  # seconds after which nothing more is lowered, so that a run ends within 8 minutes

COMPILED, MEASURED = "Compiled for an H200", "On a GPU"  # sections of the page


def optimizer_step(tx, params):
    """A step of an optimizer, and its arguments as shapes: parameters, state, gradients."""

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, params, jax.eval_shape(tx.init, params), params


def train_step(by, weight_grad_dtype):
    """A step of a GPT under autocast, and its arguments as shapes: parameters, state, tokens."""
    loss_fn, (params, tokens) = models.gpt_case(None, layers=2)
    loss_fn = amp.autocast(loss_fn, weight_grad_dtype=weight_grad_dtype)
    tx = STEPS["AdamW"][by]
    return models.train_step(loss_fn, tx, by != "plain"), params, jax.eval_shape(tx.init, params), tokens


def compiled(only):
    """Yields what the compiler says."""
    import gpu_aot  # here, for it sets the platform

    mesh = gpu_aot.h200_mesh()
    trees = [name for name in TREES if re.search(only, name)]

    def cost(fun, *args, **options):
        return gpu_aot.cost(gpu_aot.compile_for(fun, *gpu_aot.struct(mesh, args), **options))

    def rows(label, steps):
        costs = {by: cost(*step, donate_argnums=(0, 1)) for by, step in steps.items()}
        for by, c in costs.items():
            gb = {key: c[key] / 1e9 for key in ("bytes_moved", "temp_bytes", "alias_bytes")}
            ratio = c["bytes_moved"] / costs["plain"]["bytes_moved"]
            cells = (f"{x:.3f}" for x in (gb["bytes_moved"], ratio, gb["temp_bytes"], gb["alias_bytes"]))
            yield row(label, by, c["kernels"], *cells)

    yield f"Compiled for one NVIDIA H200 with JAX {jax.__version__}, by `benchmarks/kernels.py`."
    names = ("xla", *KERNELS)
    yield ""
    yield from head("tree", "gradients", "op", *(f"{what}, {by}" for what in ("launches", "GB") for by in names))
    for tree, dtype, op in itertools.product(trees, DTYPES, OPS):
        costs = [cost(partial(OPS[op], implementation=by), TREES[tree](dtype), SCALAR) for by in names]
        cells = [str(c["kernels"]) for c in costs] + [f"{c['bytes_moved'] / 1e9:.3f}" for c in costs]
        yield row(tree, dtype, op, *cells)
    figures = ("step", "launches", "GB", "x plain", "temporary GB", "aliased GB")
    yield ""
    yield from head("tree", "optimizer", *figures)
    for tree, name in itertools.product(trees, STEPS):
        steps = {by: optimizer_step(tx, TREES[tree]("float32")) for by, tx in STEPS[name].items()}
        yield from rows(f"{tree} | {name}", steps)
    yield ""
    yield from head("model", "weight_grad_dtype", *figures)
    for weights in (None, "float32") if re.search(only, MODEL) else ():
        steps = {by: train_step(by, weights) for by in ("plain", "cond, xla", "cond, mosaic_gpu")}
        yield from rows(f"{MODEL} | {weights}", steps)


@dataclasses.dataclass
class Run:
    """What is measured: programs of `calls` of an op, batches of `steps`; one to warm up, `repeats` for the median."""

    trees: dict
    calls: int = 20
    steps: int = 100
    repeats: int = 11
    copied: int = 2**30  # bytes of the buffer whose copy is the measure
    interpret: bool = False  # the kernels interpreted, no times shown
    bandwidth: float = math.nan  # of the copy, bytes a second
    seconds: dict = dataclasses.field(default_factory=dict)  # by (tree, dtype, op, by whom)
    shares: dict = dataclasses.field(default_factory=dict)  # of the copy's bandwidth, likewise
    failed: list = dataclasses.field(default_factory=list)


def tiny(dtype):
    return [Shape(shape, dtype) for shape in ((9000,), (7, 129), (3, 1, 5), (), (128,))]


def random(shapes):
    """Fresh numbers between -0.5 and 0.5, on the host."""
    rng = np.random.default_rng()
    return [np.asarray(rng.random(x.shape, np.float32) - np.float32(0.5)).astype(x.dtype) for x in shapes]


def jobs(run, trees):
    """Yields what has to be compiled: key, program, shapes of its arguments."""
    for tree, name in itertools.product(trees[:1], STEPS):
        for by, tx in STEPS[name].items():
            if not (run.interpret and "mosaic_gpu" in by):
                step, *shapes = optimizer_step(tx, run.trees[tree]("float32"))
                yield (tree, "float32", name, by), jax.jit(step, donate_argnums=(0, 1)), shapes
    for tree, dtype in itertools.product(trees, DTYPES):
        shapes = run.trees[tree](dtype), SCALAR
        for op, by in itertools.product(OPS, ("xla", *KERNELS)):
            interpret = {"interpret": True} if run.interpret and by in KERNELS else {}
            program, results = repeated(partial(OPS[op], implementation=by, **interpret), shapes, run.calls)
            yield (tree, dtype, op, by), program, (results, shapes)


def build(run, trees):
    """Returns a future program by key. Lowered one after the other, for that is Python, and compiled side by side."""
    start, built = time.monotonic(), {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for key, program, shapes in jobs(run, trees):
            try:
                if time.monotonic() - start > LATEST:
                    raise TimeoutError("not compiled, out of time")
                built[key] = pool.submit(program.lower(*shapes).compile)
            except Exception as error:
                built[key] = concurrent.futures.Future()
                built[key].set_exception(error)
    return built


def repeated(call, args, calls):
    """Returns a program that evaluates a call many times, as train steps do: without the host, into the same buffers.

    Called by itself, an op with hundreds of results takes the time that the host needs to create their buffers. The
    program is a function of results, which it overwrites, and `args`; the shapes of the results come with it.
    """

    def program(results, args):
        def again(_, results):
            now, _ = lax.optimization_barrier((args, results))  # else the compiler moves the call out of the loop
            return call(*now)

        return lax.fori_loop(0, calls, again, results)

    return jax.jit(program, donate_argnums=0), jax.eval_shape(call, *args)


def keep_results(program, shapes):
    """Returns a function of `args` that calls a `repeated` program. Its next call overwrites the results."""
    results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def run(*args):
        nonlocal results
        results = program(results, args)
        return results

    return run


def median(run, calls, call):
    """Returns the seconds of a call: the median of batches that are queued back to back, after one to warm up."""
    times = []
    for _ in range(run.repeats + 1):
        start = time.perf_counter()
        for _ in range(calls):
            out = call()
        jax.block_until_ready(out)
        if TORCH:
            getattr(torch, TORCH).synchronize()
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times[1:])


def brief(error):
    return " ".join(f"{type(error).__name__}: {error}".replace("|", "/").split())[:200]


def measured_row(run, key, moved, reference, measure):
    """Returns a line of the table. `measure` returns error and seconds; where it raises, the line says what."""
    line = f"| {' | '.join(key)} | "
    try:
        error, seconds = measure()
    except Exception as error:
        run.failed.append(key)
        return line + brief(error) + " | | | | |"
    run.seconds[key], run.shares[key] = seconds, moved / seconds / run.bandwidth
    line += "| " if error is None else f"{error:.0e} | "
    if run.interpret:
        return line + "interpreted, no timing | | | |"
    ratio = f"{run.seconds[*key[:3], reference] / seconds:.2f}" if (*key[:3], reference) in run.seconds else ""
    return line + f"{seconds * 1e6:.0f} | {moved / seconds / 1e9:.0f} | {run.shares[key]:.2f} | {ratio} |"


def disagreement(call, on_device, leaves, squares):
    """Returns the relative error of the sum of squares; raises where values or flags are not those of float64."""
    # Another factor each time, so that what an earlier program left in memory cannot pass for a result.
    factor = np.float32(np.random.default_rng().uniform(0.5, 2.0))
    *outs, finite, total = call(on_device, factor)
    for x, out in zip(leaves, *outs, strict=True) if outs else ():
        if not np.array_equal(out, (x.astype(np.float64) * np.float64(factor)).astype(out.dtype)):
            raise ValueError("wrong values")
    finite, error = bool(finite), abs(float(total) / (squares * float(factor) ** 2) - 1)  # before the next call
    worse = leaves[-1].copy()
    worse.flat[-1] = np.inf
    *_, overflown, nan = call([*on_device[:-1], worse], factor)
    if not (finite and error < 1e-4 and not overflown and np.isnan(nan)):
        raise ValueError(f"wrong: {finite}, error {error:.0e}; with an infinity {overflown}, {nan}")
    return error


def op_rows(run, tree, dtype, built):
    """Yields the lines of the ops on one tree."""
    leaves = random(run.trees[tree](dtype))
    read, size = sum(x.nbytes for x in leaves), sum(x.size for x in leaves)
    args = jax.device_put(leaves), jnp.float32(0.75)
    squares = sum(np.square(x, dtype=np.float64).sum() for x in leaves)

    @functools.cache
    def program(op, by):
        shapes = jax.eval_shape(partial(OPS[op], implementation="xla"), *args)
        call = keep_results(built[tree, dtype, op, by].result(), shapes)
        return call, disagreement(call, args[0], leaves, squares)

    def measure(op, by):
        call, error = program(op, by)
        return error, median(run, 1, partial(call, *args)) / run.calls

    for op in OPS:
        moved = read + (4 * size if op == "unscale_check" else 0)
        for by in ("xla", "xla again", *KERNELS):
            way = by.removesuffix(" again")
            yield measured_row(run, (tree, dtype, op, by), moved, "xla", partial(measure, op, way))
    if TORCH:
        grads = to_torch(leaves)
        params = with_grads([x.detach() for x in grads], grads)
        found, factor = torch.zeros((), device=TORCH), torch.full((), -1.0, device=TORCH)  # in place: the sizes stay
        calls = {
            "check_finite": lambda: torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))),
            "unscale_check": lambda: torch._amp_foreach_non_finite_check_and_unscale_(grads, found, factor),
            "clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True),
        }
        for passes, (op, call) in enumerate(calls.items(), 1):
            time_it = partial(median, run, run.calls, call)
            yield measured_row(run, (tree, dtype, op, "torch"), passes * read, "xla", lambda f=time_it: (None, f()))


def step_rows(run, tree, built):
    """Yields the lines of the steps: all train equal parameters on equal gradients, which stay as they are."""
    params, grads = (random(run.trees[tree]("float32")) for _ in range(2))
    size = sum(x.size for x in params)
    plain = []

    def measure(start):
        step = start()
        seconds = median(run, run.steps, step)
        trained = [np.asarray(x if isinstance(x, jax.Array) else x.detach().cpu()) for x in step()]
        plain[:] = plain or trained
        off = math.hypot(*(np.linalg.norm(x - y) for x, y in zip(trained, plain, strict=True)))
        error = off / math.hypot(*map(np.linalg.norm, plain))
        if not error < 1e-3:
            raise ValueError(f"the parameters are {error:.0e} off those of the plain step")
        return error, seconds

    for name, steps in STEPS.items():
        plain.clear()
        programs = {by: built[key] for by in steps if (key := (tree, "float32", name, by)) in built}
        starts = {by: partial(jax_steps, steps[by], program, params, grads) for by, program in programs.items()}
        if TORCH:
            starts["torch"] = partial(torch_steps, name != "AdamW", params, grads)
        for by, start in starts.items():
            moved = (28 if (name, by) == ("AdamW", "plain") else 32) * size
            yield measured_row(run, (tree, "float32", name, by), moved, "plain", partial(measure, start))


def jax_steps(tx, program, params, grads):
    """Returns a function that makes one step more."""
    program = program.result()
    params, grads = [jnp.array(x) for x in params], [jnp.array(x) for x in grads]
    state = tx.init(params)

    def step():
        nonlocal params, state
        params, state = program(params, state, grads)
        return params

    return step


def torch_steps(clip, params, grads):
    params = with_grads([torch.nn.Parameter(x) for x in to_torch(params)], to_torch(grads))
    optimizer = torch.optim.AdamW(params, lr=1e-3, weight_decay=1e-4, fused=True)
    scaler = torch.amp.GradScaler(TORCH, init_scale=1.0, growth_interval=2**30)
    scaler.scale(torch.ones((), device=TORCH))  # makes its state

    def step():
        if clip:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        scaler.step(optimizer)
        scaler.update()
        return params

    return step


def to_torch(leaves):
    return [torch.from_numpy(x).to(TORCH, copy=True) for x in leaves]


def with_grads(params, grads):
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return params


def verdict(run):
    """Yields whether the goals hold."""
    many, *_, large = run.trees

    def gain(mine, theirs, *key):
        return run.seconds.get((*key, theirs), math.nan) / run.seconds.get((*key, mine), math.nan)

    yield from ("", "The goals, by the least figure:", "")
    both = list(itertools.product(DTYPES, OPS))
    kernel = KERNELS[0]
    goals = [
        ("of the copy, on the large leaf", 0.9, [run.shares.get((large, *of, kernel), math.nan) for of in both]),
        ("times as fast as XLA, on many leaves", 2, [gain(kernel, "xla", many, *of) for of in both]),
        (
            "times as fast as torch, check_finite",
            1,
            [gain(kernel, "torch", many, dtype, "check_finite") for dtype in DTYPES],
        ),
        (
            "times as fast as torch, unscale_check in float32",
            1,
            [gain(kernel, "torch", many, "float32", "unscale_check")],
        ),
        ("times as fast as torch, AdamW", 1, [gain("cond, mosaic_gpu", "torch", many, "float32", "AdamW")]),
        (
            "times as fast as torch, clip",
            1,
            [gain("clip_global_norm, mosaic_gpu", "torch", many, "float32", "clip, AdamW")],
        ),
    ]
    for goal, least, figures in goals:
        if not any(map(math.isnan, figures)):
            holds = "holds" if min(figures) >= least else "missed"
            yield f"- {min(figures):.2f} {goal}; at least {least} is wanted: {holds}"


def measured(run, only=""):
    """Yields what a GPU says, or the interpreter."""
    how = "Interpreted" if run.interpret else f"Measured on one {jax.devices()[0].device_kind}"
    by = f"JAX {jax.__version__}" + (f" and torch {torch.__version__}" if TORCH else "")
    yield f"{how} with {by}, by `benchmarks/kernels.py`."
    trees = [name for name in run.trees if re.search(only, name)]
    built = build(run, trees)
    (buffer,) = map(jnp.asarray, random([Shape((run.copied // 4,), jnp.float32)]))
    run.bandwidth = 2 * buffer.nbytes / median(run, run.calls, partial(jax.jit(jnp.copy), buffer))
    del buffer
    if not run.interpret:
        yield f"The copy of {run.copied / 1e9:.2f} GB moved {run.bandwidth / 1e9:.0f} GB/s, read and written."
    yield ""
    yield from head("tree", "gradients", "op", "by", "error", "µs", "GB/s", "of copy", "x as fast as XLA or plain")
    blocks = [step_rows(run, tree, built) for tree in trees[:1]]
    blocks += [op_rows(run, tree, dtype, built) for tree, dtype in itertools.product(trees, DTYPES)]
    for block in blocks:
        try:
            yield from block
        except Exception as error:  # not of one row: a kernel before it broke the device, say
            run.failed.append(error)
            yield brief(error)
    lines = list(verdict(run))
    yield from () if run.interpret else lines


def section(title, page):
    """Returns where the text of a section of the page begins and ends."""
    return re.search(rf"^## {title}\n\n(.*?)\n*(?=^## |\Z)", page, re.M | re.S).span(1)


def beside_others(lines, text):
    """Yields a section for this GPU, after those of other GPUs in a text."""
    kind = jax.devices()[0].device_kind
    for other, figures in re.findall(r"^### (.+?)\n\n(.*?)\n*(?=^### |\Z)", text, re.M | re.S):
        yield from () if other == kind else (f"### {other}", "", *figures.splitlines(), "")
    yield from (f"### {kind}", "")
    yield from lines


def main():
    parser = arguments(__doc__, "the trees and models in whose names this regular expression is found")
    parser.add_argument("--interpret", action="store_true", help="run what measures, in Pallas' interpreter, for CI")
    parser.add_argument("--compile-only", action="store_true", help="compile, though there is a GPU")
    options = parser.parse_args()
    if options.interpret:
        trees = {"5 leaves": tiny, "one leaf": lambda dtype: tiny(dtype)[:1]}
        run = Run(trees, calls=2, steps=2, repeats=1, copied=2**12, interpret=True)
        print(*measured(run), sep="\n")
        sys.exit(f"failed: {run.failed}" if run.failed else 0)
    is_measured = jax.default_backend() == "gpu" and not options.compile_only
    lines = []
    for line in measured(Run(TREES), options.only) if is_measured else compiled(options.only):
        print(line, flush=True)
        lines.append(line)
    if options.out:
        page = options.out.read_text()
        start, end = section(MEASURED if is_measured else COMPILED, page)
        lines = beside_others(lines, page[start:end]) if is_measured else lines
        options.out.write_text(page[:start] + "\n".join(lines) + page[end:])


if __name__ == "__main__":
    main()
