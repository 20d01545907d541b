"""A graph network in Flax Linen: padded graphs in one batch, sums over edges, and labels of which some are missing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state

GRAPHS, NODES, EDGES, TASKS = 9, 96, 256, 4  # the last graph is padding


class GraphNet(nn.Module):
    @nn.compact
    def __call__(self, graph):
        senders, receivers, n_node = graph["senders"], graph["receivers"], graph["n_node"]
        of_graph = jnp.repeat(jnp.arange(GRAPHS), n_node, total_repeat_length=NODES)
        nodes, edges = nn.Dense(48)(graph["nodes"]), nn.Dense(48)(graph["edges"])
        total = jnp.zeros((GRAPHS, 48))
        for _ in range(3):
            edges = self.mlp(edges, nodes[senders], nodes[receivers], total[of_graph[senders]])
            sent = jax.ops.segment_sum(edges, senders, NODES)
            received = jax.ops.segment_sum(edges, receivers, NODES)
            nodes = nodes + self.mlp(nodes, sent, received, total[of_graph])
            total = total + self.mlp(total, jax.ops.segment_sum(nodes, of_graph, GRAPHS))
        return nn.Dense(TASKS)(total)

    def mlp(self, *inputs):
        x = nn.relu(nn.Dense(48)(jnp.concatenate(inputs, -1)))
        return nn.LayerNorm()(nn.Dense(48)(x))


def train_step(state, graph, labels):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, graph)
        mask = ~jnp.isnan(labels) & (jnp.arange(GRAPHS) < GRAPHS - 1)[:, None]
        losses = optax.sigmoid_binary_cross_entropy(logits, jnp.where(mask, labels, 0.0))
        return jnp.sum(jnp.where(mask, losses, 0.0)) / jnp.sum(mask)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def batch():
    rng = np.random.default_rng(0)
    n_node = np.append(rng.integers(6, 12, GRAPHS - 1), 0)
    n_node[-1] = NODES - n_node.sum()
    ends = [rng.integers(a, a + n, (2, 24)) for a, n in zip(np.cumsum(n_node) - n_node, n_node, strict=True)]
    senders, receivers = np.concatenate(ends, 1)[:, :EDGES].astype(np.int32)
    features = {"nodes": rng.normal(size=(NODES, 8)), "edges": rng.normal(size=(len(senders), 4))}
    labels = np.where(rng.random((GRAPHS, TASKS)) < 0.2, np.nan, rng.integers(0, 2, (GRAPHS, TASKS)))
    graph = {name: x.astype(np.float32) for name, x in features.items()}
    return graph | {"senders": senders, "receivers": receivers, "n_node": n_node}, labels.astype(np.float32)


def main(steps):
    graph, labels = batch()
    model, tx = GraphNet(), optax.adam(1e-3)
    params = model.init(jax.random.key(0), graph)["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    step, losses = jax.jit(train_step), []
    for _ in range(steps):
        state, loss = step(state, graph, labels)
        losses.append(loss)
    return losses
