"""The kernel for NVIDIA GPUs of the generations Ampere and Ada, through Pallas' Triton backend.

JAX 0.11 deprecates this backend. When JAX removes it, delete this file; no other file depends on it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.finite_check import launch
from pallas_kernels.finite_check.launch import Segment, common_dtype, dispatch, squares


def run(inputs: Sequence[jax.Array], table: Sequence[Segment], out_types: Sequence[Any], interpret: bool) -> Any:
    """Runs the kernel."""
    block = launch.BLOCK
    in_dtype = common_dtype(inputs[1:])
    width = 16 // max(x.dtype.itemsize for x in (*inputs[1:], *out_types[:-1]))
    shape = block // width, width

    def kernel(inv_scale_ref: Any, *refs: Any) -> None:
        in_refs, out_refs, partials = refs[: len(inputs) - 1], refs[len(inputs) - 1 : -1], refs[-1]
        program = pl.program_id(0)

        # The elements of a block are `width` to a thread, so that a load and the store of its products have one layout;
        # otherwise they are exchanged through shared memory.
        def place(refs: Sequence[Any], segment: Segment, index: jax.Array) -> tuple[Any, jax.Array | None]:
            offset = lax.broadcasted_iota(jnp.int32, shape, 0) * width + lax.broadcasted_iota(jnp.int32, shape, 1)
            at = jnp.int32(segment.row), segment.start + index * segment.size + offset
            return refs[segment.leaf].at[at], None if segment.size == block else offset < segment.size

        def read(segment: Segment, index: jax.Array, _: jax.Array) -> jax.Array:
            ref, mask = place(in_refs, segment, index)
            return plgpu.load(ref, mask=mask, other=None if mask is None else 0.0).astype(in_dtype)

        def write(segment: Segment, index: jax.Array, out: jax.Array) -> jax.Array:
            ref, mask = place(out_refs, segment, index)
            plgpu.store(ref, out, mask=mask)
            return out

        x = dispatch(table, program, read, jnp.zeros(shape, in_dtype))
        x = x.astype(jnp.float32) * inv_scale_ref[0]
        if out_refs:
            out = x.astype(out_types[0].dtype)
            dispatch(table, program, write, out)
            x = out.astype(jnp.float32)
        partials[program] = jnp.sum(squares(x))

    return pl.pallas_call(
        kernel,
        out_shape=tuple(out_types),
        grid=out_types[-1].shape,
        compiler_params=plgpu.CompilerParams(num_warps=8),
        interpret=interpret,
        name="unscale_check",
    )(*inputs)
