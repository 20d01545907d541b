"""A GPT in plain `jax.numpy` without a cast, whose parts carry named scopes."""

import jax
import jax.numpy as jnp
from jax import lax

VOCAB, CONTEXT, DIM, HEADS, LAYERS = 32, 16, 32, 4, 2


def init(key, layers=LAYERS):
    def dense(key, n, m):
        return {"w": jax.random.normal(key, (n, m)) / jnp.sqrt(n), "b": jnp.zeros(m)}

    def block(key):
        qkv, proj, up, down = jax.random.split(key, 4)
        return {
            "norm1": {"scale": jnp.ones(DIM), "bias": jnp.zeros(DIM)},
            "qkv": dense(qkv, DIM, 3 * DIM),
            "proj": dense(proj, DIM, DIM),
            "norm2": {"scale": jnp.ones(DIM), "bias": jnp.zeros(DIM)},
            "up": dense(up, DIM, 4 * DIM),
            "down": dense(down, 4 * DIM, DIM),
        }

    token, position, *blocks = jax.random.split(key, 2 + layers)
    return {
        "token": 0.1 * jax.random.normal(token, (VOCAB, DIM)),
        "position": 0.1 * jax.random.normal(position, (CONTEXT, DIM)),
        "blocks": jax.vmap(block)(jnp.stack(blocks)),
        "norm": {"scale": jnp.ones(DIM), "bias": jnp.zeros(DIM)},
    }


def dense(p, x):
    with jax.named_scope("dense"):
        return x @ p["w"] + p["b"]


def norm(p, x):
    with jax.named_scope("norm"):
        mean = jnp.mean(x, -1, keepdims=True)
        variance = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
        return (x - mean) * lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"]


def attention(p, x):
    batch, length, _ = x.shape
    q, k, v = jnp.moveaxis(dense(p["qkv"], x).reshape(batch, length, 3, HEADS, -1), 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    with jax.named_scope("softmax"):
        mask = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(mask, scores / jnp.sqrt(DIM / HEADS), -jnp.inf))
    return dense(p["proj"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape))


def mlp(p, x):
    h = dense(p["up"], x)
    with jax.named_scope("gelu"):
        h = jax.nn.gelu(h)
    return dense(p["down"], h)


def block(p, x):
    x = x + attention(p, norm(p["norm1"], x))
    return x + mlp(p, norm(p["norm2"], x))


def logits(params, tokens, scan=True):
    x = params["token"][tokens] + params["position"][: tokens.shape[1]]
    if scan:
        x, _ = lax.scan(lambda x, p: (block(p, x), None), x, params["blocks"])
    else:
        for i in range(len(params["blocks"]["qkv"]["b"])):
            x = block(jax.tree.map(lambda leaf, i=i: leaf[i], params["blocks"]), x)
    return norm(params["norm"], x) @ params["token"].T


def loss(params, tokens, scan=True):
    out = logits(params, tokens[:, :-1], scan)
    with jax.named_scope("loss"):
        picked = jnp.take_along_axis(out, tokens[:, 1:, None], -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(out, -1) - picked)
