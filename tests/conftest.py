"""Strict settings for every test: no silent dtype or rank promotion, eight simulated CPU devices."""

import importlib.util
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_modifyitems(items):
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


@pytest.fixture(scope="module")
def quick_compile():
    """What libraries compile for themselves is compiled for longer than it runs."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
