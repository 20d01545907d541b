"""Products whose weight gradients leave the matrix unit in float32, as it accumulates them.

The transpose of a float16 product writes float16, which is then cast to the float32 of the weight: a gradient above
65504 is `inf` by then, and a small one is rounded. Here the product of the gradient itself is asked for float32.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jmp_amp._autocast import _compat

_RESULT_DTYPE = "preferred_element_type"


def product(
    apply: Callable[[Sequence[Any]], list[Any]],
    casts: Sequence[Any],
    keep: Mapping[int, Callable[[Any], Any]],
    args: Sequence[Any],
) -> list[Any]:
    """Evaluates a product on low-precision operands and float32 weights.

    Args:
        apply: the product of low-precision operands.
        casts: the dtype that each weight is cast to; None marks the other operands.
        keep: for the weights whose casts are kept for the backward pass, what to do so.
        args: the operands.
    """

    def lowered(args: Sequence[Any]) -> list[Any]:
        return [
            x if dtype is None else lax.convert_element_type(x, dtype) for x, dtype in zip(args, casts, strict=True)
        ]

    @jax.custom_vjp
    def call(*args: Any) -> Any:
        return apply(lowered(args))[0]

    def forward(*args: Any) -> tuple[Any, Any]:
        operands = [keep[i](x) if i in keep else x for i, x in enumerate(lowered(args))]
        return apply(operands)[0], [operands[i] if i in keep else x for i, x in enumerate(args)]

    def backward(args: Sequence[Any], cotangent: jax.Array) -> tuple[Any, ...]:
        operands = lowered(args)

        def gradient(i: int) -> Any:
            """Returns the gradient of one operand; a product is linear in each."""
            if not jax.numpy.issubdtype(operands[i].dtype, np.inexact):
                return None
            transpose = jax.linear_transpose(lambda x: apply([*operands[:i], x, *operands[i + 1 :]])[0], operands[i])
            return transpose(cotangent)[0] if casts[i] is None else _in_float32(transpose, cotangent)

        return tuple(map(gradient, range(len(args))))

    call.defvjp(forward, backward)
    return [call(*args)]


def _in_float32(transpose: Callable, cotangent: jax.Array) -> jax.Array:
    """Evaluates a transposed product with the product asked for float32; what surrounds it only moves values."""
    opened, consts = _compat.open_jaxpr(_compat.trace(transpose, [cotangent]))
    env: dict[Any, Any] = dict(zip((*opened.constvars, *opened.invars), (*consts, cotangent), strict=True))
    for eqn in opened.eqns:
        values = [atom.val if isinstance(atom, Literal) else env[atom] for atom in eqn.invars]
        params = {_RESULT_DTYPE: np.dtype(np.float32)} if _RESULT_DTYPE in eqn.params else {}
        env.update(zip(eqn.outvars, _compat.bind(eqn, values, **params), strict=True))
    return env[opened.outvars[0]]
