"""A cure that is another function does not pass, even if it is equal to the program for the user's arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_amp import _jaxpr as jx
from jmp_amp.debug import first_nonfinite
from jmp_amp.debug._evaluation import Evaluation, Rewrite
from jmp_amp.debug._trials import Trials

pytestmark = pytest.mark.usefixtures("users_code")

X, W = np.float32([[1, 2], [3, -1], [0.5, 4], [-2, 1]]), np.float32([0.5, -1])


def rmse(w, x, y):
    return jnp.sqrt(jnp.mean((x @ w - y) ** 2))


def softplus_of_relu(x):
    return jnp.mean(jnp.log(1 + jnp.exp(jax.nn.relu(x))))


def mean_of_roots(x):
    return jnp.mean(jnp.sqrt(x))


MANY = np.where(np.arange(100_000) == 7, 0, 1).astype(np.float32)


# A program, its arguments, the op to replace, what the replacement reads, a replacement, its number, and whether it
# is equal to the program.
REPLACEMENTS = {
    "an eps": (rmse, (W, X, X @ W), "sqrt", "sub", lambda d, eps: jnp.sqrt(jnp.mean(d**2) + eps), 1e-6, True),
    "a variance": (rmse, (W, X, X @ W), "sqrt", "sub", lambda d, eps: jnp.std(d) + eps, 1e-6, False),
    "of relu": (softplus_of_relu, (100 * abs(X),), "log", "max", lambda x, _: jax.nn.softplus(x), 0.0, True),
    "without relu": (softplus_of_relu, (100 * abs(X),), "log", "", lambda x, _: jax.nn.softplus(x), 0.0, False),
    "one of many": (mean_of_roots, (MANY,), "sqrt", "", lambda x, n: jnp.sqrt(jnp.where(x > 0, x, n)), 1, False),
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_only_equal_functions_pass(name):
    fun, args, root, read, replacement, number, is_equal = REPLACEMENTS[name]
    program, arrays, _ = jx.trace_call(jax.grad(fun), args, {})
    evaluation = Evaluation(program, [jnp.asarray(x) for x in arrays])
    trials = Trials(evaluation, next(iter(evaluation.nonfinite.values())))
    key = next(x.key for x in trials.primal if x.primitive == root)
    inputs = [next(x.key for x in evaluation.nodes if x.primitive == read and x.place)]
    passed = trials.tried(lambda number: [Rewrite(key, inputs, lambda x: replacement(x, number))], [number])
    assert (passed is not None) == is_equal


def test_the_probability_of_a_label():
    def loss(w, x, labels):
        probabilities = jax.nn.softmax(x @ w)
        return -jnp.mean(jnp.log(probabilities[jnp.arange(4), labels]))

    found = first_nonfinite(jax.grad(loss))(500 * np.eye(2, dtype=np.float32), X, np.array([0, 0, 1, 1]))
    assert "use `jax.nn.log_softmax(x, axis)`" in found.cure
    assert found.tried
