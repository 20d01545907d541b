"""How long `jit(grad(autocast(f)))` takes to trace, lower and compile, next to plain, by hand, and other packages.

    python benchmarks/autocast_trace_time.py [--only LSTM] [--repeats 3] [--out docs/benchmarks/autocast_trace_time.md]

Nothing runs on a GPU and none is needed; see `gpu_aot.py` for what is. Only ratios within one run mean anything. All of
it takes 5 minutes of CPU time.
"""

import collections
import gc
import importlib.util
import os
import platform
import statistics
import time

import gpu_aot  # first: it sets the platform
import jax
import jax.numpy as jnp
from jax.experimental.ode import odeint
from models import CASES, F32, Shape, gpt_case, to
from report import arguments, head, report, row

import jmp_amp as amp


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


def ode_case(low, batch=64, dim=64, hidden=256):
    """A neural ODE: loops in loops, with a custom derivative."""
    args = {"up": Shape((dim, hidden), F32), "down": Shape((hidden, dim), F32)}, Shape((batch, dim), F32)

    def slope(y, t, params):
        return to(jnp.tanh(to(y, low) @ to(params["up"], low)) @ to(params["down"], low), low and F32)

    def loss_fn(params, y):
        return jnp.sum(odeint(slope, y, jnp.linspace(0.0, 1.0, 5), params)[-1] ** 2)

    return loss_fn, args


MODELS = {name: case for name, case in CASES.items() if name != "encoder with dropout"}
MODELS["neural ODE (`odeint`)"] = ode_case
VARIANTS = {
    "plain": lambda case: case(None),
    "by hand": lambda case: case(jnp.float16),
    "autocast": lambda case: (amp.autocast(case(None)[0]), case(None)[1]),
    "jmp": with_jmp,
    "mpx": with_mpx,
}
SCANS = {  # a scanned GPT-2 small, with and without recomputing
    "plain": lambda: gpt_case(None, scan=True),
    "plain, `jax.checkpoint`": lambda: gpt_case(None, scan=True, remat="dots_saveable"),
    "by hand": lambda: gpt_case(jnp.float16, scan=True),
    "by hand, `jax.checkpoint`": lambda: gpt_case(jnp.float16, scan=True, remat="dots_saveable"),
    "autocast": lambda: scan_under_autocast(),
    'autocast, `save="all"`': lambda: scan_under_autocast(save="all"),
    'autocast, `residual_stream="low"`': lambda: scan_under_autocast(residual_stream="low"),
}
PEERS = {"jmp", "mpx"}  # where they are installed
KERNELS = "fused norms and softmaxes"

WHY = """How much longer a program takes to trace, lower and compile under autocast.
For you: some seconds once, when a step is compiled. A scanned model takes up to twice as long; no step runs slower."""
NOTES = """
CPU time of the process and its children; the least of three repeats, compiled once, and in the second table the median
of three runs. "Cold" starts with empty caches, as a program does; "warm" has traced the same model before. The target
is one NVIDIA H200, and no GPU is needed. Casts by hand are traced like any other op, and take time as well. On a shared
machine the figures of another run may differ by a tenth. "Fused norms and softmaxes" counts the different kernels that
XLA makes with Triton, apart from products. They take the longest to compile; XLA compiles each once for all layers that
use it.

`jmp` and `mpx` cast whole trees of parameters, so that norms, softmax and the loss are float16 too: other results.
Of the packages that cast op by op, `jaxamp` 0.0.4 and `grampax` 0.1.0 (`quax` 0.4.6) raise errors of their own code
on these models with JAX 0.10.2 and 0.12.0.

## Where autocast loses

- Tracing takes longer than with jmp and mpx. They cast once in front of the model; autocast traces the model and
  evaluates each of its ops. This takes a fraction of a second, and compiling takes several.
- Tracing loops in loops with a custom derivative, as of an ODE solver, takes 2.5 to 3.7 times as long as plain JAX:
  autocast plans the body of a loop until the dtypes of its carries settle, and traces the derivative once more. With
  jmp and mpx, which cast the state and not the times, the solver raises.
- Compiling a scan: by default (`save="matmuls"`) the backward pass recomputes everything but products, so the program
  is as large as one with `jax.checkpoint`, which alone compiles 1.5 times as long as the plain scan; autocast adds an
  eighth to that. In return it saves [memory](autocast_cost.md). With `save="all"` nothing is recomputed: 1.2 times
  plain, as by hand.
- Compiling a Transformer takes longer than with jmp and mpx, and a ViT takes longer than by hand. The time grows with
  the number of fused norms and softmaxes. XLA fuses float32 norms and softmaxes, and those that read a float32 residual
  stream, with more of the ops around them. It leaves float16 ones in parts, so jmp and mpx compile faster than plain.
"""


