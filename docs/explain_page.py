"""A hook of MkDocs: adds the page that `explain` saves of a small transformer to the site."""
# ruff: noqa: D103 (the page shows these functions, which are short)

import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import jmp_amp as amp


def norm(w: jax.Array, x: jax.Array) -> jax.Array:
    return w * jax.nn.standardize(x)


def rotary(x: jax.Array) -> jax.Array:
    n = x.shape[-1] // 2
    angles = jnp.arange(len(x))[:, None] * 1e4 ** (-jnp.arange(n) / n)
    a, b = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
    scores = rotary(q) @ rotary(k).T / q.shape[-1] ** 0.5
    past = jnp.tri(len(x), dtype=bool)
    weights = jax.nn.softmax(jnp.where(past, scores, -1e9))
    return weights @ v @ p["out"]


def mlp(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]


def loss_fn(params: dict[str, Any], tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens[:-1]]
    for i, layer in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}/attention"):
            x = x + attention(layer, norm(layer["norm1"], x))
        with jax.named_scope(f"layer_{i}/mlp"):
            x = x + mlp(layer, norm(layer["norm2"], x))
    with jax.named_scope("head"):
        logits = norm(params["norm"], x) @ params["embed"].T
    with jax.named_scope("loss"):
        log_probs = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_probs, tokens[1:, None], axis=-1))


def report(dim: int = 256, layers: int = 4) -> amp.debug.PrecisionReport:
    """Returns the report of the transformer."""

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    layer = {"norm1": shape(dim), "qkv": shape(dim, 3 * dim), "out": shape(dim, dim), "norm2": shape(dim)}
    layer |= {"up": shape(dim, 4 * dim), "bias": shape(4 * dim), "down": shape(4 * dim, dim)}
    params = {"embed": shape(1024, dim), "layers": [layer] * layers, "norm": shape(dim)}
    return amp.explain(loss_fn)(params, jax.ShapeDtypeStruct((129,), jnp.int32))


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the page to the files to copy."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "explain.html")
        report().save(path)
        files.append(File.generated(config, "explain/transformer.html", content=path.read_text(encoding="utf-8")))
