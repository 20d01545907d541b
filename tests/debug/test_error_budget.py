"""`amp.debug.error_budget`: how much each rounding adds to the error of the gradient."""

import json
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp import _jaxpr as jx
from jmp_amp.debug._compare import floating_value_and_grad
from jmp_amp.debug._emulation import Emulation

KEYS = jax.random.split(jax.random.key(0), 8)
W = {name: jax.random.normal(key, (8, 8)) / 3 for name, key in zip("abc", KEYS, strict=False)}
X = jax.random.normal(KEYS[3], (16, 8))


def layers(params, x, wrap=lambda f: f):
    layer = wrap(lambda x, w: jnp.tanh(x @ w))
    for name, w in params.items():
        with jax.named_scope(name):
            x = layer(x, w)
    return jnp.mean(jnp.square(x))


def scanned(params, x, wrap=lambda f: f):
    step = wrap(lambda x, w: (jnp.tanh(x @ w), None))
    x, _ = lax.scan(step, x, jnp.stack([*params.values()]))
    return jnp.mean(jnp.square(x))


def branched(params, x):
    x = lax.cond(x[0, 0] < 9, lambda x: jnp.tanh(x @ params["a"]), lambda x: jnp.sin(x), x)
    return jnp.mean(jnp.square(x @ params["b"]))


@jax.custom_vjp
def settled(w, x):
    def step(y):
        return jnp.tanh(0.3 * y @ w + x)

    _, y = lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, step(c[1])), (0, jnp.zeros_like(x)))
    return y


def settled_forward(w, x):
    y = settled(w, x)
    return y, (w, x, y)


def settled_backward(kept, ct):
    w, x, y = kept
    _, pull = jax.vjp(lambda w, x: jnp.tanh(0.3 * y @ w + x), w, x)
    return pull(ct)


settled.defvjp(settled_forward, settled_backward)


def with_while(params, x):
    return jnp.mean(jnp.square(settled(params["a"], x) @ params["b"]))


def emulation(loss_fn, dtype, *args):
    return Emulation(loss_fn, args, {}, {"dtype": dtype}, {"has_aux": False, "transform": floating_value_and_grad})


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


def distance(x, y):
    return np.linalg.norm(x - y) / np.linalg.norm(y)


PROGRAMS = {
    "layers": layers,
    "checkpoint": partial(layers, wrap=jax.checkpoint),
    "scan": scanned,
    "checkpoint in a scan": partial(scanned, wrap=jax.checkpoint),
    "cond": branched,
}


@pytest.mark.sweep(30)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_switches_lead_from_float32_to_low_precision_and_each_rounding_is_estimated(name, dtype):
    loss_fn, scale = PROGRAMS[name], 2.0**8
    program = emulation(loss_fn, dtype, W, X)
    low, exact = program(program.default, scale), program(0 * program.default, scale)
    native = flat(jax.jit(amp.grad(amp.autocast(loss_fn, dtype), loss_scale=scale))(W, X)) / scale
    assert distance(exact.grads, flat(jax.jit(jax.grad(loss_fn))(W, X))) < 1e-6
    assert distance(low.grads, exact.grads) == pytest.approx(distance(native, exact.grads), rel=0.25)

    budget = amp.debug.error_budget(loss_fn, dtype, probes=16, loss_scale=scale)(W, X)
    assert budget.total == pytest.approx(distance(low.grads, exact.grads))
    assert 0.5 < budget.explained < 2
    assert sum(row.share for row in budget.rows) == pytest.approx(1)
    rounds = [i for i, row in enumerate(program.rows) if not row.decides]
    ones = np.eye(len(program.rows), dtype=np.float32)[rounds]
    alone = [distance(program(one, scale).grads, exact.grads) for one in ones]
    large = np.array(alone) > 0.1 * max(alone)
    ratios = np.array([row.error for row in budget.rows])[large] / np.array(alone)[large]
    assert ((ratios > 0.5) & (ratios < 2)).all()


@cache
def budget_of(name, dtype="float16"):
    return amp.debug.error_budget(PROGRAMS[name], dtype, probes=16)(W, X)


