"""Post-train a small decoder with GRPO in float32, bfloat16 and float16, and compare its sampler with its learner.

    python examples/grpo_float16.py                               # all three, a few minutes on two CPU cores
    python examples/grpo_float16.py --precision float16 --steps 50

The sampler writes one token after the other, with a cache of keys and values; the learner reads whole sequences. Both
compute the same log-probabilities, but round them differently. GRPO divides the one by the other, so that what differs
between them counts as a change of the policy. float16 rounds to 11 bits where bfloat16 rounds to 8. Writes
`metrics.csv` and `grpo.png`.
"""

import argparse
import csv
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure

import jmp_amp as amp

DIGITS, SEPARATOR, VOCAB = 8, 10, 11  # a sequence: digits, the separator, the digits in order
WIDTH, HEADS, LAYERS = 64, 4, 2
PROMPTS, GROUP, PASSES = 32, 8, 2  # a rollout: prompts, completions of each; and how often the learner reads it
CLIP, KL_WEIGHT = 0.2, 0.01
PRECISIONS = ("float32", "bfloat16", "float16")

Cache = list[tuple[jax.Array, jax.Array]]  # a layer's keys and values [batch, time, heads, width of a head]
Rollout = dict[str, jax.Array]


class Block(nnx.Module):
    """Attention and an MLP; with a cache, of the tokens from `start` on, which attend to those before them as well."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(2)])
        self.qkv, self.out = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, cache: Any, start: Any) -> tuple[jax.Array, Any]:
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (y.reshape(heads) for y in jnp.split(self.qkv(self.norms[0](x)), 3, axis=-1))
        if cache is not None:
            k, v = (jax.lax.dynamic_update_slice_in_dim(*pair, start, 1) for pair in zip(cache, (k, v), strict=True))
        past = jnp.arange(k.shape[1]) <= start + jnp.arange(x.shape[1])[:, None]
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
        weights = jax.nn.softmax(jnp.where(past, scores, -jnp.inf))
        x = x + self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x)))), (k, v)


class Decoder(nnx.Module):
    """Logits `[batch, time, VOCAB]` of tokens `[batch, time]`, and the cache with their keys and values."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.position = nnx.Embed(VOCAB, WIDTH, rngs=rngs), nnx.Embed(2 * DIGITS + 1, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm, self.head = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array, cache: Cache | None = None, start: Any = 0) -> tuple[jax.Array, Cache]:
        x, new = self.embed(tokens) + self.position(start + jnp.arange(tokens.shape[1])), []
        for block, old in zip(self.blocks, cache or [None] * LAYERS, strict=True):
            x, keys_and_values = block(x, old, start)
            new.append(keys_and_values)
        return self.head(self.norm(x)), new


