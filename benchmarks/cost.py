"""What programs cost on GPUs and TPUs, by the compiler: bytes, memory, launches and casts, on two pages.

    python benchmarks/cost.py TABLE [--only LSTM] [--redo autocast] [--out docs/benchmarks/TABLE.md]

- `autocast_cost`, for one H200: loss and gradients of models in float32, with casts by hand, under autocast and its
  options; a whole train step at each of apex's levels; four models with one rule of autocast left out at a time.
- `accelerators`: seven models for GPUs from T4 to B200 and for TPUs, and the largest batch that fits. An environment
  with the CUDA plugin compiles for the GPUs, one with libtpu for the TPUs. What is measured is kept in
  `accelerators.json`: a run adds what is missing there, and `--redo` measures a variant anew.

Nothing runs on a GPU or TPU and none is needed; see `gpu_aot.py` and `tpu_aot.py` for what is. The first table of
`autocast_cost` takes 15 minutes of CPU time.
"""

import contextlib
import functools
import importlib.util
import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import gpu_aot  # first: it sets the platform
import hlo
import jax
import jax.numpy as jnp
import models
import optax
import tpu_aot
from models import CASES, MORE_CASES, accumulated, by_expert, cast_whole, decoding_case, gpt_case, without_scatter
from report import arguments, head, report, row

import jmp_amp as amp
from jmp_amp._autocast import _api, _options, _rewrites
from jmp_amp._ops import RULES, ResultKind, Rule

# Programs, and what they cost


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


def plain(model, low):
    return of_gradients(model, *model.case(None))


def by_hand(model, low):
    return model.by_hand() if model.by_hand else of_gradients(model, *model.case(jnp.dtype(low)))


def expert(model, low):
    return model.by_expert() if model.by_expert else of_gradients(model, *by_expert(model.case, jnp.dtype(low)))


def whole(model, low):
    loss_fn, args = model.case(None)
    return of_gradients(model, cast_whole(loss_fn, f"mixed_{low}"), args)


def autocast(model, low, **options):
    loss_fn, args = model.case(None)
    if model.policy is None:
        return of_gradients(model, amp.autocast(loss_fn, low, **options), args)
    _, args = model.case(jnp.dtype(low))
    return of_gradients(model, amp.autocast(loss_fn, model.policy, **options), args)


def of_gradients(model, loss_fn, args):
    return model.gradients(loss_fn), args


VARIANTS = {
    "float32": plain,
    "by hand": by_hand,
    "by an expert": expert,
    "jmp, mpx": whole,
    "autocast": autocast,
    'save="all"': functools.partial(autocast, save="all"),
    'residual_stream="low"': functools.partial(autocast, residual_stream="low"),
    'weight_grad_dtype="float32"': functools.partial(autocast, weight_grad_dtype="float32"),
}


def compiled(fun, args, target="H200", **jit_kwargs):
    """Returns a function compiled for one GPU or TPU."""
    if target in TPUS:
        return tpu_aot.compile_for(fun, *args, target=target)
    return gpu_aot.compile_for(fun, *gpu_aot.struct(gpu_aot.mesh(target), args), **jit_kwargs)


def cost(fun, args, **jit_kwargs):
    """Returns what a program costs on one H200."""
    return hlo.cost(compiled(fun, args, **jit_kwargs))


GPUS = [name for name in gpu_aot.GPUS if name != "H100"]  # which runs the programs of an H200
TPUS = list(tpu_aot.TPUS)
ON_H200 = f"Compiled for one NVIDIA H200 with JAX {jax.__version__}, by `benchmarks/cost.py`."

# autocast_cost

LOW = "float16"
FEW = "float32", "by hand", "by an expert", "autocast", 'residual_stream="low"'


