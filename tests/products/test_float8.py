"""Products on float8 operands: their scales, their derivatives, and the devices that have no units for them."""

import functools
import re
import warnings
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from float8_nets import E4M3, E5M2, EVERYWHERE, float8, loss_fn, normal, scales_computed
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import dtypes, equations
from rounding import error

import jmp_amp as amp
from jmp_amp._formats import FORMATS
from jmp_amp._products import EMULATE, FLOAT8_DOT, float8_dot, quantize

pytestmark = pytest.mark.usefixtures("users_code", "emulated")


PARAMS = {"w": normal(64, 48, seed=1, scale=0.1), "v": normal(48, 32, seed=2, scale=0.1)}
X = normal(32, 64)


def used(fun, *args):
    return [eqn for eqn in equations(fun, *args) if eqn.primitive.name == FLOAT8_DOT]


# Scales.


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("largest", [1.0, 1.75, 1.7500001, 448.0, 3e38, 2.0**-100, 2.0**-110, 0.3])
def test_a_scale_is_a_power_of_two_that_uses_the_range(dtype, largest):
    x = jnp.array([[largest, -largest / 2], [0.0, largest / 3]])
    low, exponent = jax.jit(functools.partial(quantize, dtype=dtype))(x)
    scaled = np.float64(low)
    limit = float(jnp.finfo(dtype).max)
    assert limit / 2 <= np.abs(scaled).max() <= limit
    np.testing.assert_allclose(scaled, np.float64(x) * 2.0 ** int(exponent), rtol=2.0**-3)
    assert np.isfinite(scaled).all()


@pytest.mark.parametrize("x", [jnp.zeros((2, 2)), jnp.full((2, 2), 1e-40), jnp.full((2, 2), 2.0**-126)])
def test_zero_and_the_smallest_arrays_stay_finite(x):
    low, _ = quantize(x, E4M3)
    assert np.isfinite(np.float64(low)).all()


@pytest.mark.parametrize("bad", [jnp.inf, -jnp.inf, jnp.nan])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_no_infinity_becomes_a_finite_number(dtype, bad):
    low, _ = jax.jit(functools.partial(quantize, dtype=dtype))(jnp.ones((4, 4)).at[1, 2].set(bad))
    assert np.isnan(np.float64(low)).all()


# Products.


def exact(x, y, contracting, dtypes=(E4M3, E4M3)):
    """The float64 product of the quantized operands."""
    (x, i), (y, j) = quantize(x, dtypes[0]), quantize(y, dtypes[1])
    return np.tensordot(np.float64(x), np.float64(y), contracting) * 2.0 ** -(int(i) + int(j))


def dot(x, y, contracting, dtype=jnp.float32, base=jnp.bfloat16):
    params = {
        "dimension_numbers": (tuple((i,) for i in contracting), ((), ())),
        "precision": None,
        "out_sharding": None,
    }
    return float8_dot(x, y, base, (E4M3, E4M3), E5M2, preferred_element_type=jnp.dtype(dtype), **params)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("contracting", [(1, 0), (0, 0), (1, 1), (0, 1)])
@pytest.mark.parametrize("scales", [(1, 1), (2.0**100, 2.0**-100), (2.0**-50, 2.0**-50), (2.0**40, 1)])
def test_a_product_is_that_of_the_quantized_operands(contracting, scales):
    x, y = (scale * normal(32, 32, seed=i) for i, scale in enumerate(scales))
    want = exact(x, y, contracting)
    assert error(dot(x, y, contracting), want) < 1e-6
    low = np.float64(dot(x, y, contracting, jnp.bfloat16))
    np.testing.assert_allclose(low, want, rtol=2.0**-8, atol=1e-6 * abs(want).max())


def test_a_gradient_is_a_product_of_the_quantized_cotangent():
    x, y, cotangent = normal(32, 64), normal(64, 48, seed=1), normal(32, 48, seed=2)
    _, pull = jax.vjp(lambda x, y: dot(x, y, (1, 0)), x, y)
    grads = pull(cotangent)
    assert [grad.dtype for grad in grads] == [jnp.float32] * 2
    want = exact(cotangent, y, (1, 1), (E5M2, E4M3)), exact(x, cotangent, (0, 0), (E4M3, E5M2))
    assert max(map(error, grads, want)) < 1e-6


