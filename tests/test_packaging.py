"""What the package says of itself."""

import re
import tomllib
from pathlib import Path

import pytest
import typed_program

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_core_dependencies_are_four():
    assert {re.match(r"[\w-]+", line).group() for line in PROJECT["dependencies"]} == {"jax", "jaxlib", "optax", "chex"}


def test_packages_are_typed():
    assert (ROOT / "jmp_amp/py.typed").exists()
    assert (ROOT / "pallas_kernels/py.typed").exists()


def test_examples_are_short():
    for path in ROOT.glob("examples/*.py"):
        if path.name != "train_gpt.py":  # the demo, which saves and resumes
            assert len(path.read_text().splitlines()) < 150, path.name


@pytest.mark.usefixtures("users_code")
def test_typed_program_runs():
    typed_program.main()
