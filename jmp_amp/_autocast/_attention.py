"""Finds `softmax(scale * q @ k.T + bias, masked) @ v` in a program, and calls a kernel in its place."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._plan import Region
from jmp_amp._autocast._planner import Planner
from jmp_amp._autocast._primitives import OpClass
from jmp_amp._autocast._softmax import (
    Axes,
    Condition,
    Fact,
    Length,
    Line,
    Mask,
    Node,
    Op,
    conditions,
    fact_of,
    form_of,
    softmax_of,
)
from jmp_amp._cast_inputs import cast_inputs
from jmp_amp._formats import Format


class _Match(NamedTuple):
    """One attention of the program.

    Attributes:
        leaves: the values that it reads: queries, keys, values, biases and flags.
        within: the equations between the two products, and the first product.
        variants: how to compute it from the arrays of the leaves; the first one that the kernel takes is used.
    """

    leaves: tuple[Node, ...]
    within: frozenset[Op]
    variants: "list[_Attention]"


def _match(
    op: Op, ops: Sequence[Op], places: Mapping[Op, int], planner: Planner, form: Format, kernel: Any
) -> _Match | str | None:
    """Returns the attention that ends in a product, why it is none, or None if the product reads no softmax."""
    softmaxes = [softmax_of(form_of(node)) if node.has_exp else None for node in op.operands]
    side, found = int(softmaxes[0] is None), softmaxes[0] or softmaxes[1]
    if found is None:
        return next(filter(None, map(_near_softmax, op.operands)), None)
    scores, along = found
    weights, value = op.operands[side], op.operands[1 - side]
    terms = [(term, axes, n) for (term, axes), n in scores.terms.items()]
    whole = [x for x in terms if getattr(x[0], "name", "") == "dot_general" and {*weights.axes} <= {*x[1], None}]
    if not whole:
        names_of_terms = [f"`{_first_op(term)}`" for term, *_ in terms if isinstance(term, Node)]
        return f"{' and '.join(names_of_terms)} between a product and the softmax"
    first, axes, scale = whole[0]
    assert first.op is not None
    # An axis of an array is named by its place in the weights, by a string if it is none of theirs.
    of_products = _named(first.eqn), _named(op.eqn)
    places_of = dict(zip(of_products[0][2], axes, strict=True))
    names: list[list[Any]] = [[places_of.get(axis, axis) for axis in each] for each in of_products[0][:2]]
    ends: dict[str, Any] = {axis: f"v{axis}" for axis in of_products[1][2]} | dict(
        zip(of_products[1][side], weights.axes, strict=True)
    )
    of_value = [ends[axis] for axis in of_products[1][1 - side]]
    out = [ends[axis] for axis in of_products[1][2] if ends[axis] is not None]
    k = int(not along <= {*names[0]})
    queries = [axis for axis in names[1 - k] if isinstance(axis, int) and axis not in names[k]]
    shared = [axis for axis in names[k] if isinstance(axis, int) and axis not in along]
    shared.sort(key=lambda axis: names[1 - k].index(axis) if axis in names[1 - k] else -1)
    keys = [axis for axis in names[k] if axis in along]
    if {*keys} != along or not along.isdisjoint(out):
        return "the softmax, or the product that reads it, is along other axes than the keys"
    if not along <= {axis for axis in of_value if isinstance(axis, int)} <= along | {*shared}:
        return "the values have an axis that the keys lack"
    biases = [x for x in terms if x is not whole[0] and not isinstance(x[0], Mask)]
    masks = [x for term, axes, _ in terms if isinstance(term, Mask) for x in conditions(term.node, axes, term.keep)]
    between = ops[places[first.op] : places[op]]
    within = _between(first, weights, [x.node for x in masks] + [term for term, *_ in biases], between) | {first.op}
    if not all(isinstance(term, Node) for term, *_ in biases):
        return "a sum of exponentials between a product and the softmax"
    if any(planner.enter(each.region, each.eqn).format is not form for each in (*within, op)):
        return "a region or a rule gives it another precision"
    for each in (first.op, op):
        dtypes = [jx.dtype_of(x) for x in (*each.operands, *each.outs)]
        if planner.rule_of(each.eqn).op_class is not OpClass.LOWER or not form.takes(dtypes):
            return "its products do not run in the compute dtype: see their rows"
    sizes: dict[Any, Any] = dict(enumerate(weights.shape))
    for node, its in ((first.operands[1 - k], names[1 - k]), (value, of_value)):
        sizes |= {axis: n for axis, n in zip(its, node.shape, strict=True) if isinstance(axis, str)}
    layout = _Layout.of(names[1 - k], queries, keys, shared, of_value, sizes, [x[1] for x in (*biases, *masks)])
    lengths = [x.length for x in masks if x.length is not None and layout.has_length(x.length)]
    others = [*[tuple(x[1]) for x in biases], *[x.axes for x in masks], *[x.axes for x in lengths]]
    arranged = tuple([tuple(axes) for axes in (names[1 - k], names[k], of_value)] + others)
    factors, variants = tuple([n for *_, n in biases]), []
    for options, left, said in (*[(*layout.structured(masks), lengths)], ({"is_causal": False}, masks, [])):
        keeps = tuple([None if x not in left or x.length in said else x.keep for x in masks])
        plus = tuple([x.plus if x in said else None for x in lengths])
        items = tuple(options.items())
        variants.append(
            _Attention(kernel, form.dtype, scale, layout, arranged, factors, tuple(out), items, keeps, plus)
        )
    leaves = first.operands[1 - k], first.operands[k], value, *[x[0] for x in (*biases, *masks, *lengths)]
    return _Match(leaves, frozenset(within), variants)


def _named(eqn: Any) -> tuple[list[str], list[str], list[str]]:
    """Returns names for the axes of both operands of a product, and those of the result."""
    sums, shares = eqn.params["dimension_numbers"]
    sides: list[list[str]] = []
    for side, atom in enumerate(eqn.invars):
        same = {
            axis: f"{kind}{i}"
            for kind, axes in (("sum", sums), ("shared", shares))
            for i, axis in enumerate(axes[side])
        }
        sides.append([same.get(axis, f"{side}.{axis}") for axis in range(len(atom.aval.shape))])
    free = [axis for side in sides for axis in side if "." in axis]
    return sides[0], sides[1], [f"shared{i}" for i in range(len(shares[0]))] + free


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How the axes of the arrays of one attention are those of a kernel: the axes that each of these consists of."""

    rows: tuple[Any, ...]
    lengths: tuple[Any, ...]
    groups: tuple[Any, ...]
    heads: tuple[Any, ...]
    keys: tuple[Any, ...]
    terms: tuple[Any, ...]
    features: tuple[Any, ...]
    sizes: tuple[tuple[Any, Any], ...]

    @classmethod
    def of(
        cls, of_query: Any, queries: Any, keys: Any, shared: Any, of_value: Any, sizes: Any, others: Any
    ) -> "_Layout":
        """Returns the layout for the names of the axes of arrays.

        The lengths are along the axis of the queries that a mask or a bias varies along, or else the longest; other
        axes of queries are heads that share keys. Of the axes that queries and keys share, those behind the lengths
        are heads, as in (batch, length, heads, features), or else the last one.
        """
        lengths = [axis for axis in queries if any(axis in axes for axes in others)]
        if not lengths:
            lengths = sorted(queries, key=lambda axis: -sizes[axis] if isinstance(sizes[axis], int) else 0)[:1]
        behind = of_query[of_query.index(lengths[0]) :] if lengths else []
        heads = [axis for axis in shared if axis in behind] or shared[1:][-1:]
        return cls(
            rows=tuple([axis for axis in shared if axis not in heads]),
            lengths=tuple(lengths),
            groups=tuple([axis for axis in queries if axis not in lengths]),
            heads=tuple(heads),
            keys=tuple(keys),
            terms=tuple([axis for axis in of_query if isinstance(axis, str)]),
            features=tuple([axis for axis in of_value if isinstance(axis, str)]),
            sizes=tuple(sizes.items()),
        )

    def size(self, axis: Any) -> Any:
        """Returns the number of elements of an axis."""
        return dict(self.sizes)[axis]

    @property
    def of_inputs(self) -> list[list[tuple[Any, ...]]]:
        """The axes of queries, keys and values: (batch, length, heads, features)."""
        ends = (self.keys, self.heads, self.terms), (self.keys, self.heads, self.features)
        return [[self.rows, *each] for each in ((self.lengths, self.heads + self.groups, self.terms), *ends)]

    @property
    def of_scores(self) -> list[tuple[Any, ...]]:
        """The axes of biases and masks: (batch, heads, length, keys)."""
        return [self.rows, self.heads + self.groups, self.lengths, self.keys]

    def arranged(self, x: Any, axes: Axes, groups: Sequence[Sequence[Any]], is_whole: bool = False) -> Any:
        """Returns an array with an axis for each group; unless whole, one of one element if it has no axis of it."""
        names, order = [axis for axis in axes if axis is not None], [axis for group in groups for axis in group]
        x = jnp.reshape(x, [self.size(axis) for axis in names])
        x = jnp.transpose(x, [names.index(axis) for axis in order if axis in names])
        x = jnp.reshape(x, [self.size(axis) if axis in names else 1 for axis in order])
        kept = [is_whole or not {*group}.isdisjoint(names) for group in groups]
        shapes = [[self.size(axis) if keep else 1 for axis in group] for group, keep in zip(groups, kept, strict=True)]
        return jnp.reshape(jnp.broadcast_to(x, [n for shape in shapes for n in shape]), list(map(math.prod, shapes)))

    def leave(self, x: Any, axes: Sequence[Any]) -> Any:
        """Returns the result of a kernel with these axes."""
        own = self.rows + self.lengths + self.heads + self.groups + self.features
        return jnp.transpose(jnp.reshape(x, [self.size(axis) for axis in own]), [own.index(axis) for axis in axes])

    def structured(self, masks: Sequence[Condition]) -> tuple[dict[str, Any], list[Condition]]:
        """Returns masks as options of a kernel, as far as it has some for them, and the masks that are left."""
        left, right, others = math.inf, math.inf, []
        for mask in masks:
            bounds = [self._bound(line, mask.axes) for line in mask.lines or ()] or [(-1, -1)]
            if min(map(min, bounds)) < 0:
                others.append(mask)
            else:
                left, right = (min(ends) for ends in zip((left, right), *bounds, strict=True))
        options: dict[str, Any] = {"is_causal": right == 0}
        if left < math.inf or 0 < right < math.inf:
            ends = zip((left, right), (self.lengths, self.keys), strict=True)
            options["local_window_size"] = tuple([self.size(axis) if math.isinf(n) else int(n) for n, (axis,) in ends])
        return options, others

    def has_length(self, length: Length) -> bool:
        """Whether a number of keys is one for each row."""
        is_of_rows = {*length.axes} - {None} <= {*self.rows}
        return is_of_rows and self.keys == (length.along,) and jnp.issubdtype(jx.dtype_of(length.node), jnp.integer)

    def _bound(self, line: Line, axes: Axes) -> tuple[float, float]:
        """Returns how far before and behind a query its keys may be; -1 if a line says something else."""
        factors = {axis: n for axis, n in zip(axes, line[1], strict=True) if n and axis is not None}
        is_static = all(isinstance(self.size(axis), int) for axis in factors)
        if is_static and line[0] + sum(min(n * (self.size(axis) - 1), 0) for axis, n in factors.items()) >= 0:
            return math.inf, math.inf
        slopes = [factors.pop(axis, 0) for axis in (*self.lengths, *self.keys)]
        ends = {(1, -1): (math.inf, line[0]), (-1, 1): (line[0], math.inf)}
        return ends.get(tuple(slopes), (-1, -1)) if not factors else (-1, -1)


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
        options: dict[str, Any] = {"bias": None, "mask": None} | arrays | dict(self.options)
        if not isinstance(self.kernel, str):
            return self.kernel(query, key, value, **options)
        # It takes values as wide as the keys only, and cuDNN masks and biases of all queries and keys.
        width, widest = value.shape[-1], max(query.shape[-1], value.shape[-1])
        query, key, value = (jnp.pad(x, [(0, 0)] * 3 + [(0, widest - x.shape[-1])]) for x in (query, key, value))
        for name in {"bias", "mask"} & arrays.keys():
            options[name] = jnp.broadcast_to(arrays[name], (*arrays[name].shape[:2], query.shape[1], key.shape[1]))
        options["implementation"] = self.kernel
        return jax.nn.dot_product_attention(query, key, value, **options)[..., :width]


