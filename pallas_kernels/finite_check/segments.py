"""Which program of one launch works on which part of which leaf: a table, made while tracing."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

C = TypeVar("C")

INDEX_LIMIT = 2**31
"""Kernels index with int32."""


class Segment(NamedTuple):
    """Consecutive programs that do the same with consecutive blocks of one row of one leaf.

    Attributes:
        leaf: position in the list of leaves.
        row: row of the leaf's view, see `rows`.
        start: the first element in the row.
        size: elements of a program; a block, or what the blocks left over.
        first: the first program.
        programs: their number.
    """

    leaf: int
    row: int
    start: int
    size: int
    first: int
    programs: int


def rows(size: int) -> int | None:
    """The fewest equal rows as which `size` elements can be viewed so that int32 indexes each; `None` if too many.

    Several rows begin at multiples of 8 elements, for loads of 16 bytes.
    """
    fits = (n for n in range(1, 65) if size % n == 0 and size // n < INDEX_LIMIT)
    return next((n for n in fits if n == 1 or size // n % 8 == 0), None)


def view(leaf: jax.Array) -> jax.Array:
    """A leaf as its rows: a bitcast, as arrays lie in memory."""
    return leaf.reshape(rows(leaf.size), -1)


def segments(shapes: Sequence[tuple[int, ...]], block: int) -> tuple[list[Segment], int]:
    """Cuts views of `shapes` into blocks and rests; returns them and the number of programs."""
    table: list[Segment] = []
    first = 0
    for leaf, (n, length) in enumerate(shapes):
        blocks, rest = divmod(length, block)
        for row in range(n):
            for start, size, programs in ((0, block, blocks), (blocks * block, rest, 1)):
                if size and programs:
                    table.append(Segment(leaf, row, start, size, first, programs))
                    first += programs
    return table, first


def dispatch(table: Sequence[Segment], program: jax.Array, body: Callable[[Segment, jax.Array, C], C], carry: C) -> C:
    """Runs `body(segment, index in it, carry)` for the segment of a program, found by bisection.

    The tree is made of conditions that do nothing if false, since Pallas lowers the false branch twice: with a half of
    the segments in each branch, lowering took 2^depth times as long.
    """
    if len(table) == 1:
        return body(table[0], program - table[0].first, carry)
    left, right = table[: len(table) // 2], table[len(table) // 2 :]
    for half, mine in ((left, program < right[0].first), (right, program >= right[0].first)):
        carry = lax.cond(mine, lambda c, half=half: dispatch(half, program, body, c), lambda c: c, carry)
    return carry


def squares(x: jax.Array) -> jax.Array:
    """The squares of float32 values, NaN for those that are not finite."""
    return jnp.where(jnp.abs(x) < jnp.inf, x * x, jnp.nan)
