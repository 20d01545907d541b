"""Finds residual streams: the sums that norms read, and those of a ResNet.

The layers of a transformer add their outputs to a stream, and each reads the stream through a norm (Xiong et al.,
2020). A norm removes the scale, so an error of the stream relative to its size becomes the same relative error of the
input of a product, which is rounded to low precision anyway. In a ResNet, a norm ends each layer, and products read the
stream as it is (He et al., 2016). The state of an integrator or an optimizer is read in other ways, and small changes
of it add up over many steps.
"""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import Var

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._analyses import joined
from jmp_amp._autocast._paths import InfosOf, Path, Paths
from jmp_amp._autocast._values import Stream
from jmp_amp._formats import FLOAT32
from jmp_amp._ops import EqnInfo, OpClass, ResultKind


class _Holds(enum.IntEnum):
    """What a value is made of."""

    ELEMENTS = 0  # elements of an array, shifted and scaled, or their squares: `x - mean`
    STATISTIC = 1  # sums of those, such as the mean and the variance
    DEVIATION = 2  # the root of a statistic, or its reciprocal: `lax.rsqrt(variance + eps)`
    FACTOR = 3  # a deviation that was broadcast


class _Part(NamedTuple):
    """What is known of a value that is no constant.

    Attributes:
        holds: what it is made of.
        depth: how many products are on the longest way to it; at most 1 where it enters a loop.
        is_normal: whether it is the result of a norm.
        adds_norm: whether it is a sum, and the output of a layer that was added to it is the result of a norm.
    """

    holds: _Holds = _Holds.ELEMENTS
    depth: int = 0
    is_normal: bool = False
    adds_norm: bool = False


class _Parts(jx.Forward[EqnInfo, _Part | None]):
    """The analysis that finds statistics, norms, and the sums that norms are added to; None of a constant."""

    bottom = None

    def join(self, a: _Part | None, b: _Part | None) -> _Part | None:
        """Returns what is known of a value that is either of two."""
        return a if a == b else _Part(depth=_depth([a, b]), adds_norm=bool(a and b and a.adds_norm and b.adds_norm))

    def enter_loop(self, loop: jx.Loop, carry: Sequence[_Part | None]) -> Sequence[_Part | None]:
        """Returns what is known of carries: whether they depend on a product, and add a norm."""
        return [_Part(depth=min(_depth([part]), 1), adds_norm=bool(part and part.adds_norm)) for part in carry]

    def leave_loop(self, loop: jx.Loop, outs: Sequence[_Part | None]) -> Sequence[_Part | None]:
        """Returns what is known of the results of a loop: whether they depend on a product."""
        return [_Part(depth=_depth([part])) for part in outs]

    def transfer(self, info: EqnInfo, operands: Sequence[_Part | None]) -> Sequence[_Part | None]:
        """Returns what the results of an op are made of."""
        part, depth = _flow(info, operands)[0], _depth(operands) + (info.rule.op_class is OpClass.LOWER)
        part = part and part._replace(depth=depth)
        return [part if jx.dtype_of(var) == FLOAT32 else None for var in info.eqn.outvars]


def _depth(parts: Sequence[_Part | None]) -> int:
    return max((part.depth for part in parts if part), default=0)


def _has_result_shape(info: EqnInfo, i: int) -> bool:
    """Whether an operand has the shape of the result."""
    return jx.shape_of(info.eqn.invars[i]) == jx.shape_of(info.eqn.outvars[0])


def _flow(info: EqnInfo, operands: Sequence[_Part | None], reads: int = Stream.NONE) -> tuple[_Part | None, int, int]:
    """Returns what the result of an op is made of, and how its operands are read if the result is read as `reads`.

    Returns:
        What the result is made of; None for a constant. How operands that hold elements are read, as bits of `Stream`,
        and how those that hold statistics are.
    """
    rule, nothing = info.rule, (Stream.NONE, Stream.NONE)
    if len(info.eqn.outvars) != 1:
        return _Part(), *nothing
    known = [(part, _has_result_shape(info, i)) for i, part in enumerate(operands) if part]
    elements = [part for part, is_full in known if not part.holds and (rule.moves or is_full)]
    statistics = [
        part._replace(holds=_Holds.FACTOR) if part.holds is _Holds.DEVIATION and not is_full else part
        for part, is_full in known
        if part.holds
    ]
    of_statistics = Stream.NONE, reads & (Stream.STATISTIC | Stream.RESNET)
    if rule.passes_on and (not known or info.enlarges):
        return (statistics[0] if statistics else None), *of_statistics
    if rule.kind is ResultKind.TOTAL and len(known) == 1:
        return known[0][0]._replace(holds=_Holds.STATISTIC), of_statistics[1], of_statistics[1]
    is_root = rule.kind is ResultKind.POWER and (rule.power is None or rule.power % 1 != 0)
    if is_root and statistics:
        return _Part(_Holds.DEVIATION), *of_statistics
    if not (rule.passes_on or (rule.kind is ResultKind.POWER and not is_root)):
        return _Part(), *nothing
    if rule.scales and elements and any(part.holds is _Holds.FACTOR for part in statistics):
        return _Part(is_normal=True), Stream.ELEMENTS, Stream.STATISTIC  # `(x - mean) * lax.rsqrt(variance + eps)`
    if statistics and (not elements or (rule.scales and not _depth(elements))):  # `scale * lax.rsqrt(variance + eps)`
        return max(statistics), *of_statistics
    if rule.kind is ResultKind.SUM:  # `x + attention(norm(x))`, or `norm(x) + bias`
        # The output of a layer is computed after the stream that it is added to.
        last = max(elements, key=lambda part: (part.depth, part.is_normal), default=_Part())
        is_bias = len(elements) == 1
        part = _Part(is_normal=last.is_normal and is_bias, adds_norm=last.is_normal and not is_bias)
        return part, reads & Stream.RETURNED, Stream.NONE
    if len(elements) == 1 or info.repeats_operand:
        return elements[0], reads, Stream.NONE
    return _Part(), *nothing


