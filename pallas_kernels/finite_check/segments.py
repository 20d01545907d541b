"""A table, built while tracing, that assigns parts of leaves to the programs of one launch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

C = TypeVar("C")

INDEX_LIMIT = 2**31
"""Exclusive upper bound of an index: kernels index with int32."""


class Segment(NamedTuple):
    """Consecutive programs that read consecutive blocks of one row of one leaf.

    Attributes:
        leaf: the index of the leaf.
        row: the row of the leaf's view, see `rows`.
        start: the index of the first element in the row.
        size: the number of elements for each program: a block, or the remainder of the row.
        first: the index of the first program.
        programs: the number of programs.
    """

    leaf: int
    row: int
    start: int
    size: int
    first: int
    programs: int


def rows(size: int) -> int | None:
    """Returns the least number of equal rows for `size` elements such that int32 can index each row.

    If there are several rows, their length is a multiple of 8, so that each row starts at a multiple of 16 bytes.
    Returns `None` if no number up to 64 satisfies this.
    """
    fits = (n for n in range(1, 65) if size % n == 0 and size // n < INDEX_LIMIT)
    return next((n for n in fits if n == 1 or size // n % 8 == 0), None)


def view(leaf: jax.Array) -> jax.Array:
    """Reshapes a leaf to its rows, which is a bitcast."""
    return leaf.reshape(rows(leaf.size), -1)


def segments(shapes: Sequence[tuple[int, ...]], block: int) -> tuple[list[Segment], int]:
    """Splits views of `shapes` into blocks and remainders. Returns the segments and the number of programs."""
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
    """Runs `body(segment, index, carry)` for the segment of a program, with `index` relative to the segment.

    It finds the segment by bisection. Every `cond` has a false branch that returns the carry, because Pallas lowers the
    false branch twice: with one half of the segments in each branch, lowering takes 2^depth times as long.
    """
    if len(table) == 1:
        return body(table[0], program - table[0].first, carry)
    left, right = table[: len(table) // 2], table[len(table) // 2 :]
    for half, mine in ((left, program < right[0].first), (right, program >= right[0].first)):
        carry = lax.cond(mine, lambda c, half=half: dispatch(half, program, body, c), lambda c: c, carry)
    return carry


def squares(x: jax.Array) -> jax.Array:
    """Returns the squares of float32 values, and NaN for values that are not finite."""
    return jnp.where(jnp.abs(x) < jnp.inf, x * x, jnp.nan)
