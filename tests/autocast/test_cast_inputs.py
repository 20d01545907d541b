"""`cast_inputs`: functions, such as kernels, that ask for a dtype inside autocast."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jaxprs import dtypes, equations
from kernel_ways import doubled_by_kernel

import jmp_amp as amp

X = np.linspace(-1, 2, 32, dtype=np.float32).reshape(4, 8)
W = np.linspace(-1, 2, 64, dtype=np.float32).reshape(8, 8)


doubled = jax.custom_vjp(doubled_by_kernel)  # a kernel that has a derivative of its own
doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (doubled(g),))


@amp.cast_inputs("bfloat16")
def kernel(x, *, flip=False):
    return {"y": doubled(x), "rows": x.shape[0] * (-1 if flip else 1)}


def model(x, w):
    out = kernel(x @ w)
    assert out["rows"] == 4
    return jnp.sum(jnp.tanh(out["y"]) @ w)


def test_outside_of_autocast_it_has_no_effect():
    assert dtypes(model, X, W, primitive="pallas_call") == ["float32 -> float32"]
    plain = lambda x, w: jnp.sum(jnp.tanh(2 * (x @ w)) @ w)  # noqa: E731
    for transform in (lambda f: f, jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f, argnums=1))):
        np.testing.assert_allclose(transform(model)(X, W), transform(plain)(X, W), rtol=1e-6)


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit])
def test_inside_the_function_runs_as_written_on_cast_inputs(jit):
    loss_fn = amp.autocast(jit(model))
    loss, grads = jax.value_and_grad(loss_fn, argnums=(0, 1))(X, W)
    assert dtypes(loss_fn, X, W, primitive="pallas_call") == ["bfloat16 -> bfloat16"]
    assert set(dtypes(jax.grad(loss_fn), X, W, primitive="pallas_call")) == {"bfloat16 -> bfloat16"}
    assert dtypes(loss_fn, X, W, primitive="tanh") == ["bfloat16 -> bfloat16"]  # what it returned
    np.testing.assert_allclose(loss, model(X, W), rtol=0.05)
    for got, expected in zip(grads, jax.grad(model, argnums=(0, 1))(X, W), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=0.03, atol=0.3)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: lambda x, w: lax.scan(lambda x, _: (f(x, w), None), x, None, length=2)[0],
        lambda f: jax.checkpoint(f),
        lambda f: lambda x, w: jax.vmap(f, (0, None))(x[:, None], w)[:, 0],
        lambda f: lambda x, w: lax.cond(x[0, 0] < 1, f, lambda x, w: x, x, w),
    ],
    ids=["scan", "checkpoint", "vmap", "cond"],
)
def test_composes(wrap):
    def layer(x, w):
        return kernel(x @ w)["y"].astype(jnp.float32)

    fun = amp.autocast(wrap(layer))
    grad = jax.grad(lambda x, w: jnp.sum(fun(x, w)), argnums=(0, 1))
    assert set(dtypes(grad, X, W, primitive="pallas_call")) == {"bfloat16 -> bfloat16"}
    np.testing.assert_allclose(fun(X, W), wrap(layer)(X, W), rtol=0.03, atol=0.3)
    assert [g.dtype for g in grad(X, W)] == [jnp.float32, jnp.float32]


def test_a_float32_region_leaves_it_as_it_is():
    def scoped(x, w):
        with jax.named_scope("inner"):
            return model(x, w)

    fun = amp.autocast(scoped, rules={"inner": "full"})
    assert dtypes(fun, X, W, primitive="cast_inputs") == ["float32 -> float32"]
    np.testing.assert_allclose(fun(X, W), model(X, W), atol=1e-5)


def test_a_function_that_refuses_float32_runs_inside_autocast_and_raises_its_error_outside():
    @amp.cast_inputs(jnp.float16)
    def attention(q, k, n):
        if q.dtype == jnp.float32:
            raise NotImplementedError("q must be float16")
        assert n.dtype == jnp.int32
        return q @ k.T

    def fun(q, k):
        return jnp.sum(attention(q, k, jnp.int32(1)).astype(jnp.float32))

    assert jnp.isfinite(jax.grad(amp.autocast(fun))(X, X)).all()
    with pytest.raises(NotImplementedError, match="q must be float16"):
        fun(X, X)
    with pytest.raises(NotImplementedError, match="q must be float16"):
        jax.jit(fun)(X, X)


def test_explain_shows_what_is_in_it():
    rows = amp.explain(model)(X, W).select(direction="forward", primitive="pallas_call").rows
    assert [(row.compute, row.output) for row in rows] == [("bfloat16", "bfloat16")]


def test_an_array_that_is_not_an_argument_is_named():
    def fun(x, w):
        return amp.cast_inputs("bfloat16")(lambda x: x @ w)(x)

    with pytest.raises(ValueError, match=r"not its argument, float32\[8,8\].*pass it as an argument"):
        amp.autocast(fun)(X, W)


def test_a_dtype_that_is_none():
    with pytest.raises(ValueError, match="`dtype` must be a floating dtype, got `int8`"):
        amp.cast_inputs("int8")


def test_first_nonfinite_enters_it():
    def fun(x):
        return jnp.sum(amp.cast_inputs("float16")(functools.partial(jnp.multiply, 1e3))(x).astype(jnp.float32))

    assert amp.debug.first_nonfinite(fun)(X * 1e3) is None
    found = amp.debug.first_nonfinite(amp.autocast(fun))(X * 1e3)
    assert (found.primitive, found.result.dtype) == ("mul", "float16")


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_cudnn_attention_reads_its_bias_in_the_dtype_of_the_query(low, cudnn):
    attention = amp.cast_inputs(low)(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"))

    def fun(bias, x):
        return jnp.sum(attention(x, x, x, bias))

    args = jnp.ones((1, 4, 32, 32)), jnp.ones((2, 32, 4, 64))
    with pytest.raises(NotImplementedError, match="Q must be"):
        fun(*args)
    grads = jax.grad(amp.autocast(fun, "bfloat16"), (0, 1))
    for direction in ("fwd", "bwd"):
        (eqn,) = [
            e for e in equations(grads, *args) if e.primitive.name == f"dot_product_attention_{direction}_wrapper"
        ]
        assert {atom.aval.dtype.name for atom in eqn.invars[:4]} == {low}  # query, key, value, bias
    assert [aval.dtype for aval in jax.eval_shape(grads, *args)] == [jnp.float32] * 2
    report = amp.explain(fun, "bfloat16")(*args)
    kernels = [f"dot_product_attention_{direction}_wrapper" for direction in ("bwd", "fwd")]
    assert report.summary()["kernels"] == kernels
    assert report.select(direction="forward", primitive=kernels[1]).rows[0].compute == low


# The note on an error that says that 16 bits are needed, and float32 was given


def takes_bfloat16(x):
    assert x.dtype == jnp.bfloat16, f"expected bf16, got {x.dtype}"
    return x


def takes_16_bits(x):
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        raise ValueError(f"fp16 and bf16 are supported, got {x.dtype}")
    return x


def writes_bfloat16(x):
    def write(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    return pl.pallas_call(write, jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), interpret=True)(x)


def mosaic_gpu_attention(x):
    pytest.importorskip("jax_cuda13_plugin", reason="needs JAX's CUDA plugin")
    gpu = pytest.importorskip("jax.experimental.pallas.ops.gpu.attention_mgpu", reason="needs JAX's attention")
    config = gpu.TuningConfig(block_q=64, block_kv=64, max_concurrent_steps=2)
    return gpu.attention(x, x, x, config)


def cudnn_attention(x):
    return jax.nn.dot_product_attention(x, x, x, implementation="cudnn")


Q = np.ones((1, 128, 4, 64), np.float32)
REFUSALS = {  # and the dtypes that the note may name
    takes_bfloat16: {"bfloat16"},
    takes_16_bits: {"float16", "bfloat16"},
    writes_bfloat16: {"bfloat16"},
    mosaic_gpu_attention: {"float16", "bfloat16"},  # as its message says; its buffers are float16
    cudnn_attention: {"float16", "bfloat16"},
}


def notes(fun, *args, dtype):
    with pytest.raises(Exception) as raised:
        amp.autocast(fun, dtype)(*args)
    return [note for note in getattr(raised.value, "__notes__", ()) if "cast_inputs" in note]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("takes", REFUSALS)
def test_the_error_of_a_function_that_takes_no_float32_shows_what_to_write(takes, dtype, cudnn, users_code):
    def fun(x):
        return jnp.sum(takes(2 * x).astype(jnp.float32))

    low = dtype if dtype in REFUSALS[takes] else min(REFUSALS[takes])
    (note,) = notes(amp.autocast(jax.jit(fun), dtype), Q, dtype=dtype)  # once, also under two autocasts
    assert f'`amp.cast_inputs("{low}")(kernel)(q, k, v)` in place of `kernel(q, k, v)`' in note
    if takes is mosaic_gpu_attention:
        low = "float16"
    takes_low = amp.cast_inputs(low)(takes)
    jax.eval_shape(amp.autocast(lambda x: jnp.sum(takes_low(2 * x).astype(jnp.float32)), dtype), Q)


def raises(error):
    def fun(x):
        raise error

    return fun


def takes_float32(x):
    assert x.dtype == jnp.float32
    assert x.ndim == 2, "wrong rank"
    return x


UNRELATED = {
    "shapes": lambda x: x @ jnp.ones((3, 5)),
    "rank": takes_float32,
    "a bool": lambda x: 1.0 if x[0, 0, 0, 0] > 0 else x,
    "a name": raises(KeyError("bfloat16_weights")),
    "a file": raises(FileNotFoundError("weights.bf16, got none")),
    "wants float32": raises(TypeError("expected float32, got float16")),
    "says no 16 bits": raises(RuntimeError("no kernel for this type, got float32")),
    "refuses a cast by hand": lambda x: takes_float32(x.astype(jnp.bfloat16)),
    "a carry": lambda x: lax.scan(lambda c, _: ((2 * c).astype(jnp.bfloat16), None), x, length=2),
    "operands": lambda x: lax.add(x, x.astype(jnp.bfloat16)),
    "closed over": lambda x: amp.cast_inputs("bfloat16")(lambda: 2 * x)(),
    "a Pallas kernel": lambda x: pl.pallas_call(lambda x_ref: None, jax.ShapeDtypeStruct((2,), x.dtype))(x),
}


@pytest.mark.parametrize("name", UNRELATED)
def test_other_errors_get_no_note(name):
    assert notes(UNRELATED[name], Q, dtype="bfloat16") == []


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_function_that_raises_is_called_once_under_any_number_of_autocasts(n):
    calls = []

    def fun(x):
        calls.append(x.dtype)
        raise ValueError("Q must be fp16 or bf16, got float32" if n == 3 else "no such layer")

    nested = fun
    for _ in range(n):
        nested = amp.autocast(nested, "bfloat16")
    assert len(notes(nested, X, dtype="float16")) == (n == 3)
    assert calls == [jnp.float32]
