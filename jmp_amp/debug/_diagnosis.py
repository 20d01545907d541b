"""The properties of a non-finite op that select its cure."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_amp._jaxpr import holds_jaxprs
from jmp_amp.debug._eps import working_eps
from jmp_amp.debug._evaluation import NonFiniteOp
from jmp_amp.debug._float32 import evaluate_in_float32, is_below_float32
from jmp_amp.debug._location import Location, location_of
from jmp_amp.debug._node import Dataflow, Node, upstream
from jmp_amp.debug._patterns import matches
from jmp_amp.debug._values import Values, inexact_arrays, values_of

# The operand that must not be 0, by primitive.
_NONZERO_OPERANDS = {"div": 1, "rem": 1, "log": 0, "log2": 0, "rsqrt": 0, "integer_pow": 0, "pow": 0}
_DEPTH = 6  # the number of ops between a value and the pattern that it was computed by


@dataclasses.dataclass(frozen=True, eq=False)
class Diagnosis:
    """The properties of a non-finite op that select its cure.

    Attributes:
        location: the location of the op.
        operands: its floating-point operands.
        result: its first non-finite result.
        node: the place of that result in the dataflow.
        flow: the dataflow of the program.
        divides_by_zero: whether it divides by 0, or takes the logarithm of 0, where its result is non-finite.
        underflow: the location of the float16 op that rounded that operand to 0; None if there is none.
        underflow_primitive: the name of that float16 op; empty if there is none.
        is_differentiated: whether the op is part of a program that JAX differentiates.
        is_opaque: whether it contains a jaxpr, or does not run in float32.
        excess: the largest magnitude of its result in float32, over the largest finite value of the dtype of its
            result; None if the op is not low precision, or its result is non-finite in float32 too.
        find_fitting_scale: see `fitting_scale`.
    """

    location: Location
    operands: tuple[Values, ...]
    result: Values
    node: Node
    flow: Dataflow
    divides_by_zero: bool
    underflow: Location | None
    underflow_primitive: str
    is_differentiated: bool
    is_opaque: bool
    excess: float | None
    find_fitting_scale: Callable[[], int | None]

    @property
    def primitive(self) -> str:
        """The name of the op."""
        return self.node.primitive

    @property
    def largest_finite(self) -> str:
        """The largest finite value of the dtype of the result."""
        return f"{float(jnp.finfo(self.result.dtype).max):.5g}"

    @property
    def divisor(self) -> Node:
        """The operand that must not be 0, of an op that has one."""
        return self.node.operands[_NONZERO_OPERANDS[self.primitive]].origin

    @property
    def logarithms(self) -> list[Node]:
        """The logarithms that the op is the derivative of."""
        if not (self.location.backward and self.primitive == "div"):
            return []
        return [op for op in self.flow.readers(self.divisor) if op.primitive in ("log", "log2")]

    @property
    def is_constant(self) -> bool:
        """Whether the operands are constants."""
        return self.node.is_constant

    @property
    def has_lost_constant(self) -> bool:
        """Whether the result depends on a low-precision constant that was rounded to 0 or to infinity in the code.

        Tracing rounds constants, so the constant of the code is not known.
        """
        return any(
            _is_low(x) and x.is_constant and x.eqn is None and (x.low > x.high or self._is_lost_eps(reader, x))
            for reader in upstream(self.node, _DEPTH)
            for x in reader.operands
        )

    @functools.cached_property
    def fitting_scale(self) -> int | None:
        """The exponent k of a loss scale that is 2^k times smaller, with which all results are finite.

        0 if there is none down to a loss scale of 1; None if the op does not depend on the scale of
        `amp.value_and_grad`.
        """
        return self.find_fitting_scale()

    @property
    def eps_dtype(self) -> Any:
        """The dtype in which an eps must work: the lowest of the values that the result was computed from.

        No ops but products compute in float8.
        """
        nodes = {node for reader in upstream(self.node, _DEPTH) for node in (reader, *reader.operands)}
        dtypes = [jnp.dtype(node.dtype) for node in nodes if node.dtype]
        real = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize > 1]
        return min(real, key=lambda dtype: dtype.itemsize, default=np.dtype(np.float32))

    def is_in(self, pattern: str) -> bool:
        """Returns whether the op is one of the ops of a pattern; see `matches`."""
        return any(
            op in found.ops
            for op in (self.node.origin, *self.logarithms)
            for node in self.flow.downstream(op)
            for found in matches(pattern, node)
        )

    def is_behind(self, pattern: str) -> bool:
        """Returns whether an operand of the op is the result of a pattern, or was computed from it by a few ops."""
        return any(True for _ in self.found_behind(pattern))

    def found_behind(self, pattern: str) -> Iterator[Node]:
        """Yields the results of a pattern from which the result of the op was computed by a few ops."""
        return (node for node in upstream(self.node, _DEPTH) if any(True for _ in matches(pattern, node)))

    def is_(self, pattern: str) -> bool:
        """Returns whether the op is the last op of a pattern."""
        return any(True for _ in matches(pattern, self.node))

    def is_derivative_of(self, primitives: Collection[str], pattern: str) -> bool:
        """Returns whether the op is the last op of a pattern with an `x` that one of `primitives` reads, too."""
        return self.is_differentiated and any(
            reader.primitive in primitives
            for found in matches(pattern, self.node)
            for reader in self.flow.readers(found.values["x"])
        )

    def eps_for(self, fun: Callable[[Any], Any]) -> str:
        """Returns an eps at which `fun` and its derivative are finite in `eps_dtype`."""
        return working_eps(fun, self.eps_dtype)

    @staticmethod
    def _is_lost_eps(reader: Node, x: Node) -> bool:
        return x.constant == 0 and reader.primitive in ("add", "max")


def diagnose(
    op: NonFiniteOp, location: Location, flow: Dataflow, find_fitting_scale: Callable[[], int | None]
) -> Diagnosis:
    """Returns the diagnosis of an op at `location`."""
    name = op.eqn.primitive.name
    values = [x.value for x in op.operands]
    out = next(x for x in op.outs if not x.is_finite)
    result = out.value
    divisor = op.operands[_NONZERO_OPERANDS[name]] if name in _NONZERO_OPERANDS else None
    underflow = divisor.underflow if divisor is not None else None
    in_float32 = evaluate_in_float32(op.eqn, values) if is_below_float32(result.dtype) else []
    return Diagnosis(
        location=location,
        operands=tuple(map(values_of, inexact_arrays(values))),
        result=values_of(result),
        node=out.node,
        flow=flow,
        divides_by_zero=divisor is not None
        and bool(np.any((np.asarray(divisor.value) == 0) & ~np.isfinite(np.asarray(result)))),
        underflow=location_of(underflow.eqns) if underflow else None,
        underflow_primitive=underflow.eqns[-1].primitive.name if underflow else "",
        is_differentiated=any("jvp(" in str(eqn.source_info.name_stack) for eqn in op.place.eqns),
        is_opaque=in_float32 is None or holds_jaxprs(op.eqn),
        excess=_excess(in_float32, result.dtype) if in_float32 else None,
        find_fitting_scale=find_fitting_scale,
    )


def _is_low(node: Node) -> bool:
    return bool(node.dtype) and is_below_float32(jnp.dtype(node.dtype))


def _excess(in_float32: Sequence[Any], dtype: Any) -> float | None:
    largest = max(float(np.abs(np.asarray(x)).max()) for x in inexact_arrays(in_float32))
    return max(largest / float(jnp.finfo(dtype).max), 1.0) if math.isfinite(largest) else None
