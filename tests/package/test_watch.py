"""`amp.watch.plot_history` and `amp.watch.live`, and what the docs show of loggers."""

import contextlib
import csv
import io
import pathlib
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import jmp_amp as amp
from jmp_amp import watch
from jmp_amp._calls import extra

PAGE = pathlib.Path(__file__).parents[2] / "docs/watching.md"


def run(finite):
    """A row a step, as a run logs them: on the device."""
    rule, rows = amp.LossScale(init_scale=2.0**10, growth_interval=3), []
    state = rule.init()
    for step, is_finite in enumerate(finite, 1):
        state = rule.update(state, is_finite)
        rows.append({"step": step, "loss": jnp.float32(1 / step), "grad_norm": jnp.float32(step), **amp.metrics(state)})
    return rows


FINITE = [True, True, True, False, True, False, False, True]


def curve(figure, title):
    axes = next(axes for axes in figure.axes if axes.get_title() == title)
    return [tuple(np.asarray(x).tolist() for x in line.get_data()) for line in axes.lines]


def test_the_history_shows_the_scale_the_skips_the_norm_and_the_loss(tmp_path):
    figure = amp.watch.plot_history(run(FINITE), tmp_path / "history.png")
    assert (tmp_path / "history.png").read_bytes().startswith(b"\x89PNG")
    assert [axes.get_title() for axes in figure.axes] == ["Loss", "Loss scale", "Norm of the unscaled gradients"]
    scale, skipped = curve(figure, "Loss scale")
    assert scale == ([*range(1, 9)], [1024, 1024, 2048, 1024, 1024, 512, 256, 256])
    assert skipped == ([4, 6, 7], [1024, 512, 256])
    assert curve(figure, "Norm of the unscaled gradients") == [([*range(1, 9)], [*range(1, 9)])]
    (loss,) = curve(figure, "Loss")
    np.testing.assert_allclose(loss[1], [1 / n for n in range(1, 9)], rtol=1e-6)


SCALES = {2.0**16: "2^16", 3.0: "2^1.58496", 2.0**-126: "2^-126", 0.0: "0", -4.0: "-4"}
SCALES |= {np.inf: "inf", -np.inf: "-inf", np.nan: "nan"}


@pytest.mark.parametrize("cast", [float, np.float32, jnp.float32], ids=lambda cast: cast.__name__)
@pytest.mark.parametrize("scale", SCALES)
def test_the_status_line_shows_every_scale(scale, cast):
    values = {"loss": jnp.float32(jnp.nan), "loss_scale": cast(scale), "grad_norm": np.float32(np.inf), "flag": True}
    assert watch.status_line(jax.device_get(values)) == f"loss nan scale {SCALES[scale]} norm inf flag 1"


@pytest.mark.parametrize("column", ["skipped", "total_notfinite", "last_finite"])
def test_skipped_steps_are_known_from_any_of_three_columns(column):
    rows = [
        {"loss_scale": row["loss_scale"], column: {"skipped": ~row["last_finite"], **row}[column]}
        for row in run(FINITE)
    ]
    assert curve(amp.watch.plot_history(rows), "Loss scale")[1][0] == [4, 6, 7]


def test_rows_that_are_logged_now_and_then_show_that_a_step_between_was_skipped():
    rows = [row for row in run(FINITE) if row["step"] % 2]
    assert curve(amp.watch.plot_history(rows), "Loss scale")[1][0] == [5, 7]
    # Of the steps before a run was resumed, nothing is known.
    assert curve(amp.watch.plot_history(rows[2:]), "Loss scale")[1][0] == [7]


