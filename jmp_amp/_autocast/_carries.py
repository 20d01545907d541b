"""Finds the dtypes that a loop carries."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jmp_amp._autocast._plan import Plan
from jmp_amp._autocast._values import Origin, Value, join
from jmp_amp._formats import FLOAT32
from jmp_amp._jaxpr import dtype_of, shape_of

Values = tuple[Value, ...]


def plan_carries(
    plan_body: Callable[[Values], Plan],
    init: Values,
    atoms: Sequence[Any],
    decides: Sequence[bool] = (),
    streams: Sequence[bool] = (),
    low: Any = None,
) -> tuple[Values, Plan]:
    """Plans the body of a loop again and again until its carries have the dtypes that it returns.

    This ends because `join` only widens. An array that the caller passes in is state, not a bias, and keeps its dtype.
    A constant, such as zeros, takes the dtype of the values that replace it. Accumulators, recurrences, and carries
    that decide when the loop ends keep the dtypes that they were traced in.

    Args:
        plan_body: plans the body for the carries that enter it.
        init: the first carries, with what is known of them in every iteration.
        atoms: their variables and literals.
        decides: whether each carry decides when the loop ends.
        streams: whether each carry is a residual stream, which has the dtype `low` if it is made of such data.
        low: the compute dtype.

    Returns:
        The carries, and the plan of the body.
    """
    none = [False] * len(init)
    decides = decides or none
    streams = streams or none
    adds_up = [value.known.adds_up or value.known.recurs for value in init]
    fixed = [(a and not s) or d for a, d, s in zip(adds_up, decides, streams, strict=True)]

    def settled(carry: Values, fixed: Sequence[bool], rounded: Sequence[bool]) -> tuple[Values, Plan]:
        def kept(values: Iterable[Value]) -> Values:
            return tuple(map(keep, values, init, atoms, fixed))

        def keep(value: Value, first: Value, atom: Any, is_fixed: bool) -> Value:
            known = first.known._replace(adds_up=is_fixed, recurs=is_fixed and first.known.recurs)
            value = value._replace(known=known)
            return value._replace(dtype=dtype_of(atom), native=None) if is_fixed else value

        carry = kept(carry)
        while True:
            plan = plan_body(carry)
            joined = kept(
                old if is_rounded and not new.overflows(old.dtype) else join(old, new)
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
        return plan_carries(plan_body, init, atoms, decides, kept_streams, low)
    if all(is_fixed or _is_settled(value, atom) for is_fixed, value, atom in zip(fixed, start, atoms, strict=True)):
        return settled(start, fixed, none)
    carry, plan = settled(start, decides, none)
    if fixed == list(decides):
        return carry, plan
    # A carry computed from an accumulator is stored in the dtype that it would have if the accumulator were rounded.
    rounded = [value.dtype != dtype_of(atom) for value, atom in zip(carry, atoms, strict=True)]
    return settled(carry, fixed, rounded)


def _is_settled(value: Value, atom: Any) -> bool:
    """Whether a carry has the dtype that it was traced in, whatever replaces it."""
    return dtype_of(atom) != FLOAT32 or (value.dtype == FLOAT32 and value.origin is not Origin.SCALAR)


def _first_carry(value: Value, atom: Any) -> Value:
    """Describes a carry before the first iteration; low-precision values may replace a constant."""
    if dtype_of(atom) != FLOAT32:
        return value._replace(scalar=None)  # a counter
    if not shape_of(atom):
        return value
    if value.magnitudes is not None and (value.origin is Origin.SCALAR or value.magnitudes[1] == 0):
        return value._replace(origin=Origin.SCALAR, axes=(), filled=False)
    return Value(value.dtype)
