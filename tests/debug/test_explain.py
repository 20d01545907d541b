"""What `explain` says of programs whose decisions are known."""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jaxprs import number_of_calls, read_low
from models import gpt_case

import jmp_amp as amp
from jmp_amp import _jaxpr as jx

pytestmark = pytest.mark.usefixtures("users_code")
W, B, X = jnp.eye(8), jnp.zeros(8), jnp.ones((4, 8))
HERE = "tests/debug/test_explain.py"


def line_of(mark):
    """The line of this file that ends with a comment."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if line.endswith(f"  # {mark}"))
    return number


def rows(fun, *args, primitive, direction="forward", **options):
    found = amp.explain(fun, **options)(*args).select(direction=direction, primitive=primitive).rows
    assert found, primitive
    return found


def decisions(found):
    return [(row.op_class, row.why, row.inputs, row.compute, row.output) for row in found]


F16, F32 = "float16", "float32"

# A program, a primitive in it, and what is decided for that.
KNOWN = {
    "rule": (lambda x: x @ W, "dot_general", ("lower", "rule", (F32, F32), F16, F16)),
    "a reduction": (lambda x: jnp.sum(x @ W), "reduce_sum", ("full", "rule", (F16,), F32, F32)),
    "a bias": (read_low(lambda x: x @ W + B), "add", ("promote", "bias", (F16, F32), F16, F16)),
    "a mask": (
        lambda x: jnp.where(x > 0, x @ W, -1e9),
        "select_n",
        ("promote", "constant", (F32, F32), F32, F32),  # cast in front of the call of `jnp.where`
    ),
    "readers": (lambda x: jnp.exp(x @ W + B), "add", ("promote", "readers", (F16, F32), F32, F32)),
    "the caller": (lambda x: x @ W + B, "add", ("promote", "readers", (F16, F32), F32, F32)),
    "precision": (
        lambda x: jnp.dot(x, W, precision="highest"),
        "dot_general",
        ("original", "precision", (F32, F32), F32, F32),
    ),
    "an integer": (lambda x: jnp.argsort(x @ W), "iota", None),
    "a cast of the user's": (
        lambda x: x.astype(F16) @ W.astype(F16),
        "dot_general",
        ("lower", "traced", (F16, F16), F16, F16),
    ),
    "a weight in the compute dtype": (
        lambda x: x @ W.astype(F16),
        "dot_general",
        ("lower", "rule", (F32, F16), F16, F16),
    ),
    "a weight in another dtype": (
        lambda x: x @ W.astype("bfloat16"),
        "dot_general",
        ("lower", "traced", (F32, "bfloat16"), F32, F32),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_says_what_is_decided_and_why(name):
    fun, primitive, expected = KNOWN[name]
    found = amp.explain(fun)(X).select(direction="forward", primitive=primitive).rows
    assert decisions(found) == ([] if expected is None else [expected])


@pytest.mark.parametrize("move", [lambda h: h, jnp.transpose, lambda h: h[::-1], lambda h: h.reshape(2, 2, 8)])
@pytest.mark.parametrize("way", [lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda x: jax.jit(f)(x)])
def test_the_caller_reads_float32_however_the_result_is_moved(way, move):
    (row,) = rows(lambda x: move(way(lambda x: x @ W + B)(x)), X, primitive="add")
    assert (row.why, row.compute) == ("readers", F32)


def test_an_op_without_operands_needs_no_rule():
    report = amp.explain(lambda x: x * lax.iota(jnp.float32, 3))(jnp.ones(3))
    assert report.summary()["unknown"] == []


def test_regions_patterns_overrides_and_unknown_primitives_are_reasons():
    def fun(x):
        with amp.full_precision():
            x = x @ W
        with jax.named_scope("layer_0"):
            x = x @ W
        return jnp.linalg.cholesky(jnp.tanh(x @ W).T @ x)

    options = {"rules": {"layer_*": "bfloat16", lax.tanh_p: "full"}}
    products = rows(fun, X, primitive="dot_general", **options)
    assert [(row.module, row.why, row.compute) for row in products] == [
        ("", "region", F32),
        ("layer_0", "pattern", "bfloat16"),
        ("", "rule", F16),
        ("", "decomposition", F32),
    ]
    assert [row.why for row in rows(fun, X, primitive="tanh", **options)] == ["override"]


def test_primitives_without_a_rule_are_named():
    def fun(x):
        return jax.pure_callback(np.sin, jax.typeof(x), x @ W)

    report = amp.explain(fun)(X)
    assert report.summary()["unknown"] == ["pure_callback"]
    assert "Primitives without a rule: pure_callback." in str(report)
    (row,) = report.select(primitive="pure_callback").rows
    assert (row.op_class, row.why, row.inputs, row.compute) == ("original", "unknown", (F16,), F32)


def test_kernels_are_named_with_their_dtypes():
    def pallas(x):
        return pl.pallas_call(lambda x_ref, y_ref: y_ref.__setitem__(..., x_ref[...]), jax.typeof(x), interpret=True)(x)

    def fun(x):
        x = amp.cast_inputs("bfloat16")(pallas)(pallas(x @ W))
        return jax.ffi.ffi_call("no_such_target", jax.typeof(x))(x)

    report = amp.explain(fun)(X)
    kernels = ["ffi_call", "pallas_call"]
    assert report.summary()["kernels"] == kernels
    assert f"Kernels: {', '.join(kernels)}. Primitives without a rule: none." in str(report)
    forward = [row for row in report.select(direction="forward").rows if row.primitive in kernels]
    assert [(row.why, row.compute) for row in forward] == [
        ("kernel", "float32"),
        ("cast_inputs", "bfloat16"),
        ("kernel", "float32"),
    ]


def test_sources_are_the_lines_of_the_user():
    def fun(x):
        y = x @ W  # the product
        return jnp.where(y > 0, y, 0)  # the choice

    (product,) = rows(fun, X, primitive="dot_general")
    assert product.source.startswith(f"{HERE}:{line_of('the product')} (")
    # `jnp.where` is traced once for all who call it.
    (choice,) = rows(fun, X, primitive="select_n")
    assert choice.source.startswith(f"{HERE}:{line_of('the choice')} (")
    backward = rows(fun, X, primitive="dot_general", direction="backward")
    assert [row.source for row in backward] == [product.source]


BODIES = {
    "jit": (lambda x: jax.jit(lambda x: jnp.tanh(x @ W))(x), 1),
    "scan": (lambda x: lax.scan(lambda x, _: (jnp.tanh(x @ W), None), x, None, length=5)[0], 5),
    "scan in scan": (
        lambda x: lax.scan(lambda x, _: (lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x @ W), x), None), x, None, 5)[0],
        15,
    ),
    "cond": (lambda x: lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ W), lambda x: x, x), 1),
    "remat": (lambda x: jax.checkpoint(lambda x: jnp.tanh(x @ W))(x), 1),
    "custom_jvp": (lambda x: jax.nn.relu(jnp.tanh(x @ W)), 1),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_are_included_as_often_as_they_run(name):
    fun, times = BODIES[name]
    (product,) = rows(fun, X, primitive="dot_general")
    assert (product.runs, product.compute) == (times, F16)
    assert product.flops == times * 2 * 4 * 8 * 8
    assert product.bytes == times * 4 * 8 * 2
    assert sum(row.runs for row in rows(fun, X, primitive="dot_general", direction="backward")) == times


def test_the_ops_inside_a_linear_solve_are_listed_in_float32():
    def fun(x):
        def solve(_, b):
            with jax.named_scope("solver"):
                return b @ W  # inside the solver

        return lax.custom_linear_solve(lambda x: W @ x, x[0], solve, symmetric=True)

    (product,) = rows(fun, X, primitive="dot_general")
    assert (product.module, product.inputs, product.compute, product.output) == ("solver", (F32, F32), F32, F32)
    assert product.why == "decomposition"
    assert product.source.startswith(f"{HERE}:{line_of('inside the solver')} (")


def test_what_is_computed_again_for_the_backward_pass_is_told_apart():
    fun = jax.checkpoint(lambda w, x: jnp.sum(jnp.sin(jnp.sin(x @ w))))
    assert len(rows(fun, W, X, primitive="dot_general", direction="recomputed")) == 1
    assert len(rows(fun, W, X, primitive="dot_general", direction="backward")) == 2


def test_without_a_derivative_there_is_a_forward_pass_only():
    report = amp.explain(lambda x: lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ W + 1, x))(X)
    assert {row.direction for row in report.rows} == {"forward"}
    assert report.summary()["activation_bytes"] is None
    assert "JAX cannot differentiate it" in str(report)


def test_errors_of_the_function_are_its_own():
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        amp.explain(lambda x: x @ jnp.ones((3, 3)))(X)


def test_shares_count_products_and_what_is_kept():
    def fun(w, x):
        with amp.full_precision():
            y = x @ w  # as many FLOPs as the other
        return jnp.sum(jnp.sin(y) @ w)

    report = amp.explain(fun)(W, X)
    assert report.summary()["matmul_flops"] == {"float16": 0.5, "float32": 0.5}
    # x @ w in float32 for the derivative of its sine, sin(y) in float16 for that of the product.
    assert report.kept[F32] >= 4 * 8 * 4
    assert report.kept[F16] >= 4 * 8 * 2


def test_casts_are_counted_in_both_passes():
    # Of both operands and of the result; of its cotangent, and of both gradients. In a loop, those inside each time.
    assert amp.explain(lambda w, x: x @ w)(W, X).casts == 6
    assert amp.explain(lambda w, x: x + w, "float32")(W, jnp.ones((8, 8))).casts == 0
    looped = lambda x: lax.fori_loop(0, 5, lambda _, x: jnp.exp(jnp.tanh(x @ W)), x)  # noqa: E731
    assert amp.explain(looped)(X).casts > 5 * 4


def test_a_function_under_autocast_is_explained_as_it_is():
    fun = amp.autocast(lambda x: x @ W, "bfloat16", rules={lax.dot_general_p: "full"})
    assert [row.why for row in rows(fun, X, primitive="dot_general")] == ["override"]
    with pytest.raises(TypeError, match=r"already under `autocast`.* call `explain\(fun\)` without options"):
        amp.explain(fun, rules={})
    with pytest.raises(TypeError, match="`explain` takes a function, got int"):
        amp.explain(3)


def test_a_mixed_product_is_not_said_to_have_no_float32():
    text = str(amp.explain(lambda x: x @ W.astype("bfloat16"))(X))
    assert "traced: the op, or an operand, was traced in another dtype than float32" in text


def test_float32_explains_the_plain_program():
    report = amp.explain(lambda x: jnp.sum(x @ W), "float32")(X)
    assert {row.compute for row in report.rows} == {F32}
    assert report.summary()["matmul_flops"] == {"float32": 1}


def test_shapes_are_enough_and_nothing_is_compiled_or_run():
    def fun(params, x, name, flag=True):
        assert (name, flag) == ("model", False)
        return jnp.sum(x @ params["w"])

    shapes = {"w": jax.ShapeDtypeStruct((1 << 20, 1 << 20), F32)}
    report = amp.explain(fun)(shapes, jax.ShapeDtypeStruct((8, 1 << 20), F32), "model", flag=False)
    assert [row.compute for row in report.select(primitive="dot_general").rows] == [F16, F16, F16]


def test_six_layers_take_little_more_than_their_tracing():
    loss_fn, args = gpt_case(None, layers=6)

    def explain():
        return amp.explain(loss_fn)(*args)

    def trace():  # a new function each time, which JAX has not traced before
        jax.make_jaxpr(jax.grad(lambda *args: loss_fn(*args)))(*args)

    _ = explain(), trace()  # what is computed once in a process
    assert number_of_calls(explain) < 3 * number_of_calls(trace)
    report = explain()
    assert report.summary()["matmul_flops"] == {"float16": 1}
    # Equal layers share their lines.
    assert len(str(report).splitlines()) < 100


def test_a_diff_shows_what_another_policy_changes():
    report = amp.explain(lambda x: jnp.tanh(jnp.tanh(x @ W) @ W) @ W)(X)
    diff = report.diff(rules={lax.tanh_p: "full"})
    assert [(a.primitive, a.compute, b.compute, b.why) for a, b in diff.changes] == [("tanh", F16, F32, "override")] * 2
    assert "tanh  f16 -> f32  override  2      -" in str(diff)
    assert "<td>f16 -&gt; f32</td>" in diff._repr_html_()
    changed = {a.primitive for a, b in report.diff(dtype="bfloat16").changes}
    assert changed == {"dot_general", "tanh"}
    assert report.diff(report).changes == []
    assert str(report.diff("bfloat16")) == str(report.diff(dtype="bfloat16"))


def test_a_report_is_selected_and_saved():
    def fun(x):
        with jax.named_scope("encoder"):
            x = x @ W
        with jax.named_scope("decoder"):
            return x @ W

    report = amp.explain(fun)(X)
    assert {row.module for row in report.select("enc*").rows} == {"encoder"}
    assert {row.direction for row in report.select(direction="backward").rows} == {"backward"}
    saved = json.loads(report.to_json())
    assert saved["summary"] == report.summary()
    assert [row["primitive"] for row in saved["rows"]] == [row.primitive for row in report.rows]


def layered(x):
    for i in range(3):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ W + B)
    return x


def test_equal_modules_share_their_lines_when_printed():
    text = str(amp.explain(lambda x: jnp.exp(layered(x)))(X))
    assert "<lambda>(), forward" in text  # where there is no module, the function stands
    assert "layer_* (3 modules), forward" in text
    lines = [line.split()[:8] for line in text.splitlines() if line.startswith("dot_general")]
    # The first layer reads the input, the others what is float16 already.
    assert lines == [
        ["dot_general", "lower", "rule", "f32", "f32", "f16", "f16", "1"],
        ["dot_general", "lower", "rule", "f16", "f32", "f16", "f16", "2"],
    ]
    assert "bias: a bias does not widen a product" in text
    assert 'more op sites: `report.select(direction="backward")`' in text


def test_a_notebook_shows_modules_that_unfold():
    page = amp.explain(lambda x: layered(x) < 3)(X)._repr_html_()
    assert page.count("<details>") == page.count("</details>") == 2
    assert "<td>dot_general</td>" in page
    assert "&lt;lambda&gt;" in page


def test_a_model_with_dropout_knows_all_its_primitives_and_checkpoint_keeps_its_modules():
    def fun(w, x):
        def layer(x):
            with jax.named_scope("layer"):
                keep = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
                return jnp.where(keep, jnp.tanh(x @ w), 0.0)

        with jax.named_scope("net"):
            return jnp.mean(jax.checkpoint(layer)(x))

    report = amp.explain(fun)(jnp.eye(8), jnp.ones((4, 8)))
    assert report.summary()["unknown"] == []
    products = report.select("net/layer", primitive="dot_general")
    assert {row.direction for row in products.rows} == {"forward", "recomputed", "backward"}


@pytest.mark.parametrize(
    ("compiler", "file"),
    [
        (SimpleNamespace(format_code_name=lambda file: ("Cell", "In[3]")), "In[3]"),
        (SimpleNamespace(format_code_name=lambda file: None), HERE),  # a file that is no cell
        (SimpleNamespace(), HERE),  # IPython 7
    ],
)
def test_lines_of_a_notebook_are_named_after_their_cell(monkeypatch, compiler, file):
    shell = SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    (row,) = rows(lambda x: x @ W, X, primitive="dot_general")
    assert row.source.startswith(f"{file}:")


def refuses(x, t):
    return jnp.mean(jnp.tanh(x @ x) * refused(t)) ** 2


@jax.custom_jvp
def refused(t):
    return t


refused.defjvp(lambda primals, tangents: pytest.fail("differentiated"))


def test_argnums_choose_the_arguments_that_are_differentiated():
    x, t = jnp.ones((4, 4)), jnp.float32(1)
    for argnums in (0, (0,), -2):
        rows = amp.explain(refuses, argnums=argnums)(x, t).rows
        assert {row.direction for row in rows} == {"forward", "backward"}
    products = [
        len(amp.explain(lambda a, b: jnp.sum(a @ b), argnums=i)(x, x).select(primitive="dot_general").rows)
        for i in (0, (0, 1), None)
    ]
    assert products == [2, 3, 3]
    assert amp.explain(refuses, argnums=0)(x, t).diff(dtype="bfloat16").after.dtype == "bfloat16"
    for wrong in (2, (0, -3), "x"):
        with pytest.raises(ValueError, match="`argnums` must be positions of the 2 positional arguments, got"):
            amp.explain(refuses, argnums=wrong)(x, t)


def test_argnums_count_the_arguments_behind_an_nnx_module():
    nnx = pytest.importorskip("flax.nnx")

    class Model(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((4, 4)))

        def __call__(self, x, t):
            return refuses(x @ self.w[...], t)

    assert amp.explain(Model(), argnums=0)(jnp.ones((4, 4)), jnp.float32(1)).kept is not None


def test_an_argument_that_a_library_does_not_differentiate_leaves_the_forward_pass():
    eqxi = pytest.importorskip("equinox.internal")

    def model(w, t):
        return jnp.mean(jnp.tanh(w @ w) * eqxi.nondifferentiable(t))

    args = jnp.ones((4, 4)), jnp.float32(1)
    report = amp.explain(model)(*args)
    assert (report.kept, {row.direction for row in report.rows}) == (None, {"forward"})
    assert report.why_forward.startswith("with respect to all floating arguments (RuntimeError: ")
    assert "JAX cannot differentiate it with respect to all floating arguments" in str(report)
    assert amp.explain(model, argnums=0)(*args).why_forward == ""


def test_an_error_of_the_users_derivative_says_what_was_asked_for():
    @jax.custom_jvp
    def wrong(x):
        return x

    @wrong.defjvp
    def _(primals, tangents):
        raise ValueError("of mine")

    with pytest.raises(ValueError, match="of mine") as caught:
        amp.explain(wrong)(jnp.ones(2))
    assert "`explain` differentiates with respect to all floating arguments" in "".join(caught.value.__notes__)


def over_its_norm(w, x, divisor):
    h = x @ w
    return jnp.mean((h / divisor(jnp.sum(jnp.abs(h), -1, keepdims=True)) - 1) ** 2)


# The divisor of rows of a product, and whether the gradient of a row of zeros overflows in float16.
DIVISORS = {
    "a sum": (lambda n: n + 1e-12, True),
    "the other way": (lambda n: 1e-6 + n, True),
    "a maximum": (lambda n: jnp.maximum(n, 1e-9), True),
    "broadcast": (lambda n: jnp.broadcast_to(n + 1e-12, (32, 32)), True),
    "a large constant": (lambda n: n + 1e-3, False),
    "a choice": (lambda n: jnp.where(n > 0, n, 1.0), False),
    "a root": (lambda n: jnp.sqrt(n + 1e-8), False),
}


@pytest.mark.sweep(7)
@pytest.mark.parametrize("name", DIVISORS)
def test_a_quotient_by_a_small_constant_is_marked_where_its_gradient_overflows(name):
    divisor, overflows = DIVISORS[name]
    w, x = jnp.ones((32, 32)), jnp.zeros((32, 32)).at[0].set(1.0)
    loss_fn = functools.partial(over_its_norm, divisor=divisor)
    marked = {
        dtype: [r for r in amp.explain(loss_fn, dtype)(w, x).rows if r.why == "small divisor"]
        for dtype in ("float16", "bfloat16")
    }
    assert (len(marked["float16"]), len(marked["bfloat16"])) == (overflows, 0)
    assert jnp.isnan(amp.grad(amp.autocast(loss_fn), loss_scale=2.0**10)(w, x)).any() == overflows
    assert not jnp.isnan(jax.grad(loss_fn)(w, x)).any()


def test_no_op_of_a_train_step_is_unknown():
    tx = amp.dynamic_loss_scale(optax.sgd(1e-3))
    state = tx.init([W] * 3)

    def step(ws, state, x):
        loss_fn = amp.autocast(lambda ws, x: jnp.mean(x @ ws[0] @ ws[1] @ ws[2]))
        loss, grads = amp.value_and_grad(loss_fn, opt_state=state)(ws, x)
        return tx.update(grads, state, ws), loss

    report = amp.explain(step)([W] * 3, state, X)
    assert report.select(primitive="sum_together").rows
    assert report.summary()["unknown"] == []


def test_the_reports_say_alike_where_an_op_is():
    def loss_fn(ws, x):
        def step(x, w):
            with jax.named_scope("layer"):
                y = x @ w
                return jnp.tanh(y), jnp.sum(y)

        return jnp.sum(lax.scan(step, x, ws)[1])

    args = jnp.stack([W] * 3), X
    explained = amp.explain(loss_fn)(*args).select(primitive="dot_general", direction="forward").rows
    rounded = [x for x in amp.debug.error_budget(loss_fn)(*args).rows if x.primitive == "dot_general"]
    found = amp.debug.first_nonfinite(amp.autocast(loss_fn))(300 * args[0], 300 * args[1])
    site, *others = [
        {field.name: getattr(x, field.name) for field in dataclasses.fields(jx.Site)}
        for x in (*explained, *(x for x in rounded if x.direction == "forward"), found)
    ]
    assert others == [site, site]
    assert site["source"].startswith(f"{HERE}:")
    assert (site["module"], site["runs"], found.module, found.direction) == ("layer", 3, "layer", "forward")


def first_bias(b, x):
    return jax.nn.relu(x @ W + b) @ W  # first


def second_bias(b, x):
    return jax.nn.relu(x @ W + b) @ W  # second


@pytest.mark.parametrize(("fun", "line"), [(first_bias, "first"), (second_bias, "second")])
def test_an_op_has_its_own_line_though_it_is_traced_once_for_all_that_are_equal(fun, line):
    def loss_fn(b, x):
        return jnp.sum(fun(b, x))

    program = jax.make_jaxpr(jax.value_and_grad(amp.autocast(loss_fn)))(B, X)
    adds = [jx.Site.at(eqns) for eqns in jx.equations_in(program) if eqns[-1].primitive.name == "add"]
    rounded = [x for x in amp.debug.error_budget(loss_fn)(B, X).rows if x.primitive == "add"]
    found = amp.debug.first_nonfinite(amp.autocast(loss_fn))(B + 1e5, X)
    assert adds
    assert rounded
    for site in (*adds, *rounded, found):
        assert site.source.startswith(f"{HERE}:{line_of(line)} ")


def whitened(x):
    values, vectors = jnp.linalg.eigh(x.T @ x)  # eigh
    return x @ (vectors / jnp.sqrt(values + 1))


def masked(x):
    return jax.jit(lambda x: jnp.where(x > 0, x, -1e9) + 1)(x)  # mask


def simulated(x):
    return lax.scan(lambda x, _: (x + 0.1 * (x @ W), None), x, length=3)[0]  # loop


def entropy(p):
    return -jnp.sum(p * jnp.log(p))  # logarithm


def scaled(x):
    y = 1e3 * x
    return 1e4 * y  # scale


# A program, the reason, the op where it begins, and the mark of its line. A product behind the line, or in front of it.
BEGINNINGS = {
    "a decomposition in front": (lambda w, x: jnp.tanh(whitened(x) @ w), "solution", "eigh", "eigh"),
    "a decomposition behind": (lambda w, x: whitened(jnp.tanh(x) @ w), "decomposition", "eigh", "eigh"),
    "a solver by products": (
        lambda w, x: jax.scipy.sparse.linalg.cg(lambda v: 3 * v, (x @ w)[0], maxiter=2)[0],  # cg
        "decomposition",
        "custom_linear_solve",
        "cg",
    ),
    "in a loop": (
        lambda w, x: lax.scan(lambda c, w: (c, c[::-1] @ w), whitened(x), w[None])[1],
        "solution",
        "eigh",
        "eigh",
    ),
    "behind a branch that does nothing": (
        lambda w, x: lax.cond(x[0, 0] > 0, jnp.negative, lambda x: x, whitened(x)) @ w,
        "solution",
        "eigh",
        "eigh",
    ),
    "a mask in a call": (lambda w, x: masked(x) @ w, "constant", "select_n", "mask"),
    "numbers in a row": (lambda w, x: scaled(x)[::-1] @ w, "constant", "mul", "scale"),
    "a logarithm": (lambda w, x: entropy(jax.nn.sigmoid(x) @ jax.nn.sigmoid(w)), "logarithm", "log", "logarithm"),
    "a logarithm in a branch": (
        lambda w, x: lax.cond(x[0, 0] > 0, entropy, jnp.sum, jax.nn.sigmoid(x) @ jax.nn.sigmoid(w)),
        "logarithm",
        "log",
        "logarithm",
    ),
    "a loop": (lambda w, x: simulated(x), "recurrence", "scan", "loop"),
    "a difference": (
        lambda w, x: jnp.sum(x**2, 1)[:, None] + jnp.sum(w**2, 0) - 2 * x @ w,  # difference
        "distance",
        "sub",
        "difference",
    ),
    "an order": (lambda w, x: lax.top_k(jax.nn.softmax(x @ w), 2), "rank", "top_k", "order"),  # order
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_reason_is_shown_with_its_share_and_the_line_where_it_begins(name):
    fun, why, primitive, mark = BEGINNINGS[name]
    report = amp.explain(fun)(W + 0.1, X)
    begins = {row.begins for row in report.rows if row.why == why and row.primitive == "dot_general"}
    (begin,) = begins - {""}  # those of the products of the solver itself
    assert begin.startswith(f"{primitive} at {HERE}:{line_of(mark)} ")
    head = str(report).split("\n\n")[0]
    flops = [row.flops for row in report.rows if row.compute == F32]
    assert "In float32:\n" in head
    assert f" {why}, from {begin}\n" in head
    shown = [float(line.split("%")[0]) for line in head.splitlines() if ", from " in line]
    assert sum(shown) == pytest.approx(100 * sum(flops) / sum(row.flops for row in report.rows), abs=len(shown))


def test_where_products_are_low_no_reason_is_shown():
    report = amp.explain(lambda w, x: jnp.tanh(x @ w))(W, X)
    assert "In float32" not in str(report)
    assert {row.begins for row in report.rows} == {""}
    assert "In float32" not in str(amp.explain(lambda w, x: x @ w, "float32")(W, X))
    assert "In float32" not in str(amp.explain(jnp.tanh)(X))


@pytest.mark.parametrize("rules", [{"policy": "float16"}, {lax.dot_general_p: "lower"}])
def test_a_rule_of_the_user_ends_what_the_head_shows(rules):
    def fun(w, x):
        _, vectors = jnp.linalg.eigh(x.T @ x)
        with jax.named_scope("policy"):
            return jnp.tanh(x @ vectors) @ w

    before, after = (str(amp.explain(fun, rules=each)(W + 0.1, X)) for each in ({}, rules))
    assert "% solution, from eigh at " in before
    assert "solution" not in after
