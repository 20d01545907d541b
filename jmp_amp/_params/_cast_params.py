"""Casts of parameters to low precision, except those of normalization layers."""

import re
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.tree_util import keystr

from jmp_amp._policy import Policy, cast_floating, get_policy

T = TypeVar("T")

# LayerNorm_0, batch_norm, rmsnorm, norm1, bn2, ln_f
_NORM = re.compile(r"norm|(^|[^a-z])(bn|ln)([^a-z]|$)", re.IGNORECASE)


def is_norm(path: tuple[Any, ...], leaf: Any) -> bool:
    """Whether a leaf belongs to a normalization layer, judged by the names on its path.

    Args:
        path: the keys from the root of the tree to the leaf, as in `jax.tree_util.tree_map_with_path`.
        leaf: unused.

    Returns:
        True if a name on the path contains `norm`, `bn` or `ln`, in any case. `bn` and `ln` must not be next to
        other letters: `bn2` and `ln_f` match.

    Examples:
        >>> import jax
        >>> import jmp_amp as amp
        >>> params = {"LayerNorm_0": {"scale": 1.0}, "ln_f": 1.0, "kernel": 1.0}
        >>> jax.tree.leaves(jax.tree_util.tree_map_with_path(amp.is_norm, params))
        [True, False, True]
    """
    del leaf
    return any(_NORM.search(keystr((key,), simple=True)) for key in path)


def cast_params(params: T, policy: Policy | str, *, keep: Callable[[tuple[Any, ...], Any], bool] = is_norm) -> T:
    """Casts parameters to the `param_dtype` of a policy, except those of normalization layers.

    The statistics and scales of norms need a wider range than float16 has, and they are few, so apex's O2 also keeps
    them in float32. Train the result with `master_weights`.

    Args:
        params: any tree. Floating JAX and numpy arrays are cast; all other leaves are returned unchanged.
        policy: a policy, or a string that `get_policy` accepts: `"O2"`, `"p=bf16"`.
        keep: `keep(path, leaf)` is True for leaves that are returned unchanged. Pass it if your norms have other
            names, or if the tree has no names, such as a list of weights.

    Returns:
        A tree of the same structure and shapes.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> params = {"dense": {"w": jnp.ones((2, 2))}, "norm": {"scale": jnp.ones(2)}}
        >>> jax.tree.map(lambda x: str(x.dtype), amp.cast_params(params, "O2"))
        {'dense': {'w': 'float16'}, 'norm': {'scale': 'float32'}}

    References:
        `keep_batchnorm_fp32` of apex's `amp.initialize`.
    """
    dtype = get_policy(policy).param_dtype
    return jax.tree_util.tree_map_with_path(lambda path, x: x if keep(path, x) else cast_floating(x, dtype), params)
