"""Plans a jaxpr, then runs the plan: which dtype each op computes in is decided before anything is computed.

`Planner.plan` walks a jaxpr with what is known of its inputs and decides a `Step` for each equation, by the class of
its primitive (`_rules.py`, `_decisions.py`). `Plan.run` evaluates the steps. Planning traces nothing, so the dtypes
that a loop carries are found by planning its body until they no longer change, and a body that is called many times is
planned once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var

from jmp_amp._autocast import _compat
from jmp_amp._autocast._decisions import broadcast_shape, differs, dtype_of, operand_dtype, params_for, results
from jmp_amp._autocast._ops import Block, Op, cast, grouped
from jmp_amp._autocast._overrides import Overrides, scope_path
from jmp_amp._autocast._regions import region_of
from jmp_amp._autocast._rules import ORIGINAL, OpClass, Rule, Rules
from jmp_amp._autocast._values import FLOAT32, Origin, Value, constant, widest


class Step(NamedTuple):
    """The decision for one equation.

    Attributes:
        eqn: the equation as it was traced.
        casts: the dtype that each operand is cast to; None leaves it.
        outs: what is then known of the results.
        run: evaluates the equation on its cast operands.
        changed: whether anything in it runs in another dtype than it was traced in.
    """

    eqn: JaxprEqn
    casts: tuple[Any, ...]
    outs: tuple[Value, ...]
    run: Callable[[Sequence[Any]], Sequence[Any]]
    changed: bool


class Region(NamedTuple):
    """Where an equation stands.

    Attributes:
        low: the compute dtype; float32 runs everything in its traced dtypes.
        path: the named scopes around the jaxpr; empty where no rule asks for them, so that plans can be shared.
    """

    low: np.dtype
    path: str = ""


class Options(NamedTuple):
    """What a user chooses for a whole function; `autocast` documents it."""

    overrides: Overrides
    save: str = "all"
    weight_grad_dtype: np.dtype | None = None


class HigherOrder(Protocol):
    """A rule for a primitive that holds jaxprs."""

    def reads_full(self, planner: "Planner", eqn: JaxprEqn, wanted: tuple[bool, ...], region: Region) -> Sequence[bool]:
        """Whether only float32 ops read each operand, given whether only such ops read each result."""
        ...

    def step(
        self,
        planner: "Planner",
        eqn: JaxprEqn,
        values: tuple[Value, ...],
        wanted: tuple[bool, ...],
        region: Region,
    ) -> Step:
        """Decides the equation."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The steps of one jaxpr, for one set of input dtypes."""

    jaxpr: Jaxpr
    consts: Sequence[Any]
    values: Mapping[Var, Value]
    steps: Sequence[Step]
    outs: tuple[Value, ...]
    region: Region

    def run(self, *args: Any) -> list[Any]:
        """Evaluates the jaxpr on inputs of the planned dtypes; the results have the dtypes of `outs`."""
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        env |= dict(zip(self.jaxpr.invars, args, strict=True))
        shared: dict[tuple[Var, Any], Any] = {}
        blocks, convert = self._single, lax.convert_element_type
        if _compat.differentiates():
            blocks, convert = self._grouped, cast

        def read(atom: Any, dtype: Any = None) -> Any:
            if isinstance(atom, Literal):
                return atom.val if dtype is None else np.asarray(atom.val).astype(dtype)
            if dtype is None or dtype == self.values[atom].dtype:
                return env[atom]
            if (atom, dtype) not in shared:
                shared[atom, dtype] = convert(env[atom], dtype)
            return shared[atom, dtype]

        for block, dead in blocks:
            with _compat.context_of(block.eqn):
                outs = block.run(list(map(read, block.invars, block.casts)))
            env.update(zip(block.outvars, outs, strict=True))
            for var in dead:
                del env[var]
        return [read(atom) for atom in self.jaxpr.outvars]

    @functools.cached_property
    def _single(self) -> list[tuple[Block, list[Var]]]:
        return self._with_last_reads(
            [Block(step.eqn, step.eqn.invars, step.casts, step.eqn.outvars, step.run) for step in self.steps]
        )

    @functools.cached_property
    def _grouped(self) -> list[tuple[Block, list[Var]]]:
        results = {atom for atom in self.jaxpr.outvars if isinstance(atom, Var)}
        return self._with_last_reads(grouped([block for block, _ in self._single], results))

    def _with_last_reads(self, blocks: Sequence[Block]) -> list[tuple[Block, list[Var]]]:
        """Adds the variables that can be freed after each block, which matters outside `jit`."""
        seen = {atom for atom in self.jaxpr.outvars if isinstance(atom, Var)}
        pairs = []
        for block in reversed(blocks):
            atoms = {atom for atom in (*block.invars, *block.outvars) if isinstance(atom, Var)}
            pairs.append((block, list(atoms - seen)))
            seen |= atoms
        return pairs[::-1]

    @functools.cached_property
    def _traced(self) -> dict[Any, Any]:
        return {}

    @functools.cached_property
    def changed(self) -> bool:
        """Whether anything in it runs in another dtype than it was traced in."""
        inputs = ((var, self.values[var]) for var in self.jaxpr.invars)
        return differs(inputs) or any(step.changed for step in self.steps)

    def trace(self, args: Sequence[Any]) -> Any:
        """Returns the plan as a closed jaxpr, the same object for the same types, so that calls compile once."""
        types = tuple(map(jax.typeof, args))
        if types not in self._traced:
            self._traced[types] = _compat.trace(self.run, args)
        return self._traced[types]


