"""Reads values of a program as softmaxes of terms, however they are written.

What is read of a value goes forward from what is read of the operands of its op. A floating value has a `Form`: a sum
of terms, or the exponential of one. A sum of exponentials is the exponential of a `_LogSum`, a term that is constant
along the axes that it sums, as is the largest score that a softmax subtracts. So the form of every softmax is the
exponential of `scores - logsum(scores)`.

Masks are such terms as well. Of one that depends on no input it is known which indices it keeps, without computing it.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._primitives import rule_of, varying

Axes = tuple[Any, ...]  # for each axis of an array, its place in another; None for an axis of one element

_LARGEST = 2**26  # elements of a constant in which a mask is looked for
_MASKED = -1e4  # the exponential of a score that is this much smaller is 0
_LEAST_FACTOR = 2.0**-7  # that a mask may be multiplied by
_LAYOUTS = {"broadcast_in_dim", "reshape", "squeeze", "transpose"}
_COPIES = {"convert_element_type", "copy", "name", "sharding_constraint", "device_put", "pvary", "reshard"}
_COMPARISONS = {"lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "eq": "ne", "ne": "eq"}  # and their opposites
_FOLDS: dict[str, Callable[..., Any]] = {name: getattr(operator, name) for name in _COMPARISONS}
_FOLDS |= {"not": operator.not_, "and": np.logical_and, "or": np.logical_or}
_FOLDS["select_n"] = lambda which, *cases: cases[int(which)]
EXPONENTIALS = {"exp": 1.0, "exp2": math.log(2)}  # by their primitives, the logarithms of their bases
_READ = {"log", "abs", "neg", "add", "add_any", "sub", "mul", "div", "integer_pow", "reduce_sum", "max", "sqrt"}
_READ |= {"rsqrt", "pow", *EXPONENTIALS, *_LAYOUTS, *_COPIES, *_FOLDS}


def axes_of(x: Any) -> Axes:
    """Returns the axes of a variable or an array themselves."""
    return tuple([i if n != 1 else None for i, n in enumerate(getattr(x, "aval", x).shape)])


def placed(axes: Axes, places: Any) -> Axes:
    """Returns the places of axes after these have been moved."""
    return tuple([None if axis is None else places[axis] for axis in axes])


class Line(NamedTuple):
    """A value that is the sum of a number and, for each axis, the index times a factor."""

    number: Any
    factors: tuple[Any, ...]

    def plus(self, other: "Line", factor: Any = 1) -> "Line":
        """Returns the sum with a multiple of another line; one without axes is a number."""
        pairs = zip(self.factors or [0] * len(other.factors), other.factors or [0] * len(self.factors), strict=True)
        return Line(self.number + factor * other.number, tuple([x + factor * y for x, y in pairs]))

    def placed(self, axes: Axes, rank: int) -> "Line":
        """Returns it as a line of the indices of another array, given the places of its axes there."""
        factors = dict(zip(axes, self.factors, strict=True))
        return Line(self.number, tuple([factors.get(i, 0) for i in range(rank)]))

    @property
    def is_whole(self) -> bool:
        """Whether it goes through integers."""
        return not any(n % 1 for n in (self.number, *self.factors))


class Condition(NamedTuple):
    """Says of each element of a value whether it is one number or another.

    Attributes:
        atom: the value.
        keep: the number where the condition holds.
        other: the number elsewhere.
        lines: none of them is negative where it holds; None if that is not known.
        length: how many keys are kept, if it says that: a value, its axes, a number to add, and the axis of the keys.
    """

    atom: Any
    keep: Any
    other: Any
    lines: tuple[Line, ...] | None = None
    length: tuple[Any, Axes, int, int] | None = None

    @property
    def opposite(self) -> "Condition":
        """The condition that holds where this one does not."""
        lines = self.lines if self.lines is not None and len(self.lines) == 1 else ()
        negative = tuple([Line(-1 - line.number, tuple([-n for n in line.factors])) for line in lines])
        return Condition(self.atom, self.other, self.keep, negative or None)


class Choice(NamedTuple):
    """A value that is `on` where all conditions hold, and `off` elsewhere. Each has the places of its axes."""

    conditions: tuple[tuple[Condition, Axes], ...]
    on: Any
    off: Any

    def where(self, value: Any) -> tuple[tuple[Condition, Axes], ...] | None:
        """Returns conditions that all hold where it is one of its numbers; None if there are none."""
        if self.on == value:
            return self.conditions
        ((condition, axes), *others) = self.conditions
        return None if others or self.off != value else ((condition.opposite, axes),)


class Scaled(NamedTuple):
    """A product of arrays times the power, 1 or -1, of another value; `axes` has the places of the axes of that."""

    product: Any
    by: Any
    axes: Axes
    power: int


class _LogSum(NamedTuple):
    """A term that is the logarithm of the sum along some axes of the exponential of terms."""

    terms: frozenset[tuple[tuple[Any, Axes], float]]
    along: frozenset[int]


class Form(NamedTuple):
    """A value as a sum of terms, or as the exponential of such a sum.

    Attributes:
        terms: by a term and the places of its axes, its factor. A term is a variable, a product that is `Scaled`, a
            `_LogSum`, None for 1, or a `Condition`: a mask, 0 where it holds, and elsewhere so small that its
            exponential is 0.
        is_exp: whether it is the exponential.
    """

    terms: Mapping[tuple[Any, Axes], float]
    is_exp: bool = False

    def plus(self, other: "Form", factor: float = 1) -> "Form | None":
        """Returns the form with a multiple of the terms of another; None if they do not go together."""
        if self.is_exp != other.is_exp or (factor < 0 and other.is_masked):
            return None
        terms = dict(self.terms)
        for key, each in other.terms.items():
            terms[key] = 1 if isinstance(key[0], Condition) else terms.get(key, 0) + factor * each
        return Form({key: each for key, each in terms.items() if each}, self.is_exp)

    def times(self, factor: float) -> "Form | None":
        """Returns a multiple of a sum of terms; None if a mask would become larger than it may be."""
        if self.is_exp or not np.isfinite(factor) or factor == 0:
            return self if factor == 1 else None
        if self.is_masked and factor < _LEAST_FACTOR:
            return None
        return Form({key: n if isinstance(key[0], Condition) else factor * n for key, n in self.terms.items()})

    @property
    def is_masked(self) -> bool:
        """Whether a term is a mask."""
        return any(isinstance(term, Condition) for term, _ in self.terms)

    def placed(self, places: Any) -> "Form":
        """Returns the form of the value with its axes moved."""
        return self._replace(terms={(term, placed(axes, places)): n for (term, axes), n in self.terms.items()})


class Reading(NamedTuple):
    """What is read of a value.

    Attributes:
        known: the line or the choice of two numbers that it is; None if it is neither.
        form: its form; None if it is not finite, or not floating.
    """

    known: Line | Choice | None
    form: Form | None

    @property
    def number(self) -> Any:
        """The number that all elements are; None if there is none, or it is not known."""
        return self.known.number if isinstance(self.known, Line) and not any(self.known.factors) else None


class Values:
    """The values of a program, each of which is read when it is asked for.

    Attributes:
        eqns: the equation that computes each variable.
        exponentials: the variables that are computed from an exponential by ops that are read.
    """

    def __init__(self, given: Mapping[Var, Line | Choice | None]) -> None:
        """Takes what is known of the inputs and the constants of the program."""
        self.eqns: dict[Any, Any] = {}
        self.exponentials: set[Any] = set()
        self._given, self._readings = dict[Var, Any](), dict[Var, Reading]()
        for var, known in given.items():
            self.give(var, known)

    def add(self, eqn: Any) -> None:
        """Adds an equation behind those that it reads."""
        self.eqns.update(dict.fromkeys(eqn.outvars, eqn))
        name = eqn.primitive.name
        if name in EXPONENTIALS or (
            name in _READ and any(isinstance(atom, Var) and atom in self.exponentials for atom in eqn.invars)
        ):
            self.exponentials.update(eqn.outvars)

    def give(self, var: Var, known: Line | Choice | None) -> None:
        """Says what is known of an input or a constant."""
        if isinstance(known, Choice):
            conditions = [(condition._replace(atom=var), axes) for condition, axes in known.conditions]
            known = known._replace(conditions=tuple(conditions))
        self._given[var] = known

    def name(self, atom: Any) -> str:
        """Returns the name of the primitive that computes a value; empty for an input or a constant."""
        eqn = self.eqns.get(atom) if isinstance(atom, Var) else None
        return "" if eqn is None else eqn.primitive.name

    def read(self, atom: Any) -> Reading:
        """Returns what is read of a value."""
        if isinstance(atom, Literal):
            known = known_of(atom.val, atom.aval)
            return Reading(known if isinstance(known, Line) else None, self._form(atom, known, []))
        waiting = [atom]
        while waiting:  # operands first; Python's recursion would end in a long chain of ops
            operands = self.eqns[waiting[-1]].invars if self.name(waiting[-1]) in _READ else ()
            unread = [x for x in operands if isinstance(x, Var) and x not in self._readings]
            if not unread and (var := waiting.pop()) not in self._readings:
                readings = list(map(self.read, operands))
                known = self._known(var, readings)
                self._readings[var] = Reading(known, self._form(var, known, readings))
            waiting += unread
        return self._readings[atom]

    def inside(self, atom: Any) -> Line | Choice | None:
        """Returns what is known of a value inside a body that it is passed to, where no other variable is known."""
        known = self.read(atom).known
        if not isinstance(known, Choice) or any(condition.lines is None for condition, _ in known.conditions):
            return known if isinstance(known, Line) else None
        rank = len(atom.aval.shape)
        lines = [line.placed(axes, rank) for condition, axes in known.conditions for line in condition.lines or ()]
        return Choice(((Condition(None, known.on, known.off, tuple(lines)), axes_of(atom)),), known.on, known.off)

    def _known(self, var: Var, readings: Sequence[Reading]) -> Line | Choice | None:
        """Returns what is known of a value, given what is read of the operands of its op."""
        eqn, rank, known = self.eqns.get(var), len(getattr(var.aval, "shape", ())), self._given.get(var)
        name = self.name(var)
        if name == "iota" and eqn is not None:
            known = Line(0, tuple([int(i == eqn.params["dimension"]) for i in range(rank)]))
        elif eqn is not None and readings:
            known = self._computed(eqn, name, rank, readings)
        if known is None and jx.dtype_of(var) == np.bool_:
            return Choice(((Condition(var, True, False), axes_of(var)),), True, False)
        return known

    def _computed(self, eqn: Any, name: str, rank: int, readings: Sequence[Reading]) -> Line | Choice | None:
        if (axes := _moved(eqn)) is not None:
            known = readings[0].known
            if isinstance(known, Line):
                is_rounded = not (known.is_whole or jx.is_floating(eqn.outvars[0]))
                return None if is_rounded else known.placed(axes, rank)
            moved = [(condition, placed(own, axes)) for condition, own in known.conditions] if known else []
            return known and known._replace(conditions=tuple(moved))
        numbers: list[Any] = [x.number for x in readings]
        each: list[Any] = [x.known for x in readings]
        unknown = [i for i, number in enumerate(numbers) if number is None]
        if not unknown:
            value = _fold(eqn, numbers)
            return None if value is None else Line(value, (0,) * rank)
        if name in _COMPARISONS and (compared := self._compared(eqn, name)) is not None:
            return compared
        match name, each:
            case (("add" | "sub"), [Line(), Line()]):
                return each[0].plus(each[1], 1 if name == "add" else -1)
            case "neg", [Line()]:
                return Line(0, (0,) * rank).plus(each[0], -1)
            case "mul", [Line(), Line()] if len(unknown) == 1:
                return Line(0, (0,) * rank).plus(each[unknown[0]], numbers[1 - unknown[0]])
            case (("and" | "or"), [Choice(), Choice()]):
                return _all(name == "and", *each)
            case "select_n", [Choice(), *cases] if False in numbers[1:] and jx.dtype_of(eqn.outvars[0]) == np.bool_:
                i = numbers.index(False, 1)  # `flag & x`, as `jnp.tril` writes it
                if isinstance(other := cases[2 - i], Choice):
                    conditions = each[0].where(i == 1)
                    return _all(True, Choice(conditions, True, False), other) if conditions else None
        if len(unknown) == 1 and isinstance(choice := each[unknown[0]], Choice):
            i = unknown[0]
            on, off = (_fold(eqn, [*numbers[:i], end, *numbers[i + 1 :]]) for end in (choice.on, choice.off))
            if on is not None and off is not None:
                return Line(on, (0,) * rank) if on == off else choice._replace(on=on, off=off)
        return None

    def _compared(self, eqn: Any, name: str) -> Choice | None:
        """Returns a comparison of indices with each other, or with a number of keys, as where it is true, or false."""
        (var,) = eqn.outvars
        for keep, relation in ((True, name), (False, _COMPARISONS[name])):
            a, b = eqn.invars if relation in ("lt", "le", "eq") else eqn.invars[::-1]
            is_strict, x, y = relation in ("lt", "gt"), self.read(a).known, self.read(b).known
            lines, length = list[Line](), None
            if self.name(a) == "abs" and isinstance(y, Line):  # `abs(i - j) <= n`
                x = self.read(self.eqns[a].invars[0]).known
                lines = [y.plus(x, sign) for sign in (1, -1)] if isinstance(x, Line) else []
            elif isinstance(x, Line) and relation not in ("eq", "ne"):
                lines = [y.plus(x, -1)] if isinstance(y, Line) else []
                if x.is_whole and sorted(x.factors) == [0] * (len(x.factors) - 1) + [1]:
                    length = *self._source(b), int(not is_strict) - int(x.number), x.factors.index(1)
            elif isinstance(x, Line) and isinstance(y, Line) and relation == "eq":
                lines = [y.plus(x, -1), x.plus(y, -1)]
            lines = [Line(line.number - is_strict, line.factors or (0,) * len(axes_of(var))) for line in lines]
            found = tuple(lines) if all(line.is_whole for line in lines) else ()
            if found or length:
                return Choice(((Condition(var, keep, not keep, found or None, length), axes_of(var)),), keep, not keep)
        return None

    def _source(self, atom: Any) -> tuple[Any, Axes]:
        """Returns a value before it was only moved, and the places of its axes."""
        axes = axes_of(atom)
        while isinstance(atom, Var) and atom in self.eqns and (moved := _moved(self.eqns[atom])) is not None:
            (before,) = self.eqns[atom].invars
            if jx.is_floating(before) != jx.is_floating(atom) or jx.dtype_of(before) == np.bool_:
                break
            atom, axes = before, placed(moved, axes)
        return atom, axes

    def _form(self, atom: Any, known: Any, readings: Sequence[Reading]) -> Form | None:
        """Returns the form of a value; one of which nothing is known is a term of its own."""
        if not jx.is_floating(atom):
            return None
        if isinstance(known, Line) and not any(known.factors):
            return (
                Form({(None, ()): float(known.number)} if known.number else {}) if np.isfinite(known.number) else None
            )
        if isinstance(atom, Literal):
            return None
        form = self._derived(self.eqns[atom], readings) if readings else None
        if isinstance(known, Choice) and (mask := _mask(known, atom, 0, lambda n: n <= _MASKED)) is not None:
            return Form(mask)
        # A sum that holds no scores is one term: `(1 - mask) * -1e9` would lose them as `1e9 * mask - 1e9`.
        is_kept = form is not None and (
            form.is_exp or any(isinstance(term, Condition | _LogSum) or self.is_product(term) for term, _ in form.terms)
        )
        return form if is_kept else Form({(atom, axes_of(atom)): 1})

    def is_product(self, term: Any) -> bool:
        """Whether a term is a product of arrays."""
        return isinstance(term, Scaled) or self.name(term) == "dot_general"

    def _derived(self, eqn: Any, readings: Sequence[Reading]) -> Form | None:
        name, numbers = eqn.primitive.name, [x.number for x in readings]
        forms: list[Any] = [x.form for x in readings]
        if (axes := _moved(eqn)) is not None:
            return forms[0] and forms[0].placed(axes)
        match name, forms:
            case (("exp" | "exp2"), [Form(_, False)]):
                form = forms[0].times(EXPONENTIALS[name])
                return form and form._replace(is_exp=True)
            case "log", [Form(terms, True)]:
                return Form(terms)
            case "abs", [Form(_, True)]:
                return forms[0]
            case "neg", [Form(_, False)]:
                return Form({}).plus(forms[0], -1)
            case (("add" | "add_any"), [Form(_, False), Form()]):
                return forms[0].plus(forms[1])
            case "sub", [Form(_, False), Form()]:
                return forms[0].plus(forms[1], -1)
            case "div", [Form(_, True), Form()]:
                return forms[0].plus(forms[1], -1)
            case "div", [_, Form(_, True)] if numbers[0] == 1:
                return Form({}, True).plus(forms[1], -1)
            case "integer_pow", [Form(_, True)] if eqn.params["y"] == -1:
                return Form({}, True).plus(forms[0], -1)
            case (("mul" | "div"), [Form(), Form()]):
                return self._multiplied(eqn, readings)
            case "reduce_sum", [Form(_, True)]:
                return _summed(forms[0], eqn)
            case "select_n", [_, *cases] if len(cases) == 2:
                for i, fill in enumerate(numbers[1:]):
                    kept, flags = cases[1 - i], readings[0].known
                    if fill is not None and kept is not None and (fill == 0 if kept.is_exp else fill <= _MASKED):
                        mask = _mask(flags, eqn.invars[0], i == 0, lambda n: True)
                        return kept.plus(Form(mask, kept.is_exp)) if mask else None
        return None

    def _multiplied(self, eqn: Any, readings: Sequence[Reading]) -> Form | None:
        """Returns the product or the quotient of two forms, one of which is a number, flags, or a temperature."""
        forms: list[Any] = [x.form for x in readings]
        is_divided = eqn.primitive.name == "div"
        if forms[0].is_exp and forms[1].is_exp and not is_divided:
            return forms[0].plus(forms[1])
        for i in (0,) if is_divided else (0, 1):
            form, by, other = forms[i], readings[1 - i].number, eqn.invars[1 - i]
            if by is not None:
                return form.times(1 / by if is_divided else by) if by else None
            if form.is_exp and isinstance(flags := readings[1 - i].known, Choice):  # as numbers: `weights * mask`
                mask = _mask(flags, other, 1, lambda n: n == 0)
                return form.plus(Form(mask, is_exp=True)) if mask else None
            (((term, axes), n), *rest) = form.terms.items() or [((None, ()), 0)]
            source, its_axes = self._source(other)
            if not (rest or form.is_exp) and self.name(term) == "dot_general" and {*its_axes} <= {*axes, None}:
                places = placed(its_axes, {place: i for i, place in enumerate(axes)})
                return Form({(Scaled(term, source, places, 1 - 2 * is_divided), axes): n})
        return None


def _moved(eqn: Any) -> Axes | None:
    """Returns the places of the axes of a value whose elements an op moves; None for an op that does more."""
    if eqn.primitive.name not in _LAYOUTS | _COPIES or len(eqn.invars) != 1:
        return None
    (before,), (after,) = eqn.invars, eqn.outvars
    if eqn.primitive.name in _COPIES:
        return axes_of(before)
    shape, new, places = before.aval.shape, after.aval.shape, dict[int, int]()
    for axis in varying(shape):
        found = rule_of(eqn).move_axes(eqn.params, shape, new, frozenset({axis})) or ()
        if len(found) != 1 or new[min(found)] != shape[axis]:
            return None
        places[axis] = min(found)
    return placed(axes_of(before), places) if len({*places.values()}) == len(places) else None


def known_of(value: Any, aval: Any) -> Line | Choice | None:
    """Returns what is known of a constant: whether it is one number, a range of them, or a band of a matrix."""
    is_read = not isinstance(value, jax.core.Tracer) and hasattr(aval, "shape") and math.prod(aval.shape) <= _LARGEST
    if not is_read or jnp.issubdtype(aval.dtype, jax.dtypes.extended) or jnp.iscomplexobj(value) or not np.size(value):
        return None
    x = np.asarray(value)
    low, high = x.min().item(), x.max().item()
    if low == high:
        return Line(low, (0,) * x.ndim)
    axes = sorted(varying(x.shape))
    if len(axes) == 1 and x.dtype != np.bool_:  # such as `jnp.arange(n)`
        first, step = x.flat[0].item(), x.flat[1].item() - x.flat[0].item()
        is_line = np.array_equal(x.ravel(), first + step * np.arange(x.size))
        return Line(first, (step,)).placed(tuple(axes), x.ndim) if is_line else None
    if len(axes) != 2 or not ((x == high) | (x == low)).all():
        return None
    for on, off in ((high, low), (low, high)):
        matrix = (x == on).reshape([x.shape[axis] for axis in axes])
        rows, columns = np.nonzero(matrix)
        offset = np.arange(matrix.shape[1]) - np.arange(matrix.shape[0])[:, None]
        most, least = (columns - rows).max().item(), (columns - rows).min().item()
        if np.array_equal(matrix, (offset <= most) & (offset >= least)):
            lines = Line(most, (1, -1)), Line(-least, (-1, 1))
            band = Condition(None, on, off, tuple([line.placed(tuple(axes), x.ndim) for line in lines]))
            return Choice(((band, axes_of(x)),), on, off)
    return None


def _fold(eqn: Any, numbers: Sequence[Any]) -> Any:
    """Returns what an op computes from numbers; None if that is not known."""
    with np.errstate(all="ignore"):
        if eqn.primitive.name in _FOLDS:
            return _FOLDS[eqn.primitive.name](*numbers)
        fold = rule_of(eqn).fold
        return None if fold is None else fold(*numbers)


def _all(value: bool, *flags: Choice) -> Choice | None:
    """Returns flags that are `value` where all of several flags are."""
    each = [flag.where(value) for flag in flags]
    return None if None in each else Choice(sum(filter(None, each), ()), value, not value)


def _mask(known: Any, atom: Any, kept: Any, is_fill: Callable[[Any], bool]) -> dict[tuple[Any, Axes], float] | None:
    """Returns a choice of `kept` and a fill value as the terms of a mask; None if it is none."""
    for value, fill in ((known.on, known.off), (known.off, known.on)) if isinstance(known, Choice) else ():
        if value == kept and fill != kept and is_fill(fill):
            return dict.fromkeys(known.where(value) or [(Condition(atom, value, fill), axes_of(atom))], 1)
    return None


def _summed(form: Form, eqn: Any) -> Form | None:
    """Returns the sum of exponentials along axes: of the terms that vary along them, and of all masks."""
    before, axes = eqn.invars[0], eqn.params["axes"]
    along = varying(before.aval.shape) & frozenset(map(int, axes))
    inside = {key: n for key, n in form.terms.items() if isinstance(key[0], Condition) or along & set(key[1])}
    if not along <= {axis for _, places in inside for axis in places}:
        return None
    kept = [axis for axis in range(len(before.aval.shape)) if axis not in axes]
    places = {axis: kept.index(axis) for axis in kept}
    rest = Form({key: n for key, n in form.terms.items() if key not in inside}, is_exp=True).placed(places)
    sums = _LogSum(frozenset(inside.items()), along), tuple([places.get(axis) for axis in axes_of(before)])
    return rest.plus(Form({sums: 1}, is_exp=True))


def softmax_of(form: Form | None) -> tuple[Form, frozenset[int]] | None:
    """Returns the scores of a softmax, and the axes that it sums along; None if a form is no softmax."""
    sums = [key for key, n in form.terms.items() if isinstance(key[0], _LogSum) and n == -1] if form else []
    if form is None or not form.is_exp or len(sums) != 1:
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
