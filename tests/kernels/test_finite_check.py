"""Every implementation against float64: plain JAX, the kernels in Pallas' interpreters, and as compiled on a GPU.

The interpreters fill memory with NaN, so an element that a kernel forgets to write, or reads beyond a leaf, shows.
"""

import functools
import itertools
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh
from jaxprs import equations
from kernel_ways import Way, assert_same_bits, compiled, interpreted

from pallas_kernels import check_finite, unscale_check
from pallas_kernels.finite_check import launch, mosaic_gpu, reference

BAD = [np.inf, -np.inf, np.nan]
READ = [jnp.float32, jnp.float16, jnp.bfloat16]  # by the kernels
DTYPES = [*READ, jnp.float8_e5m2, jnp.complex64]
BLOCK = 2048


COMPILED = compiled(launch.KERNELS.oldest)
KERNELS = [*interpreted(launch.KERNELS.oldest), *COMPILED]
WAYS = [pytest.param(Way("xla"), id="xla"), *KERNELS]

for_every_kernel = pytest.mark.parametrize("kernel", launch.KERNELS.oldest)


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    """Interpreters are slow, so there a few thousand elements are several blocks; a GPU runs what users run."""
    with pytest.MonkeyPatch.context() as patch:
        if jax.default_backend() != "gpu":
            patch.setattr(launch, "BLOCK", BLOCK)
        yield


def jitted(way, out_dtype=jnp.float32):
    """An op compiled apart from `program`, for settings that are read while it is traced."""
    if out_dtype is None:
        op = functools.partial(check_finite, **way._asdict())
    else:
        op = functools.partial(unscale_check, out_dtype=out_dtype, **way._asdict())
    return jax.jit(op)


program = functools.cache(jitted)
"""One for all tests: a tree of the same shapes is not compiled again."""


def check(way, tree, inv_scale=1.0):
    return program(way, None)(tree, np.float32(inv_scale))


def unscale(way, tree, inv_scale=1.0, out_dtype=jnp.float32):
    return program(way, out_dtype)(tree, np.float32(inv_scale))


