"""Reads values of a program as softmaxes of terms, however they are written.

What is read of a value goes forward from what is read of the operands of its op. It is a `Form`, a sum of terms or the
exponential of one, or a `Choice` of two numbers, as a mask is. A sum of exponentials is the exponential of a `_LogSum`,
a term that is constant along the axes that it sums, as is the largest score that a softmax subtracts. So the form of
every softmax is the exponential of `scores - logsum(scores)`.

A mask is a term as well. Comparisons of sums of indices say which elements it keeps, without computing it. Ops that
only move elements, or copy them, move the axes of terms.

In `jax.nn.softmax(jnp.where(jnp.tri(n, dtype=bool), q @ k.T / 8, -1e9))`:

- `q @ k.T / 8` is `Form({(product, (0, 1)): 1 / 8})`: one term along both axes, times a number;
- the mask compares an index along axis 0 with one along axis 1, so its condition has the line `i - j`, which is not
  negative where it holds: `jnp.where(...)` is `Form({(product, (0, 1)): 1 / 8, (condition, (0, 1)): 1})`;
- the exponential of that has the same terms, and `is_exp`;
- its sum along axis 1 is the exponential of `Form({(_LogSum(scores, {1}), (0, None)): 1})`, one term along axis 0;
- their quotient has all three terms, the last one times -1: `softmax_of` finds that its `_LogSum` is of the others, and
  returns these and axis 1. From the line, `_pattern` reads `is_causal=True`.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._ops import rule_of, varying

Places = tuple[Any, ...]  # for each axis of an array, that in another; None for an axis of one element

INDEX = "index"  # the term that is the index along its axis
ONE = None, ()  # the term 1, and its axes
_LARGEST = 2**26  # elements of a constant in which a mask is looked for
_MASKED = -1e4  # the exponential of a score that is this much smaller is 0
_LEAST_FACTOR = 2.0**-7  # that a mask may be multiplied by
_LAYOUTS = {"broadcast_in_dim", "reshape", "squeeze", "transpose"}
_COPIES = {"convert_element_type", "copy", "name", "sharding_constraint", "device_put", "pvary", "reshard"}
_COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_FOLDS: dict[str, Callable[..., Any]] = {"not": operator.not_, "and": np.logical_and, "or": np.logical_or}
_FOLDS |= {**_COMPARISONS, "select_n": lambda which, *cases: cases[int(which)]}
_OF_LINES = {"add", "sub", "mul", "neg"}
# By an op, and whether each of its operands is an exponential: the factors of their terms in the result, and whether
# that is an exponential.
_COMBINED: dict[tuple[Any, ...], tuple[tuple[float, ...], bool]] = {
    ("neg", False): ((-1,), False),
    ("add", False, False): ((1, 1), False),
    ("add_any", False, False): ((1, 1), False),
    ("sub", False, False): ((1, -1), False),
    ("exp", False): ((1,), True),
    ("exp2", False): ((math.log(2),), True),
    ("mul", True, True): ((1, 1), True),
    ("div", True, True): ((1, -1), True),
    ("abs", True): ((1,), True),
    ("log", True): ((1,), False),
}
EXPONENTIALS = {"exp", "exp2"}
_READ = {"log", "abs", "neg", "add", "add_any", "sub", "mul", "div", "integer_pow", "reduce_sum", "max", "sqrt"}
_READ |= {"rsqrt", "pow", *EXPONENTIALS, *_LAYOUTS, *_COPIES, *_FOLDS}


def axes_of(x: Any) -> Places:
    """Returns the axes of a variable or an array themselves."""
    return tuple([i if n != 1 else None for i, n in enumerate(getattr(x, "aval", x).shape)])


def placed(axes: Places, places: Any) -> Places:
    """Returns the places of axes after these have been moved."""
    return tuple([None if axis is None else places[axis] for axis in axes])


class Form(NamedTuple):
    """A value as a sum of terms, or as the exponential of such a sum.

    Attributes:
        terms: by a term and the places of its axes, its factor. A term is a variable, a product that is `Scaled`, a
            `_LogSum`, `INDEX`, None for 1, or a `Condition`: a mask, 0 where it holds, and elsewhere so small that its
            exponential is 0.
        is_exp: whether it is the exponential.
    """

    terms: Mapping[tuple[Any, Places], Any]
    is_exp: bool = False

    def __hash__(self) -> int:
        return hash((frozenset(self.terms.items()), self.is_exp))

    def plus(self, other: "Form", factor: float = 1) -> "Form":
        """Returns the form with a multiple of the terms of another; masks stay as they are."""
        terms = dict(self.terms)
        for key, n in other.terms.items():
            terms[key] = 1 if isinstance(key[0], Condition) else terms.get(key, 0) + factor * n
        return Form({key: n for key, n in terms.items() if n}, self.is_exp)

    def times(self, factor: float) -> "Form | None":
        """Returns the form with a multiple of its terms; None if a mask would become larger than it may be."""
        if not np.isfinite(factor) or factor == 0 or (self._has(Condition) and factor < _LEAST_FACTOR):
            return None
        terms = {key: n if isinstance(key[0], Condition) else factor * n for key, n in self.terms.items()}
        return Form(terms, self.is_exp)

    def placed(self, places: Any) -> "Form":
        """Returns the form of the value with its axes moved."""
        return self._replace(terms={(term, placed(axes, places)): n for (term, axes), n in self.terms.items()})

    def _has(self, kind: Any) -> bool:
        return any(isinstance(term, kind) for term, _ in self.terms)

    @property
    def number(self) -> Any:
        """The number that all elements are; None if it has other terms."""
        return self.terms.get(ONE, 0) if not self.is_exp and self.terms.keys() <= {ONE} else None

    @property
    def is_line(self) -> bool:
        """Whether it is a sum of indices and of a number."""
        return not self.is_exp and all(term is None or term is INDEX for term, _ in self.terms)

    @property
    def is_whole(self) -> bool:
        """Whether it is a sum of integers: of indices, variables and a number."""
        variables = [term for term, _ in self.terms if term not in (None, INDEX)]
        is_whole = all(isinstance(x, Var) and jnp.issubdtype(jx.dtype_of(x), jnp.integer) for x in variables)
        return is_whole and not (self.is_exp or any(n % 1 for n in self.terms.values()))


def mask_of(condition: Any, axes: Places) -> Form:
    """Returns a mask that has one condition."""
    return Form({(condition, axes): 1})


def line_of(number: Any, factors: Mapping[int, Any] | None = None) -> Form:
    """Returns the sum of a number and of indices times factors."""
    terms: dict[Any, Any] = {ONE: number, **{(INDEX, (axis,)): n for axis, n in (factors or {}).items()}}
    return Form({key: n for key, n in terms.items() if n})


class Condition(NamedTuple):
    """Says of each element of a value whether it is one number or another.

    Attributes:
        atom: the value.
        keep: the number where the condition holds.
        other: the number elsewhere.
        lines: sums of indices, and of a variable, none of which is negative where it holds; empty if these are not
            known.
    """

    atom: Any
    keep: Any
    other: Any
    lines: tuple[Form, ...] = ()

    @property
    def opposite(self) -> "Condition":
        """The condition that holds where this one does not."""
        negative = [line_of(-1).plus(line, -1) for line in self.lines if len(self.lines) == 1]
        return Condition(self.atom, self.other, self.keep, tuple(negative))


class Choice(NamedTuple):
    """A value that is `on` where all conditions of a mask hold, and `off` elsewhere."""

    mask: Form
    on: Any
    off: Any

    def placed(self, places: Any) -> "Choice":
        """Returns the choice with its axes moved."""
        return self._replace(mask=self.mask.placed(places))


class Scaled(NamedTuple):
    """A product of arrays times the power, 1 or -1, of another value; `axes` has the places of the axes of that."""

    product: Any
    by: Any
    axes: Places
    power: int


class _LogSum(NamedTuple):
    """A term that is the logarithm of the sum of an exponential along some axes."""

    form: Form
    along: frozenset[int]


class Reading(NamedTuple):
    """What is read of a value.

    Attributes:
        known: the form or the choice that it is; None if it is a term of its own.
        atom: what it was before it was only moved.
        axes: the places of the axes of that.
    """

    known: Form | Choice | None
    atom: Any
    axes: Places

    @property
    def number(self) -> Any:
        """The number that all elements are; None if there is none, or it is not known."""
        return self.known.number if isinstance(self.known, Form) else None

    @property
    def line(self) -> Form:
        """The value as a sum of indices and a number, or as a term of its own."""
        known = self.known
        return known if isinstance(known, Form) and known.is_line else Form({(self.atom, self.axes): 1})

    @property
    def form(self) -> Form | None:
        """The value as a part of scores or weights, in which indices are a term; None if it is not finite."""
        if not (jx.is_floating(self.atom) and np.isfinite(self.number or 0)):
            return None
        if isinstance(self.known, Form) and (self.number is not None or not self.known.is_line):
            return self.known
        return self.mask(0, lambda n: n <= _MASKED) or Form({(self.atom, self.axes): 1})

    def mask(self, kept: Any, is_fill: Callable[[Any], bool] = lambda n: True) -> Form | None:
        """Returns a mask that holds where the value is `kept`; None if it is no choice of that and a fill value."""
        known = self.known
        if not isinstance(known, Choice) or kept not in (known.on, known.off):
            return None
        mask, fill = (known.mask, known.off) if known.on == kept else (self._opposite(known), known.on)
        return mask if is_fill(fill) else None

    def _opposite(self, known: Choice) -> Form:
        ((condition, axes), *others) = known.mask.terms
        if others:
            condition, axes = Condition(self.atom, known.on, known.off), self.axes
        return mask_of(condition.opposite, axes)

    def moved(self, places: Places, var: Var) -> "Reading":
        """Returns what is read of a variable that has the same elements elsewhere, maybe in another dtype."""
        known = self.known and self.known.placed(places)
        if isinstance(known, Form) and not (jx.is_floating(var) or known.is_whole):
            known = None
        if jx.is_floating(self.atom) != jx.is_floating(var) or jx.dtype_of(self.atom) == np.bool_:
            return Reading(known, var, axes_of(var))
        return Reading(known, self.atom, placed(self.axes, places))


class Expressions:
    """The values of a program, each of which is read when it is asked for.

    Attributes:
        eqns: the equation that computes each variable.
        constants: the constant that each other variable is, if it is one.
        exponentials: the variables that are computed from an exponential by ops that are read.
    """

    def __init__(self) -> None:
        self.eqns: dict[Any, Any] = {}
        self.constants: dict[Var, Any] = {}
        self.exponentials: set[Any] = set()
        self._readings: dict[Any, Reading] = {}

    def add(self, eqn: Any, reads: Sequence[Var]) -> None:
        """Adds an equation behind those that compute the variables that it reads."""
        self.eqns.update(dict.fromkeys(eqn.outvars, eqn))
        name = eqn.primitive.name
        if name in EXPONENTIALS or (name in _READ and not self.exponentials.isdisjoint(reads)):
            self.exponentials.update(eqn.outvars)

    def define(self, var: Var, x: Any) -> None:
        """Adds a constant."""
        self.constants[var] = x
        self.give(var, known_of(x, var.aval))

    def give(self, var: Var, known: Form | Choice | None) -> None:
        """Says what is known of an input or a constant."""
        if isinstance(known, Choice):
            mask = Form({(condition._replace(atom=var), axes): 1 for condition, axes in known.mask.terms})
            known = known._replace(mask=mask)
        if known is not None:
            self._readings[var] = Reading(known, var, axes_of(var))

    def name(self, atom: Any) -> str:
        """Returns the name of the primitive that computes a value; empty for an input or a constant."""
        eqn = self.eqns.get(atom) if isinstance(atom, Var) else None
        return "" if eqn is None else eqn.primitive.name

    def is_product(self, term: Any) -> bool:
        """Whether a term is a product of arrays."""
        return isinstance(term, Scaled) or self.name(term) == "dot_general"

    def inside(self, atom: Any) -> Form | Choice | None:
        """Returns what is known of a value inside a body that it is passed to, where no other variable is known."""
        known = self.read(atom).known
        if not isinstance(known, Choice):
            return known if known and known.is_line else None
        lines = [line.placed(axes) for condition, axes in known.mask.terms for line in condition.lines]
        is_known = all(condition.lines for condition, _ in known.mask.terms) and all(line.is_line for line in lines)
        merged = Condition(None, known.on, known.off, tuple(lines))
        return known._replace(mask=mask_of(merged, axes_of(atom))) if is_known else None

    def read(self, atom: Any) -> Reading:
        """Returns what is read of a value."""
        if isinstance(atom, Literal):
            return Reading(known_of(atom.val, atom.aval), atom, ())
        waiting = [atom]
        while waiting:  # operands first; Python's recursion would end in a long chain of ops
            operands = self.eqns[waiting[-1]].invars if self.name(waiting[-1]) in _READ else ()
            unread = [x for x in operands if isinstance(x, Var) and x not in self._readings]
            if not unread and (var := waiting.pop()) not in self._readings:
                self._readings[var] = self._read(var, list(map(self.read, operands)))
            waiting += unread
        return self._readings[atom]

    def _read(self, var: Var, operands: Sequence[Reading]) -> Reading:
        """Reads a value, given what is read of the operands of its op."""
        eqn, known = self.eqns.get(var), None
        if eqn is not None and operands:
            if (places := _moved(eqn)) is not None:
                return operands[0].moved(places, var)
            known = self._computed(eqn, operands)
        elif eqn is not None and eqn.primitive.name == "iota":
            axis = eqn.params["dimension"]
            known = line_of(0, {axis: int(eqn.params["shape"][axis] != 1)})
        if known is None and jx.dtype_of(var) == np.bool_:
            known = Choice(mask_of(Condition(var, True, False), axes_of(var)), True, False)
        return Reading(known, var, axes_of(var))

    def _computed(self, eqn: Any, operands: Sequence[Reading]) -> Form | Choice | None:
        choices = [x.known for x in operands if isinstance(x.known, Choice)]
        ends = [(x.known.on, x.known.off) if isinstance(x.known, Choice) else (x.number,) * 2 for x in operands]
        if len(choices) < 2 and not any(None in each for each in ends):
            on, off = (_fold(eqn, each) for each in zip(*ends, strict=True))
            if on is not None and off is not None:
                return choices[0]._replace(on=on, off=off) if choices and on != off else line_of(on)
        name = eqn.primitive.name
        if name in _COMPARISONS:
            return self._compared(eqn, *operands)
        if name in ("and", "or"):
            return _all(name == "and", *[x.mask(name == "and") for x in operands])
        if name == "select_n":
            return _selected(eqn, *operands) if len(operands) == 3 else None
        return self._sum(eqn, operands)

    def _compared(self, eqn: Any, low: Reading, high: Reading) -> Choice | None:
        """Returns a comparison of sums of indices, and of a number of keys, as where it is true, or false."""
        (var,), name = eqn.outvars, eqn.primitive.name
        if name in ("gt", "ge"):
            low, high = high, low
        lines = [high.line.plus(low.line, -1)]
        if name in ("eq", "ne"):
            lines.append(low.line.plus(high.line, -1))
        elif self.name(low.atom) == "abs":  # `abs(i - j) <= n`
            inside = self.read(self.eqns[low.atom].invars[0]).line.placed(low.axes)
            lines = [high.line.plus(inside, sign) for sign in (-1, 1)]
        if name in ("lt", "gt"):
            lines = [line.plus(line_of(-1)) for line in lines]
        if not all(line.is_whole for line in lines):
            return None
        keep = name != "ne"
        return Choice(mask_of(Condition(var, keep, not keep, tuple(lines)), axes_of(var)), keep, not keep)

    def _sum(self, eqn: Any, operands: Sequence[Reading]) -> Form | None:
        """Returns the result of an op as a sum of terms, or an exponential; None if it is a term of its own."""
        name = eqn.primitive.name
        is_line = name in _OF_LINES and all(x.line.is_line for x in operands)
        forms: list[Any] = [x.line if is_line else x.form for x in operands]
        if None in forms:
            return None
        form, key = None, (name, *[x.is_exp for x in forms])
        if key in _COMBINED:
            factors, is_exp = _COMBINED[key]
            terms: list[Any] = list(map(Form.times, forms, factors))
            form = None if None in terms else functools.reduce(Form.plus, terms)._replace(is_exp=is_exp)
        elif forms[-1].is_exp and (eqn.params.get("y") == -1 or (name == "div" and operands[0].number == 1)):
            form = forms[-1].times(-1)
        elif name == "mul":
            form = self._scaled(forms[0], operands[1], 1) or self._scaled(forms[1], operands[0], 1)
        elif name == "div" and not forms[0].is_exp:
            form = self._scaled(forms[0], operands[1], -1)
        elif name == "reduce_sum" and forms[0].is_exp:
            form = _summed(forms[0], eqn)
        # A sum that holds no scores is one term: `(1 - mask) * -1e9` would lose them as `1e9 * mask - 1e9`.
        if form is None or is_line or form.is_exp:
            return form
        is_kept = any(isinstance(term, Condition | _LogSum) or self.is_product(term) for term, _ in form.terms)
        return form if is_kept else None

    def _scaled(self, form: Form, other: Reading, power: int) -> Form | None:
        """Returns a form times a power of a number, of flags, or of a temperature; None if a value is none of these."""
        by = other.number
        if form.is_exp:
            mask = other.mask(1, lambda n: n == 0)  # flags as numbers: `weights * mask`
            return form if by == 1 else mask and form.plus(mask._replace(is_exp=True))
        if by is not None:
            return form.times(by**power) if by else None
        (((term, axes), n), *others) = form.terms.items() or [(ONE, 0)]
        if others or self.name(term) != "dot_general" or not {*other.axes} <= {*axes, None}:
            return None
        places = placed(other.axes, {place: i for i, place in enumerate(axes)})
        return Form({(Scaled(term, other.atom, places, power), axes): n})


def _moved(eqn: Any) -> Places | None:
    """Returns the places of the axes of a value whose elements an op moves; None for an op that does more."""
    if eqn.primitive.name not in _LAYOUTS | _COPIES or len(eqn.invars) != 1:
        return None
    (before,), (after,) = eqn.invars, eqn.outvars
    shape, new, places = before.aval.shape, after.aval.shape, dict[int, int]()
    for axis in varying(shape):
        found = rule_of(eqn).move_axes(eqn.params, shape, new, frozenset({axis})) or ()
        if len(found) != 1 or new[min(found)] != shape[axis]:
            return None
        places[axis] = min(found)
    return placed(axes_of(before), places) if len({*places.values()}) == len(places) else None


def known_of(value: Any, aval: Any) -> Form | Choice | None:
    """Returns what is known of a constant: whether it is one number, a range of them, or a band of a matrix."""
    is_read = not isinstance(value, jax.core.Tracer) and hasattr(aval, "shape") and math.prod(aval.shape) <= _LARGEST
    if not is_read or jnp.issubdtype(aval.dtype, jax.dtypes.extended) or jnp.iscomplexobj(value) or not np.size(value):
        return None
    x = np.asarray(value)
    low, high = x.min().item(), x.max().item()
    if low == high or x.size == 1:
        return line_of(low)
    axes = sorted(varying(x.shape))
    if len(axes) == 1 and x.dtype != np.bool_:  # such as `jnp.arange(n)`; two numbers may be any
        first, step = x.flat[0].item(), x.flat[1].item() - x.flat[0].item()
        is_range = x.size > 2 and abs(step) == 1 and np.array_equal(x.ravel(), first + step * np.arange(x.size))
        return line_of(first, {axes[0]: step}) if is_range else None
    if len(axes) != 2 or not ((x == high) | (x == low)).all():
        return None
    for on, off in ((high, low), (low, high)):
        matrix: Any = (x == on).reshape([x.shape[axis] for axis in axes])
        (n, m), (rows, columns) = matrix.shape, np.nonzero(matrix)
        most, least = (columns - rows).max().item(), (columns - rows).min().item()
        if np.array_equal(matrix, np.tri(n, m, most) > np.tri(n, m, least - 1)):
            i, j = axes
            lines = line_of(most, {i: 1, j: -1}), line_of(-least, {i: -1, j: 1})
            return Choice(mask_of(Condition(None, on, off, lines), axes_of(x)), on, off)
    return None


def _fold(eqn: Any, numbers: Sequence[Any]) -> Any:
    """Returns what an op computes from numbers; None if that is not known."""
    name = eqn.primitive.name
    fold = _FOLDS[name] if name in _FOLDS else rule_of(eqn).fold
    with np.errstate(all="ignore"):
        return None if fold is None else fold(*numbers)


def _all(value: bool, *masks: Any) -> Choice | None:
    """Returns flags that are `value` where all masks hold."""
    return None if None in masks else Choice(functools.reduce(Form.plus, masks), value, not value)


def _selected(eqn: Any, which: Reading, *cases: Reading) -> Form | Choice | None:
    """Returns scores, weights or flags with a fill value where flags say so."""
    for (fill, kept), value in ((cases, True), (cases[::-1], False)):
        mask, form, number = which.mask(value), kept.form, fill.number
        if mask is None or number is None:
            continue
        if jx.dtype_of(eqn.outvars[0]) == np.bool_ and number == 0:  # `flag & x`, as `jnp.tril` writes it
            return _all(True, mask, kept.mask(True))
        if form is not None and (number == 0 if form.is_exp else number <= _MASKED):
            return form.plus(mask._replace(is_exp=form.is_exp))
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
    total = (
        _LogSum(Form(inside), along),
        placed(axes_of(before), {i: places.get(i) for i in range(len(before.aval.shape))}),
    )
    return rest.plus(Form({total: 1}, is_exp=True))


def softmax_of(form: Form | None) -> tuple[Form, frozenset[int]] | None:
    """Returns the scores of a softmax, and the axes that it sums along; None if a form is no softmax."""
    sums = [key for key, n in form.terms.items() if isinstance(key[0], _LogSum) and n == -1] if form else []
    if form is None or not form.is_exp or len(sums) != 1:
        return None
    (total, outer), scores = sums[0], {key: n for key, n in form.terms.items() if key != sums[0]}
    places = dict(enumerate(outer))
    for term, inner in total.form.terms:
        for own in [axes for each, axes in scores if each == term]:
            places |= {axis: place for axis, place in zip(inner, own, strict=True) if axis in total.along}
    is_same = total.form.placed(places).terms == scores
    return (Form(scores), frozenset([places[axis] for axis in total.along])) if is_same else None
