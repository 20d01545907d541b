"""The ops as users call them: any tree, any device."""

import re
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.finite_check import primitive, reference
from pallas_kernels.finite_check.config import config_for, fastest

IMPLEMENTATIONS = (None, "xla", *primitive.KERNELS)


def check_finite(
    tree: Any, inv_scale: ArrayLike = 1.0, *, implementation: str | None = None, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Tells whether every value of a tree is finite once it is unscaled, and sums the squares.

    Both answers come from one read of the tree, and from one number: the sum is NaN exactly if a value is not finite.
    Squares of finite float32 values can overflow; the sum is then `inf` while the flag is still `True`.

    Args:
        tree: arrays of any shape; floating and complex leaves (float64 included) are read, all others pass as finite.
        inv_scale: float32[], multiplies every value before it is looked at: the reciprocal of the loss scale.
        implementation: `"xla"` is plain JAX. `"mosaic_gpu"` (NVIDIA Hopper and newer) and `"triton"` (older NVIDIA
            GPUs) are kernels that read hundreds of leaves in one launch. `None` takes the one that was measured to be
            fastest on the device, and plain JAX where a kernel cannot serve: on other devices, under `vmap` and
            differentiation, for float64, complex and 8-bit leaves, and in programs that the compiler partitions over
            devices.
        interpret: runs the kernel in Pallas' interpreter, on any device and slowly: for tests.

    Returns:
        `finite`, bool[], true for an empty tree, and the sum of squares, float32[], NaN if not finite. Values are
        multiplied and summed in float32 (in float64 for float64 leaves, then rounded). The same input gives the same
        bits.

    Raises:
        ValueError: `implementation` is none of these, or `inv_scale` is not a scalar.
        NotImplementedError: an implementation that was asked for by name cannot serve; the message says why.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import check_finite
        >>> finite, sum_of_squares = check_finite({"w": jnp.array([3.0, 4.0]), "b": jnp.float16(0)})
        >>> bool(finite), float(sum_of_squares)
        (True, 25.0)
        >>> bool(check_finite([jnp.array([1.0, jnp.inf])])[0])
        False

    References:
        `torch._amp_foreach_non_finite_check_and_unscale_` and apex's `multi_tensor_l2norm`, in one.
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
    """Multiplies a tree by the reciprocal of the loss scale, and checks what comes out, in one pass.

    Every element of the result is written, on overflow too.

    Args:
        tree: arrays of any shape; floating and complex leaves are multiplied, all others pass through.
        inv_scale: float32[], multiplies every value, in float32 (in float64 for float64 leaves).
        out_dtype: float32, float16 or bfloat16, to which the products are rounded; float64 and complex leaves keep
            their dtype.
        implementation: as for `check_finite`.
        interpret: as for `check_finite`.

    Returns:
        The tree with its floating leaves multiplied, in `out_dtype`; `finite`, bool[], whether all values in it are
        finite; and the sum of their squares, float32[], accumulated in float32, NaN if not finite.

    Raises:
        ValueError: `implementation` or `out_dtype` is none of these, or `inv_scale` is not a scalar.
        TypeError: `out_dtype` is no dtype.
        NotImplementedError: an implementation that was asked for by name cannot serve; the message says why.

    Examples:
        >>> import jax.numpy as jnp
        >>> from pallas_kernels import unscale_check
        >>> grads, finite, sum_of_squares = unscale_check({"w": jnp.float16([6, 8])}, 0.5)
        >>> print(grads["w"], grads["w"].dtype, finite, sum_of_squares)
        [3. 4.] float32 True 25.0

    References:
        `torch._amp_foreach_non_finite_check_and_unscale_`, `apex.multi_tensor_scale`.
    """
    if jnp.dtype(out_dtype) not in primitive.DTYPES:
        allowed = ", ".join(dtype.name for dtype in primitive.DTYPES)
        raise ValueError(f"`out_dtype` must be one of {allowed}, got {jnp.dtype(out_dtype).name}")
    return _run("unscale_check", tree, inv_scale, jnp.dtype(out_dtype), implementation, interpret)


def _run(
    op: str, tree: Any, inv_scale: ArrayLike, out_dtype: Any, implementation: str | None, interpret: bool
) -> tuple[Any, jax.Array, jax.Array]:
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"{op}: unknown implementation {implementation!r}; allowed: {', '.join(map(repr, IMPLEMENTATIONS))}"
        )
    if interpret and implementation not in primitive.KERNELS:
        kernels = " or ".join(map(repr, primitive.KERNELS))
        raise ValueError(f"{op}: `interpret=True` runs a kernel, name one: implementation={kernels}")
    if jnp.shape(inv_scale):
        raise ValueError(f"{op}: `inv_scale` must be a scalar, got shape {jnp.shape(inv_scale)}")
    factor = jnp.asarray(inv_scale, jnp.float32)
    paths, structure = jax.tree.flatten_with_path(tree)
    leaves = [x for _, x in paths]
    floating = [k for k, x in enumerate(leaves) if _is_floating(x)]
    for k in floating:
        leaves[k] = jnp.asarray(leaves[k])

    device = _device_kind()
    forced = implementation is not None
    implementation = implementation or fastest(device, op, len(floating))
    if implementation != "xla" and not _exists(implementation, forced):
        implementation = "xla"
    if forced and implementation != "xla":
        _check_serves(implementation, {paths[k][0]: leaves[k] for k in floating}, interpret)
    served = [k for k in floating if implementation != "xla" and primitive.serves(leaves[k])]
    rest = sorted({*floating} - {*served})
    outs, sum_of_squares = reference.unscale_check([leaves[k] for k in rest], factor, out_dtype=out_dtype)
    if served:
        more, seen = primitive.unscale_check(
            [leaves[k] for k in served],
            factor,
            out_dtype=out_dtype,
            implementation=implementation,
            forced=forced,
            config=config_for(device, implementation),
            interpret=interpret,
        )
        outs, sum_of_squares = outs + more, sum_of_squares + seen
    for k, out in zip(rest + served, outs, strict=False):
        leaves[k] = out
    return jax.tree.unflatten(structure, leaves), ~jnp.isnan(sum_of_squares), sum_of_squares


