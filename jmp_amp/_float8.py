"""The primitive of a product whose operands are cast to float8 with a scale each; nothing here knows of autocast.

Its operands and its result are 16-bit or float32, as in any other product. How it computes is decided when a program is
lowered: devices with float8 units cast both operands and multiply them as float8; others multiply in the base dtype.
The rules of the primitive are those of a product: it is linear in each operand, and its gradients are such products.

The scale of an operand is a power of two, so scaling rounds nothing, and the gradients of a scaled loss are the scaled
gradients, bit for bit. It is computed from the array itself ("current scaling"), so no state is kept from step to step.
"""

import contextlib
import contextvars
import functools
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from jmp_amp import _jaxpr as jx

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
    lhs: jax.Array, rhs: jax.Array, base: Any, operands: tuple[Any, Any], cotangents: Any, **params: Any
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
    params["preferred_element_type"] = params["preferred_element_type"] or np.dtype(base)
    return _float8_dot_p.bind(
        lhs, rhs, base=base, operands=operands, cotangents=cotangents, emulated=is_emulated(), **params
    )


def is_emulated() -> bool:
    """Whether products that are traced now run in float8 on every device."""
    return _is_emulated.get() or os.environ.get(EMULATE, "0") not in ("", "0")


@functools.cache
def as_products(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a policy for `jax.checkpoint` that treats `float8_dot` as `policy` treats `lax.dot_general`."""

    def saves(primitive: Primitive, *args: Any, **params: Any) -> Any:
        return policy(lax.dot_general_p if primitive is _float8_dot_p else primitive, *args, **params)

    return saves


def _of_quantized(
    x: jax.Array, x_exponent: jax.Array, y: jax.Array, y_exponent: jax.Array, *rest: Any, **params: Any
) -> jax.Array:
    result = params["preferred_element_type"]
    # A float8 product may exceed float16. In bfloat16 it fits, and the power of two is exact there as well.
    accumulated = np.dtype(np.float32) if result == np.float16 else result
    product = bind_plain(x, y, *rest, **params | {"preferred_element_type": accumulated})
    return (product * power_of_two(-(x_exponent + y_exponent)).astype(accumulated)).astype(result)


def in_base(lhs: jax.Array, rhs: jax.Array, *rest: Any, base: Any, **params: Any) -> jax.Array:
    """Computes the product in the base dtype."""
    return bind_plain(lhs.astype(base), rhs.astype(base), *rest, **params | {"precision": None})


OWN = ("base", "operands", "cotangents", "emulated")  # parameters that the products of `lax` do not have


def bind_plain(*args: Any, **params: Any) -> jax.Array:
    """Computes the product of `lax` with these parameters."""
    params = {name: x for name, x in params.items() if name not in OWN}
    plain = lax.dot_general_p.bind if "dimension_numbers" in params else lax.ragged_dot_general
    return plain(*args, **params)


def abstract_eval(*avals: Any, **params: Any) -> Any:
    """Returns the type of the product."""
    return jx.trace(functools.partial(in_base, **params), avals).out_avals[0]


def lower(ctx: Any, lhs: Any, rhs: Any, *rest: Any, **params: Any) -> Any:
    """Lowers a product for the device: on float8 operands, or in the base dtype with a warning."""
    lacking = [device for platform in jx.lowering_platforms(ctx) if (device := _without_float8(platform)) is not None]
    if lacking and not params["emulated"]:
        warnings.warn(
            f"{lacking[0]} has no float8 units, so products run in {params['base']} instead of float8; "
            f"set the environment variable {EMULATE}=1 to compute them as a device with float8 units does",
            stacklevel=2,
        )
        return mlir.lower_fun(functools.partial(in_base, **params), multiple_results=False)(ctx, lhs, rhs, *rest)
    operands = zip(ctx.avals_in, (lhs, rhs), params["operands"], strict=False)
    avals, values = zip(*[pair for operand in operands for pair in _quantized(ctx, *operand)], strict=True)
    product, avals = functools.partial(_of_quantized, **params), (*avals, *ctx.avals_in[2:])
    return mlir.lower_fun(product, multiple_results=False)(ctx.replace(avals_in=avals), *values, *rest)


def _quantized(ctx: Any, aval: Any, x: Any, dtype: Any) -> Sequence[tuple[Any, Any]]:
    """Lowers `quantize` once for each array, and returns its results, each as a type and a value.

    The forward and the backward pass quantize the same weights. XLA does not merge equal collectives: two maxima of a
    sharded weight would make two casts of it, and two all-gathers.
    """

    def lower() -> Sequence[tuple[Any, Any]]:
        fun = functools.partial(quantize, dtype=dtype)
        avals = jx.trace(fun, [aval]).out_avals
        values = mlir.lower_fun(fun, multiple_results=True)(ctx.replace(avals_in=[aval], avals_out=avals), x)
        return list(zip(avals, values, strict=True))

    return jx.lowered_once(ctx, (quantize, x, np.dtype(dtype)), lower)


def _gradient(i: int, cotangent: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    """Returns the gradient of an operand, by a product of the cotangent and the other operand."""
    if type(cotangent) is ad.Zero:
        return cotangent
    unknown, known = (lhs, rhs) if i == 0 else (rhs, lhs)
    base, formats = params["base"], params["operands"]

    def transposed(cotangent: Any, known: Any) -> Any:
        def product(x: Any) -> Any:
            return bind_plain(*((x, known) if i == 0 else (known, x)), **params | {"preferred_element_type": base})

        return jax.linear_transpose(product, jx.aval_with(unknown.aval, base))(cotangent)[0]

    program = jx.trace(transposed, [jx.with_dtype(cotangent, base), jx.with_dtype(known, base)])
    # For a weight that is the right operand, JAX transposes the product. Here the operands are swapped instead.
    is_swapped = any(_is_matrix_transpose(eqn) for eqn in jx.open_jaxpr(program)[0].eqns)

    def apply(eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
        if is_swapped and _is_matrix_transpose(eqn):
            return args
        if eqn.primitive is not lax.dot_general_p:
            return jx.bind(eqn, args)
        own = eqn.params | {name: params[name] for name in OWN} | {"preferred_element_type": unknown.aval.dtype}
        operands = (params["cotangents"], formats[1 - i])
        if is_swapped:
            args, operands, own = args[::-1], operands[::-1], own | _swapped(eqn)
        if len(set(operands)) == 1:  # a derivative of a derivative: no device multiplies two cotangents
            return [in_base(*args, **own)]
        return [_float8_dot_p.bind(*args, **own | {"operands": operands, "precision": lax.Precision.HIGHEST})]

    return jx.evaluate(program, [cotangent, known], apply)[0]


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
        return jax.vmap(functools.partial(in_base, **params), axes)(*args), 0
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
_float8_dot_p.def_abstract_eval(abstract_eval)
ad.defbilinear(_float8_dot_p, functools.partial(_gradient, 0), functools.partial(_gradient, 1))
batching.primitive_batchers[_float8_dot_p] = _batch
mlir.register_lowering(_float8_dot_p, lower, cacheable=False)


_BIAS = 127  # of the exponent of a float32
_MANTISSA = 23  # bits
_LARGEST = 126  # the exponents -126 to 126: the scale and its inverse are normal numbers


def quantize(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Casts an array to a float8 dtype, scaled to use its range.

    An infinity or NaN makes every element NaN, so that an overflow is found in whatever is computed from the result.

    Args:
        x: floating, not empty.
        dtype: the float8 dtype.

    Returns:
        `x * 2**exponent` in `dtype`, whose largest magnitude is between half of the largest finite number of
        `dtype` and that number; and `exponent`, an int32 scalar.
    """
    largest = lax.reduce_max(lax.abs(x), range(x.ndim)).astype(jnp.float32)
    exponent = jnp.clip(_exponent(jnp.finfo(dtype).max) - _exponent(largest), -_LARGEST, _LARGEST)
    scale = jnp.where(jnp.isfinite(largest), power_of_two(exponent), jnp.nan)
    return lax.convert_element_type(x.astype(jnp.float32) * scale, dtype), exponent


def _exponent(x: Any) -> jax.Array:
    """Returns the exponent of a float32, plus 1 if its mantissa exceeds that of every largest float8 number, 1.75."""
    bits = lax.bitcast_convert_type(jnp.float32(x), jnp.int32)
    exponent, mantissa = bits >> _MANTISSA, bits & (2**_MANTISSA - 1)
    return exponent + (mantissa > 3 << (_MANTISSA - 2)) - _BIAS


def power_of_two(exponent: jax.Array) -> jax.Array:
    """Returns a power of two as a float32; where that is below 2^-126, a device may return 0."""
    half = exponent >> 1
    return _normal_power(half) * _normal_power(exponent - half)


def _normal_power(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponent + _BIAS) << _MANTISSA, jnp.float32)


