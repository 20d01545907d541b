"""Two encoders with a contrastive loss: normalized embeddings, and a temperature that is trained as a logarithm."""

import jax
import jax.numpy as jnp
import optax

BATCH, WIDTH = 64, 64


def init(key, n):
    keys = jax.random.split(key, 3)
    sizes = {"in": (n, WIDTH), "hidden": (WIDTH, WIDTH), "out": (WIDTH, 32)}
    return {k: jax.random.normal(x, s) * s[0] ** -0.5 for x, (k, s) in zip(keys, sizes.items(), strict=True)}


def encode(params, x):
    h = jax.nn.gelu(x @ params["in"])
    h = h + jax.nn.gelu(h @ params["hidden"])
    h = h @ params["out"]
    return h / jnp.linalg.norm(h, axis=-1, keepdims=True)


def loss_fn(params, images, texts):
    images, texts = encode(params["image"], images), encode(params["text"], texts)
    logits = jnp.exp(params["logit_scale"]) * images @ texts.T
    labels = jnp.arange(BATCH)
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    return (jnp.mean(cross_entropy(logits, labels)) + jnp.mean(cross_entropy(logits.T, labels))) / 2


def main(steps):
    keys = jax.random.split(jax.random.key(0), 5)
    params = {"image": init(keys[0], 48), "text": init(keys[1], 24), "logit_scale": jnp.log(1 / 0.07)}
    maps = jax.random.normal(keys[2], (8, 48)), jax.random.normal(keys[3], (8, 24))
    tx = optax.adamw(1e-3, weight_decay=0.01)

    @jax.jit
    def step(params, opt_state, key):
        hidden = jax.random.normal(key, (BATCH, 8))
        images, texts = (jnp.tanh(hidden @ m) for m in maps)
        loss, grads = jax.value_and_grad(loss_fn)(params, images, texts)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for key in jax.random.split(keys[4], steps):
        params, opt_state, loss = step(params, opt_state, key)
        losses.append(loss)
    return losses
