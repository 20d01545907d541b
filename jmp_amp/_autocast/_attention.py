"""Attention in one kernel: finds `softmax(scale * q @ k.T + bias, masked) @ v` in a program, and calls a kernel there.

The program is read as a graph of values, each of which has a `_Form`: a sum of terms, or the exponential of one. A sum
of exponentials is the exponential of a `_LogSum`, a term that is constant along the keys, as is the largest score that
a softmax subtracts. So however a softmax is written, its form is the exponential of `scores - logsum(scores)`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._plan import Region
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._primitives import OpClass, rule_of, varying
from jmp_amp._cast_inputs import cast_inputs
from jmp_amp._formats import Format

Axes = tuple[Any, ...]  # for each axis of an array, its place in another; None for an axis of one element
Line = tuple[Any, tuple[Any, ...]]  # a number, and a factor for the index along each axis

_LARGEST = 2**26  # elements of a constant in which a mask is looked for
_MASKED = -1e4  # the exponential of a score that is this much smaller is 0
_LAYOUTS = {"broadcast_in_dim", "reshape", "squeeze", "transpose"}
_COPIES = {"convert_element_type", "copy", "name", "sharding_constraint", "device_put", "pvary", "reshard"}
_FLAGS: dict[str, Callable[..., Any]] = {"not": np.logical_not, "and": np.logical_and, "or": np.logical_or}
_FLAGS |= {"eq": np.equal, "ne": np.not_equal, "ge": np.greater_equal, "gt": np.greater}
_FLAGS |= {"le": np.less_equal, "lt": np.less}
_INVERSE = {"ge": "lt", "lt": "ge", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}


class _Fact(NamedTuple):
    """What is known of a value that depends on no input: how it depends on the indices of an element.

    Attributes:
        line: the sum that it is; None if it is no such sum.
        choice: lines, and the numbers that it is where one of them is negative, and where none is.
    """

    line: Line | None = None
    choice: tuple[tuple[Line, ...], Any, Any] | None = None


class _Node:
    """A value of the program: its type, the equation that computes it, or the value of a constant."""

    __slots__ = ("aval", "fact", "memo", "op", "value")

    def __init__(self, aval: Any, op: "_Op | None" = None, value: Any = None, fact: _Fact | None = None) -> None:
        self.aval, self.op, self.value, self.fact = aval, op, value, fact or _Fact()
        self.memo: dict[Any, Any] = {}

    @property
    def name(self) -> str:
        """The name of the primitive that computes it; empty for inputs and constants."""
        return self.op.eqn.primitive.name if self.op else ""

    @property
    def operands(self) -> Sequence["_Node"]:
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


class _Op:
    """An equation.

    Attributes:
        eqn: the equation.
        region: the region that it is in.
        operands: the values that it reads.
        calls: the calls around it that are read in place, the outermost first.
        outs: the values that it computes.
        inside: the equations of such a call.
        parts: its jaxprs, if attention is found in one of them.
    """

    def __init__(self, eqn: Any, region: Region, operands: Sequence[_Node], calls: "tuple[_Op, ...]") -> None:
        self.eqn, self.region, self.operands, self.calls = eqn, region, operands, calls
        self.outs: Sequence[_Node] = ()
        self.inside: list[_Op] = []
        self.parts: list[_Part] = []

    @property
    def line(self) -> str:
        """The line of code that it comes from."""
        return next(
            (str(frame) for eqn in (self.eqn, *[x.eqn for x in self.calls[::-1]]) for frame in jx.frames_of(eqn)), ""
        )


def _memoized(read: Callable[[_Node], Any]) -> Callable[[_Node], Any]:
    def once(node: _Node) -> Any:
        if read not in node.memo:
            node.memo[read] = read(node)
        return node.memo[read]

    return once


def _moved(node: _Node) -> tuple[_Node, Axes] | None:
    """Returns the value whose elements an op moves, and the places of its axes; None for an op that does more."""
    if node.name not in _LAYOUTS | _COPIES or len(node.operands) != 1:
        return None
    (before,) = node.operands
    if node.name in _COPIES:
        return before, before.axes
    eqn, places = node.op.eqn, dict[int, int]()
    for axis in varying(before.shape):
        found = rule_of(eqn).move_axes(eqn.params, before.shape, node.shape, frozenset({axis})) or ()
        if len(found) != 1 or node.shape[min(found)] != before.shape[axis]:
            return None
        places[axis] = min(found)
    return (before, _placed(before.axes, places)) if len({*places.values()}) == len(places) else None


def _placed(axes: Axes, places: Any) -> Axes:
    """Returns the places of axes after these have been moved."""
    return tuple([None if axis is None else places[axis] for axis in axes])


def _array(node: _Node) -> np.ndarray | None:
    """Returns the value of a constant of numbers or flags."""
    is_known = node.value is not None and not isinstance(node.value, jax.core.Tracer) and jx.dtype_of(node) is not None
    is_read = (
        is_known and math.prod(node.shape) <= _LARGEST and not jnp.issubdtype(jx.dtype_of(node), jax.dtypes.extended)
    )
    return np.asarray(node.value) if is_read else None


@_memoized
def _line(node: _Node) -> Line | None:
    """Returns a value as a line of the indices of its elements; None if it is none."""
    none = (0,) * len(node.shape)
    if node.fact.line is not None:
        return node.fact.line
    if (x := _array(node)) is not None:
        if not x.size or np.iscomplexobj(x):
            return None
        first, is_flag = x[(0,) * x.ndim], x.dtype == np.bool_
        next_ones = [x[tuple(np.eye(x.ndim, dtype=int)[i])] if n > 1 else first for i, n in enumerate(x.shape)]
        factors = none if is_flag else tuple([y.item() - first.item() for y in next_ones])
        grid = sum((f * i for f, i in zip(factors, np.indices(x.shape, sparse=True), strict=True)), first)
        return (first.item(), factors) if np.array_equal(x, np.broadcast_to(grid, x.shape)) else None
    if node.name == "iota":
        return 0, tuple([int(i == node.op.eqn.params["dimension"]) for i in range(len(node.shape))])
    if (moved := _moved(node)) is not None:
        before, places = moved
        known = _line(before)
        is_rounded = not jx.is_floating(node) and known is not None and any(x % 1 for x in (known[0], *known[1]))
        if known is None or is_rounded:
            return None
        factors = dict(zip(places, known[1], strict=True))
        return known[0], tuple([factors.get(i, 0) for i in range(len(node.shape))])
    lines = [_line(x) for x in node.operands]
    if not lines or None in lines:
        return None
    numbers, slopes = zip(*[(number, factors or none) for number, factors in lines], strict=True)
    if not any(map(any, slopes)):
        value = _computed(node, numbers)
        return None if value is None else (value, none)
    constant = [number for number, factors in zip(numbers, slopes, strict=True) if not any(factors)]
    if node.name in ("add", "sub"):
        sign = 1 if node.name == "add" else -1
        return numbers[0] + sign * numbers[1], tuple([x + sign * y for x, y in zip(*slopes, strict=True)])
    if (node.name == "mul" and constant) or node.name == "neg":
        by = constant[0] if constant else -1
        number, factors = next(line for line in lines if any(line[1]))
        return by * number, tuple([by * factor for factor in factors])
    return None


def _computed(node: _Node, numbers: Sequence[Any]) -> Any:
    """Returns what an op computes from numbers; None if that is not known."""
    rule = rule_of(node.op.eqn)
    with np.errstate(all="ignore"):
        if node.name in _FLAGS:
            return _FLAGS[node.name](*numbers)
        return None if rule.fold is None else rule.fold(node.op.eqn.params, *numbers)


def _number(node: _Node) -> Any:
    """Returns the number that all elements of a value are; None if there is none, or it is not known."""
    line = _line(node)
    return line[0] if line is not None and not any(line[1]) else None


class _Choice(NamedTuple):
    """A value of two numbers: `on` where `node == keep`, and `off` where it is `other`."""

    node: _Node
    axes: Axes
    keep: Any
    other: Any
    on: Any
    off: Any


@_memoized
def _choice(node: _Node) -> _Choice | None:
    """Returns a value as a choice of two numbers; a flag of which no more is known is one of itself."""
    is_flag = jx.dtype_of(node) == np.bool_
    itself = _Choice(node, node.axes, True, False, True, False) if is_flag else None
    if node.fact.choice is not None:
        _, off, on = node.fact.choice
        return _Choice(node, node.axes, on, off, on, off)
    if (x := _array(node)) is not None:
        if is_flag or not x.ndim or not x.size or np.iscomplexobj(x):
            return itself
        low, high = x.min().item(), x.max().item()
        is_choice = low < high and bool(np.all((x == low) | (x == high)))
        return _Choice(node, node.axes, high, low, high, low) if is_choice else None
    if (moved := _moved(node)) is not None:
        before = _choice(moved[0])
        return itself if before is None else before._replace(axes=_placed(before.axes, moved[1]))
    if not node.operands:
        return itself
    numbers = [_number(x) for x in node.operands]
    if node.name == "select_n" and len(numbers) == 3 and None not in numbers[1:]:
        flag = _choice(node.operands[0])
        return flag and flag._replace(on=numbers[1 + bool(flag.on)], off=numbers[1 + bool(flag.off)])
    unknown = [_choice(x) for x, number in zip(node.operands, numbers, strict=True) if number is None]
    if len(unknown) != 1 or unknown[0] is None:
        return itself
    on, off = ([end if x is None else x for x in numbers] for end in (unknown[0].on, unknown[0].off))
    ends = _computed(node, on), _computed(node, off)
    return itself if None in ends else unknown[0]._replace(on=ends[0], off=ends[1])


class _Condition(NamedTuple):
    """A flag that says where scores are kept: where it is `keep`, or where none of some lines is negative."""

    node: _Node
    axes: Axes
    keep: Any
    lines: tuple[Line, ...] | None


def _conditions(node: _Node, axes: Axes, keep: Any) -> Iterator[_Condition]:
    """Yields the conditions that all hold where a value is `keep`."""
    choice = _choice(node)
    if choice is not None and choice.node is not node and choice.on != choice.off:
        keeps = choice.keep if choice.on == keep else choice.other
        yield from _conditions(choice.node, _placed(choice.axes, axes), keeps)
        return
    parts: list[tuple[_Node, Any]] = []
    if node.name in ("and", "or") and bool(keep) == (node.name == "and"):
        parts = [(x, keep) for x in node.operands]
    elif node.name == "select_n" and keep and False in (cases := list(map(_number, node.operands[1:]))):
        # `flag & x`, as `jnp.tril` writes it
        parts = [(node.operands[0], cases.index(False) == 0), (node.operands[2 - cases.index(False)], True)]
    if not parts:
        yield _Condition(node, axes, keep, _lines(node, keep))
    for x, kept in parts:
        if (number := _number(x)) is None or number != kept:
            yield from _conditions(x, _placed(x.axes, axes), kept)


def _lines(flag: _Node, keep: Any) -> tuple[Line, ...] | None:
    """Returns lines, none of which is negative where a value is `keep`; None if that is not known."""
    if flag.fact.choice is not None:
        return flag.fact.choice[0] if keep == flag.fact.choice[2] else None
    if (x := _array(flag)) is not None:
        return _band(x == keep)
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


def _band(flags: np.ndarray) -> tuple[Line, ...] | None:
    """Returns the lines of a matrix of flags that is true in a band; None of another array."""
    axes = sorted(varying(flags.shape))
    if len(axes) != 2 or not flags.any():
        return None
    matrix = flags.reshape([flags.shape[axis] for axis in axes])
    rows, columns = np.nonzero(matrix)
    offsets = columns - rows
    most, least = offsets.max().item(), offsets.min().item()
    offset = np.arange(matrix.shape[1]) - np.arange(matrix.shape[0])[:, None]
    if not np.array_equal(matrix, (offset <= most) & (offset >= least)):
        return None
    slope = tuple([{axes[0]: 1, axes[1]: -1}.get(i, 0) for i in range(flags.ndim)])
    return (most, slope), (-least, tuple([-n for n in slope]))


def _fact(node: _Node) -> _Fact:
    """Returns what is known of a value inside the body that it is passed to."""
    choice, lines = _choice(node), list[Line]()
    if choice is None or (choice.node is node and node.value is None):
        return _Fact(_line(node))
    for each in _conditions(node, node.axes, choice.on):
        if each.lines is None:
            return _Fact(_line(node))
        slopes = [dict(zip(each.axes, factors, strict=True)) for _, factors in each.lines]
        places = range(len(node.shape))
        lines += [(line[0], tuple([s.get(i, 0) for i in places])) for line, s in zip(each.lines, slopes, strict=True)]
    return _Fact(_line(node), (tuple(lines), choice.off, choice.on))


class _Mask(NamedTuple):
    """A term that is 0 where a value is `keep`, and so small elsewhere that its exponential is 0."""

    node: _Node
    keep: Any


class _LogSum(NamedTuple):
    """A term that is the logarithm of the sum along some axes of the exponential of terms."""

    terms: frozenset[tuple[tuple[Any, Axes], float]]
    along: frozenset[int]


class _Form(NamedTuple):
    """A value as a sum of terms, or as the exponential of such a sum.

    Attributes:
        terms: by a term and the places of its axes, its factor. A term is a value, a `_Mask`, a `_LogSum`, or None: 1.
        is_exp: whether it is the exponential.
    """

    terms: dict[tuple[Any, Axes], float]
    is_exp: bool = False

    def plus(self, other: "_Form | None", factor: float = 1) -> "_Form | None":
        """Returns the form with a multiple of the terms of another; None if they do not go together."""
        if other is None or self.is_exp != other.is_exp or (factor < 0 and other.is_masked):
            return None
        terms = dict(self.terms)
        for key, each in other.terms.items():
            terms[key] = 1 if isinstance(key[0], _Mask) else terms.get(key, 0) + factor * each
        return _Form({key: each for key, each in terms.items() if each}, self.is_exp)

    @property
    def is_masked(self) -> bool:
        """Whether a term is a mask."""
        return any(isinstance(term, _Mask) for term, _ in self.terms)

    def placed(self, places: Any) -> "_Form":
        """Returns the form of the value with its axes moved."""
        return self._replace(terms={(term, _placed(axes, places)): n for (term, axes), n in self.terms.items()})


_ONE = _Form({}, is_exp=True)


@_memoized
def _form(node: _Node) -> _Form:
    """Returns the form of a value; one of which nothing is known is a term of its own."""
    return (_derived(node) if jx.is_floating(node) else None) or _Form({(node, node.axes): 1})


def _derived(node: _Node) -> _Form | None:
    number, choice = _number(node), _choice(node)
    if number is not None:
        return _Form({(None, ()): float(number)} if number else {}) if np.isfinite(number) else None
    if (mask := _mask(choice, 0, lambda n: n <= _MASKED)) is not None:
        return mask
    if (moved := _moved(node)) is not None:
        return _form(moved[0]).placed(moved[1]) if jx.is_floating(moved[0]) else None
    if node.op is None:
        return None
    forms, numbers = list(map(_form, node.operands)), list(map(_number, node.operands))
    match node.name, forms:
        case "exp", [_Form(terms, False)]:
            return _Form(terms, True)
        case "log", [_Form(terms, True)]:
            return _Form(terms)
        case "abs", [_Form(_, True)]:
            return forms[0]
        case "neg", [_Form(_, False)]:
            return _Form({}).plus(forms[0], -1)
        case (("add" | "add_any"), [a, b]) if not a.is_exp:
            return a.plus(b)
        case "sub", [a, b] if not a.is_exp:
            return a.plus(b, -1)
        case "div", [a, b]:
            a = _ONE if numbers[0] == 1 else a
            return a.plus(b, -1) if a.is_exp else _scaled(a, numbers[1], inverse=True)
        case "integer_pow", [a] if a.is_exp and node.op.eqn.params["y"] == -1:
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


def _mask(choice: _Choice | None, kept: Any, is_fill: Callable[[Any], bool], is_exp: bool = False) -> _Form | None:
    """Returns a choice of `kept` and a fill value as a mask; None if it is none."""
    ends = [] if choice is None else [(choice.on, choice.off, choice.keep), (choice.off, choice.on, choice.other)]
    for value, fill, keep in ends:
        if choice and value == kept and fill != kept and is_fill(fill):
            return _Form({(_Mask(choice.node, keep), choice.axes): 1}, is_exp)
    return None


def _scaled(form: _Form, by: Any, inverse: bool = False) -> _Form | None:
    """Returns a sum of terms times a number, or divided by it."""
    if by is None or form.is_exp or not np.isfinite(by) or by == 0 or (form.is_masked and by < 0):
        return form if by == 1 else None
    factor = 1 / float(by) if inverse else float(by)
    return _Form({key: n if isinstance(key[0], _Mask) else factor * n for key, n in form.terms.items()})


def _summed(form: _Form, node: _Node) -> _Form | None:
    """Returns the sum of exponentials along axes: of the terms that vary along them, and of all masks."""
    (before,), axes = node.operands, node.op.eqn.params["axes"]
    along = varying(before.shape) & frozenset(map(int, axes))
    inside = {key: n for key, n in form.terms.items() if isinstance(key[0], _Mask) or along & set(key[1])}
    if not along <= {axis for _, places in inside for axis in places}:
        return None
    kept = [axis for axis in range(len(before.shape)) if axis not in axes]
    places = {axis: kept.index(axis) for axis in kept}
    rest = _Form({key: n for key, n in form.terms.items() if key not in inside}, is_exp=True).placed(places)
    sums = _LogSum(frozenset(inside.items()), along), tuple([places.get(axis) for axis in before.axes])
    return rest.plus(_Form({sums: 1}, is_exp=True))


def _normalized(form: _Form) -> tuple[_Form, frozenset[int]] | None:
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
    return (_Form(scores), along) if is_same else None


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A kernel with the options of one attention, as a function of the arrays that it reads.

    Attributes:
        kernel: a function, or an `implementation` of `jax.nn.dot_product_attention`.
        arrays: the names of the arrays.
        options: the other arguments.
    """

    kernel: Any
    arrays: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    def __call__(self, *args: Any) -> Any:
        """Calls the kernel."""
        arrays = dict(zip(self.arrays, args, strict=True))
        query, key, value = (arrays.pop(name) for name in ("query", "key", "value"))
        options = {"bias": None, "mask": None} | arrays | dict(self.options)
        if not isinstance(self.kernel, str):
            return self.kernel(query, key, value, **options)
        # It takes values as wide as the keys only, and cuDNN masks and biases of all queries and keys.
        width, widest = value.shape[-1], max(query.shape[-1], value.shape[-1])
        query, key, value = (jnp.pad(x, [(0, 0)] * 3 + [(0, widest - x.shape[-1])]) for x in (query, key, value))
        for name in {"bias", "mask"} & arrays.keys():
            options[name] = jnp.broadcast_to(arrays[name], (*arrays[name].shape[:2], query.shape[1], key.shape[1]))
        out = jax.nn.dot_product_attention(query, key, value, implementation=self.kernel, **options)
        return out[..., :width]


