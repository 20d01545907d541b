"""Scaled gradients become true ones, and are looked at once: what loss scaling does with `pallas_kernels`."""

import collections
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmp_amp._autocast._compat import varying_axes
from pallas_kernels import check_finite, unscale_check

AxisName = Hashable | tuple[Hashable, ...]


class Seen(NamedTuple):
    """What one read of the gradients tells.

    Attributes:
        finite: bool[], whether all of them are finite once they are unscaled, on every device.
        sum_of_squares: float32[], of the true gradients, NaN where they are not finite.
    """

    finite: jax.Array
    sum_of_squares: jax.Array


def to_scale(value: Any) -> jax.Array:
    """Returns a scale that a user handed in as float32[]."""
    is_number = hasattr(value, "shape") or type(value) in (int, float)
    if not is_number or jnp.shape(value) != ():
        raise TypeError(
            f"`loss_scale` must be a scalar, got {type(value).__name__}; "
            "read it from the optimizer state with `amp.get_loss_scale(opt_state)`"
        )
    return jnp.asarray(value, jnp.float32)


def unscale(tree: Any, factor: jax.Array) -> Any:
    """Multiplies the floating and complex leaves by the reciprocal of the scale, in float32 or wider.

    Not a division: XLA makes a multiplication of some divisions by a scalar, and not of others. Plain JAX, so that it
    fuses into what follows; clipping is a part of the same factor.

    Args:
        tree: gradients of any shape; other leaves pass through.
        factor: float32[].
    """
    return map_wide(lambda x: x * factor.astype(x.dtype), tree)


def unscale_and_look(tree: Any, factor: jax.Array, implementation: str | None) -> tuple[Any, jax.Array]:
    """Both at once, where all of the result is wanted: the unscaled tree, and whether it is finite."""
    tree, finite, _ = unscale_check(tree, factor, implementation=implementation)
    return tree, finite


def look(tree: Any, factor: jax.Array, axis_name: AxisName | None, implementation: str | None) -> Seen:
    """Reads scaled gradients once, and writes nothing.

    Over mapped axes it takes one scalar collective. Under `shard_map`, the types say which leaves differ along them:
    those are shards of one gradient, so their squares add up. Without such types (`pmap`, `vmap`, `check_vma=False`)
    gradients are taken for copies of one gradient, each of which may have overflowed.

    Args:
        tree: gradients of any shape; other leaves are not read.
        factor: float32[], the reciprocal of the scale.
        axis_name: the mapped axes over which gradients are sharded or differ.
        implementation: as for `pallas_kernels.check_finite`.
    """
    names = () if axis_name is None else axis_name if isinstance(axis_name, tuple) else (axis_name,)
    typed = any(varying_axes(lax.axis_index(name)) for name in names)
    shards = collections.defaultdict(list)
    for x in jax.tree.leaves(tree):
        shards[tuple(name for name in names if typed and name in varying_axes(x))].append(x)
    total = jnp.float32(0)
    for axes, leaves in shards.items():
        _, sum_of_squares = check_finite(leaves, factor, implementation=implementation)
        total += lax.psum(sum_of_squares, axes) if axes else sum_of_squares
    if names and not typed:
        total = jnp.where(lax.psum(jnp.isnan(total).astype(jnp.float32), names) > 0, jnp.nan, total)
    return Seen(~jnp.isnan(total), total)


def map_wide(fun: Any, tree: Any) -> Any:
    """Applies `fun` to the floating and complex leaves, in float32 or wider; other leaves pass through."""

    def leaf(x: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        x = jnp.asarray(x)
        return fun(x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32))

    return jax.tree.map(leaf, tree)
