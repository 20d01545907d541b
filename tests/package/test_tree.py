from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp
import jmp_amp.compat.jmp as jmp
from jmp_amp._trees import cast_floating

FLOATING = [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2]


class Pair(NamedTuple):
    left: object
    right: object


# cast_floating


@pytest.mark.parametrize("target", FLOATING)
@pytest.mark.parametrize("source", FLOATING)
def test_cast_floating_casts_every_floating_dtype_to_every_other(source, target):
    out = cast_floating(jnp.full((2, 3), 0.5, source), target)
    assert out.dtype == target
    assert jnp.array_equal(out.astype(jnp.float32), jnp.full((2, 3), 0.5))


@pytest.mark.parametrize(
    "leaf",
    [
        jnp.arange(3),
        np.int8(1),
        jnp.array([True]),
        np.ones(2, np.uint8),
        jnp.ones(2, jnp.complex64),
        jax.random.key(0),
        jax.random.PRNGKey(0),
        np.zeros(2, jax.dtypes.float0),
        np.array(["text"]),
        np.array([None, 1.0]),
        jax.ShapeDtypeStruct((2,), jnp.float32),
        None,
        1.5,
        2,
        True,
        1j,
        "text",
        len,
    ],
    ids=repr,
)
def test_cast_floating_hands_on_everything_that_is_not_a_floating_array(leaf):
    tree = cast_floating({"x": leaf}, jnp.float16)
    assert tree["x"] is leaf


@pytest.mark.parametrize("leaf", [jnp.ones(2, jnp.float16), np.ones(2, np.float16), np.float16(1)], ids=type)
def test_cast_floating_returns_the_same_array_if_the_dtype_fits(leaf):
    assert cast_floating(leaf, jnp.float16) is leaf


def test_cast_floating_keeps_numpy_arrays_and_scalars_on_the_host():
    array, scalar = cast_floating((np.ones((2, 1)), np.float64(0.5)), jnp.bfloat16)
    assert isinstance(array, np.ndarray)
    assert isinstance(scalar, np.generic)
    assert array.shape == (2, 1)
    assert array.dtype == scalar.dtype == jnp.bfloat16


def test_cast_floating_keeps_the_structure():
    out = cast_floating(Pair({"a": [jnp.ones(1)]}, (None, jnp.ones(()))), "float16")
    assert jax.tree.structure(out) == jax.tree.structure(Pair({"a": [0]}, (None, 0)))
    assert [leaf.dtype for leaf in jax.tree.leaves(out)] == [jnp.float16] * 2


def test_cast_floating_casts_tracers_under_jit_vmap_and_grad():
    def loss(x):
        half = cast_floating({"x": x, "n": jnp.int32(1)}, jnp.float16)
        assert (half["x"].dtype, half["n"].dtype) == (jnp.float16, jnp.int32)
        return (half["x"] * half["x"]).sum().astype(jnp.float32)

    grads = jax.jit(jax.vmap(jax.grad(loss)))(jnp.ones((3, 2)))
    assert grads.dtype == jnp.float32
    assert jnp.array_equal(grads, jnp.full((3, 2), 2.0))


def test_casting_traces_no_op_for_an_array_of_that_dtype():
    jaxpr = jax.make_jaxpr(lambda x: cast_floating(x, jnp.float32))(jnp.ones(2))
    assert not jaxpr.jaxpr.eqns


# cast_to_half, cast_to_full, half_dtype of jmp


@pytest.mark.parametrize(("backend", "dtype"), [("tpu", "bfloat16"), ("gpu", "float16"), ("cpu", "float16")])
def test_half_is_bfloat16_on_a_tpu_and_float16_elsewhere(monkeypatch, backend, dtype):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert jmp.half_dtype() == jnp.dtype(dtype)
    assert jmp.cast_to_half([jnp.ones(2), 1])[0].dtype == jnp.dtype(dtype)


def test_cast_to_full_gives_float32_from_narrow_and_wide():
    tree = (
        jnp.ones(2, jnp.float16),
        jnp.ones(2, jnp.bfloat16),
        np.ones(2, np.float64),
        jnp.ones(2, jnp.int8),
    )
    assert [leaf.dtype for leaf in jmp.cast_to_full(tree)] == [jnp.float32] * 3 + [jnp.int8]


