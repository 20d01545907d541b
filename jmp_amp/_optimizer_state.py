"""The transformation that holds the state of an optimizer in 8 or 16 bits between steps."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jmp_amp import _jaxpr as jx
from jmp_amp._calls import quote, takes_options
from jmp_amp._loss_scale import check_inner

_DTYPES = ("float8", "bfloat16")
_ROUNDINGS = ("nearest", "stochastic")
_LEAST_SIZE, _LEAST_BLOCK = 4096, 32

# A code is a sign and 7 bits: how many numbers of a format with few mantissa bits lie between `least`, a power of two,
# and `abs(x) + least`. So 0 is code 0, and codes are exact on average down to 0. A format is the exponent of `least`,
# as in a float32, in 8 bits, and how many of the 23 mantissa bits of a float32 it drops, in 8 bits.
_LARGEST = 127
_SIGNED, _UNSIGNED, _WIDE = 20, 21, 23  # bits that are dropped; codes reach over 16, 32 and 128 octaves
_FIRST = np.uint16(17 << 8 | _WIDE)  # from 2**-110, for a block of which nothing is known
_HEADROOM = 4  # octaves from the power of two in the maximum of a block to the end of its codes
_FALL = 32  # steps in which a format falls by one octave at most


class LowPrecisionLeaf(NamedTuple):
    """A leaf of the state of an optimizer in low precision.

    Attributes:
        codes: uint8, of the shape of the leaf: numbers of 8 bits in the format of their block. bfloat16 with
            `dtype="bfloat16"`.
        formats: uint16, of the shape of the leaf with the last axis divided by the block: the format of each block.
            None with `dtype="bfloat16"`.
        maxima: uint16, of the shape of `formats`: the largest magnitude in each block, from which the format of the
            next step follows. None with `dtype="bfloat16"`.
    """

    codes: jax.Array
    formats: jax.Array | None = None
    maxima: jax.Array | None = None


class LowPrecisionState(NamedTuple):
    """State of `low_precision_state`.

    Attributes:
        step: int32[], the number of steps so far, which determines the random bits of the next step.
        inner_state: the state of the wrapped transformation, with a named tuple of `codes`, `formats` and `maxima` in
            place of each leaf that is held in low precision.

    Examples:
        >>> import jax.numpy as jnp, optax
        >>> import jmp_amp as amp
        >>> tx = amp.low_precision_state(optax.sgd(0.1, momentum=0.9))
        >>> state = tx.init({"w": jnp.ones((64, 256))})
        >>> state.inner_state[0].trace["w"].codes.dtype
        dtype('uint8')
        >>> state.with_float32()[0].trace["w"].dtype
        dtype('float32')
    """

    step: jax.Array
    inner_state: optax.OptState

    def with_float32(self) -> optax.OptState:
        """Returns the state of the wrapped transformation in float32, for a run without `low_precision_state`."""
        return jax.tree.map(lambda x: _decode(x) if _is_low(x) else x, self.inner_state, is_leaf=_is_low)

    def with_low_precision(self, inner_state: optax.OptState) -> "LowPrecisionState":
        """Returns this state with the values of a state of the wrapped transformation, each rounded to nearest.

        For a run that goes on from a checkpoint in float32: `tx.init(params).with_low_precision(inner_state)`.
        """
        return self._replace(inner_state=jax.tree.map(_store, self.inner_state, inner_state, is_leaf=_is_low))


@takes_options
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

    - `"float8"`: numbers of 8 bits, with one scale for each block of up to 128 values along the last axis. In a block
      with negative values they have 3 mantissa bits, as float8_e4m3fn, and reach down to 2**-15 of the maximum of the
      block. In one without, such as a second moment, they have 2 mantissa bits, as float8_e5m2, reach down to 2**-30,
      and only 0 becomes 0, because second moments are divided by. A block that was 0 until this step holds powers of
      two for one step.
    - `"bfloat16"`: two bytes in place of four, without scales.

    These leaves are float32, have the shape of a parameter and 4,096 elements at least, and the size of their last axis
    has a divisor from 32 to `block`. Others stay as they are: those of other dtypes, which `inner` chose itself
    (`mu_dtype`), and those that start from the values of parameters (`schedule_free`, `lookahead`).

    Rounding is stochastic: up or down at random, with probabilities that make it exact on average. With `b2=0.999`, a
    second moment changes by a thousandth in a step, and rounding to nearest would lose that change. The random bits are
    a hash of the number of the step and of the index of the element.

    The maximum of a block in one step gives its scale in the next one, so a step reads and writes each value once. The
    scale is a power of two with room for values that grow 8-fold in a step. Larger ones become the largest number, and
    the scale follows in the next step. So an outlier changes nothing but its own block. Infinity and NaN also
    become the largest number; wrap the result in `dynamic_loss_scale`, which skips such steps.

    Codes have the shape of the parameter, so shard them as the parameter is sharded: no step gathers anything. If the
    last axis is sharded, `block` must divide the part that a device holds. Inside `shard_map` all devices draw the same
    random bits. Call `init` under `jax.jit`, or the state exists in float32 for a moment.

    Args:
        inner: any optax transformation. Averages over more than some 100 steps of values that have a sign lose more
            than they should in 8 bits, such as the slow moment of `optax.contrib.ademamix`: keep these. Put
            `low_precision_state` inside `optax.MultiSteps`, whose sums of gradients stay float32 then.
        dtype: `"float8"` or `"bfloat16"`.
        block: the largest number of values that share a scale.
        keep: `keep(path, leaf)` is True for leaves of the state that stay as they are, such as those of embeddings.
        rounding: `"stochastic"` or `"nearest"`.

    Returns:
        An optax transformation. Wrap it in `low_precision_params` or `dynamic_loss_scale`:
        `low_precision_params(low_precision_state(optax.adamw(1e-4)), remainder=True)` takes 6 bytes a parameter.

    Raises:
        TypeError: `inner` is not an optax transformation.
        ValueError: `dtype` or `rounding` is unknown, or `block` is less than 32.

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
        Dettmers et al., [8-bit Optimizers via Block-wise Quantization](https://arxiv.org/abs/2110.02861), 2022: blocks
        with scales. `exp_avg_dtype` of Transformer Engine's `FusedAdam` and of Megatron-LM. Scales from the last step:
        delayed scaling of Transformer Engine. Stochastic rounding: Gupta et al., [Deep Learning with Limited Numerical
        Precision](https://arxiv.org/abs/1502.02551), 2015.
    """
    check_inner(inner, "low_precision_state")
    for name, value, allowed in (("dtype", dtype, _DTYPES), ("rounding", rounding, _ROUNDINGS)):
        if value not in allowed:
            raise ValueError(f"`{name}` must be {' or '.join(map(quote, allowed))}, got {quote(value)}")
    if block < _LEAST_BLOCK:
        raise ValueError(f"`block` must be at least {_LEAST_BLOCK}, got {block}; a scale takes 4 bytes a block")
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> LowPrecisionState:
        shapes = {jnp.shape(x) for x in jax.tree.leaves(params)}
        kept = _copies(inner.init, params)

        def store(path: tuple[Any, ...], x: Any) -> Any:
            if jnp.shape(x) not in shapes or x.dtype != jnp.float32 or x.size < _LEAST_SIZE or path in kept:
                return x
            if keep is not None and keep(path, x):
                return x
            if dtype == "bfloat16":
                return _store(LowPrecisionLeaf(x), x)
            size = next((n for n in range(block, _LEAST_BLOCK - 1, -1) if x.shape[-1] % n == 0), 0)
            return _store(LowPrecisionLeaf(x, x[..., ::size]), x) if size else x

        return LowPrecisionState(jnp.zeros((), jnp.int32), jax.tree_util.tree_map_with_path(store, inner.init(params)))

    def update(
        updates: optax.Updates, state: LowPrecisionState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, LowPrecisionState]:
        new_updates, new = inner.update(updates, state.with_float32(), params, **extra_args)
        falls = (state.step % _FALL == _FALL - 1).astype(jnp.int32)
        seed = None if rounding == "nearest" else state.step.astype(jnp.uint32) * np.uint32(0x9E3779B9)
        leaves, tree = jax.tree_util.tree_flatten_with_path(state.inner_state, is_leaf=_is_low)
        stored = tree.flatten_up_to(new)
        for group in _by_parameter(leaves, updates):
            old = [leaves[i][1] for i in group]
            noise = [_noise(leaf.codes.shape, i, seed) for leaf, i in zip(old, group, strict=True)]
            for i, leaf in zip(group, _round(old, [stored[i] for i in group], noise, falls), strict=True):
                stored[i] = leaf
        return new_updates, LowPrecisionState(optax.safe_increment(state.step), tree.unflatten(stored))

    return optax.GradientTransformationExtraArgs(init, update)


