"""Explains a call: the decisions of autocast, from its plan, and the ops of the backward pass, from the jaxpr."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from jmp_amp._autocast._api import Settings, autocast_with, planner_of
from jmp_amp._autocast._options import format_in
from jmp_amp._autocast._plan import Op, Plan, Step
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._primitives import RULES, OpClass
from jmp_amp._autocast._rewrites import Float8Product, why_not_float8
from jmp_amp._autocast._values import Origin, Value, constant
from jmp_amp._float8 import PRIMITIVE
from jmp_amp._formats import AS_TRACED, FORMATS, Format
from jmp_amp._jaxpr import (
    TOP,
    Provenance,
    dtype_of,
    equations_in,
    has_no_derivative,
    holds_jaxprs,
    is_backward,
    is_floating,
    is_recomputed,
    is_reference,
    open_jaxpr,
    shape_of,
    split_arrays,
)
from jmp_amp._modules import unbound


class OpSite(NamedTuple):
    """An op of the program at one place in the code.

    Attributes:
        direction: `"forward"`, `"backward"`, or `"recomputed"` for the backward pass.
        module: the named scopes around it, such as the modules of Flax and Haiku.
        source: the file and line that it comes from, and the function there.
        primitive: its name in a jaxpr.
        op_class: the class of the primitive, see `autocast`.
        why: a key of `REASONS`.
        inputs: the dtypes of its floating operands before they are cast.
        compute: the dtype that they are cast to; two for a product of float8 operands of different dtypes.
        output: the dtype of its result.
        runs: how often it runs; a `while_loop` counts as one iteration, and of a `cond` each branch counts.
        flops: floating-point operations of all runs, of products and convolutions only.
        bytes: the size of the results of all runs.
    """

    direction: str
    module: str
    source: str
    primitive: str
    op_class: str
    why: str
    inputs: tuple[str, ...]
    compute: str
    output: str
    runs: int
    flops: int
    bytes: int


REASONS = {
    "rule": "the class of its primitive",
    "bias": "a bias does not widen a product, nor a scalar an array",
    "stream": "it is a part of a residual stream, which `residual_stream` asks to be low",
    "angle": "only sines and cosines read its result",
    "distance": "a term of a squared distance or of a variance, which cancels with the others",
    "decomposition": "a matrix decomposition or a solver reads its result",
    "solution": "it reads what a decomposition or a solver returned",
    "recurrence": "a loop replaces a carry with products and sums of it",
    "logarithm": "a logarithm reads its result, which may be smaller or larger than float16 holds",
    "edge": "its result is read at the edge of a domain, where the slope is infinite, as by `acos`",
    "count": "it counts: both operands come from comparisons or integers",
    "reference": "it is in a function with a custom derivative and a reference to an array, which JAX runs",
    "loop": "it decides when a loop ends",
    "constant": "it reads a constant that the low dtype cannot hold, or a value computed from one",
    "readers": "all readers of its result read float32, and it fuses with them",
    "no matrix product": "float8 is for products of two matrices, not for convolutions or batches of products",
    "no weight": "float8 is for products with a weight, which is an argument of the function",
    "multiple": "the sizes of a float8 product are multiples of 16",
    "size": "the product is too small to gain by float8",
    "precision": "the program asks for float32 by `precision`",
    "region": "it is in a region: `full_precision` or `precision(dtype)`",
    "pattern": "its scope matches a pattern in `rules`",
    "override": "`rules` gives its primitive another class",
    "traced": "the op, or an operand, was traced in another dtype than float32",
    "unknown": "no rule for this primitive: it runs in the dtypes that it was traced in",
    "opaque": "no rule for this primitive: the products in it stay as they were traced",
    "derivative": "JAX derives it from the forward pass",
}


def widest_of(dtypes: Sequence[Any]) -> np.dtype:
    """Returns the floating dtype with the most bits."""
    return max(dtypes, key=lambda dtype: jnp.finfo(dtype).bits)


def flops_of(eqn: Any) -> int:
    """Returns the multiplications and additions of a product or convolution; memory limits all other ops."""
    if eqn.primitive.name in ("dot_general", PRIMITIVE):
        (contracting, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(eqn.invars[0].aval.shape[i] for i in contracting)
    elif eqn.primitive.name == "conv_general_dilated":
        kernel, out_features = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec[0]
        terms = math.prod(kernel) // max(kernel[out_features], 1)
    else:
        return 0
    return 2 * math.prod(eqn.outvars[0].aval.shape) * terms


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


class Explanation(NamedTuple):
    """The ops of a program.

    Attributes:
        sites: all op sites.
        casts: how often a floating value is cast to another floating dtype.
        kept: the bytes of the residuals, which the backward pass reads, by dtype and without arguments. None if the
            program has no derivative.
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
    plans: list[Plan] = []
    autocasted = autocast_with(fun, settings, plans.append)
    arrays, rebuild = split_arrays((args, kwargs), jax.ShapeDtypeStruct)
    is_float = [jnp.issubdtype(x.dtype, jnp.floating) for x in arrays]

    def call(*arrays: Any) -> list[Any]:
        args, kwargs = rebuild(arrays)
        return split_arrays(autocasted(*args, **kwargs))[0]

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
    planner, plan = planner_of(settings.options), plans[0]
    equations = list(equations_in(program, TOP))
    backward = [
        _backward_site(planner, eqn, provenance) for eqn, provenance in equations if is_backward(provenance.stack)
    ]
    sites = [*forward_sites(planner, plan, settings.format, TOP, None), *filter(None, backward)]
    casts = sum(provenance.times for eqn, provenance in equations if _is_cast(eqn))
    return Explanation(sites, casts, _kept(program) if differentiable else None)


def _backward_site(planner: Planner, eqn: Any, provenance: Provenance) -> OpSite | None:
    times = provenance.times
    outputs = [dtype_of(var) for var in eqn.outvars if is_floating(var)]
    if not outputs or holds_jaxprs(eqn):
        return None
    inputs = [dtype_of(atom) for atom in eqn.invars if is_floating(atom)]
    return OpSite(
        "recomputed" if is_recomputed(provenance.stack) else "backward",
        provenance.module,
        provenance.source,
        eqn.primitive.name,
        planner.rule_of(eqn).op_class.value,
        "derivative",
        tuple(map(str, inputs)),
        _computed_in(eqn, inputs or outputs),
        str(widest_of(outputs)),
        times,
        times * flops_of(eqn),
        times * sum(math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in eqn.outvars if is_floating(var)),
    )


def _computed_in(eqn: JaxprEqn, dtypes: Sequence[Any]) -> str:
    if eqn.primitive.name == PRIMITIVE:
        return " ".join(map(str, dict.fromkeys(eqn.params["operands"])))
    return str(widest_of(dtypes))


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
