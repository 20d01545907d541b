"""A product whose weight gradients leave the matrix unit in float32, as it accumulates them.

The transpose of a float16 product writes float16, which is then cast to the float32 of the weight: a gradient above
65504 is inf by then, and a small one is rounded. Here the product that computes the gradient returns float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from jmp_amp._autocast._format import FLOAT32
from jmp_amp._autocast._op import Op, Rewrite
from jmp_amp._autocast._rewrites._decided import Decided
from jmp_amp._autocast._rule import OpClass
from jmp_amp._jaxpr import bind, evaluate, trace

_RESULT_DTYPE = "preferred_element_type"


def match(decided: Decided) -> Rewrite | None:
    """Matches a low-precision product with a weight, where the user asks for float32 weight gradients."""
    is_asked_for = decided.weight_grad_dtype == FLOAT32 and any(decided.casts)
    is_product = decided.rule.op_class is OpClass.LOWER and decided.format.operands in decided.casts
    return _run if is_asked_for and is_product and decided.format.is_low else None


def _run(op: Op, args: Sequence[Any]) -> list[Any]:
    @jax.custom_vjp
    def call(*args: Any) -> Any:
        return op.apply(op.cast(args, save=False))[0]

    def forward(*args: Any) -> tuple[Any, Any]:
        operands = op.cast(args)
        return op.apply(operands)[0], [operands[i] if i in op.saved else x for i, x in enumerate(args)]

    def backward(args: Sequence[Any], cotangent: jax.Array) -> tuple[Any, ...]:
        operands = op.cast(args, save=False)

        def gradient(i: int) -> Any:
            """Returns the gradient of one operand; a product is linear in each."""
            if not jax.numpy.issubdtype(operands[i].dtype, np.inexact):
                return None
            transpose = jax.linear_transpose(lambda x: op.apply([*operands[:i], x, *operands[i + 1 :]])[0], operands[i])
            return transpose(cotangent)[0] if op.casts[i] is None else _in_float32(transpose, cotangent)

        return tuple(map(gradient, range(len(args))))

    call.defvjp(forward, backward)
    return [call(*args)]


def _in_float32(transpose: Callable, cotangent: jax.Array) -> jax.Array:
    """Evaluates a transposed product that returns float32; all else in the transpose only moves values."""

    def apply(eqn: JaxprEqn, args: list[Any]) -> list[Any]:
        return bind(eqn, args, **({_RESULT_DTYPE: FLOAT32} if _RESULT_DTYPE in eqn.params else {}))

    return evaluate(trace(transpose, [cotangent]), [cotangent], apply)[0]
