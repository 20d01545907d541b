"""Sums over devices of low-precision values, and the rules that make them float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxprs import dtypes

import jmp_amp as amp

ROWS, EVERYWHERE = PartitionSpec("rows"), PartitionSpec()
X = jnp.full((8, 8), 100.0)
SUMS = {"psum": lax.psum, "pmean": lax.pmean}


def scattered(x, axis):
    return lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True)


def sharded(collective, check_vma, out_specs=EVERYWHERE):
    """A product of 10,000s on each device, which are then added up."""
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))

    def product(x):
        return collective(x @ (100 * jnp.eye(8)), "rows")

    return jax.shard_map(product, mesh=mesh, in_specs=ROWS, out_specs=out_specs, check_vma=check_vma)


def together(*funs):
    """Their results on `X`, from one program."""
    return jax.jit(lambda x: [fun(x) for fun in funs])(X)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_over_devices_is_float16_and_float32_by_a_rule(name, check_vma):
    fun = sharded(SUMS[name], check_vma)
    primitive = "psum_invariant" if check_vma else "psum"
    assert dtypes(amp.autocast(fun), X, primitive=primitive) == ["float16 -> float16"]
    full = amp.autocast(fun, rules={lax.psum_p: "full"})
    assert dtypes(full, X, primitive=primitive) == ["float32 -> float32"]
    low, got, want = together(amp.autocast(fun), full, fun)
    assert np.isinf(low).all()
    np.testing.assert_allclose(got, want, rtol=1e-3)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("name", [*SUMS, "psum_scatter"])
def test_one_collective_is_float32_in_a_region(name, check_vma):
    collective, out_specs = SUMS.get(name, scattered), PartitionSpec(None, "rows" if name == "psum_scatter" else None)
    fun = sharded(amp.full_precision(collective), check_vma, out_specs)
    low, got, want = together(amp.autocast(sharded(collective, check_vma, out_specs)), amp.autocast(fun), fun)
    assert np.isinf(low).all()
    np.testing.assert_allclose(got, want, rtol=1e-3)
    assert dtypes(amp.autocast(fun), X, primitive="dot_general") == ["float16 float16 -> float16"]


@pytest.mark.parametrize("rules", [{lax.all_gather_p: "full"}, {lax.all_gather_p: "follow"}], ids=["full", "follow"])
def test_a_rule_for_a_gather_holds_where_types_are_checked_too(rules):
    def gather(x, axis):
        return lax.all_gather(x, axis, to="invarying", axis=0)

    fun = amp.autocast(sharded(gather, True), rules=rules)
    dtype = "float32" if "full" in rules.values() else "float16"
    assert dtypes(fun, X, primitive="all_gather_invariant") == [f"{dtype} -> {dtype}"]
