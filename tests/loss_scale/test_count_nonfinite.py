"""The counts of non-finite values that the errors of `check_health` name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_amp._loss_scale._state import count_nonfinite, describe_nonfinite

TREE = {
    "dense": [{"w": jnp.ones((2, 3)).at[0].set(jnp.inf), "b": np.float16([1, np.nan])}],
    "fine": jnp.zeros(4),
    "step": jnp.int32(3),
    "key": jax.random.key(0),
    "none": None,
}


def test_counts_have_the_structure_of_the_tree():
    counts = count_nonfinite(TREE)
    assert jax.tree.structure(counts) == jax.tree.structure(TREE)
    assert all((x.shape, x.dtype, x.weak_type) == ((), jnp.int32, False) for x in jax.tree.leaves(counts))
    assert jax.tree.leaves(counts) == [1, 3, 0, 0, 0]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e5m2", "complex64"])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_every_floating_dtype_is_counted(dtype, bad):
    assert count_nonfinite(jnp.array([1, bad, bad]).astype(dtype)) == 2


@pytest.mark.parametrize("leaf", [jnp.tanh, jnp.float32, "float32", np.array(["a"]), object(), True], ids=type)
def test_a_leaf_that_is_no_number_counts_as_finite(leaf):
    counts = count_nonfinite({"leaf": leaf, "number": float("nan")})
    assert counts == {"leaf": 0, "number": 1}
    assert describe_nonfinite(counts, {"leaf": leaf, "number": float("nan")}) == "['number'] (1 of 1 values)"


def test_it_maps_over_seeds():
    counts = jax.vmap(count_nonfinite)({"w": jnp.array([[1.0, jnp.inf], [1.0, 1.0]])})
    assert counts["w"].tolist() == [1, 0]
    assert describe_nonfinite(counts) == "['w'] (1)"


def test_leaves_are_named_by_their_paths():
    counts = count_nonfinite(TREE)
    assert describe_nonfinite(counts) == "['dense'][0]['b'] (1), ['dense'][0]['w'] (3)"
    assert describe_nonfinite(counts, TREE) == ("['dense'][0]['b'] (1 of 2 values), ['dense'][0]['w'] (3 of 6 values)")
    assert describe_nonfinite(count_nonfinite({"w": jnp.ones(2)})) == ""


def test_only_the_first_leaves_are_named():
    counts = count_nonfinite([jnp.float32(np.nan)] * 8)
    assert describe_nonfinite(counts) == "[0] (1), [1] (1), [2] (1), [3] (1), [4] (1) and 3 more leaves"


def test_flags_name_leaves_too():
    assert describe_nonfinite({"w": jnp.array([False, True]), "b": jnp.array(False), "x": True}) == "['w'], ['x']"
