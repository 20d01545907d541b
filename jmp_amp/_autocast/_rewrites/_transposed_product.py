"""The gradient of one operand of a product, by a product whose dtypes are given."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jmp_amp._autocast._op import Op
from jmp_amp._jaxpr import bind, evaluate, trace, with_dtype

_RESULT_DTYPE = "preferred_element_type"


def transposed_product(op: Op, operands: Sequence[Any], i: int, cotangent: jax.Array, dtype: Any) -> jax.Array:
    """Returns the gradient of an operand; a product is linear in each. All else in its transpose only moves values.

    Args:
        op: the product.
        operands: its operands, cast.
        i: the index of the operand.
        cotangent: the cotangent of the result, in any dtype.
        dtype: the dtype that the transposed product returns.
    """
    product = jax.eval_shape(op.apply, operands)[0]
    transpose = jax.linear_transpose(lambda x: op.apply([*operands[:i], x, *operands[i + 1 :]])[0], operands[i])

    def apply(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        return bind(eqn, args, **({_RESULT_DTYPE: dtype} if _RESULT_DTYPE in eqn.params else {}))

    return evaluate(trace(transpose, [with_dtype(cotangent, product.dtype)]), [cotangent], apply)[0]
