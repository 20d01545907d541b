"""The registry of primitives that hold jaxprs: how each is entered, run again with other functions, and counted.

A new one is one entry of `HIGHER_ORDER`; all that reads or runs jaxprs then knows it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, jaxprs_in_params

from jmp_amp._jaxpr._atoms import shape_of
from jmp_amp._jaxpr._tracing import bind, hoist_consts
from jmp_amp._jaxpr._versions import open_jaxpr, scan_sizes


class Call(NamedTuple):
    """An equation that runs one jaxpr once.

    Attributes:
        jaxpr: its results are those of the equation.
        operands: the places of the operands of the equation that are its inputs.
        is_inline: whether the jaxpr can be evaluated in the place of the equation: not that of `shard_map`, which runs
            on shards.
    """

    jaxpr: Any
    operands: Sequence[int]
    is_inline: bool = True


class Branches(NamedTuple):
    """An equation that runs one of several jaxprs; its first operand is the index.

    Attributes:
        jaxprs: the branches.
        operands: the places of the operands of the equation that are the inputs of each.
    """

    jaxprs: Sequence[Any]
    operands: Sequence[int]


class Loop(NamedTuple):
    """An equation that runs one jaxpr again and again.

    The inputs of the body are constants, carries and, of a `scan`, slices; its results are carries and slices.

    Attributes:
        body: the jaxpr.
        consts: the operands of the equation that are the constants of the body.
        carry: the operands that are the first carries.
        xs: the operands of which it reads a slice in each iteration.
        length: how many iterations there are; None if only the values tell.
        cond: of a `while`, the jaxpr that tells whether there is another iteration: of its constants, and the carries.
        cond_consts: the operands that are the constants of `cond`.
    """

    body: Any
    consts: slice
    carry: slice
    xs: slice
    length: Any = None
    cond: Any = None
    cond_consts: slice = slice(0)

    @property
    def n_consts(self) -> int:
        """How many constants the body has."""
        return self.consts.stop - self.consts.start

    @property
    def n_carry(self) -> int:
        """How many values are carried."""
        return self.carry.stop - self.carry.start


Structure = Call | Branches | Loop


class Traceable(Protocol):
    """A function that can also be traced, once for the same types."""

    def __call__(self, *args: Any) -> Sequence[Any]: ...

    def trace(self, args: Sequence[Any]) -> Any:
        """Returns the function as a closed jaxpr."""


class HigherOrder(NamedTuple):
    """What is known of a primitive that holds jaxprs.

    Attributes:
        enter: returns the jaxprs of an equation, and which operands they read.
        run: evaluates an equation with other functions in the place of its jaxprs: one for each branch, or for the
            condition of a loop, if it has one, and for its body. None if this cannot be done.
        keeps_inputs: whether the equation keeps its operands for the backward pass.
    """

    enter: Callable[[JaxprEqn], Structure]
    run: Callable[[JaxprEqn, Sequence[Traceable], Sequence[Any]], Sequence[Any]] | None = None
    keeps_inputs: bool = False


def structure_of(eqn: JaxprEqn) -> Structure | None:
    """Returns how an equation holds jaxprs; None for one that holds none, or for an unknown primitive."""
    entry = HIGHER_ORDER.get(eqn.primitive.name)
    return None if entry is None else entry.enter(eqn)


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[tuple[Any, Any]]:
    """Yields all jaxprs in the parameters of any equation, and how often each runs; once where that is not known."""
    structure = structure_of(eqn)
    times = structure.length if isinstance(structure, Loop) and structure.length is not None else 1
    for inner in jaxprs_in_params(eqn.params):
        yield inner, times


def holds_jaxprs(eqn: JaxprEqn) -> bool:
    """Whether there is a jaxpr in the parameters of an equation."""
    return next(jaxprs_in_params(eqn.params), None) is not None


def _call(param: str, is_inline: bool = True) -> Callable[[JaxprEqn], Call]:
    return lambda eqn: Call(eqn.params[param], range(len(eqn.invars)), is_inline)


def _enter_cond(eqn: JaxprEqn) -> Branches:
    return Branches(eqn.params["branches"], range(1, len(eqn.invars)))


def _enter_scan(eqn: JaxprEqn) -> Loop:
    n_consts, n_carry = scan_sizes(eqn)
    first, last = n_consts + n_carry, len(eqn.invars)
    return Loop(
        eqn.params["jaxpr"], slice(0, n_consts), slice(n_consts, first), slice(first, last), eqn.params["length"]
    )


def _enter_while(eqn: JaxprEqn) -> Loop:
    n_cond, n_body, last = eqn.params["cond_nconsts"], eqn.params["body_nconsts"], len(eqn.invars)
    consts, carry = slice(n_cond, n_cond + n_body), slice(n_cond + n_body, last)
    cond = eqn.params["cond_jaxpr"]
    return Loop(eqn.params["body_jaxpr"], consts, carry, slice(last, last), None, cond, slice(0, n_cond))


def _enter_linear_solve(eqn: JaxprEqn) -> Call:
    """`lax.custom_linear_solve`: what computes the result; its derivatives are those of the equation that it solves."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    first, end = lengths.matvec + lengths.vecmat, sum(n or 0 for n in lengths)
    return Call(jaxprs.solve, [*range(first, first + lengths.solve), *range(end, len(eqn.invars))])