def test_the_linear_transpose_of_a_product_is_its_gradient():
    fun, w = float8(lambda w: X @ w), PARAMS["w"]
    out, pull = jax.vjp(fun, w)
    np.testing.assert_array_equal(jax.linear_transpose(fun, w)(out)[0], pull(out)[0])


def test_one_huge_element_does_not_make_the_others_wrong():
    x = normal(32, 64).at[3, 5].set(1e4)
    got, want = dot(x, PARAMS["w"], (1, 0)), x @ PARAMS["w"]
    assert error(got[3], want[3]) < 0.1
    assert np.isfinite(got).all()


def test_with_a_float16_base_the_scaled_product_may_exceed_float16():
    x, y = jnp.full((16, 1024), 1.5), jnp.full((1024, 16), 2.0)  # 1024 * 384 * 256 before it is scaled back
    low = dot(x, y, (1, 0), jnp.float16, jnp.float16)
    assert low.dtype == jnp.float16
    assert (low == 3072).all()


# Autocast.


def test_products_with_a_weight_read_float8_and_weight_gradients_are_float32():
    grads = jax.grad(float8(loss_fn))
    products = [(*eqn.params["operands"], eqn.outvars[0].aval.dtype) for eqn in used(grads, PARAMS, X)]
    base, full = jnp.dtype("bfloat16"), jnp.dtype("float32")
    forward, weight, activation = (E4M3, E4M3, base), (E4M3, E5M2, full), (E5M2, E4M3, base)
    assert Counter(products) == {forward: 2, weight: 2, activation: 1}
    assert dtypes(grads, PARAMS, X, primitive="dot_general") == []


def test_agrees_with_float32():
    ways = [jax.value_and_grad(fun) for fun in (float8(loss_fn), loss_fn)]
    (low, got), (full, want) = jax.jit(lambda *args: [way(*args) for way in ways])(PARAMS, X)
    assert error(low, full) < 0.02
    assert error(got, want) < 0.12
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("base", ["float8_bfloat16", "float8_float16"])
def test_the_base_dtype_is_that_of_all_other_ops(base):
    low = amp.autocast(loss_fn, base, rules={"*": base})
    name = base.removeprefix("float8_")
    assert {row.split(" -> ")[1] for row in dtypes(low, PARAMS, X, primitive="tanh")} == {name}
    assert used(low, PARAMS, X)[0].params["base"] == name


def test_other_products_are_those_of_bfloat16_bit_for_bit():
    params = PARAMS | {"k": normal(2, 1, 3, 3, seed=3)}
    rules = {"first": "bfloat16"}

    def program(params, x):
        with jax.named_scope("first"):
            h = jax.nn.relu(x @ params["w"])
        scores = jax.nn.softmax(jnp.einsum("qd,kd->qk", h, h))
        return scores @ h, jax.lax.conv(x[None, None], params["k"], (1, 1), "SAME")

    low = amp.autocast(program, "float8", rules=EVERYWHERE | rules)
    assert used(low, params, X) == []
    jax.tree.map(np.testing.assert_array_equal, low(params, X), amp.autocast(program, "bfloat16")(params, X))


# Which products.

STRUCT = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def why(fun, *shapes, **options):
    rows = amp.explain(fun, **{"dtype": "float8"} | options)(*map(STRUCT, shapes)).select(direction="forward").rows
    return [(row.why, row.compute) for row in rows if row.primitive in ("dot_general", "conv_general_dilated")]


