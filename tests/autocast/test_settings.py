"""What stands beside the arrays of a program: checks, metadata, tokens, kernels, and algorithms of products."""

import re

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.experimental.xla_metadata import set_xla_metadata
from jaxprs import dtypes, equations

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

X = jnp.eye(8) / 4 + 0.1


def checked_by_user(x):
    def body(carry, i):
        checkify.check(jnp.all(carry > -1), "carry is {}", carry[0, 0])
        return jnp.tanh(carry @ carry), X[i]

    return lax.scan(body, x, jnp.arange(3))


def checked_by_jax(x):
    return lax.scan(lambda carry, i: (jnp.log(carry @ carry) * carry[i], X[i]), x, jnp.arange(3))


@pytest.mark.parametrize("fun", [checked_by_user, checked_by_jax])
@pytest.mark.parametrize("around", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
def test_checkify_rewrites_a_scan(fun, around):
    errors = checkify.all_checks
    for x in (X, -2 * X):
        error, _ = around(checkify.checkify(amp.autocast(fun), errors))(x)
        want, _ = around(checkify.checkify(fun, errors))(x)
        assert str(error.get())[:20] == str(want.get())[:20]


def metadata(fun):
    text = jax.jit(fun).lower(X).as_text()
    return [
        (op, 'a = "b"' in line)
        for line in text.splitlines()
        for op in re.findall("stablehlo.(sine|cosine|exponential)", line)
    ]


def without(x):
    with set_xla_metadata(a=None):
        return jnp.sin(x @ x)


@pytest.mark.parametrize(
    "inside",
    [
        lambda x: lax.cond(x[0, 0] > 0, without, lambda x: jnp.cos(x @ x), x),
        lambda x: jnp.exp(jax.jit(without)(x)),
        lambda x: lax.scan(lambda x, _: (jnp.cos(without(x)), None), x, None, length=2)[0],
    ],
    ids=["branch", "call", "loop"],
)
def test_metadata_that_a_part_takes_back_stays_away(inside):
    def fun(x):
        with set_xla_metadata(a="b"):
            return inside(x)

    assert metadata(amp.autocast(fun)) == metadata(fun)
    assert len({is_set for _, is_set in metadata(fun)}) == 2


@pytest.mark.parametrize("around", [lambda fun: fun, jax.jit], ids=["eager", "jit"])
def test_a_token_may_be_returned(around):
    product, token = around(amp.autocast(lambda x: (x @ x, lax.create_token())))(X)
    np.testing.assert_allclose(product, X @ X, rtol=1e-2)
    assert not isinstance(token, jax.core.Tracer)


ALGORITHMS = {
    # what the operands are under float16, and under bfloat16
    "BF16_BF16_F32": ("float32", "bfloat16"),
    "F16_F16_F32": ("float16", "float32"),
    "TF32_TF32_F32": ("float32", "float32"),
    "F32_F32_F32": ("float32", "float32"),
    "BF16_BF16_F32_X3": ("float32", "float32"),
    "DEFAULT": ("float16", "bfloat16"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_product_runs_in_16_bits_where_its_algorithm_reads_them(name):
    def fun(x):
        return lax.dot(x, x, precision=lax.DotAlgorithmPreset[name])

    for dtype, want in zip(("float16", "bfloat16"), ALGORITHMS[name], strict=True):
        (row,) = dtypes(amp.autocast(fun, dtype), X, primitive="dot_general")
        assert row.split()[:2] == [want, want]


kernel_p = jex_core.Primitive("kernel_of_the_user")
kernel_p.def_abstract_eval(lambda x: x)
cheap_p = lax.sin_p


def test_what_may_be_a_kernel_is_saved_and_not_computed_again():
    """Opaque ops are costly whatever their name is; those in the table, and those on integers, are as it says."""
    from jmp_amp._autocast._api import parse_settings, planner_of

    planner = planner_of(parse_settings().options)
    aval, integers = jax.typeof(X), jax.typeof(jnp.arange(3))
    assert planner.is_saved(kernel_p, aval)
    assert not planner.is_saved(kernel_p, integers)
    assert not planner.is_saved(cheap_p, aval)
    for name in ("ffi_call", "pallas_call", "scaled_matmul_wrapper", "mpmd_map", "scaled_dot"):
        assert planner.is_saved(jex_core.Primitive(name), aval), name


def test_in_a_scan_a_kernel_runs_once_and_not_again_for_the_gradient():
    def kernel(x):
        return jax.pure_callback(np.asarray, jax.typeof(x), x)

    @jax.custom_jvp
    def identity(x):
        return kernel(x)

    identity.defjvp(lambda primals, tangents: (identity(*primals), tangents[0]))

    def loss(x):
        return jnp.sum(lax.scan(lambda x, _: (jnp.tanh(identity(x @ x)), None), x, None, length=2)[0])

    found = [eqn.primitive.name for eqn in equations(jax.grad(amp.autocast(loss)), X)]
    assert found.count("pure_callback") == 1


def behind_a_solver(ws, x):
    x = jnp.linalg.solve(x.T @ x + jnp.eye(8), x.T).T
    with jax.named_scope("policy"):
        for w in ws:
            x = jnp.tanh(x @ w)
    return x


@pytest.mark.parametrize(
    ("rules", "why"),
    [
        ({"policy": "bfloat16"}, "pattern"),
        ({"policy": "float16"}, "pattern"),
        ({jax.lax.dot_general_p: "lower"}, "override"),
        ({"policy": "full"}, "pattern"),
    ],
)
def test_rules_come_before_reasons(rules, why):
    ws, x = [jnp.eye(8)] * 3, jnp.ones((4, 8))
    report = amp.explain(behind_a_solver, "bfloat16", rules=rules)(ws, x)
    rows = [row for row in report.rows if row.flops and row.module == "policy" and row.direction == "forward"]
    dtype = rules.get("policy", "bfloat16").replace("full", "float32")
    assert {(row.compute, row.why) for row in rows} == {(dtype, why)}
