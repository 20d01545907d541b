"""Train a CNN with batch norm and dropout in float16, in Keras on its JAX backend, on scikit-learn's digits.

    python examples/cnn_keras.py                         # float32 and float16, half a minute on two CPU cores
    python examples/cnn_keras.py --precision float16

A Keras model is a pure function, `stateless_call`: `amp.autocast` takes it, and the policies of Keras stay at float32.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

from collections.abc import Callable, Sequence
from typing import Any

import data
import jax
import keras
import numpy as np
import optax
import twins
from keras import layers

import jmp_amp as amp


def block(x: keras.KerasTensor, filters: int) -> keras.KerasTensor:
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    return layers.Activation("relu")(layers.BatchNormalization(momentum=0.9)(x))


def cnn() -> keras.Model:
    """Logits `[batch, 10]` of images `[batch, 8, 8, 1]`."""
    images = keras.Input((8, 8, 1))
    x = block(block(images, 16), 32)
    x = block(layers.MaxPooling2D()(x), 64)
    x = layers.Dropout(0.2)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(images, layers.Dense(10)(x))


def make_train_step(model: keras.Model, tx: optax.GradientTransformation, precision: str) -> Callable[..., Any]:
    def loss_fn(params: list[jax.Array], state: list[jax.Array], images: jax.Array, labels: jax.Array) -> Any:
        logits, state = model.stateless_call(params, state, images, training=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), state

    loss_fn = amp.autocast(loss_fn, precision)

    @jax.jit
    def train_step(params: Any, state: Any, opt_state: Any, images: jax.Array, labels: jax.Array) -> Any:
        value_and_grad = amp.value_and_grad(loss_fn, opt_state=opt_state, has_aux=True)
        (loss, new_state), grads = value_and_grad(params, state, images, labels)
        updates, opt_state = tx.update(grads, opt_state, params)
        state = optax.tree.where(amp.metrics(opt_state)["last_finite"], new_state, state)
        return optax.apply_updates(params, updates), state, opt_state, loss

    return train_step


def train(precision: str, steps: int, seed: int, log: Callable[..., None]) -> twins.Scores:
    rule = amp.LossScale(growth_interval=100) if precision == "float16" else amp.LossScale.none()
    keras.utils.set_random_seed(seed)
    model = cnn()
    tx = amp.dynamic_loss_scale(optax.adamw(optax.cosine_decay_schedule(3e-3, steps)), rule)
    params = [variable.value for variable in model.trainable_variables]
    state = [variable.value for variable in model.non_trainable_variables]  # batch statistics and dropout's seed
    opt_state = tx.init(params)
    images, labels, test_images, test_labels = data.digits()
    train_step = make_train_step(model, tx, precision)
    for _, batch in zip(range(steps), data.batches(images, labels, size=128, seed=seed), strict=False):
        params, state, opt_state, loss = train_step(params, state, opt_state, *batch)
        log(loss=loss, **amp.metrics(opt_state))
    amp.check_health(opt_state, params)
    for variable, value in zip(model.trainable_variables + model.non_trainable_variables, params + state, strict=True):
        variable.assign(value)
    low_model = jax.jit(amp.autocast(model.stateless_call, precision))
    logits, _ = low_model(params, state, test_images)
    predicted = model.predict(test_images, verbose=0)  # Keras's own, in float32
    return {
        "accuracy": float(np.mean(np.argmax(logits, -1) == test_labels)),
        "accuracy of model.predict": float(np.mean(np.argmax(predicted, -1) == test_labels)),
    }


def main(argv: Sequence[str] | None = None) -> dict[str, twins.Scores]:
    return twins.main(train, 300, argv)


if __name__ == "__main__":
    main()