def _is_low(x: Any) -> bool:
    return isinstance(x, LowPrecisionLeaf)


def _copies(init: Callable[[Any], Any], params: Any) -> set[tuple[Any, ...]]:
    """Returns the paths of the leaves of the state that start from the values of parameters: these are no moments."""
    found = set()

    def trace(params: Any) -> None:
        given = {id(x) for x in jx.tracers_behind(*jax.tree.leaves(params))}
        for path, x in jax.tree_util.tree_leaves_with_path(init(params)):
            if not given.isdisjoint(map(id, jx.tracers_behind(x))):
                found.add(path)

    jax.eval_shape(trace, params)
    return found


def _by_parameter(leaves: Sequence[tuple[Any, Any]], updates: Any) -> list[list[int]]:
    """Returns the places of the leaves in low precision, those of one parameter together.

    Their paths end with the path of the parameter. XLA fuses the whole step of a parameter only if the maxima of its
    leaves are found by one reduction.
    """
    parameters: Mapping[Any, int] = {
        path: i for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(updates))
    }
    groups: dict[Any, list[int]] = {}
    for i, (path, leaf) in enumerate(leaves):
        if _is_low(leaf):
            ends = (path[j:] for j in range(len(path) + 1))
            parameter = next((parameters[end] for end in ends if end in parameters), -1 - i)
            groups.setdefault((parameter, leaf.codes.shape, jnp.shape(leaf.formats)), []).append(i)
    return list(groups.values())


