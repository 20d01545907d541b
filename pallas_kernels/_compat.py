"""Code that depends on the JAX version, or on deprecated or private parts of JAX."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Function = Callable[..., Sequence[jax.Array]]


def mosaic_gpu_kernel(body: Callable[..., None], interpret: bool, **options: Any) -> Callable[..., Any]:
    """Returns `plgpu.kernel(body, **options)`, run on a GPU or in Pallas' interpreter, where unwritten memory is NaN.

    The body must not write to memory that it reads: no barriers order its writes after the reads.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # imported here, because it takes a second

    params = plgpu.CompilerParams(unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane)
    interpreter = None
    if interpret and hasattr(plgpu, "InterpretGPUParams"):
        interpreter = plgpu.InterpretGPUParams()
    elif interpret:  # until JAX 0.10
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        interpreter = InterpretGPUParams()
    return plgpu.kernel(body, compiler_params=params, interpret=interpreter, **options)


def define_primitive(
    name: str, plain: Callable[..., Function], lowered: Callable[..., Function], platform: str
) -> Primitive:
    """Returns a primitive whose implementation is chosen when a program is lowered.

    Args:
        name: the name in jaxprs.
        plain: `plain(reason, **params)` returns the function in plain JAX, which is batched and differentiated in place
            of the primitive. With a reason, it raises an error that quotes the reason, unless the function is linear.
        lowered: `lowered(context, on_platform, **params)` returns the function to compile. The context is the
            `module_context` of a lowering rule.
        platform: the platform for which `on_platform` is True.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    @functools.cache
    def compiled(**params: Any) -> Function:
        return jax.jit(functools.partial(primitive.bind, **params))

    def batch(args: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Sequence[jax.Array], list[int]]:
        outs = jax.vmap(plain("does not support `jax.vmap`", **params), axes)(*args)
        return outs, [0] * len(outs)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
        fun = plain("does not support differentiation", **params)
        return primitive.bind(*primals, **params), fun(*map(ad.instantiate_zeros, tangents))

    def lower(on_platform: bool, ctx: Any, *args: Any, **params: Any) -> Any:
        from jax._src import config

        fun = lowered(ctx.module_context, on_platform, **params)
        # Inside `shard_map`, JAX requires the axes over which each output of a kernel varies, and Triton outputs do not
        # have them. During lowering no value varies over an axis, so disabling the check is safe. From JAX 0.11 on, it
        # also warns when a Triton kernel is lowered, which is redundant: the caller chose it by name.
        with config._check_vma(False), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Triton backend is deprecated", category=DeprecationWarning)
            return mlir.lower_fun(fun, multiple_results=True)(ctx, *args)

    primitive.def_impl(lambda *args, **params: compiled(**params)(*args))
    primitive.def_abstract_eval(lambda *avals, **params: jax.make_jaxpr(plain(None, **params))(*avals).out_avals)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    mlir.register_lowering(primitive, functools.partial(lower, False))
    mlir.register_lowering(primitive, functools.partial(lower, True), platform=platform)
    return primitive


def is_partitioned(context: Any) -> bool:
    """Returns whether the compiler partitions a program over devices, given the `module_context` of a lowering rule."""
    axes = context.axis_context
    if isinstance(axes, mlir.SPMDAxisContext):  # inside `shard_map`, the compiler partitions axes that are not manual
        return axes.manual_axes != frozenset(axes.mesh.axis_names)
    return isinstance(axes, mlir.ShardingContext) and axes.num_devices != 1
