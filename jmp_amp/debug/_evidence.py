"""The causes of non-finite values, in the order in which they are considered: each is decided by what was seen."""

import bisect
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast import rule_of
from jmp_amp.debug._cures import BOUNDS, CURES
from jmp_amp.debug._evaluation import FLOAT32, FLOAT64, Rewrite, applies_loss_scale, evaluate_in, precise
from jmp_amp.debug._nodes import Node
from jmp_amp.debug._report import location_of
from jmp_amp.debug._trials import Diagnosis, Trials, nearest

_DECOMPOSITIONS = {"cholesky", "lu", "triangular_solve", "custom_linear_solve", "eigh", "eig", "svd"}
_DOMAINS = {"log", "log2", "log1p", "sqrt", "rsqrt", "pow", "asin", "acos", "atanh", "acosh", "erf_inv"}
# Their results are 0 for no finite operands, or for none but 0, unless they underflow.
_EXPONENTIALS = {"exp", "exp2", "logistic"}
_NEVER_ZERO = {"mul", "div", "integer_pow", "square", "pow", "dot_general", "reduce_prod", "convert_element_type"}
_MOST_LINES = 5
_EXTREME = 1e3  # how many times larger than others an input is that is named


def diagnose(trials: Trials) -> Diagnosis:
    """Returns the first cause that applies, with its cure."""
    return next(found for cause in _CAUSES if (found := cause(trials)))


def _of_infinities(t: Trials) -> Diagnosis | None:
    """Replaces infinities by large finite numbers."""
    if not any(x.values.infs for x in t.node.operands):
        return None

    finite = lambda x: jnp.nan_to_num(x, nan=jnp.nan) if jx.is_inexact(x) else x  # noqa: E731
    seen = _seen(t, "with it", constant=finite, arrays=[*map(finite, t.evaluation.arrays)])
    return Diagnosis(
        "infinite operand",
        "an infinity meets an infinity, or 0, here, as in the softmax of a fully masked row: mask with "
        "`jnp.where(mask, x, jnp.finfo(x.dtype).min)`, not with products. If the code has no infinity: a constant such "
        "as -1e9 is -inf in float16",
        seen,
    )


def _of_integers(t: Trials) -> Diagnosis | None:
    """Computes integers in float64."""
    for node in nearest([t.node]):
        dtype = getattr(node.held, "dtype", None)
        operands = [x.held for x in node.operands]
        is_integer = dtype is not None and jnp.issubdtype(dtype, jnp.integer) and not any(x is None for x in operands)
        if not is_integer or all(jnp.result_type(x) != dtype for x in operands):
            continue
        with precise(FLOAT64):
            inputs = [jnp.asarray(x).astype(FLOAT64) if jnp.result_type(x) == dtype else x for x in operands]
            wide = evaluate_in(FLOAT64, node.place, inputs, dtype)
            wrapped = np.zeros(()) if wide is None else np.abs(np.asarray(wide[node.index[0]]))
        if wrapped.max(initial=0) > np.iinfo(dtype).max:
            text = (
                f"`{node.primitive}` {_where(node)} is {wrapped.max():.4g}, more than {dtype} holds, and wraps around"
            )
            return Diagnosis("integer overflow", f"{text}: compute it in floating point, `x.astype(jnp.float32)`")
    return None


def _of_op(t: Trials) -> Diagnosis | None:
    """Names causes that the op and its operands show."""
    name, operands, values = t.node.primitive, t.node.operands, t.node.values
    if t.node.is_constant and name == "convert_element_type":
        return Diagnosis(
            "large constant",
            f"the constant {operands[0].values.min:.4g} exceeds {_largest(t):.5g}, the largest finite {values.dtype}: "
            "use `jnp.finfo(x.dtype).min` in a mask, or keep the ops that read the constant in float32 (autocast does "
            "so if the code is written in float32)",
        )
    if name in ("gather", "dynamic_slice") and values.nans:
        indices = np.asarray(operands[1].held)
        return Diagnosis(
            "index out of range",
            f"an index is out of range, so that JAX returns NaN: indices are from {indices.min()} to {indices.max()}, "
            f"and the array is {list(operands[0].values.shape)}. Check the data",
        )
    if jx.holds_jaxprs(t.node.eqn):
        return Diagnosis(
            "kernel",
            f"`{name}` counts as one op: call `first_nonfinite` on the function inside it, on one shard or block; or "
            "run it in float32 to check whether precision is the cause",
        )
    return None


