"""`first_nonfinite` names the line that was planted, and leaves infinities alone that are meant."""

import dataclasses
import functools
import math
import pathlib
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp import _jaxpr as jx
from jmp_amp.debug import NonFinite, first_nonfinite
from jmp_amp.debug._clock import Clock
from jmp_amp.debug._evaluation import Interpretation

pytestmark = pytest.mark.usefixtures("users_code")

F16 = jnp.float16
EYE = np.eye(8, dtype=np.float32)
X = np.full((2, 8), 100, np.float32)
LAYERS = np.stack([EYE, EYE, 1e4 * EYE, EYE])
CAUSAL = np.tril(np.ones((8, 8), bool))


def planted(name):
    """The line that is marked with a name."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    (found,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# planted: {name}")]
    return str(found)


def line(found):
    """The line of a report."""
    return re.search(r"test_first_nonfinite.py:(\d+) ", found.source)[1]


# Models with an overflow each: `name(*args)` is a loss, and `CASES` says what is to be found.


def mlp(ws, x):
    for w in ws[:2]:
        x = jnp.tanh(x @ w)
    x = 100 * x @ (ws[2] + 1)  # planted: mlp
    return jnp.mean(x @ ws[3])


def attention_logits(q, k, v):
    with jax.named_scope("attention"):
        scores = jnp.einsum("qd,kd->qk", q, k)  # planted: attention_logits
        scores = jnp.where(CAUSAL, scores / 2, -1e9)
        return jnp.mean(jax.nn.softmax(scores) @ v)


def softmax_by_hand(w, x):
    scores = x @ w
    weights = jnp.exp(scores)  # planted: softmax_by_hand
    return jnp.mean(weights / jnp.sum(weights, -1, keepdims=True))


def eps_below_float16(scale, x):
    x = x.astype(F16)
    x = x / (jnp.sqrt(jnp.mean(x**2, -1, keepdims=True)) + 1e-8)  # planted: eps_below_float16
    return jnp.mean(scale * x)


def log_of_probability(w, x):
    with amp.precision("float16"):
        probabilities = jax.nn.softmax(x) @ w  # planted: underflow
    return -jnp.mean(jnp.log(probabilities))  # planted: log_of_probability


def scan_over_layers(layers, x):
    def layer(x, w):
        with jax.named_scope("layer"):
            return jnp.abs(x @ w), jnp.sum(x)  # planted: scan_over_layers

    return jnp.mean(lax.scan(layer, x, layers)[0])


def reverse_scan(layers, x):
    def layer(x, w):
        x = jnp.abs(x @ w)  # planted: reverse_scan
        return x, x

    return jnp.mean(lax.scan(layer, x, layers, reverse=True)[1])


def fori_loop(w, x):
    def step(_, x):
        return jnp.abs(x @ w)  # planted: fori_loop

    return jnp.mean(lax.fori_loop(0, 5, step, x))


def while_in_scan(w, x):
    def inner(state):
        n, x = state
        return n + 1, jnp.abs(x @ w)  # planted: while_in_scan

    def outer(x, _):
        return lax.while_loop(lambda state: state[0] < 2, inner, (0, x))[1], None

    return jnp.mean(lax.scan(outer, x, None, length=3)[0])


def cond_branch(w, x):
    def large(x):
        return x @ (1000 * w)  # planted: cond_branch

    return jnp.mean(lax.cond(x[0, 0] > 1, large, lambda x: x @ w, x))


def activation(w, x):
    x = x @ w
    return jnp.mean(jax.nn.silu(x) * (jax.nn.relu(x).astype(F16) * 1000).astype(jnp.float32))  # planted: activation


@jax.custom_vjp
def squared(x):
    return x @ x.T  # planted: custom_vjp


squared.defvjp(lambda x: (squared(x), x), lambda x, ct: ((ct + ct.T) @ x,))


def custom_vjp(w, x):
    return jnp.mean(squared(x @ w))  # planted: custom_vjp, called


@jax.custom_jvp
def tripled(x, w):
    return 3 * (x @ w)  # planted: custom_jvp


@tripled.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return tripled(x, w), 3 * (dx @ w + x @ dw)


def custom_jvp(w, x):
    return jnp.mean(tripled(x, w))  # planted: custom_jvp, called


def remat(w, x):
    @jax.checkpoint
    def layer(x):
        return jnp.sqrt(x @ w)  # planted: remat

    return jnp.mean(layer(x))


@jax.jit
def inner_jit(x, w):
    return x @ w  # planted: nested_jit


def nested_jit(w, x):
    return jnp.mean(jax.jit(lambda x: inner_jit(x, w))(x / 100) + inner_jit(x, w))


# The arguments, the op, its iteration, and a part of the cause or the cure.
CASES = {
    mlp: ((np.stack([EYE, 100 * EYE, 198 + 0 * EYE, EYE]), X), "dot_general", (), "full"),
    attention_logits: ((100 + EYE, 900 + EYE, EYE), "dot_general", (), "full_precision"),
    softmax_by_hand: ((EYE[:4, :4], X[:, :4]), "exp", (), "2.688e+43, beyond float32"),
    eps_below_float16: ((EYE[0], X * 1e-7), "div", (), "1e-08 is 0 in float16, whose smallest positive value is 6e-8"),
    log_of_probability: ((EYE, X * [1, 0.8, *[1] * 6]), "log", (), "full_precision"),
    scan_over_layers: ((LAYERS, X), "dot_general", (2,), "`layers[2, 0, 0]` is 1e+04"),
    reverse_scan: ((LAYERS, X), "dot_general", (2,), "`layers[2, 0, 0]` is 1e+04"),
    fori_loop: ((10 * EYE, X), "dot_general", (2,), "full"),
    while_in_scan: ((10 * EYE, X), "dot_general", (1, 0), "full"),
    cond_branch: ((EYE, X), "dot_general", (), "full"),
    activation: ((EYE, X), "mul", (), "full"),
    custom_vjp: ((5 * EYE, X), "dot_general", (), "full"),
    custom_jvp: ((1000 * EYE, X), "dot_general", (), "full"),
    remat: ((1000 * EYE, X), "dot_general", (), "full"),
    nested_jit: ((1000 * EYE, X), "dot_general", (), "full"),
}
DIRECTIONS = {"forward": lambda f: f, "and backward": functools.partial(amp.value_and_grad, loss_scale=2.0**10)}


@pytest.mark.parametrize(
    ("model", "direction"),
    [  # each model in one direction, and the other by turns
        pytest.param(model, way, marks=pytest.mark.slow if (i + k) % 2 else (), id=f"{model.__name__}-{way}")
        for i, model in enumerate(CASES)
        for k, way in enumerate(DIRECTIONS)
    ],
)
@pytest.mark.sweep(6)
def test_the_planted_line_is_named(model, direction):
    if direction != "forward" and model is while_in_scan:
        pytest.skip("JAX does not differentiate `while_loop`")
    args, primitive, iteration, cure = CASES[model]
    found = first_nonfinite(DIRECTIONS[direction](amp.autocast(model)))(*args)
    # JAX knows the ops of a custom rule by the line that calls it.
    called = ", called" if direction != "forward" and model in (custom_vjp, custom_jvp) else ""
    assert line(found) == planted(model.__name__ + called)
    assert (found.primitive, found.iteration, found.direction) == (primitive, iteration, "forward")
    assert found.result.infs
    assert not any(x.infs or x.nans for x in found.operands)
    assert cure in found.cause + found.cure


@pytest.mark.parametrize("model", [mlp, scan_over_layers, custom_vjp], ids=lambda model: model.__name__)
def test_it_looks_into_jit(model):
    found = first_nonfinite(jax.jit(amp.autocast(model)))(*CASES[model][0])
    assert line(found) == planted(model.__name__)


@pytest.mark.parametrize("model", [mlp, attention_logits, scan_over_layers, remat], ids=lambda model: model.__name__)
def test_the_cure_cures(model):
    args = CASES[model][0]
    assert first_nonfinite(amp.autocast(model, rules={lax.dot_general_p: "original"}))(*args) is None
    assert first_nonfinite(model)(*args) is None


def test_the_line_that_made_the_zeros_is_named_too():
    found = first_nonfinite(amp.autocast(log_of_probability))(*CASES[log_of_probability][0])
    where = f"at tests/debug/test_first_nonfinite.py:{planted('underflow')} (log_of_probability)"
    assert where in found.cause
    assert "which is 0 in float16" in found.cause
    assert where.removeprefix("at ") in found.cure


# The backward pass


def large_gradient(w, x):
    with jax.named_scope("head"):
        return 100 * jnp.sum(x @ w)  # planted: large_gradient


def test_an_overflow_of_scaled_gradients_asks_for_a_smaller_scale():
    args = np.ones((8, 2), np.float32), X / 1e4
    scaled = amp.value_and_grad(amp.autocast(large_gradient), loss_scale=2.0**24)
    found = first_nonfinite(scaled)(*args)
    assert line(found) == planted("large_gradient")
    assert (found.direction, found.module) == ("backward", "head")
    assert "in the backward pass of" in str(found)
    (k,) = re.findall(r"With a loss scale that is 2\^(\d+) times smaller, all results are finite", found.cause)
    for scale, fits in ((2.0 ** (24 - int(k)), True), (2.0 ** (25 - int(k)), False)):
        scaled = amp.value_and_grad(amp.autocast(large_gradient), loss_scale=scale)
        assert np.isfinite(scaled(*args)[1]).all() == fits


def test_a_whole_train_step_is_looked_into():
    tx = amp.dynamic_loss_scale(optax.chain(amp.unscale_and_check(), optax.adam(1e-3)))

    @jax.jit
    def step(w, state, x):
        grads = amp.grad(amp.autocast(large_gradient), loss_scale=amp.get_loss_scale(state))(w, x)
        updates, state = tx.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    w = jnp.ones((8, 2))
    state = tx.init(w)
    found = first_nonfinite(step)(w, state, X)
    assert (line(found), found.direction) == (planted("large_gradient"), "backward")
    assert first_nonfinite(step)(w, amp.set_loss_scale(state, 1.0), X) is None


def test_the_recomputation_in_a_backward_pass_is_told_apart_from_it():
    @jax.checkpoint
    def layer(x):
        return jnp.exp(x)

    backward_only = jax.vjp(lambda x: jnp.minimum(layer(x), 1.0), jnp.float32(100.0))[1]
    found = first_nonfinite(lambda ct: backward_only(ct))(jnp.float32(1.0))
    assert (found.primitive, found.direction) == ("exp", "recomputed")


def test_the_gradient_of_a_square_root_of_zero():
    def distance(x):
        return jnp.sqrt(jnp.sum(x**2))  # planted: distance

    assert first_nonfinite(distance)(np.zeros(2, np.float32)) is None
    found = first_nonfinite(jax.grad(distance))(np.zeros(2, np.float32))
    assert line(found) == planted("distance")
    assert (found.primitive, found.direction) == ("div", "forward")
    assert "in the derivative, `div` of 0.5 and 0 is inf; `x[0]` is 0" in found.cause


def a_norm_by_hand(x, y):
    return jnp.sqrt(x[0] * x[0] + y[0] * y[0])


# Functions whose gradient is not finite, their arguments, and where the number comes from.
NUMBERS = {
    "equal arguments": (
        lambda x, y: jnp.sqrt(jnp.mean((x - y) ** 2)),
        (X[0, :3] * 0, X[0, :3] * 0),
        "`sub` of 0 and 0",
    ),
    "a sum": (lambda x, y: jnp.sqrt(jnp.sum(x + y)), (0 * X[0], 0 * X[0]), "`add` of 0 and 0"),
    "orthogonal": (lambda x, y: jnp.sqrt(x @ y), (EYE[0], EYE[1]), "`dot_general` of 0 and "),
    "a factor": (lambda x, y: jnp.sqrt(jnp.sum(x * y)), (0 * X[0], X[0]), "`x[0]` is 0"),
    "both factors": (lambda x, y: jnp.sqrt(jnp.sum(x * y)), (0 * X[0], 0 * X[0]), "`x[0]` is 0"),
    "one": (lambda x, y: jnp.sqrt(jnp.sum((x - 0) ** 2)), (0 * X[0], X[0]), "`x[0]` is 0"),
    "a mask": (lambda x, y: jnp.sqrt(jnp.where(y > 0, x, 1)), (0 * X[0, :2], X[0, :2]), "`x[0]` is 0"),
    "the lesser": (lambda x, y: jnp.log(jnp.minimum(x, y)), (0 * X[0, :2], 0 * X[0, :2]), "`x[0]` is 0"),
    "the larger": (lambda x, y: jnp.log(jnp.maximum(x, y)), (0 * X[0, :2], 0 * X[0, :2]), "`max` of 0 and 0"),
    "rounded": (a_norm_by_hand, (np.full(2, 1e-5, F16), np.full(2, 1e-5, F16)), "is 1.003e-10, which is 0 in float16"),
}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_zero_is_named_only_if_it_alone_makes_the_result(name):
    fun, args, expected = NUMBERS[name]
    find = first_nonfinite(jax.grad(lambda x, y: jnp.sum(fun(x, y)), (0, 1)))
    found = find(*args)
    assert expected in found.cause
    if (named := re.search(r"`([xy])\[", found.cause)) and name != "a mask":
        others = [
            x if key == named[1] else np.linspace(1, 2, x.size, dtype=x.dtype)
            for key, x in zip("xy", args, strict=True)
        ]
        assert find(*others) is not None


def over_a_loop(op):
    def step(h, w):
        return op(h * w), None

    return lambda x: lax.scan(step, x[0], jnp.float32([1, 0, 1, 1]))[0]


def normalized(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


# Functions that are not finite, or whose gradient is not, at a row of zeros: the op, and whether it is of a derivative
# for the loss with its gradient, and for the gradient alone.
OF_ZEROS = {
    "norm": (normalized, "`div` of 0 and 0", False, True),
    "deviation": (lambda x: x / jnp.std(x, axis=-1, keepdims=True), "`div` of 0 and 0", False, True),
    "root mean square": (lambda x: x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True)), "`div` of 0 and 0", False, True),
    "jit": (jax.jit(normalized), "`div` of 0 and 0", False, True),
    "logarithm": (jnp.log, "`log` of 0", False, True),
    "inverse": (lambda x: (1 / x) ** 2, "`div` of 1 and 0", False, False),
    "norms in a loop": (over_a_loop(normalized), "`div` of 0 and 0", False, False),
    "logarithms in a loop": (over_a_loop(jnp.log), "`log` of 0", False, False),
    "root": (jnp.sqrt, "`div` of 0.5 and 0", True, True),
    "roots in a loop": (over_a_loop(jnp.sqrt), "`div` of 0.5 and 0", True, True),
    "a branch": (lambda x: jnp.where(x > 0, jnp.sqrt(x), 0), "`div` of 0.5 and 0", True, True),
    "a derivative": (jax.grad(lambda x: jnp.sum(jnp.abs(x) ** 1.5)), "`pow` of 0 and -0.5", True, True),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", OF_ZEROS)
def test_a_derivative_is_blamed_unless_the_loss_is_not_finite(name):
    fun, op, *is_of_derivative = OF_ZEROS[name]
    x = jnp.linspace(1, 2, 6).reshape(2, 3)
    x = x if "loop" in name else x.at[1].set(0)
    loss = lambda x: jnp.sum(fun(x) * jnp.arange(1.0, 4))  # noqa: E731
    assert not is_of_derivative[0] or jnp.isfinite(loss(x))
    for transform, is_so in zip((jax.value_and_grad, jax.grad), is_of_derivative, strict=True):
        found = first_nonfinite(transform(loss))(x)
        assert found.cause.startswith("in the derivative, " * is_so)
        assert found.guide.endswith("#a-derivative-that-is-not-finite") == is_so
        assert op in found.cause or is_so is not is_of_derivative[0]


def test_values_beyond_float32_are_no_matter_of_precision():
    found = first_nonfinite(lambda x: x * x)(np.float32([1e30]))
    assert "`mul` of 1e+30 and 1e+30 at [0] is 1e+60, beyond float32" in found.cause
    assert "precision is not the cause" in found.in_float32


def test_an_operand_outside_of_the_domain():
    for fun in (jnp.log, jnp.sqrt):
        found = first_nonfinite(fun)(np.float32([2, -1]))
        assert f"`{fun.__name__}` of -1 at [1] is nan; `x[1]` is -1" in found.cause
        assert found.guide == "docs/my-loss-is-nan.md#outside-of-the-domain"


def test_a_singular_matrix():
    assert "is from 0 to 1" in first_nonfinite(jnp.linalg.inv)(np.ones((2, 2), np.float32)).cause
    assert "eigenvalues of the matrix are from -1 to -1" in first_nonfinite(jnp.linalg.cholesky)(-EYE).cause


# Functions of an integer that wraps around, and what it would be.
WRAPPED = {
    "product": (lambda n: jnp.sqrt(jnp.float32(n * n * n)), np.int32(1300), "`mul`", 1300**3),
    "sum": (lambda n: jnp.sqrt(jnp.float32(n + n)), np.int32(2**30 + 5), "`add`", 2**31),
    "shift": (lambda n: jnp.sqrt(jnp.float32(n << 3)), np.int32(2**28 + 5), "`shift_left`", 2**31),
    "shift to 0": (lambda n: 1 / jnp.float32(n << 4), np.int32(2**28), "`shift_left`", 2**32),
    "cast": (lambda n: jnp.sqrt(jnp.float32(n.astype(jnp.int8))), np.int32(200), "`convert_element_type`", 200),
    "square in bfloat16": (lambda n: jnp.sqrt(jnp.bfloat16(n * n)), np.int32(50001), "`mul`", 50001**2),
    "reduction": (
        lambda n: jnp.log(jnp.float32(jnp.sum(n))),
        np.full(3, 2**30 + 1, np.int32),
        "`reduce_sum`",
        3 * 2**30,
    ),
    "dot product": (lambda n: jnp.sqrt(jnp.float32(n @ n)), np.full(3, 30001, np.int32), "`dot_general`", 3 * 30001**2),
    "difference": (lambda n: jnp.exp(jnp.float32(n - jnp.uint8(3))), np.uint8(1), "`sub`", -2),
    "negation": (lambda n: jnp.exp(jnp.float32(-n)), np.uint32(5), "`neg`", -5),
    "exponent": (lambda n: jnp.exp(jnp.float16(n * n)), np.int8(17), "`mul`", 289),
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", WRAPPED)
def test_an_integer_that_wraps_around_is_named(name):
    fun, n, op, exact = WRAPPED[name]
    found = first_nonfinite(fun)(jnp.asarray(n))
    assert op in found.cause
    text = f"is {exact:.4g}, {'more' if exact > 0 else 'less'} than {n.dtype if name != 'cast' else 'int8'} holds"
    assert f"{text}, and wraps around" in found.cause
    assert found.guide.endswith("#an-integer-that-wraps-around")


def test_a_large_integer_that_does_not_wrap_around_is_named_itself():
    found = first_nonfinite(lambda n: jnp.sqrt(jnp.float32(n - 10)))(jnp.int32(-70000001))
    assert "`sub` of -7e+07 and 10 at" in found.cause
    found = first_nonfinite(lambda n: jnp.sqrt(jnp.float32(n)))(jnp.int32(-70000001))
    assert "`n` is -7e+07" in found.cause


def test_of_equal_values_the_first_is_named():
    def model(x):
        weight = x - 1  # planted: first of equal values
        return weight * jnp.log(x - 1)

    assert f"test_first_nonfinite.py:{planted('first of equal values')} " in first_nonfinite(model)(X[0] * 0 + 1).cause


def test_no_eps_is_advised_where_the_result_depends_on_it():
    low = lambda x: jnp.log(x.astype(jnp.float8_e5m2).astype(jnp.float32))  # noqa: E731
    for fun, x in ((jnp.log, np.complex64([0, 1])), (jnp.log, 0 * X), (low, 0 * X)):
        found = first_nonfinite(fun)(x)
        assert (found.cure, found.tried) == ("", "")
        assert "`log` of 0" in found.cause


def test_float8_is_as_low_as_float16():
    found = first_nonfinite(lambda x: x.astype(jnp.float8_e5m2).astype(jnp.float32))(1e4 * X)
    assert "of 1e+06 at [0, 0] is inf, beyond float8_e5m2, whose largest finite value is 57344" in found.cause


def test_an_op_inside_a_linear_solve_is_named():
    def model(diagonal, b):
        def solve(_, b):
            with jax.named_scope("solver"):
                return b / diagonal  # planted: solver

        return jnp.sum(lax.custom_linear_solve(lambda x: diagonal * x, b, solve, symmetric=True))

    find = first_nonfinite(model)
    assert find(np.float32([1, 2]), np.float32([1, 1])) is None
    found = find(np.float32([1, 0]), np.float32([1, 1]))
    assert (found.primitive, found.module, line(found)) == ("div", "solver", planted("solver"))


# What is not blamed


def masked_softmax(scores, mask):
    masked = jnp.where(mask, scores, -jnp.inf)
    return jax.nn.softmax(masked)  # planted: masked_softmax


def additive_mask(scores, bias):
    return jax.nn.softmax(scores + bias)  # planted: additive_mask


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (masked_softmax, (EYE, CAUSAL)),
        (additive_mask, (EYE, np.where(CAUSAL, 0, -np.inf).astype(np.float32))),
        (lambda x: jnp.max(x, initial=-jnp.inf), (EYE,)),
        (lambda x: jax.nn.logsumexp(x, where=CAUSAL), (EYE,)),
        (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"), (EYE,)),
        (lambda x: jnp.where(x > 0, jnp.log(x), 0.0), (EYE,)),
        (lambda x: jnp.exp(-jnp.exp(100 * x)), (EYE,)),
        (lambda x: lax.scan(lambda m, x: (jnp.maximum(m, x), jnp.exp(m - x)), jnp.full(8, -jnp.inf), x), (EYE,)),
        (lambda x: x.astype(jnp.int32) + jax.random.bits(jax.random.key(0), (8, 8)).astype(jnp.int32), (EYE,)),
    ],
)
def test_finite_results_have_no_culprit(fun, args):
    assert first_nonfinite(fun)(*args) is None


@pytest.mark.parametrize("fun", [masked_softmax, additive_mask], ids=lambda fun: fun.__name__)
def test_a_row_that_is_masked_whole_is_blamed_on_its_softmax(fun):
    mask = CAUSAL & (np.arange(8) > 0)[:, None]
    given = mask if fun is masked_softmax else np.where(mask, 0, -np.inf).astype(np.float32)
    found = first_nonfinite(fun)(EYE, given)
    assert line(found) == planted(fun.__name__)
    assert found.primitive == "sub"
    assert (found.operands[0].infs, found.result.nans) == (29, 8)
    assert "`sub` of -inf and -inf" in found.cause
    assert found.guide == "docs/my-loss-is-nan.md#an-infinity-meets-another"


@pytest.mark.parametrize("mask", [masked_softmax, additive_mask], ids=lambda fun: fun.__name__)
def test_an_overflow_next_to_a_harmless_mask_is_blamed(mask):
    def model(x, w):
        given = CAUSAL if mask is masked_softmax else jnp.log(CAUSAL.astype(jnp.float32))
        return mask(x, given) @ jnp.exp(w)  # planted: behind a mask

    found = first_nonfinite(model)(EYE, 100 * EYE)
    assert line(found) == planted("behind a mask")


def test_a_harmless_infinity_that_does_not_reach_the_result_is_not_blamed():
    def model(x):
        safe = jnp.where(x > 0, jnp.log(x), 0.0)
        return safe * jnp.exp(100 * x)  # planted: not the log

    assert line(first_nonfinite(model)(EYE)) == planted("not the log")


def test_harmless_infinities_of_each_iteration_are_not_blamed():
    def step(x, w):
        scores = x + jnp.log(CAUSAL.astype(jnp.float32))
        return jax.nn.softmax(scores) * jnp.exp(w), None  # planted: third iteration

    found = first_nonfinite(lambda x, ws: lax.scan(step, x, ws)[0])(EYE, np.float32([0, 0, 100, 0]))
    assert line(found) == planted("third iteration")
    assert (found.primitive, found.iteration) == ("exp", (2,))


def test_one_of_two_results_counts_alone():
    def model(x):
        return jnp.log(x), x / 0.0  # both

    assert first_nonfinite(lambda x: model(x)[1])(np.float32([1])).primitive == "div"
    assert first_nonfinite(model)(np.float32([1])).primitive == "div"
    assert first_nonfinite(model)(np.float32([0])).primitive == "log"


def test_a_loop_that_ended_because_of_nan_ends_without_it():
    def model(x):
        y = lax.while_loop(lambda y: y < 2, jnp.cos, jnp.log(x - 9))  # planted: for ever
        return y, jnp.sqrt(x - 10)

    assert line(first_nonfinite(model)(jnp.float32(5))) == planted("for ever")


# Plain float16


def test_a_mask_constant_beyond_float16_is_blamed():
    def model(scores):
        mask = CAUSAL & (jnp.arange(8) > 0)[:, None]
        return jax.nn.softmax(jnp.where(mask, scores, -1e9))  # planted: mask constant

    found = first_nonfinite(model)(EYE.astype(F16))
    assert line(found) == planted("mask constant")
    assert "of -1e+09 is -inf, beyond float16, whose largest finite value is 65504" in found.cause
    assert first_nonfinite(amp.autocast(model))(EYE) is None


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # JAX's, as it traces the constant
def test_a_mask_constant_that_is_multiplied_is_blamed():
    def model(scores):
        return jax.nn.softmax(scores + (1 - jnp.asarray(CAUSAL, F16)) * -1e9)  # planted: mask product

    found = first_nonfinite(model)(EYE.astype(F16))
    assert line(found) == planted("mask product")
    assert "-1e+09 is -inf in float16, whose largest finite value is 65504" in found.cause


# Arguments


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_an_argument_that_is_not_finite_is_named_by_its_path(bad):
    def loss(params, /, *batch, scale):
        return jnp.mean(params["dense"][0] * batch[1]) * scale

    find = first_nonfinite(amp.autocast(loss))
    params, x = {"dense": [EYE[0]], "name": "mlp"}, EYE[0]
    assert find(params, x, x, scale=1.0) is None
    found = find(params, x, bad * np.ones(8, np.float32), scale=1.0)
    assert (found.primitive, found.source) == ("argument", "batch[1]")
    found = find({"dense": [np.float32([1, bad, *[1] * 6])]}, x, x, scale=1.0)
    assert (found.source, found.result.infs + found.result.nans) == ("params['dense'][0]", 1)
    assert "`params['dense'][0]` is not finite: float32[8] = 1, 1 of 8" in str(found)
    assert find(params, x, x, scale=jnp.float32(bad)).source == "scale"


@pytest.mark.parametrize("bad", [complex(np.inf, 0), complex(1, -np.inf), complex(np.nan, 0)])
def test_a_complex_argument_that_is_not_finite_is_named(bad):
    assert first_nonfinite(lambda z: 2 * z)(np.complex64([1, bad])).source == "z"


def test_an_argument_that_is_not_used_is_not_named():
    assert first_nonfinite(lambda x, y: x)(EYE, np.full(2, np.inf)) is None
    assert first_nonfinite(lambda x, y: jnp.exp(x))(X, np.full(2, np.nan)).primitive == "exp"


def test_an_argument_that_does_no_harm_is_not_named():
    def clipped(x, most):
        return jnp.exp(jnp.minimum(x, most))  # planted: clipped

    assert first_nonfinite(clipped)(EYE, jnp.float32(np.inf)) is None
    assert line(first_nonfinite(clipped)(X, jnp.float32(np.inf))) == planted("clipped")


def test_an_infinity_that_only_passes_through():
    found = first_nonfinite(lambda x: 2 * x)(np.float32([-np.inf]))
    assert (found.primitive, found.source) == ("argument", "x")
    found = first_nonfinite(lambda x: jnp.where(x > 0, x, -jnp.inf))(EYE)
    assert found.primitive == "constant"
    assert "infinite constant" in str(found)
    assert "the results contain a NaN that no op produced" in str(first_nonfinite(lambda x: x * jnp.nan)(EYE))


def test_inside_jit_it_cannot_be_called():
    for call in (first_nonfinite(jnp.sin), lambda x: first_nonfinite(lambda: jnp.sin(x))()):
        with pytest.raises(TypeError, match="cannot run inside `jit`"):
            jax.jit(call)(1.0)
    with pytest.raises(TypeError, match="takes a function, got int"):
        first_nonfinite(3)


def test_arguments_may_hold_anything():
    def loss(config, x):
        assert config["activation"] is jnp.sin
        return config["activation"](x) / config["by"]

    found = first_nonfinite(loss)({"activation": jnp.sin, "by": 0.0, "name": "x", "none": None}, EYE)
    assert found.primitive == "div"


def test_debug_nans_of_jax_does_not_interfere():
    with jax.debug_nans(True), jax.debug_infs(True):
        assert first_nonfinite(amp.autocast(softmax_by_hand))(*CASES[softmax_by_hand][0]).primitive == "exp"


# Transformed programs


def test_under_vmap_the_elements_of_a_loop_that_are_done_stay():
    def doubled(x, n):
        def step(state):
            return state[0] + 1, state[1] * 2e4  # planted: batched while

        return lax.while_loop(lambda state: state[0] < n, step, (0, x))[1]

    find = first_nonfinite(jax.vmap(doubled))
    assert find(np.ones(2, F16), np.int32([1, 0])) is None
    found = find(np.ones(2, F16), np.int32([1, 3]))
    assert line(found) == planted("batched while")
    assert found.iteration == (1,)
    assert (found.operands[0].max, found.result.infs) == (2e4, 2)


def test_keys_and_integers_are_scanned_over():
    def model(keys, counts, x):
        def step(x, slices):
            key, n = slices
            return jnp.where(jax.random.bernoulli(key, 1.0), jnp.exp(n * x), x), n  # planted: keys

        return lax.scan(step, x, (keys, counts))[0]

    found = first_nonfinite(model)(jax.random.split(jax.random.key(0), 3), jnp.array([0, 1, 100]), EYE)
    assert (line(found), found.iteration) == (planted("keys"), (2,))


def test_mutable_arrays_are_not_looked_into():
    def model(x):
        ref = jax.new_ref(x)
        ref[...] = jnp.exp(ref[...])
        return ref[...]  # planted: read

    assert first_nonfinite(model)(EYE) is None
    assert line(first_nonfinite(model)(X)) == planted("read")


def test_layers_that_share_a_line_are_told_apart():
    def model(params, x):
        for layer in params["layers"]:
            x = jax.nn.relu(x @ layer["w"])
        return x

    params = {"layers": [{"w": EYE}, {"w": EYE}, {"w": 1e5 * EYE}, {"w": EYE}]}
    found = first_nonfinite(amp.autocast(model))(params, 10 * jnp.abs(X))
    assert found.leaf == "params['layers'][2]['w']"
    assert "  leaf     `params['layers'][2]['w']`" in str(found).splitlines()


def test_nnx_layers_that_share_a_line_are_told_apart():
    nnx = pytest.importorskip("flax.nnx", reason="needs flax")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])

        def __call__(self, x):
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return jnp.mean(x)

    model = Model(nnx.Rngs(0))
    model.layers[2].kernel[...] = model.layers[2].kernel[...] * 1e7
    found = first_nonfinite(amp.autocast(Model.__call__))(model, jnp.ones((2, 8)))
    assert "layers[2].kernel" in found.leaf or "['layers'][2]['kernel']" in found.leaf


# The report


def test_an_op_that_fails_in_float32_later_is_named():
    def model(w, x):
        y = jnp.mean(x @ w)  # planted: in float16
        return y + jnp.exp(y)  # planted: in float32

    found = first_nonfinite(amp.autocast(model))(1000 * EYE, X)
    assert (line(found), found.finite_in_float32) == (planted("in float16"), False)
    assert found.in_float32.startswith(
        f"in float32 `exp` at tests/debug/test_first_nonfinite.py:{planted('in float32')} "
    )
    assert found.in_float32.endswith("gives inf: precision is not the only cause")


@pytest.mark.parametrize("model", [scan_over_layers, fori_loop, while_in_scan, cond_branch, remat, nested_jit])
def test_loops_branches_and_calls_run_in_float32(model):
    found = first_nonfinite(amp.autocast(model))(*CASES[model][0])
    assert found.finite_in_float32


def test_whether_precision_is_the_cause_of_an_infinite_constant_is_not_known():
    with pytest.warns(RuntimeWarning, match="overflow encountered in cast"):  # JAX's, as it traces the constant
        found = first_nonfinite(lambda x: jax.nn.softmax(x + jnp.float16(-1e9)))(EYE.astype(F16))
    assert (found.finite_in_float32, found.in_float32) == (None, "")


def test_a_callback_keeps_its_dtype():
    def model(x):
        x = x.astype(F16)
        return jnp.exp(jax.pure_callback(lambda x: np.asarray(x + 11, np.float16), x, x))

    found = first_nonfinite(model)(EYE)
    assert (found.primitive, found.finite_in_float32) == ("exp", True)


def test_it_is_a_frozen_record_that_prints_as_a_paragraph():
    found = first_nonfinite(amp.autocast(scan_over_layers))(*CASES[scan_over_layers][0])
    assert isinstance(found, NonFinite)
    assert hash(found) == hash(dataclasses.replace(found))
    text = re.sub(r"\n {11}", " ", str(found))  # of lines that are broken
    head, *operands, result, cause, in_float32, cure, tried, guide = text.splitlines()
    assert head == (f"`dot_general` produced inf at {found.source}, scope layer, iteration 2")
    assert operands == ["  operand  float16[2,8] = 100", "  operand  float16[8,8] from 0 to 1e+04"]
    assert result == "  result   float16[2,8], 16 of 16 inf"
    assert in_float32 == "  float32  in float32 all results are finite: precision is the cause"
    assert cause == (
        "  cause    `dot_general` of 100 and 1e+04 at [0, 0] is 1e+06, beyond float16, whose largest finite value is "
        "65504; `layers[2, 0, 0]` is 1e+04"
    )
    assert cure.startswith("  cure     compute tests/debug/test_first_nonfinite.py:")
    assert tried == "  tried    finite, within 1e-07 of float32"
    assert guide == "  guide    docs/my-loss-is-nan.md#an-overflow-in-float16"


# Silent overflows


def test_an_overflow_that_a_division_hides_is_named_with_its_hider():
    def model(x):
        squares = jnp.sum(x * x)  # planted: overflow
        return x / jnp.sqrt(squares)  # planted: hider

    found = first_nonfinite(model)(np.float16([300, 400]))
    assert line(found) == planted("overflow")
    assert f"test_first_nonfinite.py:{planted('hider')} " in found.hidden_by
    assert f"hidden by `div` at tests/debug/test_first_nonfinite.py:{planted('hider')}" in str(found).splitlines()[0]
    assert found.guide == "docs/my-loss-is-nan.md#an-overflow-that-a-later-op-hides"
    assert first_nonfinite(model)(np.float16([3, 4])) is None


def test_a_hidden_overflow_in_a_branch_that_does_not_run_in_float64_is_not_reported():
    def model(x):
        grows = F16(1) + 0 * x[0] + F16(1e-4) > F16(1)
        return lax.cond(grows, jnp.ones_like, lambda x: 1 / (x * x), x)

    assert first_nonfinite(model)(np.float16([300, 400])) is None


@pytest.mark.sweep(3)
@pytest.mark.parametrize("n", range(1, 40, 2))
def test_a_hidden_overflow_is_reported_if_there_is_no_time_to_tell_whether_it_matters(n, monkeypatch):
    def model(x):
        return x / jnp.sum(x * x)  # planted: hidden

    monkeypatch.setattr(Clock, "is_late", property(lambda self: self._n >= n))
    found = first_nonfinite(model)(np.float16([300, 400]))
    if not found.primitive:
        return
    assert line(found) == planted("hidden")
    left_out = ("the ops that follow, so", "the program in float64, so", "the program in float32", "")
    assert found.left_out.startswith(left_out)
    assert found.left_out or n > 10


# Time


def test_after_its_time_it_stops_and_says_what_it_left_out(monkeypatch):
    def model(x):
        return jnp.exp(jnp.log(x - x))  # planted: late

    assert first_nonfinite(model)(EYE) is None
    found = first_nonfinite(model, max_seconds=1e-9)(EYE)
    assert (found.primitive, found.source, found.operands) == ("", "", ())
    assert str(found).splitlines()[0] == "no non-finite value was found in the time"
    assert found.cause == "nothing became non-finite in the 0 of 3 ops that were evaluated in 1e-09 s"
    assert found.left_out == "the other 3 ops: pass a larger `max_seconds`"
    monkeypatch.setattr(Clock, "is_late", property(lambda self: self._n >= 2))
    found = first_nonfinite(model)(EYE)
    assert (found.primitive, line(found), found.cure) == ("log", planted("late"), "")
    assert (found.finite_in_float32, found.in_float32) == (None, "")
    assert found.left_out.startswith("the ops that follow, so this infinity may be intended")
    assert found.left_out.endswith("the time was over")
    assert "left out " in str(found)
    assert found.cause == f"the elements are not known; in all, the result is {found.result}"


@pytest.mark.sweep(3)
@pytest.mark.parametrize("n", range(2, 60, 3))
def test_it_may_stop_after_any_op(n, monkeypatch):
    monkeypatch.setattr(Clock, "is_late", property(lambda self: self._n >= n))
    found = first_nonfinite(amp.autocast(scan_over_layers))(*CASES[scan_over_layers][0])
    assert (found.primitive, found.iteration) in (("dot_general", (2,)), ("", ()))
    assert not found.primitive or found.result.infs


@pytest.mark.sweep(2)
@pytest.mark.parametrize("n", range(6))
@pytest.mark.parametrize(("fun", "size"), [(amp.autocast, 1), (amp.value_and_grad, 1e33)], ids=["forward", "backward"])
def test_it_may_stop_in_any_run(fun, size, n, monkeypatch):
    wait_for, ran = Clock.wait_for, []

    def run(self, *args):
        ran.append(args)
        if len(ran) > n:
            raise TimeoutError
        return wait_for(self, *args)

    monkeypatch.setattr(Clock, "wait_for", run)
    monkeypatch.setattr(Clock, "is_late", property(lambda self: len(ran) > n))
    layers, x = CASES[scan_over_layers][0]
    found = first_nonfinite(fun(lambda *args: scan_over_layers(*args)))(layers, size * x)
    assert str(found)
    assert len(ran) <= n or found.left_out
    assert (found.primitive, found.iteration) == (("dot_general", (2,)) if n else ("", ()))
    assert bool(found.result.infs) == bool(n)


def test_a_value_that_is_printed_is_short():
    run = Interpretation(*jx.trace_call(lambda x: lax.scan(lambda x, _: (x, x), x, None, 9)[1], (EYE,), {})[:2]).run()
    assert max(len(repr(node)) for node in run.nodes) < 100


def hidden_in_a_loop(w, x):
    def step(x, _):
        return x / jnp.sum(x @ w * x), jnp.max(x)

    return lax.scan(step, x, None, length=3)[1]


def skips(w, x):
    tx = amp.dynamic_loss_scale(optax.sgd(0.1))
    state = tx.init(w)
    grads = amp.grad(amp.autocast(lambda w: jnp.sum(300 * x @ w)), opt_state=state)(w)
    return tx.update(grads, state, w)[0]


# Programs and whether something overflows in them that the results do not show.
WHOLE = {
    "healthy": (lambda w, x: jnp.mean(jnp.tanh(x @ w)), False),
    "mask": (lambda w, x: jax.nn.softmax(jnp.where(CAUSAL[:2], x @ w, -jnp.inf)), False),
    "branches": (lambda w, x: lax.cond(x[0, 0] > 1, jnp.exp, jnp.sin, x / 100), False),
    "while": (lambda w, x: lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: x / 2, x), False),
    "divided": (lambda w, x: x / jnp.sum(x.astype(F16) * 600), True),
    "in a loop": (lambda w, x: hidden_in_a_loop(w.astype(F16), x.astype(F16)), True),
    "an exponent": (lambda w, x: jnp.exp(-(x * 1e37)), True),
    "compared": (lambda w, x: jnp.sum(x * 1e37 < 3) + jnp.argmax(x * 1e37), True),
    "a skipped step": (lambda w, x: skips(w, x), True),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_program_in_which_nothing_overflows_is_compiled_once(name, monkeypatch):
    lowered, compiled = Interpretation._lowered, []
    monkeypatch.setattr(
        Interpretation, "_lowered", lambda self, *args: (compiled.append(args), lowered(self, *args))[1]
    )
    program, overflows = WHOLE[name]
    found = first_nonfinite(program)(EYE, X)
    assert len(compiled) == 1 or overflows
    assert found is None or overflows


def test_a_compilation_of_the_whole_program_counts_and_is_shown(monkeypatch):
    started, ended, shown = threading.Event(), threading.Event(), []

    def wait(x):
        if not started.is_set():  # the program as a whole takes longer than there is time, as its compilation may
            started.set()
            ended.wait()
        return np.asarray(x)

    def model(x):
        return jnp.sin(jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), jnp.cos(x)))

    def show(self, what):
        shown.append(what)
        assert "compiled" not in what or started.wait(600)

    monkeypatch.setattr(Clock, "show", show)
    monkeypatch.setattr(Clock, "seconds", property(lambda self: shown.count("the program is compiled as a whole") / 4))
    try:
        first_nonfinite(model, max_seconds=1)(EYE)
    finally:
        ended.set()
    assert {"the program is traced as a whole", "the program is compiled as a whole"} <= {*shown}


def test_a_trace_of_the_whole_program_counts(monkeypatch):
    seconds = iter(range(10**6))
    monkeypatch.setattr(Clock, "seconds", property(lambda self: float(next(seconds))))
    found = first_nonfinite(lambda x: jax.nn.logsumexp(jnp.sin(x) @ x), max_seconds=12)(EYE)
    assert found.cause.startswith("nothing became non-finite in the ")
    assert next(seconds) < 30  # each op asks for it


def test_the_time_must_be_positive():
    with pytest.raises(ValueError, match="`max_seconds` must be a positive number, got 0"):
        first_nonfinite(jnp.log, max_seconds=0)


def test_progress_is_shown_after_a_while(capsys, monkeypatch):
    find = first_nonfinite(jnp.log)
    monkeypatch.setattr("jmp_amp.debug._clock._PATIENCE", math.inf)
    assert find(EYE).result.infs
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("jmp_amp.debug._clock._PATIENCE", -1.0)
    find(EYE)
    assert re.search(r"first_nonfinite: the program is traced as a whole, \d+ s", capsys.readouterr().err)


def test_a_long_loop_is_entered_where_it_fails(monkeypatch):
    monkeypatch.setattr("jmp_amp.debug._evaluation._LONG", 100)

    def step(x, w):
        return x * w, None  # planted: long loop

    ws = np.ones(120, np.float32)
    ws[[110, 111]] = 1e30
    found = first_nonfinite(lambda x, ws: lax.scan(step, x, ws)[0])(jnp.float32(1), ws)
    assert (line(found), found.primitive, found.iteration) == (planted("long loop"), "mul", (111,))


def test_results_of_iterations_are_stacked_on_the_host(monkeypatch):
    monkeypatch.setattr(jnp, "stack", pytest.fail)  # thousands of operands, which take minutes to compile
    found = first_nonfinite(lambda x: lax.scan(lambda x, _: (x * 1e30, x), x, None, 3)[1])(jnp.float32(1))
    assert (found.primitive, found.iteration) == ("mul", (1,))


def test_iterations_may_return_keys():
    def step(key, x):
        return jax.random.split(key)[0], (key, jnp.log(x))  # planted: keys of iterations

    found = first_nonfinite(lambda key, x: lax.scan(step, key, x))(jax.random.key(0), jnp.zeros(2))
    assert (line(found), found.iteration) == (planted("keys of iterations"), (0,))


# Arguments of other types


def test_a_key_may_be_an_argument():
    def model(key, x):
        return jnp.log(x - x) + jax.random.normal(key, x.shape)  # planted: key

    for key in (jax.random.key(0), jax.random.split(jax.random.key(0))[0]):
        assert line(first_nonfinite(jax.grad(lambda x, key: jnp.sum(model(key, x))))(EYE, key)) == planted("key")


# Libraries


def test_flax_linen_names_the_module_and_the_users_line():
    linen = pytest.importorskip("flax.linen")

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x):
            x = linen.relu(linen.Dense(8, kernel_init=linen.initializers.constant(1.0))(x))
            return linen.Dense(2, kernel_init=linen.initializers.constant(1e3))(x)  # planted: linen

    model = Model()
    params = model.init(jax.random.key(0), X)
    found = first_nonfinite(amp.autocast(lambda params, x: jnp.mean(model.apply(params, x))))(params, X)
    assert (line(found), found.module) == (planted("linen"), "Model/Dense_1")
    assert re.fullmatch(r"flax.linen.linear.py:\d+ \(Dense.__call__\)", found.library)
    assert f"{found.source}, in {found.library}, scope Model/Dense_1" in str(found)
    assert f"compute {found.source} in float32" in found.cure


def test_flax_nnx_modules_are_not_changed():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first, self.norm = nnx.Linear(8, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.first(x)) * jnp.exp(x)  # planted: nnx

    def loss(model, x):
        return jnp.mean(model(x))

    model = Model(nnx.Rngs(0))
    before = jax.tree.leaves(nnx.state(model))
    for fun in (amp.autocast(loss), amp.value_and_grad(amp.autocast(loss), transform=nnx.value_and_grad)):
        assert line(first_nonfinite(fun)(model, X)) == planted("nnx")
    assert all(x is y for x, y in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))


@pytest.mark.parametrize("transform", [lambda fun: fun, amp.autocast], ids=["plain", "autocast"])
@pytest.mark.parametrize("kind", ["module", "method", "an argument"])
def test_nnx_modules_may_change_their_state(kind, transform):
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first, self.norm, self.drop = (
                nnx.Linear(8, 8, rngs=rngs),
                nnx.BatchNorm(8, rngs=rngs),
                nnx.Dropout(0.5, rngs=rngs),
            )

        def __call__(self, x, bad):
            return self.drop(self.norm(self.first(x))) * jnp.log(bad)  # planted: state

        def loss(self, x, bad):
            return jnp.mean(self(x, bad))

    model = Model(nnx.Rngs(0))
    before = jax.tree.leaves(nnx.state(model))
    fun, args = {"module": (model, ()), "method": (model.loss, ()), "an argument": (Model.loss, (model,))}[kind]
    find = first_nonfinite(transform(fun))
    assert find(*args, X, jnp.ones(())) is None
    found = find(*args, X, bad=jnp.zeros(()))
    assert (found.primitive, line(found)) == ("log", planted("state"))
    assert "`bad` is 0" in found.cause
    assert all(x is y for x, y in zip(before, jax.tree.leaves(nnx.state(model)), strict=True))


def test_optax_in_a_step_that_may_be_skipped_names_the_users_line():
    tx = amp.dynamic_loss_scale(optax.adam(1e-2, eps=0.0))

    def step(w, state):
        grads = amp.grad(lambda w: 0 * jnp.sum(w), opt_state=state)(w)
        return tx.update(grads, state, w)  # planted: optax

    found = first_nonfinite(step)(jnp.ones(2), tx.init(jnp.ones(2)))
    assert (found.primitive, line(found)) == ("div", planted("optax"))
    assert found.library.startswith("optax/")


def test_equinox_modules():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(8, 2, 8, 1, activation=jnp.exp, key=jax.random.key(0))

    def loss(model, x):
        return jnp.mean(jax.vmap(model)(x))  # planted: equinox

    model = eqx.tree_at(lambda m: m.layers[0].weight, model, 10 * EYE)
    for fun in (amp.autocast(loss), eqx.filter_value_and_grad(amp.autocast(loss))):
        found = first_nonfinite(fun)(model, X)
        assert (found.primitive, line(found)) == ("exp", planted("equinox"))
        assert found.library.startswith("equinox/nn/_mlp.py")


@pytest.mark.sweep(5)
@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.key(0, impl="rbg"), jax.random.PRNGKey(0)], ids=str)
@pytest.mark.parametrize("transform", [lambda fun: fun, jax.jit, jax.grad, amp.autocast])
def test_a_random_key_among_the_arguments_is_no_number(key, transform):
    def loss(x, key):
        return jnp.mean(jnp.log(x) * jax.random.bernoulli(key, 0.5, x.shape))

    found = first_nonfinite(transform(loss))(jnp.zeros((2, 4)), key)
    assert found is not None
    assert found.primitive in ("log", "div")
