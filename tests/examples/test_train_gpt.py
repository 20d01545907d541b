"""The GPT example, run through its command line at a tiny size."""

import csv
import importlib.util
import math
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
TINY = "--dim 16 --layers 1 --context 16 --batch 8 --steps 30 --lr 1e-2 --init-scale 1024"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example() -> Iterator[ModuleType]:
    with jax.numpy_dtype_promotion("standard"):  # `optax.adamw` takes a float to an integer power
        yield load_example()


def read_runs(out: Path) -> dict[str, list[dict[str, float]]]:
    """The rows of `metrics.csv` as numbers, by run."""
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = dict.fromkeys(row["run"] for row in rows)
    return {n: [{k: float(v) for k, v in r.items() if k != "run"} for r in rows if r["run"] == n] for n in names}


def column(rows: list[dict[str, float]], field: str) -> np.ndarray:
    return np.array([row[field] for row in rows])


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_model_type_checks_under_strict_promotion():
    example = load_example()
    params = example.init_params(example.Config(dim=16, layers=2, context=16))
    tokens = jax.ShapeDtypeStruct((8, 17), "int32")
    grads = jax.eval_shape(jax.grad(example.loss_fn), params, tokens)
    assert {leaf.dtype for leaf in jax.tree.leaves(grads)} == {np.dtype("float32")}


def test_float16_run_skips_the_injected_overflow_and_goes_on(example, tmp_path, capsys, monkeypatch):
    traces = []
    measure = example.measure
    monkeypatch.setattr(example, "measure", lambda *args: traces.append(args) or measure(*args))
    example.main([*TINY.split(), "--growth-interval", "15", "--inject-overflow", "20", "--out", str(tmp_path)])

    (rows,) = read_runs(tmp_path).values()
    assert column(rows, "step").tolist() == list(range(1, 31))
    assert np.flatnonzero(column(rows, "skipped")).tolist() == [19]
    assert column(rows, "loss_scale").tolist() == [1024] * 14 + [2048] * 5 + [1024] * 11
    losses = column(rows, "loss")
    assert np.isfinite(losses).all()
    assert losses[-5:].mean() < losses[:5].mean() - 1
    assert np.flatnonzero(np.isfinite(column(rows, "val_loss"))).tolist() == [19, 29]
    assert len(traces) == 1  # one program for all steps, the injected one included
    assert is_png(tmp_path / "loss.png")
    output = capsys.readouterr().out
    assert output.startswith("mixed_float16 0/30 compiling\nmixed_float16 20/30 val loss ")  # what a log file has early
    assert "\n320 bytes that mixed_float16 wrote, at temperature 0.7:\n" in output
    (summary,) = re.findall(r"^ mixed_float16 +\d+\.\d{4} .*$", output, re.M)
    assert not {"(", "…"} & set(summary)  # nothing to compare with, nothing cut


def write_nothing(params, prompt, key):
    """A stand-in for `generate`, which takes as long to compile as a step."""
    return prompt