@functools.lru_cache(maxsize=1024)
def _in_dtype(kernel: _Kernel, dtype: Any) -> Callable[..., Any]:
    """Returns the kernel in a dtype, the same function for equal ones, which JAX then traces once.

    In a program that is not cast yet its result has the dtype of the queries there.
    """
    call = jax.jit(kernel)

    def attention(*args: Any) -> Any:
        return call(*[x.astype(dtype) if jx.is_floating(x) else x for x in args]).astype(args[0].dtype)

    return cast_inputs(dtype)(attention)


def _arranged(x: Any, axes: Axes, groups: Sequence[Sequence[Any]], sizes: Any) -> Any:
    """Returns an array with an axis for each group of axes; one of a group of which it has none has one element.

    Args:
        x: the array.
        axes: the names of its axes; None for one of one element, which is left out.
        groups: the names of the axes of the result.
        sizes: the number of elements of each axis, by name.
    """
    names = [axis for axis in axes if axis is not None]
    order = [axis for group in groups for axis in group]
    x = jnp.reshape(x, [sizes[axis] for axis in names])
    x = jnp.transpose(x, [names.index(axis) for axis in order if axis in names])
    x = jnp.reshape(x, [sizes[axis] if axis in names else 1 for axis in order])
    reads = [not {*group}.isdisjoint(names) for group in groups]
    shapes = [[sizes[axis] if read else 1 for axis in group] for group, read in zip(groups, reads, strict=True)]
    x = jnp.broadcast_to(x, [n for shape in shapes for n in shape])
    return jnp.reshape(x, list(map(math.prod, shapes)))