@functools.lru_cache(maxsize=1024)
def _in_dtype(kernel: _Kernel, dtype: Any) -> Callable[..., Any]:
    """Returns the kernel in a dtype, the same function for equal ones, which JAX then traces once.

    In a program that is not cast yet its result has the dtype of the queries there.
    """
    call = jax.jit(kernel)

    def attention(*args: Any) -> Any:
        return call(*[x.astype(dtype) if jx.is_floating(x) else x for x in args]).astype(args[0].dtype)

    return cast_inputs(dtype)(attention)


@dataclasses.dataclass(frozen=True)
class _Attention:
    """One attention as a function of the arrays that it reads; equal ones are traced once.

    Attributes:
        kernel: the kernel.
        dtype: the dtype that it runs in.
        scale: what it multiplies the scores by.
        layout: how the axes of its arrays are found.
        axes: the names of the axes of each array: queries, keys, values, biases and flags.
        factors: what each bias is multiplied by.
        result: the names of the axes of the result.
        options: the options of the kernel.
        keeps: for each flag, the value where scores are kept; None if an option or a length says it.
        plus: what is added to each number of keys; None for one that is not used.
    """

    kernel: Any
    dtype: Any
    scale: float
    layout: _Layout
    axes: tuple[Axes, ...]
    factors: tuple[float, ...]
    result: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...]
    keeps: tuple[Any, ...]
    plus: tuple[int | None, ...]

    def __call__(self, *arrays: Any) -> Any:
        """Computes the attention, without axes of one element in the result."""
        n_scores = len(self.factors) + len(self.keeps)
        layouts = [*self.layout.of_inputs, *[self.layout.of_scores] * n_scores, *[[self.layout.rows]] * len(self.plus)]
        wholes = [True] * 3 + [False] * len(arrays)
        query, key, value, *others = map(self.layout.arranged, arrays, self.axes, layouts, wholes)
        inputs = {"query": query, "key": key, "value": value}
        if self.factors:
            total = functools.reduce(
                jnp.add, [n * x.astype(np.float32) for x, n in zip(others, self.factors, strict=False)]
            )
            # Scores below all of the dtype are masked as well by the least of it, and with -inf a row may be NaN.
            inputs["bias"] = jnp.maximum(total, float(jnp.finfo(self.dtype).min))
        flags = zip(others[len(self.factors) : n_scores], self.keeps, strict=True)
        if kept := [x == keep for x, keep in flags if keep is not None]:
            inputs["mask"] = functools.reduce(jnp.logical_and, kept)
        if ends := [x + n for x, n in zip(others[n_scores:], self.plus, strict=True) if n is not None]:
            ends = [jnp.minimum(x, key.shape[1]).astype(np.int32) for x in ends]
            inputs["key_value_seq_lengths"] = jnp.broadcast_to(functools.reduce(jnp.minimum, ends), query.shape[:1])
        kernel = _Kernel(self.kernel, tuple(inputs), (("scale", self.scale), *self.options))
        return self.layout.leave(_in_dtype(kernel, self.dtype)(*inputs.values()), self.result)

    def __str__(self) -> str:
        said = [f"{name}={value}" for name, value in self.options if value] + ["bias"] * bool(self.factors)
        for name, values in (("mask", self.keeps), ("key_value_seq_lengths", self.plus)):
            said += [name] * any(value is not None for value in values)
        return ", ".join(said)