def test_a_checkpoint_changes_nothing():
    plain, checkpointed = budget_of("layers"), budget_of("checkpoint")
    pairs = [[(row.primitive, row.direction, row.error) for row in x.rows] for x in (plain, checkpointed)]
    assert plain.total == pytest.approx(checkpointed.total, rel=1e-3)
    assert len(pairs[0]) == len(pairs[1])


def test_a_loop_sums_the_roundings_of_its_iterations():
    unrolled, loop = budget_of("layers", "bfloat16"), budget_of("scan", "bfloat16")
    assert {row.runs for row in loop.rows} == {3}
    assert loop.total == pytest.approx(unrolled.total, rel=0.1)
    for name in ("dot_general", "tanh"):
        one, many = (next(x.error for x in b.by_primitive() if x.primitive == name) for b in (loop, unrolled))
        assert 0.6 < one / many < 1.6


def test_what_a_loop_reads_in_every_iteration_is_rounded_once():
    def loss_fn(w, x):
        return jnp.mean(lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, None, 8)[0] ** 2)

    budget = amp.debug.error_budget(loss_fn, "bfloat16")(W["a"], X)
    assert {row.runs for row in budget.rows} == {1, 8}


def test_a_sum_in_16_bits_of_the_users_own_is_named():
    rows = jax.random.normal(jax.random.key(0), (600, 8))

    def loss_fn(w, rows):
        squares = jnp.tanh(rows @ w) ** 2
        total = lax.scan(lambda c, x: (c + x.astype(jnp.bfloat16), None), jnp.zeros(8, jnp.bfloat16), squares)[0]
        return jnp.mean((total.astype(jnp.float32) / 600) ** 2)

    budget = amp.debug.error_budget(loss_fn, "bfloat16")(W["a"], rows)
    assert budget.total > 0.03
    (worst,) = [row for row in budget.rows if row.share > 0.5]
    assert worst.primitive == "add"
    suggestion = amp.debug.suggest_rules(loss_fn, "bfloat16")(W["a"], rows)
    assert not suggestion.rules  # no product is to blame


def test_a_while_loop_runs_as_it_was_traced_and_is_named():
    budget = amp.debug.error_budget(with_while, "bfloat16", probes=16)(W, X)
    (named,) = budget.opaque
    assert re.fullmatch(r"while at .*test_error_budget.py:\d+ \(with_while\)", named)
    assert f"Not seen: roundings in {named}." in str(budget)
    assert 0.5 < budget.explained < 2


def test_of_a_gradient_of_0_nothing_is_said_of_independence():
    budget = amp.debug.error_budget(lambda w: 0 * jnp.sum(w @ w))(jnp.ones((16, 16)))
    assert budget.total == 0
    assert "independent" not in str(budget)


def test_errors_are_linear_in_the_roundings():
    fine, coarse = budget_of("layers"), budget_of("layers", "bfloat16")
    for a, b in ((fine.total, coarse.total), (fine.explained * fine.total, coarse.explained * coarse.total)):
        assert 6 < b / a < 10


def test_errors_pass_through_stop_gradient():
    def loss_fn(params, x):
        target = lax.stop_gradient(jnp.tanh(x @ params["b"]))
        return jnp.mean(jnp.square(jnp.tanh(x @ params["a"]) - target))

    budget = amp.debug.error_budget(loss_fn, "bfloat16", probes=8)(W, X)
    products = [row for row in budget.rows if (row.primitive, row.direction) == ("dot_general", "forward")]
    assert len(products) == 2
    assert all(row.error > 0 for row in products)
    assert 0.7 < budget.explained < 1.4


def test_a_planted_module_has_the_largest_share():
    def loss_fn(params, x):
        for name, w in params.items():
            with jax.named_scope(name):
                x = jnp.tanh(x @ w)
                if name == "b":
                    x = x @ (64 + jnp.eye(8)) - x @ jnp.full((8, 8), 64.0)
        return jnp.mean(jnp.square(x))

    budget = amp.debug.error_budget(loss_fn)(W, X)
    first = budget.by_module()[0]
    assert first.module == "b"
    assert first.share > 0.9
    line = budget.by_line()[0].source
    assert re.fullmatch(r".*test_error_budget.py:\d+ \(.*loss_fn\)", line)
    assert line in str(budget)


