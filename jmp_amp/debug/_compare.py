"""`compare`: the errors of the loss, the gradients and the activations of a program in several precisions."""

import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast import autocast
from jmp_amp._calls import check_concrete, quote, transformation
from jmp_amp._loss_scale import to_number, value_and_grad
from jmp_amp._products import emulated
from jmp_amp._trees import cast_floating
from jmp_amp.debug._evaluation import Evaluation, precise
from jmp_amp.debug._nodes import Place, reads_low
from jmp_amp.debug._report import Content, Plot, Table, as_jit_takes, check_without_autocast, flat_on_host, module_name

Arrays = dict[tuple[str, str], np.ndarray]  # float64[size] by kind and name, as in an `ErrorRow`

_COMPREHENSION = re.compile(r"(\.<locals>)?\.<(genexpr|listcomp|setcomp|dictcomp)>")


def floating_value_and_grad(fun: Callable, **options: Any) -> Callable:
    """Returns `jax.value_and_grad(fun, **options)` for arguments with any leaves.

    Leaves that are not floating arrays have the gradient None.
    """

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        is_float = [isinstance(x, jax.Array) and jx.is_floating(x) for x in leaves]

        def of_floats(*floats: Any) -> Any:
            combined = jx.combine(is_float, jax.tree.leaves(floats), leaves)
            return fun(*jax.tree.unflatten(tree, combined), **kwargs)

        floats = [x if ok else None for x, ok in zip(leaves, is_float, strict=True)]
        return jax.value_and_grad(of_floats, **options)(*jx.with_leaves(args, floats))

    return evaluate


class GradOptions(TypedDict, total=False):
    """The options of the gradient that a tool measures, as `compare` describes them."""

    loss_scale: float | None
    argnums: int | Sequence[int]
    has_aux: bool
    transform: Callable[..., Any]


def parse_grad_options(
    loss_scale: float | None = None, argnums: Any = 0, has_aux: bool = False, transform: Any = floating_value_and_grad
) -> tuple[float | None, dict[str, Any]]:
    """Returns the loss scale, and the options of `amp.value_and_grad`."""
    return loss_scale, {"argnums": argnums, "has_aux": has_aux, "transform": transform}


