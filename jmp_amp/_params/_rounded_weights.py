"""Low-precision parameters without masters: float32 updates, rounded into the parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_amp._loss_scale import check_inner
from jmp_amp._params._low_precision import check_params, deltas, round_to_params, upcast, where_frozen


class RoundedWeightsState(NamedTuple):
    """State of `rounded_weights`.

    Attributes:
        step: int32[], the number of steps so far. `seed` and `step` determine the random bits of the next step.
        inner_state: the state of the wrapped transformation, initialized with float32 parameters.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> state = amp.rounded_weights(optax.sgd(0.1), "stochastic").init({"w": jnp.ones(2, jnp.bfloat16)})
        >>> state.step.item()
        0
    """

    step: jax.Array
    inner_state: optax.OptState


def rounded_weights(
    inner: optax.GradientTransformation, rounding: str = "nearest", seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """Wraps a transformation so that it updates low-precision parameters in float32, without masters.

    Use it instead of `master_weights` to save 4 bytes for each parameter. `inner` receives float32 gradients and
    parameters and keeps its state in float32. The new parameters are rounded to their dtype:

    - `"nearest"` loses updates of less than half a unit in the last place.
    - `"stochastic"` rounds up or down at random, to each of the two neighbours with a probability proportional to the
      distance from the other one, so updates are exact on average. Values that the dtype can represent do not change.

    With both, a finite value beyond the largest finite number of the dtype becomes that number.

    A parameter is frozen if its gradient is None or `optax.MaskedNode`: `inner` receives that placeholder, and the
    updates contain it.

    Inside `shard_map` all devices draw the same random bits, so replicas stay equal. Backends that flush subnormal
    float32 values to zero, such as CPUs, also flush bfloat16 parameters and updates below 1.2e-38: there, a parameter
    below 1.5e-36 cannot change by one unit in the last place.

    Args:
        inner: any optax transformation.
        rounding: `"nearest"` or `"stochastic"`.
        seed: seeds the random bits of stochastic rounding.

    Returns:
        An optax transformation whose `update` needs `params`. Wrap it in `dynamic_loss_scale`. Its updates are float32:
        the difference between the new and the old parameter. Hence `optax.apply_updates` does not round again, unless
        a parameter shrinks as far as `master_weights` describes.

    Raises:
        TypeError: `inner` is not an optax transformation.
        ValueError: `rounding` is unknown, or `update` is called without `params`.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> params = {"w": jnp.ones(1000, jnp.bfloat16)}
        >>> for rounding in ("nearest", "stochastic"):  # bfloat16 has no number between 1 - 2**-8 and 1
        ...     tx = amp.rounded_weights(optax.sgd(2.0**-10), rounding)
        ...     updates, _ = tx.update({"w": jnp.ones(1000)}, tx.init(params), params)
        ...     print(bool((optax.apply_updates(params, updates)["w"] < 1).any()))
        False
        True

    References:
        Gupta et al., [Deep Learning with Limited Numerical Precision](https://arxiv.org/abs/1502.02551), 2015. apex's
        O3 has no masters either.
    """
    check_inner(inner, "rounded_weights")
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f'`rounding` must be "nearest" or "stochastic", got {rounding!r}')
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> RoundedWeightsState:
        return RoundedWeightsState(jnp.zeros((), jnp.int32), inner.init(upcast(params)))

    def update(
        updates: optax.Updates,
        state: RoundedWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, RoundedWeightsState]:
        check_params("rounded_weights", params)
        params = where_frozen(updates, updates, params)
        full = upcast(params)
        full_updates, inner_state = inner.update(upcast(updates), state.inner_state, full, **extra_args)
        new_full = optax.apply_updates(full, full_updates)
        keys = None
        if rounding == "stochastic":
            keys = optax.tree.split_key_like(jax.random.fold_in(jax.random.key(seed), state.step), new_full)
        rounded = round_to_params(params, new_full, keys)
        return deltas(params, rounded, full_updates), RoundedWeightsState(optax.safe_increment(state.step), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