def normal(shape, dtype=jnp.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def exact_unscaled(tree, inv_scale, out_dtype):
    with np.errstate(over="ignore"):
        return jax.tree.map(lambda x: (x.astype(np.float32) * np.float32(inv_scale)).astype(out_dtype), tree)


def exact_sum_of_squares(tree):
    return sum((np.abs(np.asarray(leaf).astype(np.complex128)) ** 2).sum() for leaf in jax.tree.leaves(tree))


def assert_is(result, finite, sum_of_squares, rtol=1e-6):
    flag, total = result
    assert (flag.shape, flag.dtype) == ((), jnp.bool_)
    assert (total.shape, total.dtype) == ((), jnp.float32)
    assert bool(flag) is finite
    np.testing.assert_allclose(float(total), sum_of_squares, rtol=rtol)


def assert_right(way, tree, inv_scale=1.0):
    """Both ops on a tree that stays finite."""
    exact = exact_unscaled(tree, inv_scale, jnp.float32)
    assert_is(check(way, tree, inv_scale), True, exact_sum_of_squares(exact), rtol=1e-5)
    assert_unscaled(program(way, jnp.float32), tree, inv_scale)


def assert_unscaled(run, tree, inv_scale, out_dtype=jnp.float32):
    exact = exact_unscaled(tree, inv_scale, out_dtype)
    finite = all(np.isfinite(x).all() for x in jax.tree.leaves(exact))
    out, *result = run(tree, np.float32(inv_scale))
    assert_same_bits(out, exact)
    assert_is(result, finite, exact_sum_of_squares(exact) if finite else np.nan, rtol=1e-5)


# Values


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", WAYS)
def test_values_are_rounded_once_and_the_sum_is_that_of_float64(way):
    block = launch.BLOCK
    sizes = [1, 7, 8, 9, 127, 128, 129, 255, 1000, 1023, 1024, 1025, block - 1, block, block + 1, 2 * block + 129]
    shapes = [*((size,) for size in sizes), (), (3, 1, 5), (33, 5), (0,), (0, 3)]
    tree = {f"{k}": normal(shape, READ[k % 3], seed=k) for k, shape in enumerate(shapes)}
    assert_unscaled(program(way, jnp.float32), tree, 1 / 3)


PAIRS = [(7777 * 77, 555 * 555), (777, 555), (555, 65537), (65537, 555), (555, 65536), (33333, 555)]
"""Sizes from the tests of apex's multi-tensor kernels."""


def pairs(dtypes, shrink):
    """The grid of apex's tests, each pair either way round."""
    sizes = [size for pair in PAIRS for size in (*pair, *reversed(pair))]
    return [normal(-(-size // shrink), dtypes[k % len(dtypes)], seed=k) for k, size in enumerate(sizes)]


@pytest.mark.sweep(len(WAYS))
@pytest.mark.parametrize("way", WAYS)
def test_large_and_small_leaves_can_be_mixed(way):
    tree = pairs([jnp.float16, jnp.float32, jnp.bfloat16, jnp.float32], shrink=256)
    assert_unscaled(program(way, jnp.float32), tree, 0.7)


@pytest.mark.parametrize("dtype", READ)
@pytest.mark.parametrize("way", COMPILED)
def test_full_sizes_on_a_gpu(way, dtype):
    assert_right(way, pairs([dtype], shrink=1), 0.7)
    assert_right(way, [normal(size, dtype) for size in (777, 555)] * 55, 2.0**-20)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("out_dtype", READ)
@pytest.mark.parametrize("way", WAYS)
def test_results_are_rounded_to_nearest_even(way, out_dtype):
    ties = [1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65504, 65519, 2**-24, 2**-25, 3 * 2**-25, -0.0]
    tree = [np.float32(ties), *(normal(300, dtype, seed=k) for k, dtype in enumerate(READ))]
    for inv_scale in (1.0, 0.3, 2.0**-20):
        assert_unscaled(program(way, out_dtype), tree, inv_scale, out_dtype)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", WAYS)
def test_what_is_no_floating_number_passes_through(way):
    others = {
        "int": np.arange(3),
        "uint8": jnp.uint8(7),
        "bool": np.array([True]),
        "key": jax.random.key(0),
        "float0": np.zeros(2, jax.dtypes.float0),
        "text": "text",
        "function": len,
        "number": 1,
    }
    tree = {"w": np.float32([6, 8]), "a": [jnp.float16(2), None, others, 4.0], "z": np.zeros((3, 0), np.float16)}
    assert_is(check_finite(tree, 0.5, **way._asdict()), True, 30.0)
    out, *result = unscale_check(tree, 0.5, **way._asdict())
    assert_is(result, True, 30.0)
    assert list(out) == sorted(tree)
    assert out["w"].tolist() == [3, 4]
    assert (out["z"].shape, out["z"].dtype) == ((3, 0), jnp.float32)
    assert (len(out["a"]), float(out["a"][0]), out["a"][1], float(out["a"][3])) == (4, 1, None, 2)
    assert out["a"][2].keys() == others.keys()
    for name, leaf in others.items():
        assert out["a"][2][name] is leaf


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "tree", [{}, (), None, [None], np.zeros((0, 3), np.float32), [np.zeros(0, np.float16), {}]], ids=repr
)
def test_nothing_is_finite_and_sums_to_zero(way, tree):
    assert_right(way, tree)


@pytest.mark.parametrize("inv_scale", [0.5, 1, np.float64(0.5), jnp.float16(0.5), jnp.float32(0.5), True], ids=repr)
def test_the_factor_is_any_scalar(inv_scale):
    out, *result = unscale_check(np.float16([6, 8]), inv_scale)
    assert out.dtype == jnp.float32
    assert_is(result, True, 100.0 * float(inv_scale) ** 2)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", KERNELS)
def test_64_bit_programs_run_the_same_kernel(way):
    tree = [normal(5, jnp.float16), normal(129), normal(BLOCK + 7, jnp.bfloat16)]
    out, *result = unscale(way, tree, 0.7)
    with jax.enable_x64(True):
        wide_out, *wide_result = unscale(way, tree, 0.7)
    assert_same_bits(wide_out, out)
    assert_same_bits(wide_result, result)


# What is not finite


def places(block):
    """Leaves by name, with positions that are read in different ways."""
    rest = 2 * block + 1024 + 128
    return {
        "few": (5, jnp.float32, [0, 2, 4]),
        "blocks and a rest of all kinds": (
            rest + 3,
            jnp.float16,
            [0, block - 1, block, 2 * block, rest - 129, rest - 128, rest - 1, rest, rest + 2],
        ),
        "rest that reaches back": (block + 5, jnp.bfloat16, [block - 123, block - 1, block, block + 4]),
        "just over a piece": (129, jnp.float32, [0, 1, 127, 128]),
        "one by one": (21, jnp.float16, [0, 8, 15, 16, 20]),
    }


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", WAYS)
def test_one_bad_element_is_found_wherever_it_is_and_all_others_are_written(way):
    leaves = places(launch.BLOCK)
    tree = {name: normal(size, dtype) for name, (size, dtype, _) in leaves.items()}
    assert_right(way, tree, 0.5)
    bad = itertools.cycle(BAD)
    for name, (_, _, positions) in leaves.items():
        for position in positions:
            spoilt = tree | {name: with_value(tree[name], position, next(bad))}
            assert_unscaled(program(way, jnp.float32), spoilt, 0.5)
        assert_is(check(way, spoilt, 0.5), False, np.nan)  # without results, the same kernel reads the last element


def with_value(x, position, value):
    x = x.copy()
    x[position] = value
    return x


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", WAYS)
def test_what_overflows_is_not_finite_and_what_only_its_square_does_is(way):
    def results(a, b, inv_scale=1.0, out_dtype=jnp.float32):
        tree = [np.full(3, a, np.float32), with_value(np.ones(300, np.float32), -1, b)]
        out, *unscaled = unscale(way, tree, inv_scale, out_dtype)
        assert_same_bits(out, exact_unscaled(tree, inv_scale, out_dtype))
        return check(way, tree, inv_scale), unscaled

    # The values themselves, by the factor or by rounding: the sum says so, and is never negative.
    for a, b in [(np.inf, -np.inf), (-np.inf, np.inf), (np.inf, np.nan), (np.nan, 1), (1, np.inf), (-np.inf, 1)]:
        for result in results(a, b):
            assert_is(result, False, np.nan)
    for result in results(1, 1e38, 100):
        assert_is(result, False, np.nan)
    checked, unscaled = results(1, 1e6, 1, jnp.float16)
    assert_is(checked, True, 302 + 1e12)
    assert_is(unscaled, False, np.nan)
    assert_is(results(1, 65519, 1, jnp.float16)[1], True, 302 + 65504.0**2)
    assert_is(results(1, 65520, 1, jnp.float16)[1], False, np.nan)
    # Squares, one or only together.
    most = np.finfo(np.float32).max
    for a, b in [(1, 3e38), (1, -most), (most, most), (1.5e19, 1.5e19)]:
        for result in results(a, b):
            assert_is(result, True, np.inf)
    # Not after the factor.
    for result in results(1, 1e30, 1e-15):
        assert_is(result, True, 1e30)


# How the work is cut


@pytest.mark.sweep(4)
@pytest.mark.parametrize("way", WAYS)
def test_two_calls_give_the_same_bits(way):
    tree = {name: normal(size, dtype) for name, (size, dtype, _) in places(launch.BLOCK).items()}
    assert_same_bits(unscale(way, tree, 0.5), unscale(way, tree, 0.5))
    assert_same_bits(check(way, tree, 0.5), check(way, tree, 0.5))


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", KERNELS)
def test_the_size_of_a_block_does_not_show(way, monkeypatch):
    tree = [normal(9000), normal(130, jnp.float16), normal(3)]
    results = []
    for block in (1024, 4096):
        monkeypatch.setattr(launch, "BLOCK", block)
        results.append(jitted(way)(tree, np.float32(0.7)))
    (out, _, total), (other_out, _, other_total) = results
    assert_same_bits(out, other_out)
    np.testing.assert_allclose(total, other_total, rtol=1e-6)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", KERNELS)
def test_a_leaf_too_large_for_an_index_is_read_as_rows(way, monkeypatch):
    monkeypatch.setattr(launch, "INDEX_LIMIT", 3000)
    run = jitted(way)
    rows = {"rows with a rest": (9000, 5), "rows of one block": (2 * BLOCK, 2), "one row": (2999, 1)}
    assert {size: launch.rows(size) for size, _ in rows.values()} == dict(rows.values())
    tree = {name: normal(size, jnp.float16) for name, (size, _) in rows.items()}
    tree["two dimensions"] = normal((6, 500))
    assert_unscaled(run, tree, 0.5)
    for name, position in [("rows with a rest", 1799), ("rows with a rest", 1800), ("rows of one block", -1)]:
        assert_unscaled(run, tree | {name: with_value(tree[name], position, np.inf)}, 0.5)


def test_rows_are_the_fewest_that_int32_indexes_and_begin_where_16_bytes_can_be_loaded():
    assert launch.rows(2**31 - 1) == 1
    assert launch.rows(2**31) == 2
    assert launch.rows(2**31 + 16) == 2
    assert launch.rows(24 * 89478487) == 3
    assert launch.rows(2**36) == 64
    assert launch.rows(2**31 + 2) is None
    assert launch.rows(2**31 + 11) is None  # a prime


@for_every_kernel
def test_a_leaf_that_has_no_such_rows_is_named(kernel, monkeypatch):
    monkeypatch.setattr(launch, "INDEX_LIMIT", 3000)
    tree = [np.ones(3001, np.float32), np.ones(5, np.float32), np.ones(6000, np.float32)]
    assert [launch.is_supported(x) for x in tree] == [False, True, True]
    with pytest.raises(NotImplementedError, match=r"leaf\[0\] is float32\[3001\]"):
        check_finite(tree, implementation=kernel)


def kernel_inputs(fun, *args):
    """The shapes of the leaves of each launch."""
    launches = [eqn for eqn in equations(fun, *args) if eqn.primitive.name == "unscale_check"]
    return [[x.aval.shape for x in eqn.invars[1:]] for eqn in launches]


@pytest.mark.sweep(6)
@pytest.mark.parametrize("way", KERNELS)
def test_more_leaves_than_one_launch_takes_are_shared_out_evenly(way, monkeypatch):
    monkeypatch.setattr(launch, "MAX_LEAVES", 2)
    tree = [normal(size, READ[size % 3], seed=size) for size in range(3, 8)]
    launches = kernel_inputs(lambda tree: unscale_check(tree, 0.7, implementation=way.implementation), tree)
    assert [len(launch) for launch in launches] == [1, 2, 2]
    assert [shape for launch in launches for shape in launch] == [x.shape for x in tree]
    run = jitted(way)
    assert_unscaled(run, tree, 0.7)
    for k in (0, 1, 4):
        assert_unscaled(run, [*tree[:k], with_value(tree[k], -1, np.nan), *tree[k + 1 :]], 0.7)


def test_the_parameters_of_a_launch_fit_into_4_kib():
    assert 8 * (2 * launch.MAX_LEAVES + 2) <= 4096


shapes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 40_000)), min_size=1, max_size=6)
blocks = st.sampled_from([1024, 2048, 8192])