@transformation
def compare(
    fun: Callable,
    policies: Any = ("float16", "bfloat16"),
    *,
    reference: str = "float32",
    **options: Unpack[GradOptions],
) -> "Callable[..., Comparison]":
    """Returns a function that compares `fun` in several precisions with `fun` in float32 or float64.

    Use it to find the module that loses accuracy, on a small batch, outside of training: it evaluates all policies on
    the arguments of one call and copies the results to the host. It reports the error of the loss, of the gradients by
    module of the parameters, and of the activations. An activation is the last result in a named scope (a Flax or Haiku
    module), or, outside of scopes, in a function. Errors propagate from one activation to the next; `worst()`, and a
    star in the table, show where they increase most.

    Args:
        fun: the loss function without any mixed precision. It returns a scalar, or `(loss, aux)` with `has_aux`.
        policies: one policy, a sequence of policies, or a dict of policies by name. A policy is a dtype, a `Policy` or
            the name of one, for `autocast`; a dict of its arguments, `{"cured": {"dtype": "float16", "rules": rules}}`;
            or a function that takes the arguments of `fun` and computes the same loss, such as a version with casts by
            hand, `{"by hand": loss_fn_half}`.
        reference: `"float32"` or `"float64"`. For `"float64"`, the arguments are cast and `fun` is traced under
            `jax.enable_x64`; arrays that `fun` explicitly creates in float32 stay float32. What `fun` itself casts to
            16 bits is computed in the dtype of the reference, and the table says so. Products of the reference run with
            `precision="highest"`.
        **options: those of the gradient. `loss_scale` multiplies the loss; the default, None, starts at 2^16 and halves
            the scale while the gradients overflow, down to 1. `argnums` and `has_aux` are as in `jax.value_and_grad`.
            `transform` is as in `amp.value_and_grad`, such as `nnx.value_and_grad`; the default differentiates with
            respect to the floating arrays and passes all other leaves of the arguments through, as `autocast` does.

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
        >>> w = {"rest": jnp.linspace(0, 1, 32).reshape(4, 8), "head": jnp.ones((8, 1))}
        >>> report = amp.debug.compare(loss_fn, ["float16"])(w, jnp.linspace(0, 1, 32).reshape(8, 4))
        >>> report.worst()
        'rest'
        >>> report.gradient["float16"] > 0.01
        True
    """
    check_without_autocast(fun, "compare", ", and the precisions as `policies`")
    if reference not in ("float32", "float64"):
        raise ValueError(f'`reference` must be "float32" or "float64", got {quote(reference)}')
    if isinstance(policies, str) or not isinstance(policies, Iterable):
        policies = [policies]
    if not isinstance(policies, Mapping):
        named = [(getattr(policy, "__name__", str(policy)), policy) for policy in policies]
        names = [name for name, _ in named]
        policies = {x if names.count(x) == 1 else f"{x} {i}": policy for i, (x, policy) in enumerate(named, 1)}
    if not policies:
        raise ValueError('`policies` is empty; pass at least one, such as ("float16", "bfloat16")')
    programs = {name: _apply_policy(fun, policy) for name, policy in policies.items()}
    loss_scale, grad_options = parse_grad_options(**options)

    @functools.wraps(fun, updated=())
    def compared(*args: Any, **kwargs: Any) -> Comparison:
        check_concrete((args, kwargs), "compare")
        args, kwargs = as_jit_takes(args, kwargs)
        program, _, _ = jx.trace_call(fun, args, kwargs)
        wide = np.dtype(reference) if reads_low(program) else None
        with precise(np.dtype(reference)), jax.numpy_dtype_promotion("standard"):
            given = cast_floating((args, kwargs), np.float64) if reference == "float64" else (args, kwargs)
            exact, _ = measure(fun, *given, 1.0, wide, **grad_options)
        check_finite((x for (kind, _), x in exact.items() if kind != "activation"), reference)
        runs = {name: measure(program, args, kwargs, loss_scale, **grad_options) for name, program in programs.items()}
        rows = []
        for key, x in exact.items():
            others = {name: results.get(key, np.empty(0)) for name, (results, _) in runs.items()}
            if all(other.size == x.size for other in others.values()):
                errors = {name: relative_error(other, x) for name, other in others.items()}
                rows.append(ErrorRow(*key, float(np.linalg.norm(x)), errors))
        gradient = {name: relative_error(all_grads(x), all_grads(exact)) for name, (x, _) in runs.items()}
        scales = {name: scale for name, (_, scale) in runs.items()}
        return Comparison(tuple(rows), gradient, scales, reference, wide is not None)

    return compared


def _apply_policy(fun: Callable, policy: Any) -> Callable:
    if isinstance(policy, Mapping):
        return autocast(fun, **policy)
    if callable(policy) and not isinstance(policy, type):  # `jnp.float16` and NumPy's scalar types are classes
        return policy
    return autocast(fun, policy)