# Parts of the names of GPUs and TPUs. A GPU that is not named here has the units: all do since Ada (sm_89), of 2022.
_GPUS_WITHOUT = re.compile("P100|V100|TITAN|T4|Quadro|A100|A30|A40|A10|A16|RTX [23]0|RTX A")
_TPUS_WITH = re.compile("TPU7|TPU v7")
_LEAST_CAPABILITY = (8, 9)


def _without_float8(platform: str) -> str | None:
    """Returns the name of the device that a program for a platform runs on, or None if it has float8 units.

    Args:
        platform: `"cpu"`, `"cuda"`, `"rocm"` or `"tpu"`.
    """
    kind, capability = _target(platform)
    if platform == "cuda":
        is_old = bool(_GPUS_WITHOUT.search(kind)) if capability is None else capability < _LEAST_CAPABILITY
        return kind if is_old else None
    has_units = platform == "tpu" and _TPUS_WITH.search(kind)
    return None if has_units else kind or platform


def _target(platform: str) -> tuple[str, tuple[int, ...] | None]:
    """Returns the kind and the compute capability of the device: the one described for the compiler, or else the first.

    The kind is empty if the program is lowered for a platform that this process does not have.
    """
    name = {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None and described.platform == name:
        return described.device_kind, None
    if jax.default_backend() != name:
        return "", None
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", None)
    return device.device_kind, None if capability is None else tuple(map(int, capability.split(".")))
