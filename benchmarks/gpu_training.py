"""Train steps of two GPTs and ResNet-50 on one GPU: time and peak memory, next to mixing by hand, and to torch.

    python benchmarks/gpu_training.py [--only "GPT-2.*float16"] [--rows FILE] [--out docs/benchmarks/gpu_training.md]
    python benchmarks/gpu_training.py --tiny         # the programs alone, on any machine

Each row is a process of its own, so that none sees the memory of another. `--rows` keeps what was measured in a file
and measures only what is not in it, so that several short runs make one page. `--jobs` compiles rows side by side; they
are timed one after the other. Torch is left out where it is missing.
"""

import concurrent.futures
import fcntl
import itertools
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings

from report import arguments, head, report, row

MODELS = {  # case, what is counted and how many, sizes, and sizes for a trial on any machine
    "GPT-2 small": (
        "gpt_case",
        "tokens",
        8 * 1024,
        {},
        {"layers": 1, "batch": 2, "length": 16, "dim": 32, "heads": 2, "vocab": 64},
    ),
    "GPT-2 small, 4096 tokens": (
        "gpt_case",
        "tokens",
        2 * 4096,
        {"batch": 2, "length": 4096},
        {"layers": 1, "batch": 1, "length": 32, "dim": 32, "heads": 2, "vocab": 64},
    ),
    "GPT, width 2048": (  # large enough for float8, which takes multiples of 16
        "gpt_case",
        "tokens",
        8 * 1024,
        {"layers": 8, "dim": 2048, "heads": 16, "vocab": 50304},
        {"layers": 1, "batch": 4, "length": 128, "dim": 1024, "heads": 8, "vocab": 64},
    ),
    "GPT-2 small, vocabulary 50304": (  # a multiple of 8
        "gpt_case",
        "tokens",
        8 * 1024,
        {"vocab": 50304},
        {"layers": 1, "batch": 2, "length": 16, "dim": 32, "heads": 2, "vocab": 64},
    ),
    "ResNet-50": (
        "resnet_case",
        "images",
        64,
        {},
        {"batch": 2, "size": 32, "blocks": (1, 1), "width": 8, "classes": 10},
    ),
}
VARIANTS = {  # what is trained, and the precision of float32 products
    "float32, TF32 off": ("float32 float32", "highest"),
    "float32, TF32 on": ("float32 float32", "tensorfloat32"),
    "by hand, float16": ("hand float16", "tensorfloat32"),
    "by hand, float16, cuDNN's attention": ("hand float16 cudnn", "tensorfloat32"),
    "cast whole (jmp, mpx), float16": ("jmp float16", "tensorfloat32"),
    "jmp_amp, float16": ("autocast float16", "tensorfloat32"),
    "jmp_amp, bfloat16": ("autocast bfloat16", "tensorfloat32"),
    "jmp_amp, float16, cuDNN's attention": ("autocast float16 cudnn", "tensorfloat32"),
    "jmp_amp, bfloat16, cuDNN's attention": ("autocast bfloat16 cudnn", "tensorfloat32"),
    'jmp_amp, float16, attention="cudnn"': ("autocast float16 attention", "tensorfloat32"),  # of the model as it is
    'jmp_amp, bfloat16, attention="cudnn"': ("autocast bfloat16 attention", "tensorfloat32"),
    'jmp_amp, bfloat16, attention="cudnn", residual_stream="low"': ("autocast bfloat16 attention low", "tensorfloat32"),
    "jmp_amp, float8": ("autocast float8", "default"),  # the precision of float8 products, too
    "jmp_amp, float8, cuDNN's attention": ("autocast float8 cudnn", "default"),
    'jmp_amp, float8, attention="cudnn"': ("autocast float8 attention", "default"),
    'jmp_amp, float16, implementation="mosaic_gpu"': ("autocast float16 mosaic_gpu", "tensorfloat32"),
    "torch, float32, TF32 off": ("torch float32", ""),
    "torch, float16": ("torch float16", ""),
    "torch, float16, compiled": ("torch float16 compiled", ""),
    "torch, bfloat16, compiled": ("torch bfloat16 compiled", ""),
}
BASE = "by hand, float16"
WARMUP, REPEATS, STEPS = 3, 5, 10

