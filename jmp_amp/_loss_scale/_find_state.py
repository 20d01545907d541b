"""Search for the loss scale in an optimizer state."""

from typing import Any

import jax
import optax
from jax.tree_util import keystr

from jmp_amp._loss_scale._dynamic_loss_scale import DynamicLossScaleState
from jmp_amp._loss_scale._loss_scale_state import LossScaleState
from jmp_amp._loss_scale._unscale_and_check import UnscaleAndCheckState


def find_state(opt_state: Any) -> LossScaleState:
    """Returns the only `LossScaleState` in a tree, without the boxes that Flax NNX's optimizer puts around arrays.

    Every step calls it to get the scale, so it also checks that `dynamic_loss_scale` is the outermost wrapper.

    Raises:
        ValueError: there is no loss scale or more than one, or a transformation outside of `dynamic_loss_scale` changes
            its gradients.
    """
    found = [(path, x) for path, x in jax.tree.leaves_with_path(opt_state, is_leaf=is_state) if is_state(x)]
    if not found:
        raise ValueError(
            f"there is no `LossScaleState` in this {type(opt_state).__name__}; "
            "wrap the optimizer in `amp.dynamic_loss_scale(...)` and pass the state that its `init` or `update` returns"
        )
    if len(found) > 1:
        paths = ", ".join(f"opt_state{keystr(path)}" for path, _ in found)
        raise ValueError(f"there are {len(found)} loss scales in this state; pass only one of: {paths}")
    _check_outermost(opt_state)
    return LossScaleState(*jax.tree.leaves(found[0][1]))


def find_wrapper_states(opt_state: Any) -> list[DynamicLossScaleState]:
    """Returns every state of `dynamic_loss_scale` in a tree."""
    return [x for x in jax.tree.leaves(opt_state, is_leaf=_is_wrapper_state) if _is_wrapper_state(x)]


def is_state(x: Any) -> bool:
    """Returns whether `x` is a `LossScaleState`."""
    return isinstance(x, LossScaleState)


def _is_wrapper_state(x: Any) -> bool:
    return isinstance(x, DynamicLossScaleState)


def _check_outermost(opt_state: Any) -> None:
    """Raises if a transformation outside of `dynamic_loss_scale` would unscale its gradients or hide overflows."""
    kinds = (DynamicLossScaleState, UnscaleAndCheckState, *_FORBIDDEN_OUTSIDE)
    for path, x in jax.tree.leaves_with_path(opt_state, is_leaf=lambda x: isinstance(x, kinds)):
        location = f"at opt_state{keystr(path)}"
        if isinstance(x, UnscaleAndCheckState) and find_wrapper_states(opt_state):
            raise ValueError(
                f"`unscale_and_check` is outside of `dynamic_loss_scale`, {location}, so it would unscale the "
                "gradients a second time, and replace overflows by zeros; move it inside, or remove it"
            )
        if type(x) in _FORBIDDEN_OUTSIDE and find_wrapper_states(x):
            name, consequence, cure = _FORBIDDEN_OUTSIDE[type(x)]
            raise ValueError(f"`{name}` wraps `dynamic_loss_scale`, {location}, so {consequence}; {cure}")


_FORBIDDEN_OUTSIDE = {
    optax.ApplyIfFiniteState: (
        "optax.apply_if_finite",
        "the loss scale would not back off on overflow",
        "remove it: `dynamic_loss_scale` skips overflows itself",
    ),
    optax.MultiStepsState: (
        "optax.MultiSteps",
        "an overflow would remain in the accumulated gradients",
        "move it inside, `dynamic_loss_scale(optax.MultiSteps(...).gradient_transformation())`, or use "
        "`amp.value_and_grad(..., accumulate_steps=)`",
    ),
}
