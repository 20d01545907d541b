"""Large products whose rows in memory are not multiples of 16 bytes, which NVIDIA's matrix units do not read.

Where such a product, as with a vocabulary of 50257, is traced for an NVIDIA GPU, its operands are padded with zeros,
and its result is sliced: the function stays the same. These are plain ops of the program. So its gradients are aligned
products, too, and what is computed once for all micro-batches includes the padding of a weight.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_amp import _jaxpr as jx
from jmp_amp._products._devices import automatic_devices, is_for_nvidia

# Multiplications and additions per byte, above which the matrix unit of a V100 limits a product, and not its memory;
# newer GPUs need more. See "Matrix Multiplication Background" in NVIDIA's Deep Learning Performance Guide.
_LEAST_INTENSITY = 139


def bind_product(args: Sequence[Any], params: dict[str, Any]) -> jax.Array:
    """Computes `lax.dot_general` of operands of any dtype, aligned if it is large and its rows are not."""
    zeros = padding(list(map(jax.typeof, args)), params, automatic_devices()) if is_for_nvidia() else None
    return padded(functools.partial(lax.dot_general_p.bind, **params), zeros)(*args)


def padding(avals: Sequence[Any], params: dict[str, Any], n_devices: int = 1) -> list[dict[int, int]] | None:
    """Returns the number of zeros to append to axes of each operand of a product; None if it stays as it is.

    The last axes of operands of 16 bits and of the result are padded to multiples of 8. Of float8 operands, cuBLAS asks
    for numbers of rows, columns and terms that are multiples of 16. A product stays as it is if its operands are wider;
    if its sizes are symbolic; or if memory limits it, as with 10 classes, or with scores of 196 x 196.

    Args:
        avals: the types of the operands.
        params: those of `lax.dot_general`.
        n_devices: over how many devices the compiler may split an axis. To pad one that can be split would move
            elements between devices; one of 50257 elements cannot be split evenly over 8.
    """
    contracting, batch = params["dimension_numbers"]
    widths = {x.dtype.itemsize for x in avals}
    if not widths < {1, 2} or not all(isinstance(n, int) for x in avals for n in x.shape):
        return None
    multiple, is_float8 = 16 // widths.pop(), avals[0].dtype.itemsize == 1
    free = [
        [i for i in range(x.ndim) if i not in (*summed, *same)]
        for x, summed, same in zip(avals, contracting, batch, strict=True)
    ]
    rows, columns = (math.prod(x.shape[i] for i in axes) for x, axes in zip(avals, free, strict=True))
    terms = math.prod(avals[0].shape[i] for i in contracting[0])
    if not rows * columns * terms >= _LEAST_INTENSITY * (rows * columns + (rows + columns) * terms) > 0:
        return None
    zeros: list[dict[int, int]] = [{}, {}]
    # The number of rows, of columns or of terms, and the axis of each operand that is one of them.
    own = [(size, {i: axes[-1]}) for i, (size, axes) in enumerate(zip((rows, columns), free, strict=True)) if axes]
    shared = [(terms, {0: lhs, 1: rhs}) for lhs, rhs in zip(*contracting, strict=True)]
    for size, axes in own + shared:
        is_last = is_float8 or [*axes] == [1] or any(axis == avals[i].ndim - 1 for i, axis in axes.items())
        for i, axis in axes.items():
            n = avals[i].shape[axis]
            if is_last and size % multiple and math.gcd(n, n_devices) == 1:
                zeros[i][axis] = -n % multiple
    return zeros if any(zeros) else None


def padded(product: Callable[..., jax.Array], zeros: Sequence[dict[int, int]] | None) -> Callable[..., jax.Array]:
    """Returns a product of two arrays that appends these zeros to them, and returns what it is without."""
    if zeros is None:
        return product

    def padded_product(*args: Any) -> jax.Array:
        shape = jax.eval_shape(product, *args).shape
        out = product(*[_with_zeros(x, n) if n else x for x, n in zip(args, zeros, strict=True)])
        return lax.slice(out, [0] * len(shape), shape)

    return padded_product


def padding_for(ctx: Any, avals: Sequence[Any], params: dict[str, Any]) -> list[dict[int, int]] | None:
    """Returns the zeros for a product that is lowered here; None for another device than a CUDA GPU."""
    is_cuda = set(jx.versions.lowering_platforms(ctx)) == {"cuda"}
    return padding(avals, params, jx.versions.automatic_devices(ctx)) if is_cuda else None


def _with_zeros(x: jax.Array, zeros: dict[int, int]) -> jax.Array:
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, zeros.get(axis, 0), 0) for axis in range(x.ndim)])
