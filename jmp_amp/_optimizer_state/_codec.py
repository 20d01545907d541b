"""Numbers of 8 bits in blocks that have a format, which follows the values from step to step.

**A code is a rounded float32.** With 4 mantissa bits, codes count the float32 numbers that have 4 mantissa bits, from
`least`, a power of two, upwards: code 0 is `least`, code 16 is `2 * least`, code 17 is `2 * least * (1 + 1/16)`. The
number that a code stands for is this number less `least`. So code 0 is 0, the first codes are evenly spaced, and the
others have a relative error. An example, with `least = 1` and 4 mantissa bits:

    value      0    1/16   ...   1     1.125   ...   3     3.25   ...
    code       0    1      ...   16    17      ...   32    33     ...

The bits of a float32 are such a count, so that a value becomes a code by `bits(value + least) - bits(least)`, shifted
right by the 19 mantissa bits that are dropped. Random bits, added before, round it up or down, exactly on average: in
an octave, what lies between two codes is linear in the bits.

**A tail takes what grows.** The last eighth of the codes go two octaves each, so that values 2**32 times as large as
the largest in the last step, and 2**64 times without a sign, are no more than coarse.

**A format fits a block.** It says where `least` is, how many mantissa bits there are, and whether a code has a sign, in
its highest bit. With fewer mantissa bits, codes reach further:

    mantissa bits                      2     3     4     5     6
    octaves of codes without a sign    56    28    14    7     3
    octaves of codes with a sign       28    14    7     3     1

Where no value is negative, as in second moments, code 1 stands for values that are negative after all, and only 0
becomes 0: one divides by second moments. The smallest value decides how far codes must reach. Where values have signs,
some of them are near 0 by chance, and the mean decides.

**The codes of this step give the format of the next one,** from the largest, the smallest and the sum in a block. So a
step reads and writes each value once. Both formats of a block are held in one number of 32 bits, so that no kernel
copies the next one to the place of the last. A block that was 0 until now has a format for all of float32: one octave a
code where no value will be negative; where values may have signs, two octaves above 4, and what is much smaller than
2**-62 is 0 for one step.

**Values that were codes become the same values again.** A state in float32 does not say which formats its blocks had.
The coarsest in which the values of a block are exact is the one that they come from, but for blocks of few or nearly
equal values.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LEAST_BLOCK, LARGEST_BLOCK = 16, 256  # the sum of the codes of a block has 16 bits
# A format is the exponent of `least` in 8 bits, as in a float32, how many bits of one are dropped in 7, and the sign.
_WIDE = 23  # an octave a code: for blocks that were 0
_FIRST_SIGNED, _FIRST_UNSIGNED, _TINY = 65 << 8 | _WIDE << 1 | 1, 1 << 8 | _WIDE << 1, 1 << 8 | _WIDE << 1 | 1
_ANY = 1 << 8 | 24 << 1 | 1  # two octaves a code
_FINE, _TAIL_SHIFT = 224, 24  # an eighth of the codes is the tail
_NEAREST = np.uint32(1 << 31)
_LARGEST = np.uint32(0x7F7FFFFF)  # the bits of the largest finite float32


def noise(shape: tuple[int, ...], leaf: int, step: jax.Array) -> jax.Array:
    """Returns uint32, the same for each step but for multiples of the golden ratio, which are even over time.

    The hash of the index is `lowbias32` of Wellons, [Hash Function Prospector](https://github.com/skeeto/hash-prospector).
    """
    x = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + np.uint32(leaf * 0x85EBCA6B % 2**32)
    x = (x ^ x >> 16) * np.uint32(0x21F0AAAD)
    x = (x ^ x >> 15) * np.uint32(0x735A2D97)
    return (x ^ x >> 15) + step.astype(jnp.uint32) * np.uint32(0x9E3779B9)


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def _spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeats what is known of each block for each of its values."""
    return jnp.broadcast_to(x[..., None], (*x.shape, shape[-1] // x.shape[-1])).reshape(shape)


class _Format(NamedTuple):
    """Formats, or the format of each value: uint32.

    Attributes:
        least: the bits of `least`.
        fine: how many codes come before the tail, as the upper 8 bits of 32.
        shift: by how many bits codes are shifted to their place in a float32.
        sign: whether there is a sign, 0 or 1.
    """

    least: jax.Array
    fine: jax.Array
    shift: jax.Array
    sign: jax.Array


def _parse(formats: jax.Array) -> _Format:
    formats = formats.astype(jnp.uint32)
    shift, sign = formats >> 1 & 0x7F, formats & 1
    fine = jnp.where((shift == _WIDE) & (sign == 1), np.uint32(64), _FINE >> sign)
    return _Format(formats >> 8 << 23, fine << 24, shift, sign)


def _value(count: jax.Array, form: _Format) -> jax.Array:
    """Returns the number that a code stands for, given its bits but for the sign, as the upper 8 bits of 32."""
    fine = jnp.minimum(count, form.fine)
    return _float(form.least + (fine >> 24 - form.shift) + (count - fine)) - _float(form.least)


@functools.partial(jax.jit, inline=True)  # one program outside of `jit`, where each op would be one
def decode(codes: jax.Array, formats: jax.Array) -> jax.Array:
    """Returns float32, of the shape of the codes. The formats may be those of `pair`, too; of bfloat16, a scalar."""
    if formats.ndim < codes.ndim:
        return codes.astype(jnp.float32)
    formats = formats.astype(jnp.uint16)
    # XLA fuses this with the step if it is cheap, so some fields are computed for each block, not for each value.
    fields = lax.optimization_barrier(_parse(formats)[:2])
    least, fine = (_spread(x, codes.shape) for x in fields)
    form, code = _parse(_spread(formats, codes.shape))._replace(least=least, fine=fine), codes.astype(jnp.uint32) << 24
    count = code & np.uint32(0xFFFFFFFF) >> form.sign
    return _float(_bits(_value(count, form)) | code - count)


def encode(x: jax.Array, formats: jax.Array, noise: Any, nearest: bool = False) -> jax.Array:
    """Rounds to 8 bits; to bfloat16 if a scalar is in the place of the formats.

    Args:
        x: float32.
        formats: those of its blocks.
        noise: uint32, random bits for each value, or half of their range, which rounds to nearest.
        nearest: whether to round to nearest where codes have a sign. Second moments would stand still.
    """
    if formats.ndim < x.ndim:
        return lax.bitcast_convert_type((_bits(x) + (noise >> 16) >> 16).astype(jnp.uint16), jnp.bfloat16)
    form = _parse(_spread(formats, x.shape))
    if nearest:
        noise = jnp.where(form.sign == 1, _NEAREST, noise)
    count = _code(x, form, noise)
    count = jnp.maximum(count, jnp.where(x == 0, 0, 2 - 2 * form.sign))  # without a sign, 1 is for negative values
    return jnp.where(x < 0, count * form.sign | 1 << 7 * form.sign, count).astype(jnp.uint8)


def _code(x: jax.Array, form: _Format, noise: Any) -> jax.Array:
    """Returns the codes of magnitudes."""
    count = _count(_bits(jnp.abs(x) + _float(form.least)), form, noise)
    return jnp.minimum(count, jnp.minimum(_count(_LARGEST, form, np.uint32(0)), 255 >> form.sign))


def _count(bits: Any, form: _Format, noise: Any) -> jax.Array:
    """Returns the code, but for the sign, of a number that is given by the bits of its sum with `least`."""
    above = bits - form.least
    fine = jnp.minimum(above, form.fine >> 24 - form.shift)
    return (fine + (noise >> 32 - form.shift) >> form.shift) + (above - fine + (noise >> 8) >> _TAIL_SHIFT)


def next_formats(leaves: Sequence[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
    """Returns the formats for values about as large as those of codes, given in pairs with their formats.

    XLA fuses a step if this is one reduction with one operand for each array of codes, so they have one shape.
    """
    blocks = []
    for codes, formats in leaves:
        code = codes.astype(jnp.uint32)
        count = code & 255 >> _parse(_spread(formats, codes.shape)).sign
        low = jnp.where(code == count, 0 - count & 255, np.uint32(255))  # 256 - count, or 255 if negative
        blocks.append((count << 24 | low << 16 | count).reshape(*formats.shape, -1))
    # A collective knows no other sums and maxima than its own, unless there are several operands.
    blocks.append(jnp.broadcast_to(leaves[-1][1].astype(jnp.uint32)[..., None], blocks[0].shape))

    def join(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        joined = [
            jnp.maximum(x >> 24, y >> 24) << 24 | jnp.maximum(x & 0xFF0000, y & 0xFF0000) | (x & 0xFFFF) + (y & 0xFFFF)
            for x, y in zip(a[:-1], b[:-1], strict=True)
        ]
        return *joined, jnp.maximum(a[-1], b[-1])

    *found, last = lax.reduce(tuple(blocks), (np.uint32(0),) * len(blocks), join, (blocks[0].ndim - 1,))
    all_formats = [*(formats for _, formats in leaves[:-1]), last.astype(jnp.uint16)]
    return [_follow(formats, x, blocks[0].shape[-1]) for formats, x in zip(all_formats, found, strict=True)]


def _follow(formats: jax.Array, found: jax.Array, block: int) -> jax.Array:
    """Returns the next formats, from the largest code, the smallest one, and the sum of codes."""
    form = _parse(formats)
    shift, sign = form.shift.astype(jnp.int32), form.sign.astype(jnp.int32)
    top, low, total = found >> 24, found >> 16 & 255, found & 0xFFFF
    is_wide = shift >= _WIDE  # the sign is not known yet
    has_sign = ((low == 255) | (sign == 1) & ~is_wide).astype(jnp.int32)

    end = jnp.where(is_wide, 255, (form.least >> 23).astype(jnp.int32) - 1 + _octaves(23 - shift, sign))
    exponent = _exponent(top, form).astype(jnp.int32) + 1
    end = jnp.minimum(jnp.clip(end, exponent, exponent + 1), 255)

    far = end.astype(jnp.float32) - _exponent(jnp.where(has_sign == 1, total // block, 256 - low), form)
    far = jnp.where(has_sign == 1, 1.6 * far, far)  # from the mean to what is small
    mantissa = jnp.full_like(end, 2)
    for bits in (3, 4, 5, 6):
        room = _octaves(bits, has_sign) + (23 - shift >= bits).astype(jnp.int32)  # so that formats rarely change
        mantissa += (far <= room.astype(jnp.float32)).astype(jnp.int32)
    least = jnp.maximum(end + 1 - _octaves(mantissa, has_sign), 8)  # so that code 1 is a normal float32
    new = (least << 8 | 23 - mantissa << 1 | has_sign).astype(jnp.uint16)
    first = jnp.where(shift == _WIDE, formats, np.uint16(_FIRST_SIGNED))
    first = jnp.where(low == 255, np.uint16(_TINY), first)  # 0 with a sign is what was too small
    return jnp.where(top > 0, new, first)


def _octaves(mantissa: Any, sign: jax.Array) -> jax.Array:
    return _FINE >> sign >> mantissa


def _exponent(count: jax.Array, form: _Format) -> jax.Array:
    """Returns the exponent of a code's value as in a float32, and the mantissa as its fraction."""
    return _bits(_value(count << 24, form)).astype(jnp.float32) * np.float32(2.0**-23)


@functools.partial(jax.jit, inline=True)
def store(x: jax.Array, formats: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns codes, their formats, and those of the next step.

    Values that were codes become these codes again. Others are rounded to nearest, in formats that fit them.

    Args:
        x: float32.
        formats: those that are tried first, which may be those of `pair`, too; they decide about blocks of zeros.
    """
    # On a mesh of explicit axes, formats that were made without `x` are sharded as it is.
    formats = formats.astype(jnp.uint16) | jnp.zeros_like(x.reshape(*formats.shape, -1)[..., 0], jnp.uint16)
    fitted = jnp.full_like(formats, _ANY)
    for _ in range(3):  # the first codes are coarse
        (fitted,) = next_formats([(encode(x, fitted, _NEAREST), fitted)])

    def attempt(found: jax.Array, tried: jax.Array) -> tuple[jax.Array, None]:
        return jnp.where(_exact(x, tried)[1], tried, found), None

    found, _ = lax.scan(attempt, fitted, jnp.stack([formats, *_candidates(x, formats)]), reverse=True)
    codes, is_exact = _exact(x, found)
    codes = jnp.where(_spread(is_exact, x.shape), codes, encode(x, found, _NEAREST))
    return codes, found, next_formats([(codes, found)])[0]


def _exact(x: jax.Array, formats: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the codes next to values, and whether all values of a block are those of the codes, bit for bit."""
    codes = (_code(x, _parse(_spread(formats, x.shape)), _NEAREST) | _bits(x) >> 31 << 7).astype(jnp.uint8)
    return codes, (_bits(decode(codes, formats)) == _bits(x)).reshape(*formats.shape, -1).all(-1)


def _candidates(x: jax.Array, formats: jax.Array) -> list[jax.Array]:
    """Returns formats that values may come from, the coarsest first.

    Below 2**24 times `least`, the lowest bit that is set in a block is that of the first code, or up to as many bits
    above it as a code has. Beyond, as after an outlier, `least` does not change the sum with it, and may be any that is
    low enough; codes of the tail are an even number of octaves from its start.
    """
    bits = _bits(x).reshape(*formats.shape, -1)
    exponent, significand = bits >> 23 & 0xFF, bits & 0x7FFFFF | 1 << 23
    lowest = exponent + lax.population_count((significand & -significand) - 1)  # the lowest bit that is set, plus 23
    lowest, smallest = (jnp.where(bits << 1 == 0, 255, each).min(-1).astype(jnp.int32) for each in (lowest, exponent))
    sign = (bits >> 31).max(-1).astype(jnp.int32)

    def form(mantissa: int, least: jax.Array) -> jax.Array:
        return (jnp.clip(least, 8, 254) << 8 | 23 - mantissa << 1 | sign).astype(jnp.uint16)

    found = [jnp.full_like(formats, kind) for kind in (_FIRST_SIGNED, _TINY)]
    found += [form(m, lowest - 23 + m - n) for m in range(2, 7) for n in range(m + 1)]
    return found + [form(m, smallest - 25 - (_octaves(m, sign) + 1) % 2) for m in range(2, 7)]


def block_of(x: jax.Array, block: int) -> int | None:
    """Returns the number of values in a block, at most `block`, which no device holds a part of; None if none fits.

    How `x` is sharded is known if its mesh is of explicit axes. Otherwise devices may have to communicate.
    """
    held = jax.typeof(x).sharding.shard_shape(x.shape)[-1]
    return next((n for n in range(block, LEAST_BLOCK - 1, -1) if held % n == 0), None)


def pair(formats: jax.Array, following: jax.Array) -> jax.Array:
    """Returns uint32, from the formats of codes and of those of the next step, which are uint16."""
    return formats.astype(jnp.uint32) | following.astype(jnp.uint32) << 16


def convert(x: jax.Array, pairs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns codes, and both formats of each block; bfloat16, and the scalar that is in the place of formats."""
    if pairs.ndim < x.ndim:
        return x.astype(jnp.bfloat16), pairs
    codes, *formats = store(x, pairs)
    return codes, pair(*formats)


def start(x: jax.Array, block: int, constant: Any, is_positive: bool) -> tuple[jax.Array, jax.Array]:
    """Returns codes, and both formats of each block, for a state that starts.

    Args:
        x: float32.
        block: the number of values in a block; 0 for bfloat16.
        constant: the number that is everywhere in `x`, or None. XLA would fold large maxima for minutes.
        is_positive: whether the values will be 0 or more.
    """
    if not block:
        return convert(x, jnp.zeros((), jnp.uint16))  # with None, Orbax would restore codes without their formats
    code, first = 0, (_FIRST_UNSIGNED if is_positive else _FIRST_SIGNED) * (1 | 1 << 16)
    if constant:
        with jax.ensure_compile_time_eval():
            stored = convert(jnp.full((1, block), constant, jnp.float32), jnp.full((1, 1), first, jnp.uint32))
            code, first = (int(x[0, 0]) for x in stored)
    pairs = jnp.full_like(x.reshape(*x.shape[:-1], -1, block)[..., 0], first, jnp.uint32)
    return convert(x, pairs) if constant is None else (jnp.full_like(x, code, jnp.uint8), pairs)
