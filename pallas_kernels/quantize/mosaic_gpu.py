"""The kernel for Hopper and newer GPUs.

Each program is one warpgroup of 128 threads. It copies a tile to shared memory once and reads it there twice, in two
layouts, so that neither maximum leaves a warp. For the rows, four neighbouring threads hold a block of 32 elements of a
row. For the columns, a thread holds 32 elements of a column: a warp reads along a row, without bank conflicts. In both,
the float8 elements of a block are 32 consecutive bytes, a whole sector of global memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import mosaic_gpu_kernel, mosaic_gpu_load, mosaic_gpu_store
from pallas_kernels.quantize import reference
from pallas_kernels.quantize.reference import BLOCK, TILE, magnitude, out_types, power_of_two, scale, scale_bits

ROWS = plgpu.Layout.WGMMA_UPCAST_4X
COLUMNS, PACKED_COLUMNS = (plgpu.Layout.TCGEN05_TMEM_NATIVE(length) for length in (1, 16))
LOAD = 1024  # elements in one load of a warpgroup: 8 or 16 bytes for each thread
LOADS = 8  # before the first is used, in search of the largest


def run(x: jax.Array, *, dtype: Any, block: int | None, interpret: bool) -> Sequence[jax.Array]:
    """Runs the kernel."""
    inputs = [x] if block else [x, _largest(x.reshape(-1), interpret)]
    cast = _cast(interpret)

    def kernel(*refs: Any) -> None:
        (x_ref, *largest_ref), (*out_refs, tile, barrier) = refs[: len(inputs)], refs[len(inputs) :]
        rows_ref, columns_ref, *scale_refs = out_refs
        i, j = lax.axis_index("i"), lax.axis_index("j")
        plgpu.copy_gmem_to_smem(x_ref.at[_at(i, TILE), _at(j, TILE)], tile, barrier)
        factor = None
        if block is None:
            factor, exponent = scale(
                jnp.max(cast(largest_ref[0][...], plgpu.Layout.WG_STRIDED((reference.PROGRAMS,), vec_size=1))), dtype
            )

            @pl.when((i == 0) & (j == 0))
            def _() -> None:
                scale_refs[0][0] = power_of_two(-exponent)

        plgpu.barrier_wait(barrier)
        for k in range(TILE // BLOCK):
            row_blocks, column_blocks = tile.at[:, _at(k, BLOCK)], tile.at[_at(k, BLOCK)]
            if interpret:  # which has no references that are transposed
                values, transposed = row_blocks[...], column_blocks[...].T
            else:
                values = mosaic_gpu_load(row_blocks, ROWS)
                transposed = mosaic_gpu_load(column_blocks.transpose((1, 0)), COLUMNS)
            sides = (rows_ref, i, j, values, ROWS, ROWS), (columns_ref, j, i, transposed, COLUMNS, PACKED_COLUMNS)
            for side, (ref, a, b, elements, layout, packed) in enumerate(sides):
                at, column = _at(a, TILE), b * (TILE // BLOCK) + k
                elements = elements.astype(jnp.float32)
                if block:
                    largest = jnp.max(magnitude(elements), axis=1)
                    factors, exponent = scale(largest, dtype)
                    mosaic_gpu_store(scale_refs[side].at[at, column], scale_bits(largest, exponent))
                    factor = cast(lax.broadcast_in_dim(factors, elements.shape, [0]), layout)
                quantized = cast((elements * factor).astype(dtype), packed)
                mosaic_gpu_store(ref.at[at, _at(column, BLOCK)], quantized)

    return mosaic_gpu_kernel(
        kernel,
        interpret,
        out_type=out_types(x, dtype=dtype, block=block),
        grid=tuple(size // TILE for size in x.shape),
        grid_names=("i", "j"),
        scratch_types=[plgpu.SMEM((TILE, TILE), x.dtype), plgpu.Barrier()],
    )(*inputs)


def _largest(x: jax.Array, interpret: bool) -> jax.Array:
    """Returns the largest magnitudes of parts of a vector. The last elements may be read more than once."""
    blocks = pl.cdiv(x.size, LOADS * LOAD)
    cast, layout = _cast(interpret), plgpu.Layout.WG_STRIDED((LOAD,), vec_size=8)

    def kernel(x_ref: Any, largest_ref: Any) -> None:
        program = lax.axis_index("program")

        def step(k: Any, largest: jax.Array) -> jax.Array:
            at = jnp.minimum(program + k * reference.PROGRAMS, blocks - 1) * (LOADS * LOAD)
            for values in [cast(x_ref[pl.ds(at + n * LOAD, LOAD)], layout) for n in range(LOADS)]:
                largest = jnp.maximum(largest, magnitude(values))
            return largest

        zeros = cast(jnp.zeros(LOAD, jnp.float32), layout)
        largest_ref[program] = jnp.max(lax.fori_loop(0, pl.cdiv(blocks, reference.PROGRAMS), step, zeros))

    return mosaic_gpu_kernel(
        kernel,
        interpret,
        out_type=jax.ShapeDtypeStruct((reference.PROGRAMS,), jnp.float32),
        grid=(reference.PROGRAMS,),
        grid_names=("program",),
    )(x)


def _at(index: Any, size: int) -> Any:
    return pl.ds(index * size, size)


def _cast(interpret: bool) -> Callable[[jax.Array, Any], jax.Array]:
    return (lambda x, layout: x) if interpret else plgpu.layout_cast  # the interpreter does not support layouts
