"""Steps that `master_weights` and `rounded_weights` share."""

from typing import Any

import jax
import jax.numpy as jnp

from jmp_amp._loss_scale import is_hole
from jmp_amp._params._rounding import round_stochastically, round_to_nearest
from jmp_amp._policy import is_inexact, wide_dtype


def check_params(name: str, params: Any) -> None:
    """Raises a `ValueError` if the transformation `name` is called without parameters."""
    if params is None:
        raise ValueError(f"`{name}` needs the parameters: call `tx.update(grads, opt_state, params)`")


def is_low_precision(x: Any) -> bool:
    """Whether a leaf is floating, with a dtype narrower than float32."""
    return is_inexact(x) and wide_dtype(jnp.result_type(x)) != jnp.result_type(x)


def upcast(tree: Any) -> Any:
    """Casts the low-precision leaves of a tree to float32."""
    return jax.tree.map(_upcast_leaf, tree)


def where_frozen(grads: Any, frozen: Any, trained: Any) -> Any:
    """Selects from `frozen` where the gradient is None or `optax.MaskedNode`, and from `trained` elsewhere.

    Each entry of `frozen` may be a subtree.
    """
    return jax.tree.map(lambda g, f, t: f if is_hole(g) else t, grads, frozen, trained, is_leaf=is_hole)


def round_to_params(params: Any, full: Any, keys: Any = None) -> Any:
    """Rounds float32 values to the dtypes of the low-precision parameters: stochastically with keys, else to nearest.

    Args:
        params: the parameters, whose dtypes are used.
        full: a tree of the same structure; float32 where the parameter is low precision.
        keys: None, or a tree of the same structure with a PRNG key for each leaf.
    """

    def round_leaf(p: Any, x: Any, key: Any = None) -> Any:
        if not is_low_precision(p):
            return x
        return round_to_nearest(x, p.dtype) if key is None else round_stochastically(x, p.dtype, key)

    return jax.tree.map(round_leaf, params, full, *([] if keys is None else [keys]))


def deltas(params: Any, rounded: Any, full_updates: Any) -> Any:
    """Returns the updates: the difference between the new and the old parameter, in float32.

    Args:
        params: the old parameters.
        rounded: the new parameters.
        full_updates: the updates of the inner transformation, which are returned for parameters of float32 and wider
            dtypes.
    """

    def delta(p: Any, new: Any, full_update: Any) -> Any:
        if not is_low_precision(p):
            return full_update
        # No finite update can make an infinite parameter finite, but adding -inf would turn it into NaN.
        old = jnp.where(jnp.isfinite(p), _upcast_leaf(p), 0)
        # The delta of equal values must be -0: adding +0 would turn a parameter of -0 into +0.
        return -(old - _upcast_leaf(new))

    return jax.tree.map(delta, params, rounded, full_updates)


def _upcast_leaf(x: Any) -> Any:
    return x.astype(jnp.float32) if is_low_precision(x) else x
