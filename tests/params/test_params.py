import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from normed_net import batch, initial_params, loss_fn, train_step

import jmp_amp as amp


def dtypes(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x.dtype.name for path, x in leaves(tree)}


def leaves(tree):
    return jax.tree.leaves_with_path(tree)


NORMS = [
    "LayerNorm_0", "BatchNorm_12", "RMSNorm_0", "GroupNorm", "layer_norm", "mlp/~/batch_norm", "norm1", "layernorm",
    "bn", "bn1", "ln_f", "ln1", "encoder.bn_2", "final_norm", "ln_1", "gn1", "norms", "BatchNorm2d", "LN", "preNorm",
    "input_layernorm", "post_attention_layernorm", "q_norm", "norm_proj", "bn_init", "final_layer_norm", "rms_norm",
    "batch_normalization_3/gamma", "layer_normalization", "BatchNormalization", "normalizer", "normalisation",
]  # fmt: skip
OTHERS = [
    "Dense_0", "kernel", "w", "embed", "attn", "lnear", "bnet", "Conv_3", "nor", "logits", "normal_head", "normal",
    "abnormal", "NormalHead", "surface_normals", "lognormal", "enormous", "BNet", "LNet", "column_2", "global_norma",
]  # fmt: skip


@pytest.mark.parametrize("name", NORMS + OTHERS)
def test_norms_are_known_by_their_names(name):
    tree = {"model": {name: {"scale": jnp.ones(2)}}}
    ((path, leaf),) = leaves(tree)
    assert amp.is_norm(path, leaf) is (name in NORMS)


def test_norms_of_classes_are_known_by_their_attributes():
    assert amp.is_norm((jax.tree_util.GetAttrKey("norm1"), jax.tree_util.SequenceKey(0)), None)
    assert not amp.is_norm((jax.tree_util.GetAttrKey("dense"), jax.tree_util.SequenceKey(0)), None)


def linen():
    nn = pytest.importorskip("flax.linen", reason="needs Flax")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            for layer in (nn.LayerNorm(), nn.BatchNorm(True), nn.RMSNorm(), nn.GroupNorm(1), nn.InstanceNorm()):
                x = nn.Dense(4)(layer(x))
            return nn.Dense(2, name="normal_head")(x)

    return Net().init(jax.random.key(0), jnp.ones((2, 3, 4)))


def haiku():
    hk = pytest.importorskip("haiku", reason="needs Haiku")

    def net(x):
        for layer in (hk.LayerNorm(-1, True, True), hk.RMSNorm(-1), hk.GroupNorm(1), hk.InstanceNorm(True, True)):
            x = hk.Linear(4)(layer(x))
        return hk.Linear(2, name="normal_head")(hk.BatchNorm(True, True, 0.9)(x, True))

    return hk.transform_with_state(net).init(jax.random.key(0), jnp.ones((2, 3, 4)))


def equinox():
    eqx = pytest.importorskip("equinox", reason="needs Equinox")

    class Net(eqx.Module):
        layernorm: eqx.nn.LayerNorm
        norms: list
        bn: eqx.nn.BatchNorm
        normal_head: eqx.nn.Linear

    key, norms = jax.random.key(0), [eqx.nn.RMSNorm(4), eqx.nn.GroupNorm(1, 4)]
    return Net(eqx.nn.LayerNorm(4), norms, eqx.nn.BatchNorm(4, "x", mode="ema"), eqx.nn.Linear(4, 2, key=key))


def nnx():
    nnx = pytest.importorskip("flax.nnx", reason="needs Flax")
    rngs = nnx.Rngs(0)

    class Net(nnx.Module):
        def __init__(self):
            self.norm1, self.ln_2 = nnx.LayerNorm(4, rngs=rngs), nnx.RMSNorm(4, rngs=rngs)
            self.batch_norm, self.normal_head = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)

    return nnx.state(Net(), nnx.Any(nnx.Param, nnx.BatchStat))


def keras():
    keras = pytest.importorskip("keras", reason="needs Keras")
    if keras.backend.backend() != "jax":
        pytest.skip("needs Keras on JAX")
    norms = [keras.layers.BatchNormalization(), keras.layers.LayerNormalization(), keras.layers.GroupNormalization(1)]
    layers = [keras.Input((3, 4)), *norms, keras.layers.RMSNormalization(), keras.layers.Dense(2, name="normal_head")]
    return {x.path: x.value for x in keras.Sequential(layers).variables if x.dtype == "float32"}


