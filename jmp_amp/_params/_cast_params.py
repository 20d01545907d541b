"""Models whose parameters are low precision, norms apart."""

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
    """Says whether a leaf belongs to a normalisation layer, by the names on its path.

    Args:
        path: the keys from the root of the tree, as JAX gives them.
        leaf: not looked at.

    Returns:
        True where a name contains `norm`, in any case, or is `bn` or `ln`, a number or another word behind it.

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
    """Casts parameters to the `param_dtype` of a policy, those of normalisation layers apart.

    Statistics and scales of norms span more than float16 holds, and they are few; apex's O2 keeps them in float32 for
    that reason.

    Args:
        params: any tree; floating JAX and numpy arrays are cast, everything else comes back as it is.
        policy: a policy, or the name of one: `"O2"`, `"p=bf16"`.
        keep: says of the path and the leaf whether it stays as it is. Give it where norms have other names, or where
            the tree has none, as a list of weights.

    Returns:
        A tree of the same structure. Train it with `master_weights`.

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
