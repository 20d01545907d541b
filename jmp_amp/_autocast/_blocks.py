"""Groups the ops that come from one call in the user's code, so that JAX differentiates equal groups once.

JAX caches the derivative of a `jit`, but not that of a primitive. So, under differentiation, the ops of one call run as
one `jit`, which JAX inlines. A model of equal layers then takes little longer to trace than one layer, and each op
keeps its source line and its scope.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Var

from jmp_amp._autocast._op import Op
from jmp_amp._jaxpr import INLINE


class Block(NamedTuple):
    """One or more ops that are evaluated together.

    Attributes:
        eqn: the first equation.
        invars: the variables and literals that it reads.
        casts: the dtype that each is cast to, in a cast that all blocks share; None leaves it.
        outvars: the variables that it defines.
        run: computes the results from the operands.
    """

    eqn: JaxprEqn
    invars: Sequence[Any]
    casts: Sequence[Any]
    outvars: Sequence[Var]
    run: Callable[[Sequence[Any]], Sequence[Any]]


def grouped(blocks: Sequence[Block], results: Collection[Any]) -> list[Block]:
    """Joins the blocks of ops that come from one call in the user's code.

    Args:
        blocks: the blocks, in order.
        results: the variables that the caller reads.
    """
    groups: list[tuple[Any, list[Block]]] = []
    for block in blocks:
        call = _call(block)
        if groups and call is not None and call == groups[-1][0]:
            groups[-1][1].append(block)
        else:
            groups.append((call, [block]))
    read_later, joined = set(results), []
    for call, group in reversed(groups):
        joined.append(group[0] if call is None else _join(group, read_later))
        read_later.update([atom for block in group for atom in block.invars if isinstance(atom, Var)])
    return joined[::-1]


def _call(block: Block) -> tuple[Any, ...] | None:
    """Returns a key for the call that an op comes from; None for a block that cannot be joined."""
    if not isinstance(block.run, Op) or block.eqn.effects:
        return None
    try:
        hash(block.run)
    except TypeError:  # a parameter that cannot be hashed
        return None
    source = block.eqn.source_info
    return source.traceback, source.name_stack, block.eqn.ctx


class _Cast(NamedTuple):
    """A cast that several ops share."""

    dtype: Any

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        return [lax.convert_element_type(args[0], self.dtype)]


class _Group(NamedTuple):
    """A sequence of ops, as a value. Each reads by index from the inputs and all results so far."""

    ops: tuple[Op | _Cast, ...]
    reads: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]


@functools.partial(jax.jit, static_argnums=0, inline=INLINE)
def _run(group: _Group, *args: Any) -> list[Any]:
    values = list(args)
    for op, places in zip(group.ops, group.reads, strict=True):
        values += op([values[place] for place in places])
    return [values[place] for place in group.results]


def _join(blocks: Sequence[Block], read_later: Collection[Var]) -> Block:
    # Atoms are identified by id, since literals cannot be hashed.
    read = [[(id(atom), cast) for atom, cast in zip(b.invars, b.casts, strict=True)] for b in blocks]
    defined = {id(var) for block in blocks for var in block.outvars}
    inputs = {
        key: atom
        for block, keys in zip(blocks, read, strict=True)
        for key, atom in zip(keys, block.invars, strict=True)
        if key[0] not in defined
    }
    places = {key: i for i, key in enumerate(inputs)}
    ops: list[Any] = []
    reads: list[tuple[int, ...]] = []
    for block, keys in zip(blocks, read, strict=True):
        for atom, cast in keys:
            if (atom, cast) not in places:  # computed in this group
                ops.append(_Cast(cast))
                reads.append((places[atom, None],))
                places[atom, cast] = len(places)
        ops.append(block.run)
        reads.append(tuple([places[key] for key in keys]))
        for var in block.outvars:
            places[id(var), None] = len(places)
    outvars = [var for block in blocks for var in block.outvars if var in read_later]
    group = _Group(tuple(ops), tuple(reads), tuple([places[id(var), None] for var in outvars]))
    casts = [cast for _, cast in inputs]
    return Block(blocks[0].eqn, [*inputs.values()], casts, outvars, lambda args: _run(group, *args))


@functools.partial(jax.jit, static_argnums=1, inline=INLINE)
def cast(x: Any, dtype: Any) -> Any:
    """Casts an array. JAX differentiates all casts of the same types once."""
    return lax.convert_element_type(x, dtype)