class Planner:
    """Plans jaxprs for one compute dtype; everything it remembers dies with it."""

    def __init__(self, rules: Rules, higher_order: Mapping[str, HigherOrder], options: Options) -> None:
        self._rules = {**rules, **options.overrides.primitives}
        self._higher_order = higher_order
        self.options = options
        self.scopes: set[str] = set()
        self.matched: set[str] = set()
        self._plans: dict[Any, Plan] = {}
        self._readers: dict[Any, tuple[list[tuple[bool, ...]], tuple[bool, ...]]] = {}

    def plan(self, jaxpr: Any, values: tuple[Value, ...], wanted: tuple[bool, ...], region: Region) -> Plan:
        """Decides every equation of a jaxpr.

        Args:
            jaxpr: closed or open.
            values: what is known of its inputs.
            wanted: whether only float32 ops read each of its results.
            region: where it stands.
        """
        # The plan keeps its jaxpr alive, so an id cannot come to mean another one.
        opened, consts = _compat.open_jaxpr(jaxpr)
        key = id(opened), values, wanted, region
        if key not in self._plans:
            self._plans[key] = self._plan(opened, consts, values, wanted, region)
        return self._plans[key]

    def _plan(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        values: tuple[Value, ...],
        wanted: tuple[bool, ...],
        region: Region,
    ) -> Plan:
        known = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
        known |= dict(zip(jaxpr.invars, values, strict=True))

        def read(atom: Any) -> Value:
            return constant(atom.val) if isinstance(atom, Literal) else known[atom]

        stored = {
            atom
            for eqn in jaxpr.eqns
            if self._rule(eqn.primitive, eqn.params).stores
            for atom in eqn.invars
            if isinstance(atom, Var)
        }
        steps = []
        for eqn, eqn_wanted in zip(jaxpr.eqns, self._wanted(jaxpr, wanted, region)[0], strict=True):
            operands = tuple(map(read, eqn.invars))
            # A norm of low-precision data is float32, but what a product reads of it is stored in low precision. Where
            # it meets other data, as in a residual sum, float32 would only be stored a second time.
            meets = any(
                isinstance(atom, Var) and atom in stored and value.as_native().dtype != value.dtype
                for atom, value in zip(eqn.invars, operands, strict=True)
            )
            inner = self._enter(region, eqn)
            if rule := self._higher_order.get(eqn.primitive.name):
                step = rule.step(self, eqn, operands, eqn_wanted, inner)
            else:
                step = self._first_order(eqn, operands, all(eqn_wanted), meets, inner.low)
            steps.append(step)
            known |= dict(zip(eqn.outvars, step.outs, strict=True))
        return Plan(jaxpr, consts, known, steps, tuple(map(read, jaxpr.outvars)), region)

    def reads_full(self, jaxpr: Any, wanted: tuple[bool, ...], region: Region) -> tuple[bool, ...]:
        """Whether only float32 ops read each input of a jaxpr, given the same of its results."""
        return self._wanted(_compat.open_jaxpr(jaxpr)[0], wanted, region)[1]

    def _wanted(
        self, jaxpr: Jaxpr, wanted: tuple[bool, ...], region: Region
    ) -> tuple[list[tuple[bool, ...]], tuple[bool, ...]]:
        """Finds the values that only float32 ops read, through cheap ops that can be evaluated in float32 with them.

        Returns it for the results of each equation, and for the inputs.
        """
        key = id(jaxpr), wanted, region
        if key in self._readers:
            return self._readers[key]
        only_full: dict[Var, bool] = {}

        def reads(atoms: Sequence[Any], full: Sequence[bool]) -> None:
            for atom, f in zip(atoms, full, strict=True):
                if isinstance(atom, Var):
                    only_full[atom] = only_full.get(atom, True) and f

        reads(jaxpr.outvars, wanted)
        of_equations = []
        for eqn in reversed(jaxpr.eqns):
            outs = tuple(only_full.get(var, False) for var in eqn.outvars)
            of_equations.append(outs)
            inner = self._enter(region, eqn)
            if rule := self._higher_order.get(eqn.primitive.name):
                reads(eqn.invars, rule.reads_full(self, eqn, outs, inner))
            else:
                simple = self._rule(eqn.primitive, eqn.params)
                full = simple.op_class is OpClass.FULL or (simple.fuses and all(outs)) or inner.low == FLOAT32
                reads(eqn.invars, [full] * len(eqn.invars))
        inputs = tuple(only_full.get(var, False) for var in jaxpr.invars)
        self._readers[key] = of_equations[::-1], inputs
        return self._readers[key]

    def saves(self, primitive: Primitive, *_: Any, **params: Any) -> bool:
        """The policy of `jax.checkpoint` that keeps the results of low-precision products, and recomputes the rest."""
        return self._rule(primitive, params).op_class is OpClass.LOWER

    def _enter(self, region: Region, eqn: JaxprEqn) -> Region:
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

    def _rule(self, primitive: Primitive, params: Mapping[str, Any]) -> Rule:
        rule = self._rules.get(primitive.name, ORIGINAL)
        return rule if isinstance(rule, Rule) else rule(params)

    def _first_order(self, eqn: JaxprEqn, values: tuple[Value, ...], wanted: bool, meets: bool, low: np.dtype) -> Step:
        rule = self._rule(eqn.primitive, eqn.params) if low != FLOAT32 else ORIGINAL
        traced = [dtype_of(atom) == FLOAT32 for atom in eqn.invars]
        eligible = [value for value, is_float32 in zip(values, traced, strict=True) if is_float32]
        compared = [value.as_native() for value in eligible] if meets else eligible
        dtype = operand_dtype(rule, eqn, compared, wanted, low)
        casts = tuple(
            dtype if is_float32 and value.dtype != dtype else None
            for value, is_float32 in zip(values, traced, strict=True)
        )
        operands = tuple(dtype or value.dtype for value in eligible)
        params = params_for(rule, eqn, widest(operands)) if operands else {}
        cast_dtypes = [c or value.dtype for value, c in zip(values, casts, strict=True)]
        outs = results(rule, eqn, values, cast_dtypes, low)
        changed = differs(zip(eqn.invars, values, strict=True)) or differs(zip(eqn.outvars, outs, strict=True))
        is_product = rule.op_class is OpClass.LOWER and dtype == low
        # Each use of an input casts it for itself, so that the cotangents of a reused weight are summed in its own dtype.
        inputs = [
            isinstance(atom, Var) and value.origin is not Origin.COMPUTED
            for atom, value in zip(eqn.invars, values, strict=True)
        ]
        each = [cast if is_input else None for is_input, cast in zip(inputs, casts, strict=True)]
        op = Op(
            eqn.primitive,
            tuple((eqn.params | params).items()),
            tuple(each),
            broadcast_shape(rule, eqn),
            is_product and any(each) and self.options.weight_grad_dtype == FLOAT32,
        )
        shared = tuple(None if is_input else cast for is_input, cast in zip(inputs, casts, strict=True))
        return Step(eqn, shared, outs, op, changed)


def cast_results(fun: Callable[..., Sequence[Any]], outs: Sequence[Value]) -> Callable[..., list[Any]]:
    """Returns `fun` with its results in the dtypes of `outs`."""

    def cast(*args: Any) -> list[Any]:
        return [
            lax.convert_element_type(x, out.dtype) if jax.numpy.result_type(x) != out.dtype else x
            for x, out in zip(fun(*args), outs, strict=True)
        ]

    return cast