def _noise(shape: tuple[int, ...], leaf: int, seed: jax.Array | None) -> Any:
    """Returns uint32, with which `x + noise >> n` rounds to nearest or stochastically: a hash of each index.

    The hash is `lowbias32` of Wellons, [Hash Function Prospector](https://github.com/skeeto/hash-prospector).
    """
    if seed is None:
        return np.uint32(1 << 31)
    x = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + np.uint32(leaf * 0x85EBCA6B % 2**32) ^ seed
    x = (x ^ x >> 16) * np.uint32(0x21F0AAAD)
    x = (x ^ x >> 15) * np.uint32(0x735A2D97)
    return x ^ x >> 15


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _parse(formats: jax.Array, shape: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Returns the bits of `least`, and how many bits are dropped, for each value."""
    blocks = formats.astype(jnp.uint32)[..., None]
    each = jnp.broadcast_to(blocks, (*formats.shape, shape[-1] // formats.shape[-1])).reshape(shape)
    return each >> 8 << 23, each & 0xFF


def _decode(leaf: LowPrecisionLeaf) -> jax.Array:
    if leaf.formats is None:
        return leaf.codes.astype(jnp.float32)
    least, dropped = _parse(leaf.formats, leaf.codes.shape)
    code = leaf.codes.astype(jnp.uint32)
    above = lax.bitcast_convert_type(least + ((code & _LARGEST) << dropped), jnp.float32)
    magnitude = _bits(above - lax.bitcast_convert_type(least, jnp.float32))
    return lax.bitcast_convert_type(magnitude | code >> 7 << 31, jnp.float32)


def _encode(x: jax.Array, formats: jax.Array, noise: Any) -> jax.Array:
    least, dropped = _parse(formats, x.shape)
    above = _bits(jnp.abs(x) + lax.bitcast_convert_type(least, jnp.float32)) - least
    code = jnp.minimum(above + (noise >> 32 - dropped) >> dropped, _LARGEST)
    code = jnp.where((code == 0) & (x != 0) & (dropped != _SIGNED), 1, code)
    return (code | _bits(x) >> 31 << 7).astype(jnp.uint8)


def _maxima(leaves: Sequence[jax.Array], blocks: int) -> Sequence[jax.Array]:
    """Returns uint16 for each block of each leaf: 15 bits of its largest magnitude, and below them the sign of that."""
    keys = [(_bits(x) >> 15 & 0xFFFE | _bits(x) >> 31).astype(jnp.uint16) for x in leaves]
    keys = [key.reshape(*key.shape[:-1], blocks, -1) for key in keys]
    return lax.reduce(
        tuple(keys), (np.uint16(0),) * len(keys), lambda a, b: tuple(map(jnp.maximum, a, b)), (keys[0].ndim - 1,)
    )


def _next_formats(formats: Any, maxima: jax.Array, falls: Any) -> jax.Array:
    """Returns the formats for values that are about as large as `maxima`, those of values in `formats`."""
    least, dropped = (jnp.asarray(x, jnp.int32) for x in (formats >> 8, formats & 0xFF))
    end = least + (128 >> 23 - dropped)
    exponent = jnp.minimum((maxima >> 8).astype(jnp.int32), end - 1)
    exponent_before = jnp.where(dropped == _WIDE, 0, end - _HEADROOM)
    has_sign = (dropped == _SIGNED) | (maxima & 1 == 1)  # a block that had a negative maximum may have one again
    dropped = jnp.where(has_sign, _SIGNED, _UNSIGNED)
    end = jnp.maximum(exponent, exponent_before - falls) + _HEADROOM
    least = jnp.maximum(end - (128 >> 23 - dropped), 4)  # so that code 1 is a normal float32
    return jnp.where(maxima <= 1, _FIRST, least << 8 | dropped).astype(jnp.uint16)


def _round(
    old: Sequence[LowPrecisionLeaf], new: Sequence[jax.Array], noise: Sequence[Any], falls: Any
) -> list[LowPrecisionLeaf]:
    """Returns the leaves of one parameter in low precision."""
    if old[0].formats is None:
        bits = [_bits(x) + (n >> 16) >> 16 for x, n in zip(new, noise, strict=True)]
        return [LowPrecisionLeaf(lax.bitcast_convert_type(x.astype(jnp.uint16), jnp.bfloat16)) for x in bits]
    formats = [_next_formats(leaf.formats, leaf.maxima, falls) for leaf in old]
    codes = map(_encode, new, formats, noise)
    return list(map(LowPrecisionLeaf, codes, formats, _maxima(new, formats[0].shape[-1])))


def _store(like: Any, x: Any) -> Any:
    """Returns `x` in the precision of `like`, each value rounded to nearest, with the exact maximum of its block."""
    if not _is_low(like):
        return x
    noise = _noise(x.shape, 0, None)
    if like.formats is None:
        return _round([like], [x], [noise], 0)[0]
    (maxima,) = _maxima([x], like.formats.shape[-1])
    formats = _next_formats(_FIRST, maxima, 0)
    return LowPrecisionLeaf(_encode(x, formats, noise), formats, maxima)
