"""Reading, setting and logging the loss scale in an optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jmp_amp._loss_scale._arguments import to_number
from jmp_amp._loss_scale._find_state import find_state, find_wrapper_states, is_state


def get_loss_scale(opt_state: Any) -> jax.Array:
    """Returns the scale that multiplies the loss of the next step.

    Args:
        opt_state: a `LossScaleState`, or any state that holds exactly one, inside or outside `jit`.

    Returns:
        float32[], with leading axes if `vmap` created the state.

    Raises:
        ValueError: `opt_state` does not hold exactly one `LossScaleState`; the message lists the paths of several.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> tx = amp.dynamic_loss_scale(optax.adam(1e-3))
        >>> print(amp.get_loss_scale(tx.init({"w": jnp.ones(2)})))
        65536.0
    """
    return find_state(opt_state).loss_scale


def set_loss_scale(opt_state: Any, value: float | jax.Array) -> Any:
    """Returns the optimizer state with the loss scale set to `value`.

    The growth tracker is reset to 0; the other counters keep their values. `value` is not clamped to the `min_scale`
    and `max_scale` of the rule, which limit only the changes that the rule makes.

    Args:
        opt_state: a `LossScaleState`, or any state that holds exactly one, inside or outside `jit`.
        value: a scalar, cast to float32; multiplies the loss of the next step.

    Returns:
        A state of the same structure and dtypes.

    Raises:
        TypeError: `value` is not a number.
        ValueError: `value` is not between 2^-126 and 2^126 (a traced `value` is not checked), or `opt_state` does not
            hold exactly one `LossScaleState`.

    Examples:
        >>> import jmp_amp as amp
        >>> state = amp.set_loss_scale(amp.LossScale().init(), 2.0**10)
        >>> print(amp.get_loss_scale(state))
        1024.0
    """
    if not isinstance(value, jax.core.Tracer):
        value = to_number("value", value)
    old = find_state(opt_state)
    new = old._replace(
        loss_scale=jnp.broadcast_to(jnp.asarray(value, jnp.float32), old.loss_scale.shape),
        growth_tracker=jnp.zeros_like(old.growth_tracker),
    )

    def replace(x: Any) -> Any:
        # The structure of `x`, because Flax NNX boxes arrays.
        return jax.tree.unflatten(jax.tree.structure(x), new) if is_state(x) else x

    return jax.tree.map(replace, opt_state, is_leaf=is_state)


def metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Returns metrics of the loss scale for the log of a training run.

    Args:
        opt_state: a `LossScaleState`, or any state that holds exactly one, inside or outside `jit`.

    Returns:
        The fields of `LossScaleState` by name. A state of `dynamic_loss_scale` adds `grad_norm`, the global norm of the
        unscaled gradients of the last step before clipping; it is `inf` if they were not finite. A state of
        `dynamic_loss_scale(..., nonfinite_leaves=True)` also adds `nonfinite/PATH`, bool[], for each leaf: whether its
        gradient was not finite. All values stay on the device, and nothing waits for them.

    Raises:
        ValueError: `opt_state` does not hold exactly one `LossScaleState`.

    Examples:
        >>> import jmp_amp as amp
        >>> amp.metrics(amp.LossScale().init())["loss_scale"].item()
        65536.0
    """
    values = find_state(opt_state)._asdict()
    for state in find_wrapper_states(opt_state):
        (sum_of_squares,) = jax.tree.leaves(state.sum_of_squares)  # Flax NNX boxes arrays
        values["grad_norm"] = jnp.sqrt(jnp.abs(sum_of_squares))
        flags = jax.tree.leaves_with_path(state.nonfinite_leaves)
        values |= {f"nonfinite/{keystr(path, simple=True, separator='/')}": flag for path, flag in flags}
    return values
