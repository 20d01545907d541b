"""Explains a call: the decisions of autocast, from its plan, and the ops of the backward pass, from the jaxpr."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Var

from jmp_amp._autocast._api import Settings, autocast_with, planner_of
from jmp_amp._autocast._forward_sites import forward_sites
from jmp_amp._autocast._nnx import unbound
from jmp_amp._autocast._op_site import OpSite, flops_of, widest_of
from jmp_amp._autocast._plan import Plan
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._provenance import TOP, Provenance, equations_in
from jmp_amp._float8 import PRIMITIVE
from jmp_amp._jaxpr import (
    dtype_of,
    has_no_derivative,
    holds_jaxprs,
    is_backward,
    is_floating,
    is_recomputed,
    open_jaxpr,
    split_arrays,
)


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
    avals = [atom.aval for atom in eqn.invars]
    inputs = [dtype_of(atom) for atom in eqn.invars if is_floating(atom)]
    return OpSite(
        "recomputed" if is_recomputed(provenance.stack) else "backward",
        provenance.module,
        provenance.source,
        eqn.primitive.name,
        planner.rule(eqn.primitive, eqn.params, avals).op_class.value,
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
