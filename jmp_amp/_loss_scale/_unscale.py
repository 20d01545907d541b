"""Scaled gradients become true ones, and are looked at once: what loss scaling does with `pallas_kernels`."""

import collections
import itertools
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jmp_amp._jaxpr import equations_behind, is_same_value, open_jaxpr, varying_axes
from jmp_amp._policy import wide_dtype

AxisName = Hashable | tuple[Hashable, ...]


class Seen(NamedTuple):
    """What one read of the gradients tells.

    Attributes:
        finite: bool[], whether all of them are finite once they are unscaled, on every device.
        sum_of_squares: float32[], of the true gradients, -inf where they are not finite.
        nonfinite_leaves: of bool[], the tree of the gradients, true where a leaf is not finite; None if not asked for.
    """

    finite: jax.Array
    sum_of_squares: jax.Array
    nonfinite_leaves: Any = None


_UNSCALED = "amp.unscale"


def unscale(tree: Any, factor: jax.Array) -> Any:
    """Multiplies the floating and complex leaves by the reciprocal of the scale, in float32 or wider.

    Not a division: XLA makes a multiplication of some divisions by a scalar, and not of others. Plain JAX, so that it
    fuses into what follows; clipping is a part of the same factor.

    Args:
        tree: gradients of any shape; other leaves pass through.
        factor: float32[].
    """
    with jax.named_scope(_UNSCALED):
        return map_wide(lambda x: x * factor.astype(x.dtype), tree)


def check_scaled(tree: Any, scale: Any = None) -> None:
    """Raises where a traced program shows that gradients are not those of a loss times `scale`.

    That is where they come from `unscale`, through a chain of transformations; or from differentiation, if a traced
    `scale` is given, without any use of it. The first few leaves tell it for all.
    """
    leaves = jax.tree.leaves_with_path(tree)
    for path, x in leaves[:_FEW]:
        if any(_UNSCALED in _scopes(eqn) for eqn in itertools.islice(equations_behind(x), _NEAR)):
            raise ValueError(
                f"the gradient at `{jax.tree_util.keystr(path)}` was unscaled before: there is an `unscale_and_check` "
                "in front of another one, or in front of `dynamic_loss_scale`; keep one of them, and put it inside the "
                "wrapper"
            )
    for path, x in leaves[:1] if isinstance(scale, jax.core.Tracer) else ():
        behind = list(equations_behind(x))
        is_used = any(is_same_value(scale, tracer) for eqn in behind for tracer in eqn.in_tracers)
        if not is_used and any(map(_differentiates, behind)):
            raise ValueError(
                f"the gradient at `{jax.tree_util.keystr(path)}` does not depend on the loss scale that it is divided "
                "by; write `amp.value_and_grad(loss_fn, loss_scale=amp.get_loss_scale(opt_state))`, or wrap the "
                "optimizer with `LossScale.none()`"
            )


_FEW, _NEAR = 4, 256  # leaves, and equations between two transformations of a chain


def _scopes(eqn: Any) -> list[str]:
    return str(eqn.source_info.name_stack).split("/")


def _differentiates(eqn: Any) -> bool:
    """Whether an equation is part of a backward pass, or a call of one."""
    inner, _ = open_jaxpr(eqn.params.get("jaxpr"))
    return any("transpose(" in str(e.source_info.name_stack) for e in (eqn, *getattr(inner, "eqns", ())))


def unscale_and_look(tree: Any, factor: jax.Array, implementation: str | None) -> tuple[Any, jax.Array]:
    """Both at once, where all of the result is wanted: the unscaled tree, and whether it is finite."""
    from pallas_kernels import unscale_check

    tree, finite, _ = unscale_check(tree, factor, implementation=implementation)
    return tree, finite


def look(
    tree: Any, factor: jax.Array, axis_name: AxisName | None, implementation: str | None, by_leaf: bool = False
) -> Seen:
    """Reads scaled gradients once, and writes nothing.

    Over mapped axes it takes one scalar collective, or one a leaf, which XLA merges. Under `shard_map`, the types say
    which leaves differ along them: those are shards of one gradient, so their squares add up. Without such types
    (`pmap`, `vmap`, `check_vma=False`) gradients are taken for copies of one gradient, each of which may have
    overflowed.

    Args:
        tree: gradients of any shape; other leaves are not read.
        factor: float32[], the reciprocal of the scale.
        axis_name: the mapped axes over which gradients are sharded or differ.
        implementation: as for `pallas_kernels.check_finite`.
        by_leaf: whether to tell leaf by leaf; each is then a check of its own.
    """
    from pallas_kernels import check_finite

    names = () if axis_name is None else axis_name if isinstance(axis_name, tuple) else (axis_name,)
    typed = any(varying_axes(lax.axis_index(name)) for name in names)
    leaves, treedef = jax.tree.flatten(tree)
    unnamed = frozenset[Any]().union(*map(varying_axes, leaves)) - {*names} - varying_axes(factor)
    if unnamed:
        raise ValueError(
            f"gradients differ along the mapped axes {sorted(unnamed)}, and the loss scale does not, so a device would "
            f"skip alone; write `axis_name={(*names, *sorted(unnamed))}`, or reduce the gradients first"
        )
    shards = collections.defaultdict(list)
    for i, x in enumerate(leaves):
        shards[tuple(name for name in names if typed and name in varying_axes(x))].append(i)
    flags: dict[int, jax.Array] = {}
    total = jnp.float32(0)
    with jax.debug_nans(False):  # a NaN here is the answer, not an error
        for axes, indices in shards.items():
            for group in [[i] for i in indices] if by_leaf else [indices]:
                _, squares = check_finite([leaves[i] for i in group], factor, implementation=implementation)
                squares = lax.psum(squares, axes) if axes else squares
                total += squares
                if by_leaf:
                    flags[group[0]] = jnp.isnan(squares)
        if names and not typed:
            flags = {i: lax.psum(bad.astype(jnp.float32), names) > 0 for i, bad in flags.items()}
            total = jnp.where(lax.psum(jnp.isnan(total).astype(jnp.float32), names) > 0, jnp.nan, total)
        by_path = jax.tree.unflatten(treedef, [flags[i] for i in range(len(leaves))]) if by_leaf else None
        # Into the fusion that adds up; of NaN, `jax.debug_nans` would make an error.
        total = jnp.where(jnp.isnan(total), -jnp.inf, total)
        return Seen(total >= 0, total, by_path)


def map_wide(fun: Any, tree: Any) -> Any:
    """Applies `fun` to the floating and complex leaves, in float32 or wider; other leaves pass through."""

    def leaf(x: Any) -> Any:
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            return x
        x = jnp.asarray(x)
        return fun(x.astype(wide_dtype(x.dtype)))

    return jax.tree.map(leaf, tree)