@pytest.mark.parametrize(
    ("reason", "x", "w"),
    [
        ("rule", (512, 2048), (2048, 2048)),
        ("rule", (4, 128, 1024), (1024, 4096)),
        ("size", (512, 768), (768, 768)),
        ("size", (512, 1024), (1024, 1024)),
        ("size", (512, 512), (512, 16384)),
        ("size", (16, 4096), (4096, 4096)),
        ("rule", (512, 4096), (4096, 50257)),
        ("rule", (1000, 4096), (4096, 4096)),
    ],
)
def test_a_product_is_float8_if_it_gains(reason, x, w):
    assert why(lambda w, x: jnp.tanh(x) @ w, w, x) == [(reason, "float8_e4m3fn" if reason == "rule" else "bfloat16")]


def test_a_product_of_activations_is_not_float8():
    assert why(lambda x: jnp.tanh(x) @ jnp.cos(x), (2048, 2048)) == [("no weight", "bfloat16")]
    assert why(lambda x, w: jnp.einsum("bij,bjk->bik", x, w), *[(4, 2048, 2048)] * 2) == [
        ("no matrix product", "bfloat16")
    ]
    shapes = (16, 64, 32, 32), (64, 64, 3, 3)
    assert why(lambda x, w: jax.lax.conv(x, w, (1, 1), "SAME"), *shapes) == [("no matrix product", "bfloat16")]


def test_a_product_of_the_users_own_dtype_is_not_float8():
    def fun(w, x):
        return x.astype(jnp.float16) @ w.astype(jnp.float16)

    assert why(fun, (2048, 2048), (512, 2048)) == [("traced", "float16")]


def test_a_rule_or_a_region_that_names_float8_holds_at_every_size():
    def program(w, x):
        with jax.named_scope("mlp"):
            x = x @ w
        with amp.precision("float8"):
            x = x @ w
        with jax.named_scope("head"):
            return x @ w

    shapes = (64, 64), (32, 64)
    low, base = "float8_e4m3fn", "bfloat16"
    assert why(program, *shapes) == [("size", base), ("region", low), ("size", base)]
    assert why(program, *shapes, dtype=base, rules={"mlp": "float8"}) == [
        ("pattern", low),
        ("region", low),
        ("rule", base),
    ]
    rules = EVERYWHERE | {"head": base}
    assert why(program, *shapes, rules=rules) == [("pattern", low), ("region", low), ("pattern", base)]


def test_explain_gives_the_flops_of_each_format():
    def program(w, v, x):
        return (x @ w) @ v

    summary = amp.explain(program, "float8")(*map(STRUCT, [(2048, 2048), (2048, 1024 + 1), (512, 2048)])).summary()
    assert summary["dtype"] == "float8"
    assert summary["matmul_flops"] == pytest.approx({"float8": 2048 / 3073, "bfloat16": 1025 / 3073})
    backward = amp.explain(float8(loss_fn))(PARAMS, X).select(direction="backward", primitive=FLOAT8_DOT).rows
    assert {row.compute for row in backward} == {"float8_e5m2 float8_e4m3fn", "float8_e4m3fn float8_e5m2"}


def test_an_array_that_branches_and_their_caller_read_is_quantized_in_each():
    def fun(w, x):
        def product():
            return x @ w

        y = jax.lax.cond(x[0, 0] > 0, product, lambda: -product())
        return y @ w.T + x, product()

    w = PARAMS["w"]
    for got, want in zip(jax.jit(float8(fun))(w, X), fun(w, X), strict=True):
        assert error(got, want) < 0.08


def test_an_array_is_quantized_once():
    text = jax.jit(jax.grad(float8(loss_fn))).lower(PARAMS, X).as_text()
    assert text.count("-> tensor<64x48xf8E4M3FN>") == 1  # for the forward and the backward pass
    assert text.count("-> tensor<48x32xf8E4M3FN>") == 1


def repeated(w, x):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), jnp.sin(x), length=3)[0]


def repeated_while(w, x):
    return jax.lax.while_loop(lambda state: state[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, jnp.sin(x)))[1]


def two_layers(params, x):
    return loss_fn(params, jnp.sin(x))


def stacked_layers(w, x):
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), jnp.sin(x), w)[0] ** 2)


SQUARE = normal(64, 64, scale=0.1)
OF_MICRO_BATCHES = functools.partial(amp.value_and_grad, accumulate_steps=2)


