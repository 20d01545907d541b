"""Which implementation of an op runs: the one that the caller passed, or the fastest as measured; and where none can.

Some programs cannot use a kernel: those that are batched, differentiated, partitioned over devices, or compiled for
another platform. JAX determines this while it transforms or lowers a program, so the rules of a kernel's primitive
choose the implementation. They use the reference, or raise an error if the caller passed the kernel as
`implementation`.
"""

import functools
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from pallas_kernels._compat import define_primitive, is_partitioned


class Generation(NamedTuple):
    """A generation of NVIDIA GPUs, and the compute capability of its first."""

    name: str
    capability: float


AMPERE, ADA, HOPPER = Generation("Ampere", 8.0), Generation("Ada", 8.9), Generation("Hopper", 9.0)

Kernels = Mapping[str, Generation]  # the kernels of an op, and the oldest GPUs that each supports

DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.float16, jnp.bfloat16)))  # that the kernels read

INDEX_LIMIT = 2**31  # the exclusive upper bound of an index: kernels index with int32


def check_arguments(op: str, implementation: str | None, interpret: bool, kernels: Kernels) -> None:
    """Raises a `ValueError` if there is no such implementation, or if it cannot be interpreted."""
    if implementation not in (None, "xla", *kernels):
        allowed = ", ".join(map(repr, (None, "xla", *kernels)))
        raise ValueError(f"{op}: `implementation` must be one of {allowed}, got {implementation!r}")
    if interpret and implementation not in kernels:
        named = "implementation=" + " or ".join(map(repr, kernels))
        raise ValueError(f"{op}: `interpret=True` needs a kernel, got implementation={implementation!r}; pass {named}")


def load_kernel(package: str, implementation: str) -> Callable[..., Sequence[jax.Array]]:
    """Imports the function `run` of a kernel on first use, because the import of its backend takes a second.

    Raises:
        ImportError: JAX has removed the backend.
    """
    return importlib.import_module(f"{package}.{implementation}").run


def is_available(package: str, implementation: str, forced: bool) -> bool:
    """Returns whether JAX has the backend of a kernel. If the caller passed it, raises a `NotImplementedError`."""
    try:
        load_kernel(package, implementation)
    except ImportError as error:
        if forced:
            raise NotImplementedError(
                f'implementation="{implementation}" needs a backend that JAX {jax.__version__} does not have '
                f"({error}); pass another implementation, or `implementation=None`"
            ) from error
        return False
    return True


def check_gpu(implementation: str, kernels: Kernels) -> None:
    """Raises a `NotImplementedError` if the GPU that programs are traced for is too old for a kernel."""
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; not a number for AMD GPUs
    if not re.fullmatch(r"\d+\.\d+", capability) or device_kind() != device.device_kind:
        return
    oldest = kernels[implementation]
    if float(capability) < oldest.capability:
        others = [name for name, gpu in kernels.items() if float(capability) >= gpu.capability]
        raise NotImplementedError(
            f'implementation="{implementation}" needs a GPU of compute capability {oldest.capability} ({oldest.name}) '
            f"or newer, but {device.device_kind} has {capability}; pass "
            f"{' or '.join(f'`implementation={name!r}`' for name in (*others, None))}"
        )


def device_kind() -> str | None:
    """Returns the kind of GPU that programs are traced for, or `None` for other devices."""
    # A program can be compiled for a device that is not present (`AbstractDevice`).
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        return described.device_kind
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None


def define_kernel(name: str, plain: Callable[..., Any], run: Callable[..., Any]) -> Primitive:
    """Returns a primitive that runs a kernel, and plain JAX in programs that cannot use it.

    Args:
        name: the name in jaxprs.
        plain: the reference, `plain(*args, **params)`.
        run: the kernel, `run(*args, **params)`. The parameters include `implementation`, its name, and `forced`,
            whether the caller passed it. Then a `NotImplementedError` is raised where the kernel cannot run.
    """

    def fallback(reason: str | None, **params: Any) -> Any:
        if params["forced"] and reason:
            raise NotImplementedError(
                f'implementation="{params["implementation"]}" {reason}; '
                'pass `implementation=None`, which falls back to plain JAX, or `"xla"`, which is always plain JAX'
            )
        return functools.partial(plain, **params)

    def lowered(context: Any, on_cuda: bool, **params: Any) -> Any:
        if not on_cuda:
            platforms = ", ".join(context.platforms)
            return fallback(f"needs an NVIDIA GPU, but the program is compiled for {platforms}", **params)
        if is_partitioned(context):
            reason = "cannot be partitioned over devices by the compiler, call it inside `jax.shard_map`"
            return fallback(reason, **params)
        return functools.partial(run, **params)

    return define_primitive(name, fallback, lowered, "cuda")
