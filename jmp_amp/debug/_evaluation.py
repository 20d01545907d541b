"""Evaluates a program: as it was traced, in a wider dtype, or with each op as a function evaluates it.

`Evaluation` does so as a part of a program that JAX traces, `Interpretation` op by op.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from jmp_amp import _jaxpr as jx
from jmp_amp._loss_scale import LOSS_SCALE
from jmp_amp._ops import rule_of
from jmp_amp.debug._clock import Clock
from jmp_amp.debug._nodes import Cell, Id, Node, Place, argument_id, summary_of

FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)

# They read the bits of a value, or call code that was written for its dtype.
_KEEP_DTYPES = {"bitcast_convert_type", "pure_callback", "io_callback", "debug_callback", "ffi_call"}
_LONG = 20_000  # ops; a loop that runs more of them is evaluated iteration by iteration, not op by op
# A variant runs once, so it is compiled as fast as it can be; low precision is rounded as the program says.
QUICK = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}


@dataclasses.dataclass(eq=False)
class Evaluation:
    """An evaluation of a program, as a part of one that JAX traces.

    Attributes:
        program: the program, a closed jaxpr.
        arrays: its arguments.
        wide: the dtype that narrower values are computed in; None for the traced dtypes.
        around: evaluates an op, given its place, its operands, and a function that evaluates it in the wide dtype.
        as_one: names of primitives that are evaluated as one op, although they hold ops.
        replayed: pytrees that another evaluation recorded, by keys that start with that of the place.
        recorded: those that `around` records in this one. Those in a loop are stacked; those in a branch that did not
            run are 0.
        loss_factor: multiplies the loss scale of `amp.value_and_grad`.
        region: whether an equation, the last of those that contain it, is computed in the wide dtype. None means all.
            Outside of the region, casts remain, and an op reads the widest of its operands.
        results: the results of the program.
    """

    program: Any
    arrays: Sequence[Any]
    wide: Any = None
    around: Callable[[Place, Sequence[Any], Callable[..., Sequence[Any]]], Sequence[Any]] | None = None
    as_one: Collection[str] = ()
    replayed: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    loss_factor: float = 1.0
    region: Callable[[tuple[JaxprEqn, ...]], bool] | None = None
    recorded: dict[Any, Any] = dataclasses.field(init=False, default_factory=dict)
    results: list[Any] = dataclasses.field(init=False, default_factory=list)

    def run(self) -> Self:
        """Evaluates the whole program."""
        with precise(self.wide):
            args = [self._argument(self._in_dtype(x), i) for i, x in enumerate(self.arrays)]
            self.results = self._run(self.program, args, Place())
        return self

    def _run(self, jaxpr: Any, args: Sequence[Any], place: Place) -> list[Any]:
        """Evaluates the jaxpr at `place`."""
        indices = itertools.count()

        def apply(eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
            return self._visit(operands, place.of(next(indices), eqn))

        def literal(atom: Any) -> Any:
            return self._constant(np.asarray(atom.val, jx.dtype_of(atom)), is_literal=True)

        return jx.evaluate(jaxpr, args, apply, self._constant, literal)

    def _argument(self, x: Any, i: int) -> Any:
        """Returns an argument of the program as a value of this evaluation."""
        return x

    def _constant(self, x: Any, is_literal: bool = False) -> Any:
        return self._in_dtype(x)

    def _visit(self, operands: list[Any], place: Place) -> Sequence[Any]:
        """Evaluates an equation: enters it, or applies it as one op."""
        structure, changes_ops = jx.structure_of(place.eqn), self.wide is not None or self.around is not None
        is_changed = changes_ops and place.eqn.primitive.name not in self.as_one
        with jx.versions.origin_of(place.eqn) if structure else contextlib.nullcontext():
            match structure:
                # A derivative rule is kept unless ops are evaluated otherwise.
                case jx.Call(jaxpr, inputs, True, rule) if not rule or changes_ops:
                    return self._run(jaxpr, [operands[i] for i in inputs], place)
                case jx.Branches(jaxprs, inputs) if is_changed:
                    return self._trace_branches(jaxprs, [operands[i] for i in inputs], operands[0], place)
                case jx.Loop() if is_changed:
                    return (self._trace_while if structure.cond else self._trace_scan)(structure, operands, place)
            return self._apply(operands, place)

    def _run_body(self, jaxpr: Any, place: Place, replayed: Any, *args: Any) -> tuple[list[Any], dict[Any, Any]]:
        """Evaluates the jaxpr of a body, and returns what is recorded in it, too."""
        outer = self.recorded, self.replayed
        self.recorded, self.replayed = {}, replayed
        try:
            return self._run(jaxpr, args, place), self.recorded
        finally:
            self.recorded, self.replayed = outer

    def _trace_branches(self, jaxprs: Sequence[Any], args: Sequence[Any], index: Any, place: Place) -> Sequence[Any]:
        """Traces each branch once, also one that is in others. Of several platforms, that of the device is lowered."""

        def completed(jaxpr: Any, out: Any, *args: Any) -> tuple[Any, dict[Any, Any]]:
            arrays = jax.core.eval_jaxpr(*jx.open_jaxpr(jaxpr), *args)
            outs, recorded = jax.tree.unflatten(jax.tree.structure(out), arrays)
            return outs, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes) | recorded

        bodies = [functools.partial(self._run_body, x, place.body(k), self.replayed) for k, x in enumerate(jaxprs)]
        programs = [jax.make_jaxpr(body, return_shape=True)(*args) for body in bodies]
        shapes = {key: x for _, (_, recorded) in programs for key, x in recorded.items()}
        branches = [functools.partial(completed, *each) for each in programs]
        if platforms := place.eqn.params.get("branches_platforms"):  # of `lax.platform_dependent`; None for all others
            named = zip(platforms, branches, strict=True)
            by_name = {name: branch for names, branch in named for name in names or ("default",)}
            outs, recorded = lax.platform_dependent(*args, **by_name)
        else:
            outs, recorded = lax.switch(index, branches, *args)
        self.recorded.update(recorded)
        return outs

    def _trace_scan(self, loop: jx.Loop, values: list[Any], place: Place) -> Sequence[Any]:
        """Traces a `scan`, whose derivative keeps carries only."""

        @functools.partial(jax.checkpoint, prevent_cse=False)
        def step(carry: list[Any], xs: tuple[list[Any], Mapping[Any, Any]]) -> tuple[Any, Any]:
            args = [*values[loop.consts], *carry, *xs[0]]
            outs, recorded = self._run_body(loop.body, place.body(0), xs[1], *args)
            new = [x.astype(old.dtype) for x, old in zip(outs, carry, strict=False)]
            return new, (outs[loop.n_carry :], recorded)

        replayed = {key: x for key, x in self.replayed.items() if key[: len(place.key)] == place.key}
        options = {name: place.eqn.params[name] for name in ("length", "reverse")}
        carry, (ys, recorded) = lax.scan(step, values[loop.carry], (values[loop.xs], replayed), **options)
        self.recorded.update(recorded)
        return [*carry, *ys]

    def _trace_while(self, loop: jx.Loop, values: list[Any], place: Place) -> Sequence[Any]:
        """Traces a `while` loop, in which nothing is recorded."""

        def traced(k: int, jaxpr: Any, inputs: Sequence[int]) -> Any:
            body = lambda *args: self._run_body(jaxpr, place.body(k), {}, *args)[0]  # noqa: E731
            return jx.trace(body, [jax.typeof(values[i]) for i in inputs])

        cond, body = (traced(k, *each) for k, each in enumerate(jx.entries(loop)))
        return jx.bind(place.eqn, values, cond_jaxpr=cond, body_jaxpr=body)

    def _apply(self, operands: Sequence[Any], place: Place) -> Sequence[Any]:
        """Returns the results of an op, as `around` evaluates it."""
        compute = functools.partial(self._apply_in_dtype, place)
        outs = compute(operands) if self.around is None else self.around(place, operands, compute)
        if self.loss_factor != 1 and applies_loss_scale(place.eqn):
            outs = [x * jnp.asarray(self.loss_factor, x.dtype) for x in outs]
        return outs

    def _apply_in_dtype(self, place: Place, operands: Sequence[Any]) -> Sequence[Any]:
        """Returns the results of an op, in the dtype of this evaluation."""
        eqn = place.eqn
        if self.wide is None:
            return jx.apply_as_traced(eqn, operands)
        is_wide = self.region is None or self.region(place.eqns)
        if not is_wide and not (rule_of(eqn).is_product or rule_of(eqn).is_cast):
            pairs = zip(operands, eqn.invars, strict=True)
            is_wide = any(jx.is_inexact(x) and x.dtype != jx.dtype_of(atom) for x, atom in pairs)
        if is_wide and (outs := evaluate_in(self.wide, eqn, operands)) is not None:
            return outs
        return [self._in_dtype(x) for x in jx.apply_as_traced(eqn, as_traced(eqn, operands))]

    def _in_dtype(self, x: Any) -> Any:
        return x if self.wide is None or self.region else widened(x, self.wide)


class _DoneError(Exception):
    """The last op was evaluated, or the time is over."""


@dataclasses.dataclass(eq=False)
class Interpretation(Evaluation):
    """An evaluation of a program op by op, whose values are `Cell`s.

    Attributes:
        allowed: the ids of the ops and arguments that may introduce non-finite values; zeros replace the non-finite
            values that any other op or argument introduces. An argument with NaN or +inf introduces them as
            `argument_id`. None allows all.
        trip_counts: the number of iterations of each `while` loop that was entered, by the id of its place. Those that
            are known before are not exceeded: with values replaced, the loop might never end.
        holds: the ids of the values to keep as `Node.held`.
        until: the id of the last op to evaluate; None evaluates all.
        clock: is told of each op, and says when to stop.
        results: none if the program was not evaluated to its end.
        is_stopped: whether the evaluation ended because the time was over.
        nodes: all values, in program order.
        nonfinite: the first non-finite result of each op that computed non-finite values from finite operands, or NaN
            from infinite constants, by the id of the op, in program order.
    """

    allowed: Collection[Id] | None = None
    trip_counts: dict[Id, int] = dataclasses.field(default_factory=dict)
    holds: Collection[Id] = ()
    until: Id | None = None
    clock: Clock = dataclasses.field(default_factory=Clock)
    is_stopped: bool = dataclasses.field(init=False, default=False)
    nodes: list[Node] = dataclasses.field(init=False, default_factory=list)
    nonfinite: dict[Id, Node] = dataclasses.field(init=False, default_factory=dict)
    _bodies: dict[Id, Callable[..., Any]] = dataclasses.field(init=False, default_factory=dict)

    def run(self) -> Self:
        """Evaluates the program, to `until` and while there is time."""
        with contextlib.suppress(_DoneError):
            super().run()
        return self

    def again(self, **changes: Any) -> Self:
        """Evaluates the program otherwise. Its loops end as they did, unless it is evaluated in a wide dtype."""
        counts = {} if "wide" in changes else dict(self.trip_counts)
        return dataclasses.replace(self, trip_counts=counts, **changes).run()

    @property
    def names(self) -> Any:
        """The paths of the arguments."""
        return jx.open_jaxpr(self.program)[0].debug_info.arg_names

    @property
    def ops(self) -> list[JaxprEqn]:
        """The equations of the program that hold no others."""
        return [eqn for *_, eqn in jx.equations_in(self.program) if not jx.inner_jaxprs(eqn)]

    @property
    def is_finite(self) -> bool:
        """Whether all results are finite."""
        return not self.is_stopped and all(x.is_finite for x in self.results)

    def _constant(self, x: Any, is_literal: bool = False) -> Cell:
        cell = self._track(super()._constant(x))
        cell.node.held, cell.node.is_constant = cell.value, is_literal
        return cell

    def _interpret(self, jaxpr: Any, args: Sequence[Cell], place: Place) -> list[Cell]:
        """Evaluates the jaxpr of a loop or a branch."""
        return self._run(jaxpr, [self._renamed(x, place, argument_id(j)) for j, x in enumerate(args)], place)

    def _renamed(self, x: Cell, place: Place, index: Id) -> Cell:
        """Returns a value under another name: an argument of a body, or a result of a loop."""
        cell = self._track(x.value, (), place, index)._replace(causes=x.causes)
        cell.node.source, cell.node.is_backward = x.node, x.node.is_backward
        x.node.readers.append(cell.node)
        return cell

    def _track(self, value: Any, operands: Sequence[Cell] = (), place: Place | None = None, index: Id = ()) -> Cell:
        """Returns the cell of an array that the op at `place`, or a copy, computed from `operands`."""
        reads, eqns = [x.node for x in operands], place.eqns if place else ()
        node = Node(summary_of(value), place, index, reads)
        node.held = value if not node.is_floating or node.id in self.holds else None
        reads_nothing = bool(eqns) and not eqns[-1].invars  # as an `iota`
        node.is_constant = reads_nothing or (bool(reads) and all(x.is_constant for x in reads))
        node.is_backward = any(x.is_backward for x in reads) or jx.direction_of(eqns) == "backward"
        for x in reads:
            x.readers.append(node)
        self.nodes.append(node)
        nonfinite = [] if node.summary.is_finite else [x.causes for x in operands if not x.is_finite]
        return Cell(value, node, frozenset[Id]().union(*nonfinite))

    def _is_allowed(self, cause: Id) -> bool:
        return self.allowed is None or cause in self.allowed

    def _argument(self, x: Any, i: int) -> Cell:
        summary, cause = summary_of(x), argument_id(i)
        # -inf is often intended, as in a mask.
        is_bad = not summary.is_finite and not np.all(np.isfinite(x) | (np.asarray(x) == -np.inf))
        if is_bad and not self._is_allowed(cause):
            return self._track(_zero_nonfinite(x), (), Place(), cause)
        return self._track(x, (), Place(), cause)._replace(causes=frozenset({cause} if is_bad else ()))

    def _visit(self, operands: list[Cell], place: Place) -> Sequence[Cell]:
        if self.clock.is_late:
            self.is_stopped = True
            raise _DoneError
        self.clock.tick("ops evaluated")
        outs = self._enter(operands, place)
        if place.id == self.until:
            raise _DoneError
        return outs

    def _enter(self, operands: list[Cell], place: Place) -> Sequence[Cell]:
        """Evaluates what is inside of an equation, or an op."""
        match jx.structure_of(place.eqn):
            case jx.Call(jaxpr, inputs, True):
                return self._run(jaxpr, [operands[i] for i in inputs], place)
            case jx.Branches(jaxprs, inputs) if np.unique(operands[0].value).size == 1:
                index = min(max(int(np.ravel(operands[0].value)[0]), 0), len(jaxprs) - 1)
                return self._interpret(jaxprs[index], [operands[i] for i in inputs], place.body(index))
            case jx.Loop() as loop if loop.length != 0:
                is_long = loop.length is None or loop.length * sum(map(jx.runs_of, jx.equations_in(loop.body))) > _LONG
                is_long = is_long and self.wide is None
                # Compiled as a whole, a loop runs faster; iterations matter only if its results are non-finite.
                if is_long and place.id not in self.trip_counts:
                    results = self._apply_tracked(operands, place)
                    if all(x.is_finite for x in results):
                        return results
                run = self._while if loop.length is None else self._scan
                outs = run(loop, operands, place, self._compiled_body if is_long else self._interpret)
                return [self._renamed(x, place, (k,)) for k, x in enumerate(outs)]
        return self._apply_checked(operands, place)

    def _apply_tracked(self, operands: Sequence[Cell], place: Place) -> list[Cell]:
        outs = self._apply([x.value for x in operands], place)
        return [self._track(x, operands, place, (k,)) for k, x in enumerate(outs)]

    def _apply_checked(self, operands: list[Cell], place: Place) -> list[Cell]:
        """Applies an op, and notes whether it made its results non-finite."""
        outs = self._apply_tracked(operands, place)
        if all(out.is_finite for out in outs) or any(x.causes for x in operands if not x.is_finite):
            return outs
        reads_nan, gives_nan = (any(x.node.summary.nans for x in cells) for cells in (operands, outs))
        if not all(x.is_finite for x in operands) and (reads_nan or not gives_nan):
            return outs
        if not self._is_allowed(place.id):
            return [self._track(_zero_nonfinite(x.value), operands, place, x.node.index) for x in outs]
        self.nonfinite[place.id] = next(x.node for x in outs if not x.is_finite)
        return [out if out.is_finite else out._replace(causes=frozenset({place.id})) for out in outs]

    def _apply_in_dtype(self, place: Place, operands: Sequence[Any]) -> Sequence[Any]:
        if place.eqn.primitive.name != "shard_map":
            return super()._apply_in_dtype(place, operands)
        # JAX would evaluate it op by op.
        return jax.jit(functools.partial(super()._apply_in_dtype, place), compiler_options=QUICK)(operands)

    def _compiled_body(self, jaxpr: Any, args: Sequence[Cell], place: Place) -> list[Cell]:
        """Runs an iteration as one program; evaluates it op by op if it introduces non-finite values."""
        if place.key not in self._bodies:
            compiled = Evaluation(self.program, (), loss_factor=self.loss_factor)
            run = functools.partial(compiled._run, jaxpr, place=place)
            self._bodies[place.key] = jax.jit(run, compiler_options=QUICK)
        n_nodes, outs = len(self.nodes), self._bodies[place.key]([x.value for x in args])
        cells = [self._track(x, args, place, (k,)) for k, x in enumerate(outs)]
        if all(x.is_finite for x in cells) or any(x.causes for x in args):
            return cells
        del self.nodes[n_nodes:]
        return self._interpret(jaxpr, args, place)

    def _scan(self, loop: jx.Loop, operands: list[Cell], place: Place, run_body: Any) -> Sequence[Cell]:
        carry, xs = operands[loop.carry], operands[loop.xs]
        ys: dict[int, list[Cell]] = {}
        steps = range(loop.length)
        for i in reversed(steps) if place.eqn.params["reverse"] else steps:
            slices = [x._replace(value=lax.dynamic_index_in_dim(x.value, np.int32(i), 0, False)) for x in xs]
            outs = run_body(loop.body, [*operands[loop.consts], *carry, *slices], place.body(0, i))
            carry, ys[i] = outs[: loop.n_carry], outs[loop.n_carry :]
        columns = zip(*(ys[i] for i in steps), strict=True)
        return [*carry, *(self._track(_stacked([y.value for y in column]), column) for column in columns)]

    def _while(self, loop: jx.Loop, operands: list[Cell], place: Place, run_body: Any) -> Sequence[Cell]:
        carry = operands[loop.carry]
        limit = self.trip_counts.get(place.id)
        for i in itertools.count() if limit is None else range(limit):
            (predicate,) = run_body(loop.cond, [*operands[loop.cond_consts], *carry], place.body(0, i))
            self.trip_counts[place.id] = i
            if not jnp.any(predicate.value):
                break
            new = run_body(loop.body, [*operands[loop.consts], *carry], place.body(1, i))
            flags, pairs = predicate.value, zip(new, carry, strict=True)
            carry = [self._track(_where(flags, x.value, y.value), [x, y]) for x, y in pairs] if flags.ndim else new
        return carry


def _stacked(arrays: Sequence[Any]) -> Any:
    """Stacks arrays. On the host: to compile a concatenation of thousands of arrays takes minutes."""
    return jnp.asarray(np.stack(arrays)) if isinstance(arrays[0].dtype, np.dtype) else jnp.stack(arrays)  # keys


def _where(predicate: Any, new: Any, old: Any) -> Any:
    """Returns the next carry of a `while` loop under `vmap`, where the elements that are done keep their values."""
    return lax.select(lax.broadcast_in_dim(predicate, new.shape, range(predicate.ndim)), new, old.astype(new.dtype))


def applies_loss_scale(eqn: JaxprEqn) -> bool:
    """Whether an equation multiplies the loss, or the cotangent of the loss, by the scale of `amp.value_and_grad`."""
    return eqn.primitive.name == "mul" and LOSS_SCALE in jx.marks_in(eqn.source_info.name_stack)


def _zero_nonfinite(x: Any) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, jnp.zeros((), x.dtype)) if jx.is_inexact(x) else x


@contextlib.contextmanager
def precise(wide: Any) -> Any:
    """A context in which JAX computes in a wide dtype."""
    products = contextlib.nullcontext() if wide is None else jax.default_matmul_precision("highest")
    with products, jax.enable_x64(True) if wide == FLOAT64 else contextlib.nullcontext():
        yield


def _wider(dtype: Any, wide: Any) -> Any:
    """Returns `wide`, or the complex dtype of its precision, for a narrower floating dtype; else `dtype`."""
    is_inexact = isinstance(dtype, np.dtype) and jnp.issubdtype(dtype, jnp.inexact)
    return np.promote_types(dtype, wide) if is_inexact else dtype


def widened(x: Any, wide: Any) -> Any:
    """Returns an array in a wide dtype."""
    return lax.convert_element_type(x, _wider(x.dtype, wide)) if jx.is_inexact(x) else x


def as_traced(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """Returns operands in the dtypes that an equation was traced in."""
    pairs = zip(operands, eqn.invars, strict=True)
    return [x.astype(jx.dtype_of(atom)) if jx.is_inexact(x) else x for x, atom in pairs]


def keeps_dtypes(eqn: JaxprEqn) -> bool:
    """Whether an op runs in the dtypes that it was traced in, whatever those of the evaluation."""
    rule = rule_of(eqn)
    has_program = bool(jx.inner_jaxprs(eqn)) and not rule.jaxpr_params
    return eqn.primitive.name in _KEEP_DTYPES or rule.is_kernel or has_program


def evaluate_in(wide: Any, eqn: JaxprEqn, operands: Sequence[Any], narrow: Any = None) -> list[Any] | None:
    """Evaluates an op in a wide dtype, also in place of the dtype `narrow`; None if the op does not run in it."""
    if eqn.primitive.name == "reduce_precision":
        return [widened(operands[0], wide)]
    if keeps_dtypes(eqn):
        return None
    if narrow is None and not any(map(jx.is_inexact, (*eqn.invars, *eqn.outvars))):
        return jx.apply_as_traced(eqn, operands)
    rule = rule_of(eqn)
    # A dtype of no operand and no result, such as that of a scale for float8, is no dtype to compute in.
    dtypes = [*map(jx.dtype_of, (*eqn.invars, *eqn.outvars)), narrow]
    wider = {x: wide if x == narrow else _wider(x, wide) for x in dtypes if isinstance(x, np.dtype)}
    params = {k: wider.get(x, x) if isinstance(x, np.dtype) else x for k, x in eqn.params.items()}
    try:
        inner = {name: eqn.params[name] for name in rule.jaxpr_params if eqn.params[name] is not None}
        params |= {name: jx.retyped(jaxpr, wide) for name, jaxpr in inner.items()}
        if rule.is_product and "precision" in params:
            params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
        with jx.versions.origin_of(eqn):
            return jx.bind(eqn, [widened(x, wide) for x in operands], **params)
    except Exception:  # a custom primitive may reject other dtypes, and a reference a cast, with any error
        return None
