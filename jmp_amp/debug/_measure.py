"""The loss and the unscaled gradients of a function, and relative errors, on the host."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._float8 import emulated
from jmp_amp._jaxpr import is_floating, split_arrays
from jmp_amp._loss_scale import to_number, value_and_grad
from jmp_amp._policy import cast_floating
from jmp_amp.debug._report import module_name

_INIT_SCALE = 2.0**16

R = TypeVar("R")


class Measurement(NamedTuple):
    """The loss and the unscaled gradients of one evaluation.

    Attributes:
        loss: float64[1].
        grads: the unscaled gradients by the module of their parameters, each float64[size].
        loss_scale: the loss scale of the evaluation.
    """

    loss: np.ndarray
    grads: dict[str, list[np.ndarray]]
    loss_scale: float

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return all(np.isfinite(x).all() for x in (self.loss, *self.all_grads))

    @property
    def all_grads(self) -> list[np.ndarray]:
        """The gradients of all modules."""
        return [x for xs in self.grads.values() for x in xs]


def floating_value_and_grad(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable:
    """Returns `jax.value_and_grad(fun)` for arguments with any leaves; non-floating leaves have the gradient None."""

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        def of_floats(*floats: Any) -> Any:
            combined = jax.tree.map(lambda f, x: x if f is None else f, floats, args, is_leaf=lambda x: x is None)
            return fun(*combined, **kwargs)

        floats = jax.tree.map(lambda x: x if _is_floating_array(x) else None, args)
        return jax.value_and_grad(of_floats, argnums, has_aux)(*floats)

    return evaluate


@emulated()  # the tools measure what float8 does, on every machine
def measure(
    fun: Callable, args: Sequence[Any], kwargs: dict[str, Any], loss_scale: float | None = None, **options: Any
) -> Measurement:
    """Evaluates the loss and its gradients.

    Args:
        fun: the loss function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        loss_scale: multiplies the loss. None starts at 2^16 and halves the scale until the loss and the gradients are
            finite, or the scale is 1.
        **options: the options of `amp.value_and_grad`.
    """
    arrays, rebuild = split_arrays((args, kwargs))
    has_aux = options.get("has_aux", False)

    @jax.jit
    def run(arrays: list[Any], scale: jax.Array) -> tuple[Any, Any]:
        args, kwargs = rebuild(arrays)
        value, grads = value_and_grad(fun, loss_scale=scale, **options)(*args, **kwargs)
        return (value[0] if has_aux else value), grads

    scale = _INIT_SCALE if loss_scale is None else to_number("loss_scale", loss_scale)
    while True:
        loss, grads = run(arrays, jnp.float32(scale))
        measurement = _unscaled(loss, grads, scale)
        if measurement.is_finite or loss_scale is not None or scale == 1:
            return measurement
        scale /= 2


def measure_reference(
    fun: Callable, args: Sequence[Any], kwargs: dict[str, Any], dtype: str, **options: Any
) -> Measurement:
    """Evaluates the loss and its gradients in float32 or float64, with `precision="highest"`, at loss scale 1.

    Raises:
        TypeError: there are no gradients.
        ValueError: the loss or its gradients are not finite.
    """
    measurement = run_exactly(measure, fun, args, kwargs, dtype, loss_scale=1.0, **options)
    if not measurement.grads:
        raise TypeError(
            "there are no floating arrays to differentiate with respect to; "
            "set `argnums` to the arguments that hold the parameters"
        )
    if not measurement.is_finite:
        raise ValueError(
            f"the loss or its gradients are not finite in {dtype} either, so precision is not the cause; "
            "find the cause with `amp.debug.first_nonfinite(jax.value_and_grad(fun))(*args)`"
        )
    return measurement


def run_exactly(
    tool: Callable[..., R], fun: Callable, args: Sequence[Any], kwargs: dict[str, Any], dtype: str, **options: Any
) -> R:
    """Returns `tool(fun, args, kwargs, **options)` in float32 or float64, with `precision="highest"`."""
    with jax.default_matmul_precision("highest"):
        if dtype == "float32":
            return tool(fun, args, kwargs, **options)
        # Outside of `enable_x64`, JAX arrays cannot be float64.
        on_host = jax.tree.map(lambda x: np.asarray(x) if _is_floating_array(x) else x, (args, kwargs))
        args, kwargs = cast_floating(on_host, np.float64)
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            return tool(fun, args, kwargs, **options)


def _is_floating_array(x: Any) -> bool:
    return isinstance(x, jax.Array) and is_floating(x)


def _unscaled(loss: Any, grads: Any, scale: float) -> Measurement:
    by_module: dict[str, list[np.ndarray]] = {}
    for path, leaf in jax.tree.leaves_with_path(grads):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            by_module.setdefault(module_name(path), []).append(flat_on_host(leaf) / scale)
    return Measurement(flat_on_host(loss), by_module, scale)


def relative_error(x: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Returns the norm of `x - reference`, for all arrays together, over the norm of `reference`.

    The error is infinite if `x` is not finite, or if `reference` is 0 and `x` is not.
    """
    if not all(np.isfinite(a).all() for a in x):
        return math.inf
    difference = norm([a - b for a, b in zip(x, reference, strict=True)])
    size = norm(reference)
    return difference / size if size else (math.inf if difference else 0.0)


def norm(arrays: Sequence[np.ndarray]) -> float:
    """Returns the Euclidean norm of all arrays together."""
    return math.hypot(*(float(np.linalg.norm(x)) for x in arrays))


def flat_on_host(x: Any) -> np.ndarray:
    """Returns an array as a float64[size] NumPy array."""
    return np.asarray(jax.device_get(x)).astype(np.float64).ravel()