def _of_counts(t: Trials) -> Diagnosis | None:
    """Adds 1 to scalars that are 0."""
    for i, x in _read_arguments(t).items():
        is_number = not np.shape(x) and jnp.issubdtype(x.dtype, np.number)  # a random key is none
        if is_number and x == 0 and (seen := _with_arrays(t, "with 1", {i: x + np.ones((), x.dtype)})):
            text = f"`{t.name(i)}` is 0, and the op divides by 0 or takes the logarithm of 0 there"
            return Diagnosis("argument is 0", f"{text}. If it counts steps, start with 1", seen)
    return None


def _of_scale(t: Trials) -> Diagnosis | None:
    """Divides the loss scale by powers of two."""
    factors = [x.operands[1].values.max or 0.0 for x in nearest([t.node]) if x.eqn and applies_loss_scale(x.eqn)]
    steps = range(1, math.floor(math.log2(max(*factors, 1.0, 1.0))) + 1)
    k = bisect.bisect_left(steps, True, key=lambda k: bool(_seen(t, "", loss_factor=2.0**-k)))
    if k == len(steps):
        return None
    return Diagnosis(
        "loss scale",
        f"the loss scale is too large: a scale that is 2^{steps[k]} times smaller fits. Dynamic loss scaling finds it "
        "by skipping one step for each halving; a smaller `init_scale` avoids the skips",
        "all results are finite with it",
    )


def _lost(node: Node) -> Node | None:
    """Returns the first value that was rounded to 0, if zeros of an operand come from there."""
    zeros = nearest(node.operands, lambda x: [y for y in x.parents if y.values.zeros])
    return min(filter(_underflows, zeros), key=lambda x: x.number, default=None)


def _underflows(node: Node) -> bool:
    """Whether an op has zeros in its result that its operands do not explain."""
    of_zeros = 0 if node.primitive in _EXPONENTIALS else 1
    from_operands = sum(x.values.infs + of_zeros * x.values.zeros for x in node.operands)
    is_of_floats = all(x.is_floating for x in node.operands)  # the zeros of integers are not counted
    return is_of_floats and node.primitive in _NEVER_ZERO | _EXPONENTIALS and node.values.zeros > from_operands


def _underflow(node: Node) -> str:
    times = f", iteration {', '.join(map(str, node.place.iteration))}" if node.place.iteration else ""
    return f"the operand is 0 because `{node.primitive}` {_where(node)}{times} underflows {node.values.dtype}"


def _of_lost_gradients(t: Trials) -> Diagnosis | None:
    """Multiplies the loss scale, for a float16 gradient that underflows and that the program divides by."""
    lost = _lost(t.node)
    if lost is None or not lost.is_backward or lost.values.dtype != "float16":
        return None
    return Diagnosis(
        "gradient that underflows",
        f"{_underflow(lost)}, whose smallest positive value is 6e-8. Gradients that underflow need a loss scale, or a "
        "larger one: `amp.value_and_grad(fun, loss_scale=scale)`, with the scale of `amp.dynamic_loss_scale`",
        _seen(t, "with a scale 2^16 times larger", loss_factor=2.0**16),
    )


def _of_precision(t: Trials) -> Diagnosis | None:
    """Computes lines, or a module, in float32."""
    if not t.evaluation.has_low_precision:
        return None
    lost = _lost(t.node)
    for node in [lost, t.node] if lost else [t.node]:
        location, passing = location_of(node.place.eqns), {}
        if passed := _lines_in_float32(t, location.source):
            lines, seen = passed
            where = "that line" if lines == [location_of(t.node.place.eqns).source] else "; ".join(lines)
            passing[f"`with amp.full_precision():` around {where}"] = seen
        if (scope := location.scope) and (seen := t.compared(**_in_float32(lambda x, y=scope: y in x.scope))):
            passing[f'`rules={{"{scope}": "full"}}`'] = seen
        if passing:
            text = (
                f"{_underflow(lost) if lost else _too_large(t)}. To run this op in float32, use "
                f"{' or '.join(passing)} if autocast chose {node.values.dtype}, or "
                "`.astype(jnp.float32)` if the code itself casts"
            )
            return Diagnosis("precision", text, next(iter(passing.values())))
    return None


def _lines_in_float32(t: Trials, line: str) -> tuple[list[str], str] | None:
    """Adds the line of the next op that is not finite, until all results are."""
    lines = [line]
    while len(lines) <= _MOST_LINES:
        changes = _in_float32(lambda x, among=(*lines,): x.source in among)
        if seen := t.compared(**changes):
            return lines, seen
        other = dataclasses.replace(t.evaluation, trip_counts={}, **changes)
        new = [location_of(x.place.eqns).source for x in other.nonfinite.values()][:1]
        if other.is_finite or not new or new[0] in lines:
            return None
        lines += new
    return None