class _Match(NamedTuple):
    """One attention of the program.

    Attributes:
        leaves: the values that it reads: queries, keys, values, biases and flags.
        within: the equations between the two products, and the first product.
        variants: how to compute it from the arrays of the leaves; the first one that the kernel takes is used.
    """

    leaves: tuple[_Node, ...]
    within: frozenset[_Op]
    variants: tuple[Callable[..., Any], ...]


def _match(op: _Op, planner: Planner, form: Format, kernel: Any) -> _Match | str | None:
    """Returns the attention that ends in a product, why it is none, or None if the product reads no softmax."""
    for side, weights in enumerate(op.operands):
        if (softmax := _normalized(_form(weights))) is not None:
            break
    else:
        return next(filter(None, map(_near_softmax, op.operands)), None)
    scores, along = softmax
    terms = [(term, axes, n) for (term, axes), n in scores.terms.items()]
    of_weights = {*weights.axes} - {None}
    products = [
        each
        for each in terms
        if isinstance(each[0], _Node) and each[0].name == "dot_general" and of_weights <= {*each[1]}
    ]
    if not products:
        names = [f"`{term.name}`" for term, *_ in terms if isinstance(term, _Node) and term.name]
        return f"{' and '.join(names) or 'an input'} between a product and the softmax"
    product, placed, scale = products[0]
    names, batch, frees = _operand_axes(product.op.eqn, placed)
    k = next((s for s in (0, 1) if frees[s] == along), None)
    contracted, batched = op.eqn.params["dimension_numbers"]
    sums, shares = ({weights.axes[axis] for axis in axes[side]} - {None} for axes in (contracted, batched))
    if k is None or sums != along:
        return "the softmax, or the product that reads it, is along other axes than the keys"
    if shares != batch:
        return "the values lack an axis of the keys, or have one more"
    q, others = 1 - k, [each for each in terms if each is not products[0]]
    query, key, value = product.operands[q], product.operands[k], op.operands[1 - side]
    ends: list[Any] = [None] * len(value.shape)
    for mine, its in ((contracted[side], contracted[1 - side]), (batched[side], batched[1 - side])):
        for i, j in zip(mine, its, strict=True):
            ends[j] = weights.axes[i]
    features = [i for i in range(len(ends)) if i not in (*contracted[1 - side], *batched[1 - side])]
    for i in features:
        ends[i] = f"v{i}"
    free = [weights.axes[i] for i in range(len(weights.shape)) if i not in (*contracted[side], *batched[side])]
    of_values = [ends[i] for i in features]
    out = [weights.axes[i] for i in batched[side]] + ([*free, *of_values] if side == 0 else [*of_values, *free])
    sizes = {axis: weights.shape[axis] for axis in of_weights}
    for node, its in ((query, names[q]), (value, ends)):
        sizes |= {axis: n for axis, n in zip(its, node.shape, strict=True) if isinstance(axis, str)}
    biases = [each for each in others if not isinstance(each[0], _Mask)]
    conditions = [
        c for term, axes, _ in others if isinstance(term, _Mask) for c in _conditions(term.node, axes, term.keep)
    ]
    if not all(isinstance(term, _Node) for term, *_ in biases):
        return "a logarithm of a sum between a product and the softmax"
    stops = {product, *[term for term, *_ in biases], *[c.node for c in conditions]}
    within = frozenset({product.op, *_between(weights, product, stops)})
    if any(planner.enter(each.region, each.eqn).format is not form for each in (*within, op)):
        return "a region or a rule gives it another precision"
    for each in (product.op, op):
        dtypes = [jx.dtype_of(x) for x in (*each.operands, *each.outs)]
        if planner.rule_of(each.eqn).op_class is not OpClass.LOWER or not form.takes(dtypes):
            return "its products do not run in the compute dtype: see their rows"
    # The lengths are along the axis of the queries that a mask or a bias varies along; the other ones are heads that
    # share keys. Of the axes that both have, those behind the lengths are heads, as in (batch, length, heads, features).
    queries = [axis for axis in names[q] if axis in frees[q]]
    varied = {axis for _, axes, _ in biases for axis in axes} | {axis for c in conditions for axis in c.axes}
    lengths = [axis for axis in queries if axis in varied]
    if not lengths:
        lengths = sorted(queries, key=lambda axis: -sizes[axis] if isinstance(sizes[axis], int) else 0)[:1]
    groups = [axis for axis in queries if axis not in lengths]
    shared = [axis for axis in names[q] if axis in batch]
    heads = [axis for axis in shared if lengths and names[q].index(axis) > names[q].index(lengths[0])] or shared[1:][
        -1:
    ]
    rows, keys = [axis for axis in shared if axis not in heads], [axis for axis in names[k] if axis in along]
    terms_of_q = [axis for axis in names[q] if isinstance(axis, str)]
    layouts = (
        [rows, lengths, [*heads, *groups], terms_of_q],
        [rows, keys, heads, terms_of_q],
        [rows, keys, heads, of_values],
    )
    of_scores = rows, [*heads, *groups], lengths, keys

    def attend(options: dict[str, Any], masks: Sequence[_Condition], *arrays: Any) -> Any:
        inputs = dict(
            zip(
                ("query", "key", "value"),
                map(_arranged, arrays, (names[q], names[k], ends), layouts, [sizes] * 3),
                strict=False,
            )
        )
        if biases:
            each = [
                n * _arranged(x, axes, of_scores, sizes) for x, (_, axes, n) in zip(arrays[3:], biases, strict=False)
            ]
            # Scores below all of the dtype are masked as well by the least of it, and with -inf a row may be NaN.
            inputs["bias"] = jnp.maximum(functools.reduce(jnp.add, each), float(jnp.finfo(form.dtype).min))
        flags = [arrays[3 + len(biases) + conditions.index(c)] for c in masks]
        if masks:
            kept = [_arranged(x == c.keep, c.axes, of_scores, sizes) for x, c in zip(flags, masks, strict=True)]
            inputs["mask"] = functools.reduce(jnp.logical_and, kept)
        call = _in_dtype(_Kernel(kernel, tuple(inputs), (("scale", scale), *options.items())), form.dtype)
        shape = rows + lengths + heads + groups + of_values
        found = jnp.reshape(call(*inputs.values()), [sizes[axis] for axis in shape])
        return jnp.reshape(
            jnp.transpose(found, [shape.index(axis) for axis in out if axis is not None]), op.outs[0].shape
        )

    variants = [_structured(conditions, lengths, keys, sizes)]
    if len(variants[0][1]) < len(conditions):
        variants.append(({"is_causal": False}, conditions))
    leaves = query, key, value, *[term for term, *_ in biases], *[c.node for c in conditions]
    return _Match(leaves, within, tuple([functools.partial(attend, *each) for each in variants]))


