"""Runs a plan: a jaxpr with the dtype that each op computes in, decided before anything is computed.

The planner (`_planner.py`) decides a `Step` for each equation; `Plan.run` evaluates the steps. Planning traces nothing,
so the dtypes that a loop carries are found by planning its body until they no longer change, and a body that is called
many times is planned once.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmp_amp._autocast import _compat
from jmp_amp._autocast._decisions import differs
from jmp_amp._autocast._ops import Block, cast, grouped
from jmp_amp._autocast._values import Value


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
    """

    eqn: JaxprEqn
    casts: tuple[Any, ...]
    outs: tuple[Value, ...]
    run: Callable[[Sequence[Any]], Sequence[Any]]
    changed: bool
    reads_full: tuple[bool, ...]
    inner: "tuple[tuple[Plan, int], ...]" = ()


class Region(NamedTuple):
    """Where an equation stands.

    Attributes:
        low: the compute dtype; float32 runs everything in its traced dtypes.
        path: the named scopes around the jaxpr; empty where no rule asks for them, so that plans can be shared.
    """

    low: np.dtype
    path: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The steps of one jaxpr, for one set of input dtypes.

    `reads_full` is as in `Step`, of its inputs; `as_traced` has the equations, by their places, that run as they were
    traced although their region is of another dtype, and why.
    """

    jaxpr: Jaxpr
    consts: Sequence[Any]
    values: Mapping[Var, Value]
    steps: Sequence[Step]
    outs: tuple[Value, ...]
    reads_full: tuple[bool, ...]
    region: Region
    as_traced: Mapping[int, str]

    def run(self, *args: Any) -> list[Any]:
        """Evaluates the jaxpr on inputs of the planned dtypes; the results have the dtypes of `outs`."""
        env = dict(zip(self.jaxpr.constvars, self.consts, strict=True))
        env |= dict(zip(self.jaxpr.invars, args, strict=True))
        shared: dict[tuple[Var, Any], Any] = {}
        blocks, convert = self._single, lax.convert_element_type
        if _compat.differentiates():
            blocks, convert = self._grouped, cast

        def read(atom: Any, dtype: Any = None) -> Any:
            if isinstance(atom, Literal):
                return atom.val if dtype is None else np.asarray(atom.val).astype(dtype)
            if dtype is None or dtype == self.values[atom].dtype:
                return env[atom]
            if (atom, dtype) not in shared:
                shared[atom, dtype] = convert(env[atom], dtype)
            return shared[atom, dtype]

        for block, dead in blocks:
            with _compat.context_of(block.eqn):
                outs = block.run(list(map(read, block.invars, block.casts)))
            env.update(zip(block.outvars, outs, strict=True))
            for var in dead:
                del env[var]
        return [read(atom) for atom in self.jaxpr.outvars]

    @functools.cached_property
    def _single(self) -> list[tuple[Block, list[Var]]]:
        return self._with_last_reads(self._blocks())

    @functools.cached_property
    def _grouped(self) -> list[tuple[Block, list[Var]]]:
        results = {atom for atom in self.jaxpr.outvars if isinstance(atom, Var)}
        return self._with_last_reads(grouped(self._blocks(), results))

    def _blocks(self) -> list[Block]:
        return [Block(step.eqn, step.eqn.invars, step.casts, step.eqn.outvars, step.run) for step in self.steps]

    def _with_last_reads(self, blocks: Sequence[Block]) -> list[tuple[Block, list[Var]]]:
        """Adds the variables that can be freed after each block, which matters outside `jit`."""
        seen = {atom for atom in self.jaxpr.outvars if isinstance(atom, Var)}
        pairs = []
        for block in reversed(blocks):
            atoms = {atom for atom in (*block.invars, *block.outvars) if isinstance(atom, Var)}
            pairs.append((block, list(atoms - seen)))
            seen |= atoms
        return pairs[::-1]

    @functools.cached_property
    def _traced(self) -> dict[Any, Any]:
        return {}

    @functools.cached_property
    def changed(self) -> bool:
        """Whether anything in it runs in another dtype than it was traced in."""
        inputs = ((var, self.values[var]) for var in self.jaxpr.invars)
        return differs(inputs) or any(step.changed for step in self.steps)

    def trace(self, args: Sequence[Any]) -> Any:
        """Returns the plan as a closed jaxpr, the same object for the same types, so that calls compile once."""
        types = tuple(map(jax.typeof, args))
        if types not in self._traced:
            self._traced[types] = _compat.trace(self.run, args)
        return self._traced[types]


def cast_results(fun: Callable[..., Sequence[Any]], outs: Sequence[Value]) -> Callable[..., list[Any]]:
    """Returns `fun` with its results in the dtypes of `outs`."""

    def cast(*args: Any) -> list[Any]:
        return [
            lax.convert_element_type(x, out.dtype) if jax.numpy.result_type(x) != out.dtype else x
            for x, out in zip(fun(*args), outs, strict=True)
        ]

    return cast
