"""What loss scaling adds to a step of AdamW: launches, bytes, compile time and collectives on GPUs, and time on a CPU.

    python benchmarks/amp_step.py [--leaves 10 100] [--devices 1 8] [--calls 2000] [--out docs/benchmarks/amp_step.md]

Nothing runs on a GPU and none is needed; see `gpu_aot.py` for what is. All of it takes 25 minutes
of CPU time. The programs of the last table run here, so keep the machine idle.
"""

import itertools
import time

import gpu_aot  # first: it sets the platform
import jax
import jax.numpy as jnp
import numpy as np
import optax
from autocast_trace_time import cpu_seconds
from collectives import on_the_wire
from jax.sharding import PartitionSpec as P
from kernels import ADAMW, CLIPPED, optimizer_step
from report import arguments, head, report, row
from trees import Shape, gpt2_small

import jmp_amp as amp

PLAIN, SCALED = 28, 32  # bytes a parameter that a step of AdamW cannot do without
TOTAL = 122_880_000  # parameters of the trees of equal leaves
NO_SCALE = amp.LossScale.none()


def by_hand(inner):
    """Unscale, check, step and select, as jmp's and mpx's users write them."""
    rule = amp.LossScale()

    def update(grads, state, params):
        scale, inner_state = state
        grads = jax.tree.map(lambda g: g / scale.loss_scale, grads)
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        updates, new_state = inner.update(grads, inner_state, params)
        old = jax.tree.map(jnp.zeros_like, updates), inner_state
        updates, inner_state = jax.tree.map(lambda x, y: jnp.where(finite, x, y), (updates, new_state), old)
        return updates, (rule.update(scale, finite), inner_state)

    return optax.GradientTransformation(lambda params: (rule.init(), inner.init(params)), update)


def ours(inner=ADAMW, **options):
    """Pairs the per-leaf program with that of the many-leaf kernels."""
    return [amp.dynamic_loss_scale(inner, implementation=by, **options) for by in ("xla", "mosaic_gpu")]


# By what is added: the floor, the transformation, and the same with the many-leaf kernels.
STEPS = {
    "AdamW": (PLAIN, ADAMW),
    "check and skip, cond": (SCALED, *ours(loss_scale=NO_SCALE)),
    "check and skip, select": (SCALED, *ours(loss_scale=NO_SCALE, skip="select")),
    "check and skip, `optax.apply_if_finite`": (SCALED, optax.apply_if_finite(ADAMW, 10)),
    "scale, cond": (SCALED, *ours()),
    "scale, select": (SCALED, *ours(skip="select")),
    "scale, by hand": (SCALED, by_hand(ADAMW)),
    "clip alone, by optax": (SCALED, CLIPPED),
    "scale and clip, `clip_global_norm`": (SCALED, *ours(clip_global_norm=1.0)),
    "scale and clip, optax's clip inside": (SCALED, *ours(CLIPPED)),
    "scale and clip, by hand": (SCALED, by_hand(CLIPPED)),
}
GROWTH = {
    "AdamW": ADAMW,
    "scale, cond, xla": ours()[0],
    "scale, cond, mosaic_gpu": ours()[1],
    "scale, select, xla": ours(skip="select")[0],
    "scale, by hand": by_hand(ADAMW),
}

CHECKED = optax.apply_if_finite(ADAMW, 10)  # three scalars of state; `dynamic_loss_scale` has seven


def with_scalars(inner, count):
    """Adds scalars to the state of an optimizer, and does nothing with them."""

    def init(params):
        return inner.init(params), [jnp.float32(i) for i in range(count)]

    def update(grads, state, params):
        updates, inner_state = inner.update(grads, state[0], params)
        return updates, (inner_state, state[1])

    return optax.GradientTransformation(init, update)


ON_CPU = {
    "AdamW": ADAMW,
    "`optax.apply_if_finite`": CHECKED,
    "`optax.apply_if_finite`, four more scalars in the state": with_scalars(CHECKED, 4),
    "check and skip, cond": ours(loss_scale=NO_SCALE)[0],
    "scale, cond": ours()[0],
    "scale, select": ours(skip="select")[0],
    "scale, by hand": by_hand(ADAMW),
}
CPU_TREES = {
    "3,000 parameters, 1 leaf": [(3000,)],
    "2,762 parameters, 4 leaves": [(32, 64), (64,), (64, 10), (10,)],
    "0.5M parameters, 6 leaves": [(784, 512), (512,), (512, 256), (256,), (256, 10), (10,)],
}

