"""Models of Haiku under autocast: layers, state, loops, rules for module scopes."""

import jax
import jax.numpy as jnp
import pytest
from agreement import FULL, FULL_UNARY, LOW, check_modules, check_rows
from checkpoints import keeps_the_users_plan

import jmp_amp as amp

hk = pytest.importorskip("haiku", reason="needs Haiku")

pytestmark = pytest.mark.usefixtures("users_code")

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (4, 6, 8))
IMAGES = jax.random.normal(KEY, (4, 6, 6, 3))


class Norms(hk.Module):
    def __call__(self, x):
        for norm in (hk.LayerNorm(-1, True, True), hk.RMSNorm(-1), hk.GroupNorm(2)):
            x = jax.nn.relu(norm(hk.Linear(8)(x)))
        return hk.Linear(3)(hk.Linear(8, name="inner")(x))


def norms(x):
    return Norms()(x)


def convolutions(x):
    x = jax.nn.relu(hk.Conv2D(4, 3)(x))
    x = jax.nn.relu(hk.BatchNorm(True, True, 0.9)(hk.Conv2D(4, 3)(x), is_training=True))
    x = hk.max_pool(hk.Conv2DTranspose(4, 3, 2)(x), (2, 2, 1), (2, 2, 1), "VALID")
    return hk.Linear(5)(jnp.mean(hk.Conv2D(8, 3)(x), (1, 2)))


def recurrent(x):
    core = hk.DeepRNN([hk.LSTM(8), jax.nn.relu, hk.GRU(8)])
    return hk.Linear(3)(hk.dynamic_unroll(core, x, core.initial_state(4), time_major=False)[0])


def transformer(x):
    mask = jnp.tril(jnp.ones((6, 6)))[None, None]

    def block(x):
        h = hk.LayerNorm(-1, True, True)(x)
        x = x + hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling())(h, h, h, mask=mask)
        h = hk.dropout(hk.next_rng_key(), 0.5, hk.LayerNorm(-1, True, True)(x))
        return x + hk.Linear(8)(jax.nn.gelu(hk.Linear(16)(h)))

    return hk.Linear(3)(hk.layer_stack(2)(hk.remat(block))(x))


def setup(model, x):
    """Parameters, state, and a loss of them that returns the model's output and new state."""
    transformed = hk.transform_with_state(model)

    def loss(params, state, x):
        out, state = transformed.apply(params, state, jax.random.key(1), x)
        return jnp.mean(out**2), (out, state)

    return *jax.jit(transformed.init)(KEY, x), loss


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("model", "x", "expected"),
    [
        (norms, X, {("add", "jvp(norms)/inner"): LOW, ("add", "jvp(norms)/layer_norm"): FULL}),
        (convolutions, IMAGES, {("add", "jvp(conv2_d)"): LOW, ("rsqrt", "batch_norm"): FULL_UNARY}),
        # The gates multiply states that add up, so they are evaluated in float32; the products are low all the same.
        (recurrent, X, {("mul", "lstm"): FULL, ("mul", "gru"): FULL}),
        (transformer, X, {("add", "multi_head_attention/value"): LOW, ("rsqrt", "layer_norm"): FULL_UNARY}),
    ],
)
def test_model_and_its_state_are_close_to_float32(model, x, expected):
    params, state, loss = setup(model, x)
    check_rows(expected, loss, params, state, x)


@pytest.mark.parametrize("pattern", ["*/layer_norm*", "layer_norm", "norms/layer_*"])
def test_patterns_match_modules(pattern):
    params, state, loss = setup(norms, X)
    # A pattern that matches nothing warns, and warnings are errors here.
    fun = amp.autocast(loss, rules={pattern: "full", "linear_[12]": "bfloat16", "*/linear_3": "full"})
    check_modules(fun, params, state, X, norm="layer_norm")


def test_remat_decides_what_is_kept():
    def model(x):
        return hk.layer_stack(2)(hk.remat(lambda x: x + hk.Linear(8)(jax.nn.gelu(hk.Linear(16)(x)))))(x)

    model = hk.without_apply_rng(hk.transform(model))
    x = jnp.ones((4, 8))
    params = model.init(KEY, x)
    assert keeps_the_users_plan(lambda params: jnp.mean(jnp.square(model.apply(params, x))), params)
