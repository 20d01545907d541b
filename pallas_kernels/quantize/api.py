"""The public op, for any matrix and any device."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels._implementations import ADA, DTYPES, HOPPER, INDEX_LIMIT, Kernel, Kernels, define_kernel
from pallas_kernels.quantize import reference

KERNELS = Kernels(__package__, {"mosaic_gpu": HOPPER, "triton": ADA})

FORMATS = tuple(map(jnp.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2)))


class Quantized(NamedTuple):
    """A matrix of shape `(m, n)` in float8, with one scale.

    Attributes:
        rows: float8[m, n], `x / scale`, rounded.
        columns: float8[n, m], the transpose of `rows`.
        scale: float32[], a power of two between `2**-126` and `2**126`.
    """

    rows: jax.Array
    columns: jax.Array
    scale: jax.Array


class QuantizedBlocks(NamedTuple):
    """A matrix of shape `(m, n)` in float8, with a scale for each block of 32 elements.

    Attributes:
        rows: float8[m, n], `x` divided by the scales of its rows, rounded.
        columns: float8[n, m], the transpose of `x` divided by the scales of its rows, rounded.
        row_scales: float8_e8m0fnu[m, n / 32].
        column_scales: float8_e8m0fnu[n, m / 32].
    """

    rows: jax.Array
    columns: jax.Array
    row_scales: jax.Array
    column_scales: jax.Array


def quantize(
    x: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    block: int | None = None,
    implementation: str | None = None,
    interpret: bool = False,
) -> Quantized | QuantizedBlocks:
    """Casts a matrix to float8 with scales that are powers of two, by rows and transposed by columns.

    A product and its gradients contract a matrix along both axes, and GPUs read float8 operands along the contracting
    axis. Both results are rounded from `x` itself. With one scale a kernel reads the matrix twice, in two launches: the
    largest magnitude must be known before the first cast. With `block=32` it reads the matrix once, in one launch.

    An infinity or NaN makes everything under its scale NaN: all elements, or the elements and the scale of its block.
    So an overflow is found in whatever is computed from the result.

    Args:
        x: float32, bfloat16 or float16, `(m, n)`. With `block=32`, both sizes must be multiples of 32.
        dtype: float8_e4m3fn or float8_e5m2.
        block: `None` for one scale, by which the largest magnitude is between half of the largest finite number of
            `dtype` and that number. 32 for the MX formats: a scale for each 32 elements along the last axis for the
            rows, and along the first axis for the columns. It is rounded up, so no element is clipped:
            `2**ceil(log2(largest of the block / largest of the dtype))`, at least `2**-126`.
        implementation: `"xla"` is plain JAX. `"mosaic_gpu"` (NVIDIA Hopper and newer, sizes that are multiples of 128)
            and `"triton"` (NVIDIA Ada and newer) are kernels. `None` is the fastest one on the device, as measured by
            `python -m pallas_kernels tune`, and plain JAX on other devices, under `vmap` and differentiation, and in
            programs that the compiler partitions over devices.
        interpret: runs the kernel in Pallas' interpreter, which is slow but works on any device. Use it for tests.

    Returns:
        `Quantized(rows, columns, scale)`, or with `block=32` `QuantizedBlocks(rows, columns, row_scales,
        column_scales)`. Elements are scaled in float32 and rounded once, to nearest even. All implementations return
        the same bits.

    Raises:
        ValueError: `x` is not a matrix, one of its sizes is not a multiple of the block, or `block` or
            `implementation` is unknown.
        TypeError: the dtype of `x` or `dtype` is not supported.
        NotImplementedError: the kernel passed as `implementation` does not support the matrix, the device or the
            transformation.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import quantize
        >>> rows, columns, scale = quantize(jnp.float32([[1, 2, 3], [4, 5, 600]]))
        >>> print(columns.shape, scale, rows.astype(jnp.float32) * scale)
        (3, 2) 2.0 [[  1.   2.   3.]
         [  4.   5. 576.]]
        >>> quantize(jnp.ones((64, 96)), block=32).column_scales.shape
        (96, 2)

    References:
        Open Compute Project, "Microscaling Formats (MX) Specification", 2023; Mishra et al., "Recipes for Pre-training
        LLMs with MXFP8", 2025 (arXiv:2506.08027), for scales that are rounded up.
    """
    KERNELS.check_arguments("quantize", implementation, interpret)
    x, dtype = jnp.asarray(x), jnp.dtype(dtype)
    for name, given, allowed in ("x", x.dtype, DTYPES), ("dtype", dtype, FORMATS):
        if given not in allowed:
            names = ", ".join(each.name for each in allowed)
            raise TypeError(f"quantize: the dtype of `{name}` must be one of {names}, got {given.name}")
    if block not in (None, reference.BLOCK):
        raise ValueError(f"quantize: `block` must be None or {reference.BLOCK}, got {block!r:.80}")
    if x.ndim != 2 or (block and any(size % block for size in x.shape)):
        sizes = f" whose sizes are multiples of {block}" if block else ""
        raise ValueError(f"quantize: `x` must be a matrix{sizes}, got shape {x.shape}")

    op = "quantize_blocks" if block else "quantize"
    kernel = KERNELS.choose(op, implementation, interpret, [x.dtype], x.size)
    if kernel is not None and not _is_supported(x, kernel.name):
        sizes = f" whose sizes are multiples of {reference.TILE}" if kernel.name == "mosaic_gpu" else ""
        kernel.refuse(
            f"supports matrices of 1 to 2^31 - 1 elements{sizes}, but `x` has the shape {x.shape}; pass "
            "`implementation=None`, which falls back to plain JAX"
        )
        kernel = None
    run = reference.quantize if kernel is None else functools.partial(_launch, kernel=kernel)
    rows, columns, *scales = run(x, dtype=dtype, block=block)
    if block is None:
        return Quantized(rows, columns, scales[0][0])
    # Kernels cannot write the dtype of the scales.
    return QuantizedBlocks(rows, columns, *(lax.bitcast_convert_type(bits, jnp.float8_e8m0fnu) for bits in scales))


def _is_supported(x: jax.Array, implementation: str) -> bool:
    is_tiled = implementation == "triton" or all(size % reference.TILE == 0 for size in x.shape)
    return is_tiled and isinstance(x.size, int) and 0 < x.size < INDEX_LIMIT  # a symbolic size is no integer


def _run(x: jax.Array, *, kernel: Kernel, **params: Any) -> Any:
    return kernel.load()(x, interpret=kernel.interpret, **params)


_launch = define_kernel("quantize", reference.quantize, _run)
