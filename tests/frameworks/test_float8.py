"""Models of each framework with float8 products: which ones there are, and the gradient beside float32."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float8_nets import scales_computed
from jaxprs import equations

import jmp_amp as amp
from jmp_amp._products import FLOAT8_DOT

pytestmark = pytest.mark.usefixtures("users_code")
X = jax.random.normal(jax.random.key(0), (32, 64))


def flax_linen():
    nn = pytest.importorskip("flax.linen", reason="needs Flax")
    model = nn.Sequential([nn.Dense(48), nn.gelu, nn.LayerNorm(), nn.Dense(32)])
    return lambda params, x: model.apply(params, x), model.init(jax.random.key(1), X)


def flax_nnx():
    nnx = pytest.importorskip("flax.nnx", reason="needs Flax")
    rngs = nnx.Rngs(0)
    layers = nnx.Linear(64, 48, rngs=rngs), nnx.gelu, nnx.LayerNorm(48, rngs=rngs), nnx.Linear(48, 32, rngs=rngs)
    graph, params = nnx.split(nnx.Sequential(*layers))
    return lambda params, x: nnx.merge(graph, params)(x), params


def equinox():
    eqx = pytest.importorskip("equinox", reason="needs Equinox")
    params, static = eqx.partition(eqx.nn.MLP(64, 32, 48, 1, key=jax.random.key(1)), eqx.is_inexact_array)
    # `vmap` inside: each product of the traced program is of one example, a matrix with a vector.
    return lambda params, x: jax.vmap(eqx.combine(params, static))(x), params


def haiku():
    hk = pytest.importorskip("haiku", reason="needs Haiku")
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([48, 32])(x)))
    return model.apply, model.init(jax.random.key(1), X)


def keras():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras", reason="needs Keras")
    layers = [keras.Input((64,)), keras.layers.Dense(48, "gelu"), keras.layers.Dense(32)]
    model = keras.Sequential(layers)
    params, others = ([v.value for v in vs] for vs in (model.trainable_variables, model.non_trainable_variables))
    return lambda params, x: model.stateless_call(params, others, x)[0], params


def plain_jax():
    params = {"w": jax.random.normal(jax.random.key(1), (64, 48)), "v": jax.random.normal(jax.random.key(2), (48, 32))}
    return lambda params, x: jax.nn.gelu(x @ params["w"] / 8) @ params["v"] / 7, params


@pytest.mark.sweep(4)
@pytest.mark.parametrize("make", [flax_linen, flax_nnx, equinox, haiku, keras, plain_jax])
def test_trains_in_float8(make, monkeypatch):
    monkeypatch.setenv("JMP_AMP_EMULATE_FLOAT8", "1")
    apply, params = make()

    def loss_fn(params, x):
        return jnp.mean((apply(params, x) - 1) ** 2)

    low = amp.autocast(loss_fn, "float8", rules={"*": "float8"})
    products = [eqn for eqn in equations(jax.grad(low), params, X) if eqn.primitive.name == FLOAT8_DOT]
    assert len(products) == 5  # two forward, three backward: nothing asks for the gradient of `X`
    got, want = jax.jit(jax.grad(low))(params, X), jax.grad(loss_fn)(params, X)
    got, want = (np.concatenate([np.ravel(x) for x in jax.tree.leaves(grads)]) for grads in (got, want))
    assert np.linalg.norm(got - want) < 0.12 * np.linalg.norm(want)


def test_scales_of_a_module_are_computed_once_for_all_micro_batches():
    nnx = pytest.importorskip("flax.nnx", reason="needs Flax")
    rngs = nnx.Rngs(0)
    net = nnx.Sequential(nnx.Linear(64, 48, rngs=rngs), nnx.BatchNorm(48, rngs=rngs), nnx.Linear(48, 32, rngs=rngs))
    low = amp.autocast(lambda net, x: jnp.mean(net(jnp.sin(x)) ** 2), "float8", rules={"*": "float8"})
    gradients = amp.value_and_grad(low, accumulate_steps=2, transform=nnx.value_and_grad)
    assert scales_computed(jax.make_jaxpr(gradients)(net, X)) == 2
