"""`amp.debug.suggest_rules`: the fewest rules that bring the gradient close to that in float32."""

import contextlib
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small_net import arguments, network

import jmp_amp as amp


@pytest.fixture
def args():
    return arguments(layers=3, width=5)


def gradient_error(loss_fn, rules, args, dtype="float16", scale=2.0**8):
    """Measured independently, with a scale at which nothing overflows."""
    low = amp.grad(amp.autocast(loss_fn, dtype, rules=rules), loss_scale=scale)
    grads, exact = (jax.tree.leaves(jax.jit(f)(*args)) for f in (low, jax.grad(loss_fn)))
    difference = [
        np.asarray(a, np.float64) / scale - np.asarray(b, np.float64) for a, b in zip(grads, exact, strict=True)
    ]
    norm = lambda xs: np.sqrt(sum(np.sum(np.square(x)) for x in xs))  # noqa: E731
    return norm(difference) / norm([np.asarray(x, np.float64) for x in exact])


def test_where_no_rule_is_needed_there_is_none(args):
    rules, report = amp.debug.suggest_rules(network())(*args)
    assert rules == {}
    assert report.met
    assert report.compilations == 1
    assert report.error == report.rows[0].error
    assert "without rules" in str(report)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("planted", ["layer_0", "layer_1", "layer_2"])
def test_the_planted_module_is_the_one_rule(args, planted):
    loss_fn = network(planted)
    rules, report = amp.debug.suggest_rules(loss_fn)(*args, tol=1e-2)
    assert rules == {planted: "full"}
    assert gradient_error(loss_fn, {}, args) > 1e-2
    assert gradient_error(loss_fn, rules, args) <= 1e-2
    assert report.met
    assert report.compilations == 2
    assert [row.key for row in report.rows] == [None, planted]
    assert report.rows[0].error > 1e-2 >= report.error
    assert 0.25 <= report.rows[1].low < 1
    assert planted in str(report)


@pytest.mark.slow
def test_two_modules_that_differ_by_a_number_make_one_pattern(args):
    loss_fn = network("layer_0", "layer_1", "layer_2")
    rules, report = amp.debug.suggest_rules(loss_fn)(*args, tol=1e-3)
    assert rules == {"layer_*": "full"}
    assert gradient_error(loss_fn, rules, args) <= 1e-3
    assert report.error <= 1e-3


def test_two_culprits_of_which_each_alone_hides_the_other_are_both_found():
    def loss_fn(params, x):
        with jax.named_scope("first"):
            x = jnp.cbrt(x @ params["first"])
        with jax.named_scope("middle"):
            x = x @ params["middle"]
        with jax.named_scope("last"):
            return jnp.mean(jnp.cbrt(x @ params["last"]))

    scales = {"first": 300, "middle": 1, "last": 300}
    params = {name: scale * (jnp.ones((5, 5)) + jnp.eye(5)) for name, scale in scales.items()}
    args = params, jnp.linspace(150, 300, 15).reshape(3, 5)
    for alone in ("first", "last"):
        assert not gradient_error(loss_fn, {alone: "full"}, args) < 0.9
    rules, report = amp.debug.suggest_rules(loss_fn)(*args)
    assert rules == {"first": "full", "last": "full"}
    assert report.rows[0].error == np.inf
    assert gradient_error(loss_fn, rules, args) < 1e-2
    assert [row.error for row in report.rows[:2]] == [np.inf, np.inf]


@pytest.mark.slow
def test_the_share_in_low_precision_is_that_of_explain(args):
    def loss_fn(params, x):
        with amp.full_precision():  # is no part of the share without rules, either
            x = x @ params["layer_0"]
        return network("layer_1")(params, x)

    def share(**options):
        return amp.explain(loss_fn, **options)(*args).summary()["matmul_flops"].get("float16", 0)

    rules, report = amp.debug.suggest_rules(loss_fn)(*args)
    assert rules == {"layer_1": "full"}
    assert [row.low for row in report.rows] == [share(), share(rules=rules)]
    assert 1 > share() > share(rules=rules) > 0


def test_an_op_class_is_suggested_where_it_is_cheaper_than_the_modules():
    def loss_fn(params, x, shift):
        for name, w in params.items():
            with jax.named_scope(name):
                # From 2048 on, float16 holds even numbers only.
                x = jnp.tanh(x @ w + shift - shift)
        return jnp.mean(jnp.square(x))

    params = {name: jnp.full((5, 5), 0.2) + 0.1 * jnp.eye(5) for name in ("a", "b", "c")}
    args = params, 1 + jnp.linspace(-0.5, 0.5, 320).reshape(64, 5), jnp.float32(2048)
    rules, report = amp.debug.suggest_rules(loss_fn)(*args)
    assert rules in (
        {jax.lax.tanh_p: "full"},
        {jax.lax.add_p: "full"},
    )  # what reads it, or what it reads, is float32, too
    assert report.rows[1].low == 1
    assert gradient_error(loss_fn, rules, args) <= 1e-2 < gradient_error(loss_fn, {}, args)