def _in_float32(region: Callable[..., bool]) -> dict[str, Any]:
    return {"wide": FLOAT32, "region": functools.cache(lambda eqns: region(location_of(eqns)))}


def _of_rule(t: Trials) -> Diagnosis | None:
    """Differentiates a function without its own derivative rule."""
    if t.node in t.primal:
        return None
    for node in t.sites:
        rules = [x for x in node.place.eqns if isinstance(y := jx.structure_of(x), jx.Call) and y.rule]
        same = [Rewrite(node.key, [node.key], lambda x: x)]  # to enter the function
        if rules and (passed := t.tried(lambda _: same)):  # noqa: B023
            text = (
                f"the derivative rule that the code {_where(node)} defines is not finite; without it, JAX's own "
                f"derivative of the function is: remove the `{rules[0].primitive.name.removesuffix('_call')}`"
            )
            return Diagnosis("derivative rule", text, passed[1])
    return None


def _of_underflow(t: Trials) -> Diagnosis | None:
    name, rule, lost = t.node.primitive, rule_of(t.node.eqn), _lost(t.node)
    divides = name in ("log", "log2", "div") or (rule.power is not None and rule.power < 0)
    if not divides or lost is None:
        return None
    return Diagnosis(
        "underflow",
        f"{_underflow(lost)}. Keep the logarithms of the factors, and add them; or divide by the sum in each step, "
        "and add the logarithms of these",
    )


def _of_eigenvalues(t: Trials) -> Diagnosis | None:
    found = [x for x in nearest([t.node], lambda x: x.parents, 6) if x.primitive in ("eigh", "svd", "eig")]
    if not found or found[0] is t.node or t.node in t.primal:
        return None
    name = found[0].primitive
    return Diagnosis(
        f"derivative of {name}",
        f"the division is inside JAX: the derivative of `{name}` divides by differences of its values, some of "
        "which are equal, or nearly so. Their vectors are not unique, and have no derivative: use a function of the "
        "values alone, or of the matrix",
    )


def _of_singular(t: Trials) -> Diagnosis | None:
    """Adds a multiple of the identity to a matrix."""
    if t.node.primitive not in _DECOMPOSITIONS:
        return None
    matrix = t.node.operands[0]

    def shifted(x: Any) -> Any:
        return x + 1e-3 * jnp.max(jnp.abs(x)) * jnp.eye(x.shape[-1], dtype=x.dtype)

    passed = t.tried(lambda _: [Rewrite(matrix.key, [matrix.key], shifted)], is_equal=False) if matrix.key else None
    return Diagnosis(
        "singular matrix",
        "the matrix is singular, or not positive definite, up to rounding: add a multiple of the identity, "
        "`a + 1e-3 * jnp.max(jnp.abs(a)) * jnp.eye(n)`, and compute the matrix in float32",
        passed[1] if passed else "",
    )


def _of_growth(t: Trials) -> Diagnosis | None:
    """Compares the iterations of a loop."""
    place = t.node.place
    if place is None or not place.iteration:
        return None
    same = [x for x in t.evaluation.nodes if x.key == t.node.key and x.place.iteration[:-1] == place.iteration[:-1]]
    sizes = [_size(x) for x in same if x.values.is_finite]
    factors = [b / a for a, b in itertools.pairwise(sizes) if a]
    if len(factors) < 3 or min(factors) < 1.5:
        return None
    factor = float(np.median(factors))
    return Diagnosis(
        "growth in a loop",
        f"the result of this line grows about {factor:.3g} times in each iteration, from {sizes[0]:.3g} to "
        f"{sizes[-1]:.3g} in {len(sizes)} iterations. If the loop takes steps of an optimizer, "
        "the learning rate is too large",
    )


def _unknown(t: Trials) -> Diagnosis:
    """Shows the values on the way to the op."""
    largest = [max(x.operands, key=_size) for x in [t.node] if x.operands]
    while largest and largest[-1].operands and len(largest) < 6:
        largest.append(max(largest[-1].operands, key=_size))
    chain = "; ".join(f"`{x.primitive}` {_where(x)}: {x.values}" for x in reversed(largest) if x.primitive)
    name = t.node.primitive
    is_outside = name in _DOMAINS and t.node.values.nans + t.node.operands[-1].values.zeros
    fact = f"the operand is outside of the domain of `{name}`" if is_outside else _too_large(t)
    text = f"{fact}. The cause is not known: no cure that was tried passes"
    return Diagnosis("unknown", f"{text}. On the way: {chain}" if chain else text)


def _size(node: Node) -> float:
    return max(abs(node.values.max or 0.0), abs(node.values.min or 0.0))


