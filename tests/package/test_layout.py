"""The layout of the code: where JAX's private names are, and what is imported when."""

import ast
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import JaxprEqn

import jmp_amp

ROOT = pathlib.Path(jmp_amp.__file__).parent
FILES = [*ROOT.rglob("*.py"), *(ROOT.parent / "pallas_kernels").rglob("*.py")]


KNOWS_JAX = {"jmp_amp/_jaxpr/_versions.py", "pallas_kernels/_compat.py"}
PUBLIC_MODULES = re.compile(
    r"jax(\.(numpy|lax|typing|stages|tree|tree_util|random|custom_derivatives|ad_checkpoint|sharding|dtypes|core"
    r"|extend(\.\w+)*|experimental(\.\w+)*|interpreters))?"
)


def private_attributes():
    """The attributes of the objects that JAX keeps to itself, and that no public object of JAX or Python has."""
    from jax._src import core
    from jax._src.interpreters import mlir, partial_eval

    private = [partial_eval.DynamicJaxprTracer, partial_eval.TracingEqn, mlir.LoweringRuleContext, mlir.ModuleContext]
    private += [core.Trace, partial_eval.JaxprTrace]
    public = [
        jax.Array,
        type(jnp.zeros(())),
        jax.ShapeDtypeStruct,
        JaxprEqn,
        jax.core.ShapedArray,
        core.Var,
        core.Literal,
        dict,
        list,
        str,
    ]
    names = {name for cls in private for name in (*dir(cls), *getattr(cls, "__annotations__", ()), *slots(cls))}
    return names - {name for cls in public for name in (*dir(cls), *slots(cls))} - OF_BOTH


def slots(cls):
    return [name for base in cls.__mro__ for name in getattr(base, "__slots__", ())]


# JAX documents `avals_in` and `replace` of the context of a lowering rule; the others are names of this package, too.
OF_BOTH = {"replace", "ctx", "val", "main", "name_stack", "source_info", "module", "platforms", "avals_in"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT.parent).as_posix())
def test_jaxs_internals_are_named_in_one_file_of_each_package(path):
    if path.relative_to(ROOT.parent).as_posix() in KNOWS_JAX:
        return
    tree = ast.parse(path.read_text())
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    imported += [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    of_jax = [name for name in imported if name.split(".")[0] in ("jax", "jaxlib")]
    assert [name for name in of_jax if not PUBLIC_MODULES.fullmatch(name)] == []
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert attributes & private_attributes() - defined == set()


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


def test_no_private_module_of_jax_is_needed_to_import_a_module():
    program = """
import builtins, importlib, pkgutil
import jax, optax

def without_private_names(name, globals=None, *args, real=builtins.__import__):
    importer = (globals or {}).get("__name__", "").split(".")[0]
    if importer in ("jmp_amp", "pallas_kernels") and name.startswith("jax._src"):
        raise ImportError(name)
    return real(name, globals, *args)

builtins.__import__ = without_private_names
import jmp_amp as amp, pallas_kernels
for package in (amp, pallas_kernels):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
state = amp.dynamic_loss_scale(optax.sgd(1.0)).init(jax.numpy.ones(2))
print(amp.get_loss_scale(state))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "65536.0\n"), done.stderr


def test_tools_and_other_interfaces_are_imported_on_first_use():
    program = """
import sys
import jmp_amp as amp
lazy = ("compat", "debug", "interop", "watch")
assert not any(name.startswith(tuple(f"jmp_amp.{part}" for part in lazy)) for name in sys.modules)
assert {*lazy, "explain"} <= set(dir(amp))
assert all(map(callable, [amp.watch.live, amp.interop.torch.state_dict, amp.compat.jmp.select_tree]))
from jmp_amp import *
print(explain is amp.explain, debug.PrecisionReport.__name__, debug is amp.debug)
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "True PrecisionReport True\n"), done.stderr


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jmp_amp' has no attribute 'autocats'"):
        jmp_amp.autocats
