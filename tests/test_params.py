import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp


def dtypes(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x.dtype.name for path, x in leaves(tree)}


def leaves(tree):
    return jax.tree.leaves_with_path(tree)


NORMS = [
    "LayerNorm_0", "BatchNorm_12", "RMSNorm_0", "GroupNorm", "layer_norm", "mlp/~/batch_norm", "norm1", "layernorm",
    "bn", "bn1", "ln_f", "ln1", "encoder.bn_2", "final_norm",
]  # fmt: skip
OTHERS = ["Dense_0", "kernel", "w", "embed", "attn", "lnear", "bnet", "Conv_3", "nor", "logits"]


@pytest.mark.parametrize("name", NORMS + OTHERS)
def test_norms_are_known_by_their_names(name):
    tree = {"model": {name: {"scale": jnp.ones(2)}}}
    ((path, leaf),) = leaves(tree)
    assert amp.is_norm(path, leaf) is (name in NORMS)


def test_norms_of_classes_are_known_by_their_attributes():
    assert amp.is_norm((jax.tree_util.GetAttrKey("norm1"), jax.tree_util.SequenceKey(0)), None)
    assert not amp.is_norm((jax.tree_util.GetAttrKey("dense"), jax.tree_util.SequenceKey(0)), None)


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


@pytest.mark.usefixtures("users_code")
def test_a_model_with_low_precision_parameters_trains_like_one_in_float32():
    rng = np.random.default_rng(0)
    params = {
        "in": rng.normal(size=(4, 16)).astype(np.float32) / 2,
        "norm": np.ones(16, np.float32),
        "out": rng.normal(size=(16, 1)).astype(np.float32) / 4,
    }
    x = rng.normal(size=(64, 4)).astype(np.float32)
    y = np.sin(x.sum(1, keepdims=True))

    def loss_fn(params, x, y):
        h = jnp.tanh(x @ params["in"])
        h = (h - h.mean(-1, keepdims=True)) / h.std(-1, keepdims=True) * params["norm"]
        return jnp.mean((h @ params["out"] - y) ** 2)

    def train(loss_fn, params, tx):
        state = tx.init(params)

        @jax.jit
        def step(params, state):
            loss, grads = amp.value_and_grad(loss_fn, loss_scale=amp.get_loss_scale(state))(params, x, y)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        for _ in range(50):
            params, state, loss = step(params, state)
        return params, loss

    adam = optax.adam(1e-2)
    _, expected = train(loss_fn, params, amp.dynamic_loss_scale(adam, amp.LossScale.none()))
    low = amp.cast_params(params, "O2")
    trained, loss = train(amp.autocast(loss_fn), low, amp.dynamic_loss_scale(amp.low_precision_params(adam)))
    np.testing.assert_allclose(loss, expected, rtol=5e-2)
    assert loss < loss_fn(params, x, y) / 2
    assert dtypes(trained) == {"in": "float16", "norm": "float32", "out": "float16"}
