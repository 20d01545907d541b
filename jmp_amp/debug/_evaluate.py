"""Evaluates a jaxpr op by op on concrete values, and remembers which ops made values that are not finite."""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmp_amp._autocast import _compat
from jmp_amp._autocast._decisions import dtype_of
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
        opened, consts = _compat.open_jaxpr(jaxpr)
        env = dict(zip(opened.constvars, map(look, consts), strict=True))
        env |= dict(zip(opened.invars, args, strict=True))

        def read(atom: Any) -> Cell:
            if isinstance(atom, Literal):
                return look(np.asarray(atom.val, dtype_of(atom)), constant=True)
            return env[atom]

        for i, (eqn, dead) in enumerate(_with_last_reads(opened)):
            outs = self._step(list(map(read, eqn.invars)), place.at(i, eqn))
            env.update(zip(eqn.outvars, outs, strict=True))
            for var in dead:
                del env[var]
        return list(map(read, opened.outvars))

    def _step(self, operands: list[Cell], place: Place) -> list[Cell]:
        eqn = place.eqns[-1]
        match eqn.primitive.name:
            case name if name in _compat.CALLS:
                return self.run(eqn.params[_compat.CALLS[name]], operands, place)
            case "cond":
                branches = eqn.params["branches"]
                index = min(max(int(operands[0].value), 0), len(branches) - 1)
                return self.run(branches[index], operands[1:], place)
            case "while" if place.path in self.lengths:
                return self._while(operands, place)
            case "scan" | "while" as name:
                # A loop whose results are finite has nothing to hide, and runs faster as a whole.
                results = [look(x, operands) for x in _bind(eqn, operands)]
                if not any(x.bad for x in results):
                    return results
                return self._scan(operands, results, place) if name == "scan" else self._while(operands, place)
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

    def _scan(self, operands: list[Cell], results: list[Cell], place: Place) -> list[Cell]:
        eqn = place.eqns[-1]
        n_consts, n_carry = _compat.scan_sizes(eqn)
        carry, xs = operands[n_consts : n_consts + n_carry], operands[n_consts + n_carry :]
        ys: dict[int, list[Cell]] = {}
        steps = range(eqn.params["length"])
        for i in reversed(steps) if eqn.params["reverse"] else steps:
            slices = [look(lax.dynamic_index_in_dim(x.value, np.int32(i), keepdims=False), [x]) for x in xs]
            outs = self.run(eqn.params["jaxpr"], [*operands[:n_consts], *carry, *slices], place.iterated(0, i))
            carry, ys[i] = outs[:n_carry], outs[n_carry:]
        if not ys:
            return results
        columns = zip(*(ys[i] for i in steps), strict=True)
        return [*carry, *(look(jnp.stack([y.value for y in column]), column) for column in columns)]

    def _while(self, operands: list[Cell], place: Place) -> list[Cell]:
        params = place.eqns[-1].params
        n_cond = params["cond_nconsts"]
        n_consts = n_cond + params["body_nconsts"]
        carry = operands[n_consts:]
        limit = self.lengths.get(place.path)
        for i in itertools.count() if limit is None else range(limit):
            (go,) = self.run(params["cond_jaxpr"], [*operands[:n_cond], *carry], place.iterated(0, i))
            self.lengths[place.path] = i
            if not np.any(go.value):
                break
            new = self.run(params["body_jaxpr"], [*operands[n_cond:n_consts], *carry], place.iterated(1, i))
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
    with _compat.context_of(eqn):
        return _compat.bind(eqn, [x.value for x in operands])


def _with_last_reads(jaxpr: Jaxpr) -> Iterator[tuple[JaxprEqn, list[Var]]]:
    """Adds the variables that can be freed after each equation."""
    seen = {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    dead = []
    for eqn in reversed(jaxpr.eqns):
        atoms = {atom for atom in (*eqn.invars, *eqn.outvars) if isinstance(atom, Var)}
        dead.append(list(atoms - seen))
        seen |= atoms
    yield from zip(jaxpr.eqns, reversed(dead), strict=True)