def test_errors_of_equal_elements_add_up():
    def loss_fn(params, x):
        return jnp.mean(jnp.square(jnp.tanh(x @ params["w"]) @ params["v"]))

    params, x = {"w": jnp.full((8, 32), 0.3), "v": jnp.full((32, 4), 0.13)}, 0.1 * jnp.abs(X)
    program = emulation(loss_fn, "bfloat16", params, x)
    runs = [program(0 * program.default, 1.0, seed) for seed in range(32)]
    index = next(i for i, row in enumerate(program.rows) if row.size == 256)
    alone = distance(program(np.eye(len(program.rows))[index], 1.0).grads, runs[0].grads)
    budget = amp.debug.error_budget(loss_fn, "bfloat16", probes=32)(params, x)
    uncorrelated = np.sqrt(np.mean([run.squares[index] for run in runs])) / np.linalg.norm(runs[0].grads)
    assert uncorrelated < alone / 4
    assert 0.5 < budget.rows[index].error / alone < 2


def test_an_overflow_is_reported_and_not_averaged():
    def loss_fn(w, x):
        return jnp.mean(jnp.cbrt(x @ w) @ jnp.ones((8, 2)))

    budget = amp.debug.error_budget(loss_fn)(300 * jnp.ones((8, 8)), 300 + X)
    assert budget.total == np.inf
    over = [row for row in budget.rows if row.overflows]
    assert {row.primitive for row in over} == {"dot_general"}
    assert all(np.isnan(row.error) for row in over)
    assert sum(row.share for row in budget.rows if not row.overflows) == pytest.approx(1)
    assert "Overflow, in no share: `dot_general` at" in str(budget)
    assert json.loads(budget.to_json())["total"] is None


def test_the_loss_scale_is_the_largest_without_overflow():
    budget = amp.debug.error_budget(lambda w: jnp.sum(jnp.tanh(X @ w) @ W["b"]))(W["a"])
    assert 1 < budget.loss_scale <= 2**16
    assert np.isfinite(budget.total)
    assert (
        amp.debug.error_budget(lambda w: 100 * jnp.sum(jnp.tanh(X @ w) @ W["b"]))(W["a"]).loss_scale < budget.loss_scale
    )


def test_what_overflows_behind_a_mask_is_no_overflow():
    def loss_fn(w, x):
        y = x @ w
        return jnp.mean(jnp.where(y < 1e4, y, 0.0))

    for large, is_finite in ((2e4, True), (1e6, False)):  # the product overflows; `x`, which the gradient reads, too
        x = jnp.ones((4, 8)).at[0].set(large)
        budget = amp.debug.error_budget(loss_fn)(jnp.ones((8, 8)), x)
        native = jax.grad(amp.autocast(loss_fn))(jnp.ones((8, 8)), x)
        assert np.isfinite(budget.total) == np.isfinite(flat(native)).all() == is_finite
        assert any(row.overflows for row in budget.rows) != is_finite


def test_the_shares_of_all_groupings_add_up_and_the_report_has_every_form(tmp_path):
    budget = budget_of("layers")
    for shares in (budget.by_line(), budget.by_module(), budget.by_primitive()):
        assert sum(x.share for x in shares) == pytest.approx(1)
        assert sum(x.size for x in shares) == sum(row.size for row in budget.rows)
    assert {x.module for x in budget.by_module()} >= {"a", "b", "c"}
    content = json.loads(budget.to_json())
    assert content["total"] == budget.total
    assert len(content["rows"]) == len(budget.rows)
    assert "<table>" in budget._repr_html_()
    pytest.importorskip("matplotlib")
    budget.plot(tmp_path / "budget.png")
    assert (tmp_path / "budget.png").stat().st_size > 1000


