"""The kernels next to XLA: launches and bytes by the compiler for an H200. `gpu.py` times them, on a GPU.

    python benchmarks/kernels.py [--only "GPT|one"] [--out docs/kernels.md]

Nothing runs on a GPU and none is needed; see `gpu_aot.py` for what is. `--out` replaces the section of the page.
"""

import itertools
import re
from functools import partial

import gpu_aot  # first: it sets the platform
import jax
import jax.numpy as jnp
import models
import optax
from report import arguments, head, report_section, row
from trees import TREES, Shape

import jmp_amp as amp
from pallas_kernels import check_finite, unscale_check

OPS = {"check_finite": check_finite, "unscale_check": unscale_check}
KERNELS = ("mosaic_gpu", "triton")
DTYPES = ("float16", "float32")
SCALAR = Shape((), jnp.float32)
ADAMW = optax.adamw(1e-3)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), ADAMW)
STEPS = {
    "AdamW": {
        "plain": ADAMW,
        "cond, xla": amp.dynamic_loss_scale(ADAMW, implementation="xla"),
        "cond, mosaic_gpu": amp.dynamic_loss_scale(ADAMW, implementation="mosaic_gpu"),
        "select, xla": amp.dynamic_loss_scale(ADAMW, skip="select", implementation="xla"),
        "select, mosaic_gpu": amp.dynamic_loss_scale(ADAMW, skip="select", implementation="mosaic_gpu"),
    },
    "clip, AdamW": {
        "plain": CLIPPED,
        "optax's clip, xla": amp.dynamic_loss_scale(CLIPPED, implementation="xla"),
        "clip_global_norm, xla": amp.dynamic_loss_scale(ADAMW, clip_global_norm=1.0, implementation="xla"),
        "clip_global_norm, mosaic_gpu": amp.dynamic_loss_scale(
            ADAMW, clip_global_norm=1.0, implementation="mosaic_gpu"
        ),
    },
}
MODEL = "GPT of 2 layers"


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


def main():
    options = arguments(__doc__, "the trees and models in whose names this regular expression is found").parse_args()
    report_section("## Compiled for an H200", compiled(options.only), options.out)


if __name__ == "__main__":
    main()
