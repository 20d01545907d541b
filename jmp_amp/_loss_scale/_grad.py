"""Gradients of a scaled loss."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_amp._loss_scale._accumulate import REDUCTIONS, accumulate
from jmp_amp._loss_scale._arguments import to_scale
from jmp_amp._policy import wide_dtype


def value_and_grad(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    loss_scale: jax.typing.ArrayLike = 1.0,
    accumulate_steps: int = 1,
    reduction: str = "mean",
    batch_argnums: int | Sequence[int] | None = None,
    transform: Callable = jax.value_and_grad,
    **kwargs: Any,
) -> Callable:
    """Returns a function that evaluates `fun` and the gradient of its scaled loss.

    The loss is cast to float32 *before* it is scaled (a float16 loss of 1 times 2^16 would be `inf`, and so would the
    cotangent of any float16 loss: above 2^15 the rest of the scale multiplies its gradients), and comes back unscaled.
    The gradients come back scaled: `unscale_and_check` or `dynamic_loss_scale` unscale them, by the same scale.

    Args:
        fun: returns a scalar floating loss of any precision, or `(loss, aux)` with `has_aux`.
        argnums: as in `jax.value_and_grad`.
        has_aux: as in `jax.value_and_grad`; `aux` is passed through.
        loss_scale: float32[], multiplies the loss; usually `get_loss_scale(opt_state)`.
        accumulate_steps: the batch is cut into so many micro-batches, which are evaluated one after the other in a
            `lax.scan`, all with the same scale. Gradients are added up in float32, and so they come back, whatever the
            dtype of the parameters; `aux` is stacked along a new first axis. One micro-batch that overflows makes the
            sum overflow. Flax NNX modules raise here, since they change inside the scan: split them into graph and
            state.
        reduction: `"mean"` over the micro-batches, or `"sum"`: of the losses and of the gradients.
        batch_argnums: the arguments whose arrays are cut along their first axes; all positional ones that are not
            differentiated if not given.
        transform: makes the gradient function: `jax.value_and_grad`, `eqx.filter_value_and_grad` or
            `nnx.value_and_grad`.
        **kwargs: passed on to `transform`.

    Returns:
        A function of the arguments of `fun` that returns `(loss, grads)`, or `((loss, aux), grads)`. `loss` is
        float32[] (float64[] for a float64 loss); each gradient has the dtype of its parameter and is `loss_scale`
        times the true one.

    Raises:
        TypeError: the loss is not a floating scalar (when the returned function is called), `loss_scale` is not a
            scalar number, or `argnums` is a float.
        ValueError: `accumulate_steps` is not positive or does not divide a first axis (the message says which), or
            `reduction` is neither of the two.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda w: jnp.square(w).astype(jnp.float16)
        >>> loss, grad = amp.value_and_grad(loss_fn, loss_scale=2.0**16)(jnp.float32(3))
        >>> print(loss, loss.dtype, grad / 2**16)
        9.0 float32 6.0
        >>> loss_fn = lambda w, x: jnp.mean(w * x)
        >>> loss, grad = amp.value_and_grad(loss_fn, accumulate_steps=2)(jnp.float32(3), jnp.arange(4.0))
        >>> print(loss, grad)
        4.5 1.5

    References:
        The order of cast and scale is apex's `scale_loss`. `reduction="sum"` is DeepSpeed's `scale_wrt_gas=False`.
    """
    if isinstance(argnums, float | jax.Array):
        raise TypeError(f"`argnums` must be an integer or several, got {argnums!r}; the scale is `loss_scale=...`")
    multiplier = to_scale(loss_scale)
    if isinstance(accumulate_steps, bool) or not isinstance(accumulate_steps, int) or accumulate_steps < 1:
        raise ValueError(f"`accumulate_steps` must be an integer of at least 1, got {accumulate_steps!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f'`reduction` must be "mean" or "sum", got {reduction!r}')

    @functools.wraps(fun, updated=())
    def scaled(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        out = fun(*args, **kwargs)
        loss, aux = out if has_aux else (out, None)
        narrow, loss = loss, _float32(loss)
        scale, rest = _split(multiplier.astype(loss.dtype), jnp.result_type(narrow))
        return loss * scale, (loss, aux, rest)

    # Some transforms, Equinox's among them, have no `argnums`.
    chosen = {} if argnums == 0 else {"argnums": argnums}
    scaled_value_and_grad = transform(scaled, has_aux=True, **chosen, **kwargs)

    def one_batch(*args: Any, **kwargs: Any) -> tuple[tuple[jax.Array, Any], Any]:
        (_, (loss, aux, rest)), grads = scaled_value_and_grad(*args, **kwargs)
        if rest is not None:
            grads = jax.tree.map(lambda g: _times(g, rest), grads)
        return (loss, aux), grads

    @functools.wraps(fun, updated=())
    def value_and_scaled_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        evaluate = one_batch
        if accumulate_steps > 1:
            cut = range(len(args)) if batch_argnums is None else _several(batch_argnums)
            kept = _several(argnums) if batch_argnums is None else ()
            evaluate = accumulate(one_batch, accumulate_steps, reduction, [i for i in cut if i not in kept])
        value, grads = evaluate(*args, **kwargs)
        return (value if has_aux else value[0]), grads

    return value_and_scaled_grad


def grad(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False, **kwargs: Any) -> Callable:
    """Returns a function that evaluates the gradient of the scaled loss of `fun`.

    As `value_and_grad`, with its arguments, without the loss: the function returns `grads`, or `(grads, aux)` with
    `has_aux`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> print(amp.grad(jnp.square, loss_scale=8.0)(jnp.float32(3)))
        48.0
    """
    value_and_scaled_grad = value_and_grad(fun, argnums, has_aux, **kwargs)

    @functools.wraps(fun, updated=())
    def scaled_grad(*args: Any, **kwargs: Any) -> Any:
        value, grads = value_and_scaled_grad(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return scaled_grad


def _several(argnums: int | Sequence[int]) -> tuple[int, ...]:
    return (argnums,) if isinstance(argnums, int) else tuple(argnums)


def _split(scale: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """Splits the scale into what multiplies the loss and what is left for the gradients, if anything.

    The cotangent of a float16 loss is what multiplies it, and float16 holds no more than 2^15 (in powers of two).
    """
    exponent = jnp.finfo(dtype).maxexp
    if exponent >= jnp.finfo(scale.dtype).maxexp:
        return scale, None
    first = jnp.minimum(scale, 2.0 ** (exponent - 1))
    return first, scale / first


def _times(g: Any, factor: jax.Array) -> Any:
    if not jnp.issubdtype(g.dtype, jnp.inexact):
        return g
    wide = g.astype(wide_dtype(g.dtype))
    return (wide * factor.astype(wide.dtype)).astype(g.dtype)


def _float32(loss: Any) -> jax.Array:
    is_array = hasattr(loss, "shape") or isinstance(loss, int | float | complex)
    if not is_array or jnp.shape(loss) != ():
        what = f"shape {jnp.shape(loss)}" if is_array else type(loss).__name__
        raise TypeError(
            f"the loss must be a scalar, got {what}; reduce it, for instance with `jnp.mean`, "
            "and return anything else as `aux` with `has_aux=True`"
        )
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"the loss must be floating, got dtype {loss.dtype}")
    return loss.astype(wide_dtype(loss.dtype))
