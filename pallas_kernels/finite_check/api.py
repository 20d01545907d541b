"""The public ops, for any tree and any device."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels.finite_check import launch, reference

IMPLEMENTATIONS = (None, "xla", *launch.KERNELS)


class Measured(NamedTuple):
    """An implementation that is faster than XLA for trees of `least_leaves` leaves or more, as measured."""

    implementation: str
    least_leaves: int


# Keys: device kind, then op. Values: measurements by `benchmarks/kernels.py`. Missing entries mean XLA. It is empty
# because the kernels have been compiled for an H200 and run in Pallas' interpreters, but not timed on a GPU.
FASTEST: dict[str, dict[str, Measured]] = {}


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
        implementation: `"xla"` is plain JAX. `"mosaic_gpu"` (NVIDIA Hopper and newer) and `"triton"` (NVIDIA Ampere and
            newer) are kernels that read hundreds of leaves in one launch. `None` uses the fastest implementation on the
            device, as measured, and falls back to plain JAX on other devices, under `vmap` and differentiation, for
            float64, complex and 8-bit leaves, and in programs that the compiler partitions over devices.
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
    if jnp.dtype(out_dtype) not in launch.DTYPES:
        allowed = ", ".join(dtype.name for dtype in launch.DTYPES)
        raise ValueError(f"`out_dtype` must be one of {allowed}, got {jnp.dtype(out_dtype).name}")
    return _run("unscale_check", tree, inv_scale, jnp.dtype(out_dtype), implementation, interpret)


def fastest_implementation(device_kind: str | None, op: str, leaves: int) -> str:
    """Returns the fastest implementation for a tree of `leaves` leaves, or `"xla"` if there is no measurement."""
    measured = FASTEST.get(device_kind or "", {}).get(op)
    return measured.implementation if measured and leaves >= measured.least_leaves else "xla"


def _run(
    op: str, tree: Any, inv_scale: ArrayLike, out_dtype: Any, implementation: str | None, interpret: bool
) -> tuple[Any, jax.Array, jax.Array]:
    _check_arguments(op, inv_scale, implementation, interpret)
    factor = jnp.asarray(inv_scale, jnp.float32)
    paths, structure = jax.tree.flatten_with_path(tree)
    leaves = [x for _, x in paths]
    floating = [k for k, x in enumerate(leaves) if _is_floating(x)]
    for k in floating:
        leaves[k] = jnp.asarray(leaves[k])

    forced = implementation is not None
    implementation = implementation or fastest_implementation(_device_kind(), op, len(floating))
    supported: list[int] = []
    if implementation != "xla" and _is_available(implementation, forced):
        if forced:
            _check_supported(implementation, {paths[k][0]: leaves[k] for k in floating}, interpret)
        supported = [k for k in floating if launch.is_supported(leaves[k])]
    rest = sorted({*floating} - {*supported})
    outs, sum_of_squares = reference.unscale_check([leaves[k] for k in rest], factor, out_dtype=out_dtype)
    if supported:
        params = {"out_dtype": out_dtype, "implementation": implementation, "forced": forced, "interpret": interpret}
        params["config"] = launch.DEFAULT
        more, more_squares = launch.unscale_check([leaves[k] for k in supported], factor, **params)
        outs, sum_of_squares = outs + more, sum_of_squares + more_squares
    for k, out in zip(rest + supported, outs, strict=False):
        leaves[k] = out
    return jax.tree.unflatten(structure, leaves), ~jnp.isnan(sum_of_squares), sum_of_squares


def _check_arguments(op: str, inv_scale: ArrayLike, implementation: str | None, interpret: bool) -> None:
    if implementation not in IMPLEMENTATIONS:
        allowed = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"{op}: `implementation` must be one of {allowed}, got {implementation!r}")
    if interpret and implementation not in launch.KERNELS:
        kernels = "implementation=" + " or ".join(map(repr, launch.KERNELS))
        raise ValueError(
            f"{op}: `interpret=True` needs a kernel, got implementation={implementation!r}; pass {kernels}"
        )
    if jnp.shape(inv_scale):
        raise ValueError(f"{op}: `inv_scale` must be a scalar, got shape {jnp.shape(inv_scale)}")


def _is_floating(x: Any) -> bool:
    return isinstance(x, float | complex) or (hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact))


def _is_available(implementation: str, forced: bool) -> bool:
    try:
        launch.load_kernel(implementation)
    except ImportError as error:
        if forced:
            raise NotImplementedError(
                f'implementation="{implementation}" needs a backend that JAX {jax.__version__} does not have '
                f"({error}); pass another implementation, or `implementation=None`"
            ) from error
        return False
    return True


def _check_supported(implementation: str, leaves: dict[Any, jax.Array], interpret: bool) -> None:
    """Raises a `NotImplementedError` if a kernel cannot read one of the leaves, or cannot run on this GPU."""
    for path, x in leaves.items():
        if x.size and not launch.is_supported(x):
            allowed = ", ".join(dtype.name for dtype in launch.DTYPES)
            raise NotImplementedError(
                f'implementation="{implementation}" supports leaves of dtype {allowed} with fewer than 2^31 elements '
                "(or up to 64 equal rows of fewer, of a length that is a multiple of 8), but "
                f"the leaf{jax.tree_util.keystr(path)} is {x.dtype.name}{list(x.shape)}; "
                "pass `implementation=None`, which reads such leaves in plain JAX"
            )
    device = jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))  # "9.0"; not a number for AMD GPUs
    if interpret or not re.fullmatch(r"\d+\.\d+", capability) or _device_kind() != device.device_kind:
        return
    oldest = launch.KERNELS[implementation]
    if float(capability) < oldest.capability:
        others = [name for name, gpu in launch.KERNELS.items() if float(capability) >= gpu.capability]
        raise NotImplementedError(
            f'implementation="{implementation}" needs a GPU of compute capability {oldest.capability} ({oldest.name}) '
            f"or newer, but {device.device_kind} has {capability}; pass "
            f"{' or '.join(f'`implementation={name!r}`' for name in (*others, None))}"
        )


def _device_kind() -> str | None:
    """Returns the kind of GPU that programs are traced for, or `None` for other devices."""
    # A program can be compiled for a device that is not present (`AbstractDevice`).
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if described is not None:
        return described.device_kind
    return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None
