"""`python -m jmp_amp`."""

import itertools
import subprocess
import sys

import jax
import optax
import pytest

import jmp_amp as amp
from jmp_amp.__main__ import facts


def test_a_bug_report_says_versions_and_devices():
    done = subprocess.run([sys.executable, "-m", "jmp_amp"], capture_output=True, text=True, check=True)
    assert f"jax {jax.__version__}\n" in done.stdout
    assert f"optax {optax.__version__}\n" in done.stdout
    assert f"jmp-amp {amp.__version__}" in done.stdout or "jmp-amp" not in done.stdout  # from a checkout
    assert "x cpu (cpu)\n" in done.stdout
    assert done.stderr == ""


def test_the_versions_come_before_jax_looks_for_devices(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: pytest.fail("looked for devices"))
    lines = itertools.takewhile(lambda line: not line.startswith("optax"), facts())
    assert f"jax {jax.__version__}" in list(lines)
