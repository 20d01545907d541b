"""Calls that cannot mean what they say raise, and the message has the value, what is allowed and the call to write."""

import copy
import pickle
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

import jmp_amp as amp

P, X = {"w": jnp.ones((3, 2))}, jnp.ones((4, 3))
OPT = amp.dynamic_loss_scale(optax.sgd(0.1), axis_name="data")


def flax_nnx():
    return pytest.importorskip("flax.nnx", reason="needs Flax")


def equinox():
    return pytest.importorskip("equinox", reason="needs Equinox")


def loss_fn(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


def of_module(module, x):
    return jnp.mean(jax.vmap(module)(x) ** 2)


def dropout_net():
    return flax_nnx().Sequential(
        flax_nnx().Linear(3, 2, rngs=flax_nnx().Rngs(0)), flax_nnx().Dropout(0.5, rngs=flax_nnx().Rngs(1))
    )


def mlp():
    return equinox().nn.MLP(3, 2, 4, 1, key=jax.random.key(0))


def update(tx, jit=jax.jit, **extra_args):
    return jit(lambda grads, state: tx.update(grads, state, P, **extra_args))(P, tx.init(P))


TOO_MANY = r"`{0}\((fun|step)\b.*\)` got a dict, float32\[4,3\] after the function; .*`{0}\(loss_fn\)\(\.\.\.\)`"
ONE_TOO_MANY = r"`{0}\((fun|step)\b.*\)` got a dict after the function; .*`{0}\(loss_fn\)\(\.\.\.\)`"
TRANSFORMATIONS = {
    "autocast": amp.autocast,
    "explain": amp.explain,
    "suggest_rules": amp.debug.suggest_rules,
    "value_and_grad": amp.value_and_grad,
    "grad": amp.grad,
    "first_nonfinite": amp.debug.first_nonfinite,
    "compare": amp.debug.compare,
    "error_budget": amp.debug.error_budget,
    "fastest": amp.debug.fastest,
    "check_loss_scaling": amp.debug.check_loss_scaling,
}

PAIR = (
    r"`has_aux=True` the function must return `\(loss, aux\)`, got {}; write `return loss, aux`.* leave out `has_aux`"
)
UNMAPPED = r"`axis_name` must name axes of .*`shard_map`.*, got '{}', .*; leave out `axis_name` under plain `jit`"
NO_SCALE = r"got None; write `tx.update\(.*, loss_scale=scale\)`, with `loss_scale=1.0` for .*`amp.dynamic_loss_scale"
SCOPES = (
    r"the scopes `head` must be \"full\" or a dtype .*\(float16, bfloat16, .*\), got {}; "
    r"write `rules={{'head': \"full\"}}`.*`rules={{lax.tanh_p: \"lower\"}}`"
)
REGION = (
    r"`full_precision` takes a function or no argument, got {}; write `with amp.full_precision\(\):`.*amp.precision\("
)
MODULE = r"differentiates floating arrays, got {} at `args\[0\]{}`; write `amp.value_and_grad\(fun, transform={}\)`"
INNER = r"`inner` must be an optax transformation, got {}; write `{}`"

CALLS = {
    "a rule of scopes that is a class": (
        lambda: amp.autocast(loss_fn, rules={"head": "lower"}),
        SCOPES.format("'lower'"),
    ),
    "a rule of scopes that is a bool": (lambda: amp.autocast(loss_fn, rules={"head": True}), SCOPES.format("True")),
    "a region with a dtype": (lambda: amp.full_precision("float32"), REGION.format("'float32'")),
    "a region with a scalar type": (lambda: amp.full_precision(jnp.float32), REGION.format("<class .*float32'>")),
    "a region with an array": (lambda: amp.full_precision(1.0), REGION.format("1.0")),
    "a scalar with has_aux": (lambda: amp.grad(loss_fn, has_aux=True)(P, X), PAIR.format(r"float32\[\]")),
    "three results with has_aux": (
        lambda: amp.value_and_grad(lambda p, x: (loss_fn(p, x), 1, 2), has_aux=True)(P, X),
        PAIR.format("a tuple of 3"),
    ),
    "an NNX module with random streams": (
        lambda: amp.value_and_grad(of_module)(dropout_net(), X),
        MODULE.format(r"uint32\[\]", ".*count.*", "nnx.value_and_grad"),
    ),
    "one that is no pytree": (
        lambda: amp.value_and_grad(of_module)(type("Net", (flax_nnx().Module,), {}, pytree=False)(), X),
        MODULE.format("a Net", "", "nnx.value_and_grad"),
    ),
    "an Equinox module with a function": (
        lambda: jax.jit(lambda x: amp.grad(of_module)(mlp(), x))(X),
        MODULE.format("a custom_jvp", r"\.activation", "eqx.filter_value_and_grad"),
    ),
    "micro-batches of an Equinox module": (
        lambda: amp.value_and_grad(of_module, accumulate_steps=2)(mlp(), X),
        MODULE.format("a custom_jvp", r"\.activation", "eqx.filter_value_and_grad"),
    ),
    "an optimizer that was not called": (
        lambda: amp.dynamic_loss_scale(optax.adam),
        INNER.format("the function `adam`", r"dynamic_loss_scale\(adam\(\.\.\.\)\)"),
    ),
    "masters of one": (
        lambda: amp.low_precision_params(optax.adam),
        INNER.format("the function `adam`", r"low_precision_params\(adam\(\.\.\.\)\)"),
    ),
    "the rule in place of the optimizer": (
        lambda: amp.dynamic_loss_scale(amp.LossScale(), optax.sgd(0.1)),
        INNER.format("a LossScale", r"dynamic_loss_scale\(optax.adam\(1e-3\)\)"),
    ),
    "no loss scale": (lambda: update(amp.unscale_and_check()), NO_SCALE),
    "no loss scale in a chain": (
        lambda: update(optax.chain(optax.clip(1.0), amp.unscale_and_check(), optax.adam(1e-3)), jit=lambda f: f),
        NO_SCALE,
    ),
}
VALUE_ERRORS = {"a rule of scopes that is a class", "a rule of scopes that is a bool"}


@pytest.mark.parametrize("name", TRANSFORMATIONS)
@pytest.mark.parametrize(("args", "message"), [((P, X), TOO_MANY), ((P,), ONE_TOO_MANY)], ids=["all", "one"])
def test_arguments_of_the_function_belong_in_the_second_call(name, args, message):
    with pytest.raises(TypeError, match=message.format(name)):
        TRANSFORMATIONS[name](loss_fn, *args)


@pytest.mark.parametrize("name", CALLS)
def test_the_message_has_the_value_what_is_allowed_and_the_call_to_write(name):
    call, message = CALLS[name]
    with pytest.raises(ValueError if name in VALUE_ERRORS else TypeError, match=message):
        call()


LONG = "x" * 10**6
SCALES = amp.LossScale().init()
HOSTILE = {
    "policy": lambda s: amp.get_policy(s),
    "policy with a key": lambda s: amp.get_policy(f"{s}=f16"),
    "policy with a dtype": lambda s: amp.get_policy(f"c={s}"),
    "policy twice": lambda s: amp.get_policy(f"c=f16,c={s}"),
    "policy without equals": lambda s: amp.get_policy(f"c=f16,{s}"),
    "Policy": lambda s: amp.Policy(s, "float16", "float32"),
    "Policy of a format": lambda s: amp.Policy("float32", s, "float32"),
    "jmp policy": lambda s: amp.compat.jmp.get_policy(s),
    "dtype": lambda s: amp.autocast(loss_fn, s),
    "policy as dtype": lambda s: amp.autocast(loss_fn, f"{s}="),
    "function": lambda s: amp.autocast(s),
    "region": lambda s: amp.full_precision(s),
    "precision": lambda s: amp.precision(s),
    "cast_inputs": lambda s: amp.cast_inputs(s),
    "rule": lambda s: amp.autocast(loss_fn, rules={s: s}),
    "class": lambda s: amp.autocast(loss_fn, rules={lax.tanh_p: s}),
    "key of a rule": lambda s: amp.autocast(loss_fn, rules={(s,): "full"}),
    "save": lambda s: amp.autocast(loss_fn, save=s),
    "residual_stream": lambda s: amp.autocast(loss_fn, residual_stream=s),
    "weight_grad_dtype": lambda s: amp.autocast(loss_fn, weight_grad_dtype=s),
    "init_scale": lambda s: amp.LossScale(init_scale=s),
    "bytes": lambda s: amp.LossScale(init_scale=s.encode()),
    "growth_interval": lambda s: amp.LossScale(growth_interval=s),
    "an integer": lambda s: amp.LossScale(growth_interval=10**10**4),
    "a scale": lambda s: amp.LossScale(init_scale=10**10**4),
    "clamp_growth": lambda s: amp.LossScale(clamp_growth=s),
    "set_loss_scale": lambda s: amp.set_loss_scale(SCALES, s),
    "finite": lambda s: amp.LossScale().update(SCALES, s),
    "loss_scale": lambda s: amp.grad(loss_fn, loss_scale=s),
    "argnums": lambda s: amp.grad(loss_fn, argnums=s),
    "batch_argnums": lambda s: amp.grad(loss_fn, accumulate_steps=2, batch_argnums=s),
    "accumulate_steps": lambda s: amp.grad(loss_fn, accumulate_steps=s),
    "reduction": lambda s: amp.grad(loss_fn, reduction=s),
    "a pair": lambda s: amp.grad(lambda p: s, has_aux=True)(P),
    "after the function": lambda s: amp.grad(loss_fn, 0, False, s),
    "inner": lambda s: amp.dynamic_loss_scale(s),
    "rule in place": lambda s: amp.dynamic_loss_scale(optax.sgd(0.1), s),
    "skip": lambda s: amp.dynamic_loss_scale(optax.sgd(0.1), skip=s),
    "axis_name": lambda s: update(amp.dynamic_loss_scale(optax.sgd(0.1), axis_name=s)),
    "a list of axes": lambda s: amp.dynamic_loss_scale(optax.sgd(0.1), axis_name=[s]),
    "clip": lambda s: amp.dynamic_loss_scale(optax.sgd(0.1), clip_global_norm=s),
    "rounding": lambda s: amp.low_precision_params(optax.sgd(0.1), rounding=s),
    "cast_params": lambda s: amp.cast_params(P, s),
    "opt_level": lambda s: amp.interop.apex.initialize(loss_fn, P, optax.sgd(0.1), s),
    "apex dtype": lambda s: amp.interop.apex.initialize(loss_fn, P, optax.sgd(0.1), dtype=s),
    "state dict": lambda s: amp.interop.torch.load_state_dict({s: 1}),
    "history": lambda s: amp.watch.plot_history([{"loss": s}]),
    "columns": lambda s: amp.watch.plot_history([{s: 1}]),
    "reference": lambda s: amp.debug.compare(loss_fn, reference=s)(P, X),
    "implementation": lambda s: update(amp.dynamic_loss_scale(optax.sgd(0.1), implementation=s)),
    "select": lambda s: amp.compat.jmp.select_tree(True, s, s + "y"),
    "pred": lambda s: amp.compat.jmp.select_tree(s, P, P),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_text_of_a_megabyte_is_not_quoted_in_full(name):
    with pytest.raises((TypeError, ValueError, AssertionError)) as info:
        HOSTILE[name](LONG)
    assert len(str(info.value)) < 1500


@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun, lambda fun: jax.vmap(fun, axis_name="batch", axis_size=2)])
@pytest.mark.parametrize("axis_name", ["data", ("batch", "data")])
def test_an_axis_that_is_not_mapped_is_named(jit, axis_name):
    tx = amp.dynamic_loss_scale(optax.sgd(0.1), axis_name=axis_name)
    with pytest.raises(ValueError, match=UNMAPPED.format("(data|batch)")):
        jit(lambda: tx.update(P, tx.init(P)))()


