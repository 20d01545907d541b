"""The layout of the code: where JAX's private names are. `lint-imports` checks the imports."""

import pathlib
import subprocess
import sys

import pytest

import jmp_amp

ROOT = pathlib.Path(jmp_amp.__file__).parent
FILES = [*ROOT.rglob("*.py"), *(ROOT.parent / "pallas_kernels").rglob("*.py")]


def test_private_names_of_jax_are_in_one_file_of_each_package():
    named = {path.relative_to(ROOT.parent).as_posix() for path in FILES if "jax._src" in path.read_text()}
    assert named <= {"jmp_amp/_jaxpr/_versions.py", "pallas_kernels/_compat.py"}


def test_a_private_name_that_jax_moves_does_not_break_the_import():
    program = """
import jax, optax, jax.experimental.pallas  # all that JAX itself imports later
from jax._src import traceback_util
del traceback_util.register_exclusion, traceback_util.api_boundary
import jmp_amp as amp
print(amp.autocast(lambda x: x @ x.T)(jax.numpy.ones((2, 3))).dtype)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "float32\n"), done.stderr


def test_the_debugging_tools_are_imported_on_first_use():
    program = """
import sys
import jmp_amp as amp
assert not any(name.startswith("jmp_amp.debug") for name in sys.modules)
assert {"debug", "explain", "suggest_rules"} <= set(dir(amp))
from jmp_amp import *
print(explain is amp.explain, PrecisionReport.__name__, debug is amp.debug)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True PrecisionReport True\n"), done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jmp_amp' has no attribute 'autocats'"):
        jmp_amp.autocats
