"""An elementwise op that casts an operand and broadcasts it, whose cotangent is summed in the dtype before the cast.

The cotangent of a broadcast is a sum. That of a float32 bias, cast to float16 and then broadcast, would be summed in
float16, where 70,000 ones are inf.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from jmp_amp._autocast._op import Op, Rewrite
from jmp_amp._autocast._rewrites._decided import Decided
from jmp_amp._autocast._rule import OpClass
from jmp_amp._jaxpr import shape_of


def match(decided: Decided) -> Rewrite | None:
    """Matches an elementwise op that casts an operand of another shape than that of its result."""
    rule, eqn = decided.rule, decided.eqn
    if not (rule.fuses and rule.op_class is OpClass.PROMOTE and eqn.outvars and any(decided.casts)):
        return None
    shape = shape_of(eqn.outvars[0])
    pairs = zip(eqn.invars, decided.casts, strict=True)
    is_broadcast = any(dtype is not None and shape_of(atom) != shape for atom, dtype in pairs)
    return _BroadcastFirst(shape) if is_broadcast and shape is not None else None


@dataclasses.dataclass(frozen=True)
class _BroadcastFirst:
    """Differentiates the op as if the operand were broadcast before it is cast.

    The op itself casts first: the large array would be kept in front of a loop, and read in every iteration.
    """

    shape: tuple[int, ...]

    def __call__(self, op: Op, args: Sequence[Any]) -> list[Any]:
        call = jax.custom_jvp(lambda *args: op.apply(op.cast(args)))

        def broadcast_first(*args: Any) -> list[Any]:
            return op.apply(op.cast(list(map(self._broadcast, args, op.casts))))

        @call.defjvp
        def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            return call(*primals), jax.jvp(broadcast_first, primals, tangents)[1]

        return call(*args)

    def _broadcast(self, x: Any, dtype: Any) -> Any:
        if dtype is None or np.shape(x) == self.shape:
            return x
        return lax.broadcast_in_dim(x, self.shape, range(np.ndim(x)))
