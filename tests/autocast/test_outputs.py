"""What a function returns: every array of it is a `jax.Array` of its dtype in its place, everything else as it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jmp_amp as amp

X, W = jnp.ones((2, 4)), jnp.eye(4)

# What a function may return beside a product, made in it from its argument.
LEAVES = {
    "product": lambda x: x @ W,
    "argument": lambda x: x,
    "element": lambda x: x[0, 0],
    "boolean": lambda x: jnp.array(False),
    "int32": lambda x: jnp.int32(3),
    "int8": lambda x: jnp.int8(3),
    "float32": lambda x: jnp.float32(2),
    "bfloat16": lambda x: jnp.bfloat16(1),
    "complex64": lambda x: jnp.complex64(1j),
    "weak int": lambda x: jnp.asarray(3),
    "weak float": lambda x: jnp.asarray(2.0),
    "weak result": lambda x: jnp.asarray(2.0) * 3,
    "weak array": lambda x: jnp.broadcast_to(jnp.asarray(2.0), (2, 4)),
    "constant": lambda x: jnp.arange(3),
    "closed-over array": lambda x: W,
    "numpy array": lambda x: np.ones(2, np.float32),
    "numpy float64": lambda x: np.ones(3),
    "numpy boolean": lambda x: np.array(True),
    "key": lambda x: jax.random.key(0),
    "empty": lambda x: jnp.zeros((0, 3), jnp.float16),
    "scalar of a branch": lambda x: jax.lax.cond(x[0, 0] > 0, lambda: jnp.array(True), lambda: jnp.array(False)),
    "scalar of a call": lambda x: jax.jit(lambda x: (jnp.array(True), x @ W))(x)[0],
    "python number": lambda x: 3,
    "numpy scalar": lambda x: np.float32(2),
    "string": lambda x: "name",
    "none": lambda x: None,
}
WAYS = {
    "eager": lambda fun: amp.autocast(fun)(X),
    "numpy": lambda fun: amp.autocast(fun)(np.asarray(X)),
    "jit": lambda fun: jax.jit(amp.autocast(fun))(X),
    "jit inside": lambda fun: amp.autocast(jax.jit(fun))(X),
    "disabled jit": lambda fun: _without_jit(amp.autocast(fun)),
}
STATIC = {"python number", "numpy scalar", "string", "none"}  # what `jit` would make an array of, or refuse


def _without_jit(fun):
    with jax.disable_jit():
        return fun(X)


def described(x):
    if isinstance(x, jax.Array):
        return jax.typeof(x).str_short(), getattr(x, "weak_type", False)  # keys have none
    return type(x), x


@pytest.mark.sweep(6)
@pytest.mark.parametrize("name", sorted(set(LEAVES) - STATIC))
def test_an_array_is_returned_as_an_array_of_its_type(name):
    def fun(x):
        return x @ W, LEAVES[name](x)

    want = jax.jit(fun)(X)[1]
    for way in WAYS:
        got = WAYS[way](fun)[1]
        assert isinstance(got, jax.Array), way
        assert described(got) == described(want), way
        assert jnp.array_equal(got, want), way


@pytest.mark.parametrize("name", sorted(STATIC))
def test_what_is_no_array_is_returned_as_it_is(name):
    got, want = (f(X)[1] for f in (amp.autocast(lambda x: (x @ W, LEAVES[name](x))), lambda x: (x, LEAVES[name](x))))
    assert type(got) is type(want)
    assert got == want


trees = st.recursive(
    st.sampled_from(sorted(LEAVES)),
    lambda sub: st.lists(sub, max_size=3) | st.tuples(sub, sub) | st.dictionaries(st.sampled_from("abc"), sub),
    max_leaves=6,
)


@settings(max_examples=30)
@given(trees)
def test_every_output_tree_keeps_its_structure_and_its_types(tree):
    def fun(x):
        return jax.tree.map(lambda name: LEAVES[name](x), tree)

    got, plain = amp.autocast(fun)(X), fun(X)
    assert jax.tree.structure(got) == jax.tree.structure(plain)
    for x, want in zip(jax.tree.leaves(got), jax.tree.leaves(plain), strict=True):
        assert described(x) == described(jnp.asarray(want) if isinstance(want, np.ndarray) else want)


@pytest.mark.parametrize("name", ["float32", "weak float", "weak result", "weak int", "numpy float64", "constant"])
def test_types_are_kept_where_64_bits_are_enabled(name):
    with jax.enable_x64(True):
        got, want = amp.autocast(lambda x: (x @ W, LEAVES[name](x)))(X)[1], jax.jit(LEAVES[name])(X)
        assert described(got) == described(want)