def without_scopes(in_float32=contextlib.nullcontext):
    def dense(w, x):
        return x @ w

    def loss_fn(params, x):
        x = jnp.tanh(dense(params["a"], x))
        with in_float32():
            x = dense(64 + params["b"], x) - dense(jnp.full((8, 8), 64.0), x)  # the line
        return jnp.mean(jnp.square(jnp.tanh(dense(params["c"], x))))

    return loss_fn


def with_a_scan(in_float32=contextlib.nullcontext):
    def layer(x, w):
        x = jnp.tanh(x @ w)
        with in_float32():
            return x @ (64 + w) - x @ jnp.full(w.shape, 64.0), None  # the line

    @jax.jit
    def loss_fn(params, x):
        return jnp.mean(jnp.square(lax.scan(layer, x, jnp.stack([*params.values()]))[0]))

    return loss_fn


@pytest.mark.sweep(6)
@pytest.mark.parametrize("make", [without_scopes, with_a_scan])
def test_where_scopes_cannot_tell_a_line_is_named(make):
    keys = jax.random.split(jax.random.key(0), 4)
    args = {x: jax.random.normal(key, (8, 8)) / 3 for x, key in zip("abc", keys, strict=False)}, jnp.ones((16, 8))
    rules, report = amp.debug.suggest_rules(make())(*args, tol=5e-3)
    code, first = inspect.getsourcelines(make)
    number = first + next(i for i, line in enumerate(code) if "# the line" in line)
    assert rules == {}
    assert [re.match(r".*test_suggest_rules.py:(\d+) ", line)[1] for line in report.lines] == [str(number)]
    assert f"Put `with amp.full_precision():` around {report.lines[0]}." in str(report)
    assert report.met
    assert report.compilations == 2
    assert 0.3 < report.rows[1].low < 0.7
    assert gradient_error(make(), {}, args) > 5e-3
    assert gradient_error(make(amp.full_precision), {}, args) == pytest.approx(report.error, rel=0.3)


def test_one_line_may_be_the_whole_program():
    def loss_fn(params, x):
        return jnp.mean(jnp.tanh(x @ (64 + params["w"]) - x @ jnp.full((5, 5), 64.0)))

    args = {"w": jnp.linspace(0.0, 1.0, 25).reshape(5, 5)}, jnp.linspace(0.0, 1.0, 15).reshape(3, 5)
    rules, report = amp.debug.suggest_rules(loss_fn)(*args)
    assert rules == {jax.lax.dot_general_p: "full"}
    assert report.rows[1].low == 0
    assert gradient_error(loss_fn, rules, args) <= 1e-2


@pytest.mark.slow
def test_of_kinks_the_gain_of_a_rule_is_measured():
    def loss_fn(params, x):
        for name, w in params.items():
            with jax.named_scope(name):
                x = x + jax.nn.relu(x @ w)
        return jnp.mean(jnp.square(x))

    keys = jax.random.split(jax.random.key(0), 4)
    params = {f"layer_{i}": jax.random.normal(key, (8, 8)) / 3 for i, key in enumerate(keys[:3])}
    args = params, jax.random.normal(keys[3], (1024, 8))
    report = amp.debug.suggest_rules(loss_fn, "bfloat16")(*args, tol=None).report
    assert report.rows[-1].error < 1e-6 < report.rows[0].error
    names = [row.key for row in report.rows[1:]]
    assert names.index("layer_0") < names.index("layer_2")  # its roundings flip the comparisons of all layers


def test_after_max_seconds_the_report_says_what_was_left_out(args):
    report = amp.debug.suggest_rules(network("layer_1"), max_seconds=1e-3)(*args).report
    assert not report.met
    assert report.compilations == 1
    assert "The time was over: " in str(report)
    assert "`max_seconds=`" in str(report)


def test_what_cannot_be_seen_into_has_no_certificate():
    beside = lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)  # noqa: E731
    mapped = on_one_device(beside)
    loss_fn = lambda w, x: mapped(w, x) + beside(w, x)  # noqa: E731
    report = amp.debug.suggest_rules(loss_fn)(jnp.eye(8), jnp.linspace(0, 1, 32).reshape(4, 8), tol=1e-5).report
    assert report.error <= 1e-5
    assert not report.met
    assert "Not seen: roundings in shard_map at" in str(report)
    assert "No rules meet" not in str(report)


@pytest.mark.slow
def test_bfloat16_needs_more_than_float16(args):
    loss_fn = network("layer_1")
    rules, report = amp.debug.suggest_rules(loss_fn, "bfloat16")(*args, tol=5e-2)
    assert report.dtype == "bfloat16"
    assert report.met
    assert "layer_1" in rules
    assert gradient_error(loss_fn, rules, args, "bfloat16", 1.0) <= 5e-2


