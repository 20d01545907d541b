"""The properties of a non-finite op that select its cure."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jmp_amp._jaxpr import holds_jaxprs
from jmp_amp.debug._evaluation import NonFiniteOp
from jmp_amp.debug._float32 import evaluate_in_float32, is_below_float32
from jmp_amp.debug._location import Location, location_of
from jmp_amp.debug._values import Values, inexact_arrays, nonfinite_array, values_of

# The operand that must not be 0, by primitive.
_NONZERO_OPERANDS = {"div": 1, "rem": 1, "log": 0, "log2": 0, "rsqrt": 0, "integer_pow": 0, "pow": 0}


class Diagnosis(NamedTuple):
    """The properties of a non-finite op that select its cure.

    Attributes:
        primitive: the name of the op.
        location: its location.
        operands: its floating-point operands.
        result: its first non-finite result.
        divides_by_zero: whether it divides by 0, or takes the logarithm of 0, where its result is non-finite.
        underflow: the location of the float16 op that rounded that operand to 0; None if there is none.
        underflow_primitive: the name of that float16 op; empty if there is none.
        is_constant: whether all its operands are constants.
        is_opaque: whether it contains a jaxpr, or does not run in float32.
        excess: the largest magnitude of its result in float32, over the largest finite value of the dtype of its
            result; None if the op is not low precision, or its result is non-finite in float32 too.
    """

    primitive: str
    location: Location
    operands: tuple[Values, ...]
    result: Values
    divides_by_zero: bool
    underflow: Location | None
    underflow_primitive: str
    is_constant: bool
    is_opaque: bool
    excess: float | None

    @property
    def largest_finite(self) -> str:
        """The largest finite value of the dtype of the result."""
        return f"{float(jnp.finfo(self.result.dtype).max):.5g}"


def diagnose(op: NonFiniteOp, location: Location) -> Diagnosis:
    """Returns the diagnosis of an op at `location`."""
    name = op.eqn.primitive.name
    values = [x.value for x in op.operands]
    result = nonfinite_array(op.outs)
    divisor = op.operands[_NONZERO_OPERANDS[name]] if name in _NONZERO_OPERANDS else None
    underflow = divisor.underflow if divisor is not None else None
    in_float32 = evaluate_in_float32(op.eqn, values) if is_below_float32(result.dtype) else []
    return Diagnosis(
        primitive=name,
        location=location,
        operands=tuple(map(values_of, inexact_arrays(values))),
        result=values_of(result),
        divides_by_zero=divisor is not None
        and bool(np.any((np.asarray(divisor.value) == 0) & ~np.isfinite(np.asarray(result)))),
        underflow=location_of(underflow.eqns) if underflow else None,
        underflow_primitive=underflow.eqns[-1].primitive.name if underflow else "",
        is_constant=all(x.is_constant for x in op.operands),
        is_opaque=in_float32 is None or holds_jaxprs(op.eqn),
        excess=_excess(in_float32, result.dtype) if in_float32 else None,
    )


def _excess(in_float32: Sequence[Any], dtype: Any) -> float | None:
    largest = max(float(np.abs(np.asarray(x)).max()) for x in inexact_arrays(in_float32))
    return max(largest / float(jnp.finfo(dtype).max), 1.0) if math.isfinite(largest) else None
