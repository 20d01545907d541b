"""An MLP of two layers without biases in float8, by each library that has it.

Every function returns `(loss_fn, args)`, the arguments as shapes. One whose library is missing raises `ImportError`.
"""

import functools
import os

import jax
import jax.numpy as jnp
from models import F32, Shape, mlp_case

import jmp_amp as amp

os.environ.setdefault("KERAS_BACKEND", "jax")

TOKENS, DIM, HIDDEN = 8192, 4096, 16384


def autocast(dtype):
    loss_fn, args = mlp_case(None, TOKENS, DIM, HIDDEN)
    return amp.autocast(loss_fn, dtype), args


def linen_mlp(**options):
    from flax import linen as nn

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x):
            dense = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16, **options)
            return dense(DIM)(jax.nn.relu(dense(HIDDEN)(x)))

    return MLP()


def linen(model):
    x = Shape((TOKENS, DIM), F32)
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    return lambda variables, x: mean_square(model.apply(variables, x)), (variables, x)


def flax_float8(name):
    from flax.linen import fp8_ops

    return linen(linen_mlp(dot_general_cls=getattr(fp8_ops, name)))


def qwix_float8():
    import qwix

    e4m3 = jnp.float8_e4m3fn
    rule = qwix.QtRule(weight_qtype=e4m3, act_qtype=e4m3, bwd_qtype=e4m3)
    return linen(qwix.quantize_model(linen_mlp(), qwix.QtProvider([rule])))


def keras_float8():
    import keras

    dense = functools.partial(keras.layers.Dense, use_bias=False, dtype="mixed_bfloat16")
    model = keras.Sequential([keras.Input((DIM,)), dense(HIDDEN, activation="relu"), dense(DIM)])
    model.quantize("float8")
    params = [Shape(x.shape, x.dtype) for x in model.trainable_variables]

    def loss_fn(params, x):
        return mean_square(model.stateless_call(params, [], x, training=True)[0])

    return loss_fn, (params, Shape((TOKENS, DIM), F32))


def mean_square(x):
    return jnp.mean(jnp.square(x.astype(F32)))


LIBRARIES = {
    "autocast, bfloat16": lambda: autocast("bfloat16"),
    "autocast, float8": lambda: autocast("float8"),
    "qwix, a scale for each channel": qwix_float8,
    "Flax, `Fp8DirectDotGeneralOp`": lambda: flax_float8("Fp8DirectDotGeneralOp"),
    "Flax, `Fp8DotGeneralOp`": lambda: flax_float8("Fp8DotGeneralOp"),
    'Keras, `quantize("float8")`': keras_float8,
}
