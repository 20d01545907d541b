"""Plans jaxprs: decides the dtype that each op computes in, by the rule of its primitive (`_rules.py`)."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var

from jmp_amp._autocast._draft import Draft
from jmp_amp._autocast._facts import Facts
from jmp_amp._autocast._known import Knowledge
from jmp_amp._autocast._op import SAVED, Op
from jmp_amp._autocast._operands import OpContext, decide, params_for
from jmp_amp._autocast._overrides import Overrides
from jmp_amp._autocast._plan import Inside, Plan, Region, Step, Use, differs
from jmp_amp._autocast._readers import Readers
from jmp_amp._autocast._regions import format_in
from jmp_amp._autocast._results import results
from jmp_amp._autocast._rewrites import Decided, rewrite_of
from jmp_amp._autocast._rule import ORIGINAL, OpClass, Rule, Rules
from jmp_amp._autocast._streams import Streams
from jmp_amp._autocast._values import Origin, Value, Wish, constant
from jmp_amp._formats import AS_TRACED, FLOAT32
from jmp_amp._jaxpr import (
    HIGHER_ORDER,
    Kept,
    Structure,
    dtype_of,
    dtype_of_aval,
    inner_jaxprs,
    jaxprs_in,
    open_jaxpr,
    scope_path,
    structure_of,
)


class Options(NamedTuple):
    """The arguments of `autocast` that hold for a whole function; see there."""

    overrides: Overrides
    save: str = "matmuls"
    weight_grad_dtype: np.dtype | None = None
    residual_stream: str = "float32"

    @property
    def has_low_stream(self) -> bool:
        """Whether residual streams are stored in the compute dtype."""
        return self.residual_stream == "low"


PlanHigherOrder = Callable[["Planner", Structure, Use], Step]
_KEPT_STEPS = 2**14


class Planner:
    """Plans jaxprs. It keeps what it finds out about a jaxpr as long as that lives; see `planner_of`."""

    def __init__(self, rules: Rules, plan_higher_order: PlanHigherOrder, options: Options) -> None:
        """Takes the op table, a function that plans equations that hold jaxprs, and the arguments of `autocast`."""
        self._rules: Mapping[str, Any] = {**rules, **options.overrides.primitives}
        self._plan_higher_order = plan_higher_order
        self.options = options
        self.knowledge = Knowledge(self.facts_of, self.constants)
        self.readers = Readers(self.facts_of, self.knowledge)
        self.streams = Streams(self.facts_of)
        self._plans, self._bodies, self._facts, self._constants = Kept(), Kept(), Kept(), Kept()
        self._steps: dict[Any, Step] = {}
        self._numbers, self._counter = dict[Any, int](), itertools.count()

    def plan(self, jaxpr: Any, values: tuple[Value, ...], wanted: tuple[Wish, ...], region: Region) -> Plan:
        """Decides every equation of a jaxpr.

        Args:
            jaxpr: closed or open.
            values: what is known of its inputs.
            wanted: how each of its results is read.
            region: the format and the scopes around it.
        """
        opened, consts = open_jaxpr(jaxpr)
        key = tuple(map(id, consts)), values, wanted, region  # the plan keeps the constants alive
        return self._plans(opened, key, lambda: self._plan(opened, consts, values, wanted, region))

    def _plan(self, jaxpr: Jaxpr, consts: Sequence[Any], *args: Any) -> Plan:
        plan = Draft(self, jaxpr, consts, *args).plan()
        bodies = self._bodies(jaxpr, (tuple(map(id, consts)), plan.decisions), dict)
        return dataclasses.replace(plan, bodies=bodies)

    def constants(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> tuple[Value, ...]:
        """Describes the constants of an open jaxpr, and reads them only once."""
        return self._constants(jaxpr, tuple(map(id, consts)), lambda: (consts, tuple(map(constant, consts))))[1]

    def rule(self, primitive: Primitive, params: Mapping[str, Any], avals: Sequence[Any]) -> Rule:
        """Returns the rule for a first-order op."""
        rule = self._rules.get(primitive.name, ORIGINAL)
        return rule if isinstance(rule, Rule) else rule(params, avals)

    def rule_of(self, eqn: JaxprEqn) -> Rule:
        """Returns the rule for a first-order equation."""
        return self.rule(eqn.primitive, eqn.params, [atom.aval for atom in eqn.invars])

    def facts_of(self, jaxpr: Jaxpr) -> list[Facts]:
        """Returns the facts of each equation of an open jaxpr."""
        return self._facts(jaxpr, (), lambda: self._read_facts(jaxpr))

    def _read_facts(self, jaxpr: Jaxpr) -> list[Facts]:
        facts, moved = [], dict[Any, Var]()
        for eqn in jaxpr.eqns:
            rule, atoms = self.rule_of(eqn), eqn.invars
            operands = dict.fromkeys([atom for atom in atoms if isinstance(atom, Var)])
            sources = tuple([moved.get(atom, atom) if isinstance(atom, Var) else None for atom in atoms])
            if rule.moves and len(eqn.outvars) == 1 and sources[0] is not None:
                moved[eqn.outvars[0]] = sources[0]
            facts.append(Facts(eqn, rule, structure_of(eqn), tuple(operands), sources, self._number_of(eqn, sources)))
        return facts

    def _number_of(self, eqn: JaxprEqn, sources: Sequence[Any]) -> int | None:
        if eqn.primitive.name not in self._rules:  # it may hold jaxprs, which these numbers would keep alive
            return None
        avals = tuple([atom.aval for atom in (*eqn.invars, *eqn.outvars)])
        literals = tuple([isinstance(atom, Literal) for atom in eqn.invars])
        moved = tuple([(sources.index(each), each.aval) if each is not None else None for each in sources])
        key = eqn.primitive, tuple(eqn.params.items()), avals, literals, moved, len(set(map(id, eqn.invars)))
        if len(self._numbers) >= _KEPT_STEPS:
            self._numbers.clear()
        try:
            return self._numbers.setdefault(key, next(self._counter))
        except TypeError:  # a parameter that cannot be hashed
            return None

    def hides_products(self, eqn: JaxprEqn) -> bool:
        """Whether an equation without a rule holds products, which stay as they were traced."""
        if eqn.primitive.name in self._rules or structure_of(eqn) is not None:
            return False
        inside = [each for inner, _ in inner_jaxprs(eqn) for each in open_jaxpr(inner)[0].eqns]
        return any(self.rule_of(each).op_class is OpClass.LOWER or self.hides_products(each) for each in inside)

    def is_saved(self, primitive: Primitive, *avals: Any, **params: Any) -> bool:
        """A policy for `jax.checkpoint`: saves the results of costly ops and the casts of constants of a loop."""
        return params.get("name") == SAVED or self._is_costly(primitive, params, avals)

    def _is_costly(self, primitive: Primitive, params: Mapping[str, Any], avals: Sequence[Any]) -> bool:
        """Whether an op is costly: by its rule, by what is in it, or because it may be a kernel.

        A kernel has no rule and reads floating values.
        """
        jaxprs = jaxprs_in(params) if primitive.name in HIGHER_ORDER else None
        if jaxprs is not None:
            inside = [eqn for inner in jaxprs for eqn in open_jaxpr(inner)[0].eqns]
            return any(self._is_costly(e.primitive, e.params, [atom.aval for atom in e.invars]) for e in inside)
        if primitive.name not in self._rules:
            return any(jnp.issubdtype(dtype, jnp.floating) for dtype in filter(None, map(dtype_of_aval, avals)))
        return self.rule(primitive, params, avals).costly

    def enter(self, region: Region, eqn: JaxprEqn) -> Region:
        """Returns the region of an equation. A region in the code takes precedence over a pattern in `rules`."""
        form, path = region
        name_stack = eqn.source_info.name_stack
        if form is AS_TRACED or not (name_stack.stack or self.options.overrides.scopes):
            return region
        if self.options.overrides.scopes:
            path = scope_path(path, name_stack)
            for pattern in self.options.overrides.matching(path):
                form = self.options.overrides.scopes[pattern]
        return Region(format_in(name_stack) or form, path)

    def decide(
        self,
        op: OpContext,
        facts: Facts,
        wanted: tuple[Wish, ...],
        region: Region,
        inside: Sequence[Inside] = (),
    ) -> Step:
        """Decides an equation.

        Args:
            op: the op.
            facts: the facts of its equation.
            wanted: how each of its results is read.
            region: the format and the scopes around it.
            inside: for each of its jaxprs, what is known of the inputs, and how the results are read.
        """
        if facts.structure is not None:
            return self._plan_higher_order(self, facts.structure, Use(op.eqn, op.values, wanted, region, inside))
        if not op.format.is_low:
            op = op._replace(rule=ORIGINAL)
        if facts.op is None:
            return self._first_order(op)
        # The same op of another layer gets the same decision.
        key = facts.op, op[2:]
        known = self._steps.get(key)
        if known is None:
            if len(self._steps) >= _KEPT_STEPS:
                self._steps.clear()
            known = self._steps[key] = self._first_order(op)
        return known._replace(eqn=op.eqn)

    def _first_order(self, op: OpContext) -> Step:
        eqn, is_float32 = op.eqn, op.is_float32
        dtype, why = decide(op)
        casts = tuple(
            dtype if eligible and value.dtype != dtype else None
            for value, eligible in zip(op.values, is_float32, strict=True)
        )
        dtypes = tuple(cast or value.dtype for cast, value in zip(casts, op.values, strict=True))
        params, outs = params_for(op, dtypes), results(op, dtypes)
        # Each use of an input casts it for itself: the cotangents of a reused weight are summed in the weight's dtype.
        are_inputs = tuple([value.origin <= Origin.INPUT for value in op.values])
        casts_itself = [
            isinstance(atom, Var) and is_input for atom, is_input in zip(eqn.invars, are_inputs, strict=True)
        ]
        each = tuple(cast if own else None for cast, own in zip(casts, casts_itself, strict=True))
        shared = tuple(None if own else cast for cast, own in zip(casts, casts_itself, strict=True))
        saved = tuple(i for i, value in enumerate(op.values) if each[i] is not None and value.save_cast)
        rewrite = rewrite_of(
            Decided(eqn, op.rule, op.format, op.reads_full, dtypes, each, are_inputs, self.options.weight_grad_dtype)
        )
        changed = differs(zip((*eqn.invars, *eqn.outvars), (*op.values, *outs), strict=True)) or rewrite is not None
        run = Op(eqn.primitive, tuple((eqn.params | params).items()), each, saved, rewrite)
        # The dtype of the operands does not show in the result of a comparison.
        shows = any(dtype_of(var) == FLOAT32 for var in eqn.outvars)
        reads_full = tuple(d == FLOAT32 or not shows for d in dtypes)
        return Step(eqn, shared, outs, run, changed, reads_full, why)
