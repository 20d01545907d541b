"""Finds the dtypes that a loop carries."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jmp_amp._autocast._format import FLOAT32
from jmp_amp._autocast._plan import Plan
from jmp_amp._autocast._values import Origin, Value, join
from jmp_amp._jaxpr import dtype_of, shape_of

Values = tuple[Value, ...]


def plan_carries(
    plan_body: Callable[[Values], Plan],
    init: Values,
    atoms: Sequence[Any],
    adds_up: Sequence[bool],
    decides: Sequence[bool] | None = None,
    streams: Sequence[bool] = (),
    low: Any = None,
) -> tuple[Values, Plan]:
    """Plans the body of a loop again and again until its carries have the dtypes that it returns.

    This ends because `join` only widens. An array that the caller passes in is state, not a bias, and keeps its dtype.
    A constant, such as zeros, takes the dtype of the values that replace it. Accumulators, and carries that decide when
    the loop ends, keep the dtypes that they were traced in.

    Args:
        plan_body: plans the body for the carries that enter it.
        init: the first carries.
        atoms: their variables and literals.
        adds_up: whether each carry is an accumulator.
        decides: whether each carry decides when the loop ends.
        streams: whether each carry is a residual stream, which has the dtype `low` if it is made of such data.
        low: the compute dtype.

    Returns:
        The carries, and the plan of the body.
    """
    none = [False] * len(init)
    decides = decides or none
    streams = streams or none
    fixed = [(a and not s) or d for a, d, s in zip(adds_up, decides, streams, strict=True)]

    def settled(carry: Values, fixed: Sequence[bool], rounded: Sequence[bool]) -> tuple[Values, Plan]:
        def kept(values: Iterable[Value]) -> Values:
            return tuple(
                value._replace(dtype=dtype_of(atom), native=None, adds_up=True) if is_fixed else value
                for value, atom, is_fixed in zip(values, atoms, fixed, strict=True)
            )

        carry = kept(carry)
        while True:
            plan = plan_body(carry)
            joined = kept(
                old if is_rounded and not new.keep_float32 else join(old, new)
                for old, new, is_rounded in zip(carry, plan.outs, rounded, strict=False)
            )
            if joined == carry:
                return carry, plan
            carry = joined

    start = tuple(map(_first_carry, init, atoms))
    if any(streams):
        start = tuple([v._replace(dtype=low) if s else v for v, s in zip(start, streams, strict=True)])
        carry, plan = settled(start, fixed, streams)
        are_low = [out.as_native().dtype == low for out in plan.outs[: len(streams)]]
        kept_streams = [s and is_low for s, is_low in zip(streams, are_low, strict=True)]
        if kept_streams == list(streams):
            return carry, plan
        return plan_carries(plan_body, init, atoms, adds_up, decides, kept_streams, low)
    if all(is_fixed or dtype_of(atom) != FLOAT32 for is_fixed, atom in zip(fixed, atoms, strict=True)):
        return settled(start, fixed, none)
    carry, plan = settled(start, decides, none)
    if fixed == list(decides):
        return carry, plan
    # A carry computed from an accumulator is stored in the dtype that it would have if the accumulator were rounded.
    rounded = [value.dtype != dtype_of(atom) for value, atom in zip(carry, atoms, strict=True)]
    return settled(carry, fixed, rounded)


def _first_carry(value: Value, atom: Any) -> Value:
    """Describes a carry before the first iteration; low-precision values may replace a constant."""
    if not shape_of(atom):
        return value
    if value.magnitudes is not None and (value.origin is Origin.SCALAR or value.magnitudes[1] == 0):
        return value._replace(origin=Origin.SCALAR, axes=(), filled=False)
    return Value(value.dtype, keep_float32=value.keep_float32)
