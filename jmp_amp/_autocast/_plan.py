"""A plan: a jaxpr with the dtype that each op computes in, decided before anything is computed.

The planner decides a `Step` for each equation; calling the plan evaluates the steps. Planning traces nothing, so the
dtypes that a loop carries are found by planning its body until they no longer change.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmp_amp._autocast._blocks import Block, cast, grouped
from jmp_amp._autocast._decisions import differs
from jmp_amp._autocast._format import Format
from jmp_amp._autocast._values import Value
from jmp_amp._jaxpr import context_of, evaluate_steps, is_differentiated, trace, with_last_reads


class Step(NamedTuple):
    """The decision for one equation.

    Attributes:
        eqn: the equation as it was traced.
        casts: the dtype that each operand is cast to; None leaves it.
        outs: what is then known of the results.
        run: evaluates the equation on its cast operands.
        changed: whether anything in it runs in another dtype than it was traced in.
        reads_full: whether each operand is read in float32 only, so that its producer may as well be evaluated in it.
        inner: the plans of the jaxprs that it holds, and how often each runs, as far as that is known.
        as_traced: why it runs as it was traced although its region is low precision, as `explain` names it.
    """

    eqn: JaxprEqn
    casts: tuple[Any, ...]
    outs: tuple[Value, ...]
    run: Callable[[Sequence[Any]], Sequence[Any]]
    changed: bool
    reads_full: tuple[bool, ...]
    inner: "tuple[tuple[Plan, Any], ...]" = ()
    as_traced: str | None = None


class Region(NamedTuple):
    """Where an equation stands.

    Attributes:
        format: what it computes in.
        path: the named scopes around the jaxpr; empty where no rule asks for them, so that plans can be shared.
    """

    format: Format
    path: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The steps of one jaxpr, for one set of input dtypes.

    Attributes:
        jaxpr: the jaxpr, open.
        consts: the values of its constants.
        values: what is known of each variable.
        steps: the decision for each equation.
        outs: what is known of the results.
        reads_full: whether each input is read in float32 only.
        region: where the jaxpr stands.
    """

    jaxpr: Jaxpr
    consts: Sequence[Any]
    values: Mapping[Var, Value]
    steps: Sequence[Step]
    outs: tuple[Value, ...]
    reads_full: tuple[bool, ...]
    region: Region

    def __call__(self, *args: Any) -> list[Any]:
        """Evaluates the jaxpr on inputs of the planned dtypes; the results have the dtypes of `outs`."""
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        env |= dict(zip(self.jaxpr.invars, args, strict=True))
        blocks, convert = (self._grouped, cast) if is_differentiated() else (self._single, lax.convert_element_type)
        shared: dict[tuple[Var, Any], Any] = {}

        def cast_once(atom: Any, x: Any, dtype: Any) -> Any:
            if dtype is None:
                return x
            if isinstance(atom, Literal):
                return np.asarray(x).astype(dtype)
            if dtype == self.values[atom].dtype:
                return x
            if (atom, dtype) not in shared:
                shared[atom, dtype] = convert(x, dtype)
            return shared[atom, dtype]

        def apply(block: Block, operands: list[Any]) -> Sequence[Any]:
            with context_of(block.eqn):
                return block.run(list(map(cast_once, block.invars, operands, block.casts)))

        return evaluate_steps(blocks, self.jaxpr.outvars, env, apply)

    @functools.cached_property
    def _single(self) -> list[tuple[Block, list[Var]]]:
        return with_last_reads(self._blocks(), self.jaxpr.outvars)

    @functools.cached_property
    def _grouped(self) -> list[tuple[Block, list[Var]]]:
        results = {atom for atom in self.jaxpr.outvars if isinstance(atom, Var)}
        return with_last_reads(grouped(self._blocks(), results), self.jaxpr.outvars)

    def _blocks(self) -> list[Block]:
        return [Block(step.eqn, step.eqn.invars, step.casts, step.eqn.outvars, step.run) for step in self.steps]

    @functools.cached_property
    def inputs(self) -> tuple[Value, ...]:
        """What is known of the inputs."""
        return tuple(self.values[var] for var in self.jaxpr.invars)

    @functools.cached_property
    def changed(self) -> bool:
        """Whether anything in it runs in another dtype than it was traced in."""
        return differs(zip(self.jaxpr.invars, self.inputs, strict=True)) or any(step.changed for step in self.steps)

    @functools.cached_property
    def _traced(self) -> dict[Any, Any]:
        return {}

    def trace(self, args: Sequence[Any]) -> Any:
        """Returns the plan as a closed jaxpr, the same object for the same types, so that calls compile once."""
        types = tuple(map(jax.typeof, args))
        if types not in self._traced:
            self._traced[types] = trace(self, args)
        return self._traced[types]


def with_results(fun: Callable[..., Sequence[Any]], outs: Sequence[Value]) -> Callable[..., list[Any]]:
    """Returns `fun` with its results cast to the dtypes of `outs`."""

    def cast(*args: Any) -> list[Any]:
        return [
            lax.convert_element_type(x, out.dtype) if jax.numpy.result_type(x) != out.dtype else x
            for x, out in zip(fun(*args), outs, strict=True)
        ]

    return cast
