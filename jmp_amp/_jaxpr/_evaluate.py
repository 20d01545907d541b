"""The evaluator: runs a jaxpr one equation at a time, with a function that applies each."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from jax.extend.core import JaxprEqn, Literal, Var

from jmp_amp._jaxpr._tracing import bind
from jmp_amp._jaxpr._versions import context_of, open_jaxpr


class Step(Protocol):
    """A unit of evaluation: an equation, or a group of equations."""

    @property
    def invars(self) -> Sequence[Any]: ...
    @property
    def outvars(self) -> Sequence[Any]: ...


S = TypeVar("S", bound=Step)


def evaluate(
    jaxpr: Any,
    args: Sequence[Any],
    apply: Callable[[JaxprEqn, list[Any]], Sequence[Any]],
    constant: Callable[[Any], Any] = lambda x: x,
    literal: Callable[[Literal], Any] = lambda atom: atom.val,
) -> list[Any]:
    """Evaluates a jaxpr on arrays, or on other values that `apply` understands.

    Args:
        jaxpr: closed or open.
        args: the values of its inputs.
        apply: computes the results of an equation from the values of its operands.
        constant: returns the value of a constant of the jaxpr.
        literal: returns the value of a literal.
    """
    opened, consts = open_jaxpr(jaxpr)
    env = dict(zip(opened.constvars, map(constant, consts), strict=True))
    env |= dict(zip(opened.invars, args, strict=True))
    return evaluate_steps(with_last_reads(opened.eqns, opened.outvars), opened.outvars, env, apply, literal)


def evaluate_steps(
    steps: Iterable[tuple[S, Sequence[Var]]],
    outvars: Sequence[Any],
    env: dict[Var, Any],
    apply: Callable[[S, list[Any]], Sequence[Any]],
    literal: Callable[[Literal], Any] = lambda atom: atom.val,
) -> list[Any]:
    """Evaluates steps one after the other; see `evaluate`.

    Args:
        steps: from `with_last_reads`.
        outvars: the variables and literals to return.
        env: the values of the variables that the steps do not define. It is changed.
        apply: computes the results of a step from the values of its operands.
        literal: returns the value of a literal.
    """

    def read(atom: Any) -> Any:
        return literal(atom) if isinstance(atom, Literal) else env[atom]

    for step, dead in steps:
        env.update(zip(step.outvars, apply(step, [read(atom) for atom in step.invars]), strict=True))
        for var in dead:
            del env[var]
    return [read(atom) for atom in outvars]


def with_last_reads(steps: Sequence[S], outvars: Sequence[Any]) -> list[tuple[S, list[Var]]]:
    """Pairs each step with the variables that no later step reads, so that they can be freed outside `jit`."""
    read_later = {atom for atom in outvars if isinstance(atom, Var)}
    pairs = []
    for step in reversed(steps):
        variables = {atom for atom in (*step.invars, *step.outvars) if isinstance(atom, Var)}
        pairs.append((step, list(variables - read_later)))
        read_later |= variables
    return pairs[::-1]


def apply_as_traced(eqn: JaxprEqn, args: Sequence[Any], **params: Any) -> list[Any]:
    """Applies an equation with its source line, scopes and settings, and with some parameters replaced."""
    with context_of(eqn):
        return bind(eqn, args, **params)