def _of_outliers(t: Trials) -> Diagnosis | None:
    """Replaces elements, or arrays, that are much larger than their neighbours."""
    arrays = _magnitudes(t, 1)
    for i, x in arrays.items():
        typical = float(np.median(x[x > 0])) if (x > 0).any() else 1.0
        is_outlier, array = x > _EXTREME * typical, np.asarray(t.evaluation.arrays[i])
        new = {i: np.where(is_outlier, typical, array)}
        if 3 < x.size >= 10 * is_outlier.sum() - 9 > 0 and (seen := _with_arrays(t, "without that", new)):
            index = tuple(np.argwhere(is_outlier)[0].tolist())
            text = f"`{t.name(i)}{[*index]}` is {array[index]:.4g}, and its neighbours are about {typical:.3g}"
            return Diagnosis("outlier", f"{text}: check the data", seen)
    sizes = {i: float(np.sqrt(np.mean(x**2))) for i, x in arrays.items() if x.ndim > 1}
    roots = {i: re.split(r"[.\[]", t.name(i))[0] for i in sizes}
    for i, size in sizes.items():
        others = [other for k, other in sizes.items() if k != i and other and roots[k] == roots[i]]
        ratio = size / float(np.median(others)) if others else 1.0
        array = np.asarray(t.evaluation.arrays[i])
        if ratio > _EXTREME and (seen := _with_arrays(t, "without that", {i: array / ratio})):
            text = f"`{t.name(i)}` holds {ratio:.1g} times its neighbours: check how it is initialised, or loaded"
            return Diagnosis("large array", text, seen)
    return None


def _of_inputs(t: Trials) -> Diagnosis | None:
    """Scales arguments down to the size of initial values."""
    sizes = {i: float(np.sqrt(np.mean(x**2) * math.prod(x.shape[:-1]))) for i, x in _magnitudes(t, 2).items()}
    large = {i: size for i, size in sizes.items() if size > _EXTREME}
    new = {i: np.asarray(t.evaluation.arrays[i]) / size for i, size in large.items()}
    if not large or not (seen := _with_arrays(t, "without that", new)):
        return None
    others = "check its initial values, its data and the learning rate"
    if len(large) == len(sizes) > 1:
        others = "all of its kind are that large: lower the learning rate"
    i = max(large, key=large.__getitem__)
    text = f"`{t.name(i)}` is {large[i]:.2g} times as large as initial values are; {others}"
    return Diagnosis("large inputs", text, seen)


def _read_arguments(t: Trials) -> dict[int, Any]:
    """Returns the arguments that the op depends on, by their number."""
    read = {node.index[1] for node in nearest([t.node]) if node.place and not node.place.eqns}
    return {i: t.evaluation.arrays[i] for i in sorted(read)}


def _magnitudes(t: Trials, ndim: int) -> dict[int, np.ndarray]:
    """Returns the magnitudes of the floating ones of these with so many axes or more."""
    arrays = {i: x for i, x in _read_arguments(t).items() if jx.is_floating(x) and x.ndim >= ndim and x.size}
    return {i: np.abs(np.asarray(x, np.float64)) for i, x in arrays.items()}


def _with_arrays(t: Trials, words: str, new: dict[int, Any]) -> str:
    arrays = [new[i].astype(x.dtype) if i in new else x for i, x in enumerate(t.evaluation.arrays)]
    return _seen(t, words, arrays=arrays)


def _seen(t: Trials, words: str, **changes: Any) -> str:
    """Returns what is seen in another evaluation; empty if its results are not finite."""
    return f"all results are finite {words}" if dataclasses.replace(t.evaluation, **changes).is_finite else ""


def _where(node: Node) -> str:
    assert node.place
    return location_of(node.place.eqns).where


def _largest(t: Trials) -> float:
    return float(jnp.finfo(t.node.values.dtype).max)


def _too_large(t: Trials) -> str:
    """Returns how much too large the result is for its dtype."""
    found = t.in_float64
    if found is None or found.max is None:
        return "the result is not finite in float64 either"
    excess = max(abs(found.max), abs(found.min or 0.0)) / _largest(t)
    if excess <= 1:
        return f"in float64 the result is {found}"
    dtype = t.node.values.dtype
    return f"the result is {excess:.3g} times too large for {dtype}, whose largest finite value is {_largest(t):.5g}"


_CAUSES: list[Callable[[Trials], Diagnosis | None]] = [
    _of_infinities,
    _of_integers,
    _of_op,
    _of_scale,
    _of_lost_gradients,
    _of_outliers,
    _of_precision,
    _of_counts,
    lambda t: t.cured(CURES),
    _of_rule,
    _of_underflow,
    _of_eigenvalues,
    _of_singular,
    _of_growth,
    _of_inputs,
    lambda t: t.cured(BOUNDS),
    _unknown,
]
