"""The tools take arguments as `jax.jit` does: a Python number in a tree is an array."""

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
TOOLS = {
    "check_loss_scaling": lambda: amp.debug.check_loss_scaling(train_step)(STATE, X),
    "first_nonfinite": lambda: amp.debug.first_nonfinite(loss_fn)(STATE, X),
    "explain": lambda: amp.explain(loss_fn)(STATE, X).rows[0],
    "error_budget": lambda: amp.debug.error_budget(of_params)(STATE.params, STATE, X).rows[0],
    "suggest_rules": lambda: amp.debug.suggest_rules(of_params)(STATE.params, STATE, X),
    "compare": lambda: amp.debug.compare(of_params)(STATE.params, STATE, X).rows[0],
    "fastest": lambda: amp.debug.fastest(of_params, [])(STATE.params, STATE, X).rows[0],
}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_takes_a_count_of_steps_that_is_a_number(tool):
    with pytest.raises(ZeroDivisionError):
        loss_fn(STATE, X)
    TOOLS[tool]()


# Functions of a state, a number and an array; and which of the two numbers are arrays for them.
TAKES = {
    "any": (lambda state, n, x: x * state["n"] + n, (True, False), (False, False)),
    "a shape": (lambda state, n, x: jnp.ones(n) * state["n"], (True, False), (False, False)),
    "a branch": (lambda state, n, x: x if n else state["n"], (True, False), (False, False)),
    "a branch inside": (lambda state, n, x: x if state["n"] else n, (False, False), (False, False)),
    "a division": (lambda state, n, x: x / state["n"] + 1 / (n - 2), (True, True), (True, True)),
    "a method": (lambda state, n, x: state["n"].astype(x.dtype) * n, (True, False), (True, False)),
    "its own error": (lambda state, n, x: [][n + state["n"]], (False, False), (False, False)),
}


@pytest.mark.parametrize("name", TAKES)
def test_a_number_that_a_function_needs_as_one_stays(name):
    fun, expected, if_needed = TAKES[name]
    for arrays, options in ((expected, {}), (if_needed, {"if_needed": True})):
        (state, n, _), _ = as_jit_takes(fun, ({"n": 3, "flag": True, "name": "a"}, 2, X), {}, **options)
        assert (isinstance(state["n"], jax.Array), isinstance(n, jax.Array)) == arrays
        assert state["flag"] is True


def test_arguments_without_numbers_are_not_traced():
    args, kwargs = (X, True, "a"), {"x": None}
    taken = as_jit_takes(pytest.fail, args, kwargs)
    assert taken[0] is args
    assert taken[1] is kwargs
