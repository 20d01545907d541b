"""Optax's transformations train under `dynamic_loss_scale` as without it; the page that lists them is complete."""

import functools
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib
from optax_transformations import PARAMS, case_of, gradients, loss_fn, names, parameters, verdict

import jmp_amp as amp

pytestmark = [pytest.mark.usefixtures("users_code"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
DOCS = pathlib.Path(__file__).parents[2] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("skip", ["cond", "select"])
@pytest.mark.parametrize("name", names())
@pytest.mark.filterwarnings("ignore:Specifying a key")
def test_a_transformation_trains_as_without_a_loss_scale(name, skip):
    assert verdict(name, skip) == "ok"


def test_the_page_lists_what_was_tried_and_nothing_failed():
    rows = [
        line.split(" | ")
        for line in (DOCS / "benchmarks/optax_transformations.md").read_text().splitlines()
        if line.startswith("| `")
    ]
    listed = {row[0].strip("|` "): row[1:3] for row in rows}
    assert {tuple(verdicts) for verdicts in listed.values()} == {("ok", "ok")}
    assert f"All {len(listed)} transformations of optax" in (DOCS / "optax.md").read_text()
    # A later optax may have more.
    assert {"adam", "lbfgs", "lookahead", "MultiSteps", "contrib.sam"} <= set(listed) & set(names())


# Which leaves were not finite


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", names())
@pytest.mark.filterwarnings("ignore:Specifying a key")
def test_the_leaf_that_overflows_is_flagged_under_every_transformation(name):
    case, params = case_of(name), parameters(name)
    tx = amp.dynamic_loss_scale(case.make(), skip="select", nonfinite_leaves=True)
    state = tx.init(params)
    value, grads = gradients(name, params, amp.get_loss_scale(state))
    grads["b"] = grads["b"].at[..., 0].set(jnp.inf)

    @jax.jit
    def update(grads, state, params):
        return tx.update(grads, state, params, **case.extra(value, grads))[1]

    new = update(grads, state, params)
    assert {name: bool(x) for name, x in amp.metrics(new).items() if "/" in name} == {
        "nonfinite/b": True,
        "nonfinite/w": False,
    }
    assert jax.tree.structure(new) == jax.tree.structure(state)


# Line searches

SEARCHES = {
    "lbfgs": optax.lbfgs,
    "lbfgs without a search": lambda: optax.lbfgs(0.1, linesearch=None),
    "zoom": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(15)),
    "backtracking": lambda: optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15)),
    "backtracking that keeps gradients": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(15, store_grad=True)
    ),
    "zoom in a wrapper": lambda: amp.low_precision_params(optax.lbfgs()),
}
BORDERS = {
    "none": lambda fun: fun,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "a copy": lambda fun: lambda g, h, *args: fun(g, jax.tree.map(lambda x: 1 * x, h), *args),
}


SEARCHED = [(name, "jit") for name in SEARCHES]
SEARCHED += [(name, border) for name in ("lbfgs", "backtracking") for border in BORDERS if border != "jit"]


@pytest.mark.parametrize(("name", "border"), SEARCHED)
@pytest.mark.sweep(9)
def test_a_line_search_gets_unscaled_gradients_behind_every_border(name, border):
    plain, tx = optax.with_extra_args_support(SEARCHES[name]()), amp.dynamic_loss_scale(SEARCHES[name]())

    def step(params, state, tx, scaled):
        value, grads = amp.value_and_grad(loss_fn, opt_state=state if scaled else None)(params)

        def update(grads, grad, state, params, value):
            return tx.update(grads, state, params, value=value, grad=grad, value_fn=loss_fn)

        updates, state = (BORDERS[border] if scaled else jax.jit)(update)(grads, grads, state, params, value)
        return optax.apply_updates(params, updates), state

    runs = []
    for each, scaled in ((plain, False), (tx, True)):
        params, state = PARAMS, each.init(PARAMS)
        jitted = jax.jit(lambda params, state, each=each, scaled=scaled: step(params, state, each, scaled))
        for _ in range(4):
            params, state = jitted(params, state)
        runs.append(params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), *runs)


def test_any_transformation_that_reads_grad_gets_it_unscaled_and_clipped_as_the_updates_are():
    def update(updates, state, params=None, *, grad, other):
        return jax.tree.map(lambda u, g, h: jnp.stack([u, g, h]), updates, grad, other), state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = amp.dynamic_loss_scale(inner, amp.LossScale(init_scale=8.0), clip_global_norm=1.0)
    grad = 8 * jnp.float32([0.0, 4.0])
    for jit in (jax.jit, lambda fun: fun):
        run = jit(lambda g, h, o, s: tx.update(g, s, grad=h, other=o)[0])
        updates = run(grad, 2 * grad, grad, tx.init(grad))
        np.testing.assert_allclose(updates, [[0, 1], [0, 2], [0, 32]], rtol=1e-6)


