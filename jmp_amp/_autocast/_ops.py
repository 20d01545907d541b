"""First-order ops as values, with the casts of their operands: equal ones are traced and differentiated once.

JAX remembers how it differentiated a `jit`, but differentiates a bare primitive anew each time that it meets it. So,
under differentiation, the ops that came from one call in the user's code are bound as one `jit`, which JAX inlines: a
model of equal layers then costs little more than one layer, and each op keeps its source line and its scope.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import JaxprEqn, Primitive, Var

from jmp_amp._autocast import _compat
from jmp_amp._autocast import _weight_grad as weight_grad

HELD = "amp:held"  # the name of what a loop keeps for the backward pass, by `jax.checkpoint`


@dataclasses.dataclass(frozen=True)
class Op:
    """A primitive, and the casts of the operands that each use casts for itself.

    Attributes:
        primitive: what is applied.
        params: its parameters, by name.
        casts: the dtype that each operand is cast to; None leaves it.
        shape: what an elementwise op broadcasts its operands to; None for other ops.
        held: the operands whose casts a loop keeps for the backward pass.
        full_grad: whether the gradients of the operands that are cast leave the matrix unit in float32.
        rewrite: evaluates it in another way, from the op itself and its operands, for the sake of its derivative.
    """

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]
    casts: tuple[Any, ...]
    shape: tuple[int, ...] | None = None
    held: tuple[int, ...] = ()
    full_grad: bool = False
    rewrite: Callable[[Callable[[Sequence[Any]], list[Any]], Sequence[Any]], list[Any]] | None = None

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Applies the primitive to the cast operands."""
        if self.full_grad:
            return weight_grad.product(self._apply, self.casts, dict.fromkeys(self.held, _keep), args)
        if self.rewrite is not None:
            return self.rewrite(self._apply, args)
        if any(map(self._spreads, args, self.casts)):
            return self._spread(args)
        return self._apply(self._cast(args))

    def _apply(self, args: Sequence[Any]) -> list[Any]:
        return _compat.apply(self.primitive, dict(self.params), args)

    def _cast(self, args: Sequence[Any]) -> list[Any]:
        cast = [
            x if dtype is None else lax.convert_element_type(x, dtype)
            for x, dtype in zip(args, self.casts, strict=True)
        ]
        return [_keep(x) if i in self.held else x for i, x in enumerate(cast)]

    def _spreads(self, x: Any, dtype: Any) -> bool:
        """Whether the op broadcasts an operand after its cast."""
        return self.shape is not None and dtype is not None and np.shape(x) != self.shape

    def _spread(self, args: Sequence[Any]) -> list[Any]:
        """Sums the cotangent of a bias in the dtype of the bias: cast first, 70,000 ones would sum to inf in float16.

        The derivative is that of the op with the bias broadcast before it is cast. The op itself casts it first, since
        the large array would be kept in front of a loop, and read in every iteration.
        """
        call = jax.custom_jvp(lambda *args: self._apply(self._cast(args)))

        @call.defjvp
        def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            return call(*primals), jax.jvp(lambda *args: self._broadcast_first(args), primals, tangents)[1]

        return call(*args)

    def _broadcast_first(self, args: Sequence[Any]) -> list[Any]:
        spread = [
            lax.broadcast_in_dim(x, self.shape or (), range(np.ndim(x))) if self._spreads(x, dtype) else x
            for x, dtype in zip(args, self.casts, strict=True)
        ]
        return self._apply(self._cast(spread))


def _keep(x: Any) -> Any:
    return checkpoint_name(x, HELD)


class Block(NamedTuple):
    """What is evaluated at once.

    Attributes:
        eqn: where it came from.
        invars: the variables and literals that it reads.
        casts: the dtype that each is cast to, once for all blocks that want it; None leaves it.
        outvars: the variables that it defines.
        run: from the operands to the results.
    """

    eqn: JaxprEqn
    invars: Sequence[Any]
    casts: Sequence[Any]
    outvars: Sequence[Var]
    run: Callable[[Sequence[Any]], Sequence[Any]]


def grouped(blocks: Sequence[Block], results: Collection[Any]) -> list[Block]:
    """Joins the blocks of ops that came from one call in the user's code; `results` are read by the caller."""
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
    """Returns what identifies the call that an op came from; None for what is not to be joined."""
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
    """Ops one after the other, as a value: what each reads are places among the inputs and then all results so far."""

    ops: tuple[Op | _Cast, ...]
    reads: tuple[tuple[int, ...], ...]
    results: tuple[int, ...]


@functools.partial(jax.jit, static_argnums=0, inline=_compat.INLINE)
def _run(group: _Group, *args: Any) -> list[Any]:
    values = list(args)
    for op, places in zip(group.ops, group.reads, strict=True):
        values += op([values[place] for place in places])
    return [values[place] for place in group.results]


def _join(blocks: Sequence[Block], read_later: Collection[Var]) -> Block:
    # Atoms go by their ids, since literals cannot be hashed.
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
            if (atom, cast) not in places:  # defined here, and cast here
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


@functools.partial(jax.jit, static_argnums=1, inline=_compat.INLINE)
def cast(x: Any, dtype: Any) -> Any:
    """Casts; differentiated once for all casts of the same types."""
    return lax.convert_element_type(x, dtype)
