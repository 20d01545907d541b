"""Evaluates a jaxpr op by op on concrete values and records the ops that make values non-finite."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jmp_amp._jaxpr import Branches, Call, Loop, apply_as_traced, dtype_of, evaluate, marks_in, structure_of
from jmp_amp._loss_scale import LOSS_SCALE
from jmp_amp.debug._cell import Cell, cell_of
from jmp_amp.debug._float32 import evaluate_in_float32
from jmp_amp.debug._node import Node
from jmp_amp.debug._place import Place, PlaceId, argument_id


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

    @property
    def eqn(self) -> JaxprEqn:
        """The equation of the op."""
        return self.place.eqns[-1]


class Evaluation:
    """One evaluation of a program.

    Attributes:
        nonfinite_ops: the ops that made values non-finite, by the id of their place, in program order.
        allowed: the ids of the ops and arguments that may introduce non-finite values; zeros replace the non-finite
            values that any other op or argument introduces. None allows all.
        trip_counts: the number of iterations of each `while` loop that was entered, by the id of its place. A loop that
            is given one runs no more iterations than that: with values replaced, it might never end.
        loss_factor: multiplies the loss scale of `amp.value_and_grad`.
        nodes: the results of all ops, in program order.
    """

    def __init__(
        self,
        allowed: Collection[PlaceId] | None = None,
        trip_counts: Mapping[PlaceId, int] | None = None,
        loss_factor: float = 1.0,
    ) -> None:
        self.nonfinite_ops: dict[PlaceId, NonFiniteOp] = {}
        self.allowed = allowed
        self.trip_counts = dict(trip_counts or {})
        self.loss_factor = loss_factor
        self.nodes: list[Node] = []

    def run_program(self, program: Any, arrays: Sequence[Any]) -> list[Cell]:
        """Evaluates a program on its arguments; one with NaN or +inf is the cause `argument_id`."""
        return self.run(program, [self._argument(x, argument_id(i)) for i, x in enumerate(arrays)])

    def run(self, jaxpr: Any, args: Sequence[Cell], place: Place = Place()) -> list[Cell]:  # noqa: B008 (immutable)
        """Evaluates the jaxpr at `place`."""
        indices = itertools.count()

        def apply(eqn: JaxprEqn, operands: list[Cell]) -> Sequence[Cell]:
            return self._equation(operands, place.equation(next(indices), eqn))

        def literal(atom: Literal) -> Cell:
            return cell_of(np.asarray(atom.val, dtype_of(atom)), is_constant=True)

        return evaluate(jaxpr, args, apply, cell_of, literal)

    def _is_allowed(self, cause: PlaceId) -> bool:
        return self.allowed is None or cause in self.allowed

    def _argument(self, x: Any, cause: PlaceId) -> Cell:
        cell = cell_of(x)
        # -inf is often intended, as in a mask.
        if not (cell.has_nan or (cell.has_inf and np.isposinf(np.asarray(x)).any())):
            return cell
        return cell._replace(causes=frozenset({cause})) if self._is_allowed(cause) else cell_of(_zero_nonfinite(x))

    def _equation(self, operands: list[Cell], place: Place) -> Sequence[Cell]:
        eqn = place.eqns[-1]
        match structure_of(eqn):
            case Call(jaxpr, inputs, is_inline=True):
                return self.run(jaxpr, [operands[i] for i in inputs], place)
            case Branches(jaxprs, inputs):
                index = min(max(int(operands[0].value), 0), len(jaxprs) - 1)
                return self.run(jaxprs[index], [operands[i] for i in inputs], place)
            case Loop(length=None) as loop if place.id in self.trip_counts:
                return self._while(loop, operands, place)
            case Loop() as loop:
                # Compiled as a whole, a loop runs faster; iterations matter only if its results are non-finite.
                results = self._apply(eqn, operands)
                if all(x.is_finite for x in results):
                    return results
                run = self._while if loop.length is None else self._scan
                return run(loop, operands, place)
        return self._op(operands, place)

    def _op(self, operands: list[Cell], place: Place) -> list[Cell]:
        outs = _mark_underflow(self._apply(place.eqns[-1], operands), operands, place)
        if all(out.is_finite for out in outs) or any(x.causes for x in operands if not x.is_finite):
            return outs
        introduces_nan = any(out.has_nan for out in outs) and not any(x.has_nan for x in operands)
        if not all(x.is_finite for x in operands) and not introduces_nan:
            return outs
        if not self._is_allowed(place.id):
            return [out if out.is_finite else cell_of(_zero_nonfinite(out.value)) for out in outs]
        self.nonfinite_ops[place.id] = NonFiniteOp(place, tuple(operands), tuple(outs))
        return [out if out.is_finite else out._replace(causes=frozenset({place.id})) for out in outs]

    def _apply(self, eqn: JaxprEqn, operands: Sequence[Cell]) -> list[Cell]:
        outs = apply_as_traced(eqn, [x.value for x in operands])
        if self.loss_factor != 1 and applies_loss_scale(eqn):
            outs = [x * jnp.asarray(self.loss_factor, x.dtype) for x in outs]
        cells = [cell_of(x, operands, eqn) for x in outs]
        self.nodes += [cell.node for cell in cells]
        return cells

    def _scan(self, loop: Loop, operands: list[Cell], place: Place) -> Sequence[Cell]:
        carry, xs = operands[loop.carry], operands[loop.xs]
        ys: dict[int, list[Cell]] = {}
        steps = range(loop.length)
        for i in reversed(steps) if place.eqns[-1].params["reverse"] else steps:
            slices = [cell_of(lax.dynamic_index_in_dim(x.value, np.int32(i), keepdims=False), [x]) for x in xs]
            outs = self.run(loop.body, [*operands[loop.consts], *carry, *slices], place.step(0, i))
            carry, ys[i] = outs[: loop.n_carry], outs[loop.n_carry :]
        if not ys:
            return self._apply(place.eqns[-1], operands)
        columns = zip(*(ys[i] for i in steps), strict=True)
        return [*carry, *(cell_of(jnp.stack([y.value for y in column]), column) for column in columns)]

    def _while(self, loop: Loop, operands: list[Cell], place: Place) -> Sequence[Cell]:
        carry = operands[loop.carry]
        limit = self.trip_counts.get(place.id)
        for i in itertools.count() if limit is None else range(limit):
            (predicate,) = self.run(loop.cond, [*operands[loop.cond_consts], *carry], place.step(0, i))
            self.trip_counts[place.id] = i
            if not np.any(predicate.value):
                break
            new = self.run(loop.body, [*operands[loop.consts], *carry], place.step(1, i))
            carry = [_select(predicate.value, x, old) for x, old in zip(new, carry, strict=True)]
        return carry


def applies_loss_scale(eqn: JaxprEqn) -> bool:
    """Whether an equation multiplies the loss, or the cotangent of the loss, by the scale of `amp.value_and_grad`."""
    return eqn.primitive.name == "mul" and LOSS_SCALE in marks_in(eqn.source_info.name_stack)


def _mark_underflow(outs: list[Cell], operands: Sequence[Cell], place: Place) -> list[Cell]:
    """Sets `underflow` to `place` in the results of a float16 op that has fewer zeros in float32."""
    if not any(out.n_zeros and out.value.dtype == jnp.float16 and not out.underflow for out in outs):
        return outs
    in_float32 = map(cell_of, evaluate_in_float32(place.eqns[-1], [x.value for x in operands]) or [])
    if not any(low.n_zeros > full.n_zeros for low, full in zip(outs, in_float32, strict=False)):
        return outs
    return [out._replace(underflow=out.underflow or place) if out.n_zeros else out for out in outs]


def _zero_nonfinite(x: Any) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def _select(predicate: Any, new: Cell, old: Cell) -> Cell:
    """Returns the next carry of a `while` loop; under `vmap`, the elements that are done keep their values."""
    if not np.ndim(predicate):
        return new
    predicate = lax.broadcast_in_dim(predicate, np.shape(new.value), range(np.ndim(predicate)))
    return cell_of(lax.select(predicate, new.value, old.value), [new, old])