class ErrorRow(NamedTuple):
    """The relative error of one result, for each policy.

    Attributes:
        kind: `"loss"`, `"gradient"` or `"activation"`.
        name: the module: for a gradient, the container of the parameters, `"decoder/norm"`; for an activation, a named
            scope or a function, `"model.py:attention"`.
        norm: the norm of the reference.
        errors: by policy, the norm of the difference over the norm of the reference; infinite if the result is not
            finite.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
        >>> report = amp.debug.compare(loss_fn)({"w": jnp.ones((8, 2)) / 8}, jnp.ones((4, 8)))
        >>> row = next(row for row in report.rows if row.kind == "gradient")
        >>> row.name, row.errors["float16"] < 1e-3
        ('w', True)
    """

    kind: str
    name: str
    norm: float
    errors: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Comparison(Plot):
    """The errors of a function under several policies; `compare` returns it. `print` shows a table.

    `plot` draws the errors as bars, a row for each module and a color for each policy; a cross marks a result that is
    not finite.

    A gradient that is 0 except for rounding, such as that of a bias before a norm, has no meaningful relative error.
    If the norm of a gradient is below 1e-5 of the norm of all gradients, the table shows its error in parentheses and
    the plot omits it.

    Attributes:
        rows: the loss, the gradients by module, and the activations in program order.
        gradient: the error of all gradients together, by policy.
        loss_scale: the loss scale, by policy.
        reference: the dtype of the reference.
        is_lifted: whether the program itself reads 16-bit values, which the reference computes in its own dtype.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> loss_fn = lambda params, x: jnp.mean((x @ params["w"]) ** 2)
        >>> report = amp.debug.compare(loss_fn)({"w": jnp.ones((8, 2)) / 8}, jnp.ones((4, 8)))
        >>> report.reference, sorted({row.kind for row in report.rows})
        ('float32', ['activation', 'gradient', 'loss'])
    """

    _aligns_right = True
    rows: tuple[ErrorRow, ...]
    gradient: dict[str, float]
    loss_scale: dict[str, float]
    reference: str
    is_lifted: bool = False

    def worst(self, policy: str | None = None) -> str:
        """Returns the module that causes the error: the one whose activation increases it by the largest factor.

        The factor is the error over the largest error of all earlier activations, or over a tenth of the largest finite
        error if that is larger. The first module with a non-finite activation takes precedence over all others.

        Args:
            policy: the name of the policy; None for the first.

        Returns:
            The name of the module; empty if there is no error.

        Raises:
            ValueError: the comparison has no such policy.
        """
        policy = next(iter(self.gradient)) if policy is None else policy
        if policy not in self.gradient:
            raise ValueError(f"`policy` must be one of {', '.join(map(repr, self.gradient))}, got {quote(policy)}")
        errors = {row.name: row.errors[policy] for row in self._of("activation")}
        largest = max((e for e in errors.values() if math.isfinite(e)), default=0) / 10 or 1.0
        worst, worst_factor = "", 0.0
        for name, error in errors.items():
            if error > largest * worst_factor:
                worst, worst_factor = name, error / largest
            largest = max(largest, error)
        return worst

    def _of(self, kind: str) -> list[ErrorRow]:
        return [row for row in self.rows if row.kind == kind]

    def _is_rounding(self, row: ErrorRow) -> bool:
        return row.kind == "gradient" and row.norm < 1e-5 * math.hypot(*(row.norm for row in self._of("gradient")))

    def _content(self) -> Content:
        policies = list(self.gradient)
        worst = {policy: self.worst(policy) for policy in policies}
        rows: list[tuple[str, ...]] = [(f"error against {self.reference}", "norm", *policies)]
        for row in self.rows:
            form = "({:.1e})" if self._is_rounding(row) else "{:.1e} "
            starred = {p for p in policies if row.kind == "activation" and worst[p] == row.name}
            errors = (f"{row.errors[p]:.1e}*" if p in starred else form.format(row.errors[p]) for p in policies)
            rows.append((f"{row.kind} {row.name}".strip(), f"{row.norm:.1e}", *errors))
            if row.kind == "loss":
                rows.append(("all gradients", "", *(f"{self.gradient[p]:.1e} " for p in policies)))
        scales = ", ".join(f"2^{math.log2(scale):g} ({policy})" for policy, scale in self.loss_scale.items())
        notes = [f"* where the error increases most. Loss scale: {scales}."]
        if self.is_lifted:
            notes.append(f"The program casts to 16 bits; the reference computes what it casts in {self.reference}.")
        return "", [Table(rows)], notes

    def _draw(self, figure: Any) -> None:
        titles = {"gradient": "Gradients, by module", "activation": "Activations, in the order of the program"}
        most_rows = max(len(self._of(kind)) for kind in titles)
        n = len(self.gradient)
        figure.set_size_inches(11, 1.6 + most_rows * (0.14 + 0.14 * n))
        plotted = [row for row in self.rows if not self._is_rounding(row)]
        finite = [e for row in plotted for e in row.errors.values() if 0 < e < math.inf]
        xlim = min(finite, default=1e-8) / 3, max(finite, default=1.0) * 3
        for axes, (kind, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
            _plot_rows(axes, [row for row in plotted if row.kind == kind], list(self.gradient), xlim[1])
            axes.set(title=title, xlabel=f"relative error against {self.reference}", xscale="log", xlim=xlim)
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=n, frameon=False)


