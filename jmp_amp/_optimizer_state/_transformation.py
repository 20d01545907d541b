"""The transformation that holds the state of an optimizer in 8 or 16 bits between steps."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_amp import _jaxpr as jx
from jmp_amp._calls import quote, with_inner_state
from jmp_amp._loss_scale import check_inner
from jmp_amp._optimizer_state import _codec as codec
from jmp_amp._optimizer_state._moments import Moments, facts_of_init, moments_of

_DTYPES = ("float8", "bfloat16")
_ROUNDINGS = ("nearest", "stochastic")
_LEAST_SIZE = 4096
_PLACEHOLDERS: list[type] = []  # of what `optax.tree_map_params` passes to `init` in place of parameters
optax.tree_map_params(lambda params: _PLACEHOLDERS.append(type(params)), None, None)


@with_inner_state
class LowPrecisionState(NamedTuple):
    """State of `low_precision_state`.

    Attributes:
        step: int32[], the number of steps so far, which determines the random bits of the next step.
        formats: uint32, for each leaf that is held in low precision, by its place in `jax.tree.leaves(inner_state)`:
            the format of each block in the lower 16 bits, and that of the next step in the upper ones, of the shape of
            the leaf with the last axis divided by the block. With `dtype="bfloat16"`, uint16[], 0.
        inner_state: the state of the wrapped transformation. Leaves in low precision are uint8, in the format of their
            block, or bfloat16.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> tx = amp.low_precision_state(optax.sgd(0.1, momentum=0.9))
        >>> state = tx.init({"w": jnp.ones((64, 256))})
        >>> state.inner_state[0].trace["w"].dtype
        dtype('uint8')
        >>> state.with_float32()[0].trace["w"].dtype
        dtype('float32')
    """

    step: jax.Array
    formats: dict[str, jax.Array]
    inner_state: optax.OptState

    def with_float32(self) -> optax.OptState:
        """Returns the state of the wrapped transformation in float32, for a run without `low_precision_state`."""
        leaves, tree = jax.tree.leaves(self.inner_state), jax.tree.structure(self.inner_state)
        for i, formats in self.formats.items():
            leaves[int(i)] = codec.decode(leaves[int(i)], formats)
        return jx.restored(jax.tree.unflatten(tree, leaves))

    def with_low_precision(self, inner_state: optax.OptState) -> "LowPrecisionState":
        """Returns this state with the values of a state of the wrapped transformation.

        For a run that goes on from a checkpoint in float32: `tx.init(params).with_low_precision(inner_state)`. Blocks
        whose values came from `with_float32` hold the same values again, bit for bit; others are rounded to nearest.
        """
        leaves, formats = jax.tree.leaves(inner_state), dict(self.formats)
        for i, old in self.formats.items():
            leaves[int(i)], formats[i] = codec.convert(leaves[int(i)], old)
        return self._replace(formats=formats, inner_state=jx.with_leaves(inner_state, leaves))


def low_precision_state(
    inner: optax.GradientTransformation,
    dtype: str = "float8",
    *,
    block: int = 128,
    keep: Callable[[tuple[Any, ...], Any], bool] | None = None,
    rounding: str = "stochastic",
) -> optax.GradientTransformationExtraArgs:
    """Wraps a transformation so that its state takes one byte in place of four between steps.

    Use it when the state of the optimizer takes too much memory: the two moments of Adam take 2.06 bytes for each
    parameter in place of 8. `inner` computes in float32. After each step, the leaves of its state are rounded to

    - `"float8"`: numbers of 8 bits, with one format for each block of up to 128 values along the last axis. Where the
      values of a block are alike, they have 4 mantissa bits, and 6 without a sign; where they span decades, down to 2.
      In a block without negative values, as those of second moments, only 0 becomes 0, because one divides by these.
      If a block turns negative after all, its first negative values become the smallest number for one step. In the
      first step of a block that was 0, numbers are an octave or two apart, and those with signs below 2**-62 are 0.
    - `"bfloat16"`: two bytes in place of four, without formats.

    These leaves are float32, have the shape of a parameter and 4,096 elements at least, and the size of their last axis
    has a divisor from 16 to `block`. Others stay as they are: those of other dtypes, which `inner` chose itself
    (`mu_dtype`), those that start from the values of parameters (`schedule_free`, `lookahead`), and those whose errors
    would be larger than a difference that `inner` takes of them. That is a difference that it divides by or takes the
    root of: the mean and the mean square of `rmsprop(centered=True)` are nearly equal. And it is the change of a value
    since the last step: `optimistic_adam` keeps its last update, which is nearly the next one, and makes both from its
    moments.

    Rounding is stochastic: up or down with probabilities that make it exact on average. With `b2=0.999`, a second
    moment changes by a thousandth in a step, and rounding to nearest would lose that change. The random bits are a hash
    of the index of the element, to which each step adds the golden ratio, so they are even over time: in few steps
    already, a value is rounded up as often as it should be.

    The codes of one step give the formats of the next one, so one pass over the values is enough. A format has room for
    values that grow 2**32-fold in a step. Larger ones, infinity and NaN become the largest number. So an outlier
    changes nothing but its own block. Wrap the result in `dynamic_loss_scale`, which skips steps that are not finite.

    Codes have the shape of the parameter, so shard them as the parameter is sharded: no step gathers anything if blocks
    divide the part of the last axis that a device holds. On a mesh of explicit axes blocks are chosen so. On one of
    auto axes choose `block`, or devices exchange the codes of the blocks that they share. Inside `shard_map` all
    devices draw the same random bits. Call `init` under `jax.jit`, or the state exists in float32 for a moment.

    Args:
        inner: any optax transformation. Averages over more than some 100 steps of values that have a sign lose more
            than they should in 8 bits, such as the slow moment of `optax.contrib.ademamix`: keep these. Put
            `low_precision_state` inside `optax.MultiSteps`, whose sums of gradients stay float32 then.
        dtype: `"float8"` or `"bfloat16"`.
        block: the largest number of values that share a format, from 16 to 256.
        keep: `keep(path, leaf)` is True for leaves of the state that stay as they are, such as those of embeddings.
        rounding: `"stochastic"`, or `"nearest"` for Muon, which amplifies random errors. Blocks without negative values
            are rounded stochastically all the same.

    Returns:
        An optax transformation. Wrap it in `low_precision_params` or `dynamic_loss_scale`:
        `low_precision_params(low_precision_state(optax.adamw(1e-4)), remainder=True)` takes 6 bytes a parameter.

    Raises:
        TypeError: `inner` is not an optax transformation.
        ValueError: `dtype` or `rounding` is unknown, `rounding="nearest"` with `"bfloat16"`, or `block` is not from 16
            to 256. Or `update` needs more arguments than gradients, state and parameters, so that `init` could not see
            that a leaf is subtracted: the message says what to `keep`.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> params = {"w": jnp.ones((1024, 1024)), "b": jnp.ones(1024)}
        >>> for tx in (optax.adamw(1e-3), amp.low_precision_state(optax.adamw(1e-3))):
        ...     state = jax.jit(tx.init)(params)
        ...     print(f"{sum(x.nbytes for x in jax.tree.leaves(state)) / 2**20:.2f} bytes a parameter")
        8.01 bytes a parameter
        2.07 bytes a parameter

    References:
        Dettmers et al., [8-bit Optimizers via Block-wise Quantization](https://arxiv.org/abs/2110.02861), 2022: blocks.
        `exp_avg_dtype` of Transformer Engine's `FusedAdam` and of Megatron-LM. Formats from the last step: delayed
        scaling of Transformer Engine. Stochastic rounding: Gupta et al., [Deep Learning with Limited Numerical
        Precision](https://arxiv.org/abs/1502.02551), 2015.
    """
    check_inner(inner, "low_precision_state")
    for name, value, allowed in (("dtype", dtype, _DTYPES), ("rounding", rounding, _ROUNDINGS)):
        if value not in allowed:
            raise ValueError(f"`{name}` must be {' or '.join(map(quote, allowed))}, got {quote(value)}")
    if dtype == "bfloat16" and rounding == "nearest":
        raise ValueError(
            '`rounding="nearest"` would make second moments stand still in bfloat16, got `dtype="bfloat16"`; leave it '
            "out, or let optax round the first moments to nearest: `mu_dtype`"
        )
    if not codec.LEAST_BLOCK <= block <= codec.LARGEST_BLOCK:
        raise ValueError(f"`block` must be from {codec.LEAST_BLOCK} to {codec.LARGEST_BLOCK}, got {block}")
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> LowPrecisionState:
        step = jnp.zeros((), jnp.int32)
        if isinstance(params, *_PLACEHOLDERS):  # which has no leaves that say how many formats there are
            return LowPrecisionState(step, step, inner.init(params))
        shapes = {jnp.shape(x) for x in jax.tree.leaves(params)}
        facts, state, moments = facts_of_init(inner.init, params), inner.init(params), Moments()
        with contextlib.suppress(Exception):  # it needs more arguments, or no gradients of these dtypes
            moments = moments_of(inner.update, params, state, params, {})

        leaves, formats = jax.tree.leaves(state), dict[str, jax.Array]()
        for i, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
            if jnp.shape(x) not in shapes or x.dtype != jnp.float32 or x.size < _LEAST_SIZE:
                continue
            if facts[i].read or i in moments.subtracted or (keep is not None and keep(path, x)):
                continue
            size = 0 if dtype == "bfloat16" else codec.block_of(x, block)
            if size is not None:
                leaves[i], formats[str(i)] = codec.start(x, size, facts[i].constant, i in moments.positive)
        return LowPrecisionState(step, formats, jx.with_leaves(state, leaves))

    def update(
        updates: optax.Updates, state: LowPrecisionState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, LowPrecisionState]:
        full = state.with_float32()
        _check(state, moments_of(inner.update, updates, full, params, extra_args))
        new_updates, new = inner.update(updates, full, params, **extra_args)
        leaves, formats = jax.tree.leaves(new), jax.tree.map(lambda x: (x >> 16).astype(jnp.uint16), state.formats)
        for i in formats:
            noise = codec.noise(leaves[int(i)].shape, int(i), state.step)
            leaves[int(i)] = codec.encode(leaves[int(i)], formats[i], noise, rounding == "nearest")
        for group in _by_parameter(new, formats, updates):
            found = codec.next_formats([(leaves[int(i)], formats[i]) for i in group])
            formats |= {i: codec.pair(formats[i], following) for i, following in zip(group, found, strict=True)}
        stored = jx.with_leaves(new, leaves)
        return new_updates, LowPrecisionState(optax.safe_increment(state.step), formats, stored)

    return optax.GradientTransformationExtraArgs(init, update)


def _check(state: LowPrecisionState, moments: Moments) -> None:
    """Raises if a difference of leaves in low precision is read, which `init` could not see."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state.inner_state)]
    wrong = [jax.tree_util.keystr(paths[i]) for i in sorted(moments.subtracted) if str(i) in state.formats]
    if wrong:
        raise ValueError(
            f"`inner` reads a difference of {' and '.join(wrong)} and another value, and their errors in low precision "
            "may be larger than the difference; keep them in float32: "
            f"`keep=lambda path, leaf: jax.tree_util.keystr(path) in {wrong}`"
        )


def _by_parameter(state: Any, formats: Mapping[str, jax.Array], updates: Any) -> list[list[str]]:
    """Returns the leaves in low precision in groups: those of one parameter, whose path is the end of theirs.

    XLA fuses the whole step of a parameter only if the maxima of its leaves are found by one reduction.
    """
    parameters = {path for path, _ in jax.tree_util.tree_leaves_with_path(updates)}
    groups: dict[Any, list[str]] = {}
    for n, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        if (x := formats.get(i := str(n))) is not None and x.ndim:
            ends = [path[j:] for j in range(len(path) + 1) if path[j:] in parameters]
            groups.setdefault((ends[0] if ends else i, x.shape), []).append(i)
    return list(groups.values())