def test_what_the_code_decides_itself_no_rule_can_mend_and_the_report_says_so(args):
    loss_fn = amp.precision("bfloat16")(network("layer_1"))
    rules, report = amp.debug.suggest_rules(loss_fn)(*args)
    assert rules == {}
    assert not report.met
    assert report.error == report.error_floor == report.rows[0].error > 1e-2
    assert "No rules meet `tol`" in str(report)


def test_modules_of_flax_are_found():
    nn = pytest.importorskip("flax.linen")

    class Difference(nn.Module):
        @nn.compact
        def __call__(self, x):
            w = self.param("w", nn.initializers.normal(1.0), (4, 5))
            return x @ (1024 + w) - x @ jnp.full((4, 5), 1024.0)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = Difference()(x)
            x = nn.LayerNorm()(nn.relu(nn.Dense(4)(x)))
            return nn.Dense(1)(x)

    model, x = Model(), jax.random.normal(jax.random.key(1), (8, 4))
    params = model.init(jax.random.key(0), x)

    def loss_fn(params, x):
        return jnp.mean(jnp.square(model.apply(params, x) - 1))

    rules, report = amp.debug.suggest_rules(loss_fn)(params, x)
    assert rules == {"Model/Difference_0": "full"}
    assert report.met
    assert gradient_error(loss_fn, rules, (params, x)) <= 1e-2


@pytest.mark.slow
def test_what_is_no_floating_array_is_passed_through(args):
    def loss_fn(model, x):
        return network("layer_1")(model["params"], model["act"](x))

    params, x = args
    rules, _ = amp.debug.suggest_rules(loss_fn)({"params": params, "act": jnp.tanh, "step": jnp.int32(3)}, x)
    assert rules == {"layer_1": "full"}
    assert gradient_error(network("layer_1"), rules, (params, jnp.tanh(x))) <= 1e-2


def test_without_a_tolerance_the_trade_is_shown(args, tmp_path):
    rules, report = amp.debug.suggest_rules(network("layer_1"))(*args, tol=None)
    assert rules == {}
    assert report.compilations == 1
    first, second, *_, last = report.rows
    assert (first.key, first.low, first.error) == (None, 1.0, report.rows[0].error)
    assert second.error < first.error / 5 or report.rows[2].error < first.error / 5
    assert last.low == 0
    assert last.error == report.error_floor < 1e-6
    assert [step.low for step in report.rows] == sorted((step.low for step in report.rows), reverse=True)
    assert "+ layer_1" in str(report)
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "trade.png")
    assert (tmp_path / "trade.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: amp.debug.suggest_rules("loss"), TypeError, "takes a function, got str"),
        (lambda f: amp.debug.suggest_rules(amp.autocast(f)), TypeError, "already under `autocast`"),
        (
            lambda f: amp.debug.suggest_rules(f, rules={"a": "full"}),
            TypeError,
            "takes no `rules`, which it returns; to keep",
        ),
        (lambda f: amp.debug.suggest_rules(f)(jnp.ones(2), tol=0), ValueError, "`tol` must be positive, got 0"),
        *(
            (
                lambda f, x=x: amp.debug.suggest_rules(f, max_seconds=x),
                ValueError,
                f"`max_seconds` must be a positive number, got {x!r}",
            )
            for x in (0, -1.0, float("nan"), "60", True, None)
        ),
        (lambda f: amp.debug.suggest_rules(f, "float8_e5m2")(jnp.ones(2)), ValueError, "float8_e5m2"),
        (lambda f: jax.jit(amp.debug.suggest_rules(f))(jnp.ones(2)), TypeError, "inside `jit`"),
        (lambda f: amp.debug.suggest_rules(f)(jnp.array([jnp.inf])), ValueError, "not finite in float32 either"),
    ],
)
def test_wrong_arguments_are_named(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(lambda w: jnp.sum(w))


def on_one_device(fun):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(
        lambda *args: jax.lax.pmean(fun(*args), "d"), mesh=mesh, in_specs=(jax.P(), jax.P("d")), out_specs=jax.P()
    )


def test_a_program_that_cannot_be_seen_into_has_no_rules_and_an_overflow_in_it_is_not_called_one_of_float32():
    loss_fn = on_one_device(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
    w, x = jnp.eye(8), jnp.linspace(0, 1, 32).reshape(4, 8)
    rules, _ = amp.debug.suggest_rules(loss_fn)(w, x, tol=1e-9)
    assert rules == {}
    with pytest.raises(ValueError, match=r"the gradient is not finite; shard_map at .* ran in low precision"):
        amp.debug.suggest_rules(on_one_device(lambda w, x: jnp.mean((1e5 * (x @ w)) @ w)))(w, 1e4 * x)
