"""What was seen at a non-finite op: which element of which value is 0, outside of the domain or too large, and why."""

import linecache
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp import _jaxpr as jx
from jmp_amp._ops import ResultKind, rule_of
from jmp_amp.debug._evaluation import FLOAT64, Interpretation, evaluate_in, precise
from jmp_amp.debug._nodes import Node, merge_equal, nearest

CONSTANT = "a-constant-that-float16-cannot-hold"

_AXES = {"axes", "axis", "dimension", "dimension_numbers", "fft_lengths", "window_dimensions"}  # an op along them
_DEPTH, _MOST_BYTES = 24, 2**30  # of the values that are looked at
_LOGARITHMS, _QUOTIENTS = {"log", "log2", "log1p"}, {"div", "rsqrt", "pow", "integer_pow", "rem"}
_WITH_POLES = {*_LOGARITHMS, "atanh", "erf_inv", "lgamma", "digamma"}
_NUMBER = r"(-?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?)"


class Cause(NamedTuple):
    """What was seen.

    Attributes:
        section: the section of the guide.
        text: a sentence.
        place: the place of the op that rounds a value to 0, if one does.
    """

    section: str
    text: str
    place: Any = None


class Element(NamedTuple):
    """An element of a value: the value, and the index."""

    node: Node
    at: tuple[int, ...]

    @property
    def number(self) -> Any:
        """The number that is there; None if it is not known."""
        held = self.node.value
        is_array = isinstance(getattr(held, "dtype", None), np.dtype) and np.ndim(held) == len(self.at)
        return np.asarray(held)[self.at].item() if is_array else None


def with_values(evaluation: Interpretation, node: Node) -> tuple[Interpretation, Node]:
    """Returns an evaluation that holds what an op was computed from, if there is time, and the op's result."""
    near = [x for x in nearest([merge_equal(evaluation.nodes)[node]], depth=_DEPTH) if x.id]
    sizes = np.cumsum([math.prod(x.summary.shape) * 8 for x in near])
    ids = {x.id for x, size in zip(near, sizes, strict=True) if size < _MOST_BYTES}
    again = evaluation.again(holds=ids)
    held = next((x for x in again.nodes if x.id == node.id and not x.is_finite), None)
    return (again, held) if held else (evaluation, node)


def diagnose_op(node: Node, is_primal: bool) -> Cause:
    """Returns what is seen at the first non-finite result of an op.

    Args:
        node: the result, in an evaluation that holds the values near it.
        is_primal: whether the op is not of a derivative.
    """
    if jx.inner_jaxprs(node.eqn):
        text = f"`{node.primitive}` counts as one op, and what is inside of it was not evaluated"
        return Cause("a-kernel-or-a-loop-as-one-op", text)
    if node.primitive in ("gather", "dynamic_slice") and node.summary.nans and node.operands[1].value is not None:
        indices = np.asarray(node.operands[1].value)
        text = f"indices are from {indices.min()} to {indices.max()}, the array is {[*node.operands[0].summary.shape]}"
        return Cause("an-index-out-of-range", f"an index is out of range: {text}")
    array = np.asarray(node.value, np.complex128) if node.value is not None else np.zeros(0)
    is_of_infinities = any(x.summary.infs for x in node.operands)
    bad = np.argwhere(np.isnan(array) if is_of_infinities else ~np.isfinite(array))
    if not len(bad):  # too many values to hold, or others than before, as of a callback or a loop that is late
        return Cause("how-to-read-the-report", f"the elements are not known; in all, the result is {node.summary}")
    element, derivative = Element(node, tuple(bad[0].tolist())), "" if is_primal else "in the derivative, "
    return _diagnose(element, derivative)


