"""What float8 costs on an H200, by the compiler: products in float8, kernels, bytes and memory, beside other libraries.

    python benchmarks/float8.py [--out docs/benchmarks/float8.md]

Nothing runs on a GPU and none is needed; see `gpu_aot.py` for what is. Flax, Keras and qwix are compared where they are
installed. All of it takes 10 minutes of CPU time.
"""

import collections
import functools
import os

import gpu_aot  # first: it sets the platform
import hlo
import jax
import jax.numpy as jnp
from collectives import on_the_wire, spread
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import F32, Shape, experts_case, gpt_case, llama_case, mlp_case
from report import arguments, head, report, row

import jmp_amp as amp

os.environ.setdefault("KERAS_BACKEND", "jax")

TOKENS, DIM, HIDDEN = 8192, 4096, 16384
FLAGS = {"default": {}, "no Triton products": {"xla_gpu_enable_triton_gemm": False}}
GPT = functools.partial(gpt_case, None, layers=4, dim=2048, heads=16, vocab=32000, batch=4, scan=True)
MODELS = {
    "Llama, 1 block of width 4096": lambda: llama_case(None),
    "GPT, 4 layers of width 2048, scanned": GPT,
    "GPT, scanned, remat": lambda: GPT(remat="dots_saveable"),
    "GPT, scanned, 4 micro-batches": GPT,
    "8 experts of width 2048": lambda: experts_case(None),
}
MICRO_BATCHES = {"GPT, scanned, 4 micro-batches": 4}

SHARDED = {
    "bfloat16": {"dtype": "bfloat16"},
    'bfloat16, `weight_grad_dtype="float32"`': {"dtype": "bfloat16", "weight_grad_dtype": "float32"},
    "float8": {"dtype": "float8"},
}

WHY = "How much of a model runs in float8, and what the scales and casts cost, beside bfloat16 and other libraries."
NOTES = """
"No Triton products" is the compiler option `xla_gpu_enable_triton_gemm=False`: cuBLASLt computes the products. On a
GPU, XLA tries both for each product and keeps the faster. A float8 product multiplies two float8 arrays in the
optimized module; one that casts them up first counts as 16-bit. Bytes are those of every kernel, by one rule for all
programs (`gpu_aot.cost`): good for ratios.

The MLP is 4096-16384-4096 with ReLU, on 8192 tokens, without biases; its weights are float32, as is its input, and
the gradients are those of both. The Llama block has the sizes of Llama 3 8B and 8192 tokens; the GPT has 4096 tokens
and a vocabulary of 32000. The experts are two layers, 2048-8192-2048, for 8192 tokens that are sorted by their expert
(`lax.ragged_dot`). Shares are of the FLOPs of products, forward and backward, those of a loop times its
iterations; the rest is attention. FSDP is the MLP on 8 GPUs, its weights sharded along their first axis; MB (10^6
bytes) are what one GPU sends, counted as in [Collectives](collectives.md).

## Where the memory of a scanned GPT goes

It needs as much memory as in bfloat16, in 4 micro-batches too, because a scan keeps no operand of a float8 product. It
keeps the results of products, as `save="matmuls"` says, and computes norms and GELUs again. In one batch, kept for 4
layers are 1,274 MB of the 2,115 MB:

| kept by the scan | MB |
|---|---|
| the scores of attention, bfloat16 | 537 |
| the results of the up projections, bfloat16 | 268 |
| queries, keys and values, bfloat16 | 201 |
| the residual stream, float32 | 134 |
| the results of attention, bfloat16, before and after the output projection | 134 |

A float8 copy of an operand would come on top of these: the derivative of GELU reads the result of the up projection in
bfloat16, that of a norm the residual stream. What saves memory is attention that keeps no scores, and
`residual_stream="low"`.

## What this shows

These are programs, not runs ([times](gpu_training.md)). `autocast` multiplies float8 arrays, so all 6 products of the
MLP are in float8 under both settings of the compiler, and in every model float8 has the share that `amp.explain`
predicts. Flax's `Fp8DotGeneralOp` and Keras cast to float8 and back, and rely on XLA to recognize a float8 product. By
default XLA recognizes none: all 6 run in bfloat16, and the casts cost extra. Float8 needs a scale for each operand,
so `autocast` moves 1.13 and 0.99 times the bytes of bfloat16, which is 0.84 of those of qwix. Flax's
`Fp8DirectDotGeneralOp` takes its scales from earlier steps: by default that is 2% less than `autocast`, without
Triton 9% more, and it keeps a state.

XLA has no kernel for ragged products on a GPU. It multiplies all tokens by all 8 experts, in any dtype, with zeros for
the tokens of other experts: 8 times the FLOPs that `explain` counts. These masked arrays are most of the bytes, and in
float8 half as large, so experts move 0.68 and 0.61 times the bytes of bfloat16 and need less than half the memory.

## Where float8 loses

- It needs about twice the kernels in the models, three times in the MLP. Most of the new ones compute a single
  number, for a scale: 18 of 25 in the MLP by default.
- A scanned GPT of width 2048 moves 10% to 14% more bytes than in bfloat16, with 4 micro-batches 4% to 6%; the Llama
  block 4%.
- The gradient of a weight leaves its product in float32, twice the bytes of bfloat16. In micro-batches of 512 tokens,
  where weights and their gradients are most of the memory, GPTs of width 2048 with 2 and 4 layers need 1.18 and 1.10
  times the memory of bfloat16 (JAX 0.12; 0.98 and 1.04 with JAX 0.10.2).
- With FSDP it sends 1.25 times the bytes of bfloat16. Weights are gathered in float8, which is half the bytes, but
  their gradients are summed in float32, which is twice the bytes; bfloat16 with `weight_grad_dtype="float32"` sends
  1.6 times as much as float8. Scales add 6 scalars to the all-reduces, 1 for each weight, activation and cotangent.
"""


