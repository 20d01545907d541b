"""The primitive of a product whose operands are cast to float8, with one scale each or one for each block of 32.

Its operands and its result are 16-bit or float32, as in any other product. How it computes is decided when a program is
lowered: devices with float8 units cast both operands and multiply them as float8; others multiply in the base dtype.
The rules of the primitive are those of a product: it is linear in each operand, and its gradients are such products.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, mlir

from jmp_amp import _jaxpr as jx
from jmp_amp._aligned import padded, padding_for, primitive_as, transposed
from jmp_amp._calls import warn
from jmp_amp._float8._devices import EMULATE, is_emulated, without_float8
from jmp_amp._float8._quantize import (
    BLOCK,
    dequantize_blocks,
    power_of_two,
    quantize,
    quantize_blocks,
    scale_exponent,
)
from pallas_kernels import fastest_implementation
from pallas_kernels import quantize as quantize_matrix

PRIMITIVE = "float8_dot_general"
PLAIN_PRIMITIVE = "ragged_dot_general"  # that of JAX
SCALE_PRIMITIVE = "float8_scale"


def float8_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    base: Any,
    operands: tuple[Any, Any],
    cotangents: Any,
    *,
    blocks: bool = False,
    is_weight: Sequence[bool] = (False, False),
    **params: Any,
) -> jax.Array:
    """Computes `lax.dot_general` of operands that are cast to float8, each with scales of its own.

    The product is accumulated in float32 and rounded once. The gradient of an operand has the dtype of the operand. It
    is a product of the operand as it was given, not as it was cast: with `blocks`, each product casts its operands
    along the axes that it sums over.

    Args:
        lhs: an operand, in `base` or float32.
        rhs: likewise.
        base: the dtype of the product on devices without float8 units.
        operands: the float8 dtypes that `lhs` and `rhs` are cast to.
        cotangents: the float8 dtype of the cotangent of the result.
        blocks: whether each 32 terms of a sum have a scale, and not an operand; the numbers of terms, rows and columns
            are multiples of 32.
        is_weight: whether each operand is a weight. The scale of a weight is an equation of its own, so that JAX keeps
            it for the backward pass, and moves it out of loops that do not change the weight.
        **params: the parameters of `lax.dot_general_p`. `preferred_element_type` is the dtype of the result; None is
            `base`. With `precision=HIGHEST` every partial sum is float32; without, a GPU may round some ("fast
            accumulation").
    """
    own = {"base": np.dtype(base), "operands": operands, "cotangents": cotangents, "blocks": blocks}
    return bind_float8(_PRODUCTS[blocks], [lhs, rhs], is_weight, params | own)


def bind_float8(primitive: Primitive, args: Sequence[Any], is_weight: Sequence[bool], params: dict[str, Any]) -> Any:
    """Applies a product; the scales of weights, which are among its first two operands, are equations of their own."""
    params["preferred_element_type"] = params["preferred_element_type"] or params["base"]
    has_scale = [weight and not params["blocks"] for weight in is_weight]
    triples = zip(args[:2], params["operands"], has_scale, strict=True)
    exponents = [_scale_p.bind(x, dtype=dtype) if is_scaled else None for x, dtype, is_scaled in triples]
    return bind_product(primitive, args, exponents, params | {"emulated": is_emulated()})


def bind_product(primitive: Primitive, args: Sequence[Any], exponents: Sequence[Any], params: dict[str, Any]) -> Any:
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
        is_product = primitive.name == "dot_general" or primitive in _PRODUCTS.values()  # it may be an aligned one
        return policy(lax.dot_general_p if is_product else primitive, *args, **params)

    return saves


def in_base(*args: Any, base: Any, scaled: Sequence[bool], **params: Any) -> jax.Array:
    """Computes the product in the base dtype, without scales."""
    (lhs, rhs, *rest), _ = _split_exponents(args, scaled)
    return bind_plain(lhs.astype(base), rhs.astype(base), *rest, **params | {"precision": None})


# Parameters that the products of `lax` do not have.
OWN = "base", "operands", "cotangents", "blocks", "emulated", "scaled"


def bind_plain(*args: Any, **params: Any) -> jax.Array:
    """Computes the product of `lax` with these parameters."""
    params = {name: x for name, x in params.items() if name not in OWN}
    plain = lax.dot_general_p.bind if "dimension_numbers" in params else lax.ragged_dot_general
    return plain(*args, **params)


def lower(ctx: Any, *args: Any, **params: Any) -> Any:
    """Lowers a product for the device: on float8 operands, or in the base dtype with a warning."""
    blocks, platforms = params["blocks"], jx.versions.lowering_platforms(ctx)
    plain = functools.partial(in_base, **params)
    lacking = [device for each in platforms if (device := without_float8(each, blocks=blocks)) is not None]
    if lacking and not params["emulated"]:
        units = "units for blocks of float8" if blocks else "float8 units"
        has_float8 = all(without_float8(each) is None for each in platforms)
        warn(
            f"{lacking[0]} has no {units}, so products run in {params['base']} instead of float8; "
            f'write dtype="{"float8" if has_float8 else np.dtype(params["base"])}" for this device, or '
            f"set the environment variable {EMULATE}=1 to compute them as a device with {units} does"
        )
        return mlir.lower_fun(plain, multiple_results=False)(ctx, *args)
    (lhs, rhs, *rest), exponents = _split_exponents(list(zip(ctx.avals_in, args, strict=True)), params["scaled"])
    inputs = [[x] if exponent is None else [x, exponent] for x, exponent in zip((lhs, rhs), exponents, strict=True)]
    if not blocks:
        orders = [_order(ctx, *each) for each in inputs]
        casts = [_Cast(dtype, order=order) for dtype, order in zip(params["operands"], orders, strict=True)]
        zeros = None
        if not rest:
            pair = [jx.with_dtype(x, dtype) for (x, _), dtype in zip((lhs, rhs), params["operands"], strict=True)]
            zeros = padding_for(ctx, pair, params)
        return _lower_casts(ctx, inputs, casts, functools.partial(_of_tensors, zeros=zeros, **params), rest)
    axes, (out,) = params["dimension_numbers"][0], jx.trace(plain, ctx.avals_in).out_avals
    casts = [_Cast(dtype, tuple(along)) for dtype, along in zip(params["operands"], axes, strict=True)]
    product = functools.partial(_of_blocks, is_native=not lacking, shape=out.shape, dtype=out.dtype)
    inputs = [[(jax.core.ShapedArray(aval.shape, aval.dtype), value) for aval, value in each] for each in inputs]
    # JAX does not merge axes of a type that has a sharding. Without a mesh no type has one; the compiler propagates it.
    device = jax.sharding.get_abstract_mesh().abstract_device
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return _lower_casts(ctx, inputs, casts, product)


Typed = tuple[Any, Any]  # a type and a value of the program that is lowered


def _order(ctx: Any, x: Typed, *exponent: Typed) -> tuple[int, ...] | None:
    """Returns the order of the axes in which a weight is stored, for GPUs; None for another operand."""
    is_gpu = {"cuda", "rocm"}.issuperset(jx.versions.lowering_platforms(ctx))
    return jx.versions.stored_order(ctx, *x) if exponent and is_gpu else None


def _lower_casts(
    ctx: Any,
    inputs: Sequence[Sequence[Typed]],
    casts: Sequence["_Cast"],
    product: Callable[..., jax.Array],
    rest: Sequence[Typed] = (),
) -> Any:
    pairs = [pair for each, cast in zip(inputs, casts, strict=True) for pair in _lowered_pair(ctx, each, cast)]
    avals, values = zip(*pairs, *rest, strict=True)
    return mlir.lower_fun(product, multiple_results=False)(ctx.replace(avals_in=avals), *values)


def _lowered_pair(ctx: Any, inputs: Sequence[Typed], cast: "_Cast") -> Sequence[Typed]:
    kernel = cast.kernel(inputs[0][0])
    if kernel is None:
        return _lowered_cast(ctx, inputs, cast)
    rows, columns, row_scales, column_scales = _lowered_cast(ctx, inputs, kernel)
    return [columns, column_scales] if cast.is_along_columns else [rows, row_scales]


def _lowered_cast(ctx: Any, inputs: Sequence[Typed], cast: Any) -> Sequence[Typed]:
    """Lowers a cast once for each array, and returns its results.

    The forward and the backward pass cast the same weights. XLA does not merge equal collectives: two maxima of a
    sharded weight would make two casts of it, and two all-gathers.
    """
    avals, values = zip(*inputs, strict=True)

    def lower() -> Sequence[Typed]:
        out_avals = jx.trace(cast, avals).out_avals
        ctx_of_cast = ctx.replace(avals_in=avals, avals_out=out_avals)
        return list(zip(out_avals, mlir.lower_fun(cast, multiple_results=True)(ctx_of_cast, *values), strict=True))

    return jx.versions.lowered_once(ctx, (cast, *values), lower)


class _Cast(NamedTuple):
    """The cast of an operand.

    Attributes:
        dtype: the float8 dtype.
        along: the axes that are summed over, if each 32 elements along them have a scale; None for one scale.
        order: the axes of the result in memory, the outermost first; None leaves it to XLA. GPUs read float8 along the
            axis that is summed over. To get there, XLA would transpose the float32 weights of all layers, before a loop
            over micro-batches starts. In the order of the weight, it transposes the float8 weight of a layer.
    """

    dtype: np.dtype
    along: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    @property
    def is_along_columns(self) -> bool:
        """Whether the axes that are summed over come first."""
        return self.along is not None and self.along == tuple(range(len(self.along)))

    def __call__(self, x: jax.Array, *exponent: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns `quantize` of the operand, or `quantize_blocks` of it as a matrix, whose rows are summed over."""
        if self.along is None:
            low, exponents = quantize(x, self.dtype, *exponent)
            return low if self.order is None else with_layout_constraint(low, Layout(self.order)), exponents
        terms = math.prod(x.shape[axis] for axis in self.along)
        if self.is_along_columns:  # the float8 array is transposed, which has fewer bytes
            return quantize_blocks(x.reshape(terms, -1), self.dtype, 0)
        others = [axis for axis in range(x.ndim) if axis not in self.along]
        return quantize_blocks(x.transpose(*others, *self.along).reshape(-1, terms), self.dtype, 1)

    def kernel(self, aval: Any) -> "_KernelCast | None":
        """Returns the cast along both axes, if a kernel is faster than XLA here."""
        if self.along is None or fastest_implementation("quantize_blocks", [aval.dtype], aval.size) == "xla":
            return None
        n, ndim = len(self.along), len(aval.shape)
        first = n if self.is_along_columns else ndim - n  # of the columns
        is_matrix = self.is_along_columns or self.along == tuple(range(first, ndim))
        return _KernelCast(self.dtype, math.prod(aval.shape[first:])) if is_matrix else None


class _KernelCast(NamedTuple):
    """The casts of an operand along its rows and along its columns, by a kernel that reads it once.

    Attributes:
        dtype: the float8 dtype.
        columns: the number of columns of the operand as a matrix.
    """

    dtype: np.dtype
    columns: int

    def __call__(self, x: jax.Array) -> Any:
        """Returns `pallas_kernels.QuantizedBlocks`."""
        return quantize_matrix(x.reshape(-1, self.columns), self.dtype, block=BLOCK)


def _of_tensors(
    x: jax.Array, x_exponent: jax.Array, y: jax.Array, y_exponent: jax.Array, *rest: Any, zeros: Any, **params: Any
) -> jax.Array:
    result = params["preferred_element_type"]
    # A float8 product may exceed float16. In bfloat16 it fits, and the power of two is exact there as well.
    accumulated = np.dtype(np.float32) if result == np.float16 else result
    plain = functools.partial(bind_plain, **params | {"preferred_element_type": accumulated})
    product = padded(plain, zeros)(x, y, *rest)
    return (product * power_of_two(-(x_exponent + y_exponent)).astype(accumulated)).astype(result)


def _of_blocks(
    x: jax.Array, x_scales: jax.Array, y: jax.Array, y_scales: jax.Array, *, is_native: bool, shape: Any, dtype: Any
) -> jax.Array:
    if is_native:
        operands = x[None], y[None], x_scales[None], y_scales[None]
        return jax.nn.scaled_matmul(*operands, dtype).reshape(shape)
    # Without the barrier, a compiler that may keep excess precision removes a cast to float8 and back.
    x, x_scales, y, y_scales = lax.optimization_barrier((x, x_scales, y, y_scales))
    wide = dequantize_blocks(x, x_scales), dequantize_blocks(y, y_scales)
    return lax.dot_general(*wide, (((1,), (1,)), ((), ()))).astype(dtype).reshape(shape)


def _gradient(
    primitive: Primitive, i: int, cotangent: Any, args: Sequence[Any], exponents: Sequence[Any], **params: Any
) -> Any:
    """Returns the gradient of an operand, by a product of the cotangent and the other operand.

    Its partial sums are float32. It is on float8 operands if a device multiplies these.
    """
    unknown, known, rest, base = args[i], args[1 - i], args[2:], params["base"]
    product = functools.partial(bind_plain, **params | {"preferred_element_type": base})
    gradient = transposed(product, i, jx.with_dtype(unknown.aval, base))
    program = jx.trace(gradient, [jx.with_dtype(cotangent, base), jx.with_dtype(known, base), *rest])
    # For a weight that is the right operand, JAX transposes the product. Here the operands are swapped instead.
    is_swapped = not rest and any(_is_matrix_transpose(eqn) for eqn in jx.open_jaxpr(program)[0].eqns)

    def apply(eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
        if is_swapped and _is_matrix_transpose(eqn):
            return args
        if eqn.primitive.name not in (lax.dot_general_p.name, PLAIN_PRIMITIVE):
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
        return [bind_product(primitive, args, scales, own | {"precision": lax.Precision.HIGHEST})]

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
    i = int(axes[0] is None)
    contracting, batch = params["dimension_numbers"][0], params["dimension_numbers"][1]
    contracting = list(contracting)
    contracting[i] = tuple(axis + 1 for axis in contracting[i])
    numbers = tuple(map(tuple, contracting)), batch
    if exponents[i] is not None:  # of the scale that suits all rows
        exponents[i] = jnp.min(exponents[i], axis=0)
    axis = 0 if i == 0 else args[0].ndim - len(contracting[0])
    return bind_product(_PRODUCTS[params["blocks"]], args, exponents, params | {"dimension_numbers": numbers}), axis


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
            return bind_product(primitive, moved, [None if j == i else x for j, x in enumerate(exponents)], params)

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


_scale_p = primitive_as(SCALE_PRIMITIVE, scale_exponent)
mlir.register_lowering(_scale_p, mlir.lower_fun(scale_exponent, multiple_results=False))
ad.defjvp(_scale_p, None)
ad.primitive_transposes[_scale_p] = lambda cotangent, x, **params: [None]

# By `blocks`. JAX needs devices to lower `scaled_matmul`, so it could not lower other products for an abstract mesh.
_PRODUCTS = {
    False: product_primitive(PRIMITIVE, _batch),
    True: jx.versions.lowered_for_devices(product_primitive(PRIMITIVE, _batch)),
}