def _diagnose(e: Element, derivative: str) -> Cause:
    node, name, operands = e.node, e.node.primitive, _operands(e)
    if rule_of(node.eqn).is_decomposition:
        return Cause("a-matrix-that-is-singular", _of_matrix(e))
    text = f"{derivative}`{name}`{_of(operands)}{_at(e.at)} is "
    zeros = [x for x in operands if x.number == 0 and name in _QUOTIENTS]
    if infinite := [x for x in operands if not np.isfinite(x.number)]:
        text, section = f"{text}{e.number:.4g}", "an-infinity-meets-another"
        origin = _origin(infinite[0], node, lambda x, _: not np.isfinite(x))
    elif zeros or (operands and (np.isnan(e.number) or name in _WITH_POLES)):
        guilty, text = [*operands[:1], *zeros][-1], f"{text}{e.number:.4g}"
        section = "the-logarithm-of-0" if name in _LOGARITHMS else "a-division-by-0"
        section = "outside-of-the-domain" if guilty.number else section
        section = "a-derivative-that-is-not-finite" if derivative else section
        origin = _origin(guilty, node, lambda x, y: x == y)
    else:
        is_cast, large = name == "convert_element_type", max(operands, key=lambda x: abs(x.number), default=None)
        exact = None if is_cast else _exact(e)
        text += f"{e.number if exact is None else exact:.4g}, beyond {_range(node)}"
        if is_cast and large and large.node.is_constant:
            return Cause(CONSTANT, text)
        section = f"an-overflow-in-float{16 if np.dtype(node.summary.dtype).itemsize < 4 else 32}"
        origin = _origin(large, node, lambda x, y: abs(x) >= 0.1 * abs(y)) if large else Cause("", "")
    return Cause(origin.section or section, "; ".join(filter(None, [text, origin.text])), origin.place)


def _origin(e: Element, reader: Node, is_same: Callable[[Any, Any], bool]) -> Cause:
    """Follows a number to where it comes from; the section is empty unless that tells it."""
    same, operands = [e], list[Element]()
    while True:
        written = (_written(reader, x) for x in same if x.node.is_constant)
        if text := next(filter(None, written), ""):
            return Cause(CONSTANT, text)
        same = [x for x in same if not x.node.is_constant]
        if not same:
            break
        e = max(same, key=lambda x: abs(x.number)) if np.isfinite(e.number) else same[0]
        dtype = getattr(e.node.value, "dtype", np.dtype(bool))
        exact = _exact(e) if jnp.issubdtype(dtype, jnp.integer) else None
        if exact is not None and not jnp.iinfo(dtype).min <= exact <= jnp.iinfo(dtype).max:
            text = f"is {exact:.4g}, {'more' if exact > 0 else 'less'} than {dtype} holds, and wraps around"
            return Cause("an-integer-that-wraps-around", f"`{e.node.primitive}` {_where(e.node)} {text}")
        reader, operands = e.node, _operands(e)
        known = [x for x in operands if x.number is not None and dtype != np.bool_]
        rounded = (x.number if x.node.is_floating else np.asarray(x.number).astype(dtype) for x in known)
        same = [x for x, number in zip(known, rounded, strict=True) if is_same(number, e.number)]
        if e.number == 0 and _needs(e, several := _independent(same)):
            # One alone is not why, unless it was rounded to 0.
            origins = (_origin(x, reader, is_same) for x in several.values())
            if cause := next((x for x in origins if x.section), None):
                return cause
            break
    if e.node.name:
        return Cause("", f"`{e.node.name}{_at(e.at)[4:]}` is {e.number:.4g}")
    value = f"{e.number:.4g}{_at(e.at)}"
    if not e.node.eqn:
        is_known = all(x.is_constant for x in e.node.parents)
        return Cause("", f"{value} is a constant of the program" if is_known else f"where {value} is from is not known")
    text = f"`{e.node.primitive}`{_of(operands)} {_where(e.node)} is"
    exact = _exact(e) if e.node.is_floating and e.number == 0 else None
    if exact and abs(exact) < jnp.finfo(e.node.summary.dtype).smallest_subnormal:
        text = f"{text} {exact:.4g}{_at(e.at)}, which is 0 in {_range(e.node, 'smallest positive')}"
        return Cause("a-value-that-rounds-to-0", text, e.node.place)
    return Cause("", f"{text} {value}")


