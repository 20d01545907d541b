"""`amp.debug.fastest`: time, memory and error of a gradient under several settings."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_amp as amp
from jmp_amp._autocast import parse_settings
from jmp_amp.debug import _compare, _fastest

KEYS = jax.random.split(jax.random.key(0), 5)
PARAMS = {name: jax.random.normal(key, (8, 8)) / 3 for name, key in zip("qkvw", KEYS, strict=False)}
X = jax.random.normal(KEYS[4], (2, 6, 8))


def loss_fn(params, x):
    q, k, v = ((x @ params[name]).reshape(*x.shape[:2], 2, 4) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("bthd,bshd->bhts", q, k) / 2)
    return jnp.mean(jnp.tanh(jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape) @ params["w"]) ** 2)


@jax.custom_jvp
def missing(query):
    return jax.ffi.ffi_call("no_such_kernel", jax.ShapeDtypeStruct(query.shape, query.dtype))(query)


missing.defjvp(lambda primals, tangents: (missing(*primals), *tangents))


def no_kernel(query, key, value, **options):
    return missing(query)


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def errors(report):
    return {row.setting: row.error for row in report.rows}


def test_rows_have_the_error_of_the_gradient_and_the_memory_of_the_program():
    report = amp.debug.fastest(loss_fn, ["float16", {"dtype": "bfloat16", "save": "all"}])(PARAMS, X)
    assert {row.setting for row in report.rows} == {'"float32"', '"float16"', '"bfloat16", save="all"'}
    exact = jax.jit(jax.grad(loss_fn))(PARAMS, X)
    for row in report.rows:
        program = jax.jit(amp.grad(amp.autocast(loss_fn, **row.options), loss_scale=row.loss_scale))
        grads = jax.tree.map(lambda x, scale=row.loss_scale: np.float64(x) / scale, program(PARAMS, X))
        off, total = (np.concatenate([np.ravel(x[name]) for name in "kqvw"]) for x in (grads, exact))
        assert row.error == pytest.approx(_compare.relative_error(off, np.float64(total)), rel=1e-3, abs=1e-6)
        assert row.peak_bytes > row.temporary_bytes > 0
        assert row.reason == ""


def test_a_cpu_has_no_times_and_sorts_by_memory():
    report = amp.debug.fastest(loss_fn, ["float16"], tolerance=0.1)(PARAMS, X)
    memory = [row.peak_bytes for row in report.rows]
    assert memory == sorted(memory)
    assert all(math.isnan(row.seconds) for row in report.rows)
    assert report.best is report.rows[0]
    assert "Times mean nothing" in str(report)


def test_an_accelerator_has_times_and_sorts_by_them(as_on_a_gpu):
    report = amp.debug.fastest(loss_fn, ["float16"])(PARAMS, X)
    times = [row.seconds for row in report.rows]
    assert times == sorted(times)
    assert times[0] > 0
    assert "Times mean nothing" not in str(report)
    (line,) = (line for line in str(report).splitlines() if line.startswith('"float32"'))
    assert line.split()[2] == "1.00"


@pytest.mark.parametrize("tolerance", [1e-9, 1e-2, None])
def test_tolerance_marks_a_setting_and_says_what_to_write(tolerance, as_on_a_gpu):
    seconds = {'"float32"': 3.0, '"float16"': 1.0, '"bfloat16"': 2.0}
    rows = [
        _fastest.Timing({"dtype": name.strip('"')}, seconds=s, error=0.0 if "32" in name else s / 200)
        for name, s in sorted(seconds.items(), key=lambda x: x[1])
    ]
    report = _fastest.Timings(tuple(rows), "a device", True, tolerance, ())
    text = str(report)
    assert text.count("*") == 2 * bool(tolerance)
    if tolerance is None:
        assert report.best is None
    elif tolerance == 1e-9:
        assert 'loss_fn = amp.autocast(loss_fn, "float32")' in text
        assert "dynamic_loss_scale" not in text
    else:
        assert 'loss_fn = amp.autocast(loss_fn, "float16")\n    tx = amp.dynamic_loss_scale(tx)' in text
    assert report._repr_html_().count("<tr>") == len(rows)


SETTINGS = [
    *(
        "float16",
        jnp.float16,
        np.dtype("float16"),
        amp.get_policy("O2"),
        amp.get_policy("params=float16,output=float16"),
    ),
    {"dtype": jnp.bfloat16, "rules": {lax.tanh_p: "full", "head/*": "float32"}, "save": "all"},
    {"weight_grad_dtype": jnp.float32, "residual_stream": "low"},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_setting_is_written_as_code(setting):
    options = setting if isinstance(setting, dict) else {"dtype": setting}
    written = _fastest.Timing(options).setting
    names = {"jax": jax, "autocast": lambda dtype="float16", **options: parse_settings(dtype, **options)}
    assert eval(f"autocast({written})", names) == parse_settings(**options)
    assert written.count("=") == len(options) - ("dtype" in options) + 3 * isinstance(setting, amp.Policy)


def test_one_setting_needs_no_list():
    for setting in SETTINGS[:3]:
        rows = amp.debug.fastest(lambda w: jnp.sum(w @ w), setting)(jnp.ones((8, 8))).rows
        assert {row.setting for row in rows} == {'"float32"', '"float16"'}


def test_no_setting_below_the_tolerance_is_said():
    report = _fastest.Timings((_fastest.Timing({"dtype": "float16"}, error=1e-3),), "cpu", False, 1e-6, ())
    assert report.best is None
    assert "No setting was found to have an error of at most 1e-06." in str(report)


def test_a_setting_that_does_not_compile_has_the_reason_in_its_row():
    settings = [{"dtype": "bfloat16", "attention": no_kernel}, "bfloat16"]
    report = amp.debug.fastest(loss_fn, settings)(PARAMS, X)
    *measured, failed = report.rows
    assert failed.setting == '"bfloat16", attention=no_kernel'
    assert "no_such_kernel" in failed.reason
    assert failed.reason in str(report)
    assert math.isnan(failed.error)
    assert all(row.error < 0.1 and not row.reason for row in measured)


def test_a_gradient_that_does_not_fit_in_float32_leaves_the_others_without_errors(monkeypatch, as_on_a_gpu):
    measure, runs = _compare.unscaled, []

    def unscaled(*args):
        runs.append(args)
        if len(runs) <= 2:  # the reference, and float32 itself
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
        return measure(*args)

    monkeypatch.setattr(_compare, "unscaled", unscaled)
    report = amp.debug.fastest(loss_fn, ["float16"], tolerance=0.1)(PARAMS, X)
    low, full = report.rows
    assert full.reason == "JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory"
    assert full.peak_bytes > 0
    assert low.seconds > 0
    assert math.isnan(low.error)
    assert report.best is None
    assert "is not known: JaxRuntimeError: RESOURCE_EXHAUSTED" in str(report)


def test_options_that_change_no_program_are_named_and_not_listed():
    report = amp.debug.fastest(loss_fn)(PARAMS, X)
    assert set(errors(report)) == {'"float32"', '"bfloat16"', '"float16"'}
    assert 'change no program: "float8"; attention="cudnn"; residual_stream="low".' in str(report)
    assert sum("refuses attention" in note for note in report.notes) == 1


def test_nothing_is_compiled_when_the_time_is_over():
    report = amp.debug.fastest(loss_fn, ["float16"], max_seconds=1e-9)(PARAMS, X)
    assert {row.reason for row in report.rows} == {"not compiled in 1e-09 s"}


def test_a_setting_that_overflows_has_an_infinite_error():
    report = amp.debug.fastest(lambda w, x: jnp.sum((x @ w) ** 2) * 1e-9, ["float16"])(jnp.full((8, 2), 1e5), X)
    assert errors(report)['"float16"'] == math.inf


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: amp.debug.fastest(amp.autocast(loss_fn)), TypeError, "already under `autocast`.*as `settings`"),
        (lambda: amp.debug.fastest(loss_fn, ["float17"]), ValueError, "float17"),
        (lambda: amp.debug.fastest(loss_fn, [{"dtype": "float16", "kernel": 1}]), TypeError, "kernel"),
        (lambda: amp.debug.fastest(loss_fn, tolerance=0), ValueError, "`tolerance` must be positive, got 0"),
        (lambda: amp.debug.fastest(loss_fn, max_seconds=-1), ValueError, "`max_seconds` must be a positive number"),
        (lambda: jax.jit(amp.debug.fastest(loss_fn, []))(PARAMS, X), TypeError, "cannot run inside `jit`"),
        (lambda: amp.debug.fastest(loss_fn, [])(PARAMS, X[..., :3]), TypeError, "dot_general"),
        (lambda: amp.debug.fastest(loss_fn, [], argnums=1)(PARAMS, X * jnp.inf), ValueError, "not finite in float32"),
        (
            lambda: amp.debug.fastest(lambda n: jnp.float32(jnp.sum(n)), [])(jnp.arange(3)),
            TypeError,
            "no floating arrays",
        ),
    ],
)
def test_wrong_calls_raise(call, error, message):
    with pytest.raises(error, match=message):
        call()
