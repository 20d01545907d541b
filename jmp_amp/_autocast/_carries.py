"""Plans the carries of a loop: each has the dtype that the body returns for it.

An array that the caller passes in is state, not a bias, and keeps its dtype. A constant takes the dtype of the values
that replace it, as `jnp.zeros(n)` in front of `h = jnp.tanh(x + h @ w)`. Accumulators (`c + x`) and recurrences
(`a @ c`) keep the dtypes that they were traced in.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._plan import Plan
from jmp_amp._autocast._primitives import Demand
from jmp_amp._autocast._values import Origin, Value, ValueFacts, join
from jmp_amp._formats import FLOAT32


class Carry(NamedTuple):
    """A carry of a loop, as it enters the body.

    Attributes:
        value: what is known of it.
        facts: the facts that hold in every iteration.
        traced: the dtype that it was traced in.
        is_stream: whether it may be a residual stream.
        keeps: the dtype that it keeps, to which the values that replace it are cast if they fit; None if these may
            widen it.
    """

    value: Value
    facts: ValueFacts
    traced: Any
    is_stream: bool
    keeps: Any = None

    @property
    def adds_up(self) -> bool:
        """Whether its errors add up over the iterations: it is an accumulator or a recurrence."""
        return self.facts.carry != Demand.NONE

    def keeping(self, dtype: Any) -> "Carry":
        """Returns the carry with a dtype that it keeps, or with None."""
        known = self.facts if dtype is self.traced else self.facts._replace(carry=Demand.NONE)
        value = self.value if dtype is None else self.value._replace(dtype=dtype, data_dtype=None)
        return self._replace(value=value._replace(known=known), keeps=dtype)

    def replaced(self, out: Value) -> "Carry":
        """Returns the carry that the body may replace by `out`."""
        is_cast = self.keeps is not None and self.keeps != out.dtype
        if is_cast and (self.keeps == FLOAT32 or not out.overflows(self.keeps)):
            out = out._replace(dtype=self.keeps)
        return self._replace(value=join(self.value, out)._replace(known=self.value.known))


Carries = Sequence[Carry]


def plan_carries(plan_of: Callable[[Carries], Plan], carries: Carries, low: Any) -> tuple[Carries, Plan]:
    """Returns the carries of a loop in their dtypes, and the plan of its body.

    Args:
        plan_of: plans the body for the carries that enter it.
        carries: as they enter the first iteration.
        low: the compute dtype, which residual streams have if the body makes them of such data.
    """
    while any(carry.is_stream for carry in carries):
        started = [c.keeping(low if c.is_stream else c.traced if c.adds_up else None) for c in carries]
        settled, plan = _settled(plan_of, started)
        is_low = [out.as_data().dtype == low for out in plan.outs]
        before, carries = carries, [c._replace(is_stream=c.is_stream and is_low[i]) for i, c in enumerate(carries)]
        if carries == before:
            return settled, plan
    is_wide = [c.adds_up or (c.value.dtype == FLOAT32 and c.value.origin is not Origin.SCALAR) for c in carries]
    if not all(wide or c.traced != FLOAT32 for wide, c in zip(is_wide, carries, strict=True)):
        # In an LSTM, `c = f * c + i * g; h = o * jnp.tanh(c)`: the cell `c` is an accumulator, and `h` is low
        # precision. A carry computed from an accumulator has the dtype that it would have if that were rounded.
        carries, _ = _settled(plan_of, [carry.keeping(None) for carry in carries])
    return _settled(plan_of, [c.keeping(c.traced if c.adds_up else c.value.dtype) for c in carries])


def _settled(plan_of: Callable[[Carries], Plan], carries: Carries) -> tuple[Carries, Plan]:
    """Plans the body until it returns the carries that it gets. This ends because `join` only widens."""
    before = None
    while before != carries:
        before, plan = carries, plan_of(carries)
        carries = list(map(Carry.replaced, carries, plan.outs))
    return carries, plan


def first_value(value: Value, atom: Any) -> Value:
    """Describes a carry before the first iteration; low-precision values may replace a constant."""
    if jx.dtype_of(atom) != FLOAT32 or not jx.shape_of(atom):
        return value
    # One constant number, or a carry of the loop around this one that starts as such a constant.
    is_number = value.origin is Origin.SCALAR and (value.known.is_constant or not value.filled)
    if is_number or (value.origin is Origin.INPUT and value.known.size == 0):
        return value._replace(origin=Origin.SCALAR, axes=(), filled=False)
    return Value(value.dtype)