def _operand_axes(eqn: Any, placed: Axes) -> tuple[list[list[Any]], set[Any], list[set[Any]]]:
    """Returns the names of the axes of both operands of a product, those that both have, and those of one alone.

    An axis has the name of its place in the result, `placed`, and is a string if the product sums over it.
    """
    contracted, batched = eqn.params["dimension_numbers"]
    names = [[None] * len(atom.aval.shape) for atom in eqn.invars]
    frees, rest = [], iter(placed)
    for i, places in enumerate(zip(*batched, strict=True)):
        names[0][places[0]] = names[1][places[1]] = placed[i]
        next(rest)
    for i, places in enumerate(zip(*contracted, strict=True)):
        names[0][places[0]] = names[1][places[1]] = f"q{i}"
    for s in (0, 1):
        mine = [i for i in range(len(names[s])) if i not in (*contracted[s], *batched[s])]
        for i in mine:
            names[s][i] = next(rest)
        frees.append({names[s][i] for i in mine} - {None})
    return names, {*placed[: len(batched[0])]} - {None}, frees


def _between(weights: _Node, product: _Node, stops: set[_Node]) -> set[_Op]:
    """Returns the equations that compute weights from a product; values in `stops` are not entered."""
    reads: dict[_Node, bool] = dict.fromkeys(stops, False) | {product: True}

    def reads_it(node: _Node) -> bool:
        if node not in reads:
            reads[node] = any([reads_it(x) for x in node.operands])
        return reads[node]

    reads_it(weights)
    return {node.op for node, is_read in reads.items() if is_read and node.op and node is not product}


