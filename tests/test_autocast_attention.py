"""Softmax and attention, by hand and of the libraries, under every way to write a mask."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import row, scoped_equations

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

PRODUCTS = {"dot_general", "conv_general_dilated"}
FULL = {"exp", "exp2", "expm1", "log", "log1p", "rsqrt", "pow", "cumsum", "reduce_sum"}
TOLERANCE = {"float16": 2e-2, "bfloat16": 6e-2}

# Compiling takes most of the time: `run` is for what is compiled here, the fixture for what libraries compile.
QUICK = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    QUICK["xla_cpu_use_fusion_emitters"] = False


def run(fun, *args):
    """Evaluates `fun` as one program."""
    return jax.jit(fun).lower(*args).compile(compiler_options=QUICK)(*args)


@pytest.fixture(scope="module")
def quick_compile():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def check(fun, *args, dtype="float16", transform=jax.value_and_grad, **options):
    """Runs `fun`, which returns a loss and what else it computes, and its gradient, with and without autocast.

    They must agree, and be finite wherever float32 is; products must be low precision, exponentials and sums float32.
    Returns the autocast program: scope, primitive and dtypes of each equation that computes floating values.
    """
    leaves, tree = jax.tree.flatten(args)
    is_array = [isinstance(x, jax.Array) for x in leaves]

    def of_arrays(transformed, *arrays):
        it = iter(arrays)
        return transformed(
            *jax.tree.unflatten(tree, [next(it) if a else x for x, a in zip(leaves, is_array, strict=True)])
        )

    scale = 2.0**10
    arrays = [x for x, a in zip(leaves, is_array, strict=True) if a]
    exact = transform(fun, has_aux=True)
    scaled = amp.value_and_grad(
        amp.autocast(fun, dtype, **options), has_aux=True, loss_scale=scale, transform=transform
    )

    def unscaled(*args):
        value, grads = scaled(*args)
        return value, jax.tree.map(lambda g: g / scale, grads)

    exact, low = (jax.jit(functools.partial(of_arrays, f)) for f in (exact, unscaled))
    want, want_grads = run(exact, *arrays)
    got, grads = run(low, *arrays)
    assert_close(got, want, dtype)
    assert_close(grads, want_grads, dtype)
    program = [
        (scope, eqn.primitive.name, row(eqn))
        for scope, eqn in scoped_equations(low, *arrays)
        if not any(hasattr(p, "eqns") for p in eqn.params.values())
        and any(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in eqn.outvars)
        and not (eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.size == eqn.outvars[0].aval.size)
    ]
    assert_classes(program, dtype)
    return program


def assert_close(got, want, dtype="float16"):
    """The leaves have the same shapes and dtypes, and differ little for the size of the leaf, or of the largest one."""
    got, want = named_arrays(got), named_arrays(want)
    assert [(name, x.shape, x.dtype) for name, x in got] == [(name, x.shape, x.dtype) for name, x in want]
    floating = [x for _, x in want if np.issubdtype(x.dtype, np.floating)]
    largest = max((np.linalg.norm(x[np.isfinite(x)]) for x in floating), default=0)
    for (name, x), (_, y) in zip(want, got, strict=True):
        if np.issubdtype(x.dtype, np.floating):
            x, y = x[np.isfinite(x)], y[np.isfinite(x)]
            assert np.isfinite(y).all(), name
            assert np.linalg.norm(x - y) <= TOLERANCE[dtype] * max(np.linalg.norm(x), 1e-2 * largest), name
        else:
            np.testing.assert_array_equal(x, y, name)


def named_arrays(tree):
    """The leaves as NumPy arrays, with their paths; no program is compiled for it."""
    leaves = [(jax.tree_util.keystr(path), x) for path, x in jax.tree.leaves_with_path(tree)]
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for _, x in leaves]
    return [
        (name, np.asarray(jax.random.key_data(x) if key else x)) for (name, x), key in zip(leaves, is_key, strict=True)
    ]


def assert_classes(program, dtype="float16"):
    products = {r for _, name, r in program if name in PRODUCTS}
    assert products == {f"{dtype} {dtype} -> {dtype}"}
    assert [entry for entry in program if entry[1] in FULL and dtype in entry[2]] == []


def rows(program, primitive, scope=""):
    """The dtypes of a primitive's equations in a scope, its backward pass included; never empty."""
    found = {r for where, name, r in program if name == primitive and scope in where}
    assert found, f"no {primitive} in {scope}"
    return found


KEYS = jax.random.split(jax.random.key(0), 4)
X = jax.random.normal(KEYS[0], (2, 6, 8))
WEIGHTS = {name: jax.random.normal(key, (8, 8)) / 2 for name, key in zip("qkv", KEYS[1:], strict=True)}
CAUSAL = jnp.tril(jnp.ones((6, 6), bool))
EMPTY_ROW = CAUSAL.at[2].set(False)
LOWEST = jnp.finfo(jnp.float32).min

MASKS = {
    "where -1e9": lambda s, mask: jnp.where(mask, s, -1e9),
    "where lowest": lambda s, mask: jnp.where(mask, s, LOWEST),
    "where -inf": lambda s, mask: jnp.where(mask, s, -jnp.inf),
    "add -1e9": lambda s, mask: s + (1.0 - mask) * -1e9,
    "add lowest": lambda s, mask: s + jnp.where(mask, 0.0, LOWEST),
    "add -inf": lambda s, mask: s + jnp.where(mask, 0.0, -jnp.inf),
}


