"""The GAN example, run through its command line for a few steps."""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

pytestmark = [
    pytest.mark.usefixtures("users_code"),
    pytest.mark.skipif(
        importlib.util.find_spec("sklearn") is None, reason="the example trains on scikit-learn's digits"
    ),
]
PATH = Path(__file__).parents[2] / "examples/gan_digits.py"


def load():
    spec = importlib.util.spec_from_file_location("gan_digits", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(example, capsys, out, precision):
    example.main(["--steps", "20", "--precision", precision, "--out", str(out)])
    said = capsys.readouterr().out
    losses = {name: float(value) for name, value in re.findall(r"^(\w+) +loss ([\d.]+)", said, re.M)}
    scales = {name: float(value) for name, value in re.findall(r"^(\w+) .*scale (\d+)", said, re.M)}
    assert losses.keys() == scales.keys() == {"critic", "generator"}
    return losses, scales


@pytest.mark.slow
def test_both_players_train_in_float16_as_in_float32(tmp_path, capsys, monkeypatch):
    example = load()
    losses, scales = run(example, capsys, tmp_path, "float16")
    assert (tmp_path / "digits.png").stat().st_size > 1000
    monkeypatch.setattr(example, "draw", lambda *args: None)  # takes as long as the training
    expected, none = run(example, capsys, tmp_path, "float32")
    for name, loss in losses.items():
        np.testing.assert_allclose(loss, expected[name], rtol=0.02)
    assert set(none.values()) == {1}
    assert min(scales.values()) >= 2**10


def test_too_few_steps_are_named(capsys):
    with pytest.raises(SystemExit):
        load().main(["--steps", "2"])
    assert "argument --steps: must be at least 5, got 2" in capsys.readouterr().err
