"""The tools take arguments as `jax.jit` does: a Python number in a tree is an array."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jmp_amp as amp
from jmp_amp.debug._report import as_jit_takes

X = np.linspace(-1, 1, 512, dtype=np.float32).reshape(16, 32)


class TrainState(NamedTuple):
    step: Any
    params: Any
    opt_state: Any


def loss_fn(state, x, power=2):
    """Python divides by zero at `step == 0`, and JAX does not; `power` may be a number or an array."""
    rate = 1.0 + 0 * jnp.minimum(state.step**-0.5, 1.0)
    return rate * jnp.mean(abs(x @ state.params) ** power)


def of_params(params, state, x):
    return loss_fn(state._replace(params=params), x)


def train_step(state, x, power=2):
    grads = amp.grad(lambda w: loss_fn(state._replace(params=w), x, power), opt_state=state.opt_state)(state.params)
    updates, opt_state = TX.update(grads, state.opt_state, state.params)
    return TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state)


TX = amp.dynamic_loss_scale(optax.sgd(0.1))
STATE = TrainState(0, jnp.ones((32, 32)), TX.init(jnp.ones((32, 32))))
# A tool of a function, and its arguments: those of `loss_fn`, of its gradient in the parameters, or of a step.
TOOLS = {
    "check_loss_scaling": (amp.debug.check_loss_scaling, train_step),
    "first_nonfinite": (amp.debug.first_nonfinite, loss_fn),
    "explain": (amp.explain, loss_fn),
    "error_budget": (amp.debug.error_budget, of_params),
    "suggest_rules": (amp.debug.suggest_rules, of_params),
    "compare": (amp.debug.compare, of_params),
    "fastest": (lambda fun: amp.debug.fastest(fun, []), of_params),
}
TRACES = {"check_loss_scaling": 1, "first_nonfinite": 1, "explain": 1, "error_budget": 2}  # without and with autocast


def arguments_of(fun, step):
    state = STATE._replace(step=step)
    return (STATE.params, state, X) if fun is of_params else (state, X)


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_traces_a_function_of_numbers_as_often_as_one_of_arrays(tool):
    transform, fun = TOOLS[tool]
    steps = []

    @functools.wraps(fun)
    def counted(*args):
        steps.append(args[-2].step)
        return fun(*args)

    with pytest.raises(ZeroDivisionError):
        loss_fn(STATE, X)
    transform(counted)(*arguments_of(fun, 0))
    n_traces = len(steps)
    transform(counted)(*arguments_of(fun, jnp.asarray(0)))
    assert len(steps) == 2 * n_traces
    assert all(isinstance(step, jax.Array) for step in steps)
    assert n_traces == TRACES.get(tool, n_traces)


@pytest.mark.parametrize("error", [TypeError, ZeroDivisionError, AttributeError, RuntimeError])
@pytest.mark.parametrize("tool", TOOLS)
def test_an_error_of_the_function_is_raised_as_it_is_after_one_trace(tool, error):
    transform, fun = TOOLS[tool]
    raised = []

    def failing(*args):
        raised.append(error("two of my own do not match"))
        raise raised[-1]

    with pytest.raises(error) as caught:
        transform(failing)(*arguments_of(fun, 0))
    assert len(raised) == 1
    assert caught.value is raised[0]


class Module(NamedTuple):
    heads: Any
    weight: Any

    def __call__(self, x):
        return x.reshape(self.heads, -1) * self.weight


STAY = [
    2,
    0.5,
    True,
    "a",
    Module(4, X),
    [Module(4, X), 2],
    {"n": 3, "act": jnp.tanh},
    {"n": 3, "name": "a"},
    X,
    [X, True],
]


def test_numbers_in_trees_are_arrays():
    state = {"n": 3, "rate": 0.5, "flag": True, "none": None, "x": X, "type": jax.ShapeDtypeStruct((), np.float32)}
    (taken,), kwargs = as_jit_takes([state], {"options": [1j, np.float32(2)]})
    assert all(isinstance(x, jax.Array) for x in (taken["n"], taken["rate"], *kwargs["options"]))
    assert all(taken[name] is state[name] for name in ("flag", "none", "x", "type"))


def test_numbers_in_modules_and_arguments_that_are_numbers_stay():
    args, kwargs = as_jit_takes(STAY, {"x": STAY[-1]})
    assert all(x is y for x, y in zip(args, STAY, strict=True))
    assert kwargs["x"] is STAY[-1]
