"""Runs equations that hold jaxprs, with other functions in place of the jaxprs."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import JaxprEqn

from jmp_amp._jaxpr._tracing import bind, hoist_consts, trace
from jmp_amp._jaxpr._versions import hi_kind, hi_primitive, open_jaxpr, params_of, with_params


class Body:
    """A function in place of a jaxpr. It is traced once, so JAX compiles, differentiates and batches it once."""

    def __init__(self, fun: Callable[..., Sequence[Any]], avals: Sequence[Any]) -> None:
        """Takes a flat function, and the types of its arguments."""
        self._fun, self._avals = fun, avals

    def __call__(self, *args: Any) -> Sequence[Any]:
        return self._fun(*args)

    @functools.cached_property
    def jaxpr(self) -> Any:
        """The function as a closed jaxpr."""
        return trace(self._fun, self._avals)


Run = Callable[[JaxprEqn, Sequence[Body], Sequence[Any]], Sequence[Any]]


def run_inline(eqn: JaxprEqn, bodies: Sequence[Body], args: Sequence[Any]) -> Sequence[Any]:
    return bodies[0](*args)


def run_with(*params: str) -> Run:
    """Returns a function that binds the primitive again, with new jaxprs as these parameters.

    All other parameters stay as they are, those that future versions of JAX add too.
    """

    def run(eqn: JaxprEqn, bodies: Sequence[Body], args: Sequence[Any]) -> Sequence[Any]:
        return bind(eqn, args, **{param: body.jaxpr for param, body in zip(params, bodies, strict=True)})

    return run


def run_cond(eqn: JaxprEqn, bodies: Sequence[Body], args: Sequence[Any]) -> Sequence[Any]:
    return bind(eqn, args, branches=tuple(body.jaxpr for body in bodies))


def run_remat(eqn: JaxprEqn, bodies: Sequence[Body], args: Sequence[Any]) -> Sequence[Any]:
    jaxpr, consts = hoist_consts(bodies[0].jaxpr)
    new: dict[str, Any] = {"jaxpr": open_jaxpr(jaxpr)[0] if hi_primitive(eqn) is None else jaxpr}
    prevent_cse = params_of(eqn).get("prevent_cse")
    if isinstance(prevent_cse, tuple):  # one for each operand
        new["prevent_cse"] = (False,) * len(consts) + prevent_cse
    return bind(with_params(eqn, **new), [*consts, *args])


def run_hi_primitive(eqn: JaxprEqn, bodies: Sequence[Body], args: Sequence[Any]) -> Sequence[Any]:
    primitive = hi_primitive(eqn)
    match hi_kind(primitive):
        case "remat":
            return run_remat(eqn, bodies, args)
        case "name":
            return [type(primitive)(primitive.name, jax.typeof(args[0]))(args[0])]
    return bodies[0](*args)


def run_shard_map(eqn: JaxprEqn, bodies: Sequence[Body], args: Sequence[Any]) -> Sequence[Any]:
    # Its body is traced where the mesh axes are manual.
    options = {name: eqn.params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    axis_names = set(eqn.params["newly_manual_axes"])
    return jax.shard_map(lambda *args: tuple(bodies[0](*args)), axis_names=axis_names, **options)(*args)
