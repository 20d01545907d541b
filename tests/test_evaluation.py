"""The evaluation of the debug tools returns what a program returns, inside of `shard_map` too."""

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

from jmp_amp import _jaxpr as jx
from jmp_amp.debug import first_nonfinite
from jmp_amp.debug._evaluation import FLOAT32, FLOAT64, Evaluator

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


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "check_vma"), [*((name, False) for name in PROGRAMS), ("gradients", True)])
def test_the_results_are_those_of_the_devices(name, check_vma):
    fun = shard_map(*PROGRAMS[name], check_vma=check_vma)
    program, arrays, _ = jx.trace_call(fun, (X, W), {})
    for wide in (None, FLOAT64):
        results = Evaluator(program, [jnp.asarray(x) for x in arrays], wide=wide).run().results
        for result, expected in zip(results, jax.tree.leaves(fun(X, W)), strict=True):
            np.testing.assert_allclose(result.value, expected, rtol=1e-5, atol=1e-6)


def test_the_line_on_a_device_is_named_with_its_cure():
    def fun(x, w):
        products = lax.pmean(x @ w, "rows")
        return jnp.sqrt(jnp.sum(products.astype(jnp.float16) * 1000 * 60, keepdims=True))  # planted: shard_map

    found = first_nonfinite(shard_map(fun, (P("rows"), P()), P(None)))(X, W)
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith("# planted: shard_map"))
    assert f"test_evaluation.py:{line} " in found.source
    assert found.finite_in_float32
    assert "full_precision" in found.cure


def test_a_collective_that_vmap_does_not_know_leaves_one_op():
    def fun(x, w):
        return lax.all_gather((x @ w).astype(jnp.float16) * 1000 * 60, ("rows", "columns"), tiled=True)

    found = first_nonfinite(shard_map(fun, (P(("rows", "columns")), P()), P(), check_vma=False))(X, W)
    assert (found.primitive, found.in_float32) == ("shard_map", "")
    assert "counts as one op" in found.cause


def test_the_shape_of_values_on_devices_has_their_mesh_in_front():
    found = first_nonfinite(shard_map(lambda x: jnp.log(x - x), P("rows"), P("rows")))(X)
    assert found.result.shape == (2, 2, 4, 4)


def in_a_scan(x):
    return lax.scan(lambda c, row: (c + jnp.sum(row), 1 / row), jnp.sum(x), x)[1]


# What a device computes of its shard, and how the shards are cut.
SHARDS = {
    "a shard": (lambda x: 1 / x, P("rows", "columns")),
    "two axes": (lambda x: 1 / x, P(None, ("columns", "rows"))),
    "copies": (lambda x: 1 / x, P("columns")),
    "a scan": (in_a_scan, P("rows", "columns")),
    "a branch": (lambda x: lax.cond(jnp.sum(x) > -1e9, lambda x: 1 / x, jnp.exp, x), P("rows", "columns")),
}


@pytest.mark.parametrize("at", [(5, 2), *(pytest.param(x, marks=pytest.mark.slow) for x in ((0, 0), (7, 3)))])
@pytest.mark.parametrize("name", SHARDS)
def test_an_element_of_an_argument_is_named_by_its_index_in_the_whole_array(name, at):
    fun, spec = SHARDS[name]
    x = np.ones((8, 4), np.float32)
    x[at] = 0
    inside = shard_map(fun, (spec,), spec, check_vma=False)
    behind = shard_map(lambda x: 2 * x, (spec,), spec, check_vma=False)
    for program in (inside, lambda x: 1 / behind(x)):
        assert first_nonfinite(program)(x).cause.endswith(f"`x[{at[0]}, {at[1]}]` is 0")


def test_an_overflow_that_is_hidden_on_a_device_is_found_in_a_large_program(monkeypatch):
    monkeypatch.setattr(importlib.import_module("jmp_amp.debug._nonfinite"), "_MANY", 0)
    found = first_nonfinite(shard_map(lambda x: x / jnp.sum(x * x), P("rows"), P("rows")))(1e30 * X)
    assert found.primitive == "mul"
    assert "`div` at" in found.hidden_by


of_a_gpu_p = Primitive("of_a_gpu")  # a CPU does not compile it
of_a_gpu_p.def_abstract_eval(lambda x: x)


def test_of_a_program_for_several_platforms_the_branch_of_the_device_is_compiled():
    def fun(x):
        return lax.platform_dependent(x, cpu=jnp.sin, default=of_a_gpu_p.bind)

    program, arrays, _ = jx.trace_call(fun, (X,), {})
    evaluator = Evaluator(program, arrays, around=lambda place, operands, compute: compute(operands))
    (result,) = jax.jit(lambda arrays: [x.value for x in evaluator.run(arrays=arrays).results])(arrays)
    np.testing.assert_allclose(result, np.sin(X), rtol=1e-6)


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
        return Evaluator(program, [x], wide=FLOAT32, around=around).run().results[0].value

    program = jax.make_jaxpr(lambda x: nested(depth, x))(jnp.float32(1))
    np.testing.assert_allclose(jax.jit(evaluated)(1.0), nested(depth, jnp.float32(1)), rtol=1e-6)
    assert len(sines) == len(set(sines)) == depth + 1
