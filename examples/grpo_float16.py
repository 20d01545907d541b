"""Post-train a small decoder with GRPO in float32, bfloat16 and float16: does the sampler agree with the learner?

    python examples/grpo_float16.py                               # all three, five minutes on two CPU cores
    python examples/grpo_float16.py --precision float16 bfloat16 --steps 50

The sampler writes one token after the other, with a cache, and stores all that it can in 16 bits, as inference engines
do; the learner reads whole sequences. They compute the same log-probabilities and round them differently. GRPO divides
one by the other, so it takes the mismatch for a change of the policy. float16 rounds to 11 bits, bfloat16 to 8. Writes
`metrics.csv` and `grpo.png`.
"""

import argparse
import csv
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import jmp_amp as amp

DIGITS, SEPARATOR, VOCAB = 8, 10, 11  # a sequence: the digits of a prompt, the separator, the digits in order
WIDTH, HEADS, LAYERS = 64, 4, 2
PROMPTS, GROUP, PASSES = 32, 8, 2  # of a rollout: the prompts, the completions of each, the learner's steps
CLIP, KL_WEIGHT = 0.2, 0.01
RUNS = {  # how each precision is drawn
    "float32": {"color": "0.7", "lw": 4},
    "bfloat16": {"color": "C2"},
    "float16": {"color": "C0"},
}
PANELS = {
    "reward": "Reward: share of completions in order",
    "mismatch_mean": "Mismatch of log-probabilities: mean, and largest (dotted)",
    "kl": "KL from the reference, nats a token",
    "clipped": "Share of clipped ratios",
}

Cache = list[tuple[jax.Array, jax.Array]]  # keys and values [batch, time, heads, width of a head] of each layer
Batch = dict[str, jax.Array]
Rows = list[dict[str, Any]]  # one for each rollout


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


def reward(prompts: jax.Array, completions: jax.Array) -> jax.Array:
    """1 for a completion with all digits of its prompt in order, 0 for any other: f32[batch]."""
    return jnp.all(completions == jnp.sort(prompts[:, :DIGITS]), axis=-1).astype(jnp.float32)


@functools.partial(nnx.jit, static_argnames="precision")
def roll_out(model: Decoder, reference: Decoder, prompts: jax.Array, key: jax.Array, precision: str) -> Batch:
    """Samples a group of completions for each of `prompts[PROMPTS, DIGITS + 1]`, and judges each within its group."""
    prompts = jnp.repeat(prompts, GROUP, axis=0)
    # Engines for inference store the residual stream in 16 bits; the learner sums it in float32.
    completions, log_probs = amp.autocast(sample, precision, residual_stream="low")(model, prompts, key)
    tokens = jnp.concatenate([prompts, completions], axis=1)
    rewards = reward(prompts, completions).reshape(-1, GROUP)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-4)
    return {
        "tokens": tokens,
        "rewards": rewards.ravel(),
        "advantages": advantages.reshape(-1, 1),
        "log_probs": log_probs,
        "reference": amp.autocast(completion_log_probs, precision)(reference, tokens),
    }


def grpo_loss(model: Decoder, rollout: Batch) -> tuple[jax.Array, Batch]:
    log_probs = completion_log_probs(model, rollout["tokens"])
    log_ratio = log_probs - rollout["log_probs"]  # before the first step on a rollout: the mismatch
    ratio, advantages = jnp.exp(log_ratio), rollout["advantages"]
    gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
    from_reference = rollout["reference"] - log_probs
    kl = jnp.mean(jnp.expm1(from_reference) - from_reference)
    distance = jnp.abs(log_ratio)
    clipped = jnp.mean(jnp.abs(ratio - 1) > CLIP)
    return KL_WEIGHT * kl - gain.mean(), {"kl": kl, "clipped": clipped, "mean": distance.mean(), "max": distance.max()}


def imitation_loss(model: Decoder, batch: Batch) -> tuple[jax.Array, Batch]:
    """Of the warm start, which shows the model some sorted digits."""
    return -completion_log_probs(model, batch["tokens"]).mean(), {}


@functools.partial(nnx.jit, static_argnames=("loss_fn", "precision"))
def train_step(model: Decoder, optimizer: nnx.Optimizer, batch: Batch, *, loss_fn: Any, precision: str) -> Batch:
    low_loss_fn = amp.autocast(loss_fn, precision)
    value_and_grad = amp.value_and_grad(low_loss_fn, has_aux=True, opt_state=optimizer, transform=nnx.value_and_grad)
    (_, measured), grads = value_and_grad(model, batch)
    optimizer.update(model, grads)  # unscales the gradients, and skips the step if they overflow
    return measured


def make_optimizer(model: Decoder, precision: str, learning_rate: float) -> nnx.Optimizer:
    rule = amp.LossScale(growth_interval=100) if precision == "float16" else amp.LossScale.none()
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(learning_rate))
    return nnx.Optimizer(model, amp.dynamic_loss_scale(tx, rule), wrt=nnx.Param)


def draw_prompts(*seed: int, size: int) -> Iterator[np.ndarray]:
    """Endless random prompts i32[size, DIGITS + 1], which end with the separator."""
    rng = np.random.default_rng(seed)
    while True:
        yield np.pad(rng.integers(10, size=(size, DIGITS), dtype=np.int32), ((0, 0), (0, 1)), constant_values=SEPARATOR)


