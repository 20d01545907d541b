"""What the state of an optimizer in 8 bits saves, costs and loses.

    python benchmarks/optimizer_state.py [--out docs/benchmarks/optimizer_state.md]
    python benchmarks/optimizer_state.py --only cost        # or memory, errors, convergence, paired

Trains a small GPT on the CPU, in a quarter of an hour, and compiles for GPUs that are not there (`gpu_aot.py`).
"""

import functools
import itertools
import platform
import statistics
import sys
from pathlib import Path
from unittest import mock

import cpu  # first: it sets a flag of XLA
import gpu_aot  # second: it sets the platform
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from report import arguments, head

import jmp_amp as amp

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import data
import finetune_8b

FORMATS = {
    "float32": lambda tx: tx,
    "float8": amp.low_precision_state,
    "float8, nearest": functools.partial(amp.low_precision_state, rounding="nearest"),
    "bfloat16": functools.partial(amp.low_precision_state, dtype="bfloat16"),
}
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 1, 2, 32, 16
OPTIMIZERS = {
    "AdamW, b2 = 0.95": lambda rate: optax.adamw(rate(3e-3), b2=0.95),
    "AdamW, b2 = 0.999": lambda rate: optax.adamw(rate(3e-3), b2=0.999),
    "Lion": lambda rate: optax.lion(rate(5e-4)),
    "RMSProp": lambda rate: optax.rmsprop(rate(2e-3), decay=0.95),
    "SGD, momentum 0.9": lambda rate: optax.sgd(rate(0.3), momentum=0.9),
    "Muon": lambda rate: optax.contrib.muon(rate(1e-2)),
    "Adafactor, momentum 0.9": lambda rate: optax.adafactor(rate(1e-2), momentum=0.9),
}


ALL_FORMATS = ("AdamW, b2 = 0.999", "RMSProp", "Muon")  # the optimizers that are tried in more than float8


def init_params(key):
    shapes = {"token": (256, WIDTH), "position": (CONTEXT, WIDTH)}
    layer = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    shapes |= {f"{name}{i}": shape for i in range(LAYERS) for name, shape in layer.items()}
    keys = jax.random.split(key, len(shapes))
    return {name: 0.02 * jax.random.normal(k, shape) for (name, shape), k in zip(shapes.items(), keys, strict=True)}


