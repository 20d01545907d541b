"""Reading, setting and logging the loss scale in an optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr

from jmp_amp._loss_scale._arguments import to_number
from jmp_amp._loss_scale._find_state import find_state, find_wrapper_states, is_state
from jmp_amp._loss_scale._loss_scale_state import LossScaleState
from jmp_amp._modules import is_module, state_of_modules, update_modules


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


def set_loss_scale(opt_state: Any, value: float | jax.Array | LossScaleState) -> Any:
    """Returns the optimizer state with the loss scale set to `value`.

    A number resets the growth tracker to 0, and the other counters keep their values. A `LossScaleState`, such as that
    of `interop.torch.load_state_dict`, replaces the scale and all counters. `value` is not clamped to the `min_scale`
    and `max_scale` of the rule, which limit only the changes that the rule makes.

    Args:
        opt_state: a `LossScaleState`, or any state that holds exactly one, inside or outside `jit`. An `nnx.Optimizer`
            is updated in place.
        value: a scalar, cast to float32, that multiplies the loss of the next step; or a `LossScaleState`.

    Returns:
        A state of the same structure; the same object if it is an `nnx.Optimizer`.

    Raises:
        TypeError: `value` is neither a number nor a `LossScaleState`.
        ValueError: a number is not between 2^-126 and 2^126 (a traced one is not checked), or `opt_state` does not hold
            exactly one `LossScaleState`.

    Examples:
        >>> import jmp_amp as amp
        >>> state = amp.set_loss_scale(amp.LossScale().init(), 2.0**10)
        >>> print(amp.get_loss_scale(state))
        1024.0
        >>> saved = dict(scale=3.0, growth_factor=4.0, backoff_factor=0.5, growth_interval=2, _growth_tracker=1)
        >>> rule, scale_state = amp.interop.torch.load_state_dict(saved)
        >>> state = amp.set_loss_scale(state, scale_state)
        >>> print(state.loss_scale, state.growth_tracker)
        3.0 1
    """
    old = find_state(opt_state)
    if is_state(value):
        new = find_state(value)
    else:
        scale = value if isinstance(value, jax.core.Tracer) else to_number("value", value)
        new = old._replace(loss_scale=jnp.asarray(scale), growth_tracker=jnp.asarray(0))
    new = jax.tree.map(lambda x, like: jnp.broadcast_to(x.astype(like.dtype), like.shape), new, old)

    def replace(x: Any) -> Any:
        # The structure of `x`, because Flax NNX boxes arrays.
        return jax.tree.unflatten(jax.tree.structure(x), new) if is_state(x) else x

    new_state = jax.tree.map(replace, opt_state, is_leaf=is_state)
    if not is_module(opt_state):
        return new_state
    update_modules(opt_state, state_of_modules(new_state))
    return opt_state


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