def scan_under_autocast(**options):
    loss_fn, args = gpt_case(None, scan=True)
    return amp.autocast(loss_fn, **options), args


def cpu_seconds():
    return time.process_time() + sum(os.times()[2:4])


def timed(fun, *args, **options):
    """Returns the result, and the CPU seconds that it took, those of other processes for it included."""
    gc.collect()
    gc.disable()
    start = cpu_seconds()
    result = fun(*args, **options)
    seconds = cpu_seconds() - start
    gc.enable()
    return result, seconds


def stages(variant, case, compiles):
    """Yields the stages of a program, and the CPU seconds of each; at last a count of kernels."""

    def trace():
        loss_fn, args = variant(case)
        args = gpu_aot.struct(mesh, args)
        return timed(jax.jit(jax.grad(lambda *args: loss_fn(*args))).trace, *args)

    mesh = gpu_aot.h200_mesh()
    jax.clear_caches()
    traced, seconds = trace()
    yield "trace, cold", seconds
    lowered, seconds = timed(traced.lower, lowering_platforms=("cuda",))
    yield "lower", seconds
    yield "trace, warm", trace()[1]
    if compiles and variant is not with_mpx:  # the program of jmp
        compiled, seconds = timed(lowered.compile)
        yield "compile", seconds
        yield KERNELS, gpu_aot.fused_by_triton(compiled)


def table(cases, repeats, compiles, variants):
    yield from head("model", "stage", *variants)
    for name, case in cases.items():
        times = collections.defaultdict(lambda: collections.defaultdict(list))
        raising = set()
        for repeat in range(repeats):
            for variant in variants:
                try:
                    for stage, seconds in stages(VARIANTS[variant], case, repeat < compiles):
                        times[stage][variant].append(seconds)
                except TypeError:  # of the solver of an ODE, where only the state is cast, and not the times
                    if variant not in PEERS:
                        raise
                    raising.add(variant)
        for stage, measured in times.items():
            least = {variant: min(seconds) for variant, seconds in measured.items()}
            if stage != KERNELS:
                least = {variant: f"{seconds / least['plain']:.2f}" for variant, seconds in least.items()}
            yield row(name, stage, *(least.get(v, "raises" if v in raising else "as jmp") for v in variants))


def table_of_scans(repeats):
    """Yields the lines of a table: what recomputing a scan costs when it is compiled."""
    yield from head("GPT-2 small, scanned", "compile, x plain", "fused norms and softmaxes")
    ratios, kernels = {name: [] for name in SCANS}, {}
    for _ in range(repeats):
        plain = None
        for name, case in SCANS.items():
            loss_fn, args = case()
            jax.clear_caches()
            traced = jax.jit(jax.grad(loss_fn)).trace(*gpu_aot.struct(gpu_aot.h200_mesh(), args))
            compiled, seconds = timed(traced.lower(lowering_platforms=("cuda",)).compile)
            plain = plain or seconds
            ratios[name].append(seconds / plain)
            kernels[name] = gpu_aot.fused_by_triton(compiled)
    for name in SCANS:
        yield f"| {name} | {statistics.median(ratios[name]):.2f} | {kernels[name]} |"


def main():
    parser = arguments(__doc__, "the models whose name contains this")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compiles", type=int, default=1, help="in how many of the repeats it compiles")
    parser.add_argument("--scans", action="store_true", help="only the table of scans")
    options = parser.parse_args()
    variants = [name for name in VARIANTS if name not in PEERS or importlib.util.find_spec(name)]
    by = (
        f"CPU time of `jit(grad(f))`, x plain, with JAX {jax.__version__} on Python {platform.python_version()} "
        f"({platform.machine()}), by `benchmarks/autocast_trace_time.py`."
    )
    cases = {name: case for name, case in MODELS.items() if options.only in name}
    lines = [] if options.scans else [*table(cases, options.repeats, options.compiles, variants), ""]
    lines += table_of_scans(options.repeats)
    report("Trace and compile time", f"{WHY}\n\n{by}", lines, NOTES, options.out)


if __name__ == "__main__":
    main()
