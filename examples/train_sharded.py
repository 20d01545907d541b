"""Train a small byte model in float16 on many devices: data parallel, then with everything sharded (FSDP).

    python examples/train_sharded.py --simulate 8             # on eight simulated devices of this CPU
    python examples/train_sharded.py                          # on all the GPUs or TPUs of this machine
    srun python examples/train_sharded.py --distributed       # on those of many machines

The loss function and the step are those of one device: `jax.jit` and the shardings do the rest.
"""

import argparse
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import jmp_amp as amp

CONTEXT, EMBEDDING, HIDDEN = 16, 32, 512
TX = amp.dynamic_loss_scale(optax.adamw(3e-3), amp.LossScale(growth_interval=50), clip_global_norm=1.0)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=512, help="examples a step, on all devices together")
    parser.add_argument("--simulate", type=int, metavar="N", help="run on N simulated CPU devices (in each process)")
    parser.add_argument(
        "--distributed",
        nargs="*",
        metavar="X",
        help="one of many processes: alone where JAX finds the others by itself (Slurm, MPI, Kubernetes, TPU pods), "
        "or with COORDINATOR:PORT PROCESSES PROCESS",
    )
    parser.add_argument("--inject-overflow", type=int, metavar="STEP", help="one example of this step weighs inf")
    return parser.parse_args(argv)


def read_windows(count: int) -> np.ndarray:
    """Random windows `[count, CONTEXT + 1]` of the source text of Python's standard library."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
    starts = np.random.default_rng(0).integers(len(text) - CONTEXT, size=(count, 1))
    return text[starts + np.arange(CONTEXT + 1)].astype(np.int32)


def init_params(key: jax.Array) -> dict[str, jax.Array]:
    shapes = {"embed": (256, EMBEDDING), "up": (CONTEXT * EMBEDDING, HIDDEN), "bias": (HIDDEN,), "out": (HIDDEN, 256)}
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    return {name: jax.random.normal(keys[name], shape) / shape[0] ** 0.5 for name, shape in shapes.items()}


@amp.autocast
def loss_fn(params: dict[str, jax.Array], windows: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted loss, and the accuracy, of the last byte of each window."""
    x = params["embed"][windows[:, :-1]].reshape(len(windows), -1)
    # Without this, XLA may gather activations where parameters are sharded, rather than parameters.
    x = jax.lax.with_sharding_constraint(x, P("data"))
    hidden = jax.lax.with_sharding_constraint(jax.nn.gelu(x @ params["up"] + params["bias"]), P("data"))
    logits = hidden @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1])
    return jnp.mean(weights * losses), jnp.mean(logits.argmax(-1) == windows[:, -1])


def train_step(params: Any, opt_state: Any, windows: jax.Array, weights: jax.Array) -> tuple[Any, Any, jax.Array]:
    value_and_grad = amp.value_and_grad(loss_fn, has_aux=True, opt_state=opt_state)
    (loss, _), grads = value_and_grad(params, windows, weights)
    updates, opt_state = TX.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def train(way: str, options: argparse.Namespace, windows: np.ndarray, progress: Progress) -> tuple[str, ...]:
    """Returns the row of the table."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    everywhere, spread = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def placed(x: jax.ShapeDtypeStruct) -> NamedSharding:
        """Sharded along the last axis, if the devices divide it."""
        if way == "data parallel" or not x.shape or x.shape[-1] % mesh.size:
            return everywhere
        return NamedSharding(mesh, P(*[None] * (len(x.shape) - 1), "data"))

    def feed(x: np.ndarray) -> jax.Array:
        """Each process hands its part of the batch to its devices, and need not have the rest."""
        part = len(x) // jax.process_count()
        mine = x[part * jax.process_index() :][:part]
        return jax.make_array_from_process_local_data(spread, mine, x.shape)

    def init(key: jax.Array) -> tuple[Any, Any]:
        params = init_params(key)
        return params, TX.init(params)

    kept = jax.tree.map(placed, jax.eval_shape(init, jax.random.key(0)))
    with jax.set_mesh(mesh):
        params, opt_state = jax.jit(init, out_shardings=kept)(jax.random.key(0))
        step_fn = jax.jit(train_step, out_shardings=(*kept, everywhere), donate_argnums=(0, 1))
        for step in progress.track(range(1, options.steps + 1), description=f"{way:13}"):
            weights = np.ones(options.batch, np.float32)
            weights[-1] = np.inf if step == options.inject_overflow else 1
            batch = windows[options.batch * step :][: options.batch]
            params, opt_state, _ = step_fn(params, opt_state, feed(batch), feed(weights))
        loss, accuracy = jax.jit(loss_fn)(params, feed(windows[: options.batch]), feed(np.ones(options.batch)))
    scaling = opt_state.loss_scale
    skips = {int(shard.data) for shard in scaling.total_notfinite.addressable_shards}  # one number, if all agree
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((params, opt_state)))
    scale = f"2^{np.log2(scaling.loss_scale.item()):g}"
    return way, f"{loss:.4f}", f"{accuracy:.1%}", ", ".join(map(str, sorted(skips))), scale, f"{held / 1e6:.3f} MB"


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if options.simulate:
        # Simulated devices share a pool of threads; with few cores, all could wait in a collective and none compute.
        os.environ.setdefault("PJRT_NPROC", str(4 * options.simulate))
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.simulate)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if options.distributed is not None:
        coordinator, processes, process = options.distributed or (None, None, None)
        jax.distributed.initialize(coordinator, processes and int(processes), process and int(process))
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {jax.process_count()} process(es)"
    if options.batch % jax.device_count():
        raise SystemExit(f"--batch {options.batch}: must be a multiple of the devices ({devices})")
    console = Console(quiet=jax.process_index() != 0)
    table = Table("", "loss", "accuracy", "skips", "scale", "held a device", title=devices, box=SIMPLE_HEAD)
    windows = read_windows(options.batch * (options.steps + 1))
    with Progress(console=console) as progress:
        for way in ("data parallel", "FSDP"):
            table.add_row(*train(way, options, windows, progress))
    console.print(table)


if __name__ == "__main__":
    main()
