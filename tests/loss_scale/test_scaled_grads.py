"""What a step does to gradients before `update` raises if it is wrong for scaled ones, and only then."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree

import jmp_amp as amp
from jmp_amp import LossScale

pytestmark = [pytest.mark.usefixtures("users_code"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

PARAMS = {"w": jnp.linspace(-1, 1, 64).reshape(8, 8), "b": jnp.linspace(0.5, 1, 8)}
X = jnp.linspace(-1, 2, 32).reshape(4, 8)
OTHER = jax.tree.map(lambda p: 0.5 * p, PARAMS)
MESH = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
SPEC = jax.sharding.PartitionSpec
DIVIDES = r"; `update` divides gradients by the loss scale: leave that to it, or multiply by the scale again at the end"
BETWEEN = r"; between `amp.value_and_grad` and `update`, gradients are multiplied by the loss scale: move it "


@amp.autocast
def loss_fn(params, x):
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


def each(fun):
    return lambda grads, state, other: jax.tree.map(fun, grads)


def with_scale(fun):
    return lambda grads, state, other: jax.tree.map(lambda g: fun(g, amp.get_loss_scale(state)), grads)


def with_params(fun):
    return lambda grads, state, other: jax.tree.map(fun, grads, PARAMS)


def by_optax(tx):
    return lambda grads, state, other: tx.update(grads, tx.init(PARAMS), PARAMS)[0]


def noise(g):
    return jax.random.normal(jax.random.key(0), g.shape)


def clip_by_norm(g, limit=1.0):
    return g * jnp.minimum(1.0, limit / jnp.linalg.norm(g))


def norm_of(grads):
    return jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))


def whitened(g):
    square = g @ g.T
    factor = jnp.linalg.cholesky(square + 0.1 * jnp.trace(square) * jnp.eye(len(g)))
    return jax.scipy.linalg.solve_triangular(factor, g, lower=True)


def in_shards(fun):
    return each(jax.shard_map(fun, mesh=MESH, in_specs=SPEC("data"), out_specs=SPEC("data")))


# From scaled gradients, the state of the optimizer, and another tree of arrays, gradients for `update`.
MISTAKES = {
    "clipped by the global norm": lambda grads, state, other: jax.tree.map(
        lambda g, norm=None: g * jnp.minimum(1.0, 1.0 / norm_of(grads)), grads
    ),
    "clipped, no division by 0": each(lambda g: g * jnp.minimum(1.0, 1.0 / (jnp.linalg.norm(g) + 1e-6))),
    "clipped where it is large": each(lambda g: jnp.where(jnp.linalg.norm(g) > 1.0, g / jnp.linalg.norm(g), g)),
    "clip_by_global_norm": by_optax(optax.clip_by_global_norm(1.0)),
    "adaptive_grad_clip": by_optax(optax.adaptive_grad_clip(0.1)),
    "clip_by_block_rms": by_optax(optax.clip_by_block_rms(1.0)),
    "clipped by value": each(lambda g: jnp.clip(g, -1, 1)),
    "clipped from above": each(lambda g: jnp.minimum(g, 1.0)),
    "weight decay": with_params(lambda g, p: g + 1e-2 * p),
    "add_decayed_weights": by_optax(optax.add_decayed_weights(1e-2)),
    "the gradient of a penalty": with_params(lambda g, p: g + 2 * p / p.size),
    "noise": each(lambda g: g + 0.01 * noise(g)),
    "add_noise": by_optax(optax.add_noise(0.01, 0.5, key=jax.random.key(0))),
    "nan_to_num": each(jnp.nan_to_num),
    "zeros for what is not finite": each(lambda g: jnp.where(jnp.isfinite(g), g, 0)),
    "zeros for NaN": each(lambda g: jnp.where(jnp.isnan(g), 0, g)),
    "zero_nans": by_optax(optax.zero_nans()),
    "the old where one is not finite": lambda grads, state, other: lax.cond(
        amp.all_finite(grads), lambda g: g, lambda g: jax.tree.map(jnp.zeros_like, g), grads
    ),
    "sign": each(jnp.sign),
    "normalized": each(lambda g: g / (jnp.linalg.norm(g) + 1e-8)),
    "scale_by_adam": by_optax(optax.scale_by_adam()),
    "unscaled by hand": with_scale(lambda g, scale: g / scale),
    "unscaled by a factor": with_scale(lambda g, scale: g * (1 / scale)),
    "unscaled by hand and clipped": with_scale(lambda g, scale: jnp.clip(g / scale, -1, 1)),
    "scaled again": with_scale(lambda g, scale: g * scale),
    "bounded": each(jnp.tanh),
    "squared": each(lambda g: g * g),
    "sparse": each(lambda g: jnp.where(jnp.abs(g) > 1e-2, g, 0)),
    "a value set": each(lambda g: g.at[0].set(1.0)),
    "skipped where it is large": lambda grads, state, other: lax.cond(
        norm_of(grads) > 10.0, lambda g: jax.tree.map(jnp.zeros_like, g), lambda g: g, grads
    ),
    "clipped in a jit": each(jax.jit(clip_by_norm)),
    "clipped in a checkpoint": each(jax.checkpoint(clip_by_norm)),
    "clipped in a scan": each(lambda g: lax.scan(lambda c, _: (clip_by_norm(c), None), g, length=2)[0]),
    "clipped in a branch": each(lambda g: lax.cond(X.sum() > 0, clip_by_norm, lambda g: g, g)),
    "clipped in a vmap": each(lambda g: jax.vmap(clip_by_norm)(g[None])[0]),
    "clipped in shards": in_shards(lambda g: jnp.clip(g, -1, 1)),
}
RIGHT = {
    "nothing": each(lambda g: g),
    "halved": each(lambda g: g / 2),
    "in bfloat16": each(lambda g: g.astype(jnp.bfloat16)),
    "masked": lambda grads, state, other: grads | {"w": grads["w"] * jnp.tril(jnp.ones((8, 8)))},
    "masked by an argument": lambda grads, state, other: jax.tree.map(jnp.multiply, grads, other),
    "selected by an argument": lambda grads, state, other: jax.tree.map(
        lambda g, x: jnp.where(x > 0.1, g, 0), grads, other
    ),
    "frozen": lambda grads, state, other: grads | {"b": jnp.zeros_like(grads["b"])},
    "one of two": each(lambda g: lax.cond(X.sum() > 0, lambda g: g, lambda g: 2 * g, g)),
    "a sum in a scan": each(lambda g: lax.scan(lambda c, y: (c + y, None), jnp.zeros_like(g), jnp.stack([g, g]))[0]),
    "added to an argument": lambda grads, state, other: jax.tree.map(jnp.add, grads, other),  # which may be scaled
    "an average with an argument": lambda grads, state, other: jax.tree.map(
        lambda g, x: 0.1 * g + 0.9 * x, grads, other
    ),
    "stopped": lambda grads, state, other: lax.stop_gradient(grads),
    "logged": lambda grads, state, other: (jax.debug.callback(lambda n: None, norm_of(grads)), grads)[1],
    "compared for the log": lambda grads, state, other: (
        jax.debug.callback(lambda n: None, norm_of(grads) > 10.0),
        grads,
    )[1],
    "overflows as NaN": each(lambda g: jnp.where(jnp.isfinite(g), g, jnp.nan)),
    "clipped by an unscaled norm": with_scale(
        lambda g, scale: g * jnp.minimum(1.0, 1.0 / (jnp.linalg.norm(g) / scale + 1e-6))
    ),
    "clipped at a scaled threshold": with_scale(lambda g, scale: clip_by_norm(g, scale)),
    "clipped by value, scaled": with_scale(lambda g, scale: jnp.clip(g, -scale, scale)),
    "scaled noise": with_scale(lambda g, scale: g + scale * 0.01 * noise(g)),
    "scaled decay": lambda grads, state, other: jax.tree.map(
        lambda g, p: g + amp.get_loss_scale(state) * 1e-2 * p, grads, PARAMS
    ),
    "unscaled and scaled again": with_scale(lambda g, scale: jnp.clip(g / scale, -1, 1) * scale),
    "normalized and scaled": with_scale(lambda g, s: g * s / jnp.maximum(jnp.linalg.norm(g), 1e-6 * s)),
    "centralized": by_optax(optax.centralize()),
    "a projection": each(lambda g: g - jnp.mean(g)),
    "without a part": each(lambda g: g - 0.5 * g * jnp.vdot(g, g) / (jnp.vdot(g, g) + 1e-30)),
    "moved": each(lambda g: jnp.roll(g.T.T.reshape(g.shape), 1)),
    "ravelled": lambda grads, state, other: (lambda flat, back: back(flat))(*ravel_pytree(grads)),
    "sorted": each(lambda g: jnp.sort(g)),
    "in a jit": each(jax.jit(lambda g: 2 * g)),
    "behind a barrier": lambda grads, state, other: lax.optimization_barrier(grads),
    "symmetric": lambda grads, state, other: grads | {"w": (grads["w"] + grads["w"].T) / 2},
    "in shards": in_shards(lambda g: 2 * g),
    "of low rank": lambda grads, state, other: (
        grads | {"w": (lambda u, s, v: (u[:, :2] * s[:2]) @ v[:2])(*jnp.linalg.svd(grads["w"], full_matrices=False))}
    ),
    "by the spectral norm, no division by 0": lambda grads, state, other: (
        grads | {"w": grads["w"] * norm_of(grads) / (jnp.linalg.norm(grads["w"], ord=2) + 1e-8)}
    ),
    "by the nuclear norm, no division by 0": lambda grads, state, other: (
        grads | {"w": grads["w"] * norm_of(grads) / jnp.maximum(jnp.linalg.norm(grads["w"], ord="nuc"), 1e-8)}
    ),
    "whitened": lambda grads, state, other: grads | {"w": norm_of(grads) * whitened(grads["w"])},
    "the largest alone": each(lambda g: jnp.where(jnp.abs(g) >= jnp.max(jnp.abs(g)), g, 0)),
    "the rate of a layer": lambda grads, state, other: jax.tree.map(lambda g, x: g * jnp.mean(x), grads, other),
    "a limit of an argument": lambda grads, state, other: jax.tree.map(
        lambda g, x: jnp.clip(g, -jnp.max(x), jnp.max(x)), grads, other
    ),
    "by the ratio of norms": lambda grads, state, other: jax.tree.map(
        lambda g: g * jnp.linalg.norm(g) / (norm_of(grads) + 1e-12), grads
    ),
}
TX = amp.dynamic_loss_scale(optax.sgd(0.1), LossScale(init_scale=256.0))
LINK = optax.chain(amp.unscale_and_check(), optax.sgd(0.1))


def with_wrapper(change):
    def step(params, state, x, other):
        _, grads = amp.value_and_grad(loss_fn, opt_state=state)(params, x)
        return TX.update(change(grads, state, other), state, params)

    return step, (PARAMS, TX.init(PARAMS), X, OTHER)


def with_link(change):
    def step(params, scaling, state, x, other):
        scale = amp.get_loss_scale(scaling)
        grads = amp.grad(loss_fn, loss_scale=scale)(params, x)
        return LINK.update(change(grads, scaling, other), state, params, loss_scale=scale)

    return step, (PARAMS, LossScale().init(), LINK.init(PARAMS), X, OTHER)


def by_rule(change):
    rule = LossScale()

    def step(params, scaling, x, other):
        grads = amp.grad(loss_fn, opt_state=scaling)(params, x)
        return rule.unscale(scaling, change(grads, scaling, other))

    return step, (PARAMS, rule.init(), X, OTHER)


BY = {"wrapper": with_wrapper, "link": with_link, "rule": by_rule}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named_with_its_line(name, by):
    step, args = BY[by](MISTAKES[name])
    cure = DIVIDES if name.startswith("unscaled by") else BETWEEN
    with pytest.raises(ValueError, match=r"test_scaled_grads.py:\d+ \(.*, the (step|gradient) .*" + cure):
        jax.eval_shape(step, *args)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_is_not_refused(name, by):
    step, args = BY[by](RIGHT[name])
    jax.eval_shape(step, *args)


# Without those whose argument would have to be scaled, and one that leaves out NaN as it leaves out all small values.
RIGHT_ALONE = {"added to an argument", "an average with an argument", "a limit of an argument", "the largest alone"}


@pytest.mark.parametrize(
    "seeds", [range(12), pytest.param(range(12, 200), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_generated_compositions_raise_only_if_the_scale_changes_the_updates_or_an_overflow_is_hidden(
    seeds, monkeypatch
):
    missed = []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        parts = [
            str(rng.choice([*MISTAKES] if rng.random() < 1 / 4 else sorted(RIGHT.keys() - RIGHT_ALONE)))
            for _ in range(rng.integers(1, 5))
        ]

        def change(grads, state, other, parts=parts):
            for part in parts:
                grads = (MISTAKES | RIGHT)[part](grads, state, other)
            return jax.tree.map(lambda g, p: g.astype(p.dtype), grads, PARAMS)

        step, args = with_wrapper(change)
        try:
            jax.eval_shape(step, *args)
            raises = False
        except ValueError:
            raises = True
        if raises != depends_on_scale(change, monkeypatch):
            assert not raises, f"{parts} of seed {seed} are right"
            missed.append(parts)
    # A value of an unknown unit, as of a decomposition or a product with an argument, may have any.
    assert len(missed) <= len(seeds) / 10, missed


def depends_on_scale(change, monkeypatch):
    """Whether a step makes other updates with another scale, or takes an overflow for a finite step."""
    with monkeypatch.context() as patch:
        patch.setattr("jmp_amp._loss_scale._rule.check_scaled", lambda *args, **kwargs: None)

        @jax.jit
        def updates(scale, factor):
            state = amp.set_loss_scale(TX.init(PARAMS), scale)
            grads = amp.grad(lambda p: factor * jnp.mean((X @ p["w"] + p["b"]) ** 2), loss_scale=scale)(PARAMS)
            return TX.update(change(grads, state, OTHER), state, PARAMS)

        ends = [updates(jnp.float32(scale), 1.0)[0] for scale in (2.0**-4, 2.0**3, 2.0**12)]
        _, state = updates(jnp.float32(8), jnp.nan)
    close = [jax.tree.map(lambda x, y: np.allclose(x, y, rtol=1e-3, atol=1e-7), ends[0], end) for end in ends[1:]]
    return bool(state.loss_scale.last_finite) or not all(jax.tree.leaves(close))


# Other forms of a step.


def clip(grads):
    return jax.tree.map(clip_by_norm, grads)


def penalized(params, x):
    return loss_fn(params, x) + norm_of(jax.grad(loss_fn)(params, x))


# From parameters, a state, a batch, and what is done to gradients, the gradients.
FORMS = {
    "a loss that has a gradient": lambda p, s, x, change: change(amp.grad(penalized, opt_state=s)(p, x)),
    "micro-batches": lambda p, s, x, change: change(amp.grad(loss_fn, opt_state=s, accumulate_steps=2)(p, x)),
    "a sum in a loop": lambda p, s, x, change: change(
        lax.scan(
            lambda total, x: (jax.tree.map(jnp.add, total, amp.grad(loss_fn, opt_state=s)(p, x)), None),
            jax.tree.map(jnp.zeros_like, p),
            x[:, None],
        )[0]
    ),
    "a jit of gradients": lambda p, s, x, change: change(
        jax.jit(lambda p, s, x: amp.grad(loss_fn, opt_state=s)(p, x))(p, s, x)
    ),
    "a jit of what is done": lambda p, s, x, change: jax.jit(change)(amp.grad(loss_fn, opt_state=s)(p, x)),
    "a jit of both": lambda p, s, x, change: jax.jit(lambda p, s, x: change(amp.grad(loss_fn, opt_state=s)(p, x)))(
        p, s, x
    ),
    "examples": lambda p, s, x, change: jax.tree.map(
        lambda g: g.mean(0), jax.vmap(lambda x: change(amp.grad(loss_fn, opt_state=s)(p, x[None])))(x)
    ),
    "a checkpoint": lambda p, s, x, change: jax.checkpoint(lambda p: change(amp.grad(loss_fn, opt_state=s)(p, x)))(p),
    "a float16 loss": lambda p, s, x, change: change(
        amp.grad(lambda p, x: loss_fn(p, x).astype(jnp.float16), opt_state=s)(p, x)
    ),
    "shards": lambda p, s, x, change: change(
        jax.shard_map(
            lambda p, s, x: lax.pmean(amp.grad(loss_fn, opt_state=s)(p, x), "data"),
            mesh=MESH,
            in_specs=(SPEC(), SPEC(), SPEC("data")),
            out_specs=SPEC(),
            check_vma=False,
        )(p, s, x)
    ),
    "value and gradient": lambda p, s, x, change: change(
        amp.value_and_grad(lambda p: (loss_fn(p, x), x), has_aux=True, opt_state=s)(p)[1]
    ),
}
AROUND = {
    "jit": lambda step, p, s, x: jax.jit(step)(p, s, x),
    "vmap": lambda step, p, s, x: jax.jit(jax.vmap(step, (None, None, 0)))(p, s, x[None]),
    "vmap of all": lambda step, *args: jax.jit(jax.vmap(step))(*jax.tree.map(lambda x: x[None], args)),
    "scan": lambda step, p, s, x: lax.scan(lambda s, x: (step(p, s, x)[1], None), s, x[None])[0],
    "shard_map": lambda step, *args: jax.jit(
        jax.shard_map(step, mesh=MESH, in_specs=SPEC(), out_specs=SPEC(), check_vma=False)
    )(*args),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize(
    ("form", "around"), [(f, a) for f in FORMS for a in AROUND if (f, a) != ("shards", "shard_map")]
)
def test_every_form_of_a_step_is_followed(form, around):
    def step(change, params, state, x):
        return TX.update(FORMS[form](params, state, x, change), state, params)

    def trace(change):
        args = PARAMS, TX.init(PARAMS), X
        return jax.eval_shape(lambda *args: AROUND[around](lambda *args: step(change, *args), *args), *args)

    trace(lambda grads: jax.tree.map(lambda g: g / 2, grads))
    with pytest.raises(ValueError, match=BETWEEN):
        trace(clip)


def test_gradients_of_two_scales_are_not_refused():
    rules = LossScale(), LossScale(init_scale=8.0)

    def step(params, scalings, states, x):
        first, second = (
            amp.grad(loss_fn, opt_state=scaling)(params, sign * x)
            for scaling, sign in zip(scalings, (1, -1), strict=True)
        )
        ratio = amp.get_loss_scale(scalings[0]) / amp.get_loss_scale(scalings[1])
        both = jax.tree.map(lambda g, h: g + h * ratio, first, second)
        unscaled, _ = rules[0].unscale(scalings[0], both)
        # One optimizer for each loss, and one for both, whose state holds the first scale.
        pairs = zip((first, second), scalings, strict=True)
        updates = [LINK.update(grads, states, params, loss_scale=s.loss_scale) for grads, s in pairs]
        return unscaled, updates

    jax.eval_shape(step, PARAMS, [rule.init() for rule in rules], LINK.init(PARAMS), X)


def test_a_sum_of_gradients_of_two_scales_is_named_as_that():
    def step(params, states, x):
        both = [amp.grad(loss_fn, opt_state=state)(params, x) for state in states]
        return TX.update(jax.tree.map(jnp.add, *both), states[0], params)

    for trace in (jax.eval_shape, lambda step, *args: amp.debug.check_loss_scaling(step)(*args)):
        with pytest.raises(
            ValueError,
            match=r"multiplied by the loss scale and a value multiplied by another loss scale; divide gradients by the",
        ):
            trace(step, PARAMS, [TX.init(PARAMS), TX.init(PARAMS)], X)


def test_gradients_that_are_not_of_value_and_grad_are_not_followed():
    def step(params, state, x, change):
        scale = amp.get_loss_scale(state)
        grads = jax.grad(lambda p: loss_fn(p, x) * scale)(params)
        return TX.update(change(grads), state, params)

    jax.eval_shape(lambda *args: step(*args, clip), PARAMS, TX.init(PARAMS), X)
    with pytest.raises(ValueError, match="does not scale and unscale its gradients consistently"):
        amp.debug.check_loss_scaling(lambda *args: step(*args, clip))(PARAMS, TX.init(PARAMS), X)


def test_nothing_is_said_outside_jit_nor_without_a_scale():
    def step(tx, params, state, x):
        return tx.update(clip(amp.grad(loss_fn, opt_state=state)(params, x)), state, params)

    step(TX, PARAMS, TX.init(PARAMS), X)
    none = amp.dynamic_loss_scale(optax.sgd(0.1), LossScale.none())
    jax.eval_shape(lambda *args: step(none, *args), PARAMS, none.init(PARAMS), X)
    static = amp.dynamic_loss_scale(optax.sgd(0.1), LossScale.static(8.0))
    with pytest.raises(ValueError, match=BETWEEN):
        jax.eval_shape(lambda *args: step(static, *args), PARAMS, static.init(PARAMS), X)


def test_the_marks_are_not_in_the_compiled_program(monkeypatch):
    def program():
        def step(params, state, x):
            return TX.update(amp.grad(loss_fn, opt_state=state)(params, x), state, params)

        return jax.jit(step).lower(PARAMS, TX.init(PARAMS), X).as_text()

    marked = program()
    monkeypatch.setattr("jmp_amp._loss_scale._grad.mark_scaled", lambda *tree: tree)
    assert program() == marked


class TrainState(NamedTuple):
    params: dict
    opt_state: tuple
    total: dict


STATES = {
    "a tuple of the user": lambda params, state, total: TrainState(params, state, total),
    "a dict": lambda params, state, total: {"params": params, "state": state, "total": total},
}


@pytest.mark.parametrize("name", STATES)
def test_a_sum_of_scaled_gradients_in_the_state_of_a_run_is_not_refused(name):
    tx = optax.chain(optax.trace(0.9), TX)

    def step(run, x, change, tx):
        params, state, total = run if name == "a tuple of the user" else (run["params"], run["state"], run["total"])
        grads = amp.grad(loss_fn, opt_state=run)(params, x)
        return tx.update(change(grads, total), state, params)

    def trace(change, tx):
        run = STATES[name](PARAMS, tx.init(PARAMS), jax.tree.map(jnp.zeros_like, PARAMS))
        jax.eval_shape(lambda run, x: step(run, x, change, tx), run, X)

    trace(lambda grads, total: jax.tree.map(jnp.add, grads, total), TX)
    with pytest.raises(ValueError, match=r"the step adds a value multiplied by the loss scale and an unscaled value"):
        trace(lambda grads, total: grads, tx)
