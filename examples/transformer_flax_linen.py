"""Train a character-level Transformer with dropout in float16, in Flax Linen, on the source text of Python's library.

    python examples/transformer_flax_linen.py                      # float32 and float16, a minute on two CPU cores
    python examples/transformer_flax_linen.py --precision float16

The `TrainState` is Flax's own: `apply_gradients` unscales, checks, clips, and skips on overflow, since its `tx` does.
"""

from collections.abc import Callable, Sequence

import data
import jax
import jax.numpy as jnp
import optax
import twins
from flax import linen as nn
from flax.training.train_state import TrainState

import jmp_amp as amp

CONTEXT, BATCH, EVAL_WINDOWS = 32, 32, 512


class Block(nn.Module):
    """A layer of `heads` heads, with the norms in front."""

    heads: int
    dropout: float

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        h = nn.MultiHeadDotProductAttention(self.heads)(nn.LayerNorm()(x), mask=mask)
        x += nn.Dropout(self.dropout, deterministic=not train)(h)
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dropout(self.dropout, deterministic=not train)(nn.Dense(x.shape[-1])(h))


class Transformer(nn.Module):
    """Logits `[batch, time, 256]` of the next byte after each of `tokens[batch, time]`."""

    width: int = 64
    heads: int = 4
    layers: int = 2
    dropout: float = 0.1

    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        x = nn.Embed(256, self.width)(tokens) + nn.Embed(CONTEXT, self.width)(jnp.arange(tokens.shape[1]))
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = Block(self.heads, self.dropout)(x, mask, train)
        return nn.Dense(256, name="head")(nn.LayerNorm()(x))


def cross_entropy(logits: jax.Array, windows: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()


def make_train_step(precision: str) -> Callable[..., tuple[TrainState, jax.Array]]:
    @jax.jit
    def train_step(state: TrainState, windows: jax.Array, key: jax.Array) -> tuple[TrainState, jax.Array]:
        @amp.autocast(dtype=precision)
        def loss_fn(params: dict) -> jax.Array:
            rngs = {"dropout": jax.random.fold_in(key, state.step)}
            return cross_entropy(state.apply_fn({"params": params}, windows[:, :-1], train=True, rngs=rngs), windows)

        loss, grads = amp.value_and_grad(loss_fn, opt_state=state.opt_state)(state.params)
        return state.apply_gradients(grads=grads), loss

    return train_step


def train(precision: str, steps: int, seed: int, log: Callable[..., None]) -> twins.Scores:
    rule = amp.LossScale(growth_interval=100) if precision == "float16" else amp.LossScale.none()
    schedule = optax.warmup_cosine_decay_schedule(0, 1e-2, steps // 10, steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    model, key = Transformer(), jax.random.key(seed)
    text, test_text = data.library_text()
    params = jax.jit(model.init)(key, jnp.zeros((1, CONTEXT), int))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=amp.dynamic_loss_scale(tx, rule))
    train_step = make_train_step(precision)
    for _, windows in zip(range(steps), data.windows(text, CONTEXT + 1, BATCH, seed), strict=False):
        state, loss = train_step(state, windows, key)
        log(loss=loss, **amp.metrics(state.opt_state))
    amp.check_health(state.opt_state, state.params)
    windows = next(data.windows(test_text, CONTEXT + 1, EVAL_WINDOWS, seed=0))
    logits = jax.jit(amp.autocast(model.apply, precision))({"params": state.params}, windows[:, :-1])
    return {"val_loss": float(cross_entropy(logits, windows))}


def main(argv: Sequence[str] | None = None) -> dict[str, twins.Scores]:
    return twins.main(train, 400, argv)


if __name__ == "__main__":
    main()
