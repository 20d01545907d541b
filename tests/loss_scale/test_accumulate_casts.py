"""Micro-batches read weights that are cast once a step, and compute what they compute with casts of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxprs import inner_equations

import jmp_amp as amp
from jmp_amp._loss_scale import _grad

pytestmark = pytest.mark.usefixtures("users_code")
STEPS, ROWS, DIM, LAYERS = 4, 60, 8, 2  # no axis of a weight has the size of a micro-batch
KEYS = jax.random.split(jax.random.key(0), 4)
WEIGHTS = {"first": jax.random.normal(KEYS[0], (DIM, DIM)), "layers": jax.random.normal(KEYS[1], (LAYERS, DIM, DIM))}
X = jax.random.normal(KEYS[2], (STEPS * ROWS, DIM))


def layer(x, w):
    return jnp.tanh(x @ w / DIM), None


def loop_over_indices(w, x):
    return lax.fori_loop(0, LAYERS, lambda i, x: layer(x, w["layers"][i])[0], x @ w["first"])


def sharded(w, x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    fun = jax.shard_map(
        lambda w, x: lax.scan(layer, x @ w["first"], w["layers"])[0], mesh=mesh, in_specs=P(), out_specs=P()
    )
    return fun(w, x)


NETS = {
    "unrolled": lambda w, x: layer(layer(x @ w["first"], w["layers"][0])[0], w["layers"][1])[0],
    "transposed and used twice": lambda w, x: x @ w["first"] @ w["first"].T + jnp.sum(w["layers"]),
    "a jitted layer": lambda w, x: (
        jax.jit(layer)(jax.jit(layer)(x, w["first"])[0], w["layers"][0])[0] * w["layers"].sum()
    ),
    "a checkpoint": lambda w, x: jax.checkpoint(layer)(x @ w["first"], w["layers"][0])[0] * w["layers"].sum(),
    "a scan": lambda w, x: lax.scan(layer, x @ w["first"], w["layers"])[0],
    "a scan of checkpoints": lambda w, x: lax.scan(jax.checkpoint(layer), x @ w["first"], w["layers"])[0],
    "a loop over indices": loop_over_indices,
    "a shared weight in a loop": lambda w, x: lax.scan(
        lambda x, _: layer(x, w["first"]), x @ w["layers"][0] @ w["layers"][1], length=3
    )[0],
    "shard_map": sharded,
}


def loss_of(net):
    return amp.autocast(lambda w, x: jnp.mean(net(w, jnp.sin(x)) ** 2))


def casts_of_weights(fun, *args):
    """Returns the shapes of the weights that the loop over micro-batches casts to float16."""
    eqns = jax.make_jaxpr(fun)(*args).eqns
    (loop,) = [eqn for eqn in eqns if eqn.primitive.name == "scan" and eqn.params["length"] == STEPS]
    casts = [eqn for eqn in inner_equations(loop) if eqn.primitive.name == "convert_element_type"]
    pairs = [(eqn.invars[0].aval, eqn.outvars[0].aval) for eqn in casts]
    return [a.shape for a, b in pairs if (a.dtype, b.dtype) == (jnp.float32, jnp.float16) and ROWS not in a.shape]


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", NETS)
def test_the_loop_casts_no_weight_and_its_gradients_are_those_of_a_loop_that_does(name, monkeypatch):
    def evaluate():
        return amp.value_and_grad(loss_of(NETS[name]), accumulate_steps=STEPS, loss_scale=8.0)

    assert casts_of_weights(evaluate(), WEIGHTS, X) == []
    once, eager = jax.jit(evaluate())(WEIGHTS, X), evaluate()(WEIGHTS, X)
    monkeypatch.setattr(_grad, "_is_hoisted", _grad.is_float8_scale)
    assert casts_of_weights(evaluate(), WEIGHTS, X) != []
    each = jax.jit(evaluate())(WEIGHTS, X)
    jax.tree.map(np.testing.assert_array_equal, once, each)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3), eager, each)
    assert {x.dtype for x in jax.tree.leaves(once)} == {np.dtype("float32")}


def equinox_model():
    eqx = pytest.importorskip("equinox", reason="needs Equinox")
    model = eqx.nn.MLP(DIM, DIM, DIM, LAYERS, use_bias=False, use_final_bias=False, key=KEYS[3])
    params, static = eqx.partition(model, eqx.is_array)
    loss_fn = lambda model, x: jnp.mean(jax.vmap(model)(jnp.sin(x)) ** 2)  # noqa: E731
    return params, lambda params: eqx.combine(params, static), loss_fn, eqx.filter_value_and_grad


def nnx_model():
    nnx = pytest.importorskip("flax.nnx", reason="needs Flax")
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(
        nnx.Linear(DIM, DIM, rngs=rngs), nnx.BatchNorm(DIM, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)
    )
    graph, params = nnx.split(model)
    loss_fn = lambda model, x: jnp.mean(model(jnp.sin(x)) ** 2)  # noqa: E731
    return params, lambda params: nnx.merge(graph, params), loss_fn, nnx.value_and_grad


@pytest.mark.parametrize("make", [equinox_model, nnx_model])
def test_weights_of_modules_are_cast_once(make):
    params, rebuild, loss_fn, transform = make()
    evaluate = amp.value_and_grad(amp.autocast(loss_fn), accumulate_steps=STEPS, transform=transform)
    assert casts_of_weights(lambda params, x: evaluate(rebuild(params), x), params, X) == []


def test_casts_to_wider_dtypes_and_of_batches_stay_in_the_loop():
    weights = jax.tree.map(lambda w: w.astype(jnp.float16), WEIGHTS)
    evaluate = amp.value_and_grad(
        lambda w, x: jnp.mean(NETS["a scan"](jax.tree.map(lambda w: w.astype(jnp.float32), w), x)),
        accumulate_steps=STEPS,
    )
    outside = [eqn for eqn in jax.make_jaxpr(evaluate)(weights, X).eqns if eqn.primitive.name == "convert_element_type"]
    assert outside == []


def test_casts_stay_in_the_loop_if_the_copies_were_a_large_part_of_the_memory():
    """A scan whose backward pass casts its slices again holds one of them at a time."""
    weights = {"first": jnp.ones((DIM, 256)), "layers": jnp.ones((16, 256, 256))}
    evaluate = amp.value_and_grad(loss_of(NETS["a scan of checkpoints"]), accumulate_steps=STEPS)
    assert (256, 256) in casts_of_weights(evaluate, weights, X)
    unrolled = amp.value_and_grad(loss_of(NETS["unrolled"]), accumulate_steps=STEPS)  # holds all copies anyway
    assert casts_of_weights(unrolled, weights, X) == []
