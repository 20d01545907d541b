"""The benchmarks that need a GPU, with tiny models on any machine: what they write, not how long it takes."""

import pathlib
import subprocess
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.slow


def page_of(name, tmp_path, *options):
    page = tmp_path / "benchmarks" / "page.md"
    (tmp_path / "img").mkdir(exist_ok=True)
    command = [sys.executable, BENCHMARKS / name, "--tiny", "--rows", tmp_path / "rows", "--out", page, *options]
    subprocess.run(command, check=True)
    return page.read_text()


def test_train_steps_are_measured(tmp_path):
    only = "GPT-2 small: (by hand, float16|jmp_amp, float16)$|ResNet-50: jmp_amp, bfloat16"
    page = page_of("gpu_training.py", tmp_path, "--jobs", "2", "--only", only)
    assert "| by hand, float16 |" in page
    assert "| jmp_amp, bfloat16 |" in page
    assert "Error" not in page


def test_a_model_is_trained_in_each_precision(tmp_path):
    page = page_of("gpu_convergence.py", tmp_path)
    (last,) = (line for line in page.splitlines() if line.startswith("| step 10, less float32 |"))
    differences = [float(cell) for cell in last.split("|")[3:-1]]
    assert len(differences) == 3
    assert max(map(abs, differences)) < 0.01
    assert (tmp_path / "img" / "gpu_convergence.png").exists()

    rows = tmp_path / "rows"

    def page_of_stopped(run):  # nothing runs again
        rest = [line for line in rows.read_text().splitlines() if not (run in line and '"step": 10,' in line)]
        rows.write_text("\n".join(rest))
        return page_of("gpu_convergence.py", tmp_path)

    page = page_of_stopped("not scaled")
    (last,) = (line for line in page.splitlines() if line.startswith("| step 10, less float32 |"))
    assert last.endswith(" |  |")
    page = page_of_stopped("float32, TF32 on")
    assert "| 8 | " in page
    assert "| 10 |  | " in page
    assert "| step 9, less float32 |" in page
