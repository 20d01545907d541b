"""The kernel for Hopper and newer GPUs.

Each program is one warpgroup of 128 threads and reads one block from global memory to registers. It loads the whole
block before it uses any element, with up to 16 bytes for each thread and load, so that enough bytes are in flight to
saturate the memory bus. Threads communicate only for the final sums. `unscale_check` also writes the products back.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import mosaic_gpu_kernel
from pallas_kernels.finite_check.launch import Segment, dispatch, squares

NARROW = 128  # elements in the narrowest load of a warpgroup: one in each thread
UNROLL = 8  # the number of single elements that are loaded before the first is used


def vectors(dtypes: Iterable[Any]) -> dict[int, int]:
    """Returns the widths of the loads of a warpgroup, in elements, and the number of elements in each thread.

    Threads access 16 bytes of the widest dtype at most. With 32, they would write in two turns that each fill half of
    every sector.
    """
    most = 16 // max(dtype.itemsize for dtype in dtypes)
    return {NARROW * most: most, NARROW: 1}


class Piece(NamedTuple):
    """Elements of one load.

    Attributes:
        offset: the index of the first element, relative to the start of the program.
        width: the number of elements.
        overlap: the number of elements that the previous pieces contain already.
    """

    offset: int
    width: int
    overlap: int = 0


def pieces(segment: Segment, length: int, widths: Iterable[int]) -> list[Piece]:
    """Splits the elements of a program into pieces.

    If the remainder is shorter than the narrowest piece, the last piece overlaps the previous ones, so that it does not
    exceed the row of `length` elements. Each other piece has the largest of the `widths` that fits.
    """
    found, at = [], 0
    for width in widths:
        while segment.size - at >= width:
            found.append(Piece(at, width))
            at += width
    if at < segment.size and length >= NARROW:
        back = segment.size - NARROW
        found.append(Piece(back, NARROW, at - back))
    return found


def run(inputs: Sequence[jax.Array], table: Sequence[Segment], out_types: Sequence[Any], interpret: bool) -> Any:
    """Runs the kernel."""
    # The interpreter does not support layouts.
    layout_cast = (lambda x, layout: x) if interpret else plgpu.layout_cast
    by_width = vectors(x.dtype for x in (*inputs[1:], *out_types[:-1]))
    layouts = {width: plgpu.Layout.WG_STRIDED((width,), vec_size=each) for width, each in by_width.items()}

    def kernel(inv_scale_ref: Any, *refs: Any) -> None:
        in_refs, out_refs, partials = refs[: len(inputs) - 1], refs[len(inputs) - 1 : -1], refs[-1]
        program = lax.axis_index("program")
        factor = inv_scale_ref[0]

        def unscaled(segment: Segment, at: Any, x: jax.Array) -> jax.Array:
            x = x.astype(jnp.float32) * factor
            if out_refs:
                out = x.astype(out_refs[segment.leaf].dtype)
                out_refs[segment.leaf][segment.row, at] = out
                x = out.astype(jnp.float32)
            return squares(x)

        def body(segment: Segment, index: jax.Array, carry: dict[int, jax.Array]) -> dict[int, jax.Array]:
            start, ref, carry = segment.start + index * segment.size, in_refs[segment.leaf], dict(carry)
            length = ref.shape[-1]
            if length < NARROW:
                return carry | {1: singles(segment, ref, carry[1])}
            cut = pieces(segment, length, layouts)
            where = [pl.ds(start + piece.offset, piece.width) for piece in cut]
            loaded = [
                layout_cast(ref[segment.row, at], layouts[piece.width]) for piece, at in zip(cut, where, strict=True)
            ]
            for piece, at, x in zip(cut, where, loaded, strict=True):
                more = unscaled(segment, at, x)
                if piece.overlap:
                    position = layout_cast(lax.iota(jnp.int32, piece.width), layouts[piece.width])
                    more = jnp.where(position < piece.overlap, 0.0, more)
                carry[piece.width] += more
            return carry

        def singles(segment: Segment, ref: Any, total: jax.Array) -> jax.Array:
            def group(i: Any, total: jax.Array, size: int = UNROLL) -> jax.Array:
                where = [i * UNROLL + k for k in range(size)]
                loaded = [ref[segment.row, at] for at in where]
                for at, x in zip(where, loaded, strict=True):
                    total += unscaled(segment, at, x)
                return total

            groups, rest = divmod(segment.size, UNROLL)
            return group(groups, lax.fori_loop(0, groups, group, total), rest)

        nothing = {width: layout_cast(jnp.zeros(width, jnp.float32), layout) for width, layout in layouts.items()}
        total = dispatch(table, program, body, nothing | {1: jnp.float32(0)})
        partials[program] = total[1] + sum(jnp.sum(total[width]) for width in layouts)

    grid = {"grid": out_types[-1].shape, "grid_names": ("program",)}
    return mosaic_gpu_kernel(kernel, interpret, out_type=tuple(out_types), **grid)(*inputs)
