"""Models of Flax Linen under autocast: layers, mutable state, lifted transformations, training."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from agreement import FULL, FULL_UNARY, LOW, assert_close, check_modules, check_rows
from checkpoints import keeps_the_users_plan

import jmp_amp as amp

nn = pytest.importorskip("flax.linen", reason="needs Flax")

pytestmark = pytest.mark.usefixtures("users_code")

KEY = jax.random.key(0)
X = jax.random.normal(KEY, (4, 6, 8))
IMAGES = jax.random.normal(KEY, (4, 8, 8, 3))
TOKENS = jax.random.randint(KEY, (4, 6), 0, 16)


class Norms(nn.Module):
    @nn.compact
    def __call__(self, x):
        for norm in (nn.LayerNorm(), nn.RMSNorm(), nn.GroupNorm(num_groups=2)):
            x = norm(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dense(8, name="inner")(x))


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(4, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.gelu(nn.ConvTranspose(4, (3, 3), strides=(2, 2))(x))
        return nn.avg_pool(nn.Conv(4, (3, 3), feature_group_count=4)(x), (2, 2))


class Dropped(nn.Module):
    """The mask comes out too, to be compared."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Dense(8)(nn.Embed(16, 8)(tokens))
        x = nn.Dropout(0.5, deterministic=False)(x)
        return nn.Dense(3)(x), x == 0


class Recurrent(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.RNN(nn.GRUCell(8))(nn.RNN(nn.LSTMCell(8))(x)))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask=None):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2)(h, mask=mask)
        h = nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))
        return x + nn.Dense(8)(h)


class Transformer(nn.Module):
    """Blocks under `nn.scan` and `nn.remat`."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 8)(tokens)
        mask = nn.make_causal_mask(tokens)
        scanned = nn.scan(
            lambda block, x, _: (block(x, mask), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, _ = scanned(nn.remat(Block)(name="layers"), x, None)
        return nn.Dense(16, name="head")(nn.LayerNorm()(x))


class ResNet(nn.Module):
    train: bool = True

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=not self.train, momentum=0.9)
        x = nn.Conv(6, (3, 3), name="stem")(x)
        for _ in range(2):
            y = nn.relu(norm()(nn.Conv(6, (3, 3))(x)))
            x = nn.relu(x + norm()(nn.Conv(6, (3, 3))(y)))
        return nn.Dense(5, name="head")(jnp.mean(x, (1, 2)))


def setup(model, x):
    """Parameters, other variables, and a function of them that returns the model's output and new variables."""
    variables = jax.jit(model.init)({"params": KEY, "dropout": KEY}, x)
    params = variables.pop("params")

    def apply(params, state, x):
        return model.apply({"params": params, **state}, x, mutable=list(state), rngs={"dropout": jax.random.key(1)})

    return params, variables, apply


def mean_square(apply):
    def loss(*args):
        out, state = apply(*args)
        return jnp.mean(jax.tree.leaves(out)[0] ** 2), (out, state)

    return loss


@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("model", "x", "expected"),
    [
        (
            Norms(),
            X,
            {
                ("add", "jvp(Norms)/inner"): LOW,
                ("add", "jvp(Norms)/LayerNorm_0"): FULL,
                ("mul", "jvp(Norms)/RMSNorm_0"): FULL,
                ("mul", "jvp(Norms)/GroupNorm_0"): FULL,
            },
        ),
        (
            Convolutions(),
            IMAGES,
            {
                ("add", "jvp(Convolutions)/Conv_0"): LOW,
                ("add", "jvp(Convolutions)/ConvTranspose_0"): LOW,
                ("max", "jvp(Convolutions)"): LOW,
            },
        ),
        (Dropped(), TOKENS, {("add", "jvp(Dropped)/Dense_0"): LOW, ("div", "jvp(Dropped)/Dropout_0"): LOW}),
        # The gates multiply states that add up, so they are evaluated in float32; the products are low all the same.
        (Recurrent(), X, {("mul", "LSTMCell_0"): FULL, ("mul", "GRUCell_0"): FULL}),
        (Transformer(), TOKENS, {("add", "LayerNorm_0"): FULL, ("add", "Dense_0"): LOW}),
        (ResNet(), IMAGES, {("add", "jvp(ResNet)/stem"): LOW, ("rsqrt", "BatchNorm_0"): FULL_UNARY}),
        (ResNet(train=False), IMAGES, {("add", "jvp(ResNet)/stem"): LOW}),
    ],
    ids=["norms", "convolutions", "embed and dropout", "recurrent", "transformer", "resnet", "resnet evaluated"],
)
def test_model_and_its_state_are_close_to_float32(model, x, expected):
    params, state, apply = setup(model, x)
    check_rows(expected, mean_square(apply), params, state, x)


@pytest.mark.parametrize("pattern", ["LayerNorm_0", "*LayerNorm_*", "Norms/LayerNorm_0", "*/LayerNorm_?"])
def test_patterns_match_modules(pattern):
    params, state, apply = setup(Norms(), X)
    # A pattern that matches nothing warns, and warnings are errors here.
    fun = amp.autocast(apply, rules={pattern: "full", "Norms/Dense_[12]": "bfloat16", "*/Dense_3": "full"})
    check_modules(fun, params, state, X, norm="LayerNorm_0")


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("model", "x", "y"),
    [(ResNet(), IMAGES, jnp.arange(4)), (Transformer(), TOKENS, jnp.roll(TOKENS, -1, 1))],
    ids=["resnet", "transformer"],
)
def test_training_with_a_dynamic_loss_scale_follows_float32(model, x, y):
    params, state, apply = setup(model, x)

    def loss_fn(params, state):
        logits, state = apply(params, state, x)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y)), state

    def train(loss_fn):
        tx = amp.dynamic_loss_scale(optax.chain(amp.unscale_and_check(), optax.adam(1e-2)))

        def step(carry, _):
            params, state, opt_state = carry
            gradient = amp.value_and_grad(loss_fn, has_aux=True, loss_scale=amp.get_loss_scale(opt_state))
            (loss, state), grads = gradient(params, state)
            updates, opt_state = tx.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), state, opt_state), loss

        def losses_of(params, state):
            (*_, opt_state), losses = jax.lax.scan(step, (params, state, tx.init(params)), length=12)
            return losses, amp.metrics(opt_state)["total_notfinite"]

        return jax.jit(losses_of)(params, state)

    losses, skipped = train(amp.autocast(loss_fn))
    assert losses[-1] < 0.8 * losses[0]
    assert skipped == 0
    assert_close(losses, train(loss_fn)[0])


class Deep(nn.Module):
    """Four blocks under `nn.remat_scan`, two groups of two."""

    @nn.compact
    def __call__(self, tokens):
        return nn.remat_scan(Block, lengths=(2, 2))()(nn.Embed(16, 8)(tokens))


@pytest.mark.parametrize("model", [Transformer(), Deep()], ids=["nn.scan of nn.remat", "nn.remat_scan"])
@pytest.mark.sweep(2)
def test_remat_decides_what_is_kept(model):
    params = model.init(KEY, TOKENS)
    assert keeps_the_users_plan(lambda params: jnp.mean(jnp.square(model.apply(params, TOKENS))), params)
