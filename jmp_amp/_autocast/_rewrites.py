"""Rewrites: other ways to evaluate an op, which change its derivative.

Each rewrite is a function that takes an op with decided dtypes and returns how to evaluate it, or None if it does not
apply. `dtypes` are the dtypes of the operands, cast or not; `casts` are those that the op casts its operands to, None
where an operand is not cast or shares its cast with other ops.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._decide import Context
from jmp_amp._autocast._plan import CastOp, Rewrite
from jmp_amp._formats import FLOAT32, Float8
from jmp_amp._ops import OpClass, ResultKind, free_sizes, product_axes
from jmp_amp._products import RAGGED_DOT, float8_dot, float8_ragged_dot

Dtypes = tuple[Any, ...]


def rewrite_of(op: Context, dtypes: Dtypes, casts: Dtypes) -> Rewrite | None:
    """Returns the first rewrite that applies to an op, None if none does."""
    return next((run for rewrite in _REWRITES if (run := rewrite(op, dtypes, casts)) is not None), None)


def _gather(op: Context, dtypes: Dtypes, casts: Dtypes) -> Rewrite | None:
    """A gather of low-precision data that were traced in float32, whose gradient a scatter would compute.

    The transpose of a gather writes into an array of zeros. For a loss in float32 that is the gradient of all logits,
    in float32, in memory. Of `take_along_axis` along the last axis, of one element a row, the gradient is a comparison
    with the index, which fuses with the gradient of the softmax and the cast that follow. Any other gather can take an
    element any number of times, as edges take that of a node. Its transpose is a sum, which in bfloat16 ends at 256 for
    ones, so it is computed in float32.
    """
    eqn, low = op.info.eqn, op.region.format.dtype
    if op.rule.kind is not ResultKind.TAKEN or jx.dtype_of(eqn.invars[0]) != FLOAT32:
        return None
    if is_label_logit(eqn.params, [atom.aval for atom in eqn.invars]):
        return _take_label_logit if dtypes[0] == FLOAT32 and op.values[0].as_data().dtype == low else None
    return _gather_low if dtypes[0] == low else None


def is_label_logit(params: Mapping[str, Any], avals: Sequence[Any]) -> bool:
    """Whether a gather takes one float32 element a row, along the last axis."""
    x, indices = avals
    rows, axis = range(x.ndim - 1), (x.ndim - 1,)
    batch = params["dimension_numbers"].operand_batching_dims  # `take_along_axis` leaves out rows of size 1
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple([i for i in rows if i not in batch and x.shape[i] == 1]),
        collapsed_slice_dims=axis,
        start_index_map=axis,
        operand_batching_dims=tuple([i for i in rows if i in batch]),
        start_indices_batching_dims=tuple(range(len(batch))),
    )
    return (
        x.dtype == np.float32
        and len(numbers.offset_dims) + len(batch) == len(rows)
        and indices.shape == (*[x.shape[i] for i in batch], 1, 1)
        and indices.dtype.itemsize >= 4  # a smaller one cannot count the elements of a long row
        and params["dimension_numbers"] == numbers
        and params["slice_sizes"] == (1,) * x.ndim
        and params["mode"] in (lax.GatherScatterMode.FILL_OR_DROP, lax.GatherScatterMode.PROMISE_IN_BOUNDS)
    )


def _tangent_of_label_logit(op: CastOp, primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    x, indices = primals
    # An index out of bounds equals none, so its tangent is 0.
    is_label = lax.broadcasted_iota(indices.dtype, x.shape, x.ndim - 1) == indices.reshape(*x.shape[:-1], 1)
    return [jnp.sum(jnp.where(is_label, tangents[0], 0), -1, keepdims=True)]


def _of_cast_operands(tangent: Callable, op: CastOp, args: Sequence[Any]) -> list[Any]:
    """Evaluates an op whose tangents are `tangent(op, primals, tangents)` of its cast operands."""
    return _with_tangent(dataclasses.replace(op, casts=(None,) * len(args)), tangent, *op.cast(args))


_take_label_logit: Rewrite = functools.partial(_of_cast_operands, _tangent_of_label_logit)


def _tangent_in_float32(op: CastOp, primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    x, indices = primals

    def in_float32(x: Any) -> list[Any]:
        return [lax.convert_element_type(op.apply([lax.convert_element_type(x, FLOAT32), indices])[0], x.dtype)]

    return jax.jvp(in_float32, [x], [tangents[0]])[1]


_gather_low: Rewrite = functools.partial(_of_cast_operands, _tangent_in_float32)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=jx.versions.INLINE)  # it is traced once for equal ops
def _with_tangent(op: CastOp, tangent: Callable, *args: Any) -> list[Any]:
    """Evaluates an op whose tangents are `tangent(op, primals, tangents)`."""

    @jax.custom_jvp
    def call(*args: Any) -> list[Any]:
        with jx.marked(jx.SHARED):  # JAX gives the lines of the caller to this call, but not to what is in it
            return op.apply(op.cast(args))

    @call.defjvp
    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        return call(*primals), tangent(op, primals, tangents)

    return call(*args)


def _float8_product(op: Context, dtypes: Dtypes, casts: Dtypes) -> Rewrite | None:
    """A product with a weight that gains by float8: it reads its operands and its cotangents in float8."""
    form = op.region.format
    is_low = op.rule.op_class is OpClass.LOWER and set(dtypes[:2]) == {form.dtype}
    if form.float8 is None or not is_low or why_not_float8(op.info.eqn, op.is_input, form.float8):
        return None
    return Float8Product(form.dtype, form.float8, op.is_input[:2])


def why_not_float8(eqn: JaxprEqn, is_input: Sequence[bool], float8: Float8) -> str | None:
    """Returns why a low-precision product or convolution is not float8, as in `OpSite.why`; None if it is.

    Args:
        eqn: the product.
        is_input: whether each operand is an input of the program, moved or not, so that it may be a weight.
        float8: the sizes.
    """
    is_ragged = eqn.primitive.name == RAGGED_DOT
    if not (_has_rows_of_groups(eqn) if is_ragged else eqn.primitive is lax.dot_general_p):
        return "no matrix product"
    contracting, batch, groups = product_axes(eqn.params)
    if batch[0] or len(contracting[0]) != 1:
        return "no matrix product"
    is_input = (is_input[0] and not is_ragged, is_input[1])
    if not any(is_input):
        return "no weight"
    avals: list[Any] = [atom.aval for atom in eqn.invars[:2]]
    terms, (rows, columns) = avals[0].shape[contracting[0][0]], map(math.prod, free_sizes(avals, contracting, groups))
    if is_ragged and any(n % float8.multiple for n in (terms, rows, columns)):
        return "multiple"
    # The rows and the columns of the product, if the first or the second operand is the weight.
    sizes = zip(is_input, ((columns, rows), (rows, columns)), strict=False)
    return None if any(is_weight and _gains(terms, *each, float8) for is_weight, each in sizes) else "size"


def _has_rows_of_groups(eqn: JaxprEqn) -> bool:
    """Whether a ragged product multiplies each row of a matrix by the matrix of its group."""
    ranks = [len(jx.shape_of(atom) or ()) for atom in eqn.invars]
    _, _, groups = product_axes(eqn.params)
    return ranks == [2, 3, 1] and bool(groups[1]) and eqn.params["group_offset"] is None


def _gains(terms: int, rows: int, columns: int, float8: Float8) -> bool:
    is_large = min(terms, columns) >= float8.min_size and terms * columns >= float8.min_weight
    return is_large and rows >= float8.min_rows


@dataclasses.dataclass(frozen=True)
class Float8Product:
    """Evaluates a product on float8 operands; the weight is cast from the dtype that it is stored in."""

    base: np.dtype
    float8: Float8
    is_weight: tuple[bool, ...]

    def __call__(self, op: CastOp, args: Sequence[Any]) -> list[Any]:
        product: Callable = float8_dot if len(args) == 2 else float8_ragged_dot
        dtypes = self.base, (self.float8.operands,) * 2, self.float8.cotangents
        return [product(*args, *dtypes, is_weight=self.is_weight, **dict(op.params))]


def _float32_weight_grad(op: Context, dtypes: Dtypes, casts: Dtypes) -> Rewrite | None:
    """A product whose weight gradients leave the matrix unit in float32, as it accumulates them.

    The transpose of a float16 product writes float16, which is then cast to the float32 of the weight: a gradient above
    65504 is inf by then, and a small one is rounded. Here the product that computes the gradient returns float32.
    """
    is_product = op.rule.op_class is OpClass.LOWER and op.region.format.dtype in casts
    return _with_float32_grads if is_product and op.options.has_float32_grads else None


def _with_float32_grads(op: CastOp, args: Sequence[Any]) -> list[Any]:
    @jax.custom_vjp
    def call(*args: Any) -> Any:
        return op.apply(op.cast(args, save=False))[0]

    def forward(*args: Any) -> tuple[Any, Any]:
        operands = op.cast(args)
        return op.apply(operands)[0], [operands[i] if i in op.saved else x for i, x in enumerate(args)]

    def backward(args: Sequence[Any], cotangent: jax.Array) -> tuple[Any, ...]:
        operands = op.cast(args, save=False)

        def gradient(i: int) -> Any:
            if not jnp.issubdtype(operands[i].dtype, np.inexact):
                return None
            dtype = operands[i].dtype if op.casts[i] is None else FLOAT32
            return _transposed_product(op, operands, i, cotangent, dtype)

        return tuple(map(gradient, range(len(args))))

    call.defvjp(forward, backward)
    return [call(*args)]


def _transposed_product(op: CastOp, operands: Sequence[Any], i: int, cotangent: jax.Array, dtype: Any) -> jax.Array:
    """Returns the gradient of operand `i`, by a product that returns `dtype`; the cotangent may have any dtype.

    A product is linear in each operand. All else in its transpose only moves values.
    """
    product = jax.eval_shape(op.apply, operands)[0]
    transpose = jax.linear_transpose(lambda x: op.apply([*operands[:i], x, *operands[i + 1 :]])[0], operands[i])

    def apply(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        if "preferred_element_type" in eqn.params:
            return jx.bind(eqn, args, preferred_element_type=dtype)
        return jx.bind(eqn, [lax.convert_element_type(x, args[0].dtype) for x in args])  # a pad has zeros of its dtype

    return jx.evaluate(jx.trace(transpose, [jx.with_dtype(cotangent, product.dtype)]), [cotangent], apply)[0]


def _quotient(op: Context, dtypes: Dtypes, casts: Dtypes) -> Rewrite | None:
    """A quotient in float16, whose derivative in the divisor JAX computes with `y ** -2`: 0 from y = 4096 on, for one.

    That of torch is the quotient once more divided by the divisor, as here.
    """
    is_low = op.region.format.needs_loss_scale and {*dtypes} == {op.region.format.dtype}
    is_quotient = op.rule.kind is ResultKind.QUOTIENT and not op.values[1].known.is_constant
    return _divide if is_low and is_quotient and not op.region.is_linear else None


@functools.partial(jax.jit, static_argnums=0, inline=jx.versions.INLINE)  # it is traced once for equal ops
def _divided(op: CastOp, x: Any, y: Any) -> jax.Array:
    @jax.custom_jvp
    def call(x: Any, y: Any) -> jax.Array:
        with jx.marked(jx.SHARED):
            return op.apply(op.cast([x, y]))[0]

    @functools.partial(call.defjvp, symbolic_zeros=True)
    def _(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
        out, (_, divisor) = call(*primals), op.cast(primals)
        # A cotangent is summed in the dtype of the operand.
        dx, dy = (
            0 if isinstance(t, SymbolicZero) else jnp.broadcast_to(t, out.shape).astype(out.dtype) for t in tangents
        )
        return out, (dx - out * dy) / divisor

    return call(x, y)


def _divide(op: CastOp, args: Sequence[Any]) -> list[Any]:
    return [_divided(op, *args)]


def _cast_bias(op: Context, dtypes: Dtypes, casts: Dtypes) -> Rewrite | None:
    """An elementwise op that casts an operand and broadcasts it; the cotangent is summed in the dtype before the cast.

    The cotangent of a broadcast is a sum. That of a float32 bias, cast to float16 and then broadcast, would be summed
    in float16, where 70,000 ones are inf.
    """
    rule, eqn = op.rule, op.info.eqn
    if not (rule.fuses and rule.op_class is OpClass.PROMOTE and eqn.outvars and any(casts)):
        return None
    shape, pairs = jx.shape_of(eqn.outvars[0]), zip(eqn.invars, casts, strict=True)
    is_broadcast = any(dtype is not None and jx.shape_of(atom) != shape for atom, dtype in pairs)
    return _broadcast_first if is_broadcast else None


def _broadcast_first(op: CastOp, args: Sequence[Any]) -> list[Any]:
    return _with_tangent(op, _tangent_of_broadcast, *args)


def _tangent_of_broadcast(op: CastOp, primals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Differentiates the op as if the operands were broadcast before they are cast.

    The op itself casts first: the large array would be kept in front of a loop, and read in every iteration.
    """
    shape = jnp.broadcast_shapes(*map(np.shape, primals))

    def broadcast(x: Any, dtype: Any) -> Any:
        is_smaller = dtype is not None and np.shape(x) != shape
        return lax.broadcast_in_dim(x, shape, range(np.ndim(x))) if is_smaller else x

    def broadcast_first(*args: Any) -> list[Any]:
        return op.apply(op.cast(list(map(broadcast, args, op.casts))))

    return jax.jvp(broadcast_first, primals, tangents)[1]


def round_once(op: CastOp, args: Sequence[Any]) -> list[Any]:
    """Evaluates an op on 16-bit arrays and float32 numbers in float32, and rounds its result."""
    return _rounded(op, *op.cast(args))


@functools.partial(jax.jit, static_argnums=0, inline=jx.versions.INLINE)  # it is traced once for equal ops
def _rounded(op: CastOp, *args: Any) -> list[Any]:
    (low,) = {x.dtype for x in args} - {FLOAT32}
    return [lax.convert_element_type(x, low) for x in op.apply([x.astype(FLOAT32) for x in args])]


_REWRITES = (_gather, _float8_product, _float32_weight_grad, _quotient, _cast_bias)
