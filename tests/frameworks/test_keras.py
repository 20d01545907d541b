"""Models of Keras, on its JAX backend, under autocast through `stateless_call`."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agreement import FULL_UNARY, LOW, PRODUCTS, assert_close, check_rows
from jaxprs import row, scoped_equations

import jmp_amp as amp

if os.environ.setdefault("KERAS_BACKEND", "jax") != "jax":
    pytest.skip("needs Keras on its JAX backend", allow_module_level=True)
keras = pytest.importorskip("keras", reason="needs Keras")
if keras.backend.backend() != "jax":
    pytest.skip("needs Keras on its JAX backend", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("users_code")

LABELS = jnp.arange(16) % 5


def dense():
    inputs = keras.Input((6, 8))
    x = keras.layers.Dense(8, activation="relu", name="inner")(inputs)
    x = keras.layers.Dense(8)(x)
    x = keras.layers.BatchNormalization(momentum=0.9, name="batch_norm")(x)
    x = keras.layers.Dropout(0.5)(x)
    h = keras.layers.LayerNormalization(name="layer_norm")(x)
    x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(2, 4)(h, h, use_causal_mask=True)])
    x = keras.layers.LSTM(8)(x)
    return keras.Model(inputs, keras.layers.Dense(5)(x))


def convolutional():
    layers = [
        keras.Input((8, 8, 3)),
        keras.layers.Conv2D(4, 3, activation="tanh", name="inner"),
        keras.layers.DepthwiseConv2D(2),
        keras.layers.BatchNormalization(momentum=0.9, name="batch_norm"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(5),
    ]
    return keras.Sequential(layers)


def loss_of(model, training):
    def loss(params, state, x):
        logits, state = model.stateless_call(params, state, x, training=training)
        labels = LABELS[: len(logits)]
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels)), (logits, state)

    return loss


def values(model):
    return [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]


def data(model, size):
    return jax.random.normal(jax.random.key(0), (size, *model.input_shape[1:]))


@pytest.mark.sweep(4)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("build", [dense, convolutional])
def test_model_and_its_state_are_close_to_float32(build, training):
    keras.utils.set_random_seed(0)
    model = build()
    # The state holds the seeds of the dropout too, which must be those of float32.
    expected = {("add", "jvp(inner)"): LOW, ("rsqrt",): FULL_UNARY}
    check_rows(expected, loss_of(model, training), *values(model), data(model, 4))


@pytest.mark.slow
def test_application_is_as_close_to_float32_as_float32_with_rounded_inputs():
    """The batch norms of an untrained network magnify any rounding: float32 is not closer to itself."""
    keras.utils.set_random_seed(0)
    model = keras.applications.MobileNet(
        (32, 32, 3), alpha=0.25, weights=None, classes=5, dropout=0.0, classifier_activation=None
    )
    args = (*values(model), data(model, 16))
    loss = loss_of(model, training=True)
    exact = jax.jit(jax.value_and_grad(loss, has_aux=True))
    low = jax.jit(jax.value_and_grad(amp.autocast(loss), has_aux=True))

    want, got = exact(*args), low(*args)
    noise = errors(exact(*jax.tree.map(rounded, args)), want)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(got))
    assert all(e < 3 * n for e, n in zip(errors(got, want), noise, strict=True))
    products = {row(e) for _, e in scoped_equations(low, *args) if e.primitive.name in PRODUCTS}
    assert products == {LOW}

    evaluated = loss_of(model, training=False)
    assert_close(jax.jit(amp.autocast(evaluated))(*args), jax.jit(evaluated)(*args))


def rounded(x):
    x = np.asarray(x)
    return x.astype(np.float16).astype(np.float32) if x.dtype == np.float32 else x


def errors(got, want):
    """The norms of what differs in the results, in the state and in the gradients."""
    (_, got), (_, want) = ((loss, (*aux, grads)) for (loss, aux), grads in (got, want))
    return [
        np.linalg.norm([np.linalg.norm(np.subtract(x, y)) for x, y in zip(*map(jax.tree.leaves, pair), strict=True)])
        for pair in zip(got, want, strict=True)
    ]
