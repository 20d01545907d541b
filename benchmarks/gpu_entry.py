"""Measures one entry of `gpu.py`, given as JSON: builds it, says "ready", waits for a line, and times it."""

import collections
import ctypes
import functools
import hashlib
import itertools
import json
import os
import pathlib
import re
import signal
import statistics
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import models
import numpy as np
import optax
from jax import lax

import jmp_amp as amp
from pallas_kernels import check_finite, unscale_check

WARMUP, REPEATS, STEPS = 3, 5, 10
CALLS = 20  # of a check, in one program
PROFILED = 3  # steps
KINDS = {  # of kernels: by their names, and by the op, the file and the function of JAX's; the first that is found
    "attention": r"sdpa|flash|cudnn",
    "products": r"nvjet|gemm|cutlass|cublas",
    "check of gradients": r"pallas_kernels|non_?finite",
    "optimizer": r"multi_tensor_apply|optax|_optimizer_state|_params/|\btrain_step",
    "loss": r"log_softmax|nll_loss|\bcross_entropy",
    "norms": r"layer_norm|\bnorm\b",
    "casts, copies": r"^wrapped_convert|_to_copy|fused_mm|^loop_pad|^mem(set|cpy)",
    "GELU, residual stream": r"gelu|\btransformer_layer\b",
    "biases and their sums": r"reduce_kernel|_sum_|\bdense\b",
    "around attention": r"permute|\battention\b",
    "embeddings, logits": r"embedding|\bloss_fn\b",
    "other": "",
}
STATES = {
    None: lambda tx: tx,
    "float32 state": lambda tx: tx,
    "8-bit state": amp.low_precision_state,
    "float32 state, remainders": lambda tx: amp.low_precision_params(tx, remainder=True),
    "8-bit state, remainders": lambda tx: amp.low_precision_params(amp.low_precision_state(tx), remainder=True),
}
SETTINGS = [{"attention": "cudnn", "residual_stream": "low"}, {"attention": "cudnn"}, {"residual_stream": "low"}, {}]
TOKENS, HELD_OUT, EVALUATIONS = 10_000_000, 500_000, 10
RATE, RATE_WARMUP = 6e-4, 0.1


class Built(Exception):  # noqa: N818 (no error)
    """All programs of an entry are compiled, and a dry run is at its end."""


class Process(NamedTuple):
    """What this process may do: compile, and time when it is its turn."""

    dry_run: bool
    tiny: bool
    wait_for_turn: Callable[[], Any]

    def compiled(self, *programs):
        """Returns the programs of functions, shapes of arguments and numbers of those that are donated."""
        if not self.dry_run:
            return [jax.jit(fun, donate_argnums=donated).lower(*args).compile() for fun, args, donated in programs]
        import gpu_aot

        costs = []
        for fun, args, donated in programs:
            args = gpu_aot.struct(gpu_aot.h200_mesh(), args)
            # JAX asks for the version of cuDNN, which its compiler does not need.
            with mock.patch("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", return_value=91300):
                costs.append(gpu_aot.cost(gpu_aot.compile_for(fun, *args, donate_argnums=donated)))
        launches, gigabytes = (sum(cost[name] for cost in costs) for name in ("kernels", "bytes_moved"))
        raise Built(f"{launches} launches, {gigabytes / 1e9:.2f} GB moved")

    def seconds(self, run, wait, calls):
        """Returns the seconds of a call: of `REPEATS` blocks, when it is the turn of this process."""
        self.wait_for_turn()
        times = []
        for _ in range(WARMUP):
            run()
        wait()
        for _ in range(REPEATS):
            start = time.perf_counter()
            for _ in range(calls):
                run()
            wait()
            times.append((time.perf_counter() - start) / calls)
        return times


