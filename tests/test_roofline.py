"""Bounds of products, compared with what a hand computes from FLOPs, bytes and rates."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp._formats import FORMATS, Float8, Format
from jmp_amp.debug._roofline import DEVICES

N = 16
FLOPS, SIZE = 2 * N**3, N * N  # of one product, in elements of each matrix
PEAKS = amp.debug.Peaks(memory=2.0, float32=1, float16=2, bfloat16=2, float8=4)
SLOW_MEMORY = PEAKS._replace(memory=0.01)
FLOAT8 = {"dtype": "float8", "rules": {"layer": "float8"}}  # at any size


def array(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


X = W = array(N, N)


def layer(w, x):
    with jax.named_scope("layer"):
        return x @ w


def hidden(w, x):
    """A layer whose input another op computes, so that it is 16-bit."""
    return layer(w, jnp.tanh(x))


def bounds(report, device=PEAKS):
    """Returns the bounds in 1e-12 seconds: in the base, in the format, and of its casts."""
    return [(1e12 * b.base_seconds, 1e12 * b.seconds, 1e12 * b.cast_seconds) for b in report.roofline(device).bounds]


def test_float8_reads_operands_twice_to_cast_them_and_keeps_residuals():
    report = amp.explain(hidden, **FLOAT8)(W, X)
    assert [b.site.compute for b in report.roofline(PEAKS).bounds] == [
        "float8_e4m3fn",
        "float8_e4m3fn float8_e5m2",  # of the weight; it reads the cotangent first
        "float8_e5m2 float8_e4m3fn",
    ]
    x, w, cotangent = (SIZE * (2 * width + 1) / 2 for width in (2, 4, 2))
    low, high = FLOPS / 4, FLOPS / 2
    np.testing.assert_allclose(
        bounds(report),
        [(high + SIZE * (4 + 2) / 2, low + x + w, x + w), (high, low + cotangent, cotangent), (high, low, 0)],
    )
    roofline = report.roofline(PEAKS)
    assert roofline.speedup == pytest.approx((3 * high + 3 * SIZE) / (3 * low + x + w + cotangent))


def test_memory_bounds_products_of_few_flops():
    (forward, *_) = amp.explain(hidden, **FLOAT8)(W, X).roofline(SLOW_MEMORY).bounds
    in_bfloat16, in_float8 = SIZE * (2 + 2 + 2), SIZE * (1 + 1 + 2)
    assert 1e12 * 0.01 * (forward.seconds - forward.cast_seconds) == pytest.approx(in_float8)
    assert 1e12 * 0.01 * forward.base_seconds == pytest.approx(in_bfloat16 + SIZE * (4 + 2))


def test_an_array_is_cast_once_for_the_products_of_a_pass_and_again_in_another_call():
    def two(v, w, x):
        x = jnp.tanh(x)
        return layer(v, x) * layer(w, x)

    forward = amp.explain(two, **FLOAT8)(W, W, X).select(direction="forward")
    first, second = (casts for *_, casts in bounds(forward))
    assert (first - second, second) == pytest.approx((SIZE * 5 / 2, SIZE * 9 / 2))
    jitted = jax.jit(layer)  # its jaxpr, and so its variables, are the same in each call
    calls = amp.explain(lambda v, w, x: jitted(v, jnp.tanh(jitted(w, jnp.tanh(x)))), **FLOAT8)(W, W, X)
    assert [casts for *_, casts in bounds(calls.select(direction="forward"))] == pytest.approx([SIZE * (5 + 9) / 2] * 2)


def test_loops_count_as_often_as_they_run():
    def scanned(ws, x):
        return lax.scan(lambda x, w: (hidden(w, x), None), x, ws)[0]

    once, many = (amp.explain(scanned, **FLOAT8)(array(n, N, N), X) for n in (1, 5))
    for peaks in (PEAKS, SLOW_MEMORY):
        np.testing.assert_allclose(np.sum(bounds(many, peaks), axis=0), 5 * np.sum(bounds(once, peaks), axis=0))


def test_blocks_are_cast_in_one_read_for_each_product(monkeypatch):
    class InBlocks(Float8):
        blocks = True

    blocks = InBlocks(cotangents=jnp.dtype("float8_e4m3fn"), min_rows=0, min_size=0, min_weight=0)
    report = amp.explain(hidden, **FLOAT8)(W, X)
    monkeypatch.setitem(FORMATS, "float8", Format("float8", jnp.dtype("bfloat16"), blocks))
    width = 1 + 1 / 32  # with the scale of a block
    forward, weight, _ = bounds(report, PEAKS._replace(mxfp8=4))
    assert forward[2] == pytest.approx(SIZE * (2 + 4 + 2 * width) / 2)
    assert weight[2] == pytest.approx(SIZE * (2 + 2 + 2 * width) / 2)
    slow = report.roofline(SLOW_MEMORY._replace(mxfp8=4)).bounds[0]
    assert 1e12 * 0.01 * (slow.seconds - slow.cast_seconds) == pytest.approx(SIZE * (2 * width + 2))
    assert report.roofline("H200").speedup == 1 < report.roofline(PEAKS._replace(mxfp8=400)).speedup  # without units


def test_sixteen_bits_are_compared_with_float32():
    report = amp.explain(hidden, "float16")(W, X)
    assert (report.roofline(PEAKS).base, report.roofline(PEAKS).dtype) == ("float32", "float16")
    casts = SIZE * (4 + 2) / 2  # of the weight alone: `tanh` casts its result
    np.testing.assert_allclose(
        bounds(report), [(FLOPS, FLOPS / 2 + casts, casts), (FLOPS, FLOPS / 2, 0), (FLOPS, FLOPS / 2, 0)]
    )
    forward = report.roofline(SLOW_MEMORY).bounds[0]
    assert 1e12 * 0.01 * forward.base_seconds == pytest.approx(SIZE * 4 * 3)
    assert 1e12 * 0.01 * (forward.seconds - forward.cast_seconds) == pytest.approx(SIZE * 2 * 3)


def test_arguments_are_cast_apart():
    assert bounds(amp.explain(layer, "float16")(W, X))[0][2] == pytest.approx(2 * SIZE * (4 + 2) / 2)


def test_products_that_the_format_leaves_alone_are_no_faster():
    def fun(w, x):
        with amp.full_precision():
            return x @ w

    assert all(base == seconds for base, seconds, _ in bounds(amp.explain(fun, "float16")(W, X)))
    traced = amp.explain(lambda w, x: x @ w, "float16")(array(N, N, dtype="float16"), array(N, N, dtype="float16"))
    assert traced.roofline(PEAKS).bounds[0].base_seconds == traced.roofline(PEAKS).bounds[0].seconds
    assert amp.explain(jnp.exp, "float16")(X).roofline(PEAKS).speedup == 1


def test_without_float8_units_products_run_in_the_base():
    roofline = amp.explain(layer, **FLOAT8)(W, X).roofline("A100")
    assert roofline.seconds == roofline.base_seconds
    assert "no float8 units" in str(roofline)


def test_float8_pays_from_about_two_thousand_on():
    gains = []
    for width in (768, 1024, 2048, 4096):
        report = amp.explain(hidden, **FLOAT8)(array(width, width), array(8192, width))
        gains.append(report.roofline("H100").speedup)
    assert gains == pytest.approx([0.82, 1.0, 1.3, 1.54], abs=0.01)


def block(params, x, heads, kv_heads):
    """A block of a transformer, with a gate if `params` has one."""
    batch, length = x.shape[:2]
    h = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True))
    q, k, v = (
        (h @ params[name]).reshape(batch, length, n, -1) for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
    )
    k, v = (jnp.repeat(each, heads // kv_heads, axis=2) for each in (k, v))
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ params["o"]
    h = x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True))
    up = jax.nn.silu(h @ params["gate"]) * (h @ params["up"]) if "gate" in params else jax.nn.gelu(h @ params["up"])
    return jnp.mean(x + up @ params["down"])


@pytest.mark.parametrize(
    ("sizes", "gain"),  # as docs/float8.md has them
    [((768, 12, 12, 3072), 1.02), ((2048, 16, 16, 8192), 1.34), ((4096, 32, 8, 14336), 1.54)],
    ids=["GPT-2 small", "1.3B", "Llama-8B"],
)
def test_a_block_of_a_transformer_gains_less_than_its_weights(sizes, gain):
    width, heads, kv_heads, inner = sizes
    kv_width = width // heads * kv_heads
    params = {"q": (width, width), "k": (width, kv_width), "v": (width, kv_width), "o": (width, width)}
    params |= {"up": (width, inner), "down": (inner, width)} | ({"gate": (width, inner)} if kv_heads < heads else {})
    params = {name: array(*shape) for name, shape in params.items()}

    def loss_fn(params, x):
        with jax.named_scope("layer"):
            return block(params, x, heads, kv_heads)

    roofline = amp.explain(loss_fn, **FLOAT8)(params, array(8, 1024, width)).roofline("H100")
    assert roofline.speedup == pytest.approx(gain, abs=0.01)


def test_an_unknown_device_and_a_format_of_32_bits_are_errors():
    report = amp.explain(layer, "float16")(W, X)
    with pytest.raises(ValueError, match=r"must be one of T4, .*, TPU7x, got 'H900'; .*`amp\.debug\.Peaks\(memory="):
        report.roofline("H900")
    with pytest.raises(ValueError, match="of less than 32 bits with its base, got a report in float32"):
        amp.explain(layer, "float32")(W, X).roofline("H100")


def deep(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"<layer_{i}>"):
            x = jnp.tanh(x @ w)
    return x


def test_it_is_printed_as_a_bound_and_layers_share_lines():
    text = str(amp.explain(deep, "float16")([W] * 3, X).roofline("T4"))
    heading, _, columns, *lines = text.splitlines()
    assert heading.startswith("Roofline bounds, not measurements: T4 at 0.32 TB/s, 8.1 TFLOP/s in float32, 65 TFLOP/s")
    assert heading.endswith("Products and the casts of their operands only.")
    assert re.split("  +", columns)[-4:] == ["float32 us", "float16 us", "casts us", "x"]
    assert [line.split()[:7] for line in lines[:-1]] == [
        ["16x16", "@", "16x16", "float16", "<layer_*>", direction, str(runs)]
        for direction, runs in (("forward", 3), ("backward", 6))
    ]
    assert re.fullmatch(r"sum +9( +[\d.]+){4}", lines[-1])


def test_a_notebook_shows_a_table():
    page = amp.explain(deep, "float16")([W] * 3, X).roofline("T4")._repr_html_()
    assert page.startswith("<p>Roofline bounds, not measurements")
    assert page.count("<tr>") == page.count("</tr>") == 4
    assert "<td>&lt;layer_*&gt;</td>" in page


@pytest.mark.parametrize("name", DEVICES)
def test_rates_of_a_device_are_dense(name):
    peaks = DEVICES[name]
    assert peaks.float32 <= peaks.bfloat16 <= peaks.float16
    assert not peaks.float8 or peaks.float8 == pytest.approx(2 * peaks.bfloat16, rel=0.01)
    assert peaks.mxfp8 in (0, peaks.float8)
    assert 20 < peaks.float16 / peaks.memory < 600  # FLOPs a byte