def test_a_lone_check_takes_gradients_that_are_not_scaled():
    updates, _ = update(amp.unscale_and_check(), loss_scale=1.0)
    assert (updates["w"] == P["w"]).all()


def test_modules_of_floating_arrays_need_no_transform():
    linear, dense = equinox().nn.Linear(3, 2, key=jax.random.key(0)), flax_nnx().Linear(3, 2, rngs=flax_nnx().Rngs(0))
    assert amp.grad(of_module)(linear, X).weight.any()
    assert amp.grad(of_module)(dense, X).kernel[...].any()


def test_integers_have_a_gradient_where_jax_is_asked_for_one():
    module = equinox().tree_at(lambda m: m.bias, equinox().nn.Linear(3, 2, key=jax.random.key(0)), jnp.arange(2))
    with jax.numpy_dtype_promotion("standard"):
        grads = amp.grad(of_module, allow_int=True)(module, X)
    assert grads.bias.dtype == jax.dtypes.float0


def test_functions_that_hold_arrays_are_policies():
    by_hand = jax.tree_util.Partial(loss_fn, P)
    report = amp.debug.compare(lambda x: loss_fn(P, x), {"by hand": by_hand, "rule": {"rules": {lax.tanh_p: "full"}}})(
        X
    )
    assert set(report.gradient) == {"by hand", "rule"}


