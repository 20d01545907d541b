"""Evaluates a program op by op on concrete values, and records the ops that make values non-finite."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_amp._autocast import rule_of
from jmp_amp._jaxpr import (
    HIGHER_ORDER,
    Body,
    Branches,
    Call,
    Loop,
    Provenance,
    apply_as_traced,
    aval_with,
    bind,
    context_of,
    dtype_of,
    equations_in,
    evaluate,
    holds_jaxprs,
    inner_jaxprs,
    is_floating,
    is_inexact,
    marks_in,
    open_jaxpr,
    shape_of,
    structure_of,
    trace,
)
from jmp_amp._loss_scale import LOSS_SCALE


def _moves_one_array(eqn: JaxprEqn) -> bool:
    """Whether an op only moves, pads or casts the elements of its first operand."""
    rule = rule_of(eqn)
    arrays = [atom for atom in eqn.invars if is_floating(atom) and shape_of(atom)]
    is_cast = rule.is_cast or eqn.primitive.name == "reduce_precision"
    return is_cast or (rule.moves and len(arrays) < 2)


# They read the bits of a value, or call code that was written for its dtype.
_KEEP_DTYPES = {"bitcast_convert_type", "pure_callback", "io_callback", "debug_callback", "ffi_call"}


@dataclasses.dataclass(frozen=True)
class Values:
    """A summary of the values of an array. `str` formats it as `float16[4,8] from -3 to 410, 2 of 32 inf`.

    Attributes:
        dtype: the name of the dtype.
        shape: the shape.
        min: the smallest finite value, of the real part if complex; None if no value is finite.
        max: the largest finite value, likewise.
        zeros: the number of zeros.
        infs: the number of infinities.
        nans: the number of NaNs.

    Examples:
        >>> import jax.numpy as jnp
        >>> import jmp_amp as amp
        >>> amp.debug.first_nonfinite(lambda x: jnp.log(x - 1))(jnp.ones(2)).operands[0]
        Values(dtype='float32', shape=(2,), min=0.0, max=0.0, zeros=2, infs=0, nans=0)
    """

    dtype: str
    shape: tuple[int, ...]
    min: float | None
    max: float | None
    zeros: int
    infs: int
    nans: int

    @property
    def is_finite(self) -> bool:
        """Whether there are no infinities and no NaNs."""
        return self.infs == self.nans == 0

    def __str__(self) -> str:
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.min is not None:
            text += f" = {self.min:.4g}" if self.min == self.max else f" from {self.min:.4g} to {self.max:.4g}"
        for count, name in ((self.infs, "inf"), (self.nans, "NaN")):
            if count:
                text += f", {count} of {math.prod(self.shape)} {name}"
        return text


_NO_VALUES = Values("", (), None, None, 0, 0, 0)


def values_of(x: Any) -> Values:
    """Returns the summary of an array; an empty one, without a dtype, unless it is floating or complex."""
    if not is_inexact(x):
        return _NO_VALUES
    counts, extremes = map(np.asarray, _summary(x))
    low, high = extremes.tolist()
    return Values(x.dtype.name, x.shape, *((low, high) if low <= high else (None, None)), *counts.tolist())


@jax.jit
def _summary(x: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers of zeros, infinities and NaNs, and the smallest and the largest finite value."""
    counts = [jnp.sum(flags, dtype=jnp.int32) for flags in (x == jnp.zeros((), x.dtype), jnp.isinf(x), jnp.isnan(x))]
    real, is_finite = jnp.real(x), jnp.isfinite(x)
    real = real.astype(jnp.float32) if is_low(real.dtype) else real
    inf = jnp.asarray(jnp.inf, real.dtype)
    low = jnp.min(jnp.where(is_finite, real, inf), initial=inf)
    high = jnp.max(jnp.where(is_finite, real, -inf), initial=-inf)
    return jnp.stack(counts), jnp.stack([low, high])


class Node:
    """A value of an evaluation in its dataflow. It holds no array, so that arrays can be freed.

    Attributes:
        values: its summary.
        eqn: the op that computed it; None for arguments, literals and slices.
        primitive: the name of that op; empty if there is none.
        operands: the values that the op read.
        is_constant: whether it was computed from literals alone.
        constant: its value, if it is a constant of one value; else None.
        origin: the value whose elements it has, before any casts and changes of shape.
        number: equal for the values of an evaluation that are computed in the same way from the same values.
    """

    number: int

    def __init__(self, values: Values, eqn: JaxprEqn | None, operands: Sequence["Node"], is_constant: bool) -> None:
        self.values, self.eqn, self.operands, self.is_constant = values, eqn, operands, is_constant
        self.primitive = eqn.primitive.name if eqn is not None else ""
        self.constant = values.min if is_constant and values.min == values.max else None
        is_moved = len(operands) == 1 if eqn is None else _moves_one_array(eqn)
        self.origin: Node = operands[0].origin if operands and is_moved else self

    @property
    def expression(self) -> Any:
        """A key that only nodes with the same `number` share."""
        if self.eqn is None:
            return self if self.constant is None else self.constant
        try:
            params = frozenset(self.eqn.params.items())
        except TypeError:  # a parameter that cannot be hashed
            return self
        return self.primitive, params, tuple(x.origin.number for x in self.operands)


