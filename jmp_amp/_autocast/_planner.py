"""Decides in which dtype each op of a jaxpr computes, by the class of its primitive (`_rules.py`, `_decisions.py`)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var

from jmp_amp._autocast import _compat
from jmp_amp._autocast._deciding import SPLIT, depends_on
from jmp_amp._autocast._decisions import (
    broadcast_shape,
    differs,
    dtype_of,
    is_neutral,
    operand_dtype,
    params_for,
    results,
    weighed,
)
from jmp_amp._autocast._gather import gather
from jmp_amp._autocast._interpreter import Plan, Region, Step
from jmp_amp._autocast._masks import chosen
from jmp_amp._autocast._ops import HELD, Op
from jmp_amp._autocast._overrides import Overrides, scope_path
from jmp_amp._autocast._pick import pick
from jmp_amp._autocast._regions import region_of
from jmp_amp._autocast._rules import ORIGINAL, OpClass, Rule, Rules
from jmp_amp._autocast._sensitive import Sensitivity
from jmp_amp._autocast._values import FLOAT32, Origin, Reads, Value, constant, widest


class Options(NamedTuple):
    """What a user chooses for a whole function; `autocast` documents it."""

    overrides: Overrides
    save: str = "matmuls"
    weight_grad_dtype: np.dtype | None = None


class HigherOrder(Protocol):
    """A rule for a primitive that holds jaxprs: decides the equation."""

    def __call__(
        self,
        planner: "Planner",
        eqn: JaxprEqn,
        values: tuple[Value, ...],
        wanted: tuple[Reads, ...],
        region: Region,
    ) -> Step: ...


class Planner:
    """Plans jaxprs for one compute dtype; everything it remembers dies with it."""

    def __init__(self, rules: Rules, higher_order: Mapping[str, HigherOrder], options: Options) -> None:
        self._rules = {**rules, **options.overrides.primitives}
        self.higher_order = higher_order
        self.options = options
        self.scopes: set[str] = set()
        self.matched: set[str] = set()
        self._plans: dict[Any, Plan] = {}
        self._steps: dict[Any, Step] = {}
        self._constants: dict[int, tuple[Any, Value]] = {}
        self._rules_of: dict[int, tuple[Jaxpr, list[Rule]]] = {}
        self.sensitivity = Sensitivity(self.rules_of)

    def plan(self, jaxpr: Any, values: tuple[Value, ...], wanted: tuple[Reads, ...], region: Region) -> Plan:
        """Decides every equation of a jaxpr.

        Args:
            jaxpr: closed or open.
            values: what is known of its inputs.
            wanted: how each of its results is read.
            region: where it stands.
        """
        # The plan keeps its jaxpr alive, so an id cannot come to mean another one.
        opened, consts = _compat.open_jaxpr(jaxpr)
        key = id(opened), values, wanted, region
        if key not in self._plans:
            self._plans[key] = _Draft(self, opened, consts, values, wanted, region).plan()
        return self._plans[key]

    def constant(self, x: Any) -> Value:
        """Describes a constant; it is read once."""
        # The constant is kept alive, so an id cannot come to mean another one.
        if id(x) not in self._constants:
            self._constants[id(x)] = x, constant(x)
        return self._constants[id(x)][1]

    def rule(self, primitive: Primitive, params: Mapping[str, Any], avals: Sequence[Any]) -> Rule:
        """Returns the rule for a first-order op."""
        rule = self._rules.get(primitive.name, ORIGINAL)
        return rule if isinstance(rule, Rule) else rule(params, avals)

    def rules_of(self, jaxpr: Jaxpr) -> list[Rule]:
        """Returns the rule for each equation of an open jaxpr; they are looked up once."""
        # The jaxpr is kept alive, so an id cannot come to mean another one.
        if id(jaxpr) not in self._rules_of:
            self._rules_of[id(jaxpr)] = jaxpr, [self.rule_of(eqn) for eqn in jaxpr.eqns]
        return self._rules_of[id(jaxpr)][1]

    def rule_of(self, eqn: JaxprEqn) -> Rule:
        """Returns the rule for a first-order equation."""
        return self.rule(eqn.primitive, eqn.params, [atom.aval for atom in eqn.invars])

    def saves(self, primitive: Primitive, *avals: Any, **params: Any) -> bool:
        """The policy of `jax.checkpoint` that keeps the results of products and computes cheaper ops again."""
        return params.get("name") == HELD or self.rule(primitive, params, avals).costly

    def enter(self, region: Region, eqn: JaxprEqn) -> Region:
        """Returns the region of an equation: what its code says comes before what a pattern says."""
        low, path = region
        name_stack = eqn.source_info.name_stack
        if self.options.overrides.scopes:
            path = scope_path(path, name_stack)
            self.scopes.add(path)
            for pattern in self.options.overrides.matching(path):
                low = self.options.overrides.scopes[pattern]
                self.matched.add(pattern)
        return Region(region_of(name_stack) or low, path)

    def first_order(
        self, rule: Rule, eqn: JaxprEqn, values: tuple[Value, ...], full: bool, meets: bool, low: np.dtype
    ) -> Step:
        """Decides an op; an equal one, such as that of the layer before, is decided as it was."""
        avals = tuple([atom.aval for atom in (*eqn.invars, *eqn.outvars)])
        literals = tuple([isinstance(atom, Literal) for atom in eqn.invars])
        key = eqn.primitive, tuple(eqn.params.items()), avals, literals, rule, values, full, meets, low
        try:
            known = self._steps.get(key)
        except TypeError:  # a parameter that cannot be hashed
            return self._decide(rule, eqn, values, full, meets, low)
        if known is None:
            known = self._steps[key] = self._decide(rule, eqn, values, full, meets, low)
        return known._replace(eqn=eqn)

    def _decide(
        self, rule: Rule, eqn: JaxprEqn, values: tuple[Value, ...], full: bool, meets: bool, low: np.dtype
    ) -> Step:
        traced = [dtype_of(atom) == FLOAT32 for atom in eqn.invars]
        eligible = chosen(traced, weighed(rule, eqn, values))
        compared = [value.as_native() for value in eligible] if meets else eligible
        dtype = operand_dtype(rule, eqn, compared, full, low)
        casts = tuple(
            dtype if is_float32 and value.dtype != dtype else None
            for value, is_float32 in zip(values, traced, strict=True)
        )
        dtypes = tuple(c or value.dtype for c, value in zip(casts, values, strict=True))
        operands = chosen(traced, dtypes)
        params = params_for(rule, eqn, widest(operands)) if operands else {}
        outs = results(rule, eqn, values, dtypes, low)
        rewrite = None
        if full and rule.picks:
            rewrite = pick
        elif rule.gathers and operands and widest(operands) == low != FLOAT32:
            rewrite = gather
        changed = rewrite is not None or differs(zip((*eqn.invars, *eqn.outvars), (*values, *outs), strict=True))
        # Each use of an input casts it for itself: the cotangents of a reused weight are summed in the weight's dtype.
        inputs = [
            isinstance(atom, Var) and value.origin <= Origin.INPUT
            for atom, value in zip(eqn.invars, values, strict=True)
        ]
        each = tuple(c if is_input else None for c, is_input in zip(casts, inputs, strict=True))
        shared = tuple(None if is_input else c for c, is_input in zip(casts, inputs, strict=True))
        is_product = rule.op_class is OpClass.LOWER and dtype == low
        full_grad = is_product and any(each) and self.options.weight_grad_dtype == FLOAT32
        held = tuple(i for i, value in enumerate(values) if each[i] is not None and value.held)
        all_params = tuple((eqn.params | params).items())
        op = Op(eqn.primitive, all_params, each, broadcast_shape(rule, eqn), held, full_grad, rewrite)
        return Step(eqn, shared, outs, op, changed, tuple(d == FLOAT32 or is_neutral(eqn) for d in dtypes))


# The reasons to run a product as it was traced, as `explain` names them.
_SENSITIVE = {Reads.ANGLE: "angle", Reads.DISTANCE: "distance", Reads.MATRIX: "decomposition"}


class _Draft:
    """A plan in the making.

    Equations are decided in order, but what reads a result comes later. When all that reads the result of a cheap op
    has turned out to read it in float32, the op is decided again: evaluated in float32 it fuses with its readers, which
    costs no memory and rounds less. So is an op that moves values of which there is a float32 copy anyway.
    """

    def __init__(
        self,
        planner: Planner,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        values: tuple[Value, ...],
        wanted: tuple[Reads, ...],
        region: Region,
    ) -> None:
        self._planner, self._jaxpr, self._consts, self._region = planner, jaxpr, consts, region
        self._known = dict(zip(jaxpr.constvars, map(planner.constant, consts), strict=True))
        self._known |= dict(zip(jaxpr.invars, values, strict=True))
        literals = (atom for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, Literal))
        self._literals = {id(literal): constant(literal.val) for literal in literals}
        self._regions = [planner.enter(region, eqn) for eqn in jaxpr.eqns]
        self._rules = planner.rules_of(jaxpr)
        self._deciding, _ = depends_on(jaxpr, [reads is Reads.TRACED for reads in wanted])
        squares = tuple([value.squares for value in values])
        self._squares = planner.sensitivity.squares(jaxpr, squares)
        self._sensitive = planner.sensitivity.sensitive(jaxpr, squares, wanted)
        self._as_traced: dict[int, str] = {}
        if self._deciding or self._sensitive:
            reasons = map(self._why_as_traced, jaxpr.eqns, self._rules)
            self._as_traced = {i: why for i, why in enumerate(reasons) if why is not None}
        for i in self._as_traced:
            self._regions[i] = self._regions[i]._replace(low=FLOAT32)
        self._steps: list[Step | None] = [None] * len(jaxpr.eqns)
        self._reasons: list[Any] = [None] * len(jaxpr.eqns)  # each step was decided as it was for these
        self._producers = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
        self._operands = [tuple(dict.fromkeys(_variables(eqn.invars))) for eqn in jaxpr.eqns]
        self._readers: dict[Var, list[int]] = {}
        for i, operands in enumerate(self._operands):
            for var in operands:
                self._readers.setdefault(var, []).append(i)
        # The equations to which it matters that there is a float32 copy of what they read.
        self._use_copies = [
            (rule.moves and not rule.fuses) or eqn.primitive.name in planner.higher_order
            for eqn, rule in zip(jaxpr.eqns, self._rules, strict=True)
        ]
        self._stored = {
            var for rule, operands in zip(self._rules, self._operands, strict=True) if rule.stores for var in operands
        }
        self._full_reads: dict[Var, set[int]] = {}  # by the equations that do
        self._decays: set[Var] = set()  # a carry that adds up is multiplied with them in every iteration
        self._low_reads = Counter({var: len(readers) for var, readers in self._readers.items()})
        self._low_reads.update(_variables(jaxpr.outvars))
        self._low_reads.subtract(_variables(chosen([bool(reads) for reads in wanted], jaxpr.outvars)))

    def _why_as_traced(self, eqn: JaxprEqn, rule: Rule) -> str | None:
        """Returns the reason to run an equation as it was traced, as `explain` names it."""
        if region_of(eqn.source_info.name_stack) is not None:
            return None  # what the code says comes first
        if any(var in self._deciding for var in eqn.outvars) and eqn.primitive.name not in SPLIT:
            return "loop"
        if rule.op_class is not OpClass.LOWER:
            return None
        return next((_SENSITIVE[self._sensitive[var]] for var in eqn.outvars if var in self._sensitive), None)

    def plan(self) -> Plan:
        for i in range(len(self._jaxpr.eqns)):
            pending = [i]
            while pending:
                pending += self._decide(pending.pop())
        outs = tuple(map(self._read, self._jaxpr.outvars))
        reads_full = tuple(map(self._is_wanted, self._jaxpr.invars))
        steps = [step for step in self._steps if step is not None]
        return Plan(self._jaxpr, self._consts, self._known, steps, outs, reads_full, self._region, self._as_traced)

    def _read(self, atom: Any) -> Value:
        return self._known[atom] if isinstance(atom, Var) else self._literals.get(id(atom)) or constant(atom.val)

    def _is_wanted(self, var: Var) -> bool:
        """Whether a variable is read in float32 only, not if it is not read at all; or must be precise."""
        return self._low_reads.get(var) == 0 or var in self._decays

    def _are_wanted(self, results: Sequence[Var]) -> bool:
        """Whether each of several results is wanted or not read at all, and one is wanted."""
        wanted = [var for var in results if self._is_wanted(var)]
        return bool(wanted) and all(var in wanted or not self._low_reads[var] for var in results)

    def _reads(self, var: Var, eqn: JaxprEqn) -> Reads:
        """How the readers of one of its results read it, as far as the equation may be told."""
        if (var in self._deciding or var in self._sensitive) and region_of(eqn.source_info.name_stack) is None:
            return Reads.TRACED if var in self._deciding else self._sensitive[var]
        return Reads.FULL if self._is_wanted(var) else Reads.ANY

    def _decide(self, i: int) -> list[int]:
        """Decides an equation, and returns those that now have reason to be decided again."""
        eqn, rule = self._jaxpr.eqns[i], self._rules[i]
        higher_order = self._planner.higher_order.get(eqn.primitive.name)
        wanted = tuple([self._reads(var, eqn) for var in eqn.outvars])
        values = tuple([self._read(atom) for atom in eqn.invars])
        copied = False
        if self._use_copies[i]:
            values = tuple(
                value._replace(copied=True) if self._is_copied(atom, i) else value
                for atom, value in zip(eqn.invars, values, strict=True)
            )
            copied = any(value.copied for value in values)
        full = (rule.fuses or (rule.moves and copied)) and self._are_wanted(eqn.outvars)
        reason = wanted if higher_order else full
        if (old := self._steps[i]) is not None and (reason, values) == self._reasons[i]:
            return []
        if higher_order:
            step = higher_order(self._planner, eqn, values, wanted, self._regions[i])
        else:
            low = self._regions[i].low
            rule = rule if low != FLOAT32 else ORIGINAL
            step = self._planner.first_order(rule, eqn, values, full, self._meets_other_data(i, values), low)
        self._steps[i], self._reasons[i] = step, (reason, values)
        for var, out in zip(eqn.outvars, step.outs, strict=True):
            squares = self._squares.get(var)
            self._known[var] = out if out.squares is squares else out._replace(squares=squares)
        affected = list(self._affected(i, step))
        if old is not None and old.outs != step.outs:
            affected += [j for var in eqn.outvars for j in self._readers.get(var, ())]
        return [j for j in affected if self._steps[j] is not None]

    def _affected(self, i: int, step: Step) -> Iterator[int]:
        """Notes what an equation reads in float32; yields the equations that this is a reason to decide again."""
        if self._rules[i].scales and any(self._known[var].adds_up for var in self._operands[i]):
            self._decays.update(self._operands[i])
            yield from (self._producers[var] for var in self._operands[i] if var in self._producers)
        pairs = zip(step.eqn.invars, step.reads_full, strict=True)
        low = {atom for atom, is_full in pairs if not is_full and isinstance(atom, Var)}
        for var in self._operands[i]:
            if var not in low and i not in (readers := self._full_reads.setdefault(var, set())):
                readers.add(i)
                self._low_reads[var] -= 1
                if self._is_wanted(var) and var in self._producers:
                    yield self._producers[var]
                yield from (j for j in self._readers[var] if self._use_copies[j])

    def _is_copied(self, atom: Any, i: int) -> bool:
        """Whether another equation reads a variable in float32."""
        return isinstance(atom, Var) and (self._known[atom].copied or bool(self._full_reads.get(atom, set()) - {i}))

    def _meets_other_data(self, i: int, values: tuple[Value, ...]) -> bool:
        """Whether an equation reads a norm of low-precision data that a product reads, too.

        The norm is float32, but what a product reads of it is stored in low precision. Where it meets other data, as
        in a residual sum, float32 would only be stored a second time.
        """
        if self._stored.isdisjoint(self._operands[i]):
            return False
        atoms = zip(self._jaxpr.eqns[i].invars, values, strict=True)
        return any(
            isinstance(atom, Var) and atom in self._stored and value.as_native().dtype != value.dtype
            for atom, value in atoms
        )


def _variables(atoms: Iterable[Any]) -> list[Var]:
    return [atom for atom in atoms if isinstance(atom, Var)]
