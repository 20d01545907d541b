"""Dataflow analyses of jaxprs: what is known of each value, and how each is read.

An analysis is a lattice (`bottom` and `join`), and a function that passes facts through a first-order equation. This
module passes them through calls, branches and loops, and reads a jaxpr once for each set of facts about its inputs
(Kildall, A unified approach to global program optimization, 1973). Facts must be hashable.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmp_amp._jaxpr._structures import Branches, Call, Loop, Structure
from jmp_amp._jaxpr._trace import Kept, Memo
from jmp_amp._jaxpr._versions import open_jaxpr

T = TypeVar("T")
S = TypeVar("S")


class Equation(Protocol):
    """An equation.

    Attributes:
        eqn: the equation.
        enters: how analyses enter its jaxprs; None for an op.
        op: a number that is the same for equal ops of equal types, so that facts pass through each only once; or None.
    """

    @property
    def eqn(self) -> JaxprEqn: ...
    @property
    def enters(self) -> Structure | None: ...
    @property
    def op(self) -> int | None: ...


def _transferred(memo: Memo, fun: Callable[..., Any], equation: Equation, *facts: Any) -> Any:
    """Returns the result of a function of an equation and of facts, the same for equal ops."""
    if equation.op is None:
        return fun(equation, *facts)
    return memo((equation.op, facts), lambda: fun(equation, *facts))


E = TypeVar("E", bound=Equation)
EquationsOf = Callable[[Jaxpr], Sequence[E]]


class Forward(Generic[E, T]):
    """An analysis that goes from the inputs of a jaxpr to its results.

    Attributes:
        bottom: what is known of a value of which nothing is known.
    """

    bottom: T

    def __init__(self, equations_of: EquationsOf[E]) -> None:
        """Takes a function that returns the equations of an open jaxpr."""
        self._equations_of = equations_of
        self._found, self._carries, self._ops = Kept(), Kept(), Memo()

    def join(self, a: T, b: T) -> T:
        """Returns what is known of a value that is either of two."""
        raise NotImplementedError

    def transfer(self, equation: E, operands: Sequence[T]) -> Sequence[T]:
        """Returns what is known of the results of a first-order equation."""
        raise NotImplementedError

    def constant(self, x: Any) -> T:
        """Returns what is known of a literal."""
        return self.bottom

    def constants(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> Sequence[T]:
        """Returns what is known of the constants of an open jaxpr."""
        return [self.bottom] * len(consts)

    def carried(self, loop: Loop, carry: Sequence[T]) -> Sequence[T]:
        """Returns what is known of carries as they enter the body of a loop."""
        return carry

    def left(self, loop: Loop, outs: Sequence[T]) -> Sequence[T]:
        """Returns what is known of the results of a loop from those of its body."""
        return outs

    def widen(self, old: T, new: T) -> T:
        """Returns what is known of a carry that is not settled after three iterations."""
        return new

    def find(self, jaxpr: Any, inputs: Sequence[T], consts: Sequence[Any] | None = None) -> Mapping[Var, T]:
        """Returns what is known of the variables of a jaxpr; `bottom` for those that it leaves out.

        Args:
            jaxpr: the jaxpr.
            inputs: what is known of its inputs.
            consts: the values of its constants, if it is open.
        """
        opened, closed_over = open_jaxpr(jaxpr)
        consts = closed_over if consts is None else consts
        given = (*self.constants(opened, consts), *inputs)
        return self._found(opened, given, lambda: self._find(opened, given))

    def _find(self, jaxpr: Jaxpr, given: Sequence[T]) -> Mapping[Var, T]:
        known = {
            var: fact for var, fact in zip((*jaxpr.constvars, *jaxpr.invars), given, strict=True) if fact != self.bottom
        }
        for equation in self._equations_of(jaxpr):
            operands = self.of(known, equation.eqn.invars)
            if equation.enters is None:
                outs = _transferred(self._ops, self.transfer, equation, operands)
            else:
                outs = self._through(equation, operands)
            for var, fact in zip(equation.eqn.outvars, outs, strict=True):
                if fact is not self.bottom:
                    known[var] = fact
        return known

    def of(self, known: Mapping[Var, T], atoms: Sequence[Any]) -> tuple[T, ...]:
        """Returns what is known of variables and literals."""
        return tuple([self.constant(a.val) if isinstance(a, Literal) else known.get(a, self.bottom) for a in atoms])

    def outs(self, jaxpr: Any, inputs: Sequence[T]) -> tuple[T, ...]:
        """Returns what is known of the results of a jaxpr."""
        return self.of(self.find(jaxpr, inputs), open_jaxpr(jaxpr)[0].outvars)

    def inside(self, equation: E, operands: Sequence[T]) -> list[tuple[Any, tuple[T, ...]]]:
        """Returns the jaxprs of an equation, the condition of a loop first, and what is known of the inputs of each."""
        match equation.enters:
            case Call(jaxpr, places):
                return [(jaxpr, tuple([operands[i] for i in places]))]
            case Branches(jaxprs, places):
                return [(branch, tuple([operands[i] for i in places])) for branch in jaxprs]
            case Loop() as loop:
                consts, xs = operands[loop.consts], operands[loop.xs]
                carry = self.settle(loop, consts, operands[loop.carry], xs)
                body = [(loop.body, (*consts, *carry, *xs))]
                return body if loop.cond is None else [(loop.cond, (*operands[loop.cond_consts], *carry)), *body]
        return []

    def settle(self, loop: Loop, consts: Sequence[T], carry: Sequence[T], xs: Sequence[T]) -> Sequence[T]:
        """Returns what is known of the carries of a loop in every iteration."""
        opened, given = open_jaxpr(loop.body)[0], (tuple(consts), tuple(carry), tuple(xs))
        return self._carries(opened, given, lambda: self._settle(loop, *given))

    def _settle(self, loop: Loop, consts: tuple[T, ...], carry: tuple[T, ...], xs: tuple[T, ...]) -> tuple[T, ...]:
        carry = tuple(self.carried(loop, carry))
        for iteration in itertools.count():
            outs = self.outs(loop.body, (*consts, *carry, *xs))[: loop.n_carry]
            new = tuple(self.carried(loop, tuple(map(self.join, carry, outs))))
            if iteration > 2:
                new = tuple(map(self.widen, carry, new))
            if new == carry:
                break
            carry = new
        return carry

    def _through(self, equation: E, operands: Sequence[T]) -> Sequence[T]:
        inside = self.inside(equation, operands)
        match equation.enters:
            case Call():
                return self.outs(*inside[0])
            case Branches():
                outs_of_branches = [self.outs(*branch) for branch in inside]
                return [functools.reduce(self.join, facts) for facts in zip(*outs_of_branches, strict=True)]
            case Loop() as loop:
                jaxpr, inputs = inside[-1]
                outs, carry = self.outs(jaxpr, inputs), inputs[loop.n_consts : loop.n_consts + loop.n_carry]
                return self.left(loop, outs if loop.cond is None else carry)
        raise TypeError(equation.enters)


class Backward(Generic[E, S, T]):
    """An analysis that goes from the results of a jaxpr to its inputs, and reads what a `Forward` one found.

    Attributes:
        bottom: what is said of a value that nothing reads.
        condition: what is said of the result of the condition of a loop.
    """

    bottom: T
    condition: T

    def __init__(self, equations_of: EquationsOf[E], known: Forward[E, S]) -> None:
        """Takes a function that returns the equations of an open jaxpr, and the other analysis."""
        self._equations_of, self.known = equations_of, known
        self._found, self._ops = Kept(), Memo()

    def join(self, a: T, b: T) -> T:
        """Returns what two readers say of a value."""
        raise NotImplementedError

    def transfer(self, equation: E, operands: Sequence[S], outs: Sequence[T]) -> Sequence[T]:
        """Returns what a first-order equation says of its operands; `operands` is what is known of them."""
        raise NotImplementedError

    def control(self, outs: Sequence[T]) -> T:
        """Returns what is said of the index of branches, from what is said of their results."""
        raise NotImplementedError

    def carried(self, loop: Loop, inputs: Sequence[S], outs: Sequence[T]) -> Sequence[T]:
        """Returns what is said of the carries that the body of a loop returns."""
        return outs

    def left(self, loop: Loop, outs: Sequence[T], said: Sequence[T]) -> Sequence[T]:
        """Returns what is said of the operands of a loop, from what is said of its results and of one iteration."""
        return said

    def find(
        self, jaxpr: Any, inputs: Sequence[S], outs: Sequence[T], consts: Sequence[Any] | None = None
    ) -> Mapping[Var, T]:
        """Returns what is said of the variables of a jaxpr; `bottom` of those that it leaves out.

        Args:
            jaxpr: the jaxpr.
            inputs: what is known of its inputs.
            outs: what is said of its results.
            consts: the values of its constants, if it is open.
        """
        opened, closed_over = open_jaxpr(jaxpr)
        consts = closed_over if consts is None else consts
        key = tuple(map(id, consts)), tuple(inputs), tuple(outs)
        known = self.known.find(opened, inputs, consts)
        return self._found(opened, key, lambda: (self._find(opened, known, outs), consts))[0]

    def _find(self, opened: Jaxpr, known: Mapping[Var, S], outs: Sequence[T]) -> Mapping[Var, T]:
        said: dict[Var, T] = {}

        def say(atoms: Sequence[Any], facts: Sequence[T]) -> None:
            for atom, fact in zip(atoms, facts, strict=True):
                if isinstance(atom, Var):
                    said[atom] = self.join(said[atom], fact) if atom in said else fact

        say(opened.outvars, outs)
        for equation in reversed(self._equations_of(opened)):
            operands = self.known.of(known, equation.eqn.invars)
            of_results = tuple([said.get(var, self.bottom) for var in equation.eqn.outvars])
            if equation.enters is None:
                of_operands = _transferred(self._ops, self.transfer, equation, operands, of_results)
            else:
                of_operands = self._through(equation, operands, of_results)
            say(equation.eqn.invars, of_operands)
        return said

    def inside(
        self, equation: E, operands: Sequence[S], outs: Sequence[T]
    ) -> list[tuple[Any, tuple[S, ...], tuple[T, ...]]]:
        """Returns the jaxprs of an equation, what is known of the inputs of each, and what is said of its results."""
        inside = self.known.inside(equation, operands)
        if not isinstance(loop := equation.enters, Loop):
            return [(jaxpr, inputs, tuple(outs)) for jaxpr, inputs in inside]
        *cond, (body, inputs) = inside
        conditions = [(jaxpr, given, (self.condition,)) for jaxpr, given in cond]
        first, ys = loop.n_consts, outs[loop.n_carry :]
        carry = tuple(self.carried(loop, inputs, outs[: loop.n_carry]))
        for condition in conditions:
            of_cond = self._said(*condition)
            carry = tuple(map(self.join, carry, of_cond[len(of_cond) - loop.n_carry :]))
        while True:
            said = self._said(body, inputs, (*carry, *ys))[first : first + loop.n_carry]
            new = tuple(map(self.join, carry, said))
            if new == carry:
                return [*conditions, (body, inputs, (*carry, *ys))]
            carry = new

    def _said(self, jaxpr: Any, inputs: Sequence[S], outs: Sequence[T]) -> list[T]:
        """Returns what is said of the inputs of a jaxpr."""
        said = self.find(jaxpr, inputs, outs)
        return [said.get(var, self.bottom) for var in open_jaxpr(jaxpr)[0].invars]

    def _through(self, equation: E, operands: Sequence[S], outs: Sequence[T]) -> Sequence[T]:
        inside = [self._said(*each) for each in self.inside(equation, operands, outs)]
        match equation.enters:
            case Call(_, places) | Branches(_, places):
                said = [self.control(outs)] * len(operands)
                for i, facts in zip(places, zip(*inside, strict=True), strict=True):
                    said[i] = functools.reduce(self.join, facts)
                return said
            case Loop() as loop:
                *cond, body = inside
                first, last = loop.n_consts, loop.n_consts + loop.n_carry
                said = [self.bottom] * len(operands)
                said[loop.consts], said[loop.carry], said[loop.xs] = body[:first], body[first:last], body[last:]
                for of_cond in cond:
                    n_consts = len(of_cond) - loop.n_carry
                    said[loop.cond_consts] = of_cond[:n_consts]
                    said[loop.carry] = list(map(self.join, of_cond[n_consts:], said[loop.carry]))
                return self.left(loop, outs, said)
        raise TypeError(equation.enters)
