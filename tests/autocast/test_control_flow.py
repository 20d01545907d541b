"""autocast through calls, loops, branches, recomputation and custom derivatives: bodies are really autocast."""

import contextlib
import gc
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from control_flow import BACKWARD, PROGRAMS, B, W, X, doubled, layer
from jax import lax
from jax.experimental.ode import odeint
from jaxprs import dtypes, equations, number_of_calls, read_low

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

LOW = "float16 float16 -> float16"


@pytest.mark.parametrize("name", PROGRAMS)
def test_products_inside_are_low_precision(name):
    rows = dtypes(amp.autocast(PROGRAMS[name]), X, primitive="dot_general")
    assert rows
    assert set(rows) == {LOW}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("around", [jax.jit, jax.vmap, jax.checkpoint], ids=["jit", "vmap", "remat"])
def test_values_are_those_of_float32(around):
    x = jnp.stack([X, X]) if around is jax.vmap else X

    @jax.jit  # one program, since most of the time goes into compiling
    def values(x):
        return {name: (around(amp.autocast(fun))(x), around(fun)(x)) for name, fun in PROGRAMS.items()}

    for name, (got, want) in values(x).items():
        assert got.dtype == want.dtype, name
        np.testing.assert_allclose(got, want, rtol=2e-3, err_msg=name)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", PROGRAMS)
def test_value_outside_of_jit_is_that_of_float32(name):
    got, want = amp.autocast(PROGRAMS[name])(X), jax.jit(PROGRAMS[name])(X)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=2e-3)


def test_gradients_are_those_of_float32_and_their_products_low_precision_either_way_round():
    def ways(fun):
        def loss(x):
            return jnp.sum(fun(x) ** 2)

        return jax.grad(loss), jax.grad(amp.autocast(loss)), amp.autocast(jax.grad(loss))

    @jax.jit
    def gradients(x):
        return {name: [way(x) for way in ways(PROGRAMS[name])] for name in BACKWARD}

    for name, (want, *both) in gradients(X).items():
        for got in both:
            np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-4, err_msg=name)
        for way in ways(PROGRAMS[name])[1:]:
            assert set(dtypes(way, X, primitive="dot_general")) == {LOW}, name


@contextlib.contextmanager
def checking_leaks():
    """JAX's check, which collects garbage after each trace: only what was made since."""
    gc.collect()
    gc.freeze()
    with jax.checking_leaks():
        yield


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_tracer_leaks(name):
    fun = amp.autocast(PROGRAMS[name])
    with checking_leaks():
        jax.make_jaxpr(fun)(X)
        # Derivatives of `shard_map`, and with `jax_remat3` those of a `checkpoint`, leak without autocast too.
        if name in BACKWARD and name != "shard_map" and not getattr(jax.config, "jax_remat3", False):
            jax.make_jaxpr(jax.grad(lambda x: jnp.sum(fun(x))))(X)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_custom_jvp_keeps_the_users_rule_and_casts_it(around):
    value, tangent = jax.jvp(around(amp.autocast(doubled)), (X,), (X,))
    np.testing.assert_allclose(value, 2 * X, rtol=1e-3)
    np.testing.assert_allclose(tangent, 10 * X, rtol=1e-3)
    rows = dtypes(lambda x, t: jax.jvp(amp.autocast(doubled), (x,), (t,)), X, X, primitive="dot_general")
    assert set(rows) == {LOW}


def test_custom_jvp_with_integer_arguments_and_results():
    @jax.custom_jvp
    def pick(x, i):
        return x[i] @ W, i

    @pick.defjvp
    def _(primals, tangents):
        x, i = primals
        return pick(x, i), (3 * (tangents[0][i] @ W), np.zeros((), jax.dtypes.float0))

    grad = jax.grad(amp.autocast(lambda x, i: jnp.sum(pick(x, i)[0])))(X, jnp.int32(1))
    np.testing.assert_array_equal(grad[1], np.full(8, 3.0))
    np.testing.assert_array_equal(grad[0], np.zeros(8))


def test_second_derivatives():
    fun = amp.autocast(lambda x: jnp.sum(jnp.tanh(x @ W)))
    plain = jax.hessian(lambda x: jnp.sum(jnp.tanh(x @ W)))
    np.testing.assert_allclose(*jax.jit(lambda x: (jax.hessian(fun)(x), plain(x)))(B + 0.5), atol=2e-3)