def _is_floating(x: Any) -> bool:
    return isinstance(x, float | complex) or (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact))


def _exists(implementation: str, forced: bool) -> bool:
    try:
        primitive.kernel(implementation)
    except ImportError as error:
        if forced:
            raise NotImplementedError(
                f'implementation="{implementation}" needs a backend that JAX {jax.__version__} does not have '
                f"({error}); pass another one, or `implementation=None`"
            ) from error
        return False
    return True


def _check_serves(implementation: str, leaves: dict[Any, jax.Array], interpret: bool) -> None:
    """Raises where a kernel that was asked for by name cannot read a leaf, or run on this GPU."""
    for path, x in leaves.items():
        if x.size and not primitive.serves(x):
            allowed = ", ".join(dtype.name for dtype in primitive.DTYPES)
            raise NotImplementedError(
                f'implementation="{implementation}" reads {allowed}, of at most 2^31 elements or equal parts of fewer, '
                f"and the leaf{jax.tree_util.keystr(path)} is {x.dtype.name}{list(x.shape)}; "
                "pass `implementation=None`, which reads such leaves in plain JAX"
            )
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; AMD's are no numbers
    too_old = re.fullmatch(r"\d+\.\d+", capability) and float(capability) < 9
    if implementation == "mosaic_gpu" and not interpret and too_old and _device_kind() == device.device_kind:
        raise NotImplementedError(
            'implementation="mosaic_gpu" needs a GPU of compute capability 9.0 (Hopper) or newer, and '
            f'{device.device_kind} has {capability}; pass `implementation="triton"` or `None`'
        )


def _device_kind() -> str | None:
    """The kind of GPU that programs are traced for; `None` where it is no GPU."""
    # Programs can be compiled for a device that is only described (`AbstractDevice`).
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        return described.device_kind
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None