# all_finite


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float8_e5m2, jnp.complex64])
def test_all_finite_finds_one_bad_element_in_any_leaf_of_mixed_dtypes(dtype, bad):
    good = {"w": jnp.ones((2, 3), jnp.float32), "x": jnp.ones(4, dtype), "n": jnp.arange(2)}
    spoilt = good | {"x": good["x"].at[3].set(jnp.asarray(bad, dtype))}
    assert bool(amp.all_finite(good)) is True
    assert bool(amp.all_finite(spoilt)) is False
    assert bool(jax.jit(amp.all_finite)(good)) is True
    assert bool(jax.jit(amp.all_finite)(spoilt)) is False


def test_all_finite_looks_at_the_imaginary_part():
    assert not amp.all_finite(jnp.array([complex(0.0, float("nan"))]))


@pytest.mark.parametrize(
    "bad",
    [float("nan"), float("inf"), complex(0, float("inf")), np.float32("nan"), np.array([1.0, np.inf])],
    ids=repr,
)
def test_all_finite_checks_host_values_too(bad):
    assert not amp.all_finite({"x": bad, "y": jnp.ones(2)})


@pytest.mark.parametrize(
    "tree",
    [
        {},
        None,
        jnp.zeros((0, 3)),
        np.zeros(0),
        [jnp.arange(3), np.int8(1), True, 7],
        jax.random.key(0),
        np.zeros(2, jax.dtypes.float0),
        ["text", len, np.array(["text"])],
        jnp.float32(3e38),
        [1.5, 1j],
        np.array([1e300]),
    ],
    ids=repr,
)
def test_all_finite_is_true_without_a_bad_number(tree):
    assert bool(amp.all_finite(tree)) is True


@pytest.mark.parametrize("tree", [{}, 1.0, np.ones(2), [np.ones(1), jnp.ones((2, 2), jnp.float16)]], ids=repr)
def test_all_finite_returns_a_boolean_scalar_array(tree):
    flag = amp.all_finite(tree)
    assert isinstance(flag, jax.Array)
    assert (flag.shape, flag.dtype) == ((), jnp.bool_)


def test_all_finite_maps_over_a_batch():
    batch = {"a": jnp.array([[1.0, 2.0], [jnp.nan, 0.0]]), "b": jnp.ones((2, 3), jnp.float16)}
    assert jax.vmap(amp.all_finite)(batch).tolist() == [True, False]


def test_all_finite_is_global_over_a_sharded_array():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    x = jax.device_put(jnp.zeros(8), sharding)
    spoilt = jax.device_put(jnp.zeros(8).at[5].set(jnp.inf), sharding)
    assert len(spoilt.sharding.device_set) == 8
    assert bool(jax.jit(amp.all_finite)([x, x])) is True
    assert bool(jax.jit(amp.all_finite)([x, spoilt])) is False


# select_tree


@pytest.mark.parametrize("pred", [True, np.bool_(True), np.array(True), jnp.array(True)], ids=repr)
def test_select_tree_takes_a_if_true_and_b_if_false(pred):
    a = {"w": jnp.ones((2, 3)), "n": jnp.arange(2), "h": np.ones(2, np.float16), "s": 1.0}
    b = {"w": jnp.zeros((2, 3)), "n": -jnp.arange(2), "h": np.zeros(2, np.float16), "s": 0.0}
    for flag, expected in ((pred, a), (jnp.logical_not(pred), b)):
        out = jmp.select_tree(flag, a, b)
        assert jax.tree.structure(out) == jax.tree.structure(a)
        assert all(jnp.array_equal(out[name], expected[name]) for name in a)
        assert [out[name].dtype for name in ("w", "n", "h")] == [jnp.float32, jnp.int32, jnp.float16]


def test_select_tree_under_jit_takes_a_traced_predicate_and_compiles_once():
    traces = []

    @jax.jit
    def select(pred, a, b):
        traces.append(pred)
        return jmp.select_tree(pred, a, b)

    a, b = Pair(jnp.ones(2), None), Pair(jnp.zeros(2), None)
    assert select(True, a, b).left.tolist() == [1, 1]
    assert select(False, a, b).left.tolist() == [0, 0]
    assert len(traces) == 1


