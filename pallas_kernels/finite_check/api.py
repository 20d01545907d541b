"""The public ops, for any tree and any device."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels._implementations import DTYPES
from pallas_kernels.finite_check import launch, reference

_ALLOWED = ", ".join(dtype.name for dtype in DTYPES)


def check_finite(
    tree: Any, inv_scale: ArrayLike = 1.0, *, implementation: str | None = None, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Checks that all values of a tree are finite after unscaling, and sums their squares.

    It reads the tree once and computes one number: the sum is NaN if and only if a value is not finite. If the squares
    of finite values overflow float32, the sum is `inf` and the flag is still `True`.

    Args:
        tree: arrays of any shape. Floating and complex leaves, including float64, are read. All other leaves count as
            finite.
        inv_scale: float32[], the reciprocal of the loss scale. Every value is multiplied by it before the check.
        implementation: `None` and `"xla"` are plain JAX. `"mosaic_gpu"` (NVIDIA Hopper and newer) and `"triton"`
            (NVIDIA Ampere and newer) are kernels that read hundreds of leaves in one launch. They support neither
            `vmap` nor differentiation, float64, complex or 8-bit leaves, nor programs that the compiler partitions over
            devices.
        interpret: runs the kernel in Pallas' interpreter, which is slow but works on any device. Use it for tests.

    Returns:
        `finite`, bool[], True for an empty tree; and the sum of squares, float32[], NaN if `finite` is False. Values
        are multiplied and summed in float32 (in float64 for float64 leaves, then rounded). The result is
        deterministic.

    Raises:
        ValueError: `implementation` is unknown, or `inv_scale` is not a scalar.
        NotImplementedError: the kernel passed as `implementation` does not support the leaves, the device or the
            transformation.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import check_finite
        >>> finite, sum_of_squares = check_finite({"w": jnp.array([3.0, 4.0]), "b": jnp.float16(0)})
        >>> bool(finite), float(sum_of_squares)
        (True, 25.0)
        >>> bool(check_finite([jnp.array([1.0, jnp.inf])])[0])
        False

    References:
        `torch._amp_foreach_non_finite_check_and_unscale_` and apex's `multi_tensor_l2norm`, combined.
    """
    _, finite, sum_of_squares = _run("check_finite", tree, inv_scale, None, implementation, interpret)
    return finite, sum_of_squares


def unscale_check(
    tree: Any,
    inv_scale: ArrayLike,
    *,
    out_dtype: DTypeLike = jnp.float32,
    implementation: str | None = None,
    interpret: bool = False,
) -> tuple[Any, jax.Array, jax.Array]:
    """Multiplies a tree by the reciprocal of the loss scale, and checks that the products are finite, in one pass.

    It writes every element of the result, even if some are not finite.

    Args:
        tree: arrays of any shape. Floating and complex leaves are multiplied; all other leaves are returned unchanged.
        inv_scale: float32[], the reciprocal of the loss scale. The product is computed in float32 (in float64 for
            float64 leaves).
        out_dtype: float32, float16 or bfloat16, the dtype of the products. float64 and complex leaves keep their dtype.
        implementation: see `check_finite`.
        interpret: see `check_finite`.

    Returns:
        The tree with its floating leaves multiplied, in `out_dtype`; `finite`, bool[], whether all its values are
        finite; and the sum of their squares, float32[], accumulated in float32, NaN if `finite` is False.

    Raises:
        ValueError: `implementation` or `out_dtype` is unknown, or `inv_scale` is not a scalar.
        TypeError: `out_dtype` is not a dtype.
        NotImplementedError: the kernel passed as `implementation` does not support the leaves, the device or the
            transformation.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import unscale_check
        >>> grads, finite, sum_of_squares = unscale_check({"w": jnp.float16([6, 8])}, 0.5)
        >>> print(grads["w"], grads["w"].dtype, finite, sum_of_squares)
        [3. 4.] float32 True 25.0

    References:
        `torch._amp_foreach_non_finite_check_and_unscale_`, `apex.multi_tensor_scale`.
    """
    if jnp.dtype(out_dtype) not in DTYPES:
        raise ValueError(f"`out_dtype` must be one of {_ALLOWED}, got {jnp.dtype(out_dtype).name}")
    return _run("unscale_check", tree, inv_scale, jnp.dtype(out_dtype), implementation, interpret)


def _run(
    op: str, tree: Any, inv_scale: ArrayLike, out_dtype: Any, implementation: str | None, interpret: bool
) -> tuple[Any, jax.Array, jax.Array]:
    kernel = launch.KERNELS.choose(op, implementation, interpret)
    if jnp.shape(inv_scale):
        raise ValueError(f"{op}: `inv_scale` must be a scalar, got shape {jnp.shape(inv_scale)}")
    factor = jnp.asarray(inv_scale, jnp.float32)
    paths, structure = jax.tree.flatten_with_path(tree)
    leaves = [x for _, x in paths]
    floating = {k: jnp.asarray(x) for k, x in enumerate(leaves) if _is_floating(x)}
    supported = {k: x for k, x in floating.items() if kernel is not None and launch.is_supported(x)}
    rest = {k: x for k, x in floating.items() if k not in supported}
    for k, x in rest.items():
        if kernel is not None and x.size != 0:
            raise kernel.refusal(
                f"supports leaves of dtype {_ALLOWED} with fewer than 2^31 elements (or up to 64 equal rows of "
                f"fewer, of a length that is a multiple of 8), but the leaf{jax.tree_util.keystr(paths[k][0])} is "
                f"{x.dtype.name}{list(x.shape)}; pass `implementation=None`, which reads such leaves in plain JAX"
            )
    sum_of_squares, *outs = reference.unscale_check(factor, *rest.values(), out_dtype=out_dtype)
    if kernel is not None and supported:
        more, *more_outs = launch.unscale_check(factor, *supported.values(), out_dtype=out_dtype, kernel=kernel)
        sum_of_squares, outs = sum_of_squares + more, outs + more_outs
    # Without `out_dtype`, leaves are not multiplied.
    for k, out in zip((*rest, *supported), outs, strict=False):
        leaves[k] = out
    return jax.tree.unflatten(structure, leaves), ~jnp.isnan(sum_of_squares), sum_of_squares


def _is_floating(x: Any) -> bool:
    return isinstance(x, float | complex) or (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact))
