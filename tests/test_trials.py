"""A cure that is another function does not pass, even if it is equal to the program for the user's arguments."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_amp import _jaxpr as jx
from jmp_amp.debug._evaluation import Evaluator, Replacement
from jmp_amp.debug._trials import Trials

pytestmark = pytest.mark.usefixtures("users_code")

X, W = np.float32([[1, 2], [3, -1], [0.5, 4], [-2, 1]]), np.float32([0.5, -1])


def rmse(w, x, y):
    return jnp.sqrt(jnp.mean((x @ w - y) ** 2))


def softplus_of_relu(x):
    return jnp.mean(jnp.log(1 + jnp.exp(jax.nn.relu(x))))


def mean_of_roots(x):
    return jnp.mean(jnp.sqrt(x))


# A program, its arguments, the op to replace, what the replacement reads, a replacement, and whether it is equal.
REPLACEMENTS = {
    "a safe root": (rmse, (W, X, X @ W), "sqrt", "sub", lambda d: safe_root(jnp.mean(d**2)), True),
    "an eps": (rmse, (W, X, X @ W), "sqrt", "sub", lambda d: jnp.sqrt(jnp.mean(d**2) + 1e-4), False),
    "a variance": (rmse, (W, X, X @ W), "sqrt", "sub", lambda d: jnp.std(d) + 1e-6, False),
    "of relu": (softplus_of_relu, (100 * abs(X),), "log", "max", jax.nn.softplus, True),
    "without relu": (softplus_of_relu, (100 * abs(X),), "log", "", jax.nn.softplus, False),
    "still not finite": (softplus_of_relu, (100 * abs(X),), "log", "max", lambda x: jnp.log(1 + jnp.exp(x)), False),
    "another shape": (softplus_of_relu, (100 * abs(X),), "log", "max", lambda x: jax.nn.softplus(x)[None], False),
    "without derivative": (mean_of_roots, (abs(X) * 0,), "sqrt", "", lambda x: jnp.sqrt(lax.stop_gradient(x)), False),
}


def safe_root(x):
    return jnp.where(x == 0, 0.0, jnp.sqrt(jnp.where(x == 0, 1.0, x)))


@pytest.mark.long
@pytest.mark.parametrize("name", REPLACEMENTS)
def test_only_equal_functions_pass(name):
    fun, args, root, read, replacement, is_equal = REPLACEMENTS[name]
    program, arrays, _ = jx.trace_call(jax.grad(fun), args, {})
    evaluation = Evaluator(program, [jnp.asarray(x) for x in arrays]).run()
    trials = Trials(evaluation, next(iter(evaluation.nonfinite.values())))
    key = next(x.key for x in trials.primal if x.primitive == root)
    value = next(x.key for x in evaluation.nodes if x.primitive == read and x.place)
    is_cured, seen = trials._tried([Replacement(key, value, replacement)])
    assert is_cured == bool(seen) == is_equal


def test_a_variant_is_not_run_before_it_is_asked_to():
    calls = []
    program, arrays, _ = jx.trace_call(lambda x: jax.pure_callback(lambda x: calls.append(1) or x, x, x), (W,), {})
    evaluator = Evaluator(program, arrays)
    evaluator.run()
    n_calls = len(calls)
    dataclasses.replace(evaluator, wide=None)
    assert len(calls) == n_calls == 1