@settings(max_examples=200)
@given(shapes, blocks)
def test_the_programs_of_a_launch_cover_each_element_once(shapes, block):
    table, programs = launch.segments(shapes, block)
    assert [segment.first for segment in table] == np.cumsum([0, *(s.programs for s in table)])[:-1].tolist()
    assert programs == sum(segment.programs for segment in table)
    ends = {(leaf, row): 0 for leaf, (n, _) in enumerate(shapes) for row in range(n)}
    for segment in table:
        assert 0 < segment.size <= block
        assert segment.start == ends[segment.leaf, segment.row]
        ends[segment.leaf, segment.row] += segment.size * segment.programs
    assert ends == {(leaf, row): length for leaf, (n, length) in enumerate(shapes) for row in range(n)}


@settings(max_examples=200)
@given(st.integers(mosaic_gpu.NARROW, 20_000), blocks, st.sampled_from(launch.DTYPES))
def test_the_pieces_of_a_program_cover_each_element_once_and_none_beyond_the_row(length, block, dtype):
    vectors = mosaic_gpu.vectors([dtype])
    counted = np.zeros(length, int)
    for segment in launch.segments([(1, length)], block)[0]:
        for program in range(segment.programs):
            start = segment.start + program * segment.size
            for piece in mosaic_gpu.pieces(segment, length, vectors):
                first, last = start + piece.offset, start + piece.offset + piece.width
                assert 0 <= first < last <= length
                assert piece.width == mosaic_gpu.NARROW or first % vectors[piece.width] == 0  # one load
                counted[first + piece.overlap : last] += 1
    assert (counted == 1).all()