@pytest.mark.parametrize("grad", [None, (), {"w": None}, lambda x: x], ids=["none", "tuple", "tree", "function"])
def test_a_grad_that_is_no_gradient_is_passed_on(grad):
    def update(updates, state, params=None, *, grad):
        passed.append(grad)
        return updates, state

    passed, inner = [], optax.GradientTransformationExtraArgs(lambda params: (), update)
    tx = amp.dynamic_loss_scale(inner)
    for jit in (jax.jit, lambda fun: fun):
        jit(lambda g, s: tx.update(g, s, grad=grad)[0])(PARAMS, tx.init(PARAMS))
    assert passed == [grad] * len(passed)


# Outside of the wrapper


class Sum(NamedTuple):
    total: Any


def add_up(guarded=False):
    """A transformation of a user: the sum of all gradients."""

    def update(updates, state, params=None):
        total = jax.tree.map(jnp.add, state.total, updates)
        if guarded:
            total = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(new), new, old), total, state.total)
            return updates, Sum(total)
        return total, Sum(total)

    return optax.GradientTransformation(lambda params: Sum(jax.tree.map(jnp.zeros_like, params)), update)


def fill_with_best(value):
    return optax.GradientTransformation(lambda p: Sum(jnp.float32(value)), lambda u, s, p=None: (u, s))


def without_extra_args(tx):
    return optax.GradientTransformation(tx.init, lambda updates, state, params=None: tx.update(updates, state, params))


ADDS = r"the step adds a value multiplied by the loss scale and an unscaled value"
COMPARES = r"the step compares a value multiplied by the loss scale and an unscaled value"
# What raises while a step is traced, and what `check_loss_scaling` finds, as the program of one update has no fault.
OUTSIDE = {
    "mechanize": (contrib.mechanize, None),
    "sam": (lambda tx: optax.with_extra_args_support(without_extra_args(contrib.sam(tx, optax.sgd(0.05)))), None),
    "a named chain": (lambda tx: optax.named_chain(("z", optax.ema(0.9)), ("a", tx)), ADDS),
    "a chain in front": (lambda tx: optax.chain(optax.chain(optax.scale(1.0), optax.trace(0.9)), tx), ADDS),
    "a chain around": (lambda tx: optax.chain(optax.trace(0.9), optax.chain(optax.scale(1.0), tx)), ADDS),
    "masked in front": (lambda tx: optax.chain(optax.masked(optax.trace(0.9), {"w": True, "b": False}), tx), ADDS),
    "hyperparameters in front": (lambda tx: optax.chain(optax.inject_hyperparams(optax.trace)(decay=0.9), tx), ADDS),
    "clipping hyperparameters": (
        lambda tx: optax.chain(optax.inject_hyperparams(optax.clip)(max_delta=1.0), tx),
        COMPARES,
    ),
    "decay": (lambda tx: optax.chain(optax.add_decayed_weights(0.1), tx), ADDS),
    "the second": (lambda tx: optax.chain(optax.scale(1.0), optax.zero_nans(), tx), "the step replaces gradients"),
    "in a named chain": (
        lambda tx: optax.named_chain(("a", optax.scale(1.0)), ("b", optax.clip_by_global_norm(1.0)), ("c", tx)),
        COMPARES,
    ),
    "in masked": (lambda tx: optax.masked(optax.chain(optax.trace(0.9), tx), {"w": True, "b": True}), ADDS),
    "a user's": (lambda tx: optax.chain(add_up(), tx), r"test_optax_transformations.py:\d+ \(add_up.*" + ADDS),
}
CORRECT = {
    "decay behind": lambda tx: optax.chain(tx, optax.add_decayed_weights(-1e-4), optax.clip(1.0)),
    "named": lambda tx: optax.named_chain(("a", optax.centralize()), ("b", tx)),
    "hyperparameters around": lambda tx: optax.inject_hyperparams(lambda rate: optax.chain(tx, optax.scale(rate)))(
        rate=1.0
    ),
    "real and imaginary parts": contrib.split_real_and_imaginary,
    "the whole in a chain": lambda tx: optax.chain(amp.low_precision_params(tx), optax.identity()),
    "only where the signs agree": lambda tx: optax.chain(cautious(tx)),
    "behind": lambda tx: optax.chain(tx, optax.trace(0.9), optax.ema(0.9)),
    "a schedule": lambda tx: optax.chain(optax.scale_by_schedule(lambda count: 1.0), tx),
    "a plateau": lambda tx: optax.chain(contrib.reduce_on_plateau(accumulation_size=100), tx),
    "a snapshot of the gradients": lambda tx: optax.chain(optax.snapshot("all", lambda updates: updates), tx),
    "a monitor": lambda tx: optax.chain(
        optax.monitor({"all": optax.measure_with_ema(lambda updates: updates, 0.9)}), tx
    ),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": True}),
    "flatten": optax.flatten,
    "schedule_free": lambda tx: contrib.schedule_free(tx, 0.01),
    "low precision": amp.low_precision_params,
    "guarded": lambda tx: optax.chain(add_up(guarded=True), tx),
    "a minimum so far": lambda tx: optax.chain(fill_with_best(np.inf), tx),
}


