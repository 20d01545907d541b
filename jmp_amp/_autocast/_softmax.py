"""Reads values of a program as softmaxes of terms, however they are written.

The program is a graph of values, each of which has a `Form`: a sum of terms, or the exponential of one. A sum of
exponentials is the exponential of a `_LogSum`, a term that is constant along the axes that it sums, as is the largest
score that a softmax subtracts. So the form of every softmax is the exponential of `scores - logsum(scores)`.

Masks are such terms as well. Of one that depends on no input it is known which indices it keeps, without computing it.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._plan import Region
from jmp_amp._autocast._primitives import rule_of, varying

Axes = tuple[Any, ...]  # for each axis of an array, its place in another; None for an axis of one element
Line = tuple[Any, tuple[Any, ...]]  # the sum of a number and, for each axis, the index times a factor

_LARGEST = 2**26  # elements of a constant in which a mask is looked for
_MASKED = -1e4  # the exponential of a score that is this much smaller is 0
_LEAST_FACTOR = 2.0**-7  # that a mask may be multiplied by
_LAYOUTS = {"broadcast_in_dim", "reshape", "squeeze", "transpose"}
_COPIES = {"convert_element_type", "copy", "name", "sharding_constraint", "device_put", "pvary", "reshard"}
_FLAGS: dict[str, Callable[..., Any]] = {"not": operator.not_, "and": np.logical_and, "or": np.logical_or}
_FLAGS |= {name: getattr(operator, name) for name in ("eq", "ne", "ge", "gt", "le", "lt")}
_PASSED = {"exp", "log", "abs", "neg", "add", "add_any", "sub", "mul", "div", "integer_pow", "reduce_sum", "select_n"}
_PASSED |= {"max", "sqrt", "rsqrt", "pow", *_LAYOUTS, *_COPIES, *_FLAGS}
_DEEPEST = 60  # ops of these in a row
_INVERSE = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


class Fact(NamedTuple):
    """What is known of a value that depends on no input: how it depends on the indices of an element.

    Attributes:
        line: the line that it is; None if it is none.
        choice: lines, and the numbers that it is where one of them is negative, and where none is.
    """

    line: Line | None = None
    choice: tuple[tuple[Line, ...], Any, Any] | None = None


class Node:
    """A value of the program.

    Attributes:
        aval: its type.
        op: the equation that computes it; None for an input or a constant.
        value: the value of a constant.
        name: the name of the primitive that computes it; empty if it is not read, or there is none.
        has_exp: whether it is computed from an exponential, by ops that a form may go through.
    """

    __slots__ = ("_fact", "aval", "depth", "has_exp", "memo", "name", "op", "value")

    def __init__(self, aval: Any, op: "Op | None" = None, value: Any = None, fact: "Fact | None" = None) -> None:
        self.aval, self.op, self.value, self._fact = aval, op, value, fact
        self.memo: dict[Any, Any] = {}
        self.name, self.depth, self.has_exp = "", 0, False
        if op is not None:
            name = op.eqn.primitive.name
            passes = name in _PASSED
            self.depth = 1 + max([x.depth for x in op.operands], default=0) if passes else 0
            # Of a long chain of ops, a part is read: Python's recursion ends.
            self.name, self.depth = (name, self.depth) if self.depth < _DEEPEST else ("", 0)
            self.has_exp = name == "exp" or (passes and any(x.has_exp for x in op.operands))

    @property
    def eqn(self) -> Any:
        """The equation that computes it; None for inputs and constants."""
        return self.op and self.op.eqn

    @property
    def operands(self) -> Sequence["Node"]:
        """The values that it is computed from."""
        return self.op.operands if self.op else ()

    @property
    def shape(self) -> tuple[Any, ...]:
        """Its shape; of a token, none."""
        return getattr(self.aval, "shape", ())

    @property
    def axes(self) -> Axes:
        """Its own axes."""
        return tuple([i if n != 1 else None for i, n in enumerate(self.shape)])

    @property
    def known(self) -> Fact:
        """What is known of an input or a constant."""
        if self._fact is None:
            self._fact = Fact() if self.value is None else _fact_of_constant(self.value, self.aval)
        return self._fact


class Op:
    """An equation.

    Attributes:
        eqn: the equation.
        region: the region that it is in.
        operands: the values that it reads.
        calls: the calls around it that are read in place, the outermost first.
        outs: the values that it computes.
        inside: the equations of such a call.
        parts: its jaxprs, if it is not read in place.
    """

    def __init__(self, eqn: Any, region: Region, operands: Sequence[Node], calls: "tuple[Op, ...]") -> None:
        self.eqn, self.region, self.operands, self.calls = eqn, region, operands, calls
        self.outs: Sequence[Node] = ()
        self.inside: list[Op] = []
        self.parts: list[Any] = []


def _memoized(read: Callable[[Node], Any]) -> Callable[[Node], Any]:
    def once(node: Node) -> Any:
        if read not in node.memo:
            node.memo[read] = read(node)
        return node.memo[read]

    return once


def placed(axes: Axes, places: Any) -> Axes:
    """Returns the places of axes after these have been moved."""
    return tuple([None if axis is None else places[axis] for axis in axes])


def _moved(node: Node) -> tuple[Node, Axes] | None:
    """Returns the value whose elements an op moves, and the places of its axes; None for an op that does more."""
    if node.name not in _LAYOUTS | _COPIES or len(node.operands) != 1:
        return None
    (before,) = node.operands
    if node.name in _COPIES:
        return before, before.axes
    eqn, places = node.eqn, dict[int, int]()
    for axis in varying(before.shape):
        found = rule_of(eqn).move_axes(eqn.params, before.shape, node.shape, frozenset({axis})) or ()
        if len(found) != 1 or node.shape[min(found)] != before.shape[axis]:
            return None
        places[axis] = min(found)
    return (before, placed(before.axes, places)) if len({*places.values()}) == len(places) else None


def _fact_of_constant(value: Any, aval: Any) -> Fact:
    """Returns what is known of a constant: whether it is one number, a range of them, or a band of a matrix."""
    is_read = not isinstance(value, jax.core.Tracer) and hasattr(aval, "shape") and math.prod(aval.shape) <= _LARGEST
    if not is_read or jnp.issubdtype(aval.dtype, jax.dtypes.extended) or jnp.iscomplexobj(value) or not np.size(value):
        return Fact()
    x, flat = np.asarray(value), tuple(range(np.ndim(value)))
    low, high = x.min().item(), x.max().item()
    if low == high:
        return Fact((low, (0,) * x.ndim))
    axes, kept = sorted(varying(x.shape)), x == high
    if len(axes) == 1 and x.dtype != np.bool_:  # such as `jnp.arange(n)`
        first, step = x.flat[0].item(), x.flat[1].item() - x.flat[0].item()
        is_line = np.array_equal(x.ravel(), first + step * np.arange(x.size))
        return Fact((first, tuple([step if i == axes[0] else 0 for i in flat])) if is_line else None)
    if len(axes) != 2 or not (kept | (x == low)).all():
        return Fact()
    for on, off in ((high, low), (low, high)):
        matrix = (x == on).reshape([x.shape[axis] for axis in axes])
        rows, columns = np.nonzero(matrix)
        offset = np.arange(matrix.shape[1]) - np.arange(matrix.shape[0])[:, None]
        most, least = (columns - rows).max().item(), (columns - rows).min().item()
        if np.array_equal(matrix, (offset <= most) & (offset >= least)):
            slope = tuple([{axes[0]: 1, axes[1]: -1}.get(i, 0) for i in flat])
            return Fact(choice=(((most, slope), (-least, tuple([-n for n in slope]))), off, on))
    return Fact()


@_memoized
def _line(node: Node) -> Line | None:
    """Returns a value as a line of the indices of its elements; None if it is none."""
    none = (0,) * len(node.shape)
    if node.op is None:
        return node.known.line
    if node.name not in _PASSED and node.name != "iota":
        return None
    if node.name == "iota":
        return 0, tuple([int(i == node.eqn.params["dimension"]) for i in range(len(node.shape))])
    if (moved := _moved(node)) is not None:
        known = _line(moved[0])
        if known is None or (not jx.is_floating(node) and any(x % 1 for x in (known[0], *known[1]))):
            return None
        factors = dict(zip(moved[1], known[1], strict=True))
        return known[0], tuple([factors.get(i, 0) for i in range(len(node.shape))])
    lines = list(map(_line, node.operands))
    if not lines or None in lines:
        return None
    numbers, slopes = zip(*[(number, factors or none) for number, factors in lines], strict=True)
    if not any(map(any, slopes)):
        value = _computed(node, numbers)
        return None if value is None else (value, none)
    if node.name in ("add", "sub"):
        sign = 1 if node.name == "add" else -1
        return numbers[0] + sign * numbers[1], tuple([x + sign * y for x, y in zip(*slopes, strict=True)])
    by = (
        -1
        if node.name == "neg"
        else next((n for n, slope in zip(numbers, slopes, strict=True) if not any(slope)), None)
    )
    if node.name in ("mul", "neg") and by is not None:
        number, factors = next(line for line in lines if any(line[1]))
        return by * number, tuple([by * factor for factor in factors])
    return None


def _computed(node: Node, numbers: Sequence[Any]) -> Any:
    """Returns what an op computes from numbers; None if that is not known."""
    fold = rule_of(node.eqn).fold
    with np.errstate(all="ignore"):
        if node.name in _FLAGS:
            return bool(_FLAGS[node.name](*numbers))
        return None if fold is None else fold(*numbers)


def _number(node: Node) -> Any:
    """Returns the number that all elements of a value are; None if there is none, or it is not known."""
    line = _line(node)
    return line[0] if line is not None and not any(line[1]) else None


class _Choice(NamedTuple):
    """A value of two numbers: `on` where `node == keep`, and `off` where it is `other`."""

    node: Node
    axes: Axes
    keep: Any
    other: Any
    on: Any
    off: Any


@_memoized
def _choice(node: Node) -> _Choice | None:
    """Returns a value as a choice of two numbers; a flag of which no more is known is one of itself."""
    itself = _Choice(node, node.axes, True, False, True, False) if jx.dtype_of(node) == np.bool_ else None
    if node.op is None:
        ends = node.known.choice
        return itself if ends is None else _Choice(node, node.axes, ends[2], ends[1], ends[2], ends[1])
    if node.name not in _PASSED:
        return itself
    if (moved := _moved(node)) is not None:
        before = _choice(moved[0])
        return itself if before is None else before._replace(axes=placed(before.axes, moved[1]))
    numbers = list(map(_number, node.operands))
    if node.name == "select_n" and len(numbers) == 3 and None not in numbers[1:]:
        flag = _choice(node.operands[0])
        return flag and flag._replace(on=numbers[1 + bool(flag.on)], off=numbers[1 + bool(flag.off)])
    unknown = [_choice(x) for x, number in zip(node.operands, numbers, strict=True) if number is None]
    if len(unknown) != 1 or unknown[0] is None:
        return itself
    on, off = ([end if x is None else x for x in numbers] for end in (unknown[0].on, unknown[0].off))
    on, off = _computed(node, on), _computed(node, off)
    return itself if on is None or off is None else unknown[0]._replace(on=on, off=off)


class Length(NamedTuple):
    """How many keys are kept: a value, and a number to add to it; `along` is the axis of the keys."""

    node: Node
    axes: Axes
    plus: int
    along: int


class Condition(NamedTuple):
    """A value that says where scores are kept.

    Attributes:
        node: the value.
        axes: the places of its axes.
        keep: what it is where scores are kept.
        lines: none of them is negative where scores are kept; None if that is not known.
        length: how many keys are kept, if it says that.
    """

    node: Node
    axes: Axes
    keep: Any
    lines: tuple[Line, ...] | None
    length: Length | None


def conditions(node: Node, axes: Axes, keep: Any) -> Iterator[Condition]:
    """Yields the conditions that all hold where a value is `keep`."""
    choice = _choice(node)
    if choice is not None and choice.node is not node and choice.on != choice.off:
        keeps = choice.keep if choice.on == keep else choice.other
        yield from conditions(choice.node, placed(choice.axes, axes), keeps)
        return
    parts: list[tuple[Node, Any]] = []
    if node.name in ("and", "or") and bool(keep) == (node.name == "and"):
        parts = [(x, keep) for x in node.operands]
    elif node.name == "select_n" and keep and False in (cases := list(map(_number, node.operands[1:]))):
        # `flag & x`, as `jnp.tril` writes it
        parts = [(node.operands[0], cases.index(False) == 0), (node.operands[2 - cases.index(False)], True)]
    if not parts:
        yield Condition(node, axes, keep, _lines(node, keep), _length(node, axes, keep))
    for x, kept in parts:
        if (number := _number(x)) is None or number != kept:
            yield from conditions(x, placed(x.axes, axes), kept)


def _lines(flag: Node, keep: Any) -> tuple[Line, ...] | None:
    """Returns lines, none of which is negative where a value is `keep`; None if that is not known."""
    if flag.op is None:
        choice = flag.known.choice
        return choice[0] if choice is not None and keep == choice[2] else None
    name = flag.name if keep else _INVERSE.get(flag.name, "")
    if name not in _INVERSE or name == "ne":
        return None
    a, b = flag.operands
    pairs = {"le": [(b, a, 1)], "lt": [(b, a, 1)], "eq": [(a, b, 1), (b, a, 1)]}.get(name, [(a, b, 1)])
    if a.name == "abs" and name in ("le", "lt"):  # `abs(i - j) <= n`
        pairs = [(b, a.operands[0], sign) for sign in (1, -1)]
    found = []
    for x, y, sign in pairs:
        (p, left), (q, right) = _line(x) or (0.5, ()), _line(y) or (0.5, ())
        slopes = [[*factors, *[0] * (len(flag.shape) - len(factors))] for factors in (left, right)]
        line = p - sign * q - (name in ("gt", "lt")), tuple([f - sign * g for f, g in zip(*slopes, strict=True)])
        if any(n % 1 for n in (p, q, *line[1])):
            return None
        found.append(line)
    return tuple(found)


def _length(flag: Node, axes: Axes, keep: Any) -> Length | None:
    """Returns the number of keys that are kept, if a flag compares their indices with one: `jnp.arange(n) < length`."""
    name = flag.name if keep else _INVERSE.get(flag.name, "")
    if name not in ("lt", "le", "gt", "ge"):
        return None
    index, length = flag.operands if name in ("lt", "le") else flag.operands[::-1]
    line, own = _line(index), length.axes
    if line is None or line[0] % 1 or sorted(line[1]) != [0] * (len(line[1]) - 1) + [1]:
        return None
    while (moved := _moved(length)) is not None and jx.dtype_of(moved[0]) != np.bool_:
        length, own = moved[0], placed(moved[1], own)
    return Length(length, placed(own, axes), int(name in ("le", "ge")) - int(line[0]), axes[line[1].index(1)])


def fact_of(node: Node) -> Fact:
    """Returns what is known of a value inside the body that it is passed to."""
    choice, line = _choice(node), _line(node)
    kept = list(conditions(node, node.axes, choice.on)) if choice is not None and choice.on != choice.off else []
    if not kept or any(each.lines is None for each in kept):
        return Fact(line)
    lines = [
        (number, tuple([dict(zip(each.axes, factors, strict=True)).get(i, 0) for i in range(len(node.shape))]))
        for each in kept
        for number, factors in each.lines or ()
    ]
    return Fact(line, (tuple(lines), choice.off, choice.on))


class Mask(NamedTuple):
    """A term that is 0 where a value is `keep`, and so small elsewhere that its exponential is 0."""

    node: Node
    keep: Any


class _LogSum(NamedTuple):
    """A term that is the logarithm of the sum along some axes of the exponential of terms."""

    terms: frozenset[tuple[tuple[Any, Axes], float]]
    along: frozenset[int]


class Form(NamedTuple):
    """A value as a sum of terms, or as the exponential of such a sum.

    Attributes:
        terms: by a term and the places of its axes, its factor. A term is a value, a `Mask`, a `_LogSum`, or None: 1.
        is_exp: whether it is the exponential.
    """

    terms: dict[tuple[Any, Axes], float]
    is_exp: bool = False

    def plus(self, other: "Form | None", factor: float = 1) -> "Form | None":
        """Returns the form with a multiple of the terms of another; None if they do not go together."""
        if other is None or self.is_exp != other.is_exp or (factor < 0 and other.is_masked):
            return None
        terms = dict(self.terms)
        for key, each in other.terms.items():
            terms[key] = 1 if isinstance(key[0], Mask) else terms.get(key, 0) + factor * each
        return Form({key: each for key, each in terms.items() if each}, self.is_exp)

    @property
    def is_masked(self) -> bool:
        """Whether a term is a mask."""
        return any(isinstance(term, Mask) for term, _ in self.terms)

    def placed(self, places: Any) -> "Form":
        """Returns the form of the value with its axes moved."""
        return self._replace(terms={(term, placed(axes, places)): n for (term, axes), n in self.terms.items()})


_ONE = Form({}, is_exp=True)


@_memoized
def form_of(node: Node) -> Form:
    """Returns the form of a value; one of which nothing is known is a term of its own."""
    form = _derived(node) if jx.is_floating(node) else None
    # A sum that holds no scores is one term: `(1 - mask) * -1e9` would lose them as `1e9 * mask - 1e9`.
    is_kept = form is not None and (form.is_exp or any(map(_is_scores, form.terms)) or _number(node) is not None)
    return form if form is not None and is_kept else Form({(node, node.axes): 1})


def _is_scores(key: tuple[Any, Axes]) -> bool:
    return isinstance(key[0], Mask | _LogSum) or getattr(key[0], "name", "") == "dot_general"


def _derived(node: Node) -> Form | None:
    if node.op is not None and node.name not in _PASSED:
        return None
    number, choice = _number(node), _choice(node)
    if number is not None:
        return Form({(None, ()): float(number)} if number else {}) if np.isfinite(number) else None
    if (mask := _mask(choice, 0, lambda n: n <= _MASKED)) is not None:
        return mask
    if (moved := _moved(node)) is not None:
        return form_of(moved[0]).placed(moved[1]) if jx.is_floating(moved[0]) else None
    if node.op is None:
        return None
    forms, numbers = list(map(form_of, node.operands)), list(map(_number, node.operands))
    match node.name, forms:
        case "exp", [Form(terms, False)]:
            return Form(terms, True)
        case "log", [Form(terms, True)]:
            return Form(terms)
        case "abs", [Form(_, True)]:
            return forms[0]
        case "neg", [Form(_, False)]:
            return Form({}).plus(forms[0], -1)
        case (("add" | "add_any"), [a, b]) if not a.is_exp:
            return a.plus(b)
        case "sub", [a, b] if not a.is_exp:
            return a.plus(b, -1)
        case "div", [a, b]:
            a = _ONE if numbers[0] == 1 else a
            return a.plus(b, -1) if a.is_exp else _scaled(a, numbers[1], inverse=True)
        case "integer_pow", [a] if a.is_exp and node.eqn.params["y"] == -1:
            return _ONE.plus(a, -1)
        case "mul", [a, b]:
            if a.is_exp and b.is_exp:
                return a.plus(b)
            i = next((i for i in (0, 1) if numbers[i] is not None), None)
            if i is not None:
                return _scaled(forms[1 - i], numbers[i])
            flags = _choice(node.operands[int(a.is_exp)])  # as numbers: `weights * mask`
            return forms[1 - int(a.is_exp)].plus(_mask(flags, 1, lambda n: n == 0, is_exp=True))
        case "reduce_sum", [a] if a.is_exp:
            return _summed(a, node)
        case "select_n", [_, *cases] if len(cases) == 2:
            for i, fill in enumerate(numbers[1:]):
                kept, flags = cases[1 - i], _choice(node.operands[0])
                if fill is not None and (fill == 0 if kept.is_exp else fill <= _MASKED):
                    return kept.plus(_mask(flags, i == 0, lambda n: True, kept.is_exp))
    return None


def _mask(choice: _Choice | None, kept: Any, is_fill: Callable[[Any], bool], is_exp: bool = False) -> Form | None:
    """Returns a choice of `kept` and a fill value as a mask; None if it is none."""
    ends = [] if choice is None else [(choice.on, choice.off, choice.keep), (choice.off, choice.on, choice.other)]
    for value, fill, keep in ends:
        if choice and value == kept and fill != kept and is_fill(fill):
            return Form({(Mask(choice.node, keep), choice.axes): 1}, is_exp)
    return None


def _scaled(form: Form, by: Any, inverse: bool = False) -> Form | None:
    """Returns a sum of terms times a number, or divided by it; a mask may not become larger than it may be."""
    if by is None or form.is_exp or not np.isfinite(by) or by == 0:
        return form if by == 1 else None
    factor = 1 / float(by) if inverse else float(by)
    if form.is_masked and factor < _LEAST_FACTOR:
        return None
    return Form({key: n if isinstance(key[0], Mask) else factor * n for key, n in form.terms.items()})


def _summed(form: Form, node: Node) -> Form | None:
    """Returns the sum of exponentials along axes: of the terms that vary along them, and of all masks."""
    (before,), axes = node.operands, node.eqn.params["axes"]
    along = varying(before.shape) & frozenset(map(int, axes))
    inside = {key: n for key, n in form.terms.items() if isinstance(key[0], Mask) or along & set(key[1])}
    if not along <= {axis for _, places in inside for axis in places}:
        return None
    kept = [axis for axis in range(len(before.shape)) if axis not in axes]
    places = {axis: kept.index(axis) for axis in kept}
    rest = Form({key: n for key, n in form.terms.items() if key not in inside}, is_exp=True).placed(places)
    sums = _LogSum(frozenset(inside.items()), along), tuple([places.get(axis) for axis in before.axes])
    return rest.plus(Form({sums: 1}, is_exp=True))


def softmax_of(form: Form) -> tuple[Form, frozenset[int]] | None:
    """Returns the scores of a softmax, and the axes that it sums along; None if a form is no softmax."""
    sums = [key for key, n in form.terms.items() if isinstance(key[0], _LogSum) and n == -1]
    if not form.is_exp or len(sums) != 1:
        return None
    (total, outer), scores = sums[0], {key: n for key, n in form.terms.items() if key != sums[0]}
    places = {i: place for i, place in enumerate(outer) if place is not None}
    found = set()
    for (term, inner), n in total.terms:
        same = [axes for each, axes in scores if each == term and scores[each, axes] == n]
        if len(same) != 1 or len(same[0]) != len(inner):
            return None
        found.add((term, same[0]))
        for axis, place in zip(inner, same[0], strict=True):
            if axis is not None and places.setdefault(axis, place) != place:
                return None
    along = frozenset(places[axis] for axis in total.along)
    is_same = found == scores.keys() and None not in places.values() and len(set(places.values())) == len(places)
    return (Form(scores), along) if is_same else None