def _run_inline(eqn: JaxprEqn, funs: Sequence[Traceable], args: Sequence[Any]) -> Sequence[Any]:
    return funs[0](*args)


def _run_jit(eqn: JaxprEqn, funs: Sequence[Traceable], args: Sequence[Any]) -> Sequence[Any]:
    return bind(eqn, args, jaxpr=funs[0].trace(args))


def _run_remat(eqn: JaxprEqn, funs: Sequence[Traceable], args: Sequence[Any]) -> Sequence[Any]:
    # The parameters say whether this is a recomputation; `jax.checkpoint` cannot be told.
    jaxpr, consts = hoist_consts(funs[0].trace(args), args)
    prevent_cse = eqn.params["prevent_cse"]
    if isinstance(prevent_cse, tuple):  # one for each operand
        prevent_cse = (False,) * len(consts) + prevent_cse
    return bind(eqn, [*consts, *args], jaxpr=jaxpr, prevent_cse=prevent_cse)


def _run_shard_map(eqn: JaxprEqn, funs: Sequence[Traceable], args: Sequence[Any]) -> Sequence[Any]:
    options = {name: eqn.params[name] for name in ("mesh", "in_specs", "out_specs", "check_vma")}
    axis_names = set(eqn.params["newly_manual_axes"])
    return jax.shard_map(lambda *args: tuple(funs[0](*args)), axis_names=axis_names, **options)(*args)


def _run_cond(eqn: JaxprEqn, funs: Sequence[Traceable], args: Sequence[Any]) -> Sequence[Any]:
    index, *operands = args
    if "branches_platforms" not in eqn.params:
        return lax.switch(index, funs, *operands)
    # The index is that of the platform; the branches for other platforms may not even compile on this one.
    platforms = zip(eqn.params["branches_platforms"], funs, strict=True)
    by_name = {name: branch for names, branch in platforms for name in names or ("default",)}
    return lax.platform_dependent(*operands, **by_name)


def _run_scan(eqn: JaxprEqn, funs: Sequence[Traceable], args: Sequence[Any]) -> Sequence[Any]:
    loop = _enter_scan(eqn)
    xs = list(args[loop.xs])

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = list(funs[0](*args[loop.consts], *carry, *x))
        return results[: loop.n_carry], results[loop.n_carry :]

    length = None if xs else loop.length  # a symbolic one cannot be given
    options = {name: eqn.params[name] for name in ("reverse", "unroll")}
    carry, ys = lax.scan(body, list(args[loop.carry]), xs, length, **options)
    return [*carry, *ys]


def _run_while(eqn: JaxprEqn, funs: Sequence[Traceable], args: Sequence[Any]) -> Sequence[Any]:
    loop, (cond, body) = _enter_while(eqn), funs

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


HIGHER_ORDER: Mapping[str, HigherOrder] = {
    "jit": HigherOrder(_call("jaxpr"), _run_jit),
    "call": HigherOrder(_call("call_jaxpr"), _run_inline),
    "closed_call": HigherOrder(_call("call_jaxpr"), _run_inline),
    "eval_jaxpr": HigherOrder(_call("call_jaxpr"), _run_inline),  # the name of both from JAX 0.12 on
    "remat2": HigherOrder(_call("jaxpr"), _run_remat, keeps_inputs=True),
    "custom_jvp_call": HigherOrder(_call("call_jaxpr"), _run_inline),
    "custom_vjp_call": HigherOrder(_call("call_jaxpr"), _run_inline, keeps_inputs=True),
    "shard_map": HigherOrder(_call("jaxpr", is_inline=False), _run_shard_map, keeps_inputs=True),
    "cond": HigherOrder(_enter_cond, _run_cond),
    "scan": HigherOrder(_enter_scan, _run_scan),
    "while": HigherOrder(_enter_while, _run_while),
    "custom_linear_solve": HigherOrder(_enter_linear_solve),
}