def cautious(tx):
    """A wrapper of a user, which reads the scaled gradients for their signs."""

    def update(updates, state, params=None, **extra):
        new, state = tx.update(updates, state, params, **extra)
        return jax.tree.map(lambda u, g: jnp.where(u * g < 0, u, 0), new, updates), state

    return optax.GradientTransformationExtraArgs(tx.init, update)


def step_of(tx, scale_of=lambda state: state):
    tx = optax.with_extra_args_support(tx)

    def step(params, state, bad):
        value, grads = amp.value_and_grad(loss_fn, opt_state=scale_of(state))(params)
        grads = jax.tree.map(lambda g: jnp.where(bad, jnp.inf, g), grads)
        updates, state = tx.update(grads, state, params, value=value)
        return optax.apply_updates(params, updates), state

    return step


def train(tx, finite, check=lambda state: None):
    step, params, state = jax.jit(step_of(tx)), PARAMS, tx.init(PARAMS)
    for each in finite:
        params, state = step(params, state, jnp.asarray(each == "x"))
        check(state)
    return params, state


IN_FRONT = sorted({*names()} - {"lookahead"})  # which changes the tree of the parameters
# Of the others, all commute with a scaling of the gradients, and pass on what is not finite.
SILENT = (
    *("add_decayed_weights", "centralize", "freeze", "identity", "scale", "scale_by_learning_rate"),  # no decay
    *("scale_by_param_block_norm", "scale_by_param_block_rms", "scale_by_schedule", "set_to_zero", "sgd", "snapshot"),
    *("stateless", "stateless_with_tree_map"),
)
# They divide by what they keep of steps before, so no program of one update is wrong. `check_loss_scaling` finds them.
DIVIDING = ("contrib.acprop", "contrib.scale_by_acprop")


def in_front(name, rule):
    return optax.with_extra_args_support(
        optax.chain(case_of(name).make(), amp.dynamic_loss_scale(optax.sgd(1.0), rule))
    )


@pytest.mark.parametrize("name", IN_FRONT)
@pytest.mark.filterwarnings("ignore:Specifying a key")
def test_what_stands_in_front_of_the_wrapper_raises_unless_it_commutes_with_the_scale(name):
    tx, params = in_front(name, amp.LossScale()), parameters(name)

    def step(params, state):
        value, grads = gradients(name, params, amp.get_loss_scale(state))
        return tx.update(grads, state, params, **case_of(name).extra(value, grads))[0]

    if name in SILENT:
        jax.eval_shape(step, params, tx.init(params))
    elif name in DIVIDING:
        with pytest.raises(ValueError, match="does not scale and unscale its gradients consistently"):
            amp.debug.check_loss_scaling(step)(params, tx.init(params))
    else:
        with pytest.raises(ValueError, match=r"gradients are multiplied by the loss scale: move it inside, "):
            jax.eval_shape(step, params, tx.init(params))


# Where a state of its own is an argument, it may hold a sum of scaled gradients, as that of micro-batches is one.
KEEPING = (
    *("MultiSteps", "apply_every", "conditionally_mask", "conditionally_transform", "contrib.dadapt_adamw"),
    *("contrib.prodigy", "contrib.reduce_on_plateau", "contrib.split_real_and_imaginary", "ema", "flatten"),
    *("inject_hyperparams", "inject_stateful_hyperparams", "masked", "measure_with_ema", "optimistic_gradient_descent"),
    *("rprop", "scale_by_optimistic_gradient", "scale_by_rprop", "scale_by_zoom_linesearch", "selective_transform"),
    *("trace", "with_extra_args_support"),
)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", IN_FRONT)
@pytest.mark.filterwarnings("ignore:Specifying a key")
def test_what_is_done_by_hand_with_a_state_of_its_own_raises_unless_it_may_commute_with_the_scale(name):
    front, params = optax.with_extra_args_support(case_of(name).make()), parameters(name)
    tx = amp.dynamic_loss_scale(optax.sgd(1.0))

    def step(params, state, own):
        value, grads = gradients(name, params, amp.get_loss_scale(state))
        grads, _ = front.update(grads, own, params, **case_of(name).extra(value, grads))
        return tx.update(grads, state, params)[0]

    args = params, tx.init(params), front.init(params)
    if name in SILENT + DIVIDING + KEEPING:
        jax.eval_shape(step, *args)
    else:
        with pytest.raises(ValueError, match=r"gradients are multiplied by the loss scale: move it inside, "):
            jax.eval_shape(step, *args)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_FRONT)
