"""What travels between GPUs in a train step, by the compiler: collectives by kind and dtype, for 8, 64 and 512 H200s.

    python benchmarks/collectives.py [--devices 8 64] [--out docs/benchmarks/collectives.md]

Nothing runs on a GPU and none is needed; see `gpu_aot.py` for what is.
"""

import collections
import functools
import itertools

import gpu_aot  # first: it sets the platform
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import F32, Shape, cross_entropy, norm, train_step, transformer_layer, transformer_shapes
from report import arguments, head, report, row

import jmp_amp as amp

VARIANTS = {
    "float32": lambda loss_fn: loss_fn,
    "autocast": amp.autocast,
    'weight_grad_dtype="float32"': functools.partial(amp.autocast, weight_grad_dtype="float32"),
}
WAYS = ("data parallel", "FSDP")

WHY = """How many bytes a train step sends between GPUs, and what loss scaling adds to them.
For you: about half the traffic of float32, and one number more for the loss scale."""
NOTES = """
A GPT of four layers of width 1024 with 8192 tokens, tied, 59 million parameters; four sequences of 256 tokens a device;
AdamW inside `dynamic_loss_scale`. Data parallel: everything is replicated, and the batch is spread. FSDP: parameters
and moments are sharded along their last axis, and `jax.lax.with_sharding_constraint` keeps the activations spread like
the batch; there is no other annotation. In so small a model, embeddings, which are looked up in float32, weigh more
than in a large one.

MB (10^6 bytes) are the bytes that one device sends in a step. They are the bytes of the operands, which the program
shows, times the factor of a ring algorithm on `n` devices: 2(n-1)/n for an all-reduce, (n-1)/n for a reduce-scatter and
an all-to-all, n-1 for an all-gather (whose operand is 1/n of its result). A collective in a loop counts as often as the
loop runs. "Summed" are gradients, by all-reduce or reduce-scatter; "other" are tokens and activations around the
embedding. "Calls" counts the collectives that run; XLA merges small ones into one.

By default the gradient of a matrix product is float16, and is summed over devices in float16. With
`weight_grad_dtype="float32"` it is float32 before the sum. Weights are gathered in float16 in both cases. Without a
loop, `weight_grad_dtype="float32"` gathers them once more for the backward pass, which by default reads the first copy.
Gradients of norms and biases stay float32, and so does the gradient of the lookup where it is summed apart.

## What loss scaling adds

Bytes that one device hands in, of the step with `amp.dynamic_loss_scale` minus the same step with the plain optax
transformation.

{added}

If gradients are the same on all devices, each device finds the same flag. If they are sharded, one float32 is summed,
which contains both the flag and the norm; XLA merges that sum with the sum of the loss.
"""


def spread(mesh, x):
    """Keeps activations spread like the batch, so that FSDP gathers weights and not these."""
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))


def model(mesh, scan, layers=4, dim=1024, heads=16, length=256, vocab=8192, each=4):
    """Returns the loss function of a GPT, its parameters and its batch as shapes."""
    blocks, last = transformer_shapes(dim, layers, scan)
    params = {"token": Shape((vocab, dim), F32), "position": Shape((length, dim), F32), "blocks": blocks, "norm": last}

    def body(x, p):
        return spread(mesh, transformer_layer(p, x, None, heads)), None

    def loss_fn(params, tokens):
        x = spread(mesh, params["token"][tokens[:, :-1]] + params["position"])
        if scan:
            x, _ = lax.scan(body, x, params["blocks"])
        else:
            for p in params["blocks"]:
                x, _ = body(x, p)
        logits = spread(mesh, norm(params["norm"], x, None) @ params["token"].T)
        return cross_entropy(logits, tokens[:, 1:], None)

    return loss_fn, params, Shape((each * mesh.size, length + 1), jnp.int32)