@pytest.mark.slow
def test_compare_runs_the_same_training_three_times(example, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(example, "generate", write_nothing)
    example.main([*TINY.split(), "--precision", "compare", "--out", str(tmp_path)])
    runs = read_runs(tmp_path)
    assert list(runs) == ["float32", "float16_unscaled", "mixed_float16"]
    np.testing.assert_allclose([rows[0]["loss"] for rows in runs.values()], runs["float32"][0]["loss"], rtol=1e-3)
    final = {name: rows[-1]["val_loss"] for name, rows in runs.items()}
    assert math.isclose(final["mixed_float16"], final["float32"], rel_tol=0.01)
    zeros = {name: column(rows, "zero_grads").mean() for name, rows in runs.items()}
    assert zeros["float32"] <= zeros["mixed_float16"] < zeros["float16_unscaled"]
    assert column(runs["float32"], "loss_scale").tolist() == [1] * 30
    output = capsys.readouterr().out
    assert all(name in output for name in runs)
    relative = {name: re.search(rf"^ {name} .*$", output, re.M)[0].count("(") for name in runs}
    assert relative == {"float32": 0, "float16_unscaled": 2, "mixed_float16": 2}
    assert "…" not in output.partition("Wrote")[0]


@pytest.mark.slow
def test_float8_trains_in_the_layers_alone(example, tmp_path, monkeypatch):
    monkeypatch.setenv("JMP_AMP_EMULATE_FLOAT8", "")
    monkeypatch.delenv("JMP_AMP_EMULATE_FLOAT8")  # the example sets it, until the test ends
    example.main([*TINY.split(), "--precision", "compare_float8", "--out", str(tmp_path)])
    runs = read_runs(tmp_path)
    assert list(runs) == ["float32", "mixed_bfloat16", "float8"]
    losses = {name: column(rows, "loss") for name, rows in runs.items()}
    assert (losses["float8"] != losses["mixed_bfloat16"]).all()  # not bfloat16 under another name
    # A single batch of 128 tokens differs by 2% at a learning rate that differs by 1%.
    assert losses["float8"][-10:].mean() == pytest.approx(losses["float32"][-10:].mean(), rel=0.01)
    assert column(runs["float8"], "loss_scale").tolist() == [1] * 30


def press_ctrl_c(example: ModuleType, monkeypatch: pytest.MonkeyPatch, step_fn: Callable, at: int) -> list[int]:
    """While step `at` runs; returns a list that grows by one a step."""
    steps: list[int] = []

    def step(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        steps.append(len(steps) + 1)
        if len(steps) == at:
            signal.raise_signal(signal.SIGINT)
        return step_fn(*args, **kwargs)

    monkeypatch.setattr(example, "train_step", step)
    return steps


def unmoved(example: ModuleType) -> Callable:
    """A step that takes no time to compile."""

    def step(params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        grads = jax.tree.map(jnp.ones_like, params)
        return params, opt_state, example.measure(jnp.float32(5), grads, amp.metrics(opt_state))

    return step


def test_ctrl_c_writes_what_there_is(example, tmp_path, capsys, monkeypatch):
    press_ctrl_c(example, monkeypatch, unmoved(example), at=7)
    example.main([*TINY.split(), "--out", str(tmp_path)])
    (rows,) = read_runs(tmp_path).values()
    assert column(rows, "step").tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert column(rows, "loss").tolist() == [5] * 7
    assert is_png(tmp_path / "loss.png")
    assert "Interrupted" in capsys.readouterr().out


def test_a_second_ctrl_c_does_not_wait_for_the_step(example, tmp_path, capsys, monkeypatch):
    def impatient(*args: object, **kwargs: object) -> None:
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the step went on")

    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell started the tests in its background
    press_ctrl_c(example, monkeypatch, impatient, at=1)
    example.main([*TINY.split(), "--out", str(tmp_path)])
    assert "Interrupted" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_before_the_first_step_ends_quietly(example, tmp_path, monkeypatch):
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(example, "train_step", interrupted)
    example.main([*TINY.split(), "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow  # `.ci/run` runs it
def test_a_run_stopped_by_ctrl_c_and_resumed_is_the_uninterrupted_one(example, tmp_path, monkeypatch):
    final = []
    train, train_step = example.train, example.train_step
    monkeypatch.setattr(example, "generate", write_nothing)
    monkeypatch.setattr(example, "plot", lambda *args: None)
    monkeypatch.setattr(example, "train", lambda *args: final.append(train(*args)) or final[-1])
    options = [*TINY.split(), "--growth-interval", "8", "--inject-overflow", "25", "--out", str(tmp_path)]
    example.main(options)
    (expected,) = read_runs(tmp_path).values()

    options += ["--checkpoint", str(tmp_path / "saved")]
    press_ctrl_c(example, monkeypatch, train_step, at=23)
    example.main(options)
    assert [len(rows) for rows in read_runs(tmp_path).values()] == [23]
    resumed_steps = press_ctrl_c(example, monkeypatch, train_step, at=0)
    example.main([*options, "--resume"])
    assert len(resumed_steps) == 7
    (rows,) = read_runs(tmp_path).values()
    for field in expected[0].keys() - {"tokens_per_s"}:
        np.testing.assert_array_equal(column(rows, field), column(expected, field), field)
    uninterrupted, resumed = final
    jax.tree.map(np.testing.assert_array_equal, resumed, uninterrupted)
    assert sorted(path.name for path in (tmp_path / "saved" / "mixed_float16").iterdir()) == ["20", "23", "30"]


@pytest.mark.slow
def test_a_comparison_is_resumed_in_the_run_that_was_stopped(example, tmp_path, monkeypatch):
    options = [*TINY.split(), "--precision", "compare", "--out", str(tmp_path), "--checkpoint", str(tmp_path / "saved")]
    press_ctrl_c(example, monkeypatch, unmoved(example), at=37)
    example.main(options)
    assert [len(rows) for rows in read_runs(tmp_path).values()] == [30, 7]
    resumed_steps = press_ctrl_c(example, monkeypatch, unmoved(example), at=0)
    example.main([*options, "--resume"])
    assert len(resumed_steps) == 23 + 30
    assert [column(rows, "step").tolist() for rows in read_runs(tmp_path).values()] == [list(range(1, 31))] * 3


def test_resuming_what_is_not_there_or_another_run_says_what_is_wrong(example, tmp_path, monkeypatch):
    saved = tmp_path / "saved"
    options = [*TINY.split(), "--out", str(tmp_path), "--checkpoint", str(saved)]
    for precision in ("mixed_float16", "compare"):
        with pytest.raises(SystemExit, match=f"--resume: there is no checkpoint in {saved}"):
            example.main([*options, "--precision", precision, "--resume"])
    assert not saved.exists()

    press_ctrl_c(example, monkeypatch, unmoved(example), at=3)
    example.main(options)
    with pytest.raises(SystemExit, match=f"there is a run in {saved}/mixed_float16; add --resume, or name another"):
        example.main(options)
    with pytest.raises(SystemExit, match=f"--lr 0.5: the run in {saved}/mixed_float16 was started with --lr 0.01"):
        example.main([*options, "--resume", "--lr", "0.5"])
    with pytest.raises(SystemExit, match=r"--steps 31: the run in .* was started with --steps 30"):
        example.main([*options, "--resume", "--steps", "31"])
    with pytest.raises(SystemExit, match=f"--resume: there is no checkpoint in {saved}/float32"):
        example.main([*options, "--resume", "--precision", "float32"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", "--steps: must be positive, got 0"),
        ("--batch -1", "--batch: must be positive, got -1"),
        ("--lr nan", "--lr: must be positive, got nan"),
        ("--seed -1", "--seed: must be positive, got -1"),
        ("--dim 33", "--dim: must be a multiple of the 2 heads, got 33"),
        ("--init-scale 1e30", "--init-scale: a loss scale requires"),
        ("--inject-overflow -3", "--inject-overflow: must be positive, got -3"),
        ("--inject-overflow 31", "--inject-overflow: step 31 of 30 never comes"),
        ("--resume", "--resume: needs --checkpoint DIR"),
        ("--precision float4", "--precision: invalid choice: 'float4'"),
        ("--context 9999999", "--context 9999999: there are only"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(example, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        example.main([*TINY.split(), *arguments.split()])
    assert message in capsys.readouterr().err + str(stop.value)
