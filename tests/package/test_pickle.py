"""What this package returns goes to other processes: Ray, joblib and submitit send it with cloudpickle."""

import copy
import inspect
import pathlib
import pickle
import re
import subprocess
import sys

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp import debug
from jmp_amp._formats import FORMATS

PARAMS, GRADS, X = {"w": jnp.eye(8) / 8}, {"w": jnp.full((8, 8), 2.0)}, jnp.ones((4, 8))


def loss_fn(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["w"] - 0.5) ** 2)


def step_of(tx, **options):
    def step(params, state, x):
        loss, grads = amp.value_and_grad(loss_fn, opt_state=state)(params, x)
        updates, state = tx.update(grads, state, params, **options)
        return optax.apply_updates(params, updates), state, loss

    return step


def differentiated(fun):
    return jax.jit(jax.value_and_grad(fun))(PARAMS, X)


def updated(tx, **options):
    """One eager and one jitted step."""
    state = tx.init(PARAMS)
    for update in (tx.update, jax.jit(tx.update)):
        updates, state = update(GRADS, state, PARAMS, **options)
    return updates, state


def stated(fun):
    return jax.jit(fun)(PARAMS, X)


SCALED = amp.dynamic_loss_scale(optax.adam(0.1))
SCALE_STATE = SCALED.init(PARAMS)

# By the name of the public function, and of a variant: what it returns, and a use of that.
MADE = {
    "autocast": (lambda: amp.autocast(loss_fn), differentiated),
    "autocast decorator": (lambda: amp.autocast(dtype="bfloat16"), lambda cast: differentiated(cast(loss_fn))),
    "autocast rules": (lambda: amp.autocast(loss_fn, rules={lax.tanh_p: "full"}), differentiated),
    "autocast policy": (lambda: amp.autocast(loss_fn, "O1"), differentiated),
    "autocast float8": (lambda: amp.autocast(loss_fn, "float8"), differentiated),
    "autocast kernel": (lambda: amp.autocast(loss_fn, "bfloat16", attention="xla"), differentiated),
    "precision": (lambda: amp.precision("bfloat16"), lambda mark: differentiated(amp.autocast(mark(loss_fn)))),
    "full_precision": (lambda: amp.full_precision(loss_fn), lambda f: differentiated(amp.autocast(f))),
    "cast_inputs": (lambda: amp.cast_inputs("bfloat16"), lambda cast: differentiated(amp.autocast(cast(loss_fn)))),
    "cast_inputs function": (
        lambda: amp.cast_inputs("bfloat16")(loss_fn),
        lambda fun: (differentiated(amp.autocast(fun)), jax.vmap(fun, (None, 0))(PARAMS, X[None])),
    ),
    "explain": (lambda: amp.explain(loss_fn), lambda fun: fun(PARAMS, X).to_json()),
    "explain report": (lambda: amp.explain(loss_fn)(PARAMS, X), lambda report: report.to_json()),
    "explain autocast": (lambda: amp.autocast(loss_fn, "bfloat16"), lambda fun: amp.explain(fun)(PARAMS, X).to_json()),
    "value_and_grad": (lambda: amp.value_and_grad(loss_fn, loss_scale=8.0), stated),
    "value_and_grad steps": (lambda: amp.value_and_grad(amp.autocast(loss_fn), accumulate_steps=2), stated),
    "grad": (lambda: amp.grad(amp.autocast(loss_fn), loss_scale=8.0), stated),
    "unscale_and_check": (amp.unscale_and_check, lambda tx: updated(tx, loss_scale=8.0)),
    "dynamic_loss_scale": (lambda: amp.dynamic_loss_scale(optax.adam(0.1)), updated),
    "dynamic_loss_scale chain": (
        lambda: optax.chain(
            optax.scale(2.0),
            amp.dynamic_loss_scale(optax.chain(amp.unscale_and_check(), optax.adam(0.1)), nonfinite_leaves=True),
        ),
        updated,
    ),
    "dynamic_loss_scale step": (lambda: step_of(SCALED), lambda step: jax.jit(step)(PARAMS, SCALE_STATE, X)),
    "low_precision_params": (lambda: amp.low_precision_params(optax.adam(0.1), remainder=True), updated),
    "low_precision_state": (lambda: amp.low_precision_state(optax.adam(0.1)), updated),
    "check_loss_scaling": (lambda: debug.check_loss_scaling(step_of(SCALED)), lambda f: f(PARAMS, SCALE_STATE, X)),
    "compare": (lambda: debug.compare(loss_fn), lambda fun: fun(PARAMS, X).worst()),
    "error_budget": (lambda: debug.error_budget(loss_fn), lambda fun: fun(PARAMS, X).total),
    "fastest": (lambda: debug.fastest(loss_fn, ["bfloat16"]), lambda fun: [x.error for x in fun(PARAMS, X).rows]),
    "first_nonfinite": (lambda: debug.first_nonfinite(loss_fn), lambda fun: fun(PARAMS, jnp.inf * X).primitive),
    "suggest_rules": (lambda: debug.suggest_rules(loss_fn), lambda fun: fun(PARAMS, X)[0]),
}


