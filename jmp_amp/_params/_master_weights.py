"""Float32 master weights of low-precision parameters, kept in the optimizer state."""

from typing import Any, NamedTuple

import jax
import optax

from jmp_amp._loss_scale import check_inner
from jmp_amp._params._low_precision import (
    check_params,
    deltas,
    is_low_precision,
    round_to_params,
    upcast,
    where_frozen,
)


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
        master: float32 copies of the parameters whose dtype is narrower than float32; `optax.MaskedNode` in place of
            all other parameters, which need no copy.
        inner_state: the state of the wrapped transformation, initialized with float32 parameters.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> state = amp.master_weights(optax.sgd(0.1)).init({"w": jnp.ones(2, jnp.float16)})
        >>> state.master["w"].dtype
        dtype('float32')
    """

    master: Any
    inner_state: optax.OptState


def master_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps a transformation so that it updates float32 masters of the model's float16 or bfloat16 parameters.

    Use it when the model's parameters themselves are low precision. `inner` receives float32 gradients and the
    float32 masters. The new parameters are the new masters, rounded to the dtype of the parameters. Updates that are
    too small for that dtype accumulate in the masters.

    The returned updates are float32: the difference between the rounded new master and the old parameter. Hence
    `optax.apply_updates` returns exactly the rounded masters.

    If a finite master exceeds the largest finite number of the dtype (65504 for float16), its parameter is that number.
    If a master is infinite, its parameter is infinite.

    `inner` receives parameters of float32 and wider dtypes unchanged. If you modify the model's parameters yourself,
    the next step overwrites them with the masters. Replace an infinite or NaN parameter by a finite number first,
    because `optax.apply_updates` adds.

    A parameter is frozen if its gradient is None or `optax.MaskedNode`: `inner` receives that placeholder, the
    updates contain it, and the master does not change.

    The update is float32, so if one step shrinks a float16 parameter more than 8192-fold (bfloat16: 65536-fold), the
    new parameter can differ from its rounded master by 2**-24 times the old parameter; the next step corrects it.
    Backends that flush subnormal float32 values to zero, such as CPUs, also flush bfloat16 parameters below 1.2e-38.

    Args:
        inner: any optax transformation.

    Returns:
        An optax transformation whose `update` needs `params`. The masters need 4 bytes for each low-precision
        parameter. Wrap it in `dynamic_loss_scale`: `dynamic_loss_scale(master_weights(optax.adamw(1e-3)))`.

    Raises:
        TypeError: `inner` is not an optax transformation.
        ValueError: `update` is called without `params`.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> tx = amp.master_weights(optax.sgd(1e-4))
        >>> params = {"w": jnp.ones(2, jnp.float16)}
        >>> state = tx.init(params)
        >>> for _ in range(10):  # float16 has no number between 1 - 2**-11 and 1
        ...     updates, state = tx.update({"w": jnp.ones(2, jnp.float16)}, state, params)
        ...     params = optax.apply_updates(params, updates)
        >>> print(params["w"], state.master["w"])
        [0.999 0.999] [0.99899983 0.99899983]

    References:
        Micikevicius et al., [Mixed Precision Training](https://arxiv.org/abs/1710.03740), 2018, section 3.1; apex's O2.
    """
    check_inner(inner, "master_weights")
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> MasterWeightsState:
        full = upcast(params)
        return MasterWeightsState(_masters(params, full), inner.init(full))

    def update(
        updates: optax.Updates,
        state: MasterWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MasterWeightsState]:
        check_params("master_weights", params)
        params, master = where_frozen(updates, updates, params), where_frozen(updates, updates, state.master)
        full = jax.tree.map(lambda p, m: m if is_low_precision(p) else p, params, master)
        full_updates, inner_state = inner.update(upcast(updates), state.inner_state, full, **extra_args)
        new_full = optax.apply_updates(full, full_updates)
        new_master = where_frozen(updates, state.master, _masters(params, new_full))
        rounded = round_to_params(params, new_full)
        return deltas(params, rounded, full_updates), MasterWeightsState(new_master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _masters(params: Any, full: Any) -> Any:
    """Returns the leaves of `full` whose parameter is low precision, and `optax.MaskedNode` for the others."""
    return jax.tree.map(lambda p, x: x if is_low_precision(p) else optax.MaskedNode(), params, full)
