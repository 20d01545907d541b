"""What autocast decided for each op of a plan, which `explain` reports."""

from collections.abc import Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn, Literal

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._plan import CastOp, Plan, Step
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._rewrites import Float8Product, why_not_float8
from jmp_amp._autocast._values import Origin, constant
from jmp_amp._ops import RULES, OpClass

# The steps of a plan and of the plans in it: the plan, the step, and its equation behind those around it.
Steps = Sequence[tuple[Plan, Step, Sequence[JaxprEqn]]]


class Decision(NamedTuple):
    """What autocast decided for an op.

    Attributes:
        inputs: the dtypes of its floating operands before they are cast.
        operands: the dtypes that they are cast to.
        results: the dtypes of its results.
        why: the reason, as in `OpSite.why`.
    """

    inputs: Sequence[Any]
    operands: Sequence[Any]
    results: Sequence[Any]
    why: str


def steps_of(plan: Plan, *outer: JaxprEqn) -> Iterator[tuple[Plan, Step, Sequence[JaxprEqn]]]:
    """Yields the steps of a plan and of the plans in it: its plan, itself, and its equation behind those around it."""
    for step in plan.steps:
        yield plan, step, (*outer, step.eqn)
        for inner in step.inner:
            yield from steps_of(inner, *outer, step.eqn)


def decision_of(planner: Planner, plan: Plan, step: Step) -> Decision:
    """Returns what was decided for a step of a plan; it holds no other plan."""
    eqn, rule, form, why = step.eqn, planner.rule_of(step.eqn), step.region.format, step.region.why
    values = [constant(atom.val) if isinstance(atom, Literal) else plan.values[atom] for atom in eqn.invars]
    each = step.run.casts if isinstance(step.run, CastOp) else (None,) * len(values)
    dtypes = [shared or own or value.dtype for shared, own, value in zip(step.casts, each, values, strict=True)]
    is_float = list(map(jx.is_inexact, eqn.invars))
    operands = [*compress(dtypes, is_float)]
    if form.float8 is not None and rule.op_class is OpClass.LOWER and {*operands} == {form.dtype}:
        why = why_not_float8(eqn, [value.origin <= Origin.INPUT for value in values], form.float8) or why
    if isinstance(step.run, CastOp) and isinstance(step.run.rewrite, Float8Product):
        operands = [step.run.rewrite.float8.operands]
    if eqn.primitive.name in planner.options.overrides.primitives:
        why = why or "override"
    elif eqn.primitive.name not in RULES and eqn.invars:  # `iota` reads nothing that could be cast
        why = why or ("opaque" if planner.hides_products(eqn) else "unknown")
    elif rule.is_kernel:
        why = why or "kernel"
    inputs = [value.dtype for value in compress(values, is_float)]
    return Decision(inputs, operands, [value.dtype for value in step.outs], why or step.why)