@functools.partial(jax.jit, static_argnums=0, inline=jx.versions.INLINE)
def _attend(attention: _Attention, *arrays: Any) -> Any:
    return attention(*arrays)


def _between(first: Node, weights: Node, stops: Sequence[Node], ops: Sequence[Op]) -> set[Op]:
    """Returns the equations, among some, that compute weights from a product, other than through some values."""
    reads, chain, needed, within = {first}, list[Op](), {weights}, set[Op]()
    for op in ops:
        if not reads.isdisjoint(op.operands):
            chain.append(op)
            reads.update([x for x in op.outs if x not in stops])
    for op in reversed(chain):
        if not needed.isdisjoint(op.outs):
            within.add(op)
            needed.update([x for x in op.operands if x not in stops])
    return within


def _first_op(node: Node) -> str:
    """Returns the name of the op that scores start with."""
    while node.name in _PASSED and (operands := [x for x in node.operands if x.value is None]):
        node = operands[0]
    return "reshape" if node.name == "dot_general" else node.name or "an input"


def _near_softmax(weights: Node) -> str | None:
    """Returns what stands between a softmax, or a quotient that is almost one, and the product that reads it."""
    nodes = [weights]
    for node in nodes:
        if node.name == "div" and (top := form_of(node.operands[0])).is_exp and softmax_of(top) is None:
            return "its denominator is not the sum of the exponentials alone"
        if node.name in _PASSED and len(nodes) < 20:
            floats = [x for x in node.operands if jx.is_floating(x) and x not in nodes]
            if any(softmax_of(form_of(x)) is not None for x in floats):
                return f"`{node.name}` between the softmax and the product, as dropout is"
            nodes += floats
    return None