class TestCarries:
    def scan(self, step, init):
        fun = amp.autocast(lambda init, x: lax.scan(step, init, x))
        (eqn,) = [e for e in equations(fun, init, jnp.stack([X] * 3)) if e.primitive.name == "scan"]
        return [var.aval.dtype.name for var in eqn.outvars], fun(init, jnp.stack([X] * 3))

    def test_recurrent_state_that_starts_at_zero_is_low_precision(self):
        def rnn(xs):
            return lax.scan(lambda h, x: (jnp.tanh(x @ W + h @ W + B), None), jnp.zeros((4, 8)), xs)[0]

        (eqn,) = [e for e in equations(amp.autocast(rnn), jnp.stack([X] * 3)) if e.primitive.name == "scan"]
        assert [var.aval.dtype.name for var in eqn.outvars] == ["float16"]

    def test_state_from_outside_keeps_its_dtype(self):
        carried, _ = self.scan(lambda h, x: (jnp.tanh(h @ W + x @ W), None), X)
        assert carried == ["float32"]
        carried, _ = self.scan(lambda h, x: (h + 0.1 * (x @ W)[0], None), B)
        assert carried == ["float32"]

    def test_carries_that_feed_each_other_reach_a_fixpoint(self):
        def step(carry, x):
            a, b, total, i = carry
            return (b, jnp.tanh(x @ W), total + jnp.sum(a), i + 1), a

        def fun(xs):
            zeros = jnp.zeros((4, 8))
            return lax.scan(step, (zeros, zeros, 0.0, 0), xs)

        fun = amp.autocast(fun)
        (eqn,) = [e for e in equations(fun, jnp.stack([X] * 3)) if e.primitive.name == "scan"]
        assert [v.aval.dtype.name for v in eqn.outvars] == [
            "float16",
            "float16",
            "float32",
            "int32",
            "float16",
        ]

    def test_time_stays_float32(self):
        def fun(xs):
            return lax.scan(
                lambda c, x: ((c[0] + 0.001, jnp.tanh(x @ W) * c[0]), None), (1000.0, jnp.zeros((4, 8))), xs
            )[0]

        np.testing.assert_allclose(amp.autocast(fun)(jnp.stack([X] * 3))[0], 1000.003, rtol=1e-6)

    def test_running_minimum_from_a_large_constant_stays_float32(self):
        def fun(xs):
            return lax.scan(lambda m, x: (jnp.minimum(m, x @ W), None), jnp.full((4, 8), 1e30), xs)[0]

        np.testing.assert_allclose(amp.autocast(fun)(jnp.stack([X] * 3)), X, rtol=1e-3)
        np.testing.assert_allclose(amp.autocast(fun)(jnp.zeros((0, 4, 8))), 1e30)

    def test_branches_meet_in_the_widest_dtype(self):
        fun = amp.autocast(lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ W, lambda x: jnp.exp(x @ W), x))
        (eqn,) = [e for e in equations(fun, X) if e.primitive.name == "cond"]
        assert eqn.outvars[0].aval.dtype == jnp.float32


class TestCalls:
    def test_a_layer_called_often_stays_one_function(self):
        shared = jax.jit(layer)

        def model(x, ws):
            for w in ws:
                x = shared(x, w, B)
            return x

        ws = [W] * 6
        text = jax.jit(amp.autocast(read_low(model))).lower(X, ws).as_text()
        # The first layer reads the float32 input, the others each other's float16 result.
        assert text.count("func.func private @layer") == 2
        assert text.count("call @layer") == 6

    def test_names_are_kept(self):
        names = [e.params.get("name") for e in equations(amp.autocast(lambda x: jax.nn.relu(jax.jit(layer)(x))), X)]
        assert "layer" in names
        assert "relu" in names

    def test_bodies_in_which_nothing_changes_are_the_very_same(self):
        inner = jax.jit(lambda key: jax.random.bits(key, (4,)))
        plain = [e.params["jaxpr"] for e in equations(inner, jax.random.key(0)) if e.primitive.name == "jit"]
        cast = [
            e.params["jaxpr"] for e in equations(amp.autocast(inner), jax.random.key(0)) if e.primitive.name == "jit"
        ]
        assert plain[0] is cast[0]

    def test_source_lines_and_scopes_survive(self):
        def fun(x):
            with jax.named_scope("here"):
                return jax.jit(layer)(x)

        (dot,) = [e for e in equations(amp.autocast(fun), X) if e.primitive.name == "dot_general"]
        assert "layer" in {frame.function_name for frame in dot.source_info.traceback.frames}
        assert "here" in jax.jit(amp.autocast(fun)).lower(X).compile().as_text()

    def test_remat_computes_again_in_the_same_dtypes(self):
        def loss(fun):
            return amp.autocast(lambda x: jnp.sum(fun(x)))

        plain, remat = jax.grad(loss(layer)), jax.grad(loss(jax.checkpoint(layer)))
        np.testing.assert_array_equal(jax.jit(plain)(X), jax.jit(remat)(X))
        rows = dtypes(remat, X, primitive="dot_general")
        assert rows == [LOW] * 3  # forward, again, backward
        # JAX applies a `HiPrim` where the flag `jax_remat3` is set.
        assert {"remat2", "call_hi_primitive"} & {e.primitive.name for e in equations(remat, X)}

    def test_one_compiled_program_for_many_calls(self):
        traces = []

        def fun(x):
            traces.append(None)
            return layer(x)

        step = jax.jit(amp.autocast(fun))
        for _ in range(3):
            step(X)
        assert len(traces) == 1


