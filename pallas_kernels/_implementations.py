"""Which implementation of an op runs: the one that the caller passed, or the fastest as measured; and where none can.

Some programs cannot use a kernel: those that are batched, differentiated, partitioned over devices, or compiled for
another platform. JAX determines this while it transforms or lowers a program, so the rules of a kernel's primitive
choose the implementation. They use the reference, or raise an error if the caller passed the kernel as
`implementation`.
"""

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels._compat import define_primitive, is_partitioned
from pallas_kernels._measured import compute_capability, fastest_implementation, target_device


class Generation(NamedTuple):
    """A generation of NVIDIA GPUs, and the compute capability of its first."""

    name: str
    capability: float


AMPERE, ADA, HOPPER = Generation("Ampere", 8.0), Generation("Ada", 8.9), Generation("Hopper", 9.0)

DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.float16, jnp.bfloat16)))  # that the kernels read

INDEX_LIMIT = 2**31  # the exclusive upper bound of an index: kernels index with int32


class Kernel(NamedTuple):
    """A kernel that an op runs.

    Attributes:
        package: the folder of the op.
        name: the file of the kernel there, which is the `implementation` that a caller passes.
        forced: whether the caller passed it. Then a `NotImplementedError` is raised where it cannot run.
        interpret: whether Pallas' interpreter runs it.
    """

    package: str
    name: str
    forced: bool
    interpret: bool

    def load(self) -> Callable[..., Sequence[jax.Array]]:
        """Imports the function `run` of the kernel on first use, because the import of its backend takes a second.

        Raises:
            ImportError: JAX has removed the backend.
        """
        return importlib.import_module(f"{self.package}.{self.name}").run

    def refuse(self, reason: str) -> None:
        """Raises a `NotImplementedError` if the caller passed the kernel, which cannot run."""
        if self.forced:
            raise NotImplementedError(f'implementation="{self.name}" {reason}')


class Kernels(NamedTuple):
    """The kernels of an op.

    Attributes:
        package: the folder of the op.
        oldest: the oldest GPUs that each kernel supports, by its name.
    """

    package: str
    oldest: Mapping[str, Generation]

    def check_arguments(self, op: str, implementation: str | None, interpret: bool) -> None:
        """Raises a `ValueError` if there is no such implementation, or if it cannot be interpreted."""
        if implementation not in (None, "xla", *self.oldest):
            allowed = ", ".join(map(repr, (None, "xla", *self.oldest)))
            raise ValueError(f"{op}: `implementation` must be one of {allowed}, got {implementation!r:.80}")
        if interpret and implementation not in self.oldest:
            cure = "pass implementation=" + " or ".join(map(repr, self.oldest))
            raise ValueError(f"{op}: `interpret=True` needs a kernel, got implementation={implementation!r}; {cure}")

    def choose(
        self, op: str, implementation: str | None, interpret: bool, dtypes: Iterable[DTypeLike], size: int
    ) -> Kernel | None:
        """Returns the kernel that the caller passed, or the fastest for these arrays; `None` is plain JAX.

        Raises:
            NotImplementedError: JAX has removed the backend of the kernel that the caller passed, or the GPU is too old
                for it.
        """
        name = implementation or fastest_implementation(op, dtypes, size)
        if name == "xla":
            return None
        kernel = Kernel(self.package, name, implementation is not None, interpret)
        try:
            kernel.load()
        except ImportError as error:
            kernel.refuse(
                f"needs a backend that JAX {jax.__version__} does not have ({error}); pass another implementation, or "
                "`implementation=None`"
            )
            return None
        device, oldest = target_device(), self.oldest[name]
        capability = compute_capability(device)
        if not interpret and capability is not None and capability < oldest.capability:
            others = [other for other, generation in self.oldest.items() if capability >= generation.capability]
            kernel.refuse(
                f"needs a GPU of compute capability {oldest.capability} ({oldest.name}) or newer, but "
                f"{device.device_kind} has {capability}; pass "
                f"{' or '.join(f'`implementation={other!r}`' for other in (*others, None))}"
            )
            return None
        return kernel


def define_kernel(name: str, plain: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs a kernel, and plain JAX in programs that cannot use it.

    Args:
        name: the name of its primitive in jaxprs.
        plain: the reference, `plain(*args, **params)`.
        run: the kernel, `run(*args, **params)`. The parameters include `kernel`, a `Kernel`.
    """

    def fallback(reason: str | None, kernel: Kernel, **params: Any) -> Any:
        if reason:
            cure = 'pass `implementation=None`, which falls back to plain JAX, or `"xla"`, which is always plain JAX'
            kernel.refuse(f"{reason}; {cure}")
        return functools.partial(plain, **params)

    def lowered(context: Any, on_cuda: bool, **params: Any) -> Any:
        if not on_cuda:
            platforms = ", ".join(context.platforms)
            return fallback(f"needs an NVIDIA GPU, but the program is compiled for {platforms}", **params)
        if is_partitioned(context):
            reason = "cannot be partitioned over devices by the compiler, call it inside `jax.shard_map`"
            return fallback(reason, **params)
        return functools.partial(run, **params)

    primitive = define_primitive(name, fallback, lowered, "cuda")

    def call(*args: Any, kernel: Kernel, **params: Any) -> Any:
        apply = run if kernel.interpret else primitive.bind  # the interpreters have effects
        return apply(*args, kernel=kernel, **params)

    return call
