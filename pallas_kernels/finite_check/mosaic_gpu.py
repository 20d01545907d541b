"""The kernel for Hopper and newer GPUs.

Each program is one warpgroup of 128 threads and reads one block from global memory to registers. It loads the whole
block before it uses any element, with up to 16 bytes for each thread and load, so that enough bytes are in flight to
saturate the memory bus. Threads communicate only for the final sums. `unscale_check` also writes the products back.
Only loads and stores name a leaf; the blocks of all leaves share the arithmetic between them. A remainder is short, and
has its own.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import mosaic_gpu_kernel
from pallas_kernels.finite_check import launch
from pallas_kernels.finite_check.launch import Segment, common_dtype, dispatch, squares, when

NARROW = 128  # elements in the narrowest load of a warpgroup: one in each thread
UNROLL = 8  # the number of single elements that are loaded before the first is used

Totals = dict[int, jax.Array]  # sums of squares, by the width of the loads


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
    in_dtype = common_dtype(inputs[1:])
    blocks = [segment for segment in table if segment.size == launch.BLOCK]
    remainders = table[len(blocks) :]

    def zeros(width: int, dtype: Any) -> jax.Array:
        return layout_cast(jnp.zeros(width, dtype), layouts[width])

    def kernel(inv_scale_ref: Any, *refs: Any) -> None:
        in_refs, out_refs, partials = refs[: len(inputs) - 1], refs[len(inputs) - 1 : -1], refs[-1]
        program = lax.axis_index("program")
        factor = inv_scale_ref[0]

        def places(segment: Segment, index: jax.Array, cut: Sequence[Piece]) -> list[tuple[int, Any]]:
            start = segment.start + index * segment.size
            return [(segment.row, pl.ds(start + piece.offset, piece.width)) for piece in cut]

        def read(segment: Segment, index: jax.Array, cut: Sequence[Piece]) -> list[jax.Array]:
            ref, where = in_refs[segment.leaf], places(segment, index, cut)
            return [layout_cast(ref[at], layouts[piece.width]) for piece, at in zip(cut, where, strict=True)]

        def unscaled(x: jax.Array) -> jax.Array:
            x = x.astype(jnp.float32) * factor
            return x.astype(out_types[0].dtype) if out_refs else x

        def write(segment: Segment, where: Sequence[Any], outs: Sequence[jax.Array]) -> None:
            if out_refs:
                for at, out in zip(where, outs, strict=True):
                    out_refs[segment.leaf][at] = out

        def add(totals: Totals, cut: Sequence[Piece], outs: Sequence[jax.Array]) -> Totals:
            totals = dict(totals)
            for piece, out in zip(cut, outs, strict=True):
                more = squares(out.astype(jnp.float32))
                if piece.overlap:
                    position = layout_cast(lax.iota(jnp.int32, piece.width), layouts[piece.width])
                    more = jnp.where(position < piece.overlap, 0.0, more)
                totals[piece.width] += more
            return totals

        def block(totals: Totals) -> Totals:
            cut = pieces(blocks[0], launch.BLOCK, layouts)

            def read_block(segment: Segment, index: jax.Array, _: Any) -> list[jax.Array]:
                return [x.astype(in_dtype) for x in read(segment, index, cut)]

            def write_block(segment: Segment, index: jax.Array, outs: list[jax.Array]) -> list[jax.Array]:
                write(segment, places(segment, index, cut), outs)
                return outs

            loaded = dispatch(blocks, program, read_block, [zeros(piece.width, in_dtype) for piece in cut])
            outs = [unscaled(x) for x in loaded]
            if out_refs:
                dispatch(blocks, program, write_block, outs)
            return add(totals, cut, outs)

        def remainder(segment: Segment, index: jax.Array, totals: Totals) -> Totals:
            length = in_refs[segment.leaf].shape[-1]
            if length < NARROW:
                return totals | {1: singles(segment, totals[1])}
            cut = pieces(segment, length, layouts)
            outs = [unscaled(x) for x in read(segment, index, cut)]
            write(segment, places(segment, index, cut), outs)
            return add(totals, cut, outs)

        def singles(segment: Segment, total: jax.Array) -> jax.Array:
            def group(i: Any, total: jax.Array, size: int = UNROLL) -> jax.Array:
                where = [(segment.row, i * UNROLL + k) for k in range(size)]
                outs = [unscaled(x) for x in [in_refs[segment.leaf][at] for at in where]]
                write(segment, where, outs)
                return sum((squares(out.astype(jnp.float32)) for out in outs), start=total)

            groups, rest = divmod(segment.size, UNROLL)
            return group(groups, lax.fori_loop(0, groups, group, total), rest)

        totals = {width: zeros(width, jnp.float32) for width in layouts} | {1: jnp.float32(0)}
        first = sum(segment.programs for segment in blocks)  # the first program that reads a remainder
        if blocks:
            totals = when(program < first, block, totals)
        if remainders:
            totals = when(program >= first, functools.partial(dispatch, remainders, program, remainder), totals)
        partials[program] = totals[1] + sum(jnp.sum(totals[width]) for width in layouts)

    grid = {"grid": out_types[-1].shape, "grid_names": ("program",)}
    return mosaic_gpu_kernel(kernel, interpret, out_type=tuple(out_types), **grid)(*inputs)
