"""Low-precision parameters: with float32 masters inside the optimizer state, or rounded where they are."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_amp._loss_scale import is_hole
from jmp_amp._params._rounding import round_stochastically, round_to_nearest
from jmp_amp._policy import is_inexact, wide_dtype


class MasterWeightsState(NamedTuple):
    """State of `master_weights`.

    Attributes:
        master: float32 masters of the parameters below float32; nothing (`optax.MaskedNode`) for the others, which are
            their own masters.
        inner_state: the state of the wrapped transformation, over float32 parameters.

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
    """Wraps a transformation so that it sees float32 parameters, while the model's are float16 or bfloat16.

    `inner` gets float32 gradients and masters, and moves the masters. The updates that come back are float32, the way
    from each parameter to its rounded master, so `optax.apply_updates` leaves parameters that are the rounded masters,
    and steps that are too small for the parameters' dtype add up in the masters until they are not.

    A master beyond the largest finite number of the dtype leaves its parameter at that number, 65504 in float16, until
    it comes back. An infinite master makes its parameter infinite.

    Parameters of float32 and wider are handed to `inner` as they are. Where the model's parameters are changed from
    outside, the masters win at the next step; an infinite or NaN parameter needs a finite number in its place first,
    because `optax.apply_updates` adds.

    Where the gradients hold None or `optax.MaskedNode`, the parameters are frozen: `inner` and the updates get that in
    their place, and the masters stay.

    A float16 parameter that shrinks more than 8192-fold in one step (bfloat16: 65536-fold) can miss its rounded master
    by 2**-24 of its former size, since the update is float32; the next step makes up for it. Backends that flush
    subnormal float32 values to zero, such as CPUs, flush those of bfloat16 parameters, too: below 1.2e-38.

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
    _check_inner(inner)
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
        _check_params("master_weights", params)
        params, master = _where_frozen(updates, updates, params), _where_frozen(updates, updates, state.master)
        full = jax.tree.map(lambda p, m: m if _is_low(p) else p, params, master)
        steps, inner_state = inner.update(jax.tree.map(_full, updates), state.inner_state, full, **extra_args)
        moved = optax.apply_updates(full, steps)
        master = _where_frozen(updates, state.master, _low_only(params, moved))
        return _ways(params, _round_low(params, moved), steps), MasterWeightsState(master, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


class RoundedWeightsState(NamedTuple):
    """State of `rounded_weights`.

    Attributes:
        step: int32[], the steps so far; with the seed it makes the random bits of the next one.
        inner_state: the state of the wrapped transformation, over float32 parameters.

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
    """Wraps a transformation so that it works in float32 on low-precision parameters that have no masters.

    `inner` gets float32 gradients and parameters and keeps its state in float32. What it makes of the parameters is
    rounded to their dtype. Rounded to the nearest, steps of less than half a unit in the last place are lost;
    stochastically, to one of the two neighbours with the odds of the distances, they arrive on average, and what the
    dtype holds stays. Either way finite values beyond the largest finite number of the dtype become that number.

    Where the gradients hold None or `optax.MaskedNode`, the parameters are frozen: `inner` and the updates get that in
    their place.

    Inside `shard_map` every device draws the same random bits, so that replicas stay equal. Backends that flush
    subnormal float32 values to zero, such as CPUs, flush bfloat16 parameters and updates below 1.2e-38: a parameter
    below 1.5e-36 cannot move by one last place there.

    Args:
        inner: any optax transformation.
        rounding: `"nearest"` or `"stochastic"`.
        seed: of the random bits of stochastic rounding.

    Returns:
        An optax transformation whose `update` needs `params`; put it inside `dynamic_loss_scale`. Updates are float32,
        the way from each parameter to where it goes, so that `optax.apply_updates` rounds no more (unless one shrinks
        as far as `master_weights` says).

    Raises:
        TypeError: `inner` is something else.
        ValueError: `rounding` is neither of the two, or `update` is called without `params`.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> params = {"w": jnp.ones(1000, jnp.bfloat16)}
        >>> for rounding in ("nearest", "stochastic"):  # bfloat16 has nothing between 1 - 2**-8 and 1
        ...     tx = amp.rounded_weights(optax.sgd(2.0**-10), rounding)
        ...     updates, _ = tx.update({"w": jnp.ones(1000)}, tx.init(params), params)
        ...     print(bool((optax.apply_updates(params, updates)["w"] < 1).any()))
        False
        True

    References:
        Gupta et al., [Deep Learning with Limited Numerical Precision](https://arxiv.org/abs/1502.02551), 2015; apex's
        O3 has no masters either.
    """
    _check_inner(inner)
    if rounding not in ("nearest", "stochastic"):
        raise ValueError(f'`rounding` must be "nearest" or "stochastic", got {rounding!r}')
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> RoundedWeightsState:
        return RoundedWeightsState(jnp.zeros((), jnp.int32), inner.init(jax.tree.map(_full, params)))

    def update(
        updates: optax.Updates,
        state: RoundedWeightsState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, RoundedWeightsState]:
        _check_params("rounded_weights", params)
        params = _where_frozen(updates, updates, params)
        full = jax.tree.map(_full, params)
        steps, inner_state = inner.update(jax.tree.map(_full, updates), state.inner_state, full, **extra_args)
        moved = optax.apply_updates(full, steps)
        keys = None
        if rounding == "stochastic":
            keys = optax.tree.split_key_like(jax.random.fold_in(jax.random.key(seed), state.step), moved)
        rounded = _round_low(params, moved, keys)
        return _ways(params, rounded, steps), RoundedWeightsState(optax.safe_increment(state.step), inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def _where_frozen(grads: Any, frozen: Any, trained: Any) -> Any:
    """Takes what `frozen` has, be it a subtree, where the gradients hold None or a masked node, else from `trained`."""
    return jax.tree.map(lambda g, f, t: f if is_hole(g) else t, grads, frozen, trained, is_leaf=is_hole)


def _round_low(params: Any, full: Any, keys: Any = None) -> Any:
    """Rounds float32 values to the dtypes of their parameters below float32, stochastically if there are keys."""

    def round_leaf(p: Any, x: Any, key: Any = None) -> Any:
        if not _is_low(p):
            return x
        return round_to_nearest(x, p.dtype) if key is None else round_stochastically(x, p.dtype, key)

    return jax.tree.map(round_leaf, params, full, *([] if keys is None else [keys]))


def _ways(params: Any, rounded: Any, steps: Any) -> Any:
    """What takes each low-precision parameter to its rounded value; the others take the steps as they are."""

    def way(p: Any, target: Any, step: Any) -> Any:
        if not _is_low(p):
            return step
        # Nothing that is added makes an infinite parameter finite, but -inf would make it NaN.
        start = jnp.where(jnp.isfinite(p), _full(p), 0)
        # Negated, because it must be -0 where they are equal: adding +0 would change a parameter of -0.
        return -(start - _full(target))

    return jax.tree.map(way, params, rounded, steps)


def _check_inner(inner: Any) -> None:
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(f"`inner` must be an optax transformation, got {type(inner).__name__}")


def _check_params(name: str, params: Any) -> None:
    if params is None:
        raise ValueError(f"`{name}` needs the parameters: call `tx.update(grads, opt_state, params)`")


def _is_low(x: Any) -> bool:
    return is_inexact(x) and wide_dtype(jnp.result_type(x)) != jnp.result_type(x)


def _full(x: Any) -> Any:
    return x.astype(jnp.float32) if _is_low(x) else x


def _low_only(params: Any, masters: Any) -> Any:
    return jax.tree.map(lambda p, m: m if _is_low(p) else optax.MaskedNode(), params, masters)
