"""Strict settings for every test: no silent dtype or rank promotion, eight simulated CPU devices."""

import collections
import contextlib
import gc
import importlib.util
import itertools
import os
import pathlib
import threading
from importlib.metadata import version

# Tests compile for longer than they run.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1"
    # On a busy machine, devices may wait for each other for longer than the 40 s after which XLA ends the process.
    " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""),
)
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "0")  # no key of a program that is not kept
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import pytest
from jax._src import compiler

from jmp_amp.debug import _emulation

pytest.register_assert_rewrite(*(path.stem for path in (pathlib.Path(__file__).parent / "helpers").rglob("*.py")))

_emulation._COMPILER_OPTIONS["xla_backend_optimization_level"] = 0  # nor do emulated gradients run for long

with contextlib.suppress(ImportError):  # with some libraries, only a test runs that does without
    from hypothesis import HealthCheck, settings

    # A busy machine fails no test, and the same commit runs the same examples.
    settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("tests")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

if version("jaxlib").startswith("0.10."):
    from jax._src.interpreters import mlir

    # Newer versions lower a few programs in each MLIR context. To make one takes longer than to lower a small program.
    make_ir_context, contexts = mlir.make_ir_context, threading.local()

    def reused_ir_context():
        if not getattr(contexts, "left", 0):
            contexts.current, contexts.left = make_ir_context(), 10
        contexts.left -= 1
        return contexts.current

    mlir.make_ir_context = reused_ir_context


# A private name: where a newer JAX has it no more, each program is compiled.
compile_and_load, executables = getattr(compiler, "backend_compile_and_load", None), {}
_ended = itertools.count(1)  # tests
_MOST_MAPS = 50_000  # of the 65,530 parts of memory that a process may map; each program maps several


def compile_once(backend, module, devices, options, host_callbacks):
    """Compiles equal programs once, a quarter of all that tests compile; source lines and scopes may differ."""
    if host_callbacks:  # functions of one test
        return compile_and_load(backend, module, devices, options, host_callbacks)
    key = backend, str(module), devices, options.SerializeAsString()
    if key not in executables:
        if len(executables) >= 500:
            del executables[next(iter(executables))]
        executables[key] = compile_and_load(backend, module, devices, options, host_callbacks)
    return executables[key]


if compile_and_load is not None:
    compiler.backend_compile_and_load = compile_once


@pytest.hookimpl(tryfirst=True)  # before fixtures, which compile as well
def pytest_runtest_setup(item):
    for_gpu = any(map(item.get_closest_marker, ("aot", "gpu")))
    jax.config.update("jax_disable_most_optimizations", not for_gpu)  # there, programs are what is tested


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Forgets all programs before they map as much memory as a process may, which thousands of tests do."""
    maps = pathlib.Path("/proc/self/maps")
    if next(_ended) % 50 == 0 and maps.exists() and maps.read_bytes().count(b"\n") > _MOST_MAPS:
        executables.clear()
        jax.clear_caches()
        gc.collect()


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what was imported lives to the end, so that collecting garbage need not visit it
    gc.set_threshold(50_000, 20, 20)  # nor every few functions that are traced


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items):
    counts = collections.Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        if (sweep := item.get_closest_marker("sweep")) and counts[test] % sweep.args[0]:
            item.add_marker("slow")
        counts[test] += 1
    if importlib.util.find_spec("jax_plugins") is not None:
        return
    reason = "compiling for a GPU needs jax-cuda13-plugin and jax-cuda13-pjrt of the same version as jax"
    for item in items:
        if item.get_closest_marker("aot"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def users_code():
    """Programs as users, and optax, write them; the library itself relies on no promotion."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def emulated(monkeypatch):
    """Computes float8 products as a device with float8 units does."""
    monkeypatch.setenv("JMP_AMP_EMULATE_FLOAT8", "1")


@pytest.fixture
def cudnn(monkeypatch):
    """JAX asks for cuDNN's version before it traces cuDNN's attention; XLA compiles it without the library."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91300)
