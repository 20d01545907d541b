"""What autocast decided, read from its plan, and what differentiation made of it, read from the jaxpr."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from jmp_amp._autocast._api import Settings, autocast_with
from jmp_amp._autocast._decisions import weighed
from jmp_amp._autocast._format import FLOAT32, FORMATS, Format
from jmp_amp._autocast._nnx import unbound
from jmp_amp._autocast._op import Op
from jmp_amp._autocast._op_site import OpSite
from jmp_amp._autocast._plan import Plan, Step
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._regions import format_in
from jmp_amp._autocast._rules import RULES, OpClass
from jmp_amp._autocast._values import Origin, Value, constant
from jmp_amp._jaxpr import (
    Frame,
    dtype_of,
    flat_call,
    frames_of,
    has_no_derivative,
    holds_jaxprs,
    inner_jaxprs,
    is_backward,
    is_floating,
    is_recomputed,
    open_jaxpr,
    scope_path,
    shape_of,
)


class Explanation(NamedTuple):
    """What a program does.

    Attributes:
        sites: all its op sites.
        casts: how often a floating value is cast to another floating dtype.
        kept: the bytes of what the backward pass reads of the forward pass, arguments aside, by dtype; None where there
            is no backward pass.
    """

    sites: list[OpSite]
    casts: int
    kept: dict[str, int] | None


def explain_call(fun: Callable, settings: Settings, args: Sequence[Any], kwargs: dict[str, Any]) -> Explanation:
    """Traces a call of `fun` under autocast and its gradient; nothing is compiled or run.

    Args:
        fun: any function that autocast takes.
        settings: those of autocast.
        args: the arguments, of which arrays may be `jax.ShapeDtypeStruct`.
        kwargs: likewise.
    """
    fun, args = unbound(fun, args)
    plans: list[tuple[Planner, Plan]] = []
    autocasted = autocast_with(fun, settings, lambda *plan: plans.append(plan))
    call, arrays = flat_call(autocasted, args, kwargs, jax.ShapeDtypeStruct)
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]

    def call_and_pull(*arrays: Any) -> Any:
        def of_floats(*floats: Any) -> list[Any]:
            it = iter(floats)
            out = call(*[next(it) if f else x for x, f in zip(arrays, is_float, strict=True)])
            return [x for x in out if jnp.issubdtype(x.dtype, jnp.inexact)]

        out, pull = jax.vjp(of_floats, *[x for x, f in zip(arrays, is_float, strict=True) if f])
        return out, pull([jnp.ones_like(x) for x in out])

    try:
        program, differentiable = jax.make_jaxpr(call_and_pull)(*arrays), True
    except Exception as error:
        if not has_no_derivative(error):
            raise
        plans.clear()
        program, differentiable = jax.make_jaxpr(call)(*arrays), False
    planner, plan = plans[0]
    equations = list(_equations(program, _TOP))
    backward = [_backward_site(planner, eqn, place) for eqn, place in equations if is_backward(place.stack)]
    sites = [*_forward_sites(planner, plan, settings.format, _TOP, None), *filter(None, backward)]
    casts = sum(place.times for eqn, place in equations if _is_cast(eqn))
    return Explanation(sites, casts, _kept(program) if differentiable else None)


class _Place(NamedTuple):
    """Where an equation stands: the names around it, the modules among them, its source, and how often it runs."""

    stack: str
    module: str
    source: str
    times: int

    def of(self, eqn: JaxprEqn) -> "_Place":
        # What JAX traced once for all its callers has no source of its own.
        names = eqn.source_info.name_stack
        frames = frames_of(eqn)
        source = _shown(frames[0]) if frames else self.source
        return _Place(f"{self.stack}/{names}", scope_path(self.module, names), source, self.times)


_TOP = _Place("", "", "", 1)


def _shown(frame: Frame) -> str:
    """The file, line and function of the user's code; no more of the path than its last folder."""
    file = "/".join(frame.file.replace(os.sep, "/").split("/")[-2:])
    return f"{file}:{frame.line} ({frame.function})"


def _forward_sites(planner: Planner, plan: Plan, top: Format, outer: _Place, forced: str | None) -> Iterator[OpSite]:
    for step in plan.steps:
        eqn = step.eqn
        region, place, why = planner.enter(plan.region, eqn), outer.of(eqn), forced
        if format_in(eqn.source_info.name_stack) is not None:
            why = "region"
        elif planner.options.overrides.matching(region.path):
            why = "pattern"
        elif step.as_traced is not None:
            why, region = step.as_traced, region._replace(format=FORMATS["float32"])
        for inner, runs in step.inner:
            yield from _forward_sites(planner, inner, top, place._replace(times=place.times * runs), why)
        if not step.inner and any(map(is_floating, (*eqn.invars, *eqn.outvars))):
            yield _forward_site(planner, plan, step, region.format, place, why if region.format is not top else None)