def test_a_csv_file_of_metrics_gives_the_same_picture(tmp_path):
    rows = jax.device_get(run(FINITE))
    with (tmp_path / "metrics.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], "note"])
        writer.writeheader()
        writer.writerows({**row, "note": "any text"} for row in rows)
    for path in (tmp_path / "metrics.csv", str(tmp_path / "metrics.csv")):
        figure = amp.watch.plot_history(path)
        for title in ("Loss", "Loss scale", "Norm of the unscaled gradients"):
            for a, b in zip(curve(figure, title), curve(amp.watch.plot_history(rows), title), strict=True):
                np.testing.assert_allclose(a, b)


def test_the_csv_of_the_example_has_a_curve_for_each_run(tmp_path):
    path = tmp_path / "metrics.csv"
    header = "run,step,val_loss,tokens_per_s,loss,loss_scale,skipped,zero_grads\n"
    rows = "".join(f"{name},{n},{2.0 if n == 2 else 'nan'},9,{3 - n},8,{n == 2:d},0\n" for name in "ab" for n in (1, 2))
    path.write_text(header + rows)
    figure = amp.watch.plot_history(path)
    assert [axes.get_title() for axes in figure.axes] == ["Loss", "Loss scale"]
    assert curve(figure, "Loss") == [([1, 2], [2, 1]), ([2], [2])] * 2  # and the validation loss, where there is one
    assert curve(figure, "Loss scale")[1] == ([2], [8])
    assert [text.get_text() for text in figure.axes[0].get_legend().texts] == ["a", "b"]


def test_only_the_columns_that_are_there_are_drawn():
    figure = amp.watch.plot_history([{"loss": 1.0}, {"loss": float("inf")}, {"loss": 0.5}])
    assert curve(figure, "Loss") == [([1, 3], [1, 0.5])]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "`rows` is empty"),
        ([{"accuracy": 1.0}], "one of the columns loss, val_loss, loss_scale, grad_norm, got accuracy"),
        ([{"loss": np.ones(2)}], "the column `loss` must contain scalar numbers"),
        ([{"loss": "low"}], "the column `loss` must contain scalar numbers, got 'low'"),
    ],
)
def test_rows_that_cannot_be_drawn_say_why(rows, message):
    with pytest.raises(ValueError, match=message):
        amp.watch.plot_history(rows)


def console():
    return Console(file=io.StringIO(), width=100, force_terminal=False)


def test_the_live_line_ends_with_the_last_step():
    out = console()
    with amp.watch.live(total=8, name="float16", every=3, console=out) as view:
        for row in run(FINITE):
            view.update(**row, tokens_per_s=123456.0)
    line = out.file.getvalue()
    assert re.search(r"float16 .* 8/8 loss 0.125 scale 2\^8 skips 3 norm 8 tokens_per_s 123,456", line)


def test_the_live_line_fits_a_terminal_of_80_columns():
    out = Console(file=io.StringIO(), width=80, force_terminal=False)
    with amp.watch.live(total=300, name="float16_unscaled", console=out) as view:
        view.update(66, loss=2.26634, loss_scale=2.0**16, total_notfinite=12, **{"tok/s": 1234567.0})
    line = re.sub(" +", " ", out.file.getvalue()).strip()
    assert line == "float16_unscaled 66/300 loss 2.266 scale 2^16 skips 12 tok/s 1,234,567 --:--"


def test_the_install_command_of_the_error_is_that_of_the_pages():
    with pytest.raises(ImportError) as error:
        extra("no_such_package", "`live`")
    (command,) = re.findall(r"`(pip install .*?)`", str(error.value))
    for page in ("README.md", "docs/index.md", "docs/tutorial/train-step.md"):
        assert command in (PAGE.parent.parent / page).read_text()
    assert command.replace("demo]", "demo,frameworks]") in (PAGE.parent / "examples.md").read_text()


def test_the_live_line_does_not_wait_for_the_step_that_is_running(monkeypatch):
    fetched = []
    monkeypatch.setattr(jax, "device_get", lambda values: fetched.append(values["loss"]) or values)
    with amp.watch.live(every=4, console=console()) as view:
        for loss in range(1, 11):
            view.update(loss=loss)
            assert loss not in fetched
    assert fetched == [4, 8, 10]