class Steps(NamedTuple):
    """Train steps of a library.

    Attributes:
        run: runs a step.
        wait: waits for it.
        peak: returns the most bytes that were allocated.
        kernels: runs a function under a profiler, and yields what is known of each kernel, and its seconds.
    """

    run: Callable[[], Any]
    wait: Callable[[], Any]
    peak: Callable[[], int]
    kernels: Callable[[Callable[[], None]], Iterator[tuple[str, float]]]


def steps_of(process, library="jax", **what):
    if library == "jax":
        return steps_of_jax(process, **what)
    import torch_models

    if process.dry_run:
        raise Built("torch compiles it where it runs")
    return Steps(*torch_models.train_step(**what))


def steps_of_jax(process, case, sizes, dtype, state=None, implementation=None, **options):
    """A step is loss, gradients, unscale, check and AdamW, with donated state."""
    keep, policy = lambda params: params, dtype
    if state and "remainders" in state:
        policy = f"params={dtype},compute={dtype},output=float32"
        keep = functools.partial(amp.cast_params, policy=policy)
    _, loss_fn, (shapes, *batch_shapes), rule = model(process, case, sizes, dtype, policy, **options)
    tx = amp.dynamic_loss_scale(STATES[state](optax.adamw(1e-4)), rule, implementation=implementation)

    def start():
        params = keep(initial(shapes))
        return params, tx.init(params)

    args = *jax.eval_shape(start), *batch_shapes
    [program] = process.compiled((models.train_step(loss_fn, tx), args, (0, 1)))
    carry, batch = jax.jit(start)(), jax.jit(lambda: initial(batch_shapes))()

    def run():
        nonlocal carry
        *carry, _ = program(*carry, *batch)

    def peak():
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)

    run()
    return Steps(run, lambda: jax.block_until_ready(carry), peak, functools.partial(kernels_of_jax, program))


def model(process, case, sizes, dtype, policy=None, by_hand=False, **options):
    """Returns a loss function as it is written and as it is trained, the shapes of its arguments, and its scale."""
    if not process.tiny:  # the row would be one of bfloat16, or of the attention of the model
        warnings.filterwarnings("error", ".* has no float8 units|.* refuses attention")
    # The precision of float8 products, too.
    jax.config.update("jax_default_matmul_precision", "default" if dtype == "float8" else "tensorfloat32")
    plain, shapes = getattr(models, case)(jnp.dtype(dtype) if by_hand else None, **sizes)
    is_cast = by_hand or dtype == "float32"
    loss_fn = plain if is_cast else amp.autocast(plain, policy or dtype, **options)
    return plain, loss_fn, shapes, amp.LossScale() if dtype == "float16" else amp.LossScale.none()


def initial(shapes):
    """Returns the initial parameters of GPT-2, normal weights, zero biases and norms of one, and whole numbers."""

    def one(path, shape, key):
        name = str(getattr(path[-1], "key", ""))
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jax.random.randint(key, shape.shape, 0, 10, shape.dtype)
        if name in ("scale", "bias", "b"):
            return jnp.full(shape.shape, float(name == "scale"), shape.dtype)
        return 0.02 * jax.random.normal(key, shape.shape, shape.dtype)

    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.map_with_path(one, shapes, jax.tree.unflatten(structure, list(keys)))


def kernels_of_jax(program, run):
    sources, on_gpu = sources_of(program.as_text()), jax.default_backend() == "gpu"
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        [file] = pathlib.Path(folder).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    lines = [line for plane in planes if ("GPU" in plane.name) == on_gpu for line in plane.lines]
    for event in itertools.chain(*(line.events for line in lines if not on_gpu or "Stream" in line.name)):
        name = re.sub(r"\W", "_", event.name)
        if on_gpu or name in sources:
            yield f"{event.name} {sources.get(name, '')}", event.duration_ns / 1e9


