"""A gather of low-precision values, whose gradient is summed in float32.

The program can take an element any number of times, as edges take that of a node. So the transpose of a gather is a sum
by scatter, and in bfloat16 a sum of ones ends at 256.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_amp._autocast._op import Op, Rewrite
from jmp_amp._autocast._rewrites._decided import Decided
from jmp_amp._autocast._rewrites._take_label_logit import is_label_logit
from jmp_amp._autocast._rewrites._with_tangent import with_tangent
from jmp_amp._jaxpr import dtype_of


def match(decided: Decided) -> Rewrite | None:
    """Matches a gather of values that were traced in float32 and are low precision now."""
    eqn = decided.eqn
    if eqn.primitive.name != "gather" or not (decided.rule.moves and decided.format.is_low):
        return None
    is_low = dtype_of(eqn.invars[0]) == jnp.float32 and decided.dtypes[0] == decided.format.dtype
    return _run if is_low and not is_label_logit(eqn.params, [atom.aval for atom in eqn.invars]) else None


def _run(op: Op, args: Sequence[Any]) -> list[Any]:
    def in_float32(x: Any, indices: Any) -> Any:
        return lax.convert_element_type(op.apply([lax.convert_element_type(x, jnp.float32), indices])[0], x.dtype)

    def tangent(x: Any, indices: Any, t: Any) -> Any:
        return jax.jvp(lambda x: in_float32(x, indices), [x], [t])[1]

    return with_tangent(op.apply, tangent, op.cast(args))
