"""An equivariant network that tells the eight shapes of four cubes apart, two of which are mirror images."""

import jax
import jax.numpy as jnp
import optax

SHAPES = jnp.array([
    [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 1, 0]],  # chiral
    [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, -1, 0]],  # its mirror image
    [[0, 0, 0], [1, 0, 0], [0, 1, 0], [1, 1, 0]],  # square
    [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 3]],  # line
    [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]],  # corner
    [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0]],  # L
    [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 1]],  # T
    [[0, 0, 0], [1, 0, 0], [1, 1, 0], [2, 1, 0]],  # zigzag
], jnp.float32)  # fmt: skip
WIDTH = 16


def logits_of(params, positions):
    """Returns the scores of the classes; they do not change if the positions are rotated."""
    offsets = positions[:, None] - positions
    squares = jnp.sum(offsets**2, -1)
    near = (squares > 0) & (squares < 2.5)
    lengths = jnp.sqrt(jnp.where(near, squares, 1.0))
    directions = jnp.where(near[..., None], offsets / lengths[..., None], 0.0)
    radial = jnp.exp(-((lengths[..., None] - jnp.linspace(0.8, 1.6, 8)) ** 2) * 10) * near[..., None]
    scalars, vectors = jnp.ones((4, WIDTH)), jnp.zeros((4, WIDTH, 3))
    for layer in params["layers"]:
        weights = jnp.tanh(radial @ layer["radial"]) @ layer["mix"]  # of each edge
        to_scalar, to_vector, along, across = jnp.split(weights, 4, -1)
        with jax.named_scope("vectors"):
            sent = jnp.einsum("jc,ijc,ijx->icx", scalars @ layer["in"], to_vector, directions)
            sent += jnp.einsum("jcx,ijc->icx", vectors, along)
            sent += jnp.einsum("ijc,ijcx->icx", across, jnp.cross(vectors[None], directions[:, :, None]))
            inner = jnp.einsum("jcx,ijx,ijc->ic", vectors, directions, to_scalar)
            vectors = vectors + jnp.einsum("icx,cd->idx", sent, layer["vector"])
            turned = jnp.einsum("icx,cd->idx", vectors, layer["turn"])
            volume = jnp.sum(vectors * jnp.cross(turned, jnp.roll(turned, 1, 1)), -1)
        scalars = scalars + jax.nn.silu(jnp.concatenate([inner, jnp.sum(vectors**2, -1), volume], -1) @ layer["out"])
    return jnp.sum(scalars @ params["head"], 0)


def loss_fn(params, positions):
    logits = jax.vmap(logits_of, (None, 0))(params, positions)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(8)))


def init(key):
    sizes = {"in": (WIDTH, WIDTH), "radial": (8, 32), "mix": (32, 4 * WIDTH), "vector": (WIDTH, WIDTH)}
    sizes |= {"turn": (WIDTH, WIDTH), "out": (3 * WIDTH, WIDTH)}
    keys = iter(jax.random.split(key, 20))

    def normal(n, m):
        return jax.random.normal(next(keys), (n, m)) * n**-0.5

    return {"layers": [{k: normal(*s) for k, s in sizes.items()} for _ in range(2)], "head": normal(WIDTH, 8)}


def train(steps):
    """Returns the parameters and the losses."""
    params, tx = init(jax.random.key(0)), optax.adam(5e-3)

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(loss_fn)(params, SHAPES)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state)
        losses.append(loss)
    return params, losses


def main(steps):
    return train(steps)[1]
