"""Small models for `autocast_accuracy.py`, each written once for two uses, like those of `models.py`.

With `low=None` a model holds no cast: that is what `autocast` takes, and float32 and float64 as they stand. With a
dtype it is mixed by hand the usual careful way: products and activations in `low`; norms, softmax, losses, sums over
neighbours, the state of an ODE and the log-determinant of a flow in float32. Every `*_case(low)` returns
`(loss_fn, init)`, where `init(rng)` draws the arguments of `loss_fn`, parameters first, with a NumPy generator. Those
in `CASES` return `(loss_fn, args)`, as those of `models.py` do; here the arguments are arrays, which depend on `seed=`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from models import F32, Shape, attention, cross_entropy, dense, full, gpt_case, norm, to, transformer_layer
from models import transformer_shapes as block_shapes


def layer(n, m):
    return {"w": Shape((n, m), F32), "b": Shape((m,), F32)}


def draw(rng, shapes):
    """Parameters of the usual scales: weights keep the variance, scales are about 1, the rest is small."""

    def leaf(path, shape):
        noise = rng.standard_normal(shape.shape)
        match path[-1].key:
            case "w":
                return noise / shape.shape[-2] ** 0.5
            case "kernel":
                return noise / np.prod(shape.shape[:-1]) ** 0.5
            case "token":
                return noise / shape.shape[-1] ** 0.5
            case "scale":
                return 1 + 0.1 * noise
            case _:
                return 0.1 * noise

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def mse(x, y, low):
    return jnp.mean(jnp.square(full(x, low) - y))


def perceptron(layers, x, low, activation=jnp.tanh):
    for p in layers[:-1]:
        x = activation(dense(p, x, low))
    return dense(layers[-1], x, low)


def mlp_case(low, batch=64, dim=32, hidden=64, classes=10):
    def init(rng):
        params = draw(rng, [layer(dim, hidden), layer(hidden, hidden), layer(hidden, classes)])
        return params, rng.standard_normal((batch, dim)), rng.integers(0, classes, (batch,))

    def loss_fn(params, x, labels):
        return cross_entropy(perceptron(params, x, low, jax.nn.gelu), labels, low)

    return loss_fn, init


def cnn_case(low, batch=8, size=8, width=8, classes=10):
    """Three convolutions with BatchNorm, one of them around a residual, and a head on the mean."""

    def init(rng):
        convs = [
            {"kernel": Shape((3, 3, n, width), F32), "scale": Shape((width,), F32), "bias": Shape((width,), F32)}
            for n in (3, width, width)
        ]
        params = draw(rng, {"convs": convs, "head": layer(width, classes)})
        images = rng.standard_normal((batch, size, size, 3))
        return params, images, rng.integers(0, classes, (batch,))

    def conv_norm(p, x, stride):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(
            to(x, low), to(p["kernel"], low), (stride, stride), "SAME", dimension_numbers=numbers
        )
        h = full(x, low)
        mean, square = jnp.mean(h, (0, 1, 2)), jnp.mean(jnp.square(h), (0, 1, 2))
        return to((h - mean) * (p["scale"] * lax.rsqrt(square - jnp.square(mean) + 1e-5)) + p["bias"], low)

    def loss_fn(params, images, labels):
        first, second, third = params["convs"]
        x = jax.nn.silu(conv_norm(first, images, 1))
        x = jax.nn.silu(conv_norm(second, x, 2))
        x = jax.nn.silu(x + conv_norm(third, x, 1))
        return cross_entropy(dense(params["head"], jnp.mean(full(x, low), (1, 2)), low), labels, low)

    return loss_fn, init


def gpt_block_case(low, batch=2, length=16, dim=32, heads=4, vocab=64):
    loss_fn, (shapes, _) = gpt_case(low, 1, batch=batch, length=length, dim=dim, heads=heads, vocab=vocab)

    def init(rng):
        return draw(rng, shapes), rng.integers(0, vocab, (batch, length + 1))

    return loss_fn, init


def vit_case(low, batch=4, patches=3, patch=4, dim=32, heads=4, layers=1, classes=10):
    tokens, pixels = patches * patches, patch * patch * 3

    def init(rng):
        blocks, last = block_shapes(dim, layers, stacked=False)
        shapes = {
            "patch": layer(pixels, dim),
            "class": Shape((dim,), F32),
            "position": Shape((tokens + 1, dim), F32),
            "blocks": blocks,
            "norm": last,
            "head": layer(dim, classes),
        }
        images = rng.standard_normal((batch, patches * patch, patches * patch, 3))
        return draw(rng, shapes), images, rng.integers(0, classes, (batch,))

    def loss_fn(params, images, labels):
        x = images.reshape(batch, patches, patch, patches, patch, 3).swapaxes(2, 3).reshape(batch, tokens, pixels)
        first = jnp.broadcast_to(to(params["class"], low), (batch, 1, dim))
        x = jnp.concatenate([first, dense(params["patch"], x, low)], 1) + to(params["position"], low)
        for p in params["blocks"]:
            x = transformer_layer(p, x, low, heads, causal=False)
        return cross_entropy(dense(params["head"], norm(params["norm"], x, low)[:, 0], low), labels, low)

    return loss_fn, init


def recurrent_case(low, gates, step, states, batch=4, steps=20, dim=32, classes=16):
    """Predicts the next of random tokens; `step(dense_of, states, x)` returns the states, the output first."""

    def init(rng):
        shapes = {"token": Shape((classes, dim), F32), "gates": gates(dim), "out": layer(dim, classes)}
        return draw(rng, shapes), rng.integers(0, classes, (steps + 1, batch))

    def loss_fn(params, tokens):
        def body(carry, x):
            carry = step(lambda name, x: dense(params["gates"][name], x, low), carry, x)
            return carry, carry[0]

        xs = to(params["token"][tokens[:-1]], low)
        _, hs = lax.scan(body, (jnp.zeros_like(xs[0]),) * states, xs)
        return cross_entropy(dense(params["out"], hs, low), tokens[1:], low)

    return loss_fn, init


def lstm_step(dense_of, carry, x):
    h, c = carry
    i, f, g, o = jnp.split(dense_of("all", jnp.concatenate([x, h], -1)), 4, -1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gru_step(dense_of, carry, x):
    (h,) = carry
    z, r = jnp.split(jax.nn.sigmoid(dense_of("gates", jnp.concatenate([x, h], -1))), 2, -1)
    n = jnp.tanh(dense_of("input", x) + r * dense_of("state", h))
    return ((1 - z) * n + z * h,)


def lstm_case(low):
    return recurrent_case(low, lambda n: {"all": layer(2 * n, 4 * n)}, lstm_step, 2)


def gru_case(low):
    return recurrent_case(
        low, lambda n: {"gates": layer(2 * n, 2 * n), "input": layer(n, n), "state": layer(n, n)}, gru_step, 1
    )


def attention_case(low, batch=4, length=16, dim=32, heads=4):
    """One layer of causal attention, fitted to random targets."""

    def init(rng):
        x, y = rng.standard_normal((2, batch, length, dim))
        return draw(rng, {"qkv": layer(dim, 3 * dim), "proj": layer(dim, dim)}), x, y

    def loss_fn(params, x, y):
        return mse(attention(params, x, low, heads, causal=True), y, low)

    return loss_fn, init


def flow_case(low, batch=64, dim=8, hidden=32, couplings=4):
    """Affine couplings (RealNVP): the negative log-likelihood of random data."""

    def init(rng):
        nets = [[layer(dim // 2, hidden), layer(hidden, hidden), layer(hidden, dim)]] * couplings
        return draw(rng, nets), rng.standard_normal((batch, dim))

    def loss_fn(params, x):
        log_det = jnp.zeros_like(x[:, 0])
        for net in params:
            a, b = jnp.split(x, 2, -1)
            scale, shift = jnp.split(full(perceptron(net, a, low), low), 2, -1)
            scale = jnp.tanh(scale)
            log_det = log_det + jnp.sum(scale, -1)
            x = jnp.concatenate([b * jnp.exp(scale) + shift, a], -1)
        return jnp.mean(0.5 * jnp.sum(jnp.square(x), -1) - log_det)

    return loss_fn, init


def graph_case(low, nodes=48, degree=6, dim=16, hidden=32, classes=8):
    """Two graph convolutions with the normalised sum over neighbours, by edges."""

    def init(rng):
        x = rng.standard_normal((nodes, dim))
        edges = rng.integers(0, nodes, (2, nodes * degree))
        return draw(rng, [layer(dim, hidden), layer(hidden, classes)]), x, edges, rng.integers(0, classes, (nodes,))

    def loss_fn(params, x, edges, labels):
        source, target = edges
        degrees = 1 + jnp.zeros_like(x[:, 0]).at[target].add(1)
        weight = lax.rsqrt(degrees[source] * degrees[target])[:, None]

        def convolve(p, x):
            h = full(to(x, low) @ to(p["w"], low), low)
            sums = (h / degrees[:, None]).at[target].add(weight * h[source])
            return to(sums + p["b"], low)

        x = jax.nn.silu(convolve(params[0], x))
        return cross_entropy(convolve(params[1], x), labels, low)

    return loss_fn, init


def ode_case(low, batch=16, dim=8, hidden=32, steps=20):
    """A neural ODE by the fourth-order Runge-Kutta method."""

    def init(rng):
        x, y = rng.standard_normal((2, batch, dim))
        return draw(rng, [layer(dim, hidden), layer(hidden, dim)]), x, y

    def loss_fn(params, x, y):
        def field(x):
            return full(perceptron(params, x, low), low)

        def step(x, _):
            dt = 1 / steps
            k1 = field(x)
            k2 = field(x + dt / 2 * k1)
            k3 = field(x + dt / 2 * k2)
            k4 = field(x + dt * k3)
            return x + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

        x, _ = lax.scan(step, x, length=steps)
        return mse(x, y, low)

    return loss_fn, init


def one_hot(rng, shape):
    return np.eye(shape[-1])[rng.integers(0, shape[-1], shape[:-1])]


def normal(rng, shape):
    return rng.standard_normal(shape)


OPTAX_LOSSES = {  # with the targets of each, drawn in the shape of the logits
    "softmax_cross_entropy": (optax.softmax_cross_entropy, one_hot),
    "softmax_cross_entropy_with_integer_labels": (
        optax.softmax_cross_entropy_with_integer_labels,
        lambda rng, shape: rng.integers(0, shape[-1], shape[:-1]),
    ),
    "smooth_labels": (lambda x, y: optax.softmax_cross_entropy(x, optax.smooth_labels(y, 0.1)), one_hot),
    "kl_divergence": (
        lambda x, y: optax.kl_divergence(jax.nn.log_softmax(x), y),
        lambda rng, shape: rng.dirichlet(np.ones(shape[-1]), shape[:-1]),
    ),
    "sigmoid_binary_cross_entropy": (optax.sigmoid_binary_cross_entropy, one_hot),
    "sigmoid_focal_loss": (optax.sigmoid_focal_loss, one_hot),
    "l2_loss": (optax.l2_loss, normal),
    "huber_loss": (optax.huber_loss, normal),
    "log_cosh": (optax.log_cosh, normal),
    "cosine_distance": (optax.cosine_distance, normal),
    "hinge_loss": (optax.hinge_loss, lambda rng, shape: np.sign(normal(rng, shape))),
}


def optax_case(low, loss, targets, batch=32, dim=32, classes=16):
    """A loss of `optax` on the logits of one linear layer."""

    def init(rng):
        y = targets(rng, (batch, classes))
        return draw(rng, layer(dim, classes)), rng.standard_normal((batch, dim)), y

    def loss_fn(params, x, y):
        return jnp.mean(loss(full(dense(params, x, low), low), y))

    return loss_fn, init


def ctc_case(low, batch=2, steps=12, dim=16, classes=8, labels=4, length=16):
    """`optax.ctc_loss` on the logits of one linear layer; the labels are padded, to more than there are steps."""

    def init(rng):
        y = rng.integers(1, classes, (batch, length))
        return draw(rng, layer(dim, classes)), rng.standard_normal((batch, steps, dim)), y

    def loss_fn(params, x, y):
        logits = full(dense(params, x, low), low)
        no_padding = jnp.zeros_like(logits[..., 0])
        padding = jnp.broadcast_to((jnp.arange(length) >= labels).astype(logits.dtype), y.shape)
        return jnp.mean(optax.ctc_loss(logits, no_padding, y, padding))

    return loss_fn, init


_CASES = {
    "MLP": mlp_case,
    "CNN with BatchNorm": cnn_case,
    "GPT block": gpt_block_case,
    "ViT": vit_case,
    "LSTM": lstm_case,
    "GRU": gru_case,
    "attention": attention_case,
    "normalising flow": flow_case,
    "graph convolution": graph_case,
    "ODE integration": ode_case,
    **{
        f"`optax.{name}`": functools.partial(optax_case, loss=loss, targets=y)
        for name, (loss, y) in OPTAX_LOSSES.items()
    },
    "`optax.ctc_loss`": ctc_case,
}


def drawn(case, low=None, seed=0, **sizes):
    """Returns the loss function of a case, and its arguments in float32 and int32."""
    loss_fn, init = case(low, **sizes)
    args = init(np.random.default_rng(seed))
    return loss_fn, jax.tree.map(lambda x: x.astype(np.float32 if x.dtype == float else np.int32), args)


CASES = {name: functools.partial(drawn, case) for name, case in _CASES.items()}
