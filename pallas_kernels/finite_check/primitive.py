"""One JAX primitive for both ops, with rules that fall back to plain JAX.

Some programs cannot use a kernel: those that are batched, differentiated, partitioned over devices, or compiled for
another platform. JAX determines this while it transforms or lowers a program, so the rules of the primitive choose
the implementation. They use the reference, or raise an error if the caller passed the kernel as `implementation`.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels._compat import lowering_kernels
from pallas_kernels.finite_check import reference
from pallas_kernels.finite_check.config import Config
from pallas_kernels.finite_check.segments import Segment, rows, segments, view
from pallas_kernels.finite_check.sums import is_partitioned

DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.float16, jnp.bfloat16)))


class Generation(NamedTuple):
    """A generation of NVIDIA GPUs, and the compute capability of its first."""

    name: str
    capability: float


KERNELS = {"mosaic_gpu": Generation("Hopper", 9.0), "triton": Generation("Ampere", 8.0)}
"""The kernels, and the oldest GPUs that their compilers support."""

unscale_check_p = Primitive("unscale_check")
unscale_check_p.multiple_results = True


class Launch(Protocol):
    """The function `launch` in each file of `KERNELS`: it reads all leaves in one launch."""

    def __call__(
        self,
        leaves: Sequence[jax.Array],
        inv_scale: jax.Array,
        table: Sequence[Segment],
        out_types: Sequence[jax.ShapeDtypeStruct],
        config: Config,
        interpret: bool,
    ) -> Sequence[jax.Array]:
        """Returns arrays of `out_types`.

        Args:
            leaves: the leaves, as returned by `segments.view`.
            inv_scale: float32[1], the factor.
            table: the parts of the leaves that the programs read.
            out_types: the products, one for each leaf or none, followed by float32[programs], the sum of squares of
                each program. The length of the latter is the grid.
            config: the sizes of the kernel.
            interpret: whether to run in Pallas' interpreter.
        """
        ...


def load_kernel(implementation: str) -> Launch:
    """Imports a kernel on first use, because the import of its backend takes a second.

    Raises:
        ImportError: JAX has removed the backend.
    """
    return importlib.import_module(f"{__package__}.{implementation}").launch


def is_supported(x: jax.Array) -> bool:
    """Whether the kernels can read a leaf."""
    return x.dtype in DTYPES and x.size > 0 and rows(x.size) is not None


def unscale_check(
    leaves: Sequence[jax.Array], inv_scale: jax.Array, **params: Any
) -> tuple[list[jax.Array], jax.Array]:
    """Computes `reference.unscale_check` with a kernel.

    Args:
        leaves: arrays that the kernels support.
        inv_scale: float32[], the factor.
        **params: `out_dtype`; `implementation`, one of `KERNELS`; `forced`, whether the caller passed the
            implementation; `config`; `interpret`.
    """
    outs: list[jax.Array] = []
    total = jnp.float32(0)
    launches = -(-len(leaves) // params["config"].max_leaves)
    for i in range(launches):
        launch_leaves = leaves[len(leaves) * i // launches : len(leaves) * (i + 1) // launches]
        run = _run_kernel if params["interpret"] else unscale_check_p.bind  # the interpreters have effects
        launch_total, *launch_outs = run(inv_scale, *launch_leaves, **params)
        outs += launch_outs
        total += launch_total
    return outs, total


def _run_reference(inv_scale: jax.Array, *leaves: jax.Array, out_dtype: Any, **_: Any) -> list[jax.Array]:
    outs, total = reference.unscale_check(leaves, inv_scale, out_dtype=out_dtype)
    return [total, *outs]


def _run_kernel(
    inv_scale: jax.Array,
    *leaves: jax.Array,
    implementation: str,
    out_dtype: Any,
    config: Config,
    interpret: bool,
    **_: Any,
) -> list[jax.Array]:
    views = [view(x) for x in leaves]
    table, programs = segments([x.shape for x in views], config.block)
    out_types = [] if out_dtype is None else [jax.ShapeDtypeStruct(x.shape, out_dtype) for x in views]
    out_types.append(jax.ShapeDtypeStruct((programs,), jnp.float32))
    *outs, sums = load_kernel(implementation)(views, inv_scale.reshape(1), table, out_types, config, interpret)
    return [jnp.sum(sums), *(out.reshape(x.shape) for out, x in zip(outs, leaves, strict=False))]


def _fallback(reason: str, *, forced: bool, implementation: str, **params: Any) -> Callable[..., list[jax.Array]]:
    """Returns the reference. Raises a `NotImplementedError` with the reason if the caller passed the kernel by name."""
    if forced:
        raise NotImplementedError(
            f'implementation="{implementation}" {reason}; '
            'pass `implementation=None`, which falls back to plain JAX, or `"xla"`, which is always plain JAX'
        )
    return functools.partial(_run_reference, **params)


def _lower(platform_has_kernels: bool, ctx: Any, *args: Any, **params: Any) -> Any:
    if not platform_has_kernels:
        fun = _fallback(
            f"needs an NVIDIA GPU, but the program is compiled for {', '.join(ctx.module_context.platforms)}", **params
        )
    elif is_partitioned(ctx.module_context):
        fun = _fallback("cannot be partitioned over devices by the compiler, call it inside `jax.shard_map`", **params)
    else:
        fun = functools.partial(_run_kernel, **params)
    with lowering_kernels():
        return mlir.lower_fun(fun, multiple_results=True)(ctx, *args)


def _batch(args: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[int]]:
    outs = jax.vmap(_fallback("does not support `jax.vmap`", **params), axes)(*args)
    return outs, [0] * len(outs)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    fun = _fallback("does not support differentiation", **params)
    return jax.jvp(fun, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


@functools.cache
def _eager(**params: Any) -> Callable[..., list[jax.Array]]:
    return jax.jit(functools.partial(unscale_check_p.bind, **params))


unscale_check_p.def_impl(lambda *args, **params: _eager(**params)(*args))
unscale_check_p.def_abstract_eval(
    lambda *avals, **params: jax.make_jaxpr(functools.partial(_run_reference, **params))(*avals).out_avals
)
batching.primitive_batchers[unscale_check_p] = _batch
ad.primitive_jvps[unscale_check_p] = _jvp
mlir.register_lowering(unscale_check_p, functools.partial(_lower, False))
mlir.register_lowering(unscale_check_p, functools.partial(_lower, True), platform="cuda")