def loaded(value):
    return cloudpickle.loads(cloudpickle.dumps(value))


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert np.array_equal(x, y), (x, y)


def test_every_public_function_that_returns_a_function_is_here():
    public = {name: getattr(module, name) for module in (amp, debug) for name in module.__all__}
    returned = {
        name: str(inspect.signature(fun).return_annotation) for name, fun in public.items() if inspect.isfunction(fun)
    }
    makes = {name for name, kind in returned.items() if re.search("Callable|Transformation|Mark", kind)}
    assert {"explain", "grad", "unscale_and_check", "precision", "compare"} < makes
    assert makes - {name.split()[0] for name in MADE} == set()


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.usefixtures("users_code")
def test_what_is_pickled_before_or_after_its_use_computes_the_same(name):
    make, use = MADE[name]
    made = make()
    before = loaded(made)
    expected = use(made)
    assert_same(use(before), expected)
    assert_same(use(loaded(made)), expected)


@pytest.mark.usefixtures("users_code")
def test_another_process_computes_the_same(tmp_path):
    names = "autocast kernel", "cast_inputs function", "dynamic_loss_scale step", "low_precision_params"
    cases = [(made := make(), use, jax.device_get(use(made))) for make, use in map(MADE.get, names)]
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        (tmp_path / "cases").write_bytes(cloudpickle.dumps((cases, assert_same)))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    code = (
        "import pathlib, sys, cloudpickle\n"
        "cases, assert_same = cloudpickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "for made, use, expected in cases: assert_same(use(made), expected)\n"
    )
    root = pathlib.Path(amp.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "cases")], cwd=root, check=True)


VALUES = {
    "rule": lambda: amp.LossScale.deepspeed(),
    "policy": lambda: amp.get_policy("O2").with_rules({"head": "full", "tail": "float8"}),
    "state": lambda: SCALE_STATE,
    "link": lambda: amp.unscale_and_check().init(PARAMS),
    "params": lambda: amp.low_precision_params(optax.adam(0.1)).init(PARAMS),
    "moments": lambda: amp.low_precision_state(optax.adam(0.1)).init(PARAMS),
    "error": lambda: amp.LossScaleError("overflow"),
}


@pytest.mark.parametrize("name", VALUES)
def test_values_are_pickled_and_copied(name):
    value = VALUES[name]()
    for again in (pickle.loads(pickle.dumps(value)), copy.copy(value), copy.deepcopy(value)):
        assert type(again) is type(value)
        assert repr(again) == repr(value)
    if name == "policy":
        assert amp.autocast(loss_fn, again).autocast_of[1] == amp.autocast(loss_fn, value).autocast_of[1]


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_stays_itself(name):
    for form in (FORMATS[name], FORMATS[name].at_any_size):
        assert pickle.loads(pickle.dumps(form)) is form
        assert copy.deepcopy(form) is form
