"""The evaluation of the debug tools returns what a program returns, over several devices too."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from jmp_amp import _jaxpr as jx
from jmp_amp.debug import error_budget, first_nonfinite
from jmp_amp.debug._evaluation import FLOAT32, FLOAT64, Evaluation, Interpretation

pytestmark = pytest.mark.usefixtures("users_code")
X, W = np.linspace(-1, 2, 32, dtype=np.float32).reshape(8, 4), np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)


def collectives(x, w):
    i, n = lax.axis_index("rows"), lax.axis_size("rows")
    ring = lax.ppermute(x, "rows", [(k, (k + 1) % n) for k in range(n)])
    everything = lax.all_gather(x, "columns", tiled=True)
    parts = lax.psum_scatter(x @ w * i, "rows", tiled=True)
    return lax.psum(ring * i, "rows"), lax.pmax(jnp.sum(everything), ("rows", "columns")), parts, lax.pmean(x, "rows")


def loops(x, w):
    def step(carry, row):
        return carry + jnp.sum(row) * (1 + lax.axis_index("rows")), carry * row

    total, rows = lax.scan(step, jnp.sum(w[0]) * (1 + lax.axis_index("rows")), x)
    count = lax.while_loop(lambda c: c < 5, lambda c: c * 2, 1.0 + lax.axis_index("rows"))
    chosen = lax.cond(lax.axis_index("columns") == 0, jnp.sin, jnp.cos, x)
    return rows * total, chosen * count


# The function on a device, and its specifications.
PROGRAMS = {
    "collectives": (
        collectives,
        (P(("rows", "columns")), P()),
        (P("columns"), P(), P(("rows", "columns")), P(("columns",), None)),
    ),
    "loops": (loops, (P("rows", "columns"), P(None, "columns")), (P("rows", "columns"), P("rows", "columns"))),
    "gradients": (
        lambda x, w: jax.grad(lambda w: lax.psum(jnp.sum(jnp.tanh(x @ w) ** 2), "rows"))(w),
        (P("rows"), P(None, "columns")),
        P(None, "columns"),
    ),
}


def shard_map(fun, in_specs, out_specs, **options):
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options))


@pytest.mark.sweep(6)
@pytest.mark.parametrize(("name", "check_vma"), [*((name, False) for name in PROGRAMS), ("gradients", True)])
def test_the_results_are_those_of_the_devices(name, check_vma):
    fun = shard_map(*PROGRAMS[name], check_vma=check_vma)
    program, arrays, _ = jx.trace_call(fun, (X, W), {})
    for wide in (None, FLOAT64):
        results = Interpretation(program, [jnp.asarray(x) for x in arrays], wide=wide).run().results
        for result, expected in zip(results, jax.tree.leaves(fun(X, W)), strict=True):
            np.testing.assert_allclose(result.value, expected, rtol=1e-5, atol=1e-6)


def test_shard_map_counts_as_one_op_and_vmap_in_its_place_is_entered():
    def fun(x, w):
        products = lax.pmean(x @ w, "rows")
        return jnp.sqrt(jnp.sum(products.astype(jnp.float16) * 1000 * 60, keepdims=True))  # planted: shard_map

    found = first_nonfinite(shard_map(fun, (P("rows"), P()), P(None)))(X, W)
    assert (found.primitive, found.in_float32) == ("shard_map", "")
    assert "counts as one op" in found.cause
    found = first_nonfinite(jax.vmap(fun, (0, None), axis_name="rows"))(X.reshape(2, 4, 4), W)
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith("# planted: shard_map"))
    assert f"test_evaluation.py:{line} " in found.source
    assert found.finite_in_float32
    assert "full_precision" in found.cure


def test_a_jit_with_shardings_is_entered():
    sharding = jax.sharding.NamedSharding(jax.make_mesh((1,), ("rows",)), P())

    def fun(w):
        return jnp.mean(jnp.exp(100 * w) @ w)  # planted: shardings

    step = jax.jit(fun, in_shardings=sharding, out_shardings=sharding)
    w = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    found = first_nonfinite(step)(w)
    assert found.primitive == "exp"
    assert f"test_evaluation.py:{line_of('shardings')} " in found.source
    assert "dot_general" in {row.primitive for row in error_budget(step)(0.01 * w).rows}


@pytest.mark.parametrize("wrap", [jax.pmap, jax.vmap])
def test_a_map_over_one_device_is_entered_as_vmap_is(wrap):
    def fun(x, w):
        return lax.pmean(jnp.sum((x @ w).astype(jnp.float16) * 60000), "rows")  # planted: one device

    found = first_nonfinite(wrap(fun, axis_name="rows"))(X[None], W[None])
    assert f"test_evaluation.py:{line_of('one device')} " in found.source
    assert found.primitive == "mul"
    assert "`dot_general` of" in found.cause or "beyond float16" in found.cause


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_shard_map_over_one_device_is_entered(check_vma):
    def fun(x, w):
        total = lax.pmean(jnp.sum(lax.psum(x @ w, "rows")), "columns")
        return lax.scan(lambda c, _: (c * 1e20, None), total, None, 5)[0]  # planted: shards

    mesh = jax.make_mesh((1, 1), ("rows", "columns"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    found = first_nonfinite(
        jax.shard_map(fun, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P(), check_vma=check_vma)
    )
    found = found(X, W)
    assert f"test_evaluation.py:{line_of('shards')} " in found.source
    assert (found.primitive, found.iteration) == ("mul", (1,))


def test_of_a_map_over_several_devices_five_operands_are_shown():
    def fun(*args):
        return jnp.exp(sum(map(jnp.sum, args)))  # planted: several devices

    found = first_nonfinite(jax.pmap(fun))(*[X.reshape(2, 4, 4)] * 6, np.full((2, 1), 1e3, np.float32))
    assert found.primitive == "shard_map"
    assert f"test_evaluation.py:{line_of('several devices')} " in found.source
    assert len(found.operands) == 5


def line_of(name):
    lines = Path(__file__).read_text().splitlines()
    return next(i for i, text in enumerate(lines, 1) if text.endswith(f"# planted: {name}"))


def test_what_a_shard_map_returns_is_followed_to_the_op_that_reads_it():
    found = first_nonfinite(lambda x: 1 / shard_map(lambda x: x - x, P("rows"), P("rows"))(x))(X)
    assert found.primitive == "div"
    assert "`shard_map`" in found.cause


of_a_gpu_p = Primitive("of_a_gpu")  # a CPU does not compile it
of_a_gpu_p.def_abstract_eval(lambda x: x)


def test_of_a_program_for_several_platforms_the_branch_of_the_device_is_compiled():
    def fun(x):
        return lax.platform_dependent(x, cpu=jnp.sin, default=of_a_gpu_p.bind)

    program, arrays, _ = jx.trace_call(fun, (X,), {})
    around = lambda place, operands, compute: compute(operands)  # noqa: E731
    (result,) = jax.jit(lambda arrays: Evaluation(program, arrays, around=around).run().results)(arrays)
    np.testing.assert_allclose(result, np.sin(X), rtol=1e-6)


def test_a_traced_while_ends_for_each_element_as_it_does():
    def count(x, n):
        return lax.while_loop(lambda c: c[1] < n, lambda c: (c[0] + 1.0, c[1] + 1), (x, 0))[0]

    program = jax.make_jaxpr(jax.vmap(count))(jnp.zeros(3), jnp.array([0, 3, 5]))
    run = jax.jit(lambda *arrays: Evaluation(program, arrays, wide=FLOAT32).run().results[0])
    np.testing.assert_array_equal(run(jnp.zeros(3), jnp.array([0, 3, 5])), [0, 3, 5])


def in_branches(depth, x):
    y = jnp.sin(x)
    return y if depth == 0 else lax.cond(y > 0, lambda y: in_branches(depth - 1, y), jnp.cos, y)


def in_scans(depth, x):
    y = jnp.sin(x)
    return y if depth == 0 else lax.scan(lambda y, _: (in_scans(depth - 1, y), None), y, length=2)[0]


@pytest.mark.parametrize("nested", [in_branches, in_scans])
def test_a_body_in_a_body_is_traced_once(nested):
    depth, sines = 6, []

    def around(place, operands, compute):
        sines.extend([place.key] * (place.eqn.primitive.name == "sin"))
        return compute(operands)

    def evaluated(x):
        return Evaluation(program, [x], wide=FLOAT32, around=around).run().results[0]

    program = jax.make_jaxpr(lambda x: nested(depth, x))(jnp.float32(1))
    np.testing.assert_allclose(jax.jit(evaluated)(1.0), nested(depth, jnp.float32(1)), rtol=1e-6)
    assert len(sines) == len(set(sines)) == depth + 1


def test_branches_return_one_dtype_though_a_region_holds_one_of_them():
    def fun(x):
        return lax.cond(x[0] > 0, jnp.exp, jnp.negative, x)

    program = jax.make_jaxpr(fun)(jnp.ones(3, jnp.float16))
    region = lambda eqns: eqns[-1].primitive.name == "exp"  # noqa: E731
    run = jax.jit(lambda x: Evaluation(program, [x], wide=FLOAT32, region=region).run().results[0])
    for x in (jnp.full(3, 12.0, jnp.float16), jnp.full(3, -2.0, jnp.float16)):  # exp(12) is beyond float16
        np.testing.assert_allclose(run(x), fun(x.astype(np.float32)), rtol=1e-6)
