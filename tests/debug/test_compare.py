"""`amp.debug.compare`: errors against float32 and float64, and the module that they come from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small_net import arguments, network

import jmp_amp as amp
from jmp_amp.debug import compare

mlp = functools.partial(network, by=256.0)


@pytest.fixture
def args():
    return arguments(layers=4, width=8)


def rows_of(report, kind):
    return {row.name: row for row in report.rows if row.kind == kind}


def relative(x, reference):
    flat = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)]) for tree in (x, reference)]
    return np.linalg.norm(flat[0] - flat[1]) / np.linalg.norm(flat[1])


def test_errors_are_the_norm_of_the_difference_over_the_norm(args):
    loss_fn = mlp()
    report = compare(loss_fn, ["float16"], loss_scale=2.0**8)(*args)
    loss, grads = jax.jit(jax.value_and_grad(loss_fn))(*args)
    low_loss, scaled = jax.jit(amp.value_and_grad(amp.autocast(loss_fn), loss_scale=2.0**8))(*args)
    low = jax.tree.map(lambda g: g / 2**8, scaled)
    np.testing.assert_allclose(report.rows[0].errors["float16"], relative(low_loss, loss), rtol=0.02, atol=1e-6)
    np.testing.assert_allclose(report.gradient["float16"], relative(low, grads), rtol=0.02)
    # A parameter that is in no container is a module of its own.
    for name, row in rows_of(report, "gradient").items():
        np.testing.assert_allclose(row.errors["float16"], relative(low[name], grads[name]), rtol=0.02)
        np.testing.assert_allclose(row.norm, np.linalg.norm(grads[name]), rtol=1e-5)
    assert report.loss_scale == {"float16": 2.0**8}


@pytest.mark.sweep(6)
@pytest.mark.parametrize("planted", ["layer_0", "layer_1", "layer_3"])
def test_the_module_with_the_planted_inaccuracy_is_the_worst(args, planted):
    report = compare(mlp(planted), ["float16"])(*args)
    assert report.worst() == planted
    starred = [line for line in str(report).splitlines() if line.endswith("*")]
    assert len(starred) == 1
    assert f"activation {planted} " in starred[0]


def test_activations_are_in_the_order_of_the_program_and_end_with_the_loss(args):
    report = compare(mlp(), ("float16", "bfloat16"))(*args)
    activations = rows_of(report, "activation")
    assert list(activations) == [*(f"layer_{i}" for i in range(4)), "small_net.py:loss_fn"]
    assert activations["small_net.py:loss_fn"].errors == pytest.approx(report.rows[0].errors, rel=0.1, abs=1e-6)
    for row in activations.values():
        assert 0 < row.errors["float16"] < row.errors["bfloat16"] < 0.1


def test_the_activation_of_a_module_is_its_last_result(args):
    report = compare(mlp(), ["float16"])(*args)
    params, x = args
    np.testing.assert_allclose(
        rows_of(report, "activation")["layer_0"].norm, np.linalg.norm(jnp.tanh(x @ params["layer_0"])), rtol=1e-5
    )


def test_scopes_inside_loops_calls_and_checkpoints_are_rows(args):
    params, x = args
    stacked = jnp.stack(list(params.values()))

    def loss_fn(stacked, x):
        @jax.checkpoint
        def layer(x, w):
            with jax.named_scope("outer"), jax.named_scope("inner"):
                return jnp.tanh(x @ w), None

        x, _ = jax.lax.scan(layer, x, stacked)
        with jax.named_scope("called"):
            x = jax.jit(lambda x: jax.nn.relu(x) * 2)(x)
        return jnp.mean(jnp.square(x))

    found = rows_of(compare(loss_fn, ["float16"])(stacked, x), "activation")
    assert list(found) == ["outer/inner", "outer", "called", "test_compare.py:loss_fn"]
    states = []
    for w in stacked:
        x = jnp.tanh(x @ w)
        states.append(x)
    np.testing.assert_allclose(found["outer/inner"].norm, np.linalg.norm(jnp.stack(states)), rtol=1e-5)
    np.testing.assert_allclose(found["called"].norm, np.linalg.norm(2 * jax.nn.relu(x)), rtol=1e-5)
    assert 0 < found["outer/inner"].errors["float16"] < 0.01


def test_a_scope_inside_a_linear_solve_is_a_row():
    def loss_fn(diagonal, b):
        def solve(_, b):
            with jax.named_scope("solver"):
                return b / diagonal

        return jnp.sum(jnp.tanh(jax.lax.custom_linear_solve(lambda x: diagonal * x, b, solve, symmetric=True)))

    diagonal, b = jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])
    found = rows_of(compare(loss_fn, ["float16"])(diagonal, b), "activation")
    assert list(found) == ["solver", "test_compare.py:loss_fn"]
    np.testing.assert_allclose(found["solver"].norm, np.linalg.norm(b / diagonal), rtol=1e-5)
    assert found["solver"].errors["float16"] < 1e-6  # the solver runs in float32


def test_without_scopes_the_functions_are_the_modules(args):
    def dense(w, x):
        return x @ w

    def logits(params, x):
        for w in params.values():
            x = sum(jnp.tanh(part) for part in jnp.split(dense(w, x), 1))
        return x

    def loss_fn(params, x):
        return jnp.mean(jnp.square(logits(params, x)))

    found = rows_of(compare(loss_fn, ["float16"])(*args), "activation")
    assert list(found) == [f"test_compare.py:{name}" for name in ("dense", "logits", "loss_fn")]


def test_float64_finds_the_error_of_float32(args):
    report = compare(mlp(), ("float32", "float16"), reference="float64")(*args)
    assert 0 < report.gradient["float32"] < 1e-5
    assert 1e-4 < report.gradient["float16"] < 1e-2
    assert 0 < rows_of(report, "activation")["layer_3"].errors["float32"] < 1e-5
    assert compare(mlp(), ["float32"])(*args).gradient == {"float32": 0}
    assert not jax.config.jax_enable_x64


def test_a_function_that_casts_by_hand_is_compared_with_the_plain_one(args):
    def norm(x):
        return x / jnp.sqrt(jnp.mean(jnp.square(x)) + jnp.asarray(1e-8, x.dtype))

    def loss_fn(params, x):
        with jax.named_scope("norm"):
            x = norm(x)
        return mlp()(params, x)

    def by_hand(params, x):
        return loss_fn(*amp.get_policy("p=f16").cast_to_param((params, x)))

    params, x = args
    report = compare(loss_fn, {"by hand": by_hand, "autocast": {"dtype": "float16"}})(params, 1e-5 * x)
    assert report.gradient["by hand"] == np.inf  # 1e-10 and 1e-8 are 0 in float16
    assert report.loss_scale == {"by hand": 1, "autocast": 2.0**16}
    assert report.worst("by hand") == "norm"
    assert report.gradient["autocast"] < 0.01
    assert "inf*" in str(report)


def test_policies_may_be_given_in_any_of_their_forms(args):
    policies = ["float16", jnp.bfloat16, amp.get_policy("mixed_float16"), "mixed_bfloat16"]
    report = compare(mlp(), policies)(*args)
    a, b, c, d = report.gradient.values()
    assert (a, b) == (c, d)
    cured = compare(mlp(), {"full": {"rules": {"layer_*": "full", jax.lax.dot_general_p: "full"}}})(*args)
    assert cured.gradient["full"] < 1e-6


@pytest.mark.parametrize("policy", [jnp.float16, np.dtype("float16"), amp.get_policy("O2"), "float16", jnp.sum])
def test_one_policy_needs_no_list(policy):
    assert len(compare(lambda w: jnp.sum(w), policy)(jnp.ones(4)).gradient) == 1


def test_policies_of_one_name_are_all_compared():
    policies = [lambda w: jnp.sum(w), lambda w: 2 * jnp.sum(w), "float16"]
    report = compare(lambda w: jnp.sum(w), policies)(jnp.ones(4))
    assert [*report.gradient.items()] == [("<lambda> 1", 0), ("<lambda> 2", 1), ("float16", 0)]


def test_aux_other_arguments_and_modules_of_nested_parameters(args):
    params, x = args

    def loss_fn(x, nested, scale=1.0):
        loss = mlp()({"a": nested["block"]["w"]}, x) * scale
        return loss, {"loss": loss}

    report = compare(loss_fn, ["float16"], argnums=1, has_aux=True)(x, {"block": {"w": params["layer_0"]}}, scale=2.0)
    assert list(rows_of(report, "gradient")) == ["block"]
    assert report.gradient["float16"] < 0.01


def test_equinox_modules_are_compared():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))

    def loss_fn(model, x):
        return jnp.mean(jnp.square(jax.vmap(model)(x)))

    report = compare(loss_fn, ["float16"], transform=eqx.filter_value_and_grad)(model, jnp.ones((2, 3)))
    assert list(rows_of(report, "gradient")) == ["layers/0", "layers/1"]
    assert report.gradient["float16"] < 0.01


def test_what_is_no_floating_array_is_passed_through_and_has_no_gradient(args):
    params, x = args

    def loss_fn(model, x):
        assert model["name"] == "layer"
        return jnp.mean(jnp.square(model["act"](x @ model["w"]["w"][model["order"]] * model["scale"])))

    model = {"w": {"w": params["layer_0"]}, "act": jnp.tanh, "order": jnp.arange(8), "name": "layer", "scale": 2.0}
    report = compare(loss_fn, ["float16"], reference="float64")(model, x)
    assert list(rows_of(report, "gradient")) == ["w"]
    grads = jax.grad(lambda w: loss_fn(model | {"w": {"w": w}}, x))(params["layer_0"])
    np.testing.assert_allclose(rows_of(report, "gradient")["w"].norm, np.linalg.norm(grads), rtol=1e-5)
    assert 0 < report.gradient["float16"] < 0.01


def test_flax_modules_are_rows():
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.LayerNorm()(nn.Dense(4)(x))
            return nn.Dense(1)(nn.relu(x))

    model, x = Model(), jax.random.normal(jax.random.key(1), (3, 2))
    params = model.init(jax.random.key(0), x)
    report = compare(lambda params, x: jnp.mean(jnp.square(model.apply(params, x))), ["float16"])(params, x)
    names = list(rows_of(report, "activation"))
    assert names[:4] == ["Model/Dense_0", "Model/LayerNorm_0", "Model/Dense_1", "Model"]
    assert set(rows_of(report, "gradient")) == {f"params/{name}" for name in ("Dense_0", "Dense_1", "LayerNorm_0")}


def test_a_gradient_that_is_zero_but_for_rounding_is_told_apart():
    def loss_fn(params, x):
        x = x @ params["w"] + params["b"]
        return jnp.mean(jnp.square(jnp.tanh(jax.nn.standardize(x, axis=0)) - jnp.linspace(0, 1, 64).reshape(8, 8)))

    params = {"b": jnp.full((1, 8), 0.3), "w": jnp.linspace(-1, 1, 32).reshape(4, 8)}
    report = compare(loss_fn, ["float16"])(params, jax.random.normal(jax.random.key(0), (8, 4)))
    bias, weight = rows_of(report, "gradient").values()
    assert bias.norm < 1e-5 * weight.norm
    lines = str(report).splitlines()
    assert [line.startswith("gradient b") and line.endswith(")") for line in lines].count(True) == 1
    assert [text.get_text() for text in report.plot().axes[0].get_yticklabels()] == ["w"]


def test_the_picture_has_a_bar_for_each_policy_and_module(args, tmp_path):
    report = compare(mlp("layer_2"), ("float16", "bfloat16"))(*args)
    figure = report.plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    gradients, activations = figure.axes
    assert [len(bars) for bars in gradients.containers] == [4, 4]
    assert [len(bars) for bars in activations.containers] == [5, 5]
    assert [text.get_text() for text in activations.get_yticklabels()][2] == "layer_2"
    widths = [bar.get_width() for bar in activations.containers[0]]
    assert widths[2] == rows_of(report, "activation")["layer_2"].errors["float16"]


def test_what_is_not_finite_in_float32_either_is_not_a_matter_of_precision(args):
    params, x = args
    with pytest.raises(ValueError, match=r"not finite in float32 either.*first_nonfinite"):
        compare(mlp())(params, x.at[0, 0].set(jnp.nan))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: compare(3), TypeError, "takes a function, got int"),
        (lambda: compare(amp.autocast(mlp())), TypeError, "already under `autocast`; pass the function"),
        (lambda: compare(mlp(), reference="float16"), ValueError, '"float32" or "float64", got \'float16\''),
        (lambda: compare(mlp(), ()), ValueError, "`policies` is empty"),
        (lambda: compare(mlp(), ["float17"]), ValueError, "float17"),
        (lambda: jax.jit(compare(mlp()))({"a": jnp.ones((4, 4))}, jnp.ones((2, 4))), TypeError, "inside `jit`"),
        (lambda: compare(lambda i, x: x[i])(1, jnp.ones(2)), TypeError, "no floating arrays .* `argnums`"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_asking_for_the_worst_of_an_unknown_policy_names_those_there_are(args):
    report = compare(mlp(), ["float16"])(*args)
    with pytest.raises(ValueError, match="`policy` must be one of 'float16', got 'fp16'"):
        report.worst("fp16")
    assert compare(mlp(), ["float32"])(*args).worst() == ""


def in_a_scan(cast, w, x):
    return jax.lax.scan(lambda c, _: (cast(jnp.tanh(c @ cast(w))), None), cast(x), length=3)[0]


def in_a_counted_loop(cast, w, x):
    step = lambda state: (cast(jnp.tanh(state[0] @ cast(w))), state[1] + 1)  # noqa: E731
    return jax.lax.fori_loop(0, 3, lambda _, state: step(state), (cast(x), 0))[0]


def in_a_branch(cast, w, x):
    return jax.lax.cond(jnp.sum(x) > -1e6, lambda: cast(jnp.tanh(x @ w)), lambda: cast(x))


def in_a_function_with_a_rule(cast, w, x):
    @jax.custom_vjp
    def product(w, x):
        return cast(x) @ cast(w)

    # The rule is not the derivative of the function, so that it is seen whether it is used.
    product.defvjp(
        lambda w, x: (product(w, x), (w, x)), lambda res, g: (2 * (res[1].T @ g.astype(jnp.float32)), g @ g.T @ g)
    )
    return product(w, x)


@pytest.mark.parametrize("reference", ["float32", "float64"])
@pytest.mark.parametrize("compute", [in_a_scan, in_a_counted_loop, in_a_branch, in_a_function_with_a_rule])
@pytest.mark.sweep(12)
def test_what_the_program_casts_itself_is_not_cast_in_the_reference(compute, reference):
    keys = jax.random.split(jax.random.key(0))
    w, x = (jax.random.normal(key, (4, 4)) for key in keys)

    def loss(cast):
        def loss_fn(w, x):
            with jax.named_scope("layer"):
                y = compute(cast, w, x)
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        return loss_fn

    in_float32, casts = loss(lambda x: x), loss(lambda x: x.astype(jnp.float16))
    report = compare(casts, {"as it is": casts, "without casts": in_float32}, reference=reference, loss_scale=1.0)(w, x)
    assert report.is_lifted
    assert "casts to 16 bits" in str(report)
    assert 1e-5 < report.gradient["as it is"] < 1e-2
    assert report.gradient["without casts"] < 2e-6
    (layer,) = (row for row in report.rows if row.name == "layer")
    assert 1e-5 < layer.errors["as it is"] < 1e-2
    assert layer.errors["without casts"] < 2e-6
    assert not compare(in_float32, reference=reference)(w, x).is_lifted


def test_a_program_that_overflows_in_its_own_float16_has_an_infinite_error():
    def loss_fn(x):
        with jax.named_scope("energy"):
            energy = jnp.sum(jnp.square(x.astype(jnp.float16)))
        return jnp.sum(x) / energy.astype(jnp.float32)

    report = compare(loss_fn)(jnp.full((8,), 300.0))
    assert report.worst() == "energy"
    assert report.rows[0].errors["float16"] == 1.0  # 0 in place of 1/300


def test_parameters_in_16_bits_are_read_in_float32_by_the_reference(args):
    params = amp.cast_params(args[0], "O3")
    report = compare(lambda params, x: mlp()(params, x.astype(jnp.float16)))(params, args[1])
    assert report.is_lifted
    assert 1e-5 < report.gradient["float16"] < 1e-1


def test_a_callback_has_the_name_of_its_scope_in_a_reference_without_casts():
    def loss_fn(x):
        with jax.named_scope("outer"):
            y = jnp.tanh(x.astype(jnp.float16)).astype(jnp.float32)
            with jax.named_scope("call"):
                called = jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), lax.stop_gradient(y))
        return jnp.sum(y * called)

    report = compare(loss_fn)(jnp.linspace(0, 1, 8))
    assert report.is_lifted
    assert {"outer", "outer/call"} <= rows_of(report, "activation").keys()