COMPILED = 1_000  # leaves, at most
WHY = """What loss scaling adds to an optimizer step: kernel launches, bytes, compile time and collectives.
For you: 14% more bytes in the optimizer step, nothing in the model, and no wait for the device."""
NOTES = """
A step updates donated float32 parameters and the moments of AdamW from float32 gradients, which are its argument.
Launches and bytes are counted by one rule for all programs (`gpu_aot.cost`); for a `cond`, those of the more expensive
branch. "By hand" is unscale, check, step and `where`, as users of jmp and mpx write them. "Many-leaf kernels" is
`implementation="mosaic_gpu"`, the rest `"xla"`, the default. "Check and skip" has a scale of 1.

The floors: AdamW reads the gradient, and reads and writes the parameter and two moments: 28 bytes a parameter. The flag
and the norm must be known before the first write, so a scaled step reads the gradients twice: 32 bytes. Unscaling, the
flag, the norm and clipping fuse with these two reads and need no more. In separate passes they would add 24 bytes to
AdamW, 86%.

In plain JAX, 16 small leaves of one shape share a launch, and XLA reads a large leaf in one launch and adds up its
parts in another one. In programs over many devices, each leaf has launches of its own.

Time is CPU time. The time of a whole program is measured once. The time to trace and lower is the least of three, and
for 10,000 leaves that of a single run. The programs of 10,000 leaves are lowered and not compiled: even for AdamW
alone, the memory of the compiler grows with the square of the number of leaves, 0.8 GB at 1,000 and 4.2 GB at 4,000.
At 10,000 the compiler was stopped at over 21 GB.

On many devices, parameters, moments and gradients are sharded alike. [Collectives](collectives.md) has the bytes that a
whole train step sends, data parallel and FSDP; there, too, loss scaling adds nothing or one float32.

On the CPU, the programs take turns, and a time is the fifth percentile of the calls of each. An operation is a fusion
or a copy in the compiled program, or a branch.

## On a CPU

Half a million parameters take as long under the loss scale as under `optax.apply_if_finite`. A few thousand parameters
in four leaves take as long, to 8%. Both read the gradients twice. Both write the updates, because the branch returns
them before they are added to the parameters; AdamW alone adds them in the pass that computes them.

For one leaf of 3,000 parameters, `optax.apply_if_finite` takes 1.3 times as long as AdamW and the loss scale 1.7
times. Its state takes this time, not its arithmetic: `optax.apply_if_finite` keeps three scalars and
`dynamic_loss_scale` seven. With four more scalars, which it only passes through, `optax.apply_if_finite` takes 1.8
times as long too, because JAX hands each array in and out of every call. The seven are what `metrics`, `check_health`
and checkpoints read.

## Where it loses

- Against plain AdamW: 14% more bytes, which is the floor, and by default two launches for each large leaf and one for
  16 small leaves of one shape. A check by hand, and `optax.apply_if_finite`, which does not scale, have as many bytes
  and two launches for each large leaf and one for each small one.
- On one device, a check by hand has as many launches (of 3,022 one fewer) or more. On many devices, where leaves are
  not joined, up to 7 fewer.
- On a CPU, a model of a few thousand parameters in one leaf: 1.7 times the time of AdamW, above.
- Time to compile the step: 2.2 to 3.0 times that of AdamW, with `select` 1.9 to 2.9, by hand 1.9 to 3.0. To trace and
  lower it: 1.5 to 2.2 times, with `select` 1.3 to 2.0, by hand 1.4 to 1.8. The many-leaf kernels add 11 to 17 launches
  instead of 29 to 2,020, and the step takes 3.5 to 8.7 times as long to compile as AdamW.
- optax's clip inside `dynamic_loss_scale` with the many-leaf kernels: XLA cannot share the read of a kernel with the
  norm of optax, so gradients are read three times, 29% more bytes than AdamW. `clip_global_norm=1.0` is at the floor.
"""


