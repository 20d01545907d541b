"""One JAX primitive for both ops, so that what cannot run as a kernel is known where JAX knows it.

Whether a program is partitioned over devices is decided when it is lowered, and whether it is batched or differentiated
while it is transformed. There the primitive becomes the reference, unless a kernel was asked for by name.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pallas_kernels._compat import lowering_kernels
from pallas_kernels.finite_check import reference
from pallas_kernels.finite_check.config import Config
from pallas_kernels.finite_check.segments import Segment, rows, segments, view

KERNELS = ("mosaic_gpu", "triton")
DTYPES = tuple(map(jnp.dtype, (jnp.float32, jnp.float16, jnp.bfloat16)))

unscale_check_p = Primitive("unscale_check")
unscale_check_p.multiple_results = True


class Launch(Protocol):
    """Reads all leaves in one launch: what each file of `KERNELS` does."""

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
            leaves: views of `segments.view`.
            inv_scale: float32[1], the factor.
            table: which program works on which part.
            out_types: the products, as many as leaves or none, and float32[programs], what each program's squares sum
                up to; its length is the grid.
            config: the sizes.
            interpret: whether to run in Pallas' interpreter.
        """
        ...


def kernel(implementation: str) -> Launch:
    """Imports a backend when it is first wanted: that takes a second, and JAX may have removed it (ImportError)."""
    return importlib.import_module(f"{__package__}.{implementation}").launch


def serves(x: jax.Array) -> bool:
    """Whether the kernels can read such a leaf."""
    return x.dtype in DTYPES and x.size > 0 and rows(x.size) is not None


def unscale_check(
    leaves: Sequence[jax.Array], inv_scale: jax.Array, **params: Any
) -> tuple[list[jax.Array], jax.Array]:
    """See `reference.unscale_check`; every leaf is one that the kernels serve.

    Args:
        leaves: the arrays.
        inv_scale: the factor.
        **params: `out_dtype`; `implementation`, a key of `KERNELS`; `forced`, whether it was asked for by name;
            `config`; `interpret`.
    """
    outs: list[jax.Array] = []
    total = jnp.float32(0)
    most = params["config"].max_leaves
    launches = -(-len(leaves) // most)
    for i in range(launches):
        some = leaves[len(leaves) * i // launches : len(leaves) * (i + 1) // launches]
        run = _kernel if params["interpret"] else unscale_check_p.bind  # the interpreters have effects of their own
        seen, *more = run(inv_scale, *some, **params)
        outs += more
        total += seen
    return outs, total


def _reference(inv_scale: jax.Array, *leaves: jax.Array, out_dtype: Any, **_: Any) -> list[jax.Array]:
    outs, total = reference.unscale_check(leaves, inv_scale, out_dtype=out_dtype)
    return [total, *outs]


def _kernel(
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
    *outs, sums = kernel(implementation)(views, inv_scale.reshape(1), table, out_types, config, interpret)
    return [jnp.sum(sums), *(out.reshape(x.shape) for out, x in zip(outs, leaves, strict=False))]


def _instead(reason: str, *, forced: bool, implementation: str, **params: Any) -> Callable[..., list[jax.Array]]:
    """The reference, for the reason given; an error where the kernel was asked for by name."""
    if forced:
        raise NotImplementedError(
            f'implementation="{implementation}" {reason}; '
            'pass `implementation=None`, which takes plain JAX there, or `"xla"`, which is plain JAX'
        )
    return functools.partial(_reference, **params)


def _lower(platform_has_kernels: bool, ctx: Any, *args: Any, **params: Any) -> Any:
    if not platform_has_kernels:
        fun = _instead(
            f"runs on NVIDIA GPUs, and this is compiled for {', '.join(ctx.module_context.platforms)}", **params
        )
    elif _partitioned(ctx.module_context.axis_context):
        fun = _instead("cannot be partitioned over devices by itself, only inside `jax.shard_map`", **params)
    else:
        fun = functools.partial(_kernel, **params)
    with lowering_kernels():
        return mlir.lower_fun(fun, multiple_results=True)(ctx, *args)


def _partitioned(axes: Any) -> bool:
    if isinstance(axes, mlir.SPMDAxisContext):  # inside `shard_map`; what it leaves to the compiler is partitioned
        return axes.manual_axes != frozenset(axes.mesh.axis_names)
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices != 1


def _batch(args: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[int]]:
    outs = jax.vmap(_instead("has no batched form", **params), axes)(*args)
    return outs, [0] * len(outs)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    fun = _instead("has no derivative", **params)
    return jax.jvp(fun, tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


@functools.cache
def _eager(**params: Any) -> Callable[..., list[jax.Array]]:
    return jax.jit(functools.partial(unscale_check_p.bind, **params))


unscale_check_p.def_impl(lambda *args, **params: _eager(**params)(*args))
unscale_check_p.def_abstract_eval(
    lambda *avals, **params: jax.make_jaxpr(functools.partial(_reference, **params))(*avals).out_avals
)
batching.primitive_batchers[unscale_check_p] = _batch
ad.primitive_jvps[unscale_check_p] = _jvp
mlir.register_lowering(unscale_check_p, functools.partial(_lower, False))
mlir.register_lowering(unscale_check_p, functools.partial(_lower, True), platform="cuda")