@pytest.mark.parametrize(
    ("transform", "fun", "weights", "times"),
    [
        (lambda fun: fun, repeated, SQUARE, 1),
        (lambda fun: fun, repeated_while, SQUARE, 1),
        (lambda fun: jax.grad(lambda *args: fun(*args).sum()), repeated, SQUARE, 1),
        (jax.grad, stacked_layers, jnp.stack([SQUARE] * 3), 3),
        (OF_MICRO_BATCHES, two_layers, PARAMS, 2),
    ],
)
def test_the_scale_of_a_weight_is_computed_once(transform, fun, weights, times):
    assert scales_computed(jax.make_jaxpr(transform(float8(fun)))(weights, X)) == times


def test_the_scales_of_stacked_weights_are_computed_once_for_all_micro_batches():
    program = jax.make_jaxpr(OF_MICRO_BATCHES(float8(stacked_layers)))(jnp.stack([SQUARE] * 3), X)
    assert scales_computed(program) == 0  # of single weights
    (maximum,) = [eqn for eqn in program.eqns if eqn.primitive.name == "reduce_max"]
    assert maximum.invars[0].aval.shape == (3, *SQUARE.shape)


@pytest.mark.parametrize("fun", [repeated, repeated_while])
def test_a_loop_multiplies_by_the_weight_that_it_closes_over(fun):
    assert error(jax.jit(float8(fun))(SQUARE, X), repeated(SQUARE, X)) < 0.1


@pytest.mark.parametrize("axes", [(None, 0), (0, None), (0, 0), (None, 1), (2, None)])
@pytest.mark.parametrize("contracting", [(1, 0), (0, 1)])
def test_vmap_adds_rows_and_batches_of_weights_run_in_the_base_dtype(axes, contracting):
    x, y = normal(16, 16, 16), normal(16, 16, 16, seed=1)
    x, y = (a if axis is not None else a[0] for a, axis in zip((x, y), axes, strict=True))
    batched = jax.vmap(lambda x, y: dot(x, y, contracting), axes)
    want = jax.vmap(lambda x, y: jnp.tensordot(x, y, [[i] for i in contracting]), axes)(x, y)
    assert error(batched(x, y), want) < (0.06 if None in axes else 0.01)
    assert len(used(batched, x, y)) == (None in axes)


@pytest.mark.parametrize(
    ("policy", "products"), [("dots_saveable", 5), ("dots_with_no_batch_dims_saveable", 5), ("nothing_saveable", 6)]
)
def test_a_checkpoint_policy_saves_float8_products_like_others(policy, products):
    policy = getattr(jax.checkpoint_policies, policy)

    def fun(params, x):
        return jax.checkpoint(lambda params, x: jax.nn.gelu(x @ params["w"]) @ params["v"], policy=policy)(
            params, x
        ).sum()

    assert len(used(jax.grad(float8(fun)), PARAMS, X)) == products


def test_shards_scale_by_themselves_or_together():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = normal(128, 64)
    grads = jax.grad(float8(loss_fn))
    want = jax.jit(jax.grad(loss_fn))(PARAMS, x)

    def local(params, x):
        return jax.lax.pmean(grads(params, x), "data")

    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False))
    assert error(mapped(PARAMS, x), want) < 0.15
    sharded = jax.device_put(PARAMS, NamedSharding(mesh, P(None, "data")))
    got = jax.jit(grads)(sharded, jax.device_put(x, NamedSharding(mesh, P("data"))))
    assert error(got, jax.jit(grads)(PARAMS, x)) < 0.05


def test_accumulated_gradients_are_those_of_the_batch():
    accumulated = amp.grad(float8(loss_fn), accumulate_steps=2)
    assert error(*jax.jit(lambda *args: [f(*args) for f in (accumulated, jax.grad(loss_fn))])(PARAMS, X)) < 0.12


def test_a_second_autocast_leaves_float8_products_alone():
    twice = amp.autocast(jax.grad(float8(loss_fn)), "float16")
    assert len(used(twice, PARAMS, X)) == 5
    once = jax.grad(float8(loss_fn))
    jax.tree.map(np.testing.assert_array_equal, *jax.jit(lambda *args: [f(*args) for f in (twice, once)])(PARAMS, X))


