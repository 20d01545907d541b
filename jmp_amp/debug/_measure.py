"""The loss and the true gradients of a function on the host, and how far they are from others."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp._jaxpr import split_arrays
from jmp_amp._loss_scale import to_number, value_and_grad
from jmp_amp._policy import cast_floating
from jmp_amp.debug._underflow import module_name

_FIRST_SCALE = 2.0**16


class Measured(NamedTuple):
    """What one evaluation gave.

    Attributes:
        loss: float64[], on the host.
        grads: the true gradients by the module of their parameters, flat, float64.
        loss_scale: what multiplied the loss.
    """

    loss: np.ndarray
    grads: dict[str, list[np.ndarray]]
    loss_scale: float

    @property
    def finite(self) -> bool:
        """Whether all of it is."""
        return all(np.isfinite(x).all() for x in (self.loss, *self.all_grads))

    @property
    def all_grads(self) -> list[np.ndarray]:
        """The gradients of all modules."""
        return [x for xs in self.grads.values() for x in xs]


def check_plain(fun: Any, name: str, cure: str) -> None:
    """Raises where `fun` is no function, or one that is under autocast."""
    if not callable(fun):
        raise TypeError(f"`{name}` takes a function, got {type(fun).__name__}")
    if hasattr(fun, "autocast_of"):
        raise TypeError(f"this function is under `autocast` already; give `{name}` the plain one{cure}")


def check_concrete(arguments: Any, name: str) -> None:
    """Raises inside `jit`."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(arguments)):
        raise TypeError(f"`{name}` reads values, so it cannot run inside `jit`; call it on concrete arguments")


def floating_value_and_grad(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable:
    """As `jax.value_and_grad`, with respect to the floating arrays alone; the gradient of anything else is None."""

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        def of_floats(*floats: Any) -> Any:
            merged = jax.tree.map(lambda f, x: x if f is None else f, floats, args, is_leaf=lambda x: x is None)
            return fun(*merged, **kwargs)

        def floating(x: Any) -> Any:
            return x if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) else None

        floats = jax.tree.map(floating, args)
        return jax.value_and_grad(of_floats, argnums, has_aux)(*floats)

    return evaluate


def measure(
    fun: Callable, args: Sequence[Any], kwargs: dict[str, Any], loss_scale: float | None = None, **options: Any
) -> Measured:
    """Evaluates the loss and its gradients.

    Args:
        fun: returns a loss.
        args: its arguments.
        kwargs: likewise.
        loss_scale: None tries 2^16, and halves until nothing overflows, or to 1: as dynamic loss scaling does.
        **options: those of `amp.value_and_grad`.
    """
    arrays, rebuild = split_arrays((args, kwargs))
    has_aux = options.get("has_aux", False)

    @jax.jit
    def run(arrays: list[Any], scale: jax.Array) -> tuple[Any, Any]:
        args, kwargs = rebuild(arrays)
        value, grads = value_and_grad(fun, loss_scale=scale, **options)(*args, **kwargs)
        return (value[0] if has_aux else value), grads

    scale = _FIRST_SCALE if loss_scale is None else to_number("loss_scale", loss_scale)
    while True:
        loss, grads = run(arrays, jnp.float32(scale))
        measured = _on_host(loss, grads, scale)
        if measured.finite or loss_scale is not None or scale == 1:
            return measured
        scale /= 2


def measure_reference(
    fun: Callable, args: Sequence[Any], kwargs: dict[str, Any], dtype: str, **options: Any
) -> Measured:
    """Evaluates as `measure` does, in float32 or float64, with products as accurate as these."""
    with jax.default_matmul_precision("highest"):
        if dtype == "float64":
            args, kwargs = widened((args, kwargs))
            with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
                measured = measure(fun, args, kwargs, 1.0, **options)
        else:
            measured = measure(fun, args, kwargs, 1.0, **options)
    if not measured.grads:
        raise TypeError(
            "there are no floating arrays to differentiate with respect to; "
            "say with `argnums` which arguments hold the parameters"
        )
    if not measured.finite:
        raise ValueError(
            f"the loss or its gradients are not finite in {dtype} either, so precision is not the cause; "
            "find out what is with `amp.debug.first_nonfinite(jax.value_and_grad(fun))(*args)`"
        )
    return measured


def widened(tree: Any) -> Any:
    """Returns a tree with its floating arrays as float64 ones of numpy."""
    is_array = (jax.Array, np.ndarray)
    host = jax.tree.map(
        lambda x: np.asarray(x) if isinstance(x, is_array) and jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )
    return cast_floating(host, np.float64)


def relative_error(x: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """The norm of the difference of two lists of arrays, over that of the reference; infinite if `x` is not finite."""
    if not all(np.isfinite(a).all() for a in x):
        return math.inf
    difference = norm([a - b for a, b in zip(x, reference, strict=True)])
    size = norm(reference)
    return difference / size if size else (math.inf if difference else 0.0)


def norm(arrays: Sequence[np.ndarray]) -> float:
    """The Euclidean norm of all of them together."""
    return math.hypot(*(float(np.linalg.norm(x)) for x in arrays))


def on_host(x: Any) -> np.ndarray:
    """Returns an array flat, in float64, in the memory of the host."""
    return np.asarray(jax.device_get(x)).astype(np.float64).ravel()


def _on_host(loss: Any, grads: Any, scale: float) -> Measured:
    by_module: dict[str, list[np.ndarray]] = {}
    for path, leaf in jax.tree.leaves_with_path(grads):
        if jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            by_module.setdefault(module_name(path), []).append(on_host(leaf) / scale)
    return Measured(on_host(loss), by_module, scale)
