"""Errors in the user's code: they are raised as they are, and show the user's lines and none of this package."""

import functools
import os
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.extend.core import Primitive

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

PACKAGE = os.path.dirname(amp.__file__)
X, W = jnp.ones((4, 8)), jnp.eye(8)


def wrong(x):
    return x @ jnp.ones((3, 3))


BODIES = {
    "plain": wrong,
    "jit": lambda x: jax.jit(wrong)(x),
    "scan": lambda x: lax.scan(lambda x, _: (wrong(x), None), x, length=2)[0],
    "checkpoint": lambda x: jax.checkpoint(wrong)(x),
    "region": lambda x: amp.full_precision(wrong)(x),
}
WAYS = {
    "autocast": lambda fun: amp.autocast(fun)(X),
    "jit": lambda fun: jax.jit(amp.autocast(fun))(X),
    "grad": lambda fun: jax.grad(lambda x: jnp.sum(amp.autocast(fun)(x)))(X),
    "explain": lambda fun: amp.explain(fun)(X),
}


@pytest.fixture(params=["quiet_remove_frames", "remove_frames", "tracebackhide"])
def filtering(request):
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", request.param)
    yield
    jax.config.update("jax_traceback_filtering", before)


@pytest.mark.usefixtures("filtering")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", BODIES)
def test_a_traceback_shows_the_users_line_and_no_line_of_this_package(name, way):
    with pytest.raises(TypeError, match="dot_general") as caught:
        WAYS[way](BODIES[name])
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    shown = [frame.f_code for frame in frames if "__tracebackhide__" not in frame.f_locals]
    assert wrong.__code__ in shown
    assert not [code for code in shown if code.co_filename.startswith(PACKAGE)]


def test_the_source_lines_of_ops_are_the_users():
    explained = amp.explain(lambda x: jnp.sum(jnp.tanh(x @ W)))(X)
    assert all(row.source.startswith("tests/autocast/test_errors.py:") for row in explained.rows if row.source)
    assert {row.source.split(":")[0] for row in explained.select(direction="forward").rows} == {
        "tests/autocast/test_errors.py"
    }


def rule(forward, backward):
    @jax.custom_vjp
    def fun(x):
        return x @ W

    fun.defvjp(forward, backward)
    return fun


def raising(error):
    def backward(_, cotangent):
        raise error

    return rule(lambda x: (x @ W, None), backward)


def tangent(error):
    @jax.custom_jvp
    def fun(x):
        return x @ W

    @fun.defjvp
    def _(primals, tangents):
        raise error

    return fun


ERRORS = [ValueError("of mine"), TypeError("of mine"), NotImplementedError("of mine"), RuntimeError("of mine")]
MINE = {
    **{f"{type(e).__name__} in a backward rule": (raising(e), type(e), "of mine") for e in ERRORS},
    **{f"{type(e).__name__} in a tangent rule": (tangent(e), type(e), "of mine") for e in ERRORS},
    "a wrong shape in a backward rule": (
        rule(lambda x: (x @ W, x), lambda x, g: (g @ jnp.ones((3, 3)),)),
        TypeError,
        "dot_general",
    ),
    "a gradient of another shape": (rule(lambda x: (x @ W, None), lambda _, g: (g[:1],)), ValueError, "shape"),
    "gradients of too many": (rule(lambda x: (x @ W, None), lambda _, g: (g, g)), TypeError, "structure|length"),
}


@pytest.mark.parametrize("name", MINE)
def test_explain_raises_the_errors_of_the_users_derivatives(name):
    fun, error, message = MINE[name]
    with pytest.raises(error, match=message):
        amp.explain(fun)(X)


def callback(kind, x, **options):
    return kind(lambda x: np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x, **options)


without_rules_p = Primitive("without_rules")
without_rules_p.def_abstract_eval(lambda x: x)

