"""How long `jit(grad(autocast(f)))` takes to trace, next to plain, mixed by hand, and the packages that import.

    python benchmarks/autocast_trace_time.py [--repeats 20] [--out docs/benchmarks/autocast_trace_time.md]

Nothing is compiled or run. Only ratios within one run mean anything.
"""

import argparse
import functools
import gc
import importlib.util
import pathlib
import platform
import time

import jax
import jax.numpy as jnp
from models import gpt_case
from report import report

import jmp_amp as amp

MODELS = {"12 layers, unrolled": gpt_case, "12 layers, scanned": functools.partial(gpt_case, scan=True)}


def with_jmp(case):
    """All parameters cast in front of the model: what a policy of `jmp` does."""
    import jmp

    loss_fn, args = case(None)
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    return lambda *args: policy.cast_to_output(loss_fn(*policy.cast_to_compute(args))), args


def with_mpx(case):
    """The same by `mpx`, PyPI's `mixed-precision-for-jax`."""
    import mpx

    loss_fn, args = case(None)
    return lambda *args: mpx.cast_to_float32(loss_fn(*mpx.cast_to_float16(args))), args


VARIANTS = {
    "plain": lambda case: case(None),
    "by hand": lambda case: case(jnp.float16),
    "autocast": lambda case: (amp.autocast(case(None)[0]), case(None)[1]),
    "jmp": with_jmp,
    "mpx": with_mpx,
}
PEERS = {"jmp", "mpx"}  # where they are installed

NOTES = """
CPU time of the tracing process; the least of the repeats. "Cold" starts with empty caches, as a program does; "warm"
has traced the same model before. By hand the casts are traced like any other op, and take time as well.

`jmp` and `mpx` cast whole trees of parameters, so that norms and the loss are float16 too: fewer casts, other results.
Of the packages that cast op by op, `jaxamp` 0.0.4 and `grampax` 0.1.0 (`quax` 0.4.6) raise errors of their own code
on these models with JAX 0.10.2 and 0.12.0.
"""


def seconds(variant, case, cold):
    loss_fn, args = variant(case)
    if cold:
        jax.clear_caches()
    gc.collect()
    gc.disable()
    start = time.process_time()
    jax.jit(jax.grad(lambda *args: loss_fn(*args))).trace(*args)
    elapsed = time.process_time() - start
    gc.enable()
    return elapsed


def table(repeats, variants):
    yield f"| model | caches | {' | '.join(variants)} |"
    yield "|---|---|" + "---|" * len(variants)
    for name, case in MODELS.items():
        for caches in ("cold", "warm"):
            times = {variant: [] for variant in variants}
            for _ in range(repeats):
                for variant, measured in times.items():
                    measured.append(seconds(VARIANTS[variant], case, caches == "cold"))
            ratios = (f"{min(times[variant]) / min(times['plain']):.2f}" for variant in variants)
            yield f"| {name} | {caches} | {' | '.join(ratios)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, help="also write the table to this file")
    options = parser.parse_args()
    variants = [name for name in VARIANTS if name not in PEERS or importlib.util.find_spec(name)]
    head = (
        f"Tracing `jit(grad(f))`, x plain, with JAX {jax.__version__} on Python {platform.python_version()} "
        f"({platform.machine()}), by `benchmarks/autocast_trace_time.py`."
    )
    report("How long autocast takes to trace", head, table(options.repeats, variants), NOTES, options.out)


if __name__ == "__main__":
    main()
