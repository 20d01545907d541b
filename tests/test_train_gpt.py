"""The GPT example, run through its command line at a tiny size."""

import csv
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_amp as amp

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_gpt.py"
TINY = "--dim 16 --layers 2 --context 16 --batch 8 --steps 30 --lr 1e-2 --init-scale 1024"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def example() -> Iterator[ModuleType]:
    jax.config.update("jax_disable_most_optimizations", True)  # compiling takes most of the time here
    with jax.numpy_dtype_promotion("standard"):  # `optax.adamw` takes a float to an integer power
        yield load_example()
    jax.config.update("jax_disable_most_optimizations", False)


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
    assert "mixed_float16" in capsys.readouterr().out


def test_compare_runs_the_same_training_three_times(example, tmp_path, capsys):
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


def test_ctrl_c_writes_what_there_is(example, tmp_path, capsys, monkeypatch):
    steps = iter(range(7))

    def until_ctrl_c(params: Any, opt_state: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        grads = jax.tree.map(jnp.ones_like, params)
        return params, opt_state, example.measure(jnp.float32(5), grads, amp.metrics(opt_state))

    monkeypatch.setattr(example, "train_step", until_ctrl_c)
    example.main([*TINY.split(), "--out", str(tmp_path)])
    (rows,) = read_runs(tmp_path).values()
    assert column(rows, "step").tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert column(rows, "loss").tolist() == [5] * 7
    assert is_png(tmp_path / "loss.png")
    assert "Interrupted" in capsys.readouterr().out


def test_ctrl_c_before_the_first_step_ends_quietly(example, tmp_path, monkeypatch):
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(example, "train_step", interrupted)
    example.main([*TINY.split(), "--out", str(tmp_path)])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--steps 0", "--steps: must be positive, got 0"),
        ("--batch -1", "--batch: must be positive, got -1"),
        ("--lr nan", "--lr: must be positive, got nan"),
        ("--seed -1", "--seed: must be positive, got -1"),
        ("--dim 33", "--dim: must be a multiple of the 2 heads, got 33"),
        ("--init-scale 1e30", "--init-scale: a loss scale needs"),
        ("--inject-overflow -3", "--inject-overflow: must be positive, got -3"),
        ("--inject-overflow 31", "--inject-overflow: step 31 of 30 never comes"),
        ("--precision float8", "--precision: invalid choice: 'float8'"),
        ("--context 9999999", "--context 9999999: there are only"),
    ],
)
def test_wrong_arguments_say_what_is_wrong(example, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        example.main([*TINY.split(), *arguments.split()])
    assert message in capsys.readouterr().err + str(stop.value)
