"""A product whose operands, results and cotangents have different dtypes, such as float8 and bfloat16.

JAX transposes the cast of an operand to a cast of its cotangent, so gradients would be rounded to the dtype of the
operand. Here the cotangent of the result is cast to its own dtype, and the products that compute the gradients return
the dtype of the result.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_amp._autocast._op import Op, Rewrite
from jmp_amp._autocast._rewrites._decided import Decided
from jmp_amp._autocast._rewrites._transposed_product import transposed_product
from jmp_amp._autocast._rule import OpClass


def match(decided: Decided) -> Rewrite | None:
    """Matches a product in a format of different dtypes."""
    form = decided.format
    is_product = decided.rule.op_class is OpClass.LOWER and form.operands in decided.casts
    return _Product(form.cotangents) if is_product and not form.is_uniform else None


@dataclasses.dataclass(frozen=True)
class _Product:
    cotangents: np.dtype

    def __call__(self, op: Op, args: Sequence[Any]) -> list[Any]:
        dtypes = [jnp.result_type(x) for x in args]

        @jax.custom_vjp
        def call(*args: Any) -> Any:
            return op.apply(op.cast(args, save=False))[0]

        def forward(*args: Any) -> tuple[Any, Any]:
            operands = op.cast(args)
            return op.apply(operands)[0], operands

        def backward(operands: Sequence[Any], cotangent: jax.Array) -> tuple[Any, ...]:
            low = lax.convert_element_type(cotangent, self.cotangents)
            grads = [transposed_product(op, operands, i, low, cotangent.dtype) for i in range(len(operands))]
            return tuple(lax.convert_element_type(grad, dtype) for grad, dtype in zip(grads, dtypes, strict=True))

        call.defvjp(forward, backward)
        return [call(*args)]
