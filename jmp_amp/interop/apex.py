"""Mixed precision training in one call, at one of apex's four opt levels."""

from collections.abc import Callable
from typing import Any, Unpack

import optax

from jmp_amp._autocast import AutocastOptions, autocast
from jmp_amp._calls import describe, quote
from jmp_amp._formats import parse_format
from jmp_amp._loss_scale import LossScale, check_rule, dynamic_loss_scale
from jmp_amp._params import cast_params, is_norm, low_precision_params
from jmp_amp._policy import Policy

__all__ = ["initialize"]


def initialize(
    loss_fn: Callable,
    params: Any,
    tx: optax.GradientTransformation,
    opt_level: str = "O1",
    *,
    dtype: Any = "float16",
    loss_scale: LossScale | None = None,
    keep: Callable | None = None,
    **options: Unpack[AutocastOptions],
) -> tuple[Callable, Any, optax.GradientTransformationExtraArgs]:
    """Returns the loss function, the parameters and the optimizer for mixed precision training at one of apex's levels.

    | level | parameters | `loss_fn` | optimizer | loss scale |
    |---|---|---|---|---|
    | `"O0"` | float32 | unchanged | unchanged | none |
    | `"O1"` | float32 | `autocast` | unchanged | dynamic |
    | `"O2"` | `dtype`, norms float32 | `autocast` | `low_precision_params` | dynamic |
    | `"O3"` | `dtype` | `autocast` | `low_precision_params(masters=False)` | none |

    Train with `"O1"`. `"O0"` is the float32 baseline. `"O2"` has low-precision weights and gradients and needs two more
    bytes for each parameter in total. `"O3"` needs the least memory and is the least accurate.

    Every level skips steps whose gradients are not finite, and traces `loss_fn` with float32 parameters. To combine
    the parts differently, call `autocast`, `cast_params`, `low_precision_params` and `dynamic_loss_scale` yourself.

    Args:
        loss_fn: a function whose first argument is the parameters.
        params: float32 parameters.
        tx: any optax transformation, configured for float32 parameters. It may contain `unscale_and_check()`.
        opt_level: `"O0"`, `"O1"`, `"O2"` or `"O3"`.
        dtype: a dtype that `autocast` computes in, except `"float32"`. bfloat16, with or without float8, needs no loss
            scale, so its loss scale is `LossScale.none()`.
        loss_scale: overrides the loss scale of the level.
        keep: `keep(path, leaf)` is True for parameters that stay float32 at `"O2"` and `"O3"`. The default is `is_norm`
            at `"O2"`, and no parameter at `"O3"`.
        **options: passed to `autocast`.

    Returns:
        `(loss_fn, params, tx)`, for any train step: `tx.init(params)`, `value_and_grad(loss_fn, opt_state=opt_state)`.

    Raises:
        TypeError: `loss_fn` or `tx` is of another type, or `loss_scale` is not a `LossScale`.
        ValueError: `opt_level` or `dtype` is unknown.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
        >>> params, tx = {"w": jnp.full(2, 0.125)}, optax.adam(1e-3)
        >>> loss_fn, params, tx = amp.interop.apex.initialize(loss_fn, params, tx, "O2")
        >>> opt_state = tx.init(params)
        >>> loss, grads = amp.value_and_grad(loss_fn, opt_state=opt_state)(params, jnp.ones((4, 2)))
        >>> updates, opt_state = tx.update(grads, opt_state, params)
        >>> print(loss, params["w"].dtype, amp.get_loss_scale(opt_state))
        0.0625 float16 65536.0

    References:
        `amp.initialize` of apex. apex's O2 and O3 run every op on 16-bit parameters in 16 bits. Here the rules of
        `autocast` apply at each level, because XLA fuses the ops that stay float32.
    """
    if not callable(loss_fn) or not isinstance(tx, optax.GradientTransformation):
        got = f"`loss_fn`, {describe(loss_fn)}" if not callable(loss_fn) else f"`tx`, {describe(tx)}"
        raise TypeError(
            "`initialize` takes a loss function, parameters and an optax transformation, in this order, got as "
            f"{got}; write `initialize(loss_fn, params, optax.adam(1e-3), opt_level={opt_level!r})`"
        )
    if opt_level not in ("O0", "O1", "O2", "O3"):
        raise ValueError(f"`opt_level` must be one of 'O0', 'O1', 'O2', 'O3', got {quote(opt_level)}")
    if loss_scale is not None:
        check_rule(loss_scale)
    form = parse_format(dtype)
    if not form.is_low:
        raise ValueError(f'`dtype` must have less than 32 bits, got {form.name}; for float32 use opt_level="O0"')
    casts_params = opt_level in ("O2", "O3")
    policy = Policy(form.dtype if casts_params else "float32", form.name, "float32")
    if loss_scale is None:
        loss_scale = LossScale() if opt_level in ("O1", "O2") and form.needs_loss_scale else LossScale.none()
    if casts_params:
        keep = keep or (is_norm if opt_level == "O2" else lambda path, leaf: False)
        params, tx = cast_params(params, policy, keep=keep), low_precision_params(tx, masters=opt_level == "O2")
    loss_fn = autocast(loss_fn, policy, enabled=opt_level != "O0", **options)
    return loss_fn, params, dynamic_loss_scale(tx, loss_scale)
