"""A loss that was not scaled is found while the step is traced, however it is split; a scaled one passes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jmp_amp as amp
from jmp_amp import LossScale

pytestmark = pytest.mark.usefixtures("users_code")

X = jnp.linspace(-1, 1, 8).reshape(4, 2)
WEIGHTS = {"w": jnp.ones((2, 2)), "b": jnp.zeros(2)}


def loss_on(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)


def penalized(p, x, factor):
    return loss_on(p, x) + factor * sum(jnp.sum(w**2) for w in jax.tree.leaves(p))


def weighted(p, x):
    weights = jnp.abs(x[:, 0])
    return jnp.sum(weights * jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2, 1)) / jnp.sum(weights)


# From parameters, batch and scale, gradients of the loss.
SCALED = {
    "by value_and_grad": lambda p, x, scale: amp.grad(loss_on, loss_scale=scale)(p, x),
    "by hand": lambda p, x, scale: jax.grad(lambda p: loss_on(p, x) * scale)(p),
    "loss by loss": lambda p, x, scale: jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2 * scale))(p),
    "after all": lambda p, x, scale: jax.tree.map(lambda g: g * scale, jax.grad(loss_on)(p, x)),
    "in a jit of its own": lambda p, x, scale: jax.jit(lambda p, s: amp.grad(loss_on, loss_scale=s)(p, x))(p, scale),
    "in micro-batches": lambda p, x, scale: amp.grad(loss_on, loss_scale=scale, accumulate_steps=2)(p, x),
    "under autocast": lambda p, x, scale: amp.grad(amp.autocast(loss_on), loss_scale=scale)(p, x),
    "example by example": lambda p, x, scale: jax.tree.map(
        lambda g: g.mean(0), jax.vmap(lambda x: amp.grad(loss_on, loss_scale=scale)(p, x[None]))(x)
    ),
    "with a penalty": lambda p, x, scale: amp.grad(
        lambda p: loss_on(p, x) + optax.tree.norm(jax.grad(loss_on)(p, x)), loss_scale=scale
    )(p),
    "of moved parameters": lambda p, x, scale: amp.grad(loss_on, loss_scale=scale)(
        jax.tree.map(jnp.add, p, jax.grad(loss_on)(p, x)), x
    ),
    "of two losses": lambda p, x, scale: jax.tree.map(
        lambda g, h: g + scale * h, amp.grad(loss_on, loss_scale=scale)(p, x), jax.grad(loss_on)(p, -x)
    ),
    "not here": lambda p, x, scale: p,
    "with a traced penalty": lambda p, x, scale: amp.grad(penalized, loss_scale=scale)(p, x, x[0, 0]),
    "a mean with weights": lambda p, x, scale: amp.grad(weighted, loss_scale=scale)(p, x),
}
UNSCALED = {
    "without a scale": lambda p, x, scale: amp.grad(loss_on)(p, x),
    "by jax.grad": lambda p, x, scale: jax.grad(loss_on)(p, x),
    "with a number": lambda p, x, scale: amp.grad(loss_on, loss_scale=2.0**16)(p, x),
    "in a jit of its own": lambda p, x, scale: jax.jit(jax.grad(loss_on))(p, x),
    "of a jit": lambda p, x, scale: jax.grad(jax.jit(loss_on))(p, x),
    "of a checkpoint": lambda p, x, scale: jax.grad(jax.checkpoint(loss_on))(p, x),
    "of a float16 loss": lambda p, x, scale: amp.grad(lambda p, x: loss_on(p, x).astype(jnp.float16))(p, x),
    "in micro-batches": lambda p, x, scale: amp.grad(loss_on, accumulate_steps=2)(p, x),
    "masked": lambda p, x, scale: jax.tree.map(lambda g: g * np.float32([1, 0]), jax.grad(loss_on)(p, x)),
    "clipped": lambda p, x, scale: jax.tree.map(lambda g: jnp.clip(g, -1, 1), jax.grad(loss_on)(p, x)),
    "with a traced penalty": lambda p, x, scale: amp.grad(penalized)(p, x, x[0, 0]),
    "a mean with weights": lambda p, x, scale: jax.grad(weighted)(p, x),
    "between two losses": lambda p, x, scale: amp.grad(lambda p, x, t: t * loss_on(p, x) + (1 - t) * loss_on(p, 2 * x))(
        p, x, x[0, 0]
    ),
}
AROUND = {  # traced, as this is where a wrong scale is found, and not compiled
    "jit": lambda step, *args: jax.jit(step)(*args),
    "scan": lambda step, params, state, x: lax.scan(lambda s, x: (step(params, s, x)[1], None), state, x[None])[0],
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", SCALED)
def test_gradients_of_a_scaled_loss_pass(name, around):
    tx = amp.dynamic_loss_scale(optax.sgd(0.1))

    def step(params, state, x):
        return tx.update(SCALED[name](params, x, amp.get_loss_scale(state)), state, params)

    trace(around, step, WEIGHTS, tx.init(WEIGHTS), X)


def trace(around, *args):
    jax.eval_shape(lambda: AROUND[around](*args))


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("name", UNSCALED)
def test_a_forgotten_scale_is_found_while_the_step_is_traced(name, around):
    def step(tx, params, state, x, **scale):
        return tx.update(UNSCALED[name](params, x, amp.get_loss_scale(state)), state, params, **scale)

    tx = amp.dynamic_loss_scale(optax.sgd(0.1))
    with pytest.raises(
        ValueError, match=r"gradient at `\['b'\]` does not depend on the loss scale.*opt_state=opt_state"
    ):
        trace(around, functools.partial(step, tx), WEIGHTS, tx.init(WEIGHTS), X)
    # A scale that is known to stand still, or is handed in as a number, may be one.
    for rule, scale in (
        (LossScale.none(), {}),
        (LossScale.static(2.0**16), {}),
        (LossScale(), {"loss_scale": 2.0**16}),
    ):
        tx = amp.dynamic_loss_scale(optax.sgd(0.1), rule)
        trace(around, functools.partial(step, tx, **scale), WEIGHTS, tx.init(WEIGHTS), X)


# Operations that change no value, between any two parts of a step.
MESH = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
IDENTITIES = {
    "nothing": lambda tree, flag: tree,
    "a barrier": lambda tree, flag: lax.optimization_barrier(tree),
    "a sharding": lambda tree, flag: lax.with_sharding_constraint(tree, NamedSharding(MESH, PartitionSpec())),
    "where": lambda tree, flag: jax.tree.map(lambda x: jnp.where(flag, x, jnp.zeros_like(x)), tree),
    "a cast": lambda tree, flag: jax.tree.map(lambda x: x.astype(jnp.complex64).real.astype(x.dtype), tree),
    "a name": lambda tree, flag: jax.tree.map(lambda x: checkpoint_name(x, "name"), tree),
    "a jit": lambda tree, flag: jax.jit(copy)(tree),
    "a cond": lambda tree, flag: lax.cond(flag, copy, lambda tree: jax.tree.map(jnp.zeros_like, tree), tree),
    "a scan": lambda tree, flag: lax.scan(lambda tree, _: (copy(tree), None), tree, length=1)[0],
    "a vmap": lambda tree, flag: jax.tree.map(lambda x: jax.vmap(jnp.copy)(x[None])[0], tree),
    "a checkpoint": lambda tree, flag: jax.checkpoint(copy)(tree),
    "a shard_map": lambda tree, flag: jax.shard_map(
        copy, mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec()
    )(tree),
}


def copy(tree):
    return jax.tree.map(jnp.copy, tree)


# From functions that compute gradients and updates, a step that is split into functions.
SPLITS = {
    "one function": lambda grad, update, p, s, x: update(grad(p, x, scale_of(s)), s, p),
    "a jit for the gradients": lambda grad, update, p, s, x: update(jax.jit(grad)(p, x, scale_of(s)), s, p),
    "a jit for each part": lambda grad, update, p, s, x: jax.jit(update)(
        jax.jit(grad)(p, x, jax.jit(scale_of)(s)), s, p
    ),
    "a jit in a jit": lambda grad, update, p, s, x: jax.jit(
        lambda p, s: jax.jit(lambda p, s: update(jax.jit(grad)(p, x, scale_of(s)), s, p))(p, s)
    )(p, s),
    "a jit that is given the scale": lambda grad, update, p, s, x: jax.jit(
        lambda p, s, x, scale: update(grad(p, x, scale), s, p)
    )(p, s, x, scale_of(s)),
    "a jit that is given the scale and jits the gradients": lambda grad, update, p, s, x: jax.jit(
        lambda p, s, x, scale: update(jax.jit(grad)(p, x, scale), s, p)
    )(p, s, x, scale_of(s)),
    "a jit that is given several scales": lambda grad, update, p, s, x: jax.jit(
        lambda p, s, x, scales: update(grad(p, x, scales[0]), s, p)
    )(p, s, x, jnp.stack([scale_of(s), scale_of(s)])),
    "jits that are given several states": lambda grad, update, p, s, x: jax.jit(
        lambda p, states, x: update(
            jax.jit(lambda p, states, x: grad(p, x, scale_of(first(states))))(p, states, x), first(states), p
        )
    )(p, jax.tree.map(lambda x: x[None], s), x),
    "a jit that closes over the scale": lambda grad, update, p, s, x: (
        lambda scale: jax.jit(lambda p, s: update(grad(p, x, scale), s, p))(p, s)
    )(scale_of(s)),
    "a jit that closes over the state": lambda grad, update, p, s, x: jax.jit(
        lambda p: update(grad(p, x, scale_of(s)), s, p)
    )(p),
    "a scan": lambda grad, update, p, s, x: lax.scan(
        lambda s, x: (update(grad(p, x, scale_of(s)), s, p)[1], None), s, x[None]
    ),
    "a scan over gradients": lambda grad, update, p, s, x: update(
        first(lax.map(lambda x: grad(p, x, scale_of(s)), x[None])), s, p
    ),
    "a cond": lambda grad, update, p, s, x: lax.cond(
        x[0, 0] > 0, lambda: update(grad(p, x, scale_of(s)), s, p), lambda: (jax.tree.map(jnp.zeros_like, p), s)
    ),
    "a vmap": lambda grad, update, p, s, x: jax.vmap(lambda x: update(grad(p, x, scale_of(s)), s, p))(x[None]),
    "a vmap of a jit": lambda grad, update, p, s, x: jax.vmap(
        jax.jit(lambda s, scale: update(grad(p, x, scale), s, p))
    )(*jax.tree.map(lambda x: x[None], (s, scale_of(s)))),
    "a forward and a backward pass": lambda grad, update, p, s, x: jax.jit(
        lambda pull, s, p, cotangent: update(pull(cotangent)[0], s, p)
    )(jax.jit(lambda p: jax.vjp(lambda p: loss_on(p, x), p)[1])(p), s, p, scale_of(s)),
    "two stages": lambda grad, update, p, s, x: jax.jit(
        lambda p, s, cotangent: update(
            jax.vjp(jax.checkpoint(lambda p: jnp.sin(x @ p["w"] + p["b"]) * jnp.ones(2)), p)[1](cotangent)[0], s, p
        )
    )(p, s, jax.grad(lambda h: loss_on(WEIGHTS, h) * scale_of(s))(x)),
}
# Those in which the update shares a function with the backward pass, and no function that the scale enters has both.
OPEN_SPLITS = [
    "one function",
    "a jit that is given the scale",
    "a jit that is given several scales",
    "a jit that closes over the scale",
    "a jit that closes over the state",
    "a scan",
    "a cond",
]


def first(tree):
    return jax.tree.map(lambda x: x[0], tree)


def scale_of(state):
    return amp.get_loss_scale(state)


def split_step(grad, split, before, after, at_state, at_both, skip="cond"):
    """A step with an operation before and after the gradients, on the state between, and on both of these."""
    tx = amp.dynamic_loss_scale(optax.adam(0.1), skip=skip)

    def step(params, state, x, flag):
        def changed_grad(params, x, scale):
            return IDENTITIES[after](grad(params, x, IDENTITIES[before](scale, flag)), flag)

        def update(grads, state, params):
            return tx.update(*IDENTITIES[at_both]((grads, IDENTITIES[at_state](state, flag)), flag), params)

        return SPLITS[split](changed_grad, update, params, IDENTITIES[before](state, flag), x)

    return jax.eval_shape(step, WEIGHTS, tx.init(WEIGHTS), X, jnp.asarray(True))


@pytest.mark.parametrize("examples", [3, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("split", SPLITS)
def test_a_right_step_passes_however_it_is_split_and_ordered(split, examples):
    @settings(max_examples=examples)
    @given(name=st.sampled_from([*SCALED]), ops=st.tuples(*[st.sampled_from([*IDENTITIES])] * 4))
    def passes(name, ops):
        split_step(SCALED[name], split, *ops)

    passes()


@pytest.mark.parametrize("is_number", [True, False])
def test_a_number_is_the_scale_where_it_was_written_to_the_state(is_number):
    tx = amp.dynamic_loss_scale(optax.sgd(0.1))

    def step(params, state):
        grads = amp.grad(loss_on, loss_scale=2.0**10)(params, X)
        written = 2.0**10 if is_number else jnp.exp2(jnp.full((), 10.0))  # traced in a `jit`
        return tx.update(grads, amp.set_loss_scale(state, written), params)

    jax.eval_shape(step, WEIGHTS, tx.init(WEIGHTS))
    amp.debug.check_loss_scaling(step)(*jax.eval_shape(lambda: (WEIGHTS, tx.init(WEIGHTS))))


@pytest.mark.parametrize("split", OPEN_SPLITS)
@given(name=st.sampled_from([*UNSCALED]), ops=st.tuples(*[st.sampled_from([*IDENTITIES])] * 3))
@settings(max_examples=8)
def test_a_forgotten_scale_is_found_however_the_step_is_split(split, name, ops):
    with pytest.raises(ValueError, match="does not depend on the loss scale"):
        split_step(UNSCALED[name], split, *ops, "nothing")


# Gradients that come after an update by unscaled gradients, but are scaled, from parameters, updates and scale.
SCALED_AGAIN = {
    "of another loss": lambda p, updates, scale: amp.grad(loss_on, loss_scale=scale)(
        optax.apply_updates(p, updates), X
    ),
    "of another loss in a jit": lambda p, updates, scale: jax.jit(amp.grad(loss_on, loss_scale=scale))(
        optax.apply_updates(p, updates), X
    ),
    "by hand": lambda p, updates, scale: jax.tree.map(lambda u: u * scale, updates),
    "moved parameters": lambda p, updates, scale: jax.tree.map(jnp.subtract, optax.apply_updates(p, updates), p),
    "of an update": lambda p, updates, scale: jax.grad(
        lambda p: (
            loss_on(optax.apply_updates(p, chain_update(amp.grad(loss_on, loss_scale=scale)(p, X), scale)), X) * scale
        )
    )(p),
}


def chain_update(grads, scale):
    tx = optax.chain(amp.unscale_and_check(), optax.clip_by_global_norm(1.0))
    return tx.update(grads, tx.init(grads), grads, loss_scale=scale)[0]


@pytest.mark.parametrize("name", SCALED_AGAIN)
def test_gradients_that_are_scaled_after_an_unscaled_update_pass(name):
    def step(p, scale):
        updates = chain_update(amp.grad(loss_on, loss_scale=scale)(p, X), scale)
        return chain_update(SCALED_AGAIN[name](p, updates, scale), scale)

    jax.eval_shape(step, WEIGHTS, jnp.float32(8))