def micro_batches(steps=16):
    """A GPT over micro-batches of one sequence; by hand each casts the weights, unless by an expert."""

    def case(low):
        return gpt_case(low, layers=6, batch=steps)

    return Model(
        case,
        functools.partial(amp.value_and_grad, accumulate_steps=steps),
        lambda: (accumulated(case(jnp.float16)[0], jnp.float16, steps), case(jnp.float16)[1]),
        lambda: (
            accumulated(without_scatter(case(jnp.float16)[0]), jnp.float16, steps, once=True),
            case(jnp.float16)[1],
        ),
    )


def decoding():
    """The weights and the cache are stored in float16, but not for float32; nothing is differentiated."""
    low = functools.partial(decoding_case, jnp.float16)
    policy = "params=float16,compute=float16,output=float32"
    return Model(decoding_case, lambda fun: fun, low, low, policy)


MODELS = {name: (Model(case), tuple(VARIANTS)) for name, case in CASES.items()}
MODELS |= {name: (Model(case), FEW) for name, case in MORE_CASES.items()}
MODELS["GPT, 6 layers, 16 micro-batches"] = micro_batches(), FEW
MODELS["GPT-2 small, decoding"] = decoding(), FEW


WHY_COST = "How many bytes a model moves and how much memory it needs, beside float32 and casts written by hand."
NOTES_COST = """
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


def costs_of_models(models):
    """Yields the lines of a Markdown table; ratios are to the model mixed by hand, and by an expert."""
    hands = "by hand", "by an expert"
    ratios = [f"x {by}" for by in hands]
    figures = "GB moved", *ratios, "temporary GB", *ratios, "launches", "casts traced", "casts compiled"
    yield from head("model", "variant", *figures)
    for name, (model, variants) in models.items():
        programs = {variant: VARIANTS[variant](model, LOW) for variant in variants}
        modules = {variant: compiled(*program) for variant, program in programs.items()}
        costs = {variant: hlo.cost(module) for variant, module in modules.items()}
        for variant, (fun, args) in programs.items():
            cells = [name, variant]
            for figure in ("bytes_moved", "temp_bytes"):
                value = costs[variant][figure]
                cells += [f"{value / 1e9:.3f}", *(f"{value / costs[by][figure]:.3f}" for by in hands)]
            traced = casts(jax.make_jaxpr(fun)(*args).jaxpr)
            cells += [costs[variant]["kernels"], traced, converts(modules[variant])]
            yield row(*cells)


# autocast_cost: what each rule saves

RULED = {
    "GPT-2, 4 layers": lambda low: models.gpt_case(low, layers=4),
    "encoder, scanned": lambda low: models.encoder_case(low),
    "ResNet, 7 blocks": lambda low: models.resnet_case(low, blocks=(3, 4)),
    "LSTM, 512 steps": lambda low: models.lstm_case(low),
}


@contextlib.contextmanager
def patched(module, name, value):
    """Replaces a table of autocast, and forgets the plans that were made by the other one."""
    with mock.patch.object(module, name, value):
        _api.planner_of.cache_clear()
        yield
    _api.planner_of.cache_clear()


def changed(change):
    """Changes every rule of the table."""

    def each(rule):
        return change(rule) if isinstance(rule, Rule) else lambda params, avals: change(rule(params, avals))

    return patched(_options, "RULES", {name: each(rule) for name, rule in RULES.items()})


def without_biases(rule):
    """A sum whose operands are never biases."""
    return rule._replace(kind=ResultKind.DIFFERENCE) if rule.kind is ResultKind.SUM else rule


def without_rewrite(left_out):
    rewrites = tuple(rewrite for rewrite in _rewrites._REWRITES if rewrite is not left_out)
    return patched(_rewrites, "_REWRITES", rewrites)


WITHOUT = {
    "nothing": contextlib.nullcontext,
    "biases are part of the layer": lambda: changed(without_biases),
    "what only float32 ops read is float32": lambda: changed(lambda rule: rule._replace(fuses=False)),
    "what a product reads of a norm is stored in float16": lambda: changed(lambda rule: rule._replace(stores=False)),
    "the label's logit is not scattered": lambda: without_rewrite(_rewrites._label_logit),
    "a bias is broadcast after its cast": lambda: without_rewrite(_rewrites._cast_bias),
    '`save="matmuls"`': contextlib.nullcontext,
}

WHY_RULES = """
## What each rule saves

