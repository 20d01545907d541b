"""`compare`: the errors of the loss, the gradients and the activations of a program in several precisions."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jmp_amp._autocast import autocast
from jmp_amp._calls import transformation
from jmp_amp._formats import FORMATS
from jmp_amp._policy import Policy
from jmp_amp.debug._activations import activations
from jmp_amp.debug._arguments import check_concrete, check_without_autocast
from jmp_amp.debug._comparison import Comparison, ErrorRow
from jmp_amp.debug._measure import Measurement, cast_to_float64, floating_value_and_grad, measure, measure_reference
from jmp_amp.debug._relative_error import norm, relative_error


@transformation
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

    Use it to find the module that loses accuracy, on a small batch, outside of training: it evaluates all policies on
    the arguments of one call and copies the results to the host. It reports the error of the loss, of the gradients by
    module of the parameters, and of the activations. An activation is the last result in a named scope (a Flax or Haiku
    module), or, outside of scopes, in a function. Errors propagate from one activation to the next; `worst()`, and a
    star in the table, show where they increase most.

    Args:
        fun: the loss function without any mixed precision. It returns a scalar, or `(loss, aux)` with `has_aux`.
        policies: a sequence of policies, or a dict of policies by name. A policy is a dtype, a `Policy` or the name of
            one, for `autocast`; a dict of arguments of `autocast`, `{"cured": {"dtype": "float16", "rules": rules}}`;
            or a function that takes the arguments of `fun` and computes the same loss, such as a version with casts by
            hand, `{"by hand": loss_fn_half}`.
        reference: `"float32"` or `"float64"`. For `"float64"`, the arguments are cast and `fun` is traced under
            `jax.enable_x64`; arrays that `fun` explicitly creates in float32 stay float32. Products of the reference
            run with `precision="highest"`.
        loss_scale: multiplies the loss. None starts at 2^16 and halves the scale while the gradients overflow, down to
            1.
        argnums: as in `jax.value_and_grad`.
        has_aux: as in `jax.value_and_grad`.
        transform: as in `amp.value_and_grad`, such as `nnx.value_and_grad`. The default differentiates with respect to
            the floating arrays and passes all other leaves of the arguments through, as `autocast` does.

    Returns:
        A function with the signature of `fun` that returns a `Comparison`; `print` it or call `plot()`.

    Raises:
        TypeError: `fun` is not callable or is already under `autocast`; a policy is of another type; there are no
            floating arrays to differentiate with respect to; or the returned function is called inside `jit`.
        ValueError: `reference` is neither `"float32"` nor `"float64"`; `policies` is empty; or the loss or the
            gradients of the reference are not finite.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> def loss_fn(w, x):
        ...     with jax.named_scope("rest"):  # float16 keeps three digits of this product
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
    check_without_autocast(fun, "compare", ", and the precisions as `policies`")
    if reference not in ("float32", "float64"):
        raise ValueError(f'`reference` must be "float32" or "float64", got {reference!r}')
    if isinstance(policies, str | Policy):
        policies = [policies]
    named = policies if isinstance(policies, Mapping) else {_name(policy): policy for policy in policies}
    if not named:
        raise ValueError('`policies` is empty; pass at least one, such as ("float16", "bfloat16")')
    programs = {name: _apply_policy(fun, policy) for name, policy in named.items()}
    options: dict[str, Any] = {"argnums": argnums, "has_aux": has_aux, "transform": transform}

    @functools.wraps(fun, updated=())
    def compared(*args: Any, **kwargs: Any) -> Comparison:
        check_concrete((args, kwargs), "compare")
        exact = measure_reference(fun, args, kwargs, reference, **options)
        exact_activations = _reference_activations(fun, args, kwargs, reference)
        measured = {name: measure(program, args, kwargs, loss_scale, **options) for name, program in programs.items()}
        rows = [*_gradient_rows(exact, measured), *_activation_rows(exact_activations, programs, args, kwargs)]
        gradient = {name: relative_error(x.all_grads, exact.all_grads) for name, x in measured.items()}
        return Comparison(tuple(rows), gradient, {name: x.loss_scale for name, x in measured.items()}, reference)

    return compared


def _name(policy: Any) -> str:
    return policy if isinstance(policy, str) else getattr(policy, "__name__", str(policy))


def _apply_policy(fun: Callable, policy: Any) -> Callable:
    if isinstance(policy, Mapping):
        return autocast(fun, **policy)
    if isinstance(policy, Policy) or (isinstance(policy, str) and policy not in FORMATS):
        return autocast(fun, policy=policy)
    # `jnp.float16` and NumPy's scalar types are callable dtypes.
    if callable(policy) and not isinstance(policy, type) and not hasattr(policy, "dtype"):
        return policy
    return autocast(fun, policy)


def _gradient_rows(exact: Measurement, measured: Mapping[str, Measurement]) -> list[ErrorRow]:
    losses = {name: relative_error([x.loss], [exact.loss]) for name, x in measured.items()}
    rows = [ErrorRow("loss", "", norm([exact.loss]), losses)]
    for module, grads in exact.grads.items():
        errors = {name: relative_error(x.grads[module], grads) for name, x in measured.items()}
        rows.append(ErrorRow("gradient", module, norm(grads), errors))
    return rows


def _reference_activations(fun: Callable, args: Any, kwargs: Any, dtype: str) -> dict[str, Any]:
    with jax.default_matmul_precision("highest"):
        if dtype == "float32":
            return activations(fun, args, kwargs)
        args, kwargs = cast_to_float64((args, kwargs))
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            return activations(fun, args, kwargs)


def _activation_rows(
    exact: Mapping[str, Any], programs: Mapping[str, Callable], args: Any, kwargs: Any
) -> list[ErrorRow]:
    """Returns a row for each module whose activation has the same size in all programs."""
    by_program = {name: activations(program, args, kwargs) for name, program in programs.items()}
    rows = []
    for module, x in exact.items():
        others = {name: by_module[module] for name, by_module in by_program.items() if module in by_module}
        if len(others) == len(by_program) and all(other.size == x.size for other in others.values()):
            errors = {name: relative_error([other], [x]) for name, other in others.items()}
            rows.append(ErrorRow("activation", module, norm([x]), errors))
    return rows
