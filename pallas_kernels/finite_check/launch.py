"""The launches of the kernels: how the leaves are split over programs.

Each file of `KERNELS` has a function `run(inputs, table, out_types, interpret)`, which returns arrays of `out_types`:

- `inputs`: float32[1], the factor, followed by the leaves, reshaped to their rows.
- `table`: the parts of the leaves that the programs read.
- `out_types`: the products, one for each leaf or none, followed by float32[programs], the sum of squares of each
  program. The length of the latter is the grid.
- `interpret`: whether to run in Pallas' interpreter.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._implementations import AMPERE, DTYPES, HOPPER, INDEX_LIMIT, Kernel, Kernels, define_kernel
from pallas_kernels.finite_check import reference

C = TypeVar("C")

KERNELS = Kernels(__package__, {"mosaic_gpu": HOPPER, "triton": AMPERE})


# The number of elements that one program reads, a power of two and a multiple of 1024. At 8192, each thread of a
# warpgroup has eight loads of 16 or 32 bytes in flight.
BLOCK = 8192
# The largest number of leaves in one launch. Each leaf needs one or two kernel parameters of 8 bytes, and every driver
# allows 4 KiB of parameters.
MAX_LEAVES = 250


class Segment(NamedTuple):
    """Consecutive programs that read consecutive blocks of one row of one leaf.

    Attributes:
        leaf: the index of the leaf.
        row: the row of the leaf, see `rows`.
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


def is_supported(x: jax.Array) -> bool:
    """Returns whether the kernels can read a leaf."""
    is_known = isinstance(x.size, int)  # a symbolic size is not
    return x.dtype in DTYPES and is_known and x.size > 0 and rows(x.size) is not None


def rows(size: int) -> int | None:
    """Returns the least number of equal rows for `size` elements such that int32 can index each row.

    If there are several rows, their length is a multiple of 8, so that each row starts at a multiple of 16 bytes.
    Returns `None` if no number up to 64 satisfies this.
    """
    fits = (n for n in range(1, 65) if size % n == 0 and size // n < INDEX_LIMIT)
    return next((n for n in fits if n == 1 or size // n % 8 == 0), None)


def segments(shapes: Sequence[tuple[int, ...]], block: int) -> tuple[list[Segment], int]:
    """Splits leaves of `shapes`, rows by length, into blocks and remainders. Also returns the number of programs.

    All blocks come before all remainders.
    """
    table: list[Segment] = []
    first = 0
    for is_remainder in (False, True):
        for leaf, (n, length) in enumerate(shapes):
            blocks, rest = divmod(length, block)
            start, size, programs = (blocks * block, rest, bool(rest)) if is_remainder else (0, block, blocks)
            for row in range(n if programs else 0):
                table.append(Segment(leaf, row, start, size, first, programs))
                first += programs
    return table, first


def dispatch(table: Sequence[Segment], program: jax.Array, body: Callable[[Segment, jax.Array, C], C], carry: C) -> C:
    """Runs `body(segment, index, carry)` for the segment of a program, with `index` relative to the segment.

    It finds the segment by bisection. The body is compiled once for each segment. The instruction cache of a GPU does
    not hold hundreds of copies of a computation, so the body of a block loads or stores, and does not compute.
    """
    if len(table) == 1:
        return body(table[0], program - table[0].first, carry)
    left, right = table[: len(table) // 2], table[len(table) // 2 :]
    for half, mine in ((left, program < right[0].first), (right, program >= right[0].first)):
        carry = when(mine, functools.partial(dispatch, half, program, body), carry)
    return carry


def when(condition: jax.Array, body: Callable[[C], C], carry: C) -> C:
    """Runs `body(carry)` if the condition holds.

    Pallas lowers the false branch of a `cond` twice, so it is always the one that does nothing: with one half of the
    segments in each branch, lowering would take 2^depth times as long.
    """
    return lax.cond(condition, body, lambda carry: carry, carry)


def common_dtype(leaves: Sequence[jax.Array]) -> Any:
    """Returns the dtype of the leaves; if they have several, float32, which holds the values of each."""
    dtypes = {x.dtype for x in leaves}
    return dtypes.pop() if len(dtypes) == 1 else jnp.dtype(jnp.float32)


def squares(x: jax.Array) -> jax.Array:
    """Returns the squares of float32 values, and NaN for values that are not finite."""
    return jnp.where(jnp.abs(x) < jnp.inf, x * x, jnp.nan)


def unscale_check(inv_scale: jax.Array, *leaves: jax.Array, out_dtype: Any, kernel: Kernel) -> list[jax.Array]:
    """Computes `reference.unscale_check` with a kernel, of leaves that it supports."""
    total, outs = jnp.float32(0), []
    launches = -(-len(leaves) // MAX_LEAVES)
    for i in range(launches):
        launch_leaves = leaves[len(leaves) * i // launches : len(leaves) * (i + 1) // launches]
        launch_total, *launch_outs = _launch(inv_scale, *launch_leaves, out_dtype=out_dtype, kernel=kernel)
        total += launch_total
        outs += launch_outs
    return [total, *outs]


def _run(inv_scale: jax.Array, *leaves: Any, out_dtype: Any, kernel: Kernel) -> list[jax.Array]:
    views = [x.reshape(rows(x.size), -1) for x in leaves]  # bitcasts
    table, programs = segments([x.shape for x in views], BLOCK)
    out_types = [] if out_dtype is None else [jax.ShapeDtypeStruct(x.shape, out_dtype) for x in views]
    out_types.append(jax.ShapeDtypeStruct((programs,), jnp.float32))
    *outs, sums = kernel.load()([inv_scale.reshape(1), *views], table, out_types, kernel.interpret)
    return [jnp.sum(sums), *(out.reshape(x.shape) for out, x in zip(outs, leaves, strict=False))]


_launch = define_kernel("unscale_check", reference.unscale_check, _run)
