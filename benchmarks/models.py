"""Models in plain JAX, each written once for all uses.

With `low=None` a model holds no cast: that is what `autocast` takes, and float32 as it stands. With a dtype it is mixed
by hand the usual way: products, activations and the residual stream in `low`; norms, softmax and the loss in float32.
Every `*_case(low)` returns `(loss_fn, args)`, the arguments as shapes. `by_expert` mixes them better.
"""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jmp_amp as amp

F32 = jnp.float32
Shape = jax.ShapeDtypeStruct


def to(x, dtype):
    """Casts where the hand would; does nothing in the model without casts."""
    return x if dtype is None else x.astype(dtype)


def cast_whole(loss_fn, policy="mixed_float16"):
    """Casts all arguments in front of the model: with jmp 0.0.4 and mpx 0.1.8 the jaxpr of each model is this one."""
    policy = amp.get_policy(policy)
    return lambda *args: policy.cast_to_output(loss_fn(*policy.cast_to_compute(args)))


def by_expert(case, low):
    """Returns a case mixed by hand with fewer bytes: see `cast_once` and `cross_entropy_without_scatter`."""
    loss_fn, args = case(low)
    return lambda params, *batch: without_scatter(loss_fn)(cast_once(params, low), *batch), args


def without_scatter(loss_fn):
    """Returns the loss function with `cross_entropy_without_scatter`."""

    def loss(*args):
        with mock.patch.dict(globals(), cross_entropy=cross_entropy_without_scatter):
            return loss_fn(*args)

    return loss


def cast_once(params, low):
    """Casts weights before the model, and so once, also if a loop reads them. Norms and tables stay float32.

    The output layer of a tied model reads a copy of its table, so the gradients of both uses are summed in float32.
    """

    def cast(path, x):
        names = {str(getattr(key, "key", "")) for key in path}
        is_float32 = any(name.startswith(("norm", "token", "embed", "scale")) for name in names)
        return x if is_float32 or x.dtype != F32 else to(x, low)

    copies = jax.tree.map_with_path(cast, params)
    return copies | {"head": to(params["token"], low)} if "token" in params else copies


def value_and_grad_by_expert(case, low, steps):
    """Returns loss and gradients over micro-batches, which read weights that are cast before the loop, and the args."""
    loss_fn, args = case(low)

    def value_and_grad(params, batch):
        copies = cast_once(params, low)
        zeros = jnp.float32(0), jax.tree.map(lambda x: jnp.zeros(x.shape, F32), params)

        def step(total, micro_batch):
            loss, grads = jax.value_and_grad(without_scatter(loss_fn))(copies, micro_batch)
            grads["token"] += full(grads.pop("head"), low)
            return jax.tree.map(lambda x, y: x + y.astype(F32), total, (loss, grads)), None

        total, _ = lax.scan(step, zeros, jnp.moveaxis(batch.reshape(-1, steps, *batch.shape[1:]), 1, 0))
        return jax.tree.map(lambda x: x / steps, total)

    return value_and_grad, args


def train_step(loss_fn, tx, is_scaled=True):
    """Returns `step(params, opt_state, *batch)`, where `tx` is `dynamic_loss_scale(...)` or not scaled."""

    def step(params, opt_state, *batch):
        scale = amp.get_loss_scale(opt_state) if is_scaled else 1.0
        loss, grads = amp.value_and_grad(loss_fn, loss_scale=scale)(params, *batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def full(x, low):
    """Casts up to float32 where the hand would."""
    return x if low is None else x.astype(F32)


def dense(p, x, low):
    return to(x, low) @ to(p["w"], low) + to(p["b"], low)


def norm(p, x, low):
    x = full(x, low)
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
    return to((x - mean) * lax.rsqrt(variance + 1e-5) * p["scale"] + p["bias"], low)


def cross_entropy(logits, labels, low):
    logits = full(logits, low)
    picked = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def cross_entropy_without_scatter(logits, labels, low):
    """The gradient of the label's logit is a comparison, which fuses; that of `take_along_axis` is scattered."""
    logits = full(logits, low)
    is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(jnp.where(is_label, logits, 0), -1))


