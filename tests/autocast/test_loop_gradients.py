"""The gradient of a value in 16 bits that a loop, or many ops, read is summed in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from rounding import EPSILON, error, rounded

import jmp_amp as amp
from jmp_amp._autocast._api import planner_of
from jmp_amp._autocast._values import Value
from jmp_amp._jaxpr import equations_in

pytestmark = pytest.mark.usefixtures("users_code")

STEPS, ROWS, WIDTH = 300, 16, 8
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(ROWS, WIDTH)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(WIDTH, WIDTH)) * 0.3, jnp.float32)


@jax.custom_jvp
def by_custom_jvp(h, z):
    return h * z


by_custom_jvp.defjvp(
    lambda primals, tangents: (by_custom_jvp(*primals), primals[1] * tangents[0] + primals[0] * tangents[1])
)


@jax.custom_vjp
def by_custom_vjp(h, z):
    return h * z


by_custom_vjp.defvjp(lambda h, z: (h * z, (h, z)), lambda res, g: (g * res[1], g * res[0]))

# How an iteration reads `z`: from the step, a state, the value, and a product.
READS = {
    "added": lambda i, h, z, dot: h + z,
    "multiplied": lambda i, h, z, dot: h * z,
    "divided by": lambda i, h, z, dot: h / (1 + z * z),
    "larger": lambda i, h, z, dot: jnp.maximum(h, 0.3 * z),
    "chosen": lambda i, h, z, dot: jnp.where(i % 2 == 0, h, z),
    "a row": lambda i, h, z, dot: 0.5 * h + z[i % ROWS],
    "a gather": lambda i, h, z, dot: h + z[jnp.arange(ROWS) * i % ROWS],
    "a slice": lambda i, h, z, dot: h + z[:1],
    "reshaped": lambda i, h, z, dot: h + z.reshape(2, -1).reshape(h.shape),
    "summed": lambda i, h, z, dot: h + z.mean(0),
    "a weight": lambda i, h, z, dot: dot(h, z[:WIDTH]),
    "attended": lambda i, h, z, dot: h + dot(jax.nn.softmax(dot(h, z.T)), z),
    "a branch": lambda i, h, z, dot: lax.cond(i % 3 == 0, lambda: h + z, lambda: h - 0.1 * z),
    "a call": lambda i, h, z, dot: jax.jit(lambda h, z: h + jnp.sin(z))(h, z),
    "a checkpoint": lambda i, h, z, dot: jax.checkpoint(lambda h, z: h + jnp.tanh(dot(h, z[:WIDTH])) + z)(h, z),
    "a custom_jvp": lambda i, h, z, dot: by_custom_jvp(h, z),
    "a custom_vjp": lambda i, h, z, dot: by_custom_vjp(h, z),
    "a loop": lambda i, h, z, dot: lax.fori_loop(0, 3, lambda j, h: 0.5 * h + z, h),
    "a map": lambda i, h, z, dot: h + lax.map(lambda row: row * z.sum(0), h),
    "a vmap": lambda i, h, z, dot: jax.vmap(lambda row: row + z[0])(h),
    "two values": lambda i, h, z, dot: h + z + z * z,
}


def by_scan(body, h):
    return lax.scan(lambda h, i: (body(i, h),) * 2, h, jnp.arange(STEPS))[1]


def by_fori_loop(body, h):
    return lax.fori_loop(0, STEPS, lambda i, c: (body(i, c[0]), c[1] + c[0]), (h, 0 * h))[1] / STEPS


def by_map(body, h):
    return lax.map(lambda i: body(i, h), jnp.arange(STEPS))


def in_scans(body, h):
    def outer(h, rows):
        return lax.scan(lambda h, i: (body(i, h),) * 2, h, rows)

    return lax.scan(outer, h, jnp.arange(STEPS).reshape(-1, 10))[1]


def checkpointed(body, h):
    return by_scan(jax.checkpoint(body), h)


def in_a_checkpoint(body, h):
    return jax.checkpoint(lambda h: by_scan(body, h))(h)


def in_checkpointed_scans(body, h):
    @jax.checkpoint
    def outer(h, rows):
        return lax.scan(lambda h, i: (body(i, h),) * 2, h, rows)

    return lax.scan(outer, h, jnp.arange(STEPS).reshape(-1, 10))[1]


def in_a_call(body, h):
    return jax.jit(lambda h: by_scan(body, h))(h)


def in_a_branch(body, h):
    return lax.cond(h[0, 0] > -1e3, lambda h: by_scan(body, h), lambda h: jnp.zeros((STEPS, *h.shape)), h)


def in_a_vmap(body, h):
    return jax.vmap(lambda scale: by_scan(body, scale * h))(jnp.array([0.5, 1.0]))


def backwards(body, h):
    return lax.scan(lambda h, i: (body(i, h),) * 2, h, jnp.arange(STEPS), reverse=True, unroll=3)[1]


def carried(body, h):  # with what the body does not change
    return lax.scan(lambda c, i: ((body(i, c[0]), c[1]), c[0] * c[1]), (h, jnp.float32(1)), jnp.arange(STEPS))[1]


def in_a_shard_map(body, h):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(lambda h: by_scan(body, h), mesh=mesh, in_specs=P(), out_specs=P())(h)


def unrolled(body, h):
    total = h
    for i in range(48):
        h = body(i, h)
        total += h
    return total / 48


LOOPS = {f.__name__: f for f in (
    by_scan, by_fori_loop, by_map, in_scans, checkpointed, in_a_checkpoint, in_checkpointed_scans, in_a_call,
    in_a_branch, in_a_vmap, in_a_shard_map, carried, backwards, unrolled,
)}  # fmt: skip


def program(loop, reads, dot, w, x):
    """A loop over a state, each iteration of which reads a product that is computed before."""
    z = dot(x, w)

    def body(i, h):
        for read in reads:
            h = READS[read](i, h, z, dot)
        return jnp.tanh(0.5 * h + 0.4)

    return LOOPS[loop](body, jnp.zeros_like(x))


def loss(fun, *args):
    return jnp.mean((fun(*args) - 0.3) ** 2)


def scaled_loss(scale, fun, *args):
    return scale * loss(fun, *args)


def errors(fun, low, args=(W, X), cast=None):
    """The error of the gradient under autocast, and of one whose products are rounded by hand."""
    ways = (
        functools.partial(fun, jnp.dot),
        functools.partial(fun, functools.partial(rounded, low)),
        amp.autocast(functools.partial(fun, jnp.dot), cast or low),
    )
    want, hand, got = (jax.jit(jax.grad(functools.partial(scaled_loss, SCALE[low], f)))(*args) for f in ways)
    return error(got, want), error(hand, want)


SCALE = {"float16": 2.0**10, "bfloat16": 1.0}


def drawn(seed):
    rng = np.random.default_rng(seed)
    return rng.choice(list(LOOPS)), rng.choice(list(READS), rng.integers(1, 4))


@pytest.mark.sweep(60)
@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("seed", range(60))
def test_a_random_loop_is_as_exact_as_its_products(seed, low):
    loop, reads = drawn(seed)
    got, by_hand = errors(functools.partial(program, loop, reads), low)
    assert got <= by_hand + 4 * EPSILON[low], (loop, reads)


def context(dot, w, x):
    """A recurrent network that reads a product in each step."""
    z = dot(x, w)
    return lax.scan(lambda h, _: (jnp.tanh(dot(h, w) + z),) * 2, jnp.zeros_like(x), None, STEPS)[1]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("stored", ["policy", "code"])
def test_parameters_that_are_stored_in_16_bits(low, stored):
    def network(w, x):
        return lax.scan(lambda h, _: (jnp.tanh(0.5 * h + x.astype(w.dtype) @ w),) * 2, x.astype(w.dtype), None, STEPS)[
            1
        ]

    w, cast = W.astype(low), f"params={low},compute={low},output=float32" if stored == "policy" else low
    want = jax.grad(functools.partial(loss, network))(w.astype(jnp.float32), X)
    got = jax.grad(lambda w: SCALE[low] * loss(amp.autocast(network, cast), w, X))(w)
    assert got.dtype == low
    assert error(got.astype(jnp.float32) / SCALE[low], want) <= 4 * EPSILON[low]


def test_a_float8_loop_sums_in_float32():
    got, by_hand = errors(context, "bfloat16", cast="float8")
    assert got <= by_hand + 4 * EPSILON["bfloat16"]


@pytest.mark.parametrize("region", [amp.full_precision, lambda f: amp.precision("bfloat16")(f)])
def test_a_region_in_the_code_reads_what_is_low_around_it(region):
    def outside(dot, w, x):
        z = dot(x, w)
        return region(lambda z: lax.scan(lambda h, _: (jnp.tanh(0.5 * h + z),) * 2, 0 * x, None, STEPS)[1])(z)

    got, by_hand = errors(outside, "bfloat16")
    assert got <= by_hand + 4 * EPSILON["bfloat16"]


def plain(w, x):
    return context(jnp.dot, w, x)


@jax.custom_jvp
def with_a_jvp(w, x):
    return plain(w, x)


with_a_jvp.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))


@jax.custom_vjp
def with_a_vjp(w, x):
    return plain(w, x)


with_a_vjp.defvjp(lambda w, x: jax.vjp(plain, w, x), lambda pull, cotangent: pull(cotangent))

AROUND = {
    "custom_jvp": lambda low, s: jax.grad(lambda w: s * loss(amp.autocast(with_a_jvp, low), w, X)),
    "custom_vjp": lambda low, s: jax.grad(lambda w: s * loss(amp.autocast(with_a_vjp, low), w, X)),
    "autocast": lambda low, s: amp.autocast(jax.grad(lambda w: s * loss(plain, w, X)), low),
}


@pytest.mark.parametrize("low", EPSILON)
@pytest.mark.parametrize("around", AROUND)
def test_derivatives_around_a_loop(around, low):
    got = jax.jit(AROUND[around](low, SCALE[low]))(W) / SCALE[low]
    assert error(got, jax.grad(lambda w: loss(plain, w, X))(W)) <= 4 * EPSILON[low]


def read_in_a_loop(x):
    z = x @ W
    return lax.scan(lambda c, _: (c + 0.1 * z, z * 0.5), jnp.zeros_like(x), None, 5)


def read_by_many(x):
    z = x @ W
    return sum((0.1 * i * z) @ W for i in range(12))


@pytest.mark.parametrize("fun", [read_in_a_loop, read_by_many])
def test_what_is_linear_can_be_transposed(fun):
    cotangent = jax.tree.map(lambda out: jnp.ones(out.shape), jax.eval_shape(fun, X))
    got, want = (jax.linear_transpose(f, X)(cotangent)[0] for f in (amp.autocast(fun, "bfloat16"), fun))
    assert error(got, want) <= 4 * EPSILON["bfloat16"]


def sums_of_cotangents(n, low="bfloat16"):
    """The dtypes in which the cotangents of a value that `n` ops read are added up."""

    def many(w):
        z, h = X @ w, jnp.tanh(X @ W)
        for _ in range(n):
            h = (h * z) @ W
        return h.sum()

    eqns = equations(jax.grad(amp.autocast(many, low)), W)
    return {str(e.outvars[0].aval.dtype) for e in eqns if e.primitive.name == "add_any"}


def test_of_a_value_that_many_ops_read_the_cotangents_are_summed_in_float32():
    assert sums_of_cotangents(8) == {"bfloat16"}  # as exact as a product
    assert sums_of_cotangents(9) == {"float32"}


def test_the_forward_pass_reads_and_keeps_16_bits():
    eqns = equations(jax.grad(lambda w: loss(amp.autocast(functools.partial(context, jnp.dot), "bfloat16"), w, X)), W)
    forward, backward = (eqn for eqn in eqns if eqn.primitive.name == "scan")
    arrays = [atom for eqn in equations_in(forward.params["jaxpr"]) for atom in eqn[-1].invars if atom.aval.shape]
    assert {str(atom.aval.dtype) for atom in (*arrays, *forward.outvars) if atom.aval.shape} == {"bfloat16"}
    assert "float32" in {str(var.aval.dtype) for var in backward.outvars}  # the accumulators


@pytest.mark.parametrize("fun", [context, functools.partial(program, "unrolled", ["added"])])
def test_a_compiled_forward_pass_is_as_without_it(fun, monkeypatch):
    def costs():
        planner_of.cache_clear()
        compiled = jax.jit(amp.autocast(functools.partial(fun, jnp.dot), "bfloat16")).lower(W, X).compile()
        memory = compiled.memory_analysis()
        return (
            compiled.as_text().count(" convert("),
            memory.temp_size_in_bytes,
            compiled.cost_analysis()["bytes accessed"],
        )

    with_it = costs()
    monkeypatch.setattr(Value, "is_half", False)
    assert with_it == costs()


def test_what_float32_weight_gradients_change():
    """The product that makes a weight's gradient returns float32; what is summed in float32 is so without it."""

    def products(**options):
        low = amp.autocast(functools.partial(context, jnp.dot), **options)
        eqns = equations(jax.grad(lambda w: loss(low, w, X)), W)
        return [str(e.outvars[0].aval.dtype) for e in eqns if e.primitive.name == "dot_general" and is_gradient(e)]

    def is_gradient(eqn):
        return eqn.outvars[0].aval.shape == W.shape

    assert products() == ["float16", "float16"]
    assert products(weight_grad_dtype="float32") == ["float32", "float32"]
