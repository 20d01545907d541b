"""The primitive of a product whose operands are cast to float8, with one scale each.

Its operands and its result are 16-bit or float32, as in any other product. How it computes is decided when a program is
lowered: devices with float8 units cast both operands and multiply them as float8; others multiply in the base dtype.
The rules of the primitive are those of a product: it is linear in each operand, and its gradients are such products.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, mlir

from jmp_amp import _jaxpr as jx
from jmp_amp._calls import warn
from jmp_amp._products._aligned import padded, padding_for
from jmp_amp._products._devices import EMULATE, is_emulated, without_float8
from jmp_amp._products._primitives import RAGGED_DOT, primitive_as
from jmp_amp._products._quantize import power_of_two, quantize, scale_exponent

FLOAT8_DOT = "float8_dot_general"
FLOAT8_SCALE = "float8_scale"


def float8_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    base: Any,
    operands: tuple[Any, Any],
    cotangents: Any,
    *,
    is_weight: Sequence[bool] = (False, False),
    **params: Any,
) -> jax.Array:
    """Computes `lax.dot_general` of operands that are cast to float8, each with scales of its own.

    The product is accumulated in float32 and rounded once. The gradient of an operand has the dtype of the operand. It
    is a product of the other operand as it was given, not as it was cast.

    Args:
        lhs: an operand, in `base` or float32.
        rhs: likewise.
        base: the dtype of the product on devices without float8 units.
        operands: the float8 dtypes that `lhs` and `rhs` are cast to.
        cotangents: the float8 dtype of the cotangent of the result.
        is_weight: whether each operand is a weight. The scale of a weight is an equation of its own, so that JAX keeps
            it for the backward pass, and moves it out of loops that do not change the weight.
        **params: the parameters of `lax.dot_general_p`. `preferred_element_type` is the dtype of the result; None is
            `base`. With `precision=HIGHEST` every partial sum is float32; without, a GPU may round some ("fast
            accumulation").
    """
    own = {"base": np.dtype(base), "operands": operands, "cotangents": cotangents}
    return bind_float8(_float8_dot_p, [lhs, rhs], is_weight, params | own)


def bind_float8(primitive: Primitive, args: Sequence[Any], is_weight: Sequence[bool], params: dict[str, Any]) -> Any:
    """Applies a product; the scales of weights, which are among its first two operands, are equations of their own."""
    params["preferred_element_type"] = params["preferred_element_type"] or params["base"]
    triples = zip(args[:2], params["operands"], is_weight, strict=True)
    exponents = [_scale_p.bind(x, dtype=dtype) if is_scaled else None for x, dtype, is_scaled in triples]
    return _bind(primitive, args, exponents, params | {"emulated": is_emulated()})


def _bind(primitive: Primitive, args: Sequence[Any], exponents: Sequence[Any], params: dict[str, Any]) -> Any:
    """Applies a product to operands and those exponents of their scales that are not None."""
    given = [x for x in exponents if x is not None]
    return primitive.bind(*args, *given, **params | {"scaled": tuple(x is not None for x in exponents)})


def _split_exponents(args: Sequence[Any], scaled: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Returns the operands of a product, and the exponents of the scales of the first two."""
    n = len(args) - sum(scaled)
    return list(args[:n]), jx.combine(scaled, args[n:], (None, None))


@functools.cache
def as_products(policy: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a policy for `jax.checkpoint` that treats other products as `policy` treats `lax.dot_general`."""

    def saves(primitive: Primitive, *args: Any, **params: Any) -> Any:
        return policy(lax.dot_general_p if primitive is _float8_dot_p else primitive, *args, **params)

    return saves


def in_base(*args: Any, base: Any, scaled: Sequence[bool], **params: Any) -> jax.Array:
    """Computes the product in the base dtype, without scales."""
    (lhs, rhs, *rest), _ = _split_exponents(args, scaled)
    return bind_plain(lhs.astype(base), rhs.astype(base), *rest, **params | {"precision": None})


# Parameters that the products of `lax` do not have.
OWN = "base", "operands", "cotangents", "emulated", "scaled"


def bind_plain(*args: Any, **params: Any) -> jax.Array:
    """Computes the product of `lax` with these parameters."""
    params = {name: x for name, x in params.items() if name not in OWN}
    plain = lax.dot_general_p.bind if "dimension_numbers" in params else lax.ragged_dot_general
    return plain(*args, **params)


def lower(ctx: Any, *args: Any, **params: Any) -> Any:
    """Lowers a product for the device: on float8 operands, or in the base dtype with a warning."""
    lacking = list(filter(None, map(without_float8, jx.versions.lowering_platforms(ctx))))
    if lacking and not params["emulated"]:
        warn(
            f"{lacking[0]} has no float8 units, so products run in {params['base']} instead of float8; write "
            f'dtype="{np.dtype(params["base"])}" for this device, or set the environment variable {EMULATE}=1 to '
            "compute them as a device with float8 units does"
        )
        return mlir.lower_fun(functools.partial(in_base, **params), multiple_results=False)(ctx, *args)
    (lhs, rhs, *rest), exponents = _split_exponents(list(zip(ctx.avals_in, args, strict=True)), params["scaled"])
    triples = zip((lhs, rhs), exponents, params["operands"], strict=True)
    casts = [_lowered_cast(ctx, [x] if exponent is None else [x, exponent], dtype) for x, exponent, dtype in triples]
    zeros = None if rest else padding_for(ctx, [aval for (aval, _), _ in casts], params)
    avals, values = zip(*itertools.chain(*casts), *rest, strict=True)
    product = functools.partial(_scaled_product, zeros=zeros, **params)
    return mlir.lower_fun(product, multiple_results=False)(ctx.replace(avals_in=avals), *values)


def _lowered_cast(ctx: Any, inputs: Sequence[tuple[Any, Any]], dtype: Any) -> list[tuple[Any, Any]]:
    """Lowers the cast of an operand to a float8 dtype, once for each array, and returns types and values of `quantize`.

    The forward and the backward pass cast the same weights. XLA does not merge equal collectives: two maxima of a
    sharded weight would make two casts of it, and two all-gathers.

    GPUs read float8 along the axis that is summed over. To get there, XLA would transpose the float32 weights of all
    layers, before a loop over micro-batches starts. In the order in which a weight is stored, it transposes the float8
    weight of a layer.

    Args:
        ctx: that of the lowering rule.
        inputs: the types and values of the operand and, for a weight, of the exponent of its scale.
        dtype: the float8 dtype.
    """
    avals, values = zip(*inputs, strict=True)
    is_on_gpu = {"cuda", "rocm"}.issuperset(jx.versions.lowering_platforms(ctx))
    order = jx.versions.stored_order(ctx, *inputs[0]) if len(inputs) > 1 and is_on_gpu else None

    def cast(x: jax.Array, *exponent: jax.Array) -> tuple[jax.Array, jax.Array]:
        low, exponents = quantize(x, dtype, *exponent)
        return low if order is None else with_layout_constraint(low, Layout(order)), exponents

    def lower() -> list[tuple[Any, Any]]:
        out_avals = jx.trace(cast, avals).out_avals
        ctx_of_cast = ctx.replace(avals_in=avals, avals_out=out_avals)
        return list(zip(out_avals, mlir.lower_fun(cast, multiple_results=True)(ctx_of_cast, *values), strict=True))

    return jx.versions.lowered_once(ctx, ("cast to float8", dtype, order, *values), lower)


def _scaled_product(
    x: jax.Array, x_exponent: jax.Array, y: jax.Array, y_exponent: jax.Array, *rest: Any, zeros: Any, **params: Any
) -> jax.Array:
    result = params["preferred_element_type"]
    # A float8 product may exceed float16. In bfloat16 it fits, and the power of two is exact there as well.
    accumulated = np.dtype(np.float32) if result == np.float16 else result
    plain = functools.partial(bind_plain, **params | {"preferred_element_type": accumulated})
    product = padded(plain, zeros)(x, y, *rest)
    return (product * power_of_two(-(x_exponent + y_exponent)).astype(accumulated)).astype(result)


def _gradient(
    primitive: Primitive, i: int, cotangent: Any, args: Sequence[Any], exponents: Sequence[Any], **params: Any
) -> Any:
    """Returns the gradient of an operand, by a product of the cotangent and the other operand.

    Its partial sums are float32. It is on float8 operands if a device multiplies these.
    """
    unknown, known, rest, base = args[i], args[1 - i], args[2:], params["base"]

    def gradient(cotangent: Any, known: Any, *rest: Any) -> Any:
        def product(x: Any) -> Any:
            operands = (x, known) if i == 0 else (known, x)
            return bind_plain(*operands, *rest, **params | {"preferred_element_type": base})

        return jax.linear_transpose(product, jx.with_dtype(unknown.aval, base))(cotangent)[0]

    program = jx.trace(gradient, [jx.with_dtype(cotangent, base), jx.with_dtype(known, base), *rest])
    # For a weight that is the right operand, JAX transposes the product. Here the operands are swapped instead.
    is_swapped = not rest and any(_is_matrix_transpose(eqn) for eqn in jx.open_jaxpr(program)[0].eqns)

    def apply(eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
        if is_swapped and _is_matrix_transpose(eqn):
            return args
        if eqn.primitive.name not in (lax.dot_general_p.name, RAGGED_DOT):
            return jx.bind(eqn, args)
        own = eqn.params | {name: params[name] for name in OWN} | {"preferred_element_type": unknown.aval.dtype}
        operands, scales = (params["cotangents"], params["operands"][1 - i]), (None, exponents[1 - i])
        if is_swapped:
            args, own = args[::-1], own | _swapped(eqn)
        if is_swapped or (rest and i == 1):  # JAX has the cotangent first, and second for the matrices of groups
            operands, scales = operands[::-1], scales[::-1]
        own["operands"] = operands
        if all(dtype == jnp.float8_e5m2 for dtype in operands):  # a second derivative
            return [in_base(*args, **own | {"scaled": ()})]
        return [_bind(primitive, args, scales, own | {"precision": lax.Precision.HIGHEST})]

    return jx.evaluate(program, [cotangent, known, *rest], apply)[0]


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
    if None not in axes[:2] or params["out_sharding"] is not None:
        return jax.vmap(functools.partial(in_base, **params), axes)(*args), 0
    pairs = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(args, axes, strict=True)]
    args, exponents = _split_exponents(pairs, params["scaled"])
    (contracting, batch), i = params["dimension_numbers"], int(axes[0] is None)
    numbers = tuple([tuple([axis + (j == i) for axis in each]) for j, each in enumerate(contracting)]), batch
    if exponents[i] is not None:  # of the scale that suits all rows
        exponents[i] = jnp.min(exponents[i], axis=0)
    axis = 0 if i == 0 else args[0].ndim - len(contracting[0])
    return _bind(_float8_dot_p, args, exponents, params | {"dimension_numbers": numbers}), axis


def product_primitive(name: str, batch: Callable[..., Any] | None = None) -> Primitive:
    """Returns a primitive of products on float8 operands, which is linear in the first two.

    Args:
        name: its name.
        batch: its rule for `jax.vmap`; without one, a batch runs in the base dtype.
    """
    primitive = primitive_as(name, in_base, batch)
    mlir.register_lowering(primitive, lower, cacheable=False)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        args, exponents = _split_exponents(primals, params["scaled"])

        def term(i: int) -> Any:
            moved = [tangents[i] if j == i else x for j, x in enumerate(args)]
            return _bind(primitive, moved, [None if j == i else x for j, x in enumerate(exponents)], params)

        out = primitive.bind(*primals, **params)
        terms = [term(i) for i in (0, 1) if type(tangents[i]) is not ad.Zero]
        return out, functools.reduce(lax.add, terms)

    def transpose(cotangent: Any, *args: Any, **params: Any) -> list[Any]:
        operands, exponents = _split_exponents(args, params["scaled"])
        if type(cotangent) is ad.Zero:
            return [None] * len(args)
        # The scale of an operand has no derivative.
        is_linear = [i < 2 and ad.is_undefined_primal(x) for i, x in enumerate(args)]
        return [
            _gradient(primitive, i, cotangent, operands, exponents, **params) if x else None
            for i, x in enumerate(is_linear)
        ]

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose
    return primitive


def is_float8_scale(primitive: Primitive, *args: Any, **params: Any) -> bool:
    """Whether an equation computes the scale of a weight; a policy for `jax.checkpoint` and `jx.hoist`."""
    return primitive is _scale_p


_scale_p = primitive_as(FLOAT8_SCALE, scale_exponent)
mlir.register_lowering(_scale_p, mlir.lower_fun(scale_exponent, multiple_results=False))
ad.defjvp(_scale_p, None)
ad.primitive_transposes[_scale_p] = lambda cotangent, x, **params: [None]

_float8_dot_p = product_primitive(FLOAT8_DOT, _batch)
