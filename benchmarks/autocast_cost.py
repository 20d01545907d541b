"""What programs cost on an H200, by the compiler: bytes, memory, launches and casts, in three tables of one page.

    python benchmarks/autocast_cost.py [--only LSTM] [--out docs/benchmarks/autocast_cost.md]

Loss and gradients of models in float32, with casts by hand, under autocast and its options; a whole train step at each
of apex's levels; four models with one rule of autocast left out at a time.

Nothing runs on a GPU and none is needed; see `gpu_aot.py` for what is. The first table takes 15 minutes of CPU time.
"""

import contextlib
import functools
import itertools
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
from models import CASES, MORE_CASES, accumulated, by_expert, cast_whole, decoding_case, gpt_case, without_scatter
from report import arguments, head, report, row

import jmp_amp as amp
from jmp_amp._autocast import _api, _planner, _rewrites
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


def compiled(fun, args, **jit_kwargs):
    """Returns a function compiled for one H200."""
    return gpu_aot.compile_for(fun, *gpu_aot.struct(gpu_aot.h200_mesh(), args), **jit_kwargs)


def cost(fun, args, **jit_kwargs):
    """Returns what a program costs on one H200."""
    return hlo.cost(compiled(fun, args, **jit_kwargs))


ON_H200 = f"Compiled for one NVIDIA H200 with JAX {jax.__version__}, by `benchmarks/autocast_cost.py`."

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

`residual_stream="low"` saves 4 to 8% of the bytes of the first transformers and 1 to 5% of their memory, beside the
default. [Attention in one kernel](attention.md) has these transformers with cuDNN's attention.

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
- Memory of GPT-2 small: 9 to 16% more than an expert, and 64% where nothing is saved. Its vocabulary of 50257 is
  [padded](../autocast.md#aligned-products), and XLA writes the gradient of padded logits beside them, not over them. A
  vocabulary of 50304 costs no memory.
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

    return patched(_planner, "RULES", {name: each(rule) for name, rule in RULES.items()})


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
    "the label's logit is not scattered": lambda: patched(_rewrites, "is_label_logit", lambda *args: False),
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


def main():
    options = arguments(__doc__, "the models whose name contains this").parse_args()
    report("Bytes and memory", f"{WHY_COST}\n\n{ON_H200}", costs_on_h200(options.only), "", options.out)


if __name__ == "__main__":
    main()
