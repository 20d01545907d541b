"""The implementation of an op that the caller passed: plain JAX, or a kernel; and where a kernel cannot run.

No kernel runs in programs that are batched, differentiated, partitioned over devices, or compiled for another platform.
JAX determines this while it transforms or lowers a program, so the rules of a kernel's primitive raise the error.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._compat import define_primitive, is_partitioned
from pallas_kernels._devices import compute_capability, target_device


class Generation(NamedTuple):
    """A generation of NVIDIA GPUs, and the compute capability of its first."""

    name: str
    capability: float


AMPERE, HOPPER = Generation("Ampere", 8.0), Generation("Hopper", 9.0)

DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.float16, jnp.bfloat16)))  # that the kernels read

INDEX_LIMIT = 2**31  # the exclusive upper bound of an index: kernels index with int32


class Kernel(NamedTuple):
    """A kernel that an op runs.

    Attributes:
        package: the folder of the op.
        name: the file of the kernel there, which is the `implementation` that a caller passes.
        interpret: whether Pallas' interpreter runs it.
    """

    package: str
    name: str
    interpret: bool

    def load(self) -> Callable[..., Sequence[jax.Array]]:
        """Imports the function `run` of the kernel on first use, because the import of its backend takes a second.

        Raises:
            ImportError: JAX has removed the backend.
        """
        return importlib.import_module(f"{self.package}.{self.name}").run

    def refusal(self, reason: str) -> NotImplementedError:
        """Returns the error that says why the kernel cannot run."""
        return NotImplementedError(f'implementation="{self.name}" {reason}')


class Kernels(NamedTuple):
    """The kernels of an op.

    Attributes:
        package: the folder of the op.
        oldest: the oldest GPUs that each kernel supports, by its name.
    """

    package: str
    oldest: Mapping[str, Generation]

    def choose(self, op: str, implementation: str | None, interpret: bool) -> Kernel | None:
        """Returns the kernel that the caller passed; `None` is plain JAX.

        Raises:
            ValueError: there is no such implementation, or it cannot be interpreted.
            NotImplementedError: JAX has removed the backend of the kernel, or the GPU is too old for it.
        """
        if implementation not in (None, "xla", *self.oldest):
            allowed = ", ".join(map(repr, (None, "xla", *self.oldest)))
            raise ValueError(f"{op}: `implementation` must be one of {allowed}, got {implementation!r:.80}")
        if implementation is None or implementation == "xla":
            if interpret:
                cure = "pass implementation=" + " or ".join(map(repr, self.oldest))
                raise ValueError(
                    f"{op}: `interpret=True` needs a kernel, got implementation={implementation!r}; {cure}"
                )
            return None
        kernel = Kernel(self.package, implementation, interpret)
        try:
            kernel.load()
        except ImportError as error:
            raise kernel.refusal(
                f"needs a backend that JAX {jax.__version__} does not have ({error}); pass another implementation, or "
                "`implementation=None`"
            ) from error
        device, oldest = target_device(), self.oldest[implementation]
        capability = compute_capability(device)
        if not interpret and capability is not None and capability < oldest.capability:
            others = [other for other, generation in self.oldest.items() if capability >= generation.capability]
            raise kernel.refusal(
                f"needs a GPU of compute capability {oldest.capability} ({oldest.name}) or newer, but "
                f"{device.device_kind} has {capability}; pass "
                f"{' or '.join(f'`implementation={other!r}`' for other in (*others, None))}"
            )
        return kernel


def define_kernel(name: str, plain: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs a kernel, and raises a `NotImplementedError` in programs that cannot use it.

    Args:
        name: the name of its primitive in jaxprs.
        plain: the reference, `plain(*args, **params)`.
        run: the kernel, `run(*args, **params)`. The parameters include `kernel`, a `Kernel`.
    """

    def typed(reason: str | None, kernel: Kernel, **params: Any) -> Any:
        if reason:
            raise kernel.refusal(f'{reason}; pass `implementation=None` or `"xla"`, which are plain JAX')
        return functools.partial(plain, **params)

    def lowered(context: Any, on_cuda: bool, **params: Any) -> Any:
        if not on_cuda:
            platforms = ", ".join(context.platforms)
            return typed(f"needs an NVIDIA GPU, but the program is compiled for {platforms}", **params)
        if is_partitioned(context):
            return typed("cannot be partitioned over devices by the compiler, call it inside `jax.shard_map`", **params)
        return functools.partial(run, **params)

    primitive = define_primitive(name, typed, lowered, "cuda")

    def call(*args: Any, kernel: Kernel, **params: Any) -> Any:
        apply = run if kernel.interpret else primitive.bind  # the interpreters have effects
        return apply(*args, kernel=kernel, **params)

    return call