def scan_in_scans(x):
    def twice(step):
        return lambda x: lax.scan(lambda x, _: (step(x), None), x, length=2)[0]

    return twice(twice(twice(lambda x: jnp.tanh(x @ W))))(x)


@jax.grad
def solved(x):
    """A solver of loops in loops, and its adjoint."""
    return jnp.sum(odeint(lambda y, t: jnp.tanh(y @ W) * jnp.exp(-t), x, jnp.array([0.0, 1.0])))


@pytest.mark.parametrize("fun", [scan_in_scans, solved])
def test_loops_in_loops_take_little_more_than_their_tracing(fun):
    def calls(transform):
        def trace():  # a new function each time, which JAX has not traced before
            jax.make_jaxpr(transform(lambda x: fun(x)))(X)

        trace()  # what is computed once in a process
        return number_of_calls(trace)

    assert calls(amp.autocast) < 5 * calls(lambda fun: fun)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("widths", "ratio"), [([8] * 13, 0.9), (range(8, 21), 1.1)], ids=["equal layers", "different layers"]
)
def test_ops_are_differentiated_together_where_that_shortens_the_trace(widths, ratio, monkeypatch):
    def calls(offset):  # shapes that JAX has not traced before
        sizes = [width + offset for width in widths]
        weights = [jnp.ones(shape) for shape in itertools.pairwise(sizes)]

        def model(weights):
            x = X[:, :1] @ jnp.ones((1, sizes[0]))
            for w in weights:
                x = jax.nn.gelu(x @ w) - jnp.mean(x)
            return jnp.sum(x)

        return number_of_calls(lambda: jax.make_jaxpr(jax.grad(amp.autocast(model)))(weights))

    calls(0)  # what is computed once in a process
    together = calls(100)
    monkeypatch.setattr("jmp_amp._autocast._plan._grouped", lambda steps, results: steps)
    assert together < ratio * calls(200)


@pytest.mark.parametrize("wide", [0, 1])
def test_the_result_of_branches_has_the_widest_of_their_dtypes(wide):
    branches = [lambda x: x @ W, lambda x: jnp.exp(2 * x)]  # exp(12) is infinite in float16

    def fun(i, x):
        return lax.switch(i, branches if wide else branches[::-1], x)

    x = jnp.full((4, 8), 6.0)
    (eqn,) = [eqn for eqn in equations(amp.autocast(fun), 0, x) if eqn.primitive.name == "cond"]
    assert eqn.outvars[0].aval.dtype == "float32"
    np.testing.assert_allclose(amp.autocast(fun)(wide, x), np.exp(12.0), rtol=2e-3)


@pytest.mark.parametrize("way", [lambda fun: fun, jax.grad, lambda fun: lambda x: jax.vmap(fun)(x[None])])
def test_ops_in_the_body_of_a_scan_keep_their_scopes_in_a_profile(way):
    def fun(x):
        return jnp.sum(lax.scan(jax.named_scope("block")(lambda x, w: (layer(x, w), None)), x, jnp.stack([W] * 3))[0])

    text = jax.jit(way(amp.autocast(fun))).lower(X).as_text(debug_info=True)
    assert "block/dot_general" in text
    assert "block/tanh" in text


WAYS = {
    "vmap": jax.vmap,
    "map": lambda fun: lambda xs: lax.map(fun, xs),
    "checkpointed map": lambda fun: lambda xs: lax.map(jax.checkpoint(fun), xs),
    "one branch": lambda fun: lambda xs: lax.cond(xs[0, 0] > -9, fun, lambda xs: xs, xs),
    "each branch": lambda fun: lambda xs: lax.cond(xs[0, 0] > -9, fun, lambda xs: fun(xs[::-1]), xs),
}
PRODUCTS = {
    "square": lambda h: h**2,
    "product": lambda h: h * jnp.flip(h, -1),
    "cube": lambda h: h**3 / 1000,
    "sum of squares": lambda h: h**2 + jnp.flip(h**2, -1),
}


def test_products_of_values_that_a_body_returns_are_float32_if_they_are_under_vmap():
    """In float16 the square of a value of 300 is inf."""
    xs = 300 * jnp.asarray(np.random.default_rng(0).standard_normal((4, 8)), jnp.float32)
    ways = [
        lambda xs, way=way, op=op: jnp.mean(jnp.abs(way(lambda x: op(x @ jnp.eye(8)))(xs)))
        for op in PRODUCTS.values()
        for way in WAYS.values()
    ]
    got, want = jax.jit(lambda xs: [[transform(way)(xs) for way in ways] for transform in (amp.autocast, lambda f: f)])(
        xs
    )
    np.testing.assert_allclose(got, want, rtol=5e-3)
