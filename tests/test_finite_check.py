import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import check_finite

BAD = [np.inf, -np.inf, np.nan]
DTYPES = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e5m2, jnp.complex64]


def normal(shape, dtype=jnp.float32, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def exact_sum_of_squares(tree):
    return sum((np.abs(np.asarray(leaf).astype(np.complex128)) ** 2).sum() for leaf in jax.tree.leaves(tree))


def assert_is(result, finite, sum_of_squares, rtol=1e-6):
    flag, total = result
    assert (flag.shape, flag.dtype) == ((), jnp.bool_)
    assert (total.shape, total.dtype) == ((), jnp.float32)
    assert bool(flag) is finite
    np.testing.assert_allclose(float(total), sum_of_squares, rtol=rtol)


@pytest.fixture(params=["eager", "jit"])
def check(request):
    return jax.jit(check_finite) if request.param == "jit" else check_finite


# apex's grid, with one dimension a tenth as long, and what kernels tend to get wrong.
SIZES = [(7777, 7), (777, 555), (555, 6553), (6553, 555), (3333, 55), (1,), (127,), (128,), (129,), (3, 1, 5), ()]


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_the_sum_of_squares_is_that_of_float64(shape):
    tree = {"a": normal(shape), "b": normal(shape[::-1], seed=1)}
    assert_is(jax.jit(check_finite)(tree), True, exact_sum_of_squares(tree), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_dtype_is_accumulated_in_float32(check, dtype):
    tree = normal((300, 11), dtype)
    assert_is(check(tree), True, exact_sum_of_squares(tree), rtol=1e-5)


def test_dtypes_may_be_mixed(check):
    tree = {str(np.dtype(dtype)): normal((5, 3), dtype) for dtype in DTYPES}
    assert_is(check(tree), True, exact_sum_of_squares(tree), rtol=1e-5)


def test_squares_beyond_the_range_of_float16_are_summed(check):
    assert_is(check(np.full(1000, 60000, np.float16)), True, 1000 * 60000.0**2)


def test_float64_is_accumulated_in_float64():
    with jax.enable_x64(True):
        for seed in range(5):
            tree = normal(100_000, jnp.float64, seed)
            assert float(check_finite(tree)[1]) == np.float32(exact_sum_of_squares(tree))
        # Finite in float64, beyond the range of float32.
        assert_is(check_finite(jnp.array([1e300])), True, np.inf)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("position", [0, 17, 34])
def test_one_bad_element_is_found_wherever_it_is(check, dtype, bad, position):
    for leaf in ("first", "last"):
        tree = {name: normal((5, 7), dtype) for name in ("first", "middle", "last")}
        tree[leaf].flat[position] = np.asarray(bad).astype(dtype)
        finite, total = check(tree)
        assert not finite
        assert not np.isfinite(total)


@pytest.mark.parametrize("bad", BAD)
def test_the_imaginary_part_counts(check, bad):
    assert not check(np.array([1, complex(1, bad)], np.complex64))[0]


@pytest.mark.parametrize("bad", BAD)
def test_a_scalar_can_be_bad(check, bad):
    assert not check({"w": np.ones(3, np.float32), "s": np.float32(bad)})[0]


def test_infinities_of_both_signs_do_not_cancel(check):
    assert not check(np.float32([np.inf, -np.inf]))[0]


def test_a_sum_that_overflows_leaves_finite_values_finite(check):
    assert_is(check(np.float32([3e38, 1.0])), True, np.inf)
    assert_is(check([np.full(4, 1.5e19, np.float32), np.float32(1)]), True, np.inf)


def test_the_sum_is_never_negative_on_overflow(check):
    # A sentinel of -1 for "unknown" turns the sign of clipped gradients.
    for bad in BAD:
        assert not check(np.float32([bad, 1]))[1] < 0


def test_the_largest_finite_values_are_finite(check):
    tree = [np.full(2, jnp.finfo(dtype).max, dtype) for dtype in (jnp.float16, jnp.bfloat16, jnp.float32)]
    assert check(tree)[0]


@pytest.mark.parametrize(
    "tree", [{}, (), None, [None], np.zeros((0, 3), np.float32), [np.zeros(0, np.float16), {}]], ids=repr
)
def test_nothing_is_finite_and_sums_to_zero(check, tree):
    assert_is(check(tree), True, 0.0)


def test_leaves_without_numbers_to_check_pass(check):
    tree = {
        "int": np.arange(3),
        "bool": np.array([True]),
        "uint8": np.uint8(7),
        "key": jax.random.key(0),
        "none": None,
        "empty": np.zeros((3, 0), np.float32),
        "w": np.float32([3, 4]),
    }
    assert_is(check(tree), True, 25.0)


def test_float0_leaves_and_objects_pass():
    assert_is(check_finite({"f0": np.zeros(2, jax.dtypes.float0), "f": len, "s": "text"}), True, 0.0)


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


def test_the_package_stands_alone():
    code = "import sys, pallas_kernels; sys.exit(any(name.startswith(('jmp_amp', 'optax')) for name in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
