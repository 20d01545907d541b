"""`amp.debug.underflow`: gradients of known exponents."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib.colors import to_rgb

import jmp_amp as amp
from jmp_amp.debug import underflow

# At scale 1 in float16: two zeros (2^-25 is a tie, which goes to the even 0), two subnormals, two normal numbers.
TRUE = 2.0 ** np.array([-30, -25, -24, -15, -14, 3])


def row_of(report, path):
    return next(row for row in report.rows if row.path == path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shares_are_those_of_float16_with_and_without_the_scale(dtype):
    row = underflow({"w": jnp.asarray(TRUE * 2**8, dtype)}, 2.0**8).total
    assert row.size == 6
    assert (row.zero, row.subnormal) == (0, 3 / 6)  # 2^-30, 2^-25 and 2^-24 are 2^-22, 2^-17 and 2^-16 now
    assert (row.zero_unscaled, row.subnormal_unscaled) == (2 / 6, 2 / 6)
    assert (row.overflow, row.largest) == (0, 11)


def test_what_float16_flushed_is_zero_whatever_the_scale():
    row = underflow(jnp.asarray(TRUE, jnp.float16)).rows[0]
    assert row.path == "(leaf)"
    assert (row.zero, row.zero_unscaled) == (2 / 6, 2 / 6)


def test_values_that_float16_cannot_hold_or_are_not_finite_overflow():
    row = underflow({"w": jnp.array([65519.0, 65520.0, jnp.inf, jnp.nan])}, 1.0).total
    assert row.overflow == 3 / 4  # 65520 is half way to 2^16, and rounds up
    assert row.largest == 15


def test_a_report_has_a_line_a_leaf_and_one_for_all():
    grads = {"dense": {"w": jnp.ones((2, 3)), "b": jnp.zeros(2)}, "head": [jnp.full(4, 2.0**-20)], "none": None}
    report = underflow(grads)
    assert [(row.path, row.size) for row in report.rows] == [("dense/b", 2), ("dense/w", 6), ("head/0", 4)]
    assert row_of(report, "dense/b").largest is None
    assert report.total.zero == 2 / 12
    assert report.total.subnormal == 4 / 12
    lines = str(report).splitlines()
    assert len(lines) == 5
    assert len({len(line) for line in lines}) == 1
    assert "100.0%" in lines[1]


def test_modules_have_histograms_of_the_true_exponents():
    grads = {"dense": {"w": jnp.array([0.75, 1.5, 0.0]), "b": jnp.array([1.0])}}
    assert underflow(grads, 4.0).exponents == {"dense": {-3: 1, -2: 2, None: 1}}


def test_leaves_that_are_not_floating_are_left_out():
    grads = {
        "w": jnp.ones(2),
        "steps": jnp.arange(3),
        "empty": jnp.zeros((0, 2)),
        "zero": np.zeros(2, jax.dtypes.float0),
        "activation": jax.nn.relu,
        "complex": jnp.ones(2, jnp.complex64),
    }
    assert [row.path for row in underflow(grads).rows] == ["w"]


def test_a_share_that_is_not_zero_does_not_look_like_it():
    report = underflow(jnp.ones(10_000).at[0].set(0.0))
    assert "<0.1%" in str(report)


def test_the_gradients_of_a_scaled_loss_are_understood_as_they_come():
    def loss_fn(w):
        return jnp.sum(w * jnp.asarray([2.0**-26, 1.0], jnp.float16))

    params = jnp.ones(2, jnp.float16)
    lost = underflow(amp.grad(loss_fn)(params))
    kept = underflow(amp.grad(loss_fn, loss_scale=2.0**15)(params), 2.0**15)
    assert (lost.total.zero, kept.total.zero) == (0.5, 0.5)  # the constant itself is 0 in float16
    assert kept.total.largest == 15


def test_the_picture_marks_what_float16_loses(tmp_path):
    grads = {"dense": {"w": jnp.asarray(TRUE)}, "head": {"w": jnp.zeros(3)}}
    figure = underflow(grads).plot(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    dense, head = figure.axes
    assert (dense.get_ylabel(), head.get_ylabel()) == ("dense", "head")
    bars = {round(bar.get_x() + 0.45): bar.get_facecolor()[:3] for bar in dense.containers[0]}
    lost, held = to_rgb("#c8443c"), to_rgb("#3b6fb6")
    assert [bars[k] for k in (-30, -25, -24, -15, -14, 3)] == [lost, lost, held, held, held, held]
    assert "100.0% zeros" in {text.get_text() for text in head.texts}


@pytest.mark.parametrize("dtype", ["float16", "float8"])
@pytest.mark.parametrize("values", [[np.inf], [np.nan, -np.inf], [np.inf, 1], [0], [0, np.nan]], ids=str)
def test_the_picture_and_the_table_have_a_module_of_any_values(values, dtype):
    report = underflow({"a": jnp.float32(values), "b": jnp.ones(2)}, dtype=dtype)
    texts = {text.get_text() for text in report.plot().axes[0].texts}
    assert ("not finite" in texts) == (not np.isfinite(values).any())
    assert ("100.0% zeros" in texts) == (0 in values)
    assert report.rows[0].overflow == np.mean(~np.isfinite(values))
    assert "a " in str(report)


def test_the_range_in_the_picture_moves_with_the_scale():
    figure = underflow({"w": jnp.ones(2) * 2**8}, 2.0**8).plot()
    ends = [patch.get_x() for patch in figure.axes[0].patches[:2]]
    assert ends == [-32, -22]
    assert "2^8" in figure.get_suptitle()


def test_inside_jit_it_says_what_to_do():
    with pytest.raises(TypeError, match="return the gradients from the jitted step"):
        jax.jit(underflow)(jnp.ones(2))
    with pytest.raises(TypeError, match="cannot run inside `jit`"):
        jax.jit(lambda scale: underflow(jnp.ones(2), scale))(jnp.float32(2))


@pytest.mark.parametrize(
    ("grads", "scale", "message"),
    [
        ({"steps": jnp.arange(3)}, 1.0, "`grads`, a dict, contains no floating arrays"),
        ({}, 1.0, "no floating arrays"),
        (jnp.ones(2), 0.0, "`loss_scale` must be a number from 2"),
        (jnp.ones(2), np.inf, "`loss_scale`"),
    ],
)
def test_wrong_arguments_are_named(grads, scale, message):
    with pytest.raises(ValueError, match=message):
        underflow(grads, scale)


def test_without_matplotlib_the_table_is_there_and_the_picture_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report = underflow(jnp.ones(2))
    assert "zero x2^0" in str(report)
    with pytest.raises(ImportError, match=r'`plot` needs matplotlib.*`pip install -e "\.\[demo\]"` in a clone'):
        report.plot()
