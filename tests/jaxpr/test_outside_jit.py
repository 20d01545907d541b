"""autocast outside `jit`: what JAX keeps is not compiled again, and nothing goes stale or piles up."""

import concurrent.futures
import gc
import threading
import tracemalloc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from custom_derivatives import by_custom_jvp, by_custom_vjp
from jax import lax
from kernel_ways import doubled_by_kernel

import jmp_amp as amp
from jmp_amp._autocast._plan import Plan, Step
from jmp_amp._ops import EqnInfo

pytestmark = pytest.mark.usefixtures("users_code", "only_new_garbage")

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


@pytest.fixture(scope="module")
def only_new_garbage():
    """Garbage collection does not visit what tests of other files left."""
    gc.freeze()


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


@pytest.mark.sweep(15)
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


@pytest.mark.parametrize("policy", ["O2", "params=bfloat16,compute=float16,output=float32", "p=f16,c=bf16,o=f32"])
def test_parameters_in_16_bits_are_traced_as_float32_without_copies(policy):
    size = 50 + len(policy)  # of this case alone: garbage of the others may still be alive
    policy, traced = amp.get_policy(policy), []

    def layer(w, x):
        copies = [array for array in jax.live_arrays() if array.shape == w.shape]
        traced.append((w.dtype, len(copies)))
        return jax.nn.gelu(x @ w) @ w

    w, x = jnp.full((size, size), 0.1, policy.param_dtype), jnp.full((3, size), 0.3)
    out = amp.autocast(layer, policy)(w, x)
    assert traced == [(jnp.float32, 1)]
    np.testing.assert_array_equal(out, amp.autocast(layer, policy)(w.astype(jnp.float32), x))


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


# A function of the user that autocast traces, by what holds it.
TRACED = {
    "cast_inputs": lambda fun: fun,
    "jit": lambda fun: jax.jit(fun),
    "checkpoint": lambda fun: jax.checkpoint(fun),
    "scan": lambda fun: lambda x: lax.scan(lambda x, _: (fun(x), None), x, length=2)[0],
    "while": lambda fun: lambda x: lax.while_loop(goes_on, lambda carry: (fun(carry[0]), carry[1] + 1), (x, 0))[0],
    "cond": lambda fun: lambda x: lax.cond(x[0, 0] > 0, fun, shifted, x),
    "vmap": lambda fun: lambda x: jax.vmap(fun)(x[None])[0],
    "custom_jvp": by_custom_jvp,
    "custom_vjp": by_custom_vjp,
    "autocast": lambda fun: amp.autocast(fun, "bfloat16"),
}


@pytest.mark.parametrize("way", ["value", "gradient"])
@pytest.mark.parametrize("name", TRACED)
def test_another_thread_may_trace_while_a_function_is_traced(name, way):
    waited = []

    def trace_others():
        other = amp.cast_inputs("bfloat16")(lambda x: amp.autocast(lambda x: jnp.sin(x @ x))(x))
        for fun in (other, jax.jit(lambda x: lax.scan(lambda x, _: (other(x), None), x, length=2)[0])):
            jax.make_jaxpr(amp.autocast(fun))(X)

    def wait_for_another(x):
        thread = threading.Thread(target=trace_others, daemon=True)
        thread.start()
        thread.join(600)
        waited.append(not thread.is_alive())
        assert waited[-1], "the other thread is blocked"
        return x @ x

    fun = amp.autocast(TRACED[name](amp.cast_inputs("bfloat16")(wait_for_another)))
    jax.make_jaxpr(fun if way == "value" or name == "while" else jax.grad(lambda x: jnp.sum(fun(x))))(X)
    assert waited
    assert all(waited)


# Each call has functions of its own, as those that a program defines where it uses them have.
FRESH = {
    "pallas_call": lambda: lambda x: doubled_by_kernel(x),
    "custom_linear_solve": lambda: (
        lambda x: lax.custom_linear_solve(lambda v: 2 * v, x, lambda _, b: b / 2, symmetric=True)
    ),
    "reduce": lambda: lambda x: x * lax.reduce(x, 0.0, lambda a, b: a + 2 * b, (0, 1)),
    "reduce_window": lambda: lambda x: lax.reduce_window(x, 0.0, lambda a, b: a + 2 * b, (1, 1), (1, 1), "VALID"),
    "scatter": lambda: lambda x: x.at[0].apply(lambda row: 2 * row),
    "pure_callback": lambda: lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
    "cast_inputs": lambda: amp.cast_inputs("bfloat16")(lambda x: x @ x),
    "scan": lambda: lambda x: lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, length=2)[0],
    "while": lambda: lambda x: lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] @ c[0], c[1] + 1), (x, 0))[0],
    "cond": lambda: lambda x: lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x),
    "custom_jvp": lambda: by_custom_jvp(lambda x: x @ x),
    "custom_vjp": lambda: by_custom_vjp(lambda x: x @ x),
    "jit": lambda: jax.jit(lambda x: x @ x),
    "checkpoint": lambda: jax.checkpoint(lambda x: x @ x),
}


@pytest.mark.sweep(42)
@pytest.mark.parametrize("name", FRESH)
def test_nothing_is_kept_of_functions_that_are_gone(name):
    def kept_after(calls):
        for n in range(calls):
            fun = FRESH[name]()
            jax.make_jaxpr(amp.autocast(lambda x, fun=fun: jnp.sin(jax.jit(fun)(x @ x))))(X)
            if n % 10 == 0:
                gc.collect()
        return sum(isinstance(x, EqnInfo | Step | Plan) for x in gc.get_objects())

    before = kept_after(201)  # caches of JAX and of autocast keep some of the newest
    assert kept_after(101) - before < 50
