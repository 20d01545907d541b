"""Warnings point at the line of the user that is executed, however JAX traces it; correct programs give none."""

import functools
import linecache
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_amp as amp
import jmp_amp.compat.jmp as jmp
from jmp_amp import value_and_grad

W, X = {"w": jnp.arange(1.0, 4.0)}, jnp.arange(12.0).reshape(4, 3)
RULE = amp.LossScale()
TX = amp.dynamic_loss_scale(optax.sgd(0.1))
STATE = TX.init(W)
SCALE = amp.get_loss_scale(STATE)
MESH = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
SPECS = {"in_specs": (jax.P(), jax.P("data")), "out_specs": jax.P(), "check_vma": False}
SHARDED = functools.partial(jax.shard_map, mesh=MESH, **SPECS)
LINK = amp.unscale_and_check()
LINK_STATE = LINK.init(W)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


scaled = value_and_grad(loss_fn, opt_state=STATE)


def static(rule):
    tx = amp.dynamic_loss_scale(optax.sgd(0.1), rule)
    return tx, tx.init(W)


def stepped(tx, state, *grads):
    for grad in grads:
        _, state = tx.update({"w": jnp.full(3, grad)}, state, W)
    return state


def warned(run, name):
    """What `run` warns of; checks that each points at the line of this file that has the name of the case."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    for each in caught:
        assert (each.filename, each.category) == (__file__, UserWarning)
        assert f'"{name}"' in linecache.getline(__file__, each.lineno)
    return [str(each.message) for each in caught]


# fmt: off
BAKED = {
    "jit": lambda: jax.jit(value_and_grad(loss_fn, opt_state=STATE))(W, X),
    "grad in jit": lambda: jax.jit(amp.grad(loss_fn, opt_state=STATE))(W, X),
    "a closure": lambda: jax.jit(lambda w, x: value_and_grad(loss_fn, opt_state=STATE)(w, x))(W, X),
    "made before": lambda: jax.jit(lambda w, x: scaled(w, x))(W, X),
    "the scale": lambda: jax.jit(value_and_grad(loss_fn, loss_scale=SCALE))(W, X),
    "a state on the host": lambda: jax.jit(value_and_grad(loss_fn, opt_state=jax.device_get(STATE)))(W, X),
    "only data is traced": lambda: jax.jit(lambda x: scaled(W, x))(X),
    "by keyword": lambda: jax.jit(lambda x: scaled(W, x=x))(X),
    "lowered": lambda: jax.jit(value_and_grad(loss_fn, opt_state=STATE)).lower(W, X),
    "traced ahead of time": lambda: jax.jit(value_and_grad(loss_fn, opt_state=STATE)).trace(W, X),
    "exported": lambda: jax.export.export(jax.jit(value_and_grad(loss_fn, opt_state=STATE)))(W, X),
    "micro-batches": lambda: jax.jit(value_and_grad(loss_fn, opt_state=STATE, accumulate_steps=2))(W, X),
    "vmap in jit": lambda: jax.jit(jax.vmap(lambda w, x: scaled(w, x), (None, 0)))(W, X),
    "scan in jit": lambda: jax.jit(lambda w, x: lax.scan(lambda c, x: (c, scaled(w, x)), 0, x[:, None]))(W, X),
    "jit in scan": lambda: lax.scan(lambda c, x: (c, jax.jit(lambda x: scaled(W, x))(x)), 0, X[:, None]),
    "jit in jit": lambda: jax.jit(lambda x: jax.jit(lambda x: scaled(W, x))(x))(X),
    "checkpoint in jit": lambda: jax.jit(jax.checkpoint(lambda w, x: scaled(w, x)))(W, X),
    "shard_map in jit": lambda: jax.jit(SHARDED(lambda w, x: scaled(w, x)))(W, X),
    "pmap": lambda: jax.pmap(lambda x: scaled(W, x))(X[:2, None]),
    "of a model": lambda: pytest.importorskip("equinox").filter_jit(value_and_grad(loss_fn, opt_state=STATE))(W, X),
    "of an NNX model": lambda: pytest.importorskip("flax.nnx").jit(value_and_grad(loss_fn, opt_state=STATE))(W, X),
    "scaled by the rule": lambda: jax.jit(lambda w, x: RULE.scale(STATE.loss_scale, loss_fn(w, x)))(W, X),
    "unscaled by the rule": lambda: jax.jit(lambda g: RULE.unscale(STATE.loss_scale, g))(W),
    "unscaled by the wrapper": lambda: jax.jit(lambda g: TX.update(g, STATE, W))(W),
    "unscaled by the scale": lambda: jax.jit(lambda g, s: TX.update(g, s, W, loss_scale=SCALE))(W, STATE),
    "unscaled by a link": lambda: jax.jit(lambda g: LINK.update(g, LINK_STATE, loss_scale=SCALE))(W),
    "a step later": lambda: jax.jit(value_and_grad(loss_fn, opt_state=stepped(TX, STATE, jnp.inf, 1.0)))(W, X),
    "once static": lambda: jax.jit(value_and_grad(loss_fn, opt_state=stepped(TX, static(RULE.none())[1], 1.0)))(W, X),
}
UNMATCHED = {
    "eager rule": lambda: amp.autocast(loss_fn, rules={"nope": "full"})(W, X),
    "jit rule": lambda: jax.jit(amp.autocast(loss_fn, rules={"nope": "full"}))(W, X),
    "grad rule": lambda: jax.grad(amp.autocast(loss_fn, rules={"nope": "full"}))(W, X),
    "jit grad rule": lambda: jax.jit(jax.value_and_grad(amp.autocast(loss_fn, rules={"nope": "full"})))(W, X),
    "vmap rule": lambda: jax.vmap(amp.autocast(loss_fn, rules={"nope": "full"}), (None, 0))(W, X),
    "jvp rule": lambda: jax.jvp(lambda x: amp.autocast(loss_fn, rules={"nope": "full"})(W, x), (X,), (X,)),
    "scan rule": lambda: lax.scan(lambda c, x: (c, amp.autocast(loss_fn, rules={"nope": "full"})(W, x)), 0, X),
    "checkpoint rule": lambda: jax.checkpoint(amp.autocast(loss_fn, rules={"nope": "full"}))(W, X),
    "scaled rule": lambda: value_and_grad(amp.autocast(loss_fn, rules={"nope": "full"}), loss_scale=8.0)(W, X),
    "jit scaled rule": lambda: jax.jit(amp.grad(amp.autocast(loss_fn, rules={"nope": "full"})))(W, X),
    "policy rule": lambda: jax.jit(amp.autocast(loss_fn, amp.get_policy("O1").with_rules({"a": "full"})))(W, X),
    "model rule": lambda: pytest.importorskip("equinox").filter_jit(amp.autocast(loss_fn, rules={"no": "full"}))(W, X),
    "shard_map rule": lambda: jax.jit(SHARDED(amp.autocast(loss_fn, rules={"nope": "full"})))(W, X),
}
OTHERS = {
    "float8": lambda: amp.autocast(in_float8)(jnp.ones((16, 16)), jnp.ones((16, 16))),
    "float8 in jit": lambda: jax.jit(amp.autocast(in_float8))(jnp.ones((16, 16)), jnp.ones((16, 16))),
    "an integer scale": lambda: jmp.DynamicLossScale(jnp.int32(8)),
    "an integer scale in jit": lambda: jax.jit(lambda x: jmp.DynamicLossScale(x).scale(1.0))(jnp.int32(8)),
    "a scaled result": lambda: amp.debug.check_loss_scaling(lambda s, g: g * amp.get_loss_scale(s))(STATE, X[0, 1]),
}
CORRECT = {
    "eager": lambda: scaled(W, X),
    "no scale": lambda: jax.jit(value_and_grad(loss_fn))(W, X),
    "a number": lambda: jax.jit(value_and_grad(loss_fn, loss_scale=1024.0))(W, X),
    "a numpy number": lambda: jax.jit(value_and_grad(loss_fn, loss_scale=np.float32(1024)))(W, X),
    "the value of the scale": lambda: jax.jit(value_and_grad(loss_fn, loss_scale=float(SCALE)))(W, X),
    "a state that is traced": lambda: jax.jit(lambda s, w, x: value_and_grad(loss_fn, opt_state=s)(w, x))(STATE, W, X),
    "a state inside": lambda: jax.jit(lambda w, x: value_and_grad(loss_fn, opt_state=TX.init(w))(w, x))(W, X),
    "a scale inside": lambda: jax.jit(lambda w, x: value_and_grad(loss_fn, loss_scale=jnp.float32(8))(w, x))(W, X),
    "a static scale": lambda: jax.jit(value_and_grad(loss_fn, opt_state=static(RULE.static(8.0))[1]))(W, X),
    "no scaling": lambda: jax.jit(value_and_grad(loss_fn, opt_state=static(RULE.none())[1]))(W, X),
    "a static scale after steps": lambda: jax.jit(
        value_and_grad(loss_fn, opt_state=stepped(*static(RULE.static(8.0)), 1.0, jnp.inf, jnp.nan, 1.0))
    )(W, X),
    "a scale that became static": lambda: jax.jit(
        value_and_grad(loss_fn, opt_state=stepped(static(RULE.static(8.0))[0], STATE, 1.0))
    )(W, X),
    "a static scale of the rule": lambda: jax.jit(
        lambda w, x: RULE.static(8.0).scale(RULE.static(8.0).init(), loss_fn(w, x))
    )(W, X),
    "vmap": lambda: jax.vmap(scaled, (None, 0))(W, X),
    "grad": lambda: jax.grad(lambda x: scaled(W, x)[0])(X),
    "jvp": lambda: jax.jvp(lambda x: scaled(W, x)[0], (X,), (X,)),
    "linearize": lambda: jax.linearize(lambda x: scaled(W, x)[0], X),
    "scan": lambda: lax.scan(lambda c, x: (c, scaled(W, x)), 0, X[:, None]),
    "map": lambda: lax.map(lambda x: scaled(W, x), X[:, None]),
    "cond": lambda: lax.cond(X.sum() > 0, scaled, scaled, W, X),
    "checkpoint": lambda: jax.checkpoint(scaled)(W, X),
    "shard_map": lambda: SHARDED(scaled)(W, X),
    "micro-batches outside jit": lambda: value_and_grad(loss_fn, opt_state=STATE, accumulate_steps=2)(W, X),
    "fori_loop over the state": lambda: lax.fori_loop(0, 2, loop, (W, STATE)),
    "fori_loop in jit": lambda: jax.jit(lambda w, s: lax.fori_loop(0, 2, loop, (w, s)))(W, STATE),
    "a jaxpr": lambda: jax.make_jaxpr(scaled)(W, X),
    "a jaxpr of a jaxpr": lambda: jax.make_jaxpr(lambda w, x: jax.make_jaxpr(scaled)(w, x).jaxpr and w)(W, X),
    "shapes": lambda: jax.eval_shape(scaled, W, X),
    "explained": lambda: amp.explain(scaled)(W, X),
    "autocast": lambda: amp.autocast(scaled)(W, X),
    "nothing is traced": lambda: jax.jit(lambda: scaled(W, X))(),
    "a step": lambda: jax.jit(lambda w, s: loop(0, (w, s)))(W, STATE),
    "a step by the scale": lambda: jax.jit(lambda g, s: TX.update(g, s, W, loss_scale=amp.get_loss_scale(s)))(W, STATE),
    "a link": lambda: jax.jit(lambda g: LINK.update(g, LINK_STATE, loss_scale=8.0))(W),
    "a rule that matches": lambda: jax.jit(amp.autocast(in_scope, rules={"head": "full"}))(W, X),
}
# fmt: on


def loop(_, carry):
    params, state = carry
    _, grads = value_and_grad(loss_fn, opt_state=state)(params, X)
    updates, state = TX.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def in_scope(params, x):
    with jax.named_scope("head"):
        return loss_fn(params, x)


def in_float8(x, w):
    with amp.precision("float8"):
        return x @ w


@pytest.mark.parametrize("name", BAKED)
def test_a_scale_that_is_compiled_as_a_constant_is_named_where_it_is_used(name):
    (message,) = warned(BAKED[name], name)
    assert message.startswith("`jax.jit` compiles the loss scale of a state as a constant here")
    assert "make the state an argument of the jitted function, `step = jax.jit(lambda opt_state" in message


@pytest.mark.parametrize("name", UNMATCHED)
def test_a_rule_that_matches_nothing_is_named_where_the_function_is_called(name):
    messages = warned(UNMATCHED[name], name)
    assert messages
    assert all("matches no scope of the function" in message for message in messages)


@pytest.mark.parametrize("name", OTHERS)
def test_other_warnings_point_at_the_line_of_the_user(name):
    (message,) = warned(OTHERS[name], name)
    assert not message.startswith("the rule for")


@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_program_gives_no_warning(name):
    with jax.numpy_dtype_promotion("standard"):
        assert not warned(CORRECT[name], name)


def test_a_loop_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for n in (4, 4, 2):  # the last one is traced again
            jax.jit(scaled)(W, X[:n])
    assert len(caught) == 1


def test_the_cure_follows_the_state():
    step = jax.jit(lambda opt_state, *args: amp.value_and_grad(loss_fn, opt_state=opt_state)(*args))
    _, before = step(STATE, W, X)
    _, after = step(stepped(TX, STATE, jnp.inf), W, X)
    assert (before["w"] == 2 * after["w"]).all()
