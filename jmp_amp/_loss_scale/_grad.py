"""Gradients of a scaled loss, of one batch or accumulated over micro-batches."""

import collections
import functools
import operator
import sys
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.tree_util import keystr

from jmp_amp import _jaxpr as jx
from jmp_amp import _modules
from jmp_amp._calls import describe, quote, transformation
from jmp_amp._loss_scale._gradients import is_overwritten, multiply
from jmp_amp._loss_scale._rule import to_scale, warn_if_constant
from jmp_amp._loss_scale._scaled_grads import mark_scaled, note_scale
from jmp_amp._loss_scale._state import find_state
from jmp_amp._products import is_float8_scale
from jmp_amp._trees import is_inexact, wide_dtype

MICRO_BATCHES = "micro_batches"  # marks the loop over them, for `check_loss_scaling`
LOSS_SCALE = "loss_scale"  # marks the multiplication of the loss, and of its cotangent, by the scale


@transformation
def value_and_grad(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    opt_state: Any = None,
    loss_scale: jax.typing.ArrayLike | None = None,
    accumulate_steps: int = 1,
    reduction: str = "mean",
    batch_argnums: int | Sequence[int] | None = None,
    transform: Callable = jax.value_and_grad,
    **kwargs: Any,
) -> Callable:
    """Returns a function that computes the loss and the gradients of the loss times the loss scale.

    Use it like `jax.value_and_grad`, in the train step, with the current `opt_state`. The returned loss is unscaled.
    The returned gradients are scaled; `dynamic_loss_scale` unscales them by the scale in its state, and
    `unscale_and_check` by the one that it is given.

    The loss is cast to float32 *before* it is scaled, because a float16 loss of 1 times 2^16 is `inf`. The cotangent of
    a float16 loss is float16 too, so it takes at most 2^15 of the scale; the rest of the scale multiplies the
    gradients.

    Args:
        fun: returns a real floating-point scalar of any precision, or `(loss, aux)` with `has_aux`.
        argnums: as in `jax.value_and_grad`.
        has_aux: as in `jax.value_and_grad`; `aux` passes through.
        opt_state: the state of `dynamic_loss_scale`, whose scale multiplies the loss. Any state that holds exactly one
            `LossScaleState` will do, an `nnx.Optimizer` too.
        loss_scale: float32[], multiplies the loss, in place of `opt_state`. Without either, the scale is 1.
        accumulate_steps: number of micro-batches into which the batch is split. A `lax.scan` evaluates them one after
            the other, with the same scale. Gradients are accumulated and returned in float32 or wider, for parameters
            of any dtype; `aux` is stacked along a new first axis. An overflow in one micro-batch makes the sum
            overflow. Batch statistics and random streams of Flax NNX modules change with each micro-batch, and typed
            keys (`jax.random.key`) that are not split are folded with its number. Of what Flax's float8 modules return
            as gradients (`_overwrite_with_gradient`), the maximum over the micro-batches is returned.
        reduction: `"mean"` or `"sum"` over the micro-batches, of both losses and gradients.
        batch_argnums: the arguments to split along the first axes of their arrays, as in `argnums`; by default, all
            positional arguments that are neither differentiated nor NNX modules nor a key, whose arrays must then agree
            in the size of their first axes. Keyword arguments are never split.
        transform: creates the gradient function: `jax.value_and_grad`, `eqx.filter_value_and_grad` or
            `nnx.value_and_grad`.
        **kwargs: passed to `transform`.

    Returns:
        A function with the arguments of `fun` that returns `(loss, grads)`, or `((loss, aux), grads)` with `has_aux`.
        `loss` is float32[], or float64[] for a float64 loss. Each gradient is the loss scale times the gradient of the
        loss, and has the dtype of its parameter unless it is accumulated.

    Raises:
        TypeError: the loss is not a real floating-point scalar (raised when the returned function is called),
            `loss_scale` is not a scalar number, `loss_scale` and `opt_state` are both given, the result of `fun` is not
            a pair with `has_aux`, or a module whose leaves are not all floating arrays is differentiated without the
            `transform` of its library.
        ValueError: `opt_state` does not hold exactly one `LossScaleState`; the scale is not between 2^-126 and 2^126
            (a traced one is not checked); `accumulate_steps` is not positive or does not divide a first axis (the
            message names it); first axes differ and `batch_argnums` is not given; `batch_argnums` selects an argument
            that does not exist or is differentiated; or `reduction` is neither `"mean"` nor `"sum"`.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> loss_fn = lambda w: jnp.square(w).astype(jnp.float16)
        >>> loss, grad = amp.value_and_grad(loss_fn, loss_scale=2.0**16)(jnp.float32(3))
        >>> print(loss, loss.dtype, grad / 2**16)
        9.0 float32 6.0
        >>> tx = amp.dynamic_loss_scale(optax.sgd(0.1), amp.LossScale(init_scale=8.0))
        >>> opt_state = tx.init(jnp.float32(3))
        >>> loss, grad = amp.value_and_grad(loss_fn, opt_state=opt_state)(jnp.float32(3))
        >>> print(loss, grad, tx.update(grad, opt_state)[0])
        9.0 48.0 -0.6
        >>> loss_fn = lambda w, x: jnp.mean(w * x)
        >>> loss, grad = amp.value_and_grad(loss_fn, accumulate_steps=2)(jnp.float32(3), jnp.arange(4.0))
        >>> print(loss, grad)
        4.5 1.5

    References:
        The order of cast and scale is that of apex's `scale_loss`. `reduction="sum"` is DeepSpeed's
        `scale_wrt_gas=False`.
    """
    source: Any = loss_scale
    if opt_state is not None:
        if loss_scale is not None:
            raise TypeError(
                "pass either `opt_state` or `loss_scale`; `opt_state=opt_state` is short for "
                "`loss_scale=amp.get_loss_scale(opt_state)`"
            )
        source = find_state(opt_state)
        loss_scale = source.loss_scale
    is_scaled = loss_scale is not None
    scale = to_scale(loss_scale if is_scaled else 1.0)
    if isinstance(accumulate_steps, bool) or not isinstance(accumulate_steps, int) or accumulate_steps < 1:
        raise ValueError(f"`accumulate_steps` must be an integer of at least 1, got {quote(accumulate_steps)}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f'`reduction` must be "mean" or "sum", got {quote(reduction)}')
    if not (isinstance(argnums, int) and argnums == 0):  # some transforms, such as Equinox's, have no `argnums`
        kwargs = {"argnums": argnums, **kwargs}
    takes_floats_only = transform is jax.value_and_grad and not kwargs.get("allow_int")
    evaluate = _scaled_value_and_grad(fun, has_aux, scale, functools.partial(transform, **kwargs))
    if accumulate_steps > 1:
        to_split = None if batch_argnums is None else _argnums_as_tuple(batch_argnums)
        evaluate = _accumulate(evaluate, accumulate_steps, reduction, argnums, to_split)

    @functools.wraps(fun, updated=())
    def value_and_scaled_grad(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        warn_if_constant(source, (args, kwargs))
        if takes_floats_only:
            _check_differentiable(args, argnums)
        (loss, aux), grads = evaluate(*args, **kwargs)
        if is_scaled:
            loss, grads = mark_scaled(loss, grads)
            note_scale(grads, loss_scale)
        return ((loss, aux) if has_aux else loss), grads

    return value_and_scaled_grad


@transformation
def grad(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False, **kwargs: Any) -> Callable:
    """Returns a function that computes the gradients of the loss times the loss scale.

    Like `value_and_grad`, and with the same arguments, but the function returns `grads`, or `(grads, aux)` with
    `has_aux`.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> print(amp.grad(jnp.square, loss_scale=8.0)(jnp.float32(3)))
        48.0
    """
    value_and_scaled_grad = value_and_grad(fun, argnums=argnums, has_aux=has_aux, **kwargs)

    @functools.wraps(fun, updated=())
    def scaled_grad(*args: Any, **kwargs: Any) -> Any:
        value, grads = value_and_scaled_grad(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return scaled_grad


def _scaled_value_and_grad(fun: Callable, has_aux: bool, scale: jax.Array, transform: Callable) -> Callable:
    """Returns a function that computes `((loss, aux), scaled gradients)` of one batch."""

    @functools.wraps(fun, updated=())
    def scaled_loss(*args: Any, **kwargs: Any) -> tuple[jax.Array, Any]:
        out = fun(*args, **kwargs)
        try:
            loss, aux = out if has_aux else (out, None)
        except (TypeError, ValueError):
            raise TypeError(
                f"with `has_aux=True` the function must return `(loss, aux)`, got {describe(out)}; write "
                "`return loss, aux` in it, or leave out `has_aux`"
            ) from None
        wide_loss = _to_wide(loss)
        loss_factor, grad_factor = _split_scale(scale.astype(wide_loss.dtype), jnp.result_type(loss))
        with jx.marked(LOSS_SCALE):  # for the tools that debug
            scaled = wide_loss * loss_factor
        return scaled, (wide_loss, aux, grad_factor)

    grad_fn = transform(scaled_loss, has_aux=True)

    def evaluate_batch(*args: Any, **kwargs: Any) -> tuple[tuple[jax.Array, Any], Any]:
        (_, (loss, aux, grad_factor)), grads = grad_fn(*args, **kwargs)
        if grad_factor is not None:
            grads = jax.tree.map(lambda g, wide: wide.astype(g.dtype), grads, multiply(grads, grad_factor))
        return (loss, aux), grads

    return evaluate_batch


def _split_scale(scale: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array | None]:
    """Splits the scale into a factor of the loss and a factor of the gradients, which is None if it is not needed.

    The cotangent of a loss of `dtype` equals the factor of the loss, and the largest power of two in float16 is 2^15.
    """
    exponent = jnp.finfo(dtype).maxexp
    if exponent >= jnp.finfo(scale.dtype).maxexp:
        return scale, None
    loss_factor = jnp.minimum(scale, 2.0 ** (exponent - 1))
    return loss_factor, scale / loss_factor


def _to_wide(loss: Any) -> jax.Array:
    """Returns the loss in float32 or wider, and raises TypeError unless it is a real floating-point scalar."""
    is_array = hasattr(loss, "shape") or isinstance(loss, int | float | complex)
    if not is_array or jnp.shape(loss) != ():
        got = f"shape {jnp.shape(loss)}" if is_array else type(loss).__name__
        raise TypeError(
            f"the loss must be a scalar, got {got}; reduce it with `jnp.mean`; return the rest as `aux`, `has_aux=True`"
        )
    loss = jnp.asarray(loss)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise TypeError(f"the loss must be a real floating-point scalar, got dtype {loss.dtype}")
    return loss.astype(wide_dtype(loss.dtype))


def _accumulate(value_and_grad: Callable, steps: int, reduction: str, argnums: Any, batch_argnums: Any) -> Callable:
    """Returns a function that evaluates `value_and_grad` on one micro-batch after the other, in one `lax.scan`.

    Args:
        value_and_grad: returns `((loss, aux), grads)`.
        steps: the number of micro-batches.
        reduction: `"mean"` or `"sum"`, applied to the losses and gradients of the micro-batches.
        argnums: the arguments that `value_and_grad` differentiates.
        batch_argnums: the arguments to split along their first axes. None splits all others but NNX modules.

    Returns:
        A function that also returns `((loss, aux), grads)`. Losses and gradients are reduced in float32 or wider, and
        `aux` is stacked along a new first axis. The state of NNX modules goes from one micro-batch to the next, and
        into the modules at the end.
    """

    def accumulated(*args: Any, **kwargs: Any) -> tuple[tuple[jax.Array, Any], Any]:
        if not all(-len(args) <= i < len(args) for i in _argnums_as_tuple(argnums)):
            return value_and_grad(*args, **kwargs)  # raises as `jax.value_and_grad` does
        differentiated = {i % len(args) for i in _argnums_as_tuple(argnums)}
        to_split = _arguments_to_split(args, differentiated, batch_argnums, steps)
        batches = {i: _split_into_micro_batches(i, args[i], steps) for i in to_split}
        if not jax.tree.leaves(batches):
            raise ValueError(
                f"accumulate_steps={steps} splits the batch, but there is no batch among the {len(args)} arguments of "
                "the loss; pass the batch as an argument, `value_and_grad(...)(params, batch)`, not in a closure"
            )
        modules = [{i: x for i, x in group if _modules.holds_modules(x)} for group in (enumerate(args), kwargs.items())]
        state, merge = _modules.split_modules(modules)

        def evaluate(state: Any, batch: Any) -> tuple[tuple[tuple[jax.Array, Any], Any], Any]:
            number, parts = batch
            copies = positional, named = merge(state)
            given = dict(enumerate(args)) | positional | parts
            as_given = differentiated | positional.keys() | parts.keys()
            inputs = [x if i in as_given else _fold_keys(x, number) for i, x in sorted(given.items())]
            options = {k: named[k] if k in named else _fold_keys(x, number) for k, x in kwargs.items()}
            return value_and_grad(*inputs, **options), _modules.state_of_modules(copies)

        def step(carry: Any, batch: Any) -> tuple[Any, Any]:
            total, state = carry
            ((loss, aux), grads), state = evaluate_hoisted(state, batch)
            total = jax.tree.map_with_path(_accumulated, total, _without_float0((loss, grads)))
            return (total, state), aux

        numbered = jnp.arange(steps, dtype=jnp.uint32), batches
        first = jax.tree.map(lambda x: x[0], numbered)
        closed, _, rebuild = jx.trace_call(evaluate, (state, first), {})
        # Casts and pads of weights, or their scales in float8, are the same for all micro-batches. A module returns its
        # weights as it got them.
        leaves, opened = jax.tree.leaves(state), jx.open_jaxpr(closed)[0]
        pairs = zip(leaves, opened.invars, opened.outvars[len(opened.outvars) - len(leaves) :], strict=False)
        known = [x if var is out else None for x, var, out in pairs]
        selects = is_float8_scale if jx.holds(closed, is_float8_scale) else _is_hoisted  # which saves little in float8
        hoisted, moved = jx.hoist(closed, known, selects, growth=_GROWTH)

        def evaluate_hoisted(*args: Any) -> Any:
            return rebuild(jax.core.eval_jaxpr(*jx.open_jaxpr(hoisted), *moved, *jax.tree.leaves(args)))

        ((loss, _), grads), after = jax.eval_shape(evaluate_hoisted, state, first)
        for path in dict(jax.tree.leaves_with_path(after)).keys() - dict(jax.tree.leaves_with_path(state)).keys():
            raise ValueError(
                f"the loss adds the variable `{keystr(path[2:])}` to a module, so the state changes its structure "
                "between micro-batches; create the variable in the constructor, or return the value as `aux`"
            )
        before = _modules.arrays_by_path(state)
        start = jax.tree.map_with_path(_start_of_sum, _without_float0((loss, grads)))
        with jx.marked(MICRO_BATCHES):
            (total, state), aux = lax.scan(step, (start, state), numbered)
        _modules.update_modules(modules, _modules.changed_state(before, state))

        def reduced(path: Any, like: Any, x: Any) -> Any:
            if x is None:
                return np.zeros(like.shape, like.dtype)
            if is_overwritten(path, like):
                return lax.convert_element_type(x, like.dtype)
            return x / (steps if reduction == "mean" else 1)

        loss, grads = jax.tree.map_with_path(reduced, (loss, grads), total)
        return (loss, aux), grads

    return accumulated


def _start_of_sum(path: Any, x: Any) -> jax.Array:
    """Returns what is added to, in float32 or wider, with the axes of `shard_map` along which a gradient varies."""
    if is_overwritten(path, x):
        return jnp.full_like(x, -jnp.inf, jnp.float32)
    return jnp.zeros_like(x, wide_dtype(x.dtype))


def _accumulated(path: Any, total: Any, x: Any) -> jax.Array:
    if is_overwritten(path, x):  # as Flax adds them up, the largest value of all micro-batches is that of the batch
        return jnp.maximum(total, lax.convert_element_type(x, total.dtype))
    return total + x.astype(total.dtype)


def _fold_keys(tree: Any, number: jax.Array) -> Any:
    """Returns a tree with the number of the micro-batch folded into its typed random keys."""
    fold = jnp.vectorize(jax.random.fold_in)
    return jax.tree.map(lambda x: fold(x, number) if _is_key(x) else x, tree)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


_GROWTH = 1.1  # casts stay in the loop if a micro-batch would need more than this many times its memory


def _is_hoisted(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Whether an op casts an array to a smaller floating dtype, or pads one in 16 bits, as large products do."""
    if primitive is lax.pad_p:
        return jx.is_floating(avals[0]) and avals[0].dtype.itemsize == 2
    if primitive is not lax.convert_element_type_p:
        return False
    dtype = params["new_dtype"]
    return jx.is_floating(avals[0]) and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < avals[0].dtype.itemsize


def _arguments_to_split(args: Sequence[Any], differentiated: Set[int], batch_argnums: Any, steps: int) -> list[int]:
    n = len(args)
    if batch_argnums is None:
        others = [i for i, x in enumerate(args) if i not in differentiated and not _modules.is_module(x)]
        to_split = [i for i in others if not _is_single_key(args[i])]
        _check_first_axes({i: args[i] for i in to_split}, steps)
        return to_split
    for i in batch_argnums:
        if not -n <= i < n:
            raise ValueError(
                f"`batch_argnums` must be from {-n} to {n - 1}, because the loss got {n} positional arguments, got {i}"
            )
        if i % n in differentiated:
            raise ValueError(
                f"`batch_argnums` must select arguments that are not differentiated, got {i}, which `argnums` selects "
                "too; the gradients of different micro-batches cannot be added up"
            )
    return sorted({i % n for i in batch_argnums})


def _is_single_key(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree)
    return bool(leaves) and all(_is_key(x) and jnp.ndim(x) == 0 for x in leaves)


def _check_first_axes(args: dict[int, Any], steps: int) -> None:
    """Raises ValueError if arrays that would be split have no first axis of one size, as some are no batch."""
    shapes = [(i, path, jnp.shape(x)) for i, tree in args.items() for path, x in jax.tree.leaves_with_path(tree)]
    counts = collections.Counter(shape[:1] for *_, shape in shapes)
    if len(counts) < 2 or _modules.holds_modules(args):
        return
    common = max(counts, key=lambda size: (len(size), counts[size]))
    i, path, shape = next(each for each in shapes if each[2][:1] != common)
    batch = tuple(dict.fromkeys(j for j, _, shape in shapes if shape[:1] == common))
    move = "pass it as an argument of its own, and " if i in batch else ""
    raise ValueError(
        f"accumulate_steps={steps} splits the first axes of arguments {list(args)}, most of which have the size "
        f"{common[0]}, but argument {i}{keystr(path)} has shape {shape}; {move}name the arguments that are a batch, "
        f"`batch_argnums={batch}`"
    )


def _split_into_micro_batches(i: int, tree: Any, steps: int) -> Any:
    if _modules.holds_modules(tree):
        raise ValueError(
            f"accumulate_steps={steps} splits argument {i}, which holds a Flax NNX module; pass the module as an "
            "argument of its own, and do not name it in `batch_argnums`"
        )

    def split(path: Any, x: Any) -> jax.Array:
        size = jnp.shape(x)[0] if jnp.ndim(x) else None
        if size is None or size % steps:
            raise ValueError(
                f"accumulate_steps={steps} splits first axes into {steps} equal parts, but argument {i}{keystr(path)} "
                f"has shape {jnp.shape(x)}; pad the batch, or select the arguments to split with `batch_argnums`"
            )
        # A micro-batch takes every `steps`-th example, so a batch that is sharded over devices is not resharded.
        return jnp.moveaxis(jnp.reshape(x, (size // steps, steps, *jnp.shape(x)[1:])), 1, 0)

    return jax.tree.map_with_path(split, tree)


def _without_float0(tree: Any) -> Any:
    """Returns None in place of the float0 gradients of integer arguments (`allow_int=True`)."""
    return jax.tree.map(lambda x: None if x.dtype == jax.dtypes.float0 else x, tree)


def _argnums_as_tuple(argnums: Any) -> tuple[int, ...]:
    """Returns `argnums` as a tuple of integers, as JAX reads it; one of Flax NNX may be an `nnx.DiffState`."""
    argnums = getattr(argnums, "argnum", argnums)
    try:
        return (operator.index(argnums),)
    except TypeError:
        return tuple(operator.index(getattr(x, "argnum", x)) for x in argnums)


def _check_differentiable(args: Sequence[Any], argnums: Any) -> None:
    """Raises TypeError if `jax.value_and_grad` refuses a leaf of a module, which `transform` could leave out."""
    # A program with modules has imported their library.
    kinds = {lib.Module: transform for name, transform in _TRANSFORMS.items() if (lib := sys.modules.get(name))}
    for i in _argnums_as_tuple(argnums):
        arg = args[i] if -len(args) <= i < len(args) else None
        nodes = jax.tree.leaves(arg, is_leaf=lambda x: isinstance(x, (*kinds,)))
        transforms = [name for kind, name in kinds.items() if any(isinstance(x, kind) for x in nodes)]
        refused = [(path, x) for path, x in jax.tree.leaves_with_path(arg) if not is_inexact(x)]
        if transforms and refused:
            path, x = refused[0]
            raise TypeError(
                f"`jax.value_and_grad` differentiates floating arrays, got {describe(x)} at `args[{i}]{keystr(path)}`; "
                f"write `amp.value_and_grad(fun, transform={transforms[0]})`, which leaves out all but parameters"
            )


_TRANSFORMS = {"flax.nnx": "nnx.value_and_grad", "equinox": "eqx.filter_value_and_grad"}