PlaceId = tuple[int, ...]


class Place(NamedTuple):
    """The position of an equation in one evaluation of a program.

    Attributes:
        id: the index of each equation in `eqns` within its jaxpr, and the jaxpr and the iteration of each loop.
        eqns: the equations that contain this one, outermost first, and the equation itself.
        iteration: the index of the iteration of each loop that contains the equation, outermost first.
    """

    id: PlaceId = ()
    eqns: tuple[JaxprEqn, ...] = ()
    iteration: tuple[int, ...] = ()

    @property
    def eqn(self) -> JaxprEqn:
        """The equation."""
        return self.eqns[-1]

    def step(self, jaxpr: int, i: int) -> "Place":
        """Returns the place of iteration `i` of one of the jaxprs of the loop at this place."""
        return Place((*self.id, jaxpr, i), self.eqns, (*self.iteration, i))


def argument_id(i: int) -> PlaceId:
    """Returns the id of argument `i` of the program, which differs from the id of every equation."""
    return -1, i


class Cell(NamedTuple):
    """An array and the facts that an evaluation tracks about it.

    Attributes:
        value: the array.
        node: the value in the dataflow.
        underflow: the place of an upstream float16 op that returned more zeros than it returns in float32; None if
            there is no such op, or no zero in the array.
        causes: the ids of the upstream ops and arguments that introduced its non-finite values; empty if they come
            from constants alone, or from -inf in an argument.
    """

    value: Any
    node: Node
    underflow: Place | None = None
    causes: frozenset[PlaceId] = frozenset()

    @property
    def is_finite(self) -> bool:
        """Whether all values of the array are finite."""
        return self.node.values.is_finite


class NonFiniteOp(NamedTuple):
    """An op that computed non-finite values from finite operands, or NaN from infinite constants.

    Attributes:
        place: the place of the op.
        operands: the cells of its operands.
        outs: the cells of its results.
    """

    place: Place
    operands: tuple[Cell, ...]
    outs: tuple[Cell, ...]