def _structured(
    conditions: Sequence[_Condition], lengths: Sequence[Any], keys: Sequence[Any], sizes: Any
) -> tuple[dict[str, Any], list[_Condition]]:
    """Returns masks as the options of a kernel, as far as it has some for them, and the masks that are left."""
    left, right, masks = math.inf, math.inf, []
    for condition in conditions:
        bounds = [_bound(line, condition.axes, lengths, keys, sizes) for line in condition.lines or [None]]
        if any(bound is None or min(bound) < 0 for bound in bounds):
            masks.append(condition)
            continue
        left, right = (min(pair) for pair in zip((left, right), *bounds, strict=True))
    options: dict[str, Any] = {"is_causal": right == 0}
    if left < math.inf or 0 < right < math.inf:
        ends = zip((left, right), (lengths, keys), strict=True)
        options["local_window_size"] = tuple([sizes[axes[0]] if math.isinf(n) else int(n) for n, axes in ends])
    return options, masks


def _bound(line: Line | None, axes: Axes, lengths: Sequence[Any], keys: Sequence[Any], sizes: Any) -> Any:
    """Returns how far to the left and to the right of a query the keys may be; None if the line says something else."""
    if line is None:
        return None
    factors = {axis: n for axis, n in zip(axes, line[1], strict=True) if n and axis is not None}
    if all(isinstance(sizes[axis], int) for axis in factors):
        least = line[0] + sum(min(n * (sizes[axis] - 1), 0) for axis, n in factors.items())
        if least >= 0:
            return math.inf, math.inf
    if len(lengths) != 1 or len(keys) != 1 or factors.keys() != {*lengths, *keys}:
        return None
    slopes = factors[lengths[0]], factors[keys[0]]
    return {(1, -1): (math.inf, line[0]), (-1, 1): (line[0], math.inf)}.get(slopes)