WHY = """How long a train step takes on a GPU, and how much memory it needs. For you: autocast takes the time of casts
by hand, within 2%. A step in float32 takes 1.6 to 2 times that with TF32, and 5 times without. With
`attention="cudnn"`, an unchanged GPT-2 small takes 0.69 of the time of casts by hand, and 0.36 with 4,096 tokens: 1.15
to 1.18 times the time of compiled torch. With padded products and a low residual stream, it takes 0.98 to 0.99 times
the time of torch on an H200, and 1.02 times that of torch with CUDA graphs. A wider GPT takes 0.98 times the time of
torch; unchanged, in float8, 0.86. [Fast on a GPU](../fast-on-a-gpu.md) says what to switch on."""
NOTES = """
A step is loss, gradients, unscale, check, AdamW, with donated state; the median of {repeats} blocks of {steps} steps,
after {warmup}. "By hand" is `benchmarks/models.py` with a dtype: products and activations in float16, norms, softmax
and loss in float32, under the same loss scale. Torch trains the same models, `autocast` and `GradScaler` with fused
AdamW, its attention by `scaled_dot_product_attention`. The models in JAX write the scores of their attention to
memory, but for the rows with cuDNN's attention: there `jax.nn.dot_product_attention(implementation="cudnn")` reads
queries, keys and values in 16 bits, by a decorator in the model. With `attention="cudnn"` the model has no decorator.
Peak memory is what each framework's allocator counts. With float8, GPT-2 small and ResNet-50 are as with
bfloat16: none of their products is large enough to gain. A row that is missing was not measured. Compare rows of one
table: each is of one run on one GPU, but for the row with a decorator on an H100, which is of another. Where the host
is late, as in some steps of ResNet-50, a row says so by its spread.

## Sizes that matrix units read

GPT-2 small, 8 x 1024 tokens, unchanged, on one NVIDIA H200 with JAX 0.11.2 and torch 2.11: milliseconds a step, and in
parentheses those in kernels. All rows of jmp_amp have `attention="cudnn"`. Products are "padded" to multiples of 8 by a
sketch of what autocast does now on GPUs: these rows are to be measured again with autocast itself.

| vocabulary | 50257 | 50304 |
|---|---|---|
| float16 | 23.00 (22.31) | 19.30 (18.56) |
| float16, `residual_stream="low"` | 22.15 (21.41) |  |
| float16, `--xla_gpu_enable_triton_gemm=false` | 19.69 (18.89) |  |
| float16, padded | 19.69 (19.05) |  |
| float16, padded, `residual_stream="low"` | 18.93 (18.30) |  |
| bfloat16, padded, `residual_stream="low"` | 18.77 (18.06) |  |
| the same, `--xla_gpu_enable_triton_gemm=false` | 18.59 |  |
| the same, Triton's multi-output fusion | 18.65 |  |
| the same, heroless priority fusion | 32.75 |  |
| torch, bfloat16, compiled | 18.99, 19.12 (18.06) | 18.30 (17.61) |
| torch, bfloat16, compiled, `mode="reduce-overhead"` | 18.32, 18.37 |  |

Rows of 50257 values of 16 bits do not start at multiples of 16 bytes, so cuBLAS does not read them. Three products with
the vocabulary take 6.05 ms as fusions in Triton, and 2.30 ms aligned. torch's compiler pads by itself. ViT-B/16, with
scores of 196 x 196, takes 26.80 ms, and 26.66 padded: small batched products gain little, and autocast leaves them. The
wider GPT, whose vocabulary is 50304, takes 49.40 ms in bfloat16 with a low stream, and compiled torch 50.26.

## Where the time goes

Milliseconds of kernels a step, of GPT-2 small with a vocabulary of 50257, on the same H200:

|  | float16, `attention="cudnn"` | bfloat16, padded, `residual_stream="low"` | torch, bfloat16, compiled |
|---|---|---|---|
| products | 12.04 | 8.24 | 8.35 |
| attention | 2.35 | 2.36 | 2.34 |
| norms, residual stream | 2.26 | 1.50 | 1.27 |
| loss | 1.26 | 1.46 | 1.37 |
| GELU and its bias | 1.17 | 1.19 | 1.14 |
| sums of biases and scales | 0.95 | 0.84 | 0.54 |
| optimizer | 1.05 | 1.05 | 1.09 |
| moves of q, k, v | 0.53 | 0.54 | in "other" |
| check of gradients | 0.41 | 0.41 | none in bfloat16 |
| casts of weights, copies | 0.22 | 0.22 | 0.83 |
| other | 0.07 | 0.25 | 1.14 |

The kernels of three steps, as `jax.profiler` and torch's profiler list them, sorted by hand into kinds. Products are
0.54 of the first column, half of which are those with the vocabulary, and 0.46 of the second. There, torch is faster in
the sums of biases and scales, by 0.30 ms, and in norms, by 0.23, and slower in casts, by 0.61. It checks no gradients
in bfloat16; nor does jmp_amp [without `dynamic_loss_scale`](../faq.md#float16-or-bfloat16), which skips steps that are
not finite.
"""


