"""Plans jaxprs: decides the dtype that each op computes in, by the rule of its primitive."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._analyses import Demands, Knowledge, joined, why_as_traced
from jmp_amp._autocast._decide import Context, Neighbours, decide, describe_results, exact_numbers, params_for
from jmp_amp._autocast._equations import describe_equations
from jmp_amp._autocast._options import Options, format_in
from jmp_amp._autocast._plan import IN_CODE, CastOp, Inside, Plan, Region, Run, Step, differs, is_loop_invariant
from jmp_amp._autocast._rewrites import rewrite_of, round_once
from jmp_amp._autocast._streams import Streams, stream_of
from jmp_amp._autocast._values import Origin, Reads, Stream, Use, Value, constant, constants
from jmp_amp._formats import AS_TRACED, FLOAT32, FORMATS
from jmp_amp._ops import ORIGINAL, RULES, Demand, EqnInfo, OpClass, ResultKind, Rule, find_rule, rule_of


class Planner:
    """Plans jaxprs. It keeps what it finds out about a jaxpr as long as that lives; see `planner_of`."""

    def __init__(self, plan_higher_order: Callable[..., Step], options: Options) -> None:
        """Takes `plan_higher_order`, which itself calls a planner and so is not imported here, and the options."""
        self._rules = {**RULES, **options.overrides.primitives}
        self._plan_higher_order = plan_higher_order
        self.options = options
        self.knowledge = Knowledge(self.infos_of)
        self.demands = Demands(self.infos_of, self.knowledge)
        self.streams = Streams(self.infos_of, self.knowledge.paths)
        self._plans, self._infos = jx.Cache(), jx.Cache()
        self._bodies = jx.Cache(drop=dict.clear)  # a plan refers to its functions, and these to the plan
        self._steps, self._ops = jx.Cache(2**14), jx.Cache(2**14)

    def plan(self, jaxpr: Any, values: tuple[Value, ...], uses: tuple[Use, ...], region: Region) -> Plan:
        """Decides every equation of a jaxpr.

        Args:
            jaxpr: closed or open.
            values: what is known of its inputs.
            uses: how each of its results is used.
            region: the format and the scopes around it.
        """
        opened, consts = jx.open_jaxpr(jaxpr)
        key = tuple(map(id, consts)), values, uses, region  # the plan keeps the constants alive
        return self._plans(opened, key, lambda: self._plan(jaxpr, values, uses, region))

    def _plan(self, jaxpr: Any, *args: Any) -> Plan:
        plan = _PlanBuilder(self, jaxpr, *args).plan()
        key = tuple(map(id, plan.consts)), plan.decisions
        return dataclasses.replace(plan, bodies=self._bodies(jx.open_jaxpr(jaxpr)[0], key, dict))

    def rule_of(self, eqn: JaxprEqn) -> Rule:
        """Returns the rule for a first-order equation."""
        return rule_of(eqn, self._rules)

    def infos_of(self, jaxpr: Jaxpr) -> list[EqnInfo]:
        """Returns the facts of each equation of an open jaxpr."""
        return self._infos(jaxpr, (), lambda: describe_equations(jaxpr, self.rule_of, self._token_of))

    def _token_of(self, eqn: JaxprEqn, sources: Sequence[Any], *relations: Any) -> object | None:
        if eqn.primitive.name not in self._rules or jx.inner_jaxprs(eqn):  # which the keys would keep alive
            return None
        avals = tuple([atom.aval for atom in (*eqn.invars, *eqn.outvars)])
        literals = tuple([isinstance(atom, Literal) for atom in eqn.invars])
        moved = tuple([(sources.index(each), each.aval) if each is not None else None for each in sources])
        key = eqn.primitive, tuple(eqn.params.items()), avals, literals, moved, relations, len(set(map(id, eqn.invars)))
        try:
            return self._ops(self, key, object)
        except TypeError:  # a parameter that cannot be hashed
            return None

    def hides_products(self, eqn: JaxprEqn) -> bool:
        """Whether an equation without a rule holds products, which stay as they were traced."""
        if eqn.primitive.name in self._rules or jx.structure_of(eqn) is not None:
            return False
        inside = (each for inner in jx.inner_jaxprs(eqn) for *_, each in jx.equations_in(inner))
        return any(self.rule_of(each).op_class is OpClass.LOWER for each in inside)

    def is_saved(self, primitive: Primitive, *avals: Any, **params: Any) -> bool:
        """A policy for `jax.checkpoint`: saves the results of costly ops and the casts of constants of a loop."""
        return is_loop_invariant(primitive, **params) or self._is_costly(primitive, *avals, **params)

    def _is_costly(self, primitive: Primitive, *avals: Any, **params: Any) -> bool:
        """Whether an op is costly: by its rule, by what is in it, or because it may be a kernel.

        A kernel has no rule and reads floating values.
        """
        if primitive.name in jx.HIGHER_ORDER and (jaxprs := jx.versions.jaxprs_in(params)) is not None:
            return any(jx.holds(inner, self._is_costly) for inner in jaxprs)
        if primitive.name not in self._rules:
            return any(map(jx.is_floating, avals))
        return find_rule(primitive, params, avals, self._rules).costly

    def enter(self, region: Region, eqn: JaxprEqn) -> Region:
        """Returns the region of an equation.

        One in the code takes precedence over patterns in `rules` and over facts, in the calls and loops in it, too.
        """
        name_stack, overrides = eqn.source_info.name_stack, self.options.overrides
        if region.format is AS_TRACED or not (name_stack.stack or overrides.scopes):
            return region
        if overrides.scopes:
            region = region._replace(path=jx.scope_path(region.path, name_stack))
            for pattern in overrides.matching(region.path) if region.why != IN_CODE else ():
                region = region._replace(format=overrides.scopes[pattern], why="pattern")
        form = format_in(name_stack)
        return region if form is None else region._replace(format=form, why=IN_CODE)

    def decide(self, op: Context) -> Step:
        """Decides an equation."""
        if op.info.structure is not None:
            return self._plan_higher_order(self, op)
        if op.info.token is None:
            return self._first_order(op)
        # The same op of another layer, with the same about it, gets the same decision.
        key = op.info.token, op.region.format, op.is_asked, op.leaves_range, op.demand, op.stream, op.neighbours
        step = self._steps(self, key, lambda: self._first_order(op))
        return step._replace(eqn=op.info.eqn, region=op.region)

    def _first_order(self, op: Context) -> Step:
        eqn, values = op.info.eqn, op.values
        op = op._replace(is_float32=[jx.dtype_of(atom) == FLOAT32 for atom in eqn.invars])
        dtype, why = decide(op)
        pairs = zip(values, op.is_float32, strict=True)
        dtypes = tuple([dtype if eligible and dtype is not None else value.dtype for value, eligible in pairs])
        triples = zip(dtypes, values, is_exact := exact_numbers(op, dtype), strict=True)
        casts = [None if exact or to == value.dtype else to for to, value, exact in triples]
        params, outs = params_for(op, dtypes), describe_results(op, dtypes)
        # Each use of an input casts it for itself: the cotangents of a reused weight are summed in the weight's dtype,
        # as those of `embedding` in `h @ embedding.T`, where `h` starts as `embedding[tokens]`.
        has_rule = eqn.primitive.name in self._rules
        is_own = [has_rule and isinstance(a, Var) and x for a, x in zip(eqn.invars, op.is_input, strict=True)]
        own = tuple([cast if mine else None for mine, cast in zip(is_own, casts, strict=True)])
        shared = tuple([None if mine else cast for mine, cast in zip(is_own, casts, strict=True)])
        saved = tuple([i for i, value in enumerate(values) if own[i] is not None and value.save_cast])
        rewrite = round_once if any(is_exact) else rewrite_of(op, dtypes, own)
        changed = bool(rewrite or params) or differs(zip((*eqn.invars, *eqn.outvars), (*values, *outs), strict=True))
        run: Run = CastOp(eqn.primitive, tuple((eqn.params | params).items()), own, saved, rewrite)
        if not has_rule:  # it is joined with no other op: JAX may be able to run it, but not to compile it
            run = functools.partial(jx.bind, eqn)
        # The dtype of the operands does not show in the result of a comparison, `jnp.argmax(logits)` or `x > 0`.
        shows = FLOAT32 in map(jx.dtype_of, eqn.outvars)
        otherwise = Reads.STORED if op.neighbours.is_stored else Reads.LOW
        reads = tuple([Reads.FUSED if d == FLOAT32 or not shows else otherwise for d in dtypes])
        return Step(eqn, op.region, shared, outs, run, changed, reads, "number" if any(is_exact) else why)


@dataclasses.dataclass(slots=True, eq=False)
class _Variable:
    """A variable or a literal, and how the equations that are decided so far read it, which are named by their indices.

    Attributes:
        value: what is known of it, a `Value`; None until its equation is decided.
        demand: how its readers read it.
        stream: how it is read as a residual stream.
        readers: the equations that read it, with the dtype in which each does.
        returned: in which dtype the results of the jaxpr that it is are read.
    """

    value: Any
    demand: int = Demand.NONE
    stream: int = Stream.NONE
    readers: dict[int, int] = dataclasses.field(default_factory=dict)
    returned: int = Reads.UNREAD

    @property
    def reads(self) -> int:
        """In which dtype it is read; as a gate, in float32."""
        return Reads.FUSED if self.demand & Demand.GATE else min([self.returned, *self.readers.values()])


# JAX adds up the cotangents of a value in its dtype. In bfloat16, the sum of so many is as exact as a product.
_FEW = 8


class _PlanBuilder:
    """A plan in the making.

    1. The analyses find the facts of all values, what their readers demand, and which are residual streams.
    2. For each equation, that says in which region it is, and whether it runs as it was traced (`_context`).
    3. Forward: equations are decided in order, by their operands and by what is known of their readers (`_decide`).
    4. Backward: what each equation reads in float32 is recorded with its operands (`_read`).

    The last two are repeated, for the equations around what has changed, until nothing does. Once all readers of a
    cheap op turn out to read float32, it is decided again: in float32 it fuses with them, which costs no memory and
    rounds less. So is an op that moves values, once there is a float32 copy of them.
    """

    def __init__(
        self, planner: Planner, jaxpr: Any, values: Sequence[Value], uses: Sequence[Use], region: Region
    ) -> None:
        """Takes a planner and the arguments of `Planner.plan`."""
        self._planner, self._region = planner, region
        self._jaxpr, self._consts = opened, consts = jx.open_jaxpr(jaxpr)
        infos, facts = planner.infos_of(opened), [value.known for value in values]
        self._facts = planner.knowledge.find(jaxpr, facts)
        demands = planner.demands.find(jaxpr, facts, [use.demand for use in uses])
        streams: Mapping[Var, int] = {}
        if planner.options.has_low_stream:
            is_computed = tuple([value.origin > Origin.INPUT for value in values])
            streams = planner.streams.of(jaxpr, is_computed, [use.stream for use in uses])
        given = dict(zip((*opened.constvars, *opened.invars), (*constants(opened, consts), *values), strict=True))
        self._variables = {
            var: _Variable(given.get(var), demands.get(var, Demand.NONE), streams.get(var, Stream.NONE))
            for var in (*given, *[var for each in infos for var in each.eqn.outvars])
        }
        self._outs = [[self._variables[var] for var in each.eqn.outvars] for each in infos]
        self._operands = [[self._variable(atom) for atom in each.eqn.invars] for each in infos]
        for i, each in enumerate(infos):
            is_dead = each.is_dead([out.demand for out in self._outs[i]])
            for operand in self._operands[i]:
                operand.readers[i] = Reads.UNREAD if is_dead else Reads.LOW
        for use, atom in zip(uses, opened.outvars, strict=True):
            if isinstance(atom, Var) and use.demand != Demand.NONE:
                is_float32 = use.demand == Demand.RETURNED or use.demand & Demand.SENSITIVE
                result = self._variables[atom]
                result.returned = min(result.returned, Reads.FUSED if is_float32 else use.reads)
        self._contexts = [self._context(i, each) for i, each in enumerate(infos)]
        self._steps: list[Step | None] = [None] * len(infos)

    def _variable(self, atom: Any) -> _Variable:
        return _Variable(constant(atom.val)) if isinstance(atom, Literal) else self._variables[atom]

    def _context(self, i: int, info: EqnInfo) -> Context:
        """Returns what is known of an equation before its operands are decided."""
        eqn, rule = info.eqn, info.rule
        region = self._planner.enter(self._region, eqn)
        outs = [out.demand for out in self._outs[i]]
        demand, overrides = joined(outs), self._planner.options.overrides
        is_asked = region.why in (IN_CODE, "pattern") or eqn.primitive.name in overrides.primitives
        inside: Sequence[Inside] = ()
        squared = [variable.demand & Demand.SQUARED for variable in self._operands[i]]
        if Demand.SQUARED in squared and (rule.moves or rule.scales):  # so are `y.T` and `2 * x`
            self._outs[i][0].demand |= Demand.SQUARED
        if info.structure is not None or rule.can_run_as_traced or demand & Demand.ENDS_LOOP:
            operands = self._planner.knowledge.of(self._facts, eqn.invars)
            operands = tuple([k._replace(is_squared=True) if x else k for k, x in zip(operands, squared, strict=True)])
            if info.program is not None:
                given = [Demand.ANY] * len(outs) if is_asked else outs
                inside = self._planner.demands.inside(info, operands, given)
            reason = why_as_traced(info, demand, operands, region.format)
            if reason is not None and region.format.is_low and not is_asked:
                region = region._replace(format=FORMATS["float32"], why=reason)
        results = self._planner.knowledge.of(self._facts, eqn.outvars)
        leaves_range = any(known.leaves(region.format.dtype) for known in results)
        if demand & ~Demand.RETURNED == Demand.METRIC:  # and nothing else reads what is chosen from
            demand |= Demand.RANK
        demand = Demand.HIDDEN if is_asked else demand & (Demand.RANK | Demand.HIDDEN)
        stream = stream_of(self._outs[i][0].stream) if rule.kind is ResultKind.SUM else Stream.NONE
        rule = rule if region.format.is_low else ORIGINAL
        return Context(info, rule, region, self._planner.options, leaves_range, is_asked, demand, stream, inside)

    def plan(self) -> Plan:
        """Decides all equations."""
        changed = set(self._variables.values())
        while changed:
            for i, step in enumerate(self._steps):
                if step is None or not changed.isdisjoint([*self._operands[i], *self._outs[i]]):
                    changed.update(self._outs[i] if self._decide(i) else ())
            changed = self._read()
        values = {var: variable.value for var, variable in self._variables.items() if variable.value is not None}
        demands = {var: variable.demand for var, variable in self._variables.items()}
        reads = tuple([self._variables[var].reads for var in self._jaxpr.invars])
        steps = [step._replace(sums=self._sums(i, step)) for i, step in enumerate(self._steps) if step is not None]
        inner = [plan for step in steps for plan in step.inner]
        scopes = frozenset({op.region.path for op in self._contexts}.union(*[plan.scopes for plan in inner]))
        hiding = {step.eqn.primitive.name for step in steps if self._planner.hides_products(step.eqn)}
        opaque = frozenset(hiding.union(*[plan.opaque for plan in inner]))
        signature, outs = self._jaxpr.replace(eqns=[]), tuple([self._variable(x).value for x in self._jaxpr.outvars])
        return Plan(signature, self._consts, values, demands, steps, outs, reads, self._region, scopes, opaque)

    def _sums(self, i: int, step: Step) -> tuple[int, ...]:
        """Returns the operands that an equation reads in 16 bits, as many others do."""
        places = enumerate(zip(self._operands[i], step.casts, strict=True)) if not self._region.is_linear else ()
        return tuple([j for j, (x, cast) in places if cast is None and len(x.readers) > _FEW and x.value.is_half])

    def _decide(self, i: int) -> bool:
        """Decides an equation, and returns whether something else is known of its results."""
        old, old_step = self._contexts[i], self._steps[i]
        info, eqn, rule = old.info, old.info.eqn, old.info.rule
        operands, outs = self._operands[i], self._outs[i]
        uses = tuple([Use(o.demand, o.stream, o.reads) for o in outs]) if info.structure is not None else ()
        # A result that is float32 already stays so, whoever reads it; that of a branch may be so because of another.
        if old_step is not None and not isinstance(info.structure, jx.Branches):
            pairs = zip(uses, old.neighbours.uses, old_step.outs, eqn.outvars, strict=False)
            uses = tuple([was if out.dtype == jx.dtype_of(var) else use for use, was, out, var in pairs])
        values = tuple([operand.value for operand in operands])
        if info.structure is not None or (rule.moves and not rule.fuses):  # it may read a copy of an operand in float32
            values = tuple([self._with_copy(*pair, i) for pair in zip(eqn.invars, operands, strict=True)])
        reads = min([out.reads for out in outs], default=Reads.UNREAD)
        needs_float32 = reads == Reads.FUSED and (
            rule.fuses or (rule.moves and any(v.has_float32_copy for v in values))
        )
        is_stored = reads == Reads.STORED and (rule.moves or rule.is_polynomial)
        neighbours = Neighbours(values, needs_float32, is_stored, self._reads_stored_norm(operands), uses)
        if old_step is not None and neighbours == old.neighbours:
            return False
        op = old._replace(neighbours=neighbours)
        step = self._planner.decide(op)
        self._contexts[i], self._steps[i] = op, step
        for var, variable, out in zip(eqn.outvars, outs, step.outs, strict=True):
            facts = self._facts.get(var)
            variable.value = out if facts is None else out._replace(known=facts)
        return old_step is None or old_step.outs != step.outs

    def _with_copy(self, atom: Any, operand: _Variable, reader: int) -> Value:
        """Returns what is known of an operand, and whether another equation reads it in float32."""
        value = operand.value
        if (value.data_dtype or value.dtype) == jx.dtype_of(atom):
            return value
        has_copy = any(reads == Reads.FUSED for i, reads in operand.readers.items() if i != reader)
        return value._replace(has_float32_copy=True) if has_copy else value

    def _read(self) -> set[_Variable]:
        """Records which operands equations read in float32, and returns those of which that is new."""
        changed = set[_Variable]()
        for i, step in enumerate(filter(None, self._steps)):
            reads = dict[_Variable, int]()
            for operand, each in zip(self._operands[i], step.read_in, strict=True):
                reads[operand] = min(each, reads.get(operand, each))
            for operand, each in reads.items():
                if each > operand.readers[i]:
                    operand.readers[i] = each
                    changed.add(operand)
        return changed

    def _reads_stored_norm(self, operands: Sequence[_Variable]) -> bool:
        """Whether an equation reads a norm of low-precision data that a product reads too.

        The norm is float32, but the product stores it in low precision. If a residual sum read it in float32, it would
        be stored twice: `h = norm(x); h + mlp(h)`.
        """
        norms = [x for x in operands if x.value.data_dtype is not None and x.value.data_dtype != x.value.dtype]
        return bool(norms) and any(self._contexts[i].info.rule.stores for x in norms for i in x.readers)
