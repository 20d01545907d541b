"""Float32 masters of low-precision parameters, inside the optimizer state."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
        master: float32 masters of the parameters below float32; nothing (`optax.MaskedNode`) for the others, which are
          their own masters.
        inner_state: the state of the wrapped transformation, over float32 parameters.
    """

    master: Any
    inner_state: optax.OptState


def master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps a transformation so that it sees float32 parameters, while the model's are float16 or bfloat16.

    `inner` gets float32 gradients and masters, and moves the masters. The updates that come back are float32, the way
    from each parameter to its rounded master, so `optax.apply_updates` leaves parameters that are the rounded masters,
    and steps that are too small for the parameters' dtype add up in the masters until they are not.

    Parameters of float32 and wider are handed to `inner` as they are. Where the model's parameters are changed from
    outside, the masters win at the next step.

    Args:
        inner: any optax transformation.

    Returns:
        An optax transformation whose `update` needs `params`; masters take 4 bytes a low-precision parameter. Put it
        inside `dynamic_loss_scale`: `dynamic_loss_scale(master_weights(optax.adamw(1e-3)))`.

    Raises:
        TypeError: `inner` is something else.
        ValueError: `update` is called without `params`.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> tx = amp.master_weights(optax.sgd(1e-4))
        >>> params = {"w": jnp.ones(2, jnp.float16)}
        >>> state = tx.init(params)
        >>> for _ in range(10):  # float16 has nothing between 1 - 2**-11 and 1
        ...     updates, state = tx.update({"w": jnp.ones(2, jnp.float16)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> print(params["w"], state.master["w"])
        [0.999 0.999] [0.99899983 0.99899983]

    References:
        Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018, section 3.1; apex's O2.
    """
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(f"`inner` must be an optax transformation, got {type(inner).__name__}")
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> MasterWeightsState:
        full = jax.tree.map(_full, params)
        return MasterWeightsState(_low_only(params, full), inner.init(full))

    def update(
        updates: optax.Updates,
        state: MasterWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        if params is None:
            raise ValueError("`master_weights` needs the parameters: call `tx.update(grads, opt_state, params)`")
        full = jax.tree.map(lambda p, m: m if _is_low(p) else p, params, state.master)
        steps, inner_state = inner.update(jax.tree.map(_full, updates), state.inner_state, full, **extra_args)
        moved = optax.apply_updates(full, steps)

        def way(p: Any, m: Any, step: Any) -> Any:
            return _full(m.astype(p.dtype)) - _full(p) if _is_low(p) else step

        return jax.tree.map(way, params, moved, steps), MasterWeightsState(_low_only(params, moved), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_low(x: Any) -> bool:
    dtype = jnp.result_type(x)
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def _full(x: Any) -> Any:
    return x.astype(jnp.float32) if _is_low(x) else x


def _low_only(params: Any, masters: Any) -> Any:
    return jax.tree.map(lambda p, m: m if _is_low(p) else optax.MaskedNode(), params, masters)
