"""Trains and saves in processes of its own: `python checkpoint_worker.py COMMAND FOLDER`.

`resume` trains each of `runs()` that has a checkpoint in its folder to the end, and writes what it saw. `save` starts,
for each line that it is given, a process that saves states until it is killed.
"""

import functools
import itertools
import os
import pathlib
import pickle
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import jmp_amp as amp

SAVED, STEPS = 5, 10
WINDOW = 3


class Run(NamedTuple):
    params: Any
    loss_fn: Callable
    tx: Any
    bad_steps: tuple[int, ...] = (3, 8)


@functools.cache
def runs():
    rng = np.random.default_rng(0)
    shapes = {"dense": {"w": (8, 8), "b": (1, 8)}, "norm": {"scale": (1, 8)}, "out": {"w": (8, 4)}}
    params = {layer: {k: jnp.float32(rng.normal(size=s) / 2) for k, s in sub.items()} for layer, sub in shapes.items()}
    rule = amp.LossScale(init_scale=2.0**10, growth_interval=2)
    adamw = optax.adamw(optax.linear_schedule(1e-2, 1e-3, STEPS))
    chain = optax.chain(amp.unscale_and_check(), optax.clip_by_global_norm(0.5), adamw)
    low = amp.cast_params(params, "O2")
    lowest = amp.cast_params(params, "O3", keep=lambda path, x: False)
    rounded = amp.low_precision_params(adamw, masters=False, rounding="stochastic")
    inside = amp.dynamic_loss_scale(optax.MultiSteps(adamw, WINDOW).gradient_transformation(), rule)
    mixed = amp.autocast(loss_fn)
    return {
        "O0": Run(params, loss_fn, amp.dynamic_loss_scale(adamw, amp.LossScale.none())),
        "O1": Run(params, mixed, amp.dynamic_loss_scale(chain, rule)),
        "O2": Run(low, mixed, amp.dynamic_loss_scale(amp.low_precision_params(adamw), rule)),
        "O3": Run(lowest, mixed, amp.dynamic_loss_scale(rounded, rule)),
        "window_inside": Run(params, mixed, inside),
    }


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["dense"]["w"] + params["dense"]["b"])
    hidden = jax.nn.standardize(hidden) * params["norm"]["scale"]
    return jnp.mean((hidden @ params["out"]["w"] - y) ** 2)


def train(run, params, state, first):
    """Yields what there is to save after each step, and its loss, from the step `first` to the end."""

    @jax.jit
    def step(params, state, x, y):
        loss, grads = amp.value_and_grad(run.loss_fn, loss_scale=amp.get_loss_scale(state))(params, x, y)
        updates, state = run.tx.update(grads, state, params)
        return {"params": optax.apply_updates(params, updates), "state": state}, loss

    for i in range(first, STEPS + 1):
        rng = np.random.default_rng(i)
        x, y = (rng.normal(size=(16, n)).astype(np.float32) for n in (8, 4))
        if i in run.bad_steps:
            x[5, 6] = np.inf
        whole, loss = step(params, state, x, y)
        params, state = whole["params"], whole["state"]
        yield whole, loss


def bits(tree):
    """What is equal where trees are, to the last bit."""
    leaves = jax.tree.leaves_with_path(jax.device_get(tree))
    return [(jax.tree_util.keystr(path), x.dtype.name, x.shape, x.tobytes()) for path, x in leaves]


def checkpoints(folder):
    return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=3))


def save(folder, step, tree):
    with checkpoints(folder) as manager:
        manager.save(step, args=ocp.args.StandardSave(tree))


def form(run):
    """The shapes and dtypes of what a run saves."""
    return {"params": run.params, "state": jax.eval_shape(run.tx.init, run.params)}


def restore(folder, target):
    """The latest checkpoint; `target` says in what form, and where."""
    with checkpoints(folder) as manager:
        return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(target))


def resume(folder):
    seen = {}
    for name in [name for name in runs() if (folder / name).exists()]:
        run = runs()[name]
        whole = restore(folder / name, form(run))
        seen[name] = [bits(after) for after in train(run, **whole, first=SAVED + 1)]
    (folder / "seen").write_bytes(pickle.dumps(seen))


def state_form():
    """Of a training run with masters, a few megabytes large."""
    tx = amp.dynamic_loss_scale(amp.low_precision_params(optax.adam(1e-3)))
    params = {f"w{i}": jax.ShapeDtypeStruct((512, 256), jnp.float16) for i in range(4)}
    return {"params": params, "state": jax.eval_shape(tx.init, params)}


def state_of(step):
    """A state of which every leaf tells the step."""
    rng = np.random.default_rng(step)

    def leaf(x):
        return rng.integers(2 if x.dtype == bool else 1000, size=x.shape).astype(x.dtype)

    return jax.tree.map(leaf, state_form())


def save_until_killed(folder):
    with checkpoints(folder) as manager:
        latest = manager.latest_step()
        for step in itertools.count(0 if latest is None else latest + 1):
            state = jax.tree.map(jnp.asarray, state_of(step))
            print("saving", os.getpid(), flush=True)
            manager.save(step, args=ocp.args.StandardSave(state))
            manager.wait_until_finished()
            print("saved", step, flush=True)


def serve(folder):
    """Imports once; JAX has no device, and no threads, before the fork."""
    for _ in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                save_until_killed(folder)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        _, status = os.waitpid(pid, 0)
        print("ended", os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    command, folder = sys.argv[1:]
    {"resume": resume, "save": serve}[command](pathlib.Path(folder))