@pytest.mark.filterwarnings("ignore:Specifying a key")
def test_what_raises_in_front_of_the_wrapper_is_wrong_and_nothing_else_is(name, monkeypatch):
    monkeypatch.setattr("jmp_amp._loss_scale._rule.check_scaled", lambda *args, **kwargs: None)
    faults, updates = set(), {}
    for scale in (1.0, 2.0**12):
        tx, start = in_front(name, amp.LossScale.static(scale)), parameters(name)

        @jax.jit
        def step(params, state, factor, tx=tx, scale=scale):
            value, grads = gradients(name, params, scale)
            grads = jax.tree.map(lambda g: g * factor, grads)
            return tx.update(grads, state, params, **case_of(name).extra(value, grads))

        for factors in ([1, 1, 1, 1], [1, np.inf, 1, 1, 1], [1, 1, np.nan, 1, 1]):
            params, state, updates[scale] = start, tx.init(start), updates.get(scale, [])
            for factor in factors:
                each, state = step(params, state, jnp.float32(factor))
                is_seen = bool(state[-1].loss_scale.last_finite) == bool(np.isfinite(factor))
                if scale > 1 and not is_seen:
                    faults.add("an overflow is hidden or kept")
                if np.isfinite(np.sum(factors)):
                    updates[scale].append(each)
                else:
                    params = optax.apply_updates(params, each)
            if scale > 1 and not all(np.isfinite(x).all() for x in jax.tree.leaves(params)):
                faults.add("parameters are not finite")
    close = jax.tree.map(functools.partial(np.allclose, rtol=1e-3, atol=1e-9), updates[1.0], updates[2.0**12])
    if not all(jax.tree.leaves(close)):
        faults.add("the scale changes the updates")
    if name == "set_to_zero":  # no gradient is left that could overflow
        faults -= {"an overflow is hidden or kept"}
    assert bool(faults) == (name not in SILENT), faults


def test_what_is_in_front_of_a_link_is_right_inside_the_wrapper():
    tx = optax.chain(optax.trace(0.9), amp.unscale_and_check(), optax.adam(0.1))

    def step(params, scaling, state):
        grads = amp.grad(loss_fn, loss_scale=scaling.loss_scale)(params)
        return tx.update(grads, state, params, loss_scale=scaling.loss_scale)

    with pytest.raises(ValueError, match="does not scale and unscale its gradients consistently"):
        amp.debug.check_loss_scaling(step)(PARAMS, amp.LossScale().init(), tx.init(PARAMS))
    wrapped = amp.dynamic_loss_scale(tx)
    jax.eval_shape(step_of(wrapped), PARAMS, wrapped.init(PARAMS), False)


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_would_keep_an_overflow_is_found(name):
    wrap, message = OUTSIDE[name]
    tx = wrap(amp.dynamic_loss_scale(optax.sgd(0.01)))
    args = PARAMS, tx.init(PARAMS), jnp.asarray(False)
    if message is not None:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(step_of(tx), *args)
    with pytest.raises(ValueError, match=message or "does not scale and unscale its gradients consistently"):
        amp.debug.check_loss_scaling(step_of(tx))(*args)


def scaling_in(state):
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, amp.LossScaleState))
    return next(x for x in nodes if isinstance(x, amp.LossScaleState))


@pytest.mark.filterwarnings("ignore:.*replaces non-finite values")
@pytest.mark.parametrize("name", OUTSIDE)
def test_it_is_found_also_if_the_loss_is_scaled_by_the_inner_state(name):
    wrap, _ = OUTSIDE[name]
    tx = wrap(amp.dynamic_loss_scale(optax.sgd(0.01)))
    with pytest.raises(ValueError, match=r"does not scale and unscale|gradients are multiplied by the loss scale"):
        amp.debug.check_loss_scaling(step_of(tx, scaling_in))(PARAMS, tx.init(PARAMS), jnp.asarray(False))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", CORRECT)
def test_correct_compositions_train_through_overflows(name):
    tx = CORRECT[name](amp.dynamic_loss_scale(optax.sgd(0.01), amp.LossScale(init_scale=64.0)))
    params, state = train(tx, "xx..x..", amp.check_health)
    assert amp.metrics(state)["last_finite"]
    assert loss_fn(params) < loss_fn(PARAMS)


def test_what_is_not_in_the_optimizer_may_be_infinite():
    state = amp.dynamic_loss_scale(optax.sgd(0.01)).init(PARAMS)
    mask = jnp.full((2, 2), -jnp.inf)
    for tree in ({"a": mask, "state": state}, [mask, state], ({"mask": mask}, state), (state, Sum(mask))):
        amp.check_health(tree)
