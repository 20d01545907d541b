"""What autocast costs on a GPU, by the compiler: bytes, memory, launches and casts of loss and gradients, for one H200.

    python benchmarks/autocast_cost.py [--only LSTM] [--out docs/benchmarks/autocast_cost.md]

Nothing runs on a GPU and none is needed; see `gpu_aot.py` for what is. All of it takes 15 minutes
of CPU time.
"""

import functools
import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

import gpu_aot  # first: it sets the platform
import jax
import jax.numpy as jnp
from models import CASES, MORE_CASES, accumulated, by_expert, cast_whole, decoding_case, gpt_case, without_scatter
from report import arguments, head, report, row

import jmp_amp as amp

LOW = jnp.float16


class Model(NamedTuple):
    """A case of `models.py`, and what is computed of its loss.

    `by_hand` and `by_expert` return the function and its arguments, where these are not the gradients of the case. With
    a `policy` the arguments are stored as the hand stores them.
    """

    case: Callable
    gradients: Callable = jax.value_and_grad
    by_hand: Callable | None = None
    by_expert: Callable | None = None
    policy: str | None = None


def autocast(case, policy=None, **options):
    loss_fn, args = case(None)
    if policy is None:
        return amp.autocast(loss_fn, **options), args
    return amp.autocast(loss_fn, policy, **options), case(LOW)[1]


def hand(model, way, make):
    """Returns the function and its arguments of a model that is mixed by hand."""
    if getattr(model, way) is not None:
        return getattr(model, way)()
    loss_fn, args = make(model.case, LOW)
    return model.gradients(loss_fn), args


def variant(make, **options):
    """Returns a variant: it makes the function and its arguments of a model."""

    def of_model(model):
        if make is autocast:
            options["policy"] = model.policy
        loss_fn, args = make(model.case, **options)
        return model.gradients(loss_fn), args

    return of_model


def whole(case):
    loss_fn, args = case(None)
    return cast_whole(loss_fn), args


VARIANTS = {
    "float32": variant(lambda case: case(None)),
    "by hand": lambda model: hand(model, "by_hand", lambda case, low: case(low)),
    "by an expert": lambda model: hand(model, "by_expert", by_expert),
    "jmp, mpx": variant(whole),
    "autocast": variant(autocast),
    'save="all"': variant(autocast, save="all"),
    'residual_stream="low"': variant(autocast, residual_stream="low"),
    'weight_grad_dtype="float32"': variant(autocast, weight_grad_dtype="float32"),
}
FEW = "float32", "by hand", "by an expert", "autocast", 'residual_stream="low"'


def micro_batches(steps=16):
    """A GPT over micro-batches of one sequence; by hand each casts the weights, unless by an expert."""

    def case(low):
        return gpt_case(low, layers=6, batch=steps)

    return Model(
        case,
        functools.partial(amp.value_and_grad, accumulate_steps=steps),
        lambda: (accumulated(case(LOW)[0], LOW, steps), case(LOW)[1]),
        lambda: (accumulated(without_scatter(case(LOW)[0]), LOW, steps, once=True), case(LOW)[1]),
    )


def decoding():
    """The weights and the cache are stored in float16, but not for float32; nothing is differentiated."""
    by_hand = functools.partial(decoding_case, LOW)
    policy = "params=float16,compute=float16,output=float32"
    return Model(decoding_case, lambda fun: fun, by_hand, by_hand, policy)


MODELS = {name: (Model(case), tuple(VARIANTS)) for name, case in CASES.items()}
MODELS |= {name: (Model(case), FEW) for name, case in MORE_CASES.items()}
MODELS["GPT, 6 layers, 16 micro-batches"] = micro_batches(), FEW
MODELS["GPT-2 small, decoding"] = decoding(), FEW