@pytest.mark.parametrize("parameters", [linen, haiku, equinox, nnx, keras])
def test_norms_of_the_libraries_are_known(parameters):
    arrays = [(path, x) for path, x in leaves(parameters()) if getattr(x, "dtype", None) == jnp.float32]
    others = [path for path, x in arrays if not amp.is_norm(path, x)]
    assert 0 < len(others) < len(arrays)
    assert others == [path for path, _ in arrays if re.search("linear|Dense|normal_head", jax.tree_util.keystr(path))]


PARAMS = {
    "dense": {"w": np.ones((2, 2), np.float32), "b": jnp.ones(2)},
    "LayerNorm_0": {"scale": jnp.ones(2)},
    "steps": jnp.int32(3),
    "name": "model",
    "none": None,
}


@pytest.mark.parametrize(("policy", "dtype"), [("O2", "float16"), ("p=bf16", "bfloat16"), ("O0", "float32")])
def test_floating_parameters_are_cast_and_norms_are_not(policy, dtype):
    cast = amp.cast_params(PARAMS, policy)
    assert cast["dense"]["w"].dtype == cast["dense"]["b"].dtype == dtype
    assert cast["LayerNorm_0"] is not PARAMS["LayerNorm_0"]
    assert cast["LayerNorm_0"]["scale"] is PARAMS["LayerNorm_0"]["scale"]
    assert (cast["steps"].dtype, cast["name"], cast["none"]) == (jnp.int32, "model", None)


def test_what_is_kept_can_be_said():
    cast = amp.cast_params(PARAMS, "O2", keep=lambda path, x: x is PARAMS["dense"]["b"])
    assert dtypes({"dense": cast["dense"], "LayerNorm_0": cast["LayerNorm_0"]}) == {
        "LayerNorm_0/scale": "float16",
        "dense/b": "float32",
        "dense/w": "float16",
    }
    everything = amp.cast_params(PARAMS, "O3", keep=lambda path, x: False)
    assert everything["LayerNorm_0"]["scale"].dtype == jnp.float16


OPTIONS = [{}, {"remainder": True}, {"masters": False}, {"masters": False, "rounding": "stochastic"}]


@pytest.mark.sweep(9)
@pytest.mark.parametrize("wrap", [lambda tx: tx, amp.dynamic_loss_scale], ids=["alone", "scaled"])
@pytest.mark.parametrize("jit", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_parameters_of_every_dtype_are_updated_without_promotion(options, jit, wrap):
    params = {str(dtype): jnp.array([1, -2], dtype) for dtype in ("float16", "bfloat16", "float32", "complex64")}
    tx = wrap(amp.low_precision_params(optax.sgd(0.5), **options))
    state = tx.init(params)
    for _ in range(2):
        grads = jax.tree.map(lambda x: x * 2**14, params)
        updates, state = jit(tx.update)(grads, state, params)
        params = jax.tree.map(lambda p, u: (p.astype(u.dtype) + u).astype(p.dtype), params, updates)
    assert all(str(x.dtype) == name for name, x in params.items())


@pytest.mark.usefixtures("users_code")
def test_a_model_with_low_precision_parameters_trains_like_one_in_float32():
    def train(loss_fn, params, tx):
        state, step = tx.init(params), jax.jit(train_step(loss_fn, tx))
        for _ in range(50):
            params, state, loss = step(params, state, *batch())
        return params, loss

    params, adam = initial_params(), optax.adam(1e-2)
    _, expected = train(loss_fn, params, amp.dynamic_loss_scale(adam, amp.LossScale.none()))
    low = amp.cast_params(params, "O2")
    trained, loss = train(amp.autocast(loss_fn), low, amp.dynamic_loss_scale(amp.low_precision_params(adam)))
    np.testing.assert_allclose(loss, expected, rtol=5e-2)
    assert loss < loss_fn(params, *batch()) / 2
    assert dtypes(trained) == {"in": "float16", "norm": "float32", "out": "float16"}
