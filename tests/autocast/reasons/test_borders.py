"""Each primitive that holds a jaxpr, with what stands at the borders of a jaxpr: literals, constants, nothing."""

import operator

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from rebuilt import all_plans_changed, rebuilt_identity

import jmp_amp as amp
from jmp_amp._jaxpr._trace import apply

X = jnp.asarray([[0.5, 0.25], [0.125, 0.75]])
CONSTANT = jnp.asarray([[0.25, 0.5], [0.75, 0.5]])


def like(fun, *args):
    """Returns zeros of the types of the results."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fun, *args))


def twice(args):
    return jax.tree.map(lambda x: jnp.stack([x, x / 2]), args)


def cond(body, args, x):
    return lax.cond(x[0, 0] > 0, body, lambda *args: like(body, *args), *args)


def switch(body, args, x):
    return lax.switch(1, [lambda *args: like(body, *args), body, body], *args)


def scan(body, args, x):
    return lax.scan(lambda carry, _: (carry, body(*carry)), args, length=2)[1]


def scan_of_slices(body, args, x):
    return lax.scan(lambda _, xs: (None, body(*xs)), None, twice(args), length=2)[1]


def scan_of_carries(body, args, x, **options):
    init = args, like(body, *args)
    return lax.scan(lambda carry, _: ((carry[0], body(*carry[0])), None), init, length=2, **options)[0]


def scan_reversed(body, args, x):
    return lax.scan(lambda carry, xs: (carry, body(*xs)), args, twice(args), length=2, reverse=True, unroll=2)


def lax_map(body, args, x):
    return lax.map(lambda xs: body(*xs[1]), (jnp.arange(2), twice(args)))


def while_loop(body, args, x):
    def step(carry):
        i, args, _ = carry
        return i + 1, args, body(*args)

    return lax.while_loop(lambda carry: carry[0] < 2, step, (0, args, like(body, *args)))


def while_loop_of_batched_condition(body, args, x):
    def step(carry):
        y, _ = carry
        return y / 2, body(*args)

    return lax.while_loop(lambda carry: carry[0][0, 0] > 0.2, step, (x, like(body, *args)))


def fori_loop(body, args, x):
    return lax.fori_loop(0, 2, lambda i, _: body(*args), like(body, *args))


def fori_loop_of_traced_bound(body, args, x):
    steps = jnp.where(x[0, 0] > 0, 2, 1)
    return lax.fori_loop(0, steps, lambda i, _: body(*args), like(body, *args))


def doubled(tangents):
    """Doubles tangents or cotangents, so that a lost rule is seen."""
    return jax.tree.map(lambda t: t if t.dtype == jax.dtypes.float0 else 2 * t, tangents)


def custom_jvp(body, args, x):
    call = jax.custom_jvp(lambda *args: body(*args))

    @call.defjvp
    def _(primals, tangents):
        results, result_tangents = jax.jvp(body, primals, tangents)
        return results, doubled(result_tangents)

    return call(*args)


def custom_vjp(body, args, x):
    call = jax.custom_vjp(lambda *args: body(*args))
    call.defvjp(lambda *args: (body(*args), args), lambda args, gs: doubled(jax.vjp(body, *args)[1](gs)))
    return call(*args)


def shard_map(body, args, x):
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
    return jax.shard_map(body, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())(*args)


def custom_linear_solve(body, args, x):
    def solve(_, b):
        return b[0], body(*b[0])

    return lax.custom_linear_solve(lambda b: b, (args, like(body, *args)), solve, symmetric=True)


def closed_call(body, args, x):
    body, closed_over = jax.closure_convert(body, *args)
    jaxpr, shape = jax.make_jaxpr(body, return_shape=True)(*args, *closed_over)
    results = apply(jex_core.primitives.closed_call_p, {"call_jaxpr": jaxpr}, [*args, *closed_over])
    return jax.tree.unflatten(jax.tree.structure(shape), results)


def associative_scan(body, args, x):
    elements = jnp.arange(3), jax.tree.map(lambda x: jnp.stack([x] * 3), (args, like(body, *args)))

    def combine(_, b):
        numbers, (args, _) = b
        return numbers, (args, jax.vmap(lambda number, args: body(*args))(numbers, args))

    return lax.associative_scan(combine, elements)


PRIMITIVES = {
    "jit": lambda body, args, x: jax.jit(body)(*args),
    "checkpoint": lambda body, args, x: jax.checkpoint(body)(*args),
    "cond": cond,
    "switch": switch,
    "scan": scan,
    "scan of slices": scan_of_slices,
    "scan of carries": scan_of_carries,
    "scan reversed": scan_reversed,
    "map": lax_map,
    "while_loop": while_loop,
    "while_loop of batched condition": while_loop_of_batched_condition,
    "fori_loop": fori_loop,
    "fori_loop of traced bound": fori_loop_of_traced_bound,
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "shard_map": shard_map,
    "custom_linear_solve": custom_linear_solve,
    "closed_call": closed_call,
    "associative_scan": associative_scan,
}

# Functions of `x` that apply a primitive `p` to a function, its arguments, and `x`.
BORDERS = {
    "literals": lambda p, x: p(lambda x: (x @ x, True, 0.0, 3), (x,), x),
    "only literals": lambda p, x: (p(lambda x: (True, 0.0, 3), (x @ x,), x), x @ x),
    "inputs passed through": lambda p, x: p(lambda x, y: (y, x @ y, x), (x, x / 2), x),
    "only inputs": lambda p, x: p(lambda x, y: (y, x), (x @ x, x), x),
    "a variable twice": lambda p, x: p(lambda x: operator.mul((x @ x,), 2), (x,), x),
    "an input twice": lambda p, x: p(lambda x: (x, x @ x, x), (x,), x),
    "an argument twice": lambda p, x: p(lambda x, y: (x @ y, x + y), (x, x), x),
    "a constant of NumPy": lambda p, x: p(lambda x: (x @ x, np.asarray(CONSTANT)), (x,), x),
    "a constant of JAX": lambda p, x: p(lambda x: (CONSTANT, x @ CONSTANT, CONSTANT), (x,), x),
    "an unused operand": lambda p, x: p(lambda unused, x, also: (x @ x,), (x / 3, x, jnp.sum(x)), x),
    "a closed-over value": lambda p, x: (lambda y: p(lambda x: (x @ y, y), (x,), x))(jnp.sin(x)),
    "no operands": lambda p, x: (p(lambda: (CONSTANT @ CONSTANT, 2), (), x), x @ x),
    "no operands but closed-over values": lambda p, x: p(lambda: (x @ x, x), (), x),
    "no results": lambda p, x: (p(lambda x: (), (x @ x,), x), x @ x),
    "nothing": lambda p, x: (p(lambda: (), (), x), x @ x),
}
FORMATS = {"float16": (amp.autocast, 2e-2), "rebuilt": (rebuilt_identity, 1e-6)}


def differentiated(fun):
    def loss(x):
        return sum(jnp.sum(y) for y in jax.tree.leaves(fun(x)) if jax.typeof(y).dtype == jnp.float32)

    return jax.grad(loss)


def mapped(fun):
    return lambda x: jax.vmap(fun)(jnp.stack([x, x / 4, -x]))


WAYS = {"eager": lambda fun: fun, "jit": lambda fun: fun, "grad": differentiated, "vmap": mapped}


NOT_DIFFERENTIABLE = {
    "while_loop",
    "while_loop of batched condition",
    "fori_loop of traced bound",
    "custom_linear_solve",
}
RULES = {"custom_jvp", "custom_vjp"}  # JAX differentiates neither with respect to values that they close over


def is_differentiable(name, border):
    return name not in NOT_DIFFERENTIABLE and not (name in RULES and "closed-over" in border)


@pytest.fixture(autouse=True)
def _all_plans_changed():
    with all_plans_changed():
        yield


def types(tree):
    avals = jax.tree.map(jax.typeof, tree)
    return jax.tree.map(lambda aval: (aval.shape, aval.dtype, aval.weak_type), avals)


def assert_same(got, want, rtol):
    assert types(got) == types(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol)


@pytest.mark.sweep(219)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_program_runs_and_returns_what_it_returns_without_autocast(name, border, form, way):
    if way == "grad" and not is_differentiable(name, border):
        pytest.skip("JAX cannot differentiate this program")

    def fun(x):
        return BORDERS[border](PRIMITIVES[name], x)

    autocast, rtol = FORMATS[form]
    got, want = WAYS[way](autocast(fun)), WAYS[way](jax.jit(fun))
    if way == "eager":
        assert_same(got(X), want(X), rtol)
    else:
        assert_same(*jax.jit(lambda x: (got(x), want(x)))(X), rtol)
