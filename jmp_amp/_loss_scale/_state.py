"""Reading, setting and checking the loss scale in an optimizer state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.tree_util import keystr

from jmp_amp import _jaxpr as jx
from jmp_amp._calls import check_concrete, listed
from jmp_amp._loss_scale._gradients import is_frozen
from jmp_amp._loss_scale._rule import NEVER, LossScaleState, is_concrete, is_scale, to_number
from jmp_amp._loss_scale._scaled_grads import SET_SCALE, note_state
from jmp_amp._loss_scale._transformations import DynamicLossScaleState
from jmp_amp._modules import is_module, state_of_modules, update_modules
from jmp_amp._trees import is_inexact


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
        value: a number, cast to float32, that multiplies the loss of the next step, or an array of one for each state
            that `vmap` created; or a `LossScaleState`.

    Returns:
        A state of the same structure; the same object if it is an `nnx.Optimizer`.

    Raises:
        TypeError: `value` is neither a number nor a `LossScaleState`.
        ValueError: a scale is not between 2^-126 and 2^126 (a traced one is not checked), or `opt_state` does not hold
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
    if isinstance(value, LossScaleState):
        new = find_state(value)
        for scale in np.ravel(new.loss_scale) if is_concrete(new.loss_scale) else ():
            to_number("value.loss_scale", scale)
    else:
        if is_concrete(value):
            numbers = np.ravel(value) if np.shape(value) == jnp.shape(old.loss_scale) != () else [value]
            scale = np.reshape([to_number("value", x) for x in numbers], np.shape(value))
        else:
            scale = checkpoint_name(jnp.asarray(value, jnp.float32), SET_SCALE)  # does nothing
        new = old._replace(loss_scale=jnp.asarray(scale), growth_tracker=jnp.asarray(0))
    new = jax.tree.map(lambda x, like: jnp.broadcast_to(x.astype(like.dtype), like.shape), new, old)

    def replace(x: Any) -> Any:
        # The structure of `x`, because Flax NNX boxes arrays.
        return jax.tree.unflatten(jax.tree.structure(x), new) if isinstance(x, LossScaleState) else x

    new_state = jax.tree.map(replace, opt_state, is_leaf=lambda x: isinstance(x, LossScaleState))
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
    for _, state in _nodes(opt_state, DynamicLossScaleState):
        (sum_of_squares,) = jax.tree.leaves(state.sum_of_squares)  # Flax NNX boxes arrays
        values["grad_norm"] = jnp.sqrt(jnp.abs(sum_of_squares))
        flags = jax.tree.leaves_with_path(state.nonfinite_leaves)
        values |= {f"nonfinite/{keystr(path, simple=True, separator='/')}": flag for path, flag in flags}
    return values


class LossScaleError(ArithmeticError):
    """Raised by `check_health` if training cannot recover by itself.

    Examples:
        >>> import jmp_amp as amp
        >>> rule = amp.LossScale(init_scale=1.0)
        >>> state = rule.update(rule.update(rule.init(), False), False)
        >>> try:
        ...     amp.check_health(state)
        ... except amp.LossScaleError as error:
        ...     print(str(error).partition(".")[0])
        the gradients overflow although the loss scale is at its minimum
    """


def check_health(
    opt_state: Any, params: Any = None, *, grads: Any = None, max_skips: int = 50, min_scale: float = 1.0
) -> None:
    """Raises `LossScaleError` if training cannot recover by itself.

    It waits for the device, so call it only occasionally, outside `jit`. If `params` or `grads` are sharded over
    several processes, all of these must call it, because the check runs a computation on all their devices.

    Args:
        opt_state: a `LossScaleState`, or any state that holds exactly one.
        params: parameters to check, or a whole model; leaves that are not arrays are ignored. A parameter that is not
            finite never becomes finite again.
        grads: the gradients of the last step, if available; the message then names those that were not finite.
        max_skips: the number of consecutive skipped steps that is an error. For comparison, a scale of 2^24 reaches 1
            after 24 overflows.
        min_scale: two consecutive overflows are an error if the scale is at most `min_scale`. Pass the `min_scale` of
            the rule in use. For `LossScale.none()`, whose scale is always 1, pass 0 to tolerate two bad batches in a
            row.

    Raises:
        LossScaleError: the loss scale is not between 2^-126 and 2^126; or parameters are not finite; or masters are
            the remainders of a checkpoint of `low_precision_params(remainder=True)`, read as numbers; or the last two
            steps overflowed and the scale is at most `min_scale`, so that a lower one is needed, or loss scaling is not
            the cause; or the last `max_skips` steps overflowed. The message names the leaves that are not finite, and
            contains the history of the scale and a cure.
        TypeError: called inside `jit`.
        ValueError: `max_skips` is not positive, or `opt_state` does not hold exactly one `LossScaleState`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> rule = amp.LossScale(init_scale=1.0)
        >>> state = rule.update(rule.init(), False)
        >>> amp.check_health(state, {"w": jnp.ones(2)})
        >>> amp.check_health(state, {"w": jnp.array([1.0, jnp.nan])})
        Traceback (most recent call last):
          ...
        jmp_amp._loss_scale._state.LossScaleError: parameters are not finite: ['w'] (1 of 2 values). ...

    References:
        DeepSpeed raises on an overflow at the minimum scale; torch and apex do not.
    """
    if max_skips < 1:
        raise ValueError(f"`max_skips` must be at least 1, got {max_skips}")
    state = find_state(opt_state)
    cure = "call it on the outputs of the jitted step, or log `amp.metrics(opt_state)`"
    check_concrete((state, params, grads), "check_health", cure)
    state = jax.device_get(state)
    consecutive_skips, cure = state.notfinite_count.max(), _CURE
    wrapper = next((x for _, x in _nodes(opt_state, DynamicLossScaleState)), None)
    flags = None if wrapper is None else wrapper.nonfinite_leaves
    nodes = jax.tree.leaves(opt_state, is_leaf=_has_masters)
    if not is_scale(state.loss_scale).all():
        fact = "the loss scale in the state is not between 2^-126 and 2^126"
        cure = "call `amp.set_loss_scale(opt_state, 2.0**16)`, and check the code that created or loaded the state"
    elif description := describe_nonfinite(count_nonfinite(params), params):
        fact = f"parameters are not finite: {description}"
        cure = "restore the last checkpoint, and check which transformation returns non-finite updates"
    elif any(_are_remainders(x.masters, params) for x in nodes if _has_masters(x)):
        fact = "the masters of parameters in the state are their remainders, of a run with `remainder=True`"
        cure = (
            "restore the checkpoint in the form that it was saved in; or cast the masters of bfloat16 parameters to "
            "uint16, and write `state._replace(masters=masters).with_float32(params)`"
        )
    elif ((state.notfinite_count > 1) & (state.loss_scale <= min_scale)).any():
        fact = "the gradients overflow although the loss scale is at its minimum"
        cure = _CURE if (state.hysteresis_tracker == NEVER).all() else f"{_FLOOR_CURE}; if it is not, {_CURE}"
    elif consecutive_skips >= max_skips:
        fact = f"the last {consecutive_skips} steps overflowed"
    else:
        return
    if description := describe_nonfinite(count_nonfinite(grads), grads) or describe_nonfinite(flags):
        fact += f"; non-finite gradients: {description}"
    raise LossScaleError(
        f"{fact}. Loss scale: {state.loss_scale.min()}; skipped steps: {state.total_notfinite.max()}, of which "
        f"{consecutive_skips} in a row until now; finite steps since the last overflow or change of the "
        f"scale: {max(state.growth_tracker.min(), 0)}. Cure: {cure}"
    )


_FLOOR_CURE = (
    "if the loss is finite, its gradients are too large for the compute dtype: let the scale go below 1, "
    "`amp.LossScale(min_scale=2.0**-20)`, or write `amp.autocast(fun, weight_grad_dtype='float32')`"
)
_CURE = (
    "check for non-finite inputs or parameters, a division by zero, the logarithm of zero, or a value outside the "
    "range of the compute dtype; run the affected code under `amp.full_precision()`"
)


def _has_masters(x: Any) -> bool:
    """Whether a node is the state of `low_precision_params`, which stands above this package."""
    return "masters" in getattr(x, "_fields", ())


def _are_remainders(masters: Any, params: Any) -> bool:
    """Whether masters are whole numbers from 0 to 65535, as remainders are that were restored as float32.

    Masters may be whole numbers. They may be far from parameters that the user has changed. But as they start from
    bfloat16, those that bfloat16 does not hold have been updated, and then they are not all whole.
    """
    leaves = zip(*(jax.tree.leaves(tree, is_leaf=is_frozen) for tree in (masters, params)), strict=False)
    pairs = [(m, p) for m, p in leaves if getattr(p, "dtype", None) == jnp.bfloat16]
    pairs = [(m, p.astype(m.dtype)) for m, p in pairs if is_inexact(m) and jnp.shape(m) == p.shape]
    are_whole = all(jnp.all((m == jnp.floor(m)) & (m >= 0) & (m < 2**16)) for m, _ in pairs)
    return are_whole and any(jnp.any((jnp.abs(p) < m / 2) & (m != lax.reduce_precision(m, 8, 7))) for m, p in pairs)


def count_nonfinite(tree: Any) -> Any:
    """Returns int32[] for each leaf, the number of its non-finite values; 0 for a leaf that is no floating array."""

    def count(x: Any) -> jax.Array:
        return jnp.sum(~jnp.isfinite(x), dtype=jnp.int32) if is_inexact(x) else jnp.int32(0)

    return jx.with_leaves(tree, map(count, jax.tree.leaves(tree)))


def describe_nonfinite(counts: Any, tree: Any = None) -> str:
    """Returns the tree paths of the first leaves that are not finite, with their counts; empty if all are.

    Args:
        counts: the result of `count_nonfinite`, or a tree of bool[], true for a leaf that is not finite. Counts with
            a leading axis, as of the states of several seeds, are summed.
        tree: the tree that was counted; if given, the description says of how many values.
    """
    sizes = [""] * len(jax.tree.leaves(counts))
    if tree is not None:
        sizes = [f" of {getattr(x, 'size', 1)} values" for x in jax.tree.leaves(tree)]
    nonfinite = []
    for (path, count), size in zip(jax.tree.leaves_with_path(jax.device_get(counts)), sizes, strict=True):
        if np.any(count):
            is_flag = np.result_type(count) == np.bool_
            nonfinite.append((keystr(path) or "the parameters") + ("" if is_flag else f" ({np.sum(count)}{size})"))
    return listed(nonfinite)


def find_state(opt_state: Any) -> LossScaleState:
    """Returns the only `LossScaleState` in a tree, without the boxes that Flax NNX's optimizer puts around arrays.

    Raises:
        ValueError: there is no loss scale or more than one, or a transformation around it that must be inside.
    """
    found = _nodes(opt_state, LossScaleState)
    if not found:
        raise ValueError(
            f"there is no `LossScaleState` in this {type(opt_state).__name__}; "
            "wrap the optimizer in `amp.dynamic_loss_scale(...)` and pass the state that its `init` or `update` returns"
        )
    if len(found) > 1:
        paths = ", ".join(f"opt_state{path}" for path, _ in found)
        raise ValueError(f"there are {len(found)} loss scales in this state; pass only one of: {paths}")
    for _, around in _nodes(opt_state, *_WRONG_AROUND):
        if _nodes(around, LossScaleState):
            name, fault = _WRONG_AROUND[type(around)]
            raise ValueError(
                f"`{name}` around `dynamic_loss_scale` {fault}; move it inside, `dynamic_loss_scale({name}(...))`"
            )
    state = LossScaleState(*jax.tree.leaves(found[0][1]))
    note_state(state.loss_scale, [x for x in jax.tree.leaves(opt_state, is_leaf=_is_of_optax) if _is_of_optax(x)])
    return state


def _is_of_optax(x: Any) -> bool:
    """Whether a node is the state of an optimizer: a tuple, but none of the user, or that of `optax.named_chain`."""
    if type(x) is dict:
        return bool(x) and all(isinstance(value, tuple) for value in x.values())
    return isinstance(x, tuple) and type(x).__module__.partition(".")[0] in ("builtins", "optax", "jmp_amp")


# The program of one `update` does not show these, as it takes the sum, or the gradients that are let through.
_WRONG_AROUND: dict[type, tuple[str, str]] = {
    optax.MultiStepsState: ("MultiSteps", "keeps sums of scaled gradients, in which an overflow remains"),
    optax.ApplyIfFiniteState: ("apply_if_finite", "hides overflows from it, so that the loss scale does not back off"),
}


def _nodes(tree: Any, *kinds: type) -> list[tuple[str, Any]]:
    """Returns the outermost nodes of these types in a tree, with their paths."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [(keystr(path), x) for path, x in leaves if isinstance(x, kinds)]