def test_each_program_runs_the_body_of_its_segment_alone():
    table, programs = launch.segments([(1, 5), (2, 2050), (1, 1024), (3, 7), (1, 4100)], 1024)

    def ran(program):
        def body(segment, index, found):
            return [*found[1:], jnp.int32(table.index(segment)) * 100 + index]

        return launch.dispatch(table, program, body, [jnp.int32(-1)] * 2)

    expected = [k * 100 + i for k, segment in enumerate(table) for i in range(segment.programs)]
    first, second = jax.jit(lambda: jax.lax.map(ran, jnp.arange(programs)))()
    assert first.tolist() == [-1] * programs
    assert second.tolist() == expected


@pytest.mark.parametrize("op", [check_finite, unscale_check])
@pytest.mark.parametrize("way", interpreted(launch.KERNELS.oldest))
def test_blocks_share_their_arithmetic(way, op):
    """Instructions of a copy for each leaf do not fit the caches of a GPU."""

    def products(leaves):
        tree = [np.ones(2 * BLOCK, np.float16)] * leaves
        found = equations(lambda tree: op(tree, 0.5, **way._asdict()), tree)
        return sum(eqn.primitive.name == "mul" and eqn.outvars[0].aval.dtype == jnp.float32 for eqn in found)

    assert 0 < products(1) == products(7)