@dataclasses.dataclass(eq=False)
class Evaluation:
    """One evaluation of a program.

    Attributes:
        program: the program, a closed jaxpr.
        arrays: its arguments; one with NaN or +inf is the cause `argument_id`.
        allowed: the ids of the ops and arguments that may introduce non-finite values; zeros replace the non-finite
            values that any other op or argument introduces. None allows all.
        trip_counts: the number of iterations of each `while` loop that was entered, by the id of its place. A loop that
            is given one runs no more iterations than that: with values replaced, it might never end.
        loss_factor: multiplies the loss scale of `amp.value_and_grad`.
        results: the results of the program.
        nonfinite_ops: the ops that made values non-finite, by the id of their place, in program order.
        readers: the results of the ops that read a value, also after casts and changes of shape, by its `origin`.
    """

    program: Any
    arrays: Sequence[Any]
    allowed: Collection[PlaceId] | None = None
    trip_counts: dict[PlaceId, int] = dataclasses.field(default_factory=dict)
    loss_factor: float = 1.0

    def __post_init__(self) -> None:
        self.trip_counts = dict(self.trip_counts)
        self.nonfinite_ops: dict[PlaceId, NonFiniteOp] = {}
        self.readers: dict[Node, list[Node]] = collections.defaultdict(list)
        self._numbers: dict[Any, int] = {}
        arguments = [self._argument(x, argument_id(i)) for i, x in enumerate(self.arrays)]
        self.results = self._run(self.program, arguments, Place())

    @property
    def is_finite(self) -> bool:
        """Whether all results are finite."""
        return all(x.is_finite for x in self.results)

    def _run(self, jaxpr: Any, args: Sequence[Cell], place: Place) -> list[Cell]:
        """Evaluates the jaxpr at `place`."""
        indices = itertools.count()

        def apply(eqn: JaxprEqn, operands: list[Cell]) -> Sequence[Cell]:
            return self._equation(operands, Place((*place.id, next(indices)), (*place.eqns, eqn), place.iteration))

        def literal(atom: Any) -> Cell:
            return self._cell(_literal(atom), is_constant=True)

        return evaluate(jaxpr, args, apply, self._cell, literal)

    def _cell(
        self, value: Any, operands: Sequence[Cell] = (), eqn: JaxprEqn | None = None, *, is_constant: bool = False
    ) -> Cell:
        """Returns the cell of an array that the op of `eqn`, or a copy, computed from `operands`."""
        is_constant = is_constant or (len(operands) > 0 and all(x.node.is_constant for x in operands))
        node = Node(values_of(value), eqn, [x.node for x in operands], is_constant)
        node.number = self._numbers.setdefault(node.expression, len(self._numbers))
        underflow = next((x.underflow for x in operands if x.underflow), None) if node.values.zeros else None
        nonfinite = [] if node.values.is_finite else [x.causes for x in operands if not x.is_finite]
        return Cell(value, node, underflow, frozenset[PlaceId]().union(*nonfinite))

    def _is_allowed(self, cause: PlaceId) -> bool:
        return self.allowed is None or cause in self.allowed

    def _argument(self, x: Any, cause: PlaceId) -> Cell:
        cell = self._cell(x)
        # -inf is often intended, as in a mask.
        if cell.is_finite or not (cell.node.values.nans or np.isposinf(np.asarray(x)).any()):
            return cell
        return cell._replace(causes=frozenset({cause})) if self._is_allowed(cause) else self._cell(_zero_nonfinite(x))

    def _equation(self, operands: list[Cell], place: Place) -> Sequence[Cell]:
        match structure_of(place.eqn):
            case Call(jaxpr, inputs, is_inline=True):
                return self._run(jaxpr, [operands[i] for i in inputs], place)
            case Branches(jaxprs, inputs):
                index = min(max(int(operands[0].value), 0), len(jaxprs) - 1)
                return self._run(jaxprs[index], [operands[i] for i in inputs], place)
            case Loop() as loop:
                # Compiled as a whole, a loop runs faster; iterations matter only if its results are non-finite.
                if place.id not in self.trip_counts:
                    results = self._apply(place.eqn, operands)
                    if all(x.is_finite for x in results):
                        return results
                run = self._while if loop.length is None else self._scan
                return run(loop, operands, place)
        return self._op(operands, place)

    def _op(self, operands: list[Cell], place: Place) -> list[Cell]:
        outs = _mark_underflow(self._apply(place.eqn, operands), operands, place)
        if all(out.is_finite for out in outs) or any(x.causes for x in operands if not x.is_finite):
            return outs
        reads_nan, gives_nan = (any(x.node.values.nans for x in cells) for cells in (operands, outs))
        if not all(x.is_finite for x in operands) and (reads_nan or not gives_nan):
            return outs
        if not self._is_allowed(place.id):
            return [out if out.is_finite else self._cell(_zero_nonfinite(out.value)) for out in outs]
        self.nonfinite_ops[place.id] = NonFiniteOp(place, tuple(operands), tuple(outs))
        return [out if out.is_finite else out._replace(causes=frozenset({place.id})) for out in outs]

    def _apply(self, eqn: JaxprEqn, operands: Sequence[Cell]) -> list[Cell]:
        outs = apply_as_traced(eqn, [x.value for x in operands])
        if self.loss_factor != 1 and applies_loss_scale(eqn):
            outs = [x * jnp.asarray(self.loss_factor, x.dtype) for x in outs]
        cells = [self._cell(x, operands, eqn) for x in outs]
        for node in (cell.node for cell in cells if cell.node.origin is cell.node):
            for operand in node.operands:
                self.readers[operand.origin].append(node)
        return cells

    def _scan(self, loop: Loop, operands: list[Cell], place: Place) -> Sequence[Cell]:
        carry, xs = operands[loop.carry], operands[loop.xs]
        ys: dict[int, list[Cell]] = {}
        steps = range(loop.length)
        for i in reversed(steps) if place.eqn.params["reverse"] else steps:
            slices = [self._cell(lax.dynamic_index_in_dim(x.value, np.int32(i), keepdims=False), [x]) for x in xs]
            outs = self._run(loop.body, [*operands[loop.consts], *carry, *slices], place.step(0, i))
            carry, ys[i] = outs[: loop.n_carry], outs[loop.n_carry :]
        if not ys:
            return self._apply(place.eqn, operands)
        columns = zip(*(ys[i] for i in steps), strict=True)
        return [*carry, *(self._cell(jnp.stack([y.value for y in column]), column) for column in columns)]

    def _while(self, loop: Loop, operands: list[Cell], place: Place) -> Sequence[Cell]:
        carry = operands[loop.carry]
        limit = self.trip_counts.get(place.id)
        for i in itertools.count() if limit is None else range(limit):
            (predicate,) = self._run(loop.cond, [*operands[loop.cond_consts], *carry], place.step(0, i))
            self.trip_counts[place.id] = i
            if not np.any(predicate.value):
                break
            new = self._run(loop.body, [*operands[loop.consts], *carry], place.step(1, i))
            carry = [self._select(predicate.value, x, old) for x, old in zip(new, carry, strict=True)]
        return carry

    def _select(self, predicate: Any, new: Cell, old: Cell) -> Cell:
        """Returns the next carry of a `while` loop; under `vmap`, the elements that are done keep their values."""
        if not np.ndim(predicate):
            return new
        predicate = lax.broadcast_in_dim(predicate, np.shape(new.value), range(np.ndim(predicate)))
        return self._cell(lax.select(predicate, new.value, old.value), [new, old])


