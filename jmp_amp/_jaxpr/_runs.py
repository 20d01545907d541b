"""Runs equations that hold jaxprs, with other functions in place of the jaxprs."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_amp._jaxpr._atoms import shape_of
from jmp_amp._jaxpr._structures import scan, while_loop
from jmp_amp._jaxpr._tracing import bind, hoist_consts
from jmp_amp._jaxpr._versions import open_jaxpr


class Traceable(Protocol):
    """A function that caches its traces by the types of its arguments."""

    def __call__(self, *args: Any) -> Sequence[Any]: ...

    def trace(self, args: Sequence[Any]) -> Any:
        """Returns the function as a closed jaxpr."""


def run_inline(eqn: JaxprEqn, funs: Sequence[Traceable], args: Sequence[Any]) -> Sequence[Any]:
    return funs[0](*args)


def run_jit(eqn: JaxprEqn, funs: Sequence[Traceable], args: Sequence[Any]) -> Sequence[Any]:
    return bind(eqn, args, jaxpr=funs[0].trace(args))


def run_remat(eqn: JaxprEqn, funs: Sequence[Traceable], args: Sequence[Any]) -> Sequence[Any]:
    # A parameter says whether this is a recomputation; `jax.checkpoint` has no argument for it.
    jaxpr, consts = hoist_consts(funs[0].trace(args), args)
    prevent_cse = eqn.params["prevent_cse"]
    if isinstance(prevent_cse, tuple):  # one for each operand
        prevent_cse = (False,) * len(consts) + prevent_cse
    return bind(eqn, [*consts, *args], jaxpr=jaxpr, prevent_cse=prevent_cse)


def run_shard_map(eqn: JaxprEqn, funs: Sequence[Traceable], args: Sequence[Any]) -> Sequence[Any]:
    options = {name: eqn.params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    axis_names = set(eqn.params["newly_manual_axes"])
    return jax.shard_map(lambda *args: tuple(funs[0](*args)), axis_names=axis_names, **options)(*args)


def run_cond(eqn: JaxprEqn, funs: Sequence[Traceable], args: Sequence[Any]) -> Sequence[Any]:
    index, *operands = args
    if "branches_platforms" not in eqn.params:
        return lax.switch(index, funs, *operands)
    # The index is that of the platform. Branches for other platforms may not compile on this one.
    platforms = zip(eqn.params["branches_platforms"], funs, strict=True)
    by_name = {name: branch for names, branch in platforms for name in names or ("default",)}
    return lax.platform_dependent(*operands, **by_name)


def run_scan(eqn: JaxprEqn, funs: Sequence[Traceable], args: Sequence[Any]) -> Sequence[Any]:
    loop = scan(eqn)
    xs = list(args[loop.xs])

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = list(funs[0](*args[loop.consts], *carry, *x))
        return results[: loop.n_carry], results[loop.n_carry :]

    length = None if xs else loop.length  # `lax.scan` takes no symbolic length
    options = {name: eqn.params[name] for name in ("reverse", "unroll")}
    carry, ys = lax.scan(body, list(args[loop.carry]), xs, length, **options)
    return [*carry, *ys]


def run_while(eqn: JaxprEqn, funs: Sequence[Traceable], args: Sequence[Any]) -> Sequence[Any]:
    loop, (cond, body) = while_loop(eqn), funs

    def goes_on(carry: Sequence[Any]) -> Any:
        return cond(*args[loop.cond_consts], *carry)[0]

    def step(carry: Sequence[Any]) -> list[Any]:
        return list(body(*args[loop.consts], *carry))

    def step_where_it_goes_on(carry: Sequence[Any]) -> list[Any]:
        """Under `vmap` each element has a predicate; those that are done stay as they are."""
        go, new = goes_on(carry), step(carry)
        return [
            lax.select(lax.broadcast_in_dim(go, jnp.shape(x), range(go.ndim)), x, old)
            for x, old in zip(new, carry, strict=True)
        ]

    init = list(args[loop.carry])
    if shape_of(open_jaxpr(loop.cond)[0].outvars[0]) == ():
        return lax.while_loop(goes_on, step, init)
    return lax.while_loop(lambda carry: jnp.any(goes_on(carry)), step_where_it_goes_on, init)