def _near_softmax(weights: _Node) -> str | None:
    """Returns what stands between a softmax, or a quotient that is almost one, and the product that reads it."""
    nodes, seen = [weights], set[_Node]()
    for node in nodes:
        if node.name == "div" and (top := _form(node.operands[0])).is_exp and _normalized(top) is None:
            return "its denominator is not the sum of the exponentials alone"
        passes = node.name in ("mul", "div", "select_n", "add", "sub", "max") or _moved(node)
        for x in node.operands if passes and len(seen) < 20 else ():
            if x not in seen and jx.is_floating(x):
                if _normalized(_form(x)) is not None:
                    return f"`{node.name}` between the softmax and the product, as dropout is"
                seen.add(x)
                nodes.append(x)
    return None


class Found(NamedTuple):
    """A softmax that a product reads.

    Attributes:
        eqns: the equations that hold the product, the outermost first, and the product itself.
        kernel: the kernel that computes the attention; empty if it stays as written.
        why: why it stays as written, or the options of the kernel.
        is_refused: whether the kernel refused it.
    """

    eqns: tuple[Any, ...]
    kernel: str
    why: str
    is_refused: bool = False


class _Part:
    """A jaxpr as a graph of values, and the attention in it. As a function, it evaluates the jaxpr with the kernel."""

    def __init__(self, jaxpr: Any, facts: Sequence[_Fact], region: Region, planner: Planner, *args: Any) -> None:
        self._planner, self._args = planner, args
        opened, _ = jx.open_jaxpr(jaxpr)
        self._inputs = [_Node(var.aval, fact=fact) for var, fact in zip(opened.invars, facts, strict=True)]
        self._ops: list[_Op] = []
        self._outs = self._read(jaxpr, self._inputs, region, (), self._ops)
        self._results = [atom.aval for atom in opened.outvars]
        self.found: list[Found] = []
        self._matches = self._find()
        self.body = jx.Body(self, [var.aval for var in opened.invars])

    @property
    def is_changed(self) -> bool:
        """Whether it calls the kernel."""
        return any(found.kernel for found in self.found)

    def _read(
        self, jaxpr: Any, inputs: Sequence[_Node], region: Region, calls: tuple[_Op, ...], ops: list[_Op]
    ) -> Sequence[_Node]:
        """Reads the equations of a jaxpr into `ops`, and returns its results."""

        def apply(eqn: Any, operands: list[_Node]) -> Sequence[_Node]:
            op = _Op(eqn, region, operands, calls)
            ops.append(op)
            structure = jx.structure_of(eqn)
            if structure is not None and jx.HIGHER_ORDER[eqn.primitive.name].run is not None:
                inside = self._planner.enter(region, eqn)
                op.parts = [self._part(op, structure, inner, places, inside) for inner, places in jx.entries(structure)]
                is_call = isinstance(structure, jx.Call) and structure.is_inline and structure.rule is None
                if (
                    not any(part.is_changed for part in op.parts)
                    and is_call
                    and not jx.versions.is_checkpoint(eqn.primitive, **eqn.params)
                ):
                    op.parts = []
                    op.outs = self._read(
                        structure.jaxpr, [operands[i] for i in structure.operands], inside, (*calls, op), op.inside
                    )
                    return op.outs
            op.outs = [_Node(var.aval, op) for var in eqn.outvars]
            return op.outs

        return jx.evaluate(
            jaxpr, inputs, apply, lambda x: _Node(jax.typeof(x), value=x), lambda atom: _Node(atom.aval, value=atom.val)
        )

    def _part(self, op: _Op, structure: Any, jaxpr: Any, places: Sequence[int], region: Region) -> "_Part":
        """Returns a jaxpr of an equation; what a loop changes is not known in it."""
        loop = isinstance(structure, jx.Loop)
        facts = [
            _Fact() if loop and not structure.consts.start <= i < structure.consts.stop else _fact(op.operands[i])
            for i in places
        ]
        return part_of(jaxpr, facts, region, self._planner, *self._args)

    def _find(self) -> dict[_Op, tuple[_Match, Callable[..., Any]]]:
        """Returns, by the last product of each attention, what it reads and what computes it."""
        form, kernel = self._args
        readers, ops = self._readers(), list(_first_order(self._ops))
        products = [op for op in ops if op.eqn.primitive is jax.lax.dot_general_p and op.outs[0] in readers]
        outcomes = {op: _match(op, self._planner, form, kernel) for op in products}
        chosen, refused = dict[_Op, Any](), set[_Op]()
        while True:
            matches = {op: match for op, match in outcomes.items() if isinstance(match, _Match)}
            dropped = {op: why for op, match in matches.items() if (why := _read_again(match, matches, readers))}
            for op in matches.keys() - dropped.keys() - chosen.keys():
                chosen[op], words = _taken(op, matches[op])
                if chosen[op] is None:
                    dropped[op] = words
                    refused.add(op)
            if not dropped:
                break
            outcomes |= dropped
        name = kernel if isinstance(kernel, str) else getattr(kernel, "__name__", type(kernel).__name__)
        for op in ops:
            eqns = (*[call.eqn for call in op.calls], op.eqn)
            self.found += [each._replace(eqns=eqns + each.eqns) for part in op.parts for each in part.found]
            if isinstance(why := outcomes.get(op), str):
                self.found.append(Found(eqns, "", why, op in refused))
            elif op in matches:
                self.found.append(Found(eqns, name, _says(*chosen[op].args)))
        return {op: (match, chosen[op]) for op, match in matches.items()}

    def _readers(self) -> dict[_Node, list[_Op | None]]:
        """Returns the equations that read each value, of those that have a use; None for the results."""
        readers: dict[_Node, list[_Op | None]] = {node: [None] for node in self._outs}
        for op in reversed(list(_first_order(self._ops))):
            if op.eqn.effects or not readers.keys().isdisjoint(op.outs):
                for node in op.operands:
                    readers.setdefault(node, []).append(op)
        return readers

    def __call__(self, *args: Any) -> list[Any]:
        """Evaluates the jaxpr, with the kernel in place of each attention."""
        env: dict[_Node, Any] = dict(zip(self._inputs, args, strict=True))
        needed = {*self._outs}
        # A call is evaluated op by op if attention ends in it, or reads a value that it computes and does not return.
        opened = {call for op in self._matches for call in op.calls}
        for match, _ in self._matches.values():
            opened |= {call for x in match.leaves if x.op for call in x.op.calls if x not in call.outs}

        def steps(ops: Sequence[_Op]) -> list[_Op]:
            kept: list[_Op] = []
            for op in reversed(ops):
                if op in opened:
                    kept += reversed(steps(op.inside))
                elif op.eqn.effects or not needed.isdisjoint(op.outs):
                    needed.update(self._matches[op][0].leaves if op in self._matches else op.operands)
                    kept.append(op)
            return kept[::-1]

        def read(node: _Node) -> Any:
            return node.value if node.value is not None else env[node]

        for op in steps(self._ops):
            if op in self._matches:
                match, attend = self._matches[op]
                with jx.versions.context_of(op.eqn):
                    outs = [jx.as_type(attend(*map(read, match.leaves)), op.outs[0].aval)]
            elif any(part.is_changed for part in op.parts):
                with jx.versions.context_of(op.eqn):
                    run = jx.HIGHER_ORDER[op.eqn.primitive.name].run
                    outs = run(op.eqn, [part.body for part in op.parts], list(map(read, op.operands)))
            else:
                outs = jx.apply_as_traced(op.eqn, list(map(read, op.operands)))
            for node, x in zip(op.outs, outs, strict=True):
                env.setdefault(node, x)
        return [jx.as_type(read(node), aval) for node, aval in zip(self._outs, self._results, strict=True)]


