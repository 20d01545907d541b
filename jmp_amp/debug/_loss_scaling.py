"""`check_loss_scaling`: follows the loss scale through a train step, as a unit is followed through a formula."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jmp_amp._jaxpr import flat_call, trace
from jmp_amp._loss_scale import LossScaleState
from jmp_amp.debug._units import Follower


def check_loss_scaling(step: Callable) -> Callable[..., None]:
    """Returns a function that raises where a train step scales and unscales its gradients in different ways.

    It traces `step` and runs nothing. The loss scale is followed through the program as a physical unit is followed
    through a formula: the loss has none, the scaled loss and its gradients have that of the scale, unscaled gradients
    have none again. What is added, compared or chosen between must have the same unit; an exponential or a logarithm
    takes values without one. So these are found, whatever made them:

    - the loss was not scaled, or by another scale than the gradients are divided by (in a traced step,
      `dynamic_loss_scale` raises for that by itself);
    - gradients are unscaled twice, in part, or not at all, before they reach the optimizer's state or the parameters;
    - they are clipped, or a weight decay or noise is added, while they are scaled.

    Args:
        step: the train step, jitted or not, as it is called. Its arguments hold the loss scale, as the state of
            `dynamic_loss_scale` or as a `LossScaleState`.

    Returns:
        A function with the arguments of `step` (shapes suffice), which returns None.

    Raises:
        ValueError: the returned function found such a fault; the message says at which lines. Or there is no loss scale
            among the arguments.
        TypeError: `step` is not callable.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> tx = amp.dynamic_loss_scale(optax.sgd(0.1))
        >>> def step(params, state, decay=0.0):
        ...     scale = amp.get_loss_scale(state)
        ...     loss, grads = amp.value_and_grad(lambda w: jnp.sum(w**2), loss_scale=scale)(params)
        ...     grads = grads + decay * params if decay else grads
        ...     updates, state = tx.update(grads, state, params)
        ...     return optax.apply_updates(params, updates), state, loss
        >>> params = jnp.ones(3)
        >>> amp.debug.check_loss_scaling(step)(params, tx.init(params))
        >>> amp.debug.check_loss_scaling(step)(params, tx.init(params), decay=0.1)
        Traceback (most recent call last):
          ...
        ValueError: the loss scale does not come out even:
        - at ... (step) adds a value multiplied by the loss scale to the power 1 with one that is not scaled: ...

    References:
        torch's `GradScaler` keeps a stage for each optimizer, and raises where `unscale_` is called twice.
    """
    if not callable(step):
        raise TypeError(f"`step` must be a function, got {type(step).__name__}")

    @functools.wraps(step, updated=())
    def check(*args: Any, **kwargs: Any) -> None:
        flat, arrays = flat_call(step, args, kwargs, jax.ShapeDtypeStruct)
        scales = _scales_among((args, kwargs), arrays)
        if not scales:
            raise ValueError(
                "there is no loss scale among the arguments; pass the state of `dynamic_loss_scale`, or a scale's own"
            )

        faults = Follower(scales).faults(trace(flat, arrays))
        if faults:
            shown = "\n".join(f"- {fault}" for fault in faults[:_SHOWN])
            raise ValueError(f"the loss scale does not come out even:\n{shown}")

    return check


_SHOWN = 5


def _scales_among(tree: Any, arrays: Sequence[Any]) -> list[int]:
    """Returns which of the arrays are loss scales."""
    states = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, LossScaleState))
    scales = [jax.tree.leaves(x.loss_scale)[0] for x in states if isinstance(x, LossScaleState)]
    return [i for i, x in enumerate(arrays) if any(x is scale for scale in scales)]