def sources_of(text):
    """Returns the op, the file and the function of each instruction of a program, by its name as kernels have it."""
    files, functions, locations, frames = (
        dict(re.findall(r"^(\d+) (.*)", re.search(rf"^{title}\n((?:.+\n)*)", text + "\n", re.M).group(1), re.M))
        for title in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
    )
    sources = {}
    for name, op, frame in re.findall(r'%?([\w.-]+) = .*op_name="([^"]*)".*?stack_frame_id=(\d+)', text):
        location = locations[re.search(r"file_location_id=(\d+)", frames[frame]).group(1)]
        file, function = re.search(r"file_name_id=(\d+) function_name_id=(\d+)", location).groups()
        sources[re.sub(r"\W", "_", name)] = f"{op} {files[file]} {functions[function]}"
    return sources


def time_step(process, row, **what):
    steps = steps_of(process, **what)
    seconds = process.seconds(steps.run, steps.wait, STEPS)
    time_ = {"ms a step": 1e3 * statistics.median(seconds), "± ms": 5e2 * (max(seconds) - min(seconds))}
    return {row: time_ | {"peak GB": steps.peak() / 1e9}}, seconds


def time_kernels(process, row, **what):
    steps = steps_of(process, **what)
    process.wait_for_turn()

    def run():
        for _ in range(PROFILED):
            steps.run()
        steps.wait()

    kinds, names = dict.fromkeys(KINDS, 0.0), collections.Counter()
    for name, seconds in steps.kernels(run):
        names[name[:100]] += seconds / PROFILED
        kinds[kind_of(name)] += 1e3 * seconds / PROFILED
    return {row: kinds | {"all": sum(kinds.values())}}, names.most_common(100)


def kind_of(kernel):
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, kernel, re.I))


def time_check(process, row, case, sizes, implementation):
    """Times the check of a tree of gradients as a step runs it: each call overwrites the results of the one before.

    Called by itself, an op with hundreds of results takes the time that the host needs to create their buffers.
    """
    shapes, factor = getattr(models, case)(None, **sizes)[1][0], jax.ShapeDtypeStruct((), jnp.float32)
    programs = {}
    for op, dtype in itertools.product((check_finite, unscale_check), ("float16", "float32")):
        grads = jax.tree.map(lambda x, dtype=dtype: jax.ShapeDtypeStruct(x.shape, dtype), shapes)
        call = functools.partial(op, implementation=implementation)
        results = jax.eval_shape(functools.partial(op, implementation="xla"), grads, factor)
        programs[f"{op.__name__}, {dtype}, µs"] = functools.partial(repeated, call), (results, grads, factor), (0,)
    built = process.compiled(*programs.values())
    runs = {
        name: time_repeated(process, program, shapes)
        for (name, (_, shapes, _)), program in zip(programs.items(), built, strict=True)
    }
    return {row: {name: 1e6 * statistics.median(seconds) for name, seconds in runs.items()}}, runs


def time_repeated(process, program, shapes):
    results, *args = shapes
    results = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), results)
    args = jax.jit(functools.partial(initial, args))()

    def run():
        nonlocal results
        results = program(results, *args)

    return [seconds / CALLS for seconds in process.seconds(run, lambda: jax.block_until_ready(results), 1)]


def repeated(call, results, *args):
    def again(_, results):
        now, _ = lax.optimization_barrier((args, results))  # else the compiler moves the call out of the loop
        return call(*now)

    return lax.fori_loop(0, CALLS, again, results)


def compare_settings(process, row, case, sizes):
    loss_fn, _, shapes, _ = model(process, case, sizes, "float32")
    settings = [{"dtype": dtype} | options for options in SETTINGS for dtype in ("bfloat16", "float16")]
    if process.dry_run:  # the steps of the other entries hold the other programs
        process.compiled((jax.value_and_grad(amp.autocast(loss_fn, **settings[0])), shapes, ()))
    measure = functools.partial(amp.debug.fastest(loss_fn, settings), *initial(shapes))
    measure()  # compiles beside other entries
    process.wait_for_turn()
    rows = {}
    for each in measure().rows:
        cells = {"ms": 1e3 * each.seconds, "peak GB": each.peak_bytes / 1e9, "gradient error": each.error}
        rows[each.setting] = {"not measured": each.reason} if each.reason else cells
    return rows, []


