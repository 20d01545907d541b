"""Train a CNN with batch norm and dropout in float16, in Flax NNX, on scikit-learn's digits.

    python examples/cnn_flax_nnx.py                      # float32 and float16, half a minute on two CPU cores
    python examples/cnn_flax_nnx.py --precision float16

`amp.autocast` takes the model as an argument: batch statistics and dropout's keys change in it as they do without.
"""

from collections.abc import Callable, Sequence
from typing import Any

import data
import jax
import jax.numpy as jnp
import optax
import twins
from flax import nnx

import jmp_amp as amp


class Block(nnx.Module):
    def __init__(self, n_in: int, n_out: int, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(n_in, n_out, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(n_out, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return nnx.relu(self.norm(self.conv(x)))


class CNN(nnx.Module):
    """Logits `[batch, 10]` of images `[batch, 8, 8, 1]`."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(1, 16, rngs), Block(16, 32, rngs), Block(32, 64, rngs)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.linear = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.blocks[1](self.blocks[0](images))
        x = self.blocks[2](nnx.max_pool(x, (2, 2), (2, 2)))
        return self.linear(self.dropout(jnp.mean(x, (1, 2))))


def loss_fn(model: CNN, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


def batch_stats(model: CNN) -> Any:
    """Returns the batch statistics, as arrays that do not change with the model."""
    return nnx.as_pure(nnx.state(model, nnx.BatchStat))


def make_train_step(precision: str) -> Callable[..., jax.Array]:
    low_loss_fn = amp.autocast(loss_fn, precision)

    @nnx.jit
    def train_step(model: CNN, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
        before = batch_stats(model)
        value_and_grad = amp.value_and_grad(low_loss_fn, opt_state=optimizer, transform=nnx.value_and_grad)
        loss, grads = value_and_grad(model, images, labels)
        optimizer.update(model, grads)
        finite = amp.metrics(optimizer)["last_finite"]  # a skipped step keeps the old statistics
        nnx.update(model, optax.tree.where(finite, batch_stats(model), before))
        return loss

    return train_step


def train(precision: str, steps: int, seed: int, log: Callable[..., None]) -> twins.Scores:
    rule = amp.LossScale(growth_interval=100) if precision == "float16" else amp.LossScale.none()
    model = CNN(nnx.Rngs(seed))
    tx = amp.dynamic_loss_scale(optax.adamw(optax.cosine_decay_schedule(3e-3, steps)), rule)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    images, labels, test_images, test_labels = data.digits()
    train_step = make_train_step(precision)
    for _, batch in zip(range(steps), data.batches(images, labels, size=128, seed=seed), strict=False):
        loss = train_step(model, optimizer, *batch)
        log(loss=loss, **amp.metrics(optimizer.opt_state))
    amp.check_health(optimizer.opt_state, nnx.state(model, nnx.Param))
    model.eval()  # batch statistics of training, no dropout
    logits = nnx.jit(amp.autocast(CNN.__call__, precision))(model, test_images)
    return {"accuracy": float(jnp.mean(jnp.argmax(logits, -1) == test_labels))}


def main(argv: Sequence[str] | None = None) -> dict[str, twins.Scores]:
    return twins.main(train, 300, argv)


if __name__ == "__main__":
    main()
