"""How kernels run in tests: interpreted, or compiled on a GPU."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl


class Way(NamedTuple):
    """How an op runs."""

    implementation: str
    interpret: bool = False


def interpreted(kernels):
    return [pytest.param(Way(name, interpret=True), id=name) for name in kernels]


def compiled(kernels):
    return [_on_a_gpu(name, _missing(oldest.capability)) for name, oldest in kernels.items()]


def _on_a_gpu(name, reason):
    marks = [pytest.mark.gpu, pytest.mark.skipif(bool(reason), reason=reason)]
    return pytest.param(Way(name), id=f"{name} on a GPU", marks=marks)


def _missing(least):
    """What a compiled kernel lacks here."""
    if jax.default_backend() != "gpu":
        return "needs an NVIDIA GPU and JAX_PLATFORMS=cuda"
    found = jax.devices()[0].compute_capability
    if not found[0].isdigit() or float(found) < least:
        return f"needs a GPU of compute capability {least}, this one has {found}"
    return ""


def assert_same_bits(tree, other):
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        assert _bits(x) == _bits(y), (x, y)


def _bits(x):
    x = np.asarray(x)
    is_nan = x != x
    return (np.where(is_nan, np.asarray(np.nan).astype(x.dtype), x) if is_nan.any() else x).tobytes()


def doubled_by_kernel(x):
    return pl.pallas_call(
        lambda x_ref, y_ref: y_ref.__setitem__(..., 2 * x_ref[...]),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=True,
    )(x)