def _says(options: dict[str, Any], masks: Sequence[_Condition]) -> str:
    """Returns the options of a kernel for `explain`."""
    return ", ".join([*[f"{name}={value}" for name, value in options.items() if value], *["mask"] * bool(masks)])


def _first_order(ops: Sequence[_Op]) -> Iterator[_Op]:
    """Yields equations, in place of a call that is read in place those in it."""
    for op in ops:
        yield from _first_order(op.inside) if op.inside else [op]


def _read_again(match: _Match, matches: Any, readers: Any) -> str:
    """Returns what reads the scores or the weights of an attention again; empty if nothing does."""
    allowed = {*matches}.union(*[each.within for each in matches.values()])
    others = [reader for op in match.within for x in op.outs for reader in readers.get(x, ()) if reader not in allowed]
    if not others:
        return ""
    return f"its weights are read again at {others[0].line}" if others[0] else "its weights are returned"


def _taken(op: _Op, match: _Match) -> tuple[Any, str]:
    """Returns the first variant of an attention that the kernel takes; without one, None and the words of the kernel."""
    words = ""
    for variant in match.variants:
        try:
            with jx.versions.context_of(op.eqn):
                jx.trace(variant, [x.aval for x in match.leaves])
            return variant, ""
        except Exception as error:
            words = f"{type(error).__name__}: {error}".partition("\n")[0]
    return None, words