def equal(leaves):
    return [Shape((TOTAL // leaves,), jnp.float32)] * leaves


def lowered(tx, tree, mesh, spec=P()):
    """The step for a GPU, parameters and state donated."""
    step, *args = optimizer_step(tx, tree)
    args = jax.tree.map(lambda x: gpu_aot.struct(mesh, x, spec if x.shape else P()), args)
    jax.clear_caches()
    return gpu_aot.lower_for(step, *args, donate_argnums=(0, 1))


def compiled(*args):
    return lowered(*args).compile()


def timed(make, *args):
    """Returns what is made, and the CPU seconds that it took, those of ptxas too."""
    start = cpu_seconds()
    made = make(*args)
    return made, cpu_seconds() - start


def steps():
    """Yields the table of what each part of the step adds, on GPT-2 small."""
    tree, mesh = gpt2_small("float32"), gpu_aot.h200_mesh()
    size = sum(x.size for x in tree)
    figures = itertools.product(("launches", "GB", "x AdamW"), ("", ", many-leaf kernels"))
    yield from head("step", *map("".join, figures), "floor, x AdamW")
    plain = None
    for name, (floor, *ways) in STEPS.items():
        costs = [gpu_aot.cost(compiled(tx, tree, mesh)) for tx in ways]
        plain = plain or costs[0]["bytes_moved"]
        rows = [(c["kernels"], f"{c['bytes_moved'] / 1e9:.3f}", f"{c['bytes_moved'] / plain:.3f}") for c in costs]
        cells = itertools.chain(*zip(*[*rows, [""] * 3][:2], strict=True))
        yield row(name, *cells, f"{floor * size / plain:.3f}")


def growth(counts):
    """Yields the table of the same parameters in more and more leaves."""
    mesh = gpu_aot.h200_mesh()
    compiled(ADAMW, equal(1), mesh)  # what the first one pays
    yield ""
    yield from head("leaves", "step", "launches", "added", "GB", "x AdamW", "trace, lower and compile, x AdamW")
    for leaves in counts:
        plain = None
        for name, tx in GROWTH.items():
            program, seconds = timed(compiled, tx, equal(leaves), mesh)
            cost = gpu_aot.cost(program)
            figures = cost["kernels"], cost["bytes_moved"], seconds
            plain = plain or figures
            ratios = [x / y for x, y in zip(figures, plain, strict=True)]
            cells = [leaves, name, figures[0], figures[0] - plain[0], f"{figures[1] / 1e9:.3f}"]
            yield row(*cells, f"{ratios[1]:.3f}", f"{ratios[2]:.2f}")


def tracing(counts):
    """Yields the table of what is known before the compiler: the time to trace and lower."""
    mesh = gpu_aot.h200_mesh()
    yield ""
    yield from head("trace and lower, x AdamW", *GROWTH)
    for leaves in counts:
        repeats = range(3 if leaves <= COMPILED else 1)
        times = [min(timed(lowered, tx, equal(leaves), mesh)[1] for _ in repeats) for tx in GROWTH.values()]
        yield f"| {leaves} leaves | {' | '.join(f'{x / times[0]:.2f}' for x in times)} |"


def sharded(devices, leaves=100):
    """Yields the table of what a step adds on many devices, parameters, state and gradients sharded over them."""
    yield ""
    yield from head("devices", "step", "launches", "GB a device", "x AdamW", "collectives", "bytes sent by a device")
    for n in devices:
        plain = None
        for name, tx in itertools.islice(GROWTH.items(), 2):
            program = compiled(tx, equal(leaves), gpu_aot.h200_mesh(n), P("data"))
            cost = gpu_aot.cost(program)
            moved, calls = cost["bytes_moved"], sum(times for _, times, _ in gpu_aot.collectives(program))
            plain = plain or moved
            cells = [n, name, cost["kernels"], f"{moved / 1e9:.4f}", f"{moved / plain:.3f}", calls]
            yield row(*cells, f"{on_the_wire(program, n).total():.0f}")


def on_cpu(calls):
    """Yields the table of times on this CPU: all programs take turns, so that they share what else runs here."""
    if calls:
        yield ""
        yield from head("on a CPU", "step", "operations", "wall time, x AdamW", "CPU time, x AdamW")
    for name, shapes in CPU_TREES.items() if calls else ():
        params = [jnp.full(shape, 0.01) for shape in shapes]
        programs, turns = {}, {}
        for by, tx in ON_CPU.items():
            step, *_ = optimizer_step(tx, params)
            state = jax.tree.map(jnp.array, (params, tx.init(params)))
            program = jax.jit(step, donate_argnums=(0, 1)).lower(*state, params).compile()
            programs[by], turns[by] = (program, state), np.empty((calls, 2))
        for i in range(calls):
            for by, (program, state) in programs.items():
                start = time.perf_counter(), time.process_time()
                state = jax.block_until_ready(program(*state, params))
                turns[by][i] = time.perf_counter() - start[0], time.process_time() - start[1]
                programs[by] = program, state
        fast = {by: np.quantile(times, 0.05, axis=0) for by, times in turns.items()}
        for by, (program, _) in programs.items():
            wall, cpu = fast[by] / fast["AdamW"]
            yield f"| {name} | {by} | {gpu_aot.cost(program)['kernels']} | {wall:.2f} | {cpu:.2f} |"


def main():
    parser = arguments(__doc__)
    parser.add_argument("--leaves", type=int, nargs="*", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 8, 64, 512])
    parser.add_argument("--calls", type=int, default=3_000, help="of each program on the CPU; 0 leaves the table out")
    options = parser.parse_args()
    line = f"Compiled for NVIDIA H200s with JAX {jax.__version__}, by `benchmarks/amp_step.py`."
    few = [leaves for leaves in options.leaves if leaves <= COMPILED]
    compiled_tables = itertools.chain(steps(), growth(few), tracing(options.leaves), sharded(options.devices))
    tables = itertools.chain(compiled_tables, on_cpu(options.calls))
    report("Cost of a loss scaling step", f"{WHY}\n\n{line}", tables, NOTES, options.out)


if __name__ == "__main__":
    main()