def applies_loss_scale(eqn: JaxprEqn) -> bool:
    """Whether an equation multiplies the loss, or the cotangent of the loss, by the scale of `amp.value_and_grad`."""
    return eqn.primitive.name == "mul" and LOSS_SCALE in marks_in(eqn.source_info.name_stack)


def _mark_underflow(outs: list[Cell], operands: Sequence[Cell], place: Place) -> list[Cell]:
    """Sets `underflow` to `place` in the results of a float16 op that has fewer zeros in float32."""
    zeros = [out.node.values.zeros for out in outs]
    if not any(n and out.value.dtype == jnp.float16 and not out.underflow for n, out in zip(zeros, outs, strict=True)):
        return outs
    in_float32 = evaluate_in_float32(place.eqn, [x.value for x in operands]) or []
    if not any(n > values_of(x).zeros for n, x in zip(zeros, in_float32, strict=False)):
        return outs
    return [out._replace(underflow=out.underflow or place) if out.node.values.zeros else out for out in outs]


def _zero_nonfinite(x: Any) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def _literal(atom: Any) -> np.ndarray:
    return np.asarray(atom.val, dtype_of(atom))


def is_low(dtype: Any) -> bool:
    """Returns whether `dtype` is a floating dtype of less than 32 bits."""
    return isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def evaluate_in_float32(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any] | None:
    """Evaluates a low-precision op in float32; returns None if the op does not run in float32."""
    params = {name: np.dtype(np.float32) if is_low(value) else value for name, value in eqn.params.items()}
    try:
        wide = [lax.convert_element_type(x, np.float32) if is_low(x.dtype) else x for x in operands]
        return bind(eqn, wide, **params)
    except Exception:  # a custom primitive may reject other dtypes, and a reference a cast, with any error
        return None


def has_low_precision(program: Any) -> bool:
    """Returns whether a program reads or computes values of less than 32 bits."""
    atoms = (atom for eqn, _ in equations_in(program, Provenance()) for atom in (*eqn.invars, *eqn.outvars))
    return any(is_low(dtype_of(atom)) for atom in atoms)


def program_in_float32(program: Any, arrays: Sequence[Any]) -> Any:
    """Returns a program without any casts to low precision, as a closed jaxpr; its results are float32, too.

    An op that does not run in float32, such as a kernel, keeps its dtypes. Constants keep the values that they were
    rounded to as the program was traced.
    """
    return trace(_in_float32(program), arrays)


def _in_float32(jaxpr: Any) -> Body:
    """Returns a jaxpr as a function of float32 arrays."""

    def run(*args: Any) -> list[Any]:
        wide = [_widened(x) for x in args]
        return evaluate(jaxpr, wide, _apply_in_float32, _widened, lambda atom: _widened(_literal(atom)))

    inputs = open_jaxpr(jaxpr)[0].invars
    return Body(run, [aval_with(x.aval, np.float32 if is_low(dtype_of(x)) else None) for x in inputs])


def _apply_in_float32(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    entry, structure = HIGHER_ORDER.get(eqn.primitive.name), structure_of(eqn)
    with context_of(eqn):
        if entry is not None and structure is not None and entry.run is not None:
            return entry.run(eqn, [_in_float32(jaxpr) for jaxpr, _ in inner_jaxprs(eqn)], operands)
        if isinstance(structure, Call):
            return _in_float32(structure.jaxpr)(*(operands[i] for i in structure.operands))
        if eqn.primitive.name not in _KEEP_DTYPES and not holds_jaxprs(eqn):
            outs = evaluate_in_float32(eqn, operands)
            if outs is not None:
                return outs
        pairs = zip(operands, map(dtype_of, eqn.invars), strict=True)
        narrow = [lax.convert_element_type(x, dtype) if is_low(dtype) else x for x, dtype in pairs]
        return [_widened(x) for x in bind(eqn, narrow)]


def _widened(x: Any) -> Any:
    return lax.convert_element_type(x, np.float32) if is_inexact(x) and is_low(x.dtype) else x
