"""A training run on one device, and ways to spread it over many."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jmp_amp as amp

RULE = amp.LossScale(init_scale=2.0**10, growth_interval=2)
BAD_STEP = 2
SCALES = [1024, 2048, 1024, 1024, 2048]  # after each step
CLIP = 0.5


def initial_params():
    rng = np.random.default_rng(0)
    shapes = {"w1": (8, 8), "b1": (8,), "w2": (8, 4), "b2": (4,)}
    return {name: 0.3 * rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def batch_of(step):
    """Eight examples; in one step, one of them holds an infinity.

    It multiplies one bias in the loss. The gradient of that bias overflows and no other does, so that one device sees
    it, whether the examples are spread or the hidden units.
    """
    rng = np.random.default_rng(1 + step)
    shapes = {"x": (8, 8), "y": (8, 4), "tilt": (8, 8)}
    batch = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    if step == BAD_STEP:
        batch["tilt"][5, 6] = np.inf
    return batch


def loss_fn(params, batch, product=jnp.dot):
    """Of a small MLP; `product` is the one over the hidden units, which tensor parallelism spreads."""
    hidden = jnp.tanh(batch["x"] @ params["w1"] + params["b1"])
    errors = product(hidden, params["w2"]) + params["b2"] - batch["y"]
    return jnp.mean(jnp.square(errors).sum(axis=1) + product(batch["tilt"], params["b1"]))


def optimizer(clip=None, axis_name=None):
    return amp.dynamic_loss_scale(optax.adamw(1e-2), RULE, axis_name, clip_global_norm=clip)


def train_step(tx, loss_and_grads):
    def step(params, state, batch):
        loss, grads = loss_and_grads(params, batch, amp.get_loss_scale(state))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return step


def loss_and_grads(params, batch, scale, loss_fn=loss_fn):
    return amp.value_and_grad(loss_fn, loss_scale=scale)(params, batch)


def train(step, params, state, place_batch=lambda batch: batch):
    """Returns parameters, state and loss after each step."""
    history = []
    for i in range(len(SCALES)):
        params, state, loss = step(params, state, place_batch(batch_of(i)))
        history.append((params, state, loss))
    return history


@functools.cache
def control(clip):
    """On one device."""
    tx = optimizer(clip)
    return jax.device_get(train(jax.jit(train_step(tx, loss_and_grads)), initial_params(), tx.init(initial_params())))


# The ways to spread a run over a mesh of the axes "data" and "model": how many devices each has, and the parameters.
NAMES = ("w1", "b1", "w2", "b2")
WAYS = {
    "data_parallel": ((4, 1), dict.fromkeys(NAMES, P())),
    "fsdp": ((4, 1), dict.fromkeys(NAMES, P("data"))),
    "tensor_parallel": ((1, 4), {"w1": P(None, "model"), "b1": P("model"), "w2": P("model"), "b2": P()}),
    "fsdp_and_tensor": ((4, 2), {"w1": P("data", "model"), "b1": P("model"), "w2": P("model", "data"), "b2": P()}),
}
BATCH = {"x": P("data"), "y": P("data"), "tilt": P("data", "model")}


def gathered(spec):
    return P(*(None if axis == "data" else axis for axis in spec))


def types_say_so(specs):
    """Where the mesh is a part of the types, what is gathered and summed over devices is written out."""
    product = functools.partial(jnp.dot, out_sharding=P("data"))

    def explicit_loss_fn(params, batch):
        params = {name: jax.sharding.reshard(p, gathered(specs[name])) for name, p in params.items()}
        return loss_fn(params, batch, product)

    return functools.partial(loss_and_grads, loss_fn=explicit_loss_fn)


def by_hand(specs, typed=True):
    """For `shard_map`: from what a device holds, the loss of all devices, and its part of the gradients of all."""

    def sharded_axis(name):
        return specs[name].index("data") if "data" in specs[name] else None

    def gather(name, p):
        if (axis := sharded_axis(name)) is not None:
            return lax.all_gather(p, "data", axis=axis, tiled=True)
        # Otherwise JAX sums the gradients of what is the same on all devices.
        return lax.pcast(p, "data", to="varying") if typed else p

    def reduce(name, g):
        if (axis := sharded_axis(name)) is not None:
            total = lax.psum_scatter(g, "data", scatter_dimension=axis, tiled=True)
            return total / lax.axis_size("data")
        return lax.pmean(g, "data")

    def my_loss_and_grads(params, batch, scale):
        whole = {name: gather(name, p) for name, p in params.items()}
        my_loss_fn = functools.partial(loss_fn, product=lambda x, w: lax.psum(x @ w, "model"))
        loss, grads = loss_and_grads(whole, batch, scale, my_loss_fn)
        return lax.pmean(loss, "data"), {name: reduce(name, g) for name, g in grads.items()}

    return my_loss_and_grads


def start(way, how, clip):
    """Returns a mesh, the compiled step, and what it begins with, of which each device takes its part."""
    shape, specs = WAYS[way]
    axis_type = AxisType.Explicit if how == "explicit" else AxisType.Auto
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(axis_type,) * 2, devices=devices)
    tx = optimizer(clip, ("data", "model") if how.startswith("shard_map") else None)
    state = tx.init(initial_params())
    state_specs = optax.tree.map_params(
        tx, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P(), is_leaf=lambda x: isinstance(x, P)
    )
    in_specs, out_specs = (specs, state_specs, BATCH), (specs, state_specs, P())
    if how.startswith("shard_map"):
        typed = how == "shard_map"
        step = train_step(tx, by_hand(specs, typed))
        step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=typed))
    else:
        step = train_step(tx, loss_and_grads if how == "auto" else types_say_so(specs))
        step = jax.jit(step, out_shardings=jax.tree.map(functools.partial(NamedSharding, mesh), out_specs))

    def place(tree, specs):
        def leaf(x, spec):
            x = np.asarray(x)
            return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: x[index])

        return jax.tree.map(leaf, tree, specs)

    return mesh, step, place(initial_params(), specs), place(state, state_specs), lambda batch: place(batch, BATCH)


@functools.cache
def run(way, how, clip):
    mesh, step, *rest = start(way, how, clip)
    with jax.set_mesh(mesh):
        history = train(step, *rest)
    assert step._cache_size() == 1
    return history
