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
        is_float32 = any(name.startswith(("norm", "token", "embed", "scale", "bias")) for name in names)
        return x if is_float32 or x.dtype != F32 else to(x, low)

    copies = jax.tree.map_with_path(cast, params)
    return copies | {"head": to(params["token"], low)} if "token" in params else copies


def accumulated(loss_fn, low, steps, once=False):
    """Returns loss and gradients over micro-batches by hand; with `once` weights are cast before the loop."""

    def value_and_grad(params, batch):
        read = cast_once(params, low) if once else params
        zeros = jnp.float32(0), jax.tree.map(lambda x: jnp.zeros(x.shape, F32), params)

        def step(total, micro_batch):
            loss, grads = jax.value_and_grad(loss_fn)(read, micro_batch)
            if once:
                grads["token"] += full(grads.pop("head"), low)
            return jax.tree.map(lambda x, y: x + y.astype(F32), total, (loss, grads)), None

        total, _ = lax.scan(step, zeros, jnp.moveaxis(batch.reshape(-1, steps, *batch.shape[1:]), 1, 0))
        return jax.tree.map(lambda x: x / steps, total)

    return value_and_grad


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


def attention(p, x, low, heads, causal, kernel=None):
    batch, length, dim = x.shape
    q, k, v = jnp.moveaxis(dense(p["qkv"], x, low).reshape(batch, length, 3, heads, -1), 2, 0)
    if kernel:
        return dense(p["proj"], kernel(q, k, v).reshape(x.shape), low)
    scores = full(jnp.einsum("bqhd,bkhd->bhqk", q, k) / (dim // heads) ** 0.5, low)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    weights = to(jax.nn.softmax(scores), low)
    return dense(p["proj"], jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape), low)


def fused_attention(implementation, dtype):
    """Returns causal attention that writes no scores to memory, such as cuDNN's, in `dtype` under `autocast`."""
    kernel = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    return amp.cast_inputs(dtype)(kernel)


def transformer_layer(p, x, low, heads, causal=True, dropout=lambda i, x: x, kernel=None):
    x = x + dropout(0, attention(p, norm(p["norm1"], x, low), low, heads, causal, kernel))
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


def gpt_case(low, layers=12, scan=False, remat=None, batch=8, length=1024, dim=768, heads=12, vocab=50257, kernel=None):
    """GPT-2 small: token and position embeddings, tied output. `kernel(q, k, v)` computes its attention, if given."""
    blocks, last = transformer_shapes(dim, layers, scan)
    params = {"token": Shape((vocab, dim), F32), "position": Shape((length, dim), F32), "blocks": blocks, "norm": last}

    def body(x, p):
        return transformer_layer(p, x, low, heads, kernel=kernel), None

    if remat:
        policy = getattr(jax.checkpoint_policies, remat)
        body = jax.checkpoint(body, policy=policy, prevent_cse=False)

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


def decoding_case(low, layers=12, batch=16, length=1024, dim=768, heads=12, vocab=50257):
    """The logits of the next token of GPT-2 small, from cached keys and values; the weights are stored in 16 bits."""
    stored = F32 if low is None else low
    blocks, last = transformer_shapes(dim, layers, stacked=False)
    weights = {"token": Shape((vocab, dim), F32), "blocks": blocks}
    params = {**jax.tree.map(lambda s: Shape(s.shape, stored), weights), "norm": last}
    cache = [[Shape((batch, length, heads, dim // heads), stored)] * 2] * layers

    def logits(params, cache, tokens):
        x = params["token"][tokens]
        for p, (keys, values) in zip(params["blocks"], cache, strict=True):
            q, k, v = jnp.moveaxis(dense(p["qkv"], norm(p["norm1"], x, low), low).reshape(batch, 3, heads, -1), 1, 0)
            k, v = jnp.concatenate([keys, k[:, None]], 1), jnp.concatenate([values, v[:, None]], 1)
            scores = full(jnp.einsum("bhd,bkhd->bhk", q, k), low) / (dim // heads) ** 0.5
            out = jnp.einsum("bhk,bkhd->bhd", to(jax.nn.softmax(scores), low), v).reshape(batch, dim)
            x = x + dense(p["proj"], out, low)
            x = x + dense(p["down"], jax.nn.gelu(dense(p["up"], norm(p["norm2"], x, low), low)), low)
        return full(norm(params["norm"], x, low) @ params["token"].T, low)

    return logits, (params, cache, Shape((batch,), jnp.int32))


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

    def project(h, name):
        out = h @ p[name].astype(h.dtype)
        return out + h @ to(p[f"{name}_a"], low) @ to(p[f"{name}_b"], low) if f"{name}_a" in p else out

    h = rms_norm(p["norm1"], x, low)
    q, k, v = (project(h, name).reshape(batch, length, -1, dim // heads) for name in "qkv")
    q = rotate(q, low).reshape(batch, length, kv_heads, heads // kv_heads, -1)
    scores = full(jnp.einsum("bqgrd,bkgd->bgrqk", q, rotate(k, low)) / (dim // heads) ** 0.5, low)
    weights = to(jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)), low)
    x = x + project(jnp.einsum("bgrqk,bkgd->bqgrd", weights, v).reshape(x.shape), "proj")
    h = rms_norm(p["norm2"], x, low)
    return x + project(jax.nn.silu(project(h, "gate")) * project(h, "up"), "down")


def llama_case(
    low, layers=1, batch=4, length=2048, dim=4096, hidden=14336, heads=32, kv_heads=8, outputs=0, rank=0, scan=False
):
    """Blocks of Llama 3 8B without embeddings: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    With `outputs` a norm and a layer of so many outputs follow. With `rank` only LoRA adapters are trained; all else is
    stored in float16. With `scan` the layers are a scan under `jax.checkpoint`.
    """
    kv_dim = dim // heads * kv_heads
    block = {"norm1": (dim,), "q": (dim, dim), "k": (dim, kv_dim), "v": (dim, kv_dim), "proj": (dim, dim)}
    block |= {"norm2": (dim,), "gate": (dim, hidden), "up": (dim, hidden), "down": (hidden, dim)}

    def shapes(block, dtype=F32):
        if scan:
            return {name: Shape((layers, *shape), dtype) for name, shape in block.items()}
        return [{name: Shape(shape, dtype) for name, shape in block.items()}] * layers

    def layer(x, p):
        return llama_layer(p, x, low, heads, kv_heads), None

    if scan:
        layer = jax.checkpoint(layer, prevent_cse=False)

    def loss_fn(params, x, out=None):
        x = to(x, low)
        if scan:
            x, _ = lax.scan(layer, x, params)
        for p in [] if scan else params:
            x, _ = layer(x, p)
        if out is not None:
            x = rms_norm(out["norm"], x, low) @ out["w"].astype(x.dtype)
        return jnp.mean(jnp.square(full(x, low)))

    def with_output(params, x):
        return loss_fn(params["layers"], x, params["out"])

    def with_adapters(adapters, frozen, x):
        both = jax.tree.map(lambda a, f: a | f, adapters, frozen["layers"], is_leaf=lambda p: "q_a" in p)
        return loss_fn(both, x, frozen["out"])

    x, out = Shape((batch, length, dim), F32), {"norm": (dim,), "w": (dim, outputs)}
    if not outputs:
        return loss_fn, (shapes(block), x)
    if not rank:
        return with_output, ({"layers": shapes(block), "out": {k: Shape(v, F32) for k, v in out.items()}}, x)
    down = {f"{name}_a": (block[name][0], rank) for name in "qv"}
    up = {f"{name}_b": (rank, block[name][1]) for name in "qv"}
    frozen = {"layers": shapes(block, jnp.float16), "out": {k: Shape(v, jnp.float16) for k, v in out.items()}}
    return with_adapters, (shapes(down | up), frozen, x)


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


def routed_experts_case(low, experts=8, tokens=4096, dim=1024, hidden=4096):
    """A layer of experts with a router: each token goes to one of them, and comes back weighted."""
    params = {"norm1": Shape((dim,), F32), "router": Shape((dim, experts), F32)}
    params |= {"up": Shape((experts, dim, hidden), F32), "down": Shape((experts, hidden, dim), F32)}

    def loss_fn(params, x):
        h = rms_norm(params["norm1"], x, low)
        gates = jax.nn.softmax(full(h @ to(params["router"], low), low))
        expert, gate = jnp.argmax(gates, -1), jnp.max(gates, -1, keepdims=True)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=experts)
        hidden = jax.nn.gelu(lax.ragged_dot(h[order], to(params["up"], low), sizes))
        out = lax.ragged_dot(hidden, to(params["down"], low), sizes)[jnp.argsort(order)]
        return jnp.mean(jnp.square(x + full(out, low) * gate))

    return loss_fn, (params, Shape((tokens, dim), F32))


def graph_case(low, layers=4, nodes=16384, edges=131072, dim=256, hidden=512):
    """A graph network: a message for each edge from the features of both nodes, summed for each node."""
    layer = {"message": {"w": Shape((2 * dim, hidden), F32), "b": Shape((hidden,), F32)}}
    layer |= {"update": {"w": Shape((hidden + dim, dim), F32), "b": Shape((dim,), F32)}}

    def loss_fn(params, x, senders, receivers):
        x = to(x, low)
        for p in params:
            message = jax.nn.relu(dense(p["message"], jnp.concatenate([x[senders], x[receivers]], -1), low))
            total = to(jax.ops.segment_sum(full(message, low), receivers, nodes), low)
            x = x + dense(p["update"], jnp.concatenate([x, total], -1), low)
        return jnp.mean(jnp.square(full(x, low)))

    indices = Shape((edges,), jnp.int32)
    return loss_fn, ([layer] * layers, Shape((nodes, dim), F32), indices, indices)


def mamba_case(low, layers=2, batch=8, length=256, dim=512, states=16, rank=32):
    """Blocks of Mamba: a selective state space, whose float32 state a scan over the sequence carries, and a gate."""
    width = 2 * dim
    block = {"norm1": (dim,), "in": (dim, 2 * width), "select": (width, rank + 2 * states), "step": (rank, width)}
    block |= {"scale_a": (width, states), "scale_d": (width,), "out": (width, dim)}

    def state_space(p, u):
        low_rank, b, c = jnp.split(u @ to(p["select"], low), [rank, rank + states], -1)
        step = jax.nn.softplus(full(low_rank @ to(p["step"], low), low))

        def advance(state, inputs):
            u, step, b, c = (full(each, low) for each in inputs)
            decay = jnp.exp(-step[..., None] * jnp.exp(p["scale_a"]))
            state = decay * state + (step * u)[..., None] * b[:, None, :]
            return state, to(jnp.sum(state * c[:, None, :], -1), low)

        inputs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (u, step, b, c))
        _, out = lax.scan(advance, jnp.zeros((batch, width, states)), inputs)
        return jnp.moveaxis(out, 0, 1) + u * to(p["scale_d"], low)

    def loss_fn(params, x):
        x = to(x, low)
        for p in params:
            u, gate = jnp.split(rms_norm(p["norm1"], x, low) @ to(p["in"], low), 2, -1)
            x = x + (state_space(p, jax.nn.silu(u)) * jax.nn.silu(gate)) @ to(p["out"], low)
        return jnp.mean(jnp.square(full(x, low)))

    params = [{name: Shape(shape, F32) for name, shape in block.items()}] * layers
    return loss_fn, (params, Shape((batch, length, dim), F32))


def chunked_loss_case(low, tokens=8192, chunks=16, dim=1024, vocab=128256):
    """Cross-entropy over a large vocabulary, in chunks of tokens whose logits are computed again for the gradient."""
    params = {"w": Shape((dim, vocab), F32)}

    def loss_fn(params, x, labels):
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def chunk(total, x_labels):
            x, labels = x_labels
            return total + cross_entropy(to(x, low) @ to(params["w"], low), labels, low), None

        split = jax.tree.map(lambda x: x.reshape(chunks, -1, *x.shape[1:]), (x, labels))
        return lax.scan(chunk, jnp.zeros(()), split)[0] / chunks

    return loss_fn, (params, Shape((tokens, dim), F32), Shape((tokens,), jnp.int32))


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
    "GPT-2 small, scanned, remat": functools.partial(gpt_case, scan=True, remat="dots_saveable"),
    "ResNet-50": resnet_case,
    "ViT-B/16": vit_case,
    "encoder with dropout": encoder_case,
    "LSTM, 512 steps": lstm_case,
}

small_llama = functools.partial(llama_case, dim=2048, hidden=7168, heads=16, outputs=8192)
MORE_CASES = {
    "GPT-2 small, scanned, remat (nothing_saveable)": functools.partial(gpt_case, scan=True, remat="nothing_saveable"),
    "Llama, scanned, remat": functools.partial(small_llama, layers=4, scan=True),
    "LoRA of Llama": functools.partial(small_llama, layers=2, rank=16),
    "LoRA of Llama, scanned, remat": functools.partial(small_llama, layers=4, rank=16, scan=True),
    "graph network": graph_case,
    "ragged experts": routed_experts_case,
    "Mamba": mamba_case,
    "chunked cross-entropy": chunked_loss_case,
}