random_leaf = st.tuples(st.integers(0, 3000), st.sampled_from(READ), st.floats(0, 1), st.sampled_from([None, *BAD]))


@settings(max_examples=8)
@given(st.lists(random_leaf, min_size=1, max_size=3), st.sampled_from([1.0, 2.0**-16, 2.0**5, 0.3, -1.7]))
def test_random_trees_in_the_triton_interpreter(leaves, inv_scale):
    tree = [normal(size, dtype, seed) for seed, (size, dtype, _, _) in enumerate(leaves)]
    for x, (size, _, where, bad) in zip(tree, leaves, strict=True):
        if bad is not None and size:
            x[int(where * (size - 1))] = bad
    assert_unscaled(program(Way("triton", interpret=True), jnp.float32), tree, inv_scale)


# What is chosen


@pytest.mark.parametrize("op", [check_finite, functools.partial(unscale_check, inv_scale=0.5)])
def test_none_and_xla_are_plain_jax_and_a_kernel_reads_what_is_floating_and_not_empty(op):
    leaves = [jnp.ones(2), jnp.ones(3), jnp.zeros(0), jnp.arange(3)]
    assert kernel_inputs(lambda tree: op(tree), leaves) == []
    assert kernel_inputs(lambda tree: op(tree, implementation="xla"), leaves) == []
    assert kernel_inputs(lambda tree: op(tree, implementation="mosaic_gpu"), leaves) == [[(2,), (3,)]]


TREE = {"a": np.arange(16, dtype=np.float32), "b": normal((8, 3), jnp.float16)}


def over_mesh(kind):
    def run(op):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        out, *result = jax.jit(op)(jax.device_put(TREE, sharding))
        assert out["a"].sharding.is_equivalent_to(sharding, 1)
        return out, *result

    return run


def on_shards(op):
    spec = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def shard(tree):
        out, _, total = op(tree)
        return out, jax.lax.psum(total, "data")

    return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=spec("data"), out_specs=(spec("data"), spec())))(TREE)


def loss(op):
    return lambda x: op(x)[2]


TRANSFORMED = {
    "eager": lambda op: op(TREE),
    "jit": lambda op: jax.jit(op)(TREE),
    "vmap": lambda op: jax.vmap(op)({"a": np.ones((4, 2), np.float32), "b": np.ones((4, 3), np.float16)}),
    "vmap over columns": lambda op: jax.vmap(op, 1)(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "grad": lambda op: jax.grad(loss(op))(TREE),
    "jit of grad": lambda op: jax.jit(jax.grad(loss(op)))(TREE),
    "grad of checkpoint": lambda op: jax.grad(jax.checkpoint(loss(op)))(TREE),
    "vmap of grad": lambda op: jax.vmap(jax.grad(loss(op)))(np.ones((2, 3), np.float32)),
    "hessian": lambda op: jax.jit(jax.hessian(loss(op)))(np.float32([1, 0, 2])),
    "vjp of the values": lambda op: jax.vjp(lambda x: op(x)[0], TREE)[1](TREE | {"b": TREE["b"].astype(np.float32)}),
    "scan": lambda op: jax.lax.scan(lambda c, x: (c, op(x)), 0, np.ones((3, 4), np.float32)),
    "shard_map": on_shards,
    "sharded inputs": over_mesh(jax.sharding.AxisType.Auto),
    "sharded types": over_mesh(jax.sharding.AxisType.Explicit),
    "complex": lambda op: jax.jit(op)([TREE, np.ones(3, np.complex64)]),
    "float8": lambda op: jax.jit(op)([TREE, np.ones(3, jnp.float8_e5m2)]),
}


@pytest.mark.sweep(9)
@pytest.mark.parametrize("case", TRANSFORMED)
def test_plain_jax_runs_in_every_transformation(case):
    def by_hand(tree):
        out = jax.tree.map(lambda x: 0.5 * (x if jnp.iscomplexobj(x) else jnp.asarray(x, jnp.float32)), tree)
        total = sum(jnp.sum(jnp.abs(x) ** 2) for x in jax.tree.leaves(out))
        return out, jnp.isfinite(total), total

    result, expected = (TRANSFORMED[case](op) for op in (lambda tree: unscale_check(tree, 0.5), by_hand))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), result, expected)


def test_the_factor_can_be_batched_and_differentiated():
    out, finite, total = jax.vmap(lambda inv_scale: unscale_check(jnp.float32([1, 2]), inv_scale))(
        jnp.float32([1, np.inf])
    )
    assert (finite.tolist(), out[0].tolist(), float(total[0])) == ([True, False], [1, 2], 5)
    assert jax.grad(lambda inv_scale: check_finite(jnp.float32([1, 2]), inv_scale)[1])(3.0) == 30


