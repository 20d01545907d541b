"""Evaluates a jaxpr op by op on concrete values, and remembers which ops made values that are not finite."""

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn, Literal

from jmp_amp._jaxpr import Branches, Call, Loop, apply_as_traced, dtype_of, evaluate, structure_of
from jmp_amp.debug._cells import Cell, Path, Place, in_float32, look


class Event(NamedTuple):
    """An op that made values that are not finite: out of finite ones, or NaN out of infinite constants."""

    place: Place
    operands: tuple[Cell, ...]
    outs: tuple[Any, ...]

    @property
    def eqn(self) -> JaxprEqn:
        """The equation."""
        return self.place.eqns[-1]


class Evaluation:
    """One evaluation of a program.

    Attributes:
        events: what happened, by place, in the order of the program.
        kept: the events that may happen: all others get zeros in the place of what is not finite. None keeps all.
        lengths: the number of iterations of each `while` that was entered; at most so many are run again. With other
            values, because not all events were kept, a loop might never end.
    """

    def __init__(self, kept: Collection[Path] | None = None, lengths: Mapping[Path, int] | None = None) -> None:
        self.events: dict[Path, Event] = {}
        self.kept = kept
        self.lengths = dict(lengths or {})

    def run_program(self, program: Any, arrays: Sequence[Any]) -> list[Cell]:
        """Evaluates a program on its arguments. One with NaN or +inf counts as an event at `argument_path`."""
        return self.run(program, [self._argument(x, argument_path(i)) for i, x in enumerate(arrays)])

    def _argument(self, x: Any, path: Path) -> Cell:
        cell = look(x)
        # -inf may be meant, in a mask.
        if not (cell.nan or (cell.inf and np.isposinf(np.asarray(x)).any())):
            return cell
        kept = self.kept is None or path in self.kept
        return cell._replace(events=frozenset({path})) if kept else look(_cleaned(x))

    def run(self, jaxpr: Any, args: Sequence[Cell], place: Place = Place()) -> list[Cell]:  # noqa: B008 (immutable)
        """Evaluates a jaxpr."""
        indices = itertools.count()

        def apply(eqn: JaxprEqn, operands: list[Cell]) -> Sequence[Cell]:
            return self._equation(operands, place.at(next(indices), eqn))

        def literal(atom: Literal) -> Cell:
            return look(np.asarray(atom.val, dtype_of(atom)), constant=True)

        return evaluate(jaxpr, args, apply, look, literal)

    def _equation(self, operands: list[Cell], place: Place) -> Sequence[Cell]:
        eqn = place.eqns[-1]
        match structure_of(eqn):
            case Call(jaxpr, places, is_inline=True):
                return self.run(jaxpr, [operands[i] for i in places], place)
            case Branches(jaxprs, places):
                index = min(max(int(operands[0].value), 0), len(jaxprs) - 1)
                return self.run(jaxprs[index], [operands[i] for i in places], place)
            case Loop(length=None) as loop if place.path in self.lengths:
                return self._while(loop, operands, place)
            case Loop() as loop:
                # A loop whose results are finite has nothing to hide, and runs faster as a whole.
                results = [look(x, operands) for x in _bind(eqn, operands)]
                if not any(x.bad for x in results):
                    return results
                run = self._while if loop.length is None else self._scan
                return run(loop, operands, place)
        return self._op(operands, place)

    def _op(self, operands: list[Cell], place: Place) -> list[Cell]:
        outs = [look(x, operands) for x in _bind(place.eqns[-1], operands)]
        if any(out.zeros and out.value.dtype == jnp.float16 and not out.rounded for out in outs):
            full = map(look, in_float32(place.eqns[-1], operands) or [])
            rounds = any(x.zeros > y.zeros for x, y in zip(outs, full, strict=False))
            outs = [out._replace(rounded=out.rounded or place) if rounds and out.zeros else out for out in outs]
        if not any(out.bad for out in outs) or any(x.events for x in operands if x.bad):
            return outs
        made_nan = any(out.nan for out in outs) and not any(x.nan for x in operands)
        if any(x.bad for x in operands) and not made_nan:
            return outs
        if self.kept is not None and place.path not in self.kept:
            return [look(_cleaned(out.value)) if out.bad else out for out in outs]
        self.events[place.path] = Event(place, tuple(operands), tuple(out.value for out in outs))
        return [out._replace(events=frozenset({place.path})) if out.bad else out for out in outs]

    def _scan(self, loop: Loop, operands: list[Cell], place: Place) -> Sequence[Cell]:
        carry, xs = operands[loop.carry], operands[loop.xs]
        ys: dict[int, list[Cell]] = {}
        steps = range(loop.length)
        for i in reversed(steps) if place.eqns[-1].params["reverse"] else steps:
            slices = [look(lax.dynamic_index_in_dim(x.value, np.int32(i), keepdims=False), [x]) for x in xs]
            outs = self.run(loop.body, [*operands[loop.consts], *carry, *slices], place.iterated(0, i))
            carry, ys[i] = outs[: loop.n_carry], outs[loop.n_carry :]
        if not ys:
            return [look(x, operands) for x in _bind(place.eqns[-1], operands)]
        columns = zip(*(ys[i] for i in steps), strict=True)
        return [*carry, *(look(jnp.stack([y.value for y in column]), column) for column in columns)]

    def _while(self, loop: Loop, operands: list[Cell], place: Place) -> Sequence[Cell]:
        carry = operands[loop.carry]
        limit = self.lengths.get(place.path)
        for i in itertools.count() if limit is None else range(limit):
            (go,) = self.run(loop.cond, [*operands[loop.cond_consts], *carry], place.iterated(0, i))
            self.lengths[place.path] = i
            if not np.any(go.value):
                break
            new = self.run(loop.body, [*operands[loop.consts], *carry], place.iterated(1, i))
            carry = [_where(go.value, x, old) for x, old in zip(new, carry, strict=True)]
        return carry


def argument_path(i: int) -> Path:
    """What stands for the place of an argument."""
    return -1, i


def _cleaned(x: Any) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype))


def _where(go: Any, new: Cell, old: Cell) -> Cell:
    """Under `vmap`, the elements of a loop that are done stay as they are."""
    if not np.ndim(go):
        return new
    go = lax.broadcast_in_dim(go, np.shape(new.value), range(np.ndim(go)))
    return look(lax.select(go, new.value, old.value), [new, old])


def _bind(eqn: JaxprEqn, operands: Sequence[Cell]) -> list[Any]:
    return apply_as_traced(eqn, [x.value for x in operands])