def _written(reader: Node, constant: Element) -> str:
    """Returns which number of the code at a reader the dtype of a constant makes 0 or infinite; empty if none."""
    dtype = np.dtype(constant.node.summary.dtype or np.float32)
    for name, number in _numbers_in(reader) if dtype.itemsize < 8 else ():
        with np.errstate(all="ignore"):
            rounded = abs(float(np.asarray(number).astype(dtype)))
        if rounded in (0, math.inf) and rounded == abs(constant.number) != abs(number):
            text = f"`{name}` = {number:.4g}" if name else f"{math.copysign(number, constant.number or 1.0):.4g}"
            which = "largest finite" if rounded else "smallest positive"
            return f"{text} is {constant.number:.4g} in {_range(constant.node, which)}"
    return ""


def _numbers_in(node: Node) -> Iterator[tuple[str, float]]:
    """Yields the numbers in the user's expressions that compute a value, and those that the file gives to their names.

    A number has the name that it is given to; an empty one if the expression itself has it.
    """
    eqns = filter(jx.frames_of, reversed(node.place.eqns if node.place else ()))
    spans = (span for eqn in eqns for span in jx.spans_of(eqn))
    for file, first, start, last, end in spans:
        lines = linecache.getlines(file)
        if jx.Frame(file, 0, "").is_of_library or len(lines) < last:
            continue
        written = [line.encode() for line in lines[first - 1 : last]]  # columns are those of bytes
        written[-1] = written[-1][:end]
        code = b"".join([written[0][start:], *written[1:]]).decode(errors="ignore")
        yield from (("", float(x)) for x in re.findall(rf"(?<![\w.]){_NUMBER}", code))
        for name in re.findall(r"\b[^\W\d]\w*", code):
            given = re.findall(rf"\b{name}(?:: *\w+)? *= *{_NUMBER}", "".join(lines))
            yield from ((name, float(x)) for x in given)


def _operands(e: Element) -> list[Element]:
    """Returns the elements that an element was computed from, as far as that is known."""
    node, index = e.node, e.at
    if node.source:
        slices = node.place.iteration[-1:] if np.ndim(node.source.value) > len(index) else ()
        return [Element(node.source, (*slices, *index))]
    if node.eqn is None and node.operands:  # the results of iterations are stacked
        return [Element(node.operands[index[0]], index[1:])]
    if not _is_known(node):
        return []
    rule, shape, arrays = rule_of(node.eqn), np.shape(node.value), [np.shape(x.value) for x in node.operands]
    is_moved = (rule.moves and not rule.fold) or rule.kind is ResultKind.SELECTED or rule.is_decomposition
    is_broadcast = all(len(x) in (0, len(shape)) and {1, *shape}.issuperset(x) for x in arrays)
    if is_moved or _AXES & node.eqn.params.keys() or not is_broadcast:
        return _terms(e)
    indices = [tuple(i if n > 1 else 0 for i, n in zip(index, x, strict=False)) for x in arrays]
    return [Element(x, i) for x, i in zip(node.operands, indices, strict=True)]


def _terms(e: Element) -> list[Element]:
    """Returns the element of each operand that an element depends on most: derivative times value is the largest."""
    large = [np.nan_to_num(x, nan=1e100, posinf=1e100, neginf=-1e100) for x in _wide(e.node)]
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
                terms = np.nan_to_num(np.abs(slope * array)) + 1e-300 * (slope != 0)
            found.append(Element(x, tuple(map(int, np.unravel_index(np.argmax(terms), slope.shape)))))
    return found


