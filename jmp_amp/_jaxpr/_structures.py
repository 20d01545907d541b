"""How an equation holds jaxprs: the operands that each reads, and how often each runs."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn

from jmp_amp._jaxpr._kept import Kept
from jmp_amp._jaxpr._tracing import split_arrays, trace
from jmp_amp._jaxpr._versions import hi_kind, hi_primitive, is_hi_type, scan_sizes


class Call(NamedTuple):
    """An equation that runs one jaxpr once.

    Attributes:
        jaxpr: the jaxpr; its results are those of the equation.
        operands: the indices of the operands that are its inputs.
        is_inline: whether the jaxpr can be evaluated in place of the equation. That of `shard_map` cannot: it runs on
            shards.
        rule: whose derivative it has instead of that of the jaxpr: `"custom_jvp_call"`, `"custom_vjp_call"` or None.
    """

    jaxpr: Any
    operands: Sequence[int]
    is_inline: bool = True
    rule: str | None = None


class Branches(NamedTuple):
    """An equation that runs one of several jaxprs; its first operand is the index.

    Attributes:
        jaxprs: the branches.
        operands: the indices of the operands that are the inputs of each branch.
    """

    jaxprs: Sequence[Any]
    operands: Sequence[int]


class Loop(NamedTuple):
    """An equation that runs one jaxpr any number of times.

    The inputs of the body are constants, carries and slices of `xs`; its results are carries and slices of `ys`.

    Attributes:
        body: the jaxpr of one iteration.
        consts: the operands that are the constants of the body.
        carry: the operands that are the initial carries.
        xs: the operands that the body reads slices of; none in a `while`.
        length: the number of iterations; None for a `while`.
        cond: the jaxpr of the condition of a `while`, over its constants and the carries; None for a `scan`.
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
        """The number of constants of the body."""
        return self.consts.stop - self.consts.start

    @property
    def n_carry(self) -> int:
        """The number of carries."""
        return self.carry.stop - self.carry.start


Structure = Call | Branches | Loop


def call(param: str, is_inline: bool = True, rule: str | None = None) -> Callable[[JaxprEqn], Call]:
    """Returns the structure of a call, whose jaxpr is in a parameter."""
    return lambda eqn: Call(eqn.params[param], range(len(eqn.invars)), is_inline, rule)


def hi_call(eqn: JaxprEqn) -> Call | None:
    """Returns the structure of a `HiPrim`; None if nothing can take the place of its function."""
    kind = hi_kind(hi_primitive(eqn))
    if kind is None or not all(isinstance(atom.aval, jax.core.ShapedArray) for atom in (*eqn.invars, *eqn.outvars)):
        return None
    rule = kind if kind in ("custom_jvp_call", "custom_vjp_call") else None
    return Call(hi_jaxpr(eqn), range(len(eqn.invars)), rule=rule)


def hi_jaxpr(eqn: JaxprEqn) -> Any:
    """Returns the function of a `HiPrim` as a closed jaxpr of arrays, the same object for the same primitive.

    None if the types of its operands do not say which arrays they consist of.
    """
    primitive = hi_primitive(eqn)
    if "jaxpr" in primitive.params:
        return primitive.params["jaxpr"]
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    try:
        arrays = [aval.lo_ty() if is_hi_type(aval) else [aval] for aval in avals]  # of types of the user
    except NotImplementedError:
        return None

    def expand(*args: Any) -> list[Any]:
        it = iter(args)
        parts = [[next(it) for _ in each] for each in arrays]
        pairs = zip(avals, parts, strict=True)
        operands = [aval.raise_val(*part) if is_hi_type(aval) else part[0] for aval, part in pairs]
        return split_arrays(primitive.expand(*jax.tree.unflatten(primitive.in_tree, operands)))[0]

    return _expanded(primitive, (), lambda: trace(expand, [aval for each in arrays for aval in each]))


_expanded = Kept()


def branches(eqn: JaxprEqn) -> Branches:
    """Returns the structure of a `cond`."""
    return Branches(eqn.params["branches"], range(1, len(eqn.invars)))


def scan(eqn: JaxprEqn) -> Loop:
    """Returns the structure of a `scan`."""
    n_consts, n_carry = scan_sizes(eqn)
    first, last = n_consts + n_carry, len(eqn.invars)
    return Loop(
        eqn.params["jaxpr"], slice(0, n_consts), slice(n_consts, first), slice(first, last), eqn.params["length"]
    )


def while_loop(eqn: JaxprEqn) -> Loop:
    """Returns the structure of a `while`."""
    n_cond, n_body, last = eqn.params["cond_nconsts"], eqn.params["body_nconsts"], len(eqn.invars)
    consts, carry = slice(n_cond, n_cond + n_body), slice(n_cond + n_body, last)
    cond = eqn.params["cond_jaxpr"]
    return Loop(eqn.params["body_jaxpr"], consts, carry, slice(last, last), None, cond, slice(0, n_cond))


def linear_solve(eqn: JaxprEqn) -> Call:
    """Returns the structure of a `custom_linear_solve`: its `solve` computes the results."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    first, end = lengths.matvec + lengths.vecmat, sum(n or 0 for n in lengths)
    return Call(jaxprs.solve, [*range(first, first + lengths.solve), *range(end, len(eqn.invars))])