Four models with one rule of autocast left out at a time. Each cell is bytes moved / temporary memory, x by hand.
"""
NOTES_RULES = """
Each row leaves one rule out of `autocast`. The row "nothing" is autocast with all rules. The difference between a
figure and that of "nothing" is the saving of the rule.
"""


def costs_without(cases):
    """Yields the lines of a Markdown table, a row a rule; bytes moved and temporary memory, x by hand."""
    yield from head("without", *cases)
    models = {name: Model(case) for name, case in cases.items()}
    hand = {name: cost(*by_hand(model, LOW)) for name, model in models.items()}
    for rule, left_out in WITHOUT.items():
        cells = []
        for name, model in models.items():
            with left_out():
                found = cost(*autocast(model, LOW, save="all" if "save" in rule else "matmuls"))
            cells.append(" / ".join(f"{found[x] / hand[name][x]:.3f}" for x in ("bytes_moved", "temp_bytes")))
        yield row(rule, *cells)


# autocast_cost: apex's levels

CASE = "GPT-2 small, scanned"
LEVELS = {level: (level, optax.adamw(1e-3)) for level in ("O0", "O1", "O2", "O3")}
LEVELS["O2, first moments in bfloat16"] = "O2", optax.adamw(1e-3, mu_dtype=jnp.bfloat16)

WHY_LEVELS = """
## Levels O0 to O3

How much memory a train step needs at each of apex's levels. O1, which is `autocast` alone, saves most of it; O2 and O3
save little more.
"""
NOTES_LEVELS = """
One train step of {case} (batch 8, 1024 tokens, AdamW, parameters and state donated), assembled by
`interop.apex.initialize(loss_fn, params, tx, level)`. Parameters and state are what stays between steps: bytes a
parameter are 4 for a float32 parameter or master, 2 for a float16 one, 8 for AdamW's two moments. Temporary
memory holds activations and gradients. Bytes moved are the bytes that all kernels read and write, counted by one rule
for all programs (`gpu_aot.cost`): good for ratios.
"""


def assemble(loss_fn, params, level, tx):
    """Returns the loss, the transformation, and the shapes of what stays between steps: parameters and state."""
    fun, _, scaled_tx = amp.interop.apex.initialize(loss_fn, {}, tx, level)
    params = jax.eval_shape(lambda params: amp.interop.apex.initialize(loss_fn, params, tx, level)[1], params)
    return fun, scaled_tx, (params, jax.eval_shape(scaled_tx.init, params))


def kept_bytes(carried):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(carried))


def cost_of_step(loss_fn, params, args, level, tx):
    """Returns the figures of a compiled train step."""
    fun, tx, carried = assemble(loss_fn, params, level, tx)
    step = models.train_step(fun, tx)
    return cost(step, (*carried, *args), donate_argnums=(0, 1)) | {"kept": kept_bytes(carried)}


def costs_of_levels(case):
    """Yields the lines of a Markdown table; ratios are to O0."""
    yield from head(
        "level", "bytes a parameter, with its state", "GB kept", "temporary GB", "both, x O0", "GB moved", "x O0"
    )
    loss_fn, (params, *args) = case(None)
    base, size = None, sum(x.size for x in jax.tree.leaves(params))
    for name, (level, tx) in LEVELS.items():
        found = cost_of_step(loss_fn, params, args, level, tx)
        kept, temporary, moved = (found[figure] for figure in ("kept", "temp_bytes", "bytes_moved"))
        base = base or (kept + temporary, moved)
        gigabytes = f"{kept / 1e9:.3f}", f"{temporary / 1e9:.3f}"
        ratios = f"{(kept + temporary) / base[0]:.3f}", f"{moved / 1e9:.1f}", f"{moved / base[1]:.3f}"
        yield row(name, f"{kept / size:.2f}", *gigabytes, *ratios)


def costs_on_h200(only):
    """Yields the tables of the page and what is said of them."""
    yield from costs_of_models({name: model for name, model in MODELS.items() if only in name})
    yield NOTES_COST.rstrip()
    if only in CASE:
        yield from (WHY_LEVELS, *costs_of_levels(CASES[CASE]), NOTES_LEVELS.format(case=CASE).rstrip())
    if cases := {name: case for name, case in RULED.items() if only in name}:
        yield from (WHY_RULES, *costs_without(cases), NOTES_RULES.rstrip())


def autocast_cost(options):
    report("Bytes and memory", f"{WHY_COST}\n\n{ON_H200}", costs_on_h200(options.only), "", options.out)


# accelerators

RESULTS = pathlib.Path(__file__).with_name("accelerators.json")
OF_ALL = {  # in the order of measuring, by their names above
    "by hand": "by hand",
    "float32": "float32",
    "cast whole": "jmp, mpx",
    "autocast": "autocast",
    "low stream": 'residual_stream="low"',
}
ROW = "model", "target", "batch"
FILLING = "float32", "autocast"
"""The variants whose largest batch is looked for."""
BATCHES = {
    "GPT-2 small, unrolled": 8,
    "GPT-2 small, scanned": 8,
    "GPT-2 small, scanned, remat": 8,
    "ResNet-50": 64,
    "ViT-B/16": 64,
    "encoder with dropout": 32,
    "LSTM, 512 steps": 64,
}
FILLED = "T4", "TPU v5e"
"""The targets of 16 GB, whose largest batch is looked for."""


WHY_ALL = """Bytes, memory and the largest batch on GPUs from T4 to B200 and on TPUs: float32, casts by hand, autocast.
For you: on a small GPU or TPU, the batch can be two to four times as large as in float32.