def jax_step(case, sizes, what):
    """Returns a function that runs a train step and one that waits for it."""
    import jax
    import jax.numpy as jnp
    import models
    import optax

    import jmp_amp as amp

    kind, dtype, *options = what.split()
    if "cudnn" in options:
        implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
        low = "bfloat16" if dtype == "float8" else dtype
        sizes = sizes | {"kernel": models.fused_attention(implementation, low)}
    loss_fn, shapes = getattr(models, case)(jnp.float16 if kind == "hand" else None, **sizes)
    if kind == "autocast":
        attention, stream = "cudnn" if "attention" in options else None, "low" if "low" in options else "float32"
        loss_fn = amp.autocast(loss_fn, dtype, attention=attention, residual_stream=stream)
    if kind == "jmp":
        loss_fn = models.cast_whole(loss_fn)
    rule = amp.LossScale.none() if dtype in ("float32", "bfloat16", "float8") else amp.LossScale()
    tx = amp.dynamic_loss_scale(optax.adamw(1e-4), rule, implementation=next(iter({"mosaic_gpu"} & set(options)), None))
    params, *batch = (random_arrays(tree, seed) for seed, tree in enumerate(shapes))

    train_step = jax.jit(models.train_step(loss_fn, tx), donate_argnums=(0, 1))
    state = params, tx.init(params), None

    def step():
        nonlocal state
        state = train_step(*state[:2], *batch)

    return step, lambda: jax.block_until_ready(state)


def random_arrays(tree, seed):
    import jax
    import jax.numpy as jnp

    def one(i, shape):
        key = jax.random.fold_in(jax.random.key(seed), i)
        if jnp.issubdtype(shape.dtype, jnp.integer):
            return jax.random.randint(key, shape.shape, 0, 10, shape.dtype)
        return 0.02 * jax.random.normal(key, shape.shape, shape.dtype)

    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [one(i, shape) for i, shape in enumerate(leaves)])


def compile_beside_others():
    """Returns a function that waits until all that called this have compiled, and no other one is timed."""
    lock = (pathlib.Path(tempfile.gettempdir()) / "jmp_amp_gpu.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lambda: fcntl.flock(lock, fcntl.LOCK_EX)


def measure(model, variant, tiny):
    """Seconds a step, peak bytes, library and device, as a dictionary."""
    case, _, _, full, small = MODELS[model]
    sizes = small if tiny else full
    what, precision = VARIANTS[variant]
    wait_for_turn = compile_beside_others()
    if not tiny:
        # The row would be one of bfloat16, or of the attention of the model.
        warnings.filterwarnings("error", ".* has no float8 units|.* refuses attention")
    if what.startswith("torch"):
        import torch_models

        step, wait, peak = torch_models.train_step(case, sizes, what)
        library, device = f"torch {torch_models.torch.__version__}", torch_models.torch.cuda.get_device_name()
    else:
        os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = precision
        import jax

        step, wait = jax_step(case, sizes, what)
        library, device = f"JAX {jax.__version__}", jax.devices()[0].device_kind

        def peak():
            return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)

    step()
    wait()
    wait_for_turn()
    for _ in range(WARMUP):
        step()
    wait()
    times = []
    for _ in range(1 if tiny else REPEATS):
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        wait()
        times.append((time.perf_counter() - start) / STEPS)
    figures = {"seconds": statistics.median(times), "spread": max(times) - min(times), "peak": peak()}
    return figures | {"library": library, "device": device}