def autocast(dtype):
    loss_fn, args = mlp_case(None, TOKENS, DIM, HIDDEN)
    return amp.autocast(loss_fn, dtype), args


def linen_mlp(**options):
    from flax import linen as nn

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16, **options)
            return dense(DIM)(jax.nn.relu(dense(HIDDEN)(x)))

    return MLP()


def linen(model):
    x = Shape((TOKENS, DIM), F32)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    return lambda variables, x: mean_square(model.apply(variables, x)), (variables, x)


def flax_float8(name):
    from flax.linen import fp8_ops

    return linen(linen_mlp(dot_general_cls=getattr(fp8_ops, name)))


def qwix_float8():
    import qwix

    rule = qwix.QtRule(**dict.fromkeys(["weight_qtype", "act_qtype", "bwd_qtype"], jnp.float8_e4m3fn))
    return linen(qwix.quantize_model(linen_mlp(), qwix.QtProvider([rule])))


def keras_float8():
    import keras

    dense = functools.partial(keras.layers.Dense, use_bias=False, dtype="mixed_bfloat16")
    model = keras.Sequential([keras.Input((DIM,)), dense(HIDDEN, activation="relu"), dense(DIM)])
    model.quantize("float8")
    params = [Shape(x.shape, x.dtype) for x in model.trainable_variables]

    def loss_fn(params, x):
        return mean_square(model.stateless_call(params, [], x, training=True)[0])

    return loss_fn, (params, Shape((TOKENS, DIM), F32))


def mean_square(x):
    return jnp.mean(jnp.square(x.astype(F32)))


# An MLP of two layers without biases by each library that has float8, as `(loss_fn, args)`, the arguments as shapes;
# one whose library is missing raises `ImportError`.
LIBRARIES = {
    "autocast, bfloat16": lambda: autocast("bfloat16"),
    "autocast, float8": lambda: autocast("float8"),
    "qwix, a scale for each channel": qwix_float8,
    "Flax, `Fp8DirectDotGeneralOp`": lambda: flax_float8("Fp8DirectDotGeneralOp"),
    "Flax, `Fp8DotGeneralOp`": lambda: flax_float8("Fp8DotGeneralOp"),
    'Keras, `quantize("float8")`': keras_float8,
}


def lower(loss_fn, args, target="H200", micro_batches=1):
    """Lowers loss and gradients of all arguments that are floating, for one GPU."""
    gradients = jax.value_and_grad
    if micro_batches > 1:
        gradients = functools.partial(amp.value_and_grad, accumulate_steps=micro_batches)
    floating = [all(jnp.issubdtype(x.dtype, jnp.floating) for x in jax.tree.leaves(arg)) for arg in args]
    argnums = tuple(i for i, is_floating in enumerate(floating) if is_floating)
    return gpu_aot.lower_for(gradients(loss_fn, argnums), *gpu_aot.struct(gpu_aot.mesh(target), args))


def products(program):
    """Returns how many products there are in the program, and how many FLOPs they have, by the width of operands."""
    count, flops = collections.Counter(), collections.Counter()
    for times, each, dtypes in gpu_aot.products(program):
        kind = "float8" if all(dtype.startswith("f8") for dtype in dtypes) else max(dtypes, key=hlo.NBYTES.get)
        count[kind] += 1
        flops[kind] += times * each
    return count, flops


