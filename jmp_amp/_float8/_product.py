"""The primitive of a product whose operands are cast to float8 with a scale each.

Its operands and its result are 16-bit or float32, as in any other product. How it computes is decided when a program is
lowered: devices with float8 units cast both operands and multiply them as float8; others multiply in the base dtype.
The rules of the primitive are those of a product: it is linear in each operand, and its gradients are such products.
"""

import contextlib
import contextvars
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from jmp_amp._float8._devices import device_without_float8
from jmp_amp._float8._quantize import power_of_two, quantize
from jmp_amp._jaxpr import bind, evaluate, open_jaxpr, trace, with_dtype

PRIMITIVE = "float8_dot_general"
EMULATE = "JMP_AMP_EMULATE_FLOAT8"

_float8_dot_p = Primitive(PRIMITIVE)
_is_emulated = contextvars.ContextVar("is_emulated", default=False)


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Traces products that run in float8 on every device: on one without float8 units, they are as slow as float32."""
    token = _is_emulated.set(True)
    try:
        yield
    finally:
        _is_emulated.reset(token)


def float8_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    base: Any,
    operands: tuple[Any, Any],
    cotangents: Any,
    **params: Any,
) -> jax.Array:
    """Computes `lax.dot_general` of operands that are cast to float8, each with a scale of its own.

    The product is accumulated in float32, multiplied by the inverse scales, and rounded once. The gradient of an
    operand has the dtype of the operand.

    Args:
        lhs: an operand, in `base` or float32.
        rhs: likewise.
        base: the dtype of the product on devices without float8 units.
        operands: the float8 dtypes that `lhs` and `rhs` are cast to.
        cotangents: the float8 dtype of the cotangent of the result.
        **params: the parameters of `lax.dot_general_p`. `preferred_element_type` is the dtype of the result; None is
            `base`. With `precision=HIGHEST` every partial sum is float32; without, a GPU may round some ("fast
            accumulation").
    """
    is_emulated = _is_emulated.get() or os.environ.get(EMULATE, "0") not in ("", "0")
    params["preferred_element_type"] = params["preferred_element_type"] or np.dtype(base)
    return _float8_dot_p.bind(
        lhs, rhs, base=base, operands=operands, cotangents=cotangents, emulated=is_emulated, **params
    )


@functools.cache
def as_products(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a policy for `jax.checkpoint` that treats `float8_dot` as `policy` treats `lax.dot_general`."""

    def saves(primitive: Primitive, *args: Any, **params: Any) -> Any:
        return policy(lax.dot_general_p if primitive is _float8_dot_p else primitive, *args, **params)

    return saves


def _of_quantized(x: jax.Array, x_exponent: jax.Array, y: jax.Array, y_exponent: jax.Array, **params: Any) -> jax.Array:
    result = params["preferred_element_type"]
    # A float8 product may exceed float16. In bfloat16 it fits, and the power of two is exact there as well.
    accumulated = np.dtype(np.float32) if result == np.float16 else result
    product = _dot(x, y, **params | {"preferred_element_type": accumulated})
    return (product * power_of_two(-(x_exponent + y_exponent)).astype(accumulated)).astype(result)


def _in_base(lhs: jax.Array, rhs: jax.Array, *, base: Any, **params: Any) -> jax.Array:
    return _dot(lhs.astype(base), rhs.astype(base), **params | {"precision": None})


_OWN = ("base", "operands", "cotangents", "emulated")  # parameters that `lax.dot_general_p` does not have


def _dot(lhs: jax.Array, rhs: jax.Array, **params: Any) -> jax.Array:
    return lax.dot_general_p.bind(lhs, rhs, **{name: x for name, x in params.items() if name not in _OWN})


def _abstract_eval(lhs: Any, rhs: Any, **params: Any) -> Any:
    return trace(functools.partial(_in_base, **params), [lhs, rhs]).out_avals[0]


def _lower(ctx: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    if not params["emulated"] and (device := device_without_float8(ctx.module_context.platforms)) is not None:
        warnings.warn(
            f"{device} has no float8 units, so products run in {params['base']} instead of float8; "
            f"set the environment variable {EMULATE}=1 to compute them as a device with float8 units does",
            stacklevel=2,
        )
        return mlir.lower_fun(functools.partial(_in_base, **params), multiple_results=False)(ctx, lhs, rhs)
    operands = zip(ctx.avals_in, (lhs, rhs), params["operands"], strict=True)
    avals, values = zip(*[pair for operand in operands for pair in _quantized(ctx, *operand)], strict=True)
    product = functools.partial(_of_quantized, **params)
    return mlir.lower_fun(product, multiple_results=False)(ctx.replace(avals_in=avals), *values)


def _quantized(ctx: Any, aval: Any, x: Any, dtype: Any) -> Sequence[tuple[Any, Any]]:
    """Lowers `quantize` once for each array, and returns its results, each as a type and a value.

    The forward and the backward pass quantize the same weights. XLA does not merge equal collectives: two maxima of a
    sharded weight would make two casts of it, and two all-gathers.
    """
    cache, block = ctx.module_context.cached_primitive_lowerings, mlir.ir.InsertionPoint.current.block
    key = quantize, x, np.dtype(dtype)
    if key not in cache or cache[key][0] != block:  # a value of another block may not be visible here
        fun = functools.partial(quantize, dtype=dtype)
        avals = trace(fun, [aval]).out_avals
        values = mlir.lower_fun(fun, multiple_results=True)(ctx.replace(avals_in=[aval], avals_out=avals), x)
        cache[key] = block, list(zip(avals, values, strict=True))
    return cache[key][1]


def _gradient(i: int, cotangent: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    """Returns the gradient of an operand, by a product of the cotangent and the other operand."""
    if type(cotangent) is ad.Zero:
        return cotangent
    unknown, known = (lhs, rhs) if i == 0 else (rhs, lhs)
    base, formats = params["base"], params["operands"]

    def transposed(cotangent: Any, known: Any) -> Any:
        def product(x: Any) -> Any:
            return _dot(*((x, known) if i == 0 else (known, x)), **params | {"preferred_element_type": base})

        return jax.linear_transpose(product, unknown.aval.update(dtype=base))(cotangent)[0]

    program = trace(transposed, [with_dtype(cotangent, base), with_dtype(known, base)])
    # For a weight that is the right operand, JAX transposes the product. Here the operands are swapped instead.
    is_swapped = any(_is_matrix_transpose(eqn) for eqn in open_jaxpr(program)[0].eqns)

    def apply(eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
        if is_swapped and _is_matrix_transpose(eqn):
            return args
        if eqn.primitive is not lax.dot_general_p:
            return bind(eqn, args)
        own = eqn.params | {name: params[name] for name in _OWN} | {"preferred_element_type": unknown.aval.dtype}
        operands = (params["cotangents"], formats[1 - i])
        if is_swapped:
            args, operands, own = args[::-1], operands[::-1], own | _swapped(eqn)
        if len(set(operands)) == 1:  # a derivative of a derivative: no device multiplies two cotangents
            return [_in_base(*args, **own)]
        return [_float8_dot_p.bind(*args, **own | {"operands": operands, "precision": lax.Precision.HIGHEST})]

    return evaluate(program, [cotangent, known], apply)[0]


def _is_matrix_transpose(eqn: JaxprEqn) -> bool:
    return eqn.primitive is lax.transpose_p and eqn.params["permutation"] == (1, 0)


def _swapped(eqn: JaxprEqn) -> dict[str, Any]:
    """Returns the parameters of a product of swapped operands, which is a matrix."""
    (contracting, batch), sharding = eqn.params["dimension_numbers"], eqn.params["out_sharding"]
    if sharding is not None:
        sharding = sharding.update(spec=jax.P(*reversed(sharding.spec)))
    return {"dimension_numbers": (contracting[::-1], batch), "out_sharding": sharding}


def _batch(args: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, int]:
    """Adds the rows of a batch to those of the product. Otherwise it runs in the base dtype."""
    if None not in axes or params["out_sharding"] is not None:
        return jax.vmap(functools.partial(_in_base, **params), axes)(*args), 0
    i = int(axes[0] is None)
    contracting, batch = params["dimension_numbers"][0], params["dimension_numbers"][1]
    args, contracting = list(args), list(contracting)
    args[i] = jnp.moveaxis(args[i], axes[i], 0)
    contracting[i] = tuple(axis + 1 for axis in contracting[i])
    numbers = tuple(map(tuple, contracting)), batch
    axis = 0 if i == 0 else args[0].ndim - len(contracting[0])
    return _float8_dot_p.bind(*args, **params | {"dimension_numbers": numbers}), axis


@functools.cache
def _eager(**params: Any) -> Callable[..., jax.Array]:
    return jax.jit(functools.partial(_float8_dot_p.bind, **params))


_float8_dot_p.def_impl(lambda lhs, rhs, **params: _eager(**params)(lhs, rhs))
_float8_dot_p.def_abstract_eval(_abstract_eval)
ad.defbilinear(_float8_dot_p, functools.partial(_gradient, 0), functools.partial(_gradient, 1))
batching.primitive_batchers[_float8_dot_p] = _batch
mlir.register_lowering(_float8_dot_p, _lower, cacheable=False)
