"""The op sites of the forward pass, read from a plan."""

import math
from collections.abc import Iterator
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from jmp_amp._autocast._op import Op
from jmp_amp._autocast._op_site import OpSite, flops_of, widest_of
from jmp_amp._autocast._plan import Plan, Step
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._provenance import Provenance
from jmp_amp._autocast._regions import format_in
from jmp_amp._autocast._rewrites import Float8Product, why_not_float8
from jmp_amp._autocast._rule import OpClass
from jmp_amp._autocast._rules import RULES
from jmp_amp._autocast._values import Origin, Value, constant
from jmp_amp._formats import AS_TRACED, FORMATS, Format
from jmp_amp._jaxpr import dtype_of, is_floating, is_reference, shape_of


def forward_sites(planner: Planner, plan: Plan, top: Format, outer: Provenance, forced: str | None) -> Iterator[OpSite]:
    """Yields the op sites of a plan and of the plans inside it.

    Args:
        planner: the planner that made the plan.
        plan: the plan.
        top: the format of the whole program.
        outer: the provenance of the equation that holds the plan; `TOP` for the program.
        forced: why all of it runs in another format than `top`; None if it does not.
    """
    for step in plan.steps:
        eqn = step.eqn
        region, provenance, why = planner.enter(plan.region, eqn), outer.of(eqn), forced
        if plan.region.format is AS_TRACED:
            pass  # marks and patterns have no effect there
        elif format_in(eqn.source_info.name_stack) is not None:
            why = "region"
        elif planner.options.overrides.matching(region.path):
            why = "pattern"
        elif step.as_traced is not None:
            why, region = step.as_traced, region._replace(format=FORMATS["float32"])
        for inner, runs in step.inner:
            if inner.region.format is not AS_TRACED:
                inside = why
            else:
                inside = "reference" if any(map(is_reference, eqn.invars)) else "decomposition"
            yield from forward_sites(planner, inner, top, provenance._replace(times=provenance.times * runs), inside)
        if not step.inner and any(map(is_floating, (*eqn.invars, *eqn.outvars))):
            yield _forward_site(
                planner, plan, step, region.format, provenance, why if region.format is not top else None
            )


def _forward_site(
    planner: Planner, plan: Plan, step: Step, form: Format, provenance: Provenance, forced: str | None
) -> OpSite:
    eqn, times = step.eqn, provenance.times
    values = [constant(atom.val) if isinstance(atom, Literal) else plan.values[atom] for atom in eqn.invars]
    each = step.run.casts if isinstance(step.run, Op) else (None,) * len(values)
    operands = [shared or own or value.dtype for shared, own, value in zip(step.casts, each, values, strict=True)]
    floating = [i for i, atom in enumerate(eqn.invars) if is_floating(atom)]
    outputs = [value.dtype for value, var in zip(step.outs, eqn.outvars, strict=True) if is_floating(var)]
    compute = widest_of([operands[i] for i in floating] or outputs)
    rule = planner.rule_of(eqn)
    if form.float8 is not None and rule.op_class is OpClass.LOWER and compute == form.dtype:
        forced = why_not_float8(eqn, [value.origin <= Origin.INPUT for value in values], form.float8) or forced
    if isinstance(step.run, Op) and isinstance(step.run.rewrite, Float8Product):
        compute = step.run.rewrite.float8.operands
    return OpSite(
        "forward",
        provenance.module,
        provenance.source,
        eqn.primitive.name,
        rule.op_class.value,
        forced or _of_rules(planner, eqn) or step.why,
        tuple(str(values[i].dtype) for i in floating),
        str(compute),
        str(widest_of(outputs)) if outputs else str(dtype_of(eqn.outvars[0])) if eqn.outvars else "",
        times,
        times * flops_of(eqn),
        times * sum(math.prod(shape_of(v) or ()) * o.dtype.itemsize for v, o in _results(eqn, step)),
    )


def _results(eqn: JaxprEqn, step: Step) -> Iterator[tuple[Any, Value]]:
    return ((v, o) for v, o in zip(eqn.outvars, step.outs, strict=True) if hasattr(o.dtype, "itemsize"))


def _of_rules(planner: Planner, eqn: JaxprEqn) -> str | None:
    """Returns what explains an op whose class is not that of the table; None if it is."""
    name = eqn.primitive.name
    if name in planner.options.overrides.primitives:
        return "override"
    if name in RULES:
        return None
    return "opaque" if planner.hides_products(eqn) else "unknown"
