"""Modules of Equinox under autocast: as arguments with static fields, vmapped, stateful, in its own loops."""

import functools

import jax
import jax.numpy as jnp
import pytest
from agreement import FULL_UNARY, LOW, assert_close, check, check_rows, loss_fn
from checkpoints import keeps_the_users_plan
from jaxprs import dtypes

import jmp_amp as amp

eqx = pytest.importorskip("equinox", reason="needs Equinox")

pytestmark = pytest.mark.usefixtures("users_code")

KEYS = jax.random.split(jax.random.key(0), 8)
X = jax.random.normal(KEYS[0], (4, 6, 8))
IMAGES = jax.random.normal(KEYS[0], (4, 3, 6, 6))


class Layers(eqx.Module):
    """Applies its layers in turn; `over` says how many leading axes each of them is vmapped over."""

    layers: list
    over: tuple[int, ...] = eqx.field(static=True)
    activation: str = eqx.field(static=True, default="relu")

    def __call__(self, x):
        for i, (layer, axes) in enumerate(zip(self.layers, self.over, strict=True)):
            for _ in range(axes):
                layer = jax.vmap(layer)
            with jax.named_scope(f"layer{i}"):
                x = layer(x)
            x = getattr(jax.nn, self.activation)(x)
        return x


def linear(i, size=8):
    return eqx.nn.Linear(8, size, key=KEYS[i])


class Recurrent(eqx.Module):
    cell: eqx.nn.GRUCell

    def __call__(self, xs):
        def over_time(xs):
            return jax.lax.scan(lambda h, x: (self.cell(x, h),) * 2, jnp.zeros(8), xs)[1]

        with jax.named_scope("layer0"):
            return jax.vmap(over_time)(xs)


class Repeated(eqx.Module):
    """A loop of Equinox that can be differentiated backward, with a checkpointed body and an error check inside."""

    linear: eqx.nn.Linear
    kind: str = eqx.field(static=True)

    def __call__(self, x):
        @eqx.filter_checkpoint
        def body(carry):
            step, x = carry
            with jax.named_scope("layer0"):
                x = jnp.tanh(jax.vmap(jax.vmap(self.linear))(x))
            return step + 1, eqx.error_if(x, jnp.any(x > 2), "tanh is at most 1")

        return eqx.internal.while_loop(lambda carry: carry[0] < 3, body, (0, x), kind=self.kind, max_steps=4)[1]


