"""Finds `softmax(scale * q @ k.T + bias, masked) @ v` in a program, and calls a kernel in its place."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._plan import Region
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._primitives import RULES, OpClass, Rule
from jmp_amp._autocast._softmax import (
    EXPONENTIALS,
    Axes,
    Condition,
    Line,
    Scaled,
    Values,
    axes_of,
    known_of,
    placed,
    softmax_of,
)
from jmp_amp._calls import warn
from jmp_amp._cast_inputs import cast_inputs


@dataclasses.dataclass(frozen=True)
class _Attention:
    """One attention as a function of the arrays that it reads; equal ones are traced once.

    An axis of an array is named by its place in the weights, by a string if it is none of theirs.

    Attributes:
        kernel: a function, or an `implementation` of `jax.nn.dot_product_attention`.
        dtype: the dtype that it runs in.
        options: its scale, and other options.
        arrays: for each array its role, the names of its axes, and a number: the factor of a `bias`, the numbers of a
            `mask` where it keeps scores and where not, what is added to a number of keys, the power of a `temperature`.
        groups: by their names, the axes that the axes of the arrays of the kernel consist of.
        sizes: the number of elements of each axis.
        result: the names of the axes of the result.
        out: its type in the program.
        traced: the dtype of the queries there.
    """

    kernel: Any
    dtype: Any
    options: tuple[tuple[str, Any], ...]
    arrays: tuple[tuple[str, Axes, Any], ...]
    groups: tuple[tuple[str, Axes], ...]
    sizes: tuple[tuple[Any, Any], ...]
    result: Axes
    out: Any
    traced: Any

    def __call__(self, *arrays: Any) -> Any:
        """Computes the attention of arrays that are cast."""
        inputs, options = dict[str, list[Any]](), {"bias": None, "mask": None, **dict(self.options)}
        for x, (role, axes, number) in zip(arrays, self.arrays, strict=True):
            inputs.setdefault(role, []).append((self._arranged(x, axes, role), number))
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
        own, sizes = self._axes("rows lengths heads groups features"), dict(self.sizes)
        x = jnp.reshape(self._run(query, key, value, options), [sizes[axis] for axis in own])
        x = jnp.transpose(x, [own.index(axis) for axis in self.result])
        return jnp.reshape(x, self.out.shape)

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

    def _axes(self, groups: str) -> list[Any]:
        return [axis for group in groups.split() for axis in dict(self.groups)[group]]

    def _arranged(self, x: Any, axes: Axes, role: str) -> Any:
        """Returns an array with the axes of its role; those of biases and masks have one element if it lacks them."""
        groups, sizes, is_whole = list(map(self._axes, _AXES[role])), dict(self.sizes), role in _WHOLE
        names, order = [axis for axis in axes if axis is not None], [axis for group in groups for axis in group]
        x = jnp.reshape(x, [sizes[axis] for axis in names])
        x = jnp.transpose(x, [names.index(axis) for axis in order if axis in names])
        x = jnp.reshape(x, [sizes[axis] if axis in names else 1 for axis in order])
        sizes |= {axis: 1 for group in groups for axis in group if not is_whole and {*group}.isdisjoint(names)}
        x = jnp.broadcast_to(x, [sizes[axis] for axis in order])
        return jnp.reshape(x, [math.prod([sizes[axis] for axis in group]) for group in groups])

    def __str__(self) -> str:
        said = [f"{name}={value}" for name, value in self.options if value and name != "scale"]
        return ", ".join([*said, *dict.fromkeys([role for role, *_ in self.arrays[3:]])])


# The groups of axes that the axes of each array of a kernel consist of, and the arrays that need all of these axes.
_AXES = {
    "query": ("rows", "lengths", "heads groups", "terms"),
    "key": ("rows", "keys", "heads", "terms"),
    "value": ("rows", "keys", "heads", "features"),
    "temperature": ("rows", "lengths", "heads groups", ""),
    "bias": ("rows", "heads groups", "lengths", "keys"),
    "mask": ("rows", "heads groups", "lengths", "keys"),
    "key_value_seq_lengths": ("rows",),
}
_WHOLE = {"query", "key", "value", "key_value_seq_lengths"}


def _is_kept(x: Any, keep: Any, other: Any) -> Any:
    """Returns where a value is one of two numbers; it may be rounded."""
    x = x.astype(np.float32)
    return jnp.abs(x - float(keep)) < jnp.abs(x - float(other))


@functools.lru_cache(maxsize=1024)
def _call_of(attention: _Attention) -> Any:
    """Returns an attention as a function that autocast runs as it is, the same for equal ones.

    In a program that is not cast its result has the type that it has there.
    """
    run = jax.jit(attention)  # in one dtype, so that JAX traces it once

    def attend(*arrays: Any) -> Any:
        x = run(*[x.astype(attention.dtype) if jx.is_floating(x) else x for x in arrays])
        dtype = arrays[0].dtype
        return jx.as_type(x, attention.out) if dtype == attention.traced else x.astype(dtype)

    return cast_inputs(attention.dtype)(attend)


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


@dataclasses.dataclass(eq=False)
class _Op:
    """An equation of a program whose calls are read in place.

    Attributes:
        eqn: the equation, with the kernel in its jaxprs.
        region: the region that it is in.
        calls: the calls around it, the outermost first.
        inside: the equations of a call that is read in place.
        found: what is found in its jaxprs.
    """

    eqn: Any
    region: Region
    calls: "tuple[_Op, ...]"
    inside: "list[_Op]" = dataclasses.field(default_factory=list)
    found: list[Found] = dataclasses.field(default_factory=list)


class _Match(NamedTuple):
    """One attention of the program.

    Attributes:
        within: the equations between the two products, and the first product.
        variants: how to compute it, and the values that this reads; the first one that the kernel takes is used.
    """

    within: frozenset[_Op]
    variants: list[tuple[_Attention, tuple[Any, ...]]]


class _Program:
    """A jaxpr as equations whose calls are read in place, and the attention in it."""

    def __init__(self, jaxpr: Any, given: Sequence[Any], region: Region, *args: Any) -> None:
        """Takes a jaxpr, what is known of its inputs, the region around it, a planner, a format and a kernel."""
        self._jaxpr, self._args, names = jx.open_jaxpr(jaxpr)[0], args, dict[Any, Any]()
        self._consts, self._made, self._ops = dict[Var, Any](), dict[Any, _Op](), list[_Op]()
        self._values = Values(dict(zip(self._jaxpr.invars, given, strict=True)))
        self._read(jaxpr, region, (), names, self._ops)
        self._outs = [_named(names, atom) for atom in self._jaxpr.outvars]
        self.found = list[Found]()
        self._kernels = self._find(list(_leaves(self._ops)))

    @property
    def is_changed(self) -> bool:
        """Whether it calls the kernel."""
        return any(found.kernel for found in self.found)

    def _read(self, jaxpr: Any, region: Region, calls: tuple[_Op, ...], names: dict[Any, Any], ops: list[_Op]) -> None:
        """Reads the equations of a jaxpr into `ops`; `names` has the variables that are called otherwise here."""
        opened, consts = jx.open_jaxpr(jaxpr)
        for var, x in zip(opened.constvars, consts, strict=True):
            name = names.setdefault(var, Var(var.aval)) if calls else var
            self._consts[name] = x
            self._values.give(name, known_of(x, var.aval))
        for eqn in opened.eqns:
            if calls:
                names |= {var: Var(var.aval) for var in eqn.outvars if var not in names}
            ops.append(op := _Op(_with_names(eqn, names) if names else eqn, region, calls))
            if eqn.primitive.name in jx.HIGHER_ORDER and self._enter(op, names):
                continue
            self._values.add(op.eqn)
            self._made |= dict.fromkeys(op.eqn.outvars, op)

    def _enter(self, op: _Op, names: dict[Any, Any]) -> bool:
        """Finds attention in the jaxprs of an equation. Reads a call in place, and returns whether it has."""
        structure: Any = jx.structure_of(op.eqn)
        run: Any = jx.HIGHER_ORDER[op.eqn.primitive.name].run
        eqn = op.eqn
        if structure is None or run is None:
            return False
        region, bodies = self._args[0].enter(op.region, eqn), list[_Body]()
        if any(_may_have_attention(jaxpr) for jaxpr, _ in jx.entries(structure)):
            known = structure.consts if isinstance(structure, jx.Loop) else slice(0, len(eqn.invars))
            for jaxpr, places in jx.entries(structure):  # nothing is known of what a loop changes
                is_known = [known.start <= i < known.stop for i in places]
                given = [
                    self._values.inside(eqn.invars[i]) if x else None for i, x in zip(places, is_known, strict=True)
                ]
                bodies.append(_rewritten(jaxpr, given, region, *self._args))
            op.found = [each._replace(eqns=(eqn, *each.eqns)) for body in bodies for each in body.found]
        is_call = isinstance(structure, jx.Call)
        if is_call and structure.rule is not None:
            why = "the function around it has a derivative of its own"
            op.found = [found._replace(kernel="", why=why) for found in op.found]
        elif any(found.kernel for found in op.found):
            jaxpr = _traced(op, jax.jit(lambda *args: run(eqn, bodies, args)), eqn.invars)
            self._replace(op, jaxpr, eqn.invars, names)
        elif is_call and structure.is_inline and not jx.versions.is_checkpoint(eqn.primitive, **eqn.params):
            opened, _ = jx.open_jaxpr(structure.jaxpr)
            inner: dict[Any, Any] = dict(zip(opened.invars, [eqn.invars[i] for i in structure.operands], strict=True))
            kept = {*inner, *opened.constvars}
            inner |= {
                v: name for v, name in zip(opened.outvars, eqn.outvars, strict=True) if _is_var(v) and v not in kept
            }
            op.found = []
            self._read(structure.jaxpr, region, (*op.calls, op), inner, op.inside)
            names |= _aliases(eqn.outvars, inner, opened.outvars)
        return bool(op.inside)

    def _replace(self, op: _Op, jaxpr: Any, operands: Sequence[Any], names: dict[Any, Any]) -> None:
        """Puts the one equation of a jaxpr in place of another. A result that is an operand gets the name of that."""
        opened, consts = jx.open_jaxpr(jaxpr)
        self._consts |= zip(opened.constvars, consts, strict=True)
        inner: dict[Any, Any] = dict(zip(opened.invars, operands, strict=True))
        results = zip(opened.outvars, op.eqn.outvars, strict=True)
        inner |= {var: name for var, name in results if _is_var(var) and var not in inner}
        names |= _aliases(op.eqn.outvars, inner, opened.outvars)
        (call,) = opened.eqns
        op.eqn = _with_names(call, inner).replace(source_info=op.eqn.source_info, ctx=op.eqn.ctx)

    def _find(self, ops: Sequence[_Op]) -> set[_Op]:
        """Finds attention, calls the kernel in place of the last product of each, and returns these."""
        kernel, readers, places = self._args[2], self._readers(ops), {op: i for i, op in enumerate(ops)}
        outcomes: dict[_Op, Any] = {
            op: self._match(op, ops, places)
            for op in ops
            if op.eqn.primitive is jax.lax.dot_general_p
            and not self._values.exponentials.isdisjoint(op.eqn.invars)
            and op.eqn.outvars[0] in readers
        }
        chosen, refused, tried = dict[_Op, Any](), set[_Op](), dict[Any, Any]()
        while True:
            matches = {op: match for op, match in outcomes.items() if isinstance(match, _Match)}
            dropped = {op: why for op, match in matches.items() if (why := _read_again(match, matches, readers))}
            for op in matches.keys() - dropped.keys() - chosen.keys():
                key = tuple([(attention, tuple([x.aval for x in reads])) for attention, reads in matches[op].variants])
                if key not in tried:  # layers are alike
                    tried[key] = _taken(op, matches[op])
                i, jaxpr, words = tried[key]
                if jaxpr is None:
                    dropped[op] = words
                    refused.add(op)
                else:
                    chosen[op] = jaxpr, *matches[op].variants[i], words
            if not dropped:
                break
            outcomes |= dropped
        for op in ops:
            calls = tuple([call.eqn for call in op.calls])
            self.found += [each._replace(eqns=calls + each.eqns) for each in op.found]
            if op in matches:
                _, attention, _, words = chosen[op]
                why = f"{attention}; its derivative as it is written: {words}" if words else str(attention)
                self.found.append(Found((*calls, op.eqn), name_of(kernel), why))
            elif outcomes.get(op) is not None:
                self.found.append(Found((*calls, op.eqn), "", outcomes[op], op in refused))
        for op in matches:
            jaxpr, attention, reads, words = chosen[op]
            if words:
                written, free = _written(op, [each for each in ops if each in matches[op].within])
                call = _with_derivative_of(_call_of(attention), written, len(reads), name_of(kernel), words)
                reads = *reads, *free
                jaxpr = _traced(op, jax.jit(call), reads)
            self._replace(op, jaxpr, reads, {})
        return {*matches}

    def _readers(self, ops: Sequence[_Op]) -> dict[Any, list[_Op | None]]:
        """Returns the equations that read each variable, of those that have a use; None for the results."""
        readers: dict[Any, list[_Op | None]] = {atom: [None] for atom in filter(_is_var, self._outs)}
        for op in reversed(ops):
            if op.eqn.effects or not readers.keys().isdisjoint(op.eqn.outvars):
                for atom in filter(_is_var, op.eqn.invars):
                    readers.setdefault(atom, []).append(op)
        return readers

    def _match(self, op: _Op, ops: Sequence[_Op], places: Mapping[_Op, int]) -> _Match | str | None:
        """Returns the attention that ends in a product, why it is none, or None if the product reads no softmax."""
        (planner, form, kernel), values, operands = self._args, self._values, op.eqn.invars
        softmaxes = [softmax_of(values.read(x).form) if x in values.exponentials else None for x in operands]
        side, found = int(softmaxes[0] is None), softmaxes[0] or softmaxes[1]
        if found is None:
            return next(filter(None, map(self._near_softmax, operands)), None)
        scores, along = found
        weights, value = operands[side], operands[1 - side]
        terms = [(*key, n) for key, n in scores.terms.items()]
        whole = [x for x in terms if values.is_product(x[0]) and {*axes_of(weights)} <= {*x[1], None}]
        if not whole:
            starts = [f"`{self._first_op(term)}`" for term, *_ in terms if isinstance(term, Var | Scaled)]
            return f"{' and '.join(starts)} between a product and the softmax"
        term, axes, scale = whole[0]
        scaled = [term] if isinstance(term, Scaled) else []
        start = self._made[scaled[0].product if scaled else term]
        # An axis of an array is named by its place in the weights, by a string if it is none of theirs.
        names = _names_of(start.eqn, axes)
        last = _names_of(op.eqn, [f"v{i}" for i in range(len(op.eqn.outvars[0].aval.shape))])
        ends = dict(zip(last[side], axes_of(weights), strict=True))
        of_value, result = ([ends.get(axis, axis) for axis in each] for each in (last[1 - side], last[2]))
        k = int(not along <= {*names[0]})
        of_query, of_key = names[1 - k], names[k]
        shared = [axis for axis in of_key if isinstance(axis, int) and axis not in along]
        shared.sort(key=lambda axis: of_query.index(axis) if axis in of_query else -1)
        if not along <= {*of_key} or not along.isdisjoint(result):
            return "the softmax, or the product that reads it, is along other axes than the keys"
        if not along <= {axis for axis in of_value if isinstance(axis, int)} <= along | {*shared}:
            return "the values have an axis that the keys lack"
        masks = [(term, axes) for term, axes, _ in terms if isinstance(term, Condition)]
        biases = [(x, "bias", its, n) for x, its, n in terms if x is not term and not isinstance(x, Condition)]
        temperatures = [(x.by, "temperature", placed(x.axes, axes), x.power) for x in scaled]
        if any(not {*its} <= {*of_query, None} for *_, its, _ in temperatures):
            return "what the scores are multiplied by differs from key to key"
        stops = {x for x, *_ in (*biases, *temperatures)} | {condition.atom for condition, _ in masks}
        within = _between(start.eqn.outvars[0], weights, stops, ops[places[start] : places[op]]) | {start}
        if not all(isinstance(x, Var) for x, *_ in biases):
            return "a sum of exponentials between a product and the softmax"
        if any(planner.enter(each.region, each.eqn).format is not form for each in (*within, op)):
            return "a region or a rule gives it another precision"
        for eqn in (start.eqn, op.eqn):
            dtypes = [jx.dtype_of(x) for x in (*eqn.invars, *eqn.outvars)]
            if planner.rule_of(eqn).op_class is not OpClass.LOWER or not form.takes(dtypes):
                return "its products do not run in the compute dtype: see their rows"
        query, key = start.eqn.invars[1 - k], start.eqn.invars[k]
        sizes: dict[Any, Any] = dict(enumerate(weights.aval.shape))
        for atom, its in ((query, of_query), (value, of_value)):
            sizes |= {axis: n for axis, n in zip(its, atom.aval.shape, strict=True) if isinstance(axis, str)}
        queries = [axis for axis in of_query if isinstance(axis, int) and axis not in of_key]
        varied = [axis for its in (*[x[2] for x in biases], *[x[1] for x in masks]) for axis in its]
        groups = _groups(of_query, queries, shared, varied, sizes) | {
            "keys": tuple([axis for axis in of_key if axis in along]),
            "terms": tuple([axis for axis in of_query if isinstance(axis, str)]),
            "features": tuple([axis for axis in of_value if isinstance(axis, str)]),
        }
        arrays = [(query, "query", of_query, 0), (key, "key", of_key, 0), (value, "value", of_value, 0)]
        variants = []
        for options, said, lengths in (_said(masks, groups, sizes), ({"is_causal": False}, [], [])):
            left = [(x.atom, "mask", its, (x.keep, x.other)) for x, its in masks if (x, its) not in said]
            given = [*arrays, *temperatures, *biases, *left, *lengths]
            described = tuple([(role, tuple(its), n) for _, role, its, n in given])
            fixed = tuple((options | {"scale": scale}).items()), described, tuple(groups.items()), tuple(sizes.items())
            axes_out = tuple([axis for axis in result if axis is not None])
            attention = _Attention(kernel, form.dtype, *fixed, axes_out, op.eqn.outvars[0].aval, jx.dtype_of(query))
            variants.append((attention, tuple([x[0] for x in given])))
        return _Match(frozenset(within), variants)

    def _first_op(self, term: Any) -> str:
        """Returns the name of the op that scores start with."""
        atom = term.product if isinstance(term, Scaled) else term
        while (name := self._values.name(atom)) in _ELEMENTWISE:
            operands = [x for x in filter(_is_var, self._values.eqns[atom].invars) if x not in self._consts]
            if not operands:
                break
            atom = operands[0]
        return "reshape" if name == "dot_general" else name or "an input"

    def _near_softmax(self, weights: Any) -> str | None:
        """Returns what stands between a softmax, or a quotient that is almost one, and the product that reads it."""
        values, atoms = self._values, [weights]
        for atom in atoms:
            name = values.name(atom)
            operands: Sequence[Any] = values.eqns[atom].invars if name in _ELEMENTWISE else ()
            forms = {x: values.read(x).form for x in filter(_is_var, operands) if x in values.exponentials}
            if name == "div" and (top := forms.get(operands[0])) and top.is_exp and softmax_of(top) is None:
                return "its denominator is not the sum of the exponentials alone"
            if any(softmax_of(form) is not None for form in forms.values()):
                return f"`{name}` between the softmax and the product, as dropout is"
            atoms += [x for x in forms if x not in atoms and len(atoms) < 20]
        return None

    def rewritten(self) -> Any:
        """Returns the jaxpr, closed, with the kernel in place of each attention."""
        needed, kept = {*filter(_is_var, self._outs)}, list[Any]()
        # A call is opened if attention ends in it, or reads a value that it computes and does not return.
        opened = {call for op in self._kernels for call in op.calls}
        for atom in [x for op in self._kernels for x in op.eqn.invars if x in self._made]:
            opened |= {call for call in self._made[atom].calls if atom not in call.eqn.outvars}

        def keep(ops: Sequence[_Op]) -> None:
            for op in reversed(ops):
                if op in opened:
                    keep(op.inside)
                elif op.eqn.effects or not needed.isdisjoint(op.eqn.outvars):
                    needed.update(filter(_is_var, op.eqn.invars))
                    kept.append(op.eqn)

        keep(self._ops)
        consts = {var: x for var, x in self._consts.items() if var in needed}
        jaxpr = self._jaxpr.replace(constvars=[*consts], eqns=kept[::-1], outvars=self._outs)
        return ClosedJaxpr(jaxpr, [*consts.values()])


_ELEMENTWISE = {"mul", "div", "select_n", "add", "sub", "max", "transpose", "reshape", "convert_element_type"}


def _is_var(atom: Any) -> bool:
    return isinstance(atom, Var)


def _named(names: Mapping[Any, Any], atom: Any) -> Any:
    return names.get(atom, atom) if isinstance(atom, Var) else atom


def _with_names(eqn: Any, names: Mapping[Any, Any]) -> Any:
    invars, outvars = ([_named(names, atom) for atom in atoms] for atoms in (eqn.invars, eqn.outvars))
    return eqn.replace(invars=invars, outvars=outvars)


def _aliases(outvars: Sequence[Any], names: Mapping[Any, Any], results: Sequence[Any]) -> dict[Any, Any]:
    """Returns the names of results that are an operand, a constant, or another result."""
    pairs = zip(outvars, [_named(names, atom) for atom in results], strict=True)
    return {var: name for var, name in pairs if name is not var}


def _leaves(ops: Sequence[_Op]) -> Iterator[_Op]:
    """Yields equations, in place of a call that is read in place those in it."""
    for op in ops:
        yield from _leaves(op.inside) if op.inside else [op]


def _names_of(eqn: Any, result: Sequence[Any]) -> list[list[Any]]:
    """Returns names for the axes of both operands of a product, and those of the result, which are given."""
    sums, shares = eqn.params["dimension_numbers"]
    free, sides = iter(result[len(shares[0]) :]), []
    for side, atom in enumerate(eqn.invars):
        same = dict(zip(shares[side], result, strict=False)) | {axis: f"sum{i}" for i, axis in enumerate(sums[side])}
        sides.append([same[axis] if axis in same else next(free) for axis in range(len(atom.aval.shape))])
    return [*sides, [*result]]


def _groups(of_query: Any, queries: Any, shared: Any, varied: Any, sizes: Any) -> dict[str, Axes]:
    """Returns the groups of the axes of queries.

    The lengths are along the axis that a mask or a bias varies along, or else the longest; other axes of queries alone
    are heads that share keys. Of the axes that queries and keys share, those behind the lengths are heads, as in
    (batch, length, heads, features), or else the last one.
    """
    lengths = [axis for axis in queries if axis in varied]
    if not lengths:
        lengths = sorted(queries, key=lambda axis: -sizes[axis] if isinstance(sizes[axis], int) else 0)[:1]
    behind = of_query[of_query.index(lengths[0]) :] if lengths else []
    heads = [axis for axis in shared if axis in behind] or shared[1:][-1:]
    groups = tuple([axis for axis in queries if axis not in lengths])
    rows = tuple([axis for axis in shared if axis not in heads])
    return {"rows": rows, "lengths": tuple(lengths), "groups": groups, "heads": tuple(heads)}


def _said(masks: Sequence[Any], groups: Mapping[str, Axes], sizes: Any) -> tuple[dict[str, Any], list[Any], list[Any]]:
    """Returns masks as options and numbers of keys of a kernel, and those of the masks that this says all of."""
    left, right, said, lengths = math.inf, math.inf, [], []
    for condition, axes in masks:
        bounds = [_bound(line, axes, groups, sizes) for line in condition.lines or ()] or [(-1, -1)]
        if min(map(min, bounds)) >= 0:
            left, right = (min(ends) for ends in zip((left, right), *bounds, strict=True))
            said.append((condition, axes))
        elif condition.length is not None:
            atom, own, plus, along = condition.length
            its = placed(own, axes)
            is_of_rows = {*its} - {None} <= {*groups["rows"]} and groups["keys"] == (axes[along],)
            if is_of_rows and jnp.issubdtype(jx.dtype_of(atom), jnp.integer):
                said.append((condition, axes))
                lengths.append((atom, "key_value_seq_lengths", its, plus))
    options: dict[str, Any] = {"is_causal": right == 0}
    if left < math.inf or 0 < right < math.inf:
        ends = zip((left, right), (groups["lengths"], groups["keys"]), strict=True)
        options["local_window_size"] = tuple([sizes[axis] if math.isinf(n) else int(n) for n, (axis,) in ends])
    return options, said, lengths


def _bound(line: Line, axes: Axes, groups: Mapping[str, Axes], sizes: Any) -> tuple[float, float]:
    """Returns how far before and behind a query its keys may be; -1 if a line says something else."""
    factors = {axis: n for axis, n in zip(axes, line.factors, strict=True) if n and axis is not None}
    is_static = all(isinstance(sizes[axis], int) for axis in factors)
    if is_static and line.number + sum(min(n * (sizes[axis] - 1), 0) for axis, n in factors.items()) >= 0:
        return math.inf, math.inf
    slopes = [factors.pop(axis, 0) for axis in (*groups["lengths"], *groups["keys"])]
    ends = {(1, -1): (math.inf, line.number), (-1, 1): (line.number, math.inf)}
    return ends.get(tuple(slopes), (-1, -1)) if not factors else (-1, -1)


def _between(first: Any, weights: Any, stops: Any, ops: Sequence[_Op]) -> set[_Op]:
    """Returns the equations, among some, that compute weights from a product, other than through some values."""
    reads, chain, needed, within = {first}, list[_Op](), {weights}, set[_Op]()
    for op in ops:
        if not reads.isdisjoint(filter(_is_var, op.eqn.invars)):
            chain.append(op)
            reads.update([x for x in op.eqn.outvars if x not in stops])
    for op in reversed(chain):
        if not needed.isdisjoint(op.eqn.outvars):
            within.add(op)
            needed.update([x for x in filter(_is_var, op.eqn.invars) if x not in stops])
    return within


def _read_again(match: _Match, matches: Any, readers: Any) -> str:
    """Returns what reads the scores or the weights of an attention again; empty if nothing does."""
    allowed = {*matches}.union(*[each.within for each in matches.values()])
    atoms = [x for op in match.within for x in op.eqn.outvars]
    others = [reader for x in atoms for reader in readers.get(x, ()) if reader not in allowed]
    if not others or others[0] is None:
        return "its weights are returned" if others else ""
    if jx.is_of_derivative(others[0].eqn.source_info.name_stack):
        return "its derivative is in the program as well: write `jax.grad(autocast(f))` for `autocast(jax.grad(f))`"
    eqns = [others[0].eqn, *[call.eqn for call in others[0].calls[::-1]]]
    lines = [str(frame) for eqn in eqns for frame in jx.frames_of(eqn)]
    return f"its weights are read again at {lines[0]}" if lines else "its weights are read again"


# The primitives whose derivatives are those of JAX, which refuses none.
_DIFFERENTIABLE = {name for name, rule in RULES.items() if not (isinstance(rule, Rule) and rule.is_kernel)}
_DIFFERENTIABLE |= {"jit", "cast_inputs", "iota", "and", "or", "not"}


def _taken(op: _Op, match: _Match) -> tuple[int, Any, str]:
    """Returns the first variant of an attention that the kernel takes, as a jaxpr, or None.

    And the words of the kernel, if it takes none, or takes this one and refuses its derivative.
    """
    words = ""
    for i, (attention, reads) in enumerate(match.variants):
        jaxpr, call = None, _call_of(attention)

        def gradients(*arrays: Any, call: Any = call) -> Any:
            out, pull = jax.vjp(lambda *qkv: call(*qkv, *arrays[3:]), *arrays[:3])
            return pull(out)

        try:
            jaxpr = _traced(op, call, reads)
            if not _primitives_in(jaxpr) <= _DIFFERENTIABLE:  # it takes as long to trace as the kernel
                _traced(op, gradients, reads)
            return i, jaxpr, ""
        except Exception as error:
            words = f"{type(error).__name__}: {error}".partition("\n")[0]
        if jaxpr is not None:
            return i, jaxpr, words
    return 0, None, words


def _written(op: _Op, within: Sequence[_Op]) -> tuple[Callable[..., Any], list[Any]]:
    """Returns an attention as the program computes it, and the values that it reads."""
    eqns = [*[each.eqn for each in within], op.eqn]
    made = {var for eqn in eqns for var in eqn.outvars}
    free = [*dict.fromkeys([x for eqn in eqns for x in filter(_is_var, eqn.invars) if x not in made])]

    def written(*args: Any) -> Any:
        env = dict(zip(free, args, strict=True))
        for eqn in eqns:
            operands = [env[x] if isinstance(x, Var) else x.val for x in eqn.invars]
            env.update(zip(eqn.outvars, jx.apply_as_traced(eqn, operands), strict=True))
        return env[eqns[-1].outvars[0]]

    return written, free


def _with_derivative_of(call: Callable, written: Callable, n: int, name: str, words: str) -> Callable[..., Any]:
    """Returns a function of `n` arrays, and those of another function, which is differentiated in its place."""

    @jax.custom_vjp
    def attend(*arrays: Any) -> Any:
        return call(*arrays[:n])

    def forward(*arrays: Any) -> Any:
        warn(f"`{name}` refuses the derivative of attention, which is computed as it is written: {words}")
        return jax.vjp(written, *arrays[n:])

    attend.defvjp(forward, lambda pull, cotangent: (*[None] * n, *pull(cotangent)))
    return attend


def _traced(op: _Op, fun: Callable, operands: Sequence[Any]) -> Any:
    """Returns a function as a jaxpr of one equation that calls it, in the settings of another equation."""
    with jx.versions.context_of(op.eqn):
        return jx.trace(fun, [atom.aval for atom in operands])


class _Body(NamedTuple):
    """A jaxpr with a kernel in it, as a function in its place, what was found in it, and what makes it anew."""

    jaxpr: Any
    found: list[Found]
    remake: Callable[[], "_Body"]

    def __call__(self, *args: Any) -> list[Any]:
        # In a `shard_map` types say along which axes of the mesh values vary, where it is traced and nowhere else.
        opened, consts = jx.open_jaxpr(self.remake().jaxpr)
        return jax.core.eval_jaxpr(opened, consts, *args)


_primitives, _bodies = jx.Cache(), jx.Cache()


def _may_have_attention(jaxpr: Any) -> bool:
    """Whether a jaxpr, or one inside it, has products and exponentials."""
    names = _primitives_in(jaxpr)
    return "dot_general" in names and not names.isdisjoint(EXPONENTIALS)


def _primitives_in(jaxpr: Any) -> frozenset[str]:
    opened, _ = jx.open_jaxpr(jaxpr)

    def find() -> frozenset[str]:
        inside = [jx.inner_jaxprs(eqn) for eqn in opened.eqns if eqn.primitive.name in jx.HIGHER_ORDER]
        return frozenset([eqn.primitive.name for eqn in opened.eqns]).union(
            *[_primitives_in(inner) for each in inside for inner in each]
        )

    return _primitives(opened, (), find)


def _rewritten(jaxpr: Any, given: Sequence[Any], region: Region, *args: Any) -> _Body:
    """Returns a jaxpr with the kernel in place of each attention, the same for the same jaxpr."""
    opened, consts = jx.open_jaxpr(jaxpr)

    def rewrite() -> tuple[Any, list[Found]]:
        program = _Program(jaxpr, given, region, *args)
        return program.rewritten() if program.is_changed else None, program.found

    key = tuple(map(id, consts)), tuple(given), region, *args, jax.sharding.get_abstract_mesh()
    new, found = _bodies(opened, key, rewrite)
    return _Body(new or jaxpr, found, lambda: _rewritten(jaxpr, given, region, *args))


def with_kernel(jaxpr: Any, planner: Planner, region: Region, kernel: Any) -> tuple[Any, list[Found]]:
    """Returns a closed jaxpr with a kernel in place of each attention, and each softmax that a product reads.

    Args:
        jaxpr: the program.
        planner: knows the rules of its ops, and the regions that they are in.
        region: the region around it. Its format is that of the kernel.
        kernel: an `implementation` of `jax.nn.dot_product_attention`, or a function with its signature.
    """
    opened, _ = jx.open_jaxpr(jaxpr)
    if not _may_have_attention(jaxpr) or any(map(jx.is_reference, opened.invars)):
        return jaxpr, []
    body = _rewritten(jaxpr, [None] * len(opened.invars), region, planner, region.format, kernel)
    return body.jaxpr, body.found


def name_of(kernel: Any) -> str:
    """Returns what `explain` and warnings call a kernel."""
    return kernel if isinstance(kernel, str) else getattr(kernel, "__name__", type(kernel).__name__)