def test_float64_is_multiplied_in_float64():
    with jax.enable_x64(True):
        tree = [np.float64([1 + 2**-40, 1e300]), np.float32([1])]
        out, *result = jax.jit(lambda tree: unscale_check(tree, 0.5))(tree)
        assert_is(result, True, np.inf)
        assert_same_bits(out, [tree[0] * 0.5, tree[1] * np.float32(0.5)])


def test_small_leaves_are_summed_together_by_one_program_in_eager_calls(monkeypatch):
    traced, one_by_one = [], reference._one_by_one
    monkeypatch.setattr(reference, "_one_by_one", lambda *arrays: traced.extend(arrays) or one_by_one(*arrays))
    leaves = [np.ones(77, np.float32)] * 2
    check_finite(leaves)
    assert traced
    traced.clear()
    check_finite(leaves)
    assert not traced


# What is refused


REFUSED = {
    "eager": (lambda op: op(TREE), "needs an NVIDIA GPU, but the program is compiled for cpu"),
    "jit": (lambda op: jax.jit(op)(TREE), "needs an NVIDIA GPU, but the program is compiled for cpu"),
    "vmap": (lambda op: jax.vmap(op)(np.ones((2, 3), np.float32)), "does not support `jax.vmap`"),
    "grad": (lambda op: jax.grad(lambda tree: op(tree)[-1])(TREE), "does not support differentiation"),
    "jvp": (
        lambda op: jax.jvp(op, (np.ones(3, np.float32),), (np.ones(3, np.float32),)),
        "does not support differentiation",
    ),
    **{
        f"for {platform}": (
            lambda op, platform=platform: jax.jit(op).trace(TREE).lower(lowering_platforms=(platform,)),
            f"needs an NVIDIA GPU, but the program is compiled for {platform}",
        )
        for platform in ("tpu", "rocm")
    },
}


@for_every_kernel
@pytest.mark.parametrize("case", REFUSED)
def test_a_kernel_asked_for_by_name_says_why_it_cannot_run_and_what_can(kernel, case):
    run, reason = REFUSED[case]
    for op in (check_finite, functools.partial(unscale_check, inv_scale=0.5)):
        with pytest.raises(NotImplementedError) as error:
            run(functools.partial(op, implementation=kernel))
        assert f'implementation="{kernel}" {reason}' in str(error.value)
        assert "pass `implementation=None`" in str(error.value)
        assert '"xla"' in str(error.value)


@for_every_kernel
@pytest.mark.parametrize(("dtype", "name"), [(jnp.complex64, "complex64"), (jnp.float8_e5m2, "float8_e5m2")])
@pytest.mark.parametrize("interpret", [False, True])
def test_a_leaf_that_a_kernel_cannot_read_is_named(kernel, dtype, name, interpret):
    tree = {"layers": [{"w": np.ones((2, 3), dtype)}, {"w": np.ones(2, np.float32)}]}
    with pytest.raises(NotImplementedError) as error:
        check_finite(tree, implementation=kernel, interpret=interpret)
    for part in (kernel, f"['layers'][0]['w'] is {name}[2, 3]", "float32, float16, bfloat16", "implementation=None"):
        assert part in str(error.value)


@for_every_kernel
def test_an_empty_leaf_of_any_dtype_is_no_obstacle(kernel):
    tree = [np.zeros(0, np.complex64), np.float32([3, 4])]
    assert_is(check_finite(tree, implementation=kernel, interpret=True), True, 25.0)


def on_device(monkeypatch, capability):
    gpu = SimpleNamespace(device_kind="A fine GPU", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda *_: [gpu])


@pytest.mark.parametrize(
    ("kernel", "capability", "oldest", "cure"),
    [
        ("mosaic_gpu", "8.9", "9.0 (Hopper)", "`implementation='triton'` or `implementation=None`"),
        ("mosaic_gpu", "7.5", "9.0 (Hopper)", "pass `implementation=None`"),
        ("triton", "7.5", "8.0 (Ampere)", "pass `implementation=None`"),
    ],
)
def test_a_kernel_names_the_gpus_that_it_needs(kernel, capability, oldest, cure, monkeypatch):
    on_device(monkeypatch, capability)
    with pytest.raises(NotImplementedError) as error:
        check_finite(TREE, implementation=kernel)
    for part in (f'"{kernel}"', oldest, f"A fine GPU has {capability}", cure):
        assert part in str(error.value)
    # The interpreter does not need it, nor does a program for another device.
    assert check_finite(TREE["b"], implementation=kernel, interpret=True)[0]
    finer = AbstractDevice(device_kind="A finer GPU", num_cores=1, platform="gpu")
    with (
        jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=finer)),
        pytest.raises(NotImplementedError, match="compiled for cpu"),
    ):
        check_finite(TREE, implementation=kernel)


