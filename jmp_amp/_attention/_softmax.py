"""Reads values of a program as softmaxes of terms, however they are written.

What is read of a value goes forward from what is read of the operands of its op. It is one of two:

- its `Elements`, if it depends on indices and constants alone, or on flags: NumPy computes them;
- a `Form`, a sum of terms or the exponential of one.

A sum of exponentials is the exponential of a `_LogSum`, a term that is constant along the axes that it sums, as is the
largest score that a softmax subtracts. So the form of every softmax is the exponential of `scores - logsum(scores)`.

A mask is a term as well: the condition that its flags have one value. Ops that only move elements, or copy them, move
the axes of terms.

In `jax.nn.softmax(jnp.where(jnp.tri(n, dtype=bool), q @ k.T / 8, -1e9))`:

- `q @ k.T / 8` is `Form({(product, (0, 1)): 1 / 8})`: one term along both axes, times a number;
- the flags compare an index along axis 0 with one along axis 1, so that they are computed, for each difference of the
  two; `jnp.where(...)` is `Form({(product, (0, 1)): 1 / 8, (condition, (0, 1)): 1})`;
- the exponential of that has the same terms, and `is_exp`;
- its sum along axis 1 is the exponential of `Form({(_LogSum(scores, {1}), (0, None)): 1})`, one term along axis 0;
- their quotient has all three terms, the last one times -1: `softmax_of` finds that its `_LogSum` is of the others, and
  returns these and axis 1. The flags are true from difference 0 on, so `_pattern` says `is_causal=True`.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._ops import rule_of, varying

Places = tuple[Any, ...]  # for each axis of an array, that in another; None for an axis of one element

ONE = None, ()  # the term 1, and its axes
_LARGEST = 2**26  # elements of a constant that are read
_MASKED = -1e4  # the exponential of a score that is this much smaller is 0
_LEAST_FACTOR = 2.0**-7  # that a mask may be multiplied by
_LAYOUTS = {"broadcast_in_dim", "reshape", "squeeze", "transpose"}
_COPIES = {"convert_element_type", "copy", "name", "sharding_constraint", "device_put", "pvary", "reshard"}
_COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
_COMPARISONS |= {"eq": np.equal, "ne": np.not_equal}
# What NumPy computes beside the ops that have a `fold` in the table of primitives.
_FOLDS: dict[str, Callable[..., Any]] = {"not": np.invert, "and": np.bitwise_and, "or": np.bitwise_or, **_COMPARISONS}
_FOLDS["select_n"] = lambda which, *cases: np.choose(np.asarray(which, int), cases)
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


def _is_flag(x: Any) -> bool:
    return jx.dtype_of(x) == np.bool_


def axes_of(x: Any) -> Places:
    """Returns the axes of a variable or an array themselves."""
    return tuple([i if n != 1 else None for i, n in enumerate(getattr(x, "aval", x).shape)])


def placed(axes: Places, places: Any) -> Places:
    """Returns the places of axes after these have been moved."""
    return tuple([None if axis is None else places[axis] for axis in axes])


class Elements(NamedTuple):
    """The elements of a value that depends on indices and constants alone, or on flags, without those that repeat.

    A mask of 32,768 queries and keys has 10**9 elements. If it depends on the difference of two indices, it is computed
    for each difference, of which there are 65,535.

    Attributes:
        array: the elements.
        along: no axis, if all elements are one number; the axis along which the elements are; or two axes of n and m
            elements, and the elements are those for the differences 1 - m to n - 1 of the indices along them.
        mask: None if the value depends on indices and constants alone. If it depends on flags, its two elements are in
            `array`: the one where the mask does not hold, and the one where it does.
    """

    array: Any
    along: Places = ()
    mask: Any = None

    def placed(self, places: Any) -> "Elements":
        """Returns the elements of the value with its axes moved."""
        return Elements(self.array, placed(self.along, places), self.mask and self.mask.placed(places))

    @property
    def step(self) -> int | None:
        """The difference of each two elements along an axis, if that is one whole number; None otherwise."""
        if len(self.along) != 1:
            return None
        first, *steps = self.array[0], *np.unique(np.diff(self.array.astype(np.float64)))
        return int(steps[0]) if len(steps) == 1 and first % 1 == steps[0] % 1 == 0 else None


class Form(NamedTuple):
    """A value as a sum of terms, or as the exponential of such a sum.

    Attributes:
        terms: by a term and the places of its axes, its factor. A term is a variable, a product that is `Scaled`, a
            `_LogSum`, None for 1, or a `Condition`: a mask, 0 where it holds, and elsewhere so small that its
            exponential is 0.
        is_exp: whether it is the exponential.
    """

    terms: Mapping[tuple[Any, Places], Any]
    is_exp: bool = False

    def __hash__(self) -> int:
        return hash((frozenset(self.terms.items()), self.is_exp))

    def plus(self, other: "Form") -> "Form":
        """Returns the form with the terms of another; masks stay as they are."""
        terms = dict(self.terms)
        for key, n in other.terms.items():
            terms[key] = 1 if isinstance(key[0], Condition) else terms.get(key, 0) + n
        return Form({key: n for key, n in terms.items() if n}, self.is_exp)

    def times(self, factor: float) -> "Form | None":
        """Returns the form with a multiple of its terms; None if a mask would become larger than it may be."""
        is_masked = any(isinstance(term, Condition) for term, _ in self.terms)
        if not np.isfinite(factor) or factor == 0 or (is_masked and factor < _LEAST_FACTOR):
            return None
        terms = {key: n if isinstance(key[0], Condition) else factor * n for key, n in self.terms.items()}
        return Form(terms, self.is_exp)

    def placed(self, places: Any) -> "Form":
        """Returns the form of the value with its axes moved."""
        return self._replace(terms={(term, placed(axes, places)): n for (term, axes), n in self.terms.items()})


class Condition(NamedTuple):
    """Says of each element of a value whether it is one number or another.

    Attributes:
        atom: the value.
        keep: the number where the condition holds.
        other: the number elsewhere.
    """

    atom: Any
    keep: Any
    other: Any


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


Known = Elements | Form | None


class Reading(NamedTuple):
    """What is read of a value.

    Attributes:
        known: its elements, or the form that it is; None if it is a term of its own.
        atom: what it was before it was only moved.
        axes: the places of the axes of that.
    """

    known: Known
    atom: Any
    axes: Places

    @property
    def number(self) -> Any:
        """The number that all elements are; None if there is none, or it is not known."""
        return self.known.array.item() if isinstance(self.known, Elements) and not self.known.array.ndim else None

    @property
    def form(self) -> Form | None:
        """The value as a part of scores or weights; None if it is not finite."""
        number = self.number
        if not (jx.is_floating(self.atom) and np.isfinite(number or 0)):
            return None
        if number is not None:
            return Form({ONE: number} if number else {})
        if isinstance(self.known, Form):
            return self.known
        return self.mask(0, lambda n: n <= _MASKED) or Form({(self.atom, self.axes): 1})

    def mask(self, kept: Any, is_fill: Callable[[Any], bool] = lambda n: True) -> Form | None:
        """Returns a mask that holds where the value is `kept`; None if it is no choice of that and a fill value."""
        if not isinstance(self.known, Elements):
            return None
        if self.number is not None:
            return Form({}) if self.number == kept else None
        array, _, mask = self.known
        fills = array[array != kept]
        if not 0 < len(fills) < len(array) or not _is_uniform(fills) or not is_fill(fills[0].item()):
            return None
        if mask and array[1] == kept:
            return mask
        condition, axes = Condition(self.atom, kept, fills[0].item()), self.axes
        if mask and len(mask.terms) == 1:
            ((opposite, axes),) = mask.terms
            condition = Condition(opposite.atom, opposite.other, opposite.keep)
        return Form({(condition, axes): 1})

    def moved(self, places: Places, var: Var) -> "Reading":
        """Returns what is read of a variable that has the same elements elsewhere, maybe in another dtype."""
        known = self.known and self.known.placed(places)
        if isinstance(known, Elements):
            known = Elements(known.array.astype(jx.dtype_of(var)), known.along, known.mask)
        if isinstance(known, Form) and not jx.is_floating(var):
            known = None
        if jx.is_floating(self.atom) != jx.is_floating(var) or _is_flag(self.atom) != _is_flag(var):
            return Reading(known, var, axes_of(var))
        return Reading(known, self.atom, placed(self.axes, places))


class Values:
    """The values of a program, each of which is read when it is asked for.

    Attributes:
        eqns: the equation that computes each variable.
        constants: the constant that each other variable is, if it is one.
        exponentials: the variables that are computed from an exponential by ops that are read.
    """

    def __init__(self, given: Mapping[Var, Elements | None], constants: dict[Var, Any]) -> None:
        """Takes the elements of the inputs of the program, None for those that are not known, and its constants."""
        self._given, self.constants = given, constants
        self.eqns: dict[Any, Any] = {}
        self.exponentials: set[Any] = set()
        self._readings: dict[Any, Reading] = {}

    def add(self, eqn: Any, inputs: Sequence[Var]) -> None:
        """Adds an equation, and the variables that it reads, behind those that compute these."""
        self.eqns.update(dict.fromkeys(eqn.outvars, eqn))
        name = eqn.primitive.name
        if name in EXPONENTIALS or (name in _READ and not self.exponentials.isdisjoint(inputs)):
            self.exponentials.update(eqn.outvars)

    def elements_of(self, atom: Any) -> Elements | None:
        """Returns the elements of a value; None if it depends on more than indices and constants."""
        known = self.read(atom).known
        return known if isinstance(known, Elements) and known.mask is None else None

    def name(self, atom: Any) -> str:
        """Returns the name of the primitive that computes a value; empty for an input or a constant."""
        eqn = self.eqns.get(atom) if isinstance(atom, Var) else None
        return "" if eqn is None else eqn.primitive.name

    def is_product(self, term: Any) -> bool:
        """Whether a term is a product of arrays."""
        return isinstance(term, Scaled) or self.name(term) == "dot_general"

    def read(self, atom: Any) -> Reading:
        """Returns what is read of a value."""
        if isinstance(atom, Literal):
            return Reading(_elements_of(atom.val, atom.aval), atom, ())
        waiting = [atom]
        while waiting:  # operands first; Python's recursion would end in a long chain of ops
            operands = self.eqns[waiting[-1]].invars if self.name(waiting[-1]) in _READ else ()
            unread = [x for x in operands if isinstance(x, Var) and x not in self._readings]
            if not unread and (var := waiting.pop()) not in self._readings:
                self._readings[var] = self._read(var, list(map(self.read, operands)))
            waiting += unread
        return self._readings[atom]

    def _read(self, var: Any, operands: Sequence[Reading]) -> Reading:
        """Reads a value, given what is read of the operands of its op."""
        eqn: Any = self.eqns.get(var)
        known: Known = self._given.get(var)
        if var in self.constants:
            known = _elements_of(self.constants[var], var.aval)
        elif eqn is not None and eqn.primitive.name == "iota":
            axis, n = eqn.params["dimension"], count(eqn.params["shape"][eqn.params["dimension"]])
            known = Elements(np.arange(n).astype(eqn.params["dtype"]), (axis,)) if n else None
        elif eqn is not None and operands:
            if (places := _moved(eqn)) is not None:
                return operands[0].moved(places, var)
            known = _computed(eqn, [x.known for x in operands]) or self._combined(eqn, operands)
        if isinstance(known, Elements) and _is_uniform(known.array) and all(isinstance(n, int) for n in var.aval.shape):
            known = Elements(known.array.flat[0])
        if known is None and _is_flag(var):
            known = _all(True, Form({(Condition(var, True, False), axes_of(var)): 1}))
        return Reading(known, var, axes_of(var))

    def _combined(self, eqn: Any, operands: Sequence[Reading]) -> Known:
        """Returns the result of an op as a sum of terms, an exponential or a mask; None if it is a term of its own."""
        name = eqn.primitive.name
        if name in ("and", "or"):
            return _all(name == "and", *[x.mask(name == "and") for x in operands])
        if name == "select_n":
            return _selected(eqn, *operands) if len(operands) == 3 else None
        if None in (forms := list[Any]([x.form for x in operands])):
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
        if form is None or form.is_exp:
            return form
        is_kept = any(isinstance(term, Condition | _LogSum) or self.is_product(term) for term, _ in form.terms)
        return form if is_kept else None

    def _scaled(self, form: Form, other: Reading, power: int) -> Form | None:
        """Returns a form times a power of a number, of flags, or of a temperature; None if a value is none of these."""
        by = other.number
        if form.is_exp:
            mask = other.mask(1, lambda n: n == 0)  # flags as numbers: `weights * mask`
            return mask and form.plus(mask)
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


def count(n: Any) -> int:
    """Returns how many indices of an axis are computed: as many as it has, or many if its size is symbolic."""
    return n if isinstance(n, int) else 2**20


def _elements_of(value: Any, aval: Any) -> Elements | None:
    """Returns the elements of a constant; None if it has more than those along an axis or a difference."""
    is_read = not isinstance(value, jax.core.Tracer) and hasattr(aval, "shape") and math.prod(aval.shape) <= _LARGEST
    if not is_read or jnp.issubdtype(aval.dtype, jax.dtypes.extended) or jnp.iscomplexobj(value) or not np.size(value):
        return None
    x = np.asarray(value, aval.dtype)
    axes, matrix = tuple(sorted(varying(x.shape))), np.squeeze(x)
    if _is_uniform(x):
        return Elements(x.flat[0])
    if len(axes) == 2 and (matrix[1:, 1:] == matrix[:-1, :-1]).all():
        matrix = np.array([*matrix[0, ::-1], *matrix[1:, 0]])
    return Elements(matrix, axes) if matrix.ndim == 1 else None


def _is_uniform(x: Any) -> bool:
    return x.size == 1 or bool((x == x.flat[0]).all())


def _computed(eqn: Any, operands: Sequence[Any]) -> Elements | None:
    """Returns the elements of the result of an op; None if it has more than those along an axis or a difference."""
    if not all(isinstance(x, Elements) for x in operands):
        return None
    arrays, sources = [x.array for x in operands], {x[1:] for x in operands} - {((), None)}
    if len(sources) > 1:
        # Where the steps along both axes are the same, the difference of two elements is one of their indices.
        steps = {x.step for x in operands}
        if eqn.primitive.name not in ("sub", *_COMPARISONS) or None in steps or len(steps) > 1:
            return None
        differences = np.arange(1 - len(arrays[1]), len(arrays[0]))
        first = np.maximum(differences, 0)
        arrays = [arrays[0][first], arrays[1][first - differences]]
        sources = {(operands[0].along + operands[1].along, None)}
    if (fold := _FOLDS.get(eqn.primitive.name) or rule_of(eqn).fold) is None:
        return None
    with np.errstate(all="ignore"):
        return Elements(np.asarray(fold(*arrays), jx.dtype_of(eqn.outvars[0])), *next(iter(sources), ()))


def _all(value: bool, *masks: Any) -> Elements | None:
    """Returns flags that are `value` where all masks hold."""
    return None if None in masks else Elements(np.array([not value, value]), (), functools.reduce(Form.plus, masks))


def _selected(eqn: Any, which: Reading, *cases: Reading) -> Known:
    """Returns scores, weights or flags with a fill value where flags say so."""
    for (fill, kept), value in ((cases, True), (cases[::-1], False)):
        mask, form, number = which.mask(value), kept.form, fill.number
        if mask is None or number is None:
            continue
        if _is_flag(eqn.outvars[0]) and number == 0:  # `flag & x`, as `jnp.tril` writes it
            return _all(True, mask, kept.mask(True))
        if form is not None and (number == 0 if form.is_exp else number <= _MASKED):
            return form.plus(mask)
    return None


def _summed(form: Form, eqn: Any) -> Form | None:
    """Returns the sum of exponentials along axes: of the terms that vary along them, and of all masks."""
    before, axes = eqn.invars[0], eqn.params["axes"]
    along = varying(before.aval.shape) & frozenset(map(int, axes))
    inside = {key: n for key, n in form.terms.items() if isinstance(key[0], Condition) or along & set(key[1])}
    if not along <= {axis for _, places in inside for axis in places}:
        return None
    kept = [axis for axis in range(len(before.aval.shape)) if axis not in axes]
    places = {axis: kept.index(axis) if axis in kept else None for axis in range(len(before.aval.shape))}
    rest = Form({key: n for key, n in form.terms.items() if key not in inside}, is_exp=True).placed(places)
    return rest.plus(Form({(_LogSum(Form(inside), along), placed(axes_of(before), places)): 1}))


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
