"""Train an LSTM in float16, in plain JAX, on the source text of Python's standard library.

    python examples/lstm.py                              # float32 and float16, a minute on two CPU cores
    python examples/lstm.py --precision float16

`amp.autocast` enters the loop over time: the state that it carries starts at `jnp.zeros`, and so is float16.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import data
import jax
import jax.numpy as jnp
import optax
import twins

import jmp_amp as amp

LENGTH, BATCH, WIDTH, EVAL_WINDOWS = 64, 32, 128, 256

Params = dict[str, Any]


def init_params(key: jax.Array) -> Params:
    def normal(key: jax.Array, n_in: int, n_out: int) -> jax.Array:
        return jax.random.normal(key, (n_in, n_out)) / math.sqrt(n_in)

    embed, inputs, hidden, head = jax.random.split(key, 4)
    forget = jnp.zeros(4 * WIDTH).at[WIDTH : 2 * WIDTH].set(1)  # forget little at first
    return {
        "embed": normal(embed, 256, WIDTH),
        "cell": {"inputs": normal(inputs, WIDTH, 4 * WIDTH), "hidden": normal(hidden, WIDTH, 4 * WIDTH), "b": forget},
        "head": {"w": normal(head, WIDTH, 256), "b": jnp.zeros(256)},
    }


def lstm(params: Params, tokens: jax.Array) -> jax.Array:
    """Logits `[time, batch, 256]` of the next byte after each of `tokens[time, batch]`."""
    cell, head = params["cell"], params["head"]

    def step(carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        h, c = carry
        gates = x @ cell["inputs"] + h @ cell["hidden"] + cell["b"]
        i, f, g, o = jnp.split(gates, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((tokens.shape[1], WIDTH))
    _, outputs = jax.lax.scan(step, (zeros, zeros), params["embed"][tokens])
    return outputs @ head["w"] + head["b"]


def loss_fn(params: Params, windows: jax.Array) -> jax.Array:
    logits = lstm(params, windows[:, :-1].T)
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:].T).mean()


def train(precision: str, steps: int, seed: int, log: Callable[..., None]) -> twins.Scores:
    rule = amp.LossScale(growth_interval=100) if precision == "float16" else amp.LossScale.none()
    tx = amp.dynamic_loss_scale(optax.adam(optax.cosine_decay_schedule(1e-2, steps)), rule, clip_global_norm=1.0)
    low_loss_fn = amp.autocast(loss_fn, precision)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Params, opt_state: Any, windows: jax.Array) -> tuple[Params, Any, dict[str, jax.Array]]:
        loss, grads = amp.value_and_grad(low_loss_fn, opt_state=opt_state)(params, windows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {"loss": loss, **amp.metrics(opt_state)}

    text, test_text = data.library_text()
    params = init_params(jax.random.key(seed))
    opt_state = tx.init(params)
    for _, windows in zip(range(steps), data.windows(text, LENGTH + 1, BATCH, seed), strict=False):
        params, opt_state, row = train_step(params, opt_state, windows)
        log(**row)
    amp.check_health(opt_state, params)
    windows = next(data.windows(test_text, LENGTH + 1, EVAL_WINDOWS, seed=0))
    return {"val_loss": float(jax.jit(low_loss_fn)(params, windows))}


def main(argv: Sequence[str] | None = None) -> dict[str, twins.Scores]:
    return twins.main(train, 400, argv)


if __name__ == "__main__":
    main()