def warm_start(steps: int, seed: int) -> Decoder:
    """The reference, from which each precision starts: a decoder that gets some digits in order, in float32."""
    model = Decoder(nnx.Rngs(seed))
    optimizer = make_optimizer(model, "float32", 1e-3)
    for _, prompts in zip(range(steps), draw_prompts(seed, 0, size=256), strict=False):
        tokens = np.concatenate([prompts, np.sort(prompts[:, :DIGITS])], axis=1)
        train_step(model, optimizer, {"tokens": tokens}, loss_fn=imitation_loss, precision="float32")
    return model


def train(reference: Decoder, precision: str, steps: int, seed: int) -> Rows:
    """Post-trains a copy of the reference, and returns a row for each rollout."""
    model, key, rows = nnx.clone(reference), jax.random.key(seed), []
    optimizer = make_optimizer(model, precision, 3e-4)
    step_fn = functools.partial(train_step, model, optimizer, loss_fn=grpo_loss, precision=precision)
    with amp.watch.live(steps, precision) as view:
        for step, prompts in zip(range(1, steps + 1), draw_prompts(seed, 1, size=PROMPTS), strict=False):
            rollout = roll_out(model, reference, prompts, jax.random.fold_in(key, step), precision)
            first, *_, last = [step_fn(rollout) for _ in range(PASSES)]
            row = {"reward": rollout["rewards"].mean(), "kl": last["kl"], "mismatch_mean": first["mean"]}
            scaling = amp.metrics(optimizer)
            view.update(**row, **scaling)
            row |= {"mismatch_max": first["max"], "clipped": last["clipped"]}
            row |= {name: scaling[name] for name in ("loss_scale", "total_notfinite", "grad_norm")}
            rows.append({"run": precision, "step": step, **row})
            if step % max(1, steps // 10) == 0 and not sys.stdout.isatty():
                # A log file gets the live line only at the end.
                print(f"{precision} {step}/{steps} reward {float(row['reward']):.3f}", flush=True)
    amp.check_health(optimizer, nnx.state(model, nnx.Param))
    return jax.device_get(rows)


def column(rows: Rows, field: str) -> np.ndarray:
    return np.array([row[field] for row in rows])


def final(rows: Rows, field: str) -> float:
    """The mean of the last fifth of a run."""
    return column(rows, field)[-max(1, len(rows) // 5) :].mean().item()


def summarize(runs: dict[str, Rows]) -> Table:
    table = Table("run", "reward", "KL", "clipped", "mismatch", "largest", "scale", "skips", box=SIMPLE_HEAD)
    for name, rows in runs.items():
        mean, largest = column(rows, "mismatch_mean").mean(), column(rows, "mismatch_max").max()
        shown = [f"{final(rows, 'reward'):.3f}", f"{final(rows, 'kl'):.3f}", f"{final(rows, 'clipped'):.2%}"]
        scale = f"2^{math.log2(rows[-1]['loss_scale']):g}"
        table.add_row(name, *shown, f"{mean:.1e}", f"{largest:.1e}", scale, f"{rows[-1]['total_notfinite']}")
    return table


def plot(runs: dict[str, Rows], path: Path) -> None:
    window = max(1, len(next(iter(runs.values()))) // 15)
    figure = Figure(figsize=(10, 6.4), dpi=150, layout="constrained")
    for (field, title), axes in zip(PANELS.items(), figure.subplots(2, 2, sharex=True).flat, strict=True):
        for name, rows in runs.items():
            steps, smooth = column(rows, "step"), np.convolve(column(rows, field), np.ones(window) / window, "valid")
            axes.plot(steps[window - 1 :], smooth, label=name, **{"lw": 1.8} | RUNS[name])
            if field == "mismatch_mean":
                axes.semilogy(steps, column(rows, "mismatch_max"), ":", color=RUNS[name]["color"], lw=1.2)
        axes.set_title(title, fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_subplotspec().is_last_row():
            axes.set_xlabel(f"step (lines: means of {window} steps)")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--precision", nargs="+", choices=("all", *RUNS), default=["all"], help="of sampler and learner"
    )
    parser.add_argument("--steps", type=int, default=150, help=f"rollouts, of {PASSES} optimizer steps each")
    parser.add_argument("--warmup", type=int, default=50, help="steps of the warm start")
    parser.add_argument("--seed", type=int, default=0, help="of the initial parameters, the prompts and the samples")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo_float16"), help="where metrics.csv and grpo.png go")
    config = parser.parse_args(argv)
    if config.steps < 1:
        parser.error(f"argument --steps: must be at least 1, got {config.steps}")
    reference = warm_start(config.warmup, config.seed)
    names = RUNS if "all" in config.precision else config.precision
    runs = {name: train(reference, name, config.steps, config.seed) for name in names}
    config.out.mkdir(parents=True, exist_ok=True)
    with (config.out / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, next(iter(runs.values()))[0])
        writer.writeheader()
        writer.writerows(row for rows in runs.values() for row in rows)
    plot(runs, config.out / "grpo.png")
    Console().print(summarize(runs))
    print(f"Wrote {config.out / 'metrics.csv'} and {config.out / 'grpo.png'}")


if __name__ == "__main__":
    main()
