"""Train a ResNet with batch norm in float16, in Haiku, on scikit-learn's digits.

    python examples/resnet_haiku.py                      # float32 and float16, under a minute on two CPU cores
    python examples/resnet_haiku.py --precision float16

Batch statistics are Haiku's state: they stay float32, and where a forward pass overflows, the old ones are kept.
"""

from collections.abc import Callable, Sequence

import data
import haiku as hk
import jax
import jax.numpy as jnp
import optax
import twins

import jmp_amp as amp


class Block(hk.Module):
    """Two convolutions and norms beside a shortcut, which is projected where the shape changes."""

    def __init__(self, channels: int, stride: int, name: str | None = None) -> None:
        super().__init__(name)
        self.channels, self.stride = channels, stride

    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        def conv_norm(x: jax.Array, size: int, stride: int, name: str) -> jax.Array:
            x = hk.Conv2D(self.channels, size, stride, with_bias=False, name=f"{name}_conv")(x)
            return hk.BatchNorm(True, True, 0.9, name=f"{name}_norm")(x, is_training)

        h = jax.nn.relu(conv_norm(x, 3, self.stride, "first"))
        h = conv_norm(h, 3, 1, "second")
        if h.shape != x.shape:
            x = conv_norm(x, 1, self.stride, "shortcut")
        return jax.nn.relu(x + h)


def resnet(images: jax.Array, is_training: bool) -> jax.Array:
    """Logits `[batch, 10]` of images `[batch, 8, 8, 1]`."""
    x = images
    for channels, stride in ((16, 1), (32, 2), (64, 2)):
        x = Block(channels, stride)(x, is_training)
    return hk.Linear(10)(jnp.mean(x, (1, 2)))


model = hk.transform_with_state(resnet)


def loss_fn(params: hk.Params, state: hk.State, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, hk.State]:
    logits, state = model.apply(params, state, None, images, is_training=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state


def make_train_step(tx: optax.GradientTransformation, precision: str) -> Callable[..., tuple]:
    low_loss_fn = amp.autocast(loss_fn, precision)

    @jax.jit
    def train_step(
        params: hk.Params, state: hk.State, opt_state: optax.OptState, images: jax.Array, labels: jax.Array
    ) -> tuple[hk.Params, hk.State, optax.OptState, jax.Array]:
        value_and_grad = amp.value_and_grad(low_loss_fn, has_aux=True, opt_state=opt_state)
        (loss, new_state), grads = value_and_grad(params, state, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        state = optax.tree.where(amp.metrics(opt_state)["last_finite"], new_state, state)
        return optax.apply_updates(params, updates), state, opt_state, loss

    return train_step


def train(precision: str, steps: int, seed: int, log: Callable[..., None]) -> twins.Scores:
    rule = amp.LossScale(growth_interval=100) if precision == "float16" else amp.LossScale.none()
    images, labels, test_images, test_labels = data.digits()
    params, state = model.init(jax.random.key(seed), images[:1], is_training=True)
    tx = amp.dynamic_loss_scale(optax.adamw(optax.cosine_decay_schedule(3e-3, steps)), rule)
    opt_state = tx.init(params)
    train_step = make_train_step(tx, precision)
    for _, batch in zip(range(steps), data.batches(images, labels, size=128, seed=seed), strict=False):
        params, state, opt_state, loss = train_step(params, state, opt_state, *batch)
        log(loss=loss, **amp.metrics(opt_state))
    amp.check_health(opt_state, params)

    def predict(params: hk.Params, state: hk.State, images: jax.Array) -> jax.Array:
        return model.apply(params, state, None, images, is_training=False)[0]

    logits = jax.jit(amp.autocast(predict, precision))(params, state, test_images)
    return {"accuracy": float(jnp.mean(jnp.argmax(logits, -1) == test_labels))}


def main(argv: Sequence[str] | None = None) -> dict[str, twins.Scores]:
    return twins.main(train, 300, argv)


if __name__ == "__main__":
    main()
