"""Modules of Flax NNX under autocast, as arguments and split into graph and state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import FULL_UNARY, LOW, assert_close, check_rows, loss_fn
from checkpoints import keeps_the_users_plan
from jaxprs import dtypes

import jmp_amp as amp

nnx = pytest.importorskip("flax.nnx", reason="needs Flax")

pytestmark = pytest.mark.usefixtures("users_code")

EXPECTED = {("add", "jvp(biased)"): LOW, ("rsqrt",): FULL_UNARY}
IMAGES = jax.random.normal(jax.random.key(0), (2, 6, 6, 4))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.inner = nnx.Linear(8, 8, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.layer_norm = nnx.LayerNorm(8, rngs=rngs)
        self.outer = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        with jax.named_scope("biased"):
            x = nnx.relu(self.conv(x))
        x = self.dropout(self.batch_norm(self.inner(x))).reshape(2, -1, 8)
        mask = nnx.make_causal_mask(x[..., 0])
        return self.outer(nnx.relu(self.layer_norm(x + self.attention(x, mask=mask))))


class Small(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 8, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.outer = nnx.Linear(8, 5, rngs=rngs)

    def __call__(self, x):
        return self.outer(nnx.relu(self.dropout(self.batch_norm(self.inner(x)))))


def state_of(model):
    return jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param)))


def test_module_is_an_argument():
    model = Net(nnx.Rngs(0))
    model.eval()
    check_rows(EXPECTED, loss_fn, model, IMAGES, transform=nnx.value_and_grad)


def test_split_module_returns_its_new_state():
    graph, params, state = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def pure(params, state, x):
        state = jax.tree.map(lambda x: x, state)  # NNX wants Variables that were made in the same transformation
        model = nnx.merge(graph, params, state)
        loss, out = loss_fn(model, x)
        return loss, (out, nnx.state(model, nnx.Not(nnx.Param)))

    # The dropout keys and counts come out too, and must be those of float32.
    check_rows(EXPECTED, pure, params, state, IMAGES)


def pure_inside(model, x):
    """Carries the state over autocast's border by hand."""
    graph, params, state = nnx.split(model, nnx.Param, ...)

    @amp.autocast
    def pure(params, state, x):
        model = nnx.merge(graph, params, state)
        return *loss_fn(model, x), nnx.state(model, nnx.Not(nnx.Param))

    loss, out, state = pure(params, state, x)
    nnx.update(model, state)
    return loss, out


@pytest.mark.parametrize(
    "autocast",
    [pure_inside, amp.autocast(loss_fn)],
    ids=["pure inside", "module as an argument"],
)
def test_running_statistics_and_dropout_counts_are_updated_in_place(autocast):
    plain, low = Small(nnx.Rngs(0)), Small(nnx.Rngs(0))
    for _ in range(2):
        want = nnx.jit(nnx.value_and_grad(loss_fn, has_aux=True))(plain, IMAGES)
        scaled = amp.value_and_grad(autocast, has_aux=True, loss_scale=8.0, transform=nnx.value_and_grad)
        (loss, out), grads = nnx.jit(scaled)(low, IMAGES)
    assert_close(((loss, out), jax.tree.map(lambda g: g / 8, grads)), want)
    assert_close(state_of(low), state_of(plain))


@pytest.mark.parametrize("call", [lambda m, x: m(x), Small.__call__], ids=["function", "method"])
def test_composes_with_nnx_jit_either_way_round(call):
    model = Small(nnx.Rngs(0))
    model.eval()
    want = model(IMAGES)
    graph, state = nnx.split(model)
    for fun in (amp.autocast(call), nnx.jit(amp.autocast(call)), amp.autocast(nnx.jit(call))):
        assert_close(fun(model, IMAGES), want)
        products = dtypes(lambda s, x, f=fun: f(nnx.merge(graph, s), x), state, IMAGES, primitive="dot_general")
        assert products == [LOW, LOW]


def test_module_or_its_method_is_the_function():
    plain = Small(nnx.Rngs(0))
    want = plain(IMAGES)
    for function_of in (lambda m: m, lambda m: m.__call__):
        low = Small(nnx.Rngs(0))
        assert_close(amp.autocast(function_of(low))(IMAGES), want)
        assert_close(state_of(low), state_of(plain))


def test_mutating_a_module_that_is_closed_over_is_an_error_of_flax():
    model = Small(nnx.Rngs(0))
    errors = pytest.importorskip("flax.errors")
    with pytest.raises(errors.TraceContextError):
        amp.autocast(lambda x: model(x))(IMAGES)
    assert np.all(model.batch_norm.mean[...] == 0)


@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: amp.explain(loss_fn)(model, x),
        lambda model, x: amp.explain(model)(x),
        lambda model, x: amp.explain(model.__call__)(x),
    ],
    ids=["argument", "module", "method"],
)
def test_explaining_a_module_leaves_it_as_it_was(call):
    model = Small(nnx.Rngs(0))
    before = state_of(model)
    report = call(model, IMAGES[0, :, 0])
    assert {row.compute for row in report.select(primitive="dot_general").rows} == {"float16"}
    assert all(x is y for x, y in zip(state_of(model), before, strict=True))


def test_remat_decides_what_is_kept():
    @nnx.vmap(in_axes=0)
    def layers(rngs):
        return nnx.Sequential(nnx.Linear(8, 16, rngs=rngs), nnx.gelu, nnx.Linear(16, 8, rngs=rngs))

    graph, params, rest = nnx.split(layers(nnx.Rngs(0).split(3)), nnx.Param, ...)

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    @nnx.remat
    def run(x, layer):
        return x + layer(x)

    def loss(params):
        return jnp.mean(jnp.square(run(jnp.ones((4, 8)), nnx.merge(graph, params, rest))))

    assert keeps_the_users_plan(loss, params)
