"""The primitive of a ragged product whose operands are cast to float8: the experts of a mixture.

It computes `lax.ragged_dot_general` as `float8_dot` computes `lax.dot_general`, with one scale for all rows and one for
all groups of the other operand.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_amp import _jaxpr as jx
from jmp_amp._float8._devices import is_emulated
from jmp_amp._float8._product import OWN, bind_gradient, bind_plain, bind_product, product_primitive, scales_of_weights

RAGGED_PRIMITIVE = "float8_ragged_dot_general"
PLAIN_PRIMITIVE = "ragged_dot_general"


def float8_ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    base: Any,
    operands: tuple[Any, Any],
    cotangents: Any,
    *,
    is_weight: Sequence[bool] = (False, False),
    **params: Any,
) -> jax.Array:
    """Computes `lax.ragged_dot_general` of operands that are cast to float8, each with one scale.

    Rows beyond the groups have no part in it, whatever they hold: their results and their gradients are 0.

    Args:
        lhs: the rows, a matrix, in `base` or float32.
        rhs: a matrix for each group of rows, likewise.
        group_sizes: the number of rows of each group, `int[groups]`.
        base: as for `float8_dot`.
        operands: likewise.
        cotangents: likewise.
        is_weight: likewise.
        **params: those of `lax.ragged_dot_general`, without batches or an offset.
    """
    params["preferred_element_type"] = params["preferred_element_type"] or np.dtype(base)
    (axis,) = params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    own = {"base": np.dtype(base), "operands": operands, "cotangents": cotangents}
    own |= {"blocks": False, "emulated": is_emulated()}
    # The scale is that of all rows, so rows beyond the groups, and their cotangents, must be 0.
    lhs = _in_groups(lhs, axis, group_sizes)
    exponents = scales_of_weights((lhs, rhs), operands, is_weight)
    product = bind_product(_ragged_dot_p, [lhs, rhs, group_sizes], exponents, params | own)
    return _in_groups(product, 0, group_sizes)


def _in_groups(x: jax.Array, axis: int, group_sizes: jax.Array) -> jax.Array:
    """Returns the array with zeros in the rows beyond the groups."""
    is_in_group = lax.broadcasted_iota(group_sizes.dtype, x.shape, axis) < jnp.sum(group_sizes, dtype=group_sizes.dtype)
    return lax.select(is_in_group, x, jnp.zeros_like(x))


def _gradient(i: int, cotangent: Any, args: Sequence[Any], exponents: Sequence[Any], **params: Any) -> Any:
    """Returns the gradient of an operand, by a ragged product of the cotangent and the other operand."""
    unknown, known, group_sizes = args[i], args[1 - i], args[2]
    base, formats = params["base"], params["operands"]

    def transposed(cotangent: Any, known: Any, group_sizes: Any) -> Any:
        def product(x: Any) -> Any:
            pair = (x, known) if i == 0 else (known, x)
            return bind_plain(*pair, group_sizes, **params | {"preferred_element_type": base})

        return jax.linear_transpose(product, jx.with_dtype(unknown.aval, base))(cotangent)[0]

    avals = jx.with_dtype(cotangent, base), jx.with_dtype(known, base), group_sizes
    operands = (params["cotangents"], formats[1]) if i == 0 else (formats[0], params["cotangents"])
    scales = [None, exponents[1]] if i == 0 else [exponents[0], None]

    def apply(eqn: JaxprEqn, args: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name != PLAIN_PRIMITIVE:
            return jx.bind(eqn, args)
        own = eqn.params | {name: params[name] for name in OWN} | {"preferred_element_type": unknown.aval.dtype}
        return [bind_gradient(_ragged_dot_p, args, scales, own | {"operands": operands})]

    return jx.evaluate(jx.trace(transposed, avals), [cotangent, known, group_sizes], apply)[0]


_ragged_dot_p = product_primitive(RAGGED_PRIMITIVE, _gradient)