def in_a_process(model, variant, tiny):
    command = [sys.executable, __file__, "--measure", model, variant, *(["--tiny"] if tiny else [])]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # leaves room for others
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    if run.returncode:
        errors = [line for line in run.stderr.splitlines() if "Error" in line or "Warning: " in line]
        return {"error": (errors or ["failed"])[-1][:100]}
    return json.loads(run.stdout.splitlines()[-1])


def measured(only, tiny, file, jobs):
    """Returns the figures: those in the file, and those measured now."""
    figures = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    known = {(one["model"], one["variant"]) for one in figures}
    all_rows = [key for key in itertools.product(MODELS, VARIANTS) if "GPT" in key[0] or "attention" not in key[1]]
    missing = [key for key in all_rows if key not in known and re.search(only, ": ".join(key))]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda key: in_a_process(*key, tiny), missing)
        for (model, variant), of_row in zip(missing, found, strict=True):
            figures.append({"model": model, "variant": variant} | of_row)
            print(json.dumps(figures[-1]), file=sys.stderr, flush=True)
            if file:
                with file.open("a") as lines:
                    print(json.dumps(figures[-1]), file=lines)
    return figures


def table(figures):
    """Yields a table for each model and GPU."""
    for model, device in itertools.product(MODELS, values(figures, "device")):
        _, unit, count, *_ = MODELS[model]
        found = {one["variant"]: one for one in figures if (one["model"], one.get("device", device)) == (model, device)}
        rows = {variant: found[variant] for variant in VARIANTS if variant in found}
        if not rows:
            continue
        yield from head(f"{model}, {device}", "ms a step", "x by hand", f"{unit} a second", "peak GB", "x by hand")
        base = rows.get(BASE, {})
        for variant, one in rows.items():
            if "error" in one:
                yield row(variant, one["error"], "", "", "", "")
                continue
            time_ = f"{1e3 * one['seconds']:.2f} ± {5e2 * one['spread']:.2f}"
            slowdown, memory = (f"{one[of] / base[of]:.3f}" if base.get(of) else "" for of in ("seconds", "peak"))
            yield row(variant, time_, slowdown, f"{count / one['seconds']:,.0f}", f"{one['peak'] / 1e9:.2f}", memory)
        yield ""


def values(figures, field):
    return sorted({one[field] for one in figures if field in one})


def main():
    parser = arguments(__doc__, "the rows whose 'MODEL: VARIANT' this regular expression is found in")
    parser.add_argument("--rows", type=pathlib.Path, help="keep the figures in this file, and measure what it lacks")
    parser.add_argument("--jobs", type=int, default=1, help="the number of rows that compile side by side")
    parser.add_argument("--tiny", action="store_true", help="run tiny models, to try the programs; times mean nothing")
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "VARIANT"), help="measure one here, and print JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(*options.measure, options.tiny)))
        return
    figures = measured(options.only, options.tiny, options.rows, options.jobs)
    devices, libraries = " and one ".join(values(figures, "device")), " and ".join(values(figures, "library"))
    opening = f"{WHY}\n\nMeasured on one {devices} with {libraries}, by `benchmarks/gpu_training.py`."
    notes = NOTES.format(repeats=REPEATS, steps=STEPS, warmup=WARMUP)
    report("Train steps on a GPU", opening, table(figures), notes, options.out)


if __name__ == "__main__":
    main()