_PASSED = {"mul", "div", "select_n", "add", "sub", "max", "transpose", "reshape", "convert_element_type"}


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

    def __init__(self, jaxpr: Any, facts: Sequence[Fact], region: Region, planner: Planner, *args: Any) -> None:
        self._planner, self._args = planner, args
        opened, _ = jx.open_jaxpr(jaxpr)
        self._inputs = [Node(var.aval, fact=fact) for var, fact in zip(opened.invars, facts, strict=True)]
        self._ops: list[Op] = []
        self._outs = self._read(jaxpr, self._inputs, region, (), self._ops)
        self._results = [atom.aval for atom in opened.outvars]
        self.found: list[Found] = []
        self._matches = self._find()
        self.body = jx.Body(self, [var.aval for var in opened.invars])

    @property
    def is_changed(self) -> bool:
        """Whether it calls the kernel."""
        return any(found.kernel for found in self.found)

    def _read(self, jaxpr: Any, inputs: Any, region: Region, calls: tuple[Op, ...], ops: list[Op]) -> Sequence[Node]:
        """Reads the equations of a jaxpr into `ops`, and returns its results."""

        def apply(eqn: Any, operands: list[Node]) -> Sequence[Node]:
            op = Op(eqn, region, operands, calls)
            ops.append(op)
            structure, holder = jx.structure_of(eqn), jx.HIGHER_ORDER.get(eqn.primitive.name)
            if structure is not None and holder is not None and holder.run is not None:
                inside = self._planner.enter(region, eqn)
                op.parts = [self._part(op, structure, *each, inside) for each in jx.entries(structure)]
                is_kept = any(part.is_changed for part in op.parts) or jx.versions.is_checkpoint(
                    eqn.primitive, **eqn.params
                )
                if isinstance(structure, jx.Call) and structure.is_inline and structure.rule is None and not is_kept:
                    operands, op.parts = [operands[i] for i in structure.operands], []
                    op.outs = self._read(structure.jaxpr, operands, inside, (*calls, op), op.inside)
                    return op.outs
            op.outs = [Node(var.aval, op) for var in eqn.outvars]
            return op.outs

        def constant(x: Any) -> Node:
            return Node(jax.typeof(x), value=x)

        return jx.evaluate(jaxpr, inputs, apply, constant, lambda atom: Node(atom.aval, value=atom.val))

    def _part(self, op: Op, structure: Any, jaxpr: Any, places: Sequence[int], region: Region) -> "_Part":
        """Returns a jaxpr of an equation; nothing is known of what a loop changes."""
        consts = structure.consts if isinstance(structure, jx.Loop) else slice(0, len(op.operands))
        facts = [fact_of(op.operands[i]) if consts.start <= i < consts.stop else Fact() for i in places]
        return _part_of(jaxpr, facts, region, self._planner, *self._args)

    def _find(self) -> dict[Op, tuple[_Match, _Attention]]:
        """Returns, by the last product of each attention, what it reads and what computes it."""
        form, kernel = self._args
        readers, ops = self._readers(), list(_first_order(self._ops))
        products = [op for op in ops if op.eqn.primitive is jax.lax.dot_general_p and op.outs[0] in readers]
        places = {op: i for i, op in enumerate(ops)}
        outcomes: dict[Op, Any] = {op: _match(op, ops, places, self._planner, form, kernel) for op in products}
        chosen, refused, tried = dict[Op, Any](), set[Op](), dict[Any, Any]()
        while True:
            matches = {op: match for op, match in outcomes.items() if isinstance(match, _Match)}
            dropped = {op: why for op, match in matches.items() if (why := _read_again(match, matches, readers))}
            for op in matches.keys() - dropped.keys() - chosen.keys():
                key = tuple(matches[op].variants), tuple([x.aval for x in matches[op].leaves])
                if key not in tried:  # layers are alike
                    tried[key] = _taken(op, matches[op])
                chosen[op], words = tried[key]
                if chosen[op] is None:
                    dropped[op] = words
                    refused.add(op)
            if not dropped:
                break
            outcomes |= dropped
        for op in ops:
            eqns = (*[call.eqn for call in op.calls], op.eqn)
            self.found += [each._replace(eqns=eqns + each.eqns) for part in op.parts for each in part.found]
            if op in matches:
                self.found.append(Found(eqns, name_of(kernel), str(chosen[op])))
            elif outcomes.get(op) is not None:
                self.found.append(Found(eqns, "", outcomes[op], op in refused))
        return {op: (match, chosen[op]) for op, match in matches.items()}

    def _readers(self) -> dict[Node, list[Op | None]]:
        """Returns the equations that read each value, of those that have a use; None for the results."""
        readers: dict[Node, list[Op | None]] = {node: [None] for node in self._outs}
        for op in reversed(list(_first_order(self._ops))):
            if op.eqn.effects or not readers.keys().isdisjoint(op.outs):
                for node in op.operands:
                    readers.setdefault(node, []).append(op)
        return readers

    def __call__(self, *args: Any) -> list[Any]:
        """Evaluates the jaxpr, with the kernel in place of each attention."""
        env: dict[Node, Any] = dict(zip(self._inputs, args, strict=True))
        needed = {*self._outs}
        # A call is evaluated op by op if attention ends in it, or reads a value that it computes and does not return.
        opened = {call for op in self._matches for call in op.calls}
        for match, _ in self._matches.values():
            opened |= {call for x in match.leaves if x.op for call in x.op.calls if x not in call.outs}

        def steps(ops: Sequence[Op]) -> list[Op]:
            kept: list[Op] = []
            for op in reversed(ops):
                if op in opened:
                    kept += reversed(steps(op.inside))
                elif op.eqn.effects or not needed.isdisjoint(op.outs):
                    needed.update(self._matches[op][0].leaves if op in self._matches else op.operands)
                    kept.append(op)
            return kept[::-1]

        def read(node: Node) -> Any:
            return node.value if node.value is not None else env[node]

        outs: Sequence[Any]
        for op in steps(self._ops):
            if op in self._matches:
                match, attention = self._matches[op]
                with jx.versions.context_of(op.eqn):
                    x = jnp.reshape(_attend(attention, *map(read, match.leaves)), op.outs[0].shape)
                    outs = [jx.as_type(x, op.outs[0].aval)]
            elif any(part.is_changed for part in op.parts):
                run: Any = jx.HIGHER_ORDER[op.eqn.primitive.name].run
                with jx.versions.context_of(op.eqn):
                    outs = run(op.eqn, [part.body for part in op.parts], [read(x) for x in op.operands])
            else:
                outs = jx.apply_as_traced(op.eqn, [read(x) for x in op.operands])
            for node, x in zip(op.outs, outs, strict=True):
                env.setdefault(node, x)
        return [jx.as_type(read(node), aval) for node, aval in zip(self._outs, self._results, strict=True)]