Bytes moved and temporary memory of autocast, x by hand: the figure of autocast divided by that of the same model with
casts by hand. Less is better."""
SHOWN = """
The models of `benchmarks/models.py` are compiled by `benchmarks/cost.py`. Nothing was run, and nothing timed.

- **Batches.** On a T4 of 16 GB, autocast trains batches 1.75 to 4.75 times as large as float32; on a TPU v5e of 16 GB,
  1.5 to 3 times. Scans without remat gain the most: in float32 they keep the results of all their layers. An unrolled
  GPT-2 small gains nothing on a TPU v5e: its softmax is float32, as by hand, and XLA stores the results of the softmax
  in float32 for the backward pass.
- **Loops.** Autocast saves only the products of a loop's body. A scanned GPT-2 small moves 0.62 to 0.79 times the bytes
  by hand on GPUs and needs 0.31 to 0.40 times the memory. On TPUs it moves 0.78 to 0.99 times the bytes and needs 0.43
  to 0.44 times the memory. The encoder and the LSTM are loops, too.
- **The residual stream** is float32 by default, and low by hand. A ViT-B/16 moves 2 to 10% more bytes than by hand on
  GPUs and 6 to 22% more on TPUs. A GPT-2 small that is unrolled or scanned with remat moves up to 1% more on GPUs and
  up to 10% more on TPUs. These models need up to 7% more memory on GPUs and 13% on TPUs.
- **ReLU.** A ResNet-50 moves up to 2% more bytes than by hand on GPUs and 11% more on TPUs. On an A100,
  an L4 and a B200 it needs 6 to 7% more memory, because XLA stores a mask of the elements that ReLU keeps. By hand the
  sums are in low precision, and XLA computes the mask from them again.