def softmax_by_hand(s):
    e = jnp.exp(s - jnp.max(s, -1, keepdims=True))
    return e / jnp.sum(e, -1, keepdims=True)


SOFTMAX = {
    "by hand": softmax_by_hand,
    "unshifted": lambda s: jnp.exp(s) / jnp.sum(jnp.exp(s), -1, keepdims=True),
    "softmax": jax.nn.softmax,
    "log_softmax": lambda s: jnp.exp(jax.nn.log_softmax(s)),
    "logsumexp": lambda s: jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)),
}


@pytest.mark.parametrize(
    ("softmax", "dtype"),
    [*((name, "float16") for name in SOFTMAX), ("softmax", "bfloat16")],
)
def test_softmax_attention_is_close_to_float32_and_never_nan_under_any_mask(softmax, dtype):
    def loss(weights, x):
        outs = {}
        for name, masked in MASKS.items():
            q, k, v = (x @ weights[name][w] for w in "qkv")
            # A row of nothing but -inf is NaN in float32 already.
            scores = masked(q @ k.mT / jnp.sqrt(8.0), CAUSAL if "inf" in name else EMPTY_ROW)
            outs[name] = SOFTMAX[softmax](scores) @ v
        return sum(jnp.mean(out**2) for out in outs.values()), outs

    program = check(loss, dict.fromkeys(MASKS, WEIGHTS), X, dtype=dtype)
    for primitive in ("exp", "div", "sub", "reduce_max") if softmax == "by hand" else ("exp",):
        assert [r for r in rows(program, primitive) if dtype in r] == []


def jax_functions():
    attend = jax.nn.dot_product_attention
    return {
        "mask": lambda *qkv: attend(*qkv, mask=EMPTY_ROW[None, None]),
        "bias": lambda *qkv: attend(*qkv, bias=jnp.where(EMPTY_ROW, 0.0, -1e9)[None, None]),
        "is_causal": lambda *qkv: attend(*qkv, is_causal=True),
    }


def linen_functions():
    attend = pytest.importorskip("flax.linen", reason="needs Flax").dot_product_attention
    return {
        "mask": lambda *qkv: attend(*qkv, mask=EMPTY_ROW[None, None]),
        "bias": lambda *qkv: attend(*qkv, bias=jnp.where(EMPTY_ROW, 0.0, -1e9)[None, None]),
    }


def nnx_functions():
    attend = pytest.importorskip("flax.nnx", reason="needs Flax").dot_product_attention
    return {
        "mask": lambda *qkv: attend(*qkv, mask=EMPTY_ROW[None, None]),
        "is_causal": lambda *qkv: attend(*qkv, is_causal=True),
    }


@pytest.mark.parametrize(
    ("functions", "dtype"),
    [
        (jax_functions, "float16"),
        (jax_functions, "bfloat16"),
        (linen_functions, "float16"),
        (nnx_functions, "float16"),
    ],
)
def test_attention_function_is_close_to_float32_and_never_nan(functions, dtype):
    attends = functions()

    def loss(weights, x):
        outs = {
            name: attend(*((x @ weights[name][w]).reshape(2, 6, 2, 4) for w in "qkv"))
            for name, attend in attends.items()
        }
        return sum(jnp.mean(out**2) for out in outs.values()), outs

    check(loss, dict.fromkeys(attends, WEIGHTS), X, dtype=dtype)


def linen_layer():
    nn = pytest.importorskip("flax.linen", reason="needs Flax")
    layer = nn.MultiHeadDotProductAttention(2)
    params = run(layer.init, KEYS[0], X)
    return params, lambda params, x: layer.apply(params, x, mask=EMPTY_ROW[None, None])


def nnx_layer():
    nnx = pytest.importorskip("flax.nnx", reason="needs Flax")
    layer = nnx.MultiHeadAttention(2, 8, decode=False, rngs=nnx.Rngs(0))
    graph, params = nnx.split(layer)
    return params, lambda params, x: nnx.merge(graph, params)(x, mask=EMPTY_ROW[None, None])


def equinox_layer():
    eqx = pytest.importorskip("equinox", reason="needs Equinox")
    biases = {f"use_{name}_bias": True for name in ("query", "key", "value", "output")}
    params, static = eqx.partition(eqx.nn.MultiheadAttention(2, 8, **biases, key=KEYS[0]), eqx.is_array)
    return params, lambda params, x: jax.vmap(lambda x: eqx.combine(params, static)(x, x, x, mask=EMPTY_ROW))(x)


def haiku_layer():
    hk = pytest.importorskip("haiku", reason="needs Haiku")

    def attend(x):
        layer = hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(1.0))
        return layer(x, x, x, mask=EMPTY_ROW[None, None])

    layer = hk.without_apply_rng(hk.transform(attend))
    return run(layer.init, KEYS[0], X), layer.apply


@pytest.mark.parametrize(
    ("layer", "dtype"),
    [
        (linen_layer, "float16"),
        (linen_layer, "bfloat16"),
        (nnx_layer, "float16"),
        (equinox_layer, "float16"),
        (haiku_layer, "float16"),
    ],
)
def test_attention_layer_is_close_to_float32_and_never_nan(layer, dtype):
    params, apply = layer()

    def loss(params, x):
        out = apply(params, x)
        return jnp.mean(out**2), out

    check(loss, params, X, dtype=dtype)
