"""The kernel for Hopper and newer: from global memory to registers and, where asked for, back.

A program is one warpgroup of 128 threads with one block. It loads the whole block before it uses any of it, 16 bytes
a thread and load, so that enough bytes are in flight to fill the memory bus; nothing is shared between threads until
the sums at the end.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import interpret_mosaic_gpu
from pallas_kernels.finite_check.config import Config
from pallas_kernels.finite_check.segments import Segment, dispatch, squares

VECTORS = {1024: 8, 128: 1}
"""Elements that a warpgroup loads at once, and how many of them a thread has: 8 of float16 are 16 bytes."""
NARROW = min(VECTORS)
UNROLL = 8
"""Single elements that are loaded before the first is used."""


class Piece(NamedTuple):
    """Elements that are loaded at once: where, how many, and how many of them were seen before."""

    offset: int
    width: int
    seen: int = 0


def pieces(segment: Segment, length: int) -> list[Piece]:
    """Cuts the elements of a program; the last piece goes back to where a full one fits into a row of `length`."""
    found, at = [], 0
    for width in VECTORS:
        while segment.size - at >= width:
            found.append(Piece(at, width))
            at += width
    if at < segment.size and length >= NARROW:
        back = segment.size - NARROW
        found.append(Piece(back, NARROW, at - back))
    return found


def launch(
    leaves: Sequence[jax.Array],
    inv_scale: jax.Array,
    table: Sequence[Segment],
    out_types: Sequence[jax.ShapeDtypeStruct],
    config: Config,
    interpret: bool,
) -> Sequence[jax.Array]:
    """See `primitive.Launch`."""
    del config  # a program is always one warpgroup
    # The interpreter knows no layouts.
    layout_cast = (lambda x, layout: x) if interpret else plgpu.layout_cast

    def kernel(inv_scale_ref: Any, *refs: Any) -> None:
        in_refs, out_refs, partials = refs[: len(leaves)], refs[len(leaves) : -1], refs[-1]
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
            cut = pieces(segment, length)
            where = [pl.ds(start + piece.offset, piece.width) for piece in cut]
            loaded = [
                layout_cast(ref[segment.row, at], _layout(piece.width)) for piece, at in zip(cut, where, strict=True)
            ]
            for piece, at, x in zip(cut, where, loaded, strict=True):
                more = unscaled(segment, at, x)
                if piece.seen:
                    position = layout_cast(lax.iota(jnp.int32, piece.width), _layout(piece.width))
                    more = jnp.where(position < piece.seen, 0.0, more)
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

        nothing = {width: layout_cast(jnp.zeros(width, jnp.float32), _layout(width)) for width in VECTORS}
        total = dispatch(table, program, body, nothing | {1: jnp.float32(0)})
        partials[program] = total[1] + sum(jnp.sum(total[width]) for width in VECTORS)

    return plgpu.kernel(
        kernel,
        out_type=tuple(out_types),
        grid=out_types[-1].shape,
        grid_names=("program",),
        # Barriers would order writes after reads of the same memory, and nothing that is read is written.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
        interpret=interpret_mosaic_gpu() if interpret else None,
    )(inv_scale, *leaves)


def _layout(width: int) -> Any:
    return plgpu.Layout.WG_STRIDED((width,), vec_size=VECTORS[width])
