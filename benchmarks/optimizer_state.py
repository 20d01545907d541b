"""What the state of an optimizer in 8 bits saves, costs and loses.

    python benchmarks/optimizer_state.py [--out docs/benchmarks/optimizer_state.md]
    python benchmarks/optimizer_state.py --only memory|cost|convergence

Trains a small GPT on the CPU, in a quarter of an hour, and compiles for GPUs that are not there (`gpu_aot.py`).
"""

import functools
import os
import platform
import statistics
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import cpu
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from report import arguments, head, report

import jmp_amp as amp

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import data

FORMATS = {
    "float32": lambda tx: tx,
    "float8": amp.low_precision_state,
    "float8, nearest": functools.partial(amp.low_precision_state, rounding="nearest"),
    "bfloat16": functools.partial(amp.low_precision_state, dtype="bfloat16"),
}
WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 2, 2, 32, 16
OPTIMIZERS = {
    "AdamW, b2 = 0.95": lambda rate: optax.adamw(rate(3e-3), b2=0.95),
    "AdamW, b2 = 0.999": lambda rate: optax.adamw(rate(3e-3), b2=0.999),
    "Lion": lambda rate: optax.lion(rate(5e-4)),
    "RMSProp": lambda rate: optax.rmsprop(rate(2e-3), decay=0.95),
    "SGD, momentum 0.9": lambda rate: optax.sgd(rate(0.3), momentum=0.9),
    "Muon": lambda rate: optax.contrib.muon(rate(1e-2)),
    "Adafactor, momentum 0.9": lambda rate: optax.adafactor(rate(1e-2), momentum=0.9),
}


def init_params(key):
    shapes = {"token": (256, WIDTH), "position": (CONTEXT, WIDTH)}
    layer = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    shapes |= {f"{name}{i}": shape for i in range(LAYERS) for name, shape in layer.items()}
    keys = jax.random.split(key, len(shapes))
    return {
        name: 0.02 * jax.random.normal(k, shape) for (name, shape), k in zip(shapes.items(), keys, strict=True)
    }


def loss_fn(params, tokens):
    x = params["token"][tokens[:, :-1]] + params["position"]
    for i in range(LAYERS):
        q, k, v = jnp.split((jax.nn.standardize(x) @ params[f"qkv{i}"]).reshape(*x.shape[:2], HEADS, -1), 3, -1)
        x += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ params[f"out{i}"]
        x += jax.nn.gelu(jax.nn.standardize(x) @ params[f"up{i}"]) @ params[f"down{i}"]
    logits = jax.nn.standardize(x) @ params["token"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def final_losses(make, store, steps, seeds):
    """The validation loss of each seed; a seed sets parameters and batches."""
    text, held_out = data.library_text(4_000_000)
    validation = jnp.asarray(next(data.windows(held_out, CONTEXT + 1, 1024, 0)))
    streams = [data.windows(text, CONTEXT + 1, BATCH, seed) for seed in range(seeds)]
    schedule = functools.partial(optax.warmup_cosine_decay_schedule, 0, warmup_steps=steps // 10, decay_steps=steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), store(make(lambda peak: schedule(peak_value=peak))))

    @jax.jit
    @jax.vmap
    def train(carry, batches):
        def step(carry, tokens):
            params, state = carry
            updates, state = tx.update(jax.grad(loss_fn)(params, tokens), state, params)
            return (optax.apply_updates(params, updates), state), None

        return lax.scan(step, carry, batches)[0]

    params = jax.vmap(init_params)(jax.random.split(jax.random.key(0), seeds))
    carry = params, jax.vmap(tx.init)(params)
    for _ in range(steps // 50):
        carry = train(carry, np.stack([[next(stream) for _ in range(50)] for stream in streams]))
    return [float(x) for x in jax.vmap(loss_fn, (0, None))(carry[0], validation)]


def convergence(steps, seeds):
    yield from head("optimizer", "state", "mean loss", "standard deviation", "less float32")
    for optimizer, make in OPTIMIZERS.items():
        expected = None
        for name, store in FORMATS.items():
            found = final_losses(make, store, steps, seeds)
            less = ""
            if expected:
                pairs = [a - b for a, b in zip(found, expected, strict=True)]
                less = f"{statistics.mean(pairs):+.4f} ± {statistics.stdev(pairs) / len(pairs) ** 0.5:.4f}"
            expected = expected or found
            yield f"| {optimizer} | {name} | {statistics.mean(found):.4f} | {statistics.stdev(found):.4f} | {less} |"


if __name__ == "__main__":
    for line in convergence(int(sys.argv[1]), int(sys.argv[2])):
        print(line, flush=True)
