"""autocast outside `jit`: what JAX keeps is not compiled again, and nothing goes stale or piles up."""

import concurrent.futures
import gc
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

X = jnp.eye(8) / 4 + 0.1
inner = jax.jit(lambda x: jnp.tanh(x @ x))


@jax.custom_jvp
def with_jvp(x):
    return inner(x)


@jax.custom_vjp
def with_vjp(x):
    return inner(x)


with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), tangents[0] @ primals[0]))
with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, cotangent: (cotangent @ x.T,))


def step(x, _):
    return jnp.tanh(x @ x), None


def goes_on(carry):
    return carry[1] < 3


def next_carry(carry):
    return carry[0] @ carry[0], carry[1] + 1


def square(x):
    return x @ x


def shifted(x):
    return x + 1


PROGRAMS = {
    "jit": inner,
    "nested jit": jax.jit(lambda x: inner(inner(x)) @ x),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(x @ x)),
    "custom_jvp": with_jvp,
    "custom_vjp": with_vjp,
    "scan": lambda x: lax.scan(step, x, None, length=3)[0],
    "while": lambda x: lax.while_loop(goes_on, next_carry, (x, 0))[0],
    "cond": lambda x: lax.cond(x[0, 0] > 0, square, shifted, x),
    "a layer": lambda x: jax.nn.gelu(x @ x + 1.0) @ x,
}


@pytest.fixture
def compiled():
    """The programs that JAX compiled, one name each."""
    names = []

    def record(event, _, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(kwargs)

    jax.monitoring.register_event_duration_secs_listener(record)
    yield names
    jax.monitoring.clear_event_listeners()


@pytest.mark.sweep(5)
@pytest.mark.parametrize("way", ["value", "gradient"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_second_call_compiles_no_more_than_without_autocast(name, way, compiled):
    counts = []
    for transform in (lambda fun: fun, amp.autocast):
        fun = transform(PROGRAMS[name])
        call = fun if way == "value" or name == "while" else jax.grad(lambda x, fun=fun: jnp.sum(fun(x)))
        call(X)
        compiled.clear()
        call(X)
        counts.append(len(compiled))
    assert counts[1] <= counts[0]


@pytest.mark.filterwarnings("ignore:the rule for `layer`")
def test_equal_options_share_what_is_kept(compiled):
    amp.autocast(inner, rules={"layer/*": "full", "*": "float16"})(X)
    compiled.clear()
    amp.autocast(inner, rules={"layer/*": "full", "*": "float16"})(X)
    assert not compiled


def test_calls_of_one_function_that_differ_only_in_what_is_known_share_a_body():
    jaxpr = jax.make_jaxpr(amp.autocast(lambda x: inner(2.0 * x) + inner(30.0 * x)))(X).jaxpr
    first, second = (eqn.params["jaxpr"] for eqn in jaxpr.eqns if "jaxpr" in eqn.params)
    assert first is second


def test_memory_is_flat_over_calls():
    fun = amp.autocast(lambda x: inner(x) @ x + PROGRAMS["scan"](x) + with_vjp(x))
    for _ in range(5):
        fun(X)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(10):
        fun(X)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (after - before) / 10 < 4096  # bytes a call, of caches of JAX that are bounded


def test_what_a_function_closes_over_is_freed_with_it():
    def call():
        array = X + 1
        inner = jax.jit(lambda x: jnp.tanh(x @ array))
        outer = jax.jit(amp.autocast(lambda x: lax.cond(x[0, 0] > 0, amp.autocast(inner), lambda x: x @ array, x)))
        outer(X).block_until_ready()
        outer.clear_cache()
        return weakref.ref(array)

    for _ in range(3):
        array = call()
        gc.collect()
        assert array() is None


class Scaled:
    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return self.by * (x @ x)


FACTOR = 2.0


def test_the_function_is_traced_at_each_call():
    global FACTOR
    factors = [2.0]
    closure = amp.autocast(lambda x: factors[0] * (x @ x))
    of_global = amp.autocast(lambda x: FACTOR * (x @ x))
    module = Scaled(2.0)
    of_module = amp.autocast(module)
    for fun in (closure, of_global, of_module):
        np.testing.assert_allclose(fun(X), 2 * X @ X, rtol=1e-2)
    factors[0] = FACTOR = module.by = 3.0
    for fun in (closure, of_global, of_module):
        np.testing.assert_allclose(fun(X), 3 * X @ X, rtol=1e-2)
    FACTOR = 2.0


def test_several_threads_may_call_at_once():
    funs = [amp.autocast(fun, dtype) for fun in PROGRAMS.values() for dtype in ("float16", "bfloat16")]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda fun: fun(X), funs * 4))
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, results[i % len(funs)])