def test_a_policy_of_suggest_rules_names_the_dtype():
    _, report = amp.debug.suggest_rules(loss_fn, "mixed_bfloat16")(P, X, tol=1.0)
    assert report.dtype == "bfloat16"


# A call with an argument that the function does not have, and the function that Python names.
UNKNOWN = {
    "autocast": lambda: amp.autocast(loss_fn, policy="O2"),
    "value_and_grad": lambda: amp.value_and_grad(loss_fn, growth_interval=10),
    "dynamic_loss_scale": lambda: amp.dynamic_loss_scale(optax.adam(1e-3), growth_interval=10),
    "unscale_and_check": lambda: amp.unscale_and_check(axis="data"),
    "low_precision_params": lambda: amp.low_precision_params(optax.adam(1e-3), dtype="float16"),
    "cast_params": lambda: amp.cast_params(P, "O2", dtype="float16"),
    "low_precision_state": lambda: amp.low_precision_state(optax.adam(1e-3), blocks=32),
    "LossScale.__init__": lambda: amp.LossScale(scale_window=8),
    "Policy.__init__": lambda: amp.Policy("float32", "float16", "float32", outputs="float32"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_argument_is_named_by_python(name):
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument '\w+'"):
        UNKNOWN[name]()


@pytest.mark.parametrize("tool", [amp.explain, amp.debug.error_budget, amp.debug.suggest_rules, amp.debug.compare])
def test_a_tool_passes_on_no_argument_that_nothing_takes(tool):
    with pytest.raises(TypeError, match="got an unexpected keyword argument 'dtyp'"):
        tool(loss_fn, dtyp="mixed_float16")


@pytest.mark.usefixtures("users_code")
def test_parameters_in_16_bits_name_low_precision_params():
    params = {"w": jnp.ones(3, jnp.float16)}
    tx = amp.dynamic_loss_scale(optax.adam(1e-3))
    with pytest.raises(TypeError, match=r"state\[0\].mu\['w'\] from float16\[3\] .*amp.low_precision_params\(inner\)"):
        tx.update(params, tx.init(params), params)
    tx = amp.dynamic_loss_scale(amp.low_precision_params(optax.adam(1e-3)))
    updates, _ = tx.update(params, tx.init(params), params)
    assert optax.apply_updates(params, updates)["w"].dtype == jnp.float16


PART = optax.partition({"train": optax.adam(0.1)}, "train")
WRAPPERS = {
    "dynamic_loss_scale": (amp.dynamic_loss_scale(PART), "opt_state.inner_state.inner_states"),
    "low_precision_params": (amp.low_precision_params(PART), "opt_state.inner_state.inner_states"),
    "low_precision_state": (amp.low_precision_state(PART), "opt_state.inner_state.inner_states"),
    "both": (
        amp.dynamic_loss_scale(amp.low_precision_params(PART)),
        "opt_state.inner_state.inner_state.inner_states",
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_an_attribute_of_the_wrapped_state_names_its_place(name):
    tx, place = WRAPPERS[name]
    opt_state = tx.init(P)
    with pytest.raises(
        AttributeError, match=f"has no attribute 'inner_states'.*: write `{re.escape(place)}`$"
    ) as raised:
        _ = opt_state.inner_states
    assert (raised.value.name, raised.value.obj) == ("inner_states", opt_state)
    assert eval(place).keys() == {"train"}
    with pytest.raises(AttributeError, match=r"object has no attribute 'inner_stats'$"):
        _ = opt_state.inner_stats
    assert not hasattr(opt_state, "inner_states")
    assert getattr(opt_state, "inner_states", None) is None
    for again in (copy.copy(opt_state), pickle.loads(pickle.dumps(opt_state)), jax.tree.map(lambda x: x, opt_state)):
        assert jax.tree.structure(again) == jax.tree.structure(opt_state)
