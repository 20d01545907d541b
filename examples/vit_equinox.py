"""Train a vision transformer in float16, in Equinox, on scikit-learn's digits.

    python examples/vit_equinox.py                       # float32 and float16, a minute on two CPU cores
    python examples/vit_equinox.py --precision float16

`amp.autocast` takes the model as an argument, its functions and static fields included; Equinox differentiates it.
"""

from collections.abc import Callable, Sequence

import data
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import twins

import jmp_amp as amp


class Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width: int, key: jax.Array) -> None:
        attention_key, mlp_key = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(num_heads=4, query_size=width, key=attention_key)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, depth=1, activation=jax.nn.gelu, key=mlp_key)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class VisionTransformer(eqx.Module):
    """Logits `[10]` of one image `[8, 8, 1]`."""

    embed: eqx.nn.Linear
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, width: int, depth: int, key: jax.Array) -> None:
        embed_key, position_key, head_key, *block_keys = jax.random.split(key, 3 + depth)
        self.embed = eqx.nn.Linear(4, width, key=embed_key)
        self.positions = 0.5 * jax.random.normal(position_key, (16, width))
        self.blocks = [Block(width, key) for key in block_keys]
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, 10, key=head_key)

    def __call__(self, image: jax.Array) -> jax.Array:
        patches = image.reshape(4, 2, 4, 2).swapaxes(1, 2).reshape(16, 4)
        x = jax.vmap(self.embed)(patches) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(jax.vmap(self.norm)(x), axis=0))


def predict(model: VisionTransformer, images: jax.Array) -> jax.Array:
    return jax.vmap(model)(images)


def loss_fn(model: VisionTransformer, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(predict(model, images), labels).mean()


def make_train_step(tx: optax.GradientTransformation, precision: str) -> Callable[..., tuple]:
    low_loss_fn = amp.autocast(loss_fn, precision)

    @eqx.filter_jit
    def train_step(
        model: VisionTransformer, opt_state: optax.OptState, images: jax.Array, labels: jax.Array
    ) -> tuple[VisionTransformer, optax.OptState, jax.Array]:
        value_and_grad = amp.value_and_grad(low_loss_fn, opt_state=opt_state, transform=eqx.filter_value_and_grad)
        loss, grads = value_and_grad(model, images, labels)
        updates, opt_state = tx.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    return train_step


def train(precision: str, steps: int, seed: int, log: Callable[..., None]) -> twins.Scores:
    rule = amp.LossScale(growth_interval=100) if precision == "float16" else amp.LossScale.none()
    model = VisionTransformer(width=64, depth=2, key=jax.random.key(seed))
    tx = amp.dynamic_loss_scale(optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-3, steps // 10, steps)), rule)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    images, labels, test_images, test_labels = data.digits()
    train_step = make_train_step(tx, precision)
    for _, batch in zip(range(steps), data.batches(images, labels, size=64, seed=seed), strict=False):
        model, opt_state, loss = train_step(model, opt_state, *batch)
        log(loss=loss, **amp.metrics(opt_state))
    amp.check_health(opt_state, eqx.filter(model, eqx.is_inexact_array))
    logits = eqx.filter_jit(amp.autocast(predict, precision))(model, test_images)
    return {"accuracy": float(jnp.mean(jnp.argmax(logits, -1) == test_labels))}


def main(argv: Sequence[str] | None = None) -> dict[str, twins.Scores]:
    return twins.main(train, 400, argv)


if __name__ == "__main__":
    main()