def _exact(e: Element, moved: Node | None = None) -> Any:
    """Returns what the op computes in float64 of the same operands, or with 1 added to one; None if not known."""
    if not _is_known(e.node):
        return None
    operands = [x + (y is moved) for x, y in zip(_wide(e.node), e.node.operands, strict=True)]
    out = _run_wide(e.node, operands)
    return None if out is None else np.asarray(out)[e.at].item()


def _independent(elements: Sequence[Element]) -> dict[Node, Element]:
    """Returns the elements by their value; without those of values that were computed from another's."""
    nodes = {x.node for x in elements}
    return {x.node: x for x in elements if len(nodes) == 1 or nodes.isdisjoint([*nearest([x.node])][1:])}


def _needs(e: Element, nodes: Collection[Node]) -> bool:
    """Whether a number changes with each of several values that its op reads, none of which is a constant."""
    are_several = len(nodes) > 1 and not any(x.is_constant for x in nodes)
    return are_several and all(_exact(e, moved=x) not in (None, e.number) for x in nodes)


def _wide(node: Node) -> list[np.ndarray]:
    """Returns the operands of an op, with floats in float64, and the integers that an integer is made of, too."""
    arrays, dtype = [np.asarray(x.value) for x in node.operands], node.value.dtype
    made_of = arrays[:1] if rule_of(node.eqn).moves else arrays  # but no index
    ints = [x for x in made_of if x.dtype == dtype and dtype.kind in "iu"]
    is_wide = [jnp.issubdtype(x.dtype, jnp.floating) or any(x is y for y in ints) for x in arrays]
    return [x.astype(np.float64) if wide else x for x, wide in zip(arrays, is_wide, strict=True)]


def _run_wide(node: Node, operands: Sequence[Any]) -> Any:
    """Returns the result of an op in float64, which is in place of the dtype of an integer, too."""
    if node.primitive == "shift_left":
        return operands[0] * 2.0 ** operands[1]
    with precise(FLOAT64):
        arrays = [*map(jnp.asarray, operands)]
        outs = evaluate_in(FLOAT64, node.eqn, arrays, None if node.is_floating else node.value.dtype)
    return outs and outs[node.index[0]]


def _is_known(node: Node) -> bool:
    """Whether an op computed a value, and its array and those of the operands are held; keys are no arrays."""
    held = [x.value for x in (*node.operands, node)]
    return node.eqn is not None and all(isinstance(getattr(x, "dtype", None), np.dtype) for x in held)


def _of_matrix(e: Element) -> str:
    matrix = np.asarray(e.node.operands[0].value, np.float64)
    matrix, is_triangular = matrix[e.at[: max(matrix.ndim - 2, 0)]], e.node.primitive == "triangular_solve"
    if not np.isfinite(matrix).all() or matrix.ndim < 2 or matrix.shape[0] != matrix.shape[1]:
        return f"the matrix that `{e.node.primitive}` reads is not finite, or not square"
    values = np.abs(np.diagonal(matrix)) if is_triangular else np.linalg.eigvals(matrix).real
    name = "diagonal of the triangular matrix is" if is_triangular else "eigenvalues of the matrix are"
    return f"the {name} from {values.min():.4g} to {values.max():.4g}"


def _where(node: Node) -> str:
    times = f", iteration {', '.join(map(str, node.place.iteration))}" if node.place.iteration else ""
    return f"{node.place.site.where}{times}"


def _at(index: tuple[int, ...]) -> str:
    return f" at [{', '.join(map(str, index))}]" if index else ""


def _of(operands: Sequence[Element]) -> str:
    return f" of {' and '.join(f'{x.number:.4g}' for x in operands)}" if operands else ""


def _range(node: Node, which: str = "largest finite") -> str:
    info = jnp.finfo(node.summary.dtype)
    value = f"{float(info.max):.5g}" if which == "largest finite" else f"{float(info.smallest_subnormal):.0e}"
    return f"{node.summary.dtype}, whose {which} value is {value.replace('e-0', 'e-')}"