def _forward_site(planner: Planner, plan: Plan, step: Step, form: Format, place: _Place, forced: str | None) -> OpSite:
    eqn, times = step.eqn, place.times
    values = [constant(atom.val) if isinstance(atom, Literal) else plan.values[atom] for atom in eqn.invars]
    each = step.run.casts if isinstance(step.run, Op) else (None,) * len(values)
    operands = [shared or own or value.dtype for shared, own, value in zip(step.casts, each, values, strict=True)]
    floating = [i for i, atom in enumerate(eqn.invars) if is_floating(atom)]
    outputs = [value.dtype for value, var in zip(step.outs, eqn.outvars, strict=True) if is_floating(var)]
    compute = _widest([operands[i] for i in floating] or outputs)
    rule = planner.rule_of(eqn)
    read = weighed(rule, eqn, values)
    traced = [read[i] for i in floating if dtype_of(eqn.invars[i]) == FLOAT32]
    return OpSite(
        "forward",
        place.module,
        place.source,
        eqn.primitive.name,
        rule.op_class.value,
        forced or _why(planner, eqn, rule.op_class, traced, compute, form),
        tuple(str(values[i].dtype) for i in floating),
        str(compute),
        str(_widest(outputs)) if outputs else str(dtype_of(eqn.outvars[0])) if eqn.outvars else "",
        times,
        times * _flops(eqn),
        times * sum(math.prod(shape_of(v) or ()) * o.dtype.itemsize for v, o in _results(eqn, step)),
    )


def _results(eqn: JaxprEqn, step: Step) -> Iterator[tuple[Any, Value]]:
    return ((v, o) for v, o in zip(eqn.outvars, step.outs, strict=True) if hasattr(o.dtype, "itemsize"))


def _why(
    planner: Planner, eqn: JaxprEqn, op_class: OpClass, traced: Sequence[Value], compute: Any, form: Format
) -> str:
    """Why an op in no region computes in that dtype; `traced` are its operands that were traced in float32."""
    name = eqn.primitive.name
    if name in planner.options.overrides.primitives:
        return "override"
    if name not in RULES:
        return "unknown"
    if not traced and not any(dtype_of(var) == FLOAT32 for var in eqn.outvars):
        return "traced"
    if op_class is OpClass.ORIGINAL:
        return "precision" if name in ("dot_general", "conv_general_dilated", "ragged_dot_general") else "rule"
    if op_class is OpClass.FULL or not traced:
        return "rule"
    if op_class is OpClass.LOWER and compute != form.operands:
        return "constant" if any(value.keep_float32 or value.is_lost(form.operands) for value in traced) else "traced"
    arrays = [value for value in traced if value.origin is not Origin.SCALAR]
    if compute != FLOAT32:
        widened = op_class is OpClass.PROMOTE and any(value.dtype == FLOAT32 for value in traced)
        return "bias" if widened else "rule"
    is_low = bool(arrays) and all(value.dtype != FLOAT32 for value in arrays)
    if any(value.exceeds(form.results) or (is_low and not value.fits(form.results)) for value in traced):
        return "constant"
    return "readers" if is_low else "rule"


def _backward_site(planner: Planner, eqn: Any, place: _Place) -> OpSite | None:
    times = place.times
    outputs = [dtype_of(var) for var in eqn.outvars if is_floating(var)]
    if not outputs or holds_jaxprs(eqn):
        return None
    avals = [atom.aval for atom in eqn.invars]
    inputs = [dtype_of(atom) for atom in eqn.invars if is_floating(atom)]
    return OpSite(
        "recomputed" if is_recomputed(place.stack) else "backward",
        place.module,
        place.source,
        eqn.primitive.name,
        planner.rule(eqn.primitive, eqn.params, avals).op_class.value,
        "derivative",
        tuple(map(str, inputs)),
        str(_widest(inputs or outputs)),
        str(_widest(outputs)),
        times,
        times * _flops(eqn),
        times * sum(math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in eqn.outvars if is_floating(var)),
    )


def _equations(jaxpr: Any, outer: _Place) -> Iterator[tuple[JaxprEqn, _Place]]:
    """All equations, those inside other equations included."""
    for eqn in open_jaxpr(jaxpr)[0].eqns:
        place = outer.of(eqn)
        yield eqn, place
        for inner, times in inner_jaxprs(eqn):
            yield from _equations(inner, place._replace(times=place.times * times))


def _kept(program: Any) -> dict[str, int]:
    made, read = set[Any](), set[Any]()
    for eqn in open_jaxpr(program)[0].eqns:
        if is_backward(eqn.source_info.name_stack):
            read.update(atom for atom in eqn.invars if isinstance(atom, Var))
        else:
            made.update(eqn.outvars)
    kept: Counter[str] = Counter()
    for var in filter(is_floating, made & read):
        kept[str(dtype_of(var))] += math.prod(var.aval.shape) * var.aval.dtype.itemsize
    return dict(kept)


def _is_cast(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "convert_element_type" and all(map(is_floating, (*eqn.invars, *eqn.outvars)))


def _widest(dtypes: Sequence[Any]) -> np.dtype:
    return max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits)


def _flops(eqn: Any) -> int:
    """Multiplications and additions of a product or convolution; other ops are limited by memory."""
    if eqn.primitive.name == "dot_general":
        (contracting, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(eqn.invars[0].aval.shape[i] for i in contracting)
    elif eqn.primitive.name == "conv_general_dilated":
        kernel, out_features = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec[0]
        terms = math.prod(kernel) // max(kernel[out_features], 1)
    else:
        return 0
    return 2 * math.prod(eqn.outvars[0].aval.shape) * terms
