"""The kernel for Ada, through Pallas' Triton backend.

JAX 0.11 deprecates this backend. When JAX removes it, delete this file; no other file depends on it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.quantize import reference
from pallas_kernels.quantize.reference import TILE, magnitude, out_types, power_of_two, quantize_rows, scale

ELEMENTS = 8192  # that a program reads at once in search of the largest
PARAMS = plgpu.CompilerParams(num_warps=8)


def run(x: jax.Array, *, dtype: Any, block: int | None, interpret: bool) -> Sequence[jax.Array]:
    """Runs the kernel."""
    inputs = [x] if block else [x, _largest(x.reshape(-1), interpret)]

    def kernel(*refs: Any) -> None:
        (x_ref, *largest_ref), (rows_ref, columns_ref, *scale_refs) = refs[: len(inputs)], refs[len(inputs) :]
        i, j = pl.program_id(0), pl.program_id(1)
        at, mask = _tile(x_ref, i, j, (TILE, TILE))
        values = plgpu.load(x_ref.at[at], mask=mask, other=None if mask is None else 0.0).astype(jnp.float32)
        if block is None:
            factor, exponent = scale(jnp.max(largest_ref[0][...]), dtype)

            @pl.when((i == 0) & (j == 0))
            def _() -> None:
                scale_refs[0][0] = power_of_two(-exponent)

            quantized = (values * factor).astype(dtype)
            _store(rows_ref, i, j, quantized)
            _store(columns_ref, j, i, quantized.T)
        else:
            _store_blocks(rows_ref, scale_refs[0], i, j, values)
            _store_blocks(columns_ref, scale_refs[1], j, i, values.T)

    return pl.pallas_call(
        kernel,
        out_shape=out_types(x, dtype=dtype, block=block),
        grid=tuple(pl.cdiv(size, TILE) for size in x.shape),
        compiler_params=PARAMS,
        interpret=interpret,
        name="quantize",
    )(*inputs)


def _store_blocks(ref: Any, scale_ref: Any, i: Any, j: Any, values: jax.Array) -> None:
    quantized, bits = quantize_rows(values, ref.dtype)
    _store(ref, i, j, quantized)
    _store(scale_ref, i, j, bits)


def _largest(x: jax.Array, interpret: bool) -> jax.Array:
    """Returns the largest magnitudes of parts of a vector. The last block may be read more than once."""
    blocks = pl.cdiv(x.size, ELEMENTS)

    def kernel(x_ref: Any, largest_ref: Any) -> None:
        program = pl.program_id(0)

        def step(k: Any, largest: jax.Array) -> jax.Array:
            at = jnp.minimum(program + k * reference.PROGRAMS, blocks - 1) * ELEMENTS
            mask = at + jnp.arange(ELEMENTS, dtype=jnp.int32) < x.size
            values = plgpu.load(x_ref.at[pl.ds(at, ELEMENTS)], mask=mask, other=0.0)
            return jnp.maximum(largest, magnitude(values))

        zeros = jnp.zeros(ELEMENTS, jnp.float32)
        largest_ref[program] = jnp.max(lax.fori_loop(0, pl.cdiv(blocks, reference.PROGRAMS), step, zeros))

    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((reference.PROGRAMS,), jnp.float32),
        grid=(reference.PROGRAMS,),
        compiler_params=PARAMS,
        interpret=interpret,
        name="largest",
    )(x)


def _store(ref: Any, i: Any, j: Any, values: jax.Array) -> None:
    at, mask = _tile(ref, i, j, values.shape)
    plgpu.store(ref.at[at], values, mask=mask)


def _tile(ref: Any, i: Any, j: Any, shape: tuple[int, ...]) -> tuple[Any, jax.Array | None]:
    """Returns the indices of a tile, and which of them the array has; `None` if it has all of every tile."""
    at = tuple(pl.ds(index * size, size) for index, size in zip((i, j), shape, strict=True))
    if all(length % size == 0 for length, size in zip(ref.shape, shape, strict=True)):
        return at, None
    inside = [
        index * size + jnp.arange(size, dtype=jnp.int32) < length
        for index, size, length in zip((i, j), shape, ref.shape, strict=True)
    ]
    return at, inside[0][:, None] & inside[1][None, :]