def _plot_rows(axes: Any, rows: list[ErrorRow], policies: list[str], right: float) -> None:
    height = 0.8 / len(policies)
    for i, policy in enumerate(policies):
        errors = np.array([row.errors[policy] for row in rows])
        positions = np.arange(len(rows)) + (i - (len(policies) - 1) / 2) * height
        axes.barh(positions, np.minimum(errors, right), height, color=f"C{i}", label=policy)
        infinite = positions[np.isinf(errors)]
        axes.plot(np.full(len(infinite), right / 1.3), infinite, "kx", ms=5)
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.invert_yaxis()


def all_grads(results: Arrays) -> np.ndarray:
    """Returns the gradients of all modules, float64[size]."""
    return np.concatenate([np.empty(0), *(x for (kind, _), x in results.items() if kind == "gradient")])


@emulated()  # the tools measure what float8 does, on every machine
def measure(
    fun: Callable,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    loss_scale: float | None,
    wide: Any = None,
    **options: Any,
) -> tuple[Arrays, float]:
    """Returns the loss, the unscaled gradients by the module of their parameters, the activations, and the loss scale.

    Args:
        fun: the loss function.
        args: its positional arguments.
        kwargs: its keyword arguments.
        loss_scale: as in `unscaled`.
        wide: the dtype that narrower values are computed in; None for the traced dtypes.
        **options: the options of `amp.value_and_grad`.
    """
    arrays, rebuild = jx.split_arrays((args, kwargs))
    run: Callable = functools.partial(loss_and_grads, fun, rebuild, **options)
    if wide is not None:
        fun, run = evaluated(fun, wide=wide), evaluated(run, wide=wide)
    results, scale = unscaled(jax.jit(run), arrays, loss_scale)
    return results | _activations(fun, args, kwargs), scale


def loss_and_grads(
    fun: Callable, rebuild: Callable, arrays: Sequence[Any], scale: jax.Array, has_aux: bool = False, **options: Any
) -> tuple[Any, Any]:
    """Returns the loss, without `aux`, and the scaled gradients of the call whose arguments `rebuild(arrays)` are.

    Raises:
        TypeError: there are no floating gradients.
    """
    args, kwargs = rebuild(arrays)
    value, grads = value_and_grad(fun, loss_scale=scale, has_aux=has_aux, **options)(*args, **kwargs)
    if not sum(x.size for x in jax.tree.leaves(grads) if jx.is_floating(x)):
        raise TypeError(
            "there are no floating arrays to differentiate with respect to; "
            "set `argnums` to the arguments that hold the parameters"
        )
    return (value[0] if has_aux else value), grads


def unscaled(run: Callable, arrays: list[Any], loss_scale: float | None) -> tuple[Arrays, float]:
    """Runs a gradient. Returns the loss, the unscaled gradients by module, and the loss scale.

    Args:
        run: `loss_and_grads`, of arrays and a loss scale.
        arrays: the arrays.
        loss_scale: multiplies the loss. None starts at 2^16 and halves the scale until the loss and the gradients are
            finite, or the scale is 1.
    """
    for scale in scales_to_try(loss_scale):
        loss, grads = run(arrays, jnp.float32(scale))
        results = {("loss", ""): flat_on_host(loss)}
        for path, leaf in jax.tree.leaves_with_path(grads):
            if jx.is_floating(leaf):
                key = "gradient", module_name(path)
                results[key] = np.append(results.get(key, []), flat_on_host(leaf) / scale)
        if all(np.isfinite(x).all() for x in results.values()):
            break
    return results, scale