def loss_fn(params, tokens):
    x = params["token"][tokens[:, :-1]] + params["position"]
    for i in range(LAYERS):
        q, k, v = jnp.split((jax.nn.standardize(x) @ params[f"qkv{i}"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
        x += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ params[f"out{i}"]
        x += jax.nn.gelu(jax.nn.standardize(x) @ params[f"up{i}"]) @ params[f"down{i}"]
    logits = jax.nn.standardize(x) @ params["token"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def final_losses(make, store, steps, seeds):
    """The validation loss of each seed; a seed sets parameters and batches."""
    text, held_out = data.library_text(4_000_000)
    validation = jnp.asarray(next(data.windows(held_out, CONTEXT + 1, 1024, 0)))
    streams = [data.windows(text, CONTEXT + 1, BATCH, seed) for seed in seeds]
    schedule = functools.partial(optax.warmup_cosine_decay_schedule, 0, warmup_steps=steps // 10, decay_steps=steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), store(make(lambda peak: schedule(peak_value=peak))))

    @jax.jit
    @jax.vmap
    def train(carry, batches):
        def step(carry, tokens):
            params, state = carry
            updates, state = tx.update(jax.grad(loss_fn)(params, tokens), state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, carry, batches)[0]

    params = jax.vmap(lambda seed: init_params(jax.random.key(seed)))(jnp.asarray(seeds))
    carry = params, jax.vmap(tx.init)(params)
    for _ in range(steps // 50):
        carry = train(carry, np.stack([[next(stream) for _ in range(50)] for stream in streams]))
    return [float(x) for x in jax.vmap(loss_fn, (0, None))(carry[0], validation)]


def errors():
    """The largest error of an update in 1,000 steps, whose gradients fall 100-fold in the middle."""
    tx, names = optax.adam(1e-2, b2=0.999), ("float8", "bfloat16")
    yield from head("decades in a block", *(f"{name}, {half} half" for name in names for half in ("first", "second")))

    @jax.jit
    def of_updates(size):
        def step(states, i):
            grads = (jax.random.normal(jax.random.key(i), (64, 128)) + 1e-3) * size * jnp.where(i < 500, 1, 0.01)
            pairs = [
                FORMATS[name](tx).update(grads, state) for name, state in zip(("float32", *names), states, strict=True)
            ]
            full, *low = (updates for updates, _ in pairs)
            size_of = [jnp.sqrt(jnp.mean(x**2)) for x in (full, *(x - full for x in low))]
            return [state for _, state in pairs], jnp.stack(size_of[1:]) / size_of[0]

        states = [FORMATS[name](tx).init(jnp.zeros((64, 128))) for name in ("float32", *names)]
        found = lax.scan(step, states, jnp.arange(1000))[1]
        return found[49:500].max(0), found[500:].max(0)

    for decades in (0, 1, 2, 3, 4, 6):
        halves = of_updates(jnp.logspace(-decades, 0, 128))
        yield f"| {decades} | " + " | ".join(f"{half[i]:.3f}" for i in range(len(names)) for half in halves) + " |"


def less_float32(found, expected):
    """The mean difference of runs with the same seeds and data, and its standard error."""
    pairs = [a - b for a, b in zip(found, expected, strict=True)]
    return f"{statistics.mean(pairs):+.4f} ± {statistics.stdev(pairs) / len(pairs) ** 0.5:.4f}"


def paired():
    """In groups of 24 seeds, each of which takes two minutes for 200 steps."""
    yield from head("steps", "pairs", "mean loss in float32", "float8 less float32")
    for steps, pairs in PAIRS.items():
        groups = [range(first, first + 24) for first in range(0, pairs, 24)]
        full, low = (
            [x for seeds in groups for x in final_losses(OPTIMIZERS["AdamW, b2 = 0.999"], FORMATS[name], steps, seeds)]
            for name in ("float32", "float8")
        )
        yield f"| {steps} | {pairs} | {statistics.mean(full):.4f} | {less_float32(low, full)} |"


def convergence(steps, seeds):
    yield from head("optimizer", "state", "mean loss", "standard deviation", "less float32")
    for optimizer, make in OPTIMIZERS.items():
        expected = None
        for name, store in FORMATS.items():
            if name not in ("float32", "float8") and optimizer not in ALL_FORMATS:
                continue
            found = final_losses(make, store, steps, range(seeds))
            less = less_float32(found, expected) if expected else ""
            expected = expected or found
            yield f"| {optimizer} | {name} | {statistics.mean(found):.4f} | {statistics.stdev(found):.4f} | {less} |"


LEAVES = {"small": (2048, 8192), "large": (4096, 14336), "stacked": (32, 4096, 1024), "head": (4096, 128256)}
STEPS = {  # parameters, and what trains them
    "float32 parameters and moments": (jnp.float32, lambda tx: tx),
    "float32 parameters, `low_precision_state`": (jnp.float32, amp.low_precision_state),
    "`low_precision_params`": (jnp.bfloat16, amp.low_precision_params),
    "`remainder=True`": (jnp.bfloat16, finetune_8b.STATES["float32"]),
    '`remainder=True`, `low_precision_state(..., "bfloat16")`': (jnp.bfloat16, finetune_8b.STATES["bfloat16"]),
    "`remainder=True`, `low_precision_state`": (jnp.bfloat16, finetune_8b.STATES["float8"]),
}


def cost(optimizer, name):
    """The figures of an update of four leaves, compiled for an H200; gradients have the dtype of parameters."""
    dtype, make = STEPS[name]
    params = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in LEAVES.items()}
    tx = make(optimizer)
    state = jax.eval_shape(tx.init, params)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    args = gpu_aot.struct(gpu_aot.h200_mesh(), (params, state, params))
    found = gpu_aot.cost(gpu_aot.compile_for(step, *args, donate_argnums=(0, 1)))
    size, leaves = sum(x.size for x in jax.tree.leaves(params)), len(jax.tree.leaves(params))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((params, state)))
    return {
        "held": held / size,
        "moved": found["bytes_moved"] / size,
        "temporary": found["temp_bytes"] / size,
        "launches": found["kernels"] / leaves,
    }


def costs():
    yield from head("", "bytes held", "bytes moved", "temporary bytes", "launches a leaf")
    for title, optimizer in (("AdamW", optax.adamw(1e-4)), ("Lion", optax.lion(1e-4))):
        for name in STEPS:
            found = cost(optimizer, name)
            yield (
                f"| {title}: {name} | {found['held']:.2f} | {found['moved']:.1f} | {found['temporary']:.3f} "
                f"| {found['launches']:.1f} |"
            )


STATES = {  # of AdamW, for bfloat16 parameters with remainders
    "float32 moments": finetune_8b.STATES["float32"],
    "moments in 8 bits": finetune_8b.STATES["float8"],
}
PLANS = (  # GPUs and models
    *((1, model) for model in ("llama3_1b", "llama3_8b", "llama3_3b", "llama2_13b")),
    *((8, model) for model in ("llama2_13b", "llama3_70b")),
    (64, "llama3_70b"),
)
SIZES = {"L4, RTX 4090": 24, "A100": 40, "A100, H100": 80, "H200": 141}


def memory():
    """The compiled peak of a step of `finetune_8b.py`, and the largest model that fits on one GPU."""
    yield from head("model", "GPUs", "state", "bytes a parameter", "peak of each GPU, GB")
    peaks = {}
    for gpus, model in PLANS:
        for name in STATES:
            with mock.patch.dict(finetune_8b.STATES, STATES):
                options = finetune_8b.parse(["--state", name])
                mesh, config = gpu_aot.h200_mesh(gpus), finetune_8b.CONFIGS[model]
                compiled, shapes, _ = finetune_8b.compile_step(options, config, mesh, gpu_aot.compile_for)
            size = sum(x.size for x in jax.tree.leaves(shapes[0]))
            held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes)) / size
            peak = finetune_8b.peak(compiled) / 1e9
            yield f"| {model}, {size / 1e9:.2f} B | {gpus} | {name} | {held:.2f} | {peak:.1f} |"
            if gpus == 1:
                peaks.setdefault(name, {})[model] = peak
    yield ""
    yield from head("GPU", "GB", *STATES)
    for gpu, size in SIZES.items():
        fits = [
            max(((peak, model) for model, peak in peaks[name].items() if peak <= 0.92 * size), default=None)
            for name in STATES
        ]
        yield f"| {gpu} | {size} | {' | '.join(f'{fit[1]}, {fit[0]:.1f} GB' if fit else 'none' for fit in fits)} |"


PAIRS = {100: 24, 200: 48}  # by the number of steps
SECTIONS = {"memory": memory, "cost": costs, "errors": errors, "convergence": convergence, "paired": paired}
TITLES = {
    "memory": "Memory",
    "cost": "Cost of a step",
    "errors": "Errors of the updates of Adam",
    "convergence": "Where training ends",
    "paired": "Paired runs of AdamW",
}
WHY = """What the state of an optimizer in 8 bits saves, costs and loses.
For you: 6 bytes a parameter in place of 12 or 14, 0.57 to 0.60 times the bytes moved in a step, and a loss that differs
by less than that of two seeds, but for Muon, which needs `rounding="nearest"`."""
NOTES = {
    "memory": """
The train step of `examples/finetune_8b.py`: all parameters, AdamW, one sequence of 4,096 tokens on each GPU, layers and
logits recomputed, parameters and state sharded over the GPUs. Peak is what the compiled program holds at once. The
second table has the largest of these models whose peak is at most 92% of the memory, which JAX uses with
`XLA_PYTHON_CLIENT_MEM_FRACTION=.92`.

`examples/finetune_8b.py --config llama3_8b --steps 60` on one NVIDIA H100 80GB HBM3 (JAX 0.11.2) planned a peak of
71.23 GB and measured 71.23 GB, at 1.15 steps, or 4,706 tokens, a second; the loss of its random weights fell from 12.7
to 2.5. Its codes were of an earlier form, and its scales took a byte more a block.
""",
    "cost": """
An update of four leaves of 17 to 525 million elements, without the forward and backward pass, for each parameter.
Gradients have the dtype of the parameters. Launches count every kernel, also those of the few scalars, which all leaves
share. In 8 bits, one launch a leaf reads and writes everything of its size; two for each moment read and compute the
formats of its blocks, a hundredth of the bytes.
""",
    "errors": """
The largest error of an update with `b2=0.999`, root mean square over all elements, divided by the size of the update
with moments in float32. Gradients are normal, their sizes span so many decades within each block of 128, and fall
100-fold after 500 of 1,000 steps. The first 49 steps are left out.
""",
    "convergence": """
A GPT of one layer and width 64 on the source text of Python's standard library, {steps} steps, {seeds} seeds, float32
parameters, every matrix and table in low precision. Losses are those of 1,024 windows that are not trained on. A
seed sets parameters and batches, which are the same for each state. "Less float32" is the mean difference from float32
with the same seed, and its standard error: below 0, the state in low precision ended lower. Muon makes all singular
values of the momentum equal, those of random rounding included: round to nearest there, or use bfloat16. For AdamW,
five seeds cannot tell the states apart.
""",
    "paired": """
The same model with `b2=0.999` and a cosine schedule that ends after so many steps. Both runs of a pair have the same
parameters and batches, so that their difference varies less than the losses of two seeds. A mean of all pairs below 0
says that 8 bits ended lower: by 2.5 standard errors after 200 steps, by none after 100.
""",
}


def write(name, options):
    """Prints a section as its lines come; with `out`, puts it into the page in place of the one that is there."""
    by = f"By `benchmarks/optimizer_state.py`, JAX {jax.__version__}, "
    if name in ("memory", "cost"):
        by += "compiled for NVIDIA H200s; nothing ran on one."
    else:
        by += f"Python {platform.python_version()}, on {cpu.features()}."
    sizes = {"steps": options.steps, "seeds": options.seeds}
    section = convergence(**sizes) if name == "convergence" else SECTIONS[name]()
    lines = []
    for line in itertools.chain([by, ""], section):
        print(line, flush=True)
        lines.append(line)
    if options.out:
        page = options.out.read_text() if options.out.exists() else ""
        parts = dict(part.split("\n", 1) for part in page.split("\n## ")[1:])
        parts[TITLES[name]] = "\n" + "\n".join(lines) + "\n" + NOTES[name].format(**sizes)
        body = "\n".join(f"## {title}\n{parts[title].rstrip()}\n" for title in TITLES.values() if title in parts)
        options.out.write_text(f"# Optimizer state in 8 bits\n\n{WHY}\n\n{body}")


def main():
    parser = arguments(__doc__, only=f"one of {', '.join(SECTIONS)}; with --out, leaves the rest of the page as it is")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    for name in SECTIONS:
        if options.only in ("", name):
            write(name, options)


if __name__ == "__main__":
    main()
