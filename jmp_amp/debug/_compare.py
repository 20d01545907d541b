"""`compare`: what a precision does to the loss, the gradients and the activations of a program."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jmp_amp._autocast import autocast
from jmp_amp._policy import Policy
from jmp_amp.debug._activations import activations
from jmp_amp.debug._comparison import Comparison, ErrorRow
from jmp_amp.debug._measure import (
    Measured,
    check_concrete,
    check_plain,
    floating_value_and_grad,
    measure,
    measure_reference,
    norm,
    relative_error,
    widened,
)

_DTYPES = ("float32", "float16", "bfloat16")


def compare(
    fun: Callable,
    policies: Sequence[Any] | Mapping[str, Any] = ("float16", "bfloat16"),
    *,
    reference: str = "float32",
    loss_scale: float | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    transform: Callable = floating_value_and_grad,
) -> Callable[..., Comparison]:
    """Returns a function that compares `fun` in several precisions with `fun` in float32 or float64.

    It shows which module costs accuracy: the errors of the loss, of the gradients by module of the parameters, and of
    the activations, which are the last results in each named scope (a module of Flax or Haiku), and in each function
    outside of scopes. Errors of activations are handed on; `worst()`, and a star in the table, says where they rise.
    Everything is evaluated on the arguments of one call and read to the host: for a small batch, outside of training.

    Args:
        fun: the loss function without any mixed precision: returns a scalar, or `(loss, aux)` with `has_aux`.
        policies: what to compare, by name or in a row: a dtype, a `Policy` or its name, for `autocast`; a dict of
            arguments of `autocast`, `{"cured": {"dtype": "float16", "rules": rules}}`; or a function with the arguments
            of `fun` that computes the same, as when you cast by hand, `{"by hand": loss_fn_half}`.
        reference: `"float32"`, or `"float64"`, for which the arguments are cast and `fun` is traced under
            `jax.enable_x64`; float32 that `fun` asks for by name stays. Products run with `precision="highest"`.
        loss_scale: multiplies the loss; None tries 2^16, and halves while the gradients overflow, down to 1.
        argnums: as in `jax.value_and_grad`.
        has_aux: as in `jax.value_and_grad`.
        transform: as in `amp.value_and_grad`: `nnx.value_and_grad`, for instance. If not given, the gradient is that of
            the floating arrays; what else is in the arguments is passed through, as by `autocast`.

    Returns:
        A function with the arguments of `fun` that returns a `Comparison`: `print` it, or `plot()` it.

    Raises:
        TypeError: `fun` is not callable or under `autocast` already, a policy is none, there are no floating arrays to
            differentiate with respect to, or it is called inside `jit`.
        ValueError: `reference` is neither of the two, there are no policies, or the reference is not finite.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> def loss_fn(w, x):
        ...     with jax.named_scope("rest"):  # of a product of which float16 holds the first three digits
        ...         rest = x @ (300 + w["rest"]) - 300 * jnp.sum(x, -1, keepdims=True)
        ...     with jax.named_scope("head"):
        ...         return jnp.mean((rest @ w["head"]) ** 2)
        >>> w = {"rest": jnp.linspace(0, 1, 12).reshape(3, 4), "head": jnp.ones((4, 1))}
        >>> report = amp.debug.compare(loss_fn, ["float16"])(w, jnp.linspace(0, 1, 24).reshape(8, 3))
        >>> report.worst()
        'rest'
        >>> report.gradient["float16"] > 0.01
        True
    """
    check_plain(fun, "compare", ", and the `policies`")
    if reference not in ("float32", "float64"):
        raise ValueError(f'`reference` must be "float32" or "float64", got {reference!r}')
    if isinstance(policies, str | Policy):
        policies = [policies]
    named = policies if isinstance(policies, Mapping) else {_name(policy): policy for policy in policies}
    if not named:
        raise ValueError('`policies` is empty; give it some, such as ("float16", "bfloat16")')
    programs = {name: _under(fun, policy) for name, policy in named.items()}
    options: dict[str, Any] = {"argnums": argnums, "has_aux": has_aux, "transform": transform}

    @functools.wraps(fun, updated=())
    def compared(*args: Any, **kwargs: Any) -> Comparison:
        check_concrete((args, kwargs), "compare")
        exact = measure_reference(fun, args, kwargs, reference, **options)
        exact_activations = _reference_activations(fun, args, kwargs, reference)
        found = {name: measure(program, args, kwargs, loss_scale, **options) for name, program in programs.items()}
        rows = [*_gradient_rows(exact, found), *_activation_rows(exact_activations, programs, args, kwargs)]
        gradient = {name: relative_error(x.all_grads, exact.all_grads) for name, x in found.items()}
        return Comparison(tuple(rows), gradient, {name: x.loss_scale for name, x in found.items()}, reference)

    return compared


def _name(policy: Any) -> str:
    return policy if isinstance(policy, str) else getattr(policy, "__name__", str(policy))


def _under(fun: Callable, policy: Any) -> Callable:
    if isinstance(policy, Mapping):
        return autocast(fun, **policy)
    if isinstance(policy, Policy) or (isinstance(policy, str) and policy not in _DTYPES):
        return autocast(fun, policy=policy)
    # `jnp.float16` is a dtype that can be called.
    if callable(policy) and not isinstance(policy, type) and not hasattr(policy, "dtype"):
        return policy
    return autocast(fun, policy)


def _gradient_rows(exact: Measured, found: Mapping[str, Measured]) -> list[ErrorRow]:
    losses = {name: relative_error([x.loss], [exact.loss]) for name, x in found.items()}
    rows = [ErrorRow("loss", "", norm([exact.loss]), losses)]
    for module, grads in exact.grads.items():
        errors = {name: relative_error(x.grads[module], grads) for name, x in found.items()}
        rows.append(ErrorRow("gradient", module, norm(grads), errors))
    return rows


def _reference_activations(fun: Callable, args: Any, kwargs: Any, dtype: str) -> dict[str, Any]:
    with jax.default_matmul_precision("highest"):
        if dtype == "float32":
            return activations(fun, args, kwargs)
        args, kwargs = widened((args, kwargs))
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            return activations(fun, args, kwargs)


def _activation_rows(
    exact: Mapping[str, Any], programs: Mapping[str, Callable], args: Any, kwargs: Any
) -> list[ErrorRow]:
    """The modules that all programs have, and whose results have the same number of elements in all."""
    found = {name: activations(program, args, kwargs) for name, program in programs.items()}
    rows = []
    for module, x in exact.items():
        others = {name: of[module] for name, of in found.items() if module in of}
        if len(others) == len(found) and all(other.size == x.size for other in others.values()):
            errors = {name: relative_error([other], [x]) for name, other in others.items()}
            rows.append(ErrorRow("activation", module, norm([x]), errors))
    return rows