class Streams(jx.Backward[EqnInfo, _Part | None, int]):
    """The analysis that finds how values are read, as bits of `Stream`."""

    bottom = condition = Stream.NONE

    def __init__(self, infos_of: InfosOf, paths: Paths) -> None:
        """Takes a function that describes the equations of an open jaxpr, and the analysis that follows inputs."""
        super().__init__(infos_of, _Parts(infos_of))
        self._paths = paths

    def join(self, a: int, b: int) -> int:
        """Returns how two readers read a value."""
        return a | b

    def transfer(self, info: EqnInfo, operands: Sequence[_Part | None], outs: Sequence[int]) -> Sequence[int]:
        """Returns how an op reads its operands."""
        if info.rule.op_class is OpClass.LOWER:  # a ResNet: `x = x + batch_norm(conv(x)); conv(x)`
            return [Stream.RESNET if part and part.adds_norm else Stream.NONE for part in operands]
        _, of_elements, of_statistics = _flow(info, operands, joined(outs))
        reads_all = info.rule.moves or info.rule.kind is ResultKind.TOTAL
        is_read = [part is not None and (reads_all or _has_result_shape(info, i)) for i, part in enumerate(operands)]
        pairs = zip(operands, is_read, strict=True)
        return [of_statistics if part and part.holds else of_elements if read else Stream.NONE for part, read in pairs]

    def of(self, jaxpr: Any, is_computed: Sequence[bool], uses: Sequence[int]) -> dict[Var, int]:
        """Returns how the sums that depend on a product are read, and the values that are returned.

        Args:
            jaxpr: closed or open.
            is_computed: whether the program computes each of its inputs.
            uses: how its results are read.
        """
        inputs = tuple([_Part(depth=int(each)) for each in is_computed])
        known, outs = self.known.find(jaxpr, inputs), self.known.outs(jaxpr, inputs)
        uses = [Stream.NONE if part and part.is_normal else use for part, use in zip(outs, uses, strict=True)]
        found = self.find(jaxpr, inputs, uses)
        return {var: read for var, read in found.items() if read & Stream.RETURNED or _depth([known.get(var)])}

    def of_body(self, loop: jx.Loop, is_weight: Sequence[bool], uses: list[int]) -> list[int]:
        """Returns how the results of the body of a loop are read: carries that are residual streams, by a norm.

        A scan over layers slices the weights that its products read. Those of its carries are residual streams that
        norms read or made. One over time has the same weights in each iteration, and its carries are states.

        Args:
            loop: the loop.
            is_weight: whether each of its `xs` is an input of the program.
            uses: how its results are read.
        """
        reached = [pair for of in self._paths.carried(loop)[1] for pair in of]
        carries, first = range(loop.n_consts, loop.body_carry.stop), loop.body_carry.stop
        weights = {i for i, weight in enumerate(is_weight, first) if weight}
        # A layer multiplies what is made of a carry by a slice, and a product reads the slice of a weight.
        is_layer = any(i in carries and path & Path.LAYER for i, path in reached)
        if not (is_layer and any(i in weights and path & Path.PRODUCT for i, path in reached)):
            return uses
        body, _ = jx.open_jaxpr(loop.body)
        inputs = (_Part(),) * len(body.invars)
        parts = self.known.outs(loop.body, inputs)
        found = self.find(loop.body, inputs, [use & Stream.RETURNED for use in uses])
        of_carries = list(uses)
        for i, (part, out, var) in enumerate(zip(parts, body.outvars, body.invars[loop.body_carry], strict=False)):
            is_returned = isinstance(out, Var) and found[out] & Stream.RETURNED
            is_stream = part and (part.is_normal or part.adds_norm or stream_of(found.get(var, Stream.NONE)))
            if is_stream and not is_returned:
                of_carries[i] = Stream.NORM
        return of_carries


def stream_of(reads: int) -> int:
    """Returns the residual stream that a value is: `NORM`, `RESNET` or `NONE`."""
    if reads & Stream.RETURNED:
        return Stream.NONE
    return Stream.NORM if reads & Stream.NORM == Stream.NORM else reads & Stream.RESNET
