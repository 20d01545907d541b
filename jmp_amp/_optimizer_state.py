"""The transformation that holds the state of an optimizer in 8 or 16 bits between steps."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jmp_amp import _jaxpr as jx
from jmp_amp._calls import quote, takes_options, with_inner_state
from jmp_amp._loss_scale import check_inner

_DTYPES = ("float8", "bfloat16")
_ROUNDINGS = ("nearest", "stochastic")
_LEAST_SIZE, _LEAST_BLOCK = 4096, 32

# A code counts the numbers with few mantissa bits from `least`, a power of two, to `abs(x) + least`. So 0 is code 0,
# and rounding is exact on average down to 0. A format is the exponent of `least` in 8 bits, as in a float32, and its
# kind in 8 more: by how many bits a code is shifted to the place of those of a float32, and whether its last bit is a
# sign. So the largest code of a block tells how large its values are, and codes are all that XLA has to read for it.
_SIGNED, _UNSIGNED, _WIDE = 19 << 1 | 1, 20 << 1, 22 << 1 | 1  # these reach over 16, 32 and 128 octaves
_NEGATIVE = 1  # the code of negative values where codes have no sign
_FIRST = 17 << 8 | _WIDE  # from 2**-110, for a block that was 0
_HEADROOM = 4  # octaves from the power of two in the maximum of a block to the end of its codes
_FALL = 32  # steps in which a format falls by one octave at most


@with_inner_state
class LowPrecisionState(NamedTuple):
    """State of `low_precision_state`.

    Attributes:
        step: int32[], the number of steps so far, which determines the random bits of the next step.
        formats: uint16, for each leaf that is held in low precision, by its place in `jax.tree.leaves(inner_state)`:
            the format of each block, of the shape of the leaf with the last axis divided by the block. Empty with
            `dtype="bfloat16"`.
        maxima: uint8, as `formats`: the largest code in each block, which decides the format of the next step.
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
    maxima: dict[str, jax.Array]
    inner_state: optax.OptState

    def with_float32(self) -> optax.OptState:
        """Returns the state of the wrapped transformation in float32, for a run without `low_precision_state`."""
        leaves, tree = jax.tree.leaves(self.inner_state), jax.tree.structure(self.inner_state)
        for i, formats in self.formats.items():
            leaves[int(i)] = _decode(leaves[int(i)], formats)
        return jx.restored(jax.tree.unflatten(tree, leaves))

    def with_low_precision(self, inner_state: optax.OptState) -> "LowPrecisionState":
        """Returns this state with the values of a state of the wrapped transformation, each rounded to nearest.

        For a run that goes on from a checkpoint in float32: `tx.init(params).with_low_precision(inner_state)`.
        """
        leaves = jax.tree.leaves(inner_state)
        formats, maxima = dict(self.formats), dict(self.maxima)
        for i, old in self.formats.items():
            leaves[int(i)], formats[i], maxima[i] = _store(leaves[int(i)], old)
        return LowPrecisionState(self.step, formats, maxima, jx.with_leaves(inner_state, leaves))


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

    Use it when the state of the optimizer takes too much memory: the two moments of Adam take 2.05 bytes for each
    parameter in place of 8. `inner` computes in float32. After each step, the leaves of its state are rounded to

    - `"float8"`: numbers of 8 bits, with one scale for each block of up to 128 values along the last axis. In a block
      with negative values they have 3 mantissa bits, as float8_e4m3fn, and reach down to 2**-15 of the maximum of the
      block. A block without, as those of second moments, needs no sign: its numbers reach down to 2**-31, and only 0
      becomes 0, because second moments are divided by. A block that was 0 until this step holds powers of two for one
      step. A block that had no negative value until this step holds 2**-31 of its maximum in place of the first ones.
    - `"bfloat16"`: two bytes in place of four, without scales.

    These leaves are float32, have the shape of a parameter and 4,096 elements at least, and the size of their last axis
    has a divisor from 32 to `block`. Others stay as they are: those of other dtypes, which `inner` chose itself
    (`mu_dtype`), and those that start from the values of parameters (`schedule_free`, `lookahead`).

    Rounding is stochastic: up or down at random, with probabilities that make it exact on average. With `b2=0.999`, a
    second moment changes by a thousandth in a step, and rounding to nearest would lose that change. The random bits are
    a hash of the number of the step and of the index of the element.

    The largest code of a block in one step gives its scale in the next one, so one pass over the values is enough. The
    scale is a power of two with room for values that grow 8-fold in a step. Larger ones become the largest number, and
    the scale follows in the next step. So an outlier changes nothing but its own block. Infinity and NaN also become
    the largest number; wrap the result in `dynamic_loss_scale`, which skips such steps.

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
        rounding: `"stochastic"` or `"nearest"`. Use `"nearest"` for Muon, which amplifies random errors.

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
        2.05 bytes a parameter

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
        raise ValueError(f"`block` must be at least {_LEAST_BLOCK}, got {block}; a scale takes 3 bytes a block")
    inner = optax.with_extra_args_support(inner)

    def init(params: optax.Params) -> LowPrecisionState:
        shapes = {jnp.shape(x) for x in jax.tree.leaves(params)}
        kept = _copies(inner.init, params)

        leaves = jax.tree_util.tree_leaves_with_path(state := inner.init(params))
        formats = {}
        for i, (path, x) in enumerate(leaves):
            if jnp.shape(x) not in shapes or x.dtype != jnp.float32 or x.size < _LEAST_SIZE or path in kept:
                continue
            if keep is not None and keep(path, x):
                continue
            size = next((n for n in range(block, _LEAST_BLOCK - 1, -1) if x.shape[-1] % n == 0), None)
            if dtype == "bfloat16":
                formats[str(i)] = jnp.zeros(0, jnp.uint16)
            elif size is not None:
                formats[str(i)] = jnp.zeros((*x.shape[:-1], x.shape[-1] // size), jnp.uint16)
        return LowPrecisionState(jnp.zeros((), jnp.int32), formats, formats, state).with_low_precision(state)

    def update(
        updates: optax.Updates, state: LowPrecisionState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, LowPrecisionState]:
        new_updates, new = inner.update(updates, state.with_float32(), params, **extra_args)
        falls = (state.step % _FALL == _FALL - 1).astype(jnp.int32)
        seed = None if rounding == "nearest" else state.step.astype(jnp.uint32) * np.uint32(0x9E3779B9)
        leaves = jax.tree.leaves(new)
        formats = {i: _next_formats(old, state.maxima[i], falls) for i, old in state.formats.items()}
        for i in formats:
            leaves[int(i)] = _encode(leaves[int(i)], formats[i], _noise(leaves[int(i)].shape, int(i), seed))
        maxima = dict(state.maxima)
        for group in _by_parameter(new, formats, updates):
            maxima |= zip(group, _maxima([(leaves[int(i)], formats[i].shape) for i in group]), strict=True)
        stored = jx.with_leaves(new, leaves)
        return new_updates, LowPrecisionState(optax.safe_increment(state.step), formats, maxima, stored)

    return optax.GradientTransformationExtraArgs(init, update)


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


def _by_parameter(state: Any, formats: Mapping[str, jax.Array], updates: Any) -> list[list[str]]:
    """Returns the leaves in low precision in groups: those of one parameter, whose path is the end of theirs.

    XLA fuses the whole step of a parameter only if the maxima of its leaves are found by one reduction.
    """
    parameters = {path for path, _ in jax.tree_util.tree_leaves_with_path(updates)}
    groups: dict[Any, list[str]] = {}
    for n, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
        if (i := str(n)) in formats and formats[i].size:
            ends = [path[j:] for j in range(len(path) + 1) if path[j:] in parameters]
            groups.setdefault((ends[0] if ends else i, formats[i].shape), []).append(i)
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


def _parse(formats: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the bits of `least`, and the kind, of formats."""
    formats = formats.astype(jnp.uint32)
    return formats >> 8 << 23, formats & 0xFF


def _spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats what is known of each block for each of its values."""
    return jnp.broadcast_to(x[..., None], (*x.shape, shape[-1] // x.shape[-1])).reshape(shape)


@functools.partial(jax.jit, inline=True)  # one program outside of `jit`, where each op would be one
def _decode(codes: jax.Array, formats: jax.Array) -> jax.Array:
    if formats.size == 0:
        return codes.astype(jnp.float32)
    least, kind = (_spread(x, codes.shape) for x in _parse(formats))
    code = codes.astype(jnp.uint32)
    sign = code & kind & 1
    above = lax.bitcast_convert_type(least + ((code ^ sign) << (kind >> 1)), jnp.float32)
    magnitude = above - lax.bitcast_convert_type(least, jnp.float32)
    return lax.bitcast_convert_type(_bits(magnitude) | sign << 31, jnp.float32)


def _encode(x: jax.Array, formats: jax.Array, noise: Any) -> jax.Array:
    """Rounds to 8 bits; to bfloat16 without formats."""
    if formats.size == 0:
        return lax.bitcast_convert_type((_bits(x) + (noise >> 16) >> 16).astype(jnp.uint16), jnp.bfloat16)
    least, kind = (_spread(each, x.shape) for each in _parse(formats))
    has_sign = kind & 1
    dropped = (kind >> 1) + has_sign
    above = _bits(jnp.abs(x) + lax.bitcast_convert_type(least, jnp.float32)) - least
    smallest = jnp.where(kind == _SIGNED, np.uint32(0), 2 - has_sign)
    code = jnp.minimum(above + (noise >> 32 - dropped) >> dropped, jnp.where(has_sign == 1, np.uint32(127), 253))
    code = jnp.where(x == 0, 0, jnp.maximum(code, smallest))
    negative = (x < 0) & (code != 0)
    return jnp.where(negative & (has_sign == 0), _NEGATIVE, code << has_sign | negative.astype(jnp.uint32)).astype(
        jnp.uint8
    )


def _maxima(leaves: Sequence[tuple[jax.Array, tuple[int, ...]]]) -> Sequence[jax.Array]:
    """Returns the largest code in each block, and whether one is negative: in its last bit, or by 254 and 255."""
    codes = [jnp.where(x == _NEGATIVE, np.uint8(255), x).reshape(*shape, -1) for x, shape in leaves]

    def larger(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(jnp.maximum(x, y) & 254 | (x | y) & 1 for x, y in zip(a, b, strict=True))

    return lax.reduce(tuple(codes), (np.uint8(0),) * len(codes), larger, (codes[0].ndim - 1,))


def _next_formats(formats: jax.Array, maxima: jax.Array, falls: jax.Array) -> jax.Array:
    """Returns the formats for values about as large as those in `formats`, whose largest codes are `maxima`."""
    if maxima.size == 0:
        return formats
    kind = formats & 0xFF
    before = (formats >> 8).astype(jnp.int32) + _octaves(kind) - _HEADROOM
    exponent = (_bits(_decode(maxima, formats)) >> 23 & 0xFF).astype(jnp.int32)
    has_sign = jnp.where(kind == _WIDE, maxima & 1 == 1, (kind == _SIGNED) | (maxima >= 254))
    exponent = jnp.where((kind == _UNSIGNED) & has_sign, before, exponent)
    exponent = jnp.where(kind == _WIDE, exponent, jnp.maximum(exponent, before - falls))
    return jnp.where(maxima == 0, np.uint16(_FIRST), _formats(exponent, has_sign))


def _formats(exponent: jax.Array, has_sign: jax.Array) -> jax.Array:
    """Returns the formats for values up to a power of two, int32 as in a float32."""
    kind = jnp.where(has_sign, _SIGNED, _UNSIGNED)
    end = jnp.minimum(exponent + _HEADROOM, 255)  # where infinity begins
    least = jnp.maximum(end - _octaves(kind), 4)  # so that code 1 is a normal float32
    return (least << 8 | kind).astype(jnp.uint16)


def _octaves(kind: jax.Array) -> jax.Array:
    return jnp.where(kind == _WIDE, 128, jnp.where(kind == _SIGNED, 16, 32))


@functools.partial(jax.jit, inline=True)
def _store(x: jax.Array, like: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns codes, rounded to nearest, and formats and maxima of the shape of `like`."""
    if like.size == 0:
        return _encode(x, like, _noise(x.shape, 0, None)), like, like
    blocks = x.reshape(*like.shape, -1)
    exponent = (_bits(jnp.abs(blocks)).max(-1) >> 23).astype(jnp.int32)  # XLA on CPUs loses a NaN in a maximum
    formats = jnp.where((blocks == 0).all(-1), np.uint16(_FIRST), _formats(exponent, (blocks < 0).any(-1)))
    codes = _encode(x, formats, _noise(x.shape, 0, None))
    (maxima,) = _maxima([(codes, like.shape)])
    return codes, formats, maxima