MODELS = {
    "mlp": lambda: (
        Layers([eqx.nn.MLP(8, 8, 16, 2, activation=jax.nn.gelu, key=KEYS[1]), linear(2)], (2, 2), "tanh"),
        X,
        {"add": LOW},
    ),
    "norms": lambda: (
        Layers(
            [
                *(linear(1), linear(2), eqx.nn.LayerNorm(8)),
                *(linear(3), eqx.nn.RMSNorm(8)),
                *(linear(4), eqx.nn.GroupNorm(2, 8)),
                linear(5),
            ],
            (2,) * 8,
        ),
        X,
        {"add": LOW},
    ),
    "convolutions": lambda: (
        Layers(
            [
                eqx.nn.Conv2d(3, 4, 3, key=KEYS[1]),
                eqx.nn.ConvTranspose2d(4, 4, 3, key=KEYS[2]),
                eqx.nn.GroupNorm(2, 4),
                eqx.nn.MaxPool2d(2, 2),
                eqx.nn.Conv2d(4, 2, 3, key=KEYS[3]),
            ],
            (1, 1, 1, 1, 1),
        ),
        IMAGES,
        {"add": LOW},
    ),
    "embedding": lambda: (
        Layers([eqx.nn.Embedding(16, 8, key=KEYS[1]), linear(2), linear(3)], (2, 2, 2)),
        jnp.arange(16).reshape(4, 4),
        {},
    ),
    "gru": lambda: (Recurrent(eqx.nn.GRUCell(8, 8, key=KEYS[1])), X, {"logistic": FULL_UNARY}),
    "checkpointed loop": lambda: (Repeated(linear(1), "checkpointed"), X, {}),
    "bounded loop": lambda: (Repeated(linear(1), "bounded"), X, {"tanh": "float16 -> float16"}),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", MODELS)
def test_module_is_an_argument_and_close_to_float32(name):
    model, x, expected = MODELS[name]()
    expected = {(primitive, "layer0"): dtypes for primitive, dtypes in expected.items()}
    check_rows(expected, loss_fn, model, x, transform=eqx.filter_value_and_grad)


def test_state_of_batch_norm_is_returned_in_float32_and_close():
    def init():
        return eqx.nn.BatchNorm(8, axis_name="batch", mode="batch"), linear(1), linear(2)

    layers, state = eqx.nn.make_with_state(init)()

    def loss(layers, state, x):
        def model(x, state):
            norm, inner, outer = layers
            x, state = norm(inner(x), state)
            return outer(jax.nn.relu(x)), state

        out, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean(out**2), (out, state)

    check_rows({("sqrt",): FULL_UNARY}, loss, layers, state, X[0], transform=eqx.filter_value_and_grad)


@pytest.mark.parametrize("around", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_a_model_that_is_made_inside_is_the_one_made_without_autocast(around):
    def init(x):
        model, state = eqx.nn.make_with_state(
            lambda: [
                eqx.nn.BatchNorm(8, "batch", mode="batch"),
                eqx.nn.LayerNorm(8),
                eqx.nn.BatchNorm(8, "b", mode="ema"),
            ]
        )()
        return model, state, jax.vmap(linear(1))(x)

    got, want = around(amp.autocast(init))(X[0])[:2], around(init)(X[0])[:2]
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert list(map(type, jax.tree.leaves(got))) == list(map(type, jax.tree.leaves(want)))
    assert eqx.tree_equal(got, want)


def test_dropout_draws_the_same_mask():
    def loss(model, x, key):
        out = eqx.nn.Dropout(0.5)(jax.vmap(jax.vmap(model))(x), key=key)
        return jnp.mean(out**2), (out, out == 0)

    check(loss, linear(1), X, KEYS[1], transform=eqx.filter_value_and_grad)


@pytest.mark.parametrize("x", [1.0, -1.0])
def test_error_if_raises_as_it_does_without_autocast(x):
    def fun(model, x):
        return model(eqx.error_if(x, x < 0, "negative"))

    fun = functools.partial(eqx.filter_jit(amp.autocast(fun)), linear(1), jnp.full(8, x))
    if x > 0:
        fun()
    else:
        with pytest.raises(RuntimeError, match="negative"):
            fun()


def test_tools_take_a_module_with_its_activation_function():
    model, x = eqx.nn.MLP(8, 3, 16, 2, key=KEYS[1]), X[0]

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x) ** 2)

    report = amp.debug.compare(loss, ["float16"])(model, x)
    filtered = amp.debug.compare(loss, ["float16"], transform=eqx.filter_value_and_grad)(model, x)
    assert report.rows == filtered.rows
    assert [row.name for row in report.rows if row.kind == "gradient"] == [f"layers/{i}" for i in range(3)]
    assert amp.debug.suggest_rules(loss)(model, x).rules == {}
    state = amp.LossScale().init()
    amp.check_health(state, model)
    with pytest.raises(amp.LossScaleError, match=r"\.layers\[0\]\.weight \(128 of 128 values\)"):
        amp.check_health(state, jax.tree.map(lambda x: x * jnp.nan if eqx.is_array(x) else x, model))


def test_composes_with_filtered_transformations_either_way_round():
    model, x, _ = MODELS["mlp"]()

    def transform(fun):
        return eqx.filter_jit(eqx.filter_grad(fun))

    def loss(model, x):
        return loss_fn(model, x)[0]

    want = transform(loss)(model, x)
    params, static = eqx.partition(model, eqx.is_array)
    for fun in (transform(amp.autocast(loss)), amp.autocast(transform(loss))):
        assert_close(fun(model, x), want)
        products = dtypes(lambda p, x, f=fun: f(eqx.combine(p, static), x), params, x, primitive="dot_general")
        assert len(products) == 11
        assert set(products) == {LOW}


def test_filter_checkpoint_decides_what_is_kept():
    layers = eqx.filter_vmap(lambda key: eqx.nn.MLP(8, 8, 16, 1, activation=jax.nn.gelu, key=key))(KEYS[:3])
    arrays, static = eqx.partition(layers, eqx.is_array)

    @eqx.filter_checkpoint
    def body(x, arrays):
        return x + jax.vmap(eqx.combine(arrays, static))(x), None

    assert keeps_the_users_plan(lambda arrays: jnp.mean(jnp.square(jax.lax.scan(body, X[0], arrays)[0])), arrays)