WITHOUT_DERIVATIVE = {
    "while loop": lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ W + 1, x),
    "while loop in a call": lambda x: jax.jit(lambda x: lax.while_loop(lambda x: x[0, 0] < 9, jnp.exp, x))(x @ W),
    "while loop in a checkpoint": jax.checkpoint(lambda x: lax.while_loop(lambda x: x[0, 0] < 9, jnp.exp, x @ W)),
    "pure callback": lambda x: callback(jax.pure_callback, x @ W),
    "io callback": lambda x: callback(io_callback, x @ W),
    "ffi call": lambda x: jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x @ W),
    "singular vectors": lambda x: jnp.linalg.svd(x @ W, full_matrices=True)[2],
    "a primitive without rules": lambda x: without_rules_p.bind(x @ W),
}


@pytest.mark.parametrize("name", WITHOUT_DERIVATIVE)
def test_where_jax_has_no_derivative_explain_tells_of_the_forward_pass(name):
    fun = WITHOUT_DERIVATIVE[name]

    def gradient(x):
        out, pull = jax.vjp(fun, x)
        return pull(out)

    with pytest.raises((NotImplementedError, ValueError)):
        jax.make_jaxpr(gradient)(X)
    report = amp.explain(fun)(X)
    assert {row.direction for row in report.rows} == {"forward"}
    assert "JAX cannot differentiate it" in str(report)


def undecided(weights, inputs):
    if inputs["x"][0, 0] > 0:
        return jnp.sum(weights)
    return weights["w"]


CALLS = {
    "autocast": lambda: amp.autocast(undecided)({"w": W}, {"x": X, "name": "not an array"}),
    "jit": lambda: jax.jit(amp.autocast(undecided))({"w": W}, {"x": X}),
    "explain": lambda: amp.explain(undecided)({"w": W}, {"x": X}),
    "first_nonfinite": lambda: amp.debug.first_nonfinite(undecided)({"w": W}, {"x": X}),
    "partial": lambda: amp.autocast(functools.partial(undecided, {"w": W}))({"x": X}),
    "keyword": lambda: amp.autocast(undecided)({"w": W}, inputs={"x": X}),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_error_of_tracing_names_the_users_function_and_argument(name):
    line = undecided.__code__.co_firstlineno
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        CALLS[name]()
    message = str(caught.value)
    assert f"the function undecided at {__file__}:{line}" in message
    assert "inputs['x']" in message
    assert PACKAGE not in message


class Undecided:
    def __call__(self, inputs):
        return undecided({"w": W}, inputs)


def test_an_error_of_tracing_names_the_call_of_an_object():
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        amp.autocast(Undecided())({"x": X})
    assert f"the function __call__ at {__file__}:{Undecided.__call__.__code__.co_firstlineno}" in str(caught.value)
    assert "inputs['x']" in str(caught.value)


class Keys:
    """A generator of keys, as EasyLM and Haiku have one."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        self.key, key = jax.random.split(self.key)
        return key


def noisy(w, keys):
    return jnp.mean((jax.random.normal(keys(), X.shape) @ w) ** 2)


@pytest.mark.parametrize("jit", [jax.jit, lambda f: f], ids=["jit", "outside jit"])
@pytest.mark.parametrize("name", ["autocast", "explain"])
def test_an_error_about_a_key_that_is_drawn_inside_names_autocast_wherever_it_is_raised(name, jit):
    def step(w, key):
        keys = Keys(key)
        fun = lambda w: noisy(w, keys)  # noqa: E731
        amp.explain(fun)(w) if name == "explain" else jax.grad(amp.autocast(fun))(w)
        return keys()

    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"<lambda> at .* traced for autocast \(see docs/sharp"):
        jit(step)(W, jax.random.key(0))


def test_a_key_that_is_drawn_before_is_the_cure():
    @jax.jit
    def step(w, key):
        keys = Keys(key)
        fun = amp.autocast(lambda w, key: noisy(w, lambda: key))
        return jax.grad(fun)(w, keys()), jax.grad(fun)(w, keys())

    first, second = step(W, jax.random.key(0))
    assert not jnp.array_equal(first, second)
