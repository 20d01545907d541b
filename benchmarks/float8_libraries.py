"""Layers without biases in float8, by each library that has it; one whose library is missing raises `ImportError`.

The functions of `LIBRARIES` return an MLP of two layers as `(loss_fn, args)`, the arguments as shapes, those of
`LAYERS` one layer of a bfloat16 input and a float32 weight, which returns bfloat16.
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


def qwix_rule():
    import qwix

    return qwix.QtRule(**dict.fromkeys(["weight_qtype", "act_qtype", "bwd_qtype"], jnp.float8_e4m3fn))


def qwix_float8():
    import qwix

    return linen(qwix.quantize_model(linen_mlp(), qwix.QtProvider([qwix_rule()])))


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


def autocast_layer(dtype):
    return amp.autocast(lambda x, w: x @ w, f"params=bfloat16,compute={dtype},output=bfloat16")


def jax_mxfp8_layer():
    configs = [jax.nn.get_scaled_dot_general_config("mxfp8")] * 3
    dot = functools.partial(
        jax.nn.scaled_dot_general,
        dimension_numbers=(((1,), (0,)), ((), ())),
        preferred_element_type=jnp.bfloat16,
        configs=configs,
    )
    return lambda x, w: dot(x, w.astype(jnp.bfloat16))


def qwix_layer():
    import qwix
    from flax import linen as nn

    layer = qwix.quantize_model(nn.Dense(DIM, use_bias=False, dtype=jnp.bfloat16), qwix.QtProvider([qwix_rule()]))
    return lambda x, w: layer.apply({"params": {"kernel": w}}, x)


BY_KERNEL = "autocast, mxfp8, cast by a kernel"

LAYERS = {
    "autocast, bfloat16": lambda: autocast_layer("bfloat16"),
    "autocast, float8": lambda: autocast_layer("float8"),
    "autocast, mxfp8": lambda: autocast_layer("mxfp8"),
    BY_KERNEL: lambda: autocast_layer("mxfp8"),
    "`jax.nn.scaled_dot_general`, mxfp8": jax_mxfp8_layer,
    "qwix, float8, a scale for each channel": qwix_layer,
}