def scales_to_try(loss_scale: float | None) -> list[float]:
    """Returns the loss scale; for None, those from 2^16 down to 1."""
    return [2.0**k for k in range(16, -1, -1)] if loss_scale is None else [to_number("loss_scale", loss_scale)]


def check_finite(results: Iterable[np.ndarray], dtype: str) -> None:
    """Raises ValueError if the results of a reference are not finite."""
    if not all(np.isfinite(x).all() for x in results):
        raise ValueError(
            f"the loss or its gradients are not finite in {dtype} either, so precision is not the cause; "
            "find the cause with `amp.debug.first_nonfinite(jax.value_and_grad(fun))(*args)`"
        )


def relative_error(x: np.ndarray, reference: np.ndarray) -> float:
    """Returns the norm of `x - reference` over the norm of `reference`, float64[size] both.

    The error is infinite if `x` is not finite, or if `reference` is 0 and `x` is not.
    """
    if not np.isfinite(x).all():
        return math.inf
    difference, norm = float(np.linalg.norm(x - reference)), float(np.linalg.norm(reference))
    return difference / norm if norm else (math.inf if difference else 0.0)


def evaluated(fun: Callable, **options: Any) -> Callable:
    """Returns `fun` as an `Evaluation` with these options evaluates it."""

    @functools.wraps(fun, updated=())
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        program, arrays, rebuild = jx.trace_call(fun, args, kwargs)
        return rebuild(Evaluation(program, arrays, **options).run().results)

    return evaluate


def _activations(fun: Callable, args: Sequence[Any], kwargs: dict[str, Any]) -> Arrays:
    """Evaluates a function and returns the last floating-point result of each module, in program order.

    A module is a named scope, such as a Flax or Haiku module, or a scope around it. An op outside of all scopes belongs
    to the user's function that contains it. If a module runs several times, its last run counts; the results of all
    iterations of a `scan` are stacked.

    Returns:
        The result of each module, `"encoder/Dense_0"`, or function, `"model.py:attention"`.
    """
    program, arrays, _ = jx.trace_call(fun, args, kwargs)
    names = dict[str, None]()

    def record(place: Place, operands: Sequence[Any], compute: Callable[..., Sequence[Any]]) -> Sequence[Any]:
        outs, at = compute(operands), jx.Site.at(place.eqns)
        floating = [x for x, var in zip(outs, place.eqn.outvars, strict=True) if jx.is_floating(var)]
        modules = (at.module or _function_in(at.source)).split("/")
        for name in reversed([*itertools.accumulate(modules, "{}/{}".format)]) if floating and modules[0] else ():
            names.pop(name, None)
            names[name] = None
            evaluation.recorded[name] = floating[0]  # it is that of the modules around it, too
        return outs

    @jax.jit
    def run(arrays: list[Any]) -> dict[str, Any]:
        evaluation.arrays = arrays
        return evaluation.run().recorded

    evaluation = Evaluation(program, arrays, around=record, as_one={"cond", "while"})
    results = run(arrays)
    return {("activation", name): flat_on_host(results[name]) for name in names}


def _function_in(source: str) -> str:
    """Returns `train.py:loss_fn` of the line `src/train.py:12 (loss_fn)`; empty if the line is unknown."""
    line, _, function = source.rpartition(" (")
    name = _COMPREHENSION.sub("", function[:-1]).rpartition("<locals>.")[2]
    return source and f"{os.path.basename(line.rpartition(':')[0])}:{name}"
