"""The kernel for NVIDIA GPUs of the generations Ampere and Ada, through Pallas' Triton backend.

JAX 0.11 deprecates this backend. When JAX removes it, delete this file; no other file depends on it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.finite_check import launch
from pallas_kernels.finite_check.launch import Segment, dispatch, squares


def run(inputs: Sequence[jax.Array], table: Sequence[Segment], out_types: Sequence[Any], interpret: bool) -> Any:
    """Runs the kernel."""
    block = launch.BLOCK

    def kernel(inv_scale_ref: Any, *refs: Any) -> None:
        in_refs, out_refs, partials = refs[: len(inputs) - 1], refs[len(inputs) - 1 : -1], refs[-1]
        program = pl.program_id(0)
        factor = inv_scale_ref[0]

        def body(segment: Segment, index: jax.Array, total: jax.Array) -> jax.Array:
            at = (jnp.int32(segment.row), pl.ds(segment.start + index * segment.size, block))
            mask = None if segment.size == block else jnp.arange(block) < segment.size
            other = None if mask is None else 0.0
            x = plgpu.load(in_refs[segment.leaf].at[at], mask=mask, other=other).astype(jnp.float32) * factor
            if out_refs:
                out = x.astype(out_refs[segment.leaf].dtype)
                plgpu.store(out_refs[segment.leaf].at[at], out, mask=mask)
                x = out.astype(jnp.float32)
            return total + squares(x)

        partials[program] = jnp.sum(dispatch(table, program, body, jnp.zeros(block, jnp.float32)))

    return pl.pallas_call(
        kernel,
        out_shape=tuple(out_types),
        grid=out_types[-1].shape,
        compiler_params=plgpu.CompilerParams(num_warps=8),
        interpret=interpret,
        name="unscale_check",
    )(*inputs)
