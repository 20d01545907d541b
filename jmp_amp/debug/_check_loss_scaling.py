"""`check_loss_scaling`: checks that a train step scales and unscales its gradients consistently."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jmp_amp._calls import transformation
from jmp_amp._jaxpr import trace_call
from jmp_amp._loss_scale import LossScaleState
from jmp_amp.debug._unit_checker import UnitChecker


@transformation
def check_loss_scaling(step: Callable) -> Callable[..., None]:
    """Returns a function that raises if a train step does not scale and unscale its gradients consistently.

    It traces `step` and runs nothing. The check is a dimensional analysis with the loss scale as its unit: the loss has
    no unit, the scaled loss and its gradients have the unit of the scale, and unscaled gradients have none. Values that
    are added, compared or selected between must have the same unit; exponentials and logarithms take values without a
    unit. The check finds these errors, in any optimizer:

    - The loss is not scaled, or scaled by another scale than the one that divides the gradients. If the step uses
      `dynamic_loss_scale`, tracing the step already raises for this.
    - The gradients are unscaled twice, in part, or not at all, before they reach the optimizer state or the parameters.
    - The gradients are clipped, or weight decay or noise is added, while they are scaled.

    Args:
        step: the train step, jitted or not. Its arguments contain the loss scale, as the state of `dynamic_loss_scale`
            or as a `LossScaleState`.

    Returns:
        A function with the signature of `step` that returns None. Its array arguments may be `jax.ShapeDtypeStruct`.

    Raises:
        TypeError: `step` is not callable.
        ValueError: the returned function found an error, and names its lines; or its arguments contain no loss scale.

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
        ValueError: `step` does not scale and unscale its gradients consistently:
        - at ... (step), the program adds a value multiplied by the loss scale and an unscaled value: the ...

    References:
        torch's `GradScaler` records a stage for each optimizer, and raises if `unscale_` is called twice.
    """
    if not callable(step):
        raise TypeError(f"`step` must be a function, got {type(step).__name__}")

    @functools.wraps(step, updated=())
    def check(*args: Any, **kwargs: Any) -> None:
        program, arrays, _ = trace_call(step, args, kwargs, jax.ShapeDtypeStruct)
        scales = _loss_scale_indices((args, kwargs), arrays)
        if not scales:
            raise ValueError(
                "the arguments contain no loss scale; pass the state of `dynamic_loss_scale`, or a `LossScaleState`"
            )

        errors = UnitChecker(scales).errors(program)
        if errors:
            lines = "\n".join(f"- {error}" for error in errors[:_MAX_ERRORS])
            raise ValueError(f"`step` does not scale and unscale its gradients consistently:\n{lines}")

    return check


_MAX_ERRORS = 5


def _loss_scale_indices(tree: Any, arrays: Sequence[Any]) -> list[int]:
    """Returns the indices of the arrays that are loss scales of a `LossScaleState` in `tree`."""
    states = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, LossScaleState))
    scales = [jax.tree.leaves(x.loss_scale)[0] for x in states if isinstance(x, LossScaleState)]
    return [i for i, x in enumerate(arrays) if any(x is scale for scale in scales)]