def test_modules_of_libraries_are_differentiated_by_their_transform():
    eqx, nnx = pytest.importorskip("equinox"), pytest.importorskip("flax.nnx")
    loss_fn = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)  # noqa: E731
    model = eqx.nn.MLP(8, 4, 8, 1, key=KEYS[0])
    budgets = [
        amp.debug.error_budget(loss_fn, transform=transform)(model, X)
        for transform in (eqx.filter_value_and_grad, floating_value_and_grad)
    ]
    assert budgets[0].rows == budgets[1].rows
    linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    of_nnx = amp.debug.error_budget(lambda m, x: jnp.mean(m(x) ** 2), transform=nnx.value_and_grad)(linear, X)
    assert 0 < of_nnx.total < 1e-2


def test_arguments_that_are_no_floating_arrays_and_aux_pass_through():
    def loss_fn(params, act, x, n):
        return jnp.mean(act(x @ params["a"]) ** 2), {"n": n}

    budget = amp.debug.error_budget(loss_fn, has_aux=True, argnums=(0,))(W, jnp.tanh, X, jnp.int32(2))
    assert 0 < budget.total < 1e-2


def relus(params, x):
    for name, w in params.items():
        with jax.named_scope(name):
            x = x + jax.nn.relu(x @ w) @ w.T
    return jnp.mean(jnp.square(x))


