"""What float32, mixing by hand and autocast need on GPUs from T4 to B200 and on TPUs, by the compiler.

    python benchmarks/accelerators.py [--only T4] [--redo autocast] [--out docs/benchmarks/accelerators.md]

No accelerator is needed. An environment with the CUDA plugin compiles for the GPUs, one with libtpu for the TPUs; see
`gpu_aot.py` and `tpu_aot.py`. What is measured is kept in `accelerators.json`: a run adds what is missing there, and
`--redo` measures a variant anew. The page is written from all that is in the file.
"""

import functools
import importlib.util
import itertools
import json
import math
import pathlib

import gpu_aot  # first: it sets the platform
import hlo
import jax
import jax.numpy as jnp
import tpu_aot
from models import CASES, cast_whole
from report import arguments, head, report, row

import jmp_amp as amp

RESULTS = pathlib.Path(__file__).with_suffix(".json")
LOW_STREAM = functools.partial(amp.autocast, residual_stream="low")
GPUS = [name for name in gpu_aot.GPUS if name != "H100"]  # which runs the programs of an H200
TPUS = list(tpu_aot.TPUS)
VARIANTS = {  # in the order of measuring
    "by hand": lambda case, dtype, batch: case(jnp.dtype(dtype), batch=batch),
    "float32": lambda case, dtype, batch: case(None, batch=batch),
    "cast whole": lambda case, dtype, batch: transformed(cast_whole, case, f"mixed_{dtype}", batch),
    "autocast": lambda case, dtype, batch: transformed(amp.autocast, case, dtype, batch),
    "low stream": lambda case, dtype, batch: transformed(LOW_STREAM, case, dtype, batch),
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


HEAD = """Bytes, memory and the largest batch on GPUs from T4 to B200 and on TPUs: float32, casts by hand, autocast.
For you: on a small GPU or TPU, the batch can be two to four times as large as in float32.

Bytes moved and temporary memory of autocast, x by hand: the figure of autocast divided by that of the same model with
casts by hand. Less is better."""
SHOWN = """
The models of `benchmarks/models.py` are compiled by `benchmarks/accelerators.py`. Nothing was run, and nothing timed.

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
NOTES = """
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


def transformed(transform, case, option, batch):
    loss_fn, args = case(None, batch=batch)
    return transform(loss_fn, option), args


def low_dtype(target):
    return "float16" if target == "T4" else "bfloat16"


def measure(model, target, variant, batch):
    """Returns the figures of one program, or an empty dict where a TPU's compiler says that it does not fit."""
    loss_fn, args = VARIANTS[variant](CASES[model], low_dtype(target), batch)
    step = jax.value_and_grad(loss_fn)
    if target in GPUS:
        compiled = gpu_aot.compile_for(step, *gpu_aot.struct(gpu_aot.mesh(target), args))
    else:
        try:
            compiled = tpu_aot.compile_for(step, *args, target=target)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return {}
    cost = hlo.cost(compiled)
    flops = {True: 0, False: 0}
    for times, each, dtypes in hlo.products(compiled):
        flops[all(hlo.NBYTES[dtype] < 4 for dtype in dtypes)] += times * each
    return {
        "bytes": cost["bytes_moved"],
        "temporary": cost["temp_bytes"],
        "needed": cost["argument_bytes"] + 3 * cost["output_bytes"] + cost["temp_bytes"],
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
        figures = {variant: get(model, target, variant, usual_batch(model, target)) for variant in VARIANTS}
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
    return [by_hand, *(over(figures, variant, "by hand", name) for variant in VARIANTS if variant != "by hand")]


def saved_by_the_low_stream(figures, target):
    return [over(figures, "low stream", "autocast", name) for name in ("bytes", "temporary")]


def share_in_low_precision(figures, target):
    return [f"{figures[variant]['low']:.0%}" if figures[variant] else "-" for variant in VARIANTS]


def memory_of_a_step(figures, target):
    return [needed(figures[variant], target) for variant in VARIANTS]


def needed(figures, target):
    """What a step needs in GB, in bold where the target has less."""
    gigabytes = f"{figures['needed'] / 1e9:.2f}" if figures else "too much"
    return gigabytes if fits(figures, target) else f"**{gigabytes}**"


SUMMARY = {"bytes": "bytes", "temporary": "memory"}
OVER_HAND = ["GB by hand", *(variant for variant in VARIANTS if variant != "by hand")]
TABLES = {
    "Bytes moved: GB by hand, and the others x by hand": (bytes_moved, OVER_HAND),
    "Temporary memory: GB by hand, and the others x by hand": (temporary_memory, OVER_HAND),
    "The low stream: bytes moved and temporary memory, x autocast": (
        saved_by_the_low_stream,
        ["bytes moved", "temporary memory"],
    ),
    "Products in low precision": (share_in_low_precision, VARIANTS),
    "GB that a step needs": (memory_of_a_step, VARIANTS),
}


def compilers():
    """Returns the targets that this environment can compile for; a process loads one of the two compilers."""
    if importlib.util.find_spec("jax_plugins"):
        return GPUS
    return TPUS if importlib.util.find_spec("libtpu") else []


def main():
    parser = arguments(__doc__, "the programs whose model or target contains this")
    parser.add_argument("--redo", choices=VARIANTS, help="measure this variant anew")
    options = parser.parse_args()
    results = Results(RESULTS)
    wanted = [
        (target, variant, model)
        for target, variant, model in itertools.product(compilers(), VARIANTS, BATCHES)
        if options.only in model or options.only in target
    ]
    for target, variant, model in wanted:
        if variant == options.redo:
            results.forget(model, target, variant)
    measure_missing(results, wanted)
    report("Accelerators", HEAD, lines(results.get), NOTES, options.out)


if __name__ == "__main__":
    main()
