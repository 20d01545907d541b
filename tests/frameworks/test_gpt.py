"""A whole model: which of its parts run in which dtype, forward and backward, scanned and unrolled."""

import functools

import gpt
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import row, scoped_equations

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

SCALE = 2.0**10
TOKENS = jax.random.randint(jax.random.key(1), (2, gpt.CONTEXT + 1), 0, gpt.VOCAB)


@pytest.fixture(scope="module")
def params():
    return initial()


@functools.cache
def initial():
    return jax.jit(gpt.init)(jax.random.key(0))


def rows(fun, params, scope):
    """`(primitive, row)` of the floating equations in a scope, calls and casts aside."""
    return [
        (eqn.primitive.name, row(eqn))
        for where, eqn in scoped_equations(fun, params, TOKENS)
        if scope in where
        and not any(hasattr(p, "eqns") for p in eqn.params.values())
        and eqn.primitive.name != "convert_element_type"
        and any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars)
    ]


@pytest.fixture(params=[True, False], ids=["scan", "unrolled"])
def loss(request):
    return functools.partial(gpt.loss, scan=request.param)


@pytest.mark.sweep(4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_product_is_low_precision_forward_and_backward(loss, params, dtype):
    forward = amp.autocast(loss, dtype)
    low = f"{dtype} {dtype} -> {dtype}"
    for fun in (forward, jax.grad(forward)):
        products = [r for name, r in rows(fun, params, "") if name == "dot_general"]
        assert len(products) >= 7
        assert set(products) == {low}


def test_a_bias_widens_no_layer_and_what_joins_the_float32_stream_is_not_rounded(loss, params):
    layers = 1 if loss.keywords["scan"] else gpt.LAYERS
    added = [r for name, r in rows(amp.autocast(loss), params, "dense") if name == "add"]
    # `qkv` and `up`; then `proj` and `down`.
    assert sorted(added) == ["float16 float16 -> float16"] * 2 * layers + ["float32 float32 -> float32"] * 2 * layers


@pytest.mark.parametrize("scope", ["norm", "softmax", "loss"])
def test_norms_softmax_and_loss_are_float32(loss, params, scope):
    # The last axis is moved or picked in the dtype it has; what is computed is computed in float32.
    moves = {"gather", "broadcast_in_dim", "reshape", "squeeze"}
    computed = [(name, r) for name, r in rows(amp.autocast(loss), params, scope) if name not in moves]
    assert len(computed) >= 5
    assert [entry for entry in computed if "float16" in entry[1]] == []


def test_gelu_rounds_each_result_to_low_precision(loss, params):
    found = [eqn for where, eqn in scoped_equations(amp.autocast(loss), params, TOKENS) if "gelu" in where]
    computed = [eqn for eqn in found if eqn.primitive.name not in ("convert_element_type", "jit")]
    wide = {eqn.outvars[0] for eqn in computed if eqn.outvars[0].aval.dtype == jnp.float32}  # with 0.044715, and others
    casts = [eqn for eqn in found if eqn.primitive.name == "convert_element_type"]
    assert 0 < len(wide) < len(computed)
    assert wide == {eqn.invars[0] for eqn in casts if eqn.outvars[0].aval.dtype == jnp.float16}


@functools.cache
def value_and_grads(scan, dtype, **options):
    """Of the model, under autocast where a dtype is given; one program for all that is asked of it."""
    loss = functools.partial(gpt.loss, scan=scan)
    if dtype is None:
        return jax.jit(jax.value_and_grad(loss))(initial(), TOKENS)
    value, grads = jax.jit(amp.value_and_grad(amp.autocast(loss, dtype, **options), loss_scale=SCALE))(
        initial(), TOKENS
    )
    return value, jax.tree.map(lambda g: g / SCALE, grads)


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["scan", "unrolled"])
@pytest.mark.sweep(4)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float16", 1e-2), pytest.param("bfloat16", 5e-2, marks=pytest.mark.slow)]
)
def test_loss_and_gradients_are_close_to_float32_and_have_its_dtype(scan, dtype, tolerance):
    exact, exact_grads = value_and_grads(scan, None)
    value, grads = value_and_grads(scan, dtype)
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, exact, rtol=1e-3)
    for path, grad in jax.tree.leaves_with_path(grads):
        want = functools.reduce(lambda tree, key: tree[key.key], path, exact_grads)
        assert grad.dtype == jnp.float32
        assert np.linalg.norm(grad - want) < tolerance * np.linalg.norm(want), jax.tree_util.keystr(path)


@pytest.mark.parametrize("other", [{"scan": False}, {"scan": True, "save": "all"}], ids=["unrolled", "saved"])
@pytest.mark.sweep(2)
def test_gradients_are_the_same_unrolled_and_with_all_saved(other):
    (_, grads), (_, others) = value_and_grads(True, "float16"), value_and_grads(dtype="float16", **other)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