def pooled(params, x):
    image = lax.conv_general_dilated(
        x.reshape(-1, 4, 4, 8), params["a"][None, None], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean(lax.reduce_window(image, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2)


def chosen(params, x):
    with amp.precision("bfloat16"):  # else this product is float32, as that of every router
        gates, which = lax.top_k(x @ params["a"], 2)
    return jnp.mean((jnp.tanh(x @ params["b"])[:, None] * jax.nn.one_hot(which, 8) * gates[..., None]) ** 2)


def nearest(params, x):
    codes = x @ params["a"]
    which = jnp.argmax(jnp.tanh(codes) @ params["b"], -1)
    return jnp.mean(jnp.square(codes - params["c"][which]))


def straight_through(x):
    return x + lax.stop_gradient(jnp.round(8 * x) / 8 - x)


def scanned_relus(params, x):
    step = lambda x, w: (x + jax.nn.leaky_relu(x @ w), None)  # noqa: E731
    return jnp.mean(jnp.square(lax.scan(step, x, jnp.stack([*params.values()]))[0]))


def branches_in_a_scan(params, x):
    def step(carry, row):
        y = row @ params["a"] + carry
        y = lax.cond(jnp.sum(y) > 0, lambda y: jax.nn.relu(y) @ params["b"], lambda y: y / 2, y)
        return y / 10, y

    return jnp.mean(jnp.square(lax.scan(step, jnp.zeros(8), x[:256])[1] @ params["c"]))


KINKS = {
    "cond in a scan": branches_in_a_scan,
    "relu": relus,
    "scan": scanned_relus,
    "max pooling": pooled,
    "top_k": chosen,
    "argmax": nearest,
    "clip": lambda params, x: jnp.mean(jnp.clip(x @ params["a"], -0.3, 0.5) ** 2),
    "abs": lambda params, x: jnp.mean(jnp.abs(jnp.tanh(x @ params["a"]) @ params["b"] @ params["c"])),
    "sort": lambda params, x: jnp.mean(jnp.sort(x @ params["a"], 0) * jnp.arange(2048.0)[:, None]),
    "round": lambda params, x: jnp.mean((straight_through(x @ params["a"]) @ params["b"]) ** 2),
    "comparison": lambda params, x: jnp.mean(jnp.where(x @ params["a"] > 0.3, x @ params["b"], 1.0) ** 2),
}


@pytest.mark.sweep(33)
@pytest.mark.parametrize("name", KINKS)
def test_decisions_that_roundings_flip_are_rows_with_their_line(name):
    loss_fn = KINKS[name]
    args = W, jax.random.normal(KEYS[4], (2048, 8))
    budget = amp.debug.error_budget(loss_fn, "bfloat16", loss_scale=1.0, probes=8)(*args)
    decisions = [row for row in budget.rows if row.decides]
    assert 0.8 < budget.explained < 1.25
    first = max(decisions, key=lambda row: row.error)
    assert first.flips > 0
    assert re.fullmatch(r".*test_error_budget.py:\d+ \(.*\)", first.source)
    assert f"{first.flips} flips" in str(budget)

    # Its switch makes the decisions of the run in low precision, and nothing else.
    program = emulation(loss_fn, "bfloat16", *args)
    exact, low = (program(on * program.default, 1.0) for on in (0, 1))
    on = np.array([row.decides for row in program.rows], np.float32)
    flipped = program(on, 1.0, decisions=low.decisions)
    assert distance(flipped.grads, exact.grads) > 0.5 * first.error
    assert (program(on, 1.0, decisions=exact.decisions).grads == exact.grads).all()


def test_what_a_custom_derivative_computes_in_the_backward_pass_has_its_scope():
    program = jax.make_jaxpr(amp.grad(amp.autocast(relus)))(W, X)
    found = [jx.Site.at(eqns) for eqns in jx.equations_in(program) if eqns[-1].primitive.name == "select_n"]
    assert {at.module for at in found if at.direction != "forward"} == set("abc")


def test_when_it_is_late_the_decisions_that_are_left_share_one_run_by_their_flips():
    args = W, jax.random.normal(KEYS[4], (2048, 8))
    budget = amp.debug.error_budget(relus, "bfloat16", loss_scale=1.0, max_seconds=1e-9)(*args)
    decisions = [row for row in budget.rows if row.decides]
    assert len(decisions) == 3
    shares = [row.share / row.flips for row in decisions]
    assert shares == pytest.approx([shares[0]] * 3)
    assert 0.5 < budget.explained < 2


def taken(y, limit):
    return lax.cond(jnp.mean(3 * y) > limit, lambda y: jax.nn.relu(y + 2) ** 2, lambda y: 3 * y, y)


@pytest.mark.slow
def test_what_only_one_run_does_has_no_flips_and_the_decision_to_do_it_has_the_whole_error():
    def loss_fn(w, limit):
        return jnp.mean(taken(jnp.tanh(X @ (64 + w) - X @ jnp.full((8, 8), 64.0)), limit))

    # Between the losses, of which the functions decide, in low precision and in float32:
    limit = (loss_fn(W["a"], jnp.inf) + amp.autocast(loss_fn, "bfloat16")(W["a"], jnp.inf)) / 2
    budget = amp.debug.error_budget(loss_fn, "bfloat16", loss_scale=1.0)(W["a"], limit)
    (row,) = (row for row in budget.rows if row.decides)
    assert row.flips == 1
    assert 0.5 < row.error / budget.total < 2


def test_without_kinks_there_are_no_decisions_to_record():
    mask = jnp.tril(jnp.ones((16, 16), bool))

    def loss_fn(w, tokens):
        x = w[tokens]
        return jnp.mean((jax.nn.softmax(jnp.where(mask, x @ x.T, -1e9)) @ x) ** 2)

    program = emulation(loss_fn, "bfloat16", W["a"], jnp.arange(16) % 8)
    assert not program(program.default, 1.0).decisions
    assert not any(row.decides for row in program.rows)


@pytest.mark.slow
def test_ops_of_integers_stay_as_traced():
    def loss_fn(w, x, counts, bits):
        n = len(x)
        flags = lax.reduce_window(counts, 0, lax.add, (2,), (1,), "SAME") + lax.cumsum(counts) + lax.cummax(counts)
        flags += jax.ops.segment_sum(counts, counts % 4, n) + jax.ops.segment_max(counts, counts % 4, n).clip(0)
        flags += jax.ops.segment_min(counts, counts % 4, n).clip(0, 9) + jax.ops.segment_prod(counts, counts % 4, n)
        flags += jnp.bincount(counts, length=n) + jnp.searchsorted(jnp.cumsum(counts), counts)
        flags += lax.population_count(bits) + lax.clz(bits) + (bits >> 1 & 3 ^ 1) + jnp.argsort(-counts) + counts**3
        flags += counts @ jnp.ones((n, n), jnp.int32) + lax.sort(bits) % 5 + lax.reduce_xor(counts, (0,)) // 2
        flags = flags.at[counts].add(1).at[counts].mul(2).at[counts].min(99) + jnp.sign(counts - 2)
        flags += lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + counts), (0, counts))[1]
        y = jnp.repeat(x @ w, counts, total_repeat_length=2 * n, axis=0)
        return jnp.mean(jnp.tanh(y[:n] * jnp.cos(flags.astype(jnp.float32))[:, None]) ** 2)

    counts = jnp.arange(16) % 4
    args = W["a"], X, counts, 3 * counts + 1
    program = emulation(loss_fn, "bfloat16", *args)
    exact, low = (program(on * program.default, 1.0) for on in (0, 1))
    native = flat(jax.jit(jax.grad(amp.autocast(loss_fn, "bfloat16")))(*args))
    assert distance(exact.grads, flat(jax.jit(jax.grad(loss_fn))(*args))) < 1e-6
    assert distance(low.grads, exact.grads) == pytest.approx(distance(native, exact.grads), rel=0.25)