def test_a_state_that_the_next_step_donates_may_be_shown(monkeypatch):
    rule, out, shown = amp.LossScale(init_scale=2.0**10, growth_interval=1), console(), []
    monkeypatch.setattr(jax, "device_get", lambda values: shown.append(values.get("loss_scale")) or values)
    step = jax.jit(lambda state: rule.update(state, True), donate_argnums=0)
    state = rule.init()
    with contextlib.suppress(KeyboardInterrupt), amp.watch.live(every=2, console=out) as view:
        for _ in range(5):
            state = step(state)
            view.update(loss=1.0, **amp.metrics(state))
        assert view._values["loss_scale"] == 2**15
        step(state)
        raise KeyboardInterrupt
    assert shown == [2**12, 2**14, None]  # of steps 2 and 4; that of step 5 is donated
    assert "5/? loss 1" in out.file.getvalue()


def test_a_resumed_run_goes_on_where_it_stopped_and_a_failed_one_shows_its_last_step():
    out = console()
    with contextlib.suppress(KeyboardInterrupt), amp.watch.live(total=10, start=5, console=out) as view:
        view.update(loss=2.0)
        view.update(loss=1.5)
        raise KeyboardInterrupt
    assert "7/10 loss 1.5" in out.file.getvalue()


def test_a_run_without_steps_or_with_numbered_ones_is_shown():
    out = console()
    with amp.watch.live(total=10, console=out):
        pass
    assert "0/10 compiling" in out.file.getvalue()
    with amp.watch.live(total=10, console=out) as view:
        view.update(9, loss=1.0)
    assert "9/10 loss 1" in out.file.getvalue()


def test_a_notebook_without_ipywidgets_shows_the_line(monkeypatch):
    shown = []

    def display(item, display_id):
        def update(item):
            shown.append(item._repr_mimebundle_(include=(), exclude=())["text/plain"])

        update(item)
        return types.SimpleNamespace(update=update)

    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    out = Console(file=io.StringIO(), force_jupyter=True)
    with amp.watch.live(total=4, name="float16", every=2, console=out) as view:
        for step in range(4):
            view.update(loss=step)
    assert [line.split()[-3:-1] for line in shown[1:]] == [["loss", "1"], ["loss", "3"]]
    assert "compiling" in shown[0]
    assert "4/4" in shown[-1]


def test_live_needs_a_positive_interval():
    with pytest.raises(ValueError, match="`every` must be at least 1, got 0"), amp.watch.live(every=0):
        pass


@pytest.mark.parametrize(
    ("module", "package", "call"),
    [
        ("matplotlib.figure", "matplotlib", lambda: amp.watch.plot_history([{"loss": 1.0}])),
        ("rich.progress", "rich", lambda: amp.watch.live().__enter__()),
    ],
)
def test_a_missing_extra_says_how_to_get_it(monkeypatch, module, package, call):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'needs {package}, .*`pip install -e "\.\[demo\]"` in a clone') as error:
        call()
    assert error.value.name == package


class Writer:
    """Stands in for the writers of tensorboardX, torch and clu."""

    def __init__(self, path, *, asynchronous=True):
        self.scalars = {}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def add_scalar(self, name, value, step):
        self.scalars[step, name] = float(value)

    def write_scalars(self, step, scalars):
        self.scalars |= {(step, name): float(value) for name, value in scalars.items()}

    def flush(self):
        pass


@pytest.mark.usefixtures("users_code")
def test_the_loggers_of_the_docs_get_every_metric(monkeypatch, tmp_path):
    stand_ins = {
        "tensorboardX": types.SimpleNamespace(SummaryWriter=Writer),
        "clu": types.SimpleNamespace(metric_writers=types.SimpleNamespace(create_default_writer=Writer)),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.chdir(tmp_path)
    scope, logged = {}, []
    for kind, block in re.findall(r"^```(python|py)\n(.*?)^```", PAGE.read_text(), re.M | re.S):
        exec(block, scope)
        if kind == "py":
            logged.append(scope["writer"].scalars)
    assert len(logged) == 2
    for scalars in logged:
        assert {"loss", "loss_scale", "grad_norm", "total_notfinite"} <= {name for _, name in scalars}
        assert {step for step, _ in scalars} == set(range(1, 201))
