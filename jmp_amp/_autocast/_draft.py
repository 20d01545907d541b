"""A plan in the making: decides the equations of one jaxpr until no decision changes."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jax.extend.core import Jaxpr, Literal, Var

from jmp_amp._autocast._facts import Facts
from jmp_amp._autocast._known import Whole
from jmp_amp._autocast._operands import OpContext
from jmp_amp._autocast._plan import Inside, Plan, Region, Step
from jmp_amp._autocast._readers import why
from jmp_amp._autocast._regions import format_in
from jmp_amp._autocast._rule import OpClass, Reads
from jmp_amp._autocast._values import Origin, Stream, Value, Wish, constant
from jmp_amp._formats import FORMATS
from jmp_amp._jaxpr import Branches, Call, dtype_of

if TYPE_CHECKING:
    from jmp_amp._autocast._planner import Planner


_SMALL = 2.0**15  # every low dtype holds it


@dataclasses.dataclass(slots=True)
class _Variable:
    """A variable, and how the equations that are decided so far read it.

    Attributes:
        value: what is known of it; None until its equation is decided.
        producer: the equation that computes it; None for an input.
        readers: the equations that read it.
        full_readers: the indices of those that read it in float32.
        low_reads: how many equations and results of the jaxpr may read it in low precision.
        is_read: whether there is a reader, or it is a result of the jaxpr.
        reads: how its readers read it.
        stream: how it is read as a residual stream.
        stored: whether an op reads it from memory, as products do.
    """

    value: Value | None = None
    producer: "_Equation | None" = None
    readers: "list[_Equation]" = dataclasses.field(default_factory=list)
    full_readers: set[int] = dataclasses.field(default_factory=set)
    low_reads: int = 0
    is_read: bool = False
    reads: int = Reads.NOBODY
    stream: Stream = Stream.NONE
    stored: bool = False

    @property
    def is_wanted(self) -> bool:
        """Whether it is to be float32: all readers read float32, or it is a gate."""
        return (self.is_read and not self.low_reads) or bool(self.reads & (Reads.FACTOR | Reads.GATE))


@dataclasses.dataclass(slots=True)
class _Equation:
    """An equation, and the decision for it.

    Attributes:
        index: its index in the jaxpr.
        facts: the facts of the equation.
        region: its format, and the scopes around it.
        uses_copies: whether a float32 copy of an operand would change the decision.
        inside: for each of its jaxprs, what is known of the inputs, and how the results are read.
        as_traced: why it runs as it was traced, see `Step`.
        step: the decision; None until there is one.
        reason: the facts that it was decided by; it is decided again when they change.
    """

    index: int
    facts: Facts
    region: Region
    uses_copies: bool
    inside: Sequence[Inside] = ()
    as_traced: str | None = None
    step: Step | None = None
    reason: Any = None


class Draft:
    """A plan in the making.

    Equations are decided in order, so the readers of a result are decided after it. Once all readers of a cheap op turn
    out to read float32, the op is decided again: in float32 it fuses with them, which costs no memory and rounds less.
    An op that moves values is decided again once there is a float32 copy of them.
    """

    def __init__(
        self,
        planner: "Planner",
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        values: tuple[Value, ...],
        wanted: tuple[Wish, ...],
        region: Region,
    ) -> None:
        """Takes a planner and the arguments of `Planner.plan`."""
        self._planner, self._jaxpr, self._consts, self._region = planner, jaxpr, consts, region
        given = zip((*jaxpr.constvars, *jaxpr.invars), (*planner.constants(jaxpr, consts), *values), strict=True)
        self._variables = {var: _Variable(value) for var, value in given}
        literals = [atom for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, Literal)]
        self._literals = {id(literal): constant(literal.val) for literal in literals}
        self._facts = planner.facts_of(jaxpr)
        self._equations = list(map(self._equation, itertools.count(), self._facts))
        for wish, atom in zip(wanted, jaxpr.outvars, strict=True):
            if isinstance(atom, Var):
                self._variables[atom].is_read = True
                self._variables[atom].low_reads += not wish.is_full
        facts = [value.known for value in values]
        self._known = planner.knowledge.find(jaxpr, facts, consts)
        self._large = {var: known.size for var, known in self._known.items() if known.size > _SMALL}
        for var, reads in planner.readers.find(jaxpr, facts, [wish.reads for wish in wanted], consts).items():
            self._variables[var].reads = reads
        for equation in self._equations:
            equation.as_traced = self._read_facts(equation)
            if equation.as_traced:
                equation.region = equation.region._replace(format=FORMATS["float32"])
        if planner.options.has_low_stream:
            are_computed = tuple([value.origin > Origin.INPUT for value in values])
            streams = planner.streams.find(jaxpr, are_computed, [wish.stream for wish in wanted])
            for var, stream in streams.items():
                self._variables[var].stream = stream

    def _equation(self, index: int, facts: Facts) -> _Equation:
        eqn, rule = facts.eqn, facts.rule
        region = self._planner.enter(self._region, eqn)
        uses_copies = facts.structure is not None or (rule.moves and not rule.fuses)
        equation = _Equation(index, facts, region, uses_copies)
        for var in facts.operands:
            variable = self._variables[var]
            variable.readers.append(equation)
            variable.low_reads += 1
            variable.is_read = True
            variable.stored |= rule.stores
        for var in eqn.outvars:
            self._variables[var] = _Variable(producer=equation)
        return equation

    def _read_facts(self, equation: _Equation) -> str | None:
        """Returns why an equation runs as it was traced: for its readers, or for what it reads; None if it does not."""
        eqn, facts = equation.facts.eqn, equation.facts
        outs = [self._variables[var].reads for var in eqn.outvars]
        reads = outs[0] if len(outs) == 1 else functools.reduce(operator.or_, outs, Reads.NOBODY)
        if facts.structure is None and facts.rule.op_class is not OpClass.LOWER and not reads & Reads.DECIDES:
            return None
        operands = self._planner.knowledge.of(self._known, eqn.invars)
        is_marked = format_in(eqn.source_info.name_stack) is not None
        if facts.enters is not None:
            given = [Reads.OTHERWISE] * len(outs) if is_marked else outs
            equation.inside = self._planner.readers.inside(facts, operands, given)
        if is_marked:  # a region in the code takes precedence
            return None
        if reads & Reads.DECIDES and not isinstance(facts.structure, Call | Branches):
            return "loop"
        if facts.rule.op_class is not OpClass.LOWER:
            return None
        if reads & Reads.RECURRENCE and any(known.recurs for known in operands):
            return "recurrence"
        if any(known.is_solution for known in operands):
            return "solution"
        counts = [known.whole for known in operands]
        if min(counts) > Whole.NO and max(counts) is Whole.COUNT:
            return "count"
        return why(reads, not equation.region.format.needs_loss_scale)

    def plan(self) -> Plan:
        """Decides all equations."""
        for equation in self._equations:
            pending = [equation]
            while pending:
                pending += self._decide(pending.pop())
        known = {var: variable.value for var, variable in self._variables.items() if variable.value is not None}
        reads_full = tuple([self._variables[var].is_wanted for var in self._jaxpr.invars])
        steps = [equation.step for equation in self._equations if equation.step is not None]
        outs = tuple(map(self._read, self._jaxpr.outvars))
        inner = [plan for step in steps for plan, _ in step.inner]
        scopes = {equation.region.path for equation in self._equations}.union(*[plan.scopes for plan in inner])
        opaque = {facts.eqn.primitive.name for facts in self._facts if self._planner.hides_products(facts.eqn)}
        opaque.update(*[plan.opaque for plan in inner])
        frame = self._jaxpr.replace(eqns=[])
        return Plan(
            frame, self._consts, known, steps, outs, reads_full, self._region, frozenset(scopes), frozenset(opaque)
        )

    def _read(self, atom: Any) -> Value:
        value = self._variables[atom].value if isinstance(atom, Var) else self._literals.get(id(atom))
        return constant(atom.val) if value is None else value

    def _decide(self, equation: _Equation) -> list[_Equation]:
        """Decides an equation, and returns those to decide again because of it."""
        (eqn, rule), old = equation.facts[:2], equation.step
        outs = [self._variables[var] for var in eqn.outvars]
        wanted: tuple[Wish, ...] = ()
        if equation.facts.structure is not None:
            wanted = tuple([Wish(out.reads or Reads.OTHERWISE, out.stream, out.is_wanted) for out in outs])
        values = tuple([self._read(atom) for atom in eqn.invars])
        has_copy = False
        if equation.uses_copies:
            pairs = zip(eqn.invars, values, strict=True)
            values = tuple([self._with_copy(atom, value, equation.index) for atom, value in pairs])
            has_copy = any(value.has_float32_copy for value in values)
        stream = outs[0].stream if rule.adds and outs[0].stream > Stream.RETURNED else Stream.NONE
        reads_full = (rule.fuses or (rule.moves and has_copy)) and _are_wanted(outs)
        reason = values, wanted, reads_full
        if old is not None and reason == equation.reason:
            return []
        shares_norm = self._shares_norm(equation, values)
        has_streams = self._planner.options.has_low_stream
        form = equation.region.format
        overflows = bool(self._large) and any(self._large.get(var, 0) > form.largest for var in eqn.outvars)
        op = OpContext(eqn, rule, values, form, reads_full, overflows, shares_norm, has_streams, stream)
        step = self._planner.decide(op, equation.facts, wanted, equation.region, equation.inside)
        equation.step, equation.reason = step, reason
        if equation.as_traced:
            equation.step = step._replace(as_traced=equation.as_traced)
        for var, variable, out in zip(eqn.outvars, outs, step.outs, strict=True):
            known = self._known.get(var)
            variable.value = out if known is None else out._replace(known=known)
        affected = list(self._affected(equation, step))
        if old is not None and old.outs != step.outs:
            affected += [reader for out in outs for reader in out.readers]
        return [each for each in affected if each.step is not None]

    def _with_copy(self, atom: Any, value: Value, reader: int) -> Value:
        """Returns what is known of an operand, and whether another equation reads it in float32."""
        if value.as_native().dtype == dtype_of(atom) or not self._variables[atom].full_readers - {reader}:
            return value
        return value._replace(has_float32_copy=True)

    def _affected(self, equation: _Equation, step: Step) -> Iterator[_Equation]:
        """Records the operands that an equation reads in float32, and yields the equations to decide again."""
        operands = [self._variables[var] for var in equation.facts.operands]
        pairs = zip(step.eqn.invars, step.reads_full, strict=True)
        low = {atom for atom, is_full in pairs if not is_full and isinstance(atom, Var)}
        for var, operand in zip(equation.facts.operands, operands, strict=True):
            if var not in low and equation.index not in operand.full_readers:
                operand.full_readers.add(equation.index)
                operand.low_reads -= 1
                if operand.is_wanted and operand.producer is not None:
                    yield operand.producer
                yield from [reader for reader in operand.readers if reader.uses_copies]

    def _shares_norm(self, equation: _Equation, values: tuple[Value, ...]) -> bool:
        """Whether an equation reads a norm of low-precision data that a product reads too.

        The norm is float32, but the product stores it in low precision. If a residual sum read it in float32, it would
        be stored twice.
        """
        if not any(self._variables[var].stored for var in equation.facts.operands):
            return False
        return any(
            isinstance(atom, Var) and self._variables[atom].stored and value.as_native().dtype != value.dtype
            for atom, value in zip(equation.facts.eqn.invars, values, strict=True)
        )


def _are_wanted(results: Sequence[_Variable]) -> bool:
    """Whether all results of an equation that are read are to be float32, and at least one is read."""
    wanted = [result.is_wanted for result in results]
    return any(wanted) and all(is_one or not result.low_reads for is_one, result in zip(wanted, results, strict=True))