@pytest.mark.slow
def test_float8_products_round_with_their_scales():
    loss_fn = amp.precision("float8")(layers)
    args = {name: jnp.kron(w, jnp.eye(4)) for name, w in W.items()}, jnp.kron(X, jnp.ones((1, 4)))
    measured = amp.debug.compare(loss_fn, ["float16"], loss_scale=2.0**8)(*args).gradient["float16"]
    budget = amp.debug.error_budget(loss_fn, loss_scale=2.0**8)(*args)
    assert budget.total > 0.02
    assert budget.total == pytest.approx(measured, rel=0.1)
    assert budget.by_primitive()[0].primitive == "float8_dot_general"


def test_what_cannot_be_seen_into_is_listed():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def mapped(params, x):
        mean = jax.shard_map(
            lambda w, x: lax.pmean(jnp.mean(jnp.tanh(x @ w)), "d"),
            mesh=mesh,
            in_specs=(jax.P(), jax.P("d")),
            out_specs=jax.P(),
        )
        return mean(params["a"], x)

    budget = amp.debug.error_budget(lambda params, x: mapped(params, x) + layers({"b": params["b"]}, x))(W, X)
    assert any(x.startswith("shard_map at") for x in budget.opaque)
    assert "Not seen: roundings in shard_map at" in str(budget)
    with pytest.raises(ValueError, match=r"rounded to float16 outside of shard_map at .*, which cannot be seen into"):
        amp.debug.error_budget(mapped)(W, X)


def of_integers(n):
    return jnp.sum(n.astype(jnp.float32))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: amp.debug.error_budget("loss"), TypeError, "takes a function, got str"),
        (lambda: amp.debug.error_budget(amp.autocast(layers)), TypeError, "already under `autocast`"),
        (
            lambda: amp.debug.error_budget(layers, probes=0),
            ValueError,
            "`probes` must be an integer of at least 1, got 0",
        ),
        (
            lambda: amp.debug.error_budget(layers, max_seconds=float("nan")),
            ValueError,
            "`max_seconds` must be a positive number, got nan",
        ),
        (lambda: amp.debug.error_budget(layers, W, X), TypeError, "after the function"),
        (
            lambda: amp.debug.error_budget(lambda w: X @ w)(W["a"]),
            TypeError,
            "the loss must be a scalar, got shape (16, 8)",
        ),
        (lambda: amp.debug.error_budget(of_integers)(jnp.arange(3)), TypeError, "there are no floating arrays"),
        (
            lambda: amp.debug.error_budget(lambda w: jnp.sum(w**2))(jnp.ones(3)),
            ValueError,
            "nothing in `fun` is rounded",
        ),
        (lambda: jax.jit(amp.debug.error_budget(layers))(W, X), TypeError, "inside `jit`"),
        (
            lambda: amp.debug.error_budget(layers)(W, X.at[0, 0].set(jnp.inf)),
            ValueError,
            "not finite in float32 either",
        ),
    ],
)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()
