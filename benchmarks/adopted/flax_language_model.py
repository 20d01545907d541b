"""A decoder in Flax Linen with a `TrainState`, a schedule by the inverse root of the step, and weights of padding."""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training import train_state

VOCAB, LENGTH, WIDTH = 32, 24, 64


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, mask):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(h, mask=mask)
        h = nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))
        return x + nn.Dense(WIDTH)(nn.gelu(h))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(VOCAB, WIDTH)
        shifted = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        x = embed(shifted) + self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        mask = nn.make_causal_mask(tokens)
        for _ in range(2):
            x = Block()(x, mask)
        return embed.attend(nn.LayerNorm()(x)) / jnp.sqrt(WIDTH)


def train_step(state, tokens):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, tokens)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        weights = jnp.where(tokens > 0, 1, 0)
        return jnp.sum(losses * weights) / jnp.sum(weights)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def schedule(step):
    return 2e-2 * jnp.minimum(step / 20, 1) * jax.lax.rsqrt(jnp.maximum(step, 20.0)) * 0.5


def main(steps):
    model = Decoder()
    start = jax.random.randint(jax.random.key(0), (16, 1), 0, VOCAB)
    tokens = (start + jnp.arange(LENGTH) * (1 + start % 3)) % VOCAB * (jnp.arange(LENGTH) < LENGTH - start % 5)
    tx = optax.adamw(schedule, b1=0.9, b2=0.98)
    params = model.init(jax.random.key(1), tokens)["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    step, losses = jax.jit(train_step), []
    for _ in range(steps):
        state, loss = step(state, tokens)
        losses.append(loss)
    return losses
