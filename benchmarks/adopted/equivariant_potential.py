"""A potential of atoms: energies by messages between neighbors with a smooth cutoff, and forces as their gradients."""

import jax
import jax.numpy as jnp
import optax

ATOMS, WIDTH, CUTOFF = 8, 32, 3.0


def cutoff(r):
    u = r / CUTOFF
    return jnp.where(u < 1, 1 - 28 * u**6 + 48 * u**7 - 21 * u**8, 0.0)


def energy_of(params, positions):
    offsets = positions[:, None] - positions + jnp.eye(ATOMS)[..., None]  # no length is 0
    lengths = jnp.sqrt(jnp.sum(offsets**2, -1))
    envelope = cutoff(lengths) * (1 - jnp.eye(ATOMS))
    n = jnp.arange(1, 9)
    basis = jnp.sin(n * jnp.pi * lengths[..., None] / CUTOFF) / lengths[..., None] * envelope[..., None]
    nodes, vectors = jnp.broadcast_to(params["embed"], (ATOMS, WIDTH)), jnp.zeros((ATOMS, WIDTH, 3))
    for layer in params["layers"]:
        weights = jax.nn.silu(basis @ layer["radial"]) @ layer["mix"] * envelope[..., None]
        to_scalar, to_vector = jnp.split(weights, 2, -1)
        messages = nodes @ layer["in"]
        scalars = jnp.einsum("ijc,jc->ic", to_scalar, messages)
        vectors = vectors + jnp.einsum("ijc,jc,ijx->icx", to_vector, messages, offsets / lengths[..., None])
        lengths_of = jnp.sum(jnp.einsum("icx,cd->idx", vectors, layer["vector"]) ** 2, -1)
        nodes = nodes + jax.nn.silu(jnp.concatenate([scalars, lengths_of], -1) @ layer["out"])
    return jnp.sum(jax.nn.silu(nodes @ params["head"]) @ params["last"])


def loss_fn(params, positions, energies, forces):
    found, gradients = jax.vmap(jax.value_and_grad(energy_of, 1), (None, 0))(params, positions)
    return jnp.mean((found - energies) ** 2) / ATOMS + jnp.mean((gradients + forces) ** 2)


def morse(positions):
    offsets = positions[:, None] - positions + jnp.eye(ATOMS)[..., None]
    lengths = jnp.sqrt(jnp.sum(offsets**2, -1))
    pairs = ((1 - jnp.exp(-(lengths - 1.2))) ** 2 - 1) * cutoff(lengths) * (1 - jnp.eye(ATOMS))
    return jnp.sum(pairs) / 2


def init(key):
    sizes = {"radial": (8, WIDTH), "mix": (WIDTH, 2 * WIDTH), "in": (WIDTH, WIDTH), "vector": (WIDTH, WIDTH)}
    sizes |= {"out": (2 * WIDTH, WIDTH)}
    keys = iter(jax.random.split(key, 20))

    def normal(n, m):
        return jax.random.normal(next(keys), (n, m)) * n**-0.5

    layers = [{k: normal(*s) for k, s in sizes.items()} for _ in range(2)]
    return {"embed": normal(1, WIDTH), "layers": layers, "head": normal(WIDTH, WIDTH), "last": normal(WIDTH, 1)}


def main(steps):
    grid = jnp.stack(jnp.meshgrid(*[jnp.arange(2.0)] * 3, indexing="ij"), -1).reshape(ATOMS, 3) * 1.3
    positions = grid + 0.15 * jax.random.normal(jax.random.key(1), (16, ATOMS, 3))
    energies, gradients = jax.vmap(jax.value_and_grad(morse))(positions)
    data = positions, energies - energies.mean(), -gradients
    params, tx = init(jax.random.key(0)), optax.adam(3e-3)

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(loss_fn)(params, *data)
        updates, opt_state = tx.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for _ in range(steps):
        params, opt_state, loss = step(params, opt_state)
        losses.append(loss)
    return losses
