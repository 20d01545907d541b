"""Train a GAN on scikit-learn's digits in float16: two losses, two optimizers, a loss scale each.

    python examples/gan_digits.py                      # a minute on two CPU cores
    python examples/gan_digits.py --precision float32  # the same run without autocast and without scaling

Writes `digits.png`: real digits, and what the generator makes of the same noise as training goes on.
"""

import argparse
import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from sklearn.datasets import load_digits

import jmp_amp as amp

NOISE, PIXELS, WIDTH, BATCH, SNAPSHOTS, SHOWN = 32, 64, 256, 128, 5, 16
Params = list[dict[str, jax.Array]]


class Player(NamedTuple):
    """A network and its optimizer's state, in which its loss scale is."""

    params: Params
    opt_state: optax.OptState


def init_params(rng: np.random.Generator, *widths: int) -> Params:
    """Layers from each width to the next."""
    return [
        {"w": jnp.asarray(rng.normal(size=(n, m)) * (2 / n) ** 0.5, jnp.float32), "b": jnp.zeros(m)}
        for n, m in itertools.pairwise(widths)
    ]


def network(params: Params, x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jax.nn.leaky_relu(x @ layer["w"] + layer["b"], 0.2)
    return x @ params[-1]["w"] + params[-1]["b"]


def generate(params: Params, noise: jax.Array) -> jax.Array:
    return jnp.tanh(network(params, noise))


def critic_loss(critic: Params, generator: Params, real: jax.Array, noise: jax.Array) -> jax.Array:
    """Tells real from generated; logits, since a sigmoid's logarithm would not survive float16."""
    verdicts = network(critic, jnp.concatenate([real, generate(generator, noise)]))
    is_real = jnp.repeat(jnp.array([[0.9], [0.0]]), len(real), axis=0)
    return optax.sigmoid_binary_cross_entropy(verdicts, is_real).mean()


def generator_loss(generator: Params, critic: Params, noise: jax.Array) -> jax.Array:
    verdicts = network(critic, generate(generator, noise))
    return optax.sigmoid_binary_cross_entropy(verdicts, jnp.ones_like(verdicts)).mean()


def make_optimizer(precision: str) -> optax.GradientTransformationExtraArgs:
    rule = amp.LossScale(growth_interval=100) if precision == "float16" else amp.LossScale.none()
    return amp.dynamic_loss_scale(optax.adam(3e-4, b1=0.5), rule)


@functools.partial(jax.jit, static_argnames="precision")
def train_step(players: dict[str, Player], real: jax.Array, key: jax.Array, precision: str) -> Any:
    """Moves the critic, then the generator; each skips by its own overflow, which moves only its own scale."""
    keys, losses = jax.random.split(key), {}
    critic, generator = players["critic"], players["generator"]

    def move(name: str, loss_fn: Any, player: Player, *args: Any) -> Player:
        loss_fn, tx = amp.autocast(loss_fn, precision), make_optimizer(precision)
        losses[name], grads = amp.value_and_grad(loss_fn, opt_state=player.opt_state)(player.params, *args)
        updates, opt_state = tx.update(grads, player.opt_state, player.params)
        return Player(optax.apply_updates(player.params, updates), opt_state)

    noises = [jax.random.normal(k, (BATCH, NOISE)) for k in keys]
    critic = move("critic", critic_loss, critic, generator.params, real, noises[0])
    generator = move("generator", generator_loss, generator, critic.params, noises[1])
    return {"critic": critic, "generator": generator}, losses


def batches(seed: int) -> Iterator[np.ndarray]:
    """Endless random batches of digits `[BATCH, PIXELS]` between -1 and 1."""
    digits, rng = (load_digits().data / 8 - 1).astype(np.float32), np.random.default_rng(seed)
    while True:
        yield digits[rng.integers(len(digits), size=BATCH)]


def train(steps: int, precision: str, seed: int) -> tuple[dict[str, Player], dict[str, jax.Array], list[Any]]:
    """Returns the players, their last losses, and digits that were generated on the way."""
    rng, key, training = np.random.default_rng(seed), jax.random.key(seed), batches(seed)
    widths = {"critic": (PIXELS, WIDTH, WIDTH, 1), "generator": (NOISE, WIDTH, WIDTH, PIXELS)}
    params = {name: init_params(rng, *sizes) for name, sizes in widths.items()}
    players = {name: Player(p, make_optimizer(precision).init(p)) for name, p in params.items()}
    shown, snapshots = jax.random.normal(jax.random.fold_in(key, steps), (SHOWN, NOISE)), []
    with Progress("{task.description}", BarColumn(), MofNCompleteColumn(), "{task.fields[status]}") as progress:
        task = progress.add_task(precision, total=steps, status="")
        for step in range(1, steps + 1):
            players, losses = train_step(players, next(training), jax.random.fold_in(key, step), precision)
            if step * SNAPSHOTS % steps < SNAPSHOTS:
                snapshots.append(jax.device_get(generate(players["generator"].params, shown)))
                status = " ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
                progress.update(task, completed=step, status=status)
    return players, losses, snapshots


def draw(snapshots: Sequence[np.ndarray], steps: int, path: Path) -> None:
    rows = {"real": load_digits().data[:SHOWN] / 8 - 1}
    rows |= {f"step {steps * (i + 1) // SNAPSHOTS}": images for i, images in enumerate(snapshots)}
    figure = Figure(figsize=(SHOWN / 2, len(rows) / 2), dpi=150)
    axes = figure.subplots(len(rows), SHOWN, gridspec_kw={"wspace": 0.1, "hspace": 0.1})
    for (label, images), row in zip(rows.items(), axes, strict=True):
        row[0].text(-1, 3.5, label, ha="right", va="center")
        for image, cell in zip(images, row, strict=True):
            cell.imshow(image.reshape(8, 8), cmap="gray_r", vmin=-1, vmax=1, interpolation="bicubic")
            cell.axis("off")
    figure.savefig(path, bbox_inches="tight")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=4000, help="of both players (default: 4000)")
    parser.add_argument("--precision", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/gan_digits"), help="where digits.png goes")
    config = parser.parse_args(argv)
    if config.steps < SNAPSHOTS:
        parser.error(f"argument --steps: must be at least {SNAPSHOTS}, got {config.steps}")
    players, losses, snapshots = train(config.steps, config.precision, config.seed)
    for name, player in players.items():
        amp.check_health(player.opt_state, player.params)
        scaling = amp.metrics(player.opt_state)
        print(f"{name:9} loss {losses[name]:.3f}  scale {scaling['loss_scale']:g}  skips {scaling['total_notfinite']}")
    config.out.mkdir(parents=True, exist_ok=True)
    draw(snapshots, config.steps, config.out / "digits.png")
    print(f"Wrote {config.out / 'digits.png'}")


if __name__ == "__main__":
    main()
