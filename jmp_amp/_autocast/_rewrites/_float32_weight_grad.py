"""A product whose weight gradients leave the matrix unit in float32, as it accumulates them.

The transpose of a float16 product writes float16, which is then cast to the float32 of the weight: a gradient above
65504 is inf by then, and a small one is rounded. Here the product that computes the gradient returns float32.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._autocast._op import Op, Rewrite
from jmp_amp._autocast._rewrites._decided import Decided
from jmp_amp._autocast._rewrites._transposed_product import transposed_product
from jmp_amp._autocast._rule import OpClass
from jmp_amp._formats import FLOAT32


def match(decided: Decided) -> Rewrite | None:
    """Matches a low-precision product with a weight, where the user asks for float32 weight gradients."""
    is_product = decided.rule.op_class is OpClass.LOWER and decided.format.dtype in decided.casts
    return _run if is_product and decided.weight_grad_dtype == FLOAT32 else None


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
            if not jnp.issubdtype(operands[i].dtype, np.inexact):
                return None
            dtype = operands[i].dtype if op.casts[i] is None else FLOAT32
            return transposed_product(op, operands, i, cotangent, dtype)

        return tuple(map(gradient, range(len(args))))

    call.defvjp(forward, backward)
    return [call(*args)]
