"""Softmax and attention, by hand and of the libraries, under every way to write a mask."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from agreement import check, rows
from jaxprs import equations, row

import jmp_amp as amp

pytestmark = pytest.mark.usefixtures("users_code")

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


@pytest.mark.sweep(4)
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
    params = jax.jit(layer.init)(KEYS[0], X)
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
    return jax.jit(layer.init)(KEYS[0], X), layer.apply


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


LOW, WIDE = "bfloat16 bfloat16 -> bfloat16", "float32 float32 -> float32"
SCALED = {
    "divided": (lambda s: s / 8, LOW),
    "multiplied": (lambda s: s * -0.25, LOW),
    "multiplied from the left": (lambda s: 2 * s, LOW),
    "transposed": (lambda s: s.mT / 8, LOW),
    "by another number": (lambda s: s / 6, WIDE),
    "inverse": (lambda s: 8 / s, WIDE),
    "with a bias": (lambda s: (s + X[0, 0, :6]) / 8, WIDE),
    "squashed": (lambda s: jnp.tanh(s) / 8, WIDE),
}


def of_scores(scaled):
    return lambda x, w: softmax_by_hand(scaled(jnp.einsum("bqd,bkd->bqk", x @ w, x)))


def scaling(fun):
    """The first equation that multiplies or divides."""
    return next(e for e in equations(fun, X, WEIGHTS["q"]) if e.primitive.name in ("mul", "div"))


@pytest.mark.parametrize("name", SCALED)
def test_scores_times_a_power_of_two_stay_bfloat16_which_is_exact(name):
    scaled, dtypes = SCALED[name]
    low = amp.autocast(of_scores(scaled), "bfloat16")
    assert row(scaling(low)) == dtypes

    def widened(s):
        with amp.full_precision():
            return scaled(s)

    assert jnp.array_equal(low(X, WEIGHTS["q"]), amp.autocast(of_scores(widened), "bfloat16")(X, WEIGHTS["q"]))


def test_scores_times_a_power_of_two_are_float32_in_place_of_float16():  # which may overflow or underflow
    assert row(scaling(amp.autocast(of_scores(lambda s: s / 8), "float16"))) == WIDE


# The kernels that the docs show

DOCS = pathlib.Path(__file__).parents[2] / "docs/custom-rules.md"
KERNELS = {
    "cudnn_attention": ["dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"],
    "gpu_attention": ["pallas_call"],
    "flash_attention": ["pallas_call"],
    "splash_attention": ["pallas_call"],
}
QKV = {name: jax.ShapeDtypeStruct((512, 512), jnp.float32) for name in "qkv"}
ARGS = QKV, jax.ShapeDtypeStruct((2, 256, 512), jnp.float32)


def gradients_through(name):
    """The gradients of a float32 model under autocast, with a kernel of the page."""
    (block,) = (b for b in re.findall(r"^```python\n(.*?)^```", DOCS.read_text(), re.M | re.S) if name in b)
    shown = {"jax": jax, "jnp": jnp, "amp": amp}
    exec(block, shown)

    def loss_fn(params, x):
        out = shown[name](*((x @ params[each]).reshape(2, 256, 4, 128) for each in "qkv"))
        return jnp.mean(out.astype(jnp.float32) ** 2)

    return jax.grad(amp.autocast(loss_fn, "bfloat16"), (0, 1))


# The newest JAX names other libraries for Pallas kernels by Triton.
shown = pytest.mark.filterwarnings(
    "ignore:.*(ops.gpu.attention|Pallas Triton backend) is deprecated:DeprecationWarning"
)


@shown
@pytest.mark.parametrize("name", KERNELS)
def test_both_passes_of_a_kernel_that_the_docs_show_read_bfloat16(name, cudnn):
    gradients = gradients_through(name)
    kernels = [eqn for eqn in equations(gradients, *ARGS) if eqn.primitive.name in KERNELS[name]]
    assert len(kernels) >= 2  # of the forward and of the backward pass
    read = [[atom.aval.dtype.name for atom in eqn.invars].count("bfloat16") for eqn in kernels]
    assert min(read) >= 2  # one sums the result and its cotangent over rows; sums are float32
    assert max(read) >= 4  # query, key, value and the cotangent
    assert {x.dtype.name for x in jax.tree.leaves(jax.eval_shape(gradients, *ARGS))} == {"float32"}


@shown
@pytest.mark.aot
@pytest.mark.parametrize("name", ["cudnn_attention", "gpu_attention"])
def test_a_kernel_that_the_docs_show_compiles_for_an_h200(name, cudnn):
    import gpu_aot

    program = gpu_aot.compile_for(gradients_through(name), *gpu_aot.struct(gpu_aot.h200_mesh(), ARGS)).as_text()
    assert program.count("__cudnn$fmha" if name == "cudnn_attention" else "__gpu$xla.gpu.triton") >= 2


@pytest.mark.parametrize("name", ["flash_attention", "splash_attention"])
def test_a_kernel_that_the_docs_show_lowers_for_a_tpu(name):
    program = jax.jit(gradients_through(name)).trace(*ARGS).lower(lowering_platforms=("tpu",)).as_text()
    assert program.count("tpu_custom_call") >= 3
