"""Dataflow analyses of jaxprs: what is known of each value, and how each is read.

An analysis is a lattice (`bottom` and `join`), and a function that passes facts through a first-order equation. This
module passes them through calls, branches and loops, and reads a jaxpr once for each set of facts about its inputs
(Kildall, A unified approach to global program optimization, 1973). Facts must be hashable.

An analysis reads equations that have four attributes: `eqn`, the equation; `program`, how analyses enter its jaxprs, or
None for an op; `is_identity`, whether its results are its several operands, one by one; and `token`, an object that is
the same for equal ops of equal types, so that facts pass through each only once, or None.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from jax.extend.core import Jaxpr, Literal, Var

from jmp_amp._jaxpr._structures import Loop, Structure, entries
from jmp_amp._jaxpr._trace import Cache
from jmp_amp._jaxpr._versions import open_jaxpr

E = TypeVar("E", bound=Any)
T = TypeVar("T")
S = TypeVar("S")


class _Analysis(Generic[E, T]):
    bottom: T
    join: Callable[[T, T], T]
    transfer: Callable[..., Sequence[T]]
    _through: Callable[..., Sequence[T]]

    def __init__(self, equations_of: Callable[[Jaxpr], Sequence[E]]) -> None:
        """Takes a function that returns the equations of an open jaxpr."""
        self._equations_of = equations_of
        self._found, self._carries, self._ops = Cache(), Cache(), Cache(2**14)

    def _pass(self, equation: E, *facts: Any) -> Sequence[T]:
        """Passes facts through an equation, and only once through equal ops."""
        if equation.program is not None:
            return self._through(equation, *facts)
        if equation.is_identity:
            return facts[-1]
        if equation.token is None:
            return self.transfer(equation, *facts)
        return self._ops(self, (equation.token, facts), lambda: self.transfer(equation, *facts))


class Forward(_Analysis[E, T]):
    """An analysis that goes from the inputs of a jaxpr to its results.

    A fact is what is known of a value. A subclass defines `bottom`, `join` and `transfer`.

    Attributes:
        bottom: the fact about a value that nothing is known of.
        join: `join(a, b)` returns what is known of a value that is either of two.
        transfer: `transfer(equation, operands)` returns what is known of the results of a first-order equation, from
            what is known of its operands.
    """

    def constant(self, x: Any) -> T:
        """Returns what is known of a literal."""
        return self.bottom

    def constants(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> Sequence[T]:
        """Returns what is known of the constants of an open jaxpr."""
        return [self.bottom] * len(consts)

    def enter_loop(self, loop: Loop, carry: Sequence[T]) -> Sequence[T]:
        """Returns what is known of carries as they enter the body of a loop."""
        return carry

    def leave_loop(self, loop: Loop, outs: Sequence[T]) -> Sequence[T]:
        """Returns what is known of the results of a loop from those of its body."""
        return outs

    def widen(self, start: T, old: T, new: T) -> T:
        """Returns what is known of a carry that two iterations do not settle; `start` is the fact before them."""
        return new

    def find(self, jaxpr: Any, inputs: Sequence[T]) -> Mapping[Var, T]:
        """Returns what is known of the variables of a jaxpr; `bottom` for those that it leaves out.

        Args:
            jaxpr: the jaxpr.
            inputs: what is known of its inputs.
        """
        opened, consts = open_jaxpr(jaxpr)
        given = (*self.constants(opened, consts), *inputs)
        return self._found(opened, given, lambda: self._find(opened, given))

    def _find(self, jaxpr: Jaxpr, given: Sequence[T]) -> Mapping[Var, T]:
        pairs = zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True)
        known = {var: fact for var, fact in pairs if fact != self.bottom}
        for equation in self._equations_of(jaxpr):
            outs = self._pass(equation, self.of(known, equation.eqn.invars))
            pairs = zip(equation.eqn.outvars, outs, strict=True)
            known |= {var: fact for var, fact in pairs if fact is not self.bottom}
        return known

    def of(self, known: Mapping[Var, T], atoms: Sequence[Any]) -> tuple[T, ...]:
        """Returns what is known of variables and literals."""
        return tuple([self.constant(a.val) if isinstance(a, Literal) else known.get(a, self.bottom) for a in atoms])

    def outs(self, jaxpr: Any, inputs: Sequence[T]) -> tuple[T, ...]:
        """Returns what is known of the results of a jaxpr."""
        return self.of(self.find(jaxpr, inputs), open_jaxpr(jaxpr)[0].outvars)

    def inside(self, equation: E, operands: Sequence[T]) -> list[tuple[Any, tuple[T, ...]]]:
        """Returns the jaxprs of an equation, the condition of a loop first, and what is known of the inputs of each."""
        structure, facts = equation.program, list(operands)
        if isinstance(structure, Loop):
            body, _ = open_jaxpr(structure.body)
            facts[structure.carry] = self._carries(body, tuple(facts), lambda: self._settle(structure, operands))
        return [(jaxpr, tuple([facts[i] for i in places])) for jaxpr, places in entries(structure)]

    def _settle(self, loop: Loop, operands: Sequence[T]) -> tuple[T, ...]:
        """Returns what is known of the carries of a loop in every iteration."""
        carry = start = tuple(self.enter_loop(loop, operands[loop.carry]))
        for iteration in itertools.count():
            outs = self.outs(loop.body, (*operands[loop.consts], *carry, *operands[loop.xs]))[: loop.n_carry]
            new = tuple(self.enter_loop(loop, tuple(map(self.join, carry, outs))))
            if iteration > 1:
                new = tuple(map(self.widen, start, carry, new))
            if new == carry:
                break
            carry = new
        return carry

    def _through(self, equation: E, operands: Sequence[T]) -> Sequence[T]:
        inside, loop = self.inside(equation, operands), equation.program
        if not isinstance(loop, Loop):
            outs_of_each = [self.outs(*each) for each in inside]
            return [functools.reduce(self.join, facts) for facts in zip(*outs_of_each, strict=True)]
        body, inputs = inside[-1]
        return self.leave_loop(loop, self.outs(body, inputs) if loop.cond is None else inputs[loop.body_carry])


class Backward(_Analysis[E, T], Generic[E, S, T]):
    """An analysis that goes from the results of a jaxpr to its inputs, and reads what a `Forward` one found.

    A fact is what readers demand of a value. A subclass defines `bottom`, `condition`, `join` and `transfer`.

    Attributes:
        bottom: what is demanded of a value that nothing reads.
        join: `join(a, b)` returns what two readers demand of a value.
        transfer: `transfer(equation, operands, outs)` returns what a first-order equation demands of its operands, from
            what is known of them, and what is demanded of its results.
        condition: what is demanded of the result of the condition of a loop.
    """

    condition: T

    def __init__(self, equations_of: Callable[[Jaxpr], Sequence[E]], known: Forward[E, S]) -> None:
        """Takes a function that returns the equations of an open jaxpr, and the other analysis."""
        super().__init__(equations_of)
        self.known = known

    def enter_loop(self, loop: Loop, inputs: Sequence[S], outs: Sequence[T]) -> Sequence[T]:
        """Returns what is demanded of the carries that the body of a loop returns."""
        return outs

    def leave(self, structure: Structure, outs: Sequence[T], demands: Sequence[T]) -> Sequence[T]:
        """Returns what an equation that holds jaxprs demands of its operands.

        Args:
            structure: how it holds them.
            outs: what is demanded of its results.
            demands: what its jaxprs demand of its operands; `bottom` of the index of branches.
        """
        return demands

    def find(self, jaxpr: Any, inputs: Sequence[S], outs: Sequence[T]) -> Mapping[Var, T]:
        """Returns what is demanded of the variables of a jaxpr; `bottom` of those that it leaves out.

        Args:
            jaxpr: the jaxpr.
            inputs: what is known of its inputs.
            outs: what is demanded of its results.
        """
        opened, consts = open_jaxpr(jaxpr)
        key = *self.known.constants(opened, consts), *inputs, *outs
        return self._found(opened, key, lambda: self._find(opened, self.known.find(jaxpr, inputs), outs))

    def _find(self, opened: Jaxpr, known: Mapping[Var, S], outs: Sequence[T]) -> Mapping[Var, T]:
        demands: dict[Var, T] = {}

        def demand(atoms: Sequence[Any], facts: Sequence[T]) -> None:
            for atom, fact in zip(atoms, facts, strict=True):
                if isinstance(atom, Var):
                    demands[atom] = self.join(demands[atom], fact) if atom in demands else fact

        demand(opened.outvars, outs)
        for equation in reversed(self._equations_of(opened)):
            operands = self.known.of(known, equation.eqn.invars)
            of_results = tuple([demands.get(var, self.bottom) for var in equation.eqn.outvars])
            demand(equation.eqn.invars, self._pass(equation, operands, of_results))
        return demands

    def inside(
        self, equation: E, operands: Sequence[S], outs: Sequence[T]
    ) -> list[tuple[Any, tuple[S, ...], tuple[T, ...]]]:
        """Returns the jaxprs of an equation, what is known of the inputs of each, and the demands on its results."""
        found, loop = self.known.inside(equation, operands), equation.program
        if not isinstance(loop, Loop):
            return [(*each, tuple(outs)) for each in found]
        *before, (body, inputs) = found
        conditions = [(*each, (self.condition,)) for each in before]
        ys = outs[loop.n_carry :]
        carry = tuple(map(self.join, outs, self._of_operands(equation, conditions)[loop.carry]))
        while True:
            inside = [*conditions, (body, inputs, (*self.enter_loop(loop, inputs, carry), *ys))]
            new = tuple(map(self.join, carry, self._of_operands(equation, inside)[loop.carry]))
            if new == carry:
                return inside
            carry = new

    def _of_operands(self, equation: E, inside: Sequence[tuple[Any, tuple[S, ...], tuple[T, ...]]]) -> list[T]:
        """Returns what jaxprs of an equation demand of its operands."""
        demands = [self.bottom] * len(equation.eqn.invars)
        for (jaxpr, inputs, outs), (_, places) in zip(inside, entries(equation.program), strict=False):
            of_inputs = self.find(jaxpr, inputs, outs)
            for i, var in zip(places, open_jaxpr(jaxpr)[0].invars, strict=True):
                demands[i] = self.join(demands[i], of_inputs.get(var, self.bottom))
        return demands

    def _through(self, equation: E, operands: Sequence[S], outs: Sequence[T]) -> Sequence[T]:
        demands = self._of_operands(equation, self.inside(equation, operands, outs))
        return self.leave(equation.program, outs, demands)