def attention(p, x, low, heads, causal):
    batch, length, dim = x.shape
    q, k, v = jnp.moveaxis(dense(p["qkv"], x, low).reshape(batch, length, 3, heads, -1), 2, 0)
    scores = full(jnp.einsum("bqhd,bkhd->bhqk", q, k) / (dim // heads) ** 0.5, low)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    weights = to(jax.nn.softmax(scores), low)
    return dense(p["proj"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape), low)


def transformer_layer(p, x, low, heads, causal=True, dropout=lambda i, x: x):
    x = x + dropout(0, attention(p, norm(p["norm1"], x, low), low, heads, causal))
    h = jax.nn.gelu(dense(p["up"], norm(p["norm2"], x, low), low))
    return x + dropout(1, dense(p["down"], h, low))


def transformer_shapes(dim, layers, stacked):
    def dense(n, m):
        return {"w": Shape((n, m), F32), "b": Shape((m,), F32)}

    norm = {"scale": Shape((dim,), F32), "bias": Shape((dim,), F32)}
    layer = {
        "norm1": norm,
        "qkv": dense(dim, 3 * dim),
        "proj": dense(dim, dim),
        "norm2": norm,
        "up": dense(dim, 4 * dim),
        "down": dense(4 * dim, dim),
    }
    if stacked:
        return jax.tree.map(lambda s: Shape((layers, *s.shape), s.dtype), layer), norm
    return [layer] * layers, norm


def gpt_case(low, layers=12, scan=False, remat=False, batch=8, length=1024, dim=768, heads=12, vocab=50257):
    """GPT-2 small: token and position embeddings, tied output."""
    blocks, last = transformer_shapes(dim, layers, scan)
    params = {"token": Shape((vocab, dim), F32), "position": Shape((length, dim), F32), "blocks": blocks, "norm": last}

    def body(x, p):
        return transformer_layer(p, x, low, heads), None

    if remat:
        body = jax.checkpoint(body, policy=jax.checkpoint_policies.dots_saveable, prevent_cse=False)

    def loss_fn(params, tokens):
        x = to(params["token"][tokens[:, :-1]] + params["position"], low)
        if scan:
            x, _ = lax.scan(body, x, params["blocks"])
        else:
            for p in params["blocks"]:
                x, _ = body(x, p)
        logits = norm(params["norm"], x, low) @ to(params.get("head", params["token"]).T, low)
        return cross_entropy(logits, tokens[:, 1:], low)

    return loss_fn, (params, Shape((batch, length + 1), jnp.int32))


def rms_norm(scale, x, low):
    x = full(x, low)
    return to(x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * scale, low)


def rotate(x, low):
    """Rotates pairs of features of queries or keys by angles that grow with the position (RoPE)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 500000.0 ** (-jnp.arange(half) / half)
    first, second = jnp.split(full(x, low), 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return to(jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1), low)


def llama_layer(p, x, low, heads, kv_heads):
    batch, length, dim = x.shape
    h = rms_norm(p["norm1"], x, low)
    q, k, v = ((h @ to(p[name], low)).reshape(batch, length, -1, dim // heads) for name in "qkv")
    q = rotate(q, low).reshape(batch, length, kv_heads, heads // kv_heads, -1)
    scores = full(jnp.einsum("bqgrd,bkgd->bgrqk", q, rotate(k, low)) / (dim // heads) ** 0.5, low)
    weights = to(jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)), low)
    x = x + jnp.einsum("bgrqk,bkgd->bqgrd", weights, v).reshape(x.shape) @ to(p["proj"], low)
    h = rms_norm(p["norm2"], x, low)
    return x + (jax.nn.silu(h @ to(p["gate"], low)) * (h @ to(p["up"], low))) @ to(p["down"], low)


def llama_case(low, layers=1, batch=4, length=2048, dim=4096, hidden=14336, heads=32, kv_heads=8):
    """Blocks of Llama 3 8B without embeddings: RMSNorm, RoPE, grouped-query attention, SwiGLU."""
    kv_dim = dim // heads * kv_heads
    block = {"norm1": (dim,), "q": (dim, dim), "k": (dim, kv_dim), "v": (dim, kv_dim), "proj": (dim, dim)}
    block |= {"norm2": (dim,), "gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}
    params = [{name: Shape(shape, F32) for name, shape in block.items()}] * layers

    def loss_fn(params, x):
        x = to(x, low)
        for p in params:
            x = llama_layer(p, x, low, heads, kv_heads)
        return jnp.mean(jnp.square(full(x, low)))

    return loss_fn, (params, Shape((batch, length, dim), F32))


def mlp_case(low, tokens=8192, dim=4096, hidden=16384, place=lambda x: x):
    """Two layers without biases; `place` says where activations are, of a model that is spread over devices."""
    params = {"up": Shape((dim, hidden), F32), "down": Shape((hidden, dim), F32)}

    def loss_fn(params, x):
        h = jax.nn.relu(place(to(x, low) @ to(params["up"], low)))
        return jnp.mean(jnp.square(full(place(h @ to(params["down"], low)), low)))

    return loss_fn, (params, Shape((tokens, dim), F32))


def experts_case(low, experts=8, tokens=8192, dim=2048, hidden=8192):
    """The experts of a mixture, two layers each without biases; the tokens are sorted by their expert."""
    params = {"up": Shape((experts, dim, hidden), F32), "down": Shape((experts, hidden, dim), F32)}

    def loss_fn(params, x, sizes):
        h = jax.nn.gelu(lax.ragged_dot(to(x, low), to(params["up"], low), sizes))
        return jnp.mean(jnp.square(full(lax.ragged_dot(h, to(params["down"], low), sizes), low)))

    return loss_fn, (params, Shape((tokens, dim), F32), Shape((experts,), jnp.int32))


def encoder_case(low, layers=6, batch=32, length=256, dim=512, heads=8, vocab=32000, rate=0.1):
    """A Transformer encoder with dropout, that reconstructs its tokens."""
    blocks, last = transformer_shapes(dim, layers, stacked=True)
    params = {"token": Shape((vocab, dim), F32), "blocks": blocks, "norm": last}

    def loss_fn(params, tokens, seed):
        def body(x, p_key):
            p, key = p_key

            def dropout(i, h):
                keep = jax.random.bernoulli(jax.random.fold_in(key, i), 1 - rate, h.shape)
                return jnp.where(keep, h / (1 - rate), 0)

            return transformer_layer(p, x, low, heads, causal=False, dropout=dropout), None

        keys = jax.random.split(jax.random.key(seed), layers)
        x, _ = lax.scan(body, to(params["token"][tokens], low), (params["blocks"], keys))
        logits = norm(params["norm"], x, low) @ to(params.get("head", params["token"]).T, low)
        return cross_entropy(logits, tokens, low)

    return loss_fn, (params, Shape((batch, length), jnp.int32), Shape((), jnp.int32))


def lstm_case(low, batch=64, steps=512, dim=512, classes=256):
    """One LSTM layer over 512 steps, with the input product inside the loop."""
    params = {
        "embed": Shape((classes, dim), F32),
        "gates": {"w": Shape((2 * dim, 4 * dim), F32), "b": Shape((4 * dim,), F32)},
        "out": {"w": Shape((dim, classes), F32), "b": Shape((classes,), F32)},
    }

    def loss_fn(params, tokens):
        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(dense(params["gates"], jnp.concatenate([to(x, low), h], -1), low), 4, -1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((batch, dim), F32 if low is None else low)
        _, hs = lax.scan(step, (zeros, zeros), params["embed"][tokens[:-1]])
        return cross_entropy(dense(params["out"], hs, low), tokens[1:], low)

    return loss_fn, (params, Shape((steps + 1, batch), jnp.int32))


def resnet_case(low, batch=64, size=224, blocks=(3, 4, 6, 3), width=64, classes=1000):
    """ResNet-50: bottleneck blocks with BatchNorm over the batch."""
    params = []  # in the order of use

    def conv_shape(n_in, n_out, kernel):
        params.append({"w": Shape((kernel, kernel, n_in, n_out), F32)})
        params.append({"scale": Shape((n_out,), F32), "bias": Shape((n_out,), F32)})

    conv_shape(3, width, 7)
    n_in = width
    for stage, count in enumerate(blocks):
        n = width * 2**stage
        for block in range(count):
            if block == 0:
                conv_shape(n_in, 4 * n, 1)
            conv_shape(n_in, n, 1)
            conv_shape(n, n, 3)
            conv_shape(n, 4 * n, 1)
            n_in = 4 * n
    params.append({"w": Shape((n_in, classes), F32), "b": Shape((classes,), F32)})

    def conv_norm(params, x, stride=1):
        w, p = next(params)["w"], next(params)
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(to(x, low), to(w, low), (stride, stride), "SAME", dimension_numbers=numbers)
        h = full(x, low)
        mean, square = jnp.mean(h, (0, 1, 2)), jnp.mean(jnp.square(h), (0, 1, 2))
        scale = p["scale"] * lax.rsqrt(square - jnp.square(mean) + 1e-5)
        return to((h - mean) * scale + p["bias"], low)

    def loss_fn(params, images, labels):
        params = iter(params)
        x = jax.nn.relu(conv_norm(params, images, 2))
        x = lax.reduce_window(x, np.array(-np.inf, x.dtype), lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage > 0 and block == 0 else 1
                skip = conv_norm(params, x, stride) if block == 0 else x
                h = jax.nn.relu(conv_norm(params, x))
                h = jax.nn.relu(conv_norm(params, h, stride))
                x = jax.nn.relu(skip + conv_norm(params, h))
        return cross_entropy(dense(next(params), jnp.mean(full(x, low), (1, 2)), low), labels, low)

    return loss_fn, (params, Shape((batch, size, size, 3), F32), Shape((batch,), jnp.int32))


def vit_case(low, layers=12, batch=64, size=256, patch=16, dim=768, heads=12, classes=1000):
    """ViT-B/16 on images of 256 pixels: patches by a convolution, 256 tokens, averaged."""
    blocks, last = transformer_shapes(dim, layers, stacked=False)
    params = {
        "patch": {"w": Shape((patch, patch, 3, dim), F32), "b": Shape((dim,), F32)},
        "position": Shape(((size // patch) ** 2, dim), F32),
        "blocks": blocks,
        "norm": last,
        "out": {"w": Shape((dim, classes), F32), "b": Shape((classes,), F32)},
    }

    def loss_fn(params, images, labels):
        w, b = (to(params["patch"][name], low) for name in "wb")
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(to(images, low), w, (patch, patch), "VALID", dimension_numbers=numbers) + b
        x = x.reshape(batch, -1, dim) + to(params["position"], low)
        for p in params["blocks"]:
            x = transformer_layer(p, x, low, heads, causal=False)
        x = jnp.mean(full(norm(params["norm"], x, low), low), 1)
        return cross_entropy(dense(params["out"], x, low), labels, low)

    return loss_fn, (params, Shape((batch, size, size, 3), F32), Shape((batch,), jnp.int32))


CASES = {
    "GPT-2 small, unrolled": gpt_case,
    "GPT-2 small, scanned": functools.partial(gpt_case, scan=True),
    "GPT-2 small, scanned, remat": functools.partial(gpt_case, scan=True, remat=True),
    "ResNet-50": resnet_case,
    "ViT-B/16": vit_case,
    "encoder with dropout": encoder_case,
    "LSTM, 512 steps": lstm_case,
}
