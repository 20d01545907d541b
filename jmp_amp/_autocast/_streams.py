"""Finds residual streams: the sums that norms read, and those of a ResNet.

The layers of a transformer add their outputs to a stream, and each reads the stream through a norm (Xiong et al.,
2020). A norm removes the scale, so an error of the stream relative to its size becomes the same relative error of the
input of a product, which is rounded to low precision anyway. In a ResNet, a norm ends each layer, and products read the
stream as it is (He et al., 2016). The state of an integrator or an optimizer is read in other ways, and small changes
of it add up over many steps.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._analyses import InfosOf, Paths, Sources
from jmp_amp._autocast._primitives import EqnInfo, OpClass, ResultKind
from jmp_amp._autocast._values import Stream
from jmp_amp._formats import FLOAT32

_CARRY, _SLICE = 0, 1  # the inputs of a body for `Paths`: all carries are one, and all slices of weights

# The value that another is made of, element by element: a result of an op, or the index of an input of the jaxpr.
_Root = Var | int


class _Holds(enum.Enum):
    ELEMENTS = enum.auto()  # the elements of the root, shifted and scaled, or their squares
    STATISTIC = enum.auto()  # sums of those, such as the mean and the variance
    DEVIATION = enum.auto()  # the root of a statistic, or its reciprocal


class _Part(NamedTuple):
    """What a value holds of its root.

    Attributes:
        root: the root.
        holds: what it holds of it.
        is_layers: whether it depends on a product of the program.
        is_normal: whether it is the result of a norm.
        adds_norm: whether it is a sum, and the output of a layer that was added to it is the result of a norm.
    """

    root: _Root
    holds: _Holds = _Holds.ELEMENTS
    is_layers: bool = False
    is_normal: bool = False
    adds_norm: bool = False


class _Norms(NamedTuple):
    """The norms and the residual streams of one jaxpr.

    Attributes:
        outs: what each result holds; None for a constant.
        streams: how each residual stream is read: `NORM`, or `RESNET` if it is a sum with the result of a norm that a
            product reads.
        layers: those that depend on a product.
        terms: for each sum, the values that it adds, results of norms aside.
        order: the values, numbered in the order in which they are computed.
    """

    outs: tuple[_Part | None, ...]
    streams: dict[_Root, Stream]
    layers: set[_Root]
    terms: dict[_Root, set[_Root]]
    order: dict[_Root, int]

    def add(self, root: _Root, reads: Stream) -> None:
        """Notes a residual stream."""
        self.streams[root] = max(reads, self.streams.get(root, reads))

    def reached(self, roots: Iterable[_Root]) -> set[_Root]:
        """Returns the values that sums are made of, the sums included."""
        reached, pending = set[_Root](), list(roots)
        while pending:
            root = pending.pop()
            if root not in reached:
                reached.add(root)
                pending += self.terms.get(root, ())
        return reached


class Streams:
    """Finds the residual streams of jaxprs; a jaxpr that many equations hold is read once."""

    def __init__(self, infos_of: InfosOf, paths: Paths) -> None:
        """Takes a function that describes the equations of an open jaxpr, and the analysis that follows inputs."""
        self._infos_of, self._paths, self._norms = infos_of, paths, jx.Cache()

    def find(self, jaxpr: Jaxpr, is_computed: Sequence[bool], uses: Sequence[Stream]) -> dict[Var, Stream]:
        """Returns the residual streams, and the values that are returned, as themselves or in a sum.

        Args:
            jaxpr: an open jaxpr.
            is_computed: whether the program computes each of its inputs.
            uses: how its results are read.
        """
        norms = self._of(jaxpr, tuple([_Part(i, is_layers=each) for i, each in enumerate(is_computed)]))
        outs = [(part, reads) for part, reads in zip(norms.outs, uses, strict=True) if part and not part.is_normal]
        norms = norms._replace(streams=dict(norms.streams))
        for part, reads in outs:
            norms.add(part.root, reads)
        returned = norms.reached(part.root for part, reads in outs if reads is Stream.RETURNED)
        found = {root: reads for root, reads in norms.streams.items() if root in norms.layers}
        found |= dict.fromkeys(returned, Stream.RETURNED)
        return {root: reads for root, reads in found.items() if isinstance(root, Var)}

    def carries(self, loop: jx.Loop, is_weight: Sequence[bool], uses: Sequence[Stream]) -> list[bool]:
        """Returns whether each carry of a `scan` over layers is a residual stream, or the result of a norm.

        A scan over layers slices the weights that its products read. One over time has the same weights in each
        iteration, and its carries are states.

        Args:
            loop: the loop.
            is_weight: whether each of its `xs` is an input of the program.
            uses: how its results are read.
        """
        constant, carry, weight_slice = Paths.bottom, frozenset({(_CARRY, 0)}), frozenset({(_SLICE, 0)})
        slices = [weight_slice if weight else constant for weight in is_weight]
        inputs = [*[constant] * loop.n_consts, *[carry] * loop.n_carry, *slices]
        if not self._has_layer(loop.body, inputs):
            return [False] * loop.n_carry
        norms = self._of(loop.body)
        pairs = zip(norms.outs, uses, strict=True)
        returned = norms.reached(out.root for out, reads in pairs if out and reads is Stream.RETURNED)
        return [
            out is not None
            and out.root not in returned
            and (out.is_normal or out.adds_norm or loop.n_consts + i in norms.streams)
            for i, out in enumerate(norms.outs[: loop.n_carry])
        ]

    def _has_layer(self, jaxpr: Any, inputs: Sequence[Sources]) -> bool:
        """Whether a jaxpr multiplies what is made of a carry, as a matrix, by a slice of a weight."""
        known = self._paths.find(jaxpr, inputs)
        for info in self._infos_of(jx.open_jaxpr(jaxpr)[0]):
            operands = self._paths.of(known, info.eqn.invars)
            if info.enters is not None and any(self._has_layer(*each) for each in self._paths.inside(info, operands)):
                return True
            if info.rule.op_class is OpClass.LOWER:
                made_of = [{i for i, _ in of} for of in operands]
                if {_SLICE} in made_of and any(_CARRY in of for of in made_of):
                    return True
        return False

    def _of(self, jaxpr: Any, inputs: tuple[_Part | None, ...] = ()) -> _Norms:
        """Returns the norms of a jaxpr. By default, its inputs are values of their own, which no layer computes."""
        opened, _ = jx.open_jaxpr(jaxpr)
        inputs = inputs or tuple(map(_Part, range(len(opened.invars))))
        return self._norms(opened, inputs, lambda: self._find(opened, inputs))

    def _find(self, jaxpr: Jaxpr, inputs: tuple[_Part | None, ...]) -> _Norms:
        parts = dict(zip(jaxpr.invars, inputs, strict=True))
        norms = _Norms((), {}, set(), {}, {})
        for info in self._infos_of(jaxpr):
            eqn = info.eqn
            operands = [parts.get(atom) if isinstance(atom, Var) else None for atom in eqn.invars]
            outs: Sequence[_Part | None]
            if isinstance(info.structure, jx.Loop):
                outs = self._enter_loop(eqn, info.structure, operands, norms)
            elif info.structure is not None:
                outs = self._enter(eqn, info.structure, operands, norms)
            elif len(eqn.outvars) == 1:
                outs = [_first_order(info, operands, norms)]
            else:
                outs = list(map(_Part, eqn.outvars))
            if info.rule.op_class is OpClass.LOWER or any(part and part.is_layers for part in operands):
                outs = [part and part._replace(is_layers=True) for part in outs]
            norms.layers.update(part.root for part in outs if part and part.is_layers)
            for part in filter(None, outs):
                norms.order.setdefault(part.root, len(norms.order))
            parts |= dict(zip(eqn.outvars, outs, strict=True))
        outs = [parts.get(atom) if isinstance(atom, Var) else None for atom in jaxpr.outvars]
        return norms._replace(outs=tuple(outs))

    def _enter(
        self, eqn: JaxprEqn, structure: jx.Call | jx.Branches, operands: Sequence[_Part | None], norms: _Norms
    ) -> list[_Part | None]:
        """Notes the residual streams that a call or branches read, and returns what the results hold."""
        given = [operands[i] for i in structure.operands]
        # Equal calls have equal keys: inside, roots are numbered.
        roots = list(dict.fromkeys(part.root for part in given if part))
        inputs = tuple([part and part._replace(root=roots.index(part.root)) for part in given])
        results: list[list[_Part | None]] = []
        for jaxpr in structure.jaxprs:
            found = self._of(jaxpr, inputs)
            for root, reads in found.streams.items():
                if isinstance(root, int):
                    norms.add(roots[root], reads)
            results.append([])
            for var, part in zip(eqn.outvars, found.outs, strict=True):
                if part is not None and isinstance(part.root, int):
                    part = part._replace(root=roots[part.root])
                elif part is not None:
                    reached = found.reached([part.root])
                    norms.terms.setdefault(var, set()).update(roots[i] for i in reached if isinstance(i, int))
                    part = part._replace(root=var)
                results[-1].append(part)
        outs = zip(eqn.outvars, zip(*results, strict=True), strict=True)
        return [each[0] if len(set(each)) == 1 else _Part(var) for var, each in outs]

    def _enter_loop(
        self, eqn: JaxprEqn, loop: jx.Loop, operands: Sequence[_Part | None], norms: _Norms
    ) -> list[_Part | None]:
        """Notes the residual streams that the body of a loop reads; each result is a value of its own."""
        found = self._of(loop.body)
        inputs = [*operands[loop.consts], *operands[loop.carry], *operands[loop.xs]]
        for i, part in enumerate(inputs):
            if part and i in found.streams:
                norms.add(part.root, found.streams[i])
        for var, part, out in zip(eqn.outvars, operands[loop.carry], found.outs, strict=False):
            if part and not part.is_normal:
                norms.terms[var] = {part.root}
            if part and part.adds_norm and out and out.adds_norm:
                norms.add(part.root, Stream.RESNET)
        return [_Part(var, is_layers=bool(found.layers)) for var in eqn.outvars]


def _first_order(info: EqnInfo, operands: Sequence[_Part | None], norms: _Norms) -> _Part | None:
    """Returns what the result of an op holds, and notes sums and residual streams."""
    eqn, rule, (result,) = info.eqn, info.rule, info.eqn.outvars
    if jx.dtype_of(result) != FLOAT32:
        return None
    known = [part for part in operands if part]
    if rule.passes_on and (not known or info.enlarges):
        return None if all(part.holds is _Holds.ELEMENTS for part in known) else known[0]
    statistics = [part for part in known if part.holds is not _Holds.ELEMENTS]
    elements = [
        part
        for atom, part in zip(eqn.invars, operands, strict=True)
        if part and part.holds is _Holds.ELEMENTS and (rule.moves or jx.shape_of(atom) == jx.shape_of(result))
    ]
    roots = {part.root for part in elements}
    # `variance = jnp.mean(x * x, -1)`, then `lax.rsqrt(variance + eps)`.
    if rule.sums and len(known) == 1:
        return known[0]._replace(holds=_Holds.STATISTIC)
    if rule.is_root and statistics:
        return statistics[0]._replace(holds=_Holds.DEVIATION)
    for part in known:  # a ResNet: `x = x + batch_norm(conv(x)); conv(x)`
        if part.adds_norm and rule.op_class is OpClass.LOWER:
            norms.add(part.root, Stream.RESNET)
    if not (rule.passes_on or (rule.kind is ResultKind.POWER and not rule.is_root)):
        return _Part(result)
    scaled = [part.root for part in statistics if part.holds is _Holds.DEVIATION and part.root in roots]
    if rule.scales and scaled:  # `(x - mean) * deviation`
        norms.add(scaled[0], Stream.NORM)
        return _Part(scaled[0], is_normal=True)
    if statistics and (not elements or (rule.scales and not any(part.is_layers for part in elements))):
        return max(statistics, key=lambda part: part.holds is _Holds.DEVIATION)
    if rule.kind is ResultKind.SUM:  # `x + attention(norm(x))`, or `norm(x) + bias`
        norms.terms[result] = {part.root for part in elements if not part.is_normal}
        # The output of a layer is computed after the stream that it is added to.
        last = max(elements, key=lambda part: norms.order.get(part.root, -1), default=None)
        adds_norm = last is not None and last.is_normal
        is_bias = len(elements) == 1
        return _Part(result, is_normal=adds_norm and is_bias, adds_norm=adds_norm and not is_bias)
    return elements[0] if len(roots) == 1 else _Part(result)