# Devices.


@pytest.fixture
def native(monkeypatch):
    monkeypatch.delenv(EMULATE)


def lowered(platform, kind=None):
    device = AbstractDevice(device_kind=kind or "", num_cores=1, platform={"cuda": "gpu"}.get(platform, platform))
    mesh = AbstractMesh((), (), abstract_device=device if kind else None)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(float8(loss_fn)).trace(PARAMS, X).lower(lowering_platforms=(platform,)).as_text()


def test_a_device_without_float8_units_runs_the_base_dtype_and_says_so(native):
    with pytest.warns(
        UserWarning, match=r'cpu has no float8 units, .* in bfloat16 .*dtype="bfloat16".* JMP_AMP_EMULATE_FLOAT8=1'
    ):
        low = jax.jit(float8(loss_fn))(PARAMS, X)
    assert low == jax.jit(amp.autocast(loss_fn, "bfloat16"))(PARAMS, X)


@pytest.mark.parametrize(
    "platform_and_kind",
    [("cuda", "NVIDIA H200"), ("cuda", "NVIDIA L4"), ("cuda", "NVIDIA B200"), ("cuda", None), ("tpu", "TPU7x")],
)
def test_other_devices_are_known_when_a_program_is_lowered_for_them(native, platform_and_kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "f8E4M3FN" in lowered(*platform_and_kind)


@pytest.mark.parametrize(
    "platform_and_kind",
    [("cuda", "NVIDIA A100-SXM4-80GB"), ("cuda", "Tesla T4"), ("tpu", "TPU v5 lite"), ("rocm", "gfx942")],
)
def test_devices_before_them_are_named(native, platform_and_kind):
    platform, kind = platform_and_kind
    with pytest.warns(UserWarning, match=f"{kind if platform != 'rocm' else 'rocm'} has no float8 units"):
        assert "f8E" not in lowered(platform, kind)


def test_an_exported_program_is_that_of_its_platform(native):
    fun = jax.jit(float8(loss_fn))
    assert "f8E4M3FN" in jax.export.export(fun, platforms=["cuda"])(PARAMS, X).mlir_module()
    with pytest.warns(UserWarning, match="cpu has no float8 units"):
        assert "f8E" not in jax.export.export(fun, platforms=["cpu"])(PARAMS, X).mlir_module()


STORED = {  # how a product reads a weight, its shape, and the order of its axes in memory, the innermost first
    "as it is": (lambda x, w: x @ w, (64, 48), "1, 0"),
    "transposed": (lambda x, w: x @ w.T, (48, 64), "0, 1"),
    "transposed by einsum": (lambda x, w: jnp.einsum("td,nd->tn", x, w), (48, 64), "1, 0"),
    "with its axes moved": (lambda x, w: jnp.einsum("td,dhf->thf", x, w.transpose(1, 2, 0)), (16, 64, 3), "1, 0, 2"),
    "transposed and cast": (lambda x, w: x @ w.T.astype(jnp.float32), (48, 64), "0, 1"),
}


@pytest.mark.parametrize("name", STORED)
def test_on_gpus_a_float8_weight_keeps_the_order_of_its_axes_and_an_activation_any(name, native):
    product, shape, order = STORED[name]

    def loss_fn(w, x):
        return jnp.sum(float8(lambda w, x: product(jnp.tanh(x), w))(w, x))

    w = jnp.ones(shape, jnp.bfloat16 if "cast" in name else jnp.float32)
    program = jax.jit(jax.grad(loss_fn, (0, 1)))
    text = program.trace(w, X).lower(lowering_platforms=("cuda",)).as_text()
    found = re.findall(r"LayoutConstraint.*result_layouts = \[dense<\[(.*?)\]>", text)
    assert found == [order]  # one cast, for both passes
    assert "LayoutConstraint" not in jax.export.export(program, platforms=["cuda"])(w, X).mlir_module()


# Names.


def test_a_policy_names_float8():
    policy = amp.get_policy("mixed_float8")
    assert (policy.compute_dtype, policy.compute_format) == (jnp.dtype("bfloat16"), "float8")
    assert amp.get_policy(str(policy)) == policy == amp.Policy("float32", "float8", "float32")
    assert policy != amp.get_policy("mixed_bfloat16")
    assert policy.with_output_dtype("bfloat16").compute_format == "float8"
    low = amp.autocast(loss_fn, policy.with_rules(EVERYWHERE))
    assert low(PARAMS, X) == float8(loss_fn)(PARAMS, X)


def test_initialize_takes_float8_without_a_loss_scale():
    loss, params, tx = amp.interop.apex.initialize(
        loss_fn, PARAMS, optax.sgd(0.1), "O2", dtype="float8", rules=EVERYWHERE
    )
    assert used(loss, params, X)
    assert params["w"].dtype == jnp.bfloat16
    assert amp.get_loss_scale(tx.init(params)) == 1
    assert not FORMATS["float8"].needs_loss_scale
    assert FORMATS["float8_float16"].needs_loss_scale


def test_a_float8_dtype_is_an_error_with_a_cure():
    with pytest.raises(ValueError, match='got float8_e4m3fn; "float8" chooses among the float8 dtypes'):
        amp.autocast(loss_fn, jnp.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"autocast computes in float16, bfloat16, float32, float8, .*, got fp8"):
        amp.autocast(loss_fn, "fp8")


# Tools.


def test_compare_shows_the_error_of_float8_on_every_machine(monkeypatch):
    monkeypatch.delenv(EMULATE)
    options = {"float8": {"dtype": "float8", "rules": EVERYWHERE}}
    report = amp.debug.compare(loss_fn, {"bfloat16": "bfloat16"} | options)(PARAMS, X)
    assert 2 * report.gradient["bfloat16"] < report.gradient["float8"] < 0.12


def test_suggest_rules_moves_modules_from_float8_to_the_base_dtype(monkeypatch):
    monkeypatch.setitem(FORMATS, "float8", FORMATS["float8"].at_any_size)

    def loss(params, x):
        with jax.named_scope("mlp"):
            x = jnp.tanh(x @ params["w"])
        with jax.named_scope("head"):
            return jnp.mean((x @ params["v"]) ** 2)

    rules, report = amp.debug.suggest_rules(loss, "float8")(PARAMS, X, tol=0.02)
    assert report.met
    assert set(rules.values()) == {"bfloat16"} == {report.value}
    assert set(rules) <= {"mlp", "head"}


def test_underflow_scales_each_gradient_to_float8():
    grads = {"small": 2.0**-60 * jnp.array([1.0, 2.0**-10, 2.0**-40]), "large": jnp.array([3e4, 1.0])}
    report = amp.debug.underflow(grads, dtype="float8")
    rows = {row.path: row for row in report.rows}
    assert report.dtype == "float8_e5m2"
    assert (rows["small"].zero, rows["small"].zero_unscaled) == (pytest.approx(1 / 3), 1.0)
    assert rows["large"].zero == rows["large"].overflow == 0
    assert "zero scaled" in str(report)
    again = amp.debug.underflow(jax.tree.map(lambda x: x * 2.0**10, grads), 2.0**10, dtype="float8")
    assert [row[:4] for row in again.rows] == [row[:4] for row in report.rows]


def test_first_nonfinite_names_a_float8_product(monkeypatch):
    monkeypatch.delenv(EMULATE)
    report = amp.debug.first_nonfinite(float8(lambda w, x: x @ w))(jnp.full((64, 48), 1e30), jnp.full((32, 64), 1e30))
    assert report.primitive == FLOAT8_DOT


def test_a_product_of_complex_numbers_is_not_float8():
    def fun(w, x):
        return jnp.real((x + 1j * x) @ w)

    assert used(float8(fun), PARAMS["w"], X) == []
    jax.tree.map(
        np.testing.assert_array_equal, float8(fun)(PARAMS["w"], X), amp.autocast(fun, "bfloat16")(PARAMS["w"], X)
    )
