"""Explains a call: the decisions of autocast, from its plan, and the ops of the backward pass, from the jaxpr."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._attention import Found
from jmp_amp._autocast._api import Settings, autocast_with, planner_of
from jmp_amp._autocast._plan import CastOp, Plan, Step
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._rewrites import Float8Product, why_not_float8
from jmp_amp._autocast._values import Origin, constant
from jmp_amp._calls import quote, shorten
from jmp_amp._formats import FLOAT32
from jmp_amp._modules import unbound
from jmp_amp._ops import RULES, OpClass, ResultKind, Rule, product_axes
from jmp_amp._products import FLOAT8_DOT, FLOAT8_RAGGED_DOT, RAGGED_DOT, padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpSite(jx.Site):
    """The dtypes that autocast chooses for an op, and why.

    Attributes:
        op_class: the class of the primitive, see `autocast`.
        why: the reason in a word or two, which `explain` prints with its meaning.
        begins: of a product in float32, the op where the reason begins, `"eigh at train.py:12 (whiten)"`; empty for
            other ops, and where it is the product itself.
        inputs: the dtypes of its floating operands before they are cast.
        compute: the dtype that they are cast to; two for a product of float8 operands of different dtypes.
        output: the dtype of its result.
        padding: what padding on CUDA devices makes of sizes of a product, `"50257 to 50264"`; empty for most.
        flops: floating-point operations of all runs, of products and convolutions only.
        bytes: the size of the results of all runs.
    """

    op_class: str
    why: str
    begins: str = ""
    inputs: tuple[str, ...]
    compute: str
    output: str
    padding: str
    flops: int
    bytes: int


# The steps of a plan and of the plans in it: the plan, the step, and its equation behind those around it.
Steps = Sequence[tuple[Plan, Step, Sequence[JaxprEqn]]]


def explain_call(
    fun: Callable,
    settings: Settings,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    argnums: int | Sequence[int] | None,
    beginnings: Callable[[Callable[[JaxprEqn], Rule], Plan, Steps], Callable[..., str]],
) -> dict[str, Any]:
    """Traces a call of `fun` under autocast and its gradient; nothing is compiled or run.

    Args:
        fun: any function that autocast takes.
        settings: those of autocast.
        args: the arguments; arrays may be `jax.ShapeDtypeStruct`.
        kwargs: likewise.
        argnums: the positional arguments whose floating arrays are differentiated; None for all arguments.
        beginnings: takes the rules, the plan and its steps; what it returns names the op where the reason for a product
            begins.

    Returns:
        The fields `rows`, `attention`, `casts`, `kept`, `scans` and `why_forward` of a `PrecisionReport`.
    """
    (fun, args), n_args = unbound(fun, args), len(args)
    chosen = range(len(args) + 1) if argnums is None else _positions(argnums, n_args, len(args) - n_args)
    calls: list[tuple[Plan, Sequence[Found]]] = []
    autocasted = autocast_with(fun, settings, lambda *call: calls.append(call))

    def call_and_pull(*args: Any, **kwargs: Any) -> Any:
        arrays, rebuild = jx.split_arrays((args, kwargs))
        arguments = [i for i, arg in enumerate((*args, kwargs)) for _ in jx.split_arrays(arg)[0]]  # keywords are last
        is_float = [jx.is_floating(x) and i in chosen for i, x in zip(arguments, arrays, strict=True)]

        def of_floats(*floats: Any) -> list[Any]:
            args, kwargs = rebuild(jx.combine(is_float, floats, arrays))
            return list(filter(jx.is_inexact, jx.split_arrays(autocasted(*args, **kwargs))[0]))

        out, pull = jax.vjp(of_floats, *compress(arrays, is_float))
        return out, pull([jnp.ones_like(x) for x in out])

    why_forward = ""
    try:
        program = jx.trace_call(call_and_pull, args, kwargs, jax.ShapeDtypeStruct)[0]
    except Exception as error:
        by = "all floating arguments" if argnums is None else f"the arguments {argnums}"
        if not jx.versions.has_no_derivative(error):
            error.add_note(f"`explain` differentiates with respect to {by}; others are chosen by `argnums`")
            raise
        program = jx.trace_call(autocasted, args, kwargs, jax.ShapeDtypeStruct)[0]
        what = shorten(str(error).strip().partition("\n")[0].rstrip("."))
        why_forward = f"with respect to {by} ({type(error).__name__}: {what})"
    whole, found = calls[-1]
    planner, equations = planner_of(settings.options), list(jx.equations_in(program))
    steps = list(_steps(whole))
    beginning = beginnings(planner.rule_of, whole, steps)
    forward = [
        _forward_site(planner, plan, step, eqns, beginning)
        for plan, step, eqns in steps
        if not step.inner and any(map(jx.is_inexact, (*step.eqn.invars, *step.eqn.outvars)))
    ]
    backward = [_backward_site(planner, eqns) for eqns in equations if jx.direction_of(eqns) != "forward"]
    casts = sum(jx.runs_of(eqns) for eqns in equations if _is_cast(eqns[-1]))
    lines = dict.fromkeys((step.keeper, jx.Site.at(eqns).source) for _, step, eqns in steps if step.keeper)
    scans = {keeper: [line for name, line in lines if name == keeper] for keeper, _ in lines}
    return {
        "rows": (*forward, *filter(None, backward)),
        "attention": tuple([each.site for each in found]),
        "casts": casts,
        "kept": None if why_forward else _kept(program),
        "scans": scans,
        "why_forward": why_forward,
    }


def _positions(argnums: int | Sequence[int], n: int, offset: int) -> set[int]:
    """Returns the positions of arguments among `n`, behind `offset` others."""
    numbers = [argnums] if isinstance(argnums, int) else list(argnums)
    if not all(isinstance(i, int) and -n <= i < n for i in numbers):
        raise ValueError(f"`argnums` must be positions of the {n} positional arguments, got {quote(argnums)}")
    return {i % n + offset for i in numbers}


def _steps(plan: Plan, *outer: JaxprEqn) -> Iterator[tuple[Plan, Step, Sequence[JaxprEqn]]]:
    """Yields the steps of a plan and of the plans in it: its plan, itself, and its equation behind those around it."""
    for step in plan.steps:
        yield plan, step, (*outer, step.eqn)
        for inner in step.inner:
            yield from _steps(inner, *outer, step.eqn)


def _forward_site(planner: Planner, plan: Plan, step: Step, eqns: Sequence[JaxprEqn], beginning: Callable) -> OpSite:
    eqn, rule, form = step.eqn, planner.rule_of(step.eqn), step.region.format
    forced = step.region.why
    values = [constant(atom.val) if isinstance(atom, Literal) else plan.values[atom] for atom in eqn.invars]
    each = step.run.casts if isinstance(step.run, CastOp) else (None,) * len(values)
    operands = [shared or own or value.dtype for shared, own, value in zip(step.casts, each, values, strict=True)]
    is_float = list(map(jx.is_inexact, eqn.invars))
    results = [(var, value.dtype) for var, value in zip(eqn.outvars, step.outs, strict=True)]
    compute = _widest([*compress(operands, is_float)] or [dtype for var, dtype in results if jx.is_inexact(var)])
    if form.float8 is not None and rule.op_class is OpClass.LOWER and compute == form.dtype:
        forced = why_not_float8(eqn, [value.origin <= Origin.INPUT for value in values], form.float8) or forced
    if isinstance(step.run, CastOp) and isinstance(step.run.rewrite, Float8Product):
        compute = step.run.rewrite.float8.operands
    why = step.why
    if eqn.primitive.name in planner.options.overrides.primitives:
        why = "override"
    elif eqn.primitive.name not in RULES and eqn.invars:  # `iota` reads nothing that could be cast
        why = "opaque" if planner.hides_products(eqn) else "unknown"
    elif rule.is_kernel:
        why = "kernel"
    elif rule.kind is ResultKind.QUOTIENT and _has_small_divisor(planner, plan, eqn.invars):
        why = "small divisor"
    inputs = [value.dtype for value in compress(values, is_float)]
    site = dataclasses.replace(jx.Site.at(eqns), direction="forward")  # also of a gradient in the program
    why = forced or why
    begins = beginning(eqns, why, form.dtype) if rule.is_product and compute == FLOAT32 else ""
    return dataclasses.replace(_op_site(site, eqn, rule, why, inputs, str(compute), results), begins=begins)


def _has_small_divisor(planner: Planner, plan: Plan, operands: Sequence[Any]) -> bool:
    """Whether a quotient is of a float16 value and of a number that a small constant keeps from 0.

    The derivative in the value is 1 / constant where the number is 0, and is cast to float16.
    """
    value, divisor = operands
    if isinstance(value, Literal) or plan.values[value].dtype != jnp.float16:
        return False
    made = {var: step.eqn for step in plan.steps for var in step.eqn.outvars}
    while isinstance(divisor, Var) and (eqn := made.get(divisor)):
        rule = planner.rule_of(eqn)
        if rule.kind is ResultKind.SUM or eqn.primitive.name == "max":
            numbers = [float(x.val) for x in eqn.invars if isinstance(x, Literal) and np.ndim(x.val) == 0]
            return any(0 < x < float(jnp.finfo(jnp.float16).tiny) for x in numbers)
        divisor = eqn.invars[0] if rule.moves or rule.is_cast else None
    return False


def _backward_site(planner: Planner, eqns: Sequence[Any]) -> OpSite | None:
    eqn = eqns[-1]
    results = [(var, jx.dtype_of(var)) for var in eqn.outvars if jx.is_inexact(var)]
    if not results or jx.inner_jaxprs(eqn):
        return None
    inputs = [jx.dtype_of(atom) for atom in eqn.invars if jx.is_inexact(atom)]
    if eqn.primitive.name in (FLOAT8_DOT, FLOAT8_RAGGED_DOT):
        compute = " ".join(map(str, dict.fromkeys(eqn.params["operands"])))
    else:
        compute = str(_widest(inputs or [dtype for _, dtype in results]))
    return _op_site(jx.Site.at(eqns), eqn, planner.rule_of(eqn), "derivative", inputs, compute, results)


def _op_site(site: jx.Site, eqn: Any, rule: Rule, why: str, inputs: Any, compute: str, outs: Any) -> OpSite:
    """Returns the site of an op; `inputs` holds the dtypes of its floating operands, `outs` its results and theirs."""
    floating = [dtype for var, dtype in outs if jx.is_inexact(var)]
    output = _widest(floating) if floating else jx.dtype_of(eqn.outvars[0]) if eqn.outvars else ""
    chosen: dict[str, Any] = {"inputs": tuple(map(str, inputs)), "compute": compute, "output": str(output)}
    sizes = [math.prod(jx.shape_of(var) or ()) * getattr(dtype, "itemsize", 0) for var, dtype in outs]
    costs: dict[str, Any] = {"flops": site.runs * flops_of(eqn), "bytes": site.runs * sum(sizes)}
    chosen["padding"] = _padding(eqn, compute)
    return OpSite(**vars(site), op_class=rule.op_class.value, why=why, **chosen, **costs)


def _padding(eqn: Any, compute: str) -> str:
    """Returns the sizes of a product that are padded; `compute` is the dtype of its operands, or two."""
    if eqn.primitive.name not in ("dot_general", FLOAT8_DOT):
        return ""
    avals = [jx.with_dtype(atom.aval, jnp.dtype(compute.split()[0])) for atom in eqn.invars[:2]]
    zeros = padding(avals, eqn.params) or []
    sizes = [(aval.shape[axis], n) for aval, each in zip(avals, zeros, strict=False) for axis, n in each.items()]
    return ", ".join(f"{size} to {size + n}" for size, n in dict.fromkeys(sizes))


def flops_of(eqn: Any) -> int:
    """Returns the multiplications and additions of a product or convolution; memory limits all other ops."""
    if eqn.primitive.name == "conv_general_dilated":
        kernel, out_features = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec[0]
        return 2 * math.prod(eqn.outvars[0].aval.shape) * (math.prod(kernel) // max(kernel[out_features], 1))
    if eqn.primitive.name not in ("dot_general", FLOAT8_DOT, RAGGED_DOT, FLOAT8_RAGGED_DOT):
        return 0
    contracting, _, groups = product_axes(eqn.params)
    sums_rows = "ragged_dot_dimension_numbers" in eqn.params and not groups[1]  # each group its own
    sizes = eqn.outvars[0].aval.shape[1 if sums_rows else 0 :]
    return 2 * math.prod([*sizes, *[eqn.invars[0].aval.shape[i] for i in contracting[0]]])


def _widest(dtypes: Sequence[Any]) -> np.dtype:
    """Returns the dtype with the most bits."""
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def _kept(program: Any) -> dict[str, int]:
    eqns = jx.open_jaxpr(program)[0].eqns
    is_late = [jx.is_backward(eqn.source_info.name_stack) for eqn in eqns]
    read = {atom for eqn in compress(eqns, is_late) for atom in eqn.invars if isinstance(atom, Var)}
    saved = [var for eqn, late in zip(eqns, is_late, strict=True) if not late for var in eqn.outvars if var in read]
    kept: Counter[str] = Counter()
    for var in filter(jx.is_inexact, saved):
        kept[str(jx.dtype_of(var))] += jx.nbytes_of(var)
    return dict(kept)


def _is_cast(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "convert_element_type" and all(map(jx.is_floating, (*eqn.invars, *eqn.outvars)))