def test_select_tree_maps_over_a_batch_of_predicates():
    out = jax.vmap(jmp.select_tree)(jnp.array([True, False]), jnp.ones((2, 3)), jnp.zeros((2, 3)))
    assert out.tolist() == [[1, 1, 1], [0, 0, 0]]


@pytest.mark.parametrize("jit", [False, True])
def test_select_tree_selects_prng_keys(jit):
    select = jax.jit(jmp.select_tree) if jit else jmp.select_tree
    a, b = jax.random.key(1), jax.random.key(2)
    for pred, expected in ((True, a), (False, b)):
        assert jnp.array_equal(jax.random.key_data(select(pred, a, b)), jax.random.key_data(expected))


def test_select_tree_does_not_let_nan_through_from_the_other_side():
    assert jmp.select_tree(True, jnp.ones(1), jnp.full(1, jnp.nan)).tolist() == [1]


def test_select_tree_hands_on_equal_leaves_that_are_no_arrays():
    assert jmp.select_tree(jnp.array(False), {"f": len, "s": "text"}, {"f": len, "s": "text"}) == {
        "f": len,
        "s": "text",
    }


@pytest.mark.parametrize(
    ("pred", "got"),
    [
        (jnp.ones(3, bool), r"bool\[3\]"),
        (jnp.int32(1), r"int32\[\]"),
        (np.float32(1), r"float32\[\]"),
        (1, "1"),
        (jax.random.key(0), r"key<fry>\[\]"),
        (None, "None"),
        ("yes", "'yes'"),
    ],
    ids=repr,
)
def test_select_tree_rejects_a_predicate_that_is_no_boolean_scalar(pred, got):
    with pytest.raises(AssertionError, match=rf"expected boolean scalar for `pred`, got {got}; compute it with"):
        jmp.select_tree(pred, jnp.ones(3), jnp.zeros(3))


@pytest.mark.parametrize(
    ("a", "b", "fact"),
    [
        (jnp.ones(2), jnp.ones(3), "`a['x'][0]` is `float32[2]` but `b['x'][0]` is `float32[3]`"),
        (jnp.ones(2), jnp.ones(()), "`a['x'][0]` is `float32[2]` but `b['x'][0]` is `float32[]`"),
        (
            jnp.ones(2),
            jnp.ones(2, jnp.float16),
            "`a['x'][0]` is `float32[2]` but `b['x'][0]` is `float16[2]`",
        ),
        (
            jnp.ones((2, 2)),
            jax.random.key(0),
            "`a['x'][0]` is `float32[2,2]` but `b['x'][0]` is `key<fry>[]`",
        ),
    ],
)
def test_select_tree_names_the_leaf_whose_shape_or_dtype_differs(a, b, fact):
    with pytest.raises(TypeError, match="same shape and dtype") as info:
        jmp.select_tree(True, {"v": 1, "x": [a]}, {"v": 1, "x": [b]})
    assert fact in str(info.value)


@pytest.mark.parametrize(("a", "b"), [("text", "other"), ("text", jnp.ones(1)), (jnp.ones(1), len)], ids=repr)
def test_select_tree_names_the_leaf_that_it_cannot_select(a, b):
    with pytest.raises(TypeError, match="cannot select between") as info:
        jmp.select_tree(True, {"x": a}, {"x": b})
    assert f"`a['x']`, which is `{a!r}`, and `b['x']`, which is `{b!r}`" in str(info.value)


@pytest.mark.parametrize(
    ("a", "b", "fact"),
    [
        ({"w": 1, "x": 2}, {"w": 1}, r"\bx\b"),
        ({"w": 1}, {"w": 1, "x": 2}, r"\bx\b"),
        ({"w": None}, {"w": 1}, "None"),
        ({"w": (1, 2)}, {"w": [1, 2]}, "tuple"),
    ],
)
def test_select_tree_names_the_difference_in_structure(a, b, fact):
    with pytest.raises(ValueError, match=fact):
        jmp.select_tree(True, a, b)