def library_table():
    """Yields a row for each library and setting of the compiler."""
    yield from head(
        "MLP", "compiler", "float8 products", "16-bit products", "kernels", "GB moved", "x bfloat16", "temporary GB"
    )
    moved_in_bfloat16 = {}
    for name, library in LIBRARIES.items():
        try:
            program = lower(*library())
        except ImportError:
            yield f"| {name} | not installed |" + " |" * 6
            continue
        for flags, compiler_options in FLAGS.items():
            compiled = program.compile(compiler_options)
            count, _ = products(compiled)
            cost = gpu_aot.cost(compiled)
            moved = cost["bytes_moved"]
            cells = [name, flags, f"{count['float8']} of {count.total()}", count["bf16"] + count["f16"]]
            cells += [
                cost["kernels"],
                f"{moved / 1e9:.3f}",
                f"{moved / moved_in_bfloat16.setdefault(flags, moved):.3f}",
            ]
            yield row(*cells, f"{cost['temp_bytes'] / 1e9:.3f}")


def model_table():
    """Yields a row for each model and setting of the compiler."""
    figures = "kernels", "x bfloat16", "GB moved", "x bfloat16", "temporary GB", "x bfloat16"
    yield from head("model", "compiler", "float8 by `explain`", "float8 compiled", *figures)
    for name, case in MODELS.items():
        loss_fn, args = case()
        predicted = amp.explain(loss_fn, "float8")(*args).summary()["matmul_flops"]["float8"]
        n = MICRO_BATCHES.get(name, 1)
        programs = [lower(amp.autocast(loss_fn, dtype), args, micro_batches=n) for dtype in ("float8", "bfloat16")]
        for flags, compiler_options in FLAGS.items():
            compiled = [program.compile(compiler_options) for program in programs]
            _, flops = products(compiled[0])
            cells = [name, flags, f"{predicted:.1%}", f"{flops['float8'] / flops.total():.1%}"]
            costs = [gpu_aot.cost(program) for program in compiled]
            for figure, unit in {"kernels": 1, "bytes_moved": 1e9, "temp_bytes": 1e9}.items():
                value, in_bfloat16 = (cost[figure] / unit for cost in costs)
                cells += [f"{value:.0f}" if unit == 1 else f"{value:.3f}", f"{value / in_bfloat16:.3f}"]
            yield row(*cells)


def lower_sharded(mesh, options, **sizes):
    """Lowers the MLP with weights sharded along their first axis, and activations spread like the batch (FSDP)."""
    loss_fn, args = mlp_case(None, **sizes, place=functools.partial(spread, mesh))
    args = gpu_aot.struct(mesh, args, P("data"))
    out_shardings = NamedSharding(mesh, P()), jax.tree.map(lambda x: x.sharding, args)
    gradients = jax.value_and_grad(amp.autocast(loss_fn, **options), (0, 1))
    return gpu_aot.lower_for(gradients, *args, out_shardings=out_shardings)


def sharded_table(n=8):
    """Yields a row for each variant and setting of the compiler: the collectives, and what one of `n` devices sends."""
    yield from head("FSDP", "compiler", "MB gathered", "MB summed", "all-reduces of scalars", "scalars", "MB sent")
    for name, options in SHARDED.items():
        program = lower_sharded(gpu_aot.h200_mesh(n), options, tokens=TOKENS, dim=DIM, hidden=HIDDEN)
        for flags, compiler_options in FLAGS.items():
            compiled = program.compile(compiler_options)
            wire = on_the_wire(compiled, n)
            moved = [
                ", ".join(f"{size / 1e6:.0f} in {dtype}" for (op, dtype), size in wire.items() if op == wanted)
                for wanted in ("all-gather", "reduce-scatter")
            ]
            scalars = scalar_all_reduces(compiled)
            cells = [name, flags, *moved, len(scalars), sum(scalars), f"{wire.total() / 1e6:.0f}"]
            yield row(*cells)


def scalar_all_reduces(program):
    """Returns how many scalars each all-reduce sums or compares: XLA merges some, and none here has an array."""
    calls = [sizes for op, _, sizes in gpu_aot.collectives(program) if op == "all-reduce"]
    return [sum(size // hlo.NBYTES[dtype] for dtype, size in sizes.items()) for sizes in calls]


def table():
    """Yields the lines of the three tables."""
    yield from library_table()
    yield ""
    yield from model_table()
    yield ""
    yield from sharded_table()


def main():
    options = arguments(__doc__).parse_args()
    by = f"Compiled for NVIDIA H200s with JAX {jax.__version__}, by `benchmarks/float8.py`."
    report("Float8", f"{WHY}\n\n{by}", table(), NOTES, options.out)


if __name__ == "__main__":
    main()