def sample(model: Decoder, prompts: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Completions `[batch, DIGITS]` and the log-probabilities of their tokens, one token after the other."""
    zeros = jnp.zeros((len(prompts), 2 * DIGITS + 1, HEADS, WIDTH // HEADS))
    logits, cache = model(prompts, [(zeros, zeros)] * LAYERS)

    def step(carry: tuple[jax.Array, Cache], at: tuple[jax.Array, jax.Array]) -> Any:
        log_probs, cache = jax.nn.log_softmax(carry[0]), carry[1]
        token = jax.random.categorical(at[0], log_probs)[:, None]
        logits, cache = model(token, cache, at[1])
        return (logits[:, -1], cache), (token[:, 0], jnp.take_along_axis(log_probs, token, -1)[:, 0])

    times = jax.random.split(key, DIGITS), jnp.arange(DIGITS + 1, 2 * DIGITS + 1)
    _, (completions, log_probs) = jax.lax.scan(step, (logits[:, -1], cache), times)
    return completions.T, log_probs.T


def completion_log_probs(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Log-probabilities `[batch, DIGITS]` of the completions in `tokens`, all at once."""
    logits, _ = model(tokens[:, :-1])
    return -optax.softmax_cross_entropy_with_integer_labels(logits[:, DIGITS:], tokens[:, DIGITS + 1 :])


def sorts(prompts: jax.Array, completions: jax.Array) -> jax.Array:
    """The reward: 1 if all digits of a completion are right."""
    return jnp.all(completions == jnp.sort(prompts[:, :DIGITS]), axis=-1).astype(jnp.float32)


@functools.partial(nnx.jit, static_argnames="precision")
def roll_out(model: Decoder, reference: Decoder, prompts: jax.Array, key: jax.Array, precision: str) -> Rollout:
    prompts = jnp.repeat(prompts, GROUP, axis=0)
    completions, log_probs = amp.autocast(sample, precision)(model, prompts, key)
    rewards = sorts(prompts, completions).reshape(-1, GROUP)
    spread = rewards - rewards.mean(1, keepdims=True)
    tokens = jnp.concatenate([prompts, completions], axis=1)
    return {
        "tokens": tokens,
        "rewards": rewards.ravel(),
        "advantages": (spread / (rewards.std(1, keepdims=True) + 1e-4)).reshape(-1, 1),
        "log_probs": log_probs,
        "reference": amp.autocast(completion_log_probs, precision)(reference, tokens),
    }


def grpo_loss(model: Decoder, rollout: Rollout) -> tuple[jax.Array, dict[str, jax.Array]]:
    log_probs = completion_log_probs(model, rollout["tokens"])
    log_ratio = log_probs - rollout["log_probs"]  # the learner's, less the sampler's
    ratio, advantages = jnp.exp(log_ratio), rollout["advantages"]
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    from_reference = rollout["reference"] - log_probs
    kl = jnp.mean(jnp.expm1(from_reference) - from_reference)
    return KL_WEIGHT * kl - gain.mean(), {
        "kl": kl,
        "mismatch_mean": jnp.abs(log_ratio).mean(),
        "mismatch_max": jnp.abs(log_ratio).max(),
        "clipped": jnp.mean(jnp.abs(ratio - 1) > CLIP),
    }


@functools.partial(nnx.jit, static_argnames="precision")
def train_step(model: Decoder, optimizer: nnx.Optimizer, rollout: Rollout, precision: str) -> dict[str, jax.Array]:
    loss_fn = amp.autocast(grpo_loss, precision)
    value_and_grad = amp.value_and_grad(loss_fn, has_aux=True, opt_state=optimizer, transform=nnx.value_and_grad)
    (_, measured), grads = value_and_grad(model, rollout)
    optimizer.update(model, grads)  # unscales the gradients, and skips the step if they overflow
    return measured


def make_optimizer(model: Decoder, precision: str, lr: float) -> nnx.Optimizer:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(lr))
    rule = amp.LossScale(growth_interval=100) if precision == "float16" else amp.LossScale.none()
    return nnx.Optimizer(model, amp.dynamic_loss_scale(tx, rule), wrt=nnx.Param)


def draw_prompts(seed: int, size: int) -> Iterator[np.ndarray]:
    """Endless random prompts i32[size, DIGITS + 1]."""
    rng = np.random.default_rng(seed)
    while True:
        digits = rng.integers(10, size=(size, DIGITS), dtype=np.int32)
        yield np.pad(digits, ((0, 0), (0, 1)), constant_values=SEPARATOR)


def warm_start(steps: int, seed: int, lr=1e-3) -> Decoder:
    """A decoder that has seen some sorted digits, in float32."""
    model = Decoder(nnx.Rngs(seed))
    optimizer = make_optimizer(model, "float32", lr)

    @nnx.jit
    def step(model: Decoder, optimizer: nnx.Optimizer, tokens: jax.Array):
        loss, grads = nnx.value_and_grad(lambda model: -completion_log_probs(model, tokens).mean())(model)
        optimizer.update(model, grads)
        return loss

    for _, prompts in zip(range(steps), draw_prompts(seed, 256), strict=False):
        loss = step(model, optimizer, np.concatenate([prompts, np.sort(prompts[:, :DIGITS])], axis=1))
        if _ % 50 == 49: print(_, loss)
    return model


def train(start: Decoder, precision: str, steps: int, seed: int, lr=3e-4):
    model = nnx.clone(start)
    optimizer = make_optimizer(model, precision, lr)
    key, rows = jax.random.key(seed), []
    for step, prompts in zip(range(steps), draw_prompts(seed+1000, PROMPTS), strict=False):
        rollout = roll_out(model, start, prompts, jax.random.fold_in(key, step), precision)
        passes = [train_step(model, optimizer, rollout, precision) for _ in range(PASSES)]
        row = {**passes[0], "kl": passes[-1]["kl"], "clipped0": passes[0]["clipped"], "clipped": passes[-1]["clipped"], "reward": rollout["rewards"].mean()}
        rows.append(row)
        if step % 10 == 9:
            r = jax.device_get(rows[-10:])
            print(precision, step + 1, *(f"{k} {np.mean([x[k] for x in r]):.3g}" for k in r[0]), amp.get_loss_scale(optimizer), flush=True)
    return rows

if __name__ == "__main__":
    import time
    t = time.time()
    start = warm_start(int(sys.argv[1]), 0)
    print("warm", time.time() - t)
    for p in PRECISIONS:
        t = time.time()
        train(start, p, int(sys.argv[2]), 0)
        print(p, time.time() - t)