@pytest.mark.parametrize(
    ("kernel", "capability"),
    [("mosaic_gpu", "9.0"), ("mosaic_gpu", "10.0"), ("triton", "8.0"), ("mosaic_gpu", "gfx942"), ("triton", "gfx942")],
)
def test_other_devices_are_told_apart_where_the_program_is_compiled(kernel, capability, monkeypatch):
    on_device(monkeypatch, capability)
    with pytest.raises(NotImplementedError, match="compiled for cpu"):
        check_finite(TREE, implementation=kernel)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"implementation": "cuda"}, ["'cuda'", "None, 'xla', 'mosaic_gpu', 'triton'"]),
        ({"inv_scale": np.ones(2, np.float32)}, ["`inv_scale` must be a scalar", "(2,)"]),
        ({"interpret": True}, ["`interpret=True`", "implementation='mosaic_gpu' or 'triton'"]),
        ({"interpret": True, "implementation": "xla"}, ["`interpret=True`", "implementation='mosaic_gpu' or 'triton'"]),
        ({"out_dtype": jnp.float64}, ["`out_dtype`", "float32, float16, bfloat16", "got float64"]),
        ({"out_dtype": "int32"}, ["`out_dtype`", "float32, float16, bfloat16", "got int32"]),
        ({"out_dtype": jnp.float8_e4m3fn}, ["`out_dtype`", "float32, float16, bfloat16", "got float8_e4m3fn"]),
    ],
    ids=str,
)
def test_wrong_arguments_are_quoted_beside_the_right_ones(arguments, parts):
    for op, name in ((check_finite, "check_finite"), (unscale_check, "unscale_check")):
        if "out_dtype" in arguments and op is check_finite:
            continue
        with pytest.raises(ValueError) as error:
            op(TREE, **{"inv_scale": 1.0} | arguments)
        for part in parts if "out_dtype" in arguments else [name, *parts]:
            assert part in str(error.value)


# Plain JAX, on what only it reads


@pytest.fixture(params=["eager", "jit"])
def plain(request):
    return jax.jit(check_finite) if request.param == "jit" else check_finite


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_is_accumulated_in_float32(plain, dtype):
    tree = normal((300, 11), dtype)
    assert_is(plain(tree), True, exact_sum_of_squares(tree), rtol=1e-5)


def test_dtypes_may_be_mixed(plain):
    tree = {str(np.dtype(dtype)): normal((5, 3), dtype) for dtype in DTYPES}
    assert_is(plain(tree), True, exact_sum_of_squares(tree), rtol=1e-5)


def test_large_leaves_are_summed_as_exactly_as_small_ones():
    tree = [normal((555, 6553)), normal((3333, 55), jnp.float16)]
    assert_is(jax.jit(check_finite)(tree), True, exact_sum_of_squares(tree), rtol=1e-5)


def test_squares_beyond_the_range_of_float16_are_summed(plain):
    assert_is(plain(np.full(1000, 60000, np.float16)), True, 1000 * 60000.0**2)


def test_float64_is_accumulated_in_float64():
    with jax.enable_x64(True):
        for seed in range(5):
            tree = normal(100_000, jnp.float64, seed)
            assert float(check_finite(tree)[1]) == np.float32(exact_sum_of_squares(tree))
        # Finite in float64, beyond the range of float32.
        assert_is(check_finite(jnp.array([1e300])), True, np.inf)


