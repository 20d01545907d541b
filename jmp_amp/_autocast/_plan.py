"""A plan: a jaxpr with the dtype that each op computes in, decided before anything is computed.

The planner decides a `Step` for each equation; calling the plan evaluates the steps. Planning traces nothing, so the
dtypes that a loop carries are found by planning its body until they no longer change.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmp_amp._autocast._blocks import Block, cast, grouped
from jmp_amp._autocast._known import Known
from jmp_amp._autocast._values import Value, Wish
from jmp_amp._formats import Format
from jmp_amp._jaxpr import Body, aval_with, context_of, dtype_of, evaluate_steps, is_differentiated, with_last_reads


class Step(NamedTuple):
    """The decision for one equation.

    Attributes:
        eqn: the equation as it was traced.
        casts: the dtype that each operand is cast to; None leaves it.
        outs: what is known of the results.
        run: evaluates the equation on its cast operands.
        changed: whether a dtype in it differs from the traced one.
        reads_full: whether each operand is read only in float32, so that its producer may be evaluated in float32.
        why: why an op reads its operands in their dtypes, as `explain` names it; empty if it holds jaxprs.
        inner: the plans of its jaxprs, and how often each runs; 1 if that is not known.
        as_traced: why it runs as it was traced although its region is low precision, as `explain` names it.
    """

    eqn: JaxprEqn
    casts: tuple[Any, ...]
    outs: tuple[Value, ...]
    run: Callable[[Sequence[Any]], Sequence[Any]]
    changed: bool
    reads_full: tuple[bool, ...]
    why: str = ""
    inner: "tuple[tuple[Plan, Any], ...]" = ()
    as_traced: str | None = None


class Region(NamedTuple):
    """The surroundings of an equation.

    Attributes:
        format: the format that it computes in.
        path: the named scopes around its jaxpr; empty if no rule has a pattern, so that equal jaxprs share a plan.
    """

    format: Format
    path: str = ""


# A jaxpr of an equation, what is known of its inputs, and how its results are read.
Inside = tuple[Any, tuple[Known, ...], tuple[int, ...]]


class Use(NamedTuple):
    """An equation that holds jaxprs, and its surroundings.

    Attributes:
        eqn: the equation.
        values: what is known of its operands.
        wanted: how each of its results is read.
        region: the format and the scopes around it.
        inside: its jaxprs, with facts; none if it runs as it was traced.
    """

    eqn: JaxprEqn
    values: tuple[Value, ...]
    wanted: tuple[Wish, ...]
    region: Region
    inside: Sequence[Inside]


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The steps of one jaxpr, for one set of input dtypes.

    Attributes:
        frame: the jaxpr, open and without equations. A plan lives as long as its jaxpr, so it must not hold it.
        consts: the values of its constants.
        values: what is known of each variable.
        steps: the decision for each equation.
        outs: what is known of the results.
        reads_full: whether each input is read in float32 only.
        region: the surroundings of the jaxpr.
        scopes: the paths of its equations; empty if no rule has a pattern.
        opaque: the primitives that hold products and have no rule, so that these stay as they were traced.
        bodies: its functions in place of the jaxpr; plans of one jaxpr with the same decisions share them.
    """

    frame: Jaxpr
    consts: Sequence[Any]
    values: Mapping[Var, Value]
    steps: Sequence[Step]
    outs: tuple[Value, ...]
    reads_full: tuple[bool, ...]
    region: Region
    scopes: frozenset[str]
    opaque: frozenset[str]
    bodies: dict[Any, Body] = dataclasses.field(default_factory=dict)

    def __call__(self, *args: Any) -> list[Any]:
        """Evaluates the jaxpr on inputs of the planned dtypes; the results have the dtypes of `outs`."""
        env = dict(zip(self.frame.constvars, self.consts, strict=True))
        env |= dict(zip(self.frame.invars, args, strict=True))
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

        return evaluate_steps(blocks, self.frame.outvars, env, apply)

    @functools.cached_property
    def _single(self) -> list[tuple[Block, list[Var]]]:
        return with_last_reads(self._blocks(), self.frame.outvars)

    @functools.cached_property
    def _grouped(self) -> list[tuple[Block, list[Var]]]:
        results = {atom for atom in self.frame.outvars if isinstance(atom, Var)}
        return with_last_reads(grouped(self._blocks(), results), self.frame.outvars)

    def _blocks(self) -> list[Block]:
        return [Block(step.eqn, step.eqn.invars, step.casts, step.eqn.outvars, step.run) for step in self.steps]

    @functools.cached_property
    def inputs(self) -> tuple[Value, ...]:
        """What is known of the inputs."""
        return tuple(self.values[var] for var in self.frame.invars)

    @functools.cached_property
    def changed(self) -> bool:
        """Whether a dtype in it differs from the traced one."""
        return differs(zip(self.frame.invars, self.inputs, strict=True)) or any(step.changed for step in self.steps)

    def body(self, outs: Sequence[Value] = (), policy: Callable[..., bool] | None = None) -> Body:
        """Returns the plan as a function in place of its jaxpr, the same one for the same arguments.

        Args:
            outs: what the results are cast to; those of the plan by default.
            policy: says what `jax.checkpoint` saves of it; None for no `jax.checkpoint`.
        """
        key = tuple(out.dtype for out in outs or self.outs), policy
        if key not in self.bodies:
            fun: Callable[..., list[Any]] = with_results(self, outs) if outs else self
            if policy is not None:
                fun = jax.checkpoint(fun, policy=policy, prevent_cse=False)
            pairs = zip(self.frame.invars, self.inputs, strict=True)
            self.bodies[key] = Body(fun, [aval_with(var.aval, value.dtype) for var, value in pairs])
        return self.bodies[key]

    @property
    def decisions(self) -> tuple[Any, ...]:
        """All that it does; plans of one jaxpr that are equal in this are the same function."""
        dtypes = tuple([value.dtype for value in (*self.inputs, *self.outs)])
        return dtypes, *[(step.casts, _identity(step.run)) for step in self.steps]


def _identity(run: Any) -> Any:
    """Returns a value that is equal for functions that do the same."""
    if isinstance(run, functools.partial):  # of an equation and its bodies
        return run.func, *[tuple(map(id, arg)) if isinstance(arg, list) else id(arg) for arg in run.args]
    try:
        hash(run)
    except TypeError:
        return id(run)
    return run


def differs(known: Iterable[tuple[Any, Value]]) -> bool:
    """Whether a variable or literal has another dtype than it was traced in."""
    return any(value.dtype != dtype_of(atom) for atom, value in known)


def with_results(fun: Callable[..., Sequence[Any]], outs: Sequence[Value]) -> Callable[..., list[Any]]:
    """Returns `fun` with its results cast to the dtypes of `outs`."""

    def cast(*args: Any) -> list[Any]:
        return [
            x if out.dtype is None or jax.numpy.result_type(x) == out.dtype else lax.convert_element_type(x, out.dtype)
            for x, out in zip(fun(*args), outs, strict=True)
        ]

    return cast
