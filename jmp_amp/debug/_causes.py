"""What was seen at a non-finite op: which element of which value is 0, outside of the domain or too large, and why."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast import rule_of
from jmp_amp.debug._evaluation import FLOAT64, Evaluation, evaluate_in, precise
from jmp_amp.debug._expressions import numbers_in
from jmp_amp.debug._nodes import Node, merge_equal, nearest
from jmp_amp.debug._report import location_of

_AXES = {"axes", "axis", "dimension", "dimension_numbers", "fft_lengths", "window_dimensions"}  # an op along them
_DEPTH, _MOST_BYTES = 24, 2**30  # of the values that are looked at
_LOGARITHMS, _SQUARE_ROOTS = {"log", "log2", "log1p"}, {"sqrt", "rsqrt"}
_QUOTIENTS = {"div", "rsqrt", "pow", "integer_pow", "rem"}
_MATRICES = {"cholesky", "lu", "triangular_solve", "eigh", "eig", "svd", "geqrf", "householder_product", "schur"}

# The sections of the guide.
GUIDE = "docs/my-loss-is-nan.md#"
SECTIONS = {
    "quotient": "a-division-by-0",
    "logarithm": "the-logarithm-of-0",
    "domain": "outside-of-the-domain",
    "derivative": "a-derivative-that-is-not-finite",
    "low range": "an-overflow-in-float16",
    "range": "an-overflow-in-float32",
    "infinity": "an-infinity-meets-another",
    "constant": "a-constant-that-float16-cannot-hold",
    "underflow": "a-value-that-rounds-to-0",
    "integer": "an-integer-that-wraps-around",
    "matrix": "a-matrix-that-is-singular",
    "index": "an-index-out-of-range",
    "kernel": "a-kernel-or-a-loop-as-one-op",
    "argument": "an-argument-that-is-not-finite",
    "loss scale": "too-large-a-loss-scale",
    "hidden": "an-overflow-that-a-later-op-hides",
    "unknown": "how-to-read-the-report",
}


class Cause(NamedTuple):
    """What was seen.

    Attributes:
        kind: a key of `SECTIONS`.
        text: a sentence.
        place: the place of the op that rounds a value to 0, if one does.
    """

    kind: str
    text: str
    place: Any = None


class Element(NamedTuple):
    """An element of a value: the value, the index, and the number that is there; None if it is not known."""

    node: Node
    at: tuple[int, ...]
    number: Any


def cause_of(evaluation: Evaluation, node: Node, is_primal: bool) -> Cause:
    """Returns what is seen at the first non-finite result of an op: the program is evaluated again up to it.

    Args:
        evaluation: of the program.
        node: the result.
        is_primal: whether the op is not of a derivative.
    """
    near = {x: None for x in nearest([node], depth=_DEPTH) if x.id}
    sizes = np.cumsum([math.prod(x.values.shape) * 8 for x in near])
    ids = {x.id for x, size in zip(near, sizes, strict=True) if size < _MOST_BYTES}
    changes = {"holds": ids, "until": node.place.id, "trip_counts": evaluation.trip_counts}
    again = dataclasses.replace(evaluation.evaluator, **changes).run()
    merge_equal(again.nodes)
    node = next((x for x in reversed(again.nodes) if x.id == node.id), node)
    name = node.primitive
    if jx.holds_jaxprs(node.eqn):
        return Cause("kernel", f"`{name}` counts as one op, and what is inside of it was not evaluated")
    if name in ("gather", "dynamic_slice") and node.values.nans and node.operands[1].held is not None:
        indices = np.asarray(node.operands[1].held)
        shape = list(node.operands[0].values.shape)
        text = f"an index is out of range: indices are from {indices.min()} to {indices.max()}, the array is {shape}"
        return Cause("index", text)
    array = np.asarray(node.held, np.complex128) if node.held is not None else np.zeros(0)
    is_of_infinities = any(x.values.infs for x in node.operands)
    bad = np.argwhere(np.isnan(array) if is_of_infinities else ~np.isfinite(array))
    if not len(bad):  # too many values to hold, or others than before, as of a callback or a loop that is late
        return Cause("unknown", f"the elements are not known; in all, the result is {node.values}")
    return _cause(_element(node, tuple(bad[0].tolist())), evaluation, "" if is_primal else "in the derivative, ")


def _cause(e: Element, evaluation: Evaluation, derivative: str) -> Cause:
    node, name, reads = e.node, e.node.primitive, [x for x in _reads(e) if x.number is not None]
    if name in _MATRICES:
        return Cause("matrix", _of_matrix(e))
    call = f"`{name}`" + (f" of {_listed(x.number for x in reads)}" if reads else "") + _at(e.at)
    infinite = [x for x in reads if not np.isfinite(x.number)]
    if infinite:
        origin = _origin(infinite[0], node, lambda x, _: not np.isfinite(x), evaluation)
        return Cause(origin.kind or "infinity", f"{derivative}{call} is {_number(e.number)}; {origin.text}")
    if (guilty := _guilty(e, reads)) is not None:
        origin = _origin(guilty, node, lambda x, y: x == y, evaluation)
        own = "domain" if guilty.number != 0 else "logarithm" if name in _LOGARITHMS else "quotient"
        kind = origin.kind or ("derivative" if derivative else own)
        return Cause(kind, f"{derivative}{call} is {_number(e.number)}; {origin.text}", origin.place)
    exact = e.number if name == "convert_element_type" else _exact(e)
    is_low = np.dtype(node.values.dtype).itemsize < 4
    text = f"{derivative}{call} is {_number(e.number if exact is None else exact)}, beyond {_largest(node)}"
    large = max(reads, key=lambda x: abs(x.number), default=None)
    if name == "convert_element_type" and large and large.node.is_constant:
        return Cause("constant", text)
    if large:
        text += f"; {_origin(large, node, lambda x, y: abs(x) >= 0.1 * abs(y), evaluation).text}"
    return Cause("low range" if is_low else "range", text)


def _guilty(e: Element, reads: list[Element]) -> Element | None:
    """Returns the operand at which the function of the op has a pole, or is not defined; None if it overflows."""
    name, zeros = e.node.primitive, [x for x in reads if x.number == 0]
    if name in _QUOTIENTS and zeros:
        return zeros[-1]
    is_defined = not np.isnan(e.number) and name not in (*_LOGARITHMS, "atanh", "erf_inv", "lgamma", "digamma")
    return None if is_defined or not reads else reads[0]


def _origin(e: Element, reader: Node, is_same: Callable[[Any, Any], bool], evaluation: Evaluation) -> Cause:
    """Follows a number to where it comes from; the kind is empty unless that tells it."""
    if e.node.is_constant and (written := _written(reader, e)):
        return Cause("constant", written)
    while True:
        reads = _reads(e)
        same = [x for x in reads if x.number is not None and is_same(x.number, e.number)]
        for x in same:
            if x.node.is_constant and (written := _written(e.node, x)):
                return Cause("constant", written)
        if wrapped := _wrapped_around(e):
            return Cause("integer", wrapped)
        followed = [x for x in same if not x.node.is_constant]
        is_flag = getattr(e.node.held, "dtype", None) == np.bool_  # of other values
        if is_flag or not followed:
            break
        e = max(followed, key=lambda x: abs(x.number)) if np.isfinite(e.number) else followed[0]
    value = f"{_number(e.number)}{_at(e.at)}"
    if e.node.place and not e.node.place.eqns:
        names: Any = jx.open_jaxpr(evaluation.evaluator.program)[0].debug_info.arg_names
        at = f"[{', '.join(map(str, e.at))}]" if e.at else ""
        return Cause("", f"`{names[e.node.index[1]]}{at}` is {_number(e.number)}")
    if not e.node.eqn:
        return Cause("", f"{value} is a constant of the program")
    made = [x.number for x in reads if x.number is not None]
    of = f" of {_listed(made)}" if made else ""
    text = f"`{e.node.primitive}`{of} {_where(e.node)} is"
    exact = _exact(e)
    if exact is not None and np.isfinite(exact) and e.node.is_floating:
        if e.number == 0 and 0 < abs(exact) < _smallest(e.node):
            text = f"{text} {_number(exact)}{_at(e.at)}, which is 0 in {_least(e.node)}"
            return Cause("underflow", text, e.node.place)
        if not np.isfinite(e.number):
            return Cause("", f"{text} {_number(exact)}{_at(e.at)}, beyond {_largest(e.node)}")
    return Cause("", f"{text} {value}")


def _written(reader: Node, constant: Element) -> str:
    """Returns which number of the code at a reader the dtype of a constant makes 0 or infinite; empty if none."""
    dtype = np.dtype(constant.node.values.dtype or np.float32)
    if (constant.number != 0 and np.isfinite(constant.number)) or dtype.itemsize >= 8:
        return ""
    for name, number in numbers_in(reader):
        with np.errstate(all="ignore"):
            rounded = float(np.asarray(number).astype(dtype))
        if number != 0 and abs(rounded) == abs(constant.number):
            limit = _least(constant.node) if rounded == 0 else _largest(constant.node)
            text = f"`{name}` = {_number(number)}" if name else _number(math.copysign(number, constant.number or 1.0))
            return f"{text} is {_number(constant.number)} in {limit}"
    return ""


def _wrapped_around(e: Element) -> str:
    """Returns what an integer is that wraps around."""
    dtype = getattr(e.node.held, "dtype", None)
    if e.node.is_floating or not isinstance(dtype, np.dtype) or dtype.kind not in "iu" or not e.node.eqn:
        return ""
    exact = _exact(e)
    if exact is None or np.iinfo(dtype).min <= exact <= np.iinfo(dtype).max:
        return ""
    return f"`{e.node.primitive}` {_where(e.node)} is {_number(exact)}, more than {dtype} holds, and wraps around"


def _reads(e: Element) -> list[Element]:
    """Returns the elements that an element was computed from, as far as that is known."""
    node, index = e.node, e.at
    if node.source:
        slices = node.place.iteration[-1:] if np.ndim(node.source.held) > len(index) else ()
        return [_element(node.source, (*slices, *index))]
    if node.eqn is None:  # the results of iterations are stacked
        is_stacked = node.operands and index and np.ndim(node.operands[0].held) == len(index) - 1
        return [_element(node.operands[index[0]], index[1:])] if is_stacked else []
    arrays = _arrays(node)
    if arrays is None:
        return []
    rule, shape = rule_of(node.eqn), np.shape(node.held)
    is_moved = (rule.moves and not rule.fold) or rule.takes or node.primitive in ("select_n", *_MATRICES)
    is_broadcast = all(x.ndim in (0, len(shape)) and {1, *shape}.issuperset(x.shape) for x in arrays)
    if is_moved or _AXES & node.eqn.params.keys() or not is_broadcast:
        return _terms(e, arrays)
    indices = [tuple(i if n > 1 else 0 for i, n in zip(index, x.shape, strict=False)) for x in arrays]
    return [_element(x, i) for x, i in zip(node.operands, indices, strict=True)]


def _terms(e: Element, arrays: list[np.ndarray]) -> list[Element]:
    """Returns the element of each operand that an element depends on most: derivative times value is the largest."""
    wide = _wide(e.node, arrays)
    large = [np.nan_to_num(x, nan=1e100, posinf=1e100, neginf=-1e100) if y else x for x, y in wide]
    try:
        with precise(FLOAT64):
            out, pullback = jax.vjp(lambda *xs: _run_wide(e.node, xs), *map(jnp.asarray, large))
            slopes = pullback(jnp.zeros_like(out).at[e.at].set(1))
    except Exception:  # an op that has no derivative, or no float64
        return []
    found = []
    for x, array, slope in zip(e.node.operands, large, map(np.asarray, slopes), strict=True):
        if slope.dtype.kind in "fc" and slope.any():
            with np.errstate(all="ignore"):
                terms = np.nan_to_num(np.abs(slope * array))
            largest = np.argmax(terms if terms.any() else slope != 0)
            found.append(_element(x, tuple(map(int, np.unravel_index(largest, slope.shape)))))
    return found


def _exact(e: Element) -> Any:
    """Returns what the op computes of the same operands in float64; None if that is not known."""
    arrays = _arrays(e.node) if e.node.eqn else None
    if arrays is None:
        return None
    with precise(FLOAT64):
        out = _run_wide(e.node, [jnp.asarray(x) for x, _ in _wide(e.node, arrays)])
    return None if out is None else np.asarray(out)[e.at].item()


def _wide(node: Node, arrays: list[np.ndarray]) -> list[tuple[np.ndarray, bool]]:
    """Returns the operands of an op in float64, and which are: floats, and the integers that an integer is made of."""
    moves, dtype = rule_of(node.eqn).moves, node.held.dtype
    found = []
    for i, x in enumerate(arrays):
        is_wide = jnp.issubdtype(x.dtype, jnp.inexact) or (x.dtype == dtype and not (moves and i))  # but no index
        found.append((x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) if is_wide else x, is_wide))
    return found


def _run_wide(node: Node, operands: Sequence[Any]) -> Any:
    """Returns the result of an op in float64, which is in place of the dtype of an integer, too."""
    outs = evaluate_in(FLOAT64, node.place, operands, None if node.is_floating else node.held.dtype)
    return outs and outs[node.index[0]]


def _array(node: Node) -> np.ndarray | None:
    is_array = isinstance(getattr(node.held, "dtype", None), np.dtype)
    return np.asarray(node.held) if is_array else None


def _arrays(node: Node) -> list[np.ndarray] | None:
    """Returns the operands of an op; None if one, or the result, is not known."""
    found = [_array(x) for x in (*node.operands, node)]
    return None if any(x is None for x in found) else [x for x in found[:-1] if x is not None]


def _element(node: Node, index: tuple[int, ...]) -> Element:
    array = _array(node)
    if array is None or array.ndim != len(index):
        return Element(node, index, None)
    number = array[index].item()
    return Element(node, index, number if isinstance(number, complex) else float(number))


def _of_matrix(e: Element) -> str:
    matrix = np.asarray(_array(e.node.operands[0]), np.float64)
    batch = e.at[: matrix.ndim - 2]
    if not np.isfinite(matrix[batch]).all():
        return f"the matrix that `{e.node.primitive}` reads is not finite"
    if e.node.primitive == "triangular_solve":
        diagonal = np.abs(np.diagonal(matrix[batch]))
        return f"the diagonal of the triangular matrix is from {_number(diagonal.min())} to {_number(diagonal.max())}"
    is_symmetric = e.node.primitive in ("cholesky", "eigh")
    values = np.linalg.eigvalsh(matrix[batch]) if is_symmetric else np.linalg.svd(matrix[batch], compute_uv=False)
    name = "eigenvalues" if is_symmetric else "singular values"
    return f"the {name} of the matrix{_at(batch)} are from {_number(values.min())} to {_number(values.max())}"


def _where(node: Node) -> str:
    times = f", iteration {', '.join(map(str, node.place.iteration))}" if node.place.iteration else ""
    return f"{location_of(node.place.eqns).where}{times}"


def _at(index: tuple[int, ...]) -> str:
    return f" at [{', '.join(map(str, index))}]" if index else ""


def _number(x: Any) -> str:
    return f"{x:.4g}"


def _listed(numbers: Iterable[Any]) -> str:
    return " and ".join(map(_number, numbers))


def _smallest(node: Node) -> float:
    return float(jnp.finfo(node.values.dtype).smallest_subnormal)


def _least(node: Node) -> str:
    return f"{node.values.dtype}, whose smallest positive value is {_smallest(node):.0e}".replace("e-0", "e-")


def _largest(node: Node) -> str:
    return f"{node.values.dtype}, whose largest finite value is {float(jnp.finfo(node.values.dtype).max):.5g}"