def compiled(mesh, way, variant, case, scaled=True, **options):
    """Returns the compiled train step of a model as `model` returns it; `options` are those of `jax.jit`."""
    loss_fn, params, batch = case
    loss_fn = VARIANTS[variant](loss_fn)
    tx = optax.adamw(1e-3)
    tx = amp.dynamic_loss_scale(tx) if scaled else tx

    def place(x):
        spec = P(*[None] * (len(x.shape) - 1), "data") if way == "FSDP" and x.shape else P()
        return gpu_aot.struct(mesh, x, spec)

    kept = jax.tree.map(place, (params, jax.eval_shape(tx.init, params)))
    out_shardings = (*jax.tree.map(lambda x: x.sharding, kept), NamedSharding(mesh, P()))
    args = (*kept, gpu_aot.struct(mesh, batch, P("data")))
    step = train_step(loss_fn, tx, scaled)
    return gpu_aot.compile_for(step, *args, donate_argnums=(0, 1), out_shardings=out_shardings, **options)


def handed_in(program):
    """Returns the bytes that one device hands in, by operation and dtype."""
    total = collections.Counter()
    for op, times, sizes in gpu_aot.collectives(program):
        for dtype, size in sizes.items():
            total[op, dtype] += times * size
    return total


def on_the_wire(program, n):
    """Returns the bytes that one of `n` devices sends, by operation and dtype."""
    sent = {
        "all-reduce": 2 * (n - 1) / n,
        "reduce-scatter": (n - 1) / n,
        "all-gather": n - 1,
        "all-to-all": (n - 1) / n,
        "collective-permute": 1,
    }
    return collections.Counter({(op, dtype): sent[op] * size for (op, dtype), size in handed_in(program).items()})


def megabytes(wire):
    """Returns the megabytes of gathered weights and of summed gradients in float16 and float32, and of the rest."""
    summed = {dtype: wire["all-reduce", dtype] + wire["reduce-scatter", dtype] for dtype in ("f16", "f32")}
    parts = [wire["all-gather", "f16"], wire["all-gather", "f32"], summed["f16"], summed["f32"]]
    return [part / 1e6 for part in (*parts, wire.total() - sum(parts))]


def table(devices, added):
    """Yields the lines of a Markdown table, and appends those of what scaling adds to `added`."""
    added += head("", "devices", "layers", "dtype", "all-reduce float32", "everything else")
    figures = *(f"{what} float{bits}" for what in ("gathered", "summed") for bits in (16, 32)), "other"
    yield from head("", "devices", "layers", "", *figures, "MB sent", "x float32", "calls")
    for way, n, scan in itertools.product(WAYS, devices, (False, True)):
        mesh, what = gpu_aot.h200_mesh(n), (way, n, "scanned" if scan else "unrolled")
        case, control = model(mesh, scan), None
        for variant in VARIANTS:
            program = compiled(mesh, way, variant, case)
            wire = on_the_wire(program, n)
            control = control or wire.total()
            parts = (f"{part:.1f}" for part in megabytes(wire))
            calls = sum(times for _, times, _ in gpu_aot.collectives(program))
            yield row(*what, variant, *parts, f"{wire.total() / 1e6:.1f}", f"{wire.total() / control:.3f}", calls)
            if variant == "autocast":
                more = handed_in(program)
                more.subtract(handed_in(compiled(mesh, way, variant, case, scaled=False)))
                scalar = more.pop(("all-reduce", "f32"))
                added.append(row(*what, variant, f"{scalar} bytes", f"{sum(map(abs, more.values()))} bytes"))


def main():
    parser = arguments(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512])
    options = parser.parse_args()
    by = f"Compiled for NVIDIA H200s, eight to a host, with JAX {jax.__version__}, by `benchmarks/collectives.py`."
    added = []
    lines = list(table(options.devices, added))
    report("Collectives", f"{WHY}\n\n{by}", lines, NOTES.format(added="\n".join(added)), options.out)


if __name__ == "__main__":
    main()
