"""Reads a product of a softmax as attention: a function of the arrays that it reads, which calls a kernel.

An axis of an array is named by its place in the weights, by a string if it is none of theirs; None if it has one
element.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from jmp_amp import _jaxpr as jx
from jmp_amp._attention._softmax import Condition, Form, Places, Scaled, Values, axes_of, count, placed, softmax_of
from jmp_amp._cast_inputs import cast_inputs

# The groups of axes that the axes of each array of a kernel consist of, and the arrays that need all of these axes.
_AXES = {
    "query": ("rows", "lengths", "heads", "terms"),
    "key": ("rows", "keys", "key_heads", "terms"),
    "value": ("rows", "keys", "key_heads", "features"),
    "temperature": ("rows", "lengths", "heads", "none"),
    "bias": ("rows", "heads", "lengths", "keys"),
    "mask": ("rows", "heads", "lengths", "keys"),
    "key_value_seq_lengths": ("rows",),
}
_WHOLE = {"query", "key", "value", "key_value_seq_lengths"}


@dataclasses.dataclass(frozen=True)
class _Array:
    """An array that attention reads.

    Attributes:
        role: one of `_AXES`.
        atom: the value in the program; equal attention may read others.
        axes: the names of its axes.
        number: the factor of a `bias`, the numbers of a `mask` where it keeps scores and where not, what is added to a
            number of keys, the power of a `temperature`.
    """

    role: str
    atom: Any = dataclasses.field(compare=False)
    axes: Places
    number: Any = 0

    @property
    def places(self) -> set[int]:
        """The axes of the weights that it has."""
        return {axis for axis in self.axes if isinstance(axis, int)}


@dataclasses.dataclass(frozen=True)
class Attention:
    """One attention as a function of the arrays that it reads; equal ones are traced once.

    Attributes:
        kernel: a function, or an `implementation` of `jax.nn.dot_product_attention`.
        dtype: the dtype that it runs in.
        arrays: the arrays, queries, keys and values first.
        groups: by their names, the axes that the axes of the arrays of the kernel consist of.
        result: the names of the axes of the result.
        out: its type in the program.
        traced: the dtype of the queries there.
        options: its scale, and other options.
    """

    kernel: Any
    dtype: Any
    arrays: tuple[_Array, ...]
    groups: tuple[tuple[str, Places], ...]
    result: Places
    out: Any
    traced: Any
    options: tuple[tuple[str, Any], ...]

    def __call__(self, *arrays: Any) -> Any:
        """Computes the attention of arrays that are cast."""
        inputs, options = dict[str, list[Any]](), {"bias": None, "mask": None, **dict(self.options)}
        groups, sizes = dict(self.groups), _sizes(self.arrays, arrays)
        for x, array in zip(arrays, self.arrays, strict=True):
            order, is_whole = [groups.get(name, ()) for name in _AXES[array.role]], array.role in _WHOLE
            inputs.setdefault(array.role, []).append((_arranged(x, array.axes, order, sizes, is_whole), array.number))
        ((query, _),), ((key, _),), ((value, _),) = (inputs[role] for role in ("query", "key", "value"))
        for x, power in inputs.get("temperature", ()):
            query = query * x**power
        if biases := inputs.get("bias"):
            total = sum(n * x.astype(np.float32) for x, n in biases)
            # Scores below all of the dtype are masked as well by the least of it, and with -inf a row may be NaN.
            options["bias"] = jnp.maximum(total, float(jnp.finfo(self.dtype).min)).astype(self.dtype)
        if flags := inputs.get("mask"):
            options["mask"] = functools.reduce(jnp.logical_and, [_is_kept(x, *numbers) for x, numbers in flags])
        if lengths := inputs.get("key_value_seq_lengths"):
            ends = [jnp.minimum(x + n, key.shape[1]).astype(np.int32) for x, n in lengths]
            options["key_value_seq_lengths"] = functools.reduce(jnp.minimum, ends)
        own = [axis for name in ("rows", "lengths", "heads", "features") for axis in groups[name]]
        result = [[axis] for axis in self.result]
        return jnp.reshape(_arranged(self._run(query, key, value, options), own, result, sizes), self.out.shape)

    def _run(self, query: Any, key: Any, value: Any, options: dict[str, Any]) -> Any:
        if not isinstance(self.kernel, str):
            return self.kernel(query, key, value, **options)
        # It takes values as wide as the keys only, and cuDNN masks and biases of all queries and keys.
        width, widest = value.shape[-1], max(query.shape[-1], value.shape[-1])
        query, key, value = (jnp.pad(x, [(0, 0)] * 3 + [(0, widest - x.shape[-1])]) for x in (query, key, value))
        for name in ("bias", "mask"):
            if (x := options[name]) is not None:
                options[name] = jnp.broadcast_to(x, (*x.shape[:2], query.shape[1], key.shape[1]))
        kernel: Any = functools.partial(jax.nn.dot_product_attention, implementation=self.kernel)
        return kernel(query, key, value, **options)[..., :width]

    def __str__(self) -> str:
        said = [f"{name}={value}" for name, value in self.options if value and name != "scale"]
        return ", ".join([*said, *dict.fromkeys([array.role for array in self.arrays[3:]])])


def _sizes(arrays: Sequence[_Array], values: Sequence[Any]) -> dict[Any, Any]:
    """Returns the number of elements of each axis of arrays, given their values or the types of these."""
    pairs = [zip(array.axes, x.shape, strict=True) for array, x in zip(arrays, values, strict=True)]
    return {axis: n for each in pairs for axis, n in each}


def _arranged(x: Any, axes: Sequence[Any], groups: Sequence[Any], sizes: dict[Any, Any], is_whole: bool = True) -> Any:
    """Returns an array with an axis for each group of axes, of one element if it may lack them."""
    names, order = [axis for axis in axes if axis is not None], [axis for group in groups for axis in group]
    x = jnp.reshape(x, [sizes[axis] for axis in names])
    x = jnp.transpose(x, [names.index(axis) for axis in order if axis in names])
    x = jnp.reshape(x, [sizes[axis] if axis in names else 1 for axis in order])
    lacks = {axis: 1 for group in groups for axis in group if not is_whole and {*group}.isdisjoint(names)}
    x = jnp.broadcast_to(x, [(sizes | lacks)[axis] for axis in order])
    return jnp.reshape(x, [math.prod([(sizes | lacks)[axis] for axis in group]) for group in groups])


def _is_kept(x: Any, keep: Any, other: Any) -> Any:
    """Returns where a value is one of two numbers; it may be rounded."""
    x = x.astype(np.float32)
    return jnp.abs(x - float(keep)) < jnp.abs(x - float(other))


@functools.lru_cache(maxsize=1024)
def call_of(attention: Attention) -> Any:
    """Returns an attention as a function that autocast runs as it is, the same for equal ones.

    In a program that is not cast its result has the type that it has there.
    """
    run = jax.jit(attention)  # in one dtype, so that JAX traces it once

    def attend(*arrays: Any) -> Any:
        x = run(*[x.astype(attention.dtype) if jx.is_floating(x) else x for x in arrays])
        dtype = arrays[0].dtype
        return jx.as_type(x, attention.out) if dtype == attention.traced else x.astype(dtype)

    return cast_inputs(attention.dtype)(attend)


class AsWrittenError(Exception):
    """Says why a softmax that a product reads stays as it is written."""


class Match(NamedTuple):
    """Attention in a program.

    Attributes:
        product: the result of the first product, the one of queries and keys.
        weights: the result of the softmax.
        given: biases, masks and temperatures, which the program computes on its own.
        variants: ways to compute it; the first one that the kernel takes is used.
    """

    product: Var
    weights: Var
    given: frozenset[Var]
    variants: list[Attention]


def match(values: Values, eqn: Any, kernel: Any, dtype: Any) -> Match | None:
    """Returns the attention that ends in a product; None if the product reads no softmax.

    Raises:
        AsWrittenError: the product reads a softmax, and is no attention.
    """
    softmaxes = [softmax_of(values.read(x).form) if x in values.exponentials else None for x in eqn.invars]
    if (found := softmaxes[0] or softmaxes[1]) is None:
        _near_softmax(values, eqn.invars)
        return None
    (scores, along), side = found, int(softmaxes[0] is None)
    term, axes = _product_in(values, scores, eqn.invars[side])
    product = term.product if isinstance(term, Scaled) else term
    operands, result = _operands_of(values.eqns[product], axes, eqn, side, along)

    others, masks = _others(scores, term, axes, operands[0])
    sizes = _sizes(operands, [x.atom.aval for x in operands])
    groups = _groups(operands, along, {axis for x in (*others, *masks) for axis in x.axes}, sizes)
    scale = ("scale", scores.terms[term, axes])
    types = result, eqn.outvars[0].aval, jx.dtype_of(operands[0].atom)
    variants = [
        Attention(kernel, dtype, (*read, *others, *arrays), tuple(names.items()), *types, (*options.items(), scale))
        for options, arrays in (_in_words(values, masks, groups, sizes), ({"is_causal": False}, masks))
        for read, names in _ways_to_read(values, operands, groups)
    ]
    return Match(product, eqn.invars[side], frozenset([x.atom for x in (*others, *masks)]), variants)


def _others(scores: Form, product: Any, axes: Places, query: _Array) -> tuple[list[_Array], list[_Array]]:
    """Returns the other terms of scores than the product: a temperature and biases, and masks."""
    others, masks = list[_Array](), list[_Array]()
    if isinstance(product, Scaled):
        others.append(_Array("temperature", product.by, placed(product.axes, axes), product.power))
        if not {*others[0].axes} <= {*query.axes, None}:
            raise AsWrittenError("what the scores are multiplied by differs from key to key")
    for (x, own), n in scores.terms.items():
        if isinstance(x, Condition):
            masks.append(_Array("mask", x.atom, own, (x.keep, x.other)))
        elif isinstance(x, Var) and x is not getattr(product, "product", product):
            others.append(_Array("bias", x, own, n))
        elif (x, own) != (product, axes):
            raise AsWrittenError("a sum of exponentials, or its scores again, between a product and the softmax")
    return others, masks


def _ways_to_read(values: Values, operands: Sequence[_Array], groups: dict[str, Places]) -> Iterator[Any]:
    """Yields queries, keys and values, and the groups of all axes: first before heads are repeated, if any are."""
    query, *pair = operands
    heads = groups["heads"]
    if len(heads) == 1 and heads == groups["key_heads"]:
        single = [_before_repeat(values, x, *heads) for x in pair]
        numbers = {x and x.atom.aval.shape[x.axes.index("repeated")] for x in single}
        if len(numbers) == 1 and None not in numbers:
            yield (query, *single), groups | {"key_heads": ("repeated",)}
    yield operands, groups


def _before_repeat(values: Values, array: _Array, axis: Any) -> _Array | None:
    """Returns the array whose elements along an axis `jnp.repeat` repeats, with that axis as `"repeated"`."""
    if values.name(array.atom) != "reshape" or axis not in array.axes:
        return None
    i, x = array.axes.index(axis) + 1, values.eqns[array.atom].invars[0]
    split = x.aval.shape  # with an axis more, behind that of the elements
    if array.atom.aval.shape != (*split[: i - 1], math.prod(split[i - 1 : i + 1]), *split[i + 1 :]):
        return None
    while values.name(x) == "broadcast_in_dim":
        places, x = values.eqns[x].params["broadcast_dimensions"], values.eqns[x].invars[0]
        if i not in places:
            axes = tuple(["repeated" if each == axis else each for each in array.axes])
            return dataclasses.replace(array, atom=x, axes=axes) if x.aval.shape == split[:i] + split[i + 1 :] else None
    return None


def _product_in(values: Values, scores: Form, weights: Any) -> tuple[Any, Places]:
    """Returns the term of scores that is the product of queries and keys, and the places of its axes."""
    for term, axes in scores.terms:
        if values.is_product(term) and {*axes_of(weights)} <= {*axes, None}:
            return term, axes
    starts = [f"`{_first_op(values, term)}`" for term, _ in scores.terms if isinstance(term, Var | Scaled)]
    raise AsWrittenError(f"{' and '.join(starts)} between a product and the softmax")


def _operands_of(first: Any, axes: Places, last: Any, side: int, along: frozenset[int]) -> tuple[Any, ...]:
    """Returns queries, keys and values, and the names of the axes of the result.

    Args:
        first: the product of queries and keys.
        axes: the names of the axes of its result.
        last: the product of weights and values.
        side: which operand of it the weights are.
        along: the axes that the softmax sums along.
    """
    operands, out = _axes_of_operands(first, axes), [f"free{i}" for i in range(len(last.outvars[0].aval.shape))]
    k = int(not along <= {*operands[0]})
    query, key = (_Array(role, first.invars[i], operands[i]) for role, i in (("query", 1 - k), ("key", k)))
    of_last = _axes_of_operands(last, out)
    places = dict(zip(of_last[side], axes_of(last.invars[side]), strict=True))
    of_value, result = (tuple([places.get(name, name) for name in names]) for names in (of_last[1 - side], out))
    value = _Array("value", last.invars[1 - side], of_value)
    if not along <= key.places or not along.isdisjoint(result):
        raise AsWrittenError("the softmax, or the product that reads it, is along other axes than the keys")
    if not along <= value.places <= key.places:
        raise AsWrittenError("the values have an axis that the keys lack")
    return (query, key, value), tuple([axis for axis in result if axis is not None])


_ELEMENTWISE = {"mul", "div", "select_n", "add", "sub", "max", "transpose", "reshape", "convert_element_type"}


def _first_op(values: Values, term: Any) -> str:
    """Returns the name of the op that scores start with."""
    atom = term.product if isinstance(term, Scaled) else term
    while (name := values.name(atom)) in _ELEMENTWISE:
        operands = [x for x in values.eqns[atom].invars if isinstance(x, Var) and x not in values.constants]
        atom = operands[0] if operands else None
    return "reshape" if name == "dot_general" else name or "an input"


def _near_softmax(values: Values, operands: Sequence[Any]) -> None:
    """Raises `AsWrittenError` if a product reads what is made of a softmax, or of a quotient that is almost one."""
    atoms = [*operands]
    for atom in atoms:
        name = values.name(atom)
        inputs: Sequence[Any] = values.eqns[atom].invars if name in _ELEMENTWISE else ()
        forms = {x: values.read(x).form for x in inputs if isinstance(x, Var) and x in values.exponentials}
        if name == "div" and (top := forms.get(inputs[0])) and top.is_exp and softmax_of(top) is None:
            raise AsWrittenError("its denominator is not the sum of the exponentials alone")
        if any(softmax_of(form) is not None for form in forms.values()):
            raise AsWrittenError(f"`{name}` between the softmax and the product, as dropout is")
        atoms += [x for x in forms if x not in atoms and len(atoms) < 20]


def _axes_of_operands(eqn: Any, result: Sequence[Any]) -> list[Places]:
    """Returns the names of the axes of both operands of a product, given those of its result."""
    sums, shares = eqn.params["dimension_numbers"]
    shared, free, operands = result[: len(shares[0])], iter(result[len(shares[0]) :]), list[Places]()
    for side, atom in enumerate(eqn.invars):
        names = {axis: f"sum{i}" for i, axis in enumerate(sums[side])} | dict(zip(shares[side], shared, strict=True))
        operands.append(tuple([names[i] if i in names else next(free) for i in range(len(atom.aval.shape))]))
    return operands


def _groups(operands: Sequence[_Array], along: frozenset[int], varied: set[Any], sizes: Any) -> dict[str, Places]:
    """Returns the groups of all axes.

    The lengths are along the axis that a mask or a bias varies along, or else the longest; other axes of queries alone
    are heads that share keys. Of the axes that queries and keys share, those behind the lengths are heads, as in
    (batch, length, heads, features), or else the last one.
    """
    query, key, value = operands
    queries = [axis for axis in query.axes if axis in query.places - key.places]
    longest = sorted(queries, key=lambda axis: -sizes[axis] if isinstance(sizes[axis], int) else 0)[:1]
    lengths = [axis for axis in queries if axis in varied] or longest
    shared = [axis for axis in key.axes if axis in key.places - along]
    shared.sort(key=lambda axis: query.axes.index(axis) if axis in query.axes else -1)
    behind = query.axes[query.axes.index(lengths[0]) :] if lengths else ()
    heads = [axis for axis in shared if axis in behind] or shared[1:][-1:]
    return {
        "rows": tuple([axis for axis in shared if axis not in heads]),
        "lengths": tuple(lengths),
        "heads": (*heads, *[axis for axis in queries if axis not in lengths]),
        "key_heads": tuple(heads),
        "keys": tuple([axis for axis in key.axes if axis in along]),
        "terms": tuple([axis for axis in query.axes if isinstance(axis, str)]),
        "features": tuple([axis for axis in value.axes if isinstance(axis, str)]),
    }


def _in_words(values: Values, masks: list[_Array], groups: dict[str, Places], sizes: dict[Any, Any]) -> tuple[Any, Any]:
    """Returns options and arrays of a kernel that say what masks do: numbers of keys, and the masks that are left."""
    before, behind, left, lengths = math.inf, math.inf, list[_Array](), list[_Array]()
    for mask in masks:
        if (band := _band(values, mask, groups, sizes)) is not None:
            before, behind = min(before, band[0]), min(behind, band[1])
        elif (length := _number_of_keys(values, mask, groups)) is not None:
            lengths.append(length)
        else:
            left.append(mask)
    options: dict[str, Any] = {"is_causal": behind == 0}
    if before < math.inf or 0 < behind < math.inf:
        ends = zip((before, behind), groups["lengths"] + groups["keys"], strict=True)
        options["local_window_size"] = tuple([sizes[axis] if math.isinf(n) else n for n, axis in ends])
    return options, left + lengths


def _band(values: Values, mask: _Array, groups: dict[str, Places], sizes: dict[Any, Any]) -> tuple[float, float] | None:
    """Returns how far before and behind a query the keys may be that a mask keeps; None if these are no band."""
    elements: Any = values.elements_of(mask.atom)
    lengths, keys = groups["lengths"], groups["keys"]
    along = placed(elements.along, mask.axes) if elements else ()
    if len(along) != 2 or along not in (lengths + keys, keys + lengths) or len(keys) != 1:
        return None
    kept = (elements.array == mask.number[0])[:: 1 if along[1] in keys else -1]
    distances = (np.flatnonzero(kept) + 1 - count(sizes[keys[0]])).tolist()  # of queries from keys
    behind, before = -distances[0], distances[-1]
    if len(distances) != behind + 1 + before or min(behind, before) < 0:
        return None
    return math.inf if kept[-1] else before, math.inf if kept[0] else behind


def _number_of_keys(values: Values, mask: _Array, groups: dict[str, Places]) -> _Array | None:
    """Returns the array of numbers of keys, if a mask keeps as many; None if it keeps others."""
    if (name := values.name(mask.atom)) not in ("lt", "le", "gt", "ge"):
        return None
    low, high = values.eqns[mask.atom].invars[:: -1 if name in ("gt", "ge") else 1]
    end, index, n = (high, low, name in ("le", "ge")) if mask.number[0] else (low, high, name in ("lt", "gt"))
    x, indices = values.read(end), values.elements_of(index)
    if indices is None or indices.step != 1 or placed(indices.along, mask.axes) != groups["keys"]:
        return None
    own, is_integer = placed(x.axes, mask.axes), jnp.issubdtype(jx.dtype_of(x.atom), jnp.integer)
    if x.number is not None or not is_integer or not {*own} <= {*groups["rows"], None}:
        return None
    return _Array("key_value_seq_lengths", x.atom, own, n - int(indices.array[0]))