def test_float64_and_complex_values_keep_their_dtype():
    with jax.enable_x64(True):
        tree = [np.float64([1 + 2**-40]), np.complex64([1 + 2j]), np.complex128([2**-40 + 1j]), np.ones(1, np.float16)]
        out, finite, _ = unscale_check(tree, 0.5, out_dtype=jnp.bfloat16)
        assert finite
        assert [x.dtype for x in out] == [jnp.float64, jnp.complex64, jnp.complex128, jnp.bfloat16]
        assert_same_bits(out[:3], [x * x.dtype.type(0.5) for x in tree[:3]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_of_any_dtype_is_found(plain, dtype):
    for bad in BAD:
        for position in (0, 17, 34):
            for leaf in ("first", "last"):
                tree = {name: normal((5, 7), dtype) for name in ("first", "middle", "last")}
                tree[leaf].flat[position] = np.asarray(bad).astype(dtype)
                assert_is(plain(tree), False, np.nan)


@pytest.mark.parametrize("bad", BAD)
def test_the_imaginary_part_counts(plain, bad):
    assert not plain(np.array([1, complex(1, bad)], np.complex64))[0]


@pytest.mark.parametrize("bad", BAD)
def test_a_scalar_can_be_bad(plain, bad):
    assert not plain({"w": np.ones(3, np.float32), "s": np.float32(bad)})[0]
    assert not plain({"w": np.ones(3, np.float32), "s": float(bad)})[0]
    assert not plain({"w": np.ones(3, np.float32), "s": complex(1, bad)})[0]


def test_the_largest_finite_values_are_finite(plain):
    assert plain([np.full(2, jnp.finfo(dtype).max, dtype) for dtype in READ])[0]


def test_every_tree_of_a_batch_has_its_own_answer():
    finite, total = jax.vmap(check_finite)({"a": jnp.float32([[1, 2], [np.nan, 0]]), "b": jnp.ones((2, 3))})
    assert finite.tolist() == [True, False]
    assert total[0] == 8


def test_over_sharded_arrays_the_answer_is_global():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    good = jax.device_put(np.arange(8, dtype=np.float32), sharding)
    bad = jax.device_put(np.float32([0, 0, 0, 0, 0, np.inf, 0, 0]), sharding)
    assert_is(jax.jit(check_finite)([good]), True, 140.0)
    assert not jax.jit(check_finite)([good, bad])[0]


def test_the_sum_of_squares_is_differentiable():
    grad = jax.grad(lambda w: check_finite({"w": w})[1])(jnp.float32([1, -2, 0]))
    assert grad.tolist() == [2, -4, 0]


def test_derivatives_go_through_leaves_that_are_summed_together():
    def total(w):
        return check_finite([w, 2 * w, jnp.ones(3)])[1]

    w = jnp.float32([1, -2, 0])
    assert jax.grad(total)(w).tolist() == [10, -20, 0]
    np.testing.assert_array_equal(jax.jit(jax.hessian(total))(w), 10 * np.eye(3))


@pytest.mark.parametrize("axes", [0, [0, None]], ids=str)
def test_leaves_of_a_batch_are_summed_together(axes):
    rows = jnp.float32([[1, 2], [np.nan, 0]])
    other = rows if axes == 0 else rows[0]
    finite, total = jax.jit(jax.vmap(lambda *tree: check_finite(tree), axes))(rows, other)
    assert finite.tolist() == [True, False]
    assert total[0] == 10


def reductions(leaves, platform, **options):
    """The number of operands of each reduction over several leaves or one, as lowered for a platform."""
    program = jax.jit(check_finite, **options).trace(leaves).lower(lowering_platforms=(platform,))
    return sorted(line.count("init:") for line in program.as_text().splitlines() if "stablehlo.reduce(" in line)


def shapes_of(*sizes):
    return [jax.ShapeDtypeStruct((size,), jnp.float16) for size in sizes]


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_small_leaves_of_one_shape_are_one_reduction(platform):
    leaves = shapes_of(*19 * [5], reference.SMALL, reference.SMALL, *2 * [reference.SMALL + 1], 7)
    assert reductions(leaves, platform) == [1, 1, 1, 2, 3, 16]
    transposed = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 3), (3, 2), (6,))]
    assert reductions(transposed, platform) == [1, 1, 1]


def test_on_a_cpu_each_leaf_is_a_reduction():
    assert reductions(shapes_of(*19 * [5]), "cpu") == 19 * [1]


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_what_the_compiler_partitions_is_a_reduction_for_each_leaf(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    data, every = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (["data"], []))
    leaves = [jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding) for sharding in (data, data, every, every)]
    assert reductions(leaves, "cuda") == 4 * [1]


def test_leaves_of_symbolic_shape_are_summed_in_plain_jax():
    shape = jax.export.symbolic_shape("n, 3")
    leaves = [jax.ShapeDtypeStruct(shape, jnp.float32)] * 2
    exported = jax.export.export(jax.jit(check_finite), platforms=("cpu", "cuda"))(leaves)
    assert_is(exported.call([np.ones((2, 3), np.float32)] * 2), True, 12.0)


def test_the_package_stands_alone():
    code = "import sys, pallas_kernels; sys.exit(any(name.startswith(('jmp_amp', 'optax')) for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_backend_that_jax_has_removed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pallas_kernels.finite_check.triton", None)
    assert check_finite(TREE)[0]
    with pytest.raises(NotImplementedError, match=r'implementation="triton" needs a backend that JAX .* does not have'):
        check_finite(TREE, implementation="triton")