def _first_order(ops: Sequence[Op]) -> Iterator[Op]:
    """Yields equations, in place of a call that is read in place those in it."""
    for op in ops:
        yield from _first_order(op.inside) if op.inside else [op]


def _read_again(match: _Match, matches: Any, readers: Any) -> str:
    """Returns what reads the scores or the weights of an attention again; empty if nothing does."""
    allowed = {*matches}.union(*[each.within for each in matches.values()])
    others = [reader for op in match.within for x in op.outs for reader in readers.get(x, ()) if reader not in allowed]
    if not others or others[0] is None:
        return "its weights are returned" if others else ""
    if jx.is_of_derivative(others[0].eqn.source_info.name_stack):
        return "its derivative is in the program as well: write `jax.grad(autocast(f))` for `autocast(jax.grad(f))`"
    eqns = [others[0].eqn, *[call.eqn for call in others[0].calls[::-1]]]
    lines = [str(frame) for eqn in eqns for frame in jx.frames_of(eqn)]
    return f"its weights are read again at {lines[0]}" if lines else "its weights are read again"


def _taken(op: Op, match: _Match) -> tuple[Any, str]:
    """Returns the first variant of an attention that the kernel takes, or None and the words of the kernel."""
    words = ""
    for variant in match.variants:
        try:
            with jx.versions.context_of(op.eqn):
                jax.eval_shape(functools.partial(_attend, variant), *[x.aval for x in match.leaves])
            return variant, ""
        except Exception as error:
            words = f"{type(error).__name__}: {error}".partition("\n")[0]
    return None, words


_parts = jx.Cache(drop=lambda part: part.__dict__.clear())


def _part_of(jaxpr: Any, facts: Sequence[Fact], region: Region, planner: Planner, form: Format, kernel: Any) -> _Part:
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
    has_exp = jx.holds(jaxpr, lambda primitive, *_, **__: primitive is jax.lax.exp_p)
    if not has_exp or any(map(jx.is_reference, opened.invars)):
        return jaxpr, []
    avals = [var.aval for var in opened.invars]
    part = _Part(jaxpr, [Fact()] * len(avals), region, planner, region.format, kernel)
    return jx.trace(part, avals) if part.is_changed else jaxpr, part.found


def name_of(kernel: Any) -> str:
    """Returns what `explain` and warnings call a kernel."""
    return kernel if isinstance(kernel, str) else getattr(kernel, "__name__", type(kernel).__name__)