WHY = "How many bytes a model moves and how much memory it needs, beside float32 and casts written by hand."
NOTES = """
Bytes and launches are counted over all kernels, by one rule for all programs (`gpu_aot.cost`): good for ratios. "Casts
traced" counts the casts between floating dtypes in the jaxpr of loss and gradients, those in the body of a loop once.
"Casts compiled" counts them in the optimized module, where most are fused into other kernels.

"By hand" is the usual way: products, activations and the residual stream in float16; norms, softmax and the loss in
float32. "By an expert" adds what takes care: weights are cast once, also where a loop or micro-batches read them, and
the label's logit is chosen by a comparison, since the gradient of `take_along_axis` is a float32 scatter of all logits.
A weight that a loop reads is then summed up in float16 in the backward pass; micro-batches are summed in float32. "jmp,
mpx" casts all arguments to float16 in front of the model. Both packages give the same program. Its norms, softmax and
loss are float16, those of autocast float32, so the results differ as well as the costs. Arrays that the model creates,
such as the initial zeros of an LSTM, stay float32, and so do the products that read them. The models are in
`benchmarks/models.py`, each written once for all variants.

"Remat" is `jax.checkpoint` around the body of the scan, with the policy `dots_saveable` where none is named; that of
the Llama and of the LoRA has no policy. The LoRA trains adapters of the queries and values alone. The graph network
sums a message for each of 8 edges a node. The experts get their tokens from a router. The Mamba scans 256 steps. The
chunked cross-entropy has a vocabulary of 128256, and computes the logits of each chunk again for its gradient. The
micro-batches are one sequence each. Decoding computes the logits of one more token, from a cache; its weights are
stored in float16.

This table is the reason for the default `save="matmuls"`. For a scan without remat, it needs 0.33 to 0.43 times the
memory of `save="all"`, and moves fewer bytes. For a scan with remat it is the same, since the user's checkpoint decides
what is kept. Without a scan, it changes nothing.

`residual_stream="low"` saves 4 to 8% of the bytes of the first transformers and 2 to 5% of their memory, beside the
default. [Accelerators](accelerators.md) has other GPUs, and TPUs. [Attention in one kernel](attention.md) has these
transformers with cuDNN's attention.

`weight_grad_dtype="float32"` writes each weight gradient in float32. That costs little or nothing if the gradient is
cast to float32 anyway. It saves bytes in an LSTM, whose loop adds to the gradient in every iteration. It costs bytes in
the convolutions of a ResNet.

## Where autocast loses

Beside an expert, too, if a ratio is above 1.02:

- The residual stream of a transformer: GPT-2 small (but not scanned without remat), ViT-B/16, Llama, LoRA, the GPT in
  16 micro-batches. It is float32, because an addition takes the widest of its operands. In the forward pass the float32
  values are fused away. In the backward pass the gradient of the stream is stored in float32, and every layer reads it.
  With `residual_stream="low"`, which rounds the stream to float16 at each addition as by hand, all of these move 0.99
  to 1.00 times the bytes of the expert.
- The graph network: 11%. Half of it is the gradient of `x[senders]`, a sum over edges, and the features themselves,
  both float32; by hand they are float16. Half is a bias: messages are summed in float32, so the bias is added in
  float32, and XLA computes its gradient in another kernel, which reads the messages again. Without biases autocast
  moves 5% more than the hand. The cast of the features is no part of it: XLA fuses it with the gather, and to cast the
  nodes before the gather saves 0.1%.
- Ragged experts: 3%. The gradients of the gathers that sort tokens by expert are summed in float32.
- Chunked cross-entropy: 27% more bytes and 66% more memory than an expert. The gradient of the output weights is summed
  over the chunks in float32, and so in an array of twice the size. By hand, where the cast is in the loop, it is
  float32, too; that has 1.5 times the bytes of autocast, for the scattered logits.
- An LSTM: 4% more than an expert, whose weight gradient is summed over 512 steps in float16. With
  `weight_grad_dtype="float32"` it is 13% less.
- An LSTM with `save="all"`: 5% more bytes than by hand, 78% more memory. Its cell accumulates, so autocast keeps it in
  float32; by hand it is float16. In return, the errors of the gradients are 0.17 to 0.29 times those by hand. With the
  default, `save="matmuls"`, the LSTM needs 0.77 times the memory by hand.
- Launches: each weight is cast once, so a model without a loop has more launches than in float32, by 4% (ResNet-50) to
  17% (GPT-2 small, ViT-B/16). By hand and with jmp or mpx, there are more again.
"""


def compiled(fun, args):
    """Returns a function compiled for one H200."""
    return gpu_aot.compile_for(fun, *gpu_aot.struct(gpu_aot.h200_mesh(), args))


def measure(loss_fn, args):
    """Returns bytes moved and temporary bytes of loss and gradients."""
    cost = gpu_aot.cost(compiled(jax.value_and_grad(loss_fn), args))
    return cost["bytes_moved"], cost["temp_bytes"]


def casts(jaxpr):
    """Counts the casts from one floating dtype to another, those of a loop's body once."""
    count = 0
    for eqn in jaxpr.eqns:
        dtypes = {var.aval.dtype for var in (*eqn.invars, *eqn.outvars) if jnp.issubdtype(var.aval.dtype, jnp.floating)}
        count += eqn.primitive.name == "convert_element_type" and len(dtypes) == 2
        for inner in itertools.chain(*(p if isinstance(p, tuple | list) else [p] for p in eqn.params.values())):
            count += casts(inner) if hasattr(inner, "eqns") else 0
    return count


def converts(program):
    """Counts the same in the optimized module, where most are fused into another kernel."""
    text = program.as_text()
    dtypes = dict(re.findall(r"(%[\w.\-]+) = (\w+)\[", text))
    pairs = re.findall(r"= (f\d+)\[\S* convert\((%[\w.\-]+)\)", text)
    return sum(dtypes[operand] in {"f16", "f32"} - {dtype} for dtype, operand in pairs)


def table(models):
    """Yields the lines of a Markdown table; ratios are to the model mixed by hand, and by an expert."""
    hands = "by hand", "by an expert"
    ratios = [f"x {by}" for by in hands]
    figures = "GB moved", *ratios, "temporary GB", *ratios, "launches", "casts traced", "casts compiled"
    yield from head("model", "variant", *figures)
    for name, (model, variants) in models.items():
        programs = {variant: VARIANTS[variant](model) for variant in variants}
        modules = {variant: compiled(*program) for variant, program in programs.items()}
        costs = {variant: gpu_aot.cost(module) for variant, module in modules.items()}
        for variant, (fun, args) in programs.items():
            cells = [name, variant]
            for figure in ("bytes_moved", "temp_bytes"):
                value = costs[variant][figure]
                cells += [f"{value / 1e9:.3f}", *(f"{value / costs[by][figure]:.3f}" for by in hands)]
            traced = casts(jax.make_jaxpr(fun)(*args).jaxpr)
            cells += [costs[variant]["kernels"], traced, converts(modules[variant])]
            yield row(*cells)


def main():
    options = arguments(__doc__, "the models whose name contains this").parse_args()
    by = f"Compiled for one NVIDIA H200 with JAX {jax.__version__}, by `benchmarks/autocast_cost.py`."
    report(
        "Bytes and memory",
        f"{WHY}\n\n{by}",
        table({name: model for name, model in MODELS.items() if options.only in name}),
        NOTES,
        options.out,
    )


if __name__ == "__main__":
    main()