def train(process, row, case, sizes, dtype, **options):
    """Trains with the step of README, and returns the validation loss, in float32, as it falls."""
    plain, loss_fn, (shapes, batch), rule = model(process, case, sizes, dtype, **options)
    count, length = batch.shape
    steps = 10 if process.tiny else TOKENS // (count * (length - 1))
    rate = optax.warmup_cosine_decay_schedule(0.0, RATE, int(RATE_WARMUP * steps), steps, 0.1 * RATE)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.1))
    tx = amp.dynamic_loss_scale(inner, rule)

    def windows(tokens, key):
        starts = jax.random.randint(key, (count, 1), 0, tokens.size - length + 1)
        return tokens[starts + jnp.arange(length)].astype(jnp.int32)

    def train_step(params, state, tokens, step):
        batch = windows(tokens, jax.random.fold_in(jax.random.key(1), step))
        return models.train_step(loss_fn, tx)(params, state, batch)

    def validation_loss(params, tokens):
        keys = jax.random.split(jax.random.key(2), 8)
        return jnp.mean(lax.map(lambda key: plain(params, windows(tokens, key)), keys))

    def start():
        params = initial(shapes)
        return params, tx.init(params)

    parts = [jax.ShapeDtypeStruct((size,), jnp.uint16) for size in (TOKENS, HELD_OUT)]
    params, state = jax.eval_shape(start)
    step, validate = process.compiled(
        (train_step, (params, state, parts[0], jax.ShapeDtypeStruct((), jnp.int32)), (0, 1)),
        (validation_loss, (params, parts[1]), ()),
    )
    training, held_out = map(jnp.asarray, np.split(tokens(sizes["vocab"]), [TOKENS]))
    params, state = jax.jit(start)()
    process.wait_for_turn()
    cells, minutes, every = {}, 0.0, max(1, steps // EVALUATIONS)
    for done in range(0, steps + 1, every):
        cells[f"step {done}"] = float(validate(params, held_out))
        begin = time.perf_counter()
        for i in range(done, min(done + every, steps)):
            params, state, _ = step(params, state, training, jnp.int32(i))
        jax.block_until_ready(params)
        minutes += (time.perf_counter() - begin) / 60
    skipped = int(amp.metrics(state)["total_notfinite"])
    return {row: cells | {"minutes of training": minutes, "skipped steps": skipped}}, []


def tokens(vocab):
    """Returns words of the source code of the installed packages as numbers; rare words are one number."""
    files = {}
    for folder in {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")}:
        files |= {file.relative_to(folder).as_posix(): file for file in pathlib.Path(folder).rglob("*.py")}
    words = []
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        words += re.findall(r"\w+|\s+|[^\w\s]", files[name].read_text(errors="ignore"))
        if len(words) > TOKENS + HELD_OUT:
            break
    common = {word: i for i, (word, _) in enumerate(collections.Counter(words).most_common(vocab - 1))}
    return np.resize(np.array([common.get(word, vocab - 1) for word in words], np.uint16), TOKENS + HELD_OUT)


def main():
    request = json.loads(sys.argv[1])
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library may print
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with `gpu.py`, in whatever way that ends

    @functools.cache
    def wait_for_turn():
        print("ready", file=channel, flush=True)
        sys.stdin.readline()

    process = Process(request["dry_run"], request["tiny"], wait_for_turn)
    start, measure = time.perf_counter(), globals()[request["measure"]]
    try:
        rows, runs = measure(process, **{key: request[key] for key in ("row", "case", "sizes")}, **request["options"])
        answer = {"rows": rows, "runs": runs}
    except Built as built:
        answer = {"compiled": f"{built}, compiled in {time.perf_counter() - start:.0f} s"}
    except (ImportError, UserWarning) as error:
        answer = {"skipped": f"skipped, {error}".partition("\n")[0][:200]}
    print(json.dumps(answer), file=channel, flush=True)


if __name__ == "__main__":
    main()
