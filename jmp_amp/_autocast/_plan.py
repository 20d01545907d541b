"""A plan: a jaxpr with the dtype that each op computes in, decided before anything is computed.

The planner decides a `Step` for each equation; calling the plan evaluates the steps. Planning traces nothing, so the
dtypes that a loop carries are found by planning its body until they no longer change.
"""

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var

from jmp_amp import _jaxpr as jx
from jmp_amp._autocast._values import Value, ValueFacts
from jmp_amp._formats import FLOAT32, Format
from jmp_amp._products import bind_product, is_float8_scale

SAVED = "amp:saved"  # the name of the casts that a loop saves for the backward pass, for `jax.checkpoint`


@dataclasses.dataclass(frozen=True)
class CastOp:
    """A primitive, and the casts of the operands that each use casts for itself.

    Attributes:
        primitive: the primitive.
        params: its parameters, by name.
        casts: the dtype that each operand is cast to; None leaves it.
        saved: the operands whose casts a loop saves for the backward pass.
        rewrite: evaluates the op in another way, which changes its derivative; None for most.
    """

    primitive: Primitive
    params: tuple[tuple[str, Any], ...]
    casts: tuple[Any, ...]
    saved: tuple[int, ...] = ()
    rewrite: "Rewrite | None" = None

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Evaluates the op on operands that are not cast yet."""
        return self.apply(self.cast(args)) if self.rewrite is None else self.rewrite(self, args)

    def apply(self, args: Sequence[Any]) -> list[Any]:
        """Applies the primitive to operands that are cast."""
        if self.primitive is lax.dot_general_p:
            return [bind_product(args, dict(self.params))]
        return jx.apply(self.primitive, dict(self.params), args)

    def cast(self, args: Sequence[Any], *, save: bool = True) -> list[Any]:
        """Casts the operands; see `_cast_once` for those that a loop does not change."""
        casts = [_cast_once if save and i in self.saved else lax.convert_element_type for i in range(len(args))]
        triples = zip(casts, args, self.casts, strict=True)
        return [x if dtype is None else convert(x, dtype) for convert, x, dtype in triples]


@functools.partial(jax.jit, static_argnums=1, inline=jx.versions.INLINE)  # it is traced once for all arrays of a type
def _cast_once(x: jax.Array, dtype: Any) -> jax.Array:
    """Casts an array that a loop does not change: the loop casts it once, and sums its gradient in its own dtype.

    The cast can move out of the loop, because no derivative goes through it. The cast of the gradient stays inside.
    """
    return _with_derivative_of(x, checkpoint_name(lax.convert_element_type(lax.stop_gradient(x), dtype), SAVED))


@jax.custom_jvp
def _with_derivative_of(x: jax.Array, cast: jax.Array) -> jax.Array:
    return cast


def _jvp_of_cast(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (_, cast), (tangent, _) = primals, tangents
    if isinstance(tangent, SymbolicZero):
        return cast, SymbolicZero(jax.typeof(cast).to_tangent_aval())
    return cast, lax.convert_element_type(tangent, cast.dtype)


_with_derivative_of.defjvp(_jvp_of_cast, symbolic_zeros=True)


def is_loop_invariant(primitive: Primitive, *args: Any, **params: Any) -> bool:
    """Whether an op is a cast by `_cast_once`, or computes the scale of such a cast, which a loop computes once."""
    return params.get("name") == SAVED or is_float8_scale(primitive)


Run = Callable[[Sequence[Any]], Sequence[Any]]  # from the operands of an equation to its results

# From an op and its operands, which are not cast yet, to its results. Equal rewrites must compare as equal.
Rewrite = Callable[[CastOp, Sequence[Any]], list[Any]]


IN_CODE = "region"  # why a region has its format if the code says so, which precedes `rules` and facts


class Region(NamedTuple):
    """The surroundings of an equation.

    Attributes:
        format: the format that it computes in.
        path: the named scopes around its jaxpr; empty if no rule has a pattern, so that equal jaxprs share a plan.
        why: why this is another format than that of the program, as `explain` names it; empty if it is not.
        is_checkpointed: whether it is inside a `jax.checkpoint`, which decides what the backward pass keeps.
        is_linear: whether JAX may transpose it without differentiating it, as the tangents of a rule.
    """

    format: Format
    path: str = ""
    why: str = ""
    is_checkpointed: bool = False
    is_linear: bool = False


class Step(NamedTuple):
    """The decision for one equation.

    Attributes:
        eqn: the equation as it was traced.
        region: its surroundings.
        casts: the dtype that each operand is cast to, in a cast that all steps share; None leaves it.
        outs: what is known of the results.
        run: evaluates the equation on its cast operands.
        changed: whether a dtype in it differs from the traced one.
        read_in: in which dtype it reads each operand; one that is read in float32 may be computed in float32.
        why: why an op reads its operands in their dtypes, as `explain` names it; empty if it holds jaxprs.
        inner: the plans of its jaxprs.
        keeper: who decides what the backward pass of a `scan` keeps, as `explain` names it.
        sums: the operands in 16 bits that many other steps read, too: JAX adds up their cotangents in float32.
    """

    eqn: JaxprEqn
    region: Region
    casts: tuple[Any, ...]
    outs: tuple[Value, ...]
    run: Run
    changed: bool
    read_in: tuple[int, ...]
    why: str = ""
    inner: "tuple[Plan, ...]" = ()
    keeper: str | None = None
    sums: tuple[int, ...] = ()


# A jaxpr of an equation, what is known of its inputs, and how its results are read.
Inside = tuple[Any, tuple[ValueFacts, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)  # JAX prints what it traces, which is a plan for a body
class Plan:
    """The steps of one jaxpr, for one set of input dtypes.

    Attributes:
        signature: the jaxpr, open and without equations. A plan lives as long as its jaxpr, so it must not hold it.
        consts: the values of its constants.
        values: what is known of each variable.
        demands: what the readers of each variable demand of it.
        steps: the decision for each equation.
        outs: what is known of the results.
        reads: in which dtype each input is read.
        region: the surroundings of the jaxpr.
        scopes: the paths of its equations; empty if no rule has a pattern.
        opaque: the primitives that hold products and have no rule, so that these stay as they were traced.
        bodies: its functions in place of the jaxpr; plans of one jaxpr with the same decisions share them.
    """

    signature: Jaxpr
    consts: Sequence[Any]
    values: Mapping[Var, Value]
    demands: Mapping[Var, int]
    steps: Sequence[Step]
    outs: tuple[Value, ...]
    reads: tuple[int, ...]
    region: Region
    scopes: frozenset[str]
    opaque: frozenset[str]
    bodies: dict[Any, jx.Body] = dataclasses.field(default_factory=dict)

    def __call__(self, *args: Any) -> list[Any]:
        """Evaluates the jaxpr on inputs of the planned dtypes; the results have the dtypes of `outs`."""
        is_traced = jx.versions.is_differentiated()
        steps, convert = (self._groups, _shared_cast) if is_traced else (self.steps, lax.convert_element_type)
        waiting, shared = iter(steps), dict[tuple[Var, Any], Any]()

        def cast_once(atom: Any, x: Any, dtype: Any) -> Any:
            if isinstance(atom, Literal):
                return np.asarray(x).astype(dtype)
            if (atom, dtype) not in shared:
                shared[atom, dtype] = convert(x, dtype)
            return shared[atom, dtype]

        def apply(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
            step = next(waiting)
            with jx.versions.context_of(eqn):
                triples = zip(eqn.invars, operands, step.casts, strict=True)
                args = [x if dtype is None else cast_once(atom, x, dtype) for atom, x, dtype in triples]
                for i in step.sums:
                    args[i] = _own_read(cast_once(eqn.invars[i], operands[i], FLOAT32), args[i])
                return step.run(args)

        jaxpr = self.signature.replace(eqns=[step.eqn for step in steps])
        return jx.evaluate(ClosedJaxpr(jaxpr, self.consts), args, apply)

    @functools.cached_property
    def _groups(self) -> Sequence[Step]:
        return _grouped(self.steps, self.signature.outvars)

    @functools.cached_property
    def inputs(self) -> tuple[Value, ...]:
        """What is known of the inputs."""
        return tuple(self.values[var] for var in self.signature.invars)

    @functools.cached_property
    def changed(self) -> bool:
        """Whether a dtype in it, or in which JAX adds up cotangents, differs from the traced one."""
        is_other = differs(zip(self.signature.invars, self.inputs, strict=True))
        return is_other or any(step.changed or step.sums for step in self.steps)

    def body(self, outs: Sequence[Value] = (), policy: Any = None, inputs: Sequence[Value] = ()) -> jx.Body:
        """Returns the plan as a function in place of its jaxpr, the same one for the same arguments.

        Args:
            outs: what the results are cast to; those of the plan by default.
            policy: says what `jax.checkpoint` saves of it; None for no `jax.checkpoint`.
            inputs: its arguments, the first of which, of another dtype than those of the plan, are cast once for all
                iterations of a loop; those of the plan by default.
        """
        outs, inputs = outs or self.outs, inputs or self.inputs
        dtypes = tuple([value.dtype for value in inputs])
        key = tuple([out.dtype for out in outs]), policy, dtypes
        if key not in self.bodies:
            run: Callable[..., list[Any]] = lambda *args: cast_to(self(*args), outs)  # noqa: E731
            if policy is not None:
                run = jax.checkpoint(run, policy=policy, prevent_cse=False)
            convert = lax.convert_element_type if self.region.is_linear else _cast_once
            avals = map(jx.with_dtype, [var.aval for var in self.signature.invars], dtypes)
            fun = run if inputs is self.inputs else lambda *args: run(*cast_to(args, self.inputs, convert))
            self.bodies[key] = jx.Body(fun, list(avals))
        return self.bodies[key]

    @property
    def decisions(self) -> tuple[Any, ...]:
        """All that it does; plans of one jaxpr that are equal in this are the same function."""
        dtypes = tuple([value.dtype for value in (*self.inputs, *self.outs)])
        return dtypes, *[(step.casts, step.sums, _identity(step.run)) for step in self.steps]


def _identity(run: Any) -> Any:
    """Returns a value that is equal for functions that do the same."""
    if isinstance(run, functools.partial):  # of an equation and its bodies
        return run.func, *[tuple(map(id, arg)) if isinstance(arg, list) else id(arg) for arg in run.args]
    try:
        hash(run)
    except TypeError:  # a parameter of an equation that cannot be hashed
        return id(run)
    return run


def differs(known: Iterable[tuple[Any, Value]]) -> bool:
    """Whether a variable or literal has another dtype than it was traced in."""
    return any(value.dtype != jx.dtype_of(atom) for atom, value in known)


def cast_to(xs: Sequence[Any], values: Sequence[Value], convert: Callable = lax.convert_element_type) -> list[Any]:
    """Returns `xs` in the dtypes of `values`."""
    pairs = zip(xs, values, strict=True)
    return [
        x if value.dtype is None or jx.dtype_of(x) == value.dtype else convert(x, value.dtype) for x, value in pairs
    ]


# Under differentiation, the ops that come from one call in the user's code run as one `jit`, which JAX inlines, if
# equal ones recur. JAX caches the derivative of a `jit`, but not that of a primitive. A model of equal layers then
# takes little longer to trace than one layer, and each op keeps its source line and its scope.

_PAYS_FROM = 3  # to trace a `jit` and its derivative takes about as long as to differentiate its ops twice


def _grouped(steps: Sequence[Step], results: Sequence[Any]) -> list[Step]:
    """Joins the steps of ops that come from one call, if there are enough equal ones; the caller reads `results`."""
    numbers = dict[Any, int]()

    def call(numbered: tuple[Step, int | None]) -> Any:
        step, number = numbered
        return id(step) if number is None else jx.versions.call_of(step.eqn)

    numbered = [(step, _number(step, numbers)) for step in steps]
    groups = [tuple(zip(*pairs, strict=True)) for _, pairs in itertools.groupby(numbered, call)]
    counts = collections.Counter([kinds for _, kinds in groups])
    read_later, joined = {atom for atom in results if isinstance(atom, Var)}, list[Step]()
    for group, kinds in reversed(groups):
        recurs = None not in kinds and counts[kinds] >= _PAYS_FROM
        joined += [_join(group, read_later)] if recurs else reversed(group)
        read_later.update([atom for step in group for atom in step.eqn.invars if isinstance(atom, Var)])
    return joined[::-1]


def _number(step: Step, numbers: dict[Any, int]) -> int | None:
    """Returns a number that is equal for equal ops on operands of the same types; None for what cannot be joined."""
    if not isinstance(step.run, CastOp) or step.sums or step.eqn.effects:
        return None
    try:
        return numbers.setdefault((step.run, step.casts, *[atom.aval for atom in step.eqn.invars]), len(numbers))
    except TypeError:  # a parameter of an equation that cannot be hashed
        return None


@functools.partial(jax.jit, static_argnums=(0, 1), inline=jx.versions.INLINE)
def _run(ops: tuple[tuple[CastOp, tuple[int, ...]], ...], results: tuple[int, ...], *args: Any) -> list[Any]:
    """Runs ops, each of which reads arguments by index, and results of those before it by `~index`."""
    made = list[Any]()
    for op, places in ops:
        made += op([made[~place] if place < 0 else args[place] for place in places])
    return [made[~place] for place in results]


def _cast_op(dtype: Any) -> CastOp:
    """Returns a cast that several ops share."""
    params = ("new_dtype", np.dtype(dtype)), ("weak_type", False), ("sharding", None)
    return CastOp(lax.convert_element_type_p, params, casts=(None,))


def _join(steps: Sequence[Step], read_later: Collection[Var]) -> Step:
    inputs, made = dict[Any, Any](), dict[Any, int]()  # by id, since literals cannot be hashed, and cast
    ops: list[tuple[Any, tuple[int, ...]]] = []

    def place_of(atom: Any, cast: Any) -> int:
        key, as_made = (id(atom), cast), (id(atom), None)
        if as_made in made and key not in made:
            ops.append((_cast_op(cast), (made[as_made],)))
            made[key] = ~len(made)
        return made[key] if key in made else inputs.setdefault(key, (len(inputs), atom))[0]

    for step in steps:
        ops.append((step.run, tuple(map(place_of, step.eqn.invars, step.casts))))
        made |= {(id(var), None): ~i for i, var in enumerate(step.eqn.outvars, len(made))}
    outvars = [var for step in steps for var in step.eqn.outvars if var in read_later]
    group = tuple(ops), tuple([made[id(var), None] for var in outvars])
    eqn = steps[0].eqn.replace(invars=[atom for _, atom in inputs.values()], outvars=outvars)
    casts = tuple([cast for _, cast in inputs])
    return steps[0]._replace(eqn=eqn, casts=casts, run=lambda args: _run(*group, *args))


# Likewise, JAX differentiates all casts of the same types once, and all reads of one type.
_shared_cast = jax.jit(lax.convert_element_type, static_argnums=1, inline=jx.versions.INLINE)


# A value with the derivative of its float32 copy, in which JAX adds up the cotangents of all reads.
_own_read = jax.jit(lambda wide, x: _with_derivative_of(wide, lax.stop_gradient(x)), inline=jx.versions.INLINE)