- **The low stream** is `autocast(..., residual_stream="low")`. On an H200 it saves 4 to 8% of the bytes of a
  transformer and 2 to 5% of its memory, in float16 and in bfloat16. The saving depends on what the compiler fuses: 0 to
  9% of the bytes on the other GPUs, and up to 18% on TPUs. An unrolled GPT-2 small on a TPU v5e is the exception: it
  moves 9% more bytes.
- **The low stream beside casts by hand.** No model needs more than 1.01 times the bytes or the memory by hand, with two
  exceptions: a ViT-B/16 moves 1.02 times the bytes on an L4, and on an A100 it moves 1.08 times the bytes and needs
  1.02 times the memory. On both, XLA stores the gradient of each GELU in float32 once more than by hand, before it sums
  it for a bias.
- **Products.** Every product is in low precision, as by hand. "Cast whole" casts the arguments of the model. It leaves
  an LSTM in float32 on GPUs, because it does not cast arrays that the model creates, such as the initial zeros. It also
  makes logits and losses low precision. On TPUs this saves a quarter to a half of the bytes of an unrolled GPT-2 small,
  and it costs accuracy.
"""
T4 = """
## float16 on a T4

A T4 (compute capability 7.5) multiplies float16 on its tensor cores, and has no bfloat16. If a program asks for
bfloat16, XLA casts the operands up and multiplies float32, so the program saves memory only;
`tests/test_accelerators_aot.py` shows both. float16 needs [loss scaling](../loss-scaling.md).
[A notebook](../notebooks/float16_on_a_t4.ipynb) trains so on a free GPU. XLA compiles no Triton kernel for a T4: norms
and softmaxes are several launches with float32 in between, and the check of the gradients is plain JAX.

## All figures

"x by hand" is a figure divided by that of casts by hand, and "x autocast" one divided by that of autocast.
"""
NOTES_ALL = """
## How this was measured

The largest batch is searched for in steps of an eighth of the usual batch, with AdamW. A step needs the parameters,
their gradients, two moments of each, the batch, and the temporary memory of the compiled loss and gradients. It fits
if all this is no more than the memory of the target. In the last table, bold figures do not fit. By default JAX takes
three quarters of a GPU; `XLA_PYTHON_CLIENT_MEM_FRACTION` raises that. Near the limit, XLA recomputes values that it has
no memory for. So float32 fits at more than half the batch of 16 bits, and moves more bytes for it. The table leaves out
two searches that were not finished: on a TPU v5e, a ResNet-50 of batch 432 and a ViT-B/16 of batch 376 still fit in
float32, because XLA recomputes so much.

Bytes are counted by one rule for all programs (`hlo.cost`). They are good for ratios, and for ratios of one target
alone. Bytes that stay in the vector memory of a TPU are not counted. "Products in low precision" is the share of the
FLOPs of products and convolutions whose operands have 16 bits in the compiled program. A TPU rounds float32 operands to
bfloat16 by default, so on a TPU float32 costs bytes and memory, not products. The low dtype is float16 on a T4 and
bfloat16 elsewhere. "By hand" and "cast whole" are defined in [Bytes and memory](autocast_cost.md), which has float16 on
an H200.

The GPUs are described by their data sheets in `benchmarks/gpu_targets.py`. The TPUs are those of libtpu, with the
memory that its compiler gives to a program. TPUs have a quarter of the batch, which fits a v5e in float32. A program
for a TPU takes one to ten minutes of CPU, one for a GPU up to half a minute. All figures are kept in
`benchmarks/accelerators.json`: a run measures what is missing there, `--redo autocast` measures one variant anew, and
`--out` writes this page. GPUs need the CUDA plugin, TPUs `pip install "jax[tpu]"`, in two environments.
"""


def low_dtype(target):
    return "float16" if target == "T4" else "bfloat16"


def measure(model, target, variant, batch):
    """Returns the figures of one program, or an empty dict where a TPU's compiler says that it does not fit."""
    model = Model(functools.partial(CASES[model], batch=batch))
    try:
        program = compiled(*VARIANTS[OF_ALL[variant]](model, low_dtype(target)), target)
    except jax.errors.JaxRuntimeError as error:
        if target in GPUS or "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {}
    figures = hlo.cost(program)
    flops = {True: 0, False: 0}
    for times, each, dtypes in hlo.products(program):
        flops[all(hlo.NBYTES[dtype] < 4 for dtype in dtypes)] += times * each
    return {
        "bytes": figures["bytes_moved"],
        "temporary": figures["temp_bytes"],
        "needed": figures["argument_bytes"] + 3 * figures["output_bytes"] + figures["temp_bytes"],
        "low": flops[True] / sum(flops.values()),
        "jax": jax.__version__,
    }


