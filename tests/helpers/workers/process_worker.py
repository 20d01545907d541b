"""One of two processes that train together: `python process_worker.py PROCESS PORT FOLDER` writes what it saw there.

With `endless` behind, it trains until it is stopped, and writes a byte for each step.
"""

import hashlib
import itertools
import json
import pathlib
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils
from many_devices import CLIP, SCALES, batch_of, start

DEVICES = 2
RUNS = [("data_parallel", "auto", None), ("data_parallel", "shard_map", None), ("fsdp", "auto", CLIP)]


def finite_here(batch):
    return all(np.isfinite(shard.data).all() for x in batch.values() for shard in x.addressable_shards)


def train(way, how, clip):
    mesh, step, params, state, place_batch = start(way, how, clip)
    seen = {"finite_here": [], "finite": [], "scales": [], "losses": [], "params": [], "hashes": []}
    with jax.set_mesh(mesh):
        for i in range(len(SCALES)):
            batch = place_batch(batch_of(i))
            params, state, loss = step(params, state, batch)
            whole = {name: np.asarray(multihost_utils.process_allgather(p, tiled=True)) for name, p in params.items()}
            seen["finite_here"].append(bool(finite_here(batch)))
            seen["finite"].append(bool(state.loss_scale.last_finite))
            seen["scales"].append(float(state.loss_scale.loss_scale))
            seen["losses"].append(float(loss))
            seen["params"].append({name: p.tolist() for name, p in whole.items()})
            seen["hashes"].append(hashlib.sha256(b"".join(p.tobytes() for p in whole.values())).hexdigest())
    return seen


def train_without_end(way, how, clip, out):
    mesh, step, params, state, place_batch = start(way, how, clip)
    with jax.set_mesh(mesh):
        for i in itertools.count():
            params, state, loss = step(params, state, place_batch(batch_of(i % len(SCALES))))
            jax.block_until_ready(loss)
            out.write(".")
            out.flush()


if __name__ == "__main__":
    process, port, folder, *endless = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"127.0.0.1:{port}",
        num_processes=2,
        process_id=int(process),
        initialization_timeout=300,
        heartbeat_timeout_seconds=10 if endless else 100,
        shutdown_timeout_seconds=10 if endless else 300,
    )
    assert (jax.process_count(), len(jax.local_devices()), len(jax.devices())) == (2, DEVICES, 2 * DEVICES)
    with (pathlib.Path(folder) / f"{process}.out").open("w") as out:
        if endless:
            train_without_end(*RUNS[0], out)
        json.dump([train(*run) for run in RUNS], out)