_parts = jx.Cache(drop=lambda part: part.__dict__.clear())


def part_of(jaxpr: Any, facts: Sequence[_Fact], region: Region, planner: Planner, form: Format, kernel: Any) -> _Part:
    """Returns a jaxpr as a graph, the same for the same jaxpr."""
    opened, consts = jx.open_jaxpr(jaxpr)
    key = tuple(map(id, consts)), tuple(facts), region, planner, form, kernel
    return _parts(opened, key, lambda: _Part(jaxpr, facts, region, planner, form, kernel))


def with_kernel(jaxpr: Any, planner: Planner, region: Region, kernel: Any) -> tuple[Any, list[Found]]:
    """Returns a closed jaxpr with a kernel in place of each attention, and each softmax that a product reads.

    Args:
        jaxpr: the program.
        planner: knows the rules of its ops, and the regions that they are in.
        region: the region around it. Its format is that of the kernel.
        kernel: an `implementation` of `jax.nn.dot_product_attention`, or a function with its signature.
    """
    opened, _ = jx.open_jaxpr(jaxpr)
    if any(map(jx.is_reference, opened.invars)) or not jx.holds(
        jaxpr, lambda primitive, *_, **__: primitive is jax.lax.exp_p
    ):
        return jaxpr, []
    avals = [var.aval for var in opened.invars]
    part = _Part(jaxpr, [_Fact()] * len(avals), region, planner, region.format, kernel)
    return jx.trace(part, avals) if part.is_changed else jaxpr, part.found