class Results:
    """The figures that are known, by model, target, variant and batch, in a file that several runs may fill."""

    def __init__(self, path):
        self.path = path

    def get(self, *key):
        return self._read().get(self._name(key))

    def measured(self, *key):
        figures = self.get(*key)
        if figures is None:
            figures = measure(*key)
            print(self._name(key), figures, flush=True)
            self._write(self._read() | {self._name(key): figures})
        return figures

    def forget(self, model, target, variant):
        gone = self._name((model, target, variant, ""))
        self._write({name: figures for name, figures in self._read().items() if not name.startswith(gone)})

    def _read(self):
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def _write(self, known):
        self.path.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")

    @staticmethod
    def _name(key):
        return " | ".join(map(str, key))


def memory_of(target):
    return gpu_aot.GPUS[target].memory if target in GPUS else tpu_aot.TPUS[target].memory


def fits(figures, target):
    return bool(figures) and figures["needed"] <= memory_of(target)


def largest_batch(get, model, target, variant):
    """Returns the largest batch that fits, of multiples of an eighth of the usual one.

    `get(model, target, variant, batch)` returns figures, or `None` where they are not known; then this returns `None`.
    Temporary memory is nearly proportional to the batch, so each program says which batch to try next.
    """
    step = max(1, BATCHES[model] // 8)
    fitting, too_many, batch = 0, math.inf, usual_batch(model, target)
    while too_many - fitting > step:
        figures = get(model, target, variant, batch)
        if figures is None:
            return None
        guess = 0
        if figures:
            kept = figures["needed"] - figures["temporary"]
            guess = int(batch * (memory_of(target) - kept) / figures["temporary"]) // step * step
        if fits(figures, target):
            fitting = batch
        else:
            too_many = batch
        if fitting < guess < too_many:
            batch = guess
        else:  # the compiler computes anew what it has no memory for
            bound = fitting + max(2 * step, fitting // 2) if too_many == math.inf else too_many
            batch = (fitting + bound) // 2 // step * step
    return fitting


def usual_batch(model, target):
    """A batch that fits the smallest target of the kind in float32, or nearly."""
    return BATCHES[model] // 4 if target in TPUS else BATCHES[model]


def measure_missing(results, wanted):
    """Measures what is not known of (target, variant, model), the usual batches first."""
    for target, variant, model in wanted:
        results.measured(model, target, variant, usual_batch(model, target))
    for target, variant, model in wanted:
        if variant in FILLING and target in FILLED:
            largest_batch(results.measured, model, target, variant)


def lines(get):
    """Yields the lines below the head of the page, of the figures that `get(model, target, variant, batch)` knows."""
    known = {}
    for model, target in itertools.product(BATCHES, [*GPUS, *TPUS]):
        figures = {variant: get(model, target, variant, usual_batch(model, target)) for variant in OF_ALL}
        if None not in figures.values():
            known[model, target] = figures
    yield from head("model", "", *GPUS, *TPUS)
    for model, (name, shown) in itertools.product(BATCHES, SUMMARY.items()):
        programs = (known.get((model, target)) for target in [*GPUS, *TPUS])
        yield row(model, shown, *(over(p, "autocast", "by hand", name, 2) if p else "-" for p in programs))
    yield from SHOWN.splitlines()
    yield from ("", "## The largest batch that fits", "", *head("model", "target", *FILLING, "times as large"))
    for model, target in itertools.product(BATCHES, FILLED):
        batches = [largest_batch(get, model, target, variant) for variant in FILLING]
        if all(batches):
            yield row(model, target, *batches, f"{batches[1] / batches[0]:.2f}")
    yield from T4.splitlines()
    for title, (cells, names) in TABLES.items():
        yield from ("", f'??? note "{title}"')
        folded = head(*ROW, *names), (row(*key, usual_batch(*key), *cells(known[key], key[1])) for key in known)
        yield from (f"    {line}" for line in itertools.chain(*folded))


def over(figures, variant, base, name, digits=3):
    """The figure of a variant divided by that of the base."""
    if not figures[variant] or not figures[base]:
        return "-"
    return f"{figures[variant][name] / figures[base][name]:.{digits}f}"


def bytes_moved(figures, target):
    return over_hand(figures, "bytes")


def temporary_memory(figures, target):
    return over_hand(figures, "temporary")


def over_hand(figures, name):
    """The figure by hand in GB, and the others as multiples of it."""
    by_hand = f"{figures['by hand'][name] / 1e9:.3f}" if figures["by hand"] else "-"
    return [by_hand, *(over(figures, variant, "by hand", name) for variant in OF_ALL if variant != "by hand")]


def saved_by_the_low_stream(figures, target):
    return [over(figures, "low stream", "autocast", name) for name in ("bytes", "temporary")]


def share_in_low_precision(figures, target):
    return [f"{figures[variant]['low']:.0%}" if figures[variant] else "-" for variant in OF_ALL]


def memory_of_a_step(figures, target):
    return [needed(figures[variant], target) for variant in OF_ALL]


def needed(figures, target):
    """What a step needs in GB, in bold where the target has less."""
    gigabytes = f"{figures['needed'] / 1e9:.2f}" if figures else "too much"
    return gigabytes if fits(figures, target) else f"**{gigabytes}**"


SUMMARY = {"bytes": "bytes", "temporary": "memory"}
OVER_HAND = ["GB by hand", *(variant for variant in OF_ALL if variant != "by hand")]
TABLES = {
    "Bytes moved: GB by hand, and the others x by hand": (bytes_moved, OVER_HAND),
    "Temporary memory: GB by hand, and the others x by hand": (temporary_memory, OVER_HAND),
    "The low stream: bytes moved and temporary memory, x autocast": (
        saved_by_the_low_stream,
        ["bytes moved", "temporary memory"],
    ),
    "Products in low precision": (share_in_low_precision, OF_ALL),
    "GB that a step needs": (memory_of_a_step, OF_ALL),
}


def compilers():
    """Returns the targets that this environment can compile for; a process loads one of the two compilers."""
    if importlib.util.find_spec("jax_plugins"):
        return GPUS
    return TPUS if importlib.util.find_spec("libtpu") else []


def accelerators(options):
    results = Results(RESULTS)
    wanted = [
        (target, variant, model)
        for target, variant, model in itertools.product(compilers(), OF_ALL, BATCHES)
        if options.only in model or options.only in target
    ]
    for target, variant, model in wanted:
        if variant == options.redo:
            results.forget(model, target, variant)
    measure_missing(results, wanted)
    report("Accelerators", WHY_ALL, lines(results.get), NOTES_ALL, options.out)


def main():
    parser = arguments(__doc__, "the models, or targets, whose name contains this")
    tables = {table.__name__: table for table in (autocast_cost, accelerators)}
    parser.add_argument("table", choices=tables)
    parser.add_argument("--redo", choices=OF_ALL, help="of the accelerators, measure this variant anew")
    options = parser.parse_args()
    tables[options.table](options)


if __name__ == "__main__":
    main()
